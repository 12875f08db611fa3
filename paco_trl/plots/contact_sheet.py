# SPDX-License-Identifier: Apache-2.0
"""Make contact sheets: a row of images with their scores for each prompt, with rows before and after training."""

import textwrap
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox
from PIL import Image, ImageOps

from ..utils.files import write_atomically
from .figures import new_figure, open_png, png_bytes


# Limits of a sheet, and of its images in pixels
MAX_PROMPTS = 8
MAX_IMAGES = 8
THUMBNAIL = 512

# Of the sheet of a model card: a card is about 700 pixels wide, on which the letters of 5.3 inches are legible
CARD_PROMPTS = CARD_IMAGES = 4
CARD_WIDTH, _CARD_DPI = 5.3, 190

LABEL_LETTERS = 12  # per line of the label of a row
LABEL_FONT = FontProperties(size=7, weight="bold")
TITLE_LINES = 3  # of an edit instruction; other prompts have one


@dataclass
class SheetImage:
    """One image of a contact sheet, a thumbnail."""

    prompt: int  # its position in the round: the row of the sheet
    generation: int  # which of the prompt's images it is: the column
    image: Image.Image
    prompt_text: str  # title of the row
    caption: str = ""  # scores, below the image
    series: int = 0  # place of its row among those of the prompt: 0 before training, 1 after it
    series_name: str = ""  # label at the left of the row; the same for all images of a row


def thumbnail(image: Image.Image) -> Image.Image:
    """Copy an image, at most `THUMBNAIL` pixels wide and high; a small one keeps its size."""
    copy = image.copy()
    copy.thumbnail((THUMBNAIL, THUMBNAIL))
    return copy


def _wrap(text: str, letters: int, lines: int) -> str:
    """Wrap a text to the width of so many letters; those of East Asia are twice as wide, and have no spaces."""
    text = " ".join(text.split())
    widths = sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)
    letters = letters * len(text) // max(widths, 1)
    wrapped = textwrap.wrap(text, max(letters, 3))
    if len(wrapped) > lines:  # `max_lines` of textwrap would leave nothing of a long word
        last = wrapped[lines - 1]
        last = last if len(last) + 2 <= letters else last[: letters - 2].rpartition(" ")[0] or last[: letters - 2]
        wrapped = [*wrapped[: lines - 1], f"{last} …"]
    return "\n".join(wrapped)


