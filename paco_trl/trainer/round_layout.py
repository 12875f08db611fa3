# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of a round: images of one size are generated in batches and trained in micro-batches."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RoundLayout:
    """Divide a generation round over processes, micro-batches and optimizer steps."""

    num_prompts: int
    num_generations: int
    batch_size: int
    num_processes: int
    num_trained_steps: int  # denoising steps, or times, at which each image is trained
    num_optimizer_steps: int  # in each iteration over the round
    num_merged: int = 1  # micro-batches that are generated as one batch

    def __post_init__(self):
        if self.num_images % self.images_per_parallel_step == 0:
            return
        sizes = (self.num_generations, self.rollout_batch_size, self.num_processes, self.num_optimizer_steps)
        multiple = prompts_multiple(*sizes)
        below, above = self.num_prompts // multiple * multiple, -(-self.num_prompts // multiple) * multiple
        nearest = " or ".join(str(number) for number in (below, above) if number > 0)
        raise ValueError(
            f"A round does not divide: {self.num_prompts} prompts x {self.num_generations} generations = "
            f"{self.num_images} images, but {self.num_processes} processes x {self.rollout_batch_size} images in a "
            f"{'micro-batch' if self.num_merged == 1 else 'rollout batch'} x {self.num_optimizer_steps} optimizer steps = "
            f"{self.images_per_parallel_step}, and {self.num_images} / {self.images_per_parallel_step} is not an integer. "
            f"Nearest numbers of prompts that work: {nearest} (`generation_batch_size` = "
            f"{' or '.join(str(number * self.num_generations) for number in (below, above) if number > 0)})."
        )

    @property
    def num_images(self) -> int:
        """Images of a round over all processes (`generation_batch_size`)."""
        return self.num_prompts * self.num_generations

    @property
    def rollout_batch_size(self) -> int:
        """Images that a process generates at a time."""
        return self.batch_size * self.num_merged

    @property
    def rollout_batch_option(self) -> str:
        """Name of the option that sets it."""
        return f"per_device_{'rollout' if self.num_merged > 1 else 'train'}_batch_size"

    @property
    def images_per_parallel_step(self) -> int:
        """A batch of generation on each process for each optimizer step, which must divide the images."""
        return self.num_processes * self.rollout_batch_size * self.num_optimizer_steps

    @property
    def micro_batches_per_process(self) -> int:
        """Micro-batches of images that one process trains in a round."""
        return self.num_images // (self.num_processes * self.batch_size)

    @property
    def steps_per_generation(self) -> int:
        """Training micro-steps of one process in a round: a micro-batch of images for each trained step."""
        return self.micro_batches_per_process * self.num_trained_steps

    @property
    def gradient_accumulation_steps(self) -> int:
        """Training micro-steps of one process for each optimizer step."""
        return self.steps_per_generation // self.num_optimizer_steps

    def describe(self) -> str:
        """Format the arithmetic as one line."""
        merged = f", generated {self.rollout_batch_size} at a time" if self.num_merged > 1 else ""
        return (
            f"{self.num_prompts} prompts x {self.num_generations} generations = {self.num_images} images a round, on "
            f"{self.num_processes} process(es) {self.micro_batches_per_process} micro-batches of {self.batch_size}"
            f"{merged}, {self.num_trained_steps} trained step(s) for each image; {self.num_optimizer_steps} optimizer "
            f"step(s) a round with {self.gradient_accumulation_steps} accumulation steps: effective batch "
            f"{self.num_images // self.num_optimizer_steps} images."
        )

    def assign(self, sizes: list[tuple[int, int]], permutation_seed: tuple[int, ...]) -> np.ndarray:
        """Assign the images of a round: indices of shape (processes, batches per process, `rollout_batch_size`)."""
        # 1. Group images by size; within a size the prompts keep the order in which they were sampled
        prompts_by_size = sorted(range(self.num_prompts), key=lambda prompt: sizes[prompt])
        images = np.concatenate(
            [np.arange(self.num_generations) + prompt * self.num_generations for prompt in prompts_by_size]
        )
        batches = images.reshape(-1, self.rollout_batch_size)  # (all batches, rollout_batch_size)
        sizes_of = [{sizes[image // self.num_generations] for image in batch} for batch in batches.tolist()]
        mixed = next((found for found in sizes_of if len(found) > 1), None)
        if mixed is not None:
            raise ValueError(
                f"A batch of {self.rollout_batch_size} would hold sizes {sorted(mixed)}: with several in a dataset, "
                f"`{self.rollout_batch_option}` must divide `num_generations` ({self.num_generations})."
            )

        # 2. Shuffle batches into optimizer steps, independently of the number of processes. Within a step order
        # them by size, so that the processes work on equal sizes at a time
        order = np.random.default_rng(permutation_seed).permutation(len(batches))
        per_step = order.reshape(self.num_optimizer_steps, -1)
        per_step = [sorted(step.tolist(), key=lambda index: next(iter(sizes_of[index]))) for step in per_step]

        # 3. Position i goes to process i mod num_processes
        dealt = batches[np.concatenate(per_step)]
        return dealt.reshape(-1, self.num_processes, self.rollout_batch_size).swapaxes(0, 1)


def prompts_multiple(num_generations: int, batch_size: int, num_processes: int, num_optimizer_steps: int) -> int:
    """Compute the smallest number of prompts whose multiples all divide evenly."""
    images = num_processes * batch_size * num_optimizer_steps
    return images // math.gcd(images, num_generations)


def nearest_multiples(value: int, multiple: int, what: str = "values") -> str:
    """Format the nearest multiples for an error."""
    below = max(value // multiple, 1) * multiple
    return f"Nearest {what} that work: {below} or {below + multiple}."


def lay_out_round(
    num_prompts: int,
    generation_batch_size: int | None,
    steps_per_generation: int | None,
    gradient_accumulation_steps: int | None,
    num_processes: int,
    *,
    num_generations: int,
    batch_size: int,
    num_trained_steps: int,
    num_optimizer_steps: int,
    num_merged: int = 1,
) -> RoundLayout:
    """Lay out a round from the sizes that are set; `None` follows from the others."""
    parallel = num_processes * batch_size

    accumulated = None  # micro-batches of images per optimizer step and process, if the accumulation is set
    if gradient_accumulation_steps is not None:
        multiple = num_trained_steps * num_merged
        if gradient_accumulation_steps % multiple != 0:
            merged = f" and generated in batches of {num_merged} micro-batches" if num_merged > 1 else ""
            raise ValueError(
                f"`gradient_accumulation_steps` is {gradient_accumulation_steps}, but each image is trained at "
                f"{num_trained_steps} denoising steps{merged}, all of them in one optimizer step: it must be a multiple "
                f"of {multiple}. {nearest_multiples(gradient_accumulation_steps, multiple)}"
            )
        accumulated = gradient_accumulation_steps // num_trained_steps

    # The images of a round must be full groups, and a micro-batch on each process for each step or accumulation
    divisor = num_optimizer_steps * num_merged if accumulated is None else accumulated
    unit = math.lcm(num_generations, parallel * divisor)

    if steps_per_generation is not None:
        images, rest = divmod(steps_per_generation * parallel, num_trained_steps)
        if rest or images % num_generations or (generation_batch_size not in (None, images)):
            raise ValueError(
                f"`steps_per_generation` is {steps_per_generation}: {steps_per_generation} micro-steps x "
                f"{num_processes} processes x {batch_size} images / {num_trained_steps} trained step(s) = "
                f"{steps_per_generation * parallel / num_trained_steps:g} images a round, which must be full "
                f"groups of `num_generations` = {num_generations}"
                + (
                    f" and equal `generation_batch_size` = {generation_batch_size}. Set one of the two."
                    if generation_batch_size is not None
                    else f". {nearest_multiples(steps_per_generation, unit // parallel * num_trained_steps)}"
                )
            )
        generation_batch_size = images

    if generation_batch_size is None:
        multiple = prompts_multiple(num_generations, batch_size, num_processes, divisor)
        num_prompts = -(-num_prompts // multiple) * multiple
    else:
        if generation_batch_size % num_generations != 0:
            raise ValueError(
                f"`generation_batch_size` is {generation_batch_size} images, not full groups of `num_generations` "
                f"= {num_generations}: {generation_batch_size} / {num_generations} = "
                f"{generation_batch_size / num_generations:g}. {nearest_multiples(generation_batch_size, unit)}"
            )
        num_prompts = generation_batch_size // num_generations

    if accumulated is not None:
        num_optimizer_steps, rest = divmod(num_prompts * num_generations, parallel * accumulated)
        if rest:
            raise ValueError(
                f"A round does not divide: {num_prompts} prompts x {num_generations} generations = "
                f"{num_prompts * num_generations} images, but {num_processes} processes x {batch_size} images in a "
                f"micro-batch x {accumulated} accumulated = {parallel * accumulated} images for each optimizer "
                f"step. {nearest_multiples(num_prompts * num_generations, unit, 'values of `generation_batch_size`')}"
            )
    sizes = (num_prompts, num_generations, batch_size, num_processes, num_trained_steps, num_optimizer_steps)
    return RoundLayout(*sizes, num_merged)
