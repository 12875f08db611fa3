# SPDX-License-Identifier: Apache-2.0
"""Build the prompts of the planted world as a dataset, and rankings with known truth."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from .truth import read_panels
from .world import Panel, PromptSpec, describe_spec, sample_specs, write_prompt


if TYPE_CHECKING:
    from datasets import Dataset


SIZE = 128  # pixels per side of a set at full resolution


def make_prompts(count: int, seed: int, named: bool = True, name: str = "prompt") -> "Dataset":
    """Sample distinct prompts of the planted world."""
    from datasets import Dataset

    from paco_trl.data import parse_image_set_prompt

    random = np.random.default_rng(seed)
    chosen: dict[str, list[PromptSpec]] = {}
    while len(chosen) < count:
        specs = sample_specs(random, named)
        chosen.setdefault(write_prompt(specs), specs)
    return Dataset.from_list(
        [
            {
                "id": f"{name}-{number:03d}",
                "prompt": prompt,
                "theme": parse_image_set_prompt(prompt).theme,
                "rows": 2,
                "cols": 2,
                "panels": [describe_spec(spec) for spec in specs],
                "height": SIZE,
                "width": SIZE,
                "specs": [list(spec) for spec in specs],
            }
            for number, (prompt, specs) in enumerate(chosen.items())
        ]
    )


def shared_properties(first: Panel, second: Panel) -> int:
    """Count the properties that two figures share."""
    return sum(a == b for a, b in zip(first.identity, second.identity, strict=True))


def make_true_rankings(panels: "Dataset", prompts: "Dataset", per_prompt: int = 8, seed: int = 0) -> "Dataset":
    """Build rankings with known truth: candidates at another position share 3, 2 and 1 properties with a reference."""
    from datasets import Dataset, Features, Image, List, Value

    random = np.random.default_rng(seed)
    found = read_panels(panels["image"][:])
    places: dict[tuple[str, int], list[int]] = {}
    for row, (prompt, position) in enumerate(zip(panels["prompt_id"][:], panels["position"][:], strict=True)):
        places.setdefault((prompt, position), []).append(row)
    paths = [image["path"] for image in panels.cast_column("image", Image(decode=False))["image"][:]]
    rows = []
    for prompt in prompts.with_format(None):
        of_prompt = []
        for reference_place, other_place in product(range(4), repeat=2):
            if reference_place == other_place:
                continue
            for reference in places.get((prompt["id"], reference_place), []):
                candidates = _one_of_each(found, reference, places[prompt["id"], other_place], random)
                if len(candidates) > 1:
                    order = random.permutation(len(candidates))
                    of_prompt.append(
                        {
                            "reference": paths[reference],
                            "candidates": [paths[candidates[place]] for place in order],
                            "ranking": [int(place) for place in np.argsort(order)],
                            "prompt": prompt["prompt"],
                            "theme": prompt["theme"],
                            "group": prompt["id"],
                        }
                    )
        kept = random.permutation(len(of_prompt))[:per_prompt]
        rows += [of_prompt[number] for number in sorted(kept)]
    if not rows:
        raise ValueError(
            f"The {len(panels)} panels of {len(prompts)} prompts give no ranking: no two of them share different numbers "
            "of properties with a third. Generate more sets, or use other prompts."
        )
    features = Features(
        {
            "reference": Image(),
            "candidates": List(Image()),
            "ranking": List(Value("int64")),
            "prompt": Value("string"),
            "theme": Value("string"),
            "group": Value("string"),
        }
    )
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)


def _one_of_each(
    found: Sequence[Panel | None], reference: int, others: Sequence[int], random: np.random.Generator
) -> list[int]:
    """Return one panel for each number of properties shared with the reference, most first."""
    if found[reference] is None:
        return []
    by_count: dict[int, list[int]] = {}
    for other in others:
        if found[other] is not None:
            by_count.setdefault(shared_properties(found[reference], found[other]), []).append(other)
    return [by_count[count][random.integers(len(by_count[count]))] for count in sorted(by_count, reverse=True)]
