# SPDX-License-Identifier: Apache-2.0
"""
Aggregation of several rewards into one, before the advantage (PaCo-RL, https://huggingface.co/papers/2512.04784).

Notation: N completions (of all groups and processes), K rewards, G generations per group.

    h_k = std(R_k) / mean(R_k)                              (Eq. 3), over all completions
    R_k <- log(1 + R_k) where h_k > delta, then sum w_k R_k (Eq. 4)

The trainer computes the advantage, (r - group mean) / group std (Eq. 2): the aggregate is *not* centered, except with
`normalize_then_sum`. A missing value is NaN and never counts as a number.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch


AGGREGATION_METHODS = ("log_tamed", "sum_then_normalize", "normalize_then_sum", "rank_then_sum", "geometric_mean")


@dataclass(frozen=True)
class AggregationDetails:
    """Details of [`aggregate_rewards`], for the logs."""

    # h_k of each reward (Eq. 3), with every method; `None` without values, with a negative one, or if all are 0
    coefficient_of_variation: list[float | None]
    tamed: list[bool]  # whether the reward was replaced by log(1 + R_k)
    threshold: float  # delta, as a number also if given as "mean"; infinity if no h_k is defined
    # Fraction that each reward contributes to the spread within groups, after taming or normalization and with its
    # weight: 0.5 and 0.5 for two rewards in balance, near 1 for one that dominates
    share: list[float | None]


def coefficient_of_variation(rewards: torch.Tensor) -> list[float | None]:
    """Compute h_k = std / mean (Eq. 3, population std) per column, `None` if undefined or a value is negative."""
    means = torch.nanmean(rewards, dim=0)  # (K,)
    stds = torch.nanmean((rewards - means) ** 2, dim=0).sqrt()  # (K,)
    # If a reward is around 0, rounding decides the sign of its mean, and so would decide whether it is tamed
    is_negative = (rewards < 0).any(dim=0)  # (K,)
    columns = zip(means.tolist(), stds.tolist(), is_negative.tolist(), strict=True)
    # A column without values has the mean NaN, and NaN > 0 is false
    return [std / mean if mean > 0 and not negative else None for mean, std, negative in columns]


def taming_threshold(h: list[float | None], threshold: float | str) -> float:
    """Return the threshold of h_k, delta, as a number: `"mean"` is the mean of those that are defined."""
    if threshold == "mean":
        defined = [h_k for h_k in h if h_k is not None]
        return statistics.mean(defined) if defined else math.inf
    if isinstance(threshold, str) or not threshold >= 0:
        raise ValueError(f"`threshold` is {threshold!r}, but must be a number >= 0 or 'mean'.")
    return float(threshold)


def log_tame(rewards: torch.Tensor, tamed: Sequence[bool]) -> torch.Tensor:
    """Replace the chosen columns by log(1 + R_k), Eq. 4."""
    tamed = torch.tensor(tamed, dtype=torch.bool, device=rewards.device)  # (K,)
    return torch.where(tamed, torch.log1p(rewards), rewards)


def normalize_in_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Normalize within groups, (R - mean) / (std + 1e-4) as TRL's advantages; a single value becomes 0, NaN stays."""
    grouped = rewards.reshape(-1, num_generations, *rewards.shape[1:])  # (N / G, G, K)
    centered = grouped - torch.nanmean(grouped, dim=1, keepdim=True)  # (N / G, G, K)
    count = (~torch.isnan(grouped)).sum(dim=1, keepdim=True)  # (N / G, 1, K)
    # With fewer than two values the sum of squares is 0, and so is the result; clamp only avoids 0 / 0
    variance = torch.nansum(centered**2, dim=1, keepdim=True) / (count - 1).clamp(min=1)  # (N / G, 1, K)
    return (centered / (variance.sqrt() + 1e-4)).reshape(rewards.shape)


