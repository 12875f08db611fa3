# SPDX-License-Identifier: Apache-2.0
"""Buffer of a generated and scored round."""

import dataclasses
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from ..rollout import RecordedStep, SDESettings
from ..utils.devices import to_device
from .round_layout import RoundLayout


@dataclasses.dataclass
class RoundBuffer:
    """A generated and scored round, as the training steps of this process consume it."""

    round_index: int
    global_step: int  # optimizer step that it was generated at
    sde: SDESettings
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # logged with each of its optimizer steps
    seconds: float = 0.0  # spent on generating and scoring it
    is_offloaded: bool = False  # whether the recorded prompts are in CPU memory
    entries: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # record, advantages and weights

    def fill(
        self,
        layout: RoundLayout,
        assignment: np.ndarray,  # (processes, micro-batches, B)
        process_index: int,
        records: list[list[RecordedStep]],
        advantages: torch.Tensor,
        is_valid: torch.Tensor,
        device: torch.device,
    ) -> None:
        """Add an entry for each micro-step, whose weights make the loss a mean over images and trained steps."""
        batches_per_step = layout.micro_batches_per_process // layout.num_optimizer_steps
        for position, (micro_batch, recorded) in enumerate(zip(assignment[process_index], records, strict=True)):
            step = position // batches_per_step
            images_of_step = assignment[:, step * batches_per_step : (step + 1) * batches_per_step].reshape(-1)
            num_valid = is_valid[torch.from_numpy(images_of_step)].sum().item()
            denominator = max(num_valid * layout.num_trained_steps, 1)  # without a valid image all weights are 0
            batch = torch.from_numpy(micro_batch)
            for record in recorded:
                weights = to_device(is_valid[batch] / denominator, device)  # (B,)
                entry = {"record": record, "advantages": to_device(advantages[batch], device), "weights": weights}
                self.entries.append(entry)

    def micro_step(self, position: int, device: torch.device) -> dict[str, Any]:
        """Return the inputs of a micro-step, on the device."""
        entry = self.entries[position % len(self.entries)]
        record = entry["record"].to(device) if self.is_offloaded else entry["record"]
        return {**entry, "record": record, "sde": self.sde}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: tensors and numbers."""
        # Not `asdict`, which would copy the tensors that images of a prompt share
        fields = lambda record: {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}  # noqa: E731
        entries = [{**entry, "record": fields(entry["record"])} for entry in self.entries]
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
        sde: SDESettings,
        device: torch.device,
        is_offloaded: bool,
    ) -> "RoundBuffer":
        """Restore the round of a checkpoint."""
        entries = []
        for entry in state["entries"]:
            record = entry.pop("record")
            if is_offloaded:  # the calls come to the device with their micro-step
                calls = record.pop("calls")
                record = {**send_to_device(record, device), "calls": calls}
            entries.append({**send_to_device(entry, device), "record": record_class(**record)})
        return cls(state["round"], state["global_step"], sde, state["metrics"], state["time"], is_offloaded, entries)
