# SPDX-License-Identifier: Apache-2.0
"""Sample sheets: an image with some prompts and grids, pairs or rankings of a stage."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from datasets import Dataset
from PIL import Image

from ..data.columns import column_by_id
from ..data.pairs import content_text, decision_of
from ..data.questions import theme_question


# Most images per row, besides the reference
_MAX_IMAGES = 8


def _evenly_spaced(items: Sequence[int], count: int) -> list[int]:
    """Select items at equal distances, since neighbors are often alike."""
    count = min(len(items), count)
    return [items[index * len(items) // count] for index in range(count)]


def grids_sheet(grids: Dataset, prompts: Dataset, path: str | Path, max_prompts: int = 6) -> None:
    """Show some prompts, one per row, with the grids of the first eight seeds."""
    rows_by_prompt: dict[str, list[int]] = {}
    for row, prompt_id in enumerate(grids["prompt_id"][:]):
        rows_by_prompt.setdefault(prompt_id, []).append(row)
    texts = column_by_id(prompts, "prompt")
    names = list(rows_by_prompt)
    rows = []
    for index in _evenly_spaced(range(len(names)), max_prompts):
        selected_rows = grids.select(rows_by_prompt[names[index]][:_MAX_IMAGES])
        rows.append((texts[names[index]], [[(row["image"], f"seed {row['seed']}") for row in selected_rows]]))
    _save(rows, path)


def pairs_sheet(pairs: Dataset, path: str | Path, max_rows: int = 5) -> None:
    """Show some pairs: consistent pairs on the left, inconsistent pairs on the right."""
    labels = [decision_of(completion) for completion in pairs.with_format(None)["completion"][:]]
    by_label = ([row for row, label_of_row in enumerate(labels) if label_of_row == label] for label in ("Yes", "No"))
    rows = []
    (prefix, suffix) = theme_question("\0").split("\0")
    for row_indices in zip_longest(*(_evenly_spaced(label_rows, max_rows) for label_rows in by_label)):
        selected_rows = [pairs[row_index] for row_index in row_indices if row_index is not None]
        captions = [
            "consistent" if decision_of(pair["completion"]) == "Yes" else "inconsistent" for pair in selected_rows
        ]
        questions = [content_text(pair["prompt"][-1]["content"]) or "" for pair in selected_rows]
        titles = [question.removeprefix(prefix).removesuffix(suffix) for question in questions]
        blocks = [
            [(image, caption) for image in pair["images"]]
            for pair, caption in zip(selected_rows, captions, strict=True)
        ]
        rows.append((" / ".join(dict.fromkeys(titles)), blocks))
    _save(rows, path)


def rankings_sheet(rankings: Dataset, path: str | Path, max_rows: int = 4) -> None:
    """Show some rankings: the reference on the left, then the candidates, the most consistent first."""
    rows = []
    for row_index in _evenly_spaced(range(len(rankings)), max_rows):
        row = rankings[row_index]
        order = row["ranking"][:_MAX_IMAGES]
        candidates = [(row["candidates"][index], f"rank {rank}") for rank, index in enumerate(order, start=1)]
        rows.append((row.get("theme") or row["prompt"], [[(row["reference"], "reference")], candidates]))
    _save(rows, path)


def _save(rows: list[tuple[str, list[list[tuple[Image.Image, str]]]]], path: str | Path) -> None:
    from .contact_sheet import render_sheet

    render_sheet(rows).save(path)
