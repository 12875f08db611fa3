# SPDX-License-Identifier: Apache-2.0
"""The console script `paco-trl`: `paco-trl <command> [options]`."""

import os
import re
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import yaml


# Command -> its module, which has a `main(arguments) -> int`, and what it does. Imported only when it is run: torch,
# diffusers and TRL take seconds.
COMMANDS = {
    "grpo": ("paco_trl.commands.grpo", "trains an image model with PaCo-GRPO"),
    "nft": ("paco_trl.commands.nft", "trains an image model with DiffusionNFT"),
    "reward": ("paco_trl.commands.reward", "trains a judge of consistency"),
    "evaluate": ("paco_trl.commands.evaluate_generation", "evaluates an image model, or a judge"),
    "build": ("paco_trl.commands.build", "builds a dataset of pairs for a judge"),
    "doctor": ("paco_trl.commands.doctor", "checks a model, a dataset and settings before training"),
    "push": ("paco_trl.commands.push", "uploads to the Hub what a run has saved, and its pending uploads"),
    "space": ("paco_trl.commands.space", "writes a Space that compares base model and adapter, and runs it"),
    "merge": ("paco_trl.commands.merge", "merges an adapter into the weights of its base model"),
    "serve-reward": ("paco_trl.commands.serve_reward", "serves a judge with vLLM, for rewards over HTTP"),
    "env": ("paco_trl.commands.env", "prints versions and devices, for a bug report"),
}
_OF_THE_USER = (ValueError, OSError, ImportError)
_TRAINING = ("grpo", "nft", "reward")
_RESUMING = ("build", "evaluate")
_PATIENCE = 10.0  # seconds
# All files with options
_OWN = ("build_arguments", "evaluate_reward", "evaluation_arguments", "memory_check", "reward", "script_arguments")
_OPTION_FILES = (
    *(f"paco_trl/commands/{name}.py" for name in _OWN),
    *(f"paco_trl/trainer/paco_{name}_config.py" for name in ("grpo", "nft", "reward")),
    *(f"trl/trainer/{name}_config.py" for name in ("base", "grpo", "sft")),
    "transformers/training_args.py",
)


def _usage() -> str:
    lines = [f"  {name:<12} {summary}" for name, (_, summary) in COMMANDS.items()]
    launch = f"{', '.join(_TRAINING + _RESUMING)} start several processes with `--num_processes 8`, or as an"
    more = ["`paco-trl <command> --help` lists the options.", f"{launch} `--accelerate_config FILE` says."]
    return "\n".join(["usage: paco-trl <command> [options]", "       paco-trl --version", "", *lines, "", *more])


def name_first(arguments: list[str], option: str) -> list[str]:
    """Name the first argument of a command: `paco-trl push folder` is `paco-trl push --folder folder`."""
    return [option, *arguments] if arguments and not arguments[0].startswith("-") else arguments


def say(command: str, message: str) -> None:
    """Write a message of a command to stderr."""
    sys.stderr.write(f"paco-trl {command}: {message}\n")
    sys.stderr.flush()


def answer(command: str, run: Callable[[], int | None]) -> int | str | None:
    """Run a command; return its exit code, with the errors of its user in one line."""
    try:
        return run()
    except Exception as error:
        # Of other types it is a fault, of which a traceback tells more
        if not isinstance(error, _OF_THE_USER) and not type(error).__module__.startswith("paco_trl."):
            raise
        if os.environ.get("RANK", "0") != "0":
            time.sleep(_PATIENCE)  # mostly the first process says the same, and the launcher then ends this one
        say(command, str(error))
        return 1
    except SystemExit as end:  # argparse, after `--help` or a value of the wrong type
        return end.code
    except KeyboardInterrupt as interrupt:  # also during the imports, which take seconds
        if os.environ.get("RANK", "0") == "0":
            how = " Rerun the same command to resume." if command in _RESUMING else ""
            sys.stderr.write(f"\npaco-trl {command}: {str(interrupt) or f'stopped.{how}'}\n")
        return 130


