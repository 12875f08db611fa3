# SPDX-License-Identifier: Apache-2.0
"""Statistics of generated images for the logs, independent of the rewards."""

from collections.abc import Sequence

import numpy as np
from accelerate.utils import gather_object
from PIL import Image

from ..rollout.rounds import Completion


# Side of the thumbnails, in pixels: for the statistics of an image, and for the diversity of a group
_STATISTICS_SIDE, _DIVERSITY_SIDE = 128, 16
STATISTICS = ("sharpness", "color_entropy", "brightness", "saturation")


def measure_image(image: Image.Image) -> tuple[list[float], np.ndarray]:
    """Return the four statistics of an image, and a thumbnail (16, 16, 3) for the diversity of its group."""
    thumbnail = image.convert("RGB")
    thumbnail.thumbnail((_STATISTICS_SIDE, _STATISTICS_SIDE), Image.Resampling.BOX)
    pixels = np.asarray(thumbnail, dtype=np.float32) / 255  # (H, W, 3)
    gray = pixels.mean(axis=-1)
    down = np.abs(np.diff(gray, axis=0))
    right = np.abs(np.diff(gray, axis=1))
    levels = np.minimum(pixels * 4, 3).astype(int) @ (16, 4, 1)
    shares = np.unique(levels, return_counts=True)[1] / levels.size
    statistics = [
        # Mean difference of neighbors: 0 without edges, at most 1
        (down.sum() + right.sum()) / (down.size + right.size),
        -(shares * np.log2(shares)).sum(),  # in bits, with four levels per channel: 0 for one color, at most 6
        pixels.mean(),  # 0 for black, 1 for white
        (pixels.max(axis=-1) - pixels.min(axis=-1)).mean(),  # 0 for gray, 1 for pure colors
    ]
    reduced = thumbnail.resize((_DIVERSITY_SIDE, _DIVERSITY_SIDE), Image.Resampling.BOX)
    return list(map(float, statistics)), np.asarray(reduced)


def measure_images(completions: Sequence[Completion]) -> list[tuple[int, tuple[list[float], np.ndarray]]]:
    """Return the indices and measurements of the completions that have their image on this process."""
    return [
        (completion.index, measure_image(completion.image))
        for completion in completions
        if completion.image is not None
    ]


def image_metrics(
    measurements: list[tuple[int, tuple[list[float], np.ndarray]]], num_generations: int
) -> dict[str, float]:
    """Average each statistic over all completions, and add the diversity of groups. Collective: call on all ranks."""
    by_completion = dict(gather_object(measurements))
    values, thumbnails = zip(*(by_completion[number] for number in sorted(by_completion)), strict=True)
    groups = (np.stack(thumbnails) / 255).reshape(
        -1, num_generations, thumbnails[0].size
    )  # (prompts, generations, values)
    metrics = dict(zip(STATISTICS, np.mean(values, axis=0).tolist(), strict=True))
    if num_generations > 1:
        # Root mean square distance between two images: the mean of (a - b)^2 over all pairs is twice the unbiased
        # variance
        metrics["diversity"] = float(np.sqrt(2 * groups.var(axis=1, ddof=1).mean(axis=1)).mean())
    return {f"images/{name}": value for name, value in metrics.items()}
