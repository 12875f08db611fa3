# SPDX-License-Identifier: Apache-2.0
"""Evaluate judges on EditReward-Bench of EditScore (https://arxiv.org/abs/2509.23909)."""

import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from ..data.columns import check_image_column, check_is_dataset, list_lengths
from ..data.questions import (
    edit_consistency_question,
    edit_following_question,
    edit_reward_bench_consistency_question,
    edit_reward_bench_following_question,
)
from . import runs


if TYPE_CHECKING:
    from datasets import Dataset


# Dimension of a row -> questions that its scores are made of
QUESTIONS_OF = {
    "prompt_following": ("prompt_following",),
    "consistency": ("consistency",),
    "overall": ("prompt_following", "consistency"),
}
QUESTIONS = {
    "default": {"prompt_following": edit_following_question, "consistency": edit_consistency_question},
    "published": {
        "prompt_following": edit_reward_bench_following_question,
        "consistency": edit_reward_bench_consistency_question,
    },
}
# Tokens of each answer in the published script
PUBLISHED_YES = ("yes", "Yes", "YES", "y", "Y")
PUBLISHED_NO = ("no", "No", "NO", "n", "N")
TEXT_COLUMNS = ("key", "instruction", "task_type", "dimension")
IMAGE_COLUMNS = ("input_image", "output_images")


def evaluate_edit_reward(
    scorer: Any,
    dataset: "Dataset",
    output_path: str | Path | None = None,
    batch_size: int = 16,
    skip_broken: bool = False,
    protocol: str = "default",
) -> dict[str, Any]:
    """
    Measure how often a scorer prefers the edit that people prefer, on EditScore's benchmark (not TIGER-Lab's).

    The score of an edited image is the scorer's answer to the question of the dimension about the pair (input image,
    edited image); that of the dimension `overall` is the geometric mean of both. The edited image is resized to the input
    image first. Both are RGB with transparency on white, and the questions are those of the editing reward. Interrupted
    runs resume, as with [`evaluate_rankings`].

    `protocol="published"` repeats the script that measured the paper's figures, and only its results compare with the
    tables of [`published_tables`]`("EditReward-Bench")` that have this protocol. Its two questions ask for an answer of
    one word, with `<img1>: ` and `<img2>: ` in front of the images. P(Yes) is summed over yes, Yes, YES, y and Y, P(No)
    over no, No, NO, n and N, each if it is among the 20 likeliest tokens; the score is 0 if none of them is. (The script
    also counts the one token that it samples at random.) Transparency is dropped, not put on white.

    Args:
        scorer (`Any`), output_path (`str` or `Path`, *optional*), batch_size (`int`, *optional*, defaults to `16`), skip_broken (`bool`, *optional*, defaults to `False`), protocol (`str`, *optional*, defaults to `"default"`):
            As in [`evaluate_rankings`].
        dataset ([`~datasets.Dataset`]):
            `EditScore/EditReward-Bench`: `key` (names of the two edited images), `instruction`, `input_image`,
            `output_images` (two, the preferred one first), `task_type`, and `dimension`, one of `prompt_following`,
            `consistency` and `overall`. A key that several rows name is scored once.

    Returns:
        `dict[str, Any]`: `settings`, `num_instances`, `skipped` and `num_unanswered` as in [`evaluate_rankings`];
        `num_keys`, the number of distinct edited images; `num_groups` for the intervals (rows that share an image, also
        through others, are one); and `dimensions`: of each dimension in the dataset `strict` and `geq` (`mean` and
        `interval`), `num_rows`, `num_ties` and `task_types`. `strict` is the fraction of rows whose preferred image
        scores higher, averaged over the task types; with `geq` a tie counts as well.

    Raises:
        TypeError: If `scorer` has no `score` or no `name`, or cannot follow the protocol.
        ValueError: If the dataset does not have this form, an image cannot be read, the file is of another run, or the
            scorer gives no finite score for a pair, or a negative one where `overall` needs it.
    """
    runs.check_scorer(scorer, protocol)
    _check_rows(dataset)
    dataset = dataset.with_format(None)  # plain Python values
    settings = {"benchmark": "edit_reward", "protocol": protocol, "scorer": scorer.name}
    run = runs.Run(settings, scorer, dataset, TEXT_COLUMNS, IMAGE_COLUMNS, skip_broken, {})
    parts = _parts(run.rows, protocol)
    asked_of = {part.key: names for part, names in parts}

    def record(part: runs.Part, answers: list[tuple[float, bool]]) -> dict[str, Any]:
        scores = dict(zip(asked_of[part.key], (score for score, _ in answers), strict=True))
        return {"key": part.key, "scores": scores, "unanswered": sum(is_none for _, is_none in answers)}

    words = (PUBLISHED_YES, PUBLISHED_NO)
    records = run.finish(output_path, "key", [part for part, _ in parts], batch_size, record, words, resizes=True)
    scores = {key: record["scores"] for key, record in records.items()}
    groups = _groups(run.rows)
    present = {row["dimension"] for row in run.rows}
    return run.results(
        records,
        num_keys=len(scores),
        num_groups=len(set(groups)),
        dimensions={name: _accuracies(name, run.rows, scores, groups) for name in QUESTIONS_OF if name in present},
    )


