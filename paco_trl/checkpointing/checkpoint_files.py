# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of PaCoGRPOTrainer consists of: written completely, or not there."""

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, send_to_device
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import rotate_checkpoints

from .checkpoints import checkpoints_of, incomplete_files, publish, read_run, stage_folder
from .export import save_trained
from .weights import gather_whole, shares, trained_parameters, zero_stage_of


if TYPE_CHECKING:
    from ..trainer.paco_grpo_trainer import PaCoGRPOTrainer

logger = get_logger(__name__)

POLICY_WEIGHTS = "policy.safetensors"  # what is trained; under DeepSpeed its own files hold it
EMA_WEIGHTS = "ema.safetensors"
STATE = "trainer_state.json"  # TRAINER_STATE_NAME of transformers

# Settings that a round which has been drawn and scored does not depend on
AFTER_DRAWING = ("epsilon", "epsilon_high", "beta", "ema_decay", "max_grad_norm", "max_steps", "warmup_steps")


def write_checkpoint(trainer: "PaCoGRPOTrainer") -> Path:
    """
    Writes a checkpoint beside the others and renames it when every process has written its part.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer; every process calls this.

    Returns:
        `Path`: the checkpoint.

    Raises:
        RuntimeError: it could not be written, on whichever process. The checkpoints that exist are as they were.
    """
    args, state = trainer.args, trainer.state
    staged = stage_folder(args.output_dir, state.global_step)
    folder = Path(args.output_dir) / staged.name
    # Each part ends with an exchange of what went wrong: a process that fails must not leave the others in a collective
    # of the next part. (DeepSpeed's own saving is one part; it can still wait for a process whose disk is full.)
    for part in (_make_folder, _write_weights, _write_further_weights, _write_state, _publish):
        _stop_if_any(trainer, staged, _attempt(trainer, staged, part))
    if args.should_save:
        if args.save_total_limit:
            # What a run left that was killed while it deleted them: it would count, and whole ones go in its place
            for checkpoint in checkpoints_of(args.output_dir):
                if incomplete_files(checkpoint):
                    shutil.rmtree(checkpoint, ignore_errors=True)
        rotate_checkpoints(
            output_dir=args.output_dir,
            save_total_limit=args.save_total_limit,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=True,
        )
    return folder


def _attempt(trainer: "PaCoGRPOTrainer", staged: Path, function) -> Exception | None:
    try:
        function(trainer, staged)
    # What a full disk is to Python, to torch and to safetensors
    except (OSError, RuntimeError, SafetensorError) as error:
        return error
    return None


def _stop_if_any(trainer: "PaCoGRPOTrainer", staged: Path, problem: Exception | None) -> None:
    mine = [] if problem is None else [f"process {trainer.accelerator.process_index}: {problem!r}"]
    problems = gather_object(mine) if trainer.accelerator.num_processes > 1 else mine
    if not problems:
        return
    if trainer.args.should_save:
        shutil.rmtree(staged.parent, ignore_errors=True)  # gives back the space that it took
    raise RuntimeError(
        f"The checkpoint of step {trainer.state.global_step} could not be written to '{trainer.args.output_dir}' "
        f"({'; '.join(problems)}). The checkpoints before it are complete. Make room there and continue with "
        "`resume_from_checkpoint=True`."
    ) from problem


def _make_folder(trainer: "PaCoGRPOTrainer", staged: Path) -> None:
    if trainer.args.should_save:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)


def _write_weights(trainer: "PaCoGRPOTrainer", staged: Path) -> None:
    keep, zero_stage = trainer.args.should_save, zero_stage_of(trainer)
    # Everything is gathered before anything is written
    average = trainer.ema.whole(keep) if trainer.ema is not None else None
    policy = None
    if zero_stage == 0 or average is None:
        policy = gather_whole(trainer.model, shares(trainer.model, zero_stage), zero_stage, keep)
    if not keep:
        return
    # What users load
    save_trained(trainer, policy if average is None else average, staged)
    # What training goes on with
    if average is not None:
        save_file(average, staged / EMA_WEIGHTS)
    if policy is not None:
        save_file(policy, staged / POLICY_WEIGHTS)


def _write_further_weights(trainer: "PaCoGRPOTrainer", staged: Path) -> None:
    trainer._save_further_weights(staged)


