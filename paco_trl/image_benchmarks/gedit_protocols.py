# SPDX-License-Identifier: Apache-2.0
"""
Ask a judge about an edit, and read its answers: with this project's own questions, in the structure of GEdit-Bench and
VIEScore, or as GEdit-Bench's own script does. docs/evaluate.md lists the differences.
"""

import ast
import json
import math
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageOps

from ..evaluation.runs import check_protocol
from ..utils.chat import ChatRequest
from ..utils.files import read_template
from ..utils.images import data_url
from ..utils.text import read_text


# Stands for the instruction
PLACEHOLDER = "<instruction>"
SEMANTIC, QUALITY = (read_template(f"gedit_{name}.txt").rstrip() for name in ("semantic", "quality"))
# One try, and another one if an answer cannot be read, as in the script
PUBLISHED_ATTEMPTS = 2
# Pixels of an image that is sent, as the benchmark's own script resizes it
_AREA = 512 * 512
# For attempts after the first, which has 0: at 0 an unreadable answer would come again
_RETRY_TEMPERATURE = 0.7
_PUBLISHED_MAX_TOKENS = 1400
_DELIMITER = "||V^=^V||"
_PROMPTS_FILE = Path("GEdit-Bench") / "viescore" / "vie_prompts.py"
# What each published question is joined from, line by line
_QUESTION_PARTS = {
    "semantic": ("_context_no_delimit", "_prompts_0shot_two_image_edit_rule", "_prompts_0shot_tie_rule_SC"),
    "quality": ("_context_no_delimit", "_prompts_0shot_rule_PQ"),
}


class EditProtocol(NamedTuple):
    """How a judge is asked about an edit."""

    questions: dict[str, str]  # `semantic`, about source and edit, and `quality`, about the edit alone
    request: Callable[[str, list[Image.Image], str, int], ChatRequest]  # of a question, images, a seed and the attempt
    read: Callable[[str, bool], Sequence[float] | None]  # reads an answer, of the first or a later attempt
    max_attempts: int


def edit_protocol(protocol: str, gedit_repo: str | Path | None) -> EditProtocol:
    """Return a protocol; the published one has the prompts of a clone of the benchmark."""
    check_protocol(protocol)
    if (protocol == "published") != (gedit_repo is not None):
        raise ValueError(
            f"`gedit_repo` is {gedit_repo!r} and `protocol` {protocol!r}: the published one, and only it, has prompts "
            "of a clone of https://github.com/stepfun-ai/Step1X-Edit."
        )
    if gedit_repo is None:
        return EditProtocol({"semantic": SEMANTIC, "quality": QUALITY}, _request, lambda text, _: read_answer(text), 3)
    prompts = read_published_prompts(gedit_repo)
    return EditProtocol(prompts, _published_request, read_published_answer, PUBLISHED_ATTEMPTS)


def overall(consistency: float, quality: float) -> float:
    """Compute the overall score of an edit (O): the geometric mean sqrt(SC * PQ)."""
    return math.sqrt(consistency * quality)


def _request(question: str, images: list[Image.Image], seed: str, attempt: int) -> ChatRequest:
    content: list[dict[str, Any]] = []
    for image in images:
        # The area and (Pillow's default) the filter of the benchmark's script
        ratio = image.width / image.height
        size = max(1, int(math.sqrt(_AREA * ratio))), max(1, int(math.sqrt(_AREA / ratio)))
        content.append(_image_part(data_url(image.resize(size), "png", compress_level=1)))
    return ChatRequest(
        [{"role": "user", "content": [*content, {"type": "text", "text": question}]}],
        seed=random.Random(f"0/{seed}/{attempt}").getrandbits(31),
        max_tokens=1024,
        temperature=_RETRY_TEMPERATURE if attempt else 0.0,
    )


def _published_request(question: str, images: list[Image.Image], seed: str, attempt: int) -> ChatRequest:
    # The text before the images, JPEG, neither temperature nor seed
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    for image in images:
        content.append(_image_part(data_url(ImageOps.exif_transpose(image).convert("RGB"), "jpeg")))
    return ChatRequest([{"role": "user", "content": content}], None, _PUBLISHED_MAX_TOKENS, None)


def _image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def read_answer(text: str) -> tuple[float, float] | None:
    """Read the two numbers of an answer, which is one JSON object; nothing is guessed."""
    answer = text[text.find("{") : text.rfind("}") + 1]
    # A line may end within a text
    scores = _valid_scores(_score_of(answer, strict=False, object_pairs_hook=_without_repeats))
    return None if scores is None or len(scores) != 2 else (float(scores[0]), float(scores[1]))


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is there twice")
    return values


def _valid_scores(scores: Any) -> list[float] | None:
    """Return a list of numbers from 0 to 10, or `None` for anything else."""
    # `bool` is an `int`; NaN is in no range
    if not isinstance(scores, list) or not scores:
        return None
    return scores if all(type(score) in (int, float) and 0 <= score <= 10 for score in scores) else None


def read_published_prompts(gedit_repo: str | Path) -> dict[str, str]:
    """Read the questions `semantic`, with `<instruction>` in it, and `quality`. The Python file is parsed and never run."""
    path = Path(gedit_repo).expanduser() / _PROMPTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"No {path}: give a clone, `git clone https://github.com/stepfun-ai/Step1X-Edit`.")
    texts = {}
    for statement in ast.parse(read_text(path)).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Constant(value=str(text))):
                texts[name] = text
    missing = [name for names in _QUESTION_PARTS.values() for name in names if name not in texts]
    if missing:
        raise ValueError(f"{path} has no text {missing[0]}. Clone the version that the protocol repeats.")
    prompts = {kind: "\n".join(texts[name] for name in names) for kind, names in _QUESTION_PARTS.items()}
    if PLACEHOLDER not in prompts["semantic"]:
        raise ValueError(f"The prompt in {path} has no {PLACEHOLDER}: the judge would not know what was to be done.")
    return prompts


def read_published_answer(text: str, again: bool) -> list[float] | None:
    """Read an answer as the script does: one score or more, of which the lowest counts; `None` if it cannot read them."""
    if text.count(_DELIMITER) == 2:
        text = text.split(_DELIMITER)[1]
    elif "{" in text and "}" in text:
        text = text[text.find("{") : text.rfind("}") + 1]
    else:
        # The script takes a random score for what it was told twice
        return None if again else _bare_scores(text)
    text = text.strip().replace("\n", "")
    score = _score_of(text)
    if score is None:
        return _valid_scores(_score_of(_with_quotes(text)))
    return _valid_scores(score if isinstance(score, list) else [score])


def _bare_scores(text: str) -> list[float] | None:
    """Scores of an answer that is a number, or has a list of two."""
    listed = text[text.find("[") : text.rfind("]") + 1]
    try:
        return _valid_scores(json.loads(listed) if re.fullmatch(r"\[\d+, ?\d+\]", listed) else [int(text)])
    except ValueError:
        return None


def _score_of(text: str, **how: Any) -> Any:
    try:
        return json.loads(text, **how)["score"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _with_quotes(text: str) -> str:
    """Quote names and texts, and put single numbers into lists."""

    def quoted(match: re.Match) -> str:
        name, value, end = match[1], match[2].strip(), match[3]
        if re.fullmatch(r"-?\d+(\.\d+)?", value):
            value = f"[{value}]"
        elif value.lower() not in ("true", "false", "null"):
            value = f'"{value}"'
        return f"{name}: {value}{end}"

    return re.sub(r'(".*?"):(.*?)(,|})', quoted, re.sub(r"(\w+):", r'"\1":', text))
