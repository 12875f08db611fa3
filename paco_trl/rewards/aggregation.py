# SPDX-License-Identifier: Apache-2.0
"""
Aggregation of several rewards into one, before the advantage (PaCo-RL, https://huggingface.co/papers/2512.04784).

Notation: N samples (all images of all groups and processes), K rewards, G generations a group.

    h_k = std(R_k) / mean(R_k)                              (Eq. 3), over all samples
    R_k <- log(1 + R_k) where h_k > delta, then sum w_k R_k (Eq. 4)

The advantage, (r - group mean) / group std (Eq. 2), is the trainer's: what this module gives is *not* centred, except
with `normalize_then_sum`.

A missing value is NaN. It never counts as a number: not in a mean, not in a sum. A row that lacks a required reward has
no aggregate; a group that lacks an optional one is compared without it.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch


AGGREGATION_METHODS = ("sum_then_normalize", "normalize_then_sum", "log_tamed", "geometric_mean")


@dataclass(frozen=True)
class AggregationDetails:
    """
    What [`aggregate_rewards`] found out on the way, for the logs.

    Attributes:
        coefficient_of_variation (`list[float | None]`):
            h_k of each reward (Eq. 3), computed with every method; `None` where it is undefined: the reward has no
            value at all, or its mean is not positive.
        tamed (`list[bool]`):
            Whether the reward was replaced by log(1 + R_k). All `False` with methods other than `log_tamed`.
        threshold (`float`):
            The threshold (delta) as a number, also when it was given as `"mean"` or `"median"`. Infinity when no h_k
            is defined and there is nothing to take the mean or the median of.
        share (`list[float | None]`):
            Part of each reward in what sets the samples of a group apart ([`spread_shares`]), after taming or
            normalising and with its weight: 0.5 and 0.5 for two rewards in balance, near 1 for one that dominates.
    """

    coefficient_of_variation: list[float | None]
    tamed: list[bool]
    threshold: float
    share: list[float | None]


def coefficient_of_variation(rewards: torch.Tensor) -> list[float | None]:
    """
    Spread of each reward in units of its mean: h_k = std / mean (Eq. 3), with the population standard deviation.

    Args:
        rewards (`torch.Tensor` of shape `(N, K)`):
            Rewards, NaN where missing. Missing values are left out.

    Returns:
        `list[float | None]`: h_k of the K rewards, `None` where there is no value or the mean is not positive.
    """
    means = torch.nanmean(rewards, dim=0)  # (K,)
    stds = torch.nanmean((rewards - means) ** 2, dim=0).sqrt()  # (K,)
    # A column without values has mean NaN, and NaN > 0 is false.
    return [std / mean if mean > 0 else None for mean, std in zip(means.tolist(), stds.tolist(), strict=True)]


def log_tame(rewards: torch.Tensor, tamed: Sequence[bool]) -> torch.Tensor:
    """
    Replace the chosen rewards by log(1 + R_k), Eq. 4.

    The slope of log(1 + R) is 1 / (1 + R): differences near 0 stay as they are, differences near R shrink by 1 + R. On
    rewards in [0, 1] it shrinks nothing by more than 2.

    Args:
        rewards (`torch.Tensor` of shape `(N, K)`):
            Rewards, NaN where missing (and NaN in the result).
        tamed (`Sequence[bool]` of length K):
            Which rewards to replace.

    Returns:
        `torch.Tensor` of shape `(N, K)`: a new tensor.
    """
    tamed = torch.tensor(tamed, dtype=torch.bool, device=rewards.device)  # (K,)
    return torch.where(tamed, torch.log1p(rewards), rewards)


def normalize_in_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """
    Normalise each reward within each group: (R - group mean) / (group std + 1e-4).

    The standard deviation is the unbiased one and the 1e-4 is TRL's, so that this is the same normalisation as that of
    TRL's advantages. A group with a single value gives 0 for it (a standard deviation of one value does not exist, and
    there is nothing to compare with); a missing value stays NaN.

    Args:
        rewards (`torch.Tensor` of shape `(N,)` or `(N, K)`):
            Rewards, NaN where missing. A group is `num_generations` consecutive rows.
        num_generations (`int`):
            Generations per group, G. N must be a multiple of it.

    Returns:
        `torch.Tensor` of the shape of `rewards`: a new tensor.
    """
    grouped = rewards.reshape(-1, num_generations, *rewards.shape[1:])  # (N / G, G, K)
    centred = grouped - torch.nanmean(grouped, dim=1, keepdim=True)  # (N / G, G, K)
    count = (~torch.isnan(grouped)).sum(dim=1, keepdim=True)  # (N / G, 1, K)
    # With fewer than two values the sum of squares is 0 and so is the result; clamp only avoids 0 / 0.
    variance = torch.nansum(centred**2, dim=1, keepdim=True) / (count - 1).clamp(min=1)  # (N / G, 1, K)
    return (centred / (variance.sqrt() + 1e-4)).reshape(rewards.shape)


def without_gaps(rewards: torch.Tensor, optional: torch.Tensor, num_generations: int, neutral: float) -> torch.Tensor:
    """
    Take an optional reward out of the groups in which it is missing for a sample.

    All samples of such a group get the same value, so that the reward has no say in how they compare: its mean over
    all samples that have it, which leaves the level of the aggregate as it is.

    Args:
        rewards (`torch.Tensor` of shape `(N, K)`):
            Rewards, NaN where missing. A group is `num_generations` consecutive rows.
        optional (`torch.Tensor` of shape `(K,)`, bool):
            Which rewards are optional. The others keep their NaNs.
        num_generations (`int`):
            Generations per group, G. N must be a multiple of it.
        neutral (`float`):
            Value of a reward that no sample has.

    Returns:
        `torch.Tensor` of shape `(N, K)`: a new tensor.
    """
    grouped = rewards.reshape(-1, num_generations, rewards.shape[1])  # (N / G, G, K)
    has_gap = torch.isnan(grouped).any(dim=1, keepdim=True) & optional  # (N / G, 1, K)
    constant = torch.nanmean(rewards, dim=0).nan_to_num(nan=neutral)  # (K,)
    return torch.where(has_gap, constant, grouped).reshape(rewards.shape)


def spread_shares(terms: torch.Tensor, num_generations: int | None) -> list[float | None]:
    """
    Part of each term of a sum in what sets the samples of a group apart: the mean over groups of its standard
    deviation within the group, divided by the sum over the terms.

    Args:
        terms (`torch.Tensor` of shape `(N, K)`):
            Terms: rewards times their weights. Values that are not finite are left out.
        num_generations (`int`, *optional*):
            Generations per group, G. If `None`, all rows are one group.

    Returns:
        `list[float | None]`: shares, which add up to 1; `None` for all where no term differs within a group.
    """
    terms = torch.where(torch.isfinite(terms), terms, torch.nan)
    grouped = terms.reshape(-1, num_generations or len(terms), terms.shape[1])  # (N / G, G, K)
    deviations = grouped - torch.nanmean(grouped, dim=1, keepdim=True)  # (N / G, G, K)
    stds = torch.nanmean(deviations**2, dim=1).sqrt()  # (N / G, K)
    spreads = torch.nanmean(stds, dim=0).nan_to_num(nan=0.0)  # (K,)
    total = spreads.sum()
    return (spreads / total).tolist() if total > 0 else [None] * terms.shape[1]


def weighted_sum(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Weighted sum over the rewards: sum_k w_k R_k (the sum of Eq. 4).

    Args:
        rewards (`torch.Tensor` of shape `(N, K)`):
            Rewards; a row with a NaN gives NaN.
        weights (`torch.Tensor` of shape `(K,)`):
            Weights.

    Returns:
        `torch.Tensor` of shape `(N,)`.
    """
    return (rewards * weights).sum(dim=1)


