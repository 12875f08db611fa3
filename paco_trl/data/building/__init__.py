# SPDX-License-Identifier: Apache-2.0
"""
Build a dataset of consistency, the paper's first part (https://arxiv.org/abs/2512.04784, Sec. 3.1): prompts, grids,
panels, rankings, pairs, reasons, the Hub. A module for each step; `examples/build_dataset.py` has a command for each.
"""

from .agreement import agreement_report, count_agreement, kendalls_w, untrusted_annotators
from .annotations import (
    Annotation,
    annotation_files,
    append_annotation,
    export_annotations,
    export_tasks,
    import_annotations,
    ranks_of_ranking,
    read_annotations,
)
from .annotators import judge_annotator_name, rank_automatically, rank_with_judge
from .build_pairs import build_pairs
from .draw_grids import draw_grids, load_pipeline
from .pair_panels import cut_panels, instances_to_rankings, make_instances
from .stage_folder import StageFolder, digest
from .voting import majority_vote


__all__ = [
    "Annotation",
    "StageFolder",
    "agreement_report",
    "annotation_files",
    "append_annotation",
    "build_pairs",
    "count_agreement",
    "cut_panels",
    "digest",
    "draw_grids",
    "export_annotations",
    "export_tasks",
    "import_annotations",
    "instances_to_rankings",
    "judge_annotator_name",
    "kendalls_w",
    "load_pipeline",
    "majority_vote",
    "make_instances",
    "rank_automatically",
    "rank_with_judge",
    "ranks_of_ranking",
    "read_annotations",
    "untrusted_annotators",
]
