# SPDX-License-Identifier: Apache-2.0
"""Calls of reward functions: a failure is an error with the reward's name, never a number."""

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from datasets import Dataset, Image
from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable


# What a reward gets besides the columns of the dataset, see `RewardScorer`
_FROM_TRAINER = {
    "prompts", "completions", "completion_ids", "panel_images", "trainer_state", "log_extra", "log_metric",
}  # fmt: skip
_ALWAYS_GIVEN = _FROM_TRAINER | {"rows", "cols"}


class RewardError(RuntimeError):
    """A reward raised, did not return a list of numbers, or has a judge that is down. It stops a run."""


def check_reward_functions(reward_funcs: Callable | list[Callable]) -> tuple[list[Callable], list[str]]:
    """Check the reward functions, wrap them to check what they return, and return these with their names."""
    reward_funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if not reward_funcs:
        raise ValueError("`reward_funcs` is empty. Pass at least one reward.")
    for function in reward_funcs:
        if not callable(function) or isinstance(function, nn.Module | type):
            raise TypeError(
                f"A reward must be a callable `(prompts, completions, **columns) -> list[float | None]`, got "
                f"{function!r}. TRL's reward models (ids and modules) score text; see `paco_trl.rewards` for images."
            )
    names = [get_callable_name(function) for function in reward_funcs]
    for name, function in zip(names, reward_funcs, strict=True):
        if not any(each.kind is each.VAR_KEYWORD for each in _parameters(function)):
            raise ValueError(
                f"The reward '{name}' has no `**kwargs`, but gets every column of the dataset and `trainer_state`. Add "
                "`**kwargs` to its parameters."
            )
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{names.count(name)} rewards are named '{name}', so their metrics `rewards/{name}/mean` would "
                "collide. Give each its own `__name__`."
            )
    return [_checked(function, name) for function, name in zip(reward_funcs, names, strict=True)], names


def check_reward_weights(weights: list[float] | None, names: list[str], aggregation: str) -> torch.Tensor:
    """Check the weights of the rewards (`None`: all 1) before generation, and return them as `(K,)`."""
    weights = _one_each(weights, 1.0, "reward_weights", names)
    if not all(math.isfinite(weight) for weight in weights) or not any(weights):
        raise ValueError(f"`reward_weights` is {weights}; weights must be finite, and at least one of them not 0.")
    if aggregation == "geometric_mean" and min(weights) < 0:
        raise ValueError(
            f"`reward_weights` is {weights}, but a geometric mean has no negative weights. Use another "
            "`multi_objective_aggregation`, or negate the reward."
        )
    return torch.tensor(weights, dtype=torch.float32)


def check_columns(reward_funcs: Callable | list[Callable], dataset: Dataset, where: str) -> None:
    """Check that a dataset has the columns (parameters, `needed_columns`) and panels (`min_panels`) of rewards."""
    if taken := sorted(_FROM_TRAINER & set(dataset.column_names)):
        raise ValueError(
            f"{where[0].upper()}{where[1:]} has the column(s) {', '.join(taken)}, but rewards get these from the trainer: "
            "the dataset's would be ignored. Rename them (`rename_column`), or remove them (`remove_columns`)."
        )
    for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        name, least = get_callable_name(function), getattr(function, "min_panels", 1)
        # Rows without a layout, such as editing prompts, have one panel
        layouts = [
            [count or 1 for count in dataset[side]] if side in dataset.column_names else [1] * len(dataset)
            for side in ("rows", "cols")
        ]
        for row, (rows, cols) in enumerate(zip(*layouts, strict=True)):
            if rows * cols < least:
                raise ValueError(
                    f"The reward '{name}' compares panels, at least {least}, but row {row} of {where} has "
                    f"{rows} x {cols}. Remove the row, or use another reward."
                )
        given = _ALWAYS_GIVEN | set(dataset.column_names)
        for each in _parameters(function):
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                if each.name not in given - {"prompt"}:
                    raise ValueError(
                        f"The reward '{name}' has the parameter `{each.name}`, which {where} has no column for. It has "
                        f"{', '.join(dataset.column_names)}, and rewards also get {', '.join(sorted(_ALWAYS_GIVEN))}."
                    )
        for column in getattr(function, "needed_columns", ()):
            if column == "image" and "images" in dataset.column_names:
                continue  # several source images
            if column not in dataset.column_names:
                raise ValueError(
                    f"The reward '{name}' requires the column `{column}`, but {where} has "
                    f"{', '.join(dataset.column_names)}. Add it, or use another reward."
                )
            if column in ("image", "images") or isinstance(dataset.features[column], Image):
                continue  # it would be decoded; the reward checks it
            for row, value in enumerate(dataset[column]):
                if not (value.strip() if isinstance(value, str) else value):
                    raise ValueError(
                        f"The reward '{name}' requires the column `{column}`, which is {value!r} in row {row} of {where}. "
                        "Fill it, or remove the row."
                    )


