# SPDX-License-Identifier: Apache-2.0
"""Render sheets of images: rows with a title, and a caption below each image."""

import textwrap
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from ..utils.images import to_rgb


# Limits of a contact sheet, and of its images in pixels
MAX_PROMPTS = MAX_IMAGES = 8
THUMBNAIL = 512
CARD_PROMPTS = CARD_IMAGES = 4  # of the sheet of a model card
# Pixels of a card, which is shown about 700 pixels wide, and of its letters, which are legible then
CARD_WIDTH, CARD_LETTER = 1008, 15

# An image and its caption, or an empty place
Cell = tuple[Image.Image | None, str]
# Title, and blocks of cells from left to right
SheetRow = tuple[str, Sequence[Sequence[Cell]]]


def breadth(image: Image.Image) -> int:
    """Count the squares that fit side by side into an image, such as the panels of a set; at least 1."""
    return max(1, image.width // image.height)


def thumbnail(image: Image.Image) -> Image.Image:
    """Copy an image, at most `THUMBNAIL` pixels high and, for each square in it, wide; a small one keeps its size."""
    copy = image.copy()
    copy.thumbnail((THUMBNAIL * breadth(image), THUMBNAIL))
    return copy


def render_sheet(
    rows: Sequence[SheetRow], heading: str = "", columns: int = 1, letter: int = 13, width: int | None = None
) -> Image.Image:
    """Render rows of blocks of images, each 180 pixels wide for each of its `columns`, or of a sheet of some `width`."""
    cell = 180
    gap = letter * 2 // 3
    if width is not None:
        cell = min((width - gap * (1 + len(blocks))) // sum(map(len, blocks)) - gap for _, blocks in rows)
    highest, cell = cell * 3 // 2, cell * columns
    width = gap + max(sum(len(block) * (cell + gap) + gap for block in blocks) for _, blocks in rows)
    strips = [_render_row(heading, [], width, cell, highest, letter)] if heading else []
    strips += [_render_row(text, blocks, width, cell, highest, letter) for text, blocks in rows]
    sheet, top = Image.new("RGB", (width, sum(strip.height for strip in strips) + gap), "white"), gap
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    return sheet


def _render_row(
    text: str, blocks: Sequence[Sequence[Cell]], width: int, cell: int, highest: int, letter: int
) -> Image.Image:
    gap, line = letter * 2 // 3, letter * 3 // 2
    lines = [part for paragraph in text.split("\n") for part in _wrap(paragraph, letter, width - 2 * gap)]
    shown = [[(image and _scale(image, cell, highest), caption) for image, caption in block] for block in blocks]
    cells = [each for block in shown for each in block]
    below = len(lines) * line + max((image.height for image, _ in cells if image), default=0)
    num_captions = max((len(caption.split("\n")) for _, caption in cells), default=0)
    strip = Image.new("RGB", (width, below + num_captions * line + gap), "white")
    draw, left = ImageDraw.Draw(strip), gap
    for number, part in enumerate(lines):
        draw.text((gap, number * line), part, "black", _font(part, letter))
    for block in shown:
        for image, caption in block:
            if image is not None:
                middle = (len(lines) * line + below - image.height) // 2
                strip.paste(image, (left + (cell - image.width) // 2, middle))
            for number, part in enumerate(caption.split("\n")):
                place = (left + cell // 2, below + number * line + 2)
                draw.text(place, part, "#333333", _font(part, letter), anchor="ma")
            left += cell + gap
        left += gap
    return strip


def _scale(image: Image.Image, cell: int, highest: int) -> Image.Image:
    """Scale an image to the width of a cell; the pixels of a small one stay sharp, and a tall one is not as wide."""
    method = Image.Resampling.NEAREST if max(image.size) < cell else Image.Resampling.BICUBIC
    return ImageOps.contain(to_rgb(image, "An image of the sheet"), (cell, highest), method)


def _wrap(text: str, letter: int, width: int) -> list[str]:
    """Break a text into at most three lines of about a width in pixels."""
    letters = int(0.95 * width * len(text) / max(_font(text, letter).getlength(text), 1))
    return textwrap.wrap(text, max(letters, 3), max_lines=3, placeholder="...")


def _font(text: str, letter: int) -> Any:
    if text.isascii():
        return ImageFont.load_default(letter)
    from .figures import font_of  # which takes seconds to import

    return ImageFont.truetype(font_of(text), letter)
