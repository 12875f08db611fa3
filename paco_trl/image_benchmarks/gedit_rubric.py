# SPDX-License-Identifier: Apache-2.0
"""Define this project's own questions about an edit, in the structure of GEdit-Bench and VIEScore, and read the answers."""

import json
import math
from typing import Any

from ..utils.files import read_template
from ..utils.text import shorten


# Stands for the instruction
PLACEHOLDER = "<instruction>"
SEMANTIC, QUALITY = (read_template(f"gedit_{name}.txt").rstrip() for name in ("semantic", "quality"))


def read_answer(text: str) -> tuple[float, float] | None:
    """Read the two numbers of an answer; nothing is guessed, so that any other answer is unreadable."""
    scores = [valid_scores(answer["score"]) for answer in _objects(text) if "score" in answer]
    pairs = {None if one is None or len(one) != 2 else (float(one[0]), float(one[1])) for one in scores}
    return pairs.pop() if len(pairs) == 1 else None


def overall(consistency: float, quality: float) -> float:
    """Compute the overall score of an edit (O): the geometric mean sqrt(SC * PQ)."""
    return math.sqrt(consistency * quality)


def valid_scores(scores: Any) -> list[float] | None:
    """Return a list of numbers from 0 to 10, or `None` for anything else."""
    # `bool` is an `int`; NaN is in no range
    if not isinstance(scores, list) or not scores:
        return None
    return scores if all(type(score) in (int, float) and 0 <= score <= 10 for score in scores) else None


def _objects(text: str) -> list[dict[str, Any]]:
    """Read the outermost JSON objects in a text."""
    decoder = json.JSONDecoder(strict=False, object_pairs_hook=_without_repeats)  # a line may end within a text
    objects, place = [], text.find("{")
    while place >= 0:
        try:
            found, end = decoder.raw_decode(text, place)
            objects.append(found)
        except (ValueError, RecursionError):
            # Something else in braces, or an object that is broken, of which no part is to be taken for the whole
            end = _end_of_braces(text, place)
        place = text.find("{", end)
    return objects


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"a name is there twice: {shorten([name for name, _ in pairs])}")
    return values


def _end_of_braces(text: str, start: int) -> int:
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)