def _launch(command: str, words: list[str]) -> None:
    """Replace this process by `accelerate launch` of the same command if its options are given, under TRL's names."""
    parser = ArgumentParser(prog=f"paco-trl {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--accelerate_config", dest="config_file")
    parser.add_argument("--num_processes", type=int)
    options, rest = parser.parse_known_args(words)
    if given := [f"--{name}={value}" for name, value in vars(options).items() if value is not None]:
        words = ["accelerate.commands.launch", *given, "-m", "paco_trl.commands.main", command, *rest]
        os.execv(sys.executable, [sys.executable, "-m", *words])


def check_options(words: list[str], required: str | None = None) -> None:
    """Refuse unknown options and texts for numbers, by the text of the files: the imports of the parser take seconds."""
    kinds: dict[str, set[str]] = {"config": {"str"}, "env": {"str"}, "help": {"bool"}}
    for source in _OPTION_FILES:
        package, _, file = source.partition("/")
        folders = getattr(find_spec(package), "submodule_search_locations", None) or [""]
        text = Path(folders[0], file).read_text(encoding="utf-8")
        for name, kind, alias in re.findall(r'^    (\w+): ([^=\n]+)|"--(\w+)"', text, flags=re.M):
            kinds.setdefault(name or alias, set()).add(kind.split("|")[0].strip())
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    values = {word[2:]: value for word, value in zip(words, [*words[1:], "--"], strict=True) if word[:2] == "--"}
    given = list(values)
    if file := values.get("config", ""):
        try:
            settings = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"'{file}' is not valid YAML: {' '.join(str(error).split())}") from error
        given += map(str, settings) if isinstance(settings, dict) else []
    for option in given:
        # As argparse: a beginning is enough, and `--no_` turns a switch off
        start = option.replace("-", "_")
        if not any(name.startswith((start, start.removeprefix("no_"))) for name in kinds):
            hint = [f" Did you mean `--{name}`?" for name in get_close_matches(start, kinds, 1)]
            raise ValueError(f"there is no option `--{option}`." + "".join(hint))
    for option, value in values.items():
        kind = kinds.get(option.replace("-", "_"), {""})
        if kind <= {"int", "float"} and not value.startswith("--"):
            try:
                (float if "float" in kind else int)(value)
            except ValueError:
                expected = "a number" if "float" in kind else "an integer"
                raise ValueError(f"`--{option}` is {value!r}, which is not {expected}.") from None
    if required and not {"help", "h"} & set(given) and not any(required.startswith(option) for option in given):
        raise ValueError(f"`--{required}` is missing: a Hub id, a directory or a file of prompts.")


def main(arguments: list[str] | None = None) -> int | str | None:
    """Run a command; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["--help"], ["-h"], ["--version"]):
        sys.stdout.write((import_module("paco_trl").__version__ if "--version" in arguments else _usage()) + "\n")
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        problem = f"unknown command {arguments[0]!r}" if arguments else "a command is missing"
        sys.stderr.write(f"{_usage()}\n\npaco-trl: {problem}; it must be one of: {', '.join(COMMANDS)}.\n")
        return 2
    command, *words = arguments
    # An unknown option is shown with its value, and this one is secret
    is_secret = any(word.replace("-", "_").startswith("__hub_token") for word in words)
    if command not in ("doctor", *_TRAINING) and is_secret:
        say(
            command,
            "a token must not be on the command line, where others can read it. Log in with `hf auth login`, or set the "
            "environment variable HF_TOKEN.",
        )
        return 2

    def run() -> int | None:
        if command in _TRAINING + _RESUMING:
            _launch(command, words)
        if command in ("doctor", *_TRAINING, *_RESUMING):
            check_options(words, "dataset_name" if command in ("grpo", "nft") else None)
        return import_module(COMMANDS[command][0]).main(words)

    return answer(command, run)


def run_script(command: str, *words: str) -> None:
    """Run a command with the options of a script."""
    if code := main([command, *words, *sys.argv[1:]]):
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
