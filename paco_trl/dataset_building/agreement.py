# SPDX-License-Identifier: Apache-2.0
"""Count the votes of annotators, and measure how well they agree: with each other, the majority and gold questions."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .annotations import Annotation


# The paper takes the majority and discards ties, and does not say how votes on orders are counted (Sec. 3.1)
class Vote(NamedTuple):
    """Result of the votes of all annotators on one instance."""

    relation: tuple[tuple[int, ...], ...]
    ranking: list[int] | None
    best: int | None
    worst: list[int]

    @property
    def num_ties(self) -> int:
        """Count the pairs of candidates without a majority."""
        return sum(row[index + 1 :].count(0) for index, row in enumerate(self.relation))

    @property
    def is_circular(self) -> bool:
        """Tell whether every pair has a majority, and yet there is no order (A before B before C before A)."""
        return self.num_ties == 0 and self.ranking is None


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
        relation,
        sorted(candidates, key=lambda index: -wins[index]) if is_order else None,
        next((index for index in candidates if wins[index] == len(wins) - 1), None),
        [index for index in candidates if wins[index] == 0 and -1 in relation[index]],
    )


def kendalls_w(ranks: Sequence[Sequence[int]]) -> float:
    """Compute Kendall's coefficient of concordance, corrected for ties; NaN if there are fewer than two orders."""
    import numpy as np
    from scipy.stats import rankdata

    if len(ranks) < 2:
        return math.nan
    # W = 12 * sum_j (R_j - m (n + 1) / 2)^2 / (m^2 (n^3 - n) - m * sum over groups of t tied ranks of (t^3 - t)), with
    # R_j the sum of the (mean) ranks of candidate j
    means = rankdata(np.asarray(ranks), axis=1)  # (m, n)
    m, n = means.shape
    ties = sum(int(count) ** 3 - int(count) for row in means for count in np.unique(row, return_counts=True)[1])
    most = m**2 * (n**3 - n) - m * ties
    return float(12 * np.sum((means.sum(0) - m * (n + 1) / 2) ** 2) / most) if most > 0 else math.nan


def count_agreement(ranks: Sequence[int], *others: Sequence[int]) -> tuple[int, int]:
    """Count the pairs of candidates in the same order as the majority of `others` has them, and those neither ties."""
    relation = majority_vote(others).relation
    signs = [relation[i][j] * (ranks[j] - ranks[i]) for i, j in itertools.combinations(range(len(ranks)), 2)]
    return sum(sign > 0 for sign in signs), sum(sign != 0 for sign in signs)


def _fraction(counts: Iterable[tuple[int, int]]) -> float | None:
    counts = list(counts)
    total = sum(total for _, total in counts)
    return sum(agreed for agreed, _ in counts) / total if total else None


def agreement_report(annotations: Sequence[Annotation], gold: Sequence[Annotation] = ()) -> dict[str, Any]:
    """
    Measure the agreement of annotators.

    Args:
        annotations (`Sequence[Annotation]`):
            Their annotations.
        gold (`Sequence[Annotation]`, *optional*, defaults to `()`):
            Annotations that are known to be right, of some of the instances.

    Returns:
        `dict`: `instances` and `instances_of_several` (ranked by two annotators or more); `kendalls_w`, its mean over
        the latter; `pairwise_agreement`, the fraction of the pairs of candidates that two annotators put in the same
        order (chance: 0.5); and `annotators`, for each one `ranked`, `skipped`, `agreement_with_others` (with the
        majority of the others) and `gold_agreement`. What cannot be computed is `None`.
    """
    truth = {annotation.instance: annotation.ranks for annotation in gold if annotation.ranks is not None}
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
        seen = [annotation for annotation in annotations if annotation.annotator == name]
        with_others, with_gold = [], []
        ranked = {annotation.instance: annotation.ranks for annotation in seen if annotation.ranks is not None}
        for instance, ranks in ranked.items():
            others = [other for annotator, other in by_instance[instance].items() if annotator != name]
            with_others += [count_agreement(ranks, *others)] if others else []
            with_gold += [count_agreement(ranks, truth[instance])] if instance in truth else []
        report["annotators"][name] = {
            "ranked": len(ranked),
            "skipped": len(seen) - len(ranked),
            "agreement_with_others": _fraction(with_others),
            "gold_agreement": _fraction(with_gold),
        }
    return report


def untrusted_annotators(report: Mapping[str, Any], min_gold_agreement: float) -> list[str]:
    """
    Find the annotators who answer too few gold questions right.

    Args:
        report (`Mapping`), min_gold_agreement (`float`):
            From [`agreement_report`], with gold questions; the least `gold_agreement`, from 0 to 1.

    Returns:
        `list[str]`: those below it, without those who saw no gold question.
    """
    fractions = {name: entry["gold_agreement"] for name, entry in report["annotators"].items()}
    if all(fraction is None for fraction in fractions.values()):
        raise ValueError(f"`min_gold_agreement` is set, but none of {list(fractions)} answered a gold question.")
    return [name for name, fraction in fractions.items() if fraction is not None and fraction < min_gold_agreement]
