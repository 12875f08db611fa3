# SPDX-License-Identifier: Apache-2.0
"""Step 1: build pairs from the panels of generated sets, labeled by how they were made."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paco_trl import load_for_inference
from paco_trl.dataset_building import (
    StageFolder,
    annotation_files,
    build_pairs,
    cut_panels,
    generate_grids,
    make_instances,
    rank_automatically,
    read_annotations,
)

from .data import make_true_rankings
from .models import toy_flux_path
from .settings import MiniatureSettings
from .truth import read_panels


if TYPE_CHECKING:
    from datasets import Dataset

GRID_SEEDS = (0, 1, 2, 3)  # paper: four sets of each prompt


def build_dataset(folder: Path, prompts: "Dataset", settings: MiniatureSettings) -> dict[str, Any]:
    """Generate sets with the untrained generator and pair their panels; the same set counts as more consistent."""
    pipeline, _ = load_for_inference(toy_flux_path(), dtype=torch.float32, device="cpu")
    grids = generate_grids(
        pipeline,
        prompts,
        StageFolder(folder / "grids"),
        seeds=GRID_SEEDS,
        batch_size=8 * len(GRID_SEEDS),
        num_inference_steps=settings.num_inference_steps,
        max_sequence_length=pipeline.tokenizer_2.model_max_length,  # the only text length that the toy knows
    )
    panels = cut_panels(grids, StageFolder(folder / "panels"))
    instances = make_instances(panels)
    rank_automatically(instances, panels, folder / "annotations")
    annotations = read_annotations(annotation_files(folder / "annotations"), instances)
    pairs, _, report = build_pairs(instances, panels, prompts, annotations, test_size=0.2, seed=settings.seed)
    StageFolder(folder / "pairs").finish(pairs, report)

    held_out = set(pairs["test"]["group"][:])
    test_prompts = prompts.select([row for row, name in enumerate(prompts["id"][:]) if name in held_out])
    rankings = make_true_rankings(panels, test_prompts, seed=settings.seed)
    shown = dict(zip(panels["id"][:], read_panels(panels["image"][:]), strict=True))
    StageFolder(folder / "rankings").finish(rankings, {"rankings": len(rankings)})
    return {
        "prompts": len(prompts),
        "sets": len(grids),
        "pairs": {name: len(split) for name, split in pairs.items()},
        "held_out_rankings": len(rankings),
        "true_share": {label: true_share(pairs["train"], shown, label) for label in ("Yes", "No")},
    }


def true_share(pairs: "Dataset", shown: dict, label: str) -> float:
    """Return the fraction of pairs with a label that really show the same figure."""
    same = []
    for names, completion in zip(pairs["panels"][:], pairs["completion"][:], strict=True):
        if completion[0]["content"] == label:
            first, second = (shown[name] for name in names)
            same.append(first is not None and second is not None and first.identity == second.identity)
    return sum(same) / len(same)
