# SPDX-License-Identifier: Apache-2.0
"""Send images to the trackers that a run reports to."""

import numpy as np
from PIL import Image
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments, is_trackio_available, is_wandb_available
from transformers.integrations import TensorBoardCallback


def send_to_trackers(sheet: Image.Image, name: str, step: int, callbacks: list[TrainerCallback]) -> None:
    """Send an image to those trackers, among a trainer's callbacks, that show images."""
    names = {type(callback).__name__ for callback in callbacks}
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.add_image(name, np.asarray(sheet), step, dataformats="HWC")
    if "WandbCallback" in names and is_wandb_available():
        import wandb

        if wandb.run is not None:
            wandb.log({name: wandb.Image(sheet), "train/global_step": step})
    if "TrackioCallback" in names and is_trackio_available():
        import trackio

        trackio.log({name: trackio.Image(np.asarray(sheet)), "train/global_step": step})


def start_trackers(
    callbacks: list[TrainerCallback], args: TrainingArguments, state: TrainerState, model: nn.Module
) -> None:
    """Start the trackers, among a trainer's callbacks, that are not running: an evaluation would lose its images."""
    # The callbacks (transformers 5.23) have no public method that only starts them:
    # https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/integration_utils.py
    for callback in callbacks:
        name = type(callback).__name__
        if name in ("TrackioCallback", "WandbCallback") and not callback._initialized:
            callback.setup(args, state, model)
        elif isinstance(callback, TensorBoardCallback) and callback.tb_writer is None and state.is_world_process_zero:
            callback._init_summary_writer(args)
