# SPDX-License-Identifier: Apache-2.0
"""Data of PaCo-RL: image-set prompts (parse, convert, check, load) and the grid images that they ask for."""

from .grids import join_grid, panel_size, split_grid
from .image_sets import (
    ImageSetPrompt,
    check_image_set_columns,
    convert_t2is,
    criteria_dict,
    demo_prompts_path,
    load_image_set_prompts,
    parse_image_set_prompt,
)


__all__ = [
    "ImageSetPrompt",
    "check_image_set_columns",
    "convert_t2is",
    "criteria_dict",
    "demo_prompts_path",
    "join_grid",
    "load_image_set_prompts",
    "panel_size",
    "parse_image_set_prompt",
    "split_grid",
]
