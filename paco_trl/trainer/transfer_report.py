# SPDX-License-Identifier: Apache-2.0
"""Agreement of the rewards before training: between resolutions, and between a short tail and the full one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from tqdm.auto import tqdm
from transformers import TrainerState

from ..evaluation.transfer import (
    RESOLUTIONS,
    TAILS,
    ScorePairs,
    Sides,
    resolution_transfer,
    save_resolution_transfer,
    transfer_table,
    transfer_warning,
)  # fmt: skip
from ..rollout import SDESettings
from ..rollout.prompt_rows import PromptRows
from .evaluator import Evaluator
from .paco_grpo_config import PaCoGRPOConfig


logger = get_logger(__name__)


def report_resolution_transfer(evaluator: Evaluator, rows: PromptRows, state: TrainerState) -> None:
    """Compare the rewards of some training prompts at both resolutions, and warn where they disagree."""
    how = [(rows.training_sizes, evaluator.args.resolution_scale), (rows.inference_sizes, 1.0)]
    _report(evaluator, rows, state, "resolution_transfer", RESOLUTIONS, how, evaluator.args.num_generations_eval)


def report_tail_transfer(evaluator: Evaluator, rows: PromptRows, state: TrainerState, sde: SDESettings) -> None:
    """Compare the rewards of groups with the short tail and the full one, and warn where they disagree."""
    sizes, scale = rows.training_sizes, evaluator.args.resolution_scale
    how = [(sizes, scale, sde), (sizes, scale, replace(sde, tail_steps=None))]
    _report(evaluator, rows, state, "tail_transfer", TAILS, how, evaluator.args.num_generations)


def compared_rows(args: PaCoGRPOConfig, name: str, rows: PromptRows) -> list[int]:
    """Return the numbers of the training prompts that a comparison generates."""
    return np.random.default_rng(args.seed).permutation(len(rows))[: getattr(args, f"{name}_prompts")].tolist()


def _report(
    evaluator: Evaluator, rows: PromptRows, state: TrainerState, name: str, sides: Sides, how: list[tuple[Any, ...]],
    generations: int,
) -> None:  # fmt: skip
    """Generate and score some training prompts in two ways with the same noise, and save and log the agreement."""
    args, accelerator = evaluator.args, evaluator.sampler.accelerator
    order = compared_rows(args, name, rows)
    scores = [
        evaluator.generate(rows, f"Comparing rewards, {side}", state, order, *arguments).rewards
        for side, arguments in zip(sides[:2], how, strict=True)
    ]
    if not accelerator.is_main_process:
        return
    short, full = ({each: side[:, k].tolist() for k, each in enumerate(evaluator.rewards.names)} for side in scores)
    pairs = ScorePairs([image // generations for image in range(len(scores[0]))], short, full, sides)
    results = resolution_transfer(pairs)
    folder = Path(args.output_dir) / "evaluation"
    save_resolution_transfer(results, pairs, folder / f"{name}.png")
    content = json.dumps([result.to_dict() for result in results], indent=2)
    (folder / f"{name}.json").write_text(content, encoding="utf-8")
    if not args.disable_tqdm:
        tqdm.write(transfer_table(results, sides))
    if (warning := transfer_warning(results, sides)) is not None:
        logger.warning(warning)
