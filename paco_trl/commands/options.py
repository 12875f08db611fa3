# SPDX-License-Identifier: Apache-2.0
"""Options of the commands and examples."""

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *aliases: str) -> Any:
    """Declare a field of a dataclass of arguments, as [`~trl.TrlParser`] reads it."""
    metadata = {"help": help, "aliases": list(aliases)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)
