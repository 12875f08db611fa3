# SPDX-License-Identifier: Apache-2.0
"""Messages of a command, which speak of options as a command line has them."""

import re
import shlex
import sys
from ast import literal_eval

from ..utils.errors import OptionError


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
