# SPDX-License-Identifier: Apache-2.0
"""Group-relative advantages of aggregated rewards."""

from typing import NamedTuple

import torch


class Advantages(NamedTuple):
    """Advantages of a round's images, and which of them take part in the loss."""

    values: torch.Tensor  # (N,), 0 for an image that is left out
    is_valid: torch.Tensor  # (N,), whether the image and another one of its group were scored
    has_spread: torch.Tensor  # (N / num_generations,), whether the group's rewards differ


def group_advantages(
    rewards: torch.Tensor, num_generations: int, scale_rewards: str = "group", advantage_clip: float | None = None
) -> Advantages:
    """Normalize rewards within the images of one prompt (Eq. 2); NaN is left out of every statistic."""
    if rewards.numel() % num_generations != 0:
        raise ValueError(f"{rewards.numel()} rewards are not full groups of {num_generations}.")
    # In float32 the mean of equal rewards may be off by a bit, and a group without spread would get advantages
    grouped = rewards.double().view(-1, num_generations)  # (prompts, G)
    scored = ~torch.isnan(grouped)
    is_valid = scored & (scored.sum(dim=1, keepdim=True) > 1)  # one alone has nothing to be compared with

    mean = _masked_mean(grouped, is_valid)
    std = _masked_std(grouped, is_valid)  # (prompts, 1)
    if scale_rewards == "group":
        scale = std + 1e-4  # as in TRL
    elif scale_rewards == "batch":
        scale = _masked_std(grouped.view(1, -1), is_valid.view(1, -1)) + 1e-4  # (1, 1)
    elif scale_rewards == "none":
        scale = torch.ones_like(std)
    else:
        raise ValueError(f"Unknown `scale_rewards` {scale_rewards!r}: it must be 'group', 'batch' or 'none'.")

    advantages = torch.where(is_valid, (grouped - mean) / scale, 0.0)
    if advantage_clip is not None:
        advantages = advantages.clamp(-advantage_clip, advantage_clip)
    has_spread = std.squeeze(1) > 0  # (prompts,)
    return Advantages(advantages.flatten().float(), is_valid.flatten(), has_spread)


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def _masked_std(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    deviations = torch.where(mask, values - _masked_mean(values, mask), 0.0)
    return torch.sqrt((deviations**2).sum(1, keepdim=True) / (mask.sum(1, keepdim=True) - 1).clamp(min=1))
