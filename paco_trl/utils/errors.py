# SPDX-License-Identifier: Apache-2.0
"""Refusals of options, and which errors are a message to the user and which are bugs, whose traceback tells more."""

import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml


TRACEBACK = "PACO_TRL_TRACEBACK"
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
# Classes by name: their modules take seconds to import
_MACHINE_ERRORS = ("CheckpointError", "OutOfMemoryError", "SafetensorError")


class OptionError(ValueError):
    """
    Values of options that cannot be, or not together.

    `options` are the fields that take part, and `remedies` others that the message recommends. Where some of the options were
    typed and others are in a file, the first of the file's whose default mends it gives way.
    """

    def __init__(self, message: str, *options: str, remedies: Iterable[str] = ()):
        super().__init__(message)
        self.options, self.remedies = options, tuple(remedies)


def refuse(errors: Iterable[OptionError]) -> None:
    """Raise the error if there is one, and several as one error with a line for each."""
    errors = [*errors]
    messages = list(dict.fromkeys(map(str, errors)))
    if len(messages) > 1:
        options = [name for error in errors for name in error.options]
        remedies = [name for error in errors for name in error.remedies]
        raise OptionError("\n- ".join([f"{len(messages)} problems:", *messages]), *options, remedies=remedies)
    if errors:
        raise errors[0]


def errors_of(
    check: Callable[..., Any], *arguments: Any, options: Iterable[str] = (), **named: Any
) -> Iterator[OptionError]:
    """Yield what a check raises; `options` are those that it is about if it does not say so itself."""
    try:
        check(*arguments, **named)
    except OptionError as error:
        yield error
    except (OSError, ValueError) as error:
        yield OptionError(str(error), *options)


def is_message_enough(error: BaseException) -> bool:
    """
    Tell whether the message of an error is enough: a `raise` of this package wrote it, or the machine is the reason, and the
    user has not asked for tracebacks.
    """
    if _wants_traceback():
        return False
    if isinstance(error, OptionError | OSError | yaml.YAMLError) or type(error).__name__ in _MACHINE_ERRORS:
        return True
    if type(error).__module__.startswith("paco_trl."):  # such as the one that names a reward, after the reward's error
        return error.__cause__ is None or is_message_enough(error.__cause__)
    return _is_raised_here(error)


def frames_of_cause(error: BaseException) -> str | None:
    """
    Format the error that an error of this package names, such as that of a user's reward, with its own frames: those of this
    package tell no more. `None` for a bug, and where the user has asked for tracebacks.
    """
    if _wants_traceback() or not type(error).__module__.startswith("paco_trl.") or error.__cause__ is None:
        return None
    return "".join(traceback.format_exception(error.__cause__))


def _wants_traceback() -> bool:
    return os.environ.get(TRACEBACK, "0") != "0"


def _is_raised_here(error: BaseException) -> bool:
    """Tell whether an error is of a `raise` of this package, not of a call or an unpacking that failed in it."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE) and (frames[-1].line or "").startswith("raise ")
