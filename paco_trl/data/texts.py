# SPDX-License-Identifier: Apache-2.0
"""Check and compare texts: prompts with prompts, instructions with those of a benchmark."""

import unicodedata
from typing import Any


def is_text(value: Any) -> bool:
    """Tell whether a value is a text that is not empty."""
    return isinstance(value, str) and bool(value.strip())


def normalized(text: str) -> str:
    """Remove differences that do not matter: case, punctuation, whitespace, forms of characters."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(" " if unicodedata.category(char).startswith("P") else char for char in text).split())
