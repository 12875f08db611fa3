# SPDX-License-Identifier: Apache-2.0
"""Help texts of options from the docstrings that describe them."""

import dataclasses
import inspect
import re
from types import MappingProxyType
from typing import TypeVar


Config = TypeVar("Config", bound=type)

# `name (`type`, ...), other (`type`, ...):` and the indented lines below it
_PARAMETER = re.compile(r"^ {4}(\w+ \(`.*\)):\n((?: {8}.*\n|\n)+)", re.MULTILINE)
# Markdown links, references and quoted values, as a terminal shows them
_MARKUP = ((r"\[([^`\]]+)\]\([^)]+\)", r"\1"), (r"\[`~?(?:\w+\.)*(\w+)`\]", r"`\1`"), (r"`\"([^`\"]*)\"`", r"'\1'"))


def help_from_docstring(config: Config) -> Config:
    """Decorate a dataclass of options: the help of each of its own fields is its description in the docstring."""
    help_of: dict[str, str] = {}
    for names, description in _PARAMETER.findall(inspect.cleandoc(config.__doc__ or "") + "\n"):
        text = " ".join(description.split())
        for pattern, shown in _MARKUP:
            text = re.sub(pattern, shown, text)
        help_of |= dict.fromkeys(re.findall(r"(\w+) \(`", names), text.replace("%", "%%"))  # argparse formats it
    inherited = {
        id(field) for parent in config.__mro__[1:] for field in getattr(parent, "__dataclass_fields__", {}).values()
    }
    for field in dataclasses.fields(config):
        if id(field) not in inherited and field.name in help_of:
            field.metadata = MappingProxyType({**field.metadata, "help": help_of[field.name]})
    return config
