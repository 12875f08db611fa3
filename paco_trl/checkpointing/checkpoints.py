# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, complete or absent: find them, compare them with the run that they belong to, write them."""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.trainer_utils import rotate_checkpoints

from .weights import trained_parameters


if TYPE_CHECKING:
    from ..data import SourceImages

logger = get_logger(__name__)

POLICY_WEIGHTS = "policy.safetensors"  # what is trained; under DeepSpeed its own files hold it
EMA_WEIGHTS = "ema.safetensors"
STATE = "trainer_state.json"  # TRAINER_STATE_NAME of transformers
RUN_FILE = "run.json"
# A checkpoint is written in here and then renamed, so that a `checkpoint-N` is complete from the moment it exists
STAGING = ".saving"

_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


def dataset_digest(dataset: Dataset, *images: "SourceImages") -> str:
    """Compute a short digest of the prompts, the sizes, and the source images and references."""
    digest = hashlib.sha256()
    for column in ("prompt", "rows", "cols", "height", "width"):
        if column in dataset.column_names:
            digest.update(json.dumps([column, list(dataset[column])]).encode())
    for each in images:  # by sizes and file lengths: reading all files of a large dataset takes minutes
        rows = range(len(dataset))
        digest.update(json.dumps([(each.sizes(row), each.lengths(row)) for row in rows]).encode())
    return digest.hexdigest()[:16]


def clear_staging(output_dir: str | Path) -> None:
    """Delete what a run that was killed while saving has left."""
    folder = Path(output_dir) / STAGING
    if folder.is_dir():
        if unfinished := ", ".join(sorted(path.name for path in folder.iterdir())):
            logger.warning(f"An earlier run was stopped while saving {unfinished}: the unfinished files are deleted.")
        shutil.rmtree(folder)


def publish(staged: Path, output_dir: str | Path, run: dict) -> Path:
    """Publish a complete checkpoint at once, with the list of its files and the `run` that it belongs to in `run.json`."""
    files = {
        str(path.relative_to(staged)): path.stat().st_size for path in sorted(staged.rglob("*")) if path.is_file()
    }
    with open(staged / RUN_FILE, "w", encoding="utf-8") as file:
        json.dump({"run": run, "files": files}, file, indent=2)
    # To the disk first: after a power cut a renamed directory may otherwise contain empty files
    for path in [*staged.rglob("*"), staged]:
        _sync(path)
    target = Path(output_dir) / staged.name
    replaced = staged.with_name(f"replaced-{staged.name}")
    if target.exists():  # of this run, which was resumed from an earlier checkpoint that it can resume from again
        os.replace(target, replaced)
    os.replace(staged, target)
    shutil.rmtree(replaced, ignore_errors=True)
    with contextlib.suppress(OSError):  # has more in it
        staged.parent.rmdir()
    _sync(Path(output_dir))  # older checkpoints may be deleted next
    return target


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def incomplete_files(checkpoint: str | Path) -> list[str]:
    """List the files of a checkpoint that are missing or truncated: `run.json` if the list of files itself is missing."""
    checkpoint = Path(checkpoint)
    content = _read_run_file(checkpoint)
    if content is None:
        return [RUN_FILE]
    return [
        name
        for name, size in content["files"].items()
        if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size != size
    ]


def checkpoints_of(output_dir: str | Path) -> list[Path]:
    """List the checkpoints in an output directory, latest first; complete or not."""
    folder = Path(output_dir)
    found = [path for path in folder.iterdir() if _CHECKPOINT.match(path.name)] if folder.is_dir() else []
    return sorted((path for path in found if path.is_dir()), key=lambda path: -int(path.name.split("-")[1]))


