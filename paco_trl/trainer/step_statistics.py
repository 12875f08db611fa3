# SPDX-License-Identifier: Apache-2.0
"""Statistics of the probability ratio, and the check that it is 1 before the first update."""

import logging
import math
from typing import Any

import torch
from accelerate import Accelerator

from ..rollout import RecordedStep, sde_step, step_std
from .paco_grpo_config import PaCoGRPOConfig


logger = logging.getLogger(__name__)

# By which two bf16 kernels may round the velocity of a 12B transformer differently (RMS, an estimate: 0.003 to 0.015)
_ROUNDING = 0.01


class StepStatistics:
    """Collect the statistics of an optimizer step's micro-steps, and gather them once."""

    def __init__(self, accelerator: Accelerator, args: PaCoGRPOConfig):
        self.accelerator, self.args = accelerator, args
        self.tolerance: Any = args.ratio_tolerance  # which the config has set
        self.rows: list[torch.Tensor] = []  # one for each micro-step of the optimizer step
        self._names: list[str] = []  # of the columns that are logged as means
        self._steps: dict[
            int, tuple[float, float, float, int]
        ] = {}  # sigmas and number of elements of each trained step
        self._has_warned = False

    def add(
        self, record: RecordedStep, ratio: torch.Tensor, means: dict[str, torch.Tensor], weights: torch.Tensor
    ) -> None:
        """Add a micro-step: ratio, `means`, to be logged, and weights are (B,); images of weight 0 do not count."""
        means = {
            **means,
            "approx_kl": ratio.clamp_min(torch.finfo(ratio.dtype).tiny).log() ** 2 / 2,  # it may underflow
        }
        index, sigma = (torch.full_like(ratio, value) for value in (record.index, record.sigma))
        self._names = list(means)
        self._steps[record.index] = record.sigma, record.sigma_next, record.sigma_max, record.prev_sample[0].numel()
        columns = [index, (ratio - 1).abs(), sigma, (weights > 0).float(), *means.values()]
        self.rows.append(torch.stack(columns, dim=1))  # (B, columns)

    def check_ratio(self, num_micro_steps: int) -> None:
        """Check that the ratio of the last micro-steps is 1. Collective: call on all ranks."""
        stats = self.accelerator.gather(torch.cat(self.rows[-num_micro_steps:])).cpu()
        if not stats[:, 1].max().item() <= self.tolerance:  # NaN, too
            raise RuntimeError(self._describe_deviation(stats))

    def finish(self, step: int, is_on_policy: bool, is_early: bool) -> dict[str, float]:
        """
        Gather the optimizer step's statistics, and start the next step. Collective: call on all ranks.

        On policy, a ratio further from 1 than `ratio_tolerance` is an error in an early round, and later a warning, as is
        one further than a tenth of `epsilon`.
        """
        stats = self.accelerator.gather(torch.cat(self.rows)).cpu()  # (images and steps, columns)
        self.rows = []
        index, deviation, _, valid, *means = stats.T
        is_finite = torch.isfinite(stats)
        if not is_finite.all():
            raise RuntimeError(
                f"The probability ratio or the KL divergence is not finite at optimizer step {step} "
                f"({int((~is_finite.all(dim=1)).sum())} of {len(stats)} micro-batch rows). The weights or "
                "the latents have overflowed; lower `learning_rate`, or train in float32."
            )
        if is_on_policy:
            worst = deviation.max().item()
            if is_early and worst > self.tolerance:
                raise RuntimeError(self._describe_deviation(stats))
            if worst > min(self.tolerance, self.args.epsilon / 10) and not self._has_warned:
                self._has_warned = True
                if self.accelerator.is_main_process:
                    logger.warning(f"Optimizer step {step}: {self._describe_deviation(stats)}")
        metrics = {}
        name = "ratio_deviation_on_policy" if is_on_policy else "ratio_deviation"
        for trained in index.unique():
            metrics[f"{name}/step_{int(trained)}"] = deviation[index == trained].mean().item()
        count = valid.sum().clamp(min=1)
        means = {
            name: ((column * valid).sum() / count).item() for name, column in zip(self._names, means, strict=True)
        }
        return metrics | means

    def _describe_deviation(self, stats: torch.Tensor) -> str:
        """Describe by step how far the ratios of gathered rows are from 1, and how far rounding may move them."""
        args, lines = self.args, ["step    sigma   mean |ratio - 1|    max |ratio - 1|    predicted"]
        for step in stats[:, 0].unique():
            _, deviation, sigma, *_ = stats[stats[:, 0] == step].T
            predicted = predicted_deviation(
                *self._steps[int(step)], args.noise_level, args.sde_type, args.loss_type == "grpo_guard"
            )
            numbers = f"{deviation.mean():16.3e}   {deviation.max():16.3e}   {predicted:10.1e}"
            lines.append(f"{int(step):4d}   {sigma[0]:.4f}   {numbers}")
        return (
            "Before an update the replayed log-probabilities must be those of the rollout, but |ratio - 1| is up to "
            f"{stats[:, 1].max().item():.3g} (`ratio_tolerance` is {self.tolerance:.3g}, `epsilon` "
            f"{args.epsilon:g}):\n" + "\n".join(lines) + "\nRollout and training compute different numbers: look for "
            "dropout, for layers that behave differently with gradients, for an adapter that only one of the two uses, for a "
            "compiled replay. In bf16 on an accelerator it can be rounding, above all with a larger "
            "`per_device_rollout_batch_size`, quantized weights or compiled blocks: velocities that differ by "
            f"{_ROUNDING} (RMS) give the predicted standard deviation of the ratio, and a largest deviation of about three "
            "times that. Leave these out, or set `ratio_tolerance`."
        )


def predicted_deviation(
    sigma: float, sigma_next: float, sigma_max: float, num_elements: int, noise_level: float, sde_type: str,
    is_normalized: bool = False, difference: float = _ROUNDING,
) -> float:  # fmt: skip
    """
    Predict the standard deviation of a ratio where two velocities of a step differ at random, by `difference` (RMS).

    The step's mean moves by k * S * d * n, where S is its standard deviation, d the difference and n normal: the
    log-ratio is the mean of k * d * n * eps - (k * d * n)^2 / 2 over the latent's N elements, of standard deviation
    k * d / sqrt(N). GRPO-Guard's normalized ratio is S times that.
    """
    one = torch.ones(1, 1)
    # Of the sample 0 the mean is the coefficient of the velocity
    step = sde_step(one, 0 * one, sigma, sigma_next, noise_level, sde_type, one, sigma_max)
    std = 1 if is_normalized else step_std(step.std, sigma, sigma_next, sde_type).item()
    return abs(step.mean.item()) * difference / std / math.sqrt(num_elements)
