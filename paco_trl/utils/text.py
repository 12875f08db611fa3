# SPDX-License-Identifier: Apache-2.0
"""Format numbers, texts and tables, for messages and in Markdown."""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any


def shorten(value: Any) -> str:
    """Return the representation of a value, cut off after 100 characters."""
    return textwrap.shorten(repr(value), width=100, placeholder="...")


def some_of(names: Sequence[str]) -> str:
    """Join at most ten names."""
    return f"{', '.join(names[:10])}{', ...' * (len(names) > 10)}"


def number_text(value: float | None, decimals: int = 3, signed: bool = False, missing: str = "n/a") -> str:
    """Format a number; `missing` replaces `None` and non-finite values. With `signed`, zero has no sign."""
    if value is None or not math.isfinite(value):
        return missing
    text = f"{value:{'+' if signed else ''}.{decimals}f}"
    return text if not signed or float(text) else text[1:]


def interval_text(mean: float | None, low: float | None, high: float | None, *, missing: str = "n/a") -> str:
    """Format a mean with its interval in brackets, where there is one."""
    ends = [number_text(end, missing="") for end in (low, high)]
    return number_text(mean, missing=missing) + (f" [{', '.join(ends)}]" if all(ends) else "")


def markdown_text(value: Any) -> str:
    """Escape a value for one line of Markdown: it creates no cells, tags or links."""
    text = " ".join(str(value).split()).replace("\\", "\\\\").replace("|", "\\|")
    return re.sub(r"&(?=[#\w])", "&amp;", text).replace("<", "&lt;").replace("](", "]\\(")


def markdown_table(columns: Iterable[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Build a Markdown table of any values, see [`markdown_text`]."""
    head, *body = ([markdown_text(cell) for cell in row] for row in (columns, *rows))
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))
