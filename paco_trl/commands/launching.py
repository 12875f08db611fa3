# SPDX-License-Identifier: Apache-2.0
"""The start of several processes: `--num_processes` and `--accelerate_config`."""

import os
import sys
from argparse import ArgumentParser
from importlib.util import find_spec

from ..utils.errors import OptionError
from .config_files import find_yaml, read_config, read_yaml


_IS_LAUNCHED = "PACO_TRL_IS_LAUNCHED"


def _number_or_none(word: str) -> int | None:
    return None if word.lower() in ("none", "null") else int(word)


def launch(command: list[str], argv: list[str]) -> None:
    """Replace this process with `accelerate launch` of the same command, if TRL's options for it are passed."""
    is_launched = bool({"LOCAL_RANK", _IS_LAUNCHED} & os.environ.keys())
    config = {} if is_launched else read_config(argv)[0]
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--accelerate_config", default=config.get("accelerate_config"))
    parser.add_argument("--num_processes", type=_number_or_none, default=config.get("num_processes"))
    options, remaining = parser.parse_known_args(argv)
    file = options.accelerate_config
    file = None if str(file).lower() in ("none", "null") else file  # `None` leaves out the one of a file
    number = options.num_processes
    if is_launched and remaining != argv:
        raise OptionError(
            "`--num_processes` and `--accelerate_config` have no effect in a command that is already launched. Leave "
            "them out."
        )
    if file is None and number in (None, 1):
        return
    flags = []
    if file is not None:
        path = find_yaml("accelerate_config", file, "accelerate_configs")
        settings = read_yaml("accelerate_config", file, path)
        if not isinstance(settings, dict):
            message = (
                f"`--accelerate_config` is {file!r}, but must contain settings, as `accelerate config` writes them."
            )
            raise OptionError(message, "accelerate_config")
        if settings.get("distributed_type") == "DEEPSPEED" and find_spec("deepspeed") is None:
            message = f'`--accelerate_config {file}` requires `deepspeed`: pip install "paco_trl[deepspeed]".'
            raise OptionError(message, "accelerate_config")
        flags.append(f"--config_file={path}")
    if number is not None:
        flags.append(f"--num_processes={number}")
    if file is None and number > 1:
        flags.append("--multi_gpu")  # or accelerate starts one process on the CPU or one GPU
    # Signals that torchrun, which the launcher uses, forwards (torch 2.9 and later; before, only SIGTERM)
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    os.environ.setdefault(
        "PET_SHUTDOWN_TIMEOUT", "300"
    )  # seconds for an optimizer step and a checkpoint; the default is 30
    os.environ[_IS_LAUNCHED] = "1"  # since its processes read the same `--config`
    argv = ["paco_trl.commands.launcher", *flags, "-m", "paco_trl.commands.main", *command, *remaining]
    os.execv(sys.executable, [sys.executable, "-m", *argv])
