# SPDX-License-Identifier: Apache-2.0
"""Step 4 of the miniature: what the generator draws at full resolution, before and after, and what of it is true."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from ..data import split_grid
from ..data.building import StageFolder, draw_grids
from ..evaluation.generation.drawing import load_system
from ..evaluation.generation.statistics import Unit, cell, difference
from ..trainer.contact_sheet import SheetImage, save_contact_sheet
from .models import toy_flux_path
from .settings import MiniatureSettings
from .truth import SetTruth, judge_set, read_panels


if TYPE_CHECKING:
    from datasets import Dataset

Truths = Mapping[Unit, SetTruth]


def draw_and_read(folder: Path, adapter: Path | None, prompts: "Dataset", settings: MiniatureSettings) -> Truths:
    """
    Draws test prompts at full resolution, and reads from the pixels what the sets show.

    Args:
        folder (`Path`):
            Where the pictures go. What is there is not drawn again.
        adapter (`Path`, *optional*):
            Folder of the adapter; `None` is the untrained generator.
        prompts ([`~datasets.Dataset`]):
            From [`make_prompts`].
        settings ([`MiniatureSettings`]):
            Sizes. The noise of a prompt and seed is the same with any adapter.

    Returns:
        `Mapping`: (prompt id, seed) -> [`SetTruth`].
    """
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
        truths[row["id"], grid["seed"]] = judge_set(panels, row["shape"], [tuple(scene) for scene in row["scenes"]])
    return truths


def compare(before: Truths, after: Truths) -> dict[str, Any]:
    """
    Means before and after and their paired difference, with bootstrap intervals over prompts.

    Args:
        before (`Mapping`), after (`Mapping`):
            From [`draw_and_read`].

    Returns:
        `dict[str, Any]`: for `consistency` and `prompt_following`: `before`, `after` and `difference`, each with `mean`
        and `interval`; `unreadable`: the share of panels that show nothing of the world.
    """
    results: dict[str, Any] = {}
    for name in ("consistency", "prompt_following"):
        values = [{unit: getattr(truth, name) for unit, truth in truths.items()} for truths in (before, after)]
        results[name] = {
            "before": cell([values[0]]),
            "after": cell([values[1]]),
            "difference": difference([values[0]], [values[1]]),
        }
    results["unreadable"] = {
        name: sum(truth.unreadable for truth in truths.values()) / (4 * len(truths))
        for name, truths in (("before", before), ("after", after))
    }
    return results


def draw_before_and_after(folder: Path, path: Path, prompts: "Dataset", truths: dict[str, Truths], count: int) -> None:
    """
    Saves a sheet of the first prompts, before and after from the same noise.

    Args:
        folder (`Path`):
            Folder of the pictures, with `before` and `after` as [`draw_and_read`] made them.
        path (`Path`):
            PNG file.
        prompts ([`~datasets.Dataset`]):
            Prompts; the first ones are shown, not chosen ones.
        truths (`dict`):
            What was read, by `before` and `after`.
        count (`int`):
            Number of prompts.
    """
    images = []
    for number, row in enumerate(prompts.select(range(count)).with_format(None)):
        for series, name in enumerate(("before", "after")):
            of_prompt = {unit: truth for unit, truth in truths[name].items() if unit[0] == row["id"]}
            for generation, ((_, seed), truth) in enumerate(of_prompt.items()):
                picture = Image.open(folder / name / "images" / row["id"] / f"{seed}.png").convert("RGB")
                picture = picture.resize((3 * picture.width, 3 * picture.height), Image.Resampling.NEAREST)
                caption = f"same figure in {round(6 * truth.consistency)} of 6 pairs"
                images.append(
                    SheetImage(number, generation, picture, row["prompt"], caption, series=series, series_name=name)
                )
    save_contact_sheet(images, "Before and after, from the same noise, at full resolution", path)
