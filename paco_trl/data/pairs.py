# SPDX-License-Identifier: Apache-2.0
"""
Pairs: two images, a question about them, and an answer that begins with Yes or No. PaCo-Reward trains on them.

The format is TRL's conversational prompt-completion format with two images: `images` (list of 2), `prompt` (one user
turn with the question, with or without a system turn in front) and `completion` (one assistant turn).
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, Features, Image, List, concatenate_datasets

from ..utils.addresses import refuse_address
from ..utils.text import is_text, shorten, shorten_path
from .columns import check_image_column, check_is_dataset, column_types, list_lengths
from .dataset_files import named_images, report_broken
from .questions import theme_question


logger = logging.getLogger(__name__)

_COLUMNS = ["images", "prompt", "completion"]
_ORDINALS = ["first", "second"]

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_PLACEHOLDER = "<image>"
# Columns of turns in other formats
_TURNS = {"conversations", "messages", "query"}

_DECISION = re.compile(r"(Yes|No)\b")
_LABEL_ONLY = re.compile(r"(Yes|No)\.?\s*")

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


def make_pair(
    first: Any, second: Any, question: str, decision: str | bool, reasons: str | None = None
) -> dict[str, Any]:
    """
    Build one row of the pair format: the columns `images`, `prompt` and `completion`.

    Args:
        first, second (`PIL.Image.Image`, `str` or anything else that [`~datasets.Image`] stores):
            The two images; in editing, the original and the edited one.
        question (`str`):
            The question, such as [`theme_question`].
        decision (`str` or `bool`):
            `"Yes"` or `True` for a consistent pair, `"No"` or `False` for an inconsistent one.
        reasons (`str`, *optional*):
            Reasons, which follow the decision: `"Yes. <reasons>"`. If `None`, the pair is label-only: `"Yes"`.
    """
    if isinstance(decision, bool):
        decision = "Yes" if decision else "No"
    if decision not in ("Yes", "No"):
        raise ValueError(f'`decision` is {decision!r}, but the judge answers Yes or No. Give "Yes", "No" or a `bool`.')
    if not is_text(question):
        raise ValueError(f"`question` is {question!r}. It must be a text that is not empty.")
    answer = decision if reasons is None else f"{decision}. {reasons}"
    return {
        "images": [first, second],
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def pair_features() -> Features:
    """Return the column types of the pair format."""
    turns = [{"role": "string", "content": "string"}]
    return column_types(images=["image"], prompt=turns, completion=turns)


def _roles(turns: Any) -> list[Any]:
    return [turn.get("role") for turn in turns] if isinstance(turns, list) else []


def content_text(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a turn."""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content or ())


def _count_image_parts(content: Any) -> int:
    return sum(part.get("type") == "image" for part in content) if isinstance(content, list) else 0


def _completion_text(completion: Any) -> str:
    if isinstance(completion, str):
        return completion
    if _roles(completion) != ["assistant"] or _count_image_parts(completion[0].get("content")):
        raise ValueError(f"The completion is {shorten(completion)}. It must be one assistant turn of text, or a text.")
    return content_text(completion[0].get("content"))


def decision_of(completion: str | list[dict[str, Any]]) -> str:
    """
    Read the decision, `"Yes"` or `"No"`, that a completion begins with: a text, or one assistant turn whose content is a
    text or a list of text parts. Raises `ValueError` if it does not begin with this word, in this case, without a space.
    """
    text = _completion_text(completion)
    match = _DECISION.match(text)
    if match is None:
        raise ValueError(
            f"The completion {shorten(text)} does not begin with the word Yes or No. The score is read at the first "
            "token: case matters, and nothing may come before, no space either."
        )
    return match[1]


def is_label_only(completion: str | list[dict[str, Any]]) -> bool:
    """Tell whether a completion (as in [`decision_of`]) is Yes or No without reasons, with or without a full stop."""
    decision_of(completion)
    return _LABEL_ONLY.fullmatch(_completion_text(completion)) is not None


