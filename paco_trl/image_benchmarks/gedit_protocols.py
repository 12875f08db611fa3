# SPDX-License-Identifier: Apache-2.0
"""
Questions to a judge about edits and the parsing of its answers: this project's questions, in the structure of
GEdit-Bench and VIEScore, or the questions of GEdit-Bench's script. docs/evaluate.md lists the differences.
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

from ..evaluation.scoring import check_protocol
from ..rewards.written_scores import read_scores, score_of, valid_scores
from ..utils.chat import ChatRequest
from ..utils.files import read_template
from ..utils.images import data_url
from ..utils.text import read_text


# Placeholder of the instruction
PLACEHOLDER = "<instruction>"
SEMANTIC, QUALITY = (read_template(f"gedit_{name}.txt").rstrip() for name in ("semantic", "quality"))
# As in the script: one attempt, and another if the answer is unreadable
PUBLISHED_ATTEMPTS = 2
_BEST = 10  # highest score
# Pixels of images for the judge, as in the benchmark's script
_AREA = 512 * 512
# Temperature of later attempts. At 0 the same unreadable answer would come back
_RETRY_TEMPERATURE = 0.7
_PUBLISHED_MAX_TOKENS = 1400
_DELIMITER = "||V^=^V||"
_PROMPTS_FILE = Path("GEdit-Bench") / "viescore" / "vie_prompts.py"
# Texts that are joined to each published question
_QUESTION_TEXTS = {
    "semantic": ("_context_no_delimit", "_prompts_0shot_two_image_edit_rule", "_prompts_0shot_tie_rule_SC"),
    "quality": ("_context_no_delimit", "_prompts_0shot_rule_PQ"),
}


class EditProtocol(NamedTuple):
    """Protocol for questions to a judge about an edit."""

    questions: dict[str, str]  # `semantic`, about source and edit, and `quality`, about the edit alone
    request: Callable[[str, list[Image.Image], str, int], ChatRequest]  # built from question, images, seed and attempt
    read: Callable[[str, bool], Sequence[float] | None]  # parses an answer; the flag is `True` after the first attempt
    max_attempts: int


def load_edit_protocol(protocol: str, gedit_repo: str | Path | None) -> EditProtocol:
    """Return a protocol. The published protocol reads its prompts from a clone of the benchmark."""
    check_protocol(protocol)
    if (protocol == "published") != (gedit_repo is not None):
        raise ValueError(
            f"`gedit_repo` is {gedit_repo!r} and `protocol` {protocol!r}, but the published protocol, and only it, "
            "requires a clone of https://github.com/stepfun-ai/Step1X-Edit."
        )
    if gedit_repo is None:
        return EditProtocol({"semantic": SEMANTIC, "quality": QUALITY}, _request, lambda text, _: read_answer(text), 3)
    prompts = read_published_prompts(gedit_repo)
    return EditProtocol(prompts, _published_request, read_published_answer, PUBLISHED_ATTEMPTS)


def compute_overall(consistency: float, quality: float) -> float:
    """Compute the overall score of an edit (O): the geometric mean sqrt(SC * PQ)."""
    return math.sqrt(consistency * quality)


def _request(question: str, images: list[Image.Image], seed: str, attempt: int) -> ChatRequest:
    content: list[dict[str, Any]] = []
    for image in images:
        # The area of the benchmark's script, and its filter, Pillow's default
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
    # As in the script: text before images, JPEG, and no temperature or seed
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    for image in images:
        content.append(_image_part(data_url(ImageOps.exif_transpose(image).convert("RGB"), "jpeg")))
    return ChatRequest([{"role": "user", "content": content}], None, _PUBLISHED_MAX_TOKENS, None)


def _image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def read_answer(text: str) -> tuple[float, ...] | None:
    """Read the two numbers of an answer, which must be one JSON object."""
    return read_scores(text, 2, _BEST)


def read_published_prompts(gedit_repo: str | Path) -> dict[str, str]:
    """Read the questions `semantic` (with `<instruction>`) and `quality` from a Python file, without running it."""
    path = Path(gedit_repo).expanduser() / _PROMPTS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no {path}. Pass a clone: `git clone https://github.com/stepfun-ai/Step1X-Edit`."
        )
    texts = {}
    for statement in ast.parse(read_text(path)).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Constant(value=str(text))):
                texts[name] = text
    missing = [name for names in _QUESTION_TEXTS.values() for name in names if name not in texts]
    if missing:
        raise ValueError(f"{path} has no text {missing[0]}. Clone the version that this protocol supports.")
    prompts = {kind: "\n".join(texts[name] for name in names) for kind, names in _QUESTION_TEXTS.items()}
    if PLACEHOLDER not in prompts["semantic"]:
        raise ValueError(f"The prompt in {path} has no {PLACEHOLDER}, so the judge would not see the instruction.")
    return prompts


def read_published_answer(text: str, is_retry: bool) -> list[float] | None:
    """Read an answer like the script: one or more scores, of which the lowest counts, or `None` if unreadable."""
    if text.count(_DELIMITER) == 2:
        text = text.split(_DELIMITER)[1]
    elif "{" in text and "}" in text:
        text = text[text.find("{") : text.rfind("}") + 1]
    else:
        # The script draws a random score after a second unreadable answer
        return None if is_retry else _bare_scores(text)
    text = text.strip().replace("\n", "")
    score = score_of(text)
    if score is None:
        return valid_scores(score_of(_with_quotes(text)), _BEST)
    return valid_scores(score if isinstance(score, list) else [score], _BEST)


def _bare_scores(text: str) -> list[float] | None:
    """Read the scores of an answer that is a number, or has a list of two."""
    list_text = text[text.find("[") : text.rfind("]") + 1]
    try:
        scores = json.loads(list_text) if re.fullmatch(r"\[\d+, ?\d+\]", list_text) else [int(text)]
        return valid_scores(scores, _BEST)
    except ValueError:
        return None


def _with_quotes(text: str) -> str:
    """Quote names and texts, and wrap single numbers in lists."""

    def quote(match: re.Match) -> str:
        name = match[1]
        value = match[2].strip()
        end = match[3]
        if re.fullmatch(r"-?\d+(\.\d+)?", value):
            value = f"[{value}]"
        elif value.lower() not in ("true", "false", "null"):
            value = f'"{value}"'
        return f"{name}: {value}{end}"

    return re.sub(r'(".*?"):(.*?)(,|})', quote, re.sub(r"(\w+):", r'"\1":', text))
