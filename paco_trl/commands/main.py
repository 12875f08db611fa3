# SPDX-License-Identifier: Apache-2.0
"""The console script `paco-trl`: `paco-trl <command> [options]`."""

import logging
import os
import re
import shlex
import sys
import time
import warnings
from argparse import ArgumentParser
from ast import literal_eval
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..utils.errors import TRACEBACK, OptionError, frames_of_cause, is_raised_by_package, is_user_error
from ..utils.stopping import NOT_ON_WINDOWS, StopRequested, stop_signals
from ..utils.text import read_text
from . import flow_factory


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
_IS_LAUNCHED = "PACO_TRL_IS_LAUNCHED"
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


def format_as_flags(error: BaseException) -> str:
    """Return the message of an error with options as a command line has them: `--max_steps 3`, not `max_steps=3`."""

    def flag(match: re.Match) -> str:
        try:
            return f"`--{match[1]} {shlex.quote(str(literal_eval(match[2])))}`"
        except (SyntaxError, ValueError):  # not a value of Python
            return match[0]

    message = re.sub(r"`([a-z]\w*)=([^`]+)`", flag, str(error))
    for name in (*error.options, *error.remedies) if isinstance(error, OptionError) else ():
        message = message.replace(f"`{name}`", f"`--{name}`")
    return message


def print_message(command: str, message: str) -> None:
    """Write a message of a command to stderr."""
    sys.stderr.write(f"paco-trl {command}: {message}\n")
    sys.stderr.flush()


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


def find_yaml(option: str, name: str, directory: str) -> str:
    """Return the path of a file, or of the packaged file with this name in a directory."""
    if Path(name).is_file():
        return name
    packaged_files = {file.stem: str(file) for file in (Path(__file__).parents[1] / directory).glob("*.yaml")}
    if name not in packaged_files:
        suggestion = "".join(f" Did you mean `{match}`?" for match in get_close_matches(name, packaged_files, 1))
        names = ", ".join(sorted(packaged_files))
        raise OptionError(
            f"`--{option}` is {name!r}: neither a file nor one of the packaged ones, {names}.{suggestion}"
        )
    return packaged_files[name]


class _Loader(yaml.SafeLoader):
    """Loader that rejects repeated keys; YAML would use the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if repeated_key := next((key for key in keys if keys.count(key) > 1), None):
            raise OptionError(f"`--config` has the key {repeated_key!r} twice. Remove one.")
        return super().construct_mapping(node, deep)


# 1e-4 is text in YAML 1.1: https://github.com/yaml/pyyaml/issues/173 (6.0). Without a sign it may be a revision
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]\d+$"), None)


def _read_yaml(option: str, name: str, path: str | Path, loader: type[yaml.SafeLoader]) -> Any:
    """Read the file of an option."""
    try:
        return yaml.load(read_text(path), loader)
    except yaml.YAMLError as error:  # which was read as a text, and has no name
        reason = str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise OptionError(f"`--{option}` is {name!r}, which is not YAML, {reason}.", option) from error


def read_config(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], str | None]:
    """Read the options in the file of `--config`; return them, the other arguments, and the name of a recipe."""
    parser = ArgumentParser(prog="paco-trl", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", nargs="?", default=[])
    namespace, remaining = parser.parse_known_args(argv)
    if not namespace.config:
        return {}, remaining, None
    if None in namespace.config:
        raise OptionError("`--config` lacks its value: a file, or the name of a recipe, such as flux.1-dev-24gb.")
    if len(namespace.config) > 1:
        raise OptionError(
            f"`--config` names {len(namespace.config)} files. Pass one, and other options on the command line."
        )
    (name,) = namespace.config
    path = Path(find_yaml("config", name, "recipes"))
    config = _read_yaml("config", name, path, _Loader)
    if not isinstance(config, dict):
        raise OptionError(f"`--config` is {name!r}, but must contain options, such as `max_steps: 100`.")
    if flow_factory.is_flow_factory(config):
        raise OptionError(flow_factory.describe(config, name))
    is_recipe = path.resolve().parent == Path(__file__).resolve().parents[1] / "recipes"
    return config, remaining, path.stem if is_recipe else None


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
    file = None if str(file).lower() in ("none", "null") else file  # to leave out that of a file
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
        settings = _read_yaml("accelerate_config", file, path, yaml.SafeLoader)
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
