# SPDX-License-Identifier: Apache-2.0
"""Repeat the requests of GEdit-Bench's own script, and its reading of the answers; docs/evaluate.md has the rest."""

import ast
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps

from ..utils.chat import ChatRequest
from ..utils.images import data_url
from .gedit_rubric import PLACEHOLDER, valid_scores


# The script's own: one try, and another one when an answer cannot be read
PUBLISHED_ATTEMPTS = 2

_PROMPTS_FILE = Path("GEdit-Bench") / "viescore" / "vie_prompts.py"
# What each question is joined from, line by line
_PARTS = {
    "semantic": ("_context_no_delimit", "_prompts_0shot_two_image_edit_rule", "_prompts_0shot_tie_rule_SC"),
    "quality": ("_context_no_delimit", "_prompts_0shot_rule_PQ"),
}
_DELIMITER = "||V^=^V||"
_MAX_TOKENS = 1400


def read_published_prompts(gedit_repo: str | Path) -> dict[str, str]:
    """Read the questions `semantic`, with `<instruction>` in it, and `quality`. The Python file is parsed and never run."""
    path = Path(gedit_repo).expanduser() / _PROMPTS_FILE
    if not path.is_file():
        raise FileNotFoundError(f"No {path}: give a clone, `git clone https://github.com/stepfun-ai/Step1X-Edit`.")
    try:
        statements = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not a Python file ({error}). Clone the benchmark's repository again.") from error
    texts = {}
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Constant(value=str(text))):
                texts[name] = text
    missing = [name for names in _PARTS.values() for name in names if name not in texts]
    if missing:
        missing = " and ".join(dict.fromkeys(missing))
        raise ValueError(f"{path} has no text {missing}. Clone the version that the protocol repeats.")
    prompts = {kind: "\n".join(texts[name] for name in names) for kind, names in _PARTS.items()}
    if PLACEHOLDER not in prompts["semantic"]:
        raise ValueError(f"The prompt in {path} has no {PLACEHOLDER}: the judge would not know what was to be done.")
    return prompts


def published_request(question: str, images: Sequence[Image.Image]) -> ChatRequest:
    """Build the script's request: the text before the images, JPEG, neither temperature nor seed."""
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    for image in images:
        url = data_url(ImageOps.exif_transpose(image).convert("RGB"), "jpeg")
        content.append({"type": "image_url", "image_url": {"url": url}})
    return ChatRequest([{"role": "user", "content": content}], None, _MAX_TOKENS, None)


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
        return valid_scores(_score_of(_with_quotes(text)))
    return valid_scores(score if isinstance(score, list) else [score])


def _bare_scores(text: str) -> list[float] | None:
    """Scores of an answer that is a number, or has a list of two."""
    found = text[text.find("[") : text.rfind("]") + 1]
    try:
        return valid_scores(json.loads(found) if re.fullmatch(r"\[\d+, ?\d+\]", found) else [int(text)])
    except ValueError:
        return None


def _score_of(text: str) -> Any:
    try:
        return json.loads(text)["score"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _with_quotes(text: str) -> str:
    """Quote names and texts, and put single numbers into lists."""

    def quoted(found: re.Match) -> str:
        name, value, end = found[1], found[2].strip(), found[3]
        if re.fullmatch(r"-?\d+(\.\d+)?", value):
            value = f"[{value}]"
        elif value.lower() not in ("true", "false", "null"):
            value = f'"{value}"'
        return f"{name}: {value}{end}"

    return re.sub(r'(".*?"):(.*?)(,|})', quoted, re.sub(r"(\w+):", r'"\1":', text))
