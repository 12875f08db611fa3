# SPDX-License-Identifier: Apache-2.0
"""Formatting of values in messages."""

import textwrap
from collections.abc import Sequence
from typing import Any


def shorten(value: Any) -> str:
    """Return the representation of a value, cut off after 100 characters."""
    return textwrap.shorten(repr(value), width=100, placeholder="...")


def some_of(names: Sequence[str]) -> str:
    """Join at most ten names."""
    return f"{', '.join(names[:10])}{', ...' * (len(names) > 10)}"
