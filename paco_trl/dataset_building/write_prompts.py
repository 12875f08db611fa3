# SPDX-License-Identifier: Apache-2.0
"""Image-set prompts written by a language model, spread evenly over categories and layouts."""

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.columns import column_types
from ..data.image_sets import ends_sentence, format_image_set_prompt
from ..data.texts import normalized
from ..utils.chat import ChatEndpoint, ChatRequest, Reply
from ..utils.journals import Journal
from ..utils.stage_folder import StageFolder
from ..utils.text import shorten
from .categories import CATEGORIES, DIMENSIONS, Category


if TYPE_CHECKING:
    from datasets import Dataset


logger = logging.getLogger(__name__)

# Prompts that a request asks for: the model makes those of one answer different from each other
_PROMPTS_PER_REQUEST = 4
# Answers after which it is clear that there will be no usable one
_TRIED_ENOUGH = 16
# Length of an answer: a panel takes about 60 tokens, the theme about 100
_TOKENS_PER_PANEL = 160
_TOKENS_PER_THEME = 320

_CODE_FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)
_WORD = re.compile(r"\w+")

NO_JSON = "not the JSON that was asked for"
TOO_FEW = "fewer prompts than asked for"
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
    Have a language model write image-set prompts, the same number for each category and layout (give or take one).

    Answers are checked: JSON, the number of panels, no empty text, no panel marker inside a text, no prompt twice.
    What fails is requested again with another seed, and left out and counted after `max_attempts`. Interrupted runs
    resume automatically; the result does not depend on the order of the answers.

    Args:
        endpoint ([`ChatEndpoint`]):
            The model.
        folder ([`StageFolder`]):
            Folder of the stage. Its settings name the model and the other arguments.
        num_prompts (`int`):
            Prompts to write.
        categories (`Sequence[str]`, *optional*):
            Names of the categories, see `CATEGORIES`; all if `None`.
        layouts (`Sequence[tuple[int, int]]`, *optional*, defaults to `((2, 2),)`):
            Rows and columns of the grids.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the requests.
        max_attempts (`int`, *optional*, defaults to `3`):
            How often a prompt is requested.

    Returns:
        [`~datasets.Dataset`]: image-set prompts with `category` and `dimensions`, also saved in the folder with a
        report.

    Raises:
        ValueError: If an argument is out of range, or no answer can be used; the error has an example.
        EndpointUnavailableError: If the endpoint cannot be reached. Earlier answers are kept.
    """
    if folder.is_done:
        return folder.load()
    if num_prompts < 1 or max_attempts < 1:
        raise ValueError(
            f"`num_prompts` is {num_prompts} and `max_attempts` {max_attempts}, but both must be at least 1."
        )
    batches = _plan(num_prompts, _categories_named(categories), _checked_layouts(layouts))
    journal = folder.journal("prompts")
    texts = {(record["request"], record["attempt"]): Reply(*record["reply"]) for record in journal.records}
    written: list[list[tuple[str, list[str]]]] = [[] for _ in batches]
    rejected: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    seen: set[str] = set()

    # All are asked, then all are checked in their order: which of two equal prompts is the later one does not depend on
    # which answer came first
    for attempt in range(max_attempts):
        missing = {
            number: len(batch.slots) - len(written[number])
            for number, batch in enumerate(batches)
            if len(written[number]) < len(batch.slots)
        }
        requests = {
            number: _request(batches[number], count, f"{seed}/{number}/{attempt}")
            for number, count in missing.items()
            if (number, attempt) not in texts
        }
        _ask(endpoint, requests, attempt, texts, batches, journal, max_attempts)
        dropped = Counter()
        for number, count in missing.items():
            batch = batches[number]
            found, causes = _read(texts[number, attempt], batch.rows, batch.cols, count)
            for theme, panels in found:
                key = normalized(" ".join([theme, *panels]))
                if key in seen:
                    causes[SAME_PROMPT] += 1
                else:
                    seen.add(key)
                    written[number].append((theme, panels))
            dropped += causes
        rejected += dropped
    if not seen:
        raise ValueError(_no_usable_answer(endpoint, texts, journal))

    rows = _rows(batches, written)
    report = {
        "asked for": num_prompts,
        "written": len(rows),
        "requests": len(texts),
        "rejected": dict(rejected.most_common()),
        "left out": dict(dropped.most_common()),
        "of each category": dict(Counter(row["category"] for row in rows)),
    }
    if dropped:
        logger.warning(
            f"{len(rows)} of {num_prompts} prompts were written. Left out after {max_attempts} attempts: "
            f"{'; '.join(f'{count} x {cause}' for cause, count in dropped.most_common())}."
        )
    folder.finish(_to_dataset(rows), report)
    return folder.load()


def _categories_named(names: Sequence[str] | None) -> list[Category]:
    if names is None:
        return list(CATEGORIES)
    known = {category.name: category for category in CATEGORIES}
    unknown = [name for name in names if name not in known]
    if unknown or not names or len(set(names)) < len(names):
        raise ValueError(
            f"`categories` is {list(names)}; {unknown or 'an empty or repeated name'} is none of: {', '.join(known)}. "
            "Name each once, or leave `categories` out for all."
        )
    return [known[name] for name in names]


def _checked_layouts(layouts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    layouts = [tuple(layout) for layout in layouts]
    if not layouts or any(len(layout) != 2 or min(layout) < 1 or max(layout) == 1 for layout in layouts):
        raise ValueError(
            f"`layouts` is {layouts}, but must have rows and columns of grids with at least two panels, such as (2, 2)."
        )
    return layouts


def _plan(num_prompts: int, categories: list[Category], layouts: list[tuple[int, int]]) -> list[_Batch]:
    """Give each place of the result a category and a layout, and group equal ones into requests."""
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
    dimensions = "\n".join(f"- {name}: {DIMENSIONS[name]}" for name in batch.category.dimensions)
    text = f"""\
