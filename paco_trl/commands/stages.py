# SPDX-License-Identifier: Apache-2.0
"""Commands in stages, such as `paco-trl build`: the first word names one."""

import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module

from ..utils.errors import OptionError
from .parser import CommandParser


def import_function(name: str) -> Callable:
    """Import a function, `module:function`, that does a command's work. It takes seconds: parse the options first."""
    module, _, function = name.partition(":")
    return getattr(import_module(f"..{module}", __name__), function)


def run_stage(
    words: list[str],
    stages: Mapping[str, tuple[type, str]],
    command: str,
    text: str | None,
    check: Callable[..., Iterable[OptionError]],
    positional: Mapping[str, str] | None = None,
) -> int:
    """
    Run the stage that the first word names, with the options behind it.

    `stages` maps its name to the class of its options and its function, `module:function`.
    """
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<9} {arguments.__doc__}" for name, (arguments, _) in stages.items()]
        sys.stdout.write("\n".join([(text or "").strip(), "", "Stages:", *lines, ""]))
        return 0
    stage, *words = words
    if stage not in stages:
        near = "".join(f" Did you mean `{name}`?" for name in get_close_matches(stage, stages, 1))
        raise OptionError(f"There is no stage {stage!r}.{near} It must be one of: {', '.join(stages)}.")
    named = (positional or {}).get(stage)
    program = f"paco-trl {command} {stage}"
    arguments, function = stages[stage]
    parser = CommandParser(arguments, positional=named, is_launched=True, check=check, prog=program)
    (args,) = parser.parse_args_and_config(words)
    import_function(function)(args)
    return 0
