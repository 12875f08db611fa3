# SPDX-License-Identifier: Apache-2.0
"""Formulas of advantages and objectives, (B,) or (B, ...). DiffusionNFT: arXiv 2509.16117, AWM: arXiv 2509.25050."""

import logging
import math
from typing import NamedTuple

import torch
from accelerate import Accelerator

from ..rewards.aggregation import group_deviations, group_std
from ..rollout import RecordedStep, sde_step
from .paco_grpo_config import PaCoGRPOConfig


logger = logging.getLogger(__name__)

# Assumed RMS difference of velocities between two bf16 kernels (estimates: 0.003 to 0.015)
_ROUNDING = 0.01


class Advantages(NamedTuple):
    """Advantages of a round's images, and which of them take part in the loss."""

    values: torch.Tensor  # (N,), 0 for an image that is left out
    is_valid: torch.Tensor  # (N,), whether the image and another one of its group were scored
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
    # `std` is that of the whole step, sqrt(-dt) included; the published code leaves dt out
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


class StepStatistics:
    """Collect statistics of an optimizer step's images (B,) over its micro-steps, and gather them once."""

    def __init__(self, accelerator: Accelerator, args: PaCoGRPOConfig):
        self.accelerator, self.args = accelerator, args
        self.micro_steps: list[torch.Tensor] = []  # (B, columns) each, of the current optimizer step
        self._names: list[str] = []

    def add(self, columns: dict[str, torch.Tensor]) -> None:
        """Add the columns of a micro-step, without gradients."""
        self._names = list(columns)
        self.micro_steps.append(torch.stack([column.detach().float() for column in columns.values()], dim=1))

    def gather(self, last: int | None = None) -> dict[str, torch.Tensor]:
        """Gather all micro-steps and start the next step, or look at the `last`. Collective: call on all ranks."""
        micro_steps = self.micro_steps if last is None else self.micro_steps[-last:]
        gathered = self.accelerator.gather(torch.cat(micro_steps)).cpu()  # (images and steps, columns)
        if last is None:
            self.micro_steps = []
        return dict(zip(self._names, gathered.T, strict=True))

    def finish(self, global_step: int, is_on_policy: bool, is_early: bool = False) -> dict[str, float]:
        """Check the optimizer step, return its metrics, and start the next step. Collective: call on all ranks."""
        raise NotImplementedError


def masked_means(columns: dict[str, torch.Tensor], is_valid: torch.Tensor) -> dict[str, float]:
    """Compute the mean of each column over the images that count."""
    count = is_valid.sum().clamp(min=1)
    return {name: ((column * is_valid).sum() / count).item() for name, column in columns.items()}


