# SPDX-License-Identifier: Apache-2.0
"""The guard against copies: are any two panels of a grid near-identical?"""

from itertools import combinations

import numpy as np
from PIL import Image
from scipy.ndimage import maximum_filter, minimum_filter, uniform_filter

from ..utils.images import to_rgb


# Panels are compared at this size, after a blur over BLUR pixels. What lies in another place of the other panel, within
# REACH pixels around, is no difference: a whole panel may be shifted by a hundredth of its width, and what is round and
# plain by three.
THUMBNAIL_SIZE = (64, 64)
BLUR = 3
REACH = 5

# Differences up to this do not count: noise and JPEG. Of the channels' range [0, 1].
TOLERANCE = 0.04

# Brightness is equalised up to this factor
MAX_GAIN = 1.1

# Share of the panel that is looked at, that of the largest differences: a raised arm is small
TOP_SHARE = 0.01


class DuplicateReward:
    """
    How far the panels of a grid are from being copies of one another. The guard beside a reward for consistency, which
    alone is highest for panels that are all the same.

    Each pair of panels scores 1 up to the similarity `threshold` of [`panel_similarity`], and from there falls linearly
    to 0 at a similarity of 1. The reward is the mean over all pairs, in [0, 1]: 1 if no two panels are near-identical,
    0 if all are. Being different by more than the threshold earns nothing, so that it does not work against the reward
    for consistency.

    The default of `threshold` is measured on drawings of a character before seven backgrounds (flat, dark, sky, room,
    soft texture, checker, coloured noise), with panels of 256 to 640 pixels. A copy with noise (standard deviation 20
    of 255), JPEG of quality 30, 8 % more or less brightness, a shift of 2 pixels, or a little of each had a similarity
    of at least 0.986, the least before the checker; that is a score of at most 0.14. The character in a coat of another
    colour had at most 0.42, a step of a tenth of the width aside 0.74, half as large again 0.75, mirrored 0.86, and
    with its arm raised 0.90. In panels of 384 x 640, where it fills less, the last two had 0.95 and 0.96: small changes
    earn a part.

    It cannot tell a panel that is meant to show the same again, sees no difference of less than 4 % in colour (a dark
    figure that moves in the dark), and takes stripes or noise of a few pixels for a flat colour. Panels below 256 pixels
    are less robust: of 128, a shift of 2 pixels had 0.94.

    It has no model. Cost: about 2 ms per pair on one core.

    Args:
        threshold (`float`, *optional*, defaults to `0.9`):
            Similarity from which a pair counts as near-identical, in [0, 1).

    Example:

    ```python
    >>> from paco_trl.rewards import DuplicateReward

    >>> no_duplicates = DuplicateReward()
    >>> no_duplicates(prompts=["A cat's day."], completions=[grid], panel_images=[[left, left]])
    [0.0]
    ```
    """

    def __init__(self, threshold: float = 0.9):
        if not 0 <= threshold < 1:
            raise ValueError(
                f"`threshold` is {threshold}, but must be at least 0 and below 1, the similarity of a panel and itself."
            )
        self.__name__ = "no_duplicates"  # TRL takes it for the metric names, `rewards/no_duplicates/mean`
        self.threshold = threshold

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        panel_images: list[list[Image.Image]] | None = None,
        **kwargs,
    ) -> list[float]:
        """
        Score grids of panels.

        Args:
            prompts (`list[str]`):
                Prompts, not used.
            completions (`list[PIL.Image.Image]`):
                The grids; not used, `panel_images` has them cut.
            panel_images (`list[list[PIL.Image.Image]]`):
                Images of the panels, for each completion.

        Returns:
            `list[float]`: one score per completion, in [0, 1].

        Raises:
            ValueError: If a completion has fewer than two panels, or one that cannot be read as RGB.
        """
        if panel_images is None or len(panel_images) != len(completions):
            found = "no `panel_images`" if panel_images is None else f"{len(panel_images)} entries of `panel_images`"
            raise ValueError(
                f"Panels are compared with one another, but there are {found} for {len(completions)} completions. They "
                "come from the trainer, or from `paco_trl.data.split_grid`, one list per completion."
            )
        return [self._score(panels, index) for index, panels in enumerate(panel_images)]

    def _score(self, panels: list[Image.Image], index: int) -> float:
        if len(panels) < 2:
            raise ValueError(
                f"Completion {index} has {len(panels)} panel, and no pair that could be alike. `DuplicateReward` needs "
                "at least two: check `rows` and `cols` in the dataset, or leave this reward out."
            )
        thumbnails = [
            _thumbnail(panel, f"Panel {number} of completion {index}") for number, panel in enumerate(panels)
        ]
        similarities = [_similarity(first, second) for first, second in combinations(thumbnails, 2)]
        scores = [min(1.0, (1 - similarity) / (1 - self.threshold)) for similarity in similarities]
        return sum(scores) / len(scores)


def panel_similarity(first: Image.Image, second: Image.Image) -> float:
    """
    How near two panels are to being the same picture.

    Both become blurred thumbnails of equal brightness. Of each pixel it is taken how far its colour lies outside the
    range of colours that the other thumbnail has around that place, so that a small shift makes no difference; noise is
    averaged away, or remains within a tolerance. The similarity is 1 minus the mean of the largest hundredth of these
    differences: only a copy has no place that differs. Means over the whole panel, and the correlation of thumbnails,
    say instead how much of the panels is the same background.

    Args:
        first (`PIL.Image.Image`):
            A panel.
        second (`PIL.Image.Image`):
            Another panel; it may have another size.

    Returns:
        `float`: in [0, 1]: 1 for copies, below 0.1 for a black and a white panel. The order of the two does not matter.
    """
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
    """How far values lie below or above all values of the reference around their place."""
    lowest = minimum_filter(reference, (REACH, REACH, 1), mode="nearest")
    highest = maximum_filter(reference, (REACH, REACH, 1), mode="nearest")
    return np.maximum(lowest - values, values - highest)
