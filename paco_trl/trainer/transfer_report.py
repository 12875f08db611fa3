# SPDX-License-Identifier: Apache-2.0
"""Agreement of the rewards between training and inference resolution, before training."""

import json
from pathlib import Path

import numpy as np
from accelerate.logging import get_logger
from tqdm.auto import tqdm
from transformers import TrainerState

from ..evaluation.transfer import (
    ScorePairs,
    resolution_transfer,
    save_resolution_transfer,
    transfer_table,
    transfer_warning,
)  # fmt: skip
from ..rollout.prompt_rows import PromptRows
from .evaluator import Evaluator


logger = get_logger(__name__)


def report_resolution_transfer(evaluator: Evaluator, rows: PromptRows, state: TrainerState) -> None:
    """Compare the rewards of some training prompts at both resolutions, and warn where they disagree."""
    args, accelerator = evaluator.args, evaluator.sampler.accelerator
    order = np.random.default_rng(args.seed).permutation(len(rows))[: args.resolution_transfer_prompts].tolist()
    sides = {"training": (rows.training_sizes, args.resolution_scale), "inference": (rows.inference_sizes, 1.0)}
    scores = {
        side: evaluator.generate(rows, f"Resolution transfer, {side} size", state, order, *how).rewards
        for side, how in sides.items()
    }
    if not accelerator.is_main_process:
        return
    pairs = ScorePairs(
        [image // args.num_generations_eval for image in range(len(scores["training"]))],
        *(
            {name: scores[side][:, k].tolist() for k, name in enumerate(evaluator.rewards.names)}
            for side in ("training", "inference")
        ),
    )
    results = resolution_transfer(pairs)
    folder = Path(args.output_dir) / "evaluation"
    save_resolution_transfer(results, pairs, folder / "resolution_transfer.png")
    (folder / "resolution_transfer.json").write_text(
        json.dumps([result.to_dict() for result in results], indent=2), encoding="utf-8"
    )
    if not args.disable_tqdm:
        tqdm.write(transfer_table(results))
    warning = transfer_warning(results)
    if warning is not None:
        logger.warning(warning)
