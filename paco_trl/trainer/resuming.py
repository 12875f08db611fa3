# SPDX-License-Identifier: Apache-2.0
"""Mixin of the trainers: atomic checkpoints, and runs that are stopped by a signal and resume exactly."""

import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch.distributed import DistError
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_callback import ExportableState, TrainerControl
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpointing.checkpoints import (
    TRAINER_STATE_FILE,
    check_identity,
    check_resumed_run,
    clear_staging,
    find_checkpoint,
    how_to_resume,
    read_run,
    rotate_checkpoints,
    write_checkpoint,
)
from ..checkpointing.output_dirs import (
    check_no_checkpoints,
    check_no_model,
    check_not_overwritten,
    check_output_dir,
    check_same_run,
    delete_run,
    mark_output_dir,
)
from ..utils.differences import differences
from ..utils.fsdp import gather_state, load_state
from ..utils.locks import sole_writer
from ..utils.logs import get_logger
from ..utils.processes import end_training
from ..utils.stopping import StopRequested, agree, defer_stop_signals, raise_stop, stop_signals
from .model_cards import TRAIN_SECONDS, training_seconds
from .publishing import HubTrainer


logger = get_logger(__name__)


class FunctionCallback(TrainerCallback):
    """Call functions at events of the training loop."""

    def __init__(self, **functions: Callable[[], None]):
        for event, function in functions.items():
            setattr(self, event, lambda *args, function=function, **kwargs: function())


@contextmanager
def without_jit_checkpoint(args: TrainingArguments) -> Iterator[None]:
    """Keep Trainer from handling `enable_jit_checkpoint`: it would save within a step."""
    is_enabled, args.enable_jit_checkpoint = args.enable_jit_checkpoint, False
    yield
    args.enable_jit_checkpoint = is_enabled


