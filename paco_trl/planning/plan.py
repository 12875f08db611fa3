# SPDX-License-Identifier: Apache-2.0
"""The memory of a run: bytes by phase and use, their sums, and a table."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.table import Table


# Fraction of a device that a plan may use. The rest is for CUDA, fragmentation, and what the plan leaves out
USABLE_FRACTION = 0.9
FLOAT32_BYTES = 4
LIBRARIES_BYTES = 5 * 2**28  # host memory of torch, transformers and diffusers in a process, without CUDA
MAX_BATCH_SIZE = 1024  # largest micro-batch to plan for
# States per weight, by the first word of an optimizer's name. Adafactor keeps row and column sums, here for rank 16
_OPTIMIZER_STATES = {"adamw": 2, "ademamix": 3, "adafactor": 1 / 16, "adagrad": 1, "lion": 1, "rmsprop": 1, "sgd": 0}


@dataclass(frozen=True)
class Phase:
    """
    Memory of one process in a phase of a run.

    Attributes:
        name (`str`):
            `load`, `encode`, `generate`, `decode`, `score`, `train`, and `evaluate` if there is an evaluation dataset;
            for a judge `load`, `train`, `evaluate`.
        device (`dict[str, int]`):
            Bytes on the device by use, for example `frozen weights`, `optimizer` and `activations`.
        host (`dict[str, int]`):
            Bytes of the process's own host memory by use.
        mapped (`dict[str, int]`):
            Bytes of host memory that are mapped from files: weights that are not quantized, if their files have the
            dtype of the run. The system drops them when memory is short, and reads them again.
    """

    name: str
    device: dict[str, int]
    host: dict[str, int]
    mapped: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.device.values())


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Settings of a run that decide its memory: see [`MemoryPlan`]."""

    batch_size: int = 1
    gradient_checkpointing: bool = True
    quantization: str | None = None
    offload_embeddings: bool = False
    offload_rewards: bool = False
    ema_offload: bool = False
    vae_tiling: bool = False
    uses_judge_server: bool = False
    zero_stage: int | None = None
    is_fsdp: bool = False
    num_processes: int = 1
    judge_batch_size: int = 8  # the default of PaCoReward

    @property
    def is_sharded(self) -> bool:
        """Whether DeepSpeed or FSDP2 places the weights."""
        return self.is_fsdp or self.zero_stage is not None

    @property
    def could_use_zero3(self) -> bool:
        """Whether ZeRO-3 would shard weights that are not sharded yet."""
        return self.zero_stage != 3 and not self.is_fsdp and self.quantization is None

    def num_shards(self, first_stage: int) -> int:
        """Return how many processes share the tensors that ZeRO shards from a stage on. FSDP2 shards all tensors."""
        return self.num_processes if self.is_fsdp or (self.zero_stage or 0) >= first_stage else 1

    def host_memory(
        self, allocated: dict[str, int], mapped: dict[str, int], weights: dict[str, int]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """
        Add frozen weights to host memory. They are mapped from their files; quantized ones are in the process's own
        memory.
        """
        return (allocated, mapped | weights) if self.quantization is None else (allocated | weights, mapped)


class Run(Protocol):
    """Memory model of a training run, which counts the bytes of its phases for given settings."""

    args: Any
    size: str  # size of an image or a pair, for messages
    max_batch_size: int

    def plan(self, zero_stage: int | None, is_fsdp: bool) -> "MemoryPlan":
        """Plan the run with the settings of its config."""

    def phases(self, settings: PlanSettings) -> list[Phase]:
        """Count the memory of each phase of the run."""

    def commands(self, settings: PlanSettings) -> list[Phase]:
        """Count the memory of commands that take the trained model."""

    def savings(self, settings: PlanSettings) -> dict[str, bool]:
        """Return which options would save memory, the cheapest first."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan(PlanSettings):
    """
    Memory of each process of a run, by phase and use.

    `print(plan)` shows a table. `dataclasses.replace(plan, batch_size=4).peak` is the peak of the same run with another
    setting.

    Attributes:
        batch_size (`int`):
            Images or pairs per micro-batch.
        gradient_checkpointing, offload_embeddings, offload_rewards, ema_offload, vae_tiling (`bool`):
            Options of the trainer's config.
        quantization (`str` or `None`):
            `nf4`, `int8`, `fp8` or `fp8_storage`, of the frozen weights.
        uses_judge_server (`bool`):
            Whether the judges of the rewards run on a server instead of the device.
        zero_stage (`int` or `None`):
            Stage of DeepSpeed's ZeRO; `None` without DeepSpeed.
        is_fsdp (`bool`):
            Whether FSDP2 shards the weights.
        num_processes (`int`):
            Number of processes.
        judge_batch_size (`int`):
            `batch_size` of the judges in rewards.
    """

    run: Run

    @functools.cached_property
    def phases(self) -> list[Phase]:
        """Phases of the run in order. Tabulate with `pd.DataFrame({p.name: p.device for p in plan.phases})`."""
        return self.run.phases(self)

    @functools.cached_property
    def commands(self) -> list[Phase]:
        """
        Memory of `evaluate prompts`, `evaluate images`, `build grids` and `space` with the trained model,
        loaded as in training. Text encoders, transformer and judge take turns on the device; each row is the largest
        turn.
        """
        return self.run.commands(self)

    @property
    def peak(self) -> int:
        """Bytes on the device in the phase that takes most."""
        return max(phase.total for phase in self.phases)

    @property
    def host_peak(self) -> int:
        """Bytes of a process's own host memory in the phase that takes most."""
        return max(sum(phase.host.values()) for phase in self.phases)

    @property
    def mapped_peak(self) -> int:
        """Bytes of host memory that are mapped from files in the phase that takes most."""
        return max(sum(phase.mapped.values()) for phase in self.phases)

    def largest_batch(self, limit: float) -> int:
        """Return the largest micro-batch that fits into `limit` bytes, as a power of two, or 0 if none fits."""
        size = 1
        while size <= self.run.max_batch_size and replace(self, batch_size=size).peak <= limit:
            size *= 2
        return size // 2

    def summary(self) -> str:
        """Summarize the peak of the run in one line."""
        largest = max(self.phases, key=lambda phase: phase.total)
        optim: Any = getattr(self.run.args.optim, "value", self.run.args.optim)
        note = f" The optimizer `{optim}` is counted as AdamW in float32." if optimizer_bytes(optim) is None else ""
        return (
            f"Micro-batches of {self.batch_size} at {self.run.size}: {format_size(largest.total)} on the device "
            f"of each process, in `{largest.name}`.{note}"
        )

    def table(self) -> Table:
        """
        Tabulate phases and commands: device, own host memory, what is mapped from files, and the uses that take more
        than a hundredth of the device's memory.
        """
        table = Table("phase", "device", "host", "mapped", "on the device", box=None, pad_edge=False)
        for phase in [*self.phases, *self.commands]:
            uses = sorted(phase.device.items(), key=lambda use: -use[1])
            summary = ", ".join(f"{use} {format_size(size)}" for use, size in uses if size > phase.total / 100)
            sizes = (phase.total, sum(phase.host.values()), sum(phase.mapped.values()))
            table.add_row(phase.name, *map(format_size, sizes), summary)
        return table

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self.summary(), self.table(), sep="\n", highlight=False, markup=False)
        return capture.get()


