# SPDX-License-Identifier: Apache-2.0
"""Compute training sizes from inference sizes (resolution-decoupled training)."""

import math


def check_inference_size(height: int, width: int, rows: int, cols: int, multiple: int, where: str) -> None:
    """Raise a `ValueError` for a size that the pipeline or the panels would have to crop or resize."""
    for name, size, count, unit in (("height", height, rows, "rows"), ("width", width, cols, "columns")):
        step = math.lcm(multiple, count)
        if size <= 0 or size % step != 0:
            below = max(size // step, 1) * step
            raise ValueError(
                f"The {name} of {where} is {size}: it must be a multiple of {multiple} (required by the pipeline) and of "
                f"{count} ({unit} of panels), so of {step}. Nearest values that work: {below} or {below + step}."
            )


def training_size(
    height: int, width: int, rows: int, cols: int, resolution_scale: float, multiple: int
) -> tuple[int, int]:
    """Return height and width for training: inference size times `resolution_scale`, rounded to the grid."""

    def scale(size: int, count: int) -> int:
        step = math.lcm(multiple, count)
        return max(1, round(size * resolution_scale / step)) * step

    return scale(height, rows), scale(width, cols)
