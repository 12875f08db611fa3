# SPDX-License-Identifier: Apache-2.0
"""Scores on disk: what is finished survives a kill, several processes share the work, and two runs do not mix."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from ..utils.files import take_lock, write_atomically
from ..utils.journals import KeyedJournal, json_line
from ..utils.text import shorten, some_of


class Scores(NamedTuple):
    """Scores that are complete."""

    settings: dict[str, Any]
    records: dict[str, dict[str, Any]]


def read_scores(folder: str | Path, digests: Mapping[str, str], **wanted: str) -> list[Scores]:
    """Read all scores of a system."""
    folder = Path(folder) / "scores"
    settings_of: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        with open(path, encoding="utf-8") as file:
            first = file.readline()
        try:
            settings = json.loads(first)
            if wanted.items() <= settings.items():
                settings_of[settings["scores"]] = settings
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is no file of scores. Move it away.") from error
    found = []
    for name, settings in settings_of.items():
        rest = {key: value for key, value in settings.items() if key != "scores"}
        store = ScoreStore(folder.parent, name, rest, digests)
        lock = FileLock(store.folder / f".{store.name}.lock")
        problem = take_lock(lock, f"the scores {name!r}", folder)
        if problem is not None:
            raise ValueError(problem)
        try:
            records = store.check([part.name for part in store.parts()])
        finally:
            lock.release()
        missing = [key for key in digests if key not in records]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(digests)} sets have no scores {name!r} in {folder}: {some_of(missing)}"
                ". The run that made them did not come to its end, and a mean over the "
                "others would be of something else. Run it again: it goes on where it was."
            )
        found.append(Scores(settings, {key: records[key] for key in digests}))
    return found


class ScoreStore:
    """
    What one scorer says of the pictures of one system, a record for each set of them.

    Each process writes a file of its own, `scores/<name>.<process>.jsonl`, and all of them read all files, so that a
    run goes on with another number of processes. A context manager: it holds a lock, which ends with the process.

    Args:
        folder (`str` or `Path`):
            Folder of the system; `scores` is made in it.
        name (`str`):
            Name of the scores, such as that of the judge. Characters that are not for file names become `-`.
        settings (`Mapping[str, Any]`):
            What has to be the same to go on: scorer, question, benchmark.
        digests (`Mapping[str, str]`):
            Key -> digest of the pictures that are scored, of all that are to be scored.
        rescore_changed (`bool`, *optional*, defaults to `False`):
            Whether records of pictures that have changed, or are not there any more, are dropped. Otherwise they are an
            error.

    Attributes:
        pending (`list[str]`):
            This process's share of the keys that have no record yet.

    Example:

    ```python
    >>> with ScoreStore("evaluation/base", "my-judge", {"judge": "my-judge"}, {"0001/0": "5d41"}) as store:
    ...     for key in store.pending:
    ...         store.append([{"key": key, "digest": "5d41", "score": 0.5}])
    ...     records = store.finish()
    ```
    """

    def __init__(
        self,
        folder: str | Path,
        name: str,
        settings: Mapping[str, Any],
        digests: Mapping[str, str],
        rescore_changed: bool = False,
    ):
        self.folder = Path(folder) / "scores"
        self.name = re.sub(r"[^\w.]+", "-", name).strip("-.") or "scores"
        self.settings = {"scores": name, **settings}
        self.digests = dict(digests)
        self.rescore_changed = rescore_changed
        self.pending: list[str] = []

    def __enter__(self) -> "ScoreStore":
        from accelerate import PartialState
        from accelerate.utils import gather_object

        self._process = PartialState()
        self._lock = FileLock(self.folder / f".{self.name}.lock")
        # The main process repairs and checks, and all of them hear what it found: none waits for one that has stopped
        found = gather_object([self._open() if self._process.is_main_process else None])[0]
        if isinstance(found, str):
            self._release()
            raise ValueError(found)
        records = self._read(found)
        gather_object([None])  # nobody writes before all have read
        # What a scorer gave no score for is asked again
        missing = [key for key in self.digests if records.get(key, {"incomplete": True}).get("incomplete")]
        self.pending = missing[self._process.process_index :: self._process.num_processes]
        own = self.folder / f"{self.name}.{self._process.process_index}.jsonl"
        self._own = KeyedJournal(own, self.settings, "key")
        return self

    def __exit__(self, *_) -> None:
        self._release()

    @property
    def is_main_process(self) -> bool:
        """Whether this process shows what goes on."""
        return self._process.is_main_process

    def append(self, records: list[dict[str, Any]]) -> None:
        """
        Add records, in a single write.

        Args:
            records (`list[dict[str, Any]]`):
                Records with `key`, `digest` and anything that JSON can hold. One with `incomplete` that is true, since
                something could not be scored, is pending again in the next run.
        """
        self._own.append(records)

    def finish(self) -> dict[str, dict[str, Any]]:
        """
        Wait for all processes.

        Returns:
            `dict[str, dict[str, Any]]`: key -> record, in the order of `digests`; the same on every process.
        """
        from accelerate.utils import gather_object

        gather_object([None])
        records = self._read([part.name for part in self.parts()])
        gather_object([None])  # nobody goes on, and lets go of the lock, before all have read
        return {key: records[key] for key in self.digests}

    def parts(self) -> list[Path]:
        """The files of these scores that are there, one of each process."""
        own = re.compile(rf"{re.escape(self.name)}\.\d+\.jsonl")
        return sorted(path for path in self.folder.glob("*.jsonl") if own.fullmatch(path.name))

    def check(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """
        Read files of these scores. A last line that was not written to its end is cut off.

        Args:
            names (`list[str]`):
                Names of the files.

        Returns:
            `dict[str, dict[str, Any]]`: key -> record.

        Raises:
            ValueError: If they were made in another way, or of pictures that are not there any more or have changed.
        """
        records = self._read(names)
        gone = sorted(records.keys() - self.digests.keys())
        changed = [key for key, one in self.digests.items() if key in records and records[key]["digest"] != one]
        for what, keys in (("were changed since", changed), ("are not there any more", gone)):
            if keys:
                raise ValueError(
                    f"{len(keys)} of the pictures that have scores in {self.folder} ({self.settings['scores']!r}) {what}: "
                    f"{some_of(keys)}. Put the pictures back that were scored, or "
                    "score these anew: `rescore_changed=True` (`score --rescore_changed True`)."
                )
        return records

    def _open(self) -> list[str] | str:
        """Take the lock and check what is there: names of the files, or what is wrong with them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        problem = take_lock(self._lock, f"the scores {self.settings['scores']!r}", self.folder)
        if problem is not None:
            return problem
        names = [part.name for part in self.parts()]
        try:
            if self.rescore_changed:
                self._drop_changed(names)
            self.check(names)
        except ValueError as error:
            return str(error)
        return names

    def _drop_changed(self, names: list[str]) -> None:
        self._read(names)  # refuses what is of another run, before anything is changed
        for name in names:
            records = KeyedJournal(self.folder / name, self.settings, "key").records.values()
            kept = [one for one in records if self.digests.get(one["key"]) == one["digest"]]
            if len(kept) < len(records):
                write_atomically(self.folder / name, b"".join(map(json_line, (self.settings, *kept))))

    def _read(self, names: list[str]) -> dict[str, dict[str, Any]]:
        records: dict[str, dict[str, Any]] = {}
        for name in names:
            part = KeyedJournal(self.folder / name, self.settings, "key").records
            for key, record in part.items():
                if key in records and not (record.get("incomplete") or records[key].get("incomplete")):
                    raise ValueError(
                        f"{self.folder / name} has scores of {shorten(key)}, which another file there has too: two runs "
                        f"wrote at the same time. Delete {', '.join(names)}, and run one at a time."
                    )
                if key not in records or not record.get("incomplete"):
                    records[key] = record
        return records

    def _release(self) -> None:
        if self._process.is_main_process:
            self._lock.release()
