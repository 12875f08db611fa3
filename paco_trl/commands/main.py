# SPDX-License-Identifier: Apache-2.0
"""The console script `paco-trl`: `paco-trl <command> [options]`."""

import sys
from importlib import import_module


# Command -> its module, which has a `main(arguments) -> int`, and what it does. The modules bring in torch, diffusers
# and TRL, which take seconds: only the one that is asked for is imported.
COMMANDS = {
    "doctor": ("paco_trl.commands.doctor", "checks a model, a dataset and settings before a training run"),
    "serve-reward": ("paco_trl.commands.serve_reward", "serves a judge with vLLM, for rewards that ask it over HTTP"),
}


def _usage() -> str:
    lines = [f"  {name:<12} {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        ["usage: paco-trl <command> [options]", "", *lines, "", "`paco-trl <command> --help` lists the options."]
    )


def main(arguments: list[str] | None = None) -> int:
    """
    Runs a command.

    Args:
        arguments (`list[str]`, *optional*):
            Name of the command and its options. If `None`, those of the command line.

    Returns:
        `int`: exit code of the command; 2 when there is no such command.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] in (["--help"], ["-h"]):
        sys.stdout.write(_usage() + "\n")
        return 0
    if not arguments or arguments[0] not in COMMANDS:
        problem = f"unknown command {arguments[0]!r}" if arguments else "a command is missing"
        sys.stderr.write(f"{_usage()}\n\npaco-trl: {problem}; it must be one of: {', '.join(COMMANDS)}.\n")
        return 2
    module, _ = COMMANDS[arguments[0]]
    return import_module(module).main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
