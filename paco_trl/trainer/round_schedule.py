# SPDX-License-Identifier: Apache-2.0
"""The rounds of a training run: their rows and stochastic steps, and what each process trains of them."""

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device

from ..rollout import Family, SDESettings, TransformerStep
from ..rollout.prompt_rows import ResolvedRows
from ..rollout.rounds import Batch, Round, Sample, pad_batches
from ..rollout.sde import STREAMS
from .paco_grpo_config import PaCoGRPOConfig


logger = logging.getLogger(__name__)

# Rounds whose prompts are encoded at a time: text encoders and transformer change places once in eight rounds
ROUNDS_AHEAD = 8


def rows_per_round(images_per_row: np.ndarray, num_prompts: int) -> int:
    """
    Return the largest number of rows that fits a round for any choice of rows, or 0.

    A row has as many prompts as images.
    """
    largest = np.sort(images_per_row)[::-1]
    for count in range(min(len(largest), num_prompts), 0, -1):
        # Rows are sorted by their number of images and dealt round-robin, so a round takes one row of each block of
        # `rounds` rows
        rounds = len(largest) // count
        if largest[: count * rounds : rounds].sum() <= num_prompts:
            return count
    return 0


class RoundSchedule:
    """
    The rounds of a run; nothing depends on processes, workers or where a run was resumed.

    `images_per_row` has the number of images, and so of prompts, of each row: a set of separate images has one for each
    panel.
    """

    def __init__(self, args: PaCoGRPOConfig, images_per_row: Sequence[int]):
        self.args = args
        self.plan = args.round_plan
        self.images_per_row = np.array(images_per_row)
        self.num_rows = len(images_per_row)
        self.rows_per_round = rows_per_round(self.images_per_row, self.plan.num_prompts)
        if not self.rows_per_round:
            largest = int(self.images_per_row.argmax())
            raise ValueError(
                f"Row {largest} of the dataset is a set of {max(images_per_row)} separate images, but a round has "
                f"{self.plan.num_prompts} prompts, one for each image: {self.plan.summary()} Set "
                f"`num_prompts_per_generation` to at least {max(images_per_row)}, or leave the row out."
            )
        # Rounds are about equal, whatever the rows
        spare = self.plan.num_prompts - self.rows_per_round * self.images_per_row.mean()
        if spare > self.plan.num_prompts / 4:
            logger.warning(
                f"Of the {self.plan.num_prompts} prompts of a round about {spare:.0f} are generated and not trained, "
                f"since {self.rows_per_round} sets of up to {max(images_per_row)} separate images fill the rest. Set "
                "`num_prompts_per_generation` to a multiple of the usual number of images."
            )
        self.rounds_per_epoch = self.num_rows // self.rows_per_round
        self.micro_steps_per_round = self.plan.steps_per_generation * args.num_iterations
        self.optimizer_steps_per_round = self.plan.num_optimizer_steps * args.num_iterations

    def row_indices(self, round_index: int) -> list[int]:
        """Return the rows of a round: part of a permutation that changes with each epoch."""
        epoch, position = divmod(round_index, self.rounds_per_epoch)
        rounds, count = self.rounds_per_epoch, self.rows_per_round
        order = np.arange(self.num_rows)
        if self.args.shuffle_dataset:
            order = np.random.default_rng((self.args.seed, STREAMS["prompts"], epoch)).permutation(order)
        # Deal the sorted rows round-robin: rounds then have about the same number of images. If all rows have the same
        # number, the rounds are slices of the permutation
        dealt = order[: rounds * count].reshape(rounds, count).T.flatten()
        dealt = dealt[np.argsort(-self.images_per_row[dealt], kind="stable")]
        return dealt.reshape(count, rounds)[:, position].tolist()

    def other_row_indices(self, round_index: int) -> list[int]:
        """Return the rows outside a round, in the order in which resampling takes them."""
        order = np.random.default_rng((self.args.seed, STREAMS["other prompts"], round_index)).permutation(
            self.num_rows
        )
        in_round = set(self.row_indices(round_index))
        return [row_index for row_index in order.tolist() if row_index not in in_round]

    def remaining_row_indices(self, max_steps: int, first_round: int) -> list[int]:
        """Return the rows that the rest of a run needs."""
        needed = set()
        for round_index in range(first_round, -(-max_steps // self.optimizer_steps_per_round)):
            needed.update(self.row_indices(round_index))
            if len(needed) == self.num_rows:
                break
        return sorted(needed)

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the run."""
        per_epoch = self.rounds_per_epoch * self.optimizer_steps_per_round
        return self.args.max_steps if self.args.max_steps > 0 else math.ceil(self.args.num_train_epochs * per_epoch)

    def summary(self) -> str:
        """Format the arithmetic of the rounds as one line."""
        rows, prompts = self.rows_per_round, self.plan.num_prompts
        sets = f" They are the prompts of {rows} row(s)." if rows < prompts else ""
        return self.plan.summary() + sets + self.describe_unused()

    def describe_unused(self) -> str:
        """Say how many rows are in no round of the run, if any are."""
        unused = self.num_rows - len(self.remaining_row_indices(self.max_steps, 0))
        rounds = math.ceil(self.max_steps / self.optimizer_steps_per_round)
        repeated = "" if self.args.shuffle_dataset else ", the same in each epoch (`shuffle_dataset`)"
        text = f" The run's {rounds} round(s) do not use {unused} of the {self.num_rows} rows"
        return f"{text}{repeated}." if unused else ""

    def sde(self, round_index: int) -> SDESettings:
        """Return the stochastic steps of a round, the same for every image and process."""
        args, steps = self.args, self.args.sde_steps
        if args.num_sde_steps is not None:
            generator = np.random.default_rng((args.seed, STREAMS["sde steps"], round_index))
            steps = generator.choice(steps, args.num_sde_steps, replace=False).tolist()
        return SDESettings(tuple(sorted(steps)), args.noise_level, args.sde_type, args.tail_steps)


class TrainingRound(Round):
    """
    A round that is trained: sharded over the processes and, once it is generated, with the micro-batches of this one.

    It is determined by the seed and `index` until groups are replaced. `trained_completions` are the completions in
    each optimizer step (fractional when a set is split between steps), `metrics` are logged with every step of the
    round, and `seconds` is the time to generate and score it.
    """

    def __init__(
        self, schedule: RoundSchedule, rows: ResolvedRows, index: int, process_index: int, global_step: int = 0
    ):
        seed, plan = schedule.args.seed, schedule.plan
        key = (seed, STREAMS["training"], index)
        row_indices = schedule.row_indices(index)
        super().__init__(rows, row_indices, plan.num_generations, key, rows.training_sizes, plan.num_prompts)
        self.index = index
        self.plan = plan
        self.sde = schedule.sde(index)
        self.global_step = global_step
        self.batches = plan.shard(self.samples, (seed, STREAMS["batches"], index))
        self.process_index = process_index
        self.local_batches = self.batches[process_index]
        self.micro_batches: list[Batch] = []
        self.trained_completions: list[float] = []
        self.metrics: dict[str, float] = {}
        self.seconds = 0.0

    def assign_advantages(self, advantages: torch.Tensor, is_trained: torch.Tensor, family: Family) -> None:
        """
        Set advantage and weight of each sample, and split this process's batches into micro-batches.

        `advantages` and `is_trained` `(completions,)` are in the order of the completions. The weights make the loss
        of an optimizer step a mean over completions and trained steps: an image of a set of n counts 1 / n.
        """
        for completion, advantage in zip(self.completions, advantages.tolist(), strict=True):
            for sample in completion.samples:
                sample.advantage = advantage

        def share(sample: Sample) -> float:
            """Return the share of a sample in its completion, 0 where that is not trained."""
            completion = sample.completion
            is_counted = is_trained[completion.index] and not sample.is_padding
            return 1 / len(completion.samples) if is_counted else 0.0

        per_step = len(self.local_batches) // self.plan.num_optimizer_steps
        self.trained_completions = []
        for first in range(0, len(self.local_batches), per_step):
            step_batches = [batch for batches in self.batches for batch in batches[first : first + per_step]]
            samples = [sample for batch in step_batches for sample in batch.samples]
            shares = torch.tensor([share(sample) for sample in samples])  # (samples,)
            total = shares.sum().item()
            self.trained_completions.append(total)
            denominator = total * self.plan.num_trained_steps or 1  # without one all weights are 0
            for sample, weight in zip(samples, (shares / denominator).tolist(), strict=True):
                sample.weight = weight
        self.micro_batches = []
        for batch in self.local_batches:
            self.micro_batches += batch.split(self.plan.micro_batches_per_rollout_batch, family)
            batch.steps = []  # the micro-batches have them, perhaps as copies

    def replace_groups(self, groups: list[int], unused_row_indices: list[int]) -> set[int]:
        """Put unused rows of the same size and number of images in the place of groups; return those replaced."""
        replaced = set()
        for group in groups:
            expected = self._shape(self.row_indices[group])
            row_index = next((index for index in unused_row_indices if self._shape(index) == expected), None)
            if row_index is not None:
                unused_row_indices.remove(row_index)
                self.replace(group, row_index)
                replaced.add(group)
        return replaced

    def _shape(self, row_index: int) -> tuple[tuple[int, int], int]:
        """Return size and number of the images of a row."""
        return self.sizes[row_index], self.rows.images_per_row[row_index]

    def batches_of(self, groups: set[int]) -> list[Batch]:
        """Return this process's batches of some groups, padded so that every process generates as many."""
        by_process = [[batch for batch in batches if batch.groups & groups] for batches in self.batches]
        padding = next(batch for batches in by_process for batch in batches)
        return pad_batches(by_process[self.process_index], max(map(len, by_process)), padding)

    def micro_step(self, position: int) -> tuple[Batch, TransformerStep]:
        """Return a micro-batch, and which of its steps is trained."""
        position %= self.plan.steps_per_generation  # `num_iterations` passes
        batch_index, step = divmod(position, self.plan.num_trained_steps)
        batch = self.micro_batches[batch_index]
        return batch, batch.steps[step]

    def is_idle_step(self, optimizer_step: int) -> bool:
        """Return whether an optimizer step of the round trains no image."""
        return self.trained_completions[optimizer_step % self.plan.num_optimizer_steps] == 0

    @property
    def is_idle(self) -> bool:
        """Whether the round trains no image at all."""
        return not any(self.trained_completions)

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors and numbers of a pending round for a checkpoint."""
        # Not `asdict`, which would copy the tensors that images of a prompt share
        batches = [
            {
                "steps": [{f.name: getattr(step, f.name) for f in dataclasses.fields(step)} for step in batch.steps],
                "advantages": [sample.advantage for sample in batch.samples],
                "weights": [sample.weight for sample in batch.samples],
            }
            for batch in self.micro_batches
        ]
        names = ("index", "global_step", "row_indices", "trained_completions", "metrics", "seconds")
        return {name: getattr(self, name) for name in names} | {"batches": batches}

    def load_state_dict(
        self, state: dict[str, Any], step_class: type[TransformerStep], device: torch.device, is_offloaded: bool
    ) -> None:
        """Restore the pending round of a checkpoint, which was sharded over as many processes."""
        for group, (row_index, saved) in enumerate(zip(self.row_indices, state["row_indices"], strict=True)):
            if row_index != saved:
                self.replace(group, saved)
        for name in ("global_step", "trained_completions", "metrics", "seconds"):
            setattr(self, name, state[name])
        size = self.plan.batch_size
        samples = [sample for batch in self.local_batches for sample in batch.samples]
        for batch_index, saved in enumerate(state["batches"]):
            batch = Batch(samples[batch_index * size : (batch_index + 1) * size])
            for sample, advantage, weight in zip(batch.samples, saved["advantages"], saved["weights"], strict=True):
                sample.advantage, sample.weight = advantage, weight
            for step in saved["steps"]:
                # With `is_offloaded` the calls come to the device with their micro-step
                calls = step["calls"] if is_offloaded else send_to_device(step["calls"], device)
                rest = {name: value for name, value in step.items() if name != "calls"}
                batch.steps.append(step_class(**send_to_device(rest, device), calls=calls))
            self.micro_batches.append(batch)
