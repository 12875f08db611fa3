# SPDX-License-Identifier: Apache-2.0
"""Values in messages."""

import textwrap
from collections.abc import Sequence
from typing import Any


def shorten(value: Any) -> str:
    """The representation of a value, cut off after 100 characters."""
    return textwrap.shorten(repr(value), width=100, placeholder="...")


def some_of(names: Sequence[str]) -> str:
    """A list of ten names at most."""
    return f"{', '.join(names[:10])}{', ...' * (len(names) > 10)}"
