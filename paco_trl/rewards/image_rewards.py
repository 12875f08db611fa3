# SPDX-License-Identifier: Apache-2.0
"""Rewards computed from pixels: grid layout, duplicate panels, readable text, and two for demos and tests."""

from collections.abc import Callable
from itertools import combinations
from unicodedata import normalize

import numpy as np
from PIL import Image, ImageChops, ImageStat
from scipy.ndimage import maximum_filter, maximum_filter1d, minimum_filter, uniform_filter

from ..utils.images import to_rgb
from .columns import PanelImages, require_column, require_panels


# ---- Layout ----

# Bands per panel along a line. Edges are detected in each band, so that part of a line also counts
BANDS_PER_PANEL = 12

# Positions across a line: larger images are averaged down to at least this, and less than twice as many
POSITIONS = 256

# How far a line may be from its expected position, as a fraction of the panel: a gutter has two edges
LINE_TOLERANCE = 0.04

# Least difference of an edge, in the channels' range [0, 1]. It must also be EDGE_FACTOR times the 85th percentile of
# the differences in its band
EDGE_DIFFERENCE = 0.03
EDGE_FACTOR = 1.5
USUAL_PERCENTILE = 85

# A line starts to count when the first fraction of its bands has an edge, and is complete at the second. Up to 0.4
# occurs by chance; two panels can share a color along part of their border. Extra lines must be clearer to count.
EXPECTED_LINE = (0.4, 0.8)
EXTRA_LINE = (0.5, 0.8)

# Smaller panels have too few pixels for lines
MIN_PANEL = 8


class LayoutReward:
    """
    Score in [0, 1] whether an image looks like a grid of `rows` x `cols` panels, from pixels alone.

    1 if every line between panels is complete and no panel is divided further, 0 for an undivided image or another
    grid. The penalty for an incomplete line is proportional to the gap. Cost: about 3 ms for 512 x 512 pixels on one
    core.

    It misses lines that are not straight, and borders without a gutter between panels of the same background. A
    straight edge across the full image where a line belongs, such as a horizon, counts as a line.
    """

    __name__ = "layout"  # names TRL's metrics, `rewards/layout/mean`
    scores_grids = True

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        rows: list[int] | None = None,
        cols: list[int] | None = None,
        **kwargs,
    ) -> list[float]:
        """Return one score in [0, 1] per completion, for the requested `rows` and `cols` of panels."""
        rows = require_column(rows, "rows", len(completions), "`LayoutReward`")
        cols = require_column(cols, "cols", len(completions), "`LayoutReward`")
        return [
            layout_score(to_rgb(image, f"Completion {index}"), rows[index], cols[index])
            for index, image in enumerate(completions)
        ]


def layout_score(image: Image.Image, rows: int, cols: int) -> float:
    """Compute how much an image looks like a grid, in [0, 1]: complete lines, and no panel divided further."""
    if image.height < rows * MIN_PANEL or image.width < cols * MIN_PANEL:
        raise ValueError(
            f"{image.height} x {image.width} pixels with {rows} x {cols} panels (rows x cols) have panels below "
            f"{MIN_PANEL} pixels, too few to see lines. Use larger images or fewer panels."
        )
    score = 1.0
    for view, count, panels_along in ((image, cols, rows), (image.transpose(Image.Transpose.TRANSPOSE), rows, cols)):
        profile = edge_profile(view, panels_along * BANDS_PER_PANEL)
        score *= _expected_lines(profile, count) * (1 - _extra_lines(profile, count))
    return score


