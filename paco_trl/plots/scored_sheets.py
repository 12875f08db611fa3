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
from .contact_sheet import MAX_IMAGES, MAX_PROMPTS, SheetImage, save_contact_sheet, send_to_trackers, thumbnail


@dataclass
class ScoredImages:
    """
    Images with their scores.

    Attributes:
        pictures (`dict[int, PIL.Image.Image]`):
            Thumbnails of those that a sheet shows, by number; prompt-major.
        num_generations (`int`):
            Images of each prompt.
        reward_names (`list[str]`):
            Names of the rewards.
        rewards (`torch.Tensor` of shape `(images, rewards)`):
            Rewards, NaN where missing.
        extra (`dict[str, list]`):
            Further columns, a value for each image.
        advantages (`torch.Tensor` of shape `(images,)`, *optional*):
            Advantages, of a training round.
    """

    pictures: dict[int, Image.Image]
    num_generations: int
    reward_names: list[str]
    rewards: torch.Tensor
    extra: dict[str, list]
    advantages: torch.Tensor | None = None

    @classmethod
    def collect(
        cls, accelerator: Accelerator, numbers: list[int], images: list[Image.Image], num_generations: int, *scores
    ) -> "ScoredImages":
        """
        Collects the pictures of the first prompts from all processes. Every process calls it.

        Args:
            accelerator ([`~accelerate.Accelerator`]):
                Accelerator of the run.
            numbers (`list[int]`), images (`list[PIL.Image.Image]`):
                Images of this process and their numbers in the round.
            num_generations (`int`):
                Images of each prompt.
            *scores:
                The other attributes, in order.

        Returns:
            [`ScoredImages`].
        """
        mine = []
        for number, image in zip(numbers, images, strict=True):
            prompt, generation = divmod(number, num_generations)
            if prompt < MAX_PROMPTS and generation < MAX_IMAGES:
                mine.append((number, thumbnail(image)))
        return cls(dict(gather_object(mine)), num_generations, *scores)

    def scores(self, number: int) -> dict[str, float | None]:
        """
        Scores of an image by name.

        Args:
            number (`int`):
                Number of the image.

        Returns:
            `dict[str, float | None]`: `None` where a reward is missing.
        """
        values = self.rewards[number].tolist()
        scores = {
            name: None if value != value else round(value, 6)  # NaN is missing
            for name, value in zip(self.reward_names, values, strict=True)
        }
        if self.advantages is not None:
            scores["advantage"] = round(self.advantages[number].item(), 6)
        return scores

    def _caption(self, number: int) -> str:
        scores = self.scores(number).items()
        return "\n".join(f"{name} {'none' if value is None else f'{value:.3f}'}" for name, value in scores)


def _sheet_images(prompts: list[str], shown: ScoredImages, before: ScoredImages | None) -> list[SheetImage]:
    images = []
    for series, (name, scored) in enumerate((("before", before), ("after", shown))):
        if scored is None:
            continue
        for number, picture in scored.pictures.items():
            prompt, generation = divmod(number, scored.num_generations)
            image = SheetImage(prompt, generation, picture, prompts[prompt], scored._caption(number))
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
    Saves `<name>.png` with the pictures and `<name>.jsonl` with the scores of all images, and sends the sheet to the
    trackers. For the main process.

    Args:
        folder (`Path`):
            Where to save.
        name (`str`):
            Name of the files.
        title (`str`):
            Title of the sheet.
        prompts (`list[str]`):
            Prompts.
        shown ([`ScoredImages`]):
            Images.
        before ([`ScoredImages`], *optional*):
            The same ones without training: shown above them, and in the columns `<score>_before`.
        tracker_name (`str`):
            Name of the sheet in the trackers.
        step (`int`):
            Optimizer step.
        callbacks (`list[~transformers.TrainerCallback]`):
            Callbacks of the trainer, among them those of its trackers.
        sources (`dict[int, list[PIL.Image.Image]]`, *optional*):
            Images that a prompt edits, by the number of the prompt: at the left of its row.
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