class ExactResumeMixin(HubTrainer):
    """Write complete checkpoints, one of them at SIGTERM and SIGUSR1 (`enable_jit_checkpoint`)."""

    resumed_from: Path | None = None
    _saved_step: int | None = None  # step of the last checkpoint of this `train()`
    loaded_step: int | None = None  # step of the checkpoint that `load_best_model_at_end` has loaded
    control: TrainerControl
    _restore_rng_state: Callable[[], None] | None = None  # as after the last step of this `train()`

    # What a run must share with one that resumes it, and what may change; see `describe_run`
    _identity: dict[str, Any]
    _settings: dict[str, Any]
    _checked: Path | None = None  # the checkpoint of `args.resume_from_checkpoint`

    # ---- Start and stop ----

    def _check_resumed_run(self, checkpoint: Path, args: TrainingArguments) -> None:
        is_deepspeed = args.deepspeed_plugin is not None
        check_resumed_run(checkpoint, self._identity, self._settings, args.world_size, is_deepspeed)

    def _identify_weights(self, weights: dict[str, str]) -> None:
        """Make the loaded weights' fingerprints part of the run's identity, and compare them with the checkpoint's."""
        self._identity["weights"] = weights
        if self._checked is not None:
            check_identity(self._checked, read_run(self._checked)["identity"], {"weights": weights})

    def _open_output_dir(self, args: TrainingArguments, published_patterns: list[str]) -> None:
        """Check the output directory before a model is loaded; a run that is training there refuses this one."""
        check_output_dir(args.output_dir, published_patterns)
        with sole_writer(args.output_dir, "checkpoints", is_inside=True):
            pass

    def _mark_output_dir(self) -> None:
        """Mark the output directory as this run's, once all checks have passed and before anything else is there."""
        if self.args.process_index == 0:
            mark_output_dir(self.args.output_dir)

    def _check_run(self, args: TrainingArguments, *models: Any) -> None:
        """
        Compare this run with the one in the checkpoint to resume from, or in the output directory; `models` are those
        that it trains.
        """
        self._checked = find_checkpoint(args.output_dir, args.resume_from_checkpoint)
        if self._checked is not None:
            self._check_resumed_run(self._checked, args)
        elif args.overwrite_output_dir:
            check_not_overwritten(args.output_dir, *models)
        else:
            check_same_run(args.output_dir, self._identity)

    def _find_checkpoint(self, resume_from_checkpoint: str | bool | None) -> Path | None:
        """Find the checkpoint to resume from; without one, delete an earlier run if that is asked for, or refuse."""
        args = self.args
        if resume_from_checkpoint is None:
            resume_from_checkpoint = args.resume_from_checkpoint
        checkpoint = find_checkpoint(args.output_dir, resume_from_checkpoint)
        if not args.overwrite_output_dir:
            check_no_checkpoints(args.output_dir, checkpoint)
            if self.state.global_step == 0:  # otherwise it is this trainer's
                check_no_model(args.output_dir)
        elif checkpoint is None and args.should_save:
            if deleted := delete_run(args.output_dir):
                logger.warning(f"`overwrite_output_dir` has deleted {', '.join(deleted)} of '{args.output_dir}'.")
        return checkpoint

    @contextmanager
    def _resumable(self, checkpoint: Path | None) -> Iterator[None]:
        """Train from a checkpoint; a signal writes one, and ends the process."""
        args = self.args
        if args.should_save:
            clear_staging(args.output_dir)
        self.resumed_from = checkpoint
        self._saved_step = None
        self._restore_rng_state = None
        self.loaded_step = None
        names = ["SIGINT", *args.jit_checkpoint_signals]  # Ctrl-C, too
        with stop_signals(names) if args.enable_jit_checkpoint else nullcontext():
            try:
                yield
            except StopRequested as stopped:
                if not args.enable_jit_checkpoint:
                    raise
                folder = self._save_before_stop()
                text = ""
                if self.accelerator.is_main_process:
                    where = "before the first optimizer step: the same command starts again"
                    if folder is not None:
                        step = folder.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
                        how = "the same command with `--resume_from_checkpoint auto` continues from there"
                        where = f"at step {step}, which is saved in '{folder}': {how}"
                    text = f"Stopped by {stopped.signal} {where}."
                if stopped.is_interrupt:  # the caller may go on, and save for example
                    raise KeyboardInterrupt(text) from None
                if stopped.by_all:
                    end_training(self.accelerator)
                sys.stderr.write(f"{text}\n" if text else "")
                raise SystemExit(stopped.code) from None

    def _begin_run(self) -> None:
        """Make the evaluation of the checkpoint's step if it is missing, before the first step."""
        if self.resumed_from is not None and self.state.global_step >= self.state.max_steps:
            self._check_finished_run(self.resumed_from)
        # A resumed run continues with its checkpoint's seconds
        self._started = time.monotonic() - (training_seconds(self.state) or 0.0)
        if self.resumed_from is not None and self.accelerator.is_main_process:
            step = self.state.global_step + 1
            last = self.state.max_steps
            where = f"at step {step} of {last}" if step <= last else f"with none of {last} step(s) left"
            tqdm.write(f"Resuming from {self.resumed_from.name} {where}.")
        if self.args.enable_jit_checkpoint:
            defer_stop_signals()  # until here a signal ends the run at once: it has nothing to save
        if self.resumed_from is not None and self._is_evaluation_due():
            self._load_rng_state(str(self.resumed_from))
            self._determine_best_metric(self._evaluate(None, None), None)

    def _check_finished_run(self, checkpoint: Path) -> None:
        """Reject other settings where no step is left: the model would be saved with settings it was not trained by."""
        of_training = {name: value for name, value in self._settings.items() if "eval" not in name}
        if changed := differences(read_run(checkpoint)["settings"], of_training):
            lines = "\n  ".join(["", *changed])
            raise ValueError(
                f"'{checkpoint}' is at step {self.state.global_step} of {self.state.max_steps}: no step is left to train "
                f"with other settings.{lines}\nSet a larger `max_steps`, or resume with the settings of the run."
            )

    def _is_evaluation_due(self) -> bool:
        """Return whether the evaluation of the checkpoint's step is missing: a judge was down, or a signal came."""
        args, state = self.args, self.state
        by_epoch = args.eval_strategy == "epoch"
        position, period = (state.epoch, 1) if by_epoch else (state.global_step, state.eval_steps)
        if args.eval_strategy == "no" or position < args.eval_delay:
            return False
        entries = [entry for entry in state.log_history if entry["step"] == state.global_step]
        is_there = any(name.startswith("eval_") for entry in entries for name in entry)
        return not is_there and (position % period == 0 or state.global_step >= state.max_steps)

    def _evaluate(self, *args, **kwargs):
        """Evaluate in training, which draws the same random numbers as without the evaluation."""
        if kwargs.get("skip_scheduler") and self.resumed_from is not None:
            return None  # the run has made the evaluation of `eval_on_start` before it was stopped
        with preserve_rng_state(self.accelerator.device):
            return super()._evaluate(*args, **kwargs)

    def _run_epoch(self, *args, **kwargs) -> None:
        """Run an epoch; Trainer makes a step too many after resuming from the last one."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log metrics; metrics of training include the seconds so far."""
        if {"loss", "train_loss"} & logs.keys():
            logs[TRAIN_SECONDS] = round(time.monotonic() - self._started, 2)
        super().log(logs, start_time)

    def _maybe_log_save_evaluate(self, *args, **kwargs) -> None:
        """Log, evaluate and save after a step; or log and stop, if a process has received a signal."""
        self._restore_rng_state = record_rng_state(self.accelerator.device)
        (stop,) = agree(self.accelerator)
        if stop:
            self.control.should_evaluate = self.control.should_save = False
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if stop:
            raise_stop(stop, by_all=True)

    def _save_before_stop(self) -> Path | None:
        """Save a checkpoint of the last step if there is none; return the latest. Collective: call on all ranks."""
        if self._restore_rng_state is None:
            return self.resumed_from
        step = self.state.global_step
        if self._saved_step != step:
            self._restore_rng_state()
            self._save_checkpoint(self.model, trial=None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)
        return Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    @property
    def _card_step(self) -> int:
        """Optimizer steps of the weights that the trainer holds."""
        return self.state.global_step if self.loaded_step is None else self.loaded_step

    # ---- Checkpoints ----

    def _run_record(self) -> dict[str, Any]:
        """Return the record of the run that a checkpoint has."""
        return {
            "identity": self._identity, "settings": self._settings, "num_processes": self.accelerator.num_processes,
            "is_deepspeed": self.is_deepspeed_enabled,
        }  # fmt: skip

    def _save_checkpoint(self, model, trial) -> None:
        """Write a checkpoint that appears when it is complete."""
        args, state = self.args, self.state
        self.store_flos()
        record = self._run_record()
        parts = (self._write_weights, self._write_further_weights, self._write_state)
        write_checkpoint(args.output_dir, state.global_step, self.accelerator, args.should_save, record, *parts)
        if args.should_save:
            rotate_checkpoints(args.output_dir, args.save_total_limit, state.best_model_checkpoint)
        self._saved_step = state.global_step
        if args.push_to_hub:
            self._push_from_checkpoint(str(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))

    def _write_weights(self, folder: Path) -> None:
        self.save_model(str(folder), _internal_call=True)

    def _write_further_weights(self, folder: Path) -> None:
        """Write weights that are not exported."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the optimizer's state, of FSDP as one process has it: Trainer would save all weights with it."""
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = gather_state(self.optimizer, self.args.should_save)
        if self.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
        if not self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, scheduler = (
            torch.load(Path(checkpoint) / name, map_location="cpu", mmap=True, weights_only=True)
            for name in (OPTIMIZER_NAME, SCHEDULER_NAME)
        )
        load_state(self.optimizer, optimizer)
        self.lr_scheduler.load_state_dict(scheduler)

    def _write_state(self, folder: Path) -> None:
        args, state = self.args, self.state
        if not args.save_only_model:
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
        # Every process loads the best checkpoint's weights in the end
        if best := state.best_global_step:
            checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{best}"
            if best == state.global_step or checkpoint.is_dir():
                state.best_model_checkpoint = str(checkpoint)
        if not args.should_save:
            return
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                name = type(callback).__name__
                saved = callback.state()
                of = state.stateful_callbacks
                of[name] = [*of[name], saved] if isinstance(of[name], list) else saved
        state.save_to_json(str(folder / TRAINER_STATE_FILE))


