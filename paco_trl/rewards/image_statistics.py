# SPDX-License-Identifier: Apache-2.0
"""Statistics of generated images that no reward sees."""

from collections.abc import Sequence

import numpy as np
from accelerate.utils import gather_object
from PIL import Image

from ..rollout.rounds import Completion


_SIDE, _SMALL = 128, 16  # pixels of a thumbnail, and of what the diversity of a group is measured on
STATISTICS = ("sharpness", "color_entropy", "brightness", "saturation")


def measure_image(image: Image.Image) -> tuple[list[float], np.ndarray]:
    """Return the four statistics of an image, and a small copy (16, 16, 3) for the diversity of its group."""
    thumbnail = image.convert("RGB")
    thumbnail.thumbnail((_SIDE, _SIDE), Image.Resampling.BOX)
    pixels = np.asarray(thumbnail, dtype=np.float32) / 255  # (H, W, 3)
    gray = pixels.mean(axis=-1)
    down, right = np.abs(np.diff(gray, axis=0)), np.abs(np.diff(gray, axis=1))
    levels = np.minimum(pixels * 4, 3).astype(int) @ (16, 4, 1)
    shares = np.unique(levels, return_counts=True)[1] / levels.size
    statistics = [
        (down.sum() + right.sum())
        / (down.size + right.size),  # mean difference of neighbors: 0 without edges, at most 1
        -(shares * np.log2(shares)).sum(),  # in bits, with four levels a channel: 0 for one color, at most 6
        pixels.mean(),  # 0 for black, 1 for white
        (pixels.max(axis=-1) - pixels.min(axis=-1)).mean(),  # 0 for gray, 1 for pure colors
    ]
    return list(map(float, statistics)), np.asarray(thumbnail.resize((_SMALL, _SMALL), Image.Resampling.BOX))


def measure_images(completions: Sequence[Completion]) -> list[tuple[int, tuple[list[float], np.ndarray]]]:
    """Measure the completions that have an image on this process, by their numbers."""
    return [(done.number, measure_image(done.image)) for done in completions if done.image is not None]


def image_metrics(
    measured: list[tuple[int, tuple[list[float], np.ndarray]]], num_generations: int
) -> dict[str, float]:
    """Average each statistic over all completions. Collective: call on all ranks."""
    by_number = dict(gather_object(measured))
    values, small = zip(*(by_number[number] for number in sorted(by_number)), strict=True)
    groups = (np.stack(small) / 255).reshape(-1, num_generations, small[0].size)  # (prompts, generations, numbers)
    metrics = dict(zip(STATISTICS, np.mean(values, axis=0).tolist(), strict=True))
    if num_generations > 1:
        # Root mean square distance of two images: the mean over all pairs of (a - b)^2 is twice the unbiased variance
        metrics["diversity"] = float(np.sqrt(2 * groups.var(axis=1, ddof=1).mean(axis=1)).mean())
    return {f"images/{name}": value for name, value in metrics.items()}
