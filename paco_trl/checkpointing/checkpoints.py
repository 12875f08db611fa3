# SPDX-License-Identifier: Apache-2.0
"""
Checkpoints, complete or absent: find them, compare them with the run that they belong to, write them. The command line looks
for them before it imports torch.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from ..hub.files import RUN_FILE, RUN_OUTPUTS, foreign_files, published_files_of, select_files
from ..utils.files import open_weights, read_record, write_atomically
from ..utils.locks import take_lock
from ..utils.text import differences


if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

POLICY_WEIGHTS = "policy.safetensors"  # what is trained; under DeepSpeed its own files hold it
EMA_WEIGHTS = "ema.safetensors"
STATE = "trainer_state.json"  # TRAINER_STATE_NAME of transformers
# A checkpoint is written in here and then renamed, so that a `checkpoint-N` is complete from the moment it exists
STAGING = ".saving"
_PATIENCE = 5.0  # seconds, with other processes that restore a checkpoint

_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


def _warn(message: str) -> None:
    """Log a warning once, in the main process."""
    from accelerate.logging import get_logger  # takes seconds

    get_logger(__name__).warning(message)


def clear_staging(output_dir: str | Path) -> None:
    """Delete the staging folders of a run that was killed while it saved. Only the run that writes there may call it."""
    folder = Path(output_dir) / STAGING
    with suppress(OSError):
        _restore_replaced(Path(output_dir))
    if replaced := _replaced(Path(output_dir)):
        names = ", ".join(path.name for path in replaced)
        _warn(
            f"'{folder}' keeps {names} of a run that was stopped: something incomplete is in its place. Move that away."
        )
    elif folder.is_dir():
        if unfinished := ", ".join(sorted(path.name for path in folder.iterdir())):
            _warn(f"An earlier run was stopped while saving {unfinished}: the unfinished files are deleted.")
        shutil.rmtree(folder)


def publish(staged: Path, output_dir: str | Path, run: dict) -> Path:
    """Publish a complete checkpoint at once, with the list of its files and the `run` that it belongs to in `run.json`."""
    paths = [path for path in sorted(staged.rglob("*")) if path.is_file()]
    files = {str(path.relative_to(staged)): path.stat().st_size for path in paths}
    (staged / RUN_FILE).write_text(json.dumps({"run": run, "files": files}, indent=2), encoding="utf-8")
    open_weights(paths)
    # To the disk first: after a power cut a renamed directory may otherwise contain empty files
    _sync(*staged.rglob("*"), staged)
    target = Path(output_dir) / staged.name
    replaced = staged.with_name(f"replaced-{staged.name}")
    if target.exists():  # of this run, which was resumed from an earlier checkpoint that it can resume from again
        for path in _files_of_user(target):
            (staged / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(target / path, staged / path, follow_symlinks=False)
        os.replace(target, replaced)
    os.replace(staged, target)
    shutil.rmtree(staged.parent, ignore_errors=True)  # the checkpoint is complete
    _sync(Path(output_dir))  # older checkpoints may be deleted next
    return target


def _replaced(folder: Path) -> dict[Path, Path]:
    """Find checkpoints that a kill between the two renames of `publish` has left in the staging folder alone."""
    replaced = {folder / path.name.removeprefix("replaced-"): path for path in (folder / STAGING).glob("replaced-*")}
    return {checkpoint: path for checkpoint, path in replaced.items() if incomplete_files(checkpoint)}


def _restore_replaced(folder: Path) -> None:
    for checkpoint, replaced in _replaced(folder).items():
        staged = replaced.with_name(checkpoint.name)
        os.replace(replaced if incomplete_files(staged) else staged, checkpoint)
        shutil.rmtree(replaced, ignore_errors=True)


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def incomplete_files(checkpoint: str | Path) -> list[str]:
    """List the files of a checkpoint that are missing or truncated: `run.json` if the list of files itself is missing."""
    if not (run := read_run(checkpoint)):
        return [RUN_FILE]
    # A card may be edited, and evaluations add their results to it
    needed = {name: Path(checkpoint) / name for name in run["files"] if not name.endswith((".md", ".png"))}
    return [n for n, path in needed.items() if not path.is_file() or path.stat().st_size < run["files"][n]]


def _files_of_user(checkpoint: Path) -> list[Path]:
    """List the files in a checkpoint's directory that are not its own, as paths in it."""
    written = {*read_run(checkpoint).get("files", ()), RUN_FILE}
    paths = (path.relative_to(checkpoint) for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir())
    return [path for path in paths if str(path) not in written]


