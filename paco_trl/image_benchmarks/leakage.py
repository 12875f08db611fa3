# SPDX-License-Identifier: Apache-2.0
"""Find training prompts that occur in the benchmark: a gain on them is not a gain."""

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from ..data.texts import words_of


# Words of a shingle
_WORDS = 5
# Fraction of the shingles of the shorter text that the other must have. The nearest two of the 298 prompts of one half of
# T2IS-Bench have 0.08; a prompt with every tenth word replaced keeps about 0.6 of its shingles, by (1 - 0.1) ** 5
NEAR_DUPLICATE = 0.3
# Shingles that two texts must share, as a run of 24 words does. What the same person writes about other things shares
# set phrases: two of the prompts above have up to 13 ("four-panel images with a 2x2 grid layout portraying a ..."),
# which is more than 0.3 of the first 40 words of one, and edit instructions up to 18 ("while keeping the ... unchanged")
_MIN_SHARED = 20
# Texts with fewer words are too short for that. A text of this length with every tenth word replaced, which leaves five
# of ten shingles, has 20 to share
_SHORT = 44
# Of two texts, the shorter of which is short: fraction of the words of both that are the same, in the same order ...
_SAME = 0.9
# ... and of the words of the shorter one. "Change the background to a city" and "... to a beach" differ in one word:
# where one is replaced a short instruction is another one, where one is added it seldom is
_KEPT = 0.95
# Words that a text can have for each word of another if `_SAME` of both are the same, at the least
_SHORTEST = _SAME / (2 - _SAME)


def find_leaks(training: Sequence[str], benchmark: Sequence[str], ids: Sequence[str]) -> dict[str, Any]:
    """
    Find prompts of a benchmark that were trained on, word for word or nearly.

    Two texts are near-duplicates if the shorter one has at least 0.3 of its sequences of five words in the other, and
    at least 20 of them; and if the shorter one has fewer than 44 words, also if at least 0.95 of its words are in the
    other, in the same order, and they make up at least 0.9 of the words of both. Chinese and Japanese characters count
    as words.

    Args:
        training (`Sequence[str]`), benchmark (`Sequence[str]`), ids (`Sequence[str]`):
            Training prompts; prompts of the benchmark; their ids, each of which is of one prompt.

    Returns:
        `dict[str, Any]`: `num_training_prompts`; `exact` and `near`, a list of `id`, `training_row`, `text` (of the
        training prompt, shortened), and for `near` the `similarity` (the first or the last of the fractions above): for
        each prompt of the benchmark the training prompt that is nearest.
    """
    texts = [words_of(text) for text in training]
    rows_of: dict[str, int] = {}
    with_shingle: dict[tuple[str, ...], list[int]] = {}
    with_word: dict[str, list[int]] = {}
    for row, words in enumerate(texts):
        if rows_of.setdefault(" ".join(words), row) != row:
            continue
        for word in set(words) if len(words) < _SHORT / _SHORTEST else ():
            with_word.setdefault(word, []).append(row)
        for shingle in _shingles(words):
            with_shingle.setdefault(shingle, []).append(row)
    exact, near = [], []
    for name, text in zip(ids, benchmark, strict=True):
        words = words_of(text)
        same = rows_of.get(" ".join(words))
        similarities: dict[int, float] = {}
        if same is None:
            similarities |= _by_shingles(words, texts, with_shingle)
            for row, similarity in _by_order(words, texts, with_word).items():
                similarities[row] = max(similarity, similarities.get(row, 0.0))
        row = max(similarities, key=similarities.__getitem__, default=same)
        if row is None:
            continue
        shown = training[row] if len(training[row]) <= 200 else training[row][:199] + "…"
        found = {"id": name, "training_row": row, "text": shown}
        if same is None:
            near.append({**found, "similarity": similarities[row]})
        else:
            exact.append(found)
    return {"num_training_prompts": len(training), "exact": exact, "near": near}


def _by_shingles(
    words: list[str], texts: list[list[str]], with_shingle: dict[tuple[str, ...], list[int]]
) -> dict[int, float]:
    """Find the texts that share enough sequences of words with another: row -> similarity."""
    own, shared = _shingles(words), dict[int, int]()
    for shingle in own:
        for row in with_shingle.get(shingle, []):
            shared[row] = shared.get(row, 0) + 1
    enough = {row: count for row, count in shared.items() if count >= _MIN_SHARED}
    similarities = {row: count / min(len(own), len(_shingles(texts[row]))) for row, count in enough.items()}
    return {row: similarity for row, similarity in similarities.items() if similarity >= NEAR_DUPLICATE}


def _by_order(words: list[str], texts: list[list[str]], with_word: dict[str, list[int]]) -> dict[int, float]:
    """Find the texts that have nearly the same words as another in the same order, if one is short: row -> similarity."""
    own, similarities = set(words), {}
    # What lacks all of this many words and one more lacks too much. Of the rarest, since few texts have them
    lacking = int(len(words) * (1 - _SHORTEST))
    rarest = sorted(own, key=lambda word: len(with_word.get(word, ())))[: lacking + 1]
    for row in {row for word in rarest for row in with_word.get(word, ())}:
        shorter, both = min(len(words), len(texts[row])), len(words) + len(texts[row])
        least = max(_SAME * both / 2, _KEPT * shorter)
        if shorter >= _SHORT or len(words) - len(own.difference(texts[row])) < least:  # the most that can be the same
            continue
        blocks = SequenceMatcher(None, words, texts[row], autojunk=False).get_matching_blocks()
        same = sum(block.size for block in blocks)
        if same >= least:
            similarities[row] = 2 * same / both
    return similarities


def _shingles(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + _WORDS]) for start in range(len(words) - _WORDS + 1)}
