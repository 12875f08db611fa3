# SPDX-License-Identifier: Apache-2.0
"""Read and check texts; format numbers, texts and tables, for messages and in Markdown."""

import bz2
import gzip
import json
import lzma
import math
import re
import unicodedata
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeGuard


# Chinese and Japanese put no blanks between words: each of their characters counts as a word
_CJK = (
    "\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_CJK}]|[^\s{_CJK}]+")


# Ending -> function that opens a compressed file
COMPRESSED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


def read_text(path: str | Path) -> str:
    """Read a user's text file, compressed or not. If it is not UTF-8, a `ValueError` names it."""
    path = Path(path).expanduser()
    try:
        with COMPRESSED.get(path.suffix, open)(path, "rb") as file:
            content = file.read()
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"'{path}' cannot be read: {error}. Compress it again.") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"'{path}' is not UTF-8: its byte {error.start} is 0x{content[error.start]:02x}. Save it as UTF-8."
        ) from error
    if "\0" in text:  # UTF-16 of English text, without its mark
        raise ValueError(f"'{path}' is not UTF-8: it has zero bytes. Save it as UTF-8.")
    return text


def read_json(path: str | Path) -> Any:
    """Read a user's JSON file; errors name the file."""
    text = read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"'{path}' is not valid JSON ({error}). Correct or replace it.") from error


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a value is a non-empty text."""
    return isinstance(value, str) and bool(value.strip())


def split_words(text: str) -> list[str]:
    """Split a text into words, ignoring case, punctuation, whitespace, and forms of characters."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return _WORD.findall("".join(" " if unicodedata.category(char).startswith("P") else char for char in text))


def normalized(text: str) -> str:
    """Return a key that is equal for equivalent texts: their words, see [`split_words`]."""
    return " ".join(split_words(text))


def shorten(value: Any) -> str:
    """Return the representation of a value, cut off after 100 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def shorten_path(path: Any) -> str:
    """Shorten an alleged path that is too long to be one, such as an image in base64."""
    text = str(path)
    return text if len(text) <= 255 else f"{text[:97]}..."


def join_first(names: Sequence[str]) -> str:
    """Join at most ten names."""
    return f"{', '.join(names[:10])}{', ...' * (len(names) > 10)}"


def number_text(value: float | None, signed: bool = False, missing: str = "n/a") -> str:
    """Format a number; `missing` replaces `None` and non-finite values. Only 0 looks like 0, and has no sign."""
    if value is None or not math.isfinite(value):
        return missing
    sign, digits = "+" if signed and value else "z", ".1e" if 0 < abs(value) < 0.0005 else ".3f"  # z: -0.0 is 0
    return f"{value:{sign}{digits}}"


def interval_text(mean: float | None, low: float | None, high: float | None, *, missing: str = "n/a") -> str:
    """Format a mean, with its interval in brackets if there is one."""
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


def without_nan(value: Any) -> Any:
    """Copy a value with `None` for NaN and lists for tuples, as JSON has them."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value