def _composite(images: list[Image.Image], aspect: float) -> Image.Image:
    """Paste images into a grid, in the arrangement that shows them largest in a box of an aspect (height / width)."""
    side = max(max(image.size) for image in images)
    images = [ImageOps.contain(image, (side, side)) for image in images]  # small ones grow
    gap = round(0.04 * side)
    width, height = (max(lengths) for lengths in zip(*(image.size for image in images), strict=True))

    def size(columns: int) -> tuple[int, int]:
        return columns * (width + gap) - gap, -(-len(images) // columns) * (height + gap) - gap

    columns = max(range(1, len(images) + 1), key=lambda count: min(1 / size(count)[0], aspect / size(count)[1]))
    composite = Image.new("RGB", size(columns), "white")
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        padded = ImageOps.pad(image, (width, height), color="white")
        composite.paste(padded, (column * (width + gap), row * (height + gap)))
    return composite


def _show(canvas: Any, place: Bbox, image: Image.Image, caption: str, size: int) -> Bbox:
    """Show an image in the center of a place of the figure, with its caption below; return its box."""
    width, height = canvas.figure.get_size_inches()
    box = place.shrunk_to_aspect(image.height / image.width, fig_aspect=height / width).anchored("C", place)
    interpolation = "nearest" if size < 128 else "antialiased"
    canvas.imshow(image, interpolation=interpolation, aspect="auto", extent=(box.x0, box.x1, box.y0, box.y1))
    below = box.y0 - 2 / 72 / height
    canvas.figure.text((box.x0 + box.x1) / 2, below, caption, fontsize=6, ha="center", va="top")
    return box


def save_contact_sheet(
    images: list[SheetImage],
    title: str,
    path: str | Path,
    sources: dict[int, list[Image.Image]] | None = None,
    is_for_card: bool = False,
) -> Image.Image:
    """Save a PNG with a row of images per prompt and series; `sources` are thumbnails left of them."""
    rows = sorted({(image.prompt, image.series) for image in images})
    columns = max(image.generation for image in images) + 1
    # All lengths are in inches; `width` is that of the images, `gap` is in widths of an image
    width, gap = 1.7 * columns * 1.06 + 0.3, 0.06
    labels = {(i.prompt, i.series): textwrap.fill(i.series_name, LABEL_LETTERS) for i in images if i.series_name}
    lines = [TextPath((0, 0), line, prop=LABEL_FONT) for label in labels.values() for line in label.splitlines()]
    margin = max(line.get_extents().x1 for line in lines) / 72 + 0.08 if labels else 0.0
    per_width = 0.96 / (columns + gap * (columns - 1))
    title_letters = columns * 26
    if is_for_card:
        width = (CARD_WIDTH - margin) / (1 + (1 + gap) * per_width * bool(sources))
        title_letters = int(18 * width)
    if len(rows) > len({prompt for prompt, _ in rows}) or labels or sources or is_for_card:
        # Rows are close to one another: each must fit with the last line of its caption
        caption_lines = max(image.caption.count("\n") + 1 for image in images)
        image_width = per_width * width
        text_height, below = max(0.62, 0.1 * caption_lines + 0.3), 0.1 * caption_lines
    else:
        image_width, text_height, below = 1.7, 0.62, 0.0
    source_column = (1 + gap) * image_width if sources else 0.0
    instructions = {}
    if sources:
        for image in images:
            instructions[image.prompt] = _wrap(image.prompt_text, title_letters + 26, TITLE_LINES)
        text_height += 0.13 * max(text.count("\n") for text in instructions.values())
    # Rows are as high as their images
    aspects = [max(i.image.height / i.image.width for i in images if (i.prompt, i.series) == row) for row in rows]
    heights = [image_width * aspect + text_height for aspect in aspects]
    own_rows = {prompt: [number for number, row in enumerate(rows) if row[0] == prompt] for prompt in instructions}
    composites, sources = {}, sources or {}
    for prompt, own in own_rows.items():
        if sources.get(prompt):
            space = sum(heights[number] for number in own) - text_height
            # Rows grow for sources up to this height, so that they are not tiny next to wide images
            most = max(space, image_width * (1.0 if len(sources[prompt]) == 1 else 1.5))
            composite = composites[prompt] = _composite(sources[prompt], most / image_width)
            missing = min(image_width * composite.height / composite.width, most) - space
            for number in own:
                heights[number] += max(missing, 0.0) / len(own)
    left = source_column + margin
    size = (width + left, sum(heights) + 0.5 + below)
    figure = new_figure(*size, _CARD_DPI) if is_for_card else new_figure(*size)
    total, height = figure.get_size_inches()
    edge = 0.02 * width / total  # where the title and the sources begin
    grid = figure.add_gridspec(
        len(rows), columns, height_ratios=heights, wspace=gap, hspace=0.0, left=(left + 0.02 * width) / total,
        right=(left + 0.98 * width) / total, bottom=0.01 + below / height, top=1 - 0.45 / height,
    )  # fmt: skip
    # One for all images: axes take Matplotlib tens of times as long as an image
    canvas = figure.add_axes((0, 0, 1, 1), xlim=(0, 1), ylim=(0, 1), autoscale_on=False)
    canvas.set_axis_off()
    figure.suptitle(title, fontsize=10, x=edge, ha="left", y=1 - 0.1 / height, va="top")
    for row, label in labels.items():
        place = grid[rows.index(row), 0].get_position(figure)
        label_edge, middle = edge + source_column / total, (place.y0 + place.y1) / 2
        figure.text(label_edge, middle, label, fontproperties=LABEL_FONT, ha="left", va="center")
    for prompt, own in own_rows.items():
        # From the top of the first row's images to the bottom of the last row's
        first, last = (grid[number, 0].get_position(figure) for number in (own[0], own[-1]))
        top = (first.y0 + first.y1 + (heights[own[0]] - text_height) / height) / 2
        bottom = (last.y0 + last.y1 - (heights[own[-1]] - text_height) / height) / 2
        place = {"x": edge, "y": top + 3 / 72 / height, "ha": "left", "va": "bottom"}
        figure.text(s=instructions[prompt], fontsize=7, parse_math=False, **place)  # a "$" is a dollar
        if prompt in composites:
            caption = "source" if len(sources[prompt]) == 1 else f"{len(sources[prompt])} sources"
            box = Bbox.from_bounds(edge, bottom, image_width / total, top - bottom)
            _show(canvas, box, composites[prompt], caption, max(composites[prompt].size))
    titled = set(instructions)
    for image in sorted(images, key=lambda image: image.series):
        place = grid[rows.index((image.prompt, image.series)), image.generation].get_position(figure)
        box = _show(canvas, place, image.image, image.caption, image.image.width)
        if image.generation == 0 and image.prompt not in titled:
            titled.add(image.prompt)
            text = _wrap(image.prompt_text, title_letters, 1)
            figure.text(box.x0, box.y1 + 3 / 72 / height, text, fontsize=7, parse_math=False)
    data = png_bytes(figure)
    write_atomically(path, data)
    return open_png(data)
