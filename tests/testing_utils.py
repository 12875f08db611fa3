# SPDX-License-Identifier: Apache-2.0
"""Helpers that several test files share."""

import io

import numpy as np
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage


# ---- Judges and rewards ----


def noise(seed: int, size: tuple[int, int] = (56, 56), mode: str = "RGB") -> PILImage.Image:
    """An image that differs from seed to seed; with transparency where the mode has it."""
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    image = PILImage.fromarray(values, "RGBA")
    return image if mode == "RGBA" else image.convert("RGB").convert(mode)


def plain(value: int, size: tuple[int, int] = (28, 28)) -> PILImage.Image:
    """An image of one color, which tells the value."""
    return PILImage.new("RGB", size, (value, 0, 255 - value))


def png(image: PILImage.Image) -> bytes:
    """The file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def pair_dataset(rows: list[dict]) -> Dataset:
    """Rows in the format of pairs as a dataset, with images as files have them."""
    turns = List({"role": Value("string"), "content": Value("string")})
    return Dataset.from_list(rows, features=Features({"images": List(Image()), "prompt": turns, "completion": turns}))
