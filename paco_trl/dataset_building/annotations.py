# SPDX-License-Identifier: Apache-2.0
"""
Annotations: the order in which an annotator puts the candidates of a ranking instance.

Each annotator has a file of JSON lines, `<annotator>.jsonl`, with a record for each ranked instance:

    {"annotator": "anna", "instance": "fox/0/1/3", "ranking": [2, 0, 1, 3]}           # candidates, best first
    {"annotator": "judge", "instance": "fox/0/1/3", "ranks": [2, 3, 1, 3]}            # rank of each, equal = tied
    {"annotator": "anna", "instance": "fox/0/1/4", "skipped": true}                   # looked at, not ranked

A record may have the `digest` of the instance's images: a ranking of other images is an error.

Annotators vote on the order of each instance; how well they agree is measured with each other and with the majority.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset

from ..data.columns import column_by_id
from ..data.rankings import is_permutation
from ..utils.journals import append_lines, read_lines
from ..utils.text import shorten


# The annotator that ranks by the construction of the grids
AUTOMATIC = "automatic"

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,39}")


class Annotation(NamedTuple):
    """Ranking of one instance by one annotator."""

    annotator: str  # name of the annotator
    instance: str  # id of the ranking instance
    # Rank of each candidate: 1 is the most consistent, equal ranks are tied. `None` for a skipped instance
    ranks: tuple[int, ...] | None
    has_scores: bool = False  # whether a judge ranked by scores
    stale: str | None = None  # its file and line, if the images have changed since


def keyed_hash(*key: int | str) -> int:
    """Compute a pseudorandom number that only depends on its key."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, key)).encode("utf-8", "surrogatepass")).digest(), "big")


def check_annotator(name: Any) -> str:
    """Check the name of an annotator, which also names a file."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"The annotator's name is {shorten(name)}, but must have 1 to 40 letters (a to z), digits, `.`, `_` or "
            "`-`, and not begin with `.`, since it names a file."
        )
    return name


def ranks_of_ranking(ranking: Sequence[int]) -> tuple[int, ...]:
    """Compute the rank of each candidate from their order (indices, best first): `(2, 3, 1)` for `[2, 0, 1]`."""
    if not is_permutation(ranking, len(ranking)):
        raise ValueError(f"the ranking {shorten(ranking)} does not list each candidate exactly once.")
    return tuple(ranking.index(candidate) + 1 for candidate in range(len(ranking)))


def ranks_of_record(record: Mapping[str, Any], count: int) -> tuple[int, ...] | None:
    """Read the ranks of a record. Errors are worded to follow `<file>, line <number>: `."""
    if record.get("skipped") is True:
        return None
    ranking = record.get("ranking")
    ranks = record.get("ranks")
    if ranking is not None:
        ranks = ranks_of_ranking(ranking)
    elif not isinstance(ranks, list) or not all(type(rank) is int and rank >= 1 for rank in ranks):
        raise ValueError(f"without a `ranking`, `ranks` must be a list of integers from 1, but is {shorten(ranks)}.")
    if len(ranks) != count:
        raise ValueError(f"it ranks {len(ranks)} candidates, but the instance has {count}.")
    return tuple(ranks)


def checked_annotations(paths: Iterable[str | Path], instances: Dataset) -> Iterator[Annotation]:
    """Read and check annotations in the order of the files."""
    counts = {name: len(candidates) for name, candidates in column_by_id(instances, "candidates").items()}
    digests = column_by_id(instances, "digest")
    for path in paths:
        for line_number, record in read_lines(path):
            try:
                annotator = check_annotator(record.get("annotator"))
                instance = record.get("instance")
                if instance not in counts:
                    raise ValueError(f"there is no instance {shorten(instance)}.")
                ranks = ranks_of_record(record, counts[instance])
            except (AttributeError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {line_number}: {error} Correct or delete it.") from error
            has_changed = record.get("digest", digests[instance]) != digests[instance]
            stale = f"{path}, line {line_number}" if has_changed else None
            yield Annotation(annotator, instance, ranks, "scores" in record, stale)


def read_annotations(paths: Iterable[str | Path], instances: Dataset) -> list[Annotation]:
    """
    Read and check annotations.

    Args:
        paths (`Iterable[str | Path]`), instances ([`~datasets.Dataset`]):
            Files of annotations; ranking instances with `id`, `candidates` and `digest`.

    Returns:
        `list[Annotation]`: the last annotation per annotator and instance, ordered by both.

    Raises:
        ValueError: If the images of an instance have changed since an annotator ranked it last.
    """
    latest = {(item.annotator, item.instance): item for item in checked_annotations(paths, instances)}
    if stale := [item for item in latest.values() if item.stale]:
        raise ValueError(
            f"{stale[0].stale}: the images of the instance {stale[0].instance!r} have changed since it was ranked "
            f"({len(stale)} such rankings). Rank again, or delete the lines."
        )
    order = {name: number for number, name in enumerate(instances.with_format(None)["id"][:])}
    return sorted(latest.values(), key=lambda annotation: (annotation.annotator, order[annotation.instance]))


def annotator_kinds(annotations: Iterable[Annotation]) -> dict[str, str]:
    """Map annotators to `"people"`, `"judge"` (if annotations have scores) or `"automatic"`."""
    kinds: dict[str, str] = {}
    for annotation in annotations:
        name = annotation.annotator
        if annotation.has_scores:
            kinds[name] = "judge"
        kinds.setdefault(name, AUTOMATIC if name == AUTOMATIC else "people")
    return kinds


def append_annotation(folder: str | Path, record: Mapping[str, Any]) -> None:
    """Append a record to its annotator's file, and flush it to disk. Unknown fields are saved, but ignored."""
    append_lines(Path(folder) / f"{check_annotator(record.get('annotator'))}.jsonl", [record])


