# SPDX-License-Identifier: Apache-2.0
"""
Pairs: two images, a question about them, and an answer that begins with Yes or No. PaCo-Reward is trained on pairs.

The format is TRL's conversational prompt-completion format with two images: `images` (list of 2), `prompt` (one user
turn with the question, optionally after a system turn) and `completion` (one assistant turn).
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
import pyarrow.compute as pc
from datasets import Dataset, Features, Image, List, concatenate_datasets

from ..utils.files import write_atomically
from ..utils.images import refuse_address, to_rgb
from ..utils.text import is_text, join_first, shorten, shorten_path
from ..utils.vision_language import check_sides
from .columns import check_image_column, check_is_dataset, column_types, list_lengths
from .dataset_files import report_broken_rows
from .image_paths import unembedded_paths
from .questions import theme_question


logger = logging.getLogger(__name__)

_COLUMNS = ["images", "prompt", "completion"]
_ORDINALS = ["first", "second"]

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_PLACEHOLDER = "<image>"
# Columns with turns in other formats
_TURN_COLUMNS = {"conversations", "messages", "query"}

_DECISION = re.compile(r"(Yes|No)\b")
_LABEL_ONLY = re.compile(r"(Yes|No)\.?\s*")

# 'Answer "Yes" and "No" first' ends every question, with the only "first" that does not refer to an image
_ANSWER_FIRST = re.compile(r"answer\s+[\"'“‘]?yes[\"'”’]?\s+(?:and|or)\s+[\"'“‘]?no[\"'”’]?\s+first", re.IGNORECASE)
# A false match only costs a pair, but a missed match gives a pair a wrong label. Only capital letters name images,
# since the "a" of "image a" is an article
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
            Images; for edits, the original and the edited one.
        question (`str`):
            Question, for example from [`theme_question`].
        decision (`str` or `bool`):
            `"Yes"` or `True` for a consistent pair, `"No"` or `False` for an inconsistent one.
        reasons (`str`, *optional*):
            Reasons that follow the decision: `"Yes. <reasons>"`. If `None`, the pair is label-only: `"Yes"`.
    """
    if isinstance(decision, bool):
        decision = "Yes" if decision else "No"
    if decision not in ("Yes", "No"):
        raise ValueError(f'`decision` is {decision!r}, but the judge answers Yes or No. Pass "Yes", "No" or a `bool`.')
    if not is_text(question):
        raise ValueError(f"`question` is {question!r}, but must be a text that is not empty.")
    if first is None or second is None:
        raise ValueError("A pair has two images, but one is None.")
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
        raise ValueError(
            f"The completion is {shorten(completion)}, but must be a text, or one assistant turn with a text."
        )
    return content_text(completion[0].get("content"))


def decision_of(completion: str | list[dict[str, Any]]) -> str:
    """
    Read the decision, `"Yes"` or `"No"`, at the start of a completion, which is a text or one assistant turn whose
    content is a text or a list of text parts. Raises a `ValueError` unless it begins with this exact word.
    """
    text = _completion_text(completion)
    match = _DECISION.match(text)
    if match is None:
        raise ValueError(
            f"The completion {shorten(text)} does not begin with the word Yes or No. The judge is scored by the first "
            "token, so that case matters, and nothing may come before it, not even a space."
        )
    return match[1]


def is_label_only(completion: str | list[dict[str, Any]]) -> bool:
    """Return whether a completion (see [`decision_of`]) is only Yes or No, with or without a period."""
    decision_of(completion)
    return _LABEL_ONLY.fullmatch(_completion_text(completion)) is not None


def check_pair_texts(prompt: Any, completion: Any) -> None:
    """Check the question and the answer of a pair."""
    roles = _roles(prompt)
    if isinstance(prompt, str) and not isinstance(completion, str):
        raise ValueError(f"The completion is {shorten(completion)}, but must be a text that begins with Yes or No.")
    if roles not in (["user"], ["system", "user"]):
        raise ValueError(
            f"The prompt is {shorten(prompt)}, but must be one user turn, optionally after a system turn."
        )
    content = prompt[-1].get("content")
    if not is_text(content_text(content)):
        raise ValueError(f"The user turn of the prompt has the content {shorten(content)}, but must have a text.")
    if isinstance(content, list) and _count_image_parts(content) != 2:
        raise ValueError(
            f"The user turn has {_count_image_parts(content)} image parts, but must have one per image (2), or none."
        )
    decision_of(completion)


