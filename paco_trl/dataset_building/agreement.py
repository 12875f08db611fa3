# SPDX-License-Identifier: Apache-2.0
"""Count the votes of annotators, and measure how well they agree: with each other, and with the majority."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .annotations import Annotation


# The paper takes the majority and discards ties, and does not say how votes on orders are counted (Sec. 3.1)
class Vote(NamedTuple):
    """Ranks by all annotators of one instance, and the result of their votes."""

    ranks: Sequence[Sequence[int]]
    relation: tuple[tuple[int, ...], ...]
    ranking: list[int] | None
    best: int | None
    worst: list[int]


def majority_vote(ranks: Sequence[Sequence[int]]) -> Vote:
    """Count the votes on one instance: each annotator's rank of each candidate (1 is best, equal is tied)."""
    candidates = range(len(ranks[0]))
    # The sign of (annotators who put i before j) - (annotators who put j before i)
    margins = [[sum((row[i] < row[j]) - (row[i] > row[j]) for row in ranks) for j in candidates] for i in candidates]
    relation = tuple(tuple((margin > 0) - (margin < 0) for margin in row) for row in margins)
    wins = [row.count(1) for row in relation]
    # An order of n candidates has those who win n - 1, n - 2, ..., 0 times; no other relation has
    is_order = sorted(wins) == list(candidates)
    return Vote(
        ranks,
        relation,
        sorted(candidates, key=lambda index: -wins[index]) if is_order else None,
        next((index for index in candidates if wins[index] == len(wins) - 1), None),
        [index for index in candidates if wins[index] == 0 and -1 in relation[index]],
    )


def kendalls_w(ranks: Sequence[Sequence[int]]) -> float:
    """Compute Kendall's coefficient of concordance, corrected for ties; NaN if there are too few orders or candidates."""
    from scipy.stats import friedmanchisquare

    if len(ranks) < 2 or len(ranks[0]) < 3 or all(len(set(row)) == 1 for row in ranks):
        return math.nan
    # W is Friedman's statistic, over the number of annotators and that of candidates but one
    return float(friedmanchisquare(*zip(*ranks, strict=True)).statistic / (len(ranks) * (len(ranks[0]) - 1)))


def count_agreement(ranks: Sequence[int], *others: Sequence[int]) -> tuple[int, int]:
    """Count the pairs of candidates in the same order as the majority of `others` has them, and those neither ties."""
    relation = majority_vote(others).relation
    signs = [relation[i][j] * (ranks[j] - ranks[i]) for i, j in itertools.combinations(range(len(ranks)), 2)]
    return sum(sign > 0 for sign in signs), sum(sign != 0 for sign in signs)


def _fraction(counts: Iterable[tuple[int, int]]) -> float | None:
    counts = list(counts)
    total = sum(total for _, total in counts)
    return sum(agreed for agreed, _ in counts) / total if total else None


def agreement_report(annotations: Sequence[Annotation]) -> dict[str, Any]:
    """
    Measure the agreement of annotators.

    Args:
        annotations (`Sequence[Annotation]`):
            Their annotations.

    Returns:
        `dict`: `instances` and `instances_of_several` (ranked by two annotators or more); `kendalls_w`, its mean over
        the latter; `pairwise_agreement`, the fraction of the pairs of candidates that two annotators put in the same
        order (chance: 0.5); and `annotators`, for each one `ranked`, `skipped` and `agreement_with_others` (with the
        majority of the others). What cannot be computed is `None`.
    """
    by_instance: dict[str, dict[str, tuple[int, ...]]] = {}  # ranks by instance and annotator
    for annotation in annotations:
        if annotation.ranks is not None:
            by_instance.setdefault(annotation.instance, {})[annotation.annotator] = annotation.ranks
    several = [list(ranks.values()) for ranks in by_instance.values() if len(ranks) > 1]
    concordances = [value for value in map(kendalls_w, several) if not math.isnan(value)]
    report: dict[str, Any] = {
        "instances": len(by_instance),
        "instances_of_several": len(several),
        "kendalls_w": sum(concordances) / len(concordances) if concordances else None,
        "pairwise_agreement": _fraction(
            count_agreement(first, second) for ranks in several for first, second in itertools.combinations(ranks, 2)
        ),
        "annotators": {},
    }
    for name in sorted({annotation.annotator for annotation in annotations}):
        ranked = {instance: ranks[name] for instance, ranks in by_instance.items() if name in ranks}
        with_others = []
        for instance, ranks in ranked.items():
            others = [other for annotator, other in by_instance[instance].items() if annotator != name]
            with_others += [count_agreement(ranks, *others)] if others else []
        report["annotators"][name] = {
            "ranked": len(ranked),
            "skipped": sum(annotation.annotator == name for annotation in annotations) - len(ranked),
            "agreement_with_others": _fraction(with_others),
        }
    return report
