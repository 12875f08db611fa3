# SPDX-License-Identifier: Apache-2.0
"""Compute bootstrap intervals over prompts."""

import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import pandas as pd


# Resamples in memory at a time
_BATCH = 100


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    groups: Sequence[Hashable] | None = None,
    confidence_level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
    strata: Sequence[Hashable] | None = None,
) -> tuple[float, float]:
    """
    Compute the percentile bootstrap interval of a mean.

    Args:
        values (`Sequence[float]`):
            Values. NaN means undefined and is left out, as in the mean that the interval belongs to.
        groups (`Sequence[Hashable]`, *optional*):
            The group of each value. Whole groups are resampled: instances of one prompt are not independent, and
            resampled one by one they give an interval that is too narrow. The mean of a resample is the sum over its
            groups divided by their number of values. If `None`, each value is a group of its own.
        confidence_level (`float`, *optional*, defaults to `0.95`), n_resamples (`int`, *optional*, defaults to
        `2000`), seed (`int`, *optional*, defaults to `0`):
            Confidence level, number and seed of the resamples.
        strata (`Sequence[Hashable]`, *optional*):
            The stratum of each value: the interval is that of the mean of the strata's means, as in a benchmark that
            averages over task types. A stratum that a resample does not contain is left out of its mean.

    Returns:
        `tuple[float, float]`: lower and upper end. Both are NaN when only one group has values: how groups differ
        cannot be told from one.
    """
    for name, labels in (("groups", groups), ("strata", strata)):
        if labels is not None and len(labels) != len(values):
            raise ValueError(f"`{name}` has {len(labels)} entries for {len(values)} `values`. Pass one per value.")
    values = np.asarray(values, dtype=float)  # (N,)
    if np.isinf(values).any():
        raise ValueError("`values` has an infinite value, which has no mean. Pass NaN for what is undefined.")
    defined = np.flatnonzero(~np.isnan(values))
    if len(defined) == 0:
        raise ValueError(f"None of the {len(values)} `values` is a number, so they have no mean and no interval.")

    strata_indices = np.zeros(len(defined), dtype=int)
    group_numbers = np.arange(len(defined))
    if groups is not None:
        group_numbers, _ = pd.factorize(pd.Series(groups, dtype=object)[defined], use_na_sentinel=False)
    if strata is not None:
        strata_indices, _ = pd.factorize(pd.Series(strata, dtype=object)[defined], use_na_sentinel=False)
    shape = (strata_indices.max() + 1, group_numbers.max() + 1)
    if shape[1] == 1:
        return math.nan, math.nan
    sums, counts = np.zeros(shape), np.zeros(shape)  # (strata, groups)
    np.add.at(sums, (strata_indices, group_numbers), values[defined])
    np.add.at(counts, (strata_indices, group_numbers), 1)

    sums = np.concatenate([sums, counts])  # (2 * strata, groups)
    return bootstrap_sums(sums, lambda totals: mean_of_strata(totals)[0], confidence_level, n_resamples, seed)


def bootstrap_sums(
    sums: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    confidence_level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Compute the percentile bootstrap interval of a statistic of sums over groups, `sums` (terms, groups)."""
    # Not `scipy.stats.bootstrap`: on few groups most of its time is overhead, and a report has thousands of intervals
    rng = np.random.default_rng(seed)
    totals = []
    for start in range(0, n_resamples, _BATCH):
        groups = rng.integers(0, sums.shape[1], (min(_BATCH, n_resamples - start), sums.shape[1]))
        totals.append(sums[:, groups].sum(axis=-1))  # (terms, batch)
    tail = 50 * (1 - confidence_level)
    # A resample that lacks all values of a part is left out
    low, high = np.nanpercentile(statistic(np.concatenate(totals, axis=1)), [tail, 100 - tail])
    return float(low), float(high)


def mean_of_strata(totals: np.ndarray, num_parts: int = 1) -> np.ndarray:
    """Average the strata's means of each part: `totals` has the sums (parts * strata, ...), then the counts."""
    sums, counts = np.split(totals, 2)
    # 0 / 0 of an absent stratum is left out; a part without any stratum is NaN. `nanmean` would warn of it
    with np.errstate(invalid="ignore"):
        means = (sums / counts).reshape(num_parts, -1, *totals.shape[1:])  # (parts, strata, ...)
        present = ~np.isnan(means)
        return np.where(present, means, 0.0).sum(axis=1) / present.sum(axis=1)
