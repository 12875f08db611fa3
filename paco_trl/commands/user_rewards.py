# SPDX-License-Identifier: Apache-2.0
"""Find rewards of the user's: in a file, or in an importable module."""

import inspect
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from ..rewards.errors import check_keywords, wrap_reward_error
from ..utils.errors import OptionError


def find_user_reward(path: str) -> Callable:
    """Import a function or a class: `my_rewards.py`, `my_rewards.py:my_reward` or `my_package.my_reward`."""
    source, _, name = path.partition(":") if path.endswith(".py") or ":" in path else path.rpartition(".")
    is_file = source.endswith(".py")
    file = Path(os.path.abspath(os.path.expanduser(source)) if is_file else source.replace(".", "/") + ".py")
    if not is_file and os.getcwd() not in sys.path:  # a script has its own directory there
        sys.path.insert(0, os.getcwd())
    try:
        module = _import_file(str(file), file.stat().st_mtime_ns) if is_file else import_module(source)
    except (Exception, SystemExit) as error:
        is_missing = (
            not is_file and isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}.")
        )
        if not is_missing and (not is_file or file.is_file()):  # but it raises, or something that it imports
            raise wrap_reward_error(path, error, __file__) from error
        advice = "Check the path" if is_file else "Write `my_rewards.py:my_reward` or `my_package.my_reward`"
        if "=" in path:
            advice += ". A weight, such as `=0.5`, is a number, for `--rewards` alone"
        what = f"file {source!r} of a reward" if is_file else f"reward {path!r}"
        raise OptionError(f"There is no {what}. {advice}.", "rewards") from None
    if not is_file and file.is_file() and not file.samefile(getattr(module, "__file__", None) or os.devnull):
        message = f"`{source}` is another module than the file '{file}' here. Write `{file}:{name}`."
        raise OptionError(message, "rewards")
    # Not what the module has only imported
    defined = [
        key
        for key, value in vars(module).items()
        if callable(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    if not name and len(defined) == 1:
        (name,) = defined
    if not defined and not hasattr(module, name):
        message = f"'{source}' has no function or class. Write a reward there: `def my_reward(prompts, completions, "
        raise OptionError(f"{message}**kwargs):`.", "rewards")
    if not hasattr(module, name):
        reason = f"has no reward `{name}`" if name else f"has {len(defined)} functions and classes"
        choices = ", ".join(f"`{source}:{key}`" for key in defined)
        raise OptionError(f"'{source}' {reason}. Name one: {choices}.", "rewards")
    reward = getattr(module, name)
    if not callable(reward):
        message = f"The reward {path!r} is {reward!r}, which cannot be called. Name a function or a class."
        raise OptionError(message, "rewards")
    if isinstance(reward, type):
        try:
            inspect.signature(reward).bind()
        except TypeError as error:
            raise OptionError(
                f"The reward {path!r} is a class, called without arguments, but {error}. Write `my_reward = "
                f"{name}(...)` there, and name `my_reward`.", "rewards",
            ) from None  # fmt: skip
    check_keywords(name, reward.__call__ if isinstance(reward, type) else reward)
    return reward


@cache
def _import_file(path: str, changed_at: int) -> ModuleType:
    """Import a file once, and again after a change, under a name that hides no other module."""
    spec: Any = spec_from_file_location(f"paco_trl_rewards_{Path(path).stem}", path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    if (folder := os.path.dirname(path)) not in sys.path:  # for what it imports from there, as a script does
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module
