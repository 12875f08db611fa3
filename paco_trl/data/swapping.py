# SPDX-License-Identifier: Apache-2.0
"""Swap the images of pairs: an augmentation for questions that do not depend on their order."""

import logging
import re
from typing import TYPE_CHECKING, Any

from .pairs import content_text, iter_texts


if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


logger = logging.getLogger(__name__)

# "Answer "Yes" and "No" first": the one "first" that names no image, at the end of every question
_ANSWER_FIRST = re.compile(r"answer\s+[\"'“‘]?yes[\"'”’]?\s+(?:and|or)\s+[\"'“‘]?no[\"'”’]?\s+first", re.IGNORECASE)
# A match by mistake only costs a pair; one that is missed gives a pair a wrong label. The letters only as capitals:
# "image a" is an article
_POSITION = re.compile(
    r"\b(?:first|second|1st|2nd|left|right|former|latter)\b"
    r"|\b(?:original|edited|modified|source|reference|candidate)\s+(?:image|picture|photo|version|one)s?\b"
    r"|\b(?:image|img|picture|photo|(?:sub-?)?figure|panel)s?[\s_#(-]*(?:1|2|one|two|(?-i:[AB]))\b",
    re.IGNORECASE,
)


def swap_pairs(dataset: "Dataset") -> "Dataset":
    """
    Add each pair in the other order, (B, A) after (A, B), so that the judge does not learn it. Not in the paper.

    Pairs whose question or answer depends on the order are not added again: the editing questions, and texts that name
    an image by its place, such as "the second image", "on the left", "Image A" or "the latter". The count is logged.
    Images are not decoded.
    """
    from datasets import concatenate_datasets

    free = [row for row, *texts in iter_texts(dataset) if not any(map(_names_a_position, texts))]
    logger.info(f"Swapped {len(free)} of {len(dataset)} pairs: the others depend on the order of their images.")
    swapped = dataset.with_format("arrow").select(free).map(_swap_images, batched=True, batch_size=100)
    swapped.set_format(**dataset.format)
    return concatenate_datasets([dataset, swapped])


def _names_a_position(turns: Any) -> bool:
    turns = [turns] if isinstance(turns, str) else [content_text(turn["content"]) or "" for turn in turns]
    return any(_POSITION.search(_ANSWER_FIRST.sub("", text)) for text in turns)


def _swap_images(batch: "pa.Table") -> "pa.Table":
    import pyarrow as pa

    images = batch["images"]
    swapped = pa.array([pair[::-1] for pair in images.to_pylist()], type=images.type)
    return batch.set_column(batch.column_names.index("images"), "images", swapped)
