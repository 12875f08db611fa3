# SPDX-License-Identifier: Apache-2.0
"""Check and compare texts: prompts with prompts, instructions with those of a benchmark."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeGuard


# Chinese and Japanese put no blanks between words: each of their characters counts as a word
_CJK = "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # fmt: skip
_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")


def is_text(value: Any) -> TypeGuard[str]:
    """Tell whether a value is a text that is not empty."""
    return isinstance(value, str) and bool(value.strip())


def words_of(text: str) -> list[str]:
    """Split a text without what does not distinguish texts: case, punctuation, whitespace, forms of characters."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return _WORD.findall("".join(" " if unicodedata.category(char).startswith("P") else char for char in text))


def normalized(text: str) -> str:
    """Return what is the same for texts that are the same: their words, see [`words_of`]."""
    return " ".join(words_of(text))


def describe_repeated(prompts: Iterable[str]) -> str | None:
    """Say which prompt is there most often, if any is there several times: a round takes them for different ones."""
    counts = Counter(prompts)
    prompt, count = counts.most_common(1)[0] if counts else ("", 1)
    if count == 1:
        return None
    return f"{counts.total() - len(counts)} row(s) repeat a prompt; {prompt[:40]!r}... is there {count} times."