class RatioStatistics(StepStatistics):
    """Collect ratios and the metrics logged with them, and check that a ratio is 1 before a round's first update."""

    def __init__(self, accelerator: Accelerator, args: PaCoGRPOConfig):
        super().__init__(accelerator, args)
        # Above this the policy would be clipped before its first update. Rounding reaches about an eighth of it (FLUX,
        # 512 px, bf16); a wrong replay is a hundred times larger than rounding
        self.tolerance: float = args.epsilon if args.ratio_tolerance is None else args.ratio_tolerance
        # Sigmas and number of elements of each trained step
        self._steps: dict[int, tuple[float, float, float, int]] = {}
        self._has_warned = False

    def add_ratio(
        self, step: RecordedStep, ratio: torch.Tensor, means: dict[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Add a micro-step: ratio, `means`, to be logged, and weights are (B,); images of weight 0 do not count."""
        log_ratio = ratio.clamp_min(torch.finfo(ratio.dtype).tiny).log()  # it may underflow
        means = means | {"approx_kl": log_ratio**2 / 2}
        index, sigma = (torch.full_like(ratio, value) for value in (step.index, step.sigma))
        self._steps[step.index] = step.sigma, step.sigma_next, step.sigma_max, step.prev_sample[0].numel()
        self.add({"index": index, "deviation": (ratio - 1).abs(), "sigma": sigma, "valid": weights > 0, **means})

    def check_ratio(self, num_micro_steps: int) -> None:
        """Check that the ratio of the last micro-steps is 1. Collective: call on all ranks."""
        columns = self.gather(num_micro_steps)
        if not columns["deviation"].max().item() <= self.tolerance:  # NaN, too
            raise RuntimeError(self._describe_deviation(columns))

    def finish(self, global_step: int, is_on_policy: bool, is_early: bool = False) -> dict[str, float]:
        """
        Return the means.

        On policy, a ratio further from 1 than `ratio_tolerance` is an error in an early round, and later a warning, as
        is one further than a tenth of `epsilon`.
        """
        columns = self.gather()
        is_finite = torch.isfinite(torch.stack([*columns.values()], dim=1)).all(dim=1)
        if not is_finite.all():
            raise RuntimeError(
                f"The probability ratio or the KL divergence is not finite at optimizer step {global_step} "
                f"({int((~is_finite).sum())} of {len(is_finite)} micro-batch rows). The weights or "
                "the latents have overflowed; lower `learning_rate`, or train in float32."
            )
        index = columns["index"]
        deviation = columns["deviation"]
        worst = deviation.max().item()
        if is_on_policy and is_early and worst > self.tolerance:
            raise RuntimeError(self._describe_deviation(columns))
        if is_on_policy and worst > min(self.tolerance, self.args.epsilon / 10) and not self._has_warned:
            self._has_warned = True
            if self.accelerator.is_main_process:
                logger.warning(f"Optimizer step {global_step}: {self._describe_deviation(columns)}")
        metrics = {}
        name = "ratio_deviation_on_policy" if is_on_policy else "ratio_deviation"
        for trained in index.unique():
            metrics[f"{name}/step_{int(trained)}"] = deviation[index == trained].mean().item()
        logged = {
            name: column for name, column in columns.items() if name not in ("index", "deviation", "sigma", "valid")
        }
        return metrics | masked_means(logged, columns["valid"])

    def _describe_deviation(self, columns: dict[str, torch.Tensor]) -> str:
        """Describe by step how far the gathered ratios are from 1, and how far rounding may move them."""
        args = self.args
        lines = ["step    sigma   mean |ratio - 1|    max |ratio - 1|    predicted"]
        for step in columns["index"].unique():
            deviation, sigma = (columns[name][columns["index"] == step] for name in ("deviation", "sigma"))
            predicted = predicted_deviation(
                *self._steps[int(step)], args.noise_level, args.sde_type, args.loss_type == "grpo_guard"
            )
            numbers = f"{deviation.mean():16.3e}   {deviation.max():16.3e}   {predicted:10.1e}"
            lines.append(f"{int(step):4d}   {sigma[0]:.4f}   {numbers}")
        return (
            "Before an update the replayed log-probabilities must be those of the rollout, but |ratio - 1| is up to "
            f"{columns['deviation'].max().item():.3g} (`ratio_tolerance` is {self.tolerance:.3g}, `epsilon` "
            f"{args.epsilon:g}):\n" + "\n".join(lines) + "\nRollout and training compute different numbers: look for "
            "dropout, for layers that behave differently with gradients, for an adapter that only one of the two "
            "uses, for a compiled replay. In bf16 on an accelerator it can be rounding, above all with a larger "
            "`per_device_rollout_batch_size`, quantized weights or compiled blocks: velocities that differ by "
            f"{_ROUNDING} (RMS) give the predicted standard deviation of the ratio, and a largest deviation of about "
            "three times that. Leave these out, or set `ratio_tolerance`."
        )


def predicted_deviation(
    sigma: float, sigma_next: float, sigma_max: float, num_elements: int, noise_level: float, sde_type: str,
    is_normalized: bool = False, difference: float = _ROUNDING,
) -> float:  # fmt: skip
    """Predict the standard deviation of a ratio where a step's velocities differ at random, by `difference` (RMS)."""
    # The step's mean moves by k * S * d * n, where S is its standard deviation, d the difference and n normal: the
    # log-ratio is the mean of k * d * n * eps - (k * d * n)^2 / 2 over the latent's N elements, of standard deviation
    # k * d / sqrt(N). GRPO-Guard's normalized ratio is S times that
    unit = torch.ones(1, 1)
    # Of the sample 0 the mean is the coefficient of the velocity
    step = sde_step(unit, 0 * unit, sigma, sigma_next, noise_level, sde_type, unit, sigma_max)
    std = 1 if is_normalized else step.std.item()
    return abs(step.mean.item()) * difference / std / math.sqrt(num_elements)