def edge_profile(image: Image.Image, bands: int) -> np.ndarray:
    """Return the fraction of the height that has a vertical edge, between each pair of neighboring columns."""
    # Averaging over bands blurs content and noise, but keeps straight vertical edges: neighboring columns that differ
    # clearly, and more than others in the band. An edge also counts at the adjacent positions.
    factor = max(1, image.width // POSITIONS)
    width = image.width // factor
    averages = np.asarray(
        image.resize((width, bands), Image.Resampling.BOX, box=(0, 0, width * factor, image.height)), dtype=float
    )  # (bands, width, 3)
    differences = np.abs(np.diff(averages / 255, axis=1)).max(axis=-1)  # (bands, width - 1)
    percentile = np.percentile(differences, USUAL_PERCENTILE, axis=1, keepdims=True)  # (bands, 1)
    is_edge = differences > np.maximum(EDGE_DIFFERENCE, EDGE_FACTOR * percentile)
    return maximum_filter1d(is_edge.astype(float), 3, axis=1, mode="constant").mean(axis=0)


def line_strength(profile: np.ndarray, position: float, tolerance: float, start: float, complete: float) -> float:
    """Return how complete a line is at the best column near its position: 0 up to `start`, 1 from `complete`."""
    width = len(profile) + 1
    center = position * width - 0.5
    reach = max(tolerance * width, 1.5)
    fraction = profile[max(round(center - reach), 0) : round(center + reach) + 1].max()
    return float(np.clip((fraction - start) / (complete - start), 0, 1))


def _expected_lines(profile: np.ndarray, count: int) -> float:
    if count == 1:
        return 1.0
    strengths = [line_strength(profile, k / count, LINE_TOLERANCE / count, *EXPECTED_LINE) for k in range(1, count)]
    return sum(strengths) / len(strengths)


def _extra_lines(profile: np.ndarray, count: int) -> float:
    def faintest(parts: int) -> float:
        # The strength of the faintest line, so that one straight edge in the content costs nothing
        num_parts = count * parts
        positions = [k / num_parts for k in range(1, num_parts) if k % parts]
        return min(line_strength(profile, position, LINE_TOLERANCE / num_parts, *EXTRA_LINE) for position in positions)

    return max(map(faintest, (2, 3, 4)))


# ---- Copies ----

# Panels are compared at this size, after a blur over BLUR pixels. A color that the other panel has within REACH pixels
# is no difference, so that panels may shift by a hundredth of their width, and round, plain objects by three.
THUMBNAIL_SIZE = (64, 64)
BLUR = 3
REACH = 5

# Differences up to this are ignored as noise or JPEG artifacts, in the channels' range [0, 1]
COLOR_TOLERANCE = 0.04

# Brightness is equalized up to this factor
MAX_GAIN = 1.1

# Fraction of the pixels to average. They have the largest differences: a raised arm is small
TOP_SHARE = 0.01


class DuplicateReward:
    """
    Penalize panels of a grid that are copies of one another. Combine it with a consistency reward: on its own, that is
    highest for identical panels.

    A pair of panels scores 1 up to the similarity `threshold` of [`panel_similarity`] and falls linearly to 0 at a
    similarity of 1. The reward is the mean over all pairs, in [0, 1]. Larger differences earn no more, so that it does
    not work against consistency. Cost: about 2 ms per pair on one core.

    The default `threshold` was measured on illustrations of a character, with panels of 256 to 640 pixels. Copies with
    noise (standard deviation 20 of 255), JPEG of quality 30, 8 % more or less brightness or a shift of 2 pixels had a
    similarity of at least 0.986; another color of the coat at most 0.42, a shift by a tenth of the width 0.74, a
    mirror image 0.86 (0.95 where the character is small), a raised arm 0.90 (0.96). Smaller panels are less robust:
    with 128 pixels, a shift of 2 had 0.94. Color differences below 4 % and patterns of a few pixels are ignored.

    Args:
        threshold (`float`, *optional*, defaults to `0.9`):
            Similarity above which a pair counts as near-identical, in [0, 1).
    """

    min_panels = 2  # the trainer checks it before it loads a model

    def __init__(self, threshold: float = 0.9):
        if not 0 <= threshold < 1:
            raise ValueError(
                f"`threshold` is {threshold}, but must be at least 0 and below 1, the similarity of copies."
            )
        self.__name__ = "no_duplicates"  # names TRL's metrics, `rewards/no_duplicates/mean`
        self.threshold = threshold

    def __call__(
        self, prompts: list[str], completions: list[Image.Image], panel_images: PanelImages | None = None, **kwargs
    ) -> list[float]:
        """Return one score in [0, 1] per completion, from the images of its panels."""
        panel_images = require_panels(panel_images, len(completions), "`DuplicateReward`")
        rewards = []
        for index, panels in enumerate(panel_images):
            where = f"of completion {index}"
            thumbnails = [
                _thumbnail(panel, f"Panel {panel_index} {where}") for panel_index, panel in enumerate(panels)
            ]
            similarities = [_similarity(first, second) for first, second in combinations(thumbnails, 2)]
            scores = [min(1.0, (1 - similarity) / (1 - self.threshold)) for similarity in similarities]
            rewards.append(sum(scores) / len(scores))
        return rewards


def panel_similarity(first: Image.Image, second: Image.Image) -> float:
    """Compute how similar two panels are: 1 for copies, below 0.1 for a black and a white panel."""
    return _similarity(_thumbnail(first, "The first panel"), _thumbnail(second, "The second panel"))


def _thumbnail(panel: Image.Image, where: str) -> np.ndarray:
    small = to_rgb(panel, where).resize(THUMBNAIL_SIZE, Image.Resampling.BOX)
    return uniform_filter(np.asarray(small, dtype=float) / 255, (BLUR, BLUR, 1), mode="nearest")  # (64, 64, 3)


def _similarity(first: np.ndarray, second: np.ndarray) -> float:
    # A pixel differs by as much as its color lies outside the range of nearby colors in the other thumbnail, so that
    # small shifts and noise do not count. Only the largest hundredth of the differences is averaged: the mean over the
    # full panel would measure how much background the panels share. The 1e-6 avoids 0 / 0 for black panels
    gain = np.clip((second.mean() + 1e-6) / (first.mean() + 1e-6), 1 / MAX_GAIN, MAX_GAIN)
    first = first * gain**0.5
    second = second / gain**0.5
    outside = np.maximum(_outside_of_range(first, second), _outside_of_range(second, first)).max(axis=-1)  # (64, 64)
    differences = np.sort(np.clip(outside - COLOR_TOLERANCE, 0, 1), axis=None)
    return float(1 - differences[-round(TOP_SHARE * differences.size) :].mean())


def _outside_of_range(values: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Compute how far values are below or above all nearby values of the reference."""
    lowest = minimum_filter(reference, (REACH, REACH, 1), mode="nearest")
    highest = maximum_filter(reference, (REACH, REACH, 1), mode="nearest")
    return np.maximum(lowest - values, values - highest)


# ---- Text ----


class OcrReward:
    """
    Score in [0, 1] how well a text can be read in an image: 1 minus the edits between the text and the best-fitting
    part of the OCR result, per character.

    OCR lines are joined from top to bottom and left to right; case and white space are ignored. Other words cost
    nothing, except between the words of the text. OCR reads straight across columns, so use the words of one panel.
    Unrelated words share letters with the text, and score about a fifth, or up to a half for short texts.

    The model is PP-OCR of [PaddleOCR](https://github.com/PaddlePaddle/PaddleOCR), for Chinese and English, in the
    package [rapidocr](https://github.com/RapidAI/RapidOCR), whose wheel contains the weights (both Apache-2.0):
    `pip install "paco_trl[ocr]"`. Compare scores only within one version of rapidocr. Cost: about 1 s for 512 x 512
    pixels on two CPU cores; it does not use the GPU.
    """

    __name__ = "ocr"  # names TRL's metrics, `rewards/ocr/mean`
    needed_columns = ("text",)  # the trainer checks them before it loads a model
    model_name = "RapidOCR"  # name on cards

    def __init__(self):
        try:
            from rapidocr import RapidOCR
        except ImportError as error:
            raise ImportError('OcrReward requires `rapidocr` and onnxruntime: pip install "paco_trl[ocr]".') from error
        # At lower levels it logs its files, and each image without text
        self.engine: Callable = RapidOCR(params={"Global.log_level": "error"})

    def __call__(
        self, prompts: list[str], completions: list[Image.Image], text: list[str] | None = None, **kwargs
    ) -> list[float]:
        """Return one score in [0, 1] per completion, for the words of the column `text`."""
        text = require_column(text, "text", len(completions), "`OcrReward`")
        for index, words in enumerate(text):
            if not isinstance(words, str) or not _letters(words):
                raise ValueError(
                    f"`text` of completion {index} (prompt {prompts[index]!r}) is {words!r}. Fill the column in every "
                    "row, or leave `OcrReward` out."
                )
        scores = []
        for index, (words, image) in enumerate(zip(text, completions, strict=True)):
            rgb = np.asarray(to_rgb(image, f"Completion {index}"))  # (height, width, 3)
            lines = self.engine(np.ascontiguousarray(rgb[:, :, ::-1])).txts or ()  # BGR, as in OpenCV
            scores.append(readability(words, "\n".join(lines)))
        return scores


def readability(text: str, ocr_text: str) -> float:
    """Return 1 minus the smallest edit distance between a text and any part of the OCR result, per character."""
    expected = _letters(text)
    letters = _letters(ocr_text)
    # Levenshtein distance of the best substring: https://en.wikipedia.org/wiki/Approximate_string_matching
    row = [0] * (len(letters) + 1)
    for count, letter in enumerate(expected, start=1):
        above = row
        row = [count]
        for column, other_letter in enumerate(letters, start=1):
            row.append(min(above[column - 1] + (letter != other_letter), above[column] + 1, row[-1] + 1))
    return 1 - min(row) / len(expected)


def _letters(text: str) -> str:
    """Normalize a text: no white space, lower case, and full-width characters in their usual form."""
    return "".join(normalize("NFKC", text).lower().split())


# ---- For demos and tests ----


def redness_reward(prompts: list[str], completions: list[Image.Image], **kwargs) -> list[float]:
    """Score how red an image is, in [-1, 1]: the mean of red minus the mean of green and blue. For demos and tests."""
    scores = []
    for index, image in enumerate(completions):
        red, green, blue = ImageStat.Stat(to_rgb(image, f"Completion {index}")).mean
        scores.append((red - (green + blue) / 2) / 255)
    return scores


def panel_similarity_reward(
    prompts: list[str], completions: list[Image.Image], panel_images: PanelImages, **kwargs
) -> list[float | None]:
    """
    Score how alike the panels of a grid are, in [0, 1]: 1 minus the mean absolute difference of their thumbnails over
    all pairs, or `None` for a single panel.

    Stands in for a consistency reward where no model can be loaded. It rewards copies. For demos and tests only.
    """
    scores = []
    for index, panels in enumerate(panel_images):
        panels = [
            to_rgb(panel, f"Panel {panel_index} of completion {index}") for panel_index, panel in enumerate(panels)
        ]
        thumbnails = [panel.resize((8, 8), Image.Resampling.BOX) for panel in panels]
        differences = [
            sum(ImageStat.Stat(ImageChops.difference(first, second)).mean) / 3 / 255  # channels, in [0, 255]
            for first, second in combinations(thumbnails, 2)
        ]
        scores.append(1 - sum(differences) / len(differences) if differences else None)
    return scores


vars(panel_similarity_reward).update(missing_score_reason="a single panel has nothing to be compared with")
