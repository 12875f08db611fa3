# SPDX-License-Identifier: Apache-2.0
"""
Annotations: the order in which an annotator puts the candidates of a ranking instance.

Each annotator has a file of JSON lines, `<annotator>.jsonl`, with a record for each ranked instance:

    {"annotator": "anna", "instance": "fox/0/1/3", "ranking": [2, 0, 1, 3]}           # candidates, best first
    {"annotator": "judge", "instance": "fox/0/1/3", "ranks": [2, 3, 1, 3]}            # rank of each, equal = tied
    {"annotator": "anna", "instance": "fox/0/1/4", "skipped": true}                   # looked at, not ranked

A record may have the `digest` of the instance's images: a ranking of other images is an error.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

from ..data.columns import by_id
from ..data.rankings import is_order
from ..utils.journals import append_lines, read_lines
from ..utils.text import shorten


# The annotator that stands for the construction
AUTOMATIC = "automatic"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,39}")


class Annotation(NamedTuple):
    """Ranking of one instance by one annotator."""

    annotator: str  # name of the annotator
    instance: str  # id of the ranking instance
    # Rank of each candidate: 1 is the most consistent, equal ranks are tied. `None` for a skipped instance
    ranks: tuple[int, ...] | None


def keyed_hash(*key: int | str) -> int:
    """Compute a number that looks random and depends on its key alone."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, key)).encode("utf-8", "surrogatepass")).digest(), "big")


def check_annotator(name: Any) -> str:
    """Check the name of an annotator, which is also the name of a file."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        rule = "1 to 40 letters (a to z), digits, `.`, `_` or `-`, and not begin with `.`: it names a file"
        raise ValueError(f"The annotator's name is {shorten(name)}. It must have {rule}.")
    return name


def ranks_of_ranking(ranking: Sequence[int]) -> tuple[int, ...]:
    """Compute the rank of each candidate from their order (indices, best first): `(2, 3, 1)` for `[2, 0, 1]`."""
    if not is_order(ranking, len(ranking)):
        raise ValueError(f"the ranking {shorten(ranking)} does not name each of its candidates exactly once.")
    return tuple(ranking.index(candidate) + 1 for candidate in range(len(ranking)))


def ranks_of_record(record: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
    """Read the ranks of one record. The errors continue `<file>, line <number>: `."""
    if record.get("skipped") is True:
        return None
    ranking, ranks = record.get("ranking"), record.get("ranks")
    if ranking is not None:
        ranks = ranks_of_ranking(ranking)
    elif not isinstance(ranks, list) or not all(type(rank) is int and rank >= 1 for rank in ranks):
        raise ValueError(f"without a `ranking`, `ranks` must be a list of integers from 1, but is {shorten(ranks)}.")
    if len(ranks) != count:
        raise ValueError(f"it ranks {len(ranks)} candidates, but the instance has {count}: the ranking is incomplete.")
    return tuple(ranks)


def checked_annotations(paths: Iterable[str | Path], instances: Dataset) -> Iterator[tuple[Annotation, bool]]:
    """Read annotations in the order of the files, and check each; the second value tells whether it has scores."""
    counts = {name: len(candidates) for name, candidates in by_id(instances, "candidates").items()}
    digests = by_id(instances, "digest")
    for path in paths:
        for number, record in read_lines(path):
            try:
                annotator, instance = check_annotator(record.get("annotator")), record.get("instance")
                if instance not in counts:
                    raise ValueError(f"there is no instance {shorten(instance)}.")
                if record.get("digest", digests[instance]) != digests[instance]:
                    raise ValueError(f"the instance {instance!r} has other images than those ranked. Rank again.")
                ranks = ranks_of_record(record, counts[instance])
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error} Correct or delete it.") from error
            yield Annotation(annotator, instance, ranks), "scores" in record


def read_annotations(paths: Iterable[str | Path], instances: Dataset) -> list[Annotation]:
    """
    Read annotations, and check each of them.

    Args:
        paths (`Iterable[str | Path]`), instances ([`~datasets.Dataset`]):
            Files of annotations; the ranking instances, with `id`, `candidates` and `digest`.

    Returns:
        `list[Annotation]`: the last one of each annotator and instance, ordered by annotator and instance.
    """
    last = {(each.annotator, each.instance): each for each, _ in checked_annotations(paths, instances)}
    order = {name: number for number, name in enumerate(instances.with_format(None)["id"][:])}
    return sorted(last.values(), key=lambda annotation: (annotation.annotator, order[annotation.instance]))


def append_annotation(folder: str | Path, record: Mapping[str, Any]) -> None:
    """Save a record in its annotator's file, flushed to disk. Fields that are not known are saved too, and not read."""
    append_lines(Path(folder) / f"{check_annotator(record.get('annotator'))}.jsonl", [record])


def annotation_files(folder: str | Path, annotators: Sequence[str] | None = None) -> list[Path]:
    """Find the files of annotations in a directory, of all annotators or of those named, ordered by name."""
    files = {path.stem: path for path in sorted(Path(folder).glob("*.jsonl"))}
    missing = [name for name in annotators or [] if name not in files]
    if not files or missing:
        of_whom = f" of {missing}" if missing else ""
        raise FileNotFoundError(f"There are no annotations{of_whom} in {folder}, only of {list(files)}. Rank first.")
    return [files[name] for name in annotators or files]
