# SPDX-License-Identifier: Apache-2.0
"""Send images and tables to the trackers that a run reports to."""

from importlib import import_module
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback


_WITH_TABLES = {"WandbCallback": "wandb", "TrackioCallback": "trackio"}


def send_table_to_trackers(
    columns: dict[str, list[Any]], name: str, step: int, callbacks: list[TrainerCallback]
) -> None:
    """Send a table to the trackers among a trainer's callbacks to which TRL's trainers send completions."""
    for callback in callbacks:
        kinds = {kind.__name__ for kind in type(callback).__mro__}
        if package := next((package for kind, package in _WITH_TABLES.items() if kind in kinds), None):
            tracker = import_module(package)
            if package != "wandb" or tracker.run is not None:
                table = tracker.Table(dataframe=pd.DataFrame(columns))
                tracker.log({name: table, "train/global_step": step})


def send_to_trackers(sheet: Image.Image, name: str, step: int, callbacks: list[TrainerCallback]) -> None:
    """Send an image to the trackers among a trainer's callbacks that show images."""
    trackers = {kind.__name__ for callback in callbacks for kind in type(callback).__mro__}  # DagsHub's is MLflow's
    for callback in callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.add_image(name, np.asarray(sheet), step, dataformats="HWC")
    # A tracker's package is there if its callback is, and is not imported otherwise
    if "WandbCallback" in trackers:
        import wandb

        if wandb.run is not None:
            wandb.log({name: wandb.Image(sheet), "train/global_step": step})
    if "TrackioCallback" in trackers:
        import trackio

        trackio.log({name: trackio.Image(np.asarray(sheet)), "train/global_step": step})
    if "MLflowCallback" in trackers:
        import mlflow

        if mlflow.active_run() is not None:
            mlflow.log_image(sheet, key=name, step=step)
    if "SwanLabCallback" in trackers:
        import swanlab

        swanlab.log({name: swanlab.Image(sheet)}, step=step)
    if "CometCallback" in trackers:
        import comet_ml

        if (experiment := comet_ml.get_running_experiment()) is not None:
            experiment.log_image(sheet, name=name, step=step)
