# SPDX-License-Identifier: Apache-2.0
"""
Build a dataset of consistency, the paper's first part (https://arxiv.org/abs/2512.04784, Sec. 3.1): prompts, grids,
panels, rankings, pairs, reasons, the Hub. A module for each step; `examples/build_dataset.py` has a command for each.
"""

from ..utils.chat import ChatEndpoint, ChatRequest, EndpointUnavailableError, Reply
from ..utils.files import digest
from ..utils.generation import load_pipeline
from ..utils.stage_folder import StageFolder
from .agreement import agreement_report, count_agreement, kendalls_w, untrusted_annotators
from .annotations import (
    Annotation,
    annotation_files,
    append_annotation,
    export_annotations,
    export_label_studio,
    export_tasks,
    import_annotations,
    ranks_of_ranking,
    read_annotations,
)
from .annotators import annotator_kinds, judge_annotator_name, rank_automatically, rank_with_judge
from .build_pairs import build_pairs
from .categories import CATEGORIES, DIMENSIONS, Category
from .dataset_card import dataset_card, pairs_sheet, rankings_sheet
from .diversify import Diversified, diversify, diversify_prompts
from .draw_grids import draw_grids
from .pair_panels import cut_panels, instances_to_rankings, make_instances
from .publish import publish_dataset
from .sample_sheet import grids_sheet, instances_sheet
from .text_embeddings import embed_texts
from .voting import majority_vote
from .write_prompts import write_prompts
from .write_reasons import VISIBLE_ATTRIBUTES, check_reasons, write_reasons


__all__ = [
    "CATEGORIES",
    "DIMENSIONS",
    "VISIBLE_ATTRIBUTES",
    "Annotation",
    "Category",
    "ChatEndpoint",
    "ChatRequest",
    "Diversified",
    "EndpointUnavailableError",
    "Reply",
    "StageFolder",
    "agreement_report",
    "annotation_files",
    "annotator_kinds",
    "append_annotation",
    "build_pairs",
    "check_reasons",
    "count_agreement",
    "cut_panels",
    "dataset_card",
    "digest",
    "diversify",
    "diversify_prompts",
    "draw_grids",
    "embed_texts",
    "export_annotations",
    "export_label_studio",
    "export_tasks",
    "grids_sheet",
    "import_annotations",
    "instances_sheet",
    "instances_to_rankings",
    "judge_annotator_name",
    "kendalls_w",
    "load_pipeline",
    "majority_vote",
    "make_instances",
    "pairs_sheet",
    "publish_dataset",
    "rank_automatically",
    "rank_with_judge",
    "rankings_sheet",
    "ranks_of_ranking",
    "read_annotations",
    "untrusted_annotators",
    "write_prompts",
    "write_reasons",
]