def optimizer_bytes(optim: str) -> float | None:
    """Return the bytes that an optimizer of `Trainer` keeps per trained weight, `None` if it is unknown."""
    name = getattr(optim, "value", optim).removeprefix("paged_")  # pages stay on the device unless it is full
    states = _OPTIMIZER_STATES.get(name.split("_")[0])
    return states and states * (1 if name.endswith("8bit") else 0.5 if name.endswith("4bit") else FLOAT32_BYTES)


class TrainingBytes(NamedTuple):
    """Bytes on the device by use: what is always there, and what a micro-batch adds besides activations."""

    always: dict[str, int]
    micro_batch: dict[str, int]


def training_memory(
    frozen_bytes: int,
    num_trained: int,
    element_size: int,
    settings: PlanSettings,
    num_averages: int = 0,
    optim: str = "adamw_torch",
) -> TrainingBytes:
    """Count the bytes that training takes on the device besides activations."""
    # DeepSpeed keeps float32 master weights. ZeRO shards them and the optimizer's states from stage 1, gradients from
    # stage 2, and weights from stage 3.
    is_deepspeed = settings.zero_stage is not None
    float32_bytes = FLOAT32_BYTES * num_trained
    bytes_per_weight = optimizer_bytes(optim)
    states = int(num_trained * (2 * FLOAT32_BYTES if bytes_per_weight is None else bytes_per_weight))
    masters = float32_bytes // settings.num_shards(1) if is_deepspeed else 0
    always = {
        "frozen weights": frozen_bytes // settings.num_shards(3),
        "trained weights": element_size * num_trained // settings.num_shards(3) + masters,
        "optimizer": states // settings.num_shards(1),
        "EMA weights": 0 if settings.ema_offload else num_averages * float32_bytes // settings.num_shards(3),
    }
    micro_batch = {
        "gradients": float32_bytes // settings.num_shards(2),
        "DDP's buckets": 0 if settings.is_sharded or settings.num_processes == 1 else float32_bytes,
    }
    return TrainingBytes(always, micro_batch)


def max_by_total(*turns: dict[str, int]) -> dict[str, int]:
    """Return the uses that take the most bytes, of those that take turns on a device."""
    return max(turns, key=lambda uses: sum(uses.values()))


def format_size(num_bytes: int) -> str:
    """Write bytes in GiB, MiB or KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
