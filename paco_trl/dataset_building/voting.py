# SPDX-License-Identifier: Apache-2.0
"""Compute the majority of several annotators on each pair of candidates."""

# The paper takes the majority and discards ties, and does not say how votes on orders are counted (Sec. 3.1)

from collections.abc import Sequence
from typing import NamedTuple


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
    if not ranks or len({len(one) for one in ranks}) != 1:
        raise ValueError(f"The annotators rank {[*map(len, ranks)]} candidates, but must rank the same ones.")
    candidates = range(len(ranks[0]))
    # The sign of (annotators who put i before j) - (annotators who put j before i)
    margins = [[sum((one[i] < one[j]) - (one[i] > one[j]) for one in ranks) for j in candidates] for i in candidates]
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
