# SPDX-License-Identifier: Apache-2.0
"""Send images to the trackers that a run reports to."""

import numpy as np
from PIL import Image
from transformers import TrainerCallback, is_trackio_available, is_wandb_available
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
