# SPDX-License-Identifier: Apache-2.0
"""Measure the agreement of scores with a human ranking (ConsistencyRank, https://huggingface.co/papers/2512.04784)."""

# n items; an order lists the items, best first; the rank of an item is its place in the order, from 1. As permutations the
# two are inverse to one another, and a correlation of orders is not a correlation of ranks
import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import kendalltau, rankdata, spearmanr


def ranking_metrics(scores: Sequence[float], human_ranking: Sequence[int]) -> dict[str, float]:
    """
    Measure the agreement of scores with a human ranking, on the ranks of the items.

    Items of equal score share the average of their ranks. A tie never counts as a hit, even if that average is a human
    rank (three items that share ranks 1 to 3 have rank 2 each).

    Args:
        scores (`Sequence[float]`):
            One score per item; higher = more consistent = better.
        human_ranking (`Sequence[int]`):
            Indices of the items, best first: a permutation of 0 to n - 1.

    Returns:
        `dict[str, float]`:
            - `accuracy`: fraction of the items whose predicted rank is the human one.
            - `kendall_tau`, `spearman_rho`: Kendall's tau-b and Spearman's rho of the predicted and the human ranks. NaN
              if all scores are equal, as in scipy.
            - `top1_bottom1`: mean of two hits (1 or 0): the human best has predicted rank 1, the human worst has
              predicted rank n.

    Example:

    ```python
    >>> from paco_trl.evaluation import ranking_metrics

    >>> # Item 2 is the best for both; people prefer item 0 to item 1
    >>> ranking_metrics(scores=[0.2, 0.6, 0.9, 0.1], human_ranking=[2, 0, 1, 3])
    {'accuracy': 0.5, 'kendall_tau': 0.6666666666666669, 'spearman_rho': 0.8, 'top1_bottom1': 1.0}
    ```
    """
    scores, human_ranking = _checked(scores, human_ranking)
    predicted_ranks = rankdata(-scores)  # (n,), ties share the average
    tied = rankdata(-scores, method="min") != rankdata(-scores, method="max")  # (n,)
    human_ranks = np.argsort(human_ranking) + 1  # (n,), the inverse permutation
    all_equal = scores.min() == scores.max()  # scipy would give NaN too, and warn
    return {
        "accuracy": float(np.mean((predicted_ranks == human_ranks) & ~tied)),
        "kendall_tau": math.nan if all_equal else float(kendalltau(predicted_ranks, human_ranks).statistic),
        "spearman_rho": math.nan if all_equal else float(spearmanr(predicted_ranks, human_ranks).statistic),
        "top1_bottom1": _top1_bottom1(predicted_ranks, human_ranking),
    }


def list_order_metrics(scores: Sequence[float], human_ranking: Sequence[int]) -> dict[str, float]:
    """
    Compute the published variant of [`ranking_metrics`], only for comparison with the numbers of the paper.

    Its tau and rho correlate the two *order lists* (the index of the item that comes first, second and so on), as if an
    item's index were a quantity. For about half of all pairs of orders of four items the result differs from that of the
    ranks, for about a quarter it has the other sign, and it depends on the numbering of the items. `accuracy` and
    `top1_bottom1` are the same in both variants, except that ties are broken by index (the later item first) here, so
    that nothing is NaN. The published script sorts with numpy's default `argsort`, which is not stable on processors with
    AVX2 or AVX-512: its order of ties, and so its figure, depends on the machine. Here it does not.

    Args:
        scores (`Sequence[float]`), human_ranking (`Sequence[int]`):
            As in [`ranking_metrics`].

    Returns:
        `dict[str, float]`: `accuracy`, `kendall_tau`, `spearman_rho` and `top1_bottom1`.
    """
    scores, human_ranking = _checked(scores, human_ranking)
    predicted_order = np.argsort(scores, kind="stable")[::-1]  # (n,)
    return {
        "accuracy": float(np.mean(predicted_order == human_ranking)),
        "kendall_tau": float(kendalltau(predicted_order, human_ranking).statistic),
        "spearman_rho": float(spearmanr(predicted_order, human_ranking).statistic),
        "top1_bottom1": _top1_bottom1(np.argsort(predicted_order) + 1, human_ranking),
    }


def _top1_bottom1(predicted_ranks: np.ndarray, human_ranking: np.ndarray) -> float:
    top = predicted_ranks[human_ranking[0]] == 1
    bottom = predicted_ranks[human_ranking[-1]] == len(predicted_ranks)
    return (int(top) + int(bottom)) / 2


def _checked(scores: Sequence[float], human_ranking: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    if len(scores) < 2:
        raise ValueError(f"`scores` has {len(scores)} items, but a ranking has at least two. Leave such rows out.")
    values = np.asarray(scores, dtype=float)  # (n,), None becomes NaN
    if not np.isfinite(values).all():
        raise ValueError(f"`scores` is {list(scores)}, but a score must be finite to have a rank. Leave the row out.")
    if len(human_ranking) != len(scores) or set(human_ranking) != set(range(len(scores))):
        raise ValueError(
            f"`human_ranking` is {list(human_ranking)}, but must list the indices of the {len(scores)} items, best first."
        )
    return values, np.asarray(human_ranking, dtype=int)
