# SPDX-License-Identifier: Apache-2.0
"""
Metrics of judges: agreement with human rankings, separation of labeled pairs, and calibration.

Human rankings have the format of ConsistencyRank (https://huggingface.co/papers/2512.04784). An order lists the n
items, best first; the rank of an item is its position in the order, from 1. As permutations they are inverses of each
other, so that correlations of orders differ from correlations of ranks.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import kendalltau, mannwhitneyu, rankdata, spearmanr


def ranking_metrics(scores: Sequence[float], human_ranking: Sequence[int]) -> dict[str, float]:
    """
    Measure the agreement of scores with a human ranking, on the ranks of the items.

    Items with equal scores share the average of their ranks. Ties never count as hits, even if that average is a human
    rank.

    Args:
        scores (`Sequence[float]`):
            One score per item; higher is more consistent, and better.
        human_ranking (`Sequence[int]`):
            Indices of the items, best first: a permutation of 0 to n - 1.

    Returns:
        `dict[str, float]`: `accuracy`, the fraction of the items whose predicted rank is the human one; `kendall_tau`
        (b) and `spearman_rho` of both ranks, NaN if all scores are equal; and `top1_bottom1`, the mean of two hits (1
        or 0): the human best has predicted rank 1, the human worst predicted rank n.

    Example:

    ```python
    >>> from paco_trl.evaluation import ranking_metrics

    >>> # Item 2 is the best for both; people prefer item 0 to item 1
    >>> ranking_metrics(scores=[0.2, 0.6, 0.9, 0.1], human_ranking=[2, 0, 1, 3])
    {'accuracy': 0.5, 'kendall_tau': 0.6666666666666669, 'spearman_rho': 0.8, 'top1_bottom1': 1.0}
    ```
    """
    scores, human_ranking = _ranking_arrays(scores, human_ranking)
    predicted_ranks = rankdata(-scores)  # (n,), ties share the average
    is_tied = rankdata(-scores, method="min") != rankdata(-scores, method="max")  # (n,)
    human_ranks = np.argsort(human_ranking) + 1  # (n,), the inverse permutation
    is_constant = scores.min() == scores.max()  # scipy would also return NaN, with a warning
    return {
        "accuracy": float(np.mean((predicted_ranks == human_ranks) & ~is_tied)),
        "kendall_tau": math.nan if is_constant else float(kendalltau(predicted_ranks, human_ranks).statistic),
        "spearman_rho": math.nan if is_constant else float(spearmanr(predicted_ranks, human_ranks).statistic),
        "top1_bottom1": _top1_bottom1(predicted_ranks, human_ranking),
    }


def list_order_metrics(scores: Sequence[float], human_ranking: Sequence[int]) -> dict[str, float]:
    """
    Compute the published variant of [`ranking_metrics`], only for comparison with the paper's figures.

    Its tau and rho correlate the two *order lists* (the index of the first item, the second, and so on), as if an
    index were a quantity. For orders of four items, this differs from the correlation of ranks in about half of all
    pairs, and has the opposite sign in about a quarter. Ties are broken by index, the later item first, so that
    nothing is NaN. (In the published script, the order of ties depends on the processor.)

    Args:
        scores (`Sequence[float]`), human_ranking (`Sequence[int]`):
            See [`ranking_metrics`], also for the returned metrics.
    """
    scores, human_ranking = _ranking_arrays(scores, human_ranking)
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


def auroc(scores: Sequence[float], labels: Sequence[int]) -> float:
    """
    Compute the area under the ROC curve: the probability that a consistent pair scores above an inconsistent one, with
    ties counting one half.

    Args:
        scores (`Sequence[float]`), labels (`Sequence[int]`):
            Scores, higher for more consistent pairs; 1 for a consistent pair, 0 for an inconsistent one.

    Returns:
        `float`: the area, in [0, 1], 0.5 for chance; NaN without pairs of both classes.
    """
    scores, labels = _binary_arrays(scores, labels)
    positives = scores[labels]
    negatives = scores[~labels]
    if len(positives) == 0 or len(negatives) == 0:
        return math.nan
    statistic = mannwhitneyu(positives, negatives, method="asymptotic").statistic
    return float(statistic / (len(positives) * len(negatives)))


def calibration_bins(scores: Sequence[float], labels: Sequence[int], num_bins: int = 10) -> dict[str, list[float]]:
    """
    Compute the reliability of probabilities: in bins of equal width, the mean score and the fraction of consistent
    pairs.

    Args:
        scores (`Sequence[float]`), labels (`Sequence[int]`):
            Probabilities, P(Yes); 1 for a consistent pair, 0 for an inconsistent one.
        num_bins (`int`, *optional*, defaults to `10`):
            Number of bins. Bin b has the scores in [b / num_bins, (b + 1) / num_bins); the last one includes 1.

    Returns:
        `dict[str, list[float]]`: `count`, `mean_score` and `share_consistent`, each with one entry per bin. The last
        two are NaN for an empty bin.
    """
    scores, labels = _binary_arrays(scores, labels)
    if ((scores < 0) | (scores > 1)).any():
        raise ValueError(f"`scores` are from {scores.min()} to {scores.max()}, not probabilities in [0, 1].")
    # Not `linspace`, whose edge near 0.3 is above a score of 0.3
    inner_edges = np.arange(1, num_bins) / num_bins  # (num_bins - 1,)
    bins = np.searchsorted(inner_edges, scores, side="right")  # (N,)
    count = np.bincount(bins, minlength=num_bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 of an empty bin
        sums = {"mean_score": scores, "share_consistent": labels}
        means = {name: np.bincount(bins, values, num_bins) / count for name, values in sums.items()}
    return {"count": count.tolist()} | {name: values.tolist() for name, values in means.items()}


def expected_calibration_error(scores: Sequence[float], labels: Sequence[int], num_bins: int = 10) -> float:
    """
    Compute sum_b (n_b / N) |mean score - fraction of consistent pairs| over the bins b of [`calibration_bins`].

    Args:
        scores (`Sequence[float]`), labels (`Sequence[int]`), num_bins (`int`, *optional*, defaults to `10`):
            See [`calibration_bins`].

    Returns:
        `float`: the error, in [0, 1]; NaN without pairs.
    """
    bins = calibration_bins(scores, labels, num_bins)
    count = np.array(bins["count"])  # (num_bins,)
    gap = np.abs(np.array(bins["mean_score"]) - np.array(bins["share_consistent"]))
    return float(np.nansum(count * gap) / count.sum()) if count.sum() else math.nan


def _finite_scores(scores: Sequence[float]) -> np.ndarray:
    values = np.asarray(scores, dtype=float)  # (n,), None becomes NaN
    if not np.isfinite(values).all():
        raise ValueError(f"`scores` must be finite numbers, but are {list(scores)}. Leave such items out.")
    return values


def _ranking_arrays(scores: Sequence[float], human_ranking: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    if len(scores) < 2 or sorted(human_ranking) != list(range(len(scores))):
        raise ValueError(
            f"`human_ranking` is {list(human_ranking)}, but must list the indices of the {len(scores)} items (at "
            "least two), best first."
        )
    return _finite_scores(scores), np.asarray(human_ranking, dtype=int)


def _binary_arrays(scores: Sequence[float], labels: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    if len(scores) != len(labels) or not set(labels) <= {0, 1}:
        raise ValueError(f"`labels` must be 1 or 0, one for each of {len(scores)} scores, but are {list(labels)}.")
    return _finite_scores(scores), np.asarray(labels, dtype=bool)
