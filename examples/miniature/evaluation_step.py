# SPDX-License-Identifier: Apache-2.0
"""Step 4: measure the truth of sets generated at full resolution, before and after training."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paco_trl import load_for_inference
from paco_trl.data import split_grid
from paco_trl.dataset_building import StageFolder, generate_grids
from paco_trl.image_benchmarks.paired_results import SampleKey, compute_difference, mean_over_prompts

from .edit_world import EditTruth
from .models import toy_flux_path
from .settings import MiniatureSettings
from .truth import SetTruth, judge_set, read_panels
from .world import PromptSpec


if TYPE_CHECKING:
    from datasets import Dataset
    from diffusers import DiffusionPipeline

Truths = Mapping[SampleKey, SetTruth | EditTruth]  # by prompt id and seed


def generate_and_read(
    folder: Path,
    adapter: Path | None,
    prompts: "Dataset",
    settings: MiniatureSettings,
    model: Path | None = None,
    **options: Any,
) -> Truths:
    """Generate sets of the test prompts at full resolution, and read from the pixels what they show."""
    base = model or toy_flux_path()
    where: dict[str, Any] = {"model": None if adapter is None else str(base), "device": "cpu"}
    pipeline, _ = load_for_inference(base if adapter is None else adapter, dtype=torch.float32, **where)
    return generate_with(pipeline, folder, prompts, settings, **options)


def generate_with(
    pipeline: "DiffusionPipeline", folder: Path, prompts: "Dataset", settings: MiniatureSettings, **options: Any
) -> Truths:
    """Do the same with a pipeline."""
    grids = generate_grids(
        pipeline,
        prompts,
        StageFolder(folder),
        seeds=range(settings.test_seeds),
        num_inference_steps=settings.num_inference_steps,
        max_sequence_length=pipeline.tokenizer_2.model_max_length,  # the only text length that the toy knows
        **({"batch_size": 8 * settings.test_seeds} | options),
    )
    rows = {row["id"]: row for row in prompts.with_format(None)}
    truths = {}
    for grid in grids:
        row = rows[grid["prompt_id"]]
        panels = read_panels(split_grid(grid["image"], row["rows"], row["cols"]))
        truths[row["id"], grid["seed"]] = judge_set(panels, [PromptSpec(*spec) for spec in row["specs"]])
    return truths


def compare(before: Truths, after: Truths) -> dict[str, Any]:
    """Compute means before and after and their paired difference, with bootstrap intervals over prompts."""
    results: dict[str, Any] = {}
    for name in next(iter(before.values()))._fields:
        values = [{unit: getattr(truth, name) for unit, truth in truths.items()} for truths in (before, after)]
        results[name] = {
            "before": mean_over_prompts([values[0]]),
            "after": mean_over_prompts([values[1]]),
            "difference": compute_difference([values[0]], [values[1]]),
        }
    return results
