# SPDX-License-Identifier: Apache-2.0
"""Texts that are compared: prompts with prompts, instructions with those of a benchmark."""

import unicodedata


def normalized(text: str) -> str:
    """Give a text without what does not make it another one: case, punctuation, whitespace, forms of characters."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(" " if unicodedata.category(char).startswith("P") else char for char in text).split())
