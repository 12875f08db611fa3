# SPDX-License-Identifier: Apache-2.0
"""Building of a dataset of consistent and inconsistent pairs (Sec. 3.1 of the paper), with one module per stage."""

from ..generation import generate_grids
from ..utils.chat import ChatEndpoint, EndpointUnavailableError
from ..utils.stage_folder import StageFolder
from .annotations import (
    Annotation,
    agreement_report,
    annotation_files,
    annotator_kinds,
    append_annotation,
    ranks_of_ranking,
    read_annotations,
)
from .diversify import diversify_prompts
from .pair_building import build_pairs
from .panels import cut_panels, make_instances
from .prompt_writing import CATEGORIES, DIMENSIONS, write_prompts
from .publish import publish_dataset
from .rank import judge_annotator_name, rank_automatically, rank_with_judge
from .reasons import VISIBLE_ATTRIBUTES, write_reasons


__all__ = [
    "CATEGORIES", "DIMENSIONS", "VISIBLE_ATTRIBUTES", "Annotation", "ChatEndpoint", "EndpointUnavailableError",
    "StageFolder", "agreement_report", "annotation_files", "annotator_kinds", "append_annotation", "build_pairs",
    "cut_panels", "diversify_prompts", "generate_grids", "judge_annotator_name",
    "make_instances", "publish_dataset", "rank_automatically", "rank_with_judge", "ranks_of_ranking",
    "read_annotations", "write_prompts", "write_reasons",
]  # fmt: skip