def is_restarted() -> bool:
    """Tell whether the launcher (`--max_restarts`) has started the processes again after one has failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def find_checkpoint(output_dir: str | Path, resume_from_checkpoint: str | bool | None) -> Path | None:
    """Find the complete checkpoint to resume from: a directory, with `True` the latest, with `"auto"` also none."""
    # The command line gives "True" as text
    if isinstance(resume_from_checkpoint, str) and resume_from_checkpoint.lower() in ("true", "false"):
        resume_from_checkpoint = resume_from_checkpoint.lower() == "true"
    if resume_from_checkpoint is None and is_restarted():
        resume_from_checkpoint = "auto"
    if not resume_from_checkpoint:
        return None
    if resume_from_checkpoint is not True and resume_from_checkpoint != "auto":
        checkpoint = Path(resume_from_checkpoint)
        if not checkpoint.is_dir():
            raise ValueError(f"`resume_from_checkpoint` is '{checkpoint}', which is not a directory.")
        broken = incomplete_files(checkpoint)
        if broken:
            found = f"The checkpoint '{checkpoint}' is incomplete: {_name_some(broken)} missing or truncated."
            raise ValueError(f"{found} Pass another, or `resume_from_checkpoint=True` for the latest complete one.")
        return checkpoint
    for checkpoint in checkpoints_of(output_dir):
        broken = incomplete_files(checkpoint)
        if not broken:
            return checkpoint
        logger.warning(f"The checkpoint '{checkpoint}' is skipped: {_name_some(broken)} missing or truncated.")
    if resume_from_checkpoint == "auto":
        return None
    missing = f"`resume_from_checkpoint` is True, but '{output_dir}' has no complete checkpoint."
    raise ValueError(f"{missing} Start with 'auto' or without it, or pass the directory of a checkpoint.")


def how_to_resume(output_dir: str | Path) -> str:
    """Say how to resume a run that has stopped, if anything is saved."""
    if not (found := checkpoints_of(output_dir)):
        return "Nothing is saved."
    return f"Rerun with `--resume_from_checkpoint auto` to resume from '{found[0]}'."


def read_run(checkpoint: str | Path) -> dict | None:
    """Read which run a checkpoint belongs to, `None` if this is not recorded."""
    content = _read_run_file(checkpoint)
    return None if content is None else content["run"]


def _read_run_file(checkpoint: str | Path) -> dict | None:
    try:
        content = json.loads((Path(checkpoint) / RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if {"run", "files"} <= content.keys() else None


def _differences(saved: dict, now: dict) -> str:
    """Describe what differs between two runs, a line each."""
    names = dict.fromkeys([*saved, *now])  # in order
    return "\n  ".join(
        f"{name}: {saved.get(name)!r}, now {now.get(name)!r}" for name in names if saved.get(name) != now.get(name)
    )


def check_resumed_run(
    checkpoint: Path, identity: dict, settings: dict, num_processes: int, is_deepspeed: bool
) -> None:
    """Check that a checkpoint has the same `identity`, and warn of other `settings`, before any model is loaded."""
    saved = read_run(checkpoint) or {}
    if different := _differences(saved.get("identity", {}), identity):
        raise ValueError(
            f"'{checkpoint}' cannot be resumed: it was made with other settings.\n  {different}\nGive this run the same "
            "ones (the optimizer's are restored with its state), or start from scratch in another `output_dir`: the "
            "adapter of a checkpoint can be passed as `peft_config`."
        )
    if saved["num_processes"] != num_processes:
        processes = f"{saved['num_processes']} processes, now {num_processes}"
        if is_deepspeed or saved["is_deepspeed"]:
            raise ValueError(
                f"'{checkpoint}' cannot be resumed with another number of processes ({processes}): DeepSpeed has "
                "divided the optimizer's state over them. Start as many as before."
            )
        if saved["is_round_pending"]:
            logger.warning(
                f"'{checkpoint}' was made by {processes}. It is in the middle of a round, whose images are stored per "
                "process: it is generated again with the current weights. At the end of a round a run resumes exactly."
            )
        else:
            logger.warning(
                f"'{checkpoint}' was made by {processes}: the images are the same, but sums are rounded differently."
            )
    elif is_deepspeed != saved["is_deepspeed"]:
        raise ValueError(
            f"'{checkpoint}' was saved {'with' if saved['is_deepspeed'] else 'without'} DeepSpeed, and this run is "
            f"{'with' if is_deepspeed else 'without'} it: their optimizer states are not the same. Start it as before."
        )
    if different := _differences(saved.get("hyperparameters", {}), settings):
        logger.warning(f"'{checkpoint}' is resumed with other settings, so this is another run:\n  {different}")


def check_output_folder(output_dir: str | Path, identity: dict, settings: dict | None = None) -> None:
    """Refuse to start in the directory of another run: `resume_from_checkpoint=True` would take its checkpoints."""
    found = checkpoints_of(output_dir)
    for checkpoint in found:
        saved = read_run(checkpoint)
        if saved is None:
            if settings is None:  # it may be skipped when the run is resumed
                continue
            raise ValueError(
                f"`output_dir` ('{output_dir}') has '{checkpoint.name}', which is not a complete checkpoint of "
                "PaCoGRPOTrainer. Choose another directory, or move it away."
            )
        different = [_differences(saved["identity"], identity)]
        if settings is not None:
            different.append(_differences(saved.get("hyperparameters", {}), settings))
        if any(different):
            raise ValueError(
                f"`output_dir` ('{output_dir}') has '{checkpoint.name}' of another run:\n  "
                + "\n  ".join(filter(None, different))
                + "\nChoose another directory, or delete that run with `overwrite_output_dir=True`. To resume it, pass "
                "`resume_from_checkpoint=True`."
            )
    if found and settings is not None:
        logger.warning(
            f"`output_dir` ('{output_dir}') has checkpoints of this run, the latest '{found[0].name}', and it "
            "starts from scratch. To resume it, pass `resume_from_checkpoint=True`."
        )


def delete_run(output_dir: str | Path) -> None:
    """Delete the checkpoints, contact sheets and evaluations of an earlier run; its encoded prompts can be used again."""
    others = (Path(output_dir) / name for name in ("contact_sheets", "evaluation"))
    for folder in (*checkpoints_of(output_dir), *others):
        shutil.rmtree(folder, ignore_errors=True)


def _name_some(names: list[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} is"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more are" if len(names) > 3 else " are")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. It stops a run."""


class StagedCheckpoint:
    """A checkpoint while it is written, next to the others."""

    def __init__(self, output_dir: str | Path, step: int, accelerator: Accelerator, should_save: bool):
        self.output_dir, self.step = Path(output_dir), step
        self.accelerator, self.should_save = accelerator, should_save
        self.folder = self.output_dir / STAGING / f"checkpoint-{step}"

    def write(self, part: Callable[[Path], Any]) -> None:
        """Write a part of the checkpoint. Collective: call on all ranks; all stop if one fails."""
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
