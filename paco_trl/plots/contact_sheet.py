# SPDX-License-Identifier: Apache-2.0
"""Pictures of a round: each prompt's images beside one another, with their scores; before and after, if wanted."""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox
from PIL import Image, ImageOps

from ..utils.files import write_atomically
from .figures import new_figure, open_png, png_bytes


# A sheet shows this much of a round, whatever its size
MAX_PROMPTS = 8
MAX_IMAGES = 8
THUMBNAIL = 256

# Label at the left of a row: letters per line, and their font
LABEL_LETTERS = 12
LABEL_FONT = FontProperties(size=7, weight="bold")

# Beside sources, the title of a row is an instruction, which is longer than a prompt's beginning: it has this many lines
TITLE_LINES = 3


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
    """Copy an image, at most `THUMBNAIL` pixels wide and high; small images stay as they are."""
    copy = image.copy()
    copy.thumbnail((THUMBNAIL, THUMBNAIL))
    return copy


def _composite(pictures: list[Image.Image], aspect: float) -> Image.Image:
    """Paste several pictures into one, in the arrangement that shows them largest in a box of an aspect (height / width)."""
    if len(pictures) == 1:
        return pictures[0]
    side = max(max(picture.size) for picture in pictures)
    pictures = [ImageOps.contain(picture, (side, side)) for picture in pictures]  # small ones grow to the others' size
    gap = round(0.04 * side)

    def lengths(columns: int) -> tuple[list[int], list[int]]:
        """Widths of the columns, and heights of the rows, each as large as its largest picture; with gaps."""
        widths = [max(picture.width for picture in pictures[i::columns]) + gap for i in range(columns)]
        starts = range(0, len(pictures), columns)
        return widths, [max(picture.height for picture in pictures[i : i + columns]) + gap for i in starts]

    def scale(columns: int) -> float:
        widths, heights = lengths(columns)
        return min(1 / sum(widths), aspect / sum(heights))

    columns = max(range(1, len(pictures) + 1), key=scale)
    widths, heights = lengths(columns)
    composite = Image.new("RGB", (sum(widths) - gap, sum(heights) - gap), "white")
    for number, picture in enumerate(pictures):
        row, column = divmod(number, columns)
        left = sum(widths[:column]) + (widths[column] - gap - picture.width) // 2
        composite.paste(picture, (left, sum(heights[:row]) + (heights[row] - gap - picture.height) // 2))
    return composite


def _show(canvas: Axes, place: Bbox, image: Image.Image, caption: str, size: int) -> Bbox:
    """Show an image in the middle of a place of the figure, with its caption below; give the box that it takes."""
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
) -> Image.Image:
    """
    Draw a contact sheet and save it as a PNG file.

    Each prompt has a row of images for each of its series, in their order, below one title. Where images name their
    series, a margin at the left has the names. Thumbnails of the images that a prompt edits (RGB, by the position of the
    prompt) stand in a column at the left of all that, in the middle of the prompt's rows.
    """
    rows = sorted({(image.prompt, image.series) for image in images})
    columns = max(image.generation for image in images) + 1
    width = 1.7 * columns * 1.06 + 0.3  # inches, without the margin of the labels and the column of sources
    gap = 0.06  # between images, in widths of one
    # Names are broken into short lines, and the margin is as wide as the longest
    labels = {(i.prompt, i.series): textwrap.fill(i.series_name, LABEL_LETTERS) for i in images if i.series_name}
    lines = {line for label in labels.values() for line in label.splitlines()}
    points = max((TextPath((0, 0), line, prop=LABEL_FONT).get_extents().x1 for line in lines), default=0.0)
    margin = points / 72 + 0.08 if labels else 0.0  # inches
    if len(rows) > len({prompt for prompt, _ in rows}) or labels or sources:
        # Rows stand close to one another: all that is in one must fit, up to the last line of its caption
        caption_lines = max(image.caption.count("\n") + 1 for image in images)
        image_width = 0.96 * width / (columns + gap * (columns - 1))
        text_height, below = max(0.62, 0.1 * caption_lines + 0.3), 0.1 * caption_lines
    else:
        image_width, text_height, below = 1.7, 0.62, 0.0
    source_column = (1 + gap) * image_width if sources else 0.0  # inches
    title_letters = int(columns * 26)
    instructions = {}
    if sources:
        for image in images:
            lines = textwrap.wrap(image.prompt_text, title_letters + 26, max_lines=TITLE_LINES, placeholder=" …")
            instructions[image.prompt] = "\n".join(lines)
        text_height += 0.13 * max(text.count("\n") for text in instructions.values())
    # Rows are as high as their images, so that wide sets are not shrunk to the height of square ones
    aspects = [max(i.image.height / i.image.width for i in images if (i.prompt, i.series) == row) for row in rows]
    heights = [image_width * aspect + text_height for aspect in aspects]
    own_rows = {prompt: [number for number, row in enumerate(rows) if row[0] == prompt] for prompt in instructions}
    source_pictures = {}
    for prompt, own in own_rows.items():
        if sources.get(prompt):
            space = sum(heights[number] for number in own) - text_height
            # Rows grow for sources up to this height, so that they are not tiny beside wide images, nor are several
            most = max(space, image_width * (1.0 if len(sources[prompt]) == 1 else 1.5))
            picture = source_pictures[prompt] = _composite(sources[prompt], most / image_width)
            missing = min(image_width * picture.height / picture.width, most) - space
            for number in own:
                heights[number] += max(missing, 0.0) / len(own)
    left = source_column + margin
    figure = new_figure(width + left, sum(heights) + 0.5 + below)
    total, height = figure.get_size_inches()
    edge = 0.02 * width / total  # where the title and the sources begin
    grid = figure.add_gridspec(
        len(rows), columns, height_ratios=heights, wspace=gap, hspace=0.0, left=(left + 0.02 * width) / total,
        right=(left + 0.98 * width) / total, bottom=0.01 + below / height, top=1 - 0.45 / height,
    )  # fmt: skip
    # One for all images: it takes Matplotlib tens of times as long to draw axes as to draw an image
    canvas = figure.add_axes((0, 0, 1, 1), xlim=(0, 1), ylim=(0, 1), autoscale_on=False)
    canvas.set_axis_off()
    figure.suptitle(title, fontsize=10, x=edge, ha="left", y=1 - 0.1 / height, va="top")
    for row, label in labels.items():
        place = grid[rows.index(row), 0].get_position(figure)
        # Images are centred in their cells, and so is the label
        label_edge = edge + source_column / total
        figure.text(label_edge, (place.y0 + place.y1) / 2, label, fontproperties=LABEL_FONT, ha="left", va="center")
    for prompt, own in own_rows.items():
        # From the top of the first row's images to the bottom of the last row's
        first, last = (grid[number, 0].get_position(figure) for number in (own[0], own[-1]))
        top = (first.y0 + first.y1 + (heights[own[0]] - text_height) / height) / 2
        bottom = (last.y0 + last.y1 - (heights[own[-1]] - text_height) / height) / 2
        place = {"x": edge, "y": top + 3 / 72 / height, "ha": "left", "va": "bottom"}
        figure.text(s=instructions[prompt], fontsize=7, parse_math=False, **place)  # a "$" is a dollar
        if prompt in source_pictures:
            number = len(sources[prompt])
            picture, box = source_pictures[prompt], Bbox.from_bounds(edge, bottom, image_width / total, top - bottom)
            _show(canvas, box, picture, "source" if number == 1 else f"{number} sources", max(picture.size))
    titled = set(instructions)
    for image in sorted(images, key=lambda image: image.series):
        place = grid[rows.index((image.prompt, image.series)), image.generation].get_position(figure)
        box = _show(canvas, place, image.image, image.caption, image.image.width)
        if image.generation == 0 and image.prompt not in titled:
            titled.add(image.prompt)
            text = textwrap.shorten(image.prompt_text, title_letters, placeholder=" …")
            figure.text(box.x0, box.y1 + 3 / 72 / height, text, fontsize=7, parse_math=False)
    data = png_bytes(figure)
    write_atomically(path, data)
    return open_png(data)
