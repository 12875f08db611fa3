# SPDX-License-Identifier: Apache-2.0
"""
Benchmarks of image models, T2IS-Bench and GEdit-Bench: images are generated or found in a folder, scored, and compared.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from ..utils.files import sole_writer
    from .card_results import add_results_to_card, check_card
    from .drawing import adapter_weights_digest, load_system, write_panel_files
    from .edit_drawing import FoundEdits, draw_edits, edit_keys, find_edits
    from .gedit import EditScore, gedit_results, score_edits
    from .image_sets import FoundImages, ImageSet, find_drawn_sets, find_image_sets
    from .leakage import find_leaks
    from .report_markdown import print_report
    from .report_page import save_generation_report
    from .score_store import ScoreStore
    from .scoring import score_aesthetics, score_alignment, score_consistency, score_duplicates
    from .t2is_bench import alignment_means, consistency_means, dimension_score, load_t2is_bench, weighted_average
    from .t2is_comparison import System, t2is_results


# Public name -> module. Importing a module only when one of its names is asked for keeps the metrics free of torch.
_MODULE_OF = {
    "EditScore": ".gedit",
    "FoundEdits": ".edit_drawing",
    "FoundImages": ".image_sets",
    "ImageSet": ".image_sets",
    "ScoreStore": ".score_store",
    "System": ".t2is_comparison",
    "adapter_weights_digest": ".drawing",
    "add_results_to_card": ".card_results",
    "alignment_means": ".t2is_bench",
    "check_card": ".card_results",
    "consistency_means": ".t2is_bench",
    "dimension_score": ".t2is_bench",
    "draw_edits": ".edit_drawing",
    "edit_keys": ".edit_drawing",
    "find_drawn_sets": ".image_sets",
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
    "sole_writer": "..utils.files",
    "t2is_results": ".t2is_comparison",
    "weighted_average": ".t2is_bench",
    "write_panel_files": ".drawing",
}

__all__ = [
    "EditScore",
    "FoundEdits",
    "FoundImages",
    "ImageSet",
    "ScoreStore",
    "System",
    "adapter_weights_digest",
    "add_results_to_card",
    "alignment_means",
    "check_card",
    "consistency_means",
    "dimension_score",
    "draw_edits",
    "edit_keys",
    "find_drawn_sets",
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
    "sole_writer",
    "t2is_results",
    "weighted_average",
    "write_panel_files",
]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paco_trl.image_benchmarks' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
