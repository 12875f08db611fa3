# SPDX-License-Identifier: Apache-2.0
"""
Evaluation of image models on T2IS-Bench, GEdit-Bench and your own prompts: find or generate images, score them, and
compare systems.
"""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


if TYPE_CHECKING:
    from .comparison_app import serve_comparison
    from .gedit import EditScore, gedit_results, score_edits
    from .leakage import find_leaks
    from .paired_results import System
    from .report import add_results_to_card, print_report, save_generation_report
    from .system_images import find_edits, find_image_sets
    from .t2is_bench import (
        load_t2is_bench,
        score_aesthetics,
        score_alignment,
        score_consistency,
        score_duplicates,
    )
    from .t2is_summary import t2is_results

__all__ = [
    "EditScore", "System", "add_results_to_card", "find_edits",
    "find_image_sets", "find_leaks", "gedit_results", "load_t2is_bench",
    "print_report", "save_generation_report", "score_aesthetics", "score_alignment", "score_consistency",
    "score_duplicates", "score_edits", "serve_comparison", "t2is_results",
]  # fmt: skip

# Lazy, so that the metrics do not import torch
__getattr__, __dir__ = lazy_imports(__name__, __file__)
