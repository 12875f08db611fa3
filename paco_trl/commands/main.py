# SPDX-License-Identifier: Apache-2.0
"""The console script `paco-trl`: `paco-trl <command> [options]`."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from difflib import get_close_matches
from importlib import import_module

from ..utils.errors import TRACEBACK, OptionError, frames_of_cause, is_raised_by_package, is_user_error
from ..utils.stopping import NOT_ON_WINDOWS, StopRequested, stop_signals
from .messages import format_as_flags, print_message


# Command -> its function of `argv`, which returns an exit code, and its summary. Modules are only imported to run a
# command, since torch, diffusers and TRL take seconds.
COMMANDS = {
    "grpo": ("paco_trl.commands.grpo:main", "trains an image model with PaCo-GRPO"),
    "nft": ("paco_trl.commands.grpo:main_nft", "trains an image model with DiffusionNFT"),
    "reward": ("paco_trl.commands.reward:main", "trains a judge of consistency"),
    "evaluate": ("paco_trl.commands.evaluate_arguments:main", "evaluates an image model, or a judge"),
    "build": ("paco_trl.commands.build_arguments:main", "builds a dataset of pairs for a judge"),
    "doctor": ("paco_trl.commands.doctor_arguments:main", "checks a model, a dataset and settings before training"),
    "push": ("paco_trl.commands.model_arguments:main_push", "uploads the saved model of a run to the Hub"),
    "space": (
        "paco_trl.commands.model_arguments:main_space",
        "writes a Space that compares a base model with its adapter",
    ),
    "merge": ("paco_trl.commands.model_arguments:main_merge", "merges an adapter into the weights of its base model"),
    "serve": ("paco_trl.commands.model_arguments:main_serve", "serves a judge with vLLM, for rewards over HTTP"),
    "env": ("paco_trl.commands.env:main", "prints versions and devices, for a bug report"),
}
_TRAINING = ("grpo", "nft", "reward")
_RESUMABLE = ("build", "evaluate")
_LAUNCHED = (*_TRAINING, *_RESUMABLE, "doctor")
# Loggers that warn on import about unused features of installed extras (torch 2.15 with torchao 0.18, bitsandbytes
# 0.50, diffusers 0.42)
_NOISY_LOGGERS = (
    "torch.utils._pytree",
    "bitsandbytes.backends.cpu.ops",
    "diffusers.quantizers.torchao.torchao_quantizer",
)
# PEFT 0.21 and diffusers 0.42 use names that transformers and the Hub's client deprecated, and this package supports
# transformers 5.23
_DEPRECATION_WARNINGS = (
    "`(is_gradient_checkpointing|past_key_values)` is deprecated|The `local_dir_use_symlinks` argument is deprecated"
)
_EXIT_DELAY = 60.0  # seconds, longer than the imports of two processes may differ


def _usage() -> str:
    lines = [f"  {name:<12} {summary}" for name, (_, summary) in COMMANDS.items()]
    launch = (
        f"For several processes, add `--num_processes 8` or `--accelerate_config zero3` to {', '.join(_LAUNCHED)}."
    )
    footer = ["`paco-trl <command> --help` lists the options.", launch]
    return "\n".join(["usage: paco-trl <command> [options]", "       paco-trl --version", "", *lines, "", *footer])


def run_command(command: str, run: Callable[[], int | None]) -> int | str | None:
    """Run a command and return its exit code. Errors are printed in one line if [`is_user_error`]."""
    try:
        with stop_signals() if command in (*_TRAINING, *_RESUMABLE) else nullcontext():
            return run()
    except Exception as error:
        frames = "" if is_user_error(error) else frames_of_cause(error)
        if frames is None:
            raise
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_EXIT_DELAY)  # usually process 0 has the same error, after which the launcher ends this one
        sys.stderr.write(frames)
        hint = "" if is_raised_by_package(error) else f" ({TRACEBACK}=1 shows the traceback.)"
        print_message(command, format_as_flags(error) + hint)
        return 1
    except StopRequested as stopped:
        if os.environ.get("RANK", "0") == "0":
            resume_command = "the same command" + " with `--resume_from_checkpoint auto`" * (command in _TRAINING)
            print_message(command, f"stopped by {stopped.signal}: {resume_command} resumes.")
        return stopped.code
    except SystemExit as end:  # from argparse, after `--help` or an invalid value
        return end.code
    except KeyboardInterrupt as interrupt:  # possibly during the slow imports
        if os.environ.get("RANK", "0") == "0":
            advice = " Rerun the same command to resume." if command in _RESUMABLE else ""
            sys.stderr.write(f"\npaco-trl {command}: {str(interrupt) or f'stopped.{advice}'}\n")
        return 130


def _check_names(argv: list[str]) -> None:
    """Reject names that are not valid text, since the files written at the end of a run are UTF-8."""
    for name in (*argv, os.getcwd()):
        if any("\ud800" <= character <= "\udfff" for character in name):
            escaped_name = os.fsencode(name).decode(errors="backslashreplace")
            raise OptionError(
                f"'{escaped_name}' is not text in {sys.getfilesystemencoding()}, the encoding of this process. Rename "
                "it, or set `LC_ALL=C.UTF-8 PYTHONUTF8=1`."
            )


def main(arguments: list[str] | None = None) -> int | str | None:
    """Run a command; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if sys.platform == "win32":
        sys.stderr.write(f"{NOT_ON_WINDOWS}\n")
        return 1
    if sys.platform == "darwin":
        sys.stderr.write("paco_trl is tested on Linux only. On macOS, try small models with `--use_cpu`.\n")
    if arguments[:1] in (["--help"], ["-h"], ["--version"]):
        sys.stdout.write((import_module("paco_trl").__version__ if "--version" in arguments else _usage()) + "\n")
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        reason = f"unknown command {arguments[0]!r}" if arguments else "a command is missing"
        suggestion = "".join(
            f" Did you mean `{match}`?" for match in get_close_matches("".join(arguments[:1]), COMMANDS, 1)
        )
        listed = "" if suggestion else f" It must be one of: {', '.join(COMMANDS)}."
        sys.stderr.write(f"paco-trl: {reason}.{suggestion}{listed} `paco-trl --help` describes them.\n")
        return 2
    command, *argv = arguments

    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=_DEPRECATION_WARNINGS)

    def run() -> int | None:
        _check_names(argv)
        if command in (*_TRAINING, "doctor") and not sys.stderr.isatty():
            os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries would fill a log file
        module, _, function = COMMANDS[command][0].partition(":")
        return getattr(import_module(module), function)(argv)

    return run_command(command, run)


if __name__ == "__main__":
    sys.exit(main())
