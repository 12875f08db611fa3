# SPDX-License-Identifier: Apache-2.0
"""Step 4 of the miniature: what the generator draws at full resolution, before and after, and what of it is true."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from paco_trl.data import split_grid
from paco_trl.dataset_building import StageFolder, draw_grids
from paco_trl.image_benchmarks.drawing import load_system
from paco_trl.image_benchmarks.statistics import Unit, cell, difference

from .models import toy_flux_path
from .settings import MiniatureSettings
from .truth import SetTruth, judge_set, read_panels
from .world import Wish


if TYPE_CHECKING:
    from datasets import Dataset

_SHOWN_ROWS, _SHOWN_COLUMNS = 4, 5

Truths = Mapping[Unit, SetTruth]  # by prompt id and seed


def draw_and_read(folder: Path, adapter: Path | None, prompts: "Dataset", settings: MiniatureSettings) -> Truths:
    """Draws test prompts at full resolution, and reads from the pixels what the sets show."""
    pipeline = load_system(str(toy_flux_path()), torch.float32, None if adapter is None else str(adapter), "cpu")
    grids = draw_grids(
        pipeline,
        prompts,
        StageFolder(folder),
        seeds=range(settings.test_seeds),
        batch_size=8 * settings.test_seeds,
        num_inference_steps=settings.num_inference_steps,
        max_sequence_length=pipeline.tokenizer_2.model_max_length,  # the toy knows texts of this length alone
    )
    asked = {row["id"]: row for row in prompts.with_format(None)}
    truths = {}
    for grid in grids:
        row = asked[grid["prompt_id"]]
        panels = read_panels(split_grid(grid["image"], row["rows"], row["cols"]))
        truths[row["id"], grid["seed"]] = judge_set(panels, [Wish(*wish) for wish in row["wishes"]])
    return truths


def compare(before: Truths, after: Truths) -> dict[str, Any]:
    """Means before and after and their paired difference, with bootstrap intervals over prompts."""
    results: dict[str, Any] = {}
    for name in SetTruth._fields:
        values = [{unit: getattr(truth, name) for unit, truth in truths.items()} for truths in (before, after)]
        results[name] = {
            "before": cell([values[0]]),
            "after": cell([values[1]]),
            "difference": difference([values[0]], [values[1]]),
        }
    return results


def draw_before_and_after(folder: Path, path: Path, prompts: "Dataset", results: dict[str, Any]) -> None:
    """
    Saves a picture of the first test prompts, before and after from the same noise. A panel whose figure is not the
    one that the prompt asks for has a red frame.
    """
    rows = list(prompts.select(range(min(_SHOWN_ROWS * _SHOWN_COLUMNS, len(prompts)))).with_format(None))
    figure = Figure(figsize=(13, 5.9), layout="constrained")
    for name, block in zip(("before", "after"), figure.subfigures(1, 2, wspace=0.03), strict=True):
        same = results["consistency"][name]["mean"]
        block.suptitle(f"{name} training: {same:.0%} of the pairs of panels show the same figure", fontsize=12)
        axes = list(block.subplots(_SHOWN_ROWS, _SHOWN_COLUMNS, squeeze=False).flat)
        for axis in axes:
            axis.axis("off")
        for row, axis in zip(rows, axes, strict=False):
            picture = Image.open(folder / name / "images" / row["id"] / "0.png").convert("RGB")
            _show_set(axis, picture, row)
    figure.savefig(path, dpi=120)


def _show_set(axis: Any, picture: Image.Image, row: dict[str, Any]) -> None:
    axis.imshow(picture, interpolation="nearest")
    wishes = [Wish(*wish) for wish in row["wishes"]]
    axis.set_title(" ".join(filter(None, (wishes[0].colour, wishes[0].shape, wishes[0].accessory))), fontsize=8, pad=2)
    side = picture.width // row["cols"]
    for place, panel in enumerate(read_panels(split_grid(picture, row["rows"], row["cols"]))):
        if panel is None or panel.identity != wishes[place][:3]:
            corner = (place % row["cols"] * side + 1, place // row["cols"] * side + 1)
            axis.add_patch(Rectangle(corner, side - 3, side - 3, fill=False, edgecolor="#e0201b", linewidth=1.8))
