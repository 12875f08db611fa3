# SPDX-License-Identifier: Apache-2.0
"""Open, convert and encode images."""

import zlib
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps

from .text import shorten


# Largest value of 16 bits: 257 * 255
_MAX_16_BITS = 65535


def refuse_address(path: str | None) -> None:
    """Reject an image that a row gives as content, or as an address: its author would choose what is requested."""
    if path is not None and "://" in path:
        raise ValueError(f"{shorten(path)} is an address, not a file. Download it if you trust the dataset.")
    # Each part of a path has at most 255 characters, and most have far fewer
    if path is not None and (path.startswith("data:") or len(path) > 1000 or max(map(len, path.split("/"))) > 255):
        raise ValueError(
            f"{shorten(path)} is the content of an image in base64, not the path of a file. Save it as a file and "
            "name that, or use Parquet with the bytes."
        )


def to_rgb(image: Image.Image, where: str) -> Image.Image:
    """Convert an image of any mode to RGB: turned as its EXIF says, transparency on white, 16 bits scaled to 8."""
    # Pillow's own conversion drops transparency and cuts off values above 255
    if image.width == 0 or image.height == 0:
        raise ValueError(f"{where} has {image.width} x {image.height} pixels (width x height): check how it was cut.")
    if image.getexif().get(ExifTags.Base.Orientation) is not None:
        image = ImageOps.exif_transpose(image)  # as `datasets` does
    if image.mode == "F" or image.mode.startswith("I"):
        return _gray_16_to_rgb(image, where)
    try:
        if image.has_transparency_data:
            white = Image.new("RGB", image.size, (255, 255, 255))
            image = image.convert("RGBA")
            white.paste(image, mask=image.getchannel("A"))
            return white
        return image if image.mode == "RGB" else image.convert("RGB")
    except ValueError as error:  # Pillow opens a few modes that it does not convert
        raise ValueError(f"{where} has the mode {image.mode!r} ({error}). Save it in RGB.") from error


def _gray_16_to_rgb(image: Image.Image, where: str) -> Image.Image:
    values = np.asarray(image)  # (height, width)
    if image.mode == "F" or values.min() < 0 or values.max() > _MAX_16_BITS:
        raise ValueError(
            f"{where} has the mode {image.mode!r} with values from {values.min()} to {values.max()}, of which it is "
            "unknown what is black and white. Scale it to 0..255 and convert it to 'L' or 'RGB'."
        )
    # Pillow opens 16 bits as "I;16"; up to 255, "I" was 8 bits
    white = 255 if image.mode == "I" and values.max() <= 255 else _MAX_16_BITS
    transparent = image.info.get("transparency")  # PNG names one gray value
    if transparent is not None:
        values = np.where(values == transparent, white, values)
    gray = np.rint(values / (white / 255)).astype(np.uint8)
    return Image.fromarray(gray).convert("RGB")


@contextmanager
def reading(image: str, remedy: str = "Replace the file, or leave the row out") -> Iterator[None]:
    """Name an image in any error of its decoder: Pillow alone has half a dozen kinds of errors."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{image} cannot be read: {type(error).__name__}: {error}. {remedy}.") from error


def open_image(source: Any) -> Image.Image:
    """Open an image from a PIL image, an array of bytes (H, W, 3), a path, bytes, or a value of a dataset."""
    if isinstance(source, dict):
        source = source["path"] if source.get("bytes") is None else source["bytes"]
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8:
            raise ValueError(f"an array of {source.dtype}; pass one of uint8, a PIL image, or a path")
        return Image.fromarray(source)
    if isinstance(source, str):
        refuse_address(source)
    return Image.open(BytesIO(source) if isinstance(source, bytes) else source)


def to_png(image: Image.Image) -> bytes:
    """Encode an image."""
    buffer = BytesIO()
    # Three times as fast as the default for generated images, and as small
    image.save(buffer, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return buffer.getvalue()


def data_url(image: Image.Image, kind: str, **options) -> str:
    """Encode an image as a data URL; `kind` is `"png"` or `"jpeg"`, `options` are those of Pillow."""
    file = BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}"
