# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of the trained weights."""

import torch
from torch import nn

from .weights import gather_weights, local_weights, split_weights


class EMA:
    """Average trained weights in float32, starting at the initial ones; each process keeps its local part."""

    def __init__(self, model: nn.Module, decay: float, zero_stage: int, offload: bool):
        self.model = model
        self.decay = decay
        self.zero_stage = zero_stage
        self.offload = offload
        self.average = {
            name: self._place(tensor, copy=True) for name, tensor in local_weights(model, zero_stage).items()
        }

    def _place(self, tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
        return tensor.to("cpu", copy=copy) if self.offload else tensor.to(tensor.device, copy=copy)

    @torch.no_grad()
    def step(self) -> None:
        """Update the average by the current weights; called once for each optimizer step."""
        weights = local_weights(self.model, self.zero_stage)
        if self.offload:  # one copy at a time
            for name, tensor in weights.items():
                self.average[name].lerp_(tensor.to("cpu"), 1 - self.decay)
        else:
            torch._foreach_lerp_([self.average[name] for name in weights], list(weights.values()), 1 - self.decay)

    def state_dict(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return the full average on the CPU, empty unless kept. Every process calls it."""
        return gather_weights(self.model, self.average, self.zero_stage, keep)

    @torch.no_grad()
    def load_state_dict(self, full: dict[str, torch.Tensor]) -> None:
        """Replace the average by full weights, on every process."""
        for name, tensor in split_weights(self.model, full, self.zero_stage).items():
            self.average[name].copy_(tensor)
