# SPDX-License-Identifier: Apache-2.0
"""Find training prompts that occur in the benchmark: a gain on them is not a gain."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..utils.text import some_of, words_of


# Words of a shingle
_SHINGLE_WORDS = 5
# Fraction of the shingles of the shorter text that the other must have. The nearest two of the 298 prompts of one half of
# T2IS-Bench have 0.08; a prompt with every tenth word replaced keeps about 0.6 of its shingles, by (1 - 0.1) ** 5
NEAR_DUPLICATE = 0.3
# Shingles that two texts must share. What the same person writes about other things shares set phrases: two of the
# prompts above have up to 13, and edit instructions up to 18 ("while keeping the ... unchanged")
_MIN_SHARED = 20


def find_leaks(training: Sequence[str], benchmark: Sequence[str], ids: Sequence[str]) -> dict[str, Any]:
    """
    Find prompts of a benchmark that were trained on, word for word or nearly.

    Two texts are near-duplicates if the shorter one has at least 0.3 of its sequences of five words in the other, and at
    least 20 of them: of short ones only the same text is found. Case, punctuation and whitespace do not count; Chinese
    and Japanese characters are words.

    Args:
        training (`Sequence[str]`), benchmark (`Sequence[str]`), ids (`Sequence[str]`):
            Training prompts; prompts of the benchmark; their ids.

    Returns:
        `dict[str, Any]`: `num_training_prompts`; `exact` and `near`, lists of the `id` of a prompt of the benchmark, and
        the `training_row` that is nearest.
    """
    texts = [_shingles(words_of(text)) for text in training]
    row_of: dict[str, int] = {}
    with_shingle: dict[tuple[str, ...], list[int]] = {}
    for row, text in enumerate(training):
        row_of.setdefault(" ".join(words_of(text)), row)
        for shingle in texts[row]:
            with_shingle.setdefault(shingle, []).append(row)
    exact, near = [], []
    for name, text in zip(ids, benchmark, strict=True):
        if (same := row_of.get(" ".join(words_of(text)))) is not None:
            exact.append({"id": name, "training_row": same})
            continue
        shingles = _shingles(words_of(text))
        shared = Counter(row for shingle in shingles for row in with_shingle.get(shingle, ()))
        for row, count in shared.most_common(1):
            if count >= max(_MIN_SHARED, NEAR_DUPLICATE * min(len(shingles), len(texts[row]))):
                near.append({"id": name, "training_row": row})
    return {"num_training_prompts": len(training), "exact": exact, "near": near}


def _shingles(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + _SHINGLE_WORDS]) for start in range(len(words) - _SHINGLE_WORDS + 1)}


def leakage_text(leakage: dict[str, Any] | None) -> str:
    """Say whether training prompts occur in the benchmark."""
    if leakage is None:
        return "Leakage: not checked: the training prompts were not given."
    training = f"{leakage['num_training_prompts']} training prompts"
    groups = [f"{title}: {some_of([prompt['id'] for prompt in leakage[kind]])}."
             for kind, title in (("exact", "the same text"), ("near", "nearly the same")) if leakage[kind]]  # fmt: skip
    return f"Leakage: prompts of the benchmark among the {training}, {' '.join(groups) or 'none.'}"
