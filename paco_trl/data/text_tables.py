# SPDX-License-Identifier: Apache-2.0
"""Rows of JSON, CSV and text files, and datasets of rows whose keys differ."""

import csv
import io
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset

from ..utils.data_names import LINES, PARQUET, TABLES, TEXT_DATA, data_ending
from ..utils.text import read_text, shorten
from .columns import criteria_list, is_json_text


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSON, JSON lines, CSV or TSV file, or of plain lines (as `text`), compressed or not."""
    ending = data_ending(path)
    if ending not in TEXT_DATA:
        raise ValueError(
            f"'{path}' is not a data file: its name must end in {', '.join(TEXT_DATA)}, optionally with .gz, or "
            f"{PARQUET}."
        )
    text = read_text(path)
    if ending == LINES:
        return [{"text": line} for line in re.split(r"\r\n?|\n", text) if line.strip()]
    return _read_table(path, text) if ending in TABLES else _read_json_rows(path, text)


def _read_json_rows(path: Path, text: str) -> list[dict[str, Any]]:
    # One list, or any sequence of values: an object per line, or over several lines as `jq` writes them
    decoder = json.JSONDecoder()
    space = re.compile(r"\s*")
    rows = list[Any]()
    end = 0
    while (start := space.match(text, end).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, end = decoder.raw_decode(text, start)
        except ValueError as error:
            line = text.count("\n", 0, start) + 1
            raise ValueError(f"{path}: what begins on line {line} is not valid JSON ({error}). Correct it.") from error
        rows += value if isinstance(value, list) else [value]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"Row {index} of {path} is {shorten(row)}, not an object with the columns as keys.")
    return rows


def _read_table(path: Path, text: str) -> list[dict[str, Any]]:
    separators = "\t" if data_ending(path) == ".tsv" else ",;\t"
    separator = next((char for char in separators if char in text.partition("\n")[0]), separators[0])
    csv.field_size_limit(max(len(text), csv.field_size_limit()))  # an image in base64 is longer than the default
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True, strict=True)
    rows: list[list[str]] = []
    try:
        names = [name.strip() for name in next(lines, [])]
        for row in filter(None, lines):
            if len(row) != len(names):
                raise ValueError(
                    f"'{path}', line {lines.line_num} has {len(row)} fields, not {len(names)} like the header: "
                    f"{shorten(row)}. Quote texts that contain {separator!r}."
                )
            rows.append(row)
    except csv.Error as error:
        raise ValueError(f"'{path}', line {lines.line_num} cannot be read: {error}. Correct its quotes.") from error
    columns = {name: _parse_column([row[index] or None for row in rows]) for index, name in enumerate(names)}
    if len(columns) < len(names) or "" in names[1:]:
        raise ValueError(f"The header of '{path}' is {shorten(names)}. Give each column its own name.")
    columns.pop("", None)  # the index that pandas writes
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _parse_column(texts: list[str | None]) -> list[Any]:
    """Convert a column of texts if all are numbers, or all are true or false."""
    for arrow_type in (pa.int64(), pa.float64(), pa.bool_()):
        with suppress(pa.ArrowInvalid):
            values = pa.array(texts, pa.string()).cast(arrow_type).to_pylist()
            pairs = zip(texts, values, strict=True)
            # "007" is an identifier, as is a number with too many digits
            is_integer = arrow_type == pa.int64()  # parses "0x1f", too
            is_identifier = any(
                text and (is_integer or text.isdigit()) and str(int(value)) != text for text, value in pairs
            )
            return texts if is_identifier else values
    return texts


def dataset_of_rows(rows: list[dict[str, Any]], where: str = "the dataset") -> Dataset:
    """
    Build a dataset with the keys of all rows; `Dataset.from_list` only takes the keys of the first row.

    Columns that Arrow cannot store, or would change (it gives each dictionary the keys of all), are stored as JSON.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if name == "criteria":
            values = [_stored_criteria(index, value) for index, value in enumerate(values)]
        columns[name] = _arrow_column(name, values, where)
    return Dataset(pa.table(columns))


def _stored_criteria(index: int, criteria: Any) -> Any:
    try:
        return criteria_list(criteria) if isinstance(criteria, dict) or is_json_text(criteria) else criteria
    except ValueError as error:
        raise ValueError(f"Row {index}: {error}") from None


def _arrow_column(name: str, values: list[Any], where: str) -> pa.Array:
    with suppress(pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        try:
            column = pa.array(values)
        except UnicodeEncodeError as error:
            row = next(row for row, value in enumerate(values) if "\\ud" in json.dumps(value))
            raise ValueError(f"`{name}` of row {row} of '{where}' has half a character: {error}.") from error
        if column.to_pylist() == values:
            return column
    texts = [None if value is None else json.dumps(value) for value in values]
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts, pa.string()))
