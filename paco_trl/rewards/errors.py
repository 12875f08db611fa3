# SPDX-License-Identifier: Apache-2.0
"""Errors of rewards; the command line needs them before it imports torch."""

import importlib
import inspect
from collections.abc import Callable


class RewardError(RuntimeError):
    """Stops a run: a reward raised, returned something other than a list of numbers, or its judge is down."""


def parameters_of(function: Callable) -> list[inspect.Parameter]:
    """Return the parameters of a reward."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable from C has no signature
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def check_keywords(name: str, function: Callable) -> None:
    """Check that a reward takes columns that it does not name."""
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters_of(function)):
        raise ValueError(f"The reward '{name}' lacks `**kwargs`. Add it: a reward gets every column of the dataset.")


def wrap_reward_error(name: str, error: BaseException, caller: str) -> RewardError:
    """Wrap a reward's error to name the reward; drop the leading traceback frames of the caller and of imports."""
    frame = error.__traceback__
    skipped_files = (caller, importlib.__file__, "<frozen importlib")
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(skipped_files):
        frame = frame.tb_next
    error.__traceback__ = frame
    where = "" if frame is None else f" ({frame.tb_frame.f_code.co_filename}:{frame.tb_lineno})"
    message = str(error).rstrip(".")
    return RewardError(f"The reward '{name}' raised {type(error).__name__}: {message}{where}.")