def check_pair_texts(prompt: Any, completion: Any) -> None:
    """Check the question and the answer of a pair."""
    roles = _roles(prompt)
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(f"The prompt is {shorten(prompt)}. It must be one user turn, with at most one system turn.")
    content = prompt[-1].get("content")
    if not is_text(content_text(content)):
        raise ValueError(f"The user turn of the prompt has the content {shorten(content)}. It must be a text.")
    if isinstance(content, list) and _count_image_parts(content) != 2:
        raise ValueError(f"The user turn has {_count_image_parts(content)} image parts for 2 images.")
    decision_of(completion)


def _with_placeholders(content: Any) -> Any:
    """Write a list of parts, the images among them, as one text."""
    if not isinstance(content, list):
        return content
    return "".join(_PLACEHOLDER if part.get("type") == "image" else part.get("text") or "" for part in content)


def as_turns(row: Mapping[str, Any]) -> dict[str, Any]:
    """
    Read prompt and completion of a row: turns or texts of these names, or what LLaMA-Factory and ms-swift have, a list of
    `conversations` (`from`, `value`) or `messages` (`role`, `content`), or `query` and `response`, with or without `system`.
    Both images come before the question: the placeholders `<image>` in front of it are removed.
    """
    prompt: Any = row.get("prompt")
    completion: Any = row.get("completion")
    turns: Any = row.get("conversations") or row.get("messages")
    if turns is None and row.get("query") is not None:
        turns = [{"role": "user", "content": row["query"]}, {"role": "assistant", "content": row.get("response")}]
    if turns and isinstance(turns, list):
        *prompt, answer = (
            {
                "role": _ROLES.get(turn.get("from") or turn.get("role")),
                "content": _with_placeholders(turn.get("value") or turn.get("content")),
            }
            for turn in turns
        )
        if row.get("system") and len(prompt) == 1:
            prompt.insert(0, {"role": "system", "content": row["system"]})
        completion = [{**answer, "content": (answer["content"] or "").strip()}]
    elif isinstance(prompt, str) and isinstance(completion, str):
        prompt = [{"role": "user", "content": prompt}]
        completion = [{"role": "assistant", "content": completion.strip()}]
    check_pair_texts(prompt, completion)
    if contents := [turn["content"] for turn in prompt if not isinstance(turn["content"], str)]:
        raise ValueError(f"a turn has the content {shorten(contents[0])}. It must be a text.")
    text = prompt[-1]["content"]
    question = re.sub(rf"^\s*{_PLACEHOLDER}\s*{_PLACEHOLDER}", "", text).strip()
    if _PLACEHOLDER in question or not question:
        raise ValueError(f"its question is {shorten(text)}. Put no or two `{_PLACEHOLDER}` before a text.")
    return {"prompt": [*prompt[:-1], {"role": "user", "content": question}], "completion": completion}


def as_pairs(dataset: Dataset, name: str, skip_broken: bool = False) -> Dataset:
    """Convert rows with texts or with the turns of other formats, see [`as_turns`], to pairs. No image is read."""
    columns = {*dataset.column_names}
    has_turns = all(isinstance(dataset.features.get(column), List) for column in ("prompt", "completion"))
    if "images" not in columns or has_turns or not (columns >= {*_COLUMNS} or columns & _TURNS):
        return dataset.remove_columns([*columns & {"image", "messages"}]) if has_turns else dataset
    texts, rows, broken = [], [], []
    for row_number, row in enumerate(dataset.with_format(None).remove_columns("images")):
        try:
            texts.append(as_turns(row))
            rows.append(row_number)
        except (ValueError, AttributeError, TypeError) as error:  # also of a turn of another type
            broken.append(f"Row {row_number} of '{name}': {error}")
    report_broken(broken, len(dataset), "rows", skip_broken)
    features = Features({column: kind for column, kind in pair_features().items() if column != "images"})
    turns = Dataset.from_list(texts, features=features)
    return concatenate_datasets([dataset.select_columns("images").select(rows), turns], axis=1)


