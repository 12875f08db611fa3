# SPDX-License-Identifier: Apache-2.0
"""What of a checkpoint leaves this machine while a run goes on."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import upload_folder
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress


if TYPE_CHECKING:
    from transformers import Trainer


def push_checkpoint(trainer: "Trainer", checkpoint_folder: str, published_files: list[str]) -> None:
    """
    Uploads a checkpoint in the background, in place of Trainer's own `_push_from_checkpoint`.

    That one uploads `training_args.bin`, which holds the token. Here only the files that a published adapter consists
    of leave this machine.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer; every process calls this, the main one uploads.
        checkpoint_folder (`str`):
            Folder of the checkpoint.
        published_files (`list[str]`):
            Patterns of the files.
    """
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    in_progress = trainer.push_in_progress
    if not args.hub_always_push and in_progress is not None and not in_progress.is_done():
        return
    # Copied, because an old checkpoint may be deleted while it is uploaded
    for pattern in published_files:
        for path in Path(checkpoint_folder).glob(pattern):
            target = Path(args.output_dir) / path.relative_to(checkpoint_folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copy(path, target)
    upload = upload_folder(
        repo_id=trainer.hub_model_id,
        folder_path=args.output_dir,
        commit_message=f"Training in progress, step {trainer.state.global_step}",
        token=args.hub_token,
        allow_patterns=published_files,
        ignore_patterns=["checkpoint-*", ".saving/*", "contact_sheets/*", "evaluation/*"],
        revision=args.hub_revision,
        run_as_future=True,
    )
    if in_progress is None or in_progress.is_done():
        trainer.push_in_progress = PushInProgress([upload])
    else:
        in_progress.jobs.append(upload)
