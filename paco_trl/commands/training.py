# SPDX-License-Identifier: Apache-2.0
"""Start and end of all training commands."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from ..checkpointing.checkpoints import find_checkpoint, how_to_resume, list_checkpoints
from ..checkpointing.output_dirs import check_no_checkpoints, check_no_model, check_output_dir
from ..utils.errors import OptionError
from ..utils.locks import LockedError, take_lock
from ..utils.processes import end_training


if TYPE_CHECKING:
    from transformers import Trainer


def check_start(args: Any, published_patterns: Iterable[str], is_early: bool = False) -> None:
    """Reject an output directory with files of the user or an earlier run; `is_early` is before torch is imported."""
    output_dir = args.output_dir or "trainer_output"  # the default of transformers
    check_output_dir(output_dir, published_patterns)
    # The run itself takes the lock once its libraries are imported
    if is_early and os.environ.get("RANK", "0") == "0" and (path := Path(output_dir) / ".lock").is_file():
        lock = FileLock(path)
        try:
            take_lock(lock, "checkpoints", output_dir)
        except LockedError as error:
            raise OptionError(str(error), "output_dir") from None
        lock.release()
    # The main process looks for the latest checkpoint later, and warns of those it skips. A restarted process resumes.
    is_latest = str(args.resume_from_checkpoint).lower() in ("auto", "true") and list_checkpoints(output_dir)
    if is_early and (is_latest or "TORCHELASTIC_RESTART_COUNT" in os.environ):
        return
    checkpoint = find_checkpoint(output_dir, args.resume_from_checkpoint)
    if not args.overwrite_output_dir:
        check_no_checkpoints(output_dir, checkpoint)
        check_no_model(output_dir)


def train_and_save(trainer: "Trainer", dataset_name: str | None, images: str | None) -> None:
    """Train, then save the model, or save and push it. Ctrl-C prints how to resume."""
    from peft import PeftModel

    args = trainer.args
    num_launched = int(os.environ.get("WORLD_SIZE", 1))
    if num_launched != trainer.accelerator.num_processes:
        raise OptionError(f"{num_launched} processes would each train alone. Without a GPU, add `--use_cpu`.")
    try:
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(str(interrupt) or f"stopped. {how_to_resume(args.output_dir)}") from None

    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
    else:
        trainer.save_model(args.output_dir, dataset_name=dataset_name)
    if trainer.accelerator.is_main_process:
        label = "Adapter" if isinstance(trainer.accelerator.unwrap_model(trainer.model), PeftModel) else "Model"
        sys.stdout.write(f"{label}: {args.output_dir}\n")
        if images is not None:
            sys.stdout.write(f"Images: {images}\n")
    end_training(trainer.accelerator)
