# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of the trained weights."""

import torch
from torch import nn

from .weights import cut_shares, gather_whole, shares


class EMA:
    """
    Exponential moving average of the trained weights, in float32.

    After each optimizer step, `average = decay * average + (1 - decay) * weights`; it begins at the weights that
    training begins with. Each process keeps its share: under ZeRO-3 a partition, otherwise all of it.

    Args:
        model (`nn.Module`):
            Model, placed as it is trained.
        decay (`float`):
            Share of the old average in the new one.
        zero_stage (`int`):
            Stage of the DeepSpeed engine that holds the weights; 0 without an engine.
        offload (`bool`):
            Whether the average is kept in CPU memory.
    """

    def __init__(self, model: nn.Module, decay: float, zero_stage: int, offload: bool):
        self.model = model
        self.decay = decay
        self.zero_stage = zero_stage
        self.offload = offload
        self.average = {name: self._place(share, copy=True) for name, share in shares(model, zero_stage).items()}

    def _place(self, tensor: torch.Tensor, copy: bool = False) -> torch.Tensor:
        return tensor.to("cpu", copy=copy) if self.offload else tensor.to(tensor.device, copy=copy)

    @torch.no_grad()
    def step(self) -> None:
        """Takes in the weights as they are now; once for each optimizer step."""
        for name, share in shares(self.model, self.zero_stage).items():
            self.average[name].lerp_(self._place(share), 1 - self.decay)

    def state_dict(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Give the whole average on the CPU, empty where it is not kept. Every process calls it."""
        return gather_whole(self.model, self.average, self.zero_stage, keep)

    @torch.no_grad()
    def load_state_dict(self, whole: dict[str, torch.Tensor]) -> None:
        """Replace the average by whole weights, on every process."""
        for name, share in cut_shares(self.model, whole, self.zero_stage).items():
            self.average[name].copy_(share)
