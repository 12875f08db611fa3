# SPDX-License-Identifier: Apache-2.0
"""
Formulas of advantages and objectives. DiffusionNFT's are from arXiv 2509.16117, AWM's from arXiv 2509.25050.

Values of images are `(B,)`, and latents and velocities `(B, ...)`.
"""

from typing import NamedTuple

import torch

from ..rewards.aggregation import group_deviations, group_std


class Advantages(NamedTuple):
    """Advantages of a round's completions, and which of them take part in the loss."""

    values: torch.Tensor  # (N,), 0 for a completion that is left out
    is_valid: torch.Tensor  # (N,), whether the completion and another one of its group were scored
    has_spread: torch.Tensor  # (groups,), whether the rewards of its completions differ


def group_advantages(
    rewards: torch.Tensor,
    num_generations: int,
    scale_rewards: str = "group",
    advantage_clip: float | None = None,
) -> Advantages:
    """Normalize rewards within the completions of a group (Eq. 2); NaN is left out of every statistic."""
    # In float32 the mean of equal rewards may be off by a bit, and a group without spread would get advantages
    grouped = rewards.double().view(-1, num_generations)  # (groups, completions)
    scored = ~torch.isnan(grouped)
    is_valid = scored & (scored.sum(dim=1, keepdim=True) > 1)  # one alone has nothing to be compared with

    deviations = group_deviations(grouped, is_valid)
    if scale_rewards == "group":
        scale = group_std(grouped, is_valid) + 1e-4  # (groups, 1), as in TRL
    elif scale_rewards == "batch":
        scale = group_std(grouped.view(1, -1), is_valid.view(1, -1)) + 1e-4  # (1, 1)
    else:
        scale = torch.ones_like(grouped)

    advantages = deviations / scale
    if advantage_clip is not None:
        advantages = advantages.clamp(-advantage_clip, advantage_clip)
    has_spread = (deviations != 0).any(dim=1)  # (groups,)
    return Advantages(advantages.flatten().float(), is_valid.flatten(), has_spread)


def informative_groups(
    rewards: torch.Tensor, num_generations: int, min_std: float | None, max_mean: float | None
) -> torch.Tensor:
    """Return which groups have a deviation above `min_std` and a mean below `max_mean` (Edit-R1, arXiv 2510.16888)."""
    grouped = rewards.double().view(-1, num_generations)  # (groups, completions)
    is_informative = torch.ones(len(grouped), dtype=torch.bool)  # (groups,)
    if min_std is not None:
        is_informative &= group_std(grouped, ~torch.isnan(grouped)).flatten() > min_std
    if max_mean is not None:
        is_informative &= ~(grouped.nanmean(dim=1) >= max_mean)
    return is_informative


class PolicyStep(NamedTuple):
    """
    A stochastic denoising step of B images, by the policy in training and by the old one, which generated them.

    Attributes:
        log_prob, old_log_prob (`torch.Tensor` of shape `(B,)`):
            Log-probability of the stored sample, averaged over the latent's elements.
        mean, old_mean (`torch.Tensor` of shape `(B, ...)`):
            Mean of the step's Gaussian.
        std (`float` or `torch.Tensor`):
            Standard deviation of the whole step, the same for both policies.
        sigma, sigma_next (`float`):
            Noise levels before and after the step, from 1 (noise) to 0 (image).
    """

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    mean: torch.Tensor
    old_mean: torch.Tensor
    std: float | torch.Tensor
    sigma: float
    sigma_next: float


class PolicyLoss(NamedTuple):
    """Loss of B images at one stochastic step, tensors of shape (B,); metrics and ratio are without gradients."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]  # values to log as means
    ratio: torch.Tensor | None = None  # 1 before an update. If `None`, exp(log_prob - old_log_prob)


class ClippedSurrogate(NamedTuple):
    """PPO's clipped objective on a batch of images: tensors of shape (B,)."""

    loss: torch.Tensor
    ratio: torch.Tensor  # ratio of the new to the old policy, detached
    is_low_clipped: torch.Tensor  # whether the lower end of the clip range cuts the gradient
    is_high_clipped: torch.Tensor


