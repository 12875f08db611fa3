# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a whole: written completely by all processes, or not there."""

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

from .checkpoints import checkpoints_of, incomplete_files, publish, stage_folder
from .weights import trained_parameters


POLICY_WEIGHTS = "policy.safetensors"  # what is trained; under DeepSpeed its own files hold it
EMA_WEIGHTS = "ema.safetensors"
STATE = "trainer_state.json"  # TRAINER_STATE_NAME of transformers


class StagedCheckpoint:
    """A checkpoint while it is written, beside the others."""

    def __init__(self, output_dir: str | Path, step: int, accelerator: Accelerator, should_save: bool):
        self.output_dir, self.step = Path(output_dir), step
        self.accelerator, self.should_save = accelerator, should_save
        self.folder = stage_folder(output_dir, step)

    def write(self, part: Callable[[Path], Any]) -> None:
        """
        Write a part of it. Every process calls it, and all stop if one cannot.

        A process that fails must not leave the others in a collective of the next part. (DeepSpeed's own saving is one
        part; it can still wait for a process whose disk is full.)
        """
        problem = None
        try:
            part(self.folder)
        # What a full disk is to Python, to torch and to safetensors
        except (OSError, RuntimeError, SafetensorError) as error:
            problem = error
        mine = [] if problem is None else [f"process {self.accelerator.process_index}: {problem!r}"]
        problems = gather_object(mine) if self.accelerator.num_processes > 1 else mine
        if not problems:
            return
        if self.should_save:
            shutil.rmtree(self.folder.parent, ignore_errors=True)  # gives back the space that it took
        raise RuntimeError(
            f"The checkpoint of step {self.step} could not be written to '{self.output_dir}' "
            f"({'; '.join(problems)}). The checkpoints before it are complete. Make room there and continue with "
            "`resume_from_checkpoint=True`."
        ) from problem


@contextmanager
def staged_checkpoint(
    output_dir: str | Path, step: int, accelerator: Accelerator, should_save: bool, run: dict
) -> Iterator[StagedCheckpoint]:
    """
    Write a checkpoint beside the others and rename it when every process has written its parts.

    Args:
        output_dir (`str` or `Path`):
            Output folder.
        step (`int`):
            Optimizer step.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the run; every process enters.
        should_save (`bool`):
            Whether this process writes what is written once.
        run (`dict`):
            What the checkpoint belongs to.

    Raises:
        RuntimeError: it could not be written, on whichever process. The checkpoints that exist are as they were.
    """
    staged = StagedCheckpoint(output_dir, step, accelerator, should_save)

    def make(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    staged.write(lambda folder: make(folder) if should_save else None)
    yield staged
    staged.write(lambda folder: publish(folder, output_dir, run) if should_save else None)


def drop_old_checkpoints(output_dir: str, limit: int | None, best: str | None) -> None:
    """Delete checkpoints beyond a limit, oldest first, never the best one."""
    if limit:
        # What a run left that was killed while it deleted them: it would count, and whole ones go in its place
        for checkpoint in checkpoints_of(output_dir):
            if incomplete_files(checkpoint):
                shutil.rmtree(checkpoint, ignore_errors=True)
    rotate_checkpoints(output_dir=output_dir, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)


def check_weights(model: nn.Module, checkpoint: Path) -> None:
    """Check that a checkpoint has the weights that a run trains, before its optimizer's state is loaded for them."""
    path = checkpoint / (POLICY_WEIGHTS if (checkpoint / POLICY_WEIGHTS).exists() else EMA_WEIGHTS)
    with safe_open(path, "pt") as file:
        saved = set(file.keys())
    trained = trained_parameters(model).keys()
    if saved != trained:
        raise ValueError(
            f"'{checkpoint}' cannot be continued: {len(saved - trained)} of its {len(saved)} weights are not trained "
            f"in this run, and {len(trained - saved)} of the {len(trained)} that are, are not in it "
            f"({', '.join(sorted(saved ^ trained)[:3])}, ...). Start anew in another `output_dir`: the adapter of a "
            "checkpoint can be continued as `peft_config`."
        )


def round_file(checkpoint: Path, process_index: int) -> Path:
    """Where a process keeps its images of a round that is not used up."""
    return checkpoint / f"rollout_{process_index}.pt"


def load_round(checkpoint: Path, process_index: int, device: torch.device, is_offloaded: bool) -> dict[str, Any]:
    """Load what a process kept of a round: tensors and numbers, nothing that runs."""
    # On the device at once, so that what images of a prompt share stays shared
    # torch does not load to "cpu:0", which the device is called in several processes on CPU
    location = "cpu" if is_offloaded or device.type == "cpu" else device
    return torch.load(round_file(checkpoint, process_index), map_location=location, weights_only=True)
