# SPDX-License-Identifier: Apache-2.0
"""Does an image look like the grid of panels that was asked for?"""

import numpy as np
from PIL import Image
from scipy.ndimage import maximum_filter1d

from ..utils.images import to_rgb


# Bands per panel along a line: in each of them an edge is looked for by itself. 12 let a part of a line count.
BANDS_PER_PANEL = 12

# Positions across a line, at least: larger images are averaged down to fewer than twice as many
POSITIONS = 256

# Where the line may be, as a share of the panel before and behind the place where it belongs: a gutter has two edges
TOLERANCE = 0.04

# An edge differs by at least this, of the channels' range [0, 1], and by EDGE_FACTOR times the difference that 85 % of
# the positions of its band stay below
EDGE_DIFFERENCE = 0.03
EDGE_FACTOR = 1.5
USUAL_PERCENTILE = 85

# Shares of a line's bands with an edge, from which it is begun and at which it is complete. Chance makes up to four
# tenths; two panels can have one colour at a place of their border. A line too many has to be clearer to count.
WANTED_LINE = (0.4, 0.8)
EXTRA_LINE = (0.5, 0.8)

# Smaller panels do not have the pixels to see lines in
MIN_PANEL = 8


class LayoutReward:
    """
    Does an image look like a grid of `rows` x `cols` panels? From pixels alone, see [`layout_score`].

    In [0, 1]: 1 if every line between panels is there along its length and no panel is divided again, 0 if the image is
    one picture, or another grid. A missing part of a line costs in proportion.

    What it cannot see: a border between panels that have the same background and no gutter; whether the panels show
    what they should; lines that are not straight. A straight edge of the content that runs through the whole image
    just where a line belongs (a horizon at half of the height, where two rows are wanted) is a line to it, so that one
    picture can pass as 2 x 1 or 1 x 2, and hardly as a grid with both rows and columns. It judges the lines, not the
    panels: a mosaic of tiles has lines nearly everywhere.

    It has no model. Cost: about 3 ms for 512 x 512 pixels on one core.

    Example:

    ```python
    >>> from paco_trl.rewards import LayoutReward

    >>> layout = LayoutReward()
    >>> layout(prompts=["A cat's day, in 4 panels."], completions=[grid], rows=[2], cols=[2])
    [1.0]
    ```
    """

    def __init__(self):
        self.__name__ = "layout"  # TRL takes it for the metric names, `rewards/layout/mean`

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        rows: list[int] | None = None,
        cols: list[int] | None = None,
        **kwargs,
    ) -> list[float]:
        """
        Score grids.

        Args:
            prompts (`list[str]`):
                Prompts, not used.
            completions (`list[PIL.Image.Image]`):
                The grids, uncut.
            rows (`list[int]`):
                Rows of panels that were asked for, for each completion.
            cols (`list[int]`):
                Columns of panels.

        Returns:
            `list[float]`: one score per completion, in [0, 1].

        Raises:
            ValueError: If `rows` or `cols` are missing, less than 1, or too many for the size of the image.
        """
        for name, column in (("rows", rows), ("cols", cols)):
            if column is None or len(column) != len(completions):
                found = f"no `{name}`" if column is None else f"{len(column)} entries of `{name}`"
                raise ValueError(
                    f"The layout is compared with the one that was asked for, but there are {found} for "
                    f"{len(completions)} completions. Fill the columns `rows` and `cols` in the dataset."
                )
        return [
            layout_score(to_rgb(image, f"Completion {index}"), rows[index], cols[index])
            for index, image in enumerate(completions)
        ]


