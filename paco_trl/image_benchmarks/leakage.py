# SPDX-License-Identifier: Apache-2.0
"""Detection of training prompts in a benchmark, where gains would be meaningless."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..utils.text import join_first, split_words


# Words per shingle
_SHINGLE_WORDS = 5
# Fraction of the shorter text's shingles that the longer text must share. The two nearest of 298 prompts of T2IS-Bench
# share 0.08; a prompt with every tenth word replaced keeps about 0.6 of its shingles, (1 - 0.1) ** 5
NEAR_DUPLICATE = 0.3
# Shingles that two texts must share. Different texts by the same author share set phrases: two of the prompts above up
# to 13 shingles, and edit instructions up to 18 ("while keeping the ... unchanged")
_MIN_SHARED = 20


def find_leaks(training: Sequence[str], benchmark: Sequence[str], ids: Sequence[str]) -> dict[str, Any]:
    """
    Find prompts of a benchmark that occur in the training data, exactly or nearly.

    Two texts are near-duplicates if they share at least 20 sequences of five words, and at least 0.3 of the sequences
    of the shorter text, so that for short texts only exact matches are found. Case, punctuation and whitespace are
    ignored; Chinese and Japanese characters are words.

    Args:
        training (`Sequence[str]`), benchmark (`Sequence[str]`), ids (`Sequence[str]`):
            Training prompts; prompts of the benchmark; their ids.

    Returns:
        `dict[str, Any]`: `num_training_prompts`, and `exact` and `near`, lists with the `id` of a benchmark prompt and
        its nearest `training_row`.
    """
    training_shingles = [_shingles(split_words(text)) for text in training]
    row_by_text: dict[str, int] = {}
    rows_by_shingle: dict[tuple[str, ...], list[int]] = {}
    for row, text in enumerate(training):
        row_by_text.setdefault(" ".join(split_words(text)), row)
        for shingle in training_shingles[row]:
            rows_by_shingle.setdefault(shingle, []).append(row)
    exact, near = [], []
    for name, text in zip(ids, benchmark, strict=True):
        if (matching_row := row_by_text.get(" ".join(split_words(text)))) is not None:
            exact.append({"id": name, "training_row": matching_row})
            continue
        shingles = _shingles(split_words(text))
        shared_counts = Counter(row for shingle in shingles for row in rows_by_shingle.get(shingle, ()))
        for row, count in shared_counts.most_common(1):
            if count >= max(_MIN_SHARED, NEAR_DUPLICATE * min(len(shingles), len(training_shingles[row]))):
                near.append({"id": name, "training_row": row})
    return {"num_training_prompts": len(training), "exact": exact, "near": near}


def _shingles(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + _SHINGLE_WORDS]) for start in range(len(words) - _SHINGLE_WORDS + 1)}


def leakage_text(leakage: dict[str, Any] | None) -> str:
    """Summarize whether training prompts occur in the benchmark."""
    if leakage is None:
        return "Leakage: not checked, since no training prompts were given."
    training = f"{leakage['num_training_prompts']} training prompts"
    groups = [
        f"{title}: {join_first([prompt['id'] for prompt in leakage[match_type]])}."
        for match_type, title in (("exact", "the same text"), ("near", "nearly the same"))
        if leakage[match_type]
    ]
    return f"Leakage: prompts of the benchmark among the {training}, {' '.join(groups) or 'none.'}"
