# SPDX-License-Identifier: Apache-2.0
"""Step 4: measure the truth of sets generated at full resolution, before and after training."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from paco_trl.data import split_grid
from paco_trl.dataset_building import StageFolder, generate_grids
from paco_trl.image_benchmarks.loading import load_system
from paco_trl.image_benchmarks.statistics import Unit, cell, difference

from .models import toy_flux_path
from .settings import MiniatureSettings
from .truth import SetTruth, judge_set, read_panels
from .world import PromptSpec


if TYPE_CHECKING:
    from datasets import Dataset

_SHOWN_ROWS, _SHOWN_COLUMNS = 4, 5

Truths = Mapping[Unit, SetTruth]  # by prompt id and seed


def generate_and_read(folder: Path, adapter: Path | None, prompts: "Dataset", settings: MiniatureSettings) -> Truths:
    """Generate sets of the test prompts at full resolution, and read from the pixels what they show."""
    pipeline = load_system(str(toy_flux_path()), torch.float32, None if adapter is None else str(adapter), "cpu")
    grids = generate_grids(
        pipeline,
        prompts,
        StageFolder(folder),
        seeds=range(settings.test_seeds),
        batch_size=8 * settings.test_seeds,
        num_inference_steps=settings.num_inference_steps,
        max_sequence_length=pipeline.tokenizer_2.model_max_length,  # the only text length that the toy knows
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
    for name in SetTruth._fields:
        values = [{unit: getattr(truth, name) for unit, truth in truths.items()} for truths in (before, after)]
        results[name] = {
            "before": cell([values[0]]),
            "after": cell([values[1]]),
            "difference": difference([values[0]], [values[1]]),
        }
    return results


def plot_before_and_after(folder: Path, path: Path, prompts: "Dataset", results: dict[str, Any]) -> None:
    """Plot sets of the first test prompts before and after, from the same noise, with red frames on wrong figures."""
    rows = list(prompts.select(range(min(_SHOWN_ROWS * _SHOWN_COLUMNS, len(prompts)))).with_format(None))
    figure = Figure(figsize=(13, 5.9), layout="constrained")
    for name, block in zip(("before", "after"), figure.subfigures(1, 2, wspace=0.03), strict=True):
        same = results["consistency"][name]["mean"]
        block.suptitle(f"{name} training: {same:.0%} of the pairs of panels show the same figure", fontsize=12)
        axes = list(block.subplots(_SHOWN_ROWS, _SHOWN_COLUMNS, squeeze=False).flat)
        for axis in axes:
            axis.axis("off")
        for row, axis in zip(rows, axes, strict=False):
            _show_set(axis, Image.open(folder / name / "images" / row["id"] / "0.png").convert("RGB"), row)
    figure.savefig(path, dpi=120)


def _show_set(axis: Any, image: Image.Image, row: dict[str, Any]) -> None:
    axis.imshow(image, interpolation="nearest")
    specs = [PromptSpec(*spec) for spec in row["specs"]]
    axis.set_title(" ".join(filter(None, (specs[0].color, specs[0].shape, specs[0].accessory))), fontsize=8, pad=2)
    side = image.width // row["cols"]
    for place, panel in enumerate(read_panels(split_grid(image, row["rows"], row["cols"]))):
        if panel is None or panel.identity != specs[place][:3]:
            corner = (place % row["cols"] * side + 1, place // row["cols"] * side + 1)
            axis.add_patch(Rectangle(corner, side - 3, side - 3, fill=False, edgecolor="#e0201b", linewidth=1.8))
