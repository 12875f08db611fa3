# SPDX-License-Identifier: Apache-2.0
"""Resolution-decoupled training: the size an image is trained at, from the size it is made for."""

import math


def check_inference_size(height: int, width: int, rows: int, cols: int, multiple: int, where: str) -> None:
    """
    Refuses a size that the pipeline or the panels would have to crop or resize.

    Args:
        height (`int`), width (`int`):
            Inference size in pixels.
        rows (`int`), cols (`int`):
            Layout of the panels.
        multiple (`int`):
            What the pipeline needs sizes to be a multiple of.
        where (`str`):
            What the size belongs to, for the message ("row 3 of the dataset").

    Raises:
        ValueError: with the nearest sizes that work.
    """
    for name, size, count, unit in (("height", height, rows, "rows"), ("width", width, cols, "columns")):
        step = math.lcm(multiple, count)
        if size <= 0 or size % step != 0:
            below = max(size // step, 1) * step
            raise ValueError(
                f"The {name} of {where} is {size}: it must be a multiple of {multiple} (the pipeline's need) and of "
                f"{count} ({unit} of panels), so of {step}. Nearest values that work: {below} or {below + step}."
            )


def training_size(
    height: int, width: int, rows: int, cols: int, resolution_scale: float, multiple: int
) -> tuple[int, int]:
    """
    Size at which an image is drawn, scored and trained (resolution-decoupled training, Part 3).

    The inference size times `resolution_scale`, each side rounded to the nearest multiple of what the pipeline and the
    panels need.

    Args:
        height (`int`), width (`int`):
            Inference size in pixels.
        rows (`int`), cols (`int`):
            Layout of the panels.
        resolution_scale (`float`):
            Factor per side.
        multiple (`int`):
            What the pipeline needs sizes to be a multiple of.

    Returns:
        `tuple[int, int]`: height and width in pixels.
    """

    def scale(size: int, count: int) -> int:
        step = math.lcm(multiple, count)
        return max(1, round(size * resolution_scale / step)) * step

    return scale(height, rows), scale(width, cols)