Write {count} {"prompt" if count == 1 else "prompts"} for a text-to-image model. Each asks for one set of {panels} images that belong together.

Kind of set: {batch.category.name} ({batch.category.group}).
The images of a set must be consistent in:
{dimensions}

Each prompt has
- "theme": one to three sentences that name the subject and everything that all images share (who or what is seen, with
  exact visible details such as hair, clothing, colours, shape and material; the medium and the look; the light; the
  place);
- "panels": exactly {panels} texts, one for each image in their order. Each is one or two sentences that describe what \
this
  image shows and how it differs from the others. It does not repeat the theme.

Subjects, places, times and looks differ widely between the prompts, and are not the first that come to mind. No text
names a layout, a grid, a panel or the number of an image. All texts are in English.

Answer with nothing but JSON of this form:
{{"prompts": [{{"theme": "...", "panels": [{", ".join(['"..."'] * panels)}]}}]}}"""
    return ChatRequest(
        messages=[{"role": "user", "content": text}],
        seed=random.Random(key).getrandbits(31),
        max_tokens=count * (panels * _TOKENS_PER_PANEL + _TOKENS_PER_THEME),
        temperature=1.0,
    )


def _ask(
    endpoint: ChatEndpoint,
    requests: dict[int, ChatRequest],
    attempt: int,
    texts: dict[tuple[int, int], Reply],
    batches: list[_Batch],
    journal: Journal,
    max_attempts: int,
) -> None:
    """Send the requests, and put the replies into the journal and into `texts`."""
    from tqdm.auto import tqdm

    if not requests:
        return
    endpoint.check()

    def is_usable(number: int, reply: Reply) -> bool:
        return bool(_read(reply, batches[number].rows, batches[number].cols, _PROMPTS_PER_REQUEST)[0])

    usable = any(is_usable(number, reply) for (number, _), reply in texts.items())
    numbers = list(requests)
    replies = endpoint.ask_all(requests.values())
    with tqdm(total=len(numbers), desc=f"Writing prompts (attempt {attempt + 1} of {max_attempts})") as bar:
        while True:
            if not usable and len(texts) >= _TRIED_ENOUGH:
                replies.close()
                raise ValueError(_no_usable_answer(endpoint, texts, journal))
            index, reply = next(replies, (None, None))
            if index is None:
                return
            number = numbers[index]
            journal.append({"request": number, "attempt": attempt, "reply": list(reply)})
            texts[number, attempt] = reply
            usable = usable or is_usable(number, reply)
            bar.update()


def _no_usable_answer(endpoint: ChatEndpoint, texts: dict[Any, Reply], journal: Journal) -> str:
    reply = texts[min(texts)]  # of the first question, whichever answer came first
    said = f"said: {shorten(reply.text)}" if reply.text is not None else f"gave {reply.problem}"
    return (
        f"None of {len(texts)} answers of {endpoint.name} can be used as image-set prompts. To the first question it "
        f"{said}. A model is needed that follows instructions and answers with JSON; one that thinks aloud must have "
        f"that turned off. Then delete {journal.path}, or give another folder."
    )


def _read(reply: Reply, rows: int, cols: int, count: int) -> tuple[list[tuple[str, list[str]]], Counter[str]]:
    """Give the usable prompts of an answer, and why the others of the `count` requested are not."""
    if reply.text is None:
        # Without what the server says in each case, so that equal causes are counted together
        return [], Counter({reply.problem.partition(" (")[0]: count})
    text = reply.text.strip()
    fenced = _CODE_FENCE.fullmatch(text)
    try:
        entries = json.loads(fenced[1] if fenced else text)["prompts"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return [], Counter({NO_JSON: count})
    if type(entries) is not list:
        return [], Counter({NO_JSON: count})
    found, causes = [], Counter()
    for entry in entries[:count]:
        try:
            found.append(_checked(entry, rows, cols))
        except _RejectedError as error:
            causes[str(error)] += 1
    if len(entries) < count:
        causes[TOO_FEW] += count - len(entries)
    return found, causes


class _RejectedError(Exception):
    """A prompt cannot be used; the message is the cause."""


def _checked(entry: Any, rows: int, cols: int) -> tuple[str, list[str]]:
    if not isinstance(entry, dict) or not isinstance(entry.get("panels"), list):
        raise _RejectedError(NO_JSON)
    if len(entry["panels"]) != rows * cols:
        raise _RejectedError(PANEL_COUNT)
    texts = [entry.get("theme"), *entry["panels"]]
    if not all(isinstance(text, str) for text in texts):
        raise _RejectedError(NO_JSON)
    theme, *panels = list(_cleaned(texts))
    if not all(_WORD.search(text) for text in [theme, *panels]):
        raise _RejectedError(EMPTY)
    if len({panel.casefold() for panel in panels}) < len(panels):
        raise _RejectedError(SAME_PANEL)
    try:
        prompt = format_image_set_prompt(theme, rows, cols, panels)
    except ValueError:
        raise _RejectedError(MARKERS) from None
    if prompt.startswith(theme):  # the model wrote a layout itself
        raise _RejectedError(MARKERS)
    return theme, panels


def _cleaned(texts: list[str]) -> Iterator[str]:
    """Give each text on one line that ends a sentence: a panel marker may come next."""
    for text in texts:
        # Half of a pair of code units, which JSON can hold and no file
        text = " ".join(text.encode("utf-8", "replace").decode().split())
        yield text if not text or ends_sentence(text) else text + "."


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


def _to_dataset(rows: list[dict[str, Any]]) -> "Dataset":
    from datasets import Dataset

    kinds = {"rows": "int64", "cols": "int64", "panels": ["string"], "dimensions": ["string"]}
    return Dataset.from_list(rows, features=column_types(**{name: kinds.get(name, "string") for name in rows[0]}))
