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

    # h_k of each reward (Eq. 3), whatever the method; `None` if it has no value, a negative one, or only zeros
    coefficient_of_variation: list[float | None]
    tamed: list[bool]  # whether the reward was replaced by log(1 + R_k)
    threshold: float  # delta as a number, even if passed as "mean"; infinity if no h_k is defined
    # Fraction of the spread within groups that each weighted reward contributes, after taming or normalization:
    # 0.5 and 0.5 for two balanced rewards, near 1 for a dominant one
    share: list[float | None]


def coefficient_of_variation(rewards: torch.Tensor) -> list[float | None]:
    """Compute h_k = std / mean (Eq. 3, population std) per column; `None` if undefined or any value is negative."""
    means = torch.nanmean(rewards, dim=0)  # (K,)
    stds = torch.nanmean((rewards - means) ** 2, dim=0).sqrt()  # (K,)
    # If values scatter around 0, rounding decides the sign of their mean, and would decide whether they are tamed
    is_negative = (rewards < 0).any(dim=0)  # (K,)
    columns = zip(means.tolist(), stds.tolist(), is_negative.tolist(), strict=True)
    # The mean of a column without values is NaN, and NaN > 0 is false
    return [std / mean if mean > 0 and not negative else None for mean, std, negative in columns]


def taming_threshold(h: list[float | None], threshold: float | str) -> float:
    """Resolve delta, the threshold of h_k, to a number: `"mean"` becomes the mean of the defined h_k."""
    if threshold == "mean":
        defined = [h_k for h_k in h if h_k is not None]
        return statistics.mean(defined) if defined else math.inf
    if isinstance(threshold, str) or not threshold >= 0:
        raise ValueError(f"`threshold` is {threshold!r}, but must be a number >= 0 or 'mean'.")
    return float(threshold)


def log_tame(rewards: torch.Tensor, tamed: Sequence[bool]) -> torch.Tensor:
    """Replace the `tamed` columns with log(1 + R_k), Eq. 4."""
    tamed = torch.tensor(tamed, dtype=torch.bool, device=rewards.device)  # (K,)
    return torch.where(tamed, torch.log1p(rewards), rewards)