def _check_rows(dataset: "Dataset") -> None:
    check_is_dataset(dataset, "dataset")
    missing = [name for name in (*TEXT_COLUMNS, *IMAGE_COLUMNS) if name not in dataset.column_names]
    if missing:
        raise ValueError(f"`dataset` needs the columns {missing}. Load `EditScore/EditReward-Bench`.")
    check_image_column(dataset, "output_images", "dataset", is_list=True)
    check_image_column(dataset, "input_image", "dataset")
    counts = list_lengths(dataset, "output_images")
    instruction_of: dict[str, str] = {}
    for index, row in enumerate(dataset.with_format(None).select_columns(list(TEXT_COLUMNS))):
        keys = row["key"]
        if row["dimension"] not in QUESTIONS_OF:
            raise ValueError(
                f"`dimension` of row {index} is {row['dimension']!r}, not one of {', '.join(QUESTIONS_OF)}."
            )
        if len(keys) != 2 or keys[0] == keys[1] or counts[index] != 2:
            raise ValueError(f"Row {index} must have two edited images, with different names in `key`: {keys!r}.")
        if any(instruction_of.setdefault(key, row["instruction"]) != row["instruction"] for key in keys):
            raise ValueError(f"Row {index} has another instruction than an earlier row with one of its keys {keys!r}.")


def _parts(rows: list[dict[str, Any]], protocol: str) -> list[tuple[runs.Part, list[str]]]:
    """List the keys to score, at the first row that names them, with the names of the questions that any row needs."""
    needed: dict[str, set[str]] = {}
    first: dict[str, tuple[int, int]] = {}
    for index, row in enumerate(rows):
        for place, key in enumerate(row["key"]):
            first.setdefault(key, (index, place))
            needed.setdefault(key, set()).update(QUESTIONS_OF[row["dimension"]])
    parts = []
    for key, (index, place) in first.items():
        names = [name for name in QUESTIONS[protocol] if name in needed[key]]
        questions = [(place, QUESTIONS[protocol][name](rows[index]["instruction"])) for name in names]
        parts.append((runs.Part(key, index, questions), names))
    return parts


def _groups(rows: list[dict[str, Any]]) -> list[int]:
    """Number the groups of rows that share a key, directly or over other rows."""
    number: dict[str, int] = {}
    edges = np.array([[number.setdefault(key, len(number)) for key in row["key"]] for row in rows])  # (rows, 2)
    graph = coo_array((np.ones(len(edges)), edges.T), shape=(len(number), len(number)))
    _, component = connected_components(graph, directed=False)
    return component[edges[:, 0]].tolist()


def _accuracies(dimension: str, rows: list[dict], scores: dict[str, dict], groups: list[int]) -> dict[str, Any]:
    selected = [(row, group) for row, group in zip(rows, groups, strict=True) if row["dimension"] == dimension]
    pairs = [[_score(dimension, scores[key]) for key in row["key"]] for row, _ in selected]
    hits = {
        "strict": [float(preferred > other) for preferred, other in pairs],
        "geq": [float(preferred >= other) for preferred, other in pairs],
    }
    task_types = [row["task_type"] for row, _ in selected]
    groups = [group for _, group in selected]

    by_type = {}
    for name in sorted(set(task_types)):
        places = [place for place, task_type in enumerate(task_types) if task_type == name]
        means = {kind: fmean(values[place] for place in places) for kind, values in hits.items()}
        by_type[name] = {**means, "num_rows": len(places)}
    return {
        **{kind: runs.mean_and_interval(values, groups, strata=task_types) for kind, values in hits.items()},
        "num_rows": len(selected),
        "num_ties": int(sum(hits["geq"]) - sum(hits["strict"])),
        "task_types": by_type,
    }


def _score(dimension: str, scores: dict[str, float]) -> float:
    """Return the score of a dimension; `overall` is sqrt(consistency * prompt_following) (PaCo-RL, Part 2)."""
    if dimension != "overall":
        return scores[dimension]
    if min(scores.values()) < 0:
        raise ValueError(
            f"The scores are {scores}, but a geometric mean is of scores >= 0. Leave out the rows of `overall`."
        )
    return math.sqrt(scores["consistency"] * scores["prompt_following"])
