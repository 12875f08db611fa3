# SPDX-License-Identifier: Apache-2.0
"""Statistics of an optimizer step, and the checks that training computes what the rollout computed."""

import logging
import math

import torch
from accelerate import Accelerator

from ..rollout import RecordedStep, sde_step
from .losses import velocity_error
from .paco_grpo_config import PaCoGRPOConfig


logger = logging.getLogger(__name__)

# Assumed RMS difference of velocities between two bf16 kernels (estimates: 0.003 to 0.015)
_ROUNDING = 0.01
# Relative deviation of the trained from the old velocity that is accepted before the first update: 0 in float32, but
# in bf16 an accelerator may choose other kernels. Dropout or a wrong precision deviate by far more.
_TOLERANCE = 0.05


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

    def reset(self) -> None:
        """Start the next optimizer step."""
        self.micro_steps = []

    def gather(self, num_micro_steps: int | None = None) -> dict[str, torch.Tensor]:
        """Gather the last micro-steps of the optimizer step, by default all. Collective: call on all ranks."""
        micro_steps = self.micro_steps if num_micro_steps is None else self.micro_steps[-num_micro_steps:]
        gathered = self.accelerator.gather(torch.cat(micro_steps)).cpu()  # (images and steps, columns)
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

        Before a round's first update, a ratio further from 1 than `ratio_tolerance` is an error in early rounds and a
        warning later. A deviation above a tenth of `epsilon` is a warning.
        """
        columns = self.gather()
        self.reset()
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


class VelocityStatistics(StepStatistics):
    """Collect velocities and the metrics logged with them, and check those before an update against the rollout's."""

    def add_velocity(
        self, velocity: torch.Tensor, old_velocity: torch.Tensor, means: dict[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Add a micro-step: `means`, to be logged, and weights are (B,); images of weight 0 do not count."""
        deviation = velocity_error(velocity.detach().float(), old_velocity)
        size = velocity_error(old_velocity, torch.zeros_like(old_velocity))
        self.add({"size": size, "valid": weights > 0, "velocity_deviation": deviation, **means})

    def finish(self, global_step: int, is_on_policy: bool, is_early: bool = False) -> dict[str, float]:
        """Return the means; refuse on policy a velocity that differs from the rollout's."""
        columns = self.gather()
        self.reset()
        if not torch.isfinite(torch.stack([*columns.values()])).all():
            raise RuntimeError(f"The velocity is not finite at optimizer step {global_step}. Lower `learning_rate`.")
        size = columns.pop("size")
        is_valid = columns.pop("valid")
        deviation = columns["velocity_deviation"]
        if is_on_policy and deviation.sum() > _TOLERANCE**2 * size.sum():
            fraction = (deviation.sum() / size.sum()).sqrt().item()
            raise RuntimeError(
                f"Before the first update of a round the trained and the old velocity differ by {fraction:.1%}. Look "
                "for dropout, for layers that behave differently with gradients, or for a compiled forward."
            )
        return masked_means(columns, is_valid)
