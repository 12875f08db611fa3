# SPDX-License-Identifier: Apache-2.0
"""Measure how well P(Yes) orders labeled pairs, and how well it is calibrated."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.stats import mannwhitneyu


def auroc(scores: Sequence[float], labels: Sequence[int]) -> float:
    """
    Compute the area under the ROC curve: the probability that a consistent pair scores above an inconsistent one, where a
    tie counts one half.

    Args:
        scores (`Sequence[float]`), labels (`Sequence[int]`):
            Scores, higher = more consistent; 1 for a consistent pair, 0 for an inconsistent one.

    Returns:
        `float`: the area, in [0, 1], 0.5 for chance; NaN without pairs of both classes.
    """
    scores, labels = _checked(scores, labels)
    positives, negatives = scores[labels], scores[~labels]
    if len(positives) == 0 or len(negatives) == 0:
        return math.nan
    statistic = mannwhitneyu(positives, negatives, method="asymptotic").statistic
    return float(statistic / (len(positives) * len(negatives)))


def calibration_bins(scores: Sequence[float], labels: Sequence[int], num_bins: int = 10) -> dict[str, list[float]]:
    """
    Compute the reliability of probabilities: in bins of equal width, the mean score and the fraction of consistent pairs.

    Args:
        scores (`Sequence[float]`), labels (`Sequence[int]`):
            Probabilities, P(Yes); 1 for a consistent pair, 0 for an inconsistent one.
        num_bins (`int`, *optional*, defaults to `10`):
            Number of bins. Bin b has the scores in [b / num_bins, (b + 1) / num_bins); the last one also has 1.

    Returns:
        `dict[str, list[float]]`: `count`, `mean_score` and `share_consistent`, each with one entry per bin. The last
        two are NaN for an empty bin.
    """
    scores, labels = _checked(scores, labels)
    if num_bins < 1:
        raise ValueError(f"`num_bins` is {num_bins}, but must be at least 1.")
    if ((scores < 0) | (scores > 1)).any():
        raise ValueError(
            f"`scores` are from {scores.min()} to {scores.max()}, but calibration is about probabilities in [0, 1]."
        )
    # b / num_bins, and not `linspace`, whose 0.3 is above the 0.3 that a score may be
    inner_edges = np.arange(1, num_bins) / num_bins  # (num_bins - 1,)
    bin_of = np.searchsorted(inner_edges, scores, side="right")  # (N,)
    count = np.bincount(bin_of, minlength=num_bins)
    with np.errstate(invalid="ignore"):  # 0 / 0 of an empty bin
        sums = {"mean_score": scores, "share_consistent": labels}
        means = {name: np.bincount(bin_of, values, num_bins) / count for name, values in sums.items()}
    return {"count": count.tolist()} | {name: values.tolist() for name, values in means.items()}


def expected_calibration_error(scores: Sequence[float], labels: Sequence[int], num_bins: int = 10) -> float:
    """
    Compute sum_b (n_b / N) |mean score - fraction of consistent pairs| over the bins b of [`calibration_bins`].

    Args:
        scores (`Sequence[float]`), labels (`Sequence[int]`), num_bins (`int`, *optional*, defaults to `10`):
            As in [`calibration_bins`].

    Returns:
        `float`: the error, in [0, 1]; NaN without any pair.
    """
    bins = calibration_bins(scores, labels, num_bins)
    count = np.array(bins["count"])  # (num_bins,)
    gap = np.abs(np.array(bins["mean_score"]) - np.array(bins["share_consistent"]))
    return float(np.nansum(count * gap) / count.sum()) if count.sum() else math.nan


def _checked(scores: Sequence[float], labels: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    if len(scores) != len(labels):
        raise ValueError(f"`scores` has {len(scores)} entries and `labels` {len(labels)}. Pass one of each per pair.")
    values = np.asarray(scores, dtype=float)  # (N,), None becomes NaN
    if not np.isfinite(values).all():
        index = int((~np.isfinite(values)).argmax())
        raise ValueError(f"`scores[{index}]` is {scores[index]}, but must be a finite number. Leave the pair out.")
    if not set(labels) <= {0, 1}:
        raise ValueError(f"`labels` has {list(set(labels))}, but must be 1 (consistent) or 0 (inconsistent).")
    return values, np.asarray(labels, dtype=bool)
