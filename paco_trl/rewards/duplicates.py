# SPDX-License-Identifier: Apache-2.0
"""Penalty on copies: are any two panels of a grid near-identical?"""

from itertools import combinations

import numpy as np
from PIL import Image
from scipy.ndimage import maximum_filter, minimum_filter, uniform_filter

from ..utils.images import to_rgb
from .columns import panels_of


# Panels are compared at this size, after a blur over BLUR pixels. A color that the other panel has within REACH pixels
# is not a difference: a full panel may be shifted by a hundredth of its width, a round and plain object by three.
THUMBNAIL_SIZE = (64, 64)
BLUR = 3
REACH = 5

# Differences up to this do not count (noise, JPEG), of the channels' range [0, 1]
TOLERANCE = 0.04

# Brightness is equalized up to this factor
MAX_GAIN = 1.1

# Fraction of the panel with the largest differences that is averaged: a raised arm is small
TOP_SHARE = 0.01


class DuplicateReward:
    """
    Score how far the panels of a grid are from being copies of one another. Use it along with a reward for
    consistency, which alone is highest for identical panels.

    Each pair of panels scores 1 up to the similarity `threshold` of [`panel_similarity`], and from there falls
    linearly to 0 at a similarity of 1. The reward is the mean over all pairs, in [0, 1]. Larger differences earn nothing
    more, so that it does not work against consistency.

    The default `threshold` was measured on illustrations of a character in front of seven backgrounds, with panels of 256 to
    640 pixels. Copies with noise (standard deviation 20 of 255), JPEG of quality 30, 8 % more or less brightness, a
    shift of 2 pixels, or a little of each had a similarity of at least 0.986. The character in a coat of another color
    had at most 0.42, a tenth of the width to the side 0.74, mirrored 0.86, and with its arm raised 0.90; the last two
    had 0.95 and 0.96 in panels of 384 x 640, which it fills less.

    It cannot detect that a panel is meant to repeat another, ignores color differences below 4 %, and takes stripes or
    noise of a few pixels for a flat color. Panels below 256 pixels are less robust: with 128, a shift of 2 pixels had
    0.94. It has no model. Cost: about 2 ms per pair on one core.

    Args:
        threshold (`float`, *optional*, defaults to `0.9`):
            Similarity above which a pair counts as near-identical, in [0, 1).
    """

    def __init__(self, threshold: float = 0.9):
        if not 0 <= threshold < 1:
            raise ValueError(f"`threshold` is {threshold}, but must be at least 0 and below 1, that of copies.")
        self.__name__ = "no_duplicates"  # names TRL's metrics, `rewards/no_duplicates/mean`
        self.threshold = threshold

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        panel_images: list[list[Image.Image]] | None = None,
        **kwargs,
    ) -> list[float]:
        """Return one score per completion, in [0, 1], from the images of its panels."""
        panel_images = panels_of(panel_images, len(completions), "`DuplicateReward`")
        return [self._score(panels, index) for index, panels in enumerate(panel_images)]

    def _score(self, panels: list[Image.Image], index: int) -> float:
        thumbnails = [
            _thumbnail(panel, f"Panel {number} of completion {index}") for number, panel in enumerate(panels)
        ]
        similarities = [_similarity(first, second) for first, second in combinations(thumbnails, 2)]
        scores = [min(1.0, (1 - similarity) / (1 - self.threshold)) for similarity in similarities]
        return sum(scores) / len(scores)


def panel_similarity(first: Image.Image, second: Image.Image) -> float:
    """Compute how similar two panels are: 1 for copies, below 0.1 for a black and a white panel."""
    # Both become blurred thumbnails of equal brightness. The difference of a pixel is how far its color is outside
    # the range of the other thumbnail's colors around that place, beyond a tolerance: small shifts and noise make no
    # difference. The similarity is 1 minus the mean of the largest hundredth of the differences: a mean over the
    # full panel would measure how much background the panels share.
    return _similarity(_thumbnail(first, "The first panel"), _thumbnail(second, "The second panel"))


def _thumbnail(panel: Image.Image, where: str) -> np.ndarray:
    small = to_rgb(panel, where).resize(THUMBNAIL_SIZE, Image.Resampling.BOX)
    return uniform_filter(np.asarray(small, dtype=float) / 255, (BLUR, BLUR, 1), mode="nearest")  # (64, 64, 3)


def _similarity(first: np.ndarray, second: np.ndarray) -> float:
    # A black panel has no brightness to divide by
    gain = np.clip((second.mean() + 1e-6) / (first.mean() + 1e-6), 1 / MAX_GAIN, MAX_GAIN)
    first, second = first * gain**0.5, second / gain**0.5
    outside = np.maximum(_outside_of_range(first, second), _outside_of_range(second, first)).max(axis=-1)  # (64, 64)
    differences = np.sort(np.clip(outside - TOLERANCE, 0, 1), axis=None)
    return float(1 - differences[-round(TOP_SHARE * differences.size) :].mean())


def _outside_of_range(values: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Compute how far values are below or above all values of the reference around their place."""
    lowest = minimum_filter(reference, (REACH, REACH, 1), mode="nearest")
    highest = maximum_filter(reference, (REACH, REACH, 1), mode="nearest")
    return np.maximum(lowest - values, values - highest)
