# SPDX-License-Identifier: Apache-2.0
"""Pictures of what a stage made, to look at: some prompts with their grids, some ranking instances."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datasets import Dataset
    from PIL import Image


def spread(items: Sequence[int], chosen: int) -> list[int]:
    """Some at equal distances, the first among them: what is next to one another is often alike."""
    chosen = min(len(items), chosen)
    return [items[place * len(items) // chosen] for place in range(chosen)]


def grids_sheet(grids: "Dataset", prompts: "Dataset", path: str | Path, max_prompts: int = 6) -> "Image.Image":
    """
    Draw some prompts with their grids, a row each with the first eight seeds.

    Args:
        grids ([`~datasets.Dataset`]):
            The grids.
        prompts ([`~datasets.Dataset`]):
            The prompts, with `id`.
        path (`str` or `Path`):
            PNG file.
        max_prompts (`int`, *optional*, defaults to `6`):
            Number of prompts at most, at equal distances among those that have grids.

    Returns:
        `PIL.Image.Image`: the picture.
    """
    from ..plots.contact_sheet import MAX_IMAGES, SheetImage, save_contact_sheet, thumbnail

    columns = grids.with_format(None).select_columns(["prompt_id", "seed"])[:]
    rows_of: dict[str, list[int]] = {}
    for row, prompt_id in enumerate(columns["prompt_id"]):
        rows_of.setdefault(prompt_id, []).append(row)
    texts = _texts(prompts)
    names = list(rows_of)
    images = []
    for number, place in enumerate(spread(range(len(names)), max_prompts)):
        name = names[place]
        for generation, row in enumerate(rows_of[name][:MAX_IMAGES]):
            image = thumbnail(grids[row]["image"]).convert("RGB")
            images.append(SheetImage(number, generation, image, texts[name], f"seed {columns['seed'][row]}"))
    shown = min(len(names), max_prompts)
    return save_contact_sheet(images, f"{shown} of {len(names)} prompts, {len(grids)} grids", path)


def instances_sheet(
    instances: "Dataset", panels: "Dataset", prompts: "Dataset", path: str | Path, max_instances: int = 6
) -> "Image.Image":
    """
    Draw some ranking instances, a row each: the reference at the left, then the first eight candidates.

    Args:
        instances ([`~datasets.Dataset`]):
            The ranking instances.
        panels ([`~datasets.Dataset`]):
            The panels.
        prompts ([`~datasets.Dataset`]):
            The prompts, with `id`.
        path (`str` or `Path`):
            PNG file.
        max_instances (`int`, *optional*, defaults to `6`):
            Number of instances at most, at equal distances.

    Returns:
        `PIL.Image.Image`: the picture.
    """
    from ..plots.contact_sheet import MAX_IMAGES, SheetImage, save_contact_sheet, thumbnail

    columns = panels.with_format(None).select_columns(["id", "seed", "position"])[:]
    row_of = {name: row for row, name in enumerate(columns["id"])}
    texts = _texts(prompts)
    images = []
    for number, place in enumerate(spread(range(len(instances)), max_instances)):
        instance = instances[place]
        for generation, name in enumerate([instance["reference"], *instance["candidates"]][: MAX_IMAGES + 1]):
            row = row_of[name]
            role = "reference" if generation == 0 else f"candidate {generation - 1}"
            caption = f"{role}\nseed {columns['seed'][row]}, panel {columns['position'][row]}"
            image = thumbnail(panels[row]["image"]).convert("RGB")
            images.append(SheetImage(number, generation, image, texts[instance["prompt_id"]], caption))
    shown = min(len(instances), max_instances)
    return save_contact_sheet(images, f"{shown} of {len(instances)} instances, the reference at the left", path)


def _texts(prompts: "Dataset") -> dict[str, str]:
    columns = prompts.with_format(None).select_columns(["id", "prompt"])[:]
    return dict(zip(columns["id"], columns["prompt"], strict=True))
