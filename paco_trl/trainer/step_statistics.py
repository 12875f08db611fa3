# SPDX-License-Identifier: Apache-2.0
"""Statistics of the probability ratio, and the check that it is 1 before the first update."""

import logging
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator


if TYPE_CHECKING:
    from ..rollout import RecordedStep

logger = logging.getLogger(__name__)


class StepStatistics:
    """Collect the statistics of an optimizer step's micro-steps, and gather them once."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._rows: list[torch.Tensor] = []
        self._names: list[str] = []  # of the columns that are logged as means
        self._has_warned = False

    def clear(self) -> None:
        """Discard what was collected."""
        self._rows = []

    def __len__(self) -> int:
        """Return the number of micro-steps collected."""
        return len(self._rows)

    def add(
        self,
        record: "RecordedStep",
        ratio: torch.Tensor,
        means: dict[str, torch.Tensor],
        weights: torch.Tensor,
    ) -> None:
        """Add a micro-step: ratio, `means`, to be logged, and weights are (B,); images of weight 0 do not count."""
        means = {
            **means,
            "approx_kl": ratio.clamp_min(torch.finfo(ratio.dtype).tiny).log() ** 2 / 2,  # it may underflow
        }
        index, sigma = (torch.full_like(ratio, value) for value in (record.index, record.sigma))
        self._names = list(means)
        columns = [index, (ratio - 1).abs(), sigma, (weights > 0).float(), *means.values()]
        self._rows.append(torch.stack(columns, dim=1))  # (B, columns)

    def check_ratio(self, num_micro_steps: int, tolerance: float, epsilon: float) -> None:
        """Check that the ratio of the last micro-steps is 1. Collective: call on all ranks."""
        stats = self.accelerator.gather(torch.cat(self._rows[-num_micro_steps:])).cpu()
        if not stats[:, 1].max().item() <= tolerance:  # NaN, too
            raise RuntimeError(describe_deviation(stats, tolerance, epsilon))

    def finish(
        self, step: int, is_on_policy: bool, tolerance: float, epsilon: float, is_early: bool
    ) -> dict[str, float]:
        """
        Gather the optimizer step's statistics, and start the next step. Collective: call on all ranks.

        On policy, a ratio further from 1 than `tolerance` is an error in an early round, and later a warning, as is one
        further than a tenth of `epsilon`.
        """
        stats = self.accelerator.gather(torch.cat(self._rows)).cpu()  # (images and steps, columns)
        self.clear()
        index, deviation, _, valid, *means = stats.T
        if not torch.isfinite(stats).all():
            raise RuntimeError(
                f"The probability ratio or the KL divergence is not finite at optimizer step {step} "
                f"({int((~torch.isfinite(stats).all(dim=1)).sum())} of {len(stats)} micro-batch rows). The weights or "
                "the latents have overflowed; lower `learning_rate`, or train in float32."
            )
        if is_on_policy:
            worst = deviation.max().item()
            if is_early and worst > tolerance:
                raise RuntimeError(describe_deviation(stats, tolerance, epsilon))
            if worst > min(tolerance, epsilon / 10) and not self._has_warned:
                self._has_warned = True
                if self.accelerator.is_main_process:
                    logger.warning(f"Optimizer step {step}: {describe_deviation(stats, tolerance, epsilon)}")
        metrics = {}
        name = "ratio_deviation_on_policy" if is_on_policy else "ratio_deviation"
        for trained in index.unique():
            metrics[f"{name}/step_{int(trained)}"] = deviation[index == trained].mean().item()
        count = valid.sum().clamp(min=1)
        means = {
            name: ((column * valid).sum() / count).item() for name, column in zip(self._names, means, strict=True)
        }
        return metrics | means


def describe_deviation(stats: torch.Tensor, tolerance: float, epsilon: float) -> str:
    """Describe by step how far the ratios of gathered rows are from 1."""
    lines = ["step    sigma   mean |ratio - 1|    max |ratio - 1|"]
    for step in stats[:, 0].unique():
        rows = stats[stats[:, 0] == step]
        lines.append(f"{int(step):4d}   {rows[0, 2]:.4f}   {rows[:, 1].mean():16.3e}   {rows[:, 1].max():16.3e}")
    return (
        "Before an update the replayed log-probabilities must be those of the rollout, but |ratio - 1| is up to "
        f"{stats[:, 1].max().item():.3g} (`ratio_tolerance` is {tolerance:.3g}, `epsilon` {epsilon:g}):\n"
        + "\n".join(lines)
        + "\nRollout and training compute different numbers: look for dropout, for layers that behave differently with "
        "gradients, for an adapter that only one of the two uses, for a compiled replay. In bf16 on an accelerator a "
        "deviation below `epsilon` can be rounding, above all with a larger `per_device_rollout_batch_size`: leave that "
        "out, or measure the deviation and set `ratio_tolerance`."
    )
