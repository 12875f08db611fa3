# SPDX-License-Identifier: Apache-2.0
"""Storage of scores on disk, for interrupted runs and several processes."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..utils.journals import Journal, check_header, read_lines
from ..utils.locks import sole_writer
from ..utils.processes import wait_for_all
from ..utils.text import join_first


class Scores(NamedTuple):
    """Complete scores: their settings, and a record for each key."""

    settings: dict[str, Any]
    records: dict[str, dict[str, Any]]

    @property
    def unanswered(self) -> list[str]:
        """Return the keys with an unanswered question."""
        return [key for key, record in self.records.items() if record["incomplete"]]


class ScoreFiles:
    """Saved scores of a system by a scorer: a record per key, with `digest` and `incomplete`."""

    # Each process appends to `<name>.<process>.jsonl`, but reads all of these files, since the next run may have
    # another number of processes. A record is valid while its digest is in `digests`, so that changed images are
    # scored again
    def __init__(self, folder: str | Path, name: str, settings: Mapping[str, Any], digests: Mapping[str, str]):
        self.folder = Path(folder) / "scores"
        self.name = re.sub(r"[^\w.]+", "-", name).strip("-.") or "scores"
        self.settings = {"scores": name, **settings}
        self.digests = dict(digests)

    def read(self) -> dict[str, dict[str, Any]]:
        """Read the best record of each key: a complete record, or otherwise the record with the most `attempts`."""
        name = re.compile(rf"{re.escape(self.name)}\.\d+\.jsonl")
        best: dict[str, dict[str, Any]] = {}
        for path in sorted(path for path in self.folder.glob("*.jsonl") if name.fullmatch(path.name)):
            lines = [line for _, line in read_lines(path)]
            if len(lines) > 1:  # a header without records does not matter
                check_header(path, lines[0], self.settings)
            for record in lines[1:]:
                if self.digests.get(record["key"]) == record["digest"]:
                    best[record["key"]] = max(best.get(record["key"], record), record, key=_rank)
        return {key: best[key] for key in self.digests if key in best}


class ScoreStore(ScoreFiles):
    """Scores to complete: `pending` is this process's share of the keys without a complete record."""

    def __init__(self, folder: str | Path, name: str, settings: Mapping[str, Any], digests: Mapping[str, str]):
        from accelerate import PartialState
        from accelerate.utils import gather_object

        super().__init__(folder, name, settings, digests)
        process = PartialState()
        self.earlier = self.read()
        gather_object([None])  # wait until all processes have read before any writes
        missing = [key for key in self.digests if self.earlier.get(key, {"incomplete": True})["incomplete"]]
        self.is_main_process = process.is_main_process
        self.is_new = len(missing) == len(self.digests)
        self.pending = missing[process.process_index :: process.num_processes]
        self._journal = Journal(self.folder / f"{self.name}.{process.process_index}.jsonl", self.settings)

    def append(self, *records: dict[str, Any]) -> None:
        """Add records in a single write."""
        self._journal.append(*(record | {"digest": self.digests[record["key"]]} for record in records))

    def finish(self) -> dict[str, dict[str, Any]]:
        """Wait for all processes, and return all records."""
        from accelerate.utils import gather_object

        wait_for_all()
        records = self.read()
        gather_object([None])  # wait until all processes have read before any releases the lock
        return records


def _rank(record: Mapping[str, Any]) -> tuple[bool, int]:
    return not record["incomplete"], record.get("attempts", 0)


@contextmanager
def open_scores(
    folder: str | Path, name: str, settings: Mapping[str, Any], digests: Mapping[str, str]
) -> Iterator[ScoreStore]:
    """Open a store with an exclusive lock."""
    files = ScoreFiles(folder, name, settings, digests)
    with sole_writer(files.folder / files.name, f"the scores {name!r}"):
        yield ScoreStore(folder, name, settings, digests)


def read_scores(folder: str | Path, digests: Mapping[str, str], **expected: str) -> list[Scores]:
    """Read all complete scores of a system with the expected settings."""
    settings_by_name: dict[str, dict[str, Any]] = {}
    for path in sorted((Path(folder) / "scores").glob("*.jsonl")):
        # Empty if a run was killed at its start
        settings: dict[str, Any] = next((line for _, line in read_lines(path)), {})
        if settings and expected.items() <= settings.items():
            settings_by_name[settings["scores"]] = settings
    scores = []
    for name, settings in settings_by_name.items():
        files = ScoreFiles(folder, name, settings, digests)
        records = files.read()
        if missing := [key for key in digests if key not in records]:
            raise ValueError(
                f"{len(missing)} of {len(digests)} images have no scores {name!r} in {files.folder}, or have changed "
                f"since: {join_first(missing)}. Rerun the scoring."
            )
        scores.append(Scores(settings, records))
    return scores
