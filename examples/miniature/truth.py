# SPDX-License-Identifier: Apache-2.0
"""What the pictures of the planted world really show, read from their pixels: no reward model has a say in it."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from PIL import Image

from .world import ALL_PANELS, Panel, Wish, draw_all_panels


_READ_AT = 32  # pixels
# Root mean square over pixels, of a range of 1, from the nearest picture of the world. Pictures of two figures that
# differ in one thing lie 0.06 apart and more, those of two scenes 0.15.
MAX_DISTANCE = 0.15


class SetTruth(NamedTuple):
    """
    What a set shows.

    Attributes:
        consistency (`float`):
            Share of the pairs of panels that show the same figure.
        prompt_following (`float`):
            Share of what the prompt asks for (in each panel a shape, a ground and a place, and where it names them a
            colour and an accessory) that is there.
        copies (`float`):
            Share of the pairs of panels that show the same in everything, scene and place too: what consistency alone
            would reward.
        unreadable (`float`):
            Share of the panels that show nothing of the world. In the other shares they count as wrong.
    """

    consistency: float
    prompt_following: float
    copies: float
    unreadable: float


def read_panels(images: Sequence[Image.Image]) -> list[Panel | None]:
    """Reads what panels show: the nearest picture of the world, or `None` where none is near."""
    if not images:
        return []
    size = (_READ_AT, _READ_AT)
    pixels = np.stack([np.asarray(image.convert("RGB").resize(size, Image.Resampling.BOX)) for image in images])
    known = draw_all_panels(_READ_AT).reshape(len(ALL_PANELS), -1).astype(np.float32) / 255  # (972, 3072)
    found = pixels.reshape(len(images), -1).astype(np.float32) / 255  # (N, 3072)
    squares = (found**2).sum(1)[:, None] + (known**2).sum(1) - 2 * found @ known.T  # (N, 972)
    nearest = squares.argmin(1)
    distances = np.sqrt(squares.clip(0).min(1) / found.shape[1])
    return [
        ALL_PANELS[index] if distance <= MAX_DISTANCE else None
        for index, distance in zip(nearest, distances, strict=True)
    ]


def judge_set(panels: Sequence[Panel | None], wishes: Sequence[Wish]) -> SetTruth:
    """Compares what a set shows with itself and with its prompt."""
    pairs = list(combinations(panels, 2))
    same = sum(a is not None and b is not None and a.identity == b.identity for a, b in pairs)
    kept = [
        panel is not None and shown == asked
        for panel, wish in zip(panels, wishes, strict=True)
        for shown, asked in zip(panel or wish, wish, strict=True)
        if asked is not None
    ]
    copies = sum(a is not None and a == b for a, b in pairs)
    unreadable = sum(panel is None for panel in panels)
    return SetTruth(same / len(pairs), sum(kept) / len(kept), copies / len(pairs), unreadable / len(panels))
