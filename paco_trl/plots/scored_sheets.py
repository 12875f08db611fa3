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
    CARD_LETTER,
    CARD_PROMPTS,
    CARD_WIDTH,
    MAX_IMAGES,
    MAX_PROMPTS,
    Cell,
    SheetRow,
    breadth,
    render_sheet,
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

    def cells(self, prompt: int, count: int, label: str = "") -> list[Cell]:
        """Return the first images of a prompt, each with its scores below it."""
        cells: list[Cell] = []
        for number in range(prompt * self.num_generations, prompt * self.num_generations + count):
            lines = [
                f"{name} {'none' if value is None else f'{value:.3f}'}" for name, value in self.scores(number).items()
            ]
            cells.append((self.pictures.get(number), "\n".join([label] * bool(label) + lines)))
        return cells


def _sheet_rows(
    prompts: list[str],
    shown: ScoredImages,
    before: ScoredImages | None,
    sources: dict[int, list[Image.Image]],
    count: int,
) -> list[SheetRow]:
    rows: list[SheetRow] = []
    num_sources = max((len(sources.get(prompt, ())) for prompt in range(len(prompts))), default=0)
    for prompt, text in enumerate(prompts):
        found = [thumbnail(to_rgb(source, "A source image")) for source in sources.get(prompt, ())]
        left: list[Cell] = [(image, f"source {n}" if len(found) > 1 else "source") for n, image in enumerate(found, 1)]
        left += [(None, "")] * (num_sources - len(left))
        if before is None:
            series = [(text, shown.cells(prompt, count))]
        elif shown.num_generations == 1:  # before and after in a row
            series = [(text, before.cells(prompt, 1, "before") + shown.cells(prompt, 1, "after"))]
        else:
            series = [(f"{text}\nbefore", before.cells(prompt, count)), ("after", shown.cells(prompt, count))]
        for title, cells in series:
            rows.append((title, [left, cells] if num_sources else [cells]))
            left = [(None, "")] * num_sources
    return rows


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
    num_prompts = 1 + max(shown.pictures) // shown.num_generations
    widest = max(map(breadth, shown.pictures.values()))
    columns = min(shown.num_generations, MAX_IMAGES)
    rows = _sheet_rows(prompts[:num_prompts], shown, before, sources or {}, columns)
    sheet = render_sheet(rows, title, widest)
    write_atomically(folder / f"{name}.png", to_png(sheet))
    few = min(columns, max(2, CARD_IMAGES // widest))
    rows = _sheet_rows(prompts[: min(num_prompts, CARD_PROMPTS)], shown, before, sources or {}, few)
    card = render_sheet(rows, title, letter=CARD_LETTER, width=CARD_WIDTH)
    write_atomically(folder / CARD / f"{name}.png", to_png(card))
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
