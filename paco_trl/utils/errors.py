# SPDX-License-Identifier: Apache-2.0
"""Which errors are a message to the user, and which are bugs, whose traceback tells more."""

import os
import traceback
from argparse import ArgumentError
from opcode import opmap

import yaml

from .option_checks import OptionError


TRACEBACK = "PACO_TRL_TRACEBACK"
# Errors of files, the network, memory or disk, and of options that the user typed
_USER_ERRORS = (OSError, ArgumentError, yaml.YAMLError)
_MACHINE_ERRORS = ("CheckpointError", "OutOfMemoryError", "SafetensorError")


def is_message_enough(error: BaseException) -> bool:
    """
    Tell whether the message of an error is enough: a `raise` of this package wrote it, or the machine is the reason, and the
    user has not asked for tracebacks.
    """
    if _wants_traceback():
        return False
    if isinstance(error, _USER_ERRORS) or type(error).__name__ in _MACHINE_ERRORS:
        return True
    if type(error).__module__.startswith("paco_trl."):  # such as the one that names a reward, after the reward's error
        return error.__cause__ is None or is_message_enough(error.__cause__)
    return _is_raised_in(error, "paco_trl")


def frames_of_cause(error: BaseException) -> str | None:
    """
    Format the error that an error of this package names, such as that of a user's reward, with its own frames: those of this
    package tell no more. `None` for a bug, and where the user has asked for tracebacks.
    """
    if _wants_traceback() or not type(error).__module__.startswith("paco_trl.") or error.__cause__ is None:
        return None
    return "".join(traceback.format_exception(error.__cause__))


def is_of_options(error: BaseException) -> bool:
    """Tell whether an error is of words that the user typed: where it was raised says no more."""
    return isinstance(error, ArgumentError | OptionError) or _is_raised_in(error, "paco_trl.commands")


def _wants_traceback() -> bool:
    return os.environ.get(TRACEBACK, "0") != "0"


def _is_raised_in(error: BaseException, package: str) -> bool:
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None or not f"{step.tb_frame.f_globals.get('__package__')}.".startswith(f"{package}."):
        return False
    # Not a call or an unpacking that failed
    return step.tb_frame.f_code.co_code[step.tb_lasti] == opmap["RAISE_VARARGS"]
