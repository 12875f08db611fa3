# SPDX-License-Identifier: Apache-2.0
"""The console script `paco-trl`: `paco-trl <command> [options]`."""

import sys
from importlib import import_module


# Command -> its module, which has a `main(arguments) -> int`, and what it does. Imported only when it is run: torch,
# diffusers and TRL take seconds.
COMMANDS = {
    "doctor": ("paco_trl.commands.doctor", "checks a model, a dataset and settings before training"),
    "push": ("paco_trl.commands.push", "uploads to the Hub what a run has saved, and its pending uploads"),
    "merge": ("paco_trl.commands.merge", "merges an adapter into the weights of its base model"),
    "serve-reward": ("paco_trl.commands.serve_reward", "serves a judge with vLLM, for rewards over HTTP"),
}


def _usage() -> str:
    lines = [f"  {name:<12} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        ["usage: paco-trl <command> [options]", "", *lines, "", "`paco-trl <command> --help` lists the options."]
    )


def name_first(arguments: list[str], option: str) -> list[str]:
    """Name the first argument of a command: `paco-trl push folder` is `paco-trl push --folder folder`."""
    return [option, *arguments] if arguments and not arguments[0].startswith("-") else arguments


def say(command: str, message: str) -> None:
    """Write a message of a command to stderr."""
    sys.stderr.write(f"paco-trl {command}: {message}\n")
    sys.stderr.flush()


def main(arguments: list[str] | None = None) -> int | str | None:
    """Run a command; return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["--help"], ["-h"]):
        sys.stdout.write(_usage() + "\n")
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        problem = f"unknown command {arguments[0]!r}" if arguments else "a command is missing"
        sys.stderr.write(f"{_usage()}\n\npaco-trl: {problem}; it must be one of: {', '.join(COMMANDS)}.\n")
        return 2
    # An unknown option is shown with its value, and this one is secret
    if arguments[0] != "doctor" and any(word.replace("-", "_").startswith("__hub_token") for word in arguments):
        say(
            arguments[0],
            "a token must not be on the command line, where others can read it. Log in with `hf auth login`, or set the "
            "environment variable HF_TOKEN.",
        )
        return 2
    module, _ = COMMANDS[arguments[0]]
    try:
        return import_module(module).main(arguments[1:])
    except (ValueError, OSError) as error:
        say(arguments[0], str(error))
        return 1
    except SystemExit as end:  # argparse, after `--help` or a value of the wrong type
        return end.code
    except KeyboardInterrupt:  # also during the imports, which take seconds
        sys.stderr.write(f"\npaco-trl {arguments[0]}: stopped.\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
