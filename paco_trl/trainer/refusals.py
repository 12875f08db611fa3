# SPDX-License-Identifier: Apache-2.0
"""Refuse inherited settings and methods that cannot work, with the reason."""

import dataclasses
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate import PartialState
from torch.distributed import DistError
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from ..checkpointing.checkpoints import how_to_resume
from ..utils.files import read_template


logger = logging.getLogger(__name__)

_REASONS: dict[str, dict[str, list[str]]] = yaml.safe_load(read_template("refused_fields.yaml"))


def refused_fields(parent: str) -> dict[str, str]:
    """Return the fields of a parent class that cannot work, each with the reason."""
    return {name: reason for reason, names in _REASONS[parent].items() for name in names}


REFUSED_FIELDS = refused_fields("GRPOConfig")
BY_NUMBER, NO_FSDP = REFUSED_FIELDS["data_seed"], REFUSED_FIELDS["fsdp"]


def refuse_fields(config: Any, parent: type, reasons: dict[str, str], verdict: str) -> None:
    """Raise `ValueError` if a field of the parent class is set to anything but its default there."""
    for field in dataclasses.fields(parent):
        value = getattr(config, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name in reasons and value != default and value is not None:
            raise ValueError(f"`{field.name}` is set to {value!r}, {verdict}: {reasons[field.name]}. Unset it.")


@contextmanager
def cpu_explained() -> Iterator[None]:
    """Say what to set where bf16, a default here, finds no GPU: transformers names half of it."""
    try:
        yield
    except ValueError as error:
        if "bf16/gpu" not in str(error):
            raise
        problem = "`bf16` is True, but there is no GPU that computes in it"
        raise ValueError(f"{problem}. To run on the CPU, set `use_cpu=True`, and `bf16=False` for float32.") from error


@contextmanager
def memory_explained() -> Iterator[None]:
    """Add what needs less memory to the error of an accelerator that has none left."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"{str(error).splitlines()[0]} To need less, set `gradient_checkpointing=True`, a smaller "
            "`per_device_train_batch_size`, an `offload_` option or quantized weights: `paco-trl doctor "
            "--device_memory 24GiB` plans what fits, and docs/reducing_memory.md has what each one saves."
        ) from error


@contextmanager
def end_explained(output_dir: str, mark: Path | None) -> Iterator[None]:
    """Say in the last line of every process which one has ended a run; it writes its error to the file that all see."""
    try:
        yield
    except BaseException as error:
        # Gloo's errors have no class of their own (torch 2.15)
        is_of_another = isinstance(error, DistError) or "/gloo/" in str(error)
        if mark is None:
            raise
        if not is_of_another:
            process = f"Process {PartialState().process_index} on {socket.gethostname()}"
            with suppress(OSError), open(mark, "a", encoding="utf-8") as file:
                file.write(f"{process} ended the run: {type(error).__name__}: {error}\n")
            raise
        words = mark.read_text(encoding="utf-8").partition("\n")[0] if mark.exists() else ""
        words = words or "Another process of the run was killed, or its machine is gone or cannot be reached."
        raise RuntimeError(f"{words} {how_to_resume(output_dir)}") from error


def name_checkpointing(config: TrainingArguments) -> None:
    """Set `activation_checkpointing`, to which transformers has renamed `gradient_checkpointing`, which TRL sets."""
    if config.activation_checkpointing is None:
        config.activation_checkpointing = config.gradient_checkpointing
    if config.activation_checkpointing_kwargs is None:
        config.activation_checkpointing_kwargs = config.gradient_checkpointing_kwargs


def check_arguments(args: TrainingArguments) -> None:
    """Refuse trackers that are not installed, and values that Trainer reads as "none is set" or cannot train with."""
    trackers = args.report_to if isinstance(args.report_to, list) else [args.report_to]
    for name in set(trackers) & set(INTEGRATION_TO_CALLBACK) - {
        "azure_ml",
        "flyte",
    }:  # which transformers does not tell
        if name in get_available_reporting_integrations():
            continue
        package = '"paco_trl[tensorboard]"' if name == "tensorboard" else name
        raise ValueError(f"`report_to` is {args.report_to!r}, but {name} is not installed: `pip install {package}`.")
    # `not` instead of a reversed comparison: it refuses NaN as well
    if not isinstance(args.learning_rate, int | float) or not 0 <= args.learning_rate < math.inf:
        raise ValueError(f"`learning_rate` is {args.learning_rate!r}; it must be a finite number, at least 0.")
    # The processes of a restart find the addresses of the first start: https://github.com/pytorch/pytorch/issues/167288,
    # torch 2.15
    environment = os.environ
    is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and environment.get("RANK") == "0"
    processes, restarts = (int(environment.get(name, 0)) for name in ("WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    if is_shared and processes > 1 and restarts > 0:
        logger.warning(
            "`max_restarts` is set, but processes that the launcher starts again do not find each other as it is set up. "
            "Set the environment variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and `rdzv_backend` to c10d."
        )
    output_dir, kwargs = args.output_dir, getattr(args, "model_init_kwargs", None)
    if output_dir is not None and (not output_dir or os.path.isfile(os.path.expanduser(output_dir))):
        raise ValueError(f"`output_dir` is {output_dir!r}; it must be a directory, which is made if it is not there.")
    if isinstance(kwargs, str) and not kwargs.startswith("{"):
        raise ValueError(f'`model_init_kwargs` is {kwargs!r}; it must be JSON, such as {{"revision": "main"}}.')
    if "torch_dtype" in (kwargs or {}):
        raise ValueError(
            "`model_init_kwargs` has `torch_dtype`, which is now called `dtype`. Rename it, or leave it out: the model is "
            "loaded in bfloat16 with `bf16`, and in float32 without."
        )
    max_steps, num_train_epochs = args.max_steps, args.num_train_epochs
    if max_steps != -1 and not max_steps >= 1:
        meaning = "with which Trainer trains for `num_train_epochs`"
        raise ValueError(f"`max_steps` is {max_steps}, {meaning}. Set at least 1, or leave it out for the epochs.")
    if max_steps == -1 and not num_train_epochs > 0:
        raise ValueError(
            f"`num_train_epochs` is {num_train_epochs}, which trains nothing. Set more than 0, or `max_steps`."
        )


def refuse_methods(reasons: dict[str, str]) -> Callable[[type], type]:
    """Decorate a class so that each of these methods raises `NotImplementedError` with its reason."""

    def refusal(name: str, reason: str) -> Callable:
        def method(self, *args, **kwargs):
            raise NotImplementedError(f"`{type(self).__name__}.{name}` cannot work: {reason}.")

        return method

    def decorate(cls: type) -> type:
        for name, reason in reasons.items():
            setattr(cls, name, refusal(name, reason))
        return cls

    return decorate
