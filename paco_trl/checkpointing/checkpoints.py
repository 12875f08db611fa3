# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are whole or not there, and that know which run they belong to."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.logging import get_logger
from datasets import Dataset


if TYPE_CHECKING:
    from ..data import SourceImages

logger = get_logger(__name__)

RUN_FILE = "run.json"
# A checkpoint is written in here and then renamed, so that a `checkpoint-N` is complete from the moment it exists
STAGING = ".saving"

_REPLACED = "replaced-"

_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


def dataset_digest(dataset: Dataset, sources: "SourceImages | None" = None) -> str:
    """
    A short digest of the prompts and sizes of a dataset: what decides which images a run draws.

    Args:
        dataset ([`~datasets.Dataset`]):
            Image-set or editing prompts.
        sources ([`~paco_trl.data.SourceImages`], *optional*):
            Its source images, of which the sizes and the lengths of the files are taken: reading all files of a large
            dataset takes minutes.

    Returns:
        `str`.
    """
    digest = hashlib.sha256()
    for column in ("prompt", "rows", "cols", "height", "width"):
        if column in dataset.column_names:
            digest.update(json.dumps([column, list(dataset[column])]).encode())
    if sources is not None:
        rows = range(len(dataset))
        digest.update(json.dumps([(sources.sizes(row), sources.lengths(row)) for row in rows]).encode())
    return digest.hexdigest()[:16]


def stage_folder(output_dir: str | Path, step: int) -> Path:
    """
    Where the checkpoint of a step is written before it is complete.

    Args:
        output_dir (`str` or `Path`):
            Output folder.
        step (`int`):
            Optimizer step.

    Returns:
        `Path`.
    """
    return Path(output_dir) / STAGING / f"checkpoint-{step}"


def recover_replaced(output_dir: str | Path) -> None:
    """
    Puts back a checkpoint that a run was replacing by a newer one of the same step when it was killed.

    Args:
        output_dir (`str` or `Path`):
            Output folder.
    """
    for replaced in (Path(output_dir) / STAGING).glob(f"{_REPLACED}checkpoint-*"):
        target = Path(output_dir) / replaced.name.removeprefix(_REPLACED)
        try:
            if not target.exists():
                os.replace(replaced, target)
        except FileNotFoundError:
            pass  # another process was faster


def clear_staging(output_dir: str | Path) -> None:
    """
    Deletes what a run that was killed while saving has left behind.

    Args:
        output_dir (`str` or `Path`):
            Output folder.
    """
    recover_replaced(output_dir)
    folder = Path(output_dir) / STAGING
    if folder.is_dir():
        unfinished = ", ".join(sorted(path.name for path in folder.iterdir()))
        if unfinished:
            logger.warning(
                f"An earlier run was stopped while it saved {unfinished}: the unfinished files are deleted."
            )
        shutil.rmtree(folder)


