# SPDX-License-Identifier: Apache-2.0
"""Sample sheets: one image with some of the prompts and grids, pairs or rankings of a stage."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from datasets import Dataset
from PIL import Image

from ..data.columns import column_by_id
from ..data.pairs import content_text, decision_of
from ..data.questions import theme_question


# Images of a row at most, without the reference
_MAX_IMAGES = 8


def _evenly_spaced(items: Sequence[int], chosen: int) -> list[int]:
    """Choose some items at equal distances, from the first: neighbors are often alike."""
    chosen = min(len(items), chosen)
    return [items[index * len(items) // chosen] for index in range(chosen)]


def grids_sheet(grids: Dataset, prompts: Dataset, path: str | Path, max_prompts: int = 6) -> None:
    """Show some prompts with their grids, a row each with the first eight seeds."""
    rows_by_prompt: dict[str, list[int]] = {}
    for row, prompt_id in enumerate(grids["prompt_id"][:]):
        rows_by_prompt.setdefault(prompt_id, []).append(row)
    texts, names = column_by_id(prompts, "prompt"), list(rows_by_prompt)
    rows = []
    for index in _evenly_spaced(range(len(names)), max_prompts):
        shown = grids.select(rows_by_prompt[names[index]][:_MAX_IMAGES])
        rows.append((texts[names[index]], [[(row["image"], f"seed {row['seed']}") for row in shown]]))
    _save(rows, path)


def pairs_sheet(pairs: Dataset, path: str | Path, max_rows: int = 5) -> None:
    """Show some pairs: consistent ones at the left, inconsistent ones at the right."""
    labels = [decision_of(completion) for completion in pairs.with_format(None)["completion"][:]]
    by_label = ([row for row, label_of_row in enumerate(labels) if label_of_row == label] for label in ("Yes", "No"))
    rows, (before, after) = [], theme_question("\0").split("\0")
    for row_numbers in zip_longest(*(_evenly_spaced(of_label, max_rows) for of_label in by_label)):
        shown = [pairs[row_number] for row_number in row_numbers if row_number is not None]
        captions = ["consistent" if decision_of(pair["completion"]) == "Yes" else "inconsistent" for pair in shown]
        questions = [content_text(pair["prompt"][-1]["content"]) or "" for pair in shown]
        titles = [question.removeprefix(before).removesuffix(after) for question in questions]
        blocks = [
            [(image, caption) for image in pair["images"]] for pair, caption in zip(shown, captions, strict=True)
        ]
        rows.append((" / ".join(dict.fromkeys(titles)), blocks))
    _save(rows, path)


def rankings_sheet(rankings: Dataset, path: str | Path, max_rows: int = 4) -> None:
    """Show some rankings: the reference at the left, then the candidates, the most consistent first."""
    rows = []
    for row_number in _evenly_spaced(range(len(rankings)), max_rows):
        row = rankings[row_number]
        order = row["ranking"][:_MAX_IMAGES]
        candidates = [(row["candidates"][index], f"rank {rank}") for rank, index in enumerate(order, start=1)]
        rows.append((row.get("theme") or row["prompt"], [[(row["reference"], "reference")], candidates]))
    _save(rows, path)


def _save(rows: list[tuple[str, list[list[tuple[Image.Image, str]]]]], path: str | Path) -> None:
    from ..plots.contact_sheet import render_sheet

    render_sheet(rows).save(path)
