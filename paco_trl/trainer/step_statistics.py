# SPDX-License-Identifier: Apache-2.0
"""Statistics of the probability ratio, and the check that it is 1 before the first update."""

from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from .losses import ClippedSurrogate


if TYPE_CHECKING:
    from ..rollout import RecordedStep


class StepStatistics:
    """Collect the statistics of an optimizer step's micro-steps, and gather them once."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self._rows: list[torch.Tensor] = []
        self._names: list[str] = []  # of the columns that are logged as means

    def clear(self) -> None:
        """Discard what was collected."""
        self._rows = []

    def __len__(self) -> int:
        """Return the number of micro-steps collected."""
        return len(self._rows)

    def add(
        self,
        record: "RecordedStep",
        surrogate: ClippedSurrogate,
        means: dict[str, torch.Tensor],
        weights: torch.Tensor,
    ) -> None:
        """Add a micro-step: `means`, to be logged, and `weights` are of shape (B,); images of weight 0 do not count."""
        ratio, low, high = surrogate.ratio, surrogate.is_low_clipped.float(), surrogate.is_high_clipped.float()
        means = {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
            "approx_kl": ratio.clamp_min(torch.finfo(ratio.dtype).tiny).log() ** 2 / 2,  # it may underflow
            **means,
        }
        index, sigma = (torch.full_like(ratio, value) for value in (record.index, record.sigma))
        self._names = list(means)
        columns = [index, (ratio - 1).abs(), sigma, (weights > 0).float(), *means.values()]
        self._rows.append(torch.stack(columns, dim=1))  # (B, columns)

    def check_ratio(self, num_micro_steps: int, tolerance: float, epsilon: float) -> None:
        """Raise `RuntimeError` if the ratio of the last micro-steps is not 1. Every process calls it."""
        stats = self.accelerator.gather(torch.cat(self._rows[-num_micro_steps:])).cpu()
        worst = stats[:, 1].max().item()
        if worst <= tolerance:
            return
        lines = ["step    sigma   mean |ratio - 1|    max |ratio - 1|"]
        for step in stats[:, 0].unique():
            of_step = stats[stats[:, 0] == step]
            lines.append(
                f"{int(step):4d}   {of_step[0, 2]:.4f}   {of_step[:, 1].mean():16.3e}   {of_step[:, 1].max():16.3e}"
            )
        raise RuntimeError(
            f"Before the first update the replayed log-probabilities must be those of the rollout, but |ratio - 1| is "
            f"up to {worst:.3g}, above `ratio_tolerance` = {tolerance:.3g} (`epsilon` is {epsilon:g}):\n"
            + "\n".join(lines)
            + "\nRollout and training compute different numbers: look for dropout, for layers that behave differently with "
            "gradients, for a compiled replay. In bf16 on an accelerator a deviation below `epsilon` can be rounding: "
            "measure it, and set `ratio_tolerance`."
        )

    def finish(self, step: int, is_on_policy: bool) -> dict[str, float]:
        """Gather the optimizer step's statistics, and start the next step. Every process calls it."""
        stats = self.accelerator.gather(torch.cat(self._rows)).cpu()  # (images and steps, columns)
        self.clear()
        index, deviation, _, valid, *means = stats.T
        if not torch.isfinite(stats).all():
            raise RuntimeError(
                f"The probability ratio or the KL divergence is not finite at optimizer step {step} "
                f"({int((~torch.isfinite(stats).all(dim=1)).sum())} of {len(stats)} micro-batch rows). The weights or "
                "the latents have overflowed; lower `learning_rate`, or train in float32."
            )
        metrics = {}
        name = "ratio_deviation_on_policy" if is_on_policy else "ratio_deviation"
        for trained in index.unique():
            metrics[f"{name}/step_{int(trained)}"] = deviation[index == trained].mean().item()
        count = valid.sum().clamp(min=1)
        means = {
            name: ((column * valid).sum() / count).item() for name, column in zip(self._names, means, strict=True)
        }
        return metrics | means
