# SPDX-License-Identifier: Apache-2.0
"""What the stages that build a dataset share: a folder that a killed stage goes on in, and that is never half written."""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

from ..utils.text import shorten


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


logger = logging.getLogger(__name__)

_SETTINGS = "settings.json"
_REPORT = "report.json"
_DATASET = "dataset"
_MARKERS = ("state.json", "dataset_dict.json")


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """
    Write a file whole or not at all, and onto the disk.

    Args:
        path (`str` or `Path`):
            The file; its folder is made.
        data (`bytes` or `str`):
            What to write; a text as UTF-8.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:60]}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode("utf-8") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # what `open` gives; `mkstemp` makes files that only their owner reads
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def file_name(name: str) -> str:
    """
    Give a name that is safe for a file, different for each id.

    Args:
        name (`str`):
            Any id.

    Returns:
        `str`: the id with everything but letters, digits and `_ - ~` percent-encoded; the full stop too, so that
        `..` is no folder.
    """
    return quote(name, safe="").replace(".", "%2E")


def digest(value: Any) -> str:
    """
    Give a digest of values that JSON can hold, to tell whether a stage still has the same inputs.

    Args:
        value (`Any`):
            Lists, dictionaries (in any order), texts, numbers.

    Returns:
        `str`: SHA-256 of its canonical JSON, as 64 hexadecimal digits.
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


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


def save_with_paths(dataset: "Dataset | DatasetDict", path: str | Path) -> None:
    """
    Save a dataset as [`~datasets.Dataset.save_to_disk`] does, but with images that are given by path left as paths.

    `save_to_disk` copies the file of an image into each row that has it. A panel is in dozens of pairs and rankings:
    here it stays on the disk once, and [`~datasets.load_from_disk`] reads it from its file.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.DatasetDict`]):
            The dataset.
        path (`str` or `Path`):
            Folder to save it in.
    """
    from datasets import DatasetDict
    from datasets.arrow_writer import ArrowWriter

    path = Path(path)
    if isinstance(dataset, DatasetDict):
        empty = DatasetDict({name: split.select([]) for name, split in dataset.items()})
        empty.save_to_disk(str(path), num_shards=dict.fromkeys(dataset, 1))
        splits = {path / name: split for name, split in dataset.items()}
    else:
        dataset.select([]).save_to_disk(str(path), num_shards=1)
        splits = {path: dataset}
    for folder, split in splits.items():
        (file,) = folder.glob("*.arrow")
        with ArrowWriter(path=str(file), features=split.features) as writer:
            for batch in split.with_format("arrow").iter(batch_size=1000):
                writer.write_table(batch)
            writer.finalize()


def _put_in_place(staged: Path, target: Path) -> None:
    """Put a whole folder in the place of another."""
    replaced = target.with_name(target.name + ".replaced")
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(target, replaced)
    os.replace(staged, target)
    shutil.rmtree(replaced, ignore_errors=True)


class StageFolder:
    """
    Folder of one stage.

    It holds `settings.json` (what the stage was started with), what the stage writes as it goes (images, journals), and
    at the end `dataset/` (for [`~datasets.load_from_disk`]) and `report.json`.

    Args:
        path (`str` or `Path`):
            The folder; it is made.
        settings (`dict`, *optional*):
            What the result depends on: options, and digests of the inputs (see [`digest`]). A stage that was stopped
            goes on only with the same ones. `None` for a stage that is done anew each time.

    Raises:
        ValueError: If the folder was begun with other settings.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any] | None = None):
        self.path = Path(path).expanduser().absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        if not self._dataset.exists() and self._replaced.exists():  # killed between the two renames
            os.replace(self._replaced, self._dataset)
        if settings is None:
            return
        file = self.path / _SETTINGS
        # As JSON gives them back, so that a tuple is equal to itself
        settings = json.loads(json.dumps(settings))
        if not file.exists():
            write_atomically(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
            return
        begun = json.loads(file.read_text(encoding="utf-8"))
        if begun != settings and not any(path.is_file() and path != file for path in self.path.rglob("*")):
            # Nothing came of it yet: its first attempt ended in an error
            write_atomically(file, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
            return
        changed = [name for name in {**begun, **settings} if begun.get(name) != settings.get(name)]
        if changed:
            listed = "; ".join(
                f"`{name}` was {shorten(begun.get(name))} and is now {shorten(settings.get(name))}" for name in changed
            )
            raise ValueError(
                f"{self.path} was begun with other settings: {listed}. What is there would be mixed with what is new. "
                "Go on with the settings of before, or give another folder (or delete this one)."
            )

    @property
    def _dataset(self) -> Path:
        return self.path / _DATASET

    @property
    def _replaced(self) -> Path:
        return self.path / f"{_DATASET}.replaced"

    @property
    def images(self) -> Path:
        """Folder for image files."""
        return self.path / "images"

    @property
    def is_done(self) -> bool:
        """Whether the stage came to its end."""
        return any((self._dataset / marker).is_file() for marker in _MARKERS)

    @property
    def settings(self) -> dict[str, Any]:
        """What the stage was started with; empty for one that has no settings."""
        file = self.path / _SETTINGS
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    @property
    def report(self) -> dict[str, Any]:
        """What the stage reported at its end; empty before."""
        file = self.path / _REPORT
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def journal(self, name: str) -> Journal:
        """
        Open a journal of this stage.

        Args:
            name (`str`):
                Its name, without `.jsonl`.

        Returns:
            [`Journal`].
        """
        return Journal(self.path / f"{name}.jsonl")

    def finish(self, dataset: "Dataset | DatasetDict", report: Mapping[str, Any]) -> None:
        """
        Save the result of the stage, in place of an earlier one.

        Args:
            dataset ([`~datasets.Dataset`] or [`~datasets.DatasetDict`]):
                The result. Images given by path stay paths.
            report (`Mapping`):
                Counts and figures for people, as JSON.
        """
        staged = self.path / f"{_DATASET}.saving"
        shutil.rmtree(staged, ignore_errors=True)
        save_with_paths(dataset, staged)
        write_atomically(self.path / _REPORT, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
        _put_in_place(staged, self._dataset)

    def clear(self) -> None:
        """Take away the result of an earlier run, where this one has none."""
        shutil.rmtree(self._dataset, ignore_errors=True)
        (self.path / _REPORT).unlink(missing_ok=True)

    def load(self) -> "Dataset | DatasetDict":
        """
        Load the result.

        Returns:
            [`~datasets.Dataset`] or [`~datasets.DatasetDict`].

        Raises:
            FileNotFoundError: If the stage has not come to its end.
        """
        from datasets import load_from_disk

        if not self.is_done:
            raise FileNotFoundError(
                f"There is no result in {self.path}: the stage {self.path.name!r} was not run, or not to its end. Run "
                "it, or run it again, and it goes on where it was."
            )
        return load_from_disk(str(self._dataset))
