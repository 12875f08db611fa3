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
    return _clip(log_prob - old_log_prob, advantages, epsilon_low, epsilon_high)


def _clip(
    log_ratio: torch.Tensor, advantages: torch.Tensor, epsilon_low: float, epsilon_high: float
) -> ClippedSurrogate:
    ratio = torch.exp(log_ratio)
    clipped_ratio = torch.clamp(ratio, 1 - epsilon_low, 1 + epsilon_high)
    loss = -torch.min(ratio * advantages, clipped_ratio * advantages)
    ratio = ratio.detach()
    return ClippedSurrogate(
        loss,
        ratio,
        is_low_clipped=(ratio < 1 - epsilon_low) & (advantages < 0),
        is_high_clipped=(ratio > 1 + epsilon_high) & (advantages > 0),
    )


def normalized_log_ratio(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    mean: torch.Tensor,
    old_mean: torch.Tensor,
    std: float | torch.Tensor,
) -> torch.Tensor:
    """
    RatioNorm of [GRPO-Guard](https://huggingface.co/papers/2510.22319) (Eq. 8), for each image on its own.

    With S the standard deviation of the step, Delta = mean - old_mean and the sample x' = old_mean + S * eps, the log
    ratio of the two Gaussians is mean[ eps * Delta / S - Delta^2 / (2 S^2) ]. The second term pulls ratios below 1,
    and the same Delta weighs more in a step with less noise. RatioNorm adds the second term back and multiplies by S:

    S * (log_prob - old_log_prob + mean[ Delta^2 / (2 S^2) ]) = mean[ eps * Delta ]

    The paper writes norms, which are sums over the elements of a latent; this is for log-probabilities that are means
    ([`~paco_trl.rollout.gaussian_log_prob`]). The published code averages the bias over the images of a batch too,
    which mixes them; its authors call that a mistake (https://github.com/yifan123/flow_grpo/issues/244).

    Args:
        log_prob (`torch.Tensor` of shape `(B,)`), old_log_prob (`torch.Tensor` of shape `(B,)`):
            Log-probability of the recorded sample under the model and under the policy that drew it.
        mean (`torch.Tensor` of shape `(B, ...)`), old_mean (`torch.Tensor` of shape `(B, ...)`):
            Means of the step under the model and under the policy that drew the sample, float32.
        std (`float` or `torch.Tensor`):
            Standard deviation of the whole step, which [`~paco_trl.rollout.step_std`] gives for every kind of step:
            s_t * sqrt(-dt), not s_t. One value, or one for each image, `(B,)` or `(B, 1, ...)`.

    Returns:
        `torch.Tensor` of shape `(B,)`. Gradients flow through `log_prob` and `mean`.

    Raises:
        ValueError: `std` is neither one value nor one for each image.
    """
    std = _one_per_image(std, mean, "std")
    bias = ((mean - old_mean) ** 2).flatten(1).mean(dim=1) / (2 * std**2)  # (B,)
    return std * (log_prob - old_log_prob + bias)


def guard_gradient_weight(sigma: float | torch.Tensor, sigma_next: float | torch.Tensor) -> float | torch.Tensor:
    """
    Weight of a step's loss in [GRPO-Guard](https://huggingface.co/papers/2510.22319) (Eq. 12): 1 / (t - t_next).

    After RatioNorm the gradient of a step is eps times the derivative of its mean by the velocity. For `"flow_sde"`
    that is (1 + a^2 / 2) * dt, so that long steps outweigh short ones, and 1 / (-dt) makes all steps equal.

    For `"dance_sde"` the factor is 1 + a^2 * (1 - t) / (2 t), which changes from step to step, and `"cps"` is not in
    the paper. The weight is 1 / (-dt) for them too, as in the published code: it makes up for the lengths of their
    steps only. With a single trained step the weight is a constant factor of the loss.

    Args:
        sigma (`float` or `torch.Tensor` of shape `(B,)`), sigma_next (`float` or `torch.Tensor` of shape `(B,)`):
            Times before and after the step.

    Returns:
        `float` or `torch.Tensor` of shape `(B,)`: the weight, as `sigma`.
    """
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
    """
    Clipped objective of [GRPO-Guard](https://huggingface.co/papers/2510.22319) on one stochastic step:
    [`clipped_surrogate`] with the ratio of [`normalized_log_ratio`], times the weight of the step.

    On policy the ratio is 1 and the gradient is that of [`clipped_surrogate`] times `std * gradient_weight`. The log
    ratio is `std` times as large as there, so that a clip range of `epsilon * std` clips where `epsilon` does there.

    Args:
        log_prob (`torch.Tensor` of shape `(B,)`), old_log_prob (`torch.Tensor` of shape `(B,)`):
            Log-probability of the recorded sample under the model and under the policy that drew it.
        mean (`torch.Tensor` of shape `(B, ...)`), old_mean (`torch.Tensor` of shape `(B, ...)`):
            Means of the step under the model and under the policy that drew the sample, float32.
        std (`float` or `torch.Tensor`):
            Standard deviation of the whole step, see [`normalized_log_ratio`].
        advantages (`torch.Tensor` of shape `(B,)`):
            Advantages.
        epsilon_low (`float`), epsilon_high (`float`):
            Clip range of the normalized ratio below and above 1.
        gradient_weight (`float` or `torch.Tensor`):
            Weight of the step, see [`guard_gradient_weight`]. 1 leaves RatioNorm alone. One value, or one for each
            image, `(B,)` or `(B, 1, ...)`.

    Returns:
        [`ClippedSurrogate`]: the weight is part of `loss`; `ratio` is the normalized one.

    Raises:
        ValueError: `std` or `gradient_weight` is neither one value nor one for each image.
    """
    log_ratio = normalized_log_ratio(log_prob, old_log_prob, mean, old_mean, std)
    surrogate = _clip(log_ratio, advantages, epsilon_low, epsilon_high)
    return surrogate._replace(loss=surrogate.loss * _one_per_image(gradient_weight, mean, "gradient_weight"))


