# SPDX-License-Identifier: Apache-2.0
"""Statistics of generated images that no reward sees, and an alarm when they drift while the reward rises."""

import math
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from PIL import Image


logger = get_logger(__name__)

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
        (down.sum() + right.sum()) / (down.size + right.size),  # of neighbors: 0 without edges, at most 1
        -(shares * np.log2(shares)).sum(),  # in bits, of four levels a channel: 0 for one color, at most 6
        pixels.mean(),  # 0 for black, 1 for white
        (pixels.max(axis=-1) - pixels.min(axis=-1)).mean(),  # 0 for gray, 1 for pure colors
    ]
    return list(map(float, statistics)), np.asarray(thumbnail.resize((_SMALL, _SMALL), Image.Resampling.BOX))


def statistics_of_prompts(
    measured: list[tuple[int, tuple[list[float], np.ndarray]]], num_generations: int
) -> dict[str, np.ndarray]:
    """Gather each statistic by prompt from what was measured of images by prompt-major number. Collective: call on all ranks."""
    by_number = dict(gather_object(measured))
    values, small = zip(*(by_number[number] for number in sorted(by_number)), strict=True)
    means = np.array(values).reshape(-1, num_generations, len(STATISTICS)).mean(axis=1)  # (prompts, statistics)
    groups = (np.stack(small) / 255).reshape(-1, num_generations, small[0].size)  # (prompts, generations, numbers)
    # Root mean square distance of two images: the mean over all pairs of (a - b)^2 is twice the unbiased variance
    diversity = np.full(len(groups), math.nan)
    if num_generations > 1:
        diversity = np.sqrt(2 * groups.var(axis=1, ddof=1).mean(axis=1))
    return {**dict(zip(STATISTICS, means.T, strict=True)), "diversity": diversity}


class DriftAlarm:
    """Compare the images of each round with those of round 0, and warn once of each statistic that leaves its range."""

    # Drift is the change of a mean over prompts in spreads (standard deviations) of prompts in round 0. It is out of range
    # at 1, or at 5 standard errors of the change where that is more, since other prompts alone move five means in each
    # round: of simulated runs of 20 rounds without a change 7 % are reported with 8 prompts a round, none with 42

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}  # part of a checkpoint: of round 0, and what was warned of

    def compare(self, values: dict[str, np.ndarray], reward: float) -> dict[str, float]:
        """Return the metrics of a round, whose statistics by prompt are `values`."""
        means = {name: float(each.mean()) for name, each in values.items()}
        if not self.state:
            spreads = {name: float(each.std(ddof=1)) if len(each) > 1 else 0.0 for name, each in values.items()}
            self.state = {"reward": reward, "means": means, "spreads": spreads, "warned": []}
        first, metrics, left = self.state, {}, []
        limit = max(1.0, 5 * math.sqrt(2 / len(values["sharpness"])))
        for name, mean in means.items():
            metrics[f"images/{name}"] = mean
            if first["spreads"][name] > 0:
                metrics[f"images/{name}_drift"] = drift = (mean - first["means"][name]) / first["spreads"][name]
                if abs(drift) > limit and reward > first["reward"] and name not in first["warned"]:
                    first["warned"].append(name)
                    left.append(f"{name} {first['means'][name]:.3g} to {mean:.3g} ({drift:+.1f} spreads of prompts)")
        if left:
            logger.warning(
                f"The mean reward rose from {first['reward']:.4g} to {reward:.4g} while the images changed in what it may "
                f"not see: {', '.join(left)}. Look at the contact sheets: this may be reward hacking."
            )
        return metrics


def describe_drift(metrics: dict[str, float]) -> str:
    """Write the drift of a round for the title of its contact sheet."""
    drifts = {name[7:-6].replace("_", " "): value for name, value in metrics.items() if name.endswith("_drift")}
    return ". Drift: " * bool(drifts) + ", ".join(f"{name} {value:+.1f}" for name, value in drifts.items())
