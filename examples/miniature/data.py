# SPDX-License-Identifier: Apache-2.0
"""Prompts of the planted world as a dataset, and rankings whose truth is known."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from .truth import read_panels
from .world import Panel, Wish, draw_wishes, write_prompt, write_wish


if TYPE_CHECKING:
    from datasets import Dataset


SIZE = 128  # pixels of a whole set at full resolution


def make_prompts(count: int, seed: int, named: bool = True, name: str = "prompt") -> "Dataset":
    """Chooses different prompts of the planted world."""
    from datasets import Dataset

    from paco_trl.data import parse_image_set_prompt

    random = np.random.default_rng(seed)
    chosen: dict[str, list[Wish]] = {}
    while len(chosen) < count:
        wishes = draw_wishes(random, named)
        chosen.setdefault(write_prompt(wishes), wishes)
    return Dataset.from_list(
        [
            {
                "id": f"{name}-{number:03d}",
                "prompt": prompt,
                "theme": parse_image_set_prompt(prompt).theme,
                "rows": 2,
                "cols": 2,
                "panels": [write_wish(wish) for wish in wishes],
                "height": SIZE,
                "width": SIZE,
                "wishes": [list(wish) for wish in wishes],
            }
            for number, (prompt, wishes) in enumerate(chosen.items())
        ]
    )


def shared_properties(first: Panel, second: Panel) -> int:
    """Counts what two figures have in common."""
    return sum(a == b for a, b in zip(first.identity, second.identity, strict=True))


def make_true_rankings(panels: "Dataset", prompts: "Dataset", per_prompt: int = 8, seed: int = 0) -> "Dataset":
    """
    Makes rankings of which the truth is known: a reference, and candidates at one other position of the same prompt
    whose figures have 3, 2 and 1 properties in common with it.
    """
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
            f"The {len(panels)} panels of {len(prompts)} prompts give no ranking: nowhere do two of them show figures that "
            "have different numbers of properties in common with a third. Draw more sets, or other prompts."
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
    """Panels that have 3, 2 and 1 properties in common with the reference, in this order, as far as there are any."""
    by_count: dict[int, list[int]] = {}
    if found[reference] is None:
        return []
    for other in others:
        if found[other] is not None:
            by_count.setdefault(shared_properties(found[reference], found[other]), []).append(other)
    return [by_count[count][random.integers(len(by_count[count]))] for count in sorted(by_count, reverse=True)]
