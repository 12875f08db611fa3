# SPDX-License-Identifier: Apache-2.0
"""Sizes of the images that a dataset asks for, checked row by row."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from datasets import Dataset

from ..data import panel_size
from .resolution import check_inference_size, training_size


if TYPE_CHECKING:
    from .paco_grpo_config import PaCoGRPOConfig


def check_panel_sizes(dataset: Dataset, args: "PaCoGRPOConfig", where: str) -> None:
    """
    Checks that the panels divide the images; needs no model.

    Args:
        dataset ([`~datasets.Dataset`]):
            Image-set prompts.
        args ([`PaCoGRPOConfig`]):
            Settings, for rows without a size.
        where (`str`):
            What the dataset is, for the message.

    Raises:
        ValueError: with the row.
    """
    for index, (rows, cols, height, width) in enumerate(_layouts_and_sizes(dataset, args)):
        try:
            panel_size(height, width, rows, cols)
        except ValueError as error:
            raise ValueError(f"Row {index} of {where}: {error}") from error


def check_sizes(dataset: Dataset, args: "PaCoGRPOConfig", multiple: int, where: str) -> set[tuple[int, int]]:
    """
    Checks the sizes against the pipeline's needs.

    Args:
        dataset ([`~datasets.Dataset`]):
            Image-set prompts.
        args ([`PaCoGRPOConfig`]):
            Settings.
        multiple (`int`):
            What the pipeline needs sizes to be a multiple of.
        where (`str`):
            What the dataset is, for the message.

    Returns:
        `set[tuple[int, int]]`: the training sizes.

    Raises:
        ValueError: with the row and the nearest sizes that work.
    """
    sizes = set()
    for index, (rows, cols, height, width) in enumerate(_layouts_and_sizes(dataset, args)):
        check_inference_size(height, width, rows, cols, multiple, f"row {index} of {where}")
        sizes.add(training_size(height, width, rows, cols, args.resolution_scale, multiple))
    return sizes


def _layouts_and_sizes(dataset: Dataset, args: "PaCoGRPOConfig") -> Iterator[tuple[int, int, int, int]]:
    columns = dataset.column_names
    heights = dataset["height"] if "height" in columns else [None] * len(dataset)
    widths = dataset["width"] if "width" in columns else [None] * len(dataset)
    for rows, cols, height, width in zip(dataset["rows"], dataset["cols"], heights, widths, strict=True):
        yield rows, cols, height or args.height, width or args.width
