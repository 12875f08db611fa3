# SPDX-License-Identifier: Apache-2.0
"""
Annotations: the order in which an annotator puts the candidates of a ranking instance.

Each annotator has a file of JSON lines, with a record for each ranked instance:

    {"annotator": "anna", "instance": "fox/0/1/3", "ranking": [2, 0, 1, 3]}           # candidates, best first
    {"annotator": "judge", "instance": "fox/0/1/3", "ranks": [2, 3, 1, 3]}            # rank of each, equal = tied
    {"annotator": "anna", "instance": "fox/0/1/4", "skipped": true}                   # looked at, not ranked

A record may have the `digest` of the instance's images ([`instance_digest`]): a ranking of other images is an error.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from filelock import FileLock

from ..data.columns import by_id
from ..data.rankings import is_order
from ..utils.files import digest, take_lock
from ..utils.journals import append_lines, read_lines
from ..utils.text import shorten
from .label_studio import records_of_label_studio


if TYPE_CHECKING:
    from datasets import Dataset


# The annotator that stands for the construction
AUTOMATIC = "automatic"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_REMEDY = "Nothing was imported. Correct the file and try again."


class Annotation(NamedTuple):
    """Ranking of one instance by one annotator."""

    annotator: str  # name of the annotator
    instance: str  # id of the ranking instance
    # Rank of each candidate: 1 is the most consistent, equal ranks are tied. `None` for a skipped instance
    ranks: tuple[int, ...] | None


def instance_digest(reference: str, candidates: Sequence[str]) -> str:
    """Compute the digest of the images of an instance, in their order."""
    return digest([reference, *candidates])[:16]


def keyed_hash(*key: int | str) -> int:
    """Compute a number that looks random and depends on its key alone."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, key)).encode("utf-8", "surrogatepass")).digest(), "big")


def check_annotator(name: Any) -> str:
    """Check the name of an annotator, which is also the name of a file."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.startswith("."):
        rule = "1 to 40 letters (a to z), digits, `.`, `_` or `-`, and not begin with `.`: it names a file"
        raise ValueError(f"The annotator's name is {shorten(name)}. It must have {rule}.")
    return name


def ranks_of_ranking(ranking: Sequence[int]) -> tuple[int, ...]:
    """Compute the rank of each candidate from their order (indices, best first): `(2, 3, 1)` for `[2, 0, 1]`."""
    if not is_order(ranking, len(ranking)):
        raise ValueError(
            f"the ranking {shorten(list(ranking))} does not name each of {len(ranking)} candidates exactly once."
        )
    return tuple(ranking.index(candidate) + 1 for candidate in range(len(ranking)))


def ranks_of_record(record: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
    """Read the ranks of one record. The errors continue `<file>, line <number>: `."""
    if record.get("skipped") is True:
        return None
    ranking, ranks = record.get("ranking"), record.get("ranks")
    if (ranking is None) == (ranks is None):
        raise ValueError(f"it must have one of `ranking`, `ranks` and `skipped: true`, not {list(record)}.")
    if ranking is not None:
        if not isinstance(ranking, list):
            raise ValueError(f"`ranking` is {shorten(ranking)}, but must be a list of candidate indices, best first.")
        ranks = ranks_of_ranking(ranking)
    elif not isinstance(ranks, list) or not all(type(rank) is int and rank >= 1 for rank in ranks):
        raise ValueError(f"`ranks` is {shorten(ranks)}, but must be a list of integers from 1.")
    if len(ranks) != count:
        raise ValueError(f"it ranks {len(ranks)} candidates, but the instance has {count}: the ranking is incomplete.")
    return tuple(ranks)


def _read_records(path: Path) -> list[tuple[str, Any]]:
    """Read each record with its place in the file."""
    if path.suffix == ".jsonl":
        return [(f"{path.name}, line {number}", record) for number, record in read_lines(path)]
    if path.suffix != ".json":
        raise ValueError(f"{path} must end in .jsonl, or in .json if Label Studio exported it.")
    records = records_of_label_studio(json.loads(path.read_text(encoding="utf-8")))
    return [(f"{path.name}, record {number}", record) for number, record in enumerate(records)]


def read_annotations(paths: Iterable[str | Path], instances: "Dataset") -> list[Annotation]:
    """
    Read annotations, and check each of them.

    Args:
        paths (`Iterable[str | Path]`), instances ([`~datasets.Dataset`]):
            Files of annotations; the ranking instances, with `id` and `candidates`.

    Returns:
        `list[Annotation]`: the last one of each annotator and instance, ordered by annotator and instance.
    """
    counts = {name: len(candidates) for name, candidates in by_id(instances, "candidates").items()}
    digests = digests_by_instance(instances)
    order = {name: number for number, name in enumerate(counts)}
    annotations: dict[tuple[str, str], Annotation] = {}
    for path in paths:
        for place, record in _read_records(Path(path)):
            if not isinstance(record, dict):
                raise ValueError(f"{place} is {shorten(record)}, but must be an object. {_REMEDY}")
            try:
                annotator, instance = check_annotator(record.get("annotator")), record.get("instance")
                if not isinstance(instance, str) or instance not in counts:
                    raise ValueError(f"there is no instance {shorten(instance)}; the first is {next(iter(counts))!r}.")
                images = digests.get(instance, {}).get("digest")
                if images is not None and record.get("digest", images) != images:
                    raise ValueError(f"the instance {instance!r} has other images than those ranked. Rank again.")
                ranks = ranks_of_record(record, counts[instance])
            except ValueError as error:
                raise ValueError(f"{place}: {error} {_REMEDY}") from error
            annotations[annotator, instance] = Annotation(annotator, instance, ranks)
    return sorted(annotations.values(), key=lambda annotation: (annotation.annotator, order[annotation.instance]))


def append_annotation(folder: str | Path, record: Mapping[str, Any]) -> None:
    """Save a record in its annotator's file, flushed to disk. Fields that are not known are saved too, and not read."""
    append_lines(Path(folder) / f"{check_annotator(record.get('annotator'))}.jsonl", [record])