def win_rates(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Compute Pref-GRPO's mean over the others of a group of 1(R > R') + 1/2 1(R = R'); NaN stays and is no other."""
    grouped = rewards.reshape(-1, num_generations, *rewards.shape[1:])  # (N / G, G, K)
    reward, other_reward = grouped.unsqueeze(2), grouped.unsqueeze(1)
    wins = ((reward > other_reward) + (reward == other_reward) / 2).sum(dim=2).to(rewards.dtype)  # (N / G, G, K)
    count = (~torch.isnan(grouped)).sum(dim=1, keepdim=True) - 1  # (N / G, 1, K)
    rates = (wins - 0.5) / count.clamp(min=1)  # without the tie with itself
    return torch.where(torch.isnan(grouped), torch.nan, rates).reshape(rewards.shape)


def without_gaps(rewards: torch.Tensor, optional: torch.Tensor, num_generations: int, neutral: float) -> torch.Tensor:
    """Replace an optional reward by its mean in groups in which a completion lacks it: it has no influence there."""
    grouped = rewards.reshape(-1, num_generations, rewards.shape[1])  # (N / G, G, K)
    has_gap = torch.isnan(grouped).any(dim=1, keepdim=True) & optional  # (N / G, 1, K)
    constant = torch.nanmean(rewards, dim=0).nan_to_num(nan=neutral)  # (K,)
    return torch.where(has_gap, constant, grouped).reshape(rewards.shape)


def spread_shares(terms: torch.Tensor, num_generations: int | None) -> list[float | None]:
    """Compute each term's fraction of the summed standard deviations within groups, averaged over groups."""
    terms = torch.where(torch.isfinite(terms), terms, torch.nan)
    grouped = terms.reshape(-1, num_generations or len(terms), terms.shape[1])  # (N / G, G, K)
    deviations = grouped - torch.nanmean(grouped, dim=1, keepdim=True)  # (N / G, G, K)
    stds = torch.nanmean(deviations**2, dim=1).sqrt()  # (N / G, K)
    spreads = torch.nanmean(stds, dim=0).nan_to_num(nan=0.0)  # (K,)
    total = spreads.sum()
    return (spreads / total).tolist() if total > 0 else [None] * terms.shape[1]


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

    Pass *all* completions of a round, gathered from all processes: h_k is a statistic over all groups. A row
    with a NaN in any required reward of nonzero weight is NaN in the aggregate. A reward of weight 0 is only logged: its
    NaNs, range and h_k do not affect the aggregate.

    Args:
        rewards (`torch.Tensor` of shape `(N, K)`):
            Rewards, NaN where missing. The arithmetic is in their dtype, or in float32 if that is more precise.
        weights (`torch.Tensor` of shape `(K,)` or `Sequence[float]`):
            Weight of each reward.
        method (`str`):
            - `"sum_then_normalize"`: the weighted sum, sum_k w_k R_k.
            - `"normalize_then_sum"`: each reward is normalized within its group, then the weighted sum. It requires
              `num_generations`.
            - `"rank_then_sum"`: each reward is replaced by the fraction of the other images of its group that it beats,
              ties counting half ([Pref-GRPO](https://huggingface.co/papers/2508.20751)), then the weighted sum. It
              requires `num_generations`.
            - `"log_tamed"`: each reward whose h_k exceeds `threshold` is replaced by log(1 + R_k), then the weighted
              sum (Eq. 3 and 4 of the [PaCo-RL paper](https://huggingface.co/papers/2512.04784)). A reward with a
              negative value has no h_k and is not tamed.
            - `"geometric_mean"`: exp(sum_k w_k log R_k / sum_k w_k). Rewards and weights must be >= 0.
        threshold (`float` or `str`, *optional*, defaults to `0.2`):
            Threshold of h_k (the paper's delta): a number, 0.2 in the paper, or `"mean"` for the mean of the h_k, also
            in the paper. The mean is over the rewards of nonzero weight whose h_k is defined; with a single one,
            nothing is tamed.
        num_generations (`int`, *optional*):
            Generations per group, G. A group is G consecutive rows. Required by `normalize_then_sum`,
            `rank_then_sum` and optional rewards; the details' `share` is within groups if given.
        required (`Sequence[bool]` of length K, *optional*):
            Whether each reward is required. A group in which an optional one is missing is compared without it. If
            `None`, all are.

    Returns:
        `tuple[torch.Tensor, AggregationDetails]`: the aggregate of shape `(N,)`, and the details.

    Raises:
        ValueError: If all weights are 0, or a value is infinite or out of the method's range.

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
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))  # (N, K)
    weights = torch.as_tensor(weights, dtype=rewards.dtype, device=rewards.device)  # (K,)
    if weights.shape != rewards.shape[1:]:
        raise ValueError(f"`weights` has shape {tuple(weights.shape)}; pass {rewards.shape[1]}, one per column.")
    if not torch.isfinite(weights).all() or not weights.any():
        raise ValueError(f"`weights` is {weights.tolist()}, but must be finite and not all 0.")
    if (wrong := torch.isinf(rewards)).any():
        raise _error(wrong, rewards, "must be finite. A reward that could not be computed is missing: pass NaN.")

    if required is not None and len(required) != len(weights):
        raise ValueError(f"`required` is {list(required)}; pass one for each of {rewards.shape[1]} columns.")
    if num_generations is not None and (num_generations < 1 or len(rewards) % num_generations):
        raise ValueError(f"`num_generations` is {num_generations}, but {len(rewards)} rows are no groups of so many.")

    required = [True] * len(weights) if required is None else list(required)
    optional = ~torch.tensor(required, dtype=torch.bool, device=rewards.device)  # (K,)
    if num_generations is None and (method in ("normalize_then_sum", "rank_then_sum") or optional.any()):
        reason = "optional rewards require" if optional.any() else f"`method={method!r}` requires"
        raise ValueError(f"`num_generations` is None, but {reason} groups of consecutive rows. Pass it.")

    used = weights != 0  # (K,)
    h, tamed = coefficient_of_variation(rewards), [False] * len(weights)
    limit = taming_threshold([h_k for h_k, is_used in zip(h, used.tolist(), strict=True) if is_used], threshold)

    if method == "normalize_then_sum":
        rewards = normalize_in_groups(rewards, cast(int, num_generations))
    elif method == "rank_then_sum":
        rewards = win_rates(rewards, cast(int, num_generations))
    elif method == "log_tamed":
        tamed = [is_used and h_k is not None and h_k > limit for is_used, h_k in zip(used.tolist(), h, strict=True)]
        rewards = log_tame(rewards, tamed) if any(tamed) else rewards
    elif method == "geometric_mean":
        if (weights < 0).any():
            raise ValueError(f"`weights` is {weights.tolist()}, but must be >= 0 for `method='geometric_mean'`.")
        if (wrong := (rewards < 0) & used).any():
            rule = "must be >= 0 for `method='geometric_mean'`. Rescale the reward, to [0, 1] for example."
            raise _error(wrong, rewards, rule)

    is_product = method == "geometric_mean"
    share = spread_shares(weights * (torch.log(rewards) if is_product else rewards), num_generations)
    if optional.any():
        rewards = without_gaps(rewards, optional, cast(int, num_generations), neutral=1.0 if is_product else 0.0)
    # Without columns of weight 0: 0 * NaN is NaN
    rewards, weights = rewards[:, used], weights[used]
    if is_product:  # exp(sum_k w_k log R_k / sum_k w_k)
        aggregate = torch.exp((weights * torch.log(rewards)).sum(dim=1) / weights.sum())  # (N,)
    else:
        aggregate = (rewards * weights).sum(dim=1)  # (N,)
    return aggregate, AggregationDetails(coefficient_of_variation=h, tamed=tamed, threshold=limit, share=share)


def _error(wrong: torch.Tensor, rewards: torch.Tensor, rule: str) -> ValueError:
    row, column = wrong.nonzero()[0].tolist()  # of (N, K)
    return ValueError(f"`rewards[{row}, {column}]` (reward {column}) is {rewards[row, column].item()}, but {rule}")
