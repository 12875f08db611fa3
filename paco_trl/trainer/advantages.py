# SPDX-License-Identifier: Apache-2.0
"""From aggregated rewards to advantages: group normalisation that leaves out what could not be scored."""

from typing import NamedTuple

import torch


class Advantages(NamedTuple):
    """
    Attributes:
        values (`torch.Tensor` of shape `(N,)`):
            Advantage of each image; 0 for an image that is left out.
        is_valid (`torch.Tensor` of shape `(N,)`, bool):
            Whether the image was scored and has a scored sibling to be compared with; the others take no part in the
            loss.
        has_spread (`torch.Tensor` of shape `(N / num_generations,)`, bool):
            Whether the group's rewards differ at all; without spread a group teaches nothing.
    """

    values: torch.Tensor
    is_valid: torch.Tensor
    has_spread: torch.Tensor


def group_advantages(
    rewards: torch.Tensor, num_generations: int, scale_rewards: str = "group", advantage_clip: float | None = None
) -> Advantages:
    """
    Normalises rewards within the images of one prompt (Eq. 2): A = (r - mean of the group) / std of the group.

    As in TRL, 1e-4 is added to the standard deviation (of n - 1 degrees of freedom), which is taken over the group,
    over the batch, or not at all. Rewards that are NaN are left out of every statistic.

    Args:
        rewards (`torch.Tensor` of shape `(N,)`):
            Aggregated rewards of all processes, groups of `num_generations` consecutive entries; NaN = not scored.
        num_generations (`int`):
            Images of each prompt.
        scale_rewards (`str`, *optional*, defaults to `"group"`):
            `"group"` (the paper's), `"batch"` or `"none"`.
        advantage_clip (`float`, *optional*):
            Advantages are clipped to [-advantage_clip, advantage_clip].

    Returns:
        [`Advantages`].

    Raises:
        ValueError: unknown `scale_rewards`, or groups that are not whole.
    """
    if rewards.numel() % num_generations != 0:
        raise ValueError(f"{rewards.numel()} rewards are not whole groups of {num_generations}.")
    # In float64 the mean of equal rewards is that reward: in float32 it may be off by a bit, and a group without spread
    # would get advantages
    grouped = rewards.double().view(-1, num_generations)  # (prompts, G)
    scored = ~torch.isnan(grouped)
    # A single scored image has nothing to be compared with
    is_valid = scored & (scored.sum(dim=1, keepdim=True) > 1)

    mean = _masked_mean(grouped, is_valid, dim=1)
    std = _masked_std(grouped, is_valid, dim=1)  # (prompts, 1)
    if scale_rewards == "group":
        scale = std + 1e-4
    elif scale_rewards == "batch":
        flat, flat_valid = grouped.view(1, -1), is_valid.view(1, -1)
        scale = _masked_std(flat, flat_valid, dim=1) + 1e-4  # (1, 1)
    elif scale_rewards == "none":
        scale = torch.ones_like(std)
    else:
        raise ValueError(f"Unknown `scale_rewards` {scale_rewards!r}: it must be 'group', 'batch' or 'none'.")

    advantages = torch.where(is_valid, (grouped - mean) / scale, 0.0)
    if advantage_clip is not None:
        advantages = advantages.clamp(-advantage_clip, advantage_clip)
    has_spread = std.squeeze(1) > 0  # (prompts,)
    return Advantages(advantages.flatten().float(), is_valid.flatten(), has_spread)


def _masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.where(mask, values, 0.0).sum(dim, keepdim=True) / mask.sum(dim, keepdim=True).clamp(min=1)


def _masked_std(values: torch.Tensor, mask: torch.Tensor, dim: int) -> torch.Tensor:
    deviations = torch.where(mask, values - _masked_mean(values, mask, dim), 0.0)
    return torch.sqrt((deviations**2).sum(dim, keepdim=True) / (mask.sum(dim, keepdim=True) - 1).clamp(min=1))
