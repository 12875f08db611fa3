# SPDX-License-Identifier: Apache-2.0
"""Loading of images for a vision-language model, the same for training and scoring."""

import zlib
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import ExifTags, Image, ImageOps

from .addresses import refuse_address
from .text import shorten_path


if TYPE_CHECKING:
    from transformers import ProcessorMixin

# Largest value of 16 bits: 257 * 255
_MAX_16_BITS = 65535


def to_rgb(image: Image.Image, where: str) -> Image.Image:
    """Convert an image of any mode to RGB: turned as its EXIF says, transparency on white, 16 bits scaled to 8."""
    # Pillow's own conversion drops transparency and cuts off what is above 255
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
            f"{where} has the mode {image.mode!r} with values from {values.min()} to {values.max()}, of which it is unknown "
            "what is black and white. Scale it to 0..255 and convert it to 'L' or 'RGB'."
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
    """Name an image in whatever its decoder raises: Pillow alone has half a dozen kinds of errors."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{image} cannot be read: {type(error).__name__}: {error}. {remedy}.") from error


def patch_size_of(processor: "ProcessorMixin") -> int:
    """Return the side in pixels of the processor's patches."""
    # Not every image processor cuts patches; 14 is the default of qwen_vl_utils
    patch_size = getattr(processor.image_processor, "patch_size", None) or 14
    return patch_size if isinstance(patch_size, int) else patch_size["height"]


def load_image(image, patch_size: int, where: str) -> Image.Image:
    """Open an image as training and scoring see it: in RGB, its sides multiples of a merged patch."""
    from qwen_vl_utils import process_vision_info

    name = image.get("path") if isinstance(image, dict) else image if isinstance(image, str | Path) else None
    with reading(f"{where} ({shorten_path(name)})" if name else where):
        # Not opened by the library: it would convert it differently
        opened = to_rgb(open_image(image), "The image")
        check_sides(*opened.size, patch_size)
        message = {"role": "user", "content": [{"type": "image", "image": opened}]}
        images, _ = process_vision_info([message], image_patch_size=patch_size)
    return images[0]


def check_sides(width: int, height: int, patch_size: int) -> None:
    """Raise the `ValueError` of a judge's libraries for sides that they cannot resize: one is over 200 times the other."""
    from qwen_vl_utils.vision_process import smart_resize

    for _ in range(2):  # `process_vision_info` resizes, and the processor what comes out of it
        height, width = smart_resize(height, width, 2 * patch_size)


def open_image(source: Any) -> Image.Image:
    """Open what [`load_image`] takes: an image, its path, its bytes, or what a row of a dataset has."""
    if isinstance(source, dict):
        source = source["path"] if source.get("bytes") is None else source["bytes"]
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, str):
        refuse_address(source)
    return Image.open(BytesIO(source) if isinstance(source, bytes) else source)


def to_png(image: Image.Image) -> bytes:
    """Encode an image."""
    buffer = BytesIO()
    # Three times as fast as the default for such images, and as small
    image.save(buffer, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return buffer.getvalue()


def data_url(image: Image.Image, kind: str, **options) -> str:
    """Encode an image as a data URL; `kind` is `"png"` or `"jpeg"`, `options` are those of Pillow."""
    file = BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind};base64,{b64encode(file.getvalue()).decode()}"


def pixel_limit(processor: "ProcessorMixin") -> int | None:
    """Return the pixels to which the processor scales down a larger image, or `None` if it has no such limit."""
    size = getattr(processor.image_processor, "size", None)
    return size["longest_edge"] if size is not None and "shortest_edge" in size and "longest_edge" in size else None


def limit_pixels(processor: "ProcessorMixin", max_pixels: int) -> None:
    """Lower the pixels to which the processor scales down a larger image; a lower limit of its own stays."""
    from transformers.image_utils import SizeDict

    limit = pixel_limit(processor)
    if limit is not None and limit > max_pixels:
        size = {**dict(processor.image_processor.size), "longest_edge": max_pixels}
        processor.image_processor.size = SizeDict(**size)


def find_control_tokens(processor: "ProcessorMixin") -> list[str]:
    """Return the tokens that are not text: turns, images, the end."""
    tokens = {str(token) for token in processor.tokenizer.added_tokens_decoder.values() if token.special}
    tokens.update(getattr(processor, name, None) or "" for name in ("image_token", "video_token"))
    return sorted(token for token in tokens if token)


def check_text(text: str, control_tokens: list[str], where: str) -> None:
    """Check that a text has no control token. A model would read it as an image or as the end of the turn."""
    token = next((token for token in control_tokens if token in text), None)
    if token is not None:
        raise ValueError(f"{where} has {token!r}, which the model reads as a control token, not as text. Remove it.")
