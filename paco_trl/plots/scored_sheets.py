# SPDX-License-Identifier: Apache-2.0
"""Contact sheets of a round or an evaluation, with the scores beside them as JSON lines."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from transformers import TrainerCallback

from ..utils.images import to_rgb
from .contact_sheet import MAX_IMAGES, MAX_PROMPTS, SheetImage, save_contact_sheet, thumbnail
from .trackers import send_to_trackers


@dataclass
class ScoredImages:
    """Images with their scores, prompt-major."""

    pictures: dict[int, Image.Image]  # thumbnails of those that a sheet shows, by number
    num_generations: int
    reward_names: list[str]
    rewards: torch.Tensor  # (images, rewards), NaN where missing
    extra: dict[str, list]  # further columns, a value for each image
    advantages: torch.Tensor | None = None  # (images,), of a training round

    @classmethod
    def collect(
        cls, accelerator: Accelerator, numbers: list[int], images: list[Image.Image], num_generations: int, *scores
    ) -> "ScoredImages":
        """Collect the pictures of the first prompts from all processes; `scores` are the other attributes, in order."""
        mine = []
        for number, image in zip(numbers, images, strict=True):
            prompt, generation = divmod(number, num_generations)
            if prompt < MAX_PROMPTS and generation < MAX_IMAGES:
                mine.append((number, thumbnail(image)))
        return cls(dict(gather_object(mine)), num_generations, *scores)

    def scores(self, number: int) -> dict[str, float | None]:
        """Give the scores of an image by name; `None` where a reward is missing."""
        values = self.rewards[number].tolist()
        scores = {
            name: None if value != value else round(value, 6)  # NaN is missing
            for name, value in zip(self.reward_names, values, strict=True)
        }
        if self.advantages is not None:
            scores["advantage"] = round(self.advantages[number].item(), 6)
        return scores

    def caption(self, number: int) -> str:
        """Write the scores of an image, a line for each."""
        scores = self.scores(number).items()
        return "\n".join(f"{name} {'none' if value is None else f'{value:.3f}'}" for name, value in scores)


def _sheet_images(prompts: list[str], shown: ScoredImages, before: ScoredImages | None) -> list[SheetImage]:
    images = []
    for series, (name, scored) in enumerate((("before", before), ("after", shown))):
        if scored is None:
            continue
        for number, picture in scored.pictures.items():
            prompt, generation = divmod(number, scored.num_generations)
            image = SheetImage(prompt, generation, picture, prompts[prompt], scored.caption(number))
            if before is not None and scored.num_generations > 1:
                image.series, image.series_name = series, name
            elif before is not None:  # of one image a prompt, before and after are beside one another
                image.generation, image.caption = series, f"{name}\n{image.caption}"
            images.append(image)
    return images


def save_scored_sheet(
    folder: Path,
    name: str,
    title: str,
    prompts: list[str],
    shown: ScoredImages,
    before: ScoredImages | None,
    tracker_name: str,
    step: int,
    callbacks: list[TrainerCallback],
    sources: dict[int, list[Image.Image]] | None = None,
) -> None:
    """
    Save `<name>.png` with pictures and `<name>.jsonl` with the scores of all images, and send the sheet to the trackers.

    Images of `before`, the same ones without training, are above those that are shown, and in columns `<score>_before`.
    `sources` are the images that a prompt edits, by the number of the prompt. For the main process.
    """
    images = _sheet_images(prompts, shown, before)
    thumbnails = {}
    for prompt in sorted({image.prompt for image in images} & set(sources or {})):
        if sources[prompt]:
            thumbnails[prompt] = [thumbnail(to_rgb(source, "A source image")) for source in sources[prompt]]
    sheet = save_contact_sheet(images, title, folder / f"{name}.png", thumbnails)
    with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
        for number in range(len(shown.rewards)):
            prompt, generation = divmod(number, shown.num_generations)
            entry = {"prompt": prompts[prompt], "generation": generation, **shown.scores(number)}
            if before is not None:
                entry |= {f"{score}_before": value for score, value in before.scores(number).items()}
            entry |= {column: values[number] for column, values in shown.extra.items()}
            file.write(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
    send_to_trackers(sheet, tracker_name, step, callbacks)
