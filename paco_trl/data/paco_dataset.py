# SPDX-License-Identifier: Apache-2.0
"""Load the published PaCo-Dataset: ShareGPT-style JSON files, with images as files or in archives."""

import json
import re
from pathlib import Path
from typing import Any

from datasets import Dataset, Features

from .archives import ARCHIVE_PATTERNS, ImageFinder
from .columns import column_types
from .dataset_files import find_dataset_folder, image_file, read_rows, report_broken
from .pairs import check_pair_texts, pair_features


# What the paper trains on; `consistency_reward_cot_test` is its evaluation set
_TRAINING_FILES = ["consistency_reward_cot_train", "sharegpt_editing_cot"]
_PATTERNS = ["*.json", "*.sh", "*.png", "*.jpg", "*.jpeg", "*.webp", *ARCHIVE_PATTERNS]

_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_PLACEHOLDER = "<image>"


def _read_pair(record: dict[str, Any], finder: ImageFinder) -> dict[str, Any]:
    """Read a record. The errors continue `<file>, record <number>: `."""
    turns = record.get("conversations", record.get("messages"))
    if not isinstance(turns, list):
        raise ValueError(f"it has no list of turns in `conversations` or `messages`, only the keys {list(record)}.")
    named = [
        {"role": _ROLES.get(turn.get("from", turn.get("role"))), "content": turn.get("value", turn.get("content"))}
        for turn in turns
    ]
    if record.get("system") and len(named) == 2:
        named.insert(0, {"role": "system", "content": record["system"]})
    *prompt, answer = named
    completion = [{**answer, "content": (answer["content"] or "").strip()}]
    check_pair_texts(prompt, completion)
    if others := [turn["content"] for turn in prompt if not isinstance(turn["content"], str)]:
        raise ValueError(f"a turn has the content {others[0]!r}. It must be a text.")
    text = prompt[-1]["content"]
    count = text.count(_PLACEHOLDER)
    question = re.sub(rf"^\s*{_PLACEHOLDER}\s*{_PLACEHOLDER}", "", text).strip()
    if count not in (0, 2) or _PLACEHOLDER in question or not question:
        raise ValueError(f"its question is {text!r}. Put no or two placeholders `{_PLACEHOLDER}`, before a text.")
    images = record.get("images")
    if not isinstance(images, list) or len(images) != 2:
        raise ValueError(f"its `images` are {images!r}, but a pair has a list of exactly 2 paths.")
    return {
        "images": [finder.find(image) for image in images],
        "prompt": [*prompt[:-1], {"role": "user", "content": question}],
        "completion": completion,
    }


def load_paco_dataset(path: str | Path, files: list[str] | None = None, skip_broken: bool = False) -> Dataset:
    """
    Load the published PaCo-Dataset as pairs.

    The layout is that of `X-GenGroup/PaCo-Dataset`: ShareGPT-style JSON files whose records have `conversations`
    (`from`, `value`) or `messages` (`role`, `content`), and `images`, two paths. Both images come before the question,
    as the weights were trained: the placeholders `<image>` in front of it are removed. LLaMA-Factory's
    `dataset_info.json`, if there is one, maps names to files.

    An image is searched in the directory first, then in its zip and tar archives, which are extracted once into the
    cache of `datasets`. Archives split into parts are not joined: the error has the command. Images are stored as
    paths and not decoded: [`validate_pairs`] does that.

    Args:
        path (`str` or `Path`):
            The directory, or the Hub id of a dataset.
        files (`list[str]`, *optional*):
            Names of datasets in `dataset_info.json`, or of JSON files. If `None`, what the paper trains on:
            `consistency_reward_cot_train` and `sharegpt_editing_cot`.
        skip_broken (`bool`, *optional*, defaults to `False`):
            Leave broken records out, with one warning that lists them. A missing or damaged file is always an error.

    Returns:
        [`~datasets.Dataset`]: the columns `images`, `prompt`, `completion` and `source`, the name in `files`.

    Raises:
        ValueError: If a file is not a list of records, or a record is broken.
        shutil.ReadError: If an archive is damaged, and an image is not in the directory itself.
    """
    folder = find_dataset_folder(path, _PATTERNS)
    finder = ImageFinder(folder)
    info_path = folder / "dataset_info.json"  # LLaMA-Factory's: name -> file
    info = json.loads(info_path.read_text(encoding="utf-8")) if info_path.is_file() else {}
    names = [name.removesuffix(".json") for name in files or _TRAINING_FILES]
    paths = [image_file(info.get(name, {}).get("file_name", f"{name}.json"), [folder]) for name in names]
    rows, broken = [], []
    for name, path_of_file in zip(names, paths, strict=True):
        for number, record in enumerate(read_rows(path_of_file)):
            try:
                rows.append(_read_pair(record, finder) | {"source": name})
            except (ValueError, AttributeError, TypeError) as error:  # also of a turn or text of another type
                broken.append(f"{path_of_file.name}, record {number}: {error}")
    report_broken(broken, len(rows) + len(broken), "records", skip_broken)
    return Dataset.from_list(rows, features=Features({**pair_features(), **column_types(source="string")}))