def _with_placeholders(content: Any) -> Any:
    """Join a list of content parts to one text, with placeholders for images."""
    if not isinstance(content, list):
        return content
    return "".join(_PLACEHOLDER if part.get("type") == "image" else part.get("text") or "" for part in content)


def as_turns(row: Mapping[str, Any]) -> dict[str, Any]:
    """
    Read the prompt and completion of a row: columns of these names with turns or texts, or the formats of
    LLaMA-Factory and ms-swift, a list of `conversations` (`from`, `value`) or `messages` (`role`, `content`), or
    `query` and `response`, optionally with `system`. Both images come before the question: the placeholders `<image>`
    in front of it are removed.
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
        raise ValueError(f"a turn has the content {shorten(contents[0])}, but must have a text.")
    text = prompt[-1]["content"]
    question = re.sub(rf"^\s*{_PLACEHOLDER}\s*{_PLACEHOLDER}", "", text).strip()
    if _PLACEHOLDER in question or not question:
        raise ValueError(f"its question is {shorten(text)}. Put two `{_PLACEHOLDER}` or none before a text.")
    return {"prompt": [*prompt[:-1], {"role": "user", "content": question}], "completion": completion}


def as_pairs(dataset: Dataset, name: str, skip_broken: bool | None = False) -> Dataset:
    """Convert rows with texts or turns in other formats, see [`as_turns`], to pairs. No image is read."""
    columns = {*dataset.column_names}
    has_turns = all(isinstance(dataset.features.get(column), List) for column in ("prompt", "completion"))
    if "images" not in columns or has_turns or not (columns >= {*_COLUMNS} or columns & _TURN_COLUMNS):
        return dataset.remove_columns([*columns & {"image", "messages"}]) if has_turns else dataset
    texts = []
    rows = []
    broken = []
    for row_index, row in enumerate(dataset.with_format(None).remove_columns("images")):
        try:
            texts.append(as_turns(row))
            rows.append(row_index)
        except (ValueError, AttributeError, TypeError) as error:  # raised for turns of another type, too
            broken.append(f"Row {row_index} of '{name}': {error}")
    report_broken_rows(broken, len(dataset), "rows", skip_broken)
    features = Features({column: feature for column, feature in pair_features().items() if column != "images"})
    turns = Dataset.from_list(texts, features=features)
    return concatenate_datasets([dataset.select_columns("images").select(rows), turns], axis=1)


def _find_invalid_rows(dataset: Dataset) -> Iterator[tuple[int, str]]:
    """Yield the rows that are not valid pairs, with the reason, without reading images."""
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
        raise ValueError(
            f"TRL would train on the columns {extra} of `{name}`. Remove them: `dataset.remove_columns({extra})`."
        )
    check_image_column(dataset, "images", name, is_list=True)


def iter_texts(dataset: Dataset) -> Iterator[tuple[int, Any, Any]]:
    """Yield the number, prompt and completion of each row, without reading images."""
    row = 0
    for batch in dataset.with_format(None).select_columns(["prompt", "completion"]).iter(batch_size=1000):
        for prompt, completion in zip(batch["prompt"], batch["completion"], strict=True):
            yield row, prompt, completion
            row += 1


def common_question(dataset: Dataset) -> str | None:
    """Return the question that all pairs share, or `None` if they differ, or if it is about a specific theme."""
    questions: set[str | None] = set()
    for _, prompt, _ in iter_texts(dataset):
        questions.add(content_text(prompt[-1]["content"]))
        if len(questions) > 1:
            return None
    (question,) = questions
    return None if question and question.startswith(theme_question("\0").split("\0")[0]) else question


def check_pair_columns(dataset: Dataset, name: str = "train_dataset") -> None:
    """
    Check that a dataset has the pair format, without reading its images; [`validate_pairs`] also decodes them.

    Raises a `ValueError` if it has no rows, a column is missing or of the wrong type, or a row does not have two
    images, one question, and a completion that begins with Yes or No. Errors call the dataset `name`.
    """
    _check_columns(dataset, name)
    for row, reason in _find_invalid_rows(dataset):
        raise ValueError(
            f"Row {row} of `{name}`: {reason} To leave out such rows, use `validate_pairs(dataset, skip_broken=True)`."
        )


def _image_error(image: Mapping[str, Any] | None, feature: Image) -> str | None:
    """Return why an image cannot be decoded or shown to a judge, or `None` if it can."""
    if image is None:
        return "is missing (None)"
    try:
        if image["bytes"] is None:
            refuse_address(image["path"])
        rgb_image = to_rgb(feature.decode_example(image), "It")
        for patch_size in (14, 16):  # of judges
            check_sides(*rgb_image.size, patch_size)
    # Decoders raise many errors for damaged files: OSError, SyntaxError, zlib.error, struct.error, ...
    except Exception as error:
        where = image["path"] if image["bytes"] is None else f"embedded image {image['path'] or ''}".strip()
        return f"({shorten_path(where)}) cannot be decoded: {type(error).__name__}: {error}"
    return None


def _decode_images(dataset: Dataset, num_proc: int | None) -> dict[int, str]:
    """Describe the images that cannot be decoded, by row. An image shared by rows is decoded once."""

    def key_of(image: Mapping[str, Any] | None) -> Any:
        return image and (image["path"], image["bytes"] and hashlib.blake2b(image["bytes"]).digest())

    check = partial(_image_error, feature=dataset.features["images"].feature)
    error_by_key: dict[Any, str | None] = {}
    errors: list[str] = []  # of each row
    arrow_images = dataset.with_format("arrow").select_columns(["images"])  # not decoded
    with ThreadPoolExecutor(num_proc or os.cpu_count()) as pool:  # Pillow releases the GIL while decoding
        for batch in arrow_images.iter(batch_size=64):
            rows = [[(key_of(image), image) for image in images or []] for images in batch["images"].to_pylist()]
            new_images = {key: image for row in rows for key, image in row if key not in error_by_key}
            error_by_key.update(zip(new_images, pool.map(check, new_images.values()), strict=True))
            for row in rows:
                named_keys = zip(_ORDINALS, (key for key, _ in row), strict=False)
                texts = [f"The {name} image {error_by_key[key]}." for name, key in named_keys if error_by_key[key]]
                errors.append(" ".join(texts))
    return {row: text for row, text in enumerate(errors) if text}


def _cache_file(dataset: Dataset) -> Path:
    """Return the cache file of [`_decode_images`], named after the dataset and sizes and times of its image files."""
    # Other versions may decode other files
    versions = f"Pillow {version('pillow')}, qwen-vl-utils {version('qwen-vl-utils')}"
    digest = hashlib.sha256(f"{dataset._fingerprint} {versions}\n".encode())
    for path in unembedded_paths(dataset)["images"]:
        stat = os.stat(path) if os.path.exists(path) else None
        digest.update(f"{path!r} {(stat.st_size, stat.st_mtime_ns) if stat else 'missing'}\n".encode())
    return Path(datasets.config.HF_DATASETS_CACHE) / "paco_trl" / f"images-{digest.hexdigest()}.json"


def _find_contradictions(dataset: Dataset) -> list[tuple[int, int]]:
    """Find pairs with the images and the question of an earlier pair, but the other answer. No image is decoded."""
    arrow_images = dataset.with_format("arrow").select_columns(["images"])
    keys: list[str | int] = []  # path, or the number of embedded bytes, which few images share
    for batch in arrow_images.iter(batch_size=1000):
        images = pc.list_flatten(batch["images"])
        lengths = pc.binary_length(pc.struct_field(images, "bytes")).to_pylist()
        paths = pc.struct_field(images, "path").to_pylist()
        keys += [path if length is None else length for path, length in zip(paths, lengths, strict=True)]

    answers: dict[Any, list[tuple[int, str]]] = {}
    for row, prompt, completion in iter_texts(dataset):
        in_order = tuple if _mentions_position(prompt) else frozenset
        key = (str(prompt), in_order(keys[2 * row : 2 * row + 2]))
        answers.setdefault(key, []).append((row, decision_of(completion)))

    contradictions = []
    for (_, order), rows in answers.items():
        if len({decision for _, decision in rows}) == 1:
            continue
        firsts: dict[Any, tuple[int, str]] = {}
        for row, decision in rows:
            (images,) = arrow_images[row]["images"].to_pylist()
            contents = type(order)(image["path"] if image["bytes"] is None else image["bytes"] for image in images)
            first, first_decision = firsts.setdefault(contents, (row, decision))
            if decision != first_decision:
                contradictions.append((first, row))
    return sorted(contradictions, key=lambda rows: rows[1])


def validate_pairs(dataset: Dataset, num_proc: int | None = None, skip_broken: bool = False) -> Dataset:
    """
    Check pairs like [`check_pair_columns`], and also decode every image, so that a damaged one does not end a run.
    Returns the valid rows, with a warning about rows that contradict one another.

    Unless caching is disabled, the result is cached by the dataset's fingerprint and the sizes and times of its image
    files, and images are only decoded again after one has changed. Images behind URLs count as broken.

    Args:
        dataset ([`~datasets.Dataset`]):
            Pairs.
        num_proc (`int`, *optional*):
            Number of decoding threads. If `None`, one per core.
        skip_broken (`bool`, *optional*, defaults to `False`):
            Whether to leave out broken rows, with a warning that lists them, instead of raising an error.

    Raises:
        ValueError: If the dataset does not have the columns of pairs, or a row is broken.
    """
    _check_columns(dataset, "dataset")
    path = _cache_file(dataset)
    if datasets.is_caching_enabled() and path.is_file():
        image_errors = json.loads(path.read_text(encoding="utf-8"))
    else:
        image_errors = _decode_images(dataset, num_proc)
        if datasets.is_caching_enabled():
            with suppress(OSError):  # the cache may be read-only
                write_atomically(path, json.dumps(image_errors))
    errors = {int(row): text for row, text in image_errors.items()} | dict(_find_invalid_rows(dataset))
    report_broken_rows([f"Row {row}: {errors[row]}" for row in sorted(errors)], len(dataset), "rows", skip_broken)
    rows = [row for row in range(len(dataset)) if row not in errors]
    valid_pairs = dataset.select(rows) if errors else dataset
    if contradictions := [f"{rows[first]} and {rows[second]}" for first, second in _find_contradictions(valid_pairs)]:
        logger.warning(
            f"{len(contradictions)} of {len(rows)} pairs repeat the images and the question of an earlier pair with "
            f"the other answer, rows {join_first(contradictions)}. Correct one of each, or leave both out."
        )
    return valid_pairs


def swap_pairs(dataset: Dataset) -> Dataset:
    """
    Append each pair in reverse order, so that the judge does not learn from the order. Not in the paper.

    Pairs whose question or answer depends on the order are not reversed: editing questions, and texts that refer to an
    image by position, such as "the second image", "on the left", "Image A" or "the latter". The count is logged.
    Images are not decoded.
    """
    swappable_rows = [row for row, *texts in iter_texts(dataset) if not any(map(_mentions_position, texts))]
    logger.info(
        f"Swapped {len(swappable_rows)} of {len(dataset)} pairs. The others depend on the order of their images."
    )
    swapped_pairs = dataset.with_format("arrow").select(swappable_rows).map(_swap_images, batched=True, batch_size=100)
    swapped_pairs.set_format(**dataset.format)
    return concatenate_datasets([dataset, swapped_pairs])


def _mentions_position(turns: Any) -> bool:
    turns = [turns] if isinstance(turns, str) else [content_text(turn["content"]) or "" for turn in turns]
    return any(_POSITION.search(_ANSWER_FIRST.sub("", text)) for text in turns)


def _swap_images(batch: pa.Table) -> pa.Table:
    images = batch["images"]
    swapped_pairs = pa.array([pair[::-1] for pair in images.to_pylist()], type=images.type)
    return batch.set_column(batch.column_names.index("images"), "images", swapped_pairs)