def annotations_lock(folder: str | Path) -> FileLock:
    """Return the lock of a directory of annotations, for what may write the files of any annotator."""
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.parent / f".{folder.name}.lock")


def annotation_files(folder: str | Path, annotators: Sequence[str] | None = None) -> list[Path]:
    """Find the files of annotations in a directory, of all annotators or of those named, ordered by name."""
    files = {path.stem: path for path in sorted(Path(folder).glob("*.jsonl"))}
    missing = [name for name in annotators or [] if name not in files]
    if not files or missing:
        of_whom = f" of {missing}" if missing else ""
        raise FileNotFoundError(
            f"There are no annotations{of_whom} in {folder}, only those of {list(files)}. Rank first."
        )
    return [files[name] for name in annotators or files]


def import_annotations(path: str | Path, folder: str | Path, instances: "Dataset") -> dict[str, int]:
    """
    Import the annotations of a file that another tool wrote, all of them or none.

    Args:
        path (`str` or `Path`):
            The file: `.jsonl`, or the `.json` of a project that Label Studio exported.
        folder (`str` or `Path`):
            Directory of the annotations. Earlier ones of an annotator stay, and are replaced for the same instance.
        instances ([`~datasets.Dataset`]):
            The ranking instances.

    Returns:
        `dict[str, int]`: number of annotations by annotator.
    """
    if Path(path).suffix == ".jsonl":
        # An unfinished last line is not that of a process killed here: the file was not copied completely
        json.loads(Path(path).read_bytes().rstrip().rpartition(b"\n")[2])
    digests = digests_by_instance(instances)
    records: dict[str, list[dict]] = defaultdict(list)
    for annotator, instance, ranks in read_annotations([path], instances):
        record = {"annotator": annotator, "instance": instance, **digests.get(instance, {})}
        records[annotator].append(record | ({"skipped": True} if ranks is None else {"ranks": list(ranks)}))
    if AUTOMATIC in records:
        raise ValueError(f"{path} has annotations by {AUTOMATIC!r}, the name of rankings by construction. Rename it.")
    lock = annotations_lock(folder)
    if problem := take_lock(lock, "annotations", folder):
        raise ValueError(problem)
    try:
        for annotator, lines in records.items():
            append_lines(Path(folder) / f"{annotator}.jsonl", lines)
    finally:
        lock.release()
    return {annotator: len(lines) for annotator, lines in records.items()}


def digests_by_instance(instances: "Dataset") -> dict[str, dict[str, str]]:
    """Return the field of a record that ties it to the images of its instance, by instance."""
    if "digest" not in instances.column_names:
        return {}
    return {name: {"digest": value} for name, value in by_id(instances, "digest").items()}