def check_required(required: list | None, names: list[str], weights: torch.Tensor) -> list[bool]:
    """Check which rewards are required (`None`: all); one of nonzero weight must be."""
    required = _one_each(required, True, "reward_required", names)
    if not any(is_required and weight != 0 for is_required, weight in zip(required, weights.tolist(), strict=True)):
        raise ValueError(f"`reward_required` is {required}: no reward of nonzero weight is required. Require one.")
    return required


def _one_each(values: list | None, default, option: str, names: list[str]) -> list:
    values = [default] * len(names) if values is None else values
    if len(values) != len(names):
        raise ValueError(
            f"`{option}` has {len(values)} entries ({values}) for {len(names)} rewards ({', '.join(names)}). Pass one "
            "for each."
        )
    return values


def _parameters(function: Callable) -> list[inspect.Parameter]:
    """Return the parameters of a callable."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of what is not written in Python
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _checked(function: Callable, name: str) -> Callable:
    async def call_async(*args, **kwargs):
        with _named_errors(name):
            rewards = function(*args, **kwargs)
            if inspect.isawaitable(rewards):  # a subclass may have a call of its own
                rewards = await rewards
        return _check_rewards(rewards, name, len(kwargs["completions"]))

    def call_sync(*args, **kwargs):
        with _named_errors(name):
            rewards = function(*args, **kwargs)
        return _check_rewards(rewards, name, len(kwargs["completions"]))

    # A call of a reward with a judge on a server returns a coroutine, which its type does not tell
    is_async = getattr(function, "is_async", False) or is_async_callable(function)
    call: Any = call_async if is_async else call_sync
    # Not functools.wraps: a callable object lacks the attributes that it copies
    functools.update_wrapper(call, function, assigned=("__doc__",), updated=())
    call.__name__ = name
    call.model_name = getattr(function, "model_name", None)  # for cards
    return call


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # The line in the reward, after those of this file
        places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        where = f" ({places[0].filename}:{places[0].lineno})" if places else ""
        message = str(error).rstrip(".")
        raise RewardError(f"The reward '{name}' raised {type(error).__name__}: {message}{where}.") from error


def _check_rewards(rewards, name: str, count: int) -> list[float | None]:
    if not isinstance(rewards, Iterable):
        raise RewardError(f"The reward '{name}' returned {rewards!r}, but must return a list of one value per image.")
    rewards = list(rewards)
    if len(rewards) != count:
        raise RewardError(f"The reward '{name}' returned {len(rewards)} values for {count} images, not one for each.")
    for index, reward in enumerate(rewards):
        with suppress(TypeError):  # of what is not a number
            if reward is None or math.isfinite(reward):
                continue
        raise RewardError(
            f"The reward '{name}' returned {reward!r} for image {index}. Return None for an image that could not be "
            "scored: the image is then excluded and counted."
        )
    return rewards
