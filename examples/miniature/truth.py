# SPDX-License-Identifier: Apache-2.0
"""Read what an image of the planted world really shows from its pixels, without any reward model."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from PIL import Image

from .world import ALL_PANELS, Panel, PromptSpec, draw_all_panels


_READ_AT = 32  # pixels
# Root mean square over pixels in [0, 1] to the nearest image of the world. Images of two figures that differ in one
# property are at least 0.06 apart, those of two scenes 0.15.
MAX_DISTANCE = 0.15


class SetTruth(NamedTuple):
    """What a set shows, as fractions; an unreadable panel counts as wrong in the first three."""

    consistency: float  # pairs of panels that show the same figure
    prompt_following: float  # properties named in the prompt that are there
    copies: float  # pairs of panels that are identical, scene and place too: what consistency alone would reward
    unreadable: float  # panels that show nothing of the world


def read_panels(images: Sequence[Image.Image], known: tuple[Panel, ...] = ALL_PANELS) -> list[Panel | None]:
    """Return the nearest panel of the world for each image, or `None` if none is near."""
    if not images:
        return []
    size = (_READ_AT, _READ_AT)
    pixels = np.stack([np.asarray(image.convert("RGB").resize(size, Image.Resampling.BOX)) for image in images])
    drawn = draw_all_panels(_READ_AT, known).reshape(len(known), -1).astype(np.float32) / 255  # (M, 3072)
    found = pixels.reshape(len(images), -1).astype(np.float32) / 255  # (N, 3072)
    squares = (found**2).sum(1)[:, None] + (drawn**2).sum(1) - 2 * found @ drawn.T  # (N, M)
    nearest = squares.argmin(1)
    distances = np.sqrt(squares.clip(0).min(1) / found.shape[1])
    return [
        known[index] if distance <= MAX_DISTANCE else None for index, distance in zip(nearest, distances, strict=True)
    ]


def judge_set(panels: Sequence[Panel | None], specs: Sequence[PromptSpec]) -> SetTruth:
    """Measure the consistency of a set and how it follows its prompt."""
    pairs = list(combinations(panels, 2))
    same = sum(a is not None and b is not None and a.identity == b.identity for a, b in pairs)
    kept = [
        panel is not None and shown == asked
        for panel, spec in zip(panels, specs, strict=True)
        for shown, asked in zip(panel or spec, spec, strict=True)
        if asked is not None
    ]
    copies = sum(a is not None and a == b for a, b in pairs)
    unreadable = sum(panel is None for panel in panels)
    return SetTruth(same / len(pairs), sum(kept) / len(kept), copies / len(pairs), unreadable / len(panels))
