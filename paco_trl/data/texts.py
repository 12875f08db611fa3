# SPDX-License-Identifier: Apache-2.0
"""Check and compare texts: prompts with prompts, instructions with those of a benchmark."""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any


def is_text(value: Any) -> bool:
    """Tell whether a value is a text that is not empty."""
    return isinstance(value, str) and bool(value.strip())


def normalized(text: str) -> str:
    """Remove differences that do not matter: case, punctuation, whitespace, forms of characters."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(" " if unicodedata.category(char).startswith("P") else char for char in text).split())


def describe_repeated(prompts: Iterable[str]) -> str | None:
    """Say which prompt is there most often, if any is there several times: a round takes them for different ones."""
    counts = Counter(prompts)
    prompt, count = counts.most_common(1)[0] if counts else ("", 1)
    if count == 1:
        return None
    return f"{counts.total() - len(counts)} row(s) repeat a prompt; {prompt[:40]!r}... is there {count} times."