def publish(staged: Path, output_dir: str | Path, run: dict) -> Path:
    """
    Makes a completely written checkpoint visible, at once.

    Args:
        staged (`Path`):
            Folder from [`stage_folder`], with everything in it.
        output_dir (`str` or `Path`):
            Output folder.
        run (`dict`):
            What the checkpoint belongs to; saved with the list of files in `run.json`.

    Returns:
        `Path`: the checkpoint.
    """
    files = {
        str(path.relative_to(staged)): path.stat().st_size for path in sorted(staged.rglob("*")) if path.is_file()
    }
    with open(staged / RUN_FILE, "w", encoding="utf-8") as file:
        json.dump({"run": run, "files": files}, file, indent=2)
    # Onto the disk first: after a power cut a renamed folder may otherwise hold empty files
    for path in [*staged.rglob("*"), staged]:
        _sync(path)
    target = Path(output_dir) / staged.name
    if target.exists():  # of the same run, which was continued from an earlier checkpoint
        replaced = staged.with_name(f"{_REPLACED}{staged.name}")
        os.replace(target, replaced)
        try:
            os.replace(staged, target)
        except OSError:
            os.replace(replaced, target)
            raise
        shutil.rmtree(replaced)
    else:
        os.replace(staged, target)
    _sync(Path(output_dir))  # older checkpoints may be deleted next
    return target


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def incomplete_files(checkpoint: str | Path) -> list[str]:
    """
    Files of a checkpoint that are missing or cut short.

    Args:
        checkpoint (`str` or `Path`):
            Folder.

    Returns:
        `list[str]`: with `run.json` alone when the list of files itself is missing.
    """
    checkpoint = Path(checkpoint)
    try:
        files = json.loads((checkpoint / RUN_FILE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError):
        return [RUN_FILE]
    return [
        name
        for name, size in files.items()
        if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size != size
    ]


def checkpoints_of(output_dir: str | Path) -> list[Path]:
    """
    Checkpoints in an output folder, latest first; complete or not.

    Args:
        output_dir (`str` or `Path`):
            Output folder; need not exist.

    Returns:
        `list[Path]`.
    """
    folder = Path(output_dir)
    found = [path for path in folder.iterdir() if _CHECKPOINT.match(path.name)] if folder.is_dir() else []
    return sorted((path for path in found if path.is_dir()), key=lambda path: -int(path.name.split("-")[1]))


def find_checkpoint(output_dir: str | Path, resume_from_checkpoint: str | bool | None) -> Path | None:
    """
    The checkpoint to continue from.

    Args:
        output_dir (`str` or `Path`):
            Output folder.
        resume_from_checkpoint (`str` or `bool`, *optional*):
            A folder, or `True` for the latest complete checkpoint of the output folder.

    Returns:
        `Path` or `None`.

    Raises:
        ValueError: there is no such checkpoint, or it is incomplete.
    """
    # The command line gives "True" as text
    if isinstance(resume_from_checkpoint, str) and resume_from_checkpoint.lower() in ("true", "false"):
        resume_from_checkpoint = resume_from_checkpoint.lower() == "true"
    if not resume_from_checkpoint:
        return None
    recover_replaced(output_dir)
    if resume_from_checkpoint is not True:
        checkpoint = Path(resume_from_checkpoint)
        if not checkpoint.is_dir():
            raise ValueError(f"`resume_from_checkpoint` is '{checkpoint}', which is no folder.")
        broken = incomplete_files(checkpoint)
        if broken:
            raise ValueError(
                f"The checkpoint '{checkpoint}' is incomplete: {_name_some(broken)} missing or cut short. Continue from "
                "another one, or pass `resume_from_checkpoint=True` for the latest complete one of the output folder."
            )
        return checkpoint
    for checkpoint in checkpoints_of(output_dir):
        broken = incomplete_files(checkpoint)
        if not broken:
            return checkpoint
        logger.warning(f"The checkpoint '{checkpoint}' is skipped: {_name_some(broken)} missing or cut short.")
    raise ValueError(
        f"`resume_from_checkpoint` is True, but '{output_dir}' has no complete checkpoint. Start without it, or pass "
        "the checkpoint's folder."
    )


def read_run(checkpoint: str | Path) -> dict | None:
    """
    What a checkpoint belongs to.

    Args:
        checkpoint (`str` or `Path`):
            Folder.

    Returns:
        `dict` or `None` when it does not say.
    """
    try:
        return json.loads((Path(checkpoint) / RUN_FILE).read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError):
        return None


def differences(saved: dict, now: dict) -> list[str]:
    """
    What differs between two runs, a line each.

    Args:
        saved (`dict`):
            Of the checkpoint.
        now (`dict`):
            Of the run that is beginning.

    Returns:
        `list[str]`.
    """
    names = dict.fromkeys([*saved, *now])  # in order
    return [
        f"{name}: {saved.get(name)!r}, now {now.get(name)!r}" for name in names if saved.get(name) != now.get(name)
    ]


def check_resumed_run(checkpoint: Path, identity: dict, course: dict, num_processes: int, is_deepspeed: bool) -> None:
    """
    Checks that a checkpoint can be continued by this run, before any model is loaded.

    Args:
        checkpoint (`Path`):
            Checkpoint.
        identity (`dict`):
            What must be the same: base model, adapter, dataset.
        course (`dict`):
            What decides how the run goes on: another value is allowed, but not exact, and is said.
        num_processes (`int`):
            Processes of this run.
        is_deepspeed (`bool`):
            Whether DeepSpeed divides the optimizer's state.

    Raises:
        ValueError: the checkpoint is another run's, or cannot be continued with this number of processes.
    """
    saved = read_run(checkpoint) or {}
    different = differences(saved.get("identity", {}), identity)
    if different:
        raise ValueError(
            f"'{checkpoint}' cannot be continued: it was made with other settings.\n  "
            + "\n  ".join(different)
            + "\nGive this run the same ones (what belongs to the optimizer is restored with its state), or start anew in "
            "another `output_dir`: the adapter of a checkpoint can be continued as `peft_config`."
        )
    if saved["num_processes"] != num_processes:
        processes = f"{saved['num_processes']} processes, now {num_processes}"
        if is_deepspeed or saved["is_deepspeed"]:
            raise ValueError(
                f"'{checkpoint}' cannot be continued with another number of processes ({processes}): DeepSpeed has "
                "divided the optimizer's state over them. Start as many as before."
            )
        if saved["is_round_pending"]:
            logger.warning(
                f"'{checkpoint}' was made by {processes}. It lies in the middle of a round, whose images are kept "
                "process by process: the round is drawn again, with the weights as they are now. A checkpoint at the "
                "end of a round is continued exactly."
            )
        else:
            logger.warning(
                f"'{checkpoint}' was made by {processes}: the same images are drawn and trained, sums are rounded "
                "differently."
            )
    elif is_deepspeed != saved["is_deepspeed"]:
        raise ValueError(
            f"'{checkpoint}' was saved {'with' if saved['is_deepspeed'] else 'without'} DeepSpeed, and this run is "
            f"{'with' if is_deepspeed else 'without'} it: their optimizer states are not the same. Start it as before."
        )
    different = differences(saved.get("course", {}), course)
    if different:
        logger.warning(
            f"'{checkpoint}' is continued with other settings, so the run is not the one it would have been:\n  "
            + "\n  ".join(different)
        )


def check_output_folder(output_dir: str | Path, identity: dict, course: dict | None = None) -> None:
    """
    Refuses to start in the folder of another run.

    Its checkpoints would be mixed with the new ones: a later `resume_from_checkpoint=True` takes the highest number.

    Args:
        output_dir (`str` or `Path`):
            Output folder.
        identity (`dict`), course (`dict`, *optional*):
            As in [`check_resumed_run`]. `course` is passed once it is known that the run starts from the beginning.

    Raises:
        ValueError: there is a checkpoint of another run.
    """
    found = checkpoints_of(output_dir)
    for checkpoint in found:
        saved = read_run(checkpoint)
        if saved is None:
            if course is None:  # it may be skipped when the run is continued
                continue
            raise ValueError(
                f"`output_dir` ('{output_dir}') has '{checkpoint.name}', which is no complete checkpoint of "
                "PaCoGRPOTrainer. Choose another folder, or move it away."
            )
        different = differences(saved["identity"], identity)
        if course is not None:
            different += differences(saved["course"], course)
        if different:
            raise ValueError(
                f"`output_dir` ('{output_dir}') has '{checkpoint.name}' of another run:\n  "
                + "\n  ".join(different)
                + "\nChoose another folder, or move the checkpoints away. To continue that run, pass "
                "`resume_from_checkpoint=True`."
            )
    if found and course is not None:
        logger.warning(
            f"`output_dir` ('{output_dir}') has checkpoints of this very run, the latest '{found[0].name}', and it "
            "starts from the beginning. To continue it, pass `resume_from_checkpoint=True`."
        )


def _name_some(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more are" if len(names) > 3 else " are")