def weighted_geometric_mean(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """
    Weighted geometric mean over the rewards: exp(sum_k w_k log R_k / sum_k w_k).

    Args:
        rewards (`torch.Tensor` of shape `(N, K)`):
            Rewards >= 0; a row with a NaN gives NaN, else a row with a 0 gives 0.
        weights (`torch.Tensor` of shape `(K,)`):
            Weights > 0.

    Returns:
        `torch.Tensor` of shape `(N,)`.
    """
    return torch.exp((weights * torch.log(rewards)).sum(dim=1) / weights.sum())


def aggregate_rewards(
    rewards: torch.Tensor,
    weights: torch.Tensor | Sequence[float],
    method: str,
    threshold: float | str = 0.2,
    num_generations: int | None = None,
    required: Sequence[bool] | None = None,
) -> tuple[torch.Tensor, AggregationDetails]:
    """
    Aggregate K rewards into one, before the advantage.

    Give it *all* samples of a round, gathered from all processes: h_k is a statistic of all samples of all groups,
    while the normalisation that follows is per group. A row with a NaN in any required reward of nonzero weight is NaN
    in the aggregate: a partial failure is a failure, not a 0 in the sum. A reward of weight 0 is only watched: its NaNs,
    its range and its h_k have no influence on the aggregate.

    Args:
        rewards (`torch.Tensor` of shape `(N, K)`):
            Rewards, NaN where missing; the tensor is not changed. The arithmetic is in its dtype, or in float32 if
            that is more precise.
        weights (`torch.Tensor` of shape `(K,)` or `Sequence[float]`):
            Weight of each reward.
        method (`str`):
            - `"sum_then_normalize"`: the weighted sum, sum_k w_k R_k.
            - `"normalize_then_sum"`: each reward is normalised within its group ([`normalize_in_groups`]), then the
              weighted sum. Needs `num_generations`.
            - `"log_tamed"`: each reward whose h_k exceeds `threshold` is replaced by log(1 + R_k), then the weighted
              sum (Eq. 3 and 4 of the [PaCo-RL paper](https://huggingface.co/papers/2512.04784)). Rewards must be > -1.
              A reward whose mean is not positive has no h_k and is not tamed.
            - `"geometric_mean"`: exp(sum_k w_k log R_k / sum_k w_k). Rewards and weights must be >= 0.
        threshold (`float` or `str`, *optional*, defaults to `0.2`):
            Threshold of h_k (the paper's delta). A number (0.2 in the paper), `"mean"` for the mean of the h_k (also
            in the paper), or `"median"` for their median (a choice of this package, which the paper does not
            document). Mean and median are over the rewards of nonzero weight whose h_k is defined; with only one such
            reward they equal its h_k and nothing is tamed.
        num_generations (`int`, *optional*):
            Generations per group, G. A group is G consecutive rows. `normalize_then_sum` and optional rewards need it,
            and the details' `share` is within groups with it.
        required (`Sequence[bool]` of length K, *optional*):
            Whether each reward is required. A group in which an optional one is missing is compared without it
            ([`without_gaps`]). If `None`, all are.

    Returns:
        `tuple[torch.Tensor, AggregationDetails]`: the aggregate of shape `(N,)`, and the details: h_k, which rewards
        were tamed, and the threshold as a number.

    Raises:
        ValueError: If `method` or `threshold` is unknown, a shape or length is wrong, a reward or weight is infinite,
            all weights are 0, `num_generations` is missing where it is needed or does not divide N, or a value is out
            of the method's range.

    Example:

    ```python
    >>> import torch
    >>> from paco_trl.rewards import aggregate_rewards

    >>> rewards = torch.tensor([[0.0, 0.7], [3.0, 0.8]])
    >>> aggregate, details = aggregate_rewards(rewards, weights=[1.0, 1.0], method="log_tamed")
    >>> aggregate
    tensor([0.7000, 2.1863])
    >>> details.tamed
    [True, False]
    ```
    """
    if method not in AGGREGATION_METHODS:
        raise ValueError(f"`method` is {method!r}, but must be one of {', '.join(AGGREGATION_METHODS)}.")
    if rewards.dim() != 2 or 0 in rewards.shape:
        raise ValueError(
            f"`rewards` has shape {tuple(rewards.shape)}, but must be (N, K): one row per sample, one column "
            "per reward."
        )
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))  # (N, K)
    weights = torch.as_tensor(weights, dtype=rewards.dtype, device=rewards.device)  # (K,)
    if weights.shape != rewards.shape[1:]:
        raise ValueError(
            f"`weights` has shape {tuple(weights.shape)}, but `rewards` has {rewards.shape[1]} columns. Pass one "
            "weight per reward."
        )
    if not torch.isfinite(weights).all() or not weights.any():
        raise ValueError(f"`weights` is {weights.tolist()}, but must be finite and not all 0.")
    _refuse_where(
        torch.isinf(rewards),
        rewards,
        "must be finite. A reward that could not be computed is missing: pass NaN (`None` from a reward function).",
    )

    required = [True] * len(weights) if required is None else list(required)
    if len(required) != len(weights):
        raise ValueError(f"`required` has {len(required)} entries, but `rewards` has {len(weights)} columns.")
    optional = ~torch.tensor(required, dtype=torch.bool, device=rewards.device)  # (K,)
    if num_generations is None:
        if method == "normalize_then_sum" or optional.any():
            reason = (
                "`method='normalize_then_sum'` normalises within" if not optional.any() else "optional rewards need"
            )
            raise ValueError(
                f"`num_generations` is None, but {reason} groups of `num_generations` consecutive rows. Pass it."
            )
    elif num_generations < 1 or len(rewards) % num_generations != 0:
        raise ValueError(
            f"`num_generations` is {num_generations}, but a group is `num_generations` consecutive rows: it must divide "
            f"the number of rows, {len(rewards)}."
        )

    used = weights != 0  # (K,)
    h = coefficient_of_variation(rewards)
    limit = _resolve_threshold(threshold, [h_k for h_k, u in zip(h, used.tolist(), strict=True) if u])
    tamed = [False] * len(h)

    if method == "normalize_then_sum":
        rewards = normalize_in_groups(rewards, num_generations)
    elif method == "log_tamed":
        # Refused whether or not this round's h_k exceeds the threshold: a reward that log(1 + R) cannot take is an
        # error in the first round, not in the round in which its spread happens to grow.
        _refuse_where(
            (rewards <= -1) & used,
            rewards,
            "must be greater than -1 for `method='log_tamed'`, because log(1 + R) does not exist there. Shift or "
            "rescale the reward (to [0, 1], for example), or use another method.",
        )
        tamed = [u and h_k is not None and h_k > limit for h_k, u in zip(h, used.tolist(), strict=True)]
        rewards = log_tame(rewards, tamed)
    elif method == "geometric_mean":
        if (weights < 0).any():
            raise ValueError(f"`weights` is {weights.tolist()}, but must be >= 0 for `method='geometric_mean'`.")
        _refuse_where(
            (rewards < 0) & used,
            rewards,
            "must be >= 0 for `method='geometric_mean'`. Shift or rescale the reward (to [0, 1], for example), or use "
            "another method.",
        )

    is_product = method == "geometric_mean"
    share = spread_shares(weights * (torch.log(rewards) if is_product else rewards), num_generations)
    if optional.any():
        rewards = without_gaps(rewards, optional, num_generations, neutral=1.0 if is_product else 0.0)
    # Columns of weight 0 leave here, because 0 * NaN is NaN.
    combine = weighted_geometric_mean if is_product else weighted_sum
    aggregate = combine(rewards[:, used], weights[used])  # (N,)
    return aggregate, AggregationDetails(coefficient_of_variation=h, tamed=tamed, threshold=limit, share=share)


def _resolve_threshold(threshold: float | str, h: list[float | None]) -> float:
    defined = [h_k for h_k in h if h_k is not None]
    if threshold == "mean":
        return statistics.mean(defined) if defined else math.inf
    if threshold == "median":
        return statistics.median(defined) if defined else math.inf
    if isinstance(threshold, str) or not threshold >= 0:
        raise ValueError(f"`threshold` is {threshold!r}, but must be a number >= 0, 'mean' or 'median'.")
    return float(threshold)


def _refuse_where(wrong: torch.Tensor, rewards: torch.Tensor, reason: str) -> None:
    # wrong: (N, K) bool
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"`rewards[{row}, {column}]` (reward {column}) is {rewards[row, column].item()}, but {reason}"
        )