def _write_state(trainer: "PaCoGRPOTrainer", staged: Path) -> None:
    args, state = trainer.args, trainer.state
    trainer._save_optimizer_and_scheduler(str(staged))
    trainer._save_scaler(str(staged))
    trainer._save_rng_state(str(staged))
    save_rollout(trainer, staged)
    # On every process: each loads the best checkpoint's weights in the end
    best = state.best_global_step
    if best:
        checkpoint = Path(args.output_dir) / f"checkpoint-{best}"
        if best == state.global_step or checkpoint.is_dir():
            state.best_model_checkpoint = str(checkpoint)
    if args.should_save:
        for callback in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(callback, ExportableState):
                name, saved = type(callback).__name__, callback.state()
                if isinstance(state.stateful_callbacks[name], list):
                    state.stateful_callbacks[name].append(saved)
                else:
                    state.stateful_callbacks[name] = saved
        state.save_to_json(str(staged / STATE))


def _publish(trainer: "PaCoGRPOTrainer", staged: Path) -> None:
    if not trainer.args.should_save:
        return
    run = {
        "identity": trainer._identity,
        "course": trainer._course(trainer.args),
        "num_processes": trainer.accelerator.num_processes,
        "is_deepspeed": trainer.is_deepspeed_enabled,
        "is_round_pending": trainer.is_round_pending,
    }
    publish(staged, trainer.args.output_dir, run)


def check_weights(model: nn.Module, checkpoint: Path) -> None:
    """
    Checks that a checkpoint has the weights that a run trains, before its optimizer's state is loaded for them.

    Args:
        model (`nn.Module`):
            Model to train.
        checkpoint (`Path`):
            Folder of the checkpoint.

    Raises:
        ValueError: it has others, for example of layers that no prediction depends on, which are not trained anymore.
    """
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


def _rollout_file(trainer: "PaCoGRPOTrainer", folder: Path) -> Path:
    return folder / f"rollout_{trainer.accelerator.process_index}.pt"


def save_rollout(trainer: "PaCoGRPOTrainer", folder: Path) -> None:
    """
    Saves this process's images of a round that is not used up, so that a resumed run learns from the same ones.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer.
        folder (`Path`):
            Folder of the checkpoint.
    """
    if not trainer.is_round_pending:
        return
    entries = [
        # Not `asdict`, which would copy the tensors, and with them what images of a prompt share
        {**entry, "record": {f.name: getattr(entry["record"], f.name) for f in dataclasses.fields(entry["record"])}}
        for entry in trainer._buffered_inputs
    ]
    for entry in entries:
        del entry["sde"]  # a function of the round
    torch.save(
        {
            "round": trainer._buffered_round,
            "global_step": trainer._buffer_global_step,
            "metrics": trainer._round_metrics,
            "time": trainer._round_time,
            "entries": entries,
        },
        _rollout_file(trainer, folder),
    )


def load_rollout(trainer: "PaCoGRPOTrainer", folder: Path) -> None:
    """
    Puts back what [`save_rollout`] has saved, if there is something and it was divided over as many processes.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer.
        folder (`Path`):
            Folder of the checkpoint.
    """
    path = _rollout_file(trainer, folder)
    run = read_run(folder)
    if not path.exists() or run["num_processes"] != trainer.accelerator.num_processes:
        return
    course = trainer._course(trainer.args)
    changed = [name for name in course if name not in AFTER_DRAWING and run["course"].get(name) != course[name]]
    if changed:
        logger.warning(
            f"'{folder}' lies in the middle of a round that was drawn with other values of {', '.join(changed)}: it is "
            "drawn again."
        )
        return
    device, is_offloaded = trainer.accelerator.device, trainer.args.offload_embeddings
    # On the device at once, so that what images of a prompt share stays shared
    # torch does not load to "cpu:0", which the device is called in several processes on CPU
    location = "cpu" if is_offloaded or device.type == "cpu" else device
    saved = torch.load(path, map_location=location, weights_only=True)
    sde = trainer._sde_settings(saved["round"])
    trainer._buffered_inputs = []
    for entry in saved["entries"]:
        record = entry.pop("record")
        if is_offloaded:  # the calls come to the device with their micro-step
            calls = record.pop("calls")
            record = {**send_to_device(record, device), "calls": calls}
        trainer._buffered_inputs.append(
            {**send_to_device(entry, device), "record": trainer._record_class(**record), "sde": sde}
        )
    trainer._buffered_round, trainer._buffer_global_step = saved["round"], saved["global_step"]
    trainer._round_metrics, trainer._round_time = saved["metrics"], saved["time"]
