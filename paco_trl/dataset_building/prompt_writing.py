# SPDX-License-Identifier: Apache-2.0
"""Stage 1: write image-set prompts with a language model, evenly over categories and layouts."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from datasets import Dataset

from ..data.grid_prompts import ends_sentence, format_image_set_prompt
from ..utils.chat import ChatEndpoint, Reply
from ..utils.files import read_template
from ..utils.stage_folder import StageFolder
from ..utils.text import normalized
from .answers import TEMPLATES, ask_in_rounds, cause_of


class Category(NamedTuple):
    """Category of image sets: its name and group, and the dimensions (keys of `DIMENSIONS`) that its images share."""

    name: str
    group: str
    dimensions: tuple[str, ...]


_DATA = json.loads(read_template("categories.json"))
# Dimension -> its description for LLMs and VLMs
DIMENSIONS: dict[str, str] = _DATA["dimensions"]
# The paper's categories
CATEGORIES = tuple(Category(name, group, tuple(dimensions)) for name, group, dimensions in _DATA["categories"])

# Prompts per request, which the model makes different from each other
_PROMPTS_PER_REQUEST = 4
# Token limits of an answer: a panel takes about 60 tokens, a theme about 100
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
    """Prompts of the same category and layout, requested together."""

    category: Category
    rows: int
    cols: int
    slots: list[int]  # indices of the prompts in the result


def write_prompts(
    endpoint: ChatEndpoint,
    stage: StageFolder,
    num_prompts: int,
    categories: Sequence[str] | None = None,
    layouts: Sequence[tuple[int, int]] = ((2, 2),),
    seed: int = 0,
    max_attempts: int = 3,
) -> Dataset:
    """
    Write image-set prompts with a language model, the same number for each category and layout (give or take one).

    Answers are checked for JSON, the number of panels, empty texts, panel markers inside texts, and repeated prompts.
    Failures are requested again with another seed, and left out and counted after `max_attempts`. Interrupted runs
    resume automatically, and the result does not depend on the order of the answers.

    Args:
        endpoint ([`ChatEndpoint`]):
            Language model.
        stage ([`StageFolder`]):
            Directory of the stage. Its settings should include the model and the other arguments.
        num_prompts (`int`):
            Number of prompts.
        categories (`Sequence[str]`, *optional*):
            Names of the categories, see `CATEGORIES`. If `None`, all.
        layouts (`Sequence[tuple[int, int]]`, *optional*, defaults to `((2, 2),)`):
            Rows and columns of the grids.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the requests.
        max_attempts (`int`, *optional*, defaults to `3`):
            Attempts per prompt.

    Returns:
        [`~datasets.Dataset`]: image-set prompts with `category` and `dimensions`, also saved in `stage`.

    Raises:
        ValueError: If no answer is usable. The error has an example.
        EndpointUnavailableError: If the endpoint cannot be reached. Earlier answers are kept.
    """
    if stage.is_done:
        return stage.load()
    if num_prompts < 1 or max_attempts < 1:
        raise ValueError(
            f"`num_prompts` is {num_prompts}, `max_attempts` {max_attempts}; but both must be at least 1."
        )
    category_by_name = {category.name: category for category in CATEGORIES}
    names = list(category_by_name if categories is None else categories)
    if not names or not set(names) <= set(category_by_name):
        raise ValueError(
            f"`categories` is {names}, but must be some of {', '.join(category_by_name)}, or `None` for all."
        )
    if not layouts or any(rows < 1 or rows * cols < 2 for rows, cols in layouts):
        raise ValueError(f"`layouts` is {layouts}, but each must have at least two panels, such as (2, 2).")
    batches = _plan(num_prompts, [category_by_name[name] for name in names], list(layouts))

    task = _PromptTask(batches)
    texts, report = ask_in_rounds(task, endpoint, stage.journal("prompts"), seed, max_attempts)
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
    counts = dict(Counter(row["category"] for row in rows.values()))
    report = {"asked for": num_prompts, "written": len(rows), **report, "of each category": counts}
    stage.finish(Dataset.from_list([rows[slot] for slot in sorted(rows)]), report)
    return stage.load()


class _PromptTask:
    """Prompts to write, by the index of their batch."""

    purpose = "image-set prompts"

    def __init__(self, batches: list[_Batch]):
        self.batches = batches
        self.target_counts: Mapping[Any, int] = {index: len(batch.slots) for index, batch in enumerate(batches)}

    def request(self, name: int, count: int) -> tuple[str, int]:
        batch = self.batches[name]
        panels = batch.rows * batch.cols
        text = TEMPLATES.get_template("write_prompts.txt.jinja").render(
            count=count, panels=panels, category=batch.category, meanings=DIMENSIONS
        )
        return text, count * (panels * _TOKENS_PER_PANEL + _TOKENS_PER_THEME)

    def read(self, name: int, reply: Reply, count: int) -> tuple[list[tuple[str, list[str]]], Counter[str]]:
        return _read(reply, self.batches[name], count)

    def key_of(self, name: int, text: tuple[str, list[str]]) -> str:
        return normalized(" ".join([text[0], *text[1]]))


def _plan(num_prompts: int, categories: list[Category], layouts: list[tuple[int, int]]) -> list[_Batch]:
    """Assign a category and a layout to each slot of the result, and group equal slots into requests."""
    slots_by_type: dict[tuple[int, int], list[int]] = {}
    for slot in range(num_prompts):
        round_number, category = divmod(slot, len(categories))
        # Shifted by the category, so that layouts are also even if categories have few prompts
        slots_by_type.setdefault((category, (round_number + category) % len(layouts)), []).append(slot)
    return [
        _Batch(categories[category], *layouts[layout], slots[start : start + _PROMPTS_PER_REQUEST])
        for (category, layout), slots in sorted(slots_by_type.items())
        for start in range(0, len(slots), _PROMPTS_PER_REQUEST)
    ]


def _read(reply: Reply, batch: _Batch, count: int) -> tuple[list[tuple[str, list[str]]], Counter[str]]:
    """Return the usable prompts of an answer, and why the other prompts of the `count` requested ones are unusable."""
    if reply.text is None:
        return [], Counter({cause_of(reply): count})
    text = reply.text.strip()
    code_block = _CODE_FENCE.fullmatch(text)
    try:
        entries = json.loads(code_block[1] if code_block else text)["prompts"]
    except (ValueError, KeyError, TypeError, RecursionError):
        entries = None
    if type(entries) is not list:
        return [], Counter({NO_JSON: count})
    results = [_check_prompt(entry, batch.rows, batch.cols) for entry in entries[:count]]
    causes = Counter(entry for entry in results if isinstance(entry, str))
    if len(entries) < count:
        causes[TOO_FEW] += count - len(entries)
    return [entry for entry in results if not isinstance(entry, str)], causes


def _check_prompt(entry: Any, rows: int, cols: int) -> tuple[str, list[str]] | str:
    """Return the theme and panels of a prompt, or why it is not usable."""
    if not isinstance(entry, dict) or not isinstance(entry.get("panels"), list):
        return NO_JSON
    if len(entry["panels"]) != rows * cols:
        return PANEL_COUNT
    texts = [entry.get("theme"), *entry["panels"]]
    if not all(isinstance(text, str) for text in texts):
        return NO_JSON
    # On one line, and without lone surrogates, which JSON allows, but UTF-8 files do not
    texts = [" ".join(text.encode("utf-8", "replace").decode().split()) for text in texts]
    # Panel markers must follow the end of a sentence
    theme, *panels = [text if not text or ends_sentence(text) else text + "." for text in texts]
    if not all(_WORD.search(text) for text in [theme, *panels]):
        return EMPTY
    if len({panel.casefold() for panel in panels}) < len(panels):
        return SAME_PANEL
    try:
        prompt = format_image_set_prompt(theme, rows, cols, panels)
    except ValueError:
        return MARKERS
    return MARKERS if prompt.startswith(theme) else (theme, panels)  # the model wrote its own layout
