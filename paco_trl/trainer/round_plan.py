# SPDX-License-Identifier: Apache-2.0
"""The sizes of a round, and how its samples are sharded over processes, micro-batches and optimizer steps."""

from dataclasses import dataclass

import numpy as np

from ..rollout.rounds import Batch, Sample


@dataclass(frozen=True)
class RoundPlan:
    """Divide a generation round over processes, micro-batches and optimizer steps."""

    num_prompts: int  # image prompts: of a set of separate images one for each panel
    num_generations: int
    batch_size: int
    num_processes: int
    num_trained_steps: int  # denoising steps, or times, at which each image is trained
    num_optimizer_steps: int  # optimizer steps in each iteration over the round
    micro_batches_per_rollout_batch: int = 1  # micro-batches that are generated as one batch

    @property
    def num_images(self) -> int:
        """Images of a round over all processes (`generation_batch_size`)."""
        return self.num_prompts * self.num_generations

    @property
    def rollout_batch_size(self) -> int:
        """Images that a process generates at a time."""
        return self.batch_size * self.micro_batches_per_rollout_batch

    @property
    def rollout_batch_option(self) -> str:
        """Name of the option that sets it."""
        return f"per_device_{'rollout' if self.micro_batches_per_rollout_batch > 1 else 'train'}_batch_size"

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

    def summary(self) -> str:
        """Format the arithmetic as one line."""
        merged = f", generated {self.rollout_batch_size} at a time" if self.micro_batches_per_rollout_batch > 1 else ""
        return (
            f"{self.num_prompts} prompts x {self.num_generations} generations = {self.num_images} images a round, on "
            f"{self.num_processes} process(es) {self.micro_batches_per_process} micro-batches of {self.batch_size}"
            f"{merged}, {self.num_trained_steps} trained step(s) for each image; {self.num_optimizer_steps} optimizer "
            f"step(s) a round with {self.gradient_accumulation_steps} accumulation steps: effective batch "
            f"{self.num_images // self.num_optimizer_steps} images."
        )

    def shard(self, samples: list[Sample], permutation_seed: tuple[int, ...]) -> list[list[Batch]]:
        """Return the batches of each process, each of images of one size, in the order of training."""
        # 1. Group samples by size; within a size the prompts keep the order in which they were sampled
        by_size = sorted(samples, key=lambda sample: sample.size)
        size = self.rollout_batch_size
        batches = [Batch(by_size[first : first + size]) for first in range(0, len(by_size), size)]
        sizes = [{sample.size for sample in batch.samples} for batch in batches]
        mixed = next((batch_sizes for batch_sizes in sizes if len(batch_sizes) > 1), None)
        if mixed is not None:
            raise ValueError(
                f"A batch of {size} would hold sizes {sorted(mixed)}: with several in a dataset, "
                f"`{self.rollout_batch_option}` must divide `num_generations` ({self.num_generations})."
            )

        # 2. Shuffle batches into optimizer steps, independently of the number of processes. Within a step order
        # them by size, so that the processes work on equal sizes at a time
        order = np.random.default_rng(permutation_seed).permutation(len(batches))
        per_step = order.reshape(self.num_optimizer_steps, -1)
        steps = [sorted(step, key=lambda i: batches[i].samples[0].size) for step in per_step.tolist()]

        # 3. Batch i goes to process i mod num_processes
        in_order = [batches[i] for step in steps for i in step]
        return [in_order[process :: self.num_processes] for process in range(self.num_processes)]
