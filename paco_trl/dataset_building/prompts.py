# SPDX-License-Identifier: Apache-2.0
"""Stage 1: write image-set prompts with a language model, spread evenly over categories and layouts."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from datasets import Dataset

from ..data.grid_prompts import ends_sentence, format_image_set_prompt
from ..utils.chat import ChatEndpoint, Reply
from ..utils.files import read_template
from ..utils.stage_folder import StageFolder
from ..utils.text import normalized
from .answers import TEMPLATES, ask_in_rounds, cause_of


class Category(NamedTuple):
    """Kind of image set: its name and group, and the dimensions (keys of `DIMENSIONS`) that its images share."""

    name: str
    group: str
    dimensions: tuple[str, ...]


_DATA = json.loads(read_template("categories.json"))
# Dimension -> its meaning, as LLMs and VLMs are told
DIMENSIONS: dict[str, str] = _DATA["dimensions"]
# Of the paper
CATEGORIES = tuple(Category(name, group, tuple(dimensions)) for name, group, dimensions in _DATA["categories"])

# Prompts of a request: the model makes those of one answer different from each other
_PROMPTS_PER_REQUEST = 4
# Length of an answer: a panel takes about 60 tokens, the theme about 100
_TOKENS_PER_PANEL = 160
_TOKENS_PER_THEME = 320

_CODE_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
_WORD = re.compile(r"\w+")

NO_JSON = "not the requested JSON"
TOO_FEW = "fewer prompts than requested"
PANEL_COUNT = "another number of panels"
EMPTY = "an empty text"
SAME_PANEL = "the same panel twice"
MARKERS = "a panel marker or a layout inside a text"


class _Batch(NamedTuple):
    """Prompts of one category and layout that are requested together."""

    category: Category
    rows: int
    cols: int
    slots: list[int]  # places of the prompts in the result


def write_prompts(
    endpoint: ChatEndpoint,
    folder: StageFolder,
    num_prompts: int,
    categories: Sequence[str] | None = None,
    layouts: Sequence[tuple[int, int]] = ((2, 2),),
    seed: int = 0,
    max_attempts: int = 3,
) -> Dataset:
    """
    Write image-set prompts with a language model, the same number for each category and layout (give or take one).

    Answers are checked: JSON, the number of panels, no empty text, no panel marker inside a text, no prompt twice.
    What fails is requested again with another seed, and left out and counted after `max_attempts`. Interrupted runs
    resume automatically; the result does not depend on the order of the answers.

    Args:
        endpoint ([`ChatEndpoint`]):
            The model.
        folder ([`StageFolder`]):
            Directory of the stage. Its settings name the model and the other arguments.
        num_prompts (`int`):
            Number of prompts.
        categories (`Sequence[str]`, *optional*):
            Names of the categories, see `CATEGORIES`; all if `None`.
        layouts (`Sequence[tuple[int, int]]`, *optional*, defaults to `((2, 2),)`):
            Rows and columns of the grids.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the requests.
        max_attempts (`int`, *optional*, defaults to `3`):
            How often a prompt is requested.

    Returns:
        [`~datasets.Dataset`]: image-set prompts with `category` and `dimensions`, also saved in `folder`.

    Raises:
        ValueError: If no answer can be used; the error has an example.
        EndpointUnavailableError: If the endpoint cannot be reached. Earlier answers are saved.
    """
    if folder.is_done:
        return folder.load()
    if num_prompts < 1 or max_attempts < 1:
        raise ValueError(f"`num_prompts` is {num_prompts}, `max_attempts` {max_attempts}; both must be at least 1.")
    known = {category.name: category for category in CATEGORIES}
    names = list(known if categories is None else categories)
    if not names or not set(names) <= set(known):
        raise ValueError(f"`categories` is {names}, but must be some of: {', '.join(known)}; or `None` for all.")
    if not layouts or any(rows < 1 or rows * cols < 2 for rows, cols in layouts):
        raise ValueError(f"`layouts` is {layouts}, but each must have two panels or more, such as (2, 2).")
    batches = _plan(num_prompts, [known[name] for name in names], list(layouts))

    def request(batch_number: int, count: int) -> tuple[str, int]:
        batch = batches[batch_number]
        panels = batch.rows * batch.cols
        text = TEMPLATES.get_template("write_prompts.txt.jinja").render(
            count=count, panels=panels, category=batch.category, meanings=DIMENSIONS
        )
        return text, count * (panels * _TOKENS_PER_PANEL + _TOKENS_PER_THEME)

    texts, report = ask_in_rounds(
        endpoint,
        folder.journal("prompts"),
        "image-set prompts",
        seed,
        max_attempts,
        {batch_number: len(batch.slots) for batch_number, batch in enumerate(batches)},
        request,
        lambda batch_number, reply, count: _read(reply, batches[batch_number], count),
        lambda _, prompt: normalized(" ".join([prompt[0], *prompt[1]])),
    )
    rows: dict[int, dict[str, Any]] = {}  # by slot
    for (category, layout_rows, layout_cols, slots), prompts in zip(batches, texts.values(), strict=True):
        for slot, (theme, panels) in zip(slots, prompts, strict=False):
            rows[slot] = {
                "id": f"{category.name.lower().replace(' ', '-')}-{slot:05d}",
                "prompt": format_image_set_prompt(theme, layout_rows, layout_cols, panels),
                "theme": theme,
                "rows": layout_rows,
                "cols": layout_cols,
                "panels": panels,
                "category": category.name,
                "dimensions": list(category.dimensions),
            }
    of_category = dict(Counter(row["category"] for row in rows.values()))
    report = {"asked for": num_prompts, "written": len(rows), **report, "of each category": of_category}
    folder.finish(Dataset.from_list([rows[slot] for slot in sorted(rows)]), report)
    return folder.load()


def _plan(num_prompts: int, categories: list[Category], layouts: list[tuple[int, int]]) -> list[_Batch]:
    """Assign a category and a layout to each slot of the result, and group equal ones into requests."""
    slots_of: dict[tuple[int, int], list[int]] = {}
    for slot in range(num_prompts):
        turn, category = divmod(slot, len(categories))
        # Shifted by the category, so that layouts are even too where a category has few prompts
        slots_of.setdefault((category, (turn + category) % len(layouts)), []).append(slot)
    return [
        _Batch(categories[category], *layouts[layout], slots[start : start + _PROMPTS_PER_REQUEST])
        for (category, layout), slots in sorted(slots_of.items())
        for start in range(0, len(slots), _PROMPTS_PER_REQUEST)
    ]


def _read(reply: Reply, batch: _Batch, count: int) -> tuple[list[tuple[str, list[str]]], Counter[str]]:
    """Return the usable prompts of an answer, and why the others of the `count` requested are not."""
    if reply.text is None:
        return [], Counter({cause_of(reply): count})
    text = reply.text.strip()
    fenced = _CODE_FENCE.fullmatch(text)
    try:
        entries = json.loads(fenced[1] if fenced else text)["prompts"]
    except (ValueError, KeyError, TypeError, RecursionError):
        entries = None
    if type(entries) is not list:
        return [], Counter({NO_JSON: count})
    checked = [_checked(entry, batch.rows, batch.cols) for entry in entries[:count]]
    causes = Counter(entry for entry in checked if isinstance(entry, str))
    if len(entries) < count:
        causes[TOO_FEW] += count - len(entries)
    return [entry for entry in checked if not isinstance(entry, str)], causes


def _checked(entry: Any, rows: int, cols: int) -> tuple[str, list[str]] | str:
    """Return theme and panels of a prompt, or why it cannot be used."""
    if not isinstance(entry, dict) or not isinstance(entry.get("panels"), list):
        return NO_JSON
    if len(entry["panels"]) != rows * cols:
        return PANEL_COUNT
    texts = [entry.get("theme"), *entry["panels"]]
    if not all(isinstance(text, str) for text in texts):
        return NO_JSON
    # On one line, without halves of a pair of code units, which JSON can hold and no file
    texts = [" ".join(text.encode("utf-8", "replace").decode().split()) for text in texts]
    # A panel marker comes after the end of a sentence
    theme, *panels = [text if not text or ends_sentence(text) else text + "." for text in texts]
    if not all(_WORD.search(text) for text in [theme, *panels]):
        return EMPTY
    if len({panel.casefold() for panel in panels}) < len(panels):
        return SAME_PANEL
    try:
        prompt = format_image_set_prompt(theme, rows, cols, panels)
    except ValueError:
        return MARKERS
    return MARKERS if prompt.startswith(theme) else (theme, panels)  # the model wrote a layout itself
