# SPDX-License-Identifier: Apache-2.0
"""Options of the commands: how they are declared and described, and which of several values an option takes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ..utils.errors import OptionError, raise_errors
from ..utils.text import read_json, shorten


# Typing an option drops these options of a file, which were set for its other value. Checks find all other
# contradictions.
_REPLACED = {
    "rewards": ("reward_weights", "reward_required"),
    "adapter": ("lora_r", "lora_alpha", "lora_target_modules"),
    "lora_r": ("lora_alpha",),
    "num_train_epochs": ("max_steps",),
    "save_steps": ("save_strategy",),
    "logging_steps": ("logging_strategy",),
}
# The paper's number of prompts does not fit another effective batch, nor its layers another model
_REPLACED_IN_RECIPES = {
    "gradient_accumulation_steps": ("num_prompts_per_generation",),
    "model_name_or_path": ("lora_target_modules",),
}


def option(default: Any, help: str, *aliases: str, **kwargs) -> Any:
    """Declare an option as a dataclass field. `kwargs` go to argparse."""
    metadata = {"help": help, "aliases": list(aliases), **kwargs}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def declared_options(config: type) -> dict[str, dict[str, Any]]:
    """Return the fields of a dataclass as options, in plain values."""
    options = {}
    hints = get_type_hints(config)
    choices = getattr(config, "choices", {})
    for declared in [declared for declared in fields(config) if declared.init]:
        hint = hints[declared.name]
        types = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
        option: dict[str, Any] = {"nullable": True} if NoneType in types else {}
        types = tuple(member for member in types if member is not NoneType)
        enums = [member for member in types if isinstance(member, type) and issubclass(member, Enum)]
        enums = enums or [member for member in types if get_origin(member) is Literal and str not in types]
        if enums:
            option["choices"] = [getattr(value, "value", value) for value in get_args(enums[0]) or enums[0]]
        elif str not in types and get_origin(types[0]) is list:
            option |= {"nargs": "+", "type": get_args(types[0])[0].__name__}
        elif str not in types and types[0] in (bool, int, float):
            option["type"] = types[0].__name__
        default = declared.default if declared.default_factory is MISSING else declared.default_factory()
        if default is MISSING:
            option["required"] = True
        elif default is not None:
            option["default"] = getattr(default, "value", default)
        if declared.name in choices:
            option["choices"] = [value for value in choices[declared.name] if not isinstance(value, bool)]
        options[declared.name] = option | declared.metadata
    return options


@cache
def config_options() -> dict[str, Any]:
    """Read the options of the configs as `make options` has described them: importing the classes takes seconds."""
    return read_json(Path(__file__).with_name("config_options.json"))


def find_unused(
    args: Any, names: Iterable[str], where: str, *because: str, chosen_only: bool = True
) -> Iterator[OptionError]:
    """
    Find options without an effect that you chose, or also those that a recipe has set. `where` says why, and
    `because` names the options that cause it.
    """
    chosen = getattr(args, "chosen", ())
    if unused := [name for name in names if (name in chosen if chosen_only else getattr(args, name) is not None)]:
        flags = ", ".join(f"`--{name}`" for name in unused)
        yield OptionError(f"{flags} would do nothing {where}. Leave it out.", *unused, *because)


@dataclass
class OptionSources:
    """Options by their source: typed ones override those of a file, which override presets."""

    typed: dict[str, Any]
    in_file: dict[str, Any]
    recipe: str | None  # its name, if the file is one of the package's
    presets: Set[str] = frozenset()  # options in `in_file` that are the defaults for the model

    def __post_init__(self):
        # The user's own choices, which a recipe's options are not
        self.chosen = frozenset(self.typed if self.recipe else self.typed | self.in_file)
        self.left_out: dict[str, str] = {}  # option of the file -> why it is left out
        replaced = _REPLACED | (_REPLACED_IN_RECIPES if self.recipe else {})
        for by in self.typed:
            names = [name for name in replaced.get(by, ()) if self.in_file.get(name) != "steps"]
            self.leave_out(dict.fromkeys(names, f"`--{by}`"))

    def leave_out(self, reasons: dict[str, str]) -> None:
        """Leave options out of the file, unless they were typed too."""
        self.left_out |= {
            name: why for name, why in reasons.items() if name in self.in_file and name not in self.typed
        }

    def values(self, *without: str) -> dict[str, Any]:
        """Return the values that apply; `without` names more options of the file to leave out."""
        left_out = {*self.left_out, *without}
        return {name: value for name, value in self.in_file.items() if name not in left_out} | self.typed

    def describe_left_out(self, final: Mapping[str, Any]) -> Iterator[str]:
        """Describe, by source and reason, the dropped options of the file that have another value in the end."""
        by_reason: dict[tuple[str, str], list[str]] = {}
        for name, why in self.left_out.items():
            if name not in final or final[name] != self.in_file[name]:
                # Weights say nothing without the rewards that they are of
                names = [*(["rewards"] if name == "reward_weights" and "rewards" in self.in_file else ()), name]
                source = "the model's defaults" if name in self.presets else self.recipe or "the file"
                settings = by_reason.setdefault((source, why), [])
                settings += [f"{name}={shorten(self.in_file[name])}" for name in names]
        for (source, why), settings in by_reason.items():
            yield f"without {', '.join(settings)} of {source}, because of {why}."

    def resolve_conflicts(self, find_errors: Callable[[dict[str, Any]], list[OptionError]]) -> None:
        """Drop options of the file that contradict the command line, and raise all other errors."""
        while errors := find_errors(self.values()):
            for error in errors:
                by = next((name for name in error.options if name in self.typed), None)
                if by is not None and (names := self._find_conflicting(error, find_errors)):
                    self.leave_out(dict.fromkeys(names, f"`--{by}`"))
                    break
            else:
                raise_errors(errors)

    def _find_conflicting(
        self, error: OptionError, find_errors: Callable[[dict[str, Any]], list[OptionError]]
    ) -> list[str]:
        """Return the first option of the file whose removal resolves an error, or all involved if only that does."""
        values = self.values()
        candidates = [name for name in error.options if name in values and name not in self.typed]
        for names in (*([name] for name in candidates), candidates):
            if not any({*other.options} <= {*error.options} for other in find_errors(self.values(*names))):
                return names
        return []
