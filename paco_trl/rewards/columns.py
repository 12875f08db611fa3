# SPDX-License-Identifier: Apache-2.0
"""Checks of the columns that rewards read."""

from PIL import Image


def column_of(column: list | None, name: str, count: int, reward: str) -> list:
    """Check that a reward got a column with one entry per image."""
    if column is None:
        remedy = "Add it to the dataset."
        if name == "panel_images":
            remedy = "The trainer or `paco_trl.data.split_grid` makes it."
        raise ValueError(f"{reward} requires the column `{name}`, which is missing. {remedy}")
    if len(column) != count:
        raise ValueError(f"`{name}` has {len(column)} entries for {count} images. Pass one for each.")
    return column


def panels_of(panel_images: list[list[Image.Image]] | None, count: int, reward: str) -> list[list[Image.Image]]:
    """Check that a reward that compares panels got at least two for each image."""
    panel_images = column_of(panel_images, "panel_images", count, reward)
    for index, panels in enumerate(panel_images):
        if len(panels) < 2:
            raise ValueError(
                f"Image {index} has {len(panels)} panel, but {reward} compares at least two. Use prompts with more "
                "`rows` or `cols`, or leave this reward out."
            )
    return panel_images
