# SPDX-License-Identifier: Apache-2.0
"""Write files of JSON lines that only grow: finished records survive a kill."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from .differences import differences
from .files import write_atomically


logger = logging.getLogger(__name__)


def read_lines(path: str | Path) -> list[tuple[int, Any]]:
    """Read a file of JSON lines with their numbers, from 1; an unfinished last line is left out."""
    # Lines end in b"\n" only: `splitlines` would also cut at characters that JSON allows inside a string
    lines = Path(path).read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                records.append((number, json.loads(line)))
            except ValueError as error:
                if number < len(lines):
                    text = f"{path}, line {number} is not valid JSON ({error}). Correct or delete this line."
                    raise ValueError(text) from error
                logger.warning(f"{path} ends in a line that was not written to its end: it is left out.")
    return records


def append_lines(path: str | Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append JSON lines to a file in a single write, flushed to disk; nothing else may write to it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        _end_last_line(file)
        file.write(b"".join(map(json_line, records)))
        file.flush()
        os.fsync(file.fileno())


def json_line(record: Mapping[str, Any]) -> bytes:
    """Encode a record as a line."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass") + b"\n"


def _end_last_line(file: BinaryIO) -> None:
    """Cut off an unfinished last line, or end one that lacks only the line break."""
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


def check_header(path: Path, stored: Any, header: dict[str, Any]) -> None:
    """Raise an error if the first line of a file is not `header`."""
    if not isinstance(stored, dict) or stored.keys() != header.keys():
        raise ValueError(f"{path} exists and is not a result file of this benchmark. Give another path.")
    if different := differences(stored, header):
        raise ValueError(f"{path} has results of another run: {'; '.join(different)}. Move it, or write elsewhere.")


class Journal:
    """Records that survive a kill, in the order of writing; without a path they are in memory only."""

    # A `header` says what the records depend on: a file with another header is refused

    def __init__(self, path: str | Path | None, header: dict[str, Any] | None = None):
        self.path = None if path is None else Path(path)
        lines = read_lines(self.path) if self.path is not None and self.path.exists() else []
        if header is not None and self.path is not None:
            if len(lines) == 1 and isinstance(lines[0][1], dict) and lines[0][1].keys() == header.keys():
                write_atomically(self.path, json_line(lines.pop()[1] | header))  # nothing depends on the header yet
            elif lines:
                check_header(self.path, lines.pop(0)[1], header)
            elif self.path.exists() and not json_line(header).startswith(self.path.read_bytes()):
                raise ValueError(f"{self.path} exists and is not a result file of an evaluation. Give another path.")
            else:
                append_lines(self.path, [header])
        self.records: list[dict[str, Any]] = [record for _, record in lines]

    def append(self, *records: Mapping[str, Any]) -> None:
        """Add records, to the file in a single write. NaN is `None` in them: JSON has no NaN."""
        if self.path is not None:
            append_lines(self.path, records)
        self.records += map(dict, records)
