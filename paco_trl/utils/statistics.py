# SPDX-License-Identifier: Apache-2.0
"""How far a mean could be from the one that another sample of prompts would have given."""

import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from scipy.stats import DegenerateDataWarning, bootstrap


def bootstrap_interval(
    values: Sequence[float],
    groups: Sequence[Hashable] | None = None,
    confidence_level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
    strata: Sequence[Hashable] | None = None,
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of a mean.

    With `groups`, whole groups are drawn with replacement: instances of one prompt are not independent, and drawn one
    by one they give an interval that is too narrow. Every instance counts the same: the mean of a draw is the sum over
    its groups divided by their number of values.

    With `strata`, the interval is that of the mean of the strata's means, as in a benchmark that averages over task
    types. A stratum that a draw does not contain is left out of the mean of that draw.

    Args:
        values (`Sequence[float]`):
            Values. NaN means undefined and is left out, as in the mean that the interval belongs to.
        groups (`Sequence[Hashable]`, *optional*):
            The group of each value. If `None`, each value is a group of its own.
        confidence_level (`float`, *optional*, defaults to `0.95`):
            Confidence level of the interval.
        n_resamples (`int`, *optional*, defaults to `2000`):
            Number of draws.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws: the same values give the same interval.
        strata (`Sequence[Hashable]`, *optional*):
            The stratum of each value. If `None`, there is one.

    Returns:
        `tuple[float, float]`: lower and upper end. Both are NaN when only one group has values: how groups differ
        cannot be told from one.

    Raises:
        ValueError: If no value is left, a value is infinite, or `groups` or `strata` has another length than `values`.

    Example:

    ```python
    >>> from paco_trl.evaluation import bootstrap_interval

    >>> bootstrap_interval([0.0] * 50 + [1.0] * 50)  # 0.5 -+ 1.96 * sqrt(0.25 / 100)
    (0.4, 0.6)
    ```
    """
    for name, labels in (("groups", groups), ("strata", strata)):
        if labels is not None and len(labels) != len(values):
            raise ValueError(f"`{name}` has {len(labels)} entries for {len(values)} `values`. Pass one per value.")
    values = np.asarray(values, dtype=float)  # (N,)
    if np.isinf(values).any():
        raise ValueError("`values` has an infinite value, of which there is no mean. Pass NaN for what is undefined.")
    defined = np.flatnonzero(~np.isnan(values))
    if len(defined) == 0:
        raise ValueError(f"None of the {len(values)} `values` is a number, so there is no mean and no interval of it.")

    group_of = _numbered(groups, defined)  # (n,)
    stratum_of = _numbered(strata, defined) if strata is not None else np.zeros(len(defined), dtype=int)  # (n,)
    shape = (stratum_of.max() + 1, group_of.max() + 1)
    if shape[1] == 1:
        return math.nan, math.nan
    sums, counts = np.zeros(shape), np.zeros(shape)  # (strata, groups)
    np.add.at(sums, (stratum_of, group_of), values[defined])
    np.add.at(counts, (stratum_of, group_of), 1)

    sums = np.concatenate([sums, counts])  # (2 * strata, groups)
    result = bootstrap_sums(sums, lambda totals: mean_of_strata(totals)[0], confidence_level, n_resamples, seed)
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def bootstrap_sums(
    sums: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    confidence_level: float = 0.95,
    n_resamples: int = 2000,
    seed: int = 0,
) -> Any:
    """Percentile bootstrap of a statistic of sums over groups, `sums` (terms, groups): what `scipy.stats.bootstrap` gives."""

    def of_draws(*drawn: np.ndarray, axis: int) -> np.ndarray:
        return statistic(np.stack(drawn).sum(axis=axis))  # (terms, draws) -> (draws,)

    with warnings.catch_warnings():
        # Of an interval that is NaN because a draw is: `np.nanpercentile` of the draws leaves such ones out
        warnings.simplefilter("ignore", DegenerateDataWarning)
        return bootstrap(
            tuple(sums),
            of_draws,
            paired=True,
            vectorized=True,
            method="percentile",
            confidence_level=confidence_level,
            n_resamples=n_resamples,
            batch=100,  # draws in memory at a time; the result does not depend on it
            rng=np.random.default_rng(seed),
        )


def mean_of_strata(totals: np.ndarray, num_parts: int = 1) -> np.ndarray:
    """The mean of the strata's means of each part: `totals` has the sums (parts * strata, ...), then the counts."""
    sums, counts = np.split(totals, 2)
    # 0 / 0 of a stratum that was not drawn is left out; a part without any is NaN. `nanmean` would warn of it
    with np.errstate(invalid="ignore"):
        means = (sums / counts).reshape(num_parts, -1, *totals.shape[1:])  # (parts, strata, ...)
        present = ~np.isnan(means)
        return np.where(present, means, 0.0).sum(axis=1) / present.sum(axis=1)


def _numbered(labels: Sequence[Hashable] | None, rows: np.ndarray) -> np.ndarray:
    """Give the labels of some rows as 0, 1, 2 ... by first appearance; without labels each row has its own."""
    if labels is None:
        return np.arange(len(rows))
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(labels[row], len(numbers)) for row in rows])
