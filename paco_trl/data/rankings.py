# SPDX-License-Identifier: Apache-2.0
"""
Rankings: a reference image and candidates, ranked by their consistency with it.

Columns: `reference` (image), `candidates` (list of images), `ranking` (indices of the candidates, best first),
`prompt` and, optionally, `theme`, `criteria` (see [`criteria_dict`]), `group` (rows of the same prompt) and `id`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features

from ..utils.text import is_text, shorten
from .archives import ARCHIVE_PATTERNS, ImageFinder
from .columns import (
    CRITERIA_TYPE,
    check_image_column,
    check_is_dataset,
    check_values,
    column_types,
    criteria_list,
    list_lengths,
)
from .dataset_files import find_dataset_folder
from .grid_prompts import parse_image_set_prompt
from .pairs import make_pair, pair_features
from .questions import theme_question
from .text_tables import read_rows


_COLUMNS = ["reference", "candidates", "ranking", "prompt"]
RANK_FILE = "consistency_full_rank.jsonl"
_PROMPT_FILE = "prompt_data.jsonl"


def check_ranking_columns(dataset: Dataset, name: str = "dataset") -> None:
    """
    Check that a dataset has the format of rankings, without reading its images.

    Raises a `ValueError` if it has no rows, a column is missing or of the wrong type, or a row has fewer than two
    candidates, an empty prompt, or a `ranking` that does not list each candidate exactly once. Errors call the dataset
    `name`.
    """
    check_is_dataset(dataset, name, _COLUMNS)
    check_image_column(dataset, "reference", name)
    check_image_column(dataset, "candidates", name, is_list=True)
    check_values(dataset, name, "prompt", is_text, "a text that is not empty")
    counts = list_lengths(dataset, "candidates").tolist()
    for row, (count, ranking) in enumerate(zip(counts, dataset.with_format(None)["ranking"], strict=True)):
        if count < 2:
            raise ValueError(f"Row {row} of `{name}` has {max(count, 0)} candidates, but a ranking needs at least 2.")
        if not is_permutation(ranking, count):
            raise ValueError(
                f"`ranking` of row {row} of `{name}` is {shorten(ranking)}, but must list the candidates 0 to "
                f"{count - 1} once, best first."
            )


def is_permutation(ranking: Any, count: int) -> bool:
    """Return whether a ranking has each index from 0 to `count - 1` exactly once."""
    is_list = isinstance(ranking, (list, tuple)) and all(type(index) is int for index in ranking)
    return is_list and sorted(ranking) == list(range(count))


def ranking_features() -> Features:
    """Return the column types of rankings."""
    texts = {"id": "string", "group": "string", "prompt": "string", "criteria": CRITERIA_TYPE}
    return column_types(**texts, reference="image", candidates=["image"], ranking=["int64"])


def _read_ranking(record: dict[str, Any], finder: ImageFinder) -> dict[str, Any]:
    """Read reference, candidates and ranking of a record. Errors are worded to follow `<file>, record <number>: `."""
    reference = record.get("ref_image", record.get("ref_img"))
    names = record.get("comp_images", record.get("comparison_images"))
    order = record.get("rank_images")
    if not isinstance(names, list) or len(names) < 2 or len(set(map(str, names))) != len(names):
        raise ValueError(
            f"`comp_images` is {shorten(names)}, but must be a list of at least two different file names."
        )
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(map(str, names)):
        raise ValueError(f"`rank_images` is {shorten(order)}, but must order `comp_images`, {shorten(names)}.")
    folder = PurePath("images", str(record.get("folder")))
    paths = [finder.find(name, folder) for name in [reference, *names]]
    return {"reference": paths[0], "candidates": paths[1:], "ranking": [names.index(name) for name in order]}


def load_consistency_rank(name_or_path: str | Path) -> Dataset:
    """
    Load the published ConsistencyRank benchmark as rankings.

    `X-GenGroup/ConsistencyRank-Bench` has `consistency_full_rank.jsonl` with `folder`, `ref_image`, `comp_images` and
    `rank_images` (best first), `prompt_data.jsonl` with `idx` (the folder), `prompt` and `criteria`, and the images in
    `images/<folder>/` or in `images.zip`, which is extracted once into the cache of `datasets`.

    Args:
        name_or_path (`str` or `Path`):
            Directory, or Hub id of a dataset.

    Returns:
        [`~datasets.Dataset`]: the columns `id` (`"<folder>/<reference>/<n>"` for record `n` of a reference), `group`
        (the folder), `prompt`, `criteria`, `reference`, `candidates` and `ranking`.

    Raises:
        ValueError: If a file does not have JSON objects, or a record is broken.
        shutil.ReadError: If `images.zip` is damaged.
    """
    folder = find_dataset_folder(name_or_path, ["*.jsonl", "images/*", *ARCHIVE_PATTERNS])
    finder = ImageFinder(folder)
    prompts = {str(row["idx"]): row for row in read_rows(folder / _PROMPT_FILE)}
    rows = []
    counts: dict[str, int] = {}
    for record_number, record in enumerate(read_rows(folder / RANK_FILE)):
        group = str(record.get("folder"))
        prefix = f"{group}/{record.get('ref_image', record.get('ref_img'))}"
        counts[prefix] = counts.get(prefix, -1) + 1
        try:
            if group not in prompts:
                raise ValueError(f"its `folder` {shorten(record.get('folder'))} is not an `idx` of {_PROMPT_FILE}.")
            ranking = _read_ranking(record, finder)
        except ValueError as error:
            raise ValueError(f"{RANK_FILE}, record {record_number}: {error}") from error
        texts = {"prompt": prompts[group]["prompt"], "criteria": criteria_list(prompts[group].get("criteria"))}
        rows.append({"id": f"{prefix}/{counts[prefix]}", "group": group, **texts, **ranking})
    return Dataset.from_list(rows, features=ranking_features())


def theme_of(row: Mapping[str, Any]) -> str:
    """Return the theme of a row: its `theme`, the theme of its image-set prompt, or the prompt itself."""
    if is_text(row.get("theme")):
        return row["theme"]
    try:
        return parse_image_set_prompt(row["prompt"]).theme
    except ValueError:
        return row["prompt"]


def default_question(row: Mapping[str, Any]) -> str:
    """Return the question about the theme of a row."""
    return theme_question(theme_of(row))


def _make_pairs(
    batch: pa.Table, rows: list[int], num_positives: int, num_negatives: int, questions: list[str], names: list[str]
) -> dict[str, list[Any]]:
    pairs = []
    for row_index, row in zip(rows, batch.to_pylist(), strict=True):
        best = row["ranking"][:num_positives]
        worst = row["ranking"][-num_negatives:]
        for index, decision in [*((index, "Yes") for index in best), *((index, "No") for index in worst)]:
            pairs.append(row | make_pair(row["reference"], row["candidates"][index], questions[row_index], decision))
    return {name: [pair[name] for pair in pairs] for name in names}


def rankings_to_pairs(
    dataset: Dataset,
    num_positives: int = 1,
    num_negatives: int = 1,
    question: Callable[[dict[str, Any]], str] | None = None,
) -> Dataset:
    """
    Convert rankings to pairs: the reference is consistent with the best candidates, and inconsistent with the worst.

    The paper keeps "clear positives and negatives" without stating their number. The completions are label-only.

    Args:
        dataset ([`~datasets.Dataset`]):
            Rankings. Images are not decoded, and paths stay paths.
        num_positives (`int`, *optional*, defaults to `1`), num_negatives (`int`, *optional*, defaults to `1`):
            Number of best candidates that are consistent, and of worst ones that are inconsistent.
        question (`Callable[[dict], str]`, *optional*):
            Function from a row, without `reference` and `candidates`, to its question. If `None`, [`theme_question`]
            with the row's theme, the theme of its image-set prompt, or its prompt.

    Returns:
        [`~datasets.Dataset`]: the pairs, the reference as the first image, and `group` if the rankings have it.

    Raises:
        ValueError: If the dataset does not have the format of rankings, or a row has too few candidates.
    """
    check_ranking_columns(dataset)
    numbers = {"num_positives": num_positives, "num_negatives": num_negatives}
    if min(numbers.values()) < 1:
        raise ValueError(f"{numbers} must each be at least 1, since the judge needs both answers.")
    counts = list_lengths(dataset, "candidates")
    if counts.min() < num_positives + num_negatives:
        raise ValueError(
            f"Row {counts.argmin()} has {counts.min()} candidates, but {num_positives + num_negatives} are needed."
        )
    features = pair_features()
    if "group" in dataset.column_names:
        features = Features({**features, "group": dataset.features["group"]})
    texts = dataset.with_format(None).remove_columns(["reference", "candidates"])
    questions = [(question or default_question)(row) for row in texts]
    pairs = dataset.with_format("arrow").map(
        _make_pairs,
        with_indices=True,
        batched=True,
        batch_size=100,
        remove_columns=dataset.column_names,
        features=features,
        fn_kwargs=numbers | {"questions": questions, "names": list(features)},
        desc="Making pairs",
    )
    return pairs.with_format(None)
