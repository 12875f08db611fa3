# SPDX-License-Identifier: Apache-2.0
"""Images on their way into a vision-language model: one way for training and scoring."""

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import requests
from PIL import Image


if TYPE_CHECKING:
    from transformers import ProcessorMixin

# Seconds to wait for an image behind a URL
_TIMEOUT = 30.0


def load_image(image, processor: "ProcessorMixin", where: str) -> Image.Image:
    """
    Opens an image and brings it to the size that the vision tower cuts into whole patches.

    It goes through `qwen_vl_utils.process_vision_info`, as in the usage example of the published judge: transparency
    on white, sides rounded to multiples of a merged patch (28 pixels for Qwen2.5-VL). The judge's scores and its
    training see the same pixels because both come here.

    Args:
        image (`PIL.Image.Image`, `str`, `Path`, `bytes` or `dict`):
            Image, its path, its URL (`http`, `https`, `file` or `data`), the bytes of its file, or the undecoded row of
            [`~datasets.Image`], a `dict` of `bytes` and `path`.
        processor ([`~transformers.ProcessorMixin`]):
            Processor of the model; its patch size is read.
        where (`str`):
            Where the image comes from, for the error.

    Returns:
        `PIL.Image.Image`: in RGB.

    Raises:
        ValueError: The image cannot be read: it is missing, no image, or cut short.
    """
    from qwen_vl_utils import process_vision_info

    # Not every image processor cuts patches; 14 is the library's own default
    patch_size = getattr(processor.image_processor, "patch_size", None) or 14
    patch_size = patch_size if isinstance(patch_size, int) else patch_size["height"]
    source, name = image, None
    if isinstance(image, dict):
        source = image["bytes"] if image.get("bytes") is not None else image.get("path")
        name = image.get("path")
    if isinstance(source, Path):
        source = str(source)
    if isinstance(source, str):
        name = source if len(source) < 300 else source[:40] + "…"  # a data URL is the whole image
    try:
        if isinstance(source, str) and source.startswith(("http://", "https://")):
            # The library would wait forever for a server that does not answer
            response = requests.get(source, timeout=_TIMEOUT)
            response.raise_for_status()
            source = response.content
        if isinstance(source, (bytes, bytearray)):
            source = Image.open(BytesIO(source))
        elif not isinstance(source, (str, Image.Image)):
            raise TypeError(f"an image, a path, a URL or bytes are needed, not {type(source).__name__}")
        message = {"role": "user", "content": [{"type": "image", "image": source}]}
        images, _ = process_vision_info([message], image_patch_size=patch_size)
    except Exception as error:  # Pillow raises half a dozen kinds, requests and base64 their own
        raise ValueError(
            f"{where} cannot be read{f' ({name})' if name else ''}: {type(error).__name__}: {error}. Replace the file, "
            "or leave it out."
        ) from error
    return images[0]


def pixel_limit(processor: "ProcessorMixin") -> int | None:
    """Pixels to which the processor scales down a larger image, or `None` if it does it in another way."""
    size = getattr(processor.image_processor, "size", None)
    return size["longest_edge"] if size is not None and "shortest_edge" in size and "longest_edge" in size else None


def limit_pixels(processor: "ProcessorMixin", max_pixels: int) -> None:
    """
    Lowers the pixels to which the processor scales down a larger image. A lower limit of its own stays.

    Args:
        processor ([`~transformers.ProcessorMixin`]):
            Processor, changed in place. One without such a limit (all images to one size, for example) stays as it is.
        max_pixels (`int`):
            Largest number of pixels.
    """
    from transformers.image_utils import SizeDict

    limit = pixel_limit(processor)
    if limit is not None and limit > max_pixels:
        size = {**dict(processor.image_processor.size), "longest_edge": max_pixels}
        processor.image_processor.size = SizeDict(**size)


def find_control_tokens(processor: "ProcessorMixin") -> list[str]:
    """
    Tokens that are no text: turns, images, the end.

    Args:
        processor ([`~transformers.ProcessorMixin`]):
            Processor.

    Returns:
        `list[str]`.
    """
    tokens = {str(token) for token in processor.tokenizer.added_tokens_decoder.values() if token.special}
    tokens.update(getattr(processor, name, None) for name in ("image_token", "video_token"))
    return sorted(token for token in tokens if token)


def check_text(text: str, control_tokens: list[str], where: str) -> None:
    """
    Checks that a text has no control token, which would be read as an image, or as the end of the turn.

    Args:
        text (`str`):
            Text.
        control_tokens (`list[str]`):
            From [`find_control_tokens`].
        where (`str`):
            Where the text comes from, for the error.

    Raises:
        ValueError: It has one.
    """
    token = next((token for token in control_tokens if token in text), None)
    if token is not None:
        raise ValueError(f"{where} has {token!r}, which the model reads as a command and not as text. Take it out.")
