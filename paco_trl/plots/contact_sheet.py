# SPDX-License-Identifier: Apache-2.0
"""Render sheets of images: rows with a title, and a caption below each image."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from ..utils.files import to_png, write_atomically
from ..utils.images import to_rgb


# Limits of a contact sheet, and of its images in pixels
MAX_PROMPTS = MAX_IMAGES = 8
THUMBNAIL = 512
CARD_PROMPTS = CARD_IMAGES = 4  # of the sheet of a model card
# Pixels of a card, which is shown about 700 pixels wide, and of its letters, which are legible then
_CARD_WIDTH, _CARD_LETTER = 1008, 15
_TITLE_LINES = 3

# An image and its caption, or an empty place
Cell = tuple[Image.Image | None, str]


@dataclass
class SheetImage:
    """One image of a contact sheet, a thumbnail."""

    prompt: int  # its position in the round: the row of the sheet
    generation: int  # which of the prompt's images it is: the column
    image: Image.Image
    prompt_text: str  # title of the row
    caption: str = ""  # scores, below the image
    series: int = 0  # place of its row among those of the prompt: 0 before training, 1 after it
    series_name: str = ""  # label above the row; the same for all images of a row


def breadth(image: Image.Image) -> int:
    """Count the squares that fit side by side into an image, such as the panels of a set; at least 1."""
    return max(1, image.width // image.height)


def thumbnail(image: Image.Image) -> Image.Image:
    """Copy an image, at most `THUMBNAIL` pixels high and, for each square in it, wide; a small one keeps its size."""
    copy = image.copy()
    copy.thumbnail((THUMBNAIL * breadth(image), THUMBNAIL))
    return copy


def save_contact_sheet(
    images: list[SheetImage],
    title: str,
    path: str | Path,
    sources: dict[int, list[Image.Image]] | None = None,
    is_for_card: bool = False,
) -> Image.Image:
    """Save a PNG with a row of images per prompt and series; `sources` are thumbnails left of them."""
    columns, sources = max(image.generation for image in images) + 1, sources or {}
    num_sources = max(map(len, sources.values()), default=0)
    rows, titled = [], set[int]()
    for prompt, series in sorted({(image.prompt, image.series) for image in images}):
        in_row = {image.generation: image for image in images if (image.prompt, image.series) == (prompt, series)}
        first = next(iter(in_row.values()))
        own_sources = [] if prompt in titled else sources.get(prompt, [])
        text = first.series_name if prompt in titled else f"{first.prompt_text}\n{first.series_name}"
        titled.add(prompt)
        shown: list[Cell] = [
            (in_row[column].image, in_row[column].caption) if column in in_row else (None, "")
            for column in range(columns)
        ]
        captions = ["source"] if len(own_sources) == 1 else [f"source {n + 1}" for n in range(len(own_sources))]
        left: list[Cell] = [*zip(own_sources, captions, strict=True), *[(None, "")] * (num_sources - len(own_sources))]
        rows.append((text, [left, shown] if num_sources else [shown]))
    if is_for_card:
        gap = _gap(_CARD_LETTER)
        cell = (_CARD_WIDTH - gap * (2 + bool(num_sources))) // (columns + num_sources) - gap
        sheet = render_sheet(rows, cell, _CARD_LETTER, title)
    else:
        sheet = render_sheet(rows, heading=title, columns=max(breadth(image.image) for image in images))
    write_atomically(path, to_png(sheet))
    return sheet


def render_sheet(
    rows: Sequence[tuple[str, Sequence[Sequence[Cell]]]],
    cell: int = 180,
    letter: int = 13,
    heading: str = "",
    columns: int = 1,
) -> Image.Image:
    """Render rows of blocks of images below their titles, each `cell` pixels wide for each of its `columns`."""
    gap, highest, cell = _gap(letter), cell * 3 // 2, cell * columns
    width = gap + max(sum(len(block) * (cell + gap) + gap for block in blocks) for _, blocks in rows)
    strips = [_render_row(heading, [], width, cell, highest, letter)] if heading else []
    strips += [_render_row(text, blocks, width, cell, highest, letter) for text, blocks in rows]
    sheet, top = Image.new("RGB", (width, sum(strip.height for strip in strips) + gap), "white"), gap
    for strip in strips:
        sheet.paste(strip, (0, top))
        top += strip.height
    return sheet


def _gap(letter: int) -> int:
    return letter * 2 // 3


def _render_row(
    text: str, blocks: Sequence[Sequence[Cell]], width: int, cell: int, highest: int, letter: int
) -> Image.Image:
    gap, line = _gap(letter), letter * 3 // 2
    lines = [part for paragraph in text.split("\n") for part in _wrap(paragraph, letter, width - 2 * gap)]
    shown = [[(image and _scale(image, cell, highest), caption) for image, caption in block] for block in blocks]
    cells = [each for block in shown for each in block]
    below = len(lines) * line + max((image.height for image, _ in cells if image), default=0)
    num_captions = max((len(caption.split("\n")) for _, caption in cells), default=0)
    strip = Image.new("RGB", (width, below + num_captions * line + gap), "white")
    draw, left = ImageDraw.Draw(strip), gap
    for number, part in enumerate(lines):
        part, font = _legible(part, letter)
        draw.text((gap, number * line), part, "black", font)
    for block in shown:
        for image, caption in block:
            if image is not None:
                middle = (len(lines) * line + below - image.height) // 2
                strip.paste(image, (left + (cell - image.width) // 2, middle))
            for number, part in enumerate(caption.split("\n")):
                part, font = _legible(part, letter)
                draw.text((left + cell // 2, below + number * line + 2), part, "#333333", font, anchor="ma")
            left += cell + gap
        left += gap
    return strip


def _scale(image: Image.Image, cell: int, highest: int) -> Image.Image:
    """Scale an image to the width of a cell; the pixels of a small one stay sharp, and a tall one is not as wide."""
    method = Image.Resampling.NEAREST if max(image.size) < cell else Image.Resampling.BICUBIC
    return ImageOps.contain(to_rgb(image, "An image of the sheet"), (cell, highest), method)


def _wrap(text: str, letter: int, width: int) -> list[str]:
    """Break a text into at most three lines of a width in pixels, at spaces where there are any."""
    text, font = _legible(" ".join(text.split()), letter)
    lines: list[str] = []
    while text:
        end = next((n for n in range(1, len(text)) if font.getlength(text[: n + 1]) > width), len(text))
        if end < len(text) and len(lines) == _TITLE_LINES - 1:
            return [*lines, text[: end - 1].rstrip() + "…"]
        if end < len(text):
            end = text.rfind(" ", 0, end + 1) if " " in text[: end + 1] else end
        lines.append(text[:end])
        text = text[end:].lstrip()
    return lines


def _legible(text: str, letter: int) -> tuple[str, Any]:
    """Choose a font that has the letters of a text, and replace what none has: Pillow's own shows boxes then."""
    if text.isascii():
        return text, ImageFont.load_default(letter)
    from matplotlib.font_manager import FontProperties, findfont  # takes seconds

    from .figures import font_families, legible

    families = font_families()
    family = next((name for name in families if legible(text, [name]) == text), families[0])
    return legible(text, [family]), ImageFont.truetype(findfont(FontProperties(family=[family])), letter)