def _one_per_image(value: float | torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    # (B, 1, ...) against (B,) would broadcast to (B, 1, ..., B) and mix the images
    value = torch.as_tensor(value, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    if value.numel() != 1 and (value.numel() != len(like) or len(value) != len(like)):
        raise ValueError(
            f"`{name}` has shape {tuple(value.shape)} for a batch of {len(like)} images; pass one value, or one for "
            "each image."
        )
    return value.flatten()  # (B,) or (1,)


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


class NoisedImage(NamedTuple):
    """
    A point of the forward process between an image and noise.

    Attributes:
        sample (`torch.Tensor` of shape `(B, ...)`):
            Sample at the given time: what the model sees.
        target (`torch.Tensor` of shape `(B, ...)`):
            Velocity there: what the model is to predict.
    """

    sample: torch.Tensor
    target: torch.Tensor


def add_flow_noise(image: torch.Tensor, noise: torch.Tensor, sigma: float | torch.Tensor) -> NoisedImage:
    """
    Forward process of flow matching: x_t = (1 - t) * x_0 + t * eps, with the velocity v = eps - x_0.

    Args:
        image (`torch.Tensor` of shape `(B, ...)`):
            Latents x_0 of drawn images.
        noise (`torch.Tensor` of shape `(B, ...)`):
            Standard Gaussian noise eps.
        sigma (`float` or `torch.Tensor`):
            Time t: 0 gives the image, 1 the noise. One value, or one for each image, `(B,)` or `(B, 1, ...)`.

    Returns:
        [`NoisedImage`].

    Raises:
        ValueError: `sigma` is neither one value nor one for each image.
    """
    t = _one_per_image(sigma, image, "sigma").view(-1, *[1] * (image.ndim - 1))  # (B, 1, ...)
    return NoisedImage((1 - t) * image + t * noise, noise - image)


def nft_reward_probability(advantages: torch.Tensor, advantage_clip: float) -> torch.Tensor:
    """
    Optimality probability of [DiffusionNFT](https://huggingface.co/papers/2509.16117):
    r = 1/2 + 1/2 * clip(A / advantage_clip, -1, 1).

    The paper divides reward minus group mean by a normalizer Z. With advantages that are divided by a standard
    deviation already, Z is `advantage_clip` standard deviations.

    Args:
        advantages (`torch.Tensor` of shape `(B,)`):
            Advantages.
        advantage_clip (`float`):
            Advantage at which the probability reaches 1, and, negative, 0.

    Returns:
        `torch.Tensor` of shape `(B,)`, in [0, 1]. An advantage of 0 gives 1/2, which teaches nothing on policy.

    Raises:
        ValueError: `advantage_clip` is not positive.
    """
    if advantage_clip <= 0:
        raise ValueError(f"`advantage_clip` is {advantage_clip}: advantages are divided by it, it must be positive.")
    return 0.5 + 0.5 * torch.clamp(advantages / advantage_clip, -1, 1)


def nft_velocities(
    velocity: torch.Tensor, old_velocity: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Implicit positive and negative policy of [DiffusionNFT](https://huggingface.co/papers/2509.16117).

    v+ = (1 - beta) * v_old + beta * v, v- = (1 + beta) * v_old - beta * v: the old velocity, moved by beta along the
    update and against it.

    Args:
        velocity (`torch.Tensor` of shape `(B, ...)`), old_velocity (`torch.Tensor` of shape `(B, ...)`):
            Velocity under the model and under the policy that drew the images.
        beta (`float`):
            Length of the move. A smaller one makes the model move further for the same reward.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]` of shape `(B, ...)`: v+ and v-, at least float32. No gradient flows to
        `old_velocity`.

    Raises:
        ValueError: `beta` is not positive.
    """
    if beta <= 0:
        raise ValueError(f"`beta` is {beta}: the policies would not depend on the model, it must be positive.")
    # In bf16 the sum would round away the small difference between the two velocities
    dtype = torch.promote_types(velocity.dtype, torch.float32)
    velocity, old_velocity = velocity.to(dtype), old_velocity.detach().to(dtype)
    return (1 - beta) * old_velocity + beta * velocity, (1 + beta) * old_velocity - beta * velocity


def velocity_error(velocity: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """
    Flow-matching loss of each image: mean[ (v - target)^2 ] over the non-batch dimensions.

    Args:
        velocity (`torch.Tensor` of shape `(B, ...)`), target (`torch.Tensor` of shape `(B, ...)`):
            Predicted velocity and its target.

    Returns:
        `torch.Tensor` of shape `(B,)`.
    """
    return ((velocity - target) ** 2).flatten(1).mean(dim=1)


def self_normalized_image_error(
    velocity: torch.Tensor, target: torch.Tensor, sigma: float | torch.Tensor, minimum: float = 1e-5
) -> torch.Tensor:
    """
    Adaptive loss weighting of [DiffusionNFT](https://huggingface.co/papers/2509.16117), in place of a weight w(t):
    mean[ (x - x_0)^2 ] / stop_gradient( mean[ |x - x_0| ] ), of the image x = x_t - t * v that a velocity points to.

    Computed from x - x_0 = t * (target - v), which it equals without the rounding of x_t - t * v - x_0.

    Args:
        velocity (`torch.Tensor` of shape `(B, ...)`), target (`torch.Tensor` of shape `(B, ...)`):
            Predicted velocity and its target eps - x_0.
        sigma (`float` or `torch.Tensor`):
            Time t. One value, or one for each image, `(B,)` or `(B, 1, ...)`.
        minimum (`float`, *optional*, defaults to `1e-5`):
            Least value of the denominator (the published code's).

    Returns:
        `torch.Tensor` of shape `(B,)`.

    Raises:
        ValueError: `sigma` is neither one value nor one for each image.
    """
    t = _one_per_image(sigma, velocity, "sigma").view(-1, *[1] * (velocity.ndim - 1))  # (B, 1, ...)
    error = (t * (target - velocity)).flatten(1)  # (B, elements)
    return (error**2).mean(dim=1) / error.detach().abs().mean(dim=1).clamp(min=minimum)


def nft_loss(
    velocity: torch.Tensor,
    old_velocity: torch.Tensor,
    target: torch.Tensor,
    reward_probability: torch.Tensor,
    beta: float,
    sigma: float | torch.Tensor | None,
) -> torch.Tensor:
    """
    Policy objective of [DiffusionNFT](https://huggingface.co/papers/2509.16117) at one time of the forward process:
    r * |v+ - target|^2 + (1 - r) * |v- - target|^2.

    It needs drawn images and their rewards, no stochastic steps and no log-probabilities. At v = v_old the gradient
    by v is beta * (2 r - 1) times that of the flow-matching loss: towards images with r > 1/2, away from the others.
    (The published code also divides by beta and multiplies by its advantage clip, which scales the loss.)

    Args:
        velocity (`torch.Tensor` of shape `(B, ...)`), old_velocity (`torch.Tensor` of shape `(B, ...)`):
            Velocity at the noised image under the model and under the policy that drew the images.
        target (`torch.Tensor` of shape `(B, ...)`):
            Velocity of the forward process, see [`add_flow_noise`].
        reward_probability (`torch.Tensor` of shape `(B,)`):
            r, see [`nft_reward_probability`].
        beta (`float`):
            Strength of the implicit policies, see [`nft_velocities`].
        sigma (`float`, `torch.Tensor` or `None`):
            Time, for the paper's adaptive weighting ([`self_normalized_image_error`]). `None` leaves the errors of
            the velocities unweighted ([`velocity_error`]).

    Returns:
        `torch.Tensor` of shape `(B,)`. Gradients flow to `velocity` only.

    Raises:
        ValueError: `beta` is not positive, or `sigma` is neither one value nor one for each image.
    """
    positive, negative = nft_velocities(velocity, old_velocity, beta)
    if sigma is None:
        positive_error, negative_error = velocity_error(positive, target), velocity_error(negative, target)
    else:
        positive_error = self_normalized_image_error(positive, target, sigma)
        negative_error = self_normalized_image_error(negative, target, sigma)
    return reward_probability * positive_error + (1 - reward_probability) * negative_error


def nft_old_policy_decay(step: int, rate: float = 0.001, maximum: float = 0.5, num_on_policy_steps: int = 0) -> float:
    """
    Decay eta of the old policy of [DiffusionNFT](https://huggingface.co/papers/2509.16117):
    theta_old <- eta * theta_old + (1 - eta) * theta, with eta = min(rate * step, maximum).

    0 makes the old policy a copy of the model. The defaults are the paper's min(0.001 i, 0.5); for its text-rendering
    reward the published code has `rate=0.0075`, `maximum=0.999`, `num_on_policy_steps=75`.

    Args:
        step (`int`):
            Number of optimizer steps done.
        rate (`float`, *optional*, defaults to `0.001`):
            Growth with each step.
        maximum (`float`, *optional*, defaults to `0.5`):
            Greatest decay.
        num_on_policy_steps (`int`, *optional*, defaults to `0`):
            Steps before the decay begins to grow.

    Returns:
        `float`: the decay, in [0, `maximum`].
    """
    return min(max(step - num_on_policy_steps, 0) * rate, maximum)
