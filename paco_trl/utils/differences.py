# SPDX-License-Identifier: Apache-2.0
"""Compare two descriptions: of a run and its checkpoint, or of a stage and its directory."""

import re
from collections.abc import Iterator
from typing import Any

from .text import shorten


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """List the differences of two descriptions, a line each: the entries of `now`, and everything within them."""
    lines = []
    for name, before, value in changes(saved, now):
        words = [_without_digest(before), _without_digest(value)]
        is_content = "" in words or words[0] == words[1]  # of which only digests are known
        lines.append(
            f"{name}: its contents have changed" if is_content
            else f"{name}: {shorten(words[0])}, now {shorten(words[1])}"
        )  # fmt: skip
    return lines


def _without_digest(value: Any) -> Any:
    """Leave out a digest of contents, from which a reader learns nothing; a word before the digest stays."""
    return re.sub(r"(?:^|: )[0-9a-f]{16,64}$", "", value) if isinstance(value, str) else value


def changes(saved: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Find the differences that [`differences`] lists: names, and the two values."""
    for name, value in now.items():
        before = saved.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            within = changes(before, dict.fromkeys(before) | value)
            yield from ((f"{name}/{inner}", *values) for inner, *values in within)
        elif before != value:
            yield name, before, value