def _delete_checkpoint(checkpoint: Path) -> None:
    """Delete a checkpoint. Files of the user stay, and with them the record that marks it as a checkpoint."""
    kept = {checkpoint / path for path in [*_files_of_user(checkpoint), Path(RUN_FILE)]}
    if len(kept) > 1:
        for path in {path for path in checkpoint.rglob("*") if not path.is_dir()} - kept:
            path.unlink(missing_ok=True)
        return
    # Aside first: half of one, after a kill, would not be known as the package's own
    trash = checkpoint.parent / STAGING / f"old-{checkpoint.name}"
    trash.parent.mkdir(exist_ok=True)
    os.replace(checkpoint, trash)
    shutil.rmtree(trash.parent, ignore_errors=True)


def checkpoints_of(output_dir: str | Path) -> list[Path]:
    """List the checkpoints in an output directory, latest first; complete or not."""
    folder = Path(output_dir)
    lock = FileLock(folder / ".lock")  # a run that has it is between the two renames
    if _replaced(folder) and take_lock(lock, "checkpoints", folder, _PATIENCE) is None:
        with suppress(OSError):  # read only, or restored by another process
            _restore_replaced(folder)
        lock.release()
    paths = [path for path in folder.iterdir() if _CHECKPOINT.match(path.name)] if folder.is_dir() else []
    return sorted((path for path in paths if path.is_dir()), key=lambda path: -int(path.name.split("-")[1]))


def find_checkpoint(output_dir: str | Path, resume_from_checkpoint: str | bool | None) -> Path | None:
    """Find the complete checkpoint to resume from: a directory, with `True` the latest, with `"auto"` also none."""
    # The command line gives "True" as text
    requested = {"true": True, "false": None}.get(str(resume_from_checkpoint).lower(), resume_from_checkpoint)
    # The launcher (`--max_restarts`) has started the processes again after one has failed
    if resume_from_checkpoint is None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        requested = "auto"
    if not requested:
        return None
    is_named = requested is not True and requested != "auto"
    if is_named and not Path(str(requested)).exists():
        checkpoints_of(Path(str(requested)).parent)  # puts back what a kill has left aside
    for checkpoint in [Path(str(requested))] if is_named else checkpoints_of(output_dir):
        if not (broken := incomplete_files(checkpoint)):
            return checkpoint
        reason = f"{broken[0]} is missing or truncated."
        if is_named:
            what = f"The checkpoint '{checkpoint}' is incomplete: {reason}"
            what = what if checkpoint.is_dir() else f"There is no checkpoint '{checkpoint}'."
            raise ValueError(f"{what} Pass another, or `resume_from_checkpoint=True` for the latest complete one.")
        _warn(f"The checkpoint '{checkpoint}' is skipped: {reason}")
    if requested == "auto":
        return None
    raise ValueError(
        f"`resume_from_checkpoint` is True, but '{output_dir}' has no complete checkpoint. Start with 'auto' or "
        "without it, or pass the directory of a checkpoint."
    )


def how_to_resume(output_dir: str | Path) -> str:
    """Say how to resume a run that has stopped, if anything is saved."""
    complete = [checkpoint for checkpoint in checkpoints_of(output_dir) if not incomplete_files(checkpoint)]
    if not complete:
        return "Nothing is saved."
    return f"Rerun with `--resume_from_checkpoint auto` to resume from '{complete[0]}'."


def read_run(checkpoint: str | Path) -> dict:
    """Read which run a checkpoint belongs to, and the sizes of its `files`; empty if this is not recorded."""
    content = read_record(Path(checkpoint) / RUN_FILE)
    return {**content["run"], "files": content["files"]} if {"run", "files"} <= content.keys() else {}


