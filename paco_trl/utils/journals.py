# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines that only grow: what is finished survives a kill."""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO


logger = logging.getLogger(__name__)


def read_lines(path: str | Path) -> list[tuple[int, Any]]:
    """Read a file of JSON lines with their numbers, from 1, without a last line that was not written to its end."""
    *lines, last = Path(path).read_bytes().split(b"\n")
    records = list(
        _parsed(lines, "{path}, line {number} is not valid JSON ({error}). Correct or delete this line.", path)
    )
    if last.strip():
        try:
            records.append((len(lines) + 1, json.loads(last)))
        except ValueError:
            logger.warning(f"{path} ends in a line that was not written to its end: it is left out.")
    return records


def _parsed(lines: Sequence[bytes], damaged: str, path: str | Path) -> Iterator[tuple[int, Any]]:
    # Lines end in b"\n" only: `splitlines` would also cut at characters that JSON allows inside a string
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(damaged.format(path=path, number=number, error=error)) from error


def append_lines(path: str | Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Add lines of JSON to a file, in a single write and onto the disk; nothing else may be writing to it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        _end_last_line(file)
        file.write(b"".join(map(json_line, records)))
        file.flush()
        os.fsync(file.fileno())


def json_line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of a journal."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass") + b"\n"


def _end_last_line(file: BinaryIO) -> None:
    """Cut off a line that was not written to its end; end one that only lacks its end."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    last = file.read().rpartition(b"\n")[2]
    try:
        json.loads(last)
    except ValueError:
        file.truncate(end - len(last))
    else:
        file.write(b"\n")


class Journal:
    """What a stage has done so far, in the order in which it was written."""

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict[str, Any]] = [record for _, record in read_lines(path)] if path.exists() else []

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record to the disk."""
        append_lines(self.path, [record])
        self.records.append(dict(record))


class KeyedJournal:
    """A journal whose header says whose records it has, one for each key; only in memory without a path."""

    # A record with `incomplete` that is true may be followed by another one of the same key, which takes its place

    def __init__(self, path: str | Path | None, header: dict[str, Any], key: str):
        self.records: dict[Any, dict[str, Any]] = {}
        self.key = key
        self.path = Path(path) if path is not None else None
        if self.path is not None and not self._resume(header):
            append_lines(self.path, [header])

    def append(self, records: list[dict[str, Any]]) -> None:
        """Add records, to the file in a single write. NaN is `None` in them: JSON has no NaN."""
        if self.path is not None:
            append_lines(self.path, records)
        self.records |= {record[self.key]: record for record in records}

    def _resume(self, header: dict[str, Any]) -> bool:
        """Read what is there; whether anything is."""
        content = self.path.read_bytes() if self.path.exists() else b""
        *lines, torn = content.split(b"\n")
        damaged = (
            "Line {number} of {path} is not valid JSON ({error}): the file is damaged, or no result file of an "
            "evaluation. Give another path, or delete the lines from there on."
        )
        found = list(_parsed(lines, damaged, self.path))
        if found:
            self._check_header(found[0][1], header)
        elif not json_line(header).startswith(content):
            raise ValueError(f"{self.path} exists and is no result file of an evaluation. Give another path.")
        for number, record in found[1:]:
            name = record[self.key]
            if name in self.records and not self.records[name].get("incomplete"):
                raise ValueError(
                    f"Line {number} of {self.path} has the {self.key} {name!r} of an earlier line: two runs wrote to "
                    "the file at the same time. Delete it, and run one at a time."
                )
            self.records[name] = record
        if torn:
            os.truncate(self.path, len(content) - len(torn))
        return bool(found)

    def _check_header(self, found: Any, wanted: dict[str, Any]) -> None:
        if not isinstance(found, dict) or found.keys() != wanted.keys():
            raise ValueError(f"{self.path} exists and is no result file of this benchmark. Give another path.")
        different = [
            f"`{name}` is {found[name]!r} there and {wanted[name]!r} now"
            for name in wanted
            if found[name] != wanted[name]
        ]
        if different:
            raise ValueError(
                f"{self.path} has the results of another run: {'; '.join(different)}. Give another path, or delete "
                "the file to begin anew."
            )
