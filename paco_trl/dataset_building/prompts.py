# SPDX-License-Identifier: Apache-2.0
"""Stage 1: write image-set prompts with a language model, spread evenly over categories and layouts."""

import json
import logging
import re
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, PackageLoader

from ..data.columns import column_types
from ..data.grid_prompts import ends_sentence, format_image_set_prompt
from ..data.texts import normalized
from ..utils.chat import ChatEndpoint, ChatRequest, Reply
from ..utils.files import read_template
from ..utils.stage_folder import StageFolder
from .answers import Answers, cause_of, causes_text, sampled_request


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)


class Category(NamedTuple):
    """Kind of image set: its name and group, and the dimensions (keys of `DIMENSIONS`) that its images share."""

    name: str
    group: str
    dimensions: tuple[str, ...]


# Also of the texts that ask for reasons
TEMPLATES = Environment(loader=PackageLoader("paco_trl"))
_DATA = json.loads(read_template("categories.json"))
# Dimension -> its meaning, as LLMs and VLMs are told
DIMENSIONS: dict[str, str] = _DATA["dimensions"]
# Of the paper
CATEGORIES = tuple(Category(name, group, tuple(dimensions)) for name, group, dimensions in _DATA["categories"])

# Prompts of a request: the model makes those of one answer different from each other
_PROMPTS_PER_REQUEST = 4
# Answers after which it is clear that there will be no usable one
_TRIED_ENOUGH = 16
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
SAME_PROMPT = "the same as an earlier prompt"


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
) -> "Dataset":
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
    from datasets import Dataset

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
    journal = folder.journal("prompts")
    answers = Answers(endpoint, journal, "image-set prompts", _TRIED_ENOUGH)
    replies: dict[tuple[int, int], Reply] = {}

    def add(number: int, attempt: int, reply: Reply) -> None:
        usable, causes = _read(reply, batches[number], _PROMPTS_PER_REQUEST)
        answers.add(f"{seed}/{number}/{attempt}", reply, bool(usable), causes)
        replies[number, attempt] = reply

    def save(question: tuple[int, int, ChatRequest], reply: Reply) -> bool:
        number, attempt, _ = question
        journal.append({"request": number, "attempt": attempt, "reply": list(reply)})
        add(number, attempt, reply)
        return True

    for record in journal.records:
        add(record["request"], record["attempt"], Reply(*record["reply"]))
    written: list[list[tuple[str, list[str]]]] = [[] for _ in batches]
    rejected: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    seen: set[str] = set()

    # All are sent, then all are checked in order: of two equal prompts the same one is dropped, whichever came first
    for attempt in range(max_attempts):
        lacking = {n: len(batch.slots) - len(written[n]) for n, batch in enumerate(batches)}
        lacking = {number: count for number, count in lacking.items() if count}
        unsent = [
            (number, attempt, _request(batches[number], count, f"{seed}/{number}/{attempt}"))
            for number, count in lacking.items()
            if (number, attempt) not in replies
        ]
        if unsent:
            description = f"Writing prompts (attempt {attempt + 1} of {max_attempts})"
            answers.collect(iter(unsent), itemgetter(2), save, total=len(unsent), desc=description)
        dropped = Counter()
        for number, count in lacking.items():
            usable, causes = _read(replies[number, attempt], batches[number], count)
            for theme, panels in usable:
                key = normalized(" ".join([theme, *panels]))
                if key in seen:
                    causes[SAME_PROMPT] += 1
                else:
                    seen.add(key)
                    written[number].append((theme, panels))
            dropped += causes
        rejected += dropped
    if not seen:
        raise answers.none_usable()

    rows = _rows(batches, written)
    report = {
        "asked for": num_prompts,
        "written": len(rows),
        "requests": len(replies),
        "rejected": dict(rejected.most_common()),
        "left out": dict(dropped.most_common()),
        "of each category": dict(Counter(row["category"] for row in rows)),
    }
    if dropped:
        logger.warning(f"{len(rows)} of {num_prompts} prompts were written. Left out: {causes_text(dropped)}.")
    kinds = {"rows": "int64", "cols": "int64", "panels": ["string"], "dimensions": ["string"]}
    features = column_types(**{name: kinds.get(name, "string") for name in rows[0]})
    folder.finish(Dataset.from_list(rows, features=features), report)
    return folder.load()


def _plan(num_prompts: int, categories: list[Category], layouts: list[tuple[int, int]]) -> list[_Batch]:
    """Assign a category and a layout to each place of the result, and group equal ones into requests."""
    places: dict[tuple[int, int], list[int]] = {}
    for slot in range(num_prompts):
        turn, category = divmod(slot, len(categories))
        # Shifted by the category, so that layouts are even too where a category has few prompts
        places.setdefault((category, (turn + category) % len(layouts)), []).append(slot)
    return [
        _Batch(categories[category], *layouts[layout], slots[start : start + _PROMPTS_PER_REQUEST])
        for (category, layout), slots in sorted(places.items())
        for start in range(0, len(slots), _PROMPTS_PER_REQUEST)
    ]


def _request(batch: _Batch, count: int, key: str) -> ChatRequest:
    panels = batch.rows * batch.cols
    text = TEMPLATES.get_template("write_prompts.txt.jinja").render(
        count=count, panels=panels, category=batch.category, meanings=DIMENSIONS
    )
    return sampled_request(text, key, count * (panels * _TOKENS_PER_PANEL + _TOKENS_PER_THEME))


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


def _rows(batches: list[_Batch], written: list[list[tuple[str, list[str]]]]) -> list[dict[str, Any]]:
    rows = {}
    for batch, prompts in zip(batches, written, strict=True):
        for slot, (theme, panels) in zip(batch.slots, prompts, strict=False):
            rows[slot] = {
                "id": f"{batch.category.name.lower().replace(' ', '-')}-{slot:05d}",
                "prompt": format_image_set_prompt(theme, batch.rows, batch.cols, panels),
                "theme": theme,
                "rows": batch.rows,
                "cols": batch.cols,
                "panels": panels,
                "category": batch.category.name,
                "dimensions": list(batch.category.dimensions),
            }
    return [rows[slot] for slot in sorted(rows)]
