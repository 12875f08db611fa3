# SPDX-License-Identifier: Apache-2.0
"""Phrases that must not return to messages, comments and pages: the words are those of the field, in American English."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PHRASES = [
    "(re)?dr[ae]w(n|s|ings?)?|pictures?|folders?|anew|beside|shall|to the bit|nobody",
    "(goes|go|went|gone|going) on|(lies|lie|lay) in",
    "(?<!there )(is|are|was|were) no (?!longer|more|less|one|other|better|worse)[a-z]+",
    r"\w*(colour|behaviour|licence|centre|grey|labelled|labelling|cancelled|neighbour|favour|honour|artefact)\w*",
    "(normal|optim|initial|serial|recogn|organ|summar|quant|real)is(e[ds]?|ing|ation)",
]
FORBIDDEN = re.compile(rf"(?<![\w/.-])({'|'.join(PHRASES)})(?![\w/(=])", re.IGNORECASE)
# Names and code are not prose: they are those of other libraries, or what users already wrote down
CODE = re.compile(r"```.*?```|\w+ \(\[?`|`[^`\n]*`|\{[^{}]*\}|https?://\S+|\]\([^)]*\)", re.DOTALL)
PAGES = [
    "*.md",
    "Makefile",
    "setup.cfg",
    "docs/*.md",
    "examples/**/*.md",
    "examples/**/*.yaml",
    "benchmarks/*.md",
    "paco_trl/templates/*.yaml",
]
PYTHON = ["paco_trl/**/*.py", "examples/**/*.py", "benchmarks/**/*.py"]
FILES = sorted(path for pattern in PAGES + PYTHON for path in ROOT.glob(pattern))
# Prompts behind stored results, and words that models and older cards are searched for
ALLOWED = {
    "benchmarks/reward_overlap.py": ["grey"],
    "benchmarks/reward_scoring.py": ["drawn", "watercolour"],
    "benchmarks/reward_training.py": ["colours"],
    "benchmarks/t2is_scoring.py": ["watercolour"],
    "paco_trl/dataset_building/categories.py": ["draw"],
    "paco_trl/dataset_building/write_reasons.py": [
        "colour",
        "coloured",
        "colours",
        "drawing",
        "drawn",
        "grey",
        "watercolour",
    ],
    "paco_trl/image_benchmarks/card_results.py": ["Licence"],
    "paco_trl/rewards/duplicates.py": ["drawings"],
    "paco_trl/tiny/clip.py": ["drawing"],
    "paco_trl/tiny/qwen2_5_vl.py": ["colour"],
}


def python_prose(source: str):
    """Yield the line and text of each comment and string with a space, f-strings with `{}` for their values."""
    nodes = list(ast.walk(ast.parse(source)))
    f_strings = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in f_strings for part in node.values}
    texts = [(node, node.value) for node in nodes if isinstance(node, ast.Constant) and id(node) not in parts]
    for node in f_strings:
        texts.append((node, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)))
    yield from ((node.lineno, text) for node, text in texts if isinstance(text, str) and " " in text)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def phrases(text: str, is_python: bool) -> list[tuple[int, str]]:
    """Return the line and text of each forbidden phrase."""
    found = []
    for line, prose in python_prose(text) if is_python else [(1, text)]:
        prose = CODE.sub(lambda match: "\n" * match[0].count("\n"), prose)
        found += [(line + prose[: match.start()].count("\n"), match[0]) for match in FORBIDDEN.finditer(prose)]
    return sorted(found)


def test_phrases_are_found():
    page = "Images are drawn anew.\n\nA folder is no file, `draw` is. There is no rest."
    assert phrases(page, False) == [(1, "anew"), (1, "drawn"), (3, "folder"), (3, "is no file")]
    code = 'folder = draw  # a colour\nraise ValueError(f"`{folder}` goes on `folder`")'
    assert phrases(code, True) == [(1, "colour"), (2, "goes on")]


def test_the_license_has_one_name():
    """SPDX's in prose and metadata; the Hub's identifier as code, in quotes or in a card's metadata."""
    spelled = re.compile(r"(?<![`\"\[])apache[\w.-]*( license[\w ,.]*)?", re.IGNORECASE)
    assert [match[0] for match in spelled.finditer("Apache 2.0, [apache-2.0]")] == ["Apache"]
    for path in [*FILES, ROOT / "CITATION.cff", ROOT / "pyproject.toml"]:
        found = {match[0].rstrip(".") for match in spelled.finditer(path.read_text(encoding="utf-8"))}
        assert found <= {"Apache-2.0", "Apache--2.0-blue"}, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_words_are_those_of_the_field(path):
    allowed = ALLOWED.get(str(path.relative_to(ROOT)), [])
    found = phrases(path.read_text(encoding="utf-8"), path.suffix == ".py")
    assert not [phrase for phrase in found if phrase[1] not in allowed]
