# SPDX-License-Identifier: Apache-2.0
"""Store scores on disk, for runs that are interrupted or have several processes."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from ..utils.files import take_lock, write_atomically
from ..utils.journals import Journal, json_line
from ..utils.processes import wait_for_all
from ..utils.text import shorten, some_of


class Scores(NamedTuple):
    """Complete scores: how they were made, and a record for each key."""

    settings: dict[str, Any]
    records: dict[str, dict[str, Any]]


def read_scores(folder: str | Path, digests: Mapping[str, str], **expected: str) -> list[Scores]:
    """Read all scores of a system whose settings have the expected values."""
    settings_of: dict[str, dict[str, Any]] = {}
    for path in sorted((Path(folder) / "scores").glob("*.jsonl")):
        with open(path, encoding="utf-8") as file:
            header = file.readline()
        settings = json.loads(header) if header else {}  # none yet: a run was killed as it began
        if settings and expected.items() <= settings.items():
            settings_of[settings["scores"]] = settings
    found = []
    for name, settings in settings_of.items():
        store = ScoreStore(folder, name, {key: value for key, value in settings.items() if key != "scores"}, digests)
        records = store.check(store.parts())
        missing = [key for key in digests if key not in records]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(digests)} sets have no scores {name!r} in {store.folder}: {some_of(missing)}. "
                "Rerun the scoring."
            )
        found.append(Scores(settings, {key: records[key] for key in digests}))
    return found


class ScoreStore:
    """Store the scores of one system by one scorer: a record for each set, with `key`, `digest` and `incomplete`."""

    # Each process writes `<name>.<process>.jsonl` and reads all of these files, since the next run may have another number
    # of processes. What has no record, or an incomplete one, is `pending`. Records of other settings are an error; those
    # of other images are too, or are dropped with `rescore_changed`
    def __init__(
        self,
        folder: str | Path,
        name: str,
        settings: Mapping,
        digests: Mapping[str, str],
        rescore_changed: bool = False,
    ):
        self.folder = Path(folder) / "scores"
        self.name = re.sub(r"[^\w.]+", "-", name).strip("-.") or "scores"
        self.settings = {"scores": name, **settings}
        self.digests = dict(digests)
        self.rescore_changed = rescore_changed
        self.pending: list[str] = []  # of this process
        self.num_done = 0
        self._lock = FileLock(self.folder / f".{self.name}.lock")

    def __enter__(self) -> "ScoreStore":
        from accelerate import PartialState
        from accelerate.utils import gather_object

        process = PartialState()
        wait_for_all()
        self.is_main_process = process.is_main_process
        # The main process checks, and all of them hear the result: none waits for one that has stopped
        problem, parts = gather_object([self._open() if self.is_main_process else None])[0]
        if problem is not None:
            self.__exit__()
            raise ValueError(problem)
        records = self._read(parts)
        gather_object([None])  # no process writes before all have read
        missing = [key for key in self.digests if records.get(key, {"incomplete": True}).get("incomplete")]
        self.num_done = len(self.digests) - len(missing)
        self.pending = missing[process.process_index :: process.num_processes]
        own = self.folder / f"{self.name}.{process.process_index}.jsonl"
        self._own = Journal(own, self.settings, "key")
        return self

    def __exit__(self, *_) -> None:
        if self.is_main_process:
            self._lock.release()

    def append(self, *records: dict[str, Any]) -> None:
        """Add records, in a single write."""
        self._own.append(*records)

    def finish(self) -> dict[str, dict[str, Any]]:
        """Wait for all processes, and give all records in the order of `digests`."""
        from accelerate.utils import gather_object

        wait_for_all()
        records = self._read(self.parts())
        gather_object([None])  # no process releases the lock before all have read
        return {key: records[key] for key in self.digests}

    def parts(self) -> list[Path]:
        """List the files of these scores, one for each process."""
        own = re.compile(rf"{re.escape(self.name)}\.\d+\.jsonl")
        return sorted(path for path in self.folder.glob("*.jsonl") if own.fullmatch(path.name))

    def check(self, parts: list[Path]) -> dict[str, dict[str, Any]]:
        """Read files of these scores, and refuse records of images that have changed or are gone."""
        records = self._read(parts)
        stale = [key for key, record in records.items() if self.digests.get(key) != record["digest"]]
        if stale:
            raise ValueError(
                f"{len(stale)} of the images that have scores in {self.folder} ({self.settings['scores']!r}) have changed "
                f"since, or are gone: {some_of(stale)}. Restore them, or score again with `rescore_changed=True` "
                "(`--rescore_changed True`)."
            )
        return records

    def _open(self) -> tuple[str | None, list[Path]]:
        """Take the lock and check the files: what is wrong, and the files."""
        if problem := take_lock(self._lock, f"the scores {self.settings['scores']!r}", self.folder):
            return problem, []
        parts = self.parts()
        try:
            if self.rescore_changed:
                self._read(parts)  # refuses those of another run, before anything changes
                for path in parts:
                    self._drop_stale(path)
            self.check(parts)
        except ValueError as error:
            return str(error), []
        return None, parts

    def _drop_stale(self, path: Path) -> None:
        records = Journal(path, self.settings, "key").by_key.values()
        kept = [one for one in records if self.digests.get(one["key"]) == one["digest"]]
        if len(kept) < len(records):
            write_atomically(path, b"".join(map(json_line, (self.settings, *kept))))

    def _read(self, parts: list[Path]) -> dict[str, dict[str, Any]]:
        records: dict[str, dict[str, Any]] = {}
        for path in parts:
            for key, record in Journal(path, self.settings, "key").by_key.items():
                earlier = records.get(key, {"incomplete": True})
                if not (record.get("incomplete") or earlier.get("incomplete")):
                    raise ValueError(
                        f"{path} has scores of {shorten(key)}, as does another file there: two runs wrote at once. Delete both."
                    )
                if key not in records or not record.get("incomplete"):
                    records[key] = record
        return records