def clipped_surrogate(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> ClippedSurrogate:
    """Compute PPO's clipped objective (Eq. 1): -min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A)."""
    ratio = torch.exp(log_prob - old_log_prob)
    clipped_ratio = torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    ratio = ratio.detach()
    is_low = (ratio < 1 - epsilon_low) & (advantages < 0)
    is_high = (ratio > 1 + epsilon_high) & (advantages > 0)
    return ClippedSurrogate(loss, ratio, is_low, is_high)


def normalized_log_ratio(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    mean: torch.Tensor,
    old_mean: torch.Tensor,
    std: float | torch.Tensor,
) -> torch.Tensor:
    """Compute RatioNorm of [GRPO-Guard](https://huggingface.co/papers/2510.22319) (Eq. 8) for each image."""
    # Each step is x' = old_mean + S * eps, so the log-ratio is
    # mean[eps * Delta / S - Delta^2 / (2 S^2)] with Delta = mean - old_mean.
    # RatioNorm drops the second term, which pulls ratios below 1, and multiplies by S.
    # The published code averages the bias over the batch by mistake:
    # https://github.com/yifan123/flow_grpo/issues/244
    # S is s_t * sqrt(-dt), not s_t.
    return _one_per_image(std, mean, "std") * (log_prob - old_log_prob + gaussian_kl(mean, old_mean, std))


def guard_gradient_weight(sigma: float | torch.Tensor, sigma_next: float | torch.Tensor) -> float | torch.Tensor:
    """Compute the weight 1 / (t - t_next) of a step's loss in GRPO-Guard (Eq. 12)."""
    # It makes all steps of `"flow_sde"` equal; of the other kinds it balances the lengths only, as in published code
    return 1 / (sigma - sigma_next)


def guarded_surrogate(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    mean: torch.Tensor,
    old_mean: torch.Tensor,
    std: float | torch.Tensor,
    advantages: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    gradient_weight: float | torch.Tensor,
) -> ClippedSurrogate:
    """Compute GRPO-Guard's objective: [`clipped_surrogate`] of the normalized ratio, times the step's weight."""
    log_ratio = normalized_log_ratio(log_prob, old_log_prob, mean, old_mean, std)
    surrogate = clipped_surrogate(log_ratio, torch.zeros_like(log_ratio), advantages, epsilon_low, epsilon_high)
    loss = surrogate.loss * _one_per_image(gradient_weight, mean, "gradient_weight")
    return surrogate._replace(loss=loss)


def _one_per_image(value: float | torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    # (B, 1, ...) against (B,) would broadcast to (B, 1, ..., B) and mix the images
    # One number stays on the CPU, where it combines with any device: a copy would wait for all that is queued
    value = torch.as_tensor(value, dtype=torch.promote_types(like.dtype, torch.float32))
    if value.numel() == 1:
        return value.reshape(())
    if value.numel() != len(like) or len(value) != len(like):
        raise ValueError(
            f"`{name}` has shape {tuple(value.shape)}; pass one value, or one for each of {len(like)} images."
        )
    return value.flatten()  # (B,)


def gaussian_kl(mean: torch.Tensor, ref_mean: torch.Tensor, std: float | torch.Tensor) -> torch.Tensor:
    """Compute the KL divergence of two Gaussians of equal standard deviation, averaged over the latent's elements."""
    # `std` is the standard deviation of the whole step, with sqrt(-dt). The published code leaves dt out
    return ((mean - ref_mean) ** 2).flatten(1).mean(dim=1) / (2 * _one_per_image(std, mean, "std") ** 2)  # (B,)


def add_flow_noise(
    image: torch.Tensor, noise: torch.Tensor, sigma: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x_t = (1 - t) * x_0 + t * eps of the forward process of flow matching, and the velocity eps - x_0."""
    t = _one_per_image(sigma, image, "sigma").view(-1, *[1] * (image.ndim - 1))  # (B, 1, ...)
    return (1 - t) * image + t * noise, noise - image


def nft_reward_probability(advantages: torch.Tensor, advantage_clip: float) -> torch.Tensor:
    """Compute DiffusionNFT's optimality probability: r = 1/2 + 1/2 * clip(A / advantage_clip, -1, 1)."""
    # The paper's normalizer Z is `advantage_clip` standard deviations: advantages are divided by one already
    return 0.5 + 0.5 * torch.clamp(advantages / advantage_clip, -1, 1)


def nft_velocities(
    velocity: torch.Tensor, old_velocity: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute DiffusionNFT's implicit policies: v+- = (1 -+ beta) * v_old +- beta * v, at least in float32."""
    # In bf16 the sum would round away the small difference between the two velocities
    dtype = torch.promote_types(velocity.dtype, torch.float32)
    velocity = velocity.to(dtype)
    old_velocity = old_velocity.detach().to(dtype)
    return (1 - beta) * old_velocity + beta * velocity, (1 + beta) * old_velocity - beta * velocity


def velocity_error(velocity: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Compute the flow-matching loss of each image: the mean squared error of its velocity."""
    return ((velocity - target) ** 2).flatten(1).mean(dim=1)


def self_normalized_image_error(
    velocity: torch.Tensor, target: torch.Tensor, sigma: float | torch.Tensor
) -> torch.Tensor:
    """Compute DiffusionNFT's adaptively weighted error of the image x = x_t - t * v that a velocity points to."""
    t = _one_per_image(sigma, velocity, "sigma").view(-1, *[1] * (velocity.ndim - 1))  # (B, 1, ...)
    # x - x_0 = t * (target - v), without the rounding of x_t - t * v - x_0. The minimum is the published code's
    error = (t * (target - velocity)).flatten(1)  # (B, elements)
    return (error**2).mean(dim=1) / error.detach().abs().mean(dim=1).clamp(min=1e-5)


def nft_loss(
    velocity: torch.Tensor,
    old_velocity: torch.Tensor,
    target: torch.Tensor,
    reward_probability: torch.Tensor,
    beta: float,
    sigma: float | torch.Tensor,
) -> torch.Tensor:
    """Compute DiffusionNFT's objective at one time: r * error(v+) + (1 - r) * error(v-)."""
    positive, negative = nft_velocities(velocity, old_velocity, beta)
    positive_error = self_normalized_image_error(positive, target, sigma)
    negative_error = self_normalized_image_error(negative, target, sigma)
    return reward_probability * positive_error + (1 - reward_probability) * negative_error


def matching_log_prob(
    velocity: torch.Tensor, target: torch.Tensor, sigma: float | torch.Tensor, weighting: str
) -> torch.Tensor:
    """Compute AWM's log-probability of an image from its flow-matching loss l at time t, in float64."""
    # "t": -t * l. "ghuber", of the published code: -t * ((l + e)^p - e^p) / p with p = 1/4
    error = velocity_error(velocity.double(), target.double())
    t = _one_per_image(sigma, velocity, "sigma").double()
    if weighting == "ghuber":
        power, minimum = 0.25, 1e-10
        error = ((error + minimum) ** power - minimum**power) / power
    return -t * error


def nft_old_policy_decay(step: int, rate: float = 0.001, maximum: float = 0.5) -> float:
    """Compute the decay min(rate * step, maximum) of DiffusionNFT's old policy."""
    return min(step * rate, maximum)
