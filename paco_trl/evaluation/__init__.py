# SPDX-License-Identifier: Apache-2.0
"""
Evaluation of judges against human preferences, and of models trained at a reduced resolution.

A scorer is any object with `score(images, prompts) -> list[float]` and a `name` (str), for example
[`~paco_trl.PaCoReward`] or the baseline [`ClipIScorer`]. `images` is a list of `(first, second)` pairs of PIL images,
`prompts` has one question per pair, and a higher score means more consistent. `ScorerTraits` in
`evaluation/scoring.py` lists the attributes that a scorer may also have.
"""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


if TYPE_CHECKING:
    from ..rewards.clip import ClipIScorer
    from ..utils.statistics import bootstrap_interval
    from .aesthetics import AestheticScorer
    from .comparing_judge import ComparingJudge
    from .grid_artifacts import grid_artifact_score
    from .judge_benchmarks import load_rankings
    from .judge_report import published_tables, report_tables, save_report
    from .labeled_pairs import evaluate_pairs
    from .metrics import (
        auroc,
        calibration_bins,
        expected_calibration_error,
        list_order_metrics,
        ranking_metrics,
    )
    from .ranking_benchmark import evaluate_rankings

__all__ = [
    "AestheticScorer", "ClipIScorer", "ComparingJudge", "auroc", "bootstrap_interval", "calibration_bins",
    "evaluate_pairs", "evaluate_rankings", "expected_calibration_error", "grid_artifact_score", "list_order_metrics",
    "load_rankings", "published_tables", "ranking_metrics", "report_tables", "save_report",
]  # fmt: skip

# Lazy, so that the metrics do not import torch
__getattr__, __dir__ = lazy_imports(__name__, __file__)