def group_deviations(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Subtract from each value `(groups, N, ...)` the mean of its group over the `mask`; 0 outside the mask."""
    mean = torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return torch.where(mask, values - mean, 0.0)


def group_std(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute the standard deviation of each group over the `mask`, `(groups, 1, ...)`; 0 for a lone value."""
    degrees = (mask.sum(dim=1, keepdim=True) - 1).clamp(min=1)
    return torch.sqrt((group_deviations(values, mask) ** 2).sum(dim=1, keepdim=True) / degrees)


def normalize_in_groups(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """Normalize within groups like TRL's advantages, (R - mean) / (std + 1e-4); a lone value becomes 0, NaN stays."""
    grouped = rewards.reshape(-1, num_generations, *rewards.shape[1:])  # (N / G, G, K)
    scored = ~torch.isnan(grouped)
    normalized = group_deviations(grouped, scored) / (group_std(grouped, scored) + 1e-4)
    return torch.where(scored, normalized, torch.nan).reshape(rewards.shape)


def win_rates(rewards: torch.Tensor, num_generations: int) -> torch.Tensor:
    """
    Compute Pref-GRPO's win rates: the mean of 1(R > R') + 1/2 1(R = R') over the other values R' of a group.

    NaN stays, and does not count as an opponent.
    """
    grouped = rewards.reshape(-1, num_generations, *rewards.shape[1:])  # (N / G, G, K)
    reward = grouped.unsqueeze(2)
    other_reward = grouped.unsqueeze(1)
    wins = ((reward > other_reward) + (reward == other_reward) / 2).sum(dim=2).to(rewards.dtype)  # (N / G, G, K)
    count = (~torch.isnan(grouped)).sum(dim=1, keepdim=True) - 1  # (N / G, 1, K)
    rates = (wins - 0.5) / count.clamp(min=1)  # without the tie of each value with itself
    return torch.where(torch.isnan(grouped), torch.nan, rates).reshape(rewards.shape)


def neutralize_gaps(
    rewards: torch.Tensor, optional: torch.Tensor, num_generations: int, neutral: float
) -> torch.Tensor:
    """Set an optional reward to its overall mean in groups in which a completion lacks it, so that it is neutral."""
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

    Pass *all* completions of a round, gathered from all processes: h_k is a statistic over all groups. A row with a
    NaN in any required reward of nonzero weight is NaN in the aggregate. A reward of weight 0 is only logged: its
    NaNs, range and h_k do not affect the aggregate.

    Args:
        rewards (`torch.Tensor` of shape `(N, K)`):
            Rewards, NaN where missing. Computed in their dtype, or in float32 if that is more precise.
        weights (`torch.Tensor` of shape `(K,)` or `Sequence[float]`):
            Weight of each reward.
        method (`str`):
            - `"sum_then_normalize"`: the weighted sum, sum_k w_k R_k.
            - `"normalize_then_sum"`: the weighted sum of the rewards normalized within their groups. Requires
              `num_generations`.
            - `"rank_then_sum"`: the weighted sum of the win rates within groups, the fraction of a group's other
              images that an image beats, ties counting half ([Pref-GRPO](https://huggingface.co/papers/2508.20751)).
              Requires `num_generations`.
            - `"log_tamed"`: the weighted sum after replacing each reward whose h_k exceeds `threshold` with
              log(1 + R_k) (Eq. 3 and 4 of the [PaCo-RL paper](https://huggingface.co/papers/2512.04784)). A reward
              with a negative value has no h_k and is not tamed.
            - `"geometric_mean"`: exp(sum_k w_k log R_k / sum_k w_k). Rewards and weights must be >= 0.
        threshold (`float` or `str`, *optional*, defaults to `0.2`):
            Threshold of h_k (delta). The paper uses both 0.2 and `"mean"`, the mean over the rewards of nonzero weight
            whose h_k is defined; with only one such reward, nothing is tamed.
        num_generations (`int`, *optional*):
            Generations per group, G. A group is G consecutive rows. Required by `normalize_then_sum`,
            `rank_then_sum` and optional rewards. If `None`, the details' `share` treats all rows as one group.
        required (`Sequence[bool]` of length K, *optional*):
            Whether each reward is required. If an optional reward is missing for a row, the row's whole group is
            compared without it. If `None`, all are required.

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
    if (is_invalid := torch.isinf(rewards)).any():
        raise _reward_error(is_invalid, rewards, "must be finite. Pass NaN for a reward that could not be computed.")

    if required is not None and len(required) != len(weights):
        raise ValueError(f"`required` is {list(required)}; pass {rewards.shape[1]} values, one per column.")
    if num_generations is not None and (num_generations < 1 or len(rewards) % num_generations):
        raise ValueError(
            f"`num_generations` is {num_generations}, but {len(rewards)} rows do not divide into groups of that size."
        )

    required = [True] * len(weights) if required is None else list(required)
    optional = ~torch.tensor(required, dtype=torch.bool, device=rewards.device)  # (K,)
    if num_generations is None and (method in ("normalize_then_sum", "rank_then_sum") or optional.any()):
        reason = "optional rewards require" if optional.any() else f"`method={method!r}` requires"
        raise ValueError(f"`num_generations` is None, but {reason} groups of consecutive rows. Pass it.")

    has_weight = weights != 0  # (K,)
    h = coefficient_of_variation(rewards)
    tamed = [False] * len(weights)
    delta = taming_threshold([h_k for h_k, counts in zip(h, has_weight.tolist(), strict=True) if counts], threshold)

    if method == "normalize_then_sum":
        rewards = normalize_in_groups(rewards, cast(int, num_generations))
    elif method == "rank_then_sum":
        rewards = win_rates(rewards, cast(int, num_generations))
    elif method == "log_tamed":
        tamed = [
            counts and h_k is not None and h_k > delta for counts, h_k in zip(has_weight.tolist(), h, strict=True)
        ]
        rewards = log_tame(rewards, tamed) if any(tamed) else rewards
    elif method == "geometric_mean":
        if (weights < 0).any():
            raise ValueError(f"`weights` is {weights.tolist()}, but must be >= 0 for `method='geometric_mean'`.")
        if (is_invalid := (rewards < 0) & has_weight).any():
            rule = "must be >= 0 for `method='geometric_mean'`. Rescale the reward, for example to [0, 1]."
            raise _reward_error(is_invalid, rewards, rule)

    is_product = method == "geometric_mean"
    share = spread_shares(weights * (torch.log(rewards) if is_product else rewards), num_generations)
    if optional.any():
        rewards = neutralize_gaps(rewards, optional, cast(int, num_generations), neutral=1.0 if is_product else 0.0)
    # Drop columns of weight 0: 0 * NaN is NaN
    rewards = rewards[:, has_weight]
    weights = weights[has_weight]
    if is_product:  # exp(sum_k w_k log R_k / sum_k w_k)
        aggregate = torch.exp((weights * torch.log(rewards)).sum(dim=1) / weights.sum())  # (N,)
    else:
        aggregate = (rewards * weights).sum(dim=1)  # (N,)
    return aggregate, AggregationDetails(coefficient_of_variation=h, tamed=tamed, threshold=delta, share=share)


def _reward_error(is_invalid: torch.Tensor, rewards: torch.Tensor, rule: str) -> ValueError:
    row, column = is_invalid.nonzero()[0].tolist()  # the first invalid value of (N, K)
    return ValueError(f"`rewards[{row}, {column}]` (reward {column}) is {rewards[row, column].item()}, but {rule}")
