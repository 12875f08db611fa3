# SPDX-License-Identifier: Apache-2.0
"""Render sheets of images. Sheets of a round or an evaluation are saved with their scores as JSON lines."""

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image, ImageDraw, ImageFont, ImageOps

from ..data.grids import with_gaps
from ..rollout.rounds import Completion
from ..utils.files import write_atomically
from ..utils.images import to_png, to_rgb


# Limits of a contact sheet, and of its images in pixels
MAX_PROMPTS = MAX_IMAGES = 8
THUMBNAIL = 512
CARD_PROMPTS = CARD_IMAGES = 4  # size of a model card's sheet
# Pixels of a card's sheet and its letters, which are legible where the sheet is shown about 700 pixels wide
CARD_WIDTH, CARD_LETTER = 1008, 15
CARD = "card"  # directory for what a model card shows: a smaller sheet, and the first image of each prompt

# An image and its caption, or an empty place
Cell = tuple[Image.Image | None, str]
# Title, and blocks of cells from left to right
SheetRow = tuple[str, Sequence[Sequence[Cell]]]


def breadth(image: Image.Image) -> int:
    """Count the squares that fit side by side into an image, such as the panels of a set; at least 1."""
    return max(1, image.width // image.height)


def thumbnail(image: Image.Image, count: int = 1) -> Image.Image:
    """
    Copy an image, and reduce each square in it to at most `THUMBNAIL` pixels. A small image keeps its size. The `count`
    separate images of a set get a gap between them.
    """
    copy = with_gaps(image, count).copy()
    copy.thumbnail((THUMBNAIL * breadth(image), THUMBNAIL))
    return copy


@dataclass(frozen=True)
class SheetLayout:
    """Sizes on a sheet, in pixels."""

    letter: int  # height of the letters
    columns: int  # squares that fit side by side into an image
    has_sets: bool  # images are sets, and are farther from each other than the images in a set
    square: int = 180  # width of a square image

    @property
    def gap(self) -> int:
        """Margin of the sheet."""
        return self.letter * 2 // 3

    @property
    def line(self) -> int:
        """Height of a line of text."""
        return self.letter * 3 // 2

    @property
    def apart(self) -> int:
        """Distance of the images in a block."""
        return 3 * self.gap if self.has_sets else self.gap

    @property
    def cell(self) -> int:
        """Width of a cell."""
        return self.square * self.columns

    @property
    def highest(self) -> int:
        """Greatest height of an image."""
        return self.square * 3 // 2

    def width_of(self, blocks: Sequence[Sequence[Cell]]) -> int:
        """Return the width of a row."""
        return self.gap + sum(len(block) * (self.cell + self.apart) + self.gap for block in blocks)

    def fit_to(self, width: int, rows: Sequence[SheetRow]) -> "SheetLayout":
        """Return a layout with squares as large as a sheet of this width allows."""
        squares = [(width - self.gap * (1 + len(blocks))) // sum(map(len, blocks)) - self.apart for _, blocks in rows]
        return replace(self, square=min(squares))


def render_sheet(
    rows: Sequence[SheetRow], heading: str = "", columns: int = 1, letter: int = 13, width: int | None = None
) -> Image.Image:
    """
    Render rows of images. Images are as wide as `columns` squares of 180 pixels or, if the sheet has a `width`, as fit.
    """
    has_sets = any(image and breadth(image) > 1 for _, blocks in rows for block in blocks for image, _ in block)
    layout = SheetLayout(letter, columns, has_sets)
    if width is not None:
        layout = layout.fit_to(width, rows)
    sheet_width = max(layout.width_of(blocks) for _, blocks in rows)
    headings: list[SheetRow] = [(heading, [])] if heading else []
    strips = [Image.new("RGB", (sheet_width, layout.gap), "white")]
    strips += [_render_row(text, blocks, sheet_width, layout) for text, blocks in [*headings, *rows]]
    return Image.fromarray(np.concatenate(list(map(np.asarray, strips))))


def _render_row(text: str, blocks: Sequence[Sequence[Cell]], width: int, layout: SheetLayout) -> Image.Image:
    letter, gap, line, cell = layout.letter, layout.gap, layout.line, layout.cell
    lines = [part for paragraph in text.split("\n") for part in _wrap(paragraph, letter, width - 2 * gap)]
    shown = [
        [(image and _scale(image, cell, layout.highest), caption) for image, caption in block] for block in blocks
    ]
    cells = sum(shown, [])
    below = len(lines) * line + max((image.height for image, _ in cells if image), default=0)
    num_captions = max((len(caption.split("\n")) for _, caption in cells), default=0)
    strip = Image.new("RGB", (width, below + num_captions * line + gap), "white")
    draw = ImageDraw.Draw(strip)
    left = gap
    for line_number, part in enumerate(lines):
        draw.text((gap, line_number * line), part, "black", _font(part, letter))
    for block in shown:
        for image, caption in block:
            if image is not None:
                middle = (len(lines) * line + below - image.height) // 2
                strip.paste(image, (left + (cell - image.width) // 2, middle))
            for line_number, part in enumerate(caption.split("\n")):
                top_center = (left + cell // 2, below + line_number * line + 2)
                draw.text(top_center, part, "#333333", _font(part, letter), anchor="ma")
            left += cell + layout.apart
        left += gap
    return strip


def _scale(image: Image.Image, cell: int, highest: int) -> Image.Image:
    """Scale an image to the width of a cell. The pixels of a small image stay sharp, and a tall image is narrower."""
    method = Image.Resampling.NEAREST if max(image.size) < cell else Image.Resampling.BICUBIC
    return ImageOps.contain(to_rgb(image, "An image of the sheet"), (cell, highest), method)


def _wrap(text: str, letter: int, width: int) -> list[str]:
    """Break a text into at most three lines of a width in pixels."""
    font = _font(text, letter)
    letters = int(width * len(text) / max(font.getlength(text), 1))
    # Capitals are wider than the mean letter
    while letters > 3 and any(font.getlength(line) > width for line in _lines(text, letters)):
        letters -= 1
    return _lines(text, letters)


def _lines(text: str, letters: int) -> list[str]:
    return textwrap.wrap(text, max(letters, 3), max_lines=3, placeholder="...")


def _font(text: str, letter: int) -> Any:
    if text.isascii():
        return ImageFont.load_default(letter)
    from .figures import font_of  # which takes seconds to import

    return ImageFont.truetype(font_of(text), letter)


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
        cls,
        accelerator: Accelerator,
        completions: Sequence[Completion],
        num_generations: int,
        *,
        reward_names: list[str],
        rewards: torch.Tensor,
        extra: dict[str, list],
        advantages: torch.Tensor | None = None,
    ) -> "ScoredImages":
        """Gather thumbnails of the first prompts from all processes."""
        mine = [
            (done.index, thumbnail(done.image, len(done.samples)))
            for done in completions
            if done.image is not None and done.group < MAX_PROMPTS and done.generation < MAX_IMAGES
        ]
        pictures = dict(gather_object(mine))
        return cls(pictures, num_generations, reward_names, rewards, extra, advantages)

    def scores(self, image_index: int) -> dict[str, float | None]:
        """Return the scores of an image by name; a missing reward is `None`."""
        named = zip(self.reward_names, self.rewards[image_index].tolist(), strict=True)
        scores = {name: None if math.isnan(value) else round(value, 6) for name, value in named}
        if self.advantages is not None:
            scores["advantage"] = round(self.advantages[image_index].item(), 6)
        return scores

    def table(self, prompts: list[str]) -> dict[str, list]:
        """Return the prompt and the scores of all images by column, with what rewards have logged."""
        numbers = range(len(self.rewards))
        scores = [self.scores(number) for number in numbers]
        columns = {name: [row[name] for row in scores] for name in scores[0]}
        return {"prompt": [prompts[number // self.num_generations] for number in numbers], **columns, **self.extra}

    def cells(self, prompt: int, count: int, label: str = "") -> list[Cell]:
        """Return the first images of a prompt, each with its scores below it."""
        cells: list[Cell] = []
        for image_index in range(prompt * self.num_generations, prompt * self.num_generations + count):
            lines = [
                f"{name} {'none' if value is None else f'{value:.3f}'}"
                for name, value in self.scores(image_index).items()
            ]
            cells.append((self.pictures.get(image_index), "\n".join([label] * bool(label) + lines)))
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
        thumbnails = [thumbnail(to_rgb(source, "A source image")) for source in sources.get(prompt, ())]
        left: list[Cell] = [
            (image, f"source {n}" if len(thumbnails) > 1 else "source") for n, image in enumerate(thumbnails, 1)
        ]
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
    """
    Save and return `<name>.png`. Save all scores as `<name>.jsonl`, and a model card's images in `card/`.

    Call on the main process. `before` has the same images from the untrained model: the sheet shows each beside or above
    the trained model's image, and the scores are columns `<score>_before`.
    """
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
    for image_index in range(len(shown.rewards)):
        prompt, generation = divmod(image_index, shown.num_generations)
        entry = {"prompt": prompts[prompt], "generation": generation, **shown.scores(image_index)}
        if before is not None:
            entry |= {f"{score}_before": value for score, value in before.scores(image_index).items()}
        entry |= {column: values[image_index] for column, values in shown.extra.items()}
        lines.append(json.dumps(entry, ensure_ascii=False, default=str) + "\n")
    write_atomically(folder / f"{name}.jsonl", "".join(lines))
    return sheet
