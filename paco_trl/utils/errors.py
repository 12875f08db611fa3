# SPDX-License-Identifier: Apache-2.0
"""Errors in options, and which errors need only their message and which a traceback."""

import linecache
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
    An invalid value of an option, or options that contradict each other.

    `options` are the fields involved, and `remedies` are other fields that the message recommends. If some of the
    options were typed and other options are in a file, the parser drops the first option of the file whose removal
    resolves the error.
    """

    def __init__(self, message: str, *options: str, remedies: Iterable[str] = ()):
        super().__init__(message)
        self.options = options
        self.remedies = tuple(remedies)


def raise_errors(errors: Iterable[OptionError]) -> None:
    """Raise the error if there is one; several are raised as one error with a line for each."""
    errors = [*errors]
    messages = list(dict.fromkeys(map(str, errors)))
    if len(messages) > 1:
        options = [name for error in errors for name in error.options]
        remedies = [name for error in errors for name in error.remedies]
        raise OptionError("\n- ".join([f"{len(messages)} problems:", *messages]), *options, remedies=remedies)
    if errors:
        raise errors[0]


def collect_errors(
    check: Callable[..., Any], *arguments: Any, options: Iterable[str] = (), **named: Any
) -> Iterator[OptionError]:
    """Yield the error that a check raises; `options` are the options it concerns, unless the error names its own."""
    try:
        check(*arguments, **named)
    except OptionError as error:
        yield error
    except (OSError, ValueError) as error:
        yield OptionError(str(error), *options)


def is_user_error(error: BaseException) -> bool:
    """
    Return whether the message of an error is enough: this package raised it, or the machine caused it, and the user has
    not asked for tracebacks.
    """
    if _wants_traceback():
        return False
    if isinstance(error, OptionError | OSError | yaml.YAMLError) or type(error).__name__ in _MACHINE_ERRORS:
        return True
    if _is_own(error):  # such as a `RewardError`, which a reward's own error caused
        return error.__cause__ is None or is_user_error(error.__cause__)
    return is_raised_by_package(error)


def frames_of_cause(error: BaseException) -> str | None:
    """
    Format the cause of an error of this package, such as an error in a user's reward, without the package's own
    frames. Return `None` for a bug, or if the user has asked for tracebacks.
    """
    if _wants_traceback() or not _is_own(error) or error.__cause__ is None:
        return None
    return "".join(traceback.format_exception(error.__cause__))


def _wants_traceback() -> bool:
    return os.environ.get(TRACEBACK, "0") != "0"


def _is_own(error: BaseException) -> bool:
    return type(error).__module__.startswith("paco_trl.")


def is_raised_by_package(error: BaseException) -> bool:
    """Return whether a `raise` of this package raised an error, not a call or an unpacking that failed in it."""
    if _is_own(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.startswith(_PACKAGE):
        return False
    # From the column on: the message of a `raise` may fail too
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0)
    return line[frames[-1].colno :].startswith("raise ")
