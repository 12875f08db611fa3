# SPDX-License-Identifier: Apache-2.0
"""Rows, stochastic steps and noise of each round, as functions of the seed and the round alone."""

import numpy as np

from ..rollout import SDESettings
from ..rollout.noise import STREAMS
from .paco_grpo_config import PaCoGRPOConfig


class RoundSchedule:
    """The rounds of a run; nothing depends on processes, workers or where a run was resumed."""

    def __init__(self, args: PaCoGRPOConfig, num_rows: int):
        self.args, self.layout, self.num_rows = args, args.round_layout, num_rows
        self.rounds_per_epoch = num_rows // self.layout.num_prompts
        self.micro_steps_per_round = self.layout.steps_per_generation * args.num_iterations
        self.optimizer_steps_per_round = self.layout.num_optimizer_steps * args.num_iterations

    def rows(self, round_index: int) -> list[int]:
        """Return the row numbers of a round: a slice of a permutation that changes with each epoch."""
        epoch, position = divmod(round_index, self.rounds_per_epoch)
        order = np.arange(self.num_rows)
        if self.args.shuffle_dataset:
            order = np.random.default_rng((self.args.seed, STREAMS["prompts"], epoch)).permutation(order)
        return order[position * self.layout.num_prompts : (position + 1) * self.layout.num_prompts].tolist()

    def remaining_rows(self, max_steps: int, first_round: int) -> list[int]:
        """Return the rows that the rest of a run needs."""
        needed = set()
        for round_index in range(first_round, -(-max_steps // self.optimizer_steps_per_round)):
            needed.update(self.rows(round_index))
            if len(needed) == self.num_rows:
                break
        return sorted(needed)

    def assign(self, round_index: int, sizes: list[tuple[int, int]]) -> np.ndarray:
        """Assign a round's images to processes and micro-batches: (processes, micro-batches, B)."""
        return self.layout.assign(sizes, (self.args.seed, STREAMS["batches"], round_index))

    def sde(self, round_index: int) -> SDESettings:
        """Return the stochastic steps of a round, the same for every image and process."""
        args, steps = self.args, self.args.sde_steps
        if args.num_sde_steps is not None:
            generator = np.random.default_rng((args.seed, STREAMS["sde steps"], round_index))
            steps = generator.choice(steps, args.num_sde_steps, replace=False).tolist()
        settings = (args.noise_level, args.sde_type, args.images_per_prefix, args.tail_steps)
        return SDESettings(tuple(sorted(steps)), *settings)

    def noise_key(self, round_index: int, row: int, generation: int) -> tuple[int, ...]:
        """Return the key of an image's noise."""
        return (self.args.seed, STREAMS["training"], round_index, row, generation)
