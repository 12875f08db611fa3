# SPDX-License-Identifier: Apache-2.0
"""A round that was generated and scored, as the training steps take it from this process."""

import dataclasses
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from ..rollout import RecordedStep, SDESettings
from .round_layout import RoundLayout


@dataclasses.dataclass
class RoundBuffer:
    """
    A round of this process.

    Attributes:
        round_index (`int`), global_step (`int`):
            Number of the round, and the optimizer step it was generated at.
        sde ([`SDESettings`], *optional*):
            Its stochastic steps.
        metrics (`dict[str, float]`):
            What is logged with each of its optimizer steps.
        seconds (`float`):
            How long it took to generate and score.
        is_offloaded (`bool`):
            Whether the recorded prompts are in CPU memory.
        entries (`list[dict]`):
            For each micro-step of training the recorded step, advantages and weights in the loss.
    """

    round_index: int
    global_step: int
    sde: SDESettings | None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    is_offloaded: bool = False
    entries: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def fill(
        self,
        layout: RoundLayout,
        assignment: np.ndarray,
        process_index: int,
        records: list[list[RecordedStep]],
        advantages: torch.Tensor,
        is_valid: torch.Tensor,
        device: torch.device,
    ) -> None:
        """
        Add an entry for each micro-step.

        The weights make an optimizer step's loss the mean over its valid images, on all processes, and their stochastic
        steps.
        """
        batches_per_step = layout.micro_batches_per_process // layout.num_optimizer_steps
        for position, (micro_batch, recorded) in enumerate(zip(assignment[process_index], records, strict=True)):
            step = position // batches_per_step
            images_of_step = assignment[:, step * batches_per_step : (step + 1) * batches_per_step].reshape(-1)
            num_valid = is_valid[torch.from_numpy(images_of_step)].sum().item()
            # An optimizer step without any valid image has weights of 0 and no gradient
            denominator = max(num_valid * layout.num_trained_steps, 1)
            batch = torch.from_numpy(micro_batch)
            for record in recorded:
                self.entries.append(
                    {
                        "record": record,
                        "advantages": advantages[batch].to(device),  # (B,)
                        "weights": (is_valid[batch] / denominator).to(device),  # (B,)
                    }
                )

    def micro_step(self, position: int, device: torch.device) -> dict[str, Any]:
        """Give the inputs of a micro-step, with what was offloaded on the device."""
        entry = self.entries[position % len(self.entries)]
        record = entry["record"].to(device) if self.is_offloaded else entry["record"]
        return {**entry, "record": record, "sde": self.sde}

    def state_dict(self) -> dict[str, Any]:
        """Give what a checkpoint keeps: tensors and numbers, without the stochastic steps, a function of the round."""
        entries = [
            # Not `asdict`, which would copy the tensors, and with them what images of a prompt share
            {
                **entry,
                "record": {f.name: getattr(entry["record"], f.name) for f in dataclasses.fields(entry["record"])},
            }
            for entry in self.entries
        ]
        return {
            "round": self.round_index,
            "global_step": self.global_step,
            "metrics": self.metrics,
            "time": self.seconds,
            "entries": entries,
        }

    @classmethod
    def from_state_dict(
        cls,
        state: dict[str, Any],
        record_class: type[RecordedStep],
        sde: SDESettings | None,
        device: torch.device,
        is_offloaded: bool,
    ) -> "RoundBuffer":
        """Make the round of a checkpoint again."""
        entries = []
        for entry in state["entries"]:
            record = entry.pop("record")
            if is_offloaded:  # the calls come to the device with their micro-step
                calls = record.pop("calls")
                record = {**send_to_device(record, device), "calls": calls}
            entries.append({**send_to_device(entry, device), "record": record_class(**record)})
        return cls(state["round"], state["global_step"], sde, state["metrics"], state["time"], is_offloaded, entries)