def layout_score(image: Image.Image, rows: int, cols: int) -> float:
    """
    How much an image looks like a grid of panels.

    For either direction it is taken how complete the wanted lines are, on average, and how complete the lines of a
    grid are that divides each of these panels into two, three or four again (its faintest line counts, so that a
    single straight edge in the content costs nothing). The score is the product of the completeness of both
    directions, times 1 minus that of the lines too many. Grids that lack a wanted line need no penalty of their own.

    Args:
        image (`PIL.Image.Image`):
            Image.
        rows (`int`):
            Rows of panels. Of one row no line is expected.
        cols (`int`):
            Columns of panels.

    Returns:
        `float`: in [0, 1].

    Raises:
        ValueError: If `rows` or `cols` are less than 1, or the panels smaller than 8 pixels.
    """
    if rows < 1 or cols < 1:
        raise ValueError(f"A grid needs at least one row and one column, got rows={rows} and cols={cols}.")
    if image.height < rows * MIN_PANEL or image.width < cols * MIN_PANEL:
        raise ValueError(
            f"An image of {image.height}x{image.width} pixels (height x width) with a {rows}x{cols} grid (rows x cols) "
            f"has panels of less than {MIN_PANEL} pixels, too few to see lines. Take larger images, or fewer panels."
        )
    image = to_rgb(image, "The image")
    score = 1.0
    for turned, count, panels_along in (
        (image, cols, rows),
        (image.transpose(Image.Transpose.TRANSPOSE), rows, cols),
    ):
        profile = edge_profile(turned, panels_along * BANDS_PER_PANEL)
        score *= _wanted_lines(profile, count) * (1 - _extra_lines(profile, count))
    return score


def edge_profile(image: Image.Image, bands: int) -> np.ndarray:
    """
    How much of the height has a vertical edge, at each position of the width.

    The image is cut into horizontal bands, and each is averaged from top to bottom. What is left of content and noise
    is faint, while an upright straight edge stays as it is: neighbouring columns that differ clearly, and more than
    others of the same band. A neighbouring position counts too, because an edge can lie between two.

    Args:
        image (`PIL.Image.Image`):
            Image in RGB.
        bands (`int`):
            Number of bands.

    Returns:
        `np.ndarray`: share of the bands that have an edge, of shape (positions - 1,): entry i belongs to the border of
        the columns i and i + 1, averaged from several pixels of a large image.
    """
    factor = max(1, image.width // POSITIONS)
    width = image.width // factor
    averages = np.asarray(
        image.resize((width, bands), Image.Resampling.BOX, box=(0, 0, width * factor, image.height)), dtype=float
    )  # (bands, width, 3)
    differences = np.abs(np.diff(averages / 255, axis=1)).max(axis=-1)  # (bands, width - 1)
    usual = np.percentile(differences, USUAL_PERCENTILE, axis=1, keepdims=True)  # (bands, 1)
    is_edge = differences > np.maximum(EDGE_DIFFERENCE, EDGE_FACTOR * usual)
    return maximum_filter1d(is_edge.astype(float), 3, axis=1, mode="constant").mean(axis=0)


def line_strength(profile: np.ndarray, place: float, tolerance: float, begun: float, complete: float) -> float:
    """
    How complete a line is, at the best position near the place where it belongs.

    Args:
        profile (`np.ndarray`):
            Share of the line's length with an edge, for each position, from [`edge_profile`].
        place (`float`):
            Where the line belongs, as a share of the width.
        tolerance (`float`):
            How far it may be from there, as a share of the width. It is at least one position and a half.
        begun (`float`):
            Share of the length up to which there is no line.
        complete (`float`):
            Share of the length from which the line is complete.

    Returns:
        `float`: in [0, 1].
    """
    width = len(profile) + 1
    center, reach = place * width - 0.5, max(tolerance * width, 1.5)
    # Slices end before their end
    share = profile[max(round(center - reach), 0) : round(center + reach) + 1].max()
    return float(np.clip((share - begun) / (complete - begun), 0, 1))


def _wanted_lines(profile: np.ndarray, count: int) -> float:
    if count == 1:
        return 1.0
    strengths = [line_strength(profile, k / count, TOLERANCE / count, *WANTED_LINE) for k in range(1, count)]
    return sum(strengths) / len(strengths)


def _extra_lines(profile: np.ndarray, count: int) -> float:
    strengths = []
    for parts in (2, 3, 4):
        finer = count * parts
        places = [k / finer for k in range(1, finer) if k % parts]
        strengths.append(min(line_strength(profile, place, TOLERANCE / finer, *EXTRA_LINE) for place in places))
    return max(strengths)
