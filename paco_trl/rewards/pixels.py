# SPDX-License-Identifier: Apache-2.0
"""Rewards from pixel values alone, without a model. For demos and tests."""

from itertools import combinations

from PIL import Image, ImageChops, ImageStat

from ..utils.images import to_rgb


THUMBNAIL_SIZE = (8, 8)


def redness_reward(prompts: list[str], completions: list[Image.Image], **kwargs) -> list[float]:
    """
    Score how red an image is, in [-1, 1]: the mean of red minus the mean of green and blue. For demos and tests.
    """
    scores = []
    for index, image in enumerate(completions):
        red, green, blue = ImageStat.Stat(to_rgb(image, f"Completion {index}")).mean
        scores.append((red - (green + blue) / 2) / 255)
    return scores


def panel_similarity_reward(
    prompts: list[str], completions: list[Image.Image], panel_images: list[list[Image.Image]], **kwargs
) -> list[float | None]:
    """
    Score how alike the panels of a grid are, in [0, 1]: 1 minus the mean absolute difference of their thumbnails over
    all pairs. `None` for a single panel, which has no pair.

    It replaces a consistency reward where no model can be loaded. It rewards copies. For demos and tests only.
    """
    scores = []
    for index, panels in enumerate(panel_images):
        panels = [to_rgb(panel, f"Panel {number} of completion {index}") for number, panel in enumerate(panels)]
        thumbnails = [panel.resize(THUMBNAIL_SIZE, Image.Resampling.BOX) for panel in panels]
        differences = [
            sum(ImageStat.Stat(ImageChops.difference(first, second)).mean) / 3 / 255  # channels, in [0, 255]
            for first, second in combinations(thumbnails, 2)
        ]
        scores.append(1 - sum(differences) / len(differences) if differences else None)
    return scores
