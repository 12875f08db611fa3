# SPDX-License-Identifier: Apache-2.0
"""Grids: image sets as one image with panels of equal size, in row-major order."""

import hashlib
from collections.abc import Sequence

from PIL import Image


def panel_size(height: int, width: int, rows: int, cols: int) -> tuple[int, int]:
    """Compute height and width of a grid's panels in pixels; raise `ValueError` if they would differ."""
    if min(rows, cols, height, width) < 1 or height % rows or width % cols:
        raise ValueError(
            f"An image of {height}x{width} pixels (height x width) does not divide into a {rows}x{cols} grid of equal "
            "panels. Use a height and a width that do."
        )
    return height // rows, width // cols


def split_grid(image: Image.Image, rows: int, cols: int) -> list[Image.Image]:
    """Split a grid image into its `rows * cols` panels, row by row from the upper left."""
    height, width = panel_size(image.height, image.width, rows, cols)
    return [
        image.crop((col * width, row * height, (col + 1) * width, (row + 1) * height))
        for row in range(rows)
        for col in range(cols)
    ]


def join_grid(panels: Sequence[Image.Image], rows: int, cols: int) -> Image.Image:
    """Join panels of the same size and mode into a grid image, the inverse of [`split_grid`]."""
    if not panels or len(panels) != rows * cols:
        raise ValueError(f"A {rows}x{cols} grid (rows x cols) has {rows * cols} panels, got {len(panels)} images.")
    formats = sorted({(panel.height, panel.width, panel.mode) for panel in panels})
    if len(formats) > 1:
        raise ValueError(
            f"The panels of a grid must have the same size and mode, got (height, width, mode) {formats}."
        )
    ((height, width, mode),) = formats
    image = Image.new(mode, (cols * width, rows * height))
    for index, panel in enumerate(panels):
        row, col = divmod(index, cols)
        image.paste(panel, (col * width, row * height))
    return image


def with_gaps(image: Image.Image, count: int) -> Image.Image:
    """Insert white gaps between `count` side-by-side images, for display."""
    if count == 1:
        return image
    gap = max(2, image.height // 32)
    padded_image = Image.new(image.mode, (image.width + (count - 1) * gap, image.height), "white")
    for index, panel in enumerate(split_grid(image, 1, count)):
        padded_image.paste(panel, (index * (panel.width + gap), 0))
    return padded_image


def pixels_sha256(image: Image.Image) -> str:
    """Hash the pixels of an image, independent of its file format."""
    header = f"{image.width}x{image.height} {image.mode}\n".encode()
    return hashlib.sha256(header + image.tobytes()).hexdigest()