def check_resumed_run(
    checkpoint: Path, identity: dict, settings: dict, num_processes: int, is_deepspeed: bool
) -> None:
    """Check that a checkpoint has the same `identity`, and warn of other `settings`, before any model is loaded."""
    saved = read_run(checkpoint)
    if "settings" not in saved:
        raise ValueError(f"'{checkpoint}' is of an older version or another trainer. Start anew from its adapter.")
    before, key = saved["num_processes"], "processes of DeepSpeed"  # over which the optimizer's state is divided
    then = saved["identity"] | {key: before if saved["is_deepspeed"] else None}
    check_identity(checkpoint, then, identity | {key: num_processes if is_deepspeed else None})
    if before != num_processes:
        result = ": the images are the same, but sums are rounded differently." if "is_round_pending" in saved else "."
        if saved.get("is_round_pending"):
            result = ". It is in the middle of a round, whose images are stored per process: it is generated again."
        _warn(f"'{checkpoint}' was made by {before} processes, now {num_processes}{result}")
    if different := differences(saved["settings"], settings):
        lines = "\n  ".join(["", *different])
        _warn(f"'{checkpoint}' is resumed with other settings, so this is another run:{lines}")


def check_identity(checkpoint: Path, saved: dict, identity: dict) -> None:
    """Refuse to resume a checkpoint of another run."""
    if different := differences(saved, identity):
        lines = "\n  ".join(["", *different])
        raise ValueError(
            f"'{checkpoint}' cannot be resumed: it is of another run.{lines}\nGive it the same (the optimizer's "
            "settings are restored), or start anew from its adapter."
        )


def check_output_dir(output_dir: str | Path, published_files: Iterable[str]) -> None:
    """Refuse a directory with files of the user's that a run would overwrite or delete."""
    if message := foreign_files(output_dir, [*published_files, *RUN_OUTPUTS, RUN_FILE]):
        raise ValueError(message)
    for checkpoint in checkpoints_of(output_dir):
        if not (checkpoint / RUN_FILE).exists():
            raise ValueError(f"'{checkpoint}' was not written by paco_trl: it has no {RUN_FILE}. Move it away.")


def begin_output_dir(output_dir: str | Path) -> None:
    """Note that a run writes in a directory. After a kill this may be the only sign that its files are the package's."""
    write_atomically(Path(output_dir) / RUN_FILE, json.dumps({"run": {}, "files": {}}), durable=False)


def check_same_run(output_dir: str | Path, identity: dict) -> None:
    """Refuse the directory of another run, which can be neither resumed nor continued."""
    for checkpoint in checkpoints_of(output_dir):
        if incomplete_files(checkpoint):  # skipped when the run is resumed
            continue
        if different := differences(read_run(checkpoint).get("identity", identity), identity):
            lines = "\n  ".join(["", *different])
            raise ValueError(
                f"`output_dir` has '{checkpoint}' of another run:{lines}\nChoose another directory, or delete that "
                "run with `overwrite_output_dir=True`."
            )


def check_rerun(output_dir: str | Path, resumed: Path | None) -> None:
    """Refuse to write over the checkpoints of an interrupted run by one that does not resume it."""
    checkpoints = [checkpoint for checkpoint in checkpoints_of(output_dir) if not incomplete_files(checkpoint)]
    if checkpoints and (resumed is None or resumed.resolve().parent != Path(output_dir).resolve()):
        names = ", ".join(checkpoint.name for checkpoint in checkpoints[::-1])
        raise ValueError(
            f"`output_dir`, '{output_dir}', has {names} of an earlier run. Resume it with "
            "`resume_from_checkpoint='auto'`, delete it with `overwrite_output_dir=True`, or choose another."
        )