def _find_invalid_rows(dataset: Dataset) -> Iterator[tuple[int, str]]:
    """Find the rows that are not valid pairs, without reading images."""
    lengths = list_lengths(dataset, "images")
    for row, prompt, completion in iter_texts(dataset):
        try:
            if lengths[row] != 2:
                raise ValueError(f"It has {max(lengths[row], 0)} images, but a pair has exactly 2.")
            check_pair_texts(prompt, completion)
        except ValueError as error:
            yield row, str(error)


def _check_columns(dataset: Any, name: str) -> None:
    check_is_dataset(dataset, name, _COLUMNS)
    if extra := [column for column in ("image", "messages") if column in dataset.column_names]:
        raise ValueError(f"TRL would train on the columns {extra} of `{name}`: `dataset.remove_columns({extra})`.")
    check_image_column(dataset, "images", name, is_list=True)


def iter_texts(dataset: Dataset) -> Iterator[tuple[int, Any, Any]]:
    """Iterate over the texts of pairs, with the number of the row; their images are not read."""
    row = 0
    for batch in dataset.with_format(None).select_columns(["prompt", "completion"]).iter(batch_size=1000):
        for prompt, completion in zip(batch["prompt"], batch["completion"], strict=True):
            yield row, prompt, completion
            row += 1


def common_question(dataset: Dataset) -> str | None:
    """Return the question of all pairs, or `None` if they differ or name a theme, of which others have another one."""
    questions: set[str | None] = set()
    for _, prompt, _ in iter_texts(dataset):
        questions.add(content_text(prompt[-1]["content"]))
        if len(questions) > 1:
            return None
    (question,) = questions
    return None if question and question.startswith(theme_question("\0").split("\0")[0]) else question


def check_pair_columns(dataset: Dataset, name: str = "train_dataset") -> None:
    """
    Check that a dataset has the pair format, without reading its images; [`validate_pairs`] also decodes them. Raises
    `ValueError` if it has no rows, a column is missing or of the wrong type, or a row does not have two images, one
    question, and a completion that begins with Yes or No. `name` is the dataset's in errors.
    """
    _check_columns(dataset, name)
    for row, reason in _find_invalid_rows(dataset):
        raise ValueError(f"Row {row} of `{name}`: {reason} Use `validate_pairs(dataset, skip_broken=True)`.")


def _image_error(image: Mapping[str, Any] | None, feature: Image) -> str | None:
    """Describe why an image cannot be decoded, or no judge can be shown it, or None."""
    from ..utils.images import check_sides, to_rgb

    if image is None:
        return "is missing (None)"
    try:
        if image["bytes"] is None:
            refuse_address(image["path"])
        opened = to_rgb(feature.decode_example(image), "It")
        for patch_size in (14, 16):  # of the judges
            check_sides(*opened.size, patch_size)
    # Whatever a decoder raises for a damaged file: OSError, SyntaxError, zlib.error, struct.error, ...
    except Exception as error:
        where = image["path"] if image["bytes"] is None else f"embedded image {image['path'] or ''}".strip()
        return f"({shorten_path(where)}) cannot be decoded: {type(error).__name__}: {error}"
    return None


def _decode_images(dataset: Dataset, num_proc: int | None) -> dict[str, str]:
    """Describe which images of the rows cannot be decoded. An image that occurs in many rows is decoded once."""

    def key_of(image: Mapping[str, Any] | None) -> Any:
        return image and (image["path"], image["bytes"] and hashlib.blake2b(image["bytes"]).digest())

    check = partial(_image_error, feature=dataset.features["images"].feature)
    by_key: dict[Any, str | None] = {}
    errors: dict[str, str] = {}
    stored = dataset.with_format("arrow").select_columns(["images"])  # as Arrow tables, which have them undecoded
    with ThreadPoolExecutor(num_proc or os.cpu_count()) as pool:  # Pillow releases the GIL while it decodes
        for batch in stored.iter(batch_size=64):
            rows = [[(key_of(image), image) for image in images or []] for images in batch["images"].to_pylist()]
            new = {key: image for row in rows for key, image in row if key not in by_key}
            by_key.update(zip(new, pool.map(check, new.values()), strict=True))
            for row in rows:
                errors[str(len(errors))] = " ".join(
                    f"The {name} image {by_key[key]}."
                    for name, (key, _) in zip(_ORDINALS, row, strict=False)
                    if by_key[key]
                )
    return {row: text for row, text in errors.items() if text}


