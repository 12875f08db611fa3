# SPDX-License-Identifier: Apache-2.0
"""
Evaluate judges: how well do the scores of image pairs agree with people? And models trained at a reduced resolution: do
their scores carry over to the inference resolution, and do their images show a grid?

A scorer is any object with `score(images, prompts) -> list[float]` and a `name` (str): `images` is a list of
`(first, second)` pairs of PIL images, `prompts` has one question per pair, and a higher score means more consistent.
[`~paco_trl.PaCoReward`] is one; [`ClipIScorer`] and [`DreamSimScorer`] are baselines to compare it with.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from ..rewards.baselines import ClipIScorer, DreamSimScorer
    from ..utils.statistics import bootstrap_interval
    from .aesthetics import AestheticScorer
    from .binary import auroc, calibration_bins, expected_calibration_error
    from .edit_reward import evaluate_edit_reward
    from .grid_artifacts import grid_artifact_score
    from .published import published_tables
    from .ranking import list_order_metrics, ranking_metrics
    from .ranking_benchmark import evaluate_rankings
    from .report import report_tables, save_report
    from .transfer import resolution_transfer


# Public name -> module. Importing a module only when one of its names is asked for keeps the metrics free of torch.
_MODULE_OF = {
    "AestheticScorer": ".aesthetics",
    "ClipIScorer": "..rewards.baselines",
    "DreamSimScorer": "..rewards.baselines",
    "auroc": ".binary",
    "bootstrap_interval": "..utils.statistics",
    "calibration_bins": ".binary",
    "evaluate_edit_reward": ".edit_reward",
    "evaluate_rankings": ".ranking_benchmark",
    "expected_calibration_error": ".binary",
    "grid_artifact_score": ".grid_artifacts",
    "list_order_metrics": ".ranking",
    "published_tables": ".published",
    "ranking_metrics": ".ranking",
    "report_tables": ".report",
    "resolution_transfer": ".transfer",
    "save_report": ".report",
}

__all__ = [
    "AestheticScorer",
    "ClipIScorer",
    "DreamSimScorer",
    "auroc",
    "bootstrap_interval",
    "calibration_bins",
    "evaluate_edit_reward",
    "evaluate_rankings",
    "expected_calibration_error",
    "grid_artifact_score",
    "list_order_metrics",
    "published_tables",
    "ranking_metrics",
    "report_tables",
    "resolution_transfer",
    "save_report",
]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paco_trl.evaluation' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
