# SPDX-License-Identifier: Apache-2.0
"""The objective, one formula a function."""

from typing import NamedTuple

import torch


class ClippedSurrogate(NamedTuple):
    """
    Attributes:
        loss (`torch.Tensor` of shape `(B,)`):
            Loss of each image.
        ratio (`torch.Tensor` of shape `(B,)`):
            Probability ratio of the new to the old policy, detached.
        is_low_clipped (`torch.Tensor` of shape `(B,)`, bool), is_high_clipped (`torch.Tensor` of shape `(B,)`, bool):
            Whether the clip at the lower or upper end cuts the gradient.
    """

    loss: torch.Tensor
    ratio: torch.Tensor
    is_low_clipped: torch.Tensor
    is_high_clipped: torch.Tensor


def clipped_surrogate(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> ClippedSurrogate:
    """
    PPO's clipped objective on one stochastic step (Eq. 1): -min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A).

    Args:
        log_prob (`torch.Tensor` of shape `(B,)`), old_log_prob (`torch.Tensor` of shape `(B,)`):
            Log-probability of the recorded sample under the model and under the policy that drew it.
        advantages (`torch.Tensor` of shape `(B,)`):
            Advantages.
        epsilon_low (`float`), epsilon_high (`float`):
            Clip range below and above 1.

    Returns:
        [`ClippedSurrogate`].
    """
    ratio = torch.exp(log_prob - old_log_prob)
    clipped_ratio = torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    ratio = ratio.detach()
    return ClippedSurrogate(
        loss,
        ratio,
        is_low_clipped=(ratio < 1 - epsilon_low) & (advantages < 0),
        is_high_clipped=(ratio > 1 + epsilon_high) & (advantages > 0),
    )


def gaussian_kl(mean: torch.Tensor, ref_mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """
    KL divergence of two Gaussians of equal standard deviation, averaged over the non-batch dimensions.

    KL = mean[ (mean - ref_mean)^2 / (2 std^2) ], with the standard deviation of the whole step (sqrt(-dt) included):
    the divergence itself. The published code leaves dt out.

    Args:
        mean (`torch.Tensor` of shape `(B, ...)`), ref_mean (`torch.Tensor` of shape `(B, ...)`):
            Means of the step under the model and the reference.
        std (`torch.Tensor`):
            Standard deviation of the step, broadcastable.

    Returns:
        `torch.Tensor` of shape `(B,)`.
    """
    return ((mean - ref_mean) ** 2 / (2 * std**2)).flatten(1).mean(dim=1)