def record_rng_state(device: torch.device) -> Callable[[], None]:
    """Record the state of the generators of Python, NumPy and torch, and return what restores it."""
    is_cuda = device.type == "cuda"
    python = random.getstate()
    numpy = np.random.get_state()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if is_cuda else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return restore


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch at the end."""
    restore = record_rng_state(device)
    try:
        yield
    finally:
        restore()


@contextmanager
def end_explained(output_dir: str, mark: Path | None) -> Iterator[None]:
    """
    If the run fails, let the last line of every process name the process that failed. That process writes its error to
    the shared file `mark`.
    """
    try:
        yield
    except BaseException as error:
        # Gloo's errors have no class of their own (torch 2.15)
        is_of_another = isinstance(error, DistError) or "/gloo/" in str(error)
        if mark is None or isinstance(error, SystemExit):  # a signal, to all of them
            raise
        if not is_of_another:
            process = f"Process {PartialState().process_index} on {socket.gethostname()}"
            with suppress(OSError), open(mark, "a", encoding="utf-8") as file:
                file.write(f"{process} ended the run: {type(error).__name__}: {error}\n")
            raise
        words = mark.read_text(encoding="utf-8").partition("\n")[0] if mark.exists() else ""
        words = words or "Another process of the run was killed, or its machine is gone or cannot be reached."
        raise RuntimeError(f"{words} {how_to_resume(output_dir)}") from error
