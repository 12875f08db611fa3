# SPDX-License-Identifier: Apache-2.0
"""
Data of PaCo-RL: image-set prompts (parse, convert, check, load) and the grid images that they ask for; pairs of images,
their questions and answers; rankings.
"""

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
from .paco_dataset import load_paco_dataset
from .pairs import check_pair_columns, decision_of, is_label_only, make_pair, validate_pairs
from .questions import (
    criterion_question,
    edit_consistency_question,
    edit_following_question,
    plain_question,
    theme_question,
)
from .rankings import check_ranking_columns, load_consistency_rank, rankings_to_pairs
from .swapping import swap_pairs


__all__ = [
    "ImageSetPrompt",
    "check_image_set_columns",
    "check_pair_columns",
    "check_ranking_columns",
    "convert_t2is",
    "criteria_dict",
    "criterion_question",
    "decision_of",
    "demo_prompts_path",
    "edit_consistency_question",
    "edit_following_question",
    "is_label_only",
    "join_grid",
    "load_consistency_rank",
    "load_image_set_prompts",
    "load_paco_dataset",
    "make_pair",
    "panel_size",
    "parse_image_set_prompt",
    "plain_question",
    "rankings_to_pairs",
    "split_grid",
    "swap_pairs",
    "theme_question",
    "validate_pairs",
]