def annotation_files(folder: str | Path, annotators: Sequence[str] | None = None) -> list[Path]:
    """Find the annotation files of all or some annotators in a directory, ordered by name."""
    files = {path.stem: path for path in sorted(Path(folder).glob("*.jsonl"))}
    missing = [name for name in annotators or [] if name not in files]
    if not files or missing:
        whose = f" of {missing}" if missing else ""
        raise FileNotFoundError(f"There are no annotations{whose} in {folder}, only of {list(files)}. Rank first.")
    return [files[name] for name in annotators or files]


# ---- Votes and agreement ----


# The paper takes the majority and discards ties, but does not say how it counts votes on orders (Sec. 3.1)
class Vote(NamedTuple):
    """Ranks of an instance by all annotators, and the result of their votes."""

    ranks: Sequence[Sequence[int]]
    relation: tuple[tuple[int, ...], ...]
    ranking: list[int] | None
    best: int | None
    worst: list[int]


def majority_vote(ranks: Sequence[Sequence[int]]) -> Vote:
    """Count the votes on an instance, from each annotator's ranks of the candidates (1 is best, equal ranks tie)."""
    candidates = range(len(ranks[0]))
    # Number of annotators who put i before j, minus the number who put j before i
    margins = [[sum((row[i] < row[j]) - (row[i] > row[j]) for row in ranks) for j in candidates] for i in candidates]
    relation = tuple(tuple((margin > 0) - (margin < 0) for margin in row) for row in margins)
    wins = [row.count(1) for row in relation]
    # Only a strict order has candidates that win n - 1, n - 2, ..., 0 times
    is_permutation = sorted(wins) == list(candidates)
    return Vote(
        ranks,
        relation,
        sorted(candidates, key=lambda index: -wins[index]) if is_permutation else None,
        next((index for index in candidates if wins[index] == len(wins) - 1), None),
        [index for index in candidates if wins[index] == 0 and -1 in relation[index]],
    )


def kendalls_w(ranks: Sequence[Sequence[int]]) -> float:
    """Compute Kendall's coefficient of concordance, corrected for ties; NaN with too few orders or candidates."""
    from scipy.stats import friedmanchisquare

    if len(ranks) < 2 or len(ranks[0]) < 3 or all(len(set(row)) == 1 for row in ranks):
        return math.nan
    # W is Friedman's statistic, over the number of annotators times the number of candidates minus one
    return float(friedmanchisquare(*zip(*ranks, strict=True)).statistic / (len(ranks) * (len(ranks[0]) - 1)))


def count_agreement(ranks: Sequence[int], *other_ranks: Sequence[int]) -> tuple[int, int]:
    """Count the pairs in the order of the majority of `other_ranks`, and the pairs that neither side ties."""
    relation = majority_vote(other_ranks).relation
    signs = [relation[i][j] * (ranks[j] - ranks[i]) for i, j in itertools.combinations(range(len(ranks)), 2)]
    return sum(sign > 0 for sign in signs), sum(sign != 0 for sign in signs)


def _fraction(counts: Iterable[tuple[int, int]]) -> float | None:
    counts = list(counts)
    total = sum(total for _, total in counts)
    return sum(num_agreed for num_agreed, _ in counts) / total if total else None


def agreement_report(annotations: Sequence[Annotation]) -> dict[str, Any]:
    """
    Measure the agreement of annotators.

    Args:
        annotations (`Sequence[Annotation]`):
            Annotations.

    Returns:
        `dict`: `instances` and `instances_of_several` (ranked by at least two annotators); `kendalls_w`, its mean over
        the latter; `pairwise_agreement`, the fraction of candidate pairs that two annotators put in the same order
        (chance: 0.5); and `annotators`, for each `ranked`, `skipped` and `agreement_with_others` (with their
        majority). Undefined values are `None`.
    """
    ranks_by_instance: dict[str, dict[str, tuple[int, ...]]] = {}  # ranks by instance and annotator
    for annotation in annotations:
        if annotation.ranks is not None:
            ranks_by_instance.setdefault(annotation.instance, {})[annotation.annotator] = annotation.ranks
    shared_rankings = [list(ranks.values()) for ranks in ranks_by_instance.values() if len(ranks) > 1]
    concordances = [value for value in map(kendalls_w, shared_rankings) if not math.isnan(value)]
    report: dict[str, Any] = {
        "instances": len(ranks_by_instance),
        "instances_of_several": len(shared_rankings),
        "kendalls_w": sum(concordances) / len(concordances) if concordances else None,
        "pairwise_agreement": _fraction(
            count_agreement(first, second)
            for ranks in shared_rankings
            for first, second in itertools.combinations(ranks, 2)
        ),
        "annotators": {},
    }
    for name in sorted({annotation.annotator for annotation in annotations}):
        own_ranks = {instance: ranks[name] for instance, ranks in ranks_by_instance.items() if name in ranks}
        agreement_counts = []
        for instance, ranks in own_ranks.items():
            other_ranks = [other for annotator, other in ranks_by_instance[instance].items() if annotator != name]
            agreement_counts += [count_agreement(ranks, *other_ranks)] if other_ranks else []
        report["annotators"][name] = {
            "ranked": len(own_ranks),
            "skipped": sum(annotation.annotator == name for annotation in annotations) - len(own_ranks),
            "agreement_with_others": _fraction(agreement_counts),
        }
    return report
