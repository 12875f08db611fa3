# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint completely by all processes, or not at all."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.trainer_utils import rotate_checkpoints

from .checkpoints import checkpoints_of, incomplete_files, publish, recover_replaced, stage_folder
from .weights import trained_parameters


POLICY_WEIGHTS = "policy.safetensors"  # what is trained; under DeepSpeed its own files hold it
EMA_WEIGHTS = "ema.safetensors"
STATE = "trainer_state.json"  # TRAINER_STATE_NAME of transformers


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. It stops a run."""


class StagedCheckpoint:
    """A checkpoint while it is written, next to the others."""

    def __init__(self, output_dir: str | Path, step: int, accelerator: Accelerator, should_save: bool):
        self.output_dir, self.step = Path(output_dir), step
        self.accelerator, self.should_save = accelerator, should_save
        self.folder = stage_folder(output_dir, step)

    def write(self, part: Callable[[Path], Any]) -> None:
        """Write a part of the checkpoint. Every process calls it, and all stop if one fails."""
        problem = None
        try:
            part(self.folder)
        # A full disk, to Python, to torch and to safetensors
        except (OSError, RuntimeError, SafetensorError) as error:
            problem = error
        mine = [] if problem is None else [f"process {self.accelerator.process_index}: {problem!r}"]
        problems = gather_object(mine) if self.accelerator.num_processes > 1 else mine
        if not problems:
            return
        if self.should_save:
            shutil.rmtree(self.folder.parent, ignore_errors=True)  # frees its space
        raise CheckpointError(
            f"The checkpoint of step {self.step} could not be written to '{self.output_dir}' "
            f"({'; '.join(problems)}). Earlier ones are complete. Make room and resume (`resume_from_checkpoint=True`)."
        ) from problem


@contextmanager
def staged_checkpoint(
    output_dir: str | Path, step: int, accelerator: Accelerator, should_save: bool, run: dict
) -> Iterator[StagedCheckpoint]:
    """Write a checkpoint aside and rename it when every process is done; raise `CheckpointError` on all if one fails."""
    staged = StagedCheckpoint(output_dir, step, accelerator, should_save)

    def make(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    try:
        staged.write(lambda folder: make(folder) if should_save else None)
        yield staged
        staged.write(lambda folder: publish(folder, output_dir, run) if should_save else None)
    except KeyboardInterrupt:
        if should_save:
            recover_replaced(output_dir)
            shutil.rmtree(staged.folder.parent, ignore_errors=True)
        raise


def drop_old_checkpoints(output_dir: str, limit: int | None, best: str | None) -> None:
    """Delete checkpoints beyond a limit, oldest first, but never the best one."""
    if limit:
        # What a run killed while deleting has left: it would count, and complete ones be deleted instead
        for checkpoint in checkpoints_of(output_dir):
            if incomplete_files(checkpoint):
                shutil.rmtree(checkpoint, ignore_errors=True)
    rotate_checkpoints(output_dir=output_dir, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)


def check_weights(model: nn.Module, checkpoint: Path) -> None:
    """Check that a checkpoint has the weights that a run trains, before the optimizer's state is loaded."""
    path = checkpoint / (POLICY_WEIGHTS if (checkpoint / POLICY_WEIGHTS).exists() else EMA_WEIGHTS)
    with safe_open(path, "pt") as file:
        saved = set(file.keys())
    trained = trained_parameters(model).keys()
    if saved != trained:
        raise ValueError(
            f"'{checkpoint}' cannot be resumed: {len(saved - trained)} of its {len(saved)} weights are not trained "
            f"in this run, and {len(trained - saved)} of the {len(trained)} trained weights are not in it "
            f"({', '.join(sorted(saved ^ trained)[:3])}, ...). Start from scratch in another `output_dir`: the adapter "
            "of a checkpoint can be passed as `peft_config`."
        )


def round_file(checkpoint: Path, process_index: int) -> Path:
    """Return the file with a process's images of an unfinished round."""
    return checkpoint / f"rollout_{process_index}.pt"


def load_round(checkpoint: Path, process_index: int, device: torch.device, is_offloaded: bool) -> dict[str, Any]:
    """Load the images of an unfinished round: tensors and numbers, no code."""
    # To the device at once, so that tensors shared by the images of a prompt stay shared. In several processes on CPU the
    # device is called "cpu:0", to which torch does not load
    location = "cpu" if is_offloaded or device.type == "cpu" else device
    return torch.load(round_file(checkpoint, process_index), map_location=location, weights_only=True)
