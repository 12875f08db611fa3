# SPDX-License-Identifier: Apache-2.0
"""Quality of P(Yes) on labelled pairs: does it order them, and does it mean what it says?"""

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata


def auroc(scores: Sequence[float], labels: Sequence[int]) -> float:
    """
    Area under the ROC curve: the probability that a consistent pair scores above an inconsistent one.

    A tie counts one half. With R the sum of the ranks of the n1 consistent pairs among all pairs (ties share the
    average) and n0 inconsistent pairs, it is (R - n1 (n1 + 1) / 2) / (n1 n0), the Mann-Whitney statistic.

    Args:
        scores (`Sequence[float]`):
            Scores; higher = more consistent.
        labels (`Sequence[int]`):
            1 for a consistent pair, 0 for an inconsistent one.

    Returns:
        `float`: the area, in [0, 1], 0.5 for chance; NaN when there are only pairs of one class, or none.

    Raises:
        ValueError: If the lengths differ, a label is not 0 or 1, or a score is missing or infinite.

    Example:

    ```python
    >>> from paco_trl.evaluation import auroc

    >>> auroc([0.9, 0.4, 0.6, 0.1], [1, 1, 0, 0])  # of the four pairs of one and zero, only 0.4 < 0.6 is wrong
    0.75
    ```
    """
    scores, labels = _checked(scores, labels)
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if positives == 0 or negatives == 0:
        return math.nan
    rank_sum = rankdata(scores)[labels].sum()
    return float((rank_sum - positives * (positives + 1) / 2) / (positives * negatives))


def calibration_bins(scores: Sequence[float], labels: Sequence[int], num_bins: int = 10) -> dict[str, list[float]]:
    """
    Reliability of probabilities: in bins of equal width, the mean score beside the share of consistent pairs.

    Bin b holds the scores in [b / num_bins, (b + 1) / num_bins); the last one also holds 1.

    Args:
        scores (`Sequence[float]`):
            Probabilities, P(Yes).
        labels (`Sequence[int]`):
            1 for a consistent pair, 0 for an inconsistent one.
        num_bins (`int`, *optional*, defaults to `10`):
            Number of bins.

    Returns:
        `dict[str, list[float]]`: `count`, `mean_score` and `share_consistent`, each with one entry per bin. The last
        two are NaN for an empty bin.

    Raises:
        ValueError: If the lengths differ, a label is not 0 or 1, a score is missing or not in [0, 1], or `num_bins` is
            less than 1.
    """
    scores, labels = _checked(scores, labels)
    if num_bins < 1:
        raise ValueError(f"`num_bins` is {num_bins}, but must be at least 1.")
    outside = np.flatnonzero((scores < 0) | (scores > 1))
    if len(outside):
        raise ValueError(
            f"`scores[{outside[0]}]` is {scores[outside[0]]}, but calibration is about probabilities, in [0, 1]. Use "
            "`auroc` for scores that are not probabilities."
        )
    # b / num_bins, and not `linspace`, whose 0.3 is above the 0.3 that a score may be
    inner_edges = np.arange(1, num_bins) / num_bins  # (num_bins - 1,)
    bin_of = np.searchsorted(inner_edges, scores, side="right")  # (N,)
    count = np.bincount(bin_of, minlength=num_bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 of an empty bin
        mean_score = np.bincount(bin_of, weights=scores, minlength=num_bins) / count
        share_consistent = np.bincount(bin_of, weights=labels, minlength=num_bins) / count
    return {
        "count": count.tolist(),
        "mean_score": mean_score.tolist(),
        "share_consistent": share_consistent.tolist(),
    }


def expected_calibration_error(scores: Sequence[float], labels: Sequence[int], num_bins: int = 10) -> float:
    """
    Expected calibration error: sum_b (n_b / N) |mean score of bin b - share of consistent pairs in bin b|.

    The bins are those of [`calibration_bins`]; empty ones have no weight.

    Args:
        scores (`Sequence[float]`):
            Probabilities, P(Yes).
        labels (`Sequence[int]`):
            1 for a consistent pair, 0 for an inconsistent one.
        num_bins (`int`, *optional*, defaults to `10`):
            Number of bins.

    Returns:
        `float`: the error, in [0, 1]; NaN without any pair.

    Raises:
        ValueError: As [`calibration_bins`].
    """
    bins = calibration_bins(scores, labels, num_bins)
    count = np.array(bins["count"])
    if count.sum() == 0:
        return math.nan
    gap = np.abs(np.array(bins["mean_score"]) - np.array(bins["share_consistent"]))  # (num_bins,)
    filled = count > 0
    return float((count[filled] * gap[filled]).sum() / count.sum())


def _checked(scores: Sequence[float], labels: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    if len(scores) != len(labels):
        raise ValueError(
            f"`scores` has {len(scores)} entries and `labels` has {len(labels)}. Pass one of each a pair."
        )
    for index, (score, label) in enumerate(zip(scores, labels, strict=True)):
        if score is None or not math.isfinite(score):
            raise ValueError(
                f"`scores[{index}]` is {score}, but must be a finite number. Score the pair again, or leave it out."
            )
        if label not in (0, 1):
            raise ValueError(f"`labels[{index}]` is {label!r}, but must be 1 (consistent) or 0 (inconsistent).")
    return np.asarray(scores, dtype=float), np.asarray(labels, dtype=bool)