def delete_run(output_dir: str | Path) -> None:
    """Delete the checkpoints, curves, sheets and evaluations of an earlier run; its encoded prompts can be used again."""
    for checkpoint in checkpoints_of(output_dir):
        if (checkpoint / RUN_FILE).exists():
            _delete_checkpoint(checkpoint)
    for path in select_files(output_dir, RUN_OUTPUTS).values():
        path.unlink(missing_ok=True)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. It stops a run."""


def write_checkpoint(
    output_dir: str | Path,
    step: int,
    accelerator: "Accelerator",
    should_save: bool,
    run: dict,
    *parts: Callable[[Path], Any],
) -> None:
    """Write the parts of a checkpoint aside, and rename it when all ranks are done, or raise on all. Collective."""
    from accelerate.utils import gather_object
    from safetensors import SafetensorError

    folder = Path(output_dir) / STAGING / f"checkpoint-{step}"

    def begin(folder: Path) -> None:
        if should_save:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)

    def end(folder: Path) -> None:
        if should_save:
            publish(folder, output_dir, run)

    for part in (begin, *parts, end):
        failure = None
        try:
            part(folder)
        # A full disk, to Python, to torch and to safetensors
        except (OSError, RuntimeError, SafetensorError) as error:
            failure = error
        failures = gather_object([f"process {accelerator.process_index}: {failure!r}"] if failure else [])
        if failures:
            if should_save:
                with suppress(OSError):
                    _restore_replaced(Path(output_dir))
                if not _replaced(Path(output_dir)):  # else it has the only complete copies
                    shutil.rmtree(folder.parent, ignore_errors=True)  # frees its space
            raise CheckpointError(
                f"The checkpoint of step {step} could not be written to '{output_dir}' ({'; '.join(failures)}). Make "
                "room and resume (`resume_from_checkpoint=True`)."
            ) from failure


def drop_old_checkpoints(output_dir: str, limit: int | None, best: str | None) -> None:
    """Delete checkpoints beyond a limit, oldest first, but never the best one and the one just written."""
    checkpoints = [checkpoint for checkpoint in checkpoints_of(output_dir)[::-1] if (checkpoint / RUN_FILE).exists()]
    complete = [checkpoint for checkpoint in checkpoints if not incomplete_files(checkpoint)]
    if not limit or not complete:
        return
    # Of a run that was resumed from an earlier checkpoint, later ones are the oldest. A copied run has other times
    written = max(complete, key=lambda checkpoint: checkpoint.stat().st_mtime)
    kept = [written, *(checkpoint for checkpoint in complete if best is not None and checkpoint == Path(best))]
    later = complete.index(written) + 1
    kept = list(dict.fromkeys([*kept, *complete[:later][::-1], *complete[later:]]))[: max(limit, len({*kept}))]
    for checkpoint in checkpoints:
        if checkpoint not in kept:
            _delete_checkpoint(checkpoint)


def round_file(checkpoint: Path, process_index: int) -> Path:
    """Return the file with a process's samples of an unfinished round."""
    return checkpoint / f"rollout_{process_index}.pt"


def load_round(checkpoint: Path, process_index: int, device: "torch.device", is_offloaded: bool) -> dict[str, Any]:
    """Load the steps, advantages and weights of an unfinished round: tensors and numbers, no code."""
    import torch

    # To the device at once, so that tensors shared by the images of a prompt stay shared. In several processes on CPU the
    # device is called "cpu:0", to which torch does not load
    location = "cpu" if is_offloaded or device.type == "cpu" else device
    return torch.load(round_file(checkpoint, process_index), map_location=location, weights_only=True)


def find_saved_model(folder: Path) -> Path:
    """Find the newest model of an output directory: itself, or its latest complete checkpoint if that was saved later."""
    models = [checkpoint for checkpoint in checkpoints_of(folder) if _is_complete(checkpoint)][:1]
    models = [*[folder] * _is_complete(folder), *models]
    if not models:
        raise ValueError(
            f"'{folder}' has no saved model, or none that is complete. Give the directory of a run or a checkpoint."
        )
    return max(models, key=_saved_at)  # the directory itself if it was saved at the same step


def _is_complete(folder: Path) -> bool:
    return published_files_of(folder) is not None and incomplete_files(folder) in ([], [RUN_FILE])


def _saved_at(folder: Path) -> tuple[str, int]:
    # As recorded: a copy has other dates
    from ..hub.settings import load_settings

    card = load_settings(folder)
    return ("", 0) if card is None else (card.saved_at or "", card.settings.get("optimizer_steps", 0))
