# SPDX-License-Identifier: Apache-2.0
"""Checks of the columns that a reward is called with."""

from typing import Any


PanelImages = list[list[Any]]  # the panels of each completion, as PIL images


def require_column(column: list | None, name: str, count: int, reward: str) -> list:
    """Check that a reward's column is present, with one entry per image, and return it."""
    if column is None:
        remedy = "Add it to the dataset."
        if name == "panel_images":
            remedy = "The trainer adds it; in your own code use `paco_trl.data.split_grid`."
        raise ValueError(f"{reward} requires the column `{name}`, which is missing. {remedy}")
    if len(column) != count:
        raise ValueError(f"`{name}` has {len(column)} entries for {count} images. Pass one per image.")
    return column


def require_panels(panel_images: PanelImages | None, count: int, reward: str) -> PanelImages:
    """Check that a reward that compares panels gets at least two per image, and return them."""
    panel_images = require_column(panel_images, "panel_images", count, reward)
    for index, panels in enumerate(panel_images):
        if len(panels) < 2:
            raise ValueError(f"Image {index} has {len(panels)} panel, but {reward} compares several. Leave it out.")
    return panel_images
