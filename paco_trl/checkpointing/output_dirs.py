# SPDX-License-Identifier: Apache-2.0
"""
Output directories of runs: whether a run may write there, and deleting an earlier run.

The command line uses this module before it imports torch.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..hub.files import RUN_FILE, RUN_OUTPUTS, check_no_foreign_files, find_published_patterns, select_files
from ..utils.differences import differences
from ..utils.errors import OptionError
from ..utils.files import file_on_path, read_record, why_unwritable, write_atomically
from ..utils.model_files import CARD_DATA_FILE
from .checkpoints import delete_checkpoint, incomplete_files, list_checkpoints, read_run


def check_output_dir(output_dir: str | Path, published_patterns: Iterable[str]) -> None:
    """Reject a directory with files of the user that a run would overwrite, or that is a checkpoint or a model."""
    if not os.fspath(output_dir):
        raise OptionError("`output_dir` is empty. Name a directory.", "output_dir")
    if (file := file_on_path(output_dir)) is not None:
        raise OptionError(f"`output_dir` is '{output_dir}', but '{file}' is a file. Name a directory.", "output_dir")
    if (reason := why_unwritable(output_dir)) is not None:
        raise OptionError(f"`output_dir` is '{output_dir}', but {reason} Name another directory.", "output_dir")
    # A model that is not the package's, or a part of one: an adapter's config beside it would change how it loads
    configs = ("config.json", "scheduler_config.json", "tokenizer_config.json")
    is_of_run = "run" in read_record(Path(output_dir) / RUN_FILE)
    is_foreign = not is_of_run and not (Path(output_dir) / CARD_DATA_FILE).exists()
    keys = {key for name in configs for key in read_record(Path(output_dir) / name)}
    is_model = is_foreign and not keys.isdisjoint(("_class_name", "model_type", "tokenizer_class"))
    if is_model or (Path(output_dir) / "model_index.json").exists():
        message = f"`output_dir`, '{output_dir}', is the directory of a model. Choose another one."
        raise OptionError(message, "output_dir")
    if read_run(output_dir).get("files"):
        message = f"`output_dir`, '{output_dir}', is a checkpoint. Resume it with `resume_from_checkpoint` and the "
        message += "`output_dir` of its run, or choose another directory."
        raise OptionError(message, "output_dir")
    try:
        check_no_foreign_files(output_dir, [*published_patterns, *RUN_OUTPUTS, RUN_FILE])
    except ValueError as error:
        raise OptionError(str(error), "output_dir") from None
    for checkpoint in list_checkpoints(output_dir):
        if not (checkpoint / RUN_FILE).exists():
            message = f"'{checkpoint}' was not written by paco_trl: it has no {RUN_FILE}. Move it away."
            raise OptionError(message, "output_dir")


def mark_output_dir(output_dir: str | Path) -> None:
    """Mark a directory as a run's. After a kill, this may be the only sign that its files are the package's."""
    write_atomically(Path(output_dir) / RUN_FILE, json.dumps({"run": {}, "files": {}}), durable=False)


def check_same_run(output_dir: str | Path, identity: dict) -> None:
    """Reject the directory of another run, which can be neither resumed nor continued."""
    for checkpoint in list_checkpoints(output_dir):
        if incomplete_files(checkpoint):  # skipped on resuming
            continue
        if changes := differences(read_run(checkpoint).get("identity", identity), identity):
            lines = "\n  ".join(["", *changes])
            raise OptionError(
                f"`output_dir` has '{checkpoint}' of another run:{lines}\nChoose another directory, or delete that "
                "run with `overwrite_output_dir=True`.", "output_dir",
            )  # fmt: skip


def check_no_checkpoints(output_dir: str | Path, resumed_checkpoint: Path | None) -> None:
    """Reject a run that would overwrite the checkpoints of an earlier one without resuming it."""
    checkpoints = [checkpoint for checkpoint in list_checkpoints(output_dir) if not incomplete_files(checkpoint)]
    if checkpoints and (
        resumed_checkpoint is None or resumed_checkpoint.resolve().parent != Path(output_dir).resolve()
    ):
        names = ", ".join(checkpoint.name for checkpoint in checkpoints[::-1])
        raise OptionError(
            f"`output_dir`, '{output_dir}', has {names} of an earlier run. Resume it with "
            "`resume_from_checkpoint='auto'`, delete it with `overwrite_output_dir=True`, or choose another "
            "directory.",
            "output_dir",
        )  # fmt: skip


def check_no_model(output_dir: str | Path) -> None:
    """Reject a run that would overwrite the model of an earlier one, if no checkpoint of it is left."""
    if find_published_patterns(output_dir) is not None and all(map(incomplete_files, list_checkpoints(output_dir))):
        raise OptionError(
            f"`output_dir`, '{output_dir}', has the model of an earlier run. Overwrite it with "
            "`overwrite_output_dir=True`, or choose another directory.",
            "output_dir",
        )


def _own_checkpoints(output_dir: str | Path) -> list[Path]:
    return [checkpoint for checkpoint in list_checkpoints(output_dir) if (checkpoint / RUN_FILE).exists()]


def check_not_overwritten(output_dir: str | Path, *models: Any) -> None:
    """Reject an adapter or a model to train in a checkpoint that `overwrite_output_dir` would delete."""
    for model in models:
        for checkpoint in _own_checkpoints(output_dir) if isinstance(model, str) else ():
            if Path(model).resolve().is_relative_to(checkpoint.resolve()):
                raise ValueError(
                    f"'{model}' is in '{output_dir}', where `overwrite_output_dir` deletes all checkpoints. Name another "
                    "`output_dir`."
                )


def delete_run(output_dir: str | Path) -> list[str]:
    """
    Delete the checkpoints, curves, sheets and evaluations of an earlier run, but keep its prompt embeddings; return the
    names of the checkpoints.
    """
    checkpoints = _own_checkpoints(output_dir)
    for checkpoint in checkpoints:
        delete_checkpoint(checkpoint)
    for path in select_files(output_dir, RUN_OUTPUTS).values():
        path.unlink(missing_ok=True)
    return [checkpoint.name for checkpoint in checkpoints]
