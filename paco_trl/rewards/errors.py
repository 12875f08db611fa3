# SPDX-License-Identifier: Apache-2.0
"""Errors of rewards; the command line needs them before it imports torch."""

import importlib


class RewardError(RuntimeError):
    """A reward raised, did not return a list of numbers, or has a judge that is down. It stops a run."""


def named_error(name: str, error: BaseException, caller: str) -> RewardError:
    """Name the reward that has raised an error, and keep only the frames after the caller's and an import's."""
    step, before = error.__traceback__, (caller, importlib.__file__, "<frozen importlib")
    while step is not None and step.tb_frame.f_code.co_filename.startswith(before):
        step = step.tb_next
    error.__traceback__ = step
    where = "" if step is None else f" ({step.tb_frame.f_code.co_filename}:{step.tb_lineno})"
    message = str(error).rstrip(".")
    return RewardError(f"The reward '{name}' raised {type(error).__name__}: {message}{where}.")