def _cache_file(dataset: Dataset) -> Path:
    """Name the cached result of [`_decode_images`] by the dataset, and by the sizes and times of its image files."""
    # Other versions may decode more, or less
    versions = f"Pillow {version('pillow')}, qwen-vl-utils {version('qwen-vl-utils')}"
    digest = hashlib.sha256(f"{dataset._fingerprint} {versions}\n".encode())
    for path in named_images(dataset)["images"]:
        stat = os.stat(path) if os.path.exists(path) else None
        digest.update(f"{path!r} {(stat.st_size, stat.st_mtime_ns) if stat else 'missing'}\n".encode())
    return Path(datasets.config.HF_DATASETS_CACHE) / "paco_trl" / f"images-{digest.hexdigest()}.json"


def validate_pairs(dataset: Dataset, num_proc: int | None = None, skip_broken: bool = False) -> Dataset:
    """
    Check everything that [`check_pair_columns`] does, and decode every image, before a run ends at a damaged one. Returns
    the valid rows.

    The result is cached with the dataset's fingerprint and the sizes and times of its image files: images are decoded
    again only after one has changed. Not with caching disabled. An image behind a URL is broken.

    Args:
        dataset ([`~datasets.Dataset`]):
            The pairs.
        num_proc (`int`, *optional*):
            Number of threads that decode; one per core if `None`.
        skip_broken (`bool`, *optional*, defaults to `False`):
            Leave broken rows out, with one warning that lists them, instead of raising an error.

    Raises:
        ValueError: If the columns are not those of pairs, or a row is broken.
    """
    from ..utils.files import write_atomically

    _check_columns(dataset, "dataset")
    path = _cache_file(dataset)
    if datasets.is_caching_enabled() and path.is_file():
        image_errors = json.loads(path.read_text(encoding="utf-8"))
    else:
        image_errors = _decode_images(dataset, num_proc)
        if datasets.is_caching_enabled():
            with suppress(OSError):  # a cache that can only be read
                write_atomically(path, json.dumps(image_errors))
    errors = {int(row): text for row, text in image_errors.items()} | dict(_find_invalid_rows(dataset))
    report_broken([f"Row {row}: {errors[row]}" for row in sorted(errors)], len(dataset), "rows", skip_broken)
    return dataset.select([row for row in range(len(dataset)) if row not in errors]) if errors else dataset


def swap_pairs(dataset: Dataset) -> Dataset:
    """
    Add each pair in the other order, (B, A) after (A, B), so that the judge does not learn it. Not in the paper.

    Pairs whose question or answer depends on the order are not added again: the editing questions, and texts that name
    an image by its place, such as "the second image", "on the left", "Image A" or "the latter". The count is logged.
    Images are not decoded.
    """
    free = [row for row, *texts in iter_texts(dataset) if not any(map(_names_a_position, texts))]
    logger.info(f"Swapped {len(free)} of {len(dataset)} pairs: the others depend on the order of their images.")
    swapped = dataset.with_format("arrow").select(free).map(_swap_images, batched=True, batch_size=100)
    swapped.set_format(**dataset.format)
    return concatenate_datasets([dataset, swapped])


def _names_a_position(turns: Any) -> bool:
    turns = [turns] if isinstance(turns, str) else [content_text(turn["content"]) or "" for turn in turns]
    return any(_POSITION.search(_ANSWER_FIRST.sub("", text)) for text in turns)


def _swap_images(batch: pa.Table) -> pa.Table:
    images = batch["images"]
    swapped = pa.array([pair[::-1] for pair in images.to_pylist()], type=images.type)
    return batch.set_column(batch.column_names.index("images"), "images", swapped)
