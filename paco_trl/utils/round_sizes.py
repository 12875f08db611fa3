# SPDX-License-Identifier: Apache-2.0
"""Derive the size of a round from the options that set it, without torch."""

import math
from fractions import Fraction
from typing import Any, NamedTuple

from .errors import OptionError


# Prompts and optimizer steps of a round where nothing sets them (paper)
DEFAULT_PROMPTS = 42
DEFAULT_OPTIMIZER_STEPS = 2


class RoundSizes(NamedTuple):
    """The fields that set the size of a round; `None` if it follows from others."""

    num_prompts_per_generation: int | None = None
    optimizer_steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    gradient_accumulation_steps: int | None = None

    @classmethod
    def of(cls, options: Any) -> "RoundSizes":
        """Return the sizes that a config, or the options of a command line, set."""
        return cls(*(getattr(options, name) for name in cls._fields))


def trained_steps(options: Any) -> int:
    """Return the number of stochastic steps, or of DiffusionNFT's and AWM's times, at which each image is trained."""
    if hasattr(options, "num_noise_levels"):  # a field of PaCoNFTConfig
        return options.num_noise_levels or options.num_inference_steps - 1
    return options.num_sde_steps or len(options.sde_steps)


def round_divisors(options: Any, num_processes: int) -> dict[str, int]:
    """Return the sizes that divide a round, as keyword arguments of [`round_sizes`]."""
    batch_size = options.per_device_train_batch_size
    return {
        "num_processes": num_processes,
        "num_generations": options.num_generations,
        "batch_size": batch_size,
        "num_trained_steps": trained_steps(options),
        "micro_batches_per_rollout_batch": (options.per_device_rollout_batch_size or 0) // batch_size or 1,
    }


def round_sizes(
    requested: RoundSizes,
    *,
    num_processes: int,
    num_generations: int,
    batch_size: int,
    num_trained_steps: int,
    micro_batches_per_rollout_batch: int = 1,
) -> tuple[int, int]:
    """
    Return the prompts and the optimizer steps of a round from the sizes that are set: 42 prompts, rounded up to full
    batches, and 2 optimizer steps if none is. If only `gradient_accumulation_steps` is set, it fixes the images of an
    optimizer step, as in TRL. A round is then two optimizer steps, or the smallest larger number that holds full
    groups.

    Raises:
        OptionError: the sizes that are set do not divide a round, or contradict each other.
    """
    parallel = num_processes * batch_size  # images of a micro-batch on all processes
    num_prompts = requested.num_prompts_per_generation
    steps = Fraction(requested.optimizer_steps_per_generation or DEFAULT_OPTIMIZER_STEPS)
    images = Fraction(requested.generation_batch_size or 0)
    per_step = Fraction(requested.gradient_accumulation_steps or 0)
    per_step *= Fraction(parallel, num_trained_steps)  # images of an optimizer step
    if not images:
        images = Fraction((requested.steps_per_generation or 0) * parallel, num_trained_steps)
    # A multiple of this is full groups, and a full batch of generation on each process for each optimizer step
    batch = parallel * micro_batches_per_rollout_batch
    unit = math.lcm(num_generations, int(per_step) if per_step and per_step % batch == 0 else batch * int(steps))
    if not images:
        images = (
            num_prompts * num_generations if num_prompts else steps * per_step or DEFAULT_PROMPTS * num_generations
        )
        images = Fraction(math.ceil(images / unit) * unit)
    if per_step:
        steps = images / per_step
    trained = images * num_trained_steps / parallel  # micro-steps of a process
    planned = (images / num_generations, steps, images, trained, trained / steps)
    settings = {name: value for name, value in requested._asdict().items() if value is not None}
    are_equal = all(value in (None, size) for value, size in zip(requested, planned, strict=True))
    if settings.keys() <= {"num_prompts_per_generation", "optimizer_steps_per_generation"}:
        are_equal = True  # the prompts may be rounded up
    if not are_equal or steps.denominator > 1 or images % num_generations or images % (batch * steps):
        below = int(images // unit * unit)
        above = int(-(-images // unit) * unit)
        nearest = " or ".join(str(count // num_generations) for count in dict.fromkeys((below, above)) if count)
        rollout = (
            f" generated in batches of {micro_batches_per_rollout_batch} micro-batches,"
            if micro_batches_per_rollout_batch > 1
            else ""
        )
        # Options of a file give way to those that are typed in this order, the number of prompts last
        batches = ("per_device_rollout_batch_size", "per_device_train_batch_size", "num_generations")
        raise OptionError(
            f"The sizes of a round do not fit together: {', '.join(f'`{n}` = {v}' for n, v in settings.items())}, "
            f"with `num_generations` = {num_generations}, {num_processes} process(es) x {batch_size} "
            f"image(s),{rollout} and {num_trained_steps} trained denoising step(s) of each image, all in one "
            f"optimizer step. They give {_number(images)} images in {_number(images / num_generations)} groups, for "
            f"{_number(steps)} optimizer step(s). Set `num_prompts_per_generation` to {nearest}, "
            "`optimizer_steps_per_generation` if you want another number than "
            f"{DEFAULT_OPTIMIZER_STEPS}, and leave the others out.",
            *RoundSizes._fields[::-1], *batches,
        )  # fmt: skip
    return int(images) // num_generations, int(steps)


def _number(value: Fraction) -> str:
    return f"{float(value):g}"
