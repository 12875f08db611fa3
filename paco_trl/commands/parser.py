# SPDX-License-Identifier: Apache-2.0
"""Parser of the commands, and commands in stages."""

import argparse
import inspect
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from trl import TrlParser


_TRUTH = ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0")  # values of a switch


class CommandParser(TrlParser):
    """
    Parser whose help lists the package's options first and no `hidden` ones, and that checks the values of a file.

    `positional` is an option that may be given without its name: `paco-trl push paco-flux`.
    """

    def __init__(
        self,
        dataclass_types: type | tuple[type, ...],
        hidden: Collection[str] = (),
        positional: str | None = None,
        **kwargs,
    ):
        named = "" if positional is None else f"{positional.removesuffix('_name_or_path').upper()} "
        super().__init__(dataclass_types, **{"usage": f"%(prog)s {named}[--config FILE] [options]", **kwargs})
        self.positional = positional
        for action in self._actions:
            if action.dest in hidden or action.dest == "fsdp_config":  # training refuses FSDP
                action.help = argparse.SUPPRESS
            elif action.dest == "model_init_kwargs":  # TRL's help speaks of language models
                action.help = "Arguments of the model's `from_pretrained`, as JSON, such as a revision."

    def format_help(self) -> str:
        """List the options of the package in front of those of TRL and transformers."""
        classes = [base for each in self.dataclass_types for base in each.__mro__]
        own = [each for each in classes if each.__module__.split(".")[0] not in ("builtins", "transformers", "trl")]
        names = {"help"}.union(*map(inspect.get_annotations, own))
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for title, is_own in (("options", True), ("options of TRL and transformers", False)):
            formatter.start_section(title)
            formatter.add_arguments([action for action in self._actions if (action.dest in names) is is_own])
            formatter.end_section()
        return formatter.format_help()

    def parse_args_and_config(self, args: Sequence[str] | None = None, **kwargs: Any) -> tuple:
        """Parse the options of the command line and of a file."""
        words = list(sys.argv[1:] if args is None else args)
        if self.positional is not None and (place := self._place_of_positional(words)) is not None:
            words.insert(place, f"--{self.positional}")
        return super().parse_args_and_config(words, **kwargs)

    def _place_of_positional(self, words: list[str]) -> int | None:
        """Find the first word that is neither an option nor the value of one."""
        place = 0
        while place < len(words) and words[place].startswith("-"):
            action = self._option_string_actions.get(words[place])
            takes_value = "=" not in words[place] and (action is None or action.nargs != 0)
            if takes_value and action is not None and action.nargs == "?":  # a switch, which may stand alone
                takes_value = words[place + 1 : place + 2] != [] and words[place + 1].lower() in _TRUTH
            place += 1 + takes_value
        return place if place < len(words) else None

    def set_defaults_with_config(self, **config: Any) -> list[str]:
        """Take the values of a YAML file: one value for a list of one, and an option by any of its names."""
        hints = {name: hint for each in self.dataclass_types for name, hint in get_type_hints(each).items()}
        for action in self._actions:
            for name in [option.lstrip("-") for option in action.option_strings if action.nargs != 0]:
                if name in config:
                    config[action.dest] = _fitting(name, config.pop(name), action, hints[action.dest])
        return super().set_defaults_with_config(**config)


def _fitting(name: str, value: Any, action: argparse.Action, hint: Any) -> Any:
    """Return a value of a YAML file as its option takes it."""
    is_union = isinstance(hint, types.UnionType) or get_origin(hint) is Union
    kinds = {get_origin(kind) or kind for kind in (get_args(hint) if is_union else [hint])}
    if value is None and type(None) in kinds:
        return None
    if value is None:
        raise ValueError(f"`{name}` has no value in the file. Give it one, or leave the line out.")
    if action.nargs != "+":
        return _checked(name, value, kinds)
    convert: Any = action.type  # argparse converts a text, but none in a list
    values = [_checked(name, each, {convert}) for each in (value if isinstance(value, list) else [value])]
    try:
        return [convert(each) if isinstance(each, str) else each for each in values]
    except ValueError as error:
        raise ValueError(f"`{name}` is {value!r} in the file, which does not fit: {error}.") from error


def _checked(name: str, value: Any, kinds: set) -> Any:
    fits = any(not isinstance(kind, type) or isinstance(value, kind) for kind in kinds) or isinstance(value, str)
    fits = fits or isinstance(value, int) and float in kinds
    if isinstance(value, bool) or not fits:
        # A text may be True or a number, such as `resume_from_checkpoint`, but not that of a choice: YAML's `no` is False
        is_choice = any(isinstance(kind, type) and issubclass(kind, Enum) for kind in kinds)
        fits = bool in kinds or str in kinds and not is_choice and isinstance(value, (bool, int, float))
    if not fits:
        names = " or ".join(sorted(getattr(kind, "__name__", str(kind)) for kind in kinds - {type(None)}))
        raise ValueError(f"`{name}` is {value!r} in the file, but takes {names}. Put a text such as `no` in quotes.")
    return value


def run_stage(words: list[str], stages: Mapping[str, tuple[type, Any]], program: str, text: str | None) -> int:
    """Run the stage that the first word names, with the options behind it."""
    if not words or words[0] in ("-h", "--help"):
        lines = [f"  {name:<9} {arguments.__doc__}" for name, (arguments, _) in stages.items()]
        sys.stdout.write("\n".join([(text or "").strip(), "", "Stages:", *lines, ""]))
        return 0
    if words[0] not in stages:
        raise ValueError(f"There is no stage {words[0]!r}. It must be one of: {', '.join(stages)}.")
    arguments, run = stages[words[0]]
    run(*CommandParser(arguments, prog=f"{program} {words[0]}").parse_args_and_config(words[1:]))
    return 0
