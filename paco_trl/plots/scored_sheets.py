# SPDX-License-Identifier: Apache-2.0
"""Save contact sheets of a round or an evaluation, with the scores as JSON lines."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image

from ..utils.files import to_png, write_atomically
from ..utils.images import to_rgb
from .contact_sheet import (
    CARD_IMAGES,
    CARD_PROMPTS,
    MAX_IMAGES,
    MAX_PROMPTS,
    SheetImage,
    breadth,
    save_contact_sheet,
    thumbnail,
)


CARD = "card"  # directory for what a model card shows: a smaller sheet, and the first image of each prompt


@dataclass
class ScoredImages:
    """Images with their scores, prompt-major."""

    pictures: dict[int, Image.Image]  # thumbnails of the images on the sheet, by number
    num_generations: int
    reward_names: list[str]
    rewards: torch.Tensor  # (images, rewards), NaN where missing
    extra: dict[str, list]  # more columns, with a value for each image
    advantages: torch.Tensor | None = None  # (images,), of a training round

    @classmethod
    def collect(
        cls, accelerator: Accelerator, numbers: list[int], images: list[Image.Image], num_generations: int, *scores
    ) -> "ScoredImages":
        """Gather thumbnails of the first prompts from all processes; `scores` are the other attributes, in order."""
        mine = []
        for number, image in zip(numbers, images, strict=True):
            prompt, generation = divmod(number, num_generations)
            if prompt < MAX_PROMPTS and generation < MAX_IMAGES:
                mine.append((number, thumbnail(image)))
        return cls(dict(gather_object(mine)), num_generations, *scores)

    def scores(self, number: int) -> dict[str, float | None]:
        """Return the scores of an image by name; a missing reward is `None`."""
        named = zip(self.reward_names, self.rewards[number].tolist(), strict=True)
        scores = {name: None if math.isnan(value) else round(value, 6) for name, value in named}
        if self.advantages is not None:
            scores["advantage"] = round(self.advantages[number].item(), 6)
        return scores

    def caption(self, number: int) -> str:
        """Return the scores of an image, a line for each."""
        scores = self.scores(number).items()
        return "\n".join(f"{name} {'none' if value is None else f'{value:.3f}'}" for name, value in scores)


def _sheet_images(prompts: list[str], shown: ScoredImages, before: ScoredImages | None) -> list[SheetImage]:
    images = []
    for series, (name, scored) in enumerate((("before", before), ("after", shown))):
        if scored is None:
            continue
        for number in scored.pictures:
            prompt, generation = divmod(number, scored.num_generations)
            image = SheetImage(prompt, generation, scored.pictures[number], prompts[prompt], scored.caption(number))
            if before is not None and scored.num_generations > 1:
                image.series, image.series_name = series, name
            elif before is not None:  # a prompt with one image has before and after in a row
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
    sources: dict[int, list[Image.Image]] | None = None,
) -> Image.Image:
    """Save `<name>.png`, which is returned, all scores in `<name>.jsonl`, and `card/` (main process only)."""
    # `before` has the same images without training, for rows above and columns `<score>_before`
    images = _sheet_images(prompts, shown, before)
    thumbnails, sources = {}, sources or {}
    for prompt in sorted({image.prompt for image in images} & set(sources)):
        if sources[prompt]:
            thumbnails[prompt] = [thumbnail(to_rgb(source, "A source image")) for source in sources[prompt]]
    sheet = save_contact_sheet(images, title, folder / f"{name}.png", thumbnails)
    columns = max(2, CARD_IMAGES // max(breadth(image.image) for image in images))
    few = [image for image in images if image.prompt < CARD_PROMPTS and image.generation < columns]
    save_contact_sheet(few, title, folder / CARD / f"{name}.png", thumbnails, True)
    for prompt in range(CARD_PROMPTS):
        if (picture := shown.pictures.get(prompt * shown.num_generations)) is not None:
            write_atomically(folder / CARD / f"{prompt}_{name}.png", to_png(picture))
    lines = []
    for number in range(len(shown.rewards)):
        prompt, generation = divmod(number, shown.num_generations)
        entry = {"prompt": prompts[prompt], "generation": generation, **shown.scores(number)}
        if before is not None:
            entry |= {f"{score}_before": value for score, value in before.scores(number).items()}
        entry |= {column: values[number] for column, values in shown.extra.items()}
        lines.append(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
    write_atomically(folder / f"{name}.jsonl", "".join(lines))
    return sheet
