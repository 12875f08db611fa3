# SPDX-License-Identifier: Apache-2.0
"""Read scores that a model has written as JSON, for rewards and GEdit-Bench. Any other text gives `None`."""

import json
from typing import Any


def read_scores(text: str, count: int, best: float) -> tuple[float, ...] | None:
    """
    Read the `count` numbers, 0 to `best`, under `score` in an answer that has one JSON object, maybe after reasons or
    in a code fence. A single number needs no list.
    """
    answer = text[text.find("{") : text.rfind("}") + 1]
    # Not strict, since strings may have line breaks
    scores = score_of(answer, strict=False, object_pairs_hook=_without_repeats)
    scores = valid_scores(scores if isinstance(scores, list) else [scores], best)
    return tuple(map(float, scores)) if scores is not None and len(scores) == count else None


def score_of(text: str, **options: Any) -> Any:
    """Return the value of `score` in a JSON object, or `None` if the text is no object with this name."""
    try:
        return json.loads(text, **options)["score"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def valid_scores(scores: Any, best: float) -> list[float] | None:
    """Return a list of numbers from 0 to `best`, or `None` for anything else."""
    # Compare types, because a `bool` is an `int`. NaN fails the comparison with 0.
    if not isinstance(scores, list) or not scores:
        return None
    return scores if all(type(score) in (int, float) and 0 <= score <= best for score in scores) else None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name occurs twice")
    return values
