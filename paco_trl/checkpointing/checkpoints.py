# SPDX-License-Identifier: Apache-2.0
"""
Checkpoints, which are either complete or absent: writing, finding and deleting them, and comparing them with a run.

The command line uses this module before it imports torch.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from ..hub.files import PIPELINE_ADAPTER, RUN_FILE, find_published_patterns
from ..utils.differences import differences
from ..utils.errors import OptionError
from ..utils.files import apply_umask, read_record
from ..utils.locks import LockedError, take_lock


if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

POLICY_WEIGHTS = "policy.safetensors"  # trained weights, except under DeepSpeed, which has its own files
EMA_WEIGHTS = "ema.safetensors"
TRAINER_STATE_FILE = "trainer_state.json"  # TRAINER_STATE_NAME of transformers
# Checkpoints are written in this folder and then renamed, so that an existing `checkpoint-N` is complete
STAGING = ".saving"
_SHARDED_BY = "processes of DeepSpeed"  # part of a run's identity, since they shard the optimizer's state
# In the errors of Python, torch and safetensors for a full disk
_DISK_FULL = ("No space left", "Disk quota", "PytorchStreamWriter", "unexpected pos", "StorageFull")
_LOCK_TIMEOUT = 5.0  # seconds to wait for other processes that restore a checkpoint

_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


def _warn(message: str) -> None:
    """Log a warning once, in the main process."""
    from ..utils.logs import get_logger  # a slow import

    get_logger(__name__).warning(message)


def incomplete_files(checkpoint: str | Path) -> list[str]:
    """List the missing or truncated files of a checkpoint, or `run.json` if their list itself is missing."""
    if not (run := read_run(checkpoint)):
        return [RUN_FILE]
    # Not the card, which users and evaluations may edit
    paths = {name: Path(checkpoint) / name for name in run["files"] if not name.endswith((".md", ".png"))}
    return [n for n, path in paths.items() if not path.is_file() or path.stat().st_size < run["files"][n]]


def _user_files(checkpoint: Path) -> list[Path]:
    """List the files in a checkpoint's directory that paco_trl did not write, as relative paths."""
    own_files = {*read_run(checkpoint).get("files", ()), RUN_FILE}
    paths = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir())
    return [path for path in paths if str(path) not in own_files]


# ---- Writing: staged, replaced, restored ----

# A checkpoint is written to `.saving/checkpoint-N` (staged) and renamed. One that it replaces is first renamed to
# `.saving/replaced-checkpoint-N`. After a kill between the two renames, there is no complete `checkpoint-N`: whoever
# reads next puts the staged one in its place if that is complete, else the replaced one (restored).


