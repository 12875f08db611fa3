# SPDX-License-Identifier: Apache-2.0
"""
Evaluate image models on T2IS-Bench and GEdit-Bench: generate images or find them in a directory, score, and compare.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .card_results import add_results_to_card
    from .drawing import load_system
    from .edit_drawing import draw_edits, find_edits
    from .gedit import EditScore, gedit_results, score_edits
    from .image_sets import find_image_sets
    from .leakage import find_leaks
    from .report_markdown import print_report
    from .report_page import save_generation_report
    from .scoring import score_aesthetics, score_alignment, score_consistency, score_duplicates
    from .t2is_bench import alignment_means, consistency_means, load_t2is_bench
    from .t2is_comparison import System, t2is_results


# Public name -> module, which is imported when the name is used: the metrics come without torch
_MODULE_OF = {
    "EditScore": ".gedit",
    "System": ".t2is_comparison",
    "add_results_to_card": ".card_results",
    "alignment_means": ".t2is_bench",
    "consistency_means": ".t2is_bench",
    "draw_edits": ".edit_drawing",
    "find_edits": ".edit_drawing",
    "find_image_sets": ".image_sets",
    "find_leaks": ".leakage",
    "gedit_results": ".gedit",
    "load_system": ".drawing",
    "load_t2is_bench": ".t2is_bench",
    "print_report": ".report_markdown",
    "save_generation_report": ".report_page",
    "score_aesthetics": ".scoring",
    "score_alignment": ".scoring",
    "score_consistency": ".scoring",
    "score_duplicates": ".scoring",
    "score_edits": ".gedit",
    "t2is_results": ".t2is_comparison",
}

__all__ = [
    "EditScore",
    "System",
    "add_results_to_card",
    "alignment_means",
    "consistency_means",
    "draw_edits",
    "find_edits",
    "find_image_sets",
    "find_leaks",
    "gedit_results",
    "load_system",
    "load_t2is_bench",
    "print_report",
    "save_generation_report",
    "score_aesthetics",
    "score_alignment",
    "score_consistency",
    "score_duplicates",
    "score_edits",
    "t2is_results",
]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paco_trl.image_benchmarks' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
