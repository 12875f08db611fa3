# SPDX-License-Identifier: Apache-2.0
"""Compute training sizes from inference sizes (resolution-decoupled training)."""

import math


# A multiple that suits every known pipeline, and autoencoders that compress 32 times. It is proposed before the
# pipeline is loaded.
_ANY_MULTIPLE = 32


def check_inference_size(height: int, width: int, rows: int, cols: int, multiple: int | None, where: str) -> None:
    """
    Raise a `ValueError` for a size that is no `multiple` of the pipeline's pixels (`None` if it is not known yet), or
    that the panels do not divide.
    """
    for name, size, count, unit in (("height", height, rows, "rows"), ("width", width, cols, "columns")):
        if size > 0 and size % math.lcm(multiple or 1, count) == 0:
            continue
        step = math.lcm(multiple or _ANY_MULTIPLE, count)
        below = max(size // step, 1) * step
        needed = f"{multiple} (required by the pipeline)"
        if multiple is None:
            needed = f"{count} ({unit} of panels) and of what the pipeline requires, at most {_ANY_MULTIPLE}"
        elif step != multiple:
            needed += f" and of {count} ({unit} of panels), so of {step}"
        raise ValueError(
            f"The {name} of {where} is {size}: it must be a multiple of {needed}. Nearest values that work: {below} "
            f"or {below + step}."
        )


def training_size(
    height: int, width: int, rows: int, cols: int, resolution_scale: float, multiple: int
) -> tuple[int, int]:
    """Return height and width for training: inference size times `resolution_scale`, rounded to the grid."""

    def scale(size: int, count: int) -> int:
        step = math.lcm(multiple, count)
        return max(1, round(size * resolution_scale / step)) * step

    return scale(height, rows), scale(width, cols)
