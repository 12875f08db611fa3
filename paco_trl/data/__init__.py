# SPDX-License-Identifier: Apache-2.0
"""Loading, checks and conversion of data: image-set prompts, editing prompts, pairs with questions, and rankings."""

from .columns import criteria_dict
from .edit_prompts import check_edit_columns, convert_gedit_bench, exclude_benchmark_images, load_edit_prompts
from .grid_prompts import ImageSetPrompt, find_truncated_panels, format_image_set_prompt, parse_image_set_prompt
from .grids import join_grid, panel_size, split_grid
from .image_sets import check_image_set_columns, check_image_set_rows, demo_prompts_path, load_image_set_prompts
from .paco_dataset import load_paco_dataset
from .pairs import check_pair_columns, decision_of, is_label_only, make_pair, swap_pairs, validate_pairs
from .questions import (
    criterion_question,
    edit_consistency_question,
    edit_following_question,
    plain_question,
    shows_question,
    t2is_bench_question,
    theme_question,
)
from .rankings import check_ranking_columns, load_consistency_rank, rankings_to_pairs
from .source_images import SourceImages, has_source_images
from .stories import load_stories
from .t2is import convert_t2is, convert_t2is_row


__all__ = [
    "ImageSetPrompt",
    "SourceImages",
    "check_edit_columns",
    "check_image_set_columns",
    "check_image_set_rows",
    "check_pair_columns",
    "check_ranking_columns",
    "convert_gedit_bench",
    "convert_t2is",
    "convert_t2is_row",
    "criteria_dict",
    "criterion_question",
    "decision_of",
    "demo_prompts_path",
    "edit_consistency_question",
    "edit_following_question",
    "exclude_benchmark_images",
    "find_truncated_panels",
    "format_image_set_prompt",
    "has_source_images",
    "is_label_only",
    "join_grid",
    "load_consistency_rank",
    "load_edit_prompts",
    "load_image_set_prompts",
    "load_paco_dataset",
    "load_stories",
    "make_pair",
    "panel_size",
    "parse_image_set_prompt",
    "plain_question",
    "rankings_to_pairs",
    "shows_question",
    "split_grid",
    "swap_pairs",
    "t2is_bench_question",
    "theme_question",
    "validate_pairs",
]  # fmt: skip
