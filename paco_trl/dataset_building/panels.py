# SPDX-License-Identifier: Apache-2.0
"""Stage 3: cut grids into panels, stored once, and combine them (by id) into ranking instances."""

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from datasets import Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from tqdm.auto import tqdm

from ..data.columns import column_by_id, column_types, criteria_list, typed_dataset
from ..data.grids import pixels_sha256, split_grid
from ..data.rankings import ranking_features
from ..utils.files import digest, file_name, write_atomically
from ..utils.images import reading, to_png
from ..utils.stage_folder import StageFolder


def cut_panels(grids: Dataset, stage: StageFolder) -> Dataset:
    """
    Cut grids into panels, and save each panel once. Interrupted runs resume automatically.

    Args:
        grids ([`~datasets.Dataset`]):
            Grids with `id`, `prompt_id`, `seed`, `rows`, `cols` and `image` (a path). Panels keep the mode of their
            grid, but palettes are resolved.
        stage ([`StageFolder`]):
            Directory of the stage. Its settings should include a digest of the grids.

    Returns:
        [`~datasets.Dataset`]: the panels in the order of the grids, row by row: `id` (`"<prompt
        id>/<seed>/<position>"`), `prompt_id`, `seed`, `position`, `sha256` (of size, mode and pixels) and `image` (a
        path).
    """
    rows = list(grids.with_format(None).cast_column("image", ImageFeature(decode=False)))
    journal = stage.journal("panels")
    hashes = {record["grid"]: record["sha256"] for record in journal.records}
    paths = {
        grid["id"]: [
            str(stage.images / file_name(grid["prompt_id"]) / f"{grid['seed']}-{position}.png")
            for position in range(grid["rows"] * grid["cols"])
        ]
        for grid in rows
    }
    pending_grids = [
        grid for grid in rows if grid["id"] not in hashes or not all(map(os.path.isfile, paths[grid["id"]]))
    ]
    with ThreadPoolExecutor(2) as pool:  # Pillow and hashlib release the GIL
        digest_iterator = pool.map(lambda grid: _cut_grid(grid, paths[grid["id"]]), pending_grids)
        for grid, sha256 in zip(tqdm(pending_grids, desc="Cutting panels", unit="grid"), digest_iterator, strict=True):
            journal.append({"grid": grid["id"], "sha256": sha256})
            hashes[grid["id"]] = sha256

    panels = [
        (f"{grid['id']}/{position}", grid["prompt_id"], grid["seed"], position, hashes[grid["id"]][position], path)
        for grid in rows
        for position, path in enumerate(paths[grid["id"]])
    ]
    types = {"seed": "int64", "position": "int64", "sha256": "string", "image": "image"}
    dataset = typed_dataset(panels, id="string", prompt_id="string", **types)
    report = {
        "prompts": len({grid["prompt_id"] for grid in rows}),
        "seeds": list(dict.fromkeys(grid["seed"] for grid in rows)),
        "grids": len(rows),
        "panels": len(dataset),
        "panels that are equal to an earlier one": len(dataset) - len(set(dataset["sha256"])),
    }
    stage.finish(dataset, report)
    return dataset


def _cut_grid(grid: Mapping[str, Any], paths: list[str]) -> list[str]:
    """Cut a grid, save its panels, and return their digests."""
    path = grid["image"]["path"]
    with reading(f"The grid {grid['id']!r} ({path})", "Rerun the stage `grids`"), Image.open(path) as image:
        image.load()
        # Panels cannot be compared by palette indices
        panels = split_grid(image.convert() if image.mode == "P" else image, grid["rows"], grid["cols"])
    for panel, path in zip(panels, paths, strict=True):
        write_atomically(path, to_png(panel))
    return [pixels_sha256(panel) for panel in panels]


def make_instances(panels: Dataset) -> Dataset:
    """
    Combine panels into ranking instances.

    Each panel is a reference, once for each other position; its candidates are the panels at that position in all
    grids of the prompt. With `P` panels and `S` seeds, a prompt has `S * P * (P - 1)` instances of `S` candidates, 48
    for 4 panels and 4 seeds.

    Args:
        panels ([`~datasets.Dataset`]):
            Panels with `id`, `prompt_id`, `seed`, `position` and `sha256`. Images are not read.

    Returns:
        [`~datasets.Dataset`]: the instances by prompt, seed, position and other position: `id` (`"<prompt
        id>/<seed>/<position>/<other position>"`), `prompt_id`, `reference` (id of a panel), `candidates` (ids, by
        seed) and `digest` (of their images).
    """
    columns = panels.with_format(None).select_columns(["id", "prompt_id", "seed", "position", "sha256"])[:]
    digests = dict(zip(columns["id"], columns.pop("sha256"), strict=True))
    panel_ids: dict[str, dict[tuple[int, int], str]] = {}  # by prompt, then by seed and position
    for name, prompt_id, seed, position in zip(*columns.values(), strict=True):
        panel_ids.setdefault(prompt_id, {})[seed, position] = name
    seeds = list(dict.fromkeys(columns["seed"]))
    rows = []
    for prompt_id, names in panel_ids.items():
        positions = range(max(position for _, position in names) + 1)
        missing = [panel for panel in itertools.product(seeds, positions) if panel not in names]
        if missing or len(seeds) < 2 or len(positions) < 2:
            raise ValueError(
                f"The prompt {prompt_id!r} lacks the panels {missing[:4]} (seed, position), or has fewer than two "
                "seeds or panels per grid. Generate the same seeds for all prompts, or leave it out."
            )
        for seed, position, candidate_position in itertools.product(seeds, positions, positions):
            if position != candidate_position:
                reference = names[seed, position]
                candidates = [names[candidate_seed, candidate_position] for candidate_seed in seeds]
                images = [digests[panel] for panel in (reference, *candidates)]
                name = f"{prompt_id}/{seed}/{position}/{candidate_position}"
                rows.append((name, prompt_id, reference, candidates, digest(images)[:16]))
    types = {"reference": "string", "candidates": ["string"], "digest": "string"}
    return typed_dataset(rows, id="string", prompt_id="string", **types)


def instances_to_rankings(
    instances: Dataset, panels: Dataset, prompts: Dataset, rankings: Mapping[str, Sequence[int]]
) -> Dataset:
    """Convert ranked instances (id -> candidates, best first) to the format of rankings, without copying images."""
    paths = column_by_id(panels, "image")
    names = [name for name in ("id", "prompt", "theme", "criteria") if name in prompts.column_names]
    prompt_rows = {row["id"]: row for row in prompts.with_format(None).select_columns(names)}
    features = ranking_features()
    if "theme" in names:
        features = Features({**features, **column_types(theme="string")})
    rows = []
    for instance in instances.with_format(None):
        name = instance["id"]
        prompt_id = instance["prompt_id"]
        candidates = instance["candidates"]
        if name not in rankings:
            continue
        row = {"theme": None, **prompt_rows[prompt_id], "id": name, "group": prompt_id, "ranking": rankings[name]}
        row["criteria"] = criteria_list(row.get("criteria"))
        row |= {"reference": paths[instance["reference"]], "candidates": [paths[panel] for panel in candidates]}
        rows.append(row)
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)
