# SPDX-License-Identifier: Apache-2.0
"""Rewards as they are called: a failure is an error with the reward's name, never a number."""

import functools
import math
from collections.abc import Callable, Iterable

import torch
from datasets import Dataset, Image
from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable


class RewardError(RuntimeError):
    """A reward raised, gave no list of numbers, or has a judge that is down. It stops a run; what was trained is saved."""


def check_reward_functions(reward_funcs: Callable | list[Callable]) -> tuple[list[Callable], list[str]]:
    """
    Checks the reward functions and wraps them so that what they return is checked too.

    Args:
        reward_funcs (`Callable` or `list[Callable]`):
            Rewards, sync or async: `(prompts, completions, **columns) -> list[float | None]`.

    Returns:
        `tuple[list[Callable], list[str]]`: the wrapped functions and their names.

    Raises:
        TypeError: a reward is not such a callable.
        ValueError: there is none, or two have the same name.
    """
    reward_funcs = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
    if not reward_funcs:
        raise ValueError("`reward_funcs` is empty: there is nothing to train for.")
    for function in reward_funcs:
        if not callable(function) or isinstance(function, nn.Module | type):
            raise TypeError(
                f"A reward must be a callable `(prompts, completions, **columns) -> list[float | None]`, got "
                f"{function!r}. TRL's reward models (ids and modules) score text; see `paco_trl.rewards` for images."
            )
    names = [get_callable_name(function) for function in reward_funcs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{names.count(name)} rewards are named '{name}', so their metrics `rewards/{name}/mean` would be "
                "mixed up. Give each its own `__name__`."
            )
    return [_checked(function, name) for function, name in zip(reward_funcs, names, strict=True)], names


def check_reward_weights(weights: list[float] | None, names: list[str], aggregation: str) -> torch.Tensor:
    """
    Checks the weights of the rewards before anything is drawn.

    Args:
        weights (`list[float]` or `None`):
            `args.reward_weights`; `None` is 1 for each.
        names (`list[str]`):
            Names of the rewards.
        aggregation (`str`):
            How rewards are aggregated.

    Returns:
        `torch.Tensor` of shape `(len(names),)`.

    Raises:
        ValueError: another number of weights than rewards, weights that are not finite or all 0, or a negative one
            where there is a geometric mean.
    """
    weights = weights if weights is not None else [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(
            f"`reward_weights` has {len(weights)} entries ({weights}) for {len(names)} rewards ({', '.join(names)}); "
            "give one for each."
        )
    if not all(math.isfinite(weight) for weight in weights) or not any(weights):
        raise ValueError(f"`reward_weights` is {weights}; weights must be finite, and at least one of them not 0.")
    if aggregation == "geometric_mean" and min(weights) < 0:
        raise ValueError(
            f"`reward_weights` is {weights}, but a geometric mean has no negative weights. Use another "
            "`multi_objective_aggregation`, or turn the reward around."
        )
    return torch.tensor(weights, dtype=torch.float32)


def check_columns(reward_funcs: Callable | list[Callable], dataset: Dataset, where: str) -> None:
    """
    Checks that a dataset has what rewards say they need, before a model is loaded: columns (`needed_columns`), filled in
    every row, and panels (`min_panels`).

    Args:
        reward_funcs (`Callable` or `list[Callable]`):
            Rewards as the user gave them; one without these attributes is not asked.
        dataset ([`~datasets.Dataset`]):
            Dataset.
        where (`str`):
            What it is, for the error.

    Raises:
        ValueError: a column is missing or empty in a row, or a row has too few panels.
    """
    for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        name, least = get_callable_name(function), getattr(function, "min_panels", 1)
        # Rows without a layout, as of editing prompts, have one panel
        layouts = [
            [count or 1 for count in dataset[side]] if side in dataset.column_names else [1] * len(dataset)
            for side in ("rows", "cols")
        ]
        for row, (rows, cols) in enumerate(zip(*layouts, strict=True)):
            if rows * cols < least:
                raise ValueError(
                    f"The reward '{name}' compares panels, at least {least}, but row {row} of {where} has "
                    f"{rows} x {cols}. Leave the row out, or use another reward."
                )
        for column in getattr(function, "needed_columns", ()):
            if column == "image" and "images" in dataset.column_names:
                continue  # several source images
            if column not in dataset.column_names:
                raise ValueError(
                    f"The reward '{name}' needs the column `{column}`, but {where} has "
                    f"{', '.join(dataset.column_names)}. Add it, or use another reward."
                )
            if column in ("image", "images") or isinstance(
                dataset.features[column], Image
            ):  # would be decoded, and is checked where it is used
                continue
            for row, value in enumerate(dataset[column]):
                if not (value.strip() if isinstance(value, str) else value):
                    raise ValueError(
                        f"The reward '{name}' needs the column `{column}`, which is {value!r} in row {row} of {where}. "
                        "Fill it, or leave the row out."
                    )


def check_required(required: list[bool] | None, names: list[str], weights: torch.Tensor) -> list[bool]:
    """
    Checks which rewards are required.

    Args:
        required (`list[bool]` or `None`):
            `args.reward_required`; `None` is all.
        names (`list[str]`):
            Names of the rewards.
        weights (`torch.Tensor` of shape `(len(names),)`):
            Their weights.

    Returns:
        `list[bool]`.

    Raises:
        ValueError: another number of entries than rewards, or none of nonzero weight is required.
    """
    required = [True] * len(names) if required is None else required
    if len(required) != len(names):
        raise ValueError(
            f"`reward_required` has {len(required)} entries ({required}) for {len(names)} rewards "
            f"({', '.join(names)}); give one for each."
        )
    if not any(is_required and weight != 0 for is_required, weight in zip(required, weights.tolist(), strict=True)):
        raise ValueError(
            f"`reward_required` is {required}, so that no reward of nonzero weight is required, and a run could go on "
            "without any. Make one required."
        )
    return required


def _checked(function: Callable, name: str) -> Callable:
    if is_async_callable(function):

        async def call(*args, **kwargs):
            try:
                rewards = await function(*args, **kwargs)
            except Exception as error:
                raise RewardError(_raised(name, error)) from error
            return _check_rewards(rewards, name, len(kwargs["completions"]))

    else:

        def call(*args, **kwargs):
            try:
                rewards = function(*args, **kwargs)
            except Exception as error:
                raise RewardError(_raised(name, error)) from error
            return _check_rewards(rewards, name, len(kwargs["completions"]))

    # Not functools.wraps: a callable object has none of the attributes it copies
    functools.update_wrapper(call, function, assigned=("__doc__",), updated=())
    call.__name__ = name
    call.model_name = getattr(function, "model_name", None)  # for cards
    return call


def _raised(name: str, error: Exception) -> str:
    return f"The reward '{name}' raised {type(error).__name__}: {error}"


def _check_rewards(rewards, name: str, count: int) -> list[float | None]:
    if not isinstance(rewards, Iterable):
        raise RewardError(
            f"The reward '{name}' returned {rewards!r}; it must give a list with a value for each image."
        )
    rewards = list(rewards)
    if len(rewards) != count:
        raise RewardError(
            f"The reward '{name}' returned {len(rewards)} values for {count} images; it must give one each."
        )
    for index, reward in enumerate(rewards):
        if reward is None:
            continue
        try:
            is_number = math.isfinite(reward)
        except TypeError:
            is_number = False
        if not is_number:
            raise RewardError(
                f"The reward '{name}' returned {reward!r} for image {index}. Return None for an image that could not "
                "be scored: it is then left out, and counted."
            )
    return rewards
