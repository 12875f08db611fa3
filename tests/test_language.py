# SPDX-License-Identifier: Apache-2.0
"""Phrases that must not return to messages, comments and pages: the words are those of the field, in American English."""

import io
import re
import tokenize
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PHRASES = [
    *("(re)?dr[ae]w(n|s|ings?)?", "pictures?", "folders?", "anew", "beside", "shall", "to the bit", "nobody"),
    *("(goes|go|went|gone|going) on", "(lies|lie|lay) in"),
    "(?<!there )(is|are|was|were) no (?!longer|more|less|one|other|better|worse)[a-z]+",
    r"\w*(colour|behaviour|licence|centre|grey|labelled|labelling|cancelled|neighbour|favour|honour|artefact)\w*",
    "(normal|optim|initial|serial|recogn|organ|summar|quant|real)is(e[ds]?|ing|ation)",
]
FORBIDDEN = re.compile(rf"(?<![\w/.-])({'|'.join(PHRASES)})(?![\w/(=])", re.IGNORECASE)
# Names and code are not prose: they are those of other libraries, or what users already wrote down
CODE = re.compile(r"```.*?```|`[^`\n]*`|\{[^{}]*\}|https?://\S+|\]\([^)]*\)", re.DOTALL)
PATTERNS = [
    "*.md",
    "docs/[!bdhu]*.md",
    "examples/miniature/**/*.md",
    "examples/miniature/**/*.py",
    "examples/**/*.yaml",
    "benchmarks/*.md",
    "benchmarks/*.py",
]
# Texts that are input of models: stored results and a published protocol were made with exactly these
EXCEPTIONS = {
    "benchmarks/reward_overlap.py": ["grey"],
    "benchmarks/reward_scoring.py": ["drawn", "watercolour"],
    "benchmarks/reward_training.py": ["colours"],
    "benchmarks/t2is_scoring.py": ["watercolour"],
}
FILES = sorted(path for pattern in PATTERNS for path in ROOT.glob(pattern))


def phrases(text: str, is_python: bool) -> list[str]:
    """Return the forbidden phrases with their lines; of Python code only comments and strings are read."""
    pieces = [(1, text)]
    if is_python:
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        prose = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", None))  # the last from 3.12 on
        pieces = [(token.start[0], token.string) for token in tokens if token.type in prose and " " in token.string]
    found = []
    for first, piece in pieces:
        piece = CODE.sub(lambda match: "\n" * match[0].count("\n"), piece)
        found += [(first + piece[: m.start()].count("\n"), m[0]) for m in FORBIDDEN.finditer(piece)]
    return [f"line {line}: {phrase}" for line, phrase in found]


def test_phrases_are_found():
    assert phrases("Images are drawn anew.\n\nA folder is no file, `draw` is.", False) == [
        *("line 1: drawn", "line 1: anew", "line 3: folder", "line 3: is no file"),
    ]
    assert phrases('folder = draw  # a colour\nraise ValueError(f"{folder} goes on")', True) == [
        *("line 1: colour", "line 2: goes on"),
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_words_are_those_of_the_field(path):
    found = phrases(path.read_text(encoding="utf-8"), path.suffix == ".py")
    allowed = EXCEPTIONS.get(str(path.relative_to(ROOT)), [])
    assert not [phrase for phrase in found if phrase.split(": ")[1] not in allowed]
