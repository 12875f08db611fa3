# SPDX-License-Identifier: Apache-2.0
"""Before training: do the rewards at the training resolution say what they say at the inference resolution?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from accelerate.logging import get_logger
from tqdm.auto import tqdm

from ..evaluation.transfer import (
    ScorePairs,
    resolution_transfer,
    save_resolution_transfer,
    transfer_table,
    transfer_warning,
)
from .evaluator import draw_evaluation


if TYPE_CHECKING:
    from .paco_grpo_trainer import PaCoGRPOTrainer

logger = get_logger(__name__)


def report_resolution_transfer(trainer: "PaCoGRPOTrainer") -> None:
    """
    Draws some training prompts at both resolutions, correlates the training rewards, and warns where they disagree.

    Both are drawn by the pipeline's ODE with `num_inference_steps_eval` steps, so that the resolution is all that
    differs. Saves `resolution_transfer.json` and `resolution_transfer.png` in `output_dir/evaluation`.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer; every process calls this.
    """
    args, rows = trainer.args, trainer.train_rows
    order = np.random.default_rng(args.seed).permutation(len(rows))[: args.resolution_transfer_prompts].tolist()
    trainer.model.eval()
    scores = {
        side: draw_evaluation(
            trainer,
            trainer.scorer,
            trainer.reward_weights,
            rows,
            f"Resolution transfer, {side} size",
            order,
            at_training_size=side == "training",
        ).rewards
        for side in ("training", "inference")
    }
    trainer.model.train()
    if not trainer.accelerator.is_main_process:
        return
    pairs = ScorePairs(
        [image // args.num_generations_eval for image in range(len(scores["training"]))],
        *(
            {name: scores[side][:, k].tolist() for k, name in enumerate(trainer.reward_func_names)}
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
