# SPDX-License-Identifier: Apache-2.0
"""
Evaluation of image models, on T2IS-Bench and GEdit-Bench: pictures are drawn or found in a folder, scored, and compared.

Evaluation of judges: how well do the scores of image pairs agree with people? And of a model trained at a reduced
resolution: do its scores carry over to the inference resolution, and does it leave a grid in its images?

A scorer is any object with `score(images, prompts) -> list[float]` and a `name` (str): `images` is a list of
`(first, second)` pairs of PIL images, `prompts` has one question per pair, and a higher score means more consistent.
[`~paco_trl.PaCoReward`] is one; [`ClipIScorer`] and [`DreamSimScorer`] are baselines to compare it with.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .aesthetics import AestheticScorer
    from .baselines import ClipIScorer, DreamSimScorer
    from .binary import auroc, calibration_bins, expected_calibration_error
    from .bootstrap import bootstrap_interval
    from .edit_reward import evaluate_edit_reward
    from .generation.card_results import add_results_to_card, check_card
    from .generation.drawing import adapter_weights_digest, load_system, write_panel_files
    from .generation.edit_drawing import FoundEdits, draw_edits, edit_keys, find_edits
    from .generation.gedit import EditScore, gedit_results, score_edits
    from .generation.image_sets import FoundImages, ImageSet, find_drawn_sets, find_image_sets
    from .generation.leakage import find_leaks
    from .generation.report_markdown import print_report
    from .generation.report_page import save_generation_report
    from .generation.score_store import ScoreStore, sole_writer
    from .generation.scoring import score_aesthetics, score_alignment, score_consistency, score_duplicates
    from .generation.t2is_bench import (
        alignment_means,
        consistency_means,
        dimension_score,
        load_t2is_bench,
        weighted_average,
    )
    from .generation.t2is_results import System, t2is_results
    from .grid_artifacts import grid_artifact_score
    from .published import published_tables
    from .ranking import list_order_metrics, ranking_metrics
    from .ranking_benchmark import evaluate_rankings
    from .report import report_tables, save_report
    from .transfer import resolution_transfer


# Public name -> module. Importing a module only when one of its names is asked for keeps the metrics free of torch.
_MODULE_OF = {
    "AestheticScorer": ".aesthetics",
    "ClipIScorer": ".baselines",
    "DreamSimScorer": ".baselines",
    "EditScore": ".generation.gedit",
    "FoundEdits": ".generation.edit_drawing",
    "FoundImages": ".generation.image_sets",
    "ImageSet": ".generation.image_sets",
    "ScoreStore": ".generation.score_store",
    "System": ".generation.t2is_results",
    "adapter_weights_digest": ".generation.drawing",
    "add_results_to_card": ".generation.card_results",
    "alignment_means": ".generation.t2is_bench",
    "auroc": ".binary",
    "bootstrap_interval": ".bootstrap",
    "calibration_bins": ".binary",
    "check_card": ".generation.card_results",
    "consistency_means": ".generation.t2is_bench",
    "dimension_score": ".generation.t2is_bench",
    "draw_edits": ".generation.edit_drawing",
    "edit_keys": ".generation.edit_drawing",
    "evaluate_edit_reward": ".edit_reward",
    "evaluate_rankings": ".ranking_benchmark",
    "expected_calibration_error": ".binary",
    "find_drawn_sets": ".generation.image_sets",
    "find_edits": ".generation.edit_drawing",
    "find_image_sets": ".generation.image_sets",
    "find_leaks": ".generation.leakage",
    "gedit_results": ".generation.gedit",
    "grid_artifact_score": ".grid_artifacts",
    "list_order_metrics": ".ranking",
    "load_system": ".generation.drawing",
    "load_t2is_bench": ".generation.t2is_bench",
    "print_report": ".generation.report_markdown",
    "published_tables": ".published",
    "ranking_metrics": ".ranking",
    "report_tables": ".report",
    "resolution_transfer": ".transfer",
    "save_generation_report": ".generation.report_page",
    "save_report": ".report",
    "score_aesthetics": ".generation.scoring",
    "score_alignment": ".generation.scoring",
    "score_consistency": ".generation.scoring",
    "score_duplicates": ".generation.scoring",
    "score_edits": ".generation.gedit",
    "sole_writer": ".generation.score_store",
    "t2is_results": ".generation.t2is_results",
    "weighted_average": ".generation.t2is_bench",
    "write_panel_files": ".generation.drawing",
}

__all__ = [
    "AestheticScorer",
    "ClipIScorer",
    "DreamSimScorer",
    "EditScore",
    "FoundEdits",
    "FoundImages",
    "ImageSet",
    "ScoreStore",
    "System",
    "adapter_weights_digest",
    "add_results_to_card",
    "alignment_means",
    "auroc",
    "bootstrap_interval",
    "calibration_bins",
    "check_card",
    "consistency_means",
    "dimension_score",
    "draw_edits",
    "edit_keys",
    "evaluate_edit_reward",
    "evaluate_rankings",
    "expected_calibration_error",
    "find_drawn_sets",
    "find_edits",
    "find_image_sets",
    "find_leaks",
    "gedit_results",
    "grid_artifact_score",
    "list_order_metrics",
    "load_system",
    "load_t2is_bench",
    "print_report",
    "published_tables",
    "ranking_metrics",
    "report_tables",
    "resolution_transfer",
    "save_generation_report",
    "save_report",
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
        raise AttributeError(f"module 'paco_trl.evaluation' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
