# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines that only grow: what is finished survives a kill."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO


logger = logging.getLogger(__name__)


def read_lines(path: str | Path) -> list[tuple[int, Any]]:
    """
    Read a file of JSON lines. A last line without an end that is no JSON was being written when a process was killed:
    it is left out, with a warning.

    Args:
        path (`str` or `Path`):
            The file.

    Returns:
        `list[tuple[int, Any]]`: number of the line, from 1, and what it holds.

    Raises:
        ValueError: If another line is no JSON.
    """
    records = []
    # Not `splitlines`, which would also cut at characters that JSON allows inside a string
    *lines, last = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate([*lines, last], start=1):
        if not line.strip():
            continue
        try:
            records.append((number, json.loads(line)))
        except ValueError as error:
            if number > len(lines):
                logger.warning(f"{path} ends in a line that was not written to its end: it is left out.")
                continue
            raise ValueError(
                f"{path}, line {number} is not valid JSON ({error}). Correct or delete this line."
            ) from error
    return records


def append_line(path: str | Path, record: Mapping[str, Any]) -> None:
    """
    Add a line of JSON to a file, and onto the disk.

    Args:
        path (`str` or `Path`):
            The file; it and its folder are made. Nothing else may be writing to it at the same time.
        record (`Mapping`):
            Anything that JSON can hold.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        _end_last_line(file)
        file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
        file.flush()
        os.fsync(file.fileno())


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
    """
    A file of JSON lines that only grows: what a stage has done so far.

    A line counts once it is on the disk. A process that is killed while it writes leaves a torn last line, which is
    dropped at the next start.

    Args:
        path (`Path`):
            The file. It is made with the first record.

    Attributes:
        path (`Path`):
            The file.
        records (`list[dict]`):
            What is in it, in the order in which it was written.
    """

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict[str, Any]] = [record for _, record in read_lines(path)] if path.exists() else []

    def append(self, record: Mapping[str, Any]) -> None:
        """
        Write a record to the disk.

        Args:
            record (`Mapping`):
                Anything that JSON can hold.
        """
        append_line(self.path, record)
        self.records.append(dict(record))


class KeyedJournal:
    """
    The finished part of a run: a header that says whose results they are, then one JSON line per record.

    A run that finds its own file goes on where it ended. A half-written last line, which a kill leaves, is dropped. A
    record with `incomplete` that is true may be followed by another one of the same key, which takes its place.

    Args:
        path (`str` or `Path`, *optional*):
            The file; made, with its folder, when it is not there. If `None`, the records are only kept in memory.
        header (`dict[str, Any]`):
            Scorer, dataset and settings: what has to be the same for the records to be of the same run.
        key (`str`):
            The entry of a record that says what it is about.

    Attributes:
        records (`dict[Any, dict[str, Any]]`):
            The records by their key, those found in the file included.

    Raises:
        ValueError: If the file is of another run, is not such a file, or is damaged.
    """

    def __init__(self, path: str | Path | None, header: dict[str, Any], key: str):
        self.records: dict[Any, dict[str, Any]] = {}
        self.key = key
        self.path = Path(path) if path is not None else None
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._resume(header):
            self._write([header])

    def append(self, records: list[dict[str, Any]]) -> None:
        """
        Add records, to the file in a single write.

        Args:
            records (`list[dict[str, Any]]`):
                The records. NaN is `None` in them: JSON has no NaN.
        """
        if self.path is not None:
            self._write(records)
        self.records |= {record[self.key]: record for record in records}

    def _write(self, lines: list[dict[str, Any]]) -> None:
        text = "".join(_json_line(line) for line in lines)
        with open(self.path, "ab") as file:
            file.write(text.encode())

    def _resume(self, header: dict[str, Any]) -> bool:
        content = self.path.read_bytes() if self.path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        if not complete and not _json_line(header).encode().startswith(content):
            raise ValueError(f"{self.path} exists and is no result file of an evaluation. Give another path.")
        # Not `splitlines`, which would also cut at characters that JSON allows inside a string
        for number, line in enumerate(complete.decode(errors="replace").split("\n")[:-1], start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"Line {number} of {self.path} is not valid JSON ({error}): the file is damaged, or no result "
                    "file of an evaluation. Give another path, or delete the lines from there on."
                ) from error
            if number == 1:
                self._check_header(record, header)
            elif record[self.key] in self.records and not self.records[record[self.key]].get("incomplete"):
                raise ValueError(
                    f"Line {number} of {self.path} has the {self.key} {record[self.key]!r} of an earlier line: two "
                    "runs wrote to the file at the same time. Delete it, and run one at a time."
                )
            else:
                self.records[record[self.key]] = record
        if len(complete) < len(content):
            with open(self.path, "r+b") as file:
                file.truncate(len(complete))
        return bool(complete)

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


def _json_line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
