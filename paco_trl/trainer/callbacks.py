# SPDX-License-Identifier: Apache-2.0
"""Callbacks for the steps and rounds of a run. Yours may have `on_round_end`, too: see `docs/paco_grpo_trainer.md`."""

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import TrainerCallback

from ..checkpointing.checkpoints import EMA_WEIGHTS
from ..checkpointing.weights import EMA
from ..plots.contact_sheet import MAX_PROMPTS, ScoredImages, save_scored_sheet
from ..plots.trackers import send_table_to_trackers, send_to_trackers
from ..rewards.image_statistics import image_metrics, measure_images
from ..rewards.scoring import Scores
from ..rollout.prompt_rows import PromptRows
from .evaluator import Evaluation
from .round_schedule import TrainingRound


class AverageCallback(TrainerCallback):
    """Average the trained weights (`ema_decay`) from the start of `train()`, for evaluations and saved files."""

    file = EMA_WEIGHTS  # file name in a checkpoint

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.average: EMA | None = None  # `None` until `train()` begins

    def decay(self, step: int) -> float:
        """Return the decay of an update."""
        return self.trainer.args.ema_decay

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Start at the trained weights, or at the average of the checkpoint, if it has one."""
        trainer, checkpoint = self.trainer, self.trainer.resumed_from
        average = EMA(trainer.model, self.decay(state.global_step), trainer.zero_stage, args.ema_offload)
        if checkpoint is not None and (checkpoint / self.file).exists():
            average.load_state_dict(load_file(checkpoint / self.file))
        self.average = average

    def on_optimizer_step(self, args, state, control, **kwargs) -> None:
        """Follow an update of the weights."""
        if self.average is not None and not self.trainer.is_idle_step:
            self.average.step()


class ImageStatisticsCallback(TrainerCallback):
    """Log statistics of a round's images that no reward sees."""

    def on_round_end(self, args, state, control, round: TrainingRound, **kwargs) -> None:
        """Add the statistics to the metrics of the round. Collective: called on all ranks."""
        round.metrics |= image_metrics(measure_images(round.completions), round.num_generations)


class ContactSheetsCallback(TrainerCallback):
    """
    Save images and scores of the first prompts of each round and evaluation, and send the sheets to the trackers, with
    a table of all completions of a round.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        reward_names: list[str],
        eval_reward_names: list[str],
        trackers: list[TrainerCallback],
    ):
        self.accelerator = accelerator
        self.trackers = trackers
        self.reward_names = reward_names
        self.eval_reward_names = eval_reward_names

    def on_round_end(
        self, args, state, control, round: TrainingRound, scores: Scores, advantages: torch.Tensor, **kwargs
    ) -> None:
        """Save the sheet of a round. Collective: called on all ranks."""
        scored = ScoredImages.collect(
            self.accelerator,
            round.completions,
            round.num_generations,
            reward_names=self.reward_names,
            rewards=scores.rewards,
            extra=scores.extra,
            advantages=advantages,
        )
        title = f"Round {round.index}, step {state.global_step}"
        self.save(args, state, f"round_{round.index:05d}", title, round.rows, round.row_indices, scored)
        if self.accelerator.is_main_process:
            table = scored.table([round.rows.prompts[row_index] for row_index in round.row_indices])
            send_table_to_trackers(table, "completions", state.global_step, self.trackers)

    def on_evaluation_end(
        self, args, state, control, rows: PromptRows, after: Evaluation, before: Evaluation | None, name: str, **kwargs
    ) -> None:
        """Save the sheet of an evaluation, with the images of the untrained model beside its own."""
        scored = self._scored_images(after, args.num_generations_eval)
        untrained = None if before is None else self._scored_images(before, args.num_generations_eval)
        title = f"Evaluation, step {state.global_step}"
        name, tracker = f"{name}_step_{state.global_step:06d}", f"{name}_contact_sheet"
        self.save(args, state, name, title, rows, list(range(len(rows))), scored, untrained, tracker)

    def _scored_images(self, evaluation: Evaluation, num_generations: int) -> ScoredImages:
        return ScoredImages(
            pictures=evaluation.pictures,
            num_generations=num_generations,
            reward_names=self.eval_reward_names,
            rewards=evaluation.rewards,
            extra=evaluation.extra,
        )

    def save(
        self,
        args,
        state,
        name: str,
        title: str,
        rows: PromptRows,
        row_indices: list[int],
        scored: ScoredImages,
        before: ScoredImages | None = None,
        tracker_name: str = "contact_sheet",
    ) -> None:
        """Save a sheet of some rows, on the main process."""
        if not self.accelerator.is_main_process:
            return
        sources = None
        if rows.sources is not None:
            sources = {
                position: rows.images(row_index) for position, row_index in enumerate(row_indices[:MAX_PROMPTS])
            }
        prompts = [rows.prompts[row_index] for row_index in row_indices]
        folder = Path(args.output_dir) / "contact_sheets"
        sheet = save_scored_sheet(folder, name, title, prompts, scored, before, sources)
        send_to_trackers(sheet, tracker_name, state.global_step, self.trackers)
