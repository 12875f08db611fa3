# SPDX-License-Identifier: Apache-2.0
"""Sample sheets: one image with some of the prompts and grids, pairs or rankings of a stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.columns import by_id
from ..data.pairs import content_text, decision_of
from ..data.questions import theme_question


if TYPE_CHECKING:
    from datasets import Dataset
    from PIL import Image


# Images of a row at most, without the reference
_MAX_IMAGES = 8


def _evenly_spaced(items: Sequence[int], chosen: int) -> list[int]:
    """Choose some items at equal distances, from the first: neighbors are often alike."""
    chosen = min(len(items), chosen)
    return [items[place * len(items) // chosen] for place in range(chosen)]


def grids_sheet(grids: "Dataset", prompts: "Dataset", path: str | Path, max_prompts: int = 6) -> None:
    """Show some prompts with their grids, a row each with the first eight seeds."""
    rows_by_prompt: dict[str, list[int]] = {}
    for row, prompt_id in enumerate(grids["prompt_id"][:]):
        rows_by_prompt.setdefault(prompt_id, []).append(row)
    texts, names = by_id(prompts, "prompt"), list(rows_by_prompt)
    rows = []
    for place in _evenly_spaced(range(len(names)), max_prompts):
        shown = grids.select(rows_by_prompt[names[place]][:_MAX_IMAGES])
        rows.append((texts[names[place]], [[(row["image"], f"seed {row['seed']}") for row in shown]]))
    _save(rows, path)


def _theme_of(question: str) -> str:
    before, after = theme_question("\0").split("\0")
    return question.removeprefix(before).removesuffix(after)


def pairs_sheet(pairs: "Dataset", path: str | Path, max_rows: int = 5) -> None:
    """Show some pairs: a consistent one at the left, an inconsistent one, if possible of its prompt, at the right."""
    columns = pairs.with_format(None)
    labels = [decision_of(completion) for completion in columns["completion"][:]]
    groups = columns["group"][:] if "group" in pairs.column_names else [None] * len(pairs)
    rows_by_label = {name: [row for row, label in enumerate(labels) if label == name] for name in ("Yes", "No")}
    negatives = {groups[row]: row for row in reversed(rows_by_label["No"])}
    matched = [row for row in rows_by_label["Yes"] if groups[row] in negatives]
    positives = {groups[row]: row for row in reversed(matched)}
    left = _evenly_spaced(sorted(positives.values()) or rows_by_label["Yes"], max_rows)
    right = [negatives[groups[row]] for row in left] if positives else _evenly_spaced(rows_by_label["No"], max_rows)
    rows = []
    for number in range(max(len(left), len(right))):
        blocks, titles = [], []
        for chosen, caption in ((left, "consistent"), (right, "inconsistent")):
            if number < len(chosen):
                pair = pairs[chosen[number]]
                blocks.append([(image, caption) for image in pair["images"]])
                titles.append(_theme_of(content_text(pair["prompt"][-1]["content"]) or ""))
        rows.append((" / ".join(dict.fromkeys(titles)), blocks))
    _save(rows, path)


def rankings_sheet(rankings: "Dataset", path: str | Path, max_rows: int = 4) -> None:
    """Show some rankings: the reference at the left, then the candidates, the most consistent first."""
    rows = []
    for number in _evenly_spaced(range(len(rankings)), max_rows):
        row = rankings[number]
        order = row["ranking"][:_MAX_IMAGES]
        candidates = [(row["candidates"][index], f"rank {rank}") for rank, index in enumerate(order, start=1)]
        rows.append((row.get("theme") or row["prompt"], [[(row["reference"], "reference")], candidates]))
    _save(rows, path)


def _save(rows: list[tuple[str, list[list[tuple["Image.Image", str]]]]], path: str | Path) -> None:
    from ..plots.contact_sheet import render_sheet

    render_sheet(rows).save(path)
