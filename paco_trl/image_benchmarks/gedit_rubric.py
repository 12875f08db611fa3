# SPDX-License-Identifier: Apache-2.0
"""Define this project's own questions about an edit, in the structure of GEdit-Bench and VIEScore, and read the answers."""

import json
import math
from typing import Any

from ..utils.text import shorten


# Stands for the instruction
PLACEHOLDER = "<instruction>"

_ANSWER = """\
Answer with one JSON object and nothing else:
{"reasoning": "<what you see, in at most three sentences>", "score": [<first number>, <second number>]}"""

SEMANTIC = f"""\
You rate an edit of a picture. The first image is the picture before the edit, the second image is the picture after it.
This instruction was to be carried out:

{PLACEHOLDER}

Give two numbers from 0 to 10. Whole numbers are enough.

First number: how far was the instruction carried out?
 0: nothing of what it asks for is to be seen in the second image.
 5: part of it was done, or the right thing was done to the wrong place or in the wrong way.
10: everything that it asks for was done, as it says.

Second number: how well was everything else left alone? Compare what the instruction does not name: people and their
faces, objects, text, background, colours, style, framing.
 0: the second image is another picture.
 5: the picture can be recognised, but several things changed that were not to change.
10: nothing changed but what the instruction asks for and what has to change with it.
If the two images are the same although a change was asked for, the first number is 0.

Do not rate beauty here, and rate each number without regard to the other one.

{_ANSWER}"""

QUALITY = f"""\
You rate the quality of one picture that a program has made. What it was asked for is not to be judged, only what is seen.

Give two numbers from 0 to 10. Whole numbers are enough.

First number: how natural does the picture look?
 0: nothing fits together; light, shadows, sizes or perspective are impossible.
 5: it looks right at first sight, but some part is out of place: its light, its size, its edge, its distance.
10: it looks like one photograph, or one drawing, in which everything belongs together.

Second number: how free is it of flaws?
 0: large parts are blurred, distorted, noisy or torn, or bodies and objects are misshapen.
 5: there are flaws that one sees without searching, such as malformed hands, doubled edges, smears or broken letters.
10: no flaw is found even when one searches.

{_ANSWER}"""


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