def commit_checkpoint(staging_dir: Path, output_dir: str | Path, run: dict) -> Path:
    """Publish a complete checkpoint atomically, with its `run` and the list of its files in `run.json`."""
    paths = [path for path in sorted(staging_dir.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(staging_dir)): path.stat().st_size for path in paths}
    (staging_dir / RUN_FILE).write_text(json.dumps({"run": run, "files": files}, indent=2), encoding="utf-8")
    apply_umask(paths)
    # Flush to the disk first, or a renamed directory may contain empty files after a power failure
    _sync(*staging_dir.rglob("*"), staging_dir)
    target = Path(output_dir) / staging_dir.name
    replaced_dir = staging_dir.with_name(f"replaced-{staging_dir.name}")
    if target.exists():  # if this run was resumed from an earlier checkpoint, which is still there
        for path in _user_files(target):
            (staging_dir / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(target / path, staging_dir / path, follow_symlinks=False)
        os.replace(target, replaced_dir)
    os.replace(staging_dir, target)
    _delete_staged(replaced_dir)
    _sync(Path(output_dir))  # before older checkpoints are deleted
    return target


def _delete_staged(path: Path) -> None:
    """Delete a folder in the staging folder, which may keep the only copy of another checkpoint."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # not empty
        path.parent.rmdir()


def _find_replaced(folder: Path) -> dict[Path, Path]:
    """Find checkpoints only in the staging folder, after a kill between the two renames of `commit_checkpoint`."""
    paths = {folder / path.name.removeprefix("replaced-"): path for path in (folder / STAGING).glob("replaced-*")}
    return {checkpoint: path for checkpoint, path in paths.items() if incomplete_files(checkpoint)}


def _restore_replaced(folder: Path) -> None:
    for checkpoint, replaced_dir in _find_replaced(folder).items():
        staging_dir = replaced_dir.with_name(checkpoint.name)
        os.replace(replaced_dir if incomplete_files(staging_dir) else staging_dir, checkpoint)
        shutil.rmtree(replaced_dir, ignore_errors=True)


def _restore_interrupted(folder: Path) -> None:
    """Put back a checkpoint that a killed run was replacing, unless a run is replacing it now."""
    lock = FileLock(folder / ".lock")  # held by a run that may be between the two renames
    if _find_replaced(folder):
        with suppress(LockedError, OSError):  # read-only, or restored by another process
            take_lock(lock, "checkpoints", folder, _LOCK_TIMEOUT)
            _restore_replaced(folder)
        lock.release()


def clear_staging(output_dir: str | Path) -> None:
    """Delete the staging folders of a run killed while saving. Only call it from the run that owns `output_dir`."""
    folder = Path(output_dir) / STAGING
    with suppress(OSError):
        _restore_replaced(Path(output_dir))
    if replaced := _find_replaced(Path(output_dir)):
        names = ", ".join(path.name for path in replaced)
        _warn(
            f"'{folder}' keeps {names} of an interrupted run, because something incomplete is in its place. Move that "
            "away."
        )
    elif folder.is_dir():
        if unfinished := ", ".join(sorted(path.name for path in folder.iterdir())):
            _warn(f"An earlier run was stopped while saving {unfinished}. Deleting the unfinished files.")
        shutil.rmtree(folder)


def delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint, but keep files of the user, and with them the record that marks it as a checkpoint."""
    paths_to_keep = {checkpoint / path for path in [*_user_files(checkpoint), Path(RUN_FILE)]}
    if len(paths_to_keep) > 1:
        for path in {path for path in checkpoint.rglob("*") if not path.is_dir()} - paths_to_keep:
            path.unlink(missing_ok=True)
        return
    # Move it first: after a kill, half a checkpoint would not be recognized as the package's own
    trash = checkpoint.parent / STAGING / f"old-{checkpoint.name}"
    trash.parent.mkdir(exist_ok=True)
    os.replace(checkpoint, trash)
    _delete_staged(trash)


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


# ---- Finding ----


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """
    List the checkpoints in an output directory, complete or not, latest first.

    One that a killed run was replacing is put back before, so that no reader takes it for lost.
    """
    folder = Path(output_dir)
    _restore_interrupted(folder)
    paths = [path for path in folder.iterdir() if _CHECKPOINT.match(path.name)] if folder.is_dir() else []
    return sorted((path for path in paths if path.is_dir()), key=lambda path: -int(path.name.split("-")[1]))


def find_checkpoint(output_dir: str | Path, resume_from_checkpoint: str | bool | None) -> Path | None:
    """Find the complete checkpoint to resume: a directory, the latest (`True`), or the latest if any (`"auto"`)."""
    # The command line passes "True" as text
    requested = {"true": True, "false": None}.get(str(resume_from_checkpoint).lower(), resume_from_checkpoint)
    # The launcher (`--max_restarts`) restarted the processes after one failed
    if resume_from_checkpoint is None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        requested = "auto"
    if not requested:
        return None
    is_path = requested is not True and requested != "auto"
    if is_path and not Path(str(requested)).exists():
        _restore_interrupted(Path(str(requested)).parent)
    if is_path and (of_run := list_checkpoints(str(requested))):
        message = f"'{requested}' is the directory of a run. Name one of its checkpoints, such as '{of_run[0]}'."
        raise OptionError(message, "resume_from_checkpoint")
    for checkpoint in [Path(str(requested))] if is_path else list_checkpoints(output_dir):
        if not (files := incomplete_files(checkpoint)):
            return checkpoint
        reason = f"{files[0]} is missing or truncated."
        if is_path:
            message = f"The checkpoint '{checkpoint}' is incomplete: {reason}"
            message = message if checkpoint.is_dir() else f"There is no checkpoint '{checkpoint}'."
            message += " Pass another, or `resume_from_checkpoint=True` for the latest complete one."
            raise OptionError(message, "resume_from_checkpoint")
        _warn(f"The checkpoint '{checkpoint}' is skipped: {reason}")
    if requested == "auto":
        return None
    raise OptionError(
        f"`resume_from_checkpoint` is True, but '{output_dir}' has no complete checkpoint. Use 'auto', leave "
        "it out, or pass the directory of a checkpoint.", "resume_from_checkpoint",
    )  # fmt: skip


def how_to_resume(output_dir: str | Path) -> str:
    """Return advice on how to resume an interrupted run."""
    complete = [checkpoint for checkpoint in list_checkpoints(output_dir) if not incomplete_files(checkpoint)]
    if not complete:
        return "Nothing is saved."
    return f"Rerun with `--resume_from_checkpoint auto` to resume from '{complete[0]}'."


def read_run(checkpoint: str | Path) -> dict:
    """Read the run of a checkpoint and the sizes of its `files`, an empty dictionary if there is no record."""
    content = read_record(Path(checkpoint) / RUN_FILE)
    return {**content["run"], "files": content["files"]} if {"run", "files"} <= content.keys() else {}


def check_resumed_run(
    checkpoint: Path, identity: dict, settings: dict, num_processes: int, is_deepspeed: bool
) -> None:
    """Check that a checkpoint has the same `identity`, and warn about other `settings`, before any model is loaded."""
    saved_run = read_run(checkpoint)
    if "settings" not in saved_run:
        raise ValueError(
            f"'{checkpoint}' is from an older version or another trainer. Start {_new_run_from(checkpoint)}."
        )
    old_num_processes = saved_run["num_processes"]
    old_identity = saved_run["identity"] | {_SHARDED_BY: old_num_processes if saved_run["is_deepspeed"] else None}
    check_identity(checkpoint, old_identity, identity | {_SHARDED_BY: num_processes if is_deepspeed else None})
    if old_num_processes != num_processes:
        if "is_round_pending" not in saved_run:  # a judge's
            result = "."
        elif saved_run["is_round_pending"]:
            result = (
                ". It is in the middle of a round, whose images are stored per process: the round is generated again."
            )
        else:
            result = ": the images are the same, but sums are rounded differently."
        _warn(f"'{checkpoint}' was saved by {old_num_processes} processes, now there are {num_processes}{result}")
    if changes := differences(saved_run["settings"], settings):
        lines = "\n  ".join(["", *changes])
        _warn(f"'{checkpoint}' is resumed with other settings for the steps that are left, if any:{lines}")


def check_identity(checkpoint: Path, saved_run: dict, identity: dict) -> None:
    """Reject a checkpoint of another run."""
    if changes := differences(saved_run, identity):
        lines = "\n  ".join(["", *changes])
        raise ValueError(
            f"'{checkpoint}' cannot be resumed: it is of another run.{lines}\nPass what that run had (the optimizer's "
            f"settings are restored), or start {_new_run_from(checkpoint)}."
        )


def _new_run_from(checkpoint: Path) -> str:
    """Say how to start a new run from the adapter of a checkpoint; a judge's is only continued in Python."""
    is_of_pipeline = find_published_patterns(checkpoint) is PIPELINE_ADAPTER
    how = f" (`--adapter {checkpoint}`, in Python `peft_config`)" if is_of_pipeline else ""
    return f"a new run from its adapter{how} in another `output_dir`"


class CheckpointError(RuntimeError):
    """Stops a run: a checkpoint could not be written."""


def write_checkpoint(
    output_dir: str | Path,
    step: int,
    accelerator: "Accelerator",
    should_save: bool,
    run: dict,
    *writers: Callable[[Path], Any],
) -> None:
    """Write a checkpoint to a staging folder, and publish it once all ranks are done, or raise on all. Collective."""
    from accelerate.utils import gather_object

    folder = Path(output_dir) / STAGING / f"checkpoint-{step}"

    def begin(folder: Path) -> None:
        if should_save:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def end(folder: Path) -> None:
        if should_save:
            commit_checkpoint(folder, output_dir, run)

    for writer in (begin, *writers, end):
        failure = None
        try:
            writer(folder)
        except Exception as error:  # of any type: the other processes wait below
            failure = error
        failures = gather_object([f"process {accelerator.process_index}: {failure!r}"] if failure else [])
        if failures:
            if should_save:
                with suppress(OSError):
                    _restore_replaced(Path(output_dir))
                if not _find_replaced(Path(output_dir)):  # otherwise it has the only complete copies
                    _delete_staged(folder)  # to free its space
            is_disk_full = any(words in failure for failure in failures for words in _DISK_FULL)
            advice = "Free disk space and resume" if is_disk_full else "Mend the cause and resume"
            raise CheckpointError(
                f"The checkpoint of step {step} could not be written to '{output_dir}' ({'; '.join(failures)}). "
                f"{advice} (`resume_from_checkpoint=True`)."
            ) from failure


def rotate_checkpoints(output_dir: str, limit: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond a limit, but never the best one or the one just written."""
    checkpoints = [checkpoint for checkpoint in list_checkpoints(output_dir)[::-1] if (checkpoint / RUN_FILE).exists()]
    complete = [checkpoint for checkpoint in checkpoints if not incomplete_files(checkpoint)]
    if not limit or not complete:
        return
    # If the run was resumed from an earlier checkpoint, checkpoints of later steps are older, so they go first.
    # File times only tell which one is newest, since a copied run has other times
    newest = max(complete, key=lambda checkpoint: checkpoint.stat().st_mtime)
    protected = [newest, *(checkpoint for checkpoint in complete if best is not None and checkpoint == Path(best))]
    num_earlier = complete.index(newest) + 1
    by_age = list(dict.fromkeys([*protected, *complete[:num_earlier][::-1], *complete[num_earlier:]]))
    remaining = by_age[: max(limit, len({*protected}))]
    for checkpoint in checkpoints:
        if checkpoint not in remaining:
            delete_checkpoint(checkpoint)


def round_file(checkpoint: Path, process_index: int) -> Path:
    """Return the file of a process's samples of an unfinished round."""
    return checkpoint / f"rollout_{process_index}.pt"


def load_round(checkpoint: Path, process_index: int, device: "torch.device", is_offloaded: bool) -> dict[str, Any]:
    """Load the steps, advantages and weights of an unfinished round, as tensors and numbers without code."""
    import torch

    # Directly to the device, so that images of a prompt keep sharing tensors. Several processes on the CPU have the
    # device "cpu:0", which `torch.load` rejects
    location = "cpu" if is_offloaded or device.type == "cpu" else device
    return torch.load(round_file(checkpoint, process_index), map_location=location, weights_only=True)


def find_saved_model(folder: Path) -> Path:
    """Find the newest model of an output directory: the directory itself, or its latest complete checkpoint."""
    models = [checkpoint for checkpoint in list_checkpoints(folder) if _is_complete(checkpoint)][:1]
    models = [*[folder] * _is_complete(folder), *models]
    if not models:
        raise ValueError(f"'{folder}' has no complete saved model. Pass the directory of a run or a checkpoint.")
    return max(models, key=_saved_at)  # on a tie, the directory itself


def _is_complete(folder: Path) -> bool:
    return find_published_patterns(folder) is not None and incomplete_files(folder) in ([], [RUN_FILE])


def _saved_at(folder: Path) -> tuple[str, int]:
    # From the record, since copies have other file times
    from ..hub.card_data import load_card_data

    card = load_card_data(folder)
    return ("", 0) if card is None else (card.saved_at or "", card.settings.get("optimizer_steps", 0))
