# SPDX-License-Identifier: Apache-2.0
"""Check rewards, their weights, and the columns of the dataset that they need, before anything is generated."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image
from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable

from ..data.image_sets import SEPARATE


# Arguments of a reward besides the columns of the dataset, see `RewardScorer`
_TRAINER_ARGUMENTS = {
    "prompts", "completions", "completion_ids", "num_generations", "panel_images", "trainer_state", "log_extra",
    "log_metric",
}  # fmt: skip
_ALWAYS_PASSED = _TRAINER_ARGUMENTS | {"rows", "cols"}


class RewardFunction(Protocol):
    """
    A reward. It may also have these attributes; none is required.

    Attributes:
        __name__ (`str`):
            Name in metrics and messages; otherwise that of its class.
        is_async (`bool`):
            Whether a call returns a coroutine, which the type of an object does not tell.
        needed_columns (`tuple[str, ...]`):
            Columns that the dataset must have, filled in every row.
        min_panels (`int`):
            Fewest panels of a prompt.
        scores_grids (`bool`):
            Whether it reads the lines of a grid, which a set of separate images lacks.
        model, judge (`Any`):
            A `torch.nn.Module`, or what has one as its `model`: `offload_rewards` moves it.
        model_name (`str`):
            Model behind it, for cards.
        missing_score_reason (`str` or `None`):
            Why the last `None` was returned, for messages.
        fingerprint (`Any`):
            What else its values depend on: a resumed run notices a change, as it does of attributes with plain values,
            and of private ones that are named after an argument (`_threshold`).

    A parameter named `num_generations`, as in TRL an argument of each call, says that it compares the images of a prompt:
    it gets all of them in one call.
    """

    def __call__(self, prompts: list[str], completions: list[Image.Image], **columns: Any) -> Any:
        """Return a list of one `float` per completion, or `None` where it has none, or a coroutine of that list."""
        ...


def is_async_reward(function: RewardFunction) -> bool:
    """Tell whether a call returns a coroutine, also of an object that says so (a judge on a server)."""
    return getattr(function, "is_async", False) or is_async_callable(function)


def check_reward_functions(reward_funcs: list[Callable]) -> list[str]:
    """Check the reward functions, and return their names."""
    if not reward_funcs:
        raise ValueError("`reward_funcs` is empty. Pass at least one reward.")
    for function in reward_funcs:
        if isinstance(function, str):
            raise TypeError(
                f"A reward must be a callable, got {function!r}: names are for `--rewards` on the command line. Pass the "
                "reward, such as `paco_trl.rewards.ConsistencyReward(...)`."
            )
        if not callable(function) or isinstance(function, nn.Module | type):
            raise TypeError(
                f"A reward must be a callable `(prompts, completions, **columns) -> list[float | None]`, got {function!r}. "
                "TRL's reward models score text; see `paco_trl.rewards` for images."
            )
    names = [get_callable_name(function) for function in reward_funcs]
    for name, function in zip(names, reward_funcs, strict=True):
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters_of(function)):
            raise ValueError(
                f"The reward '{name}' gets every column of the dataset: add `**kwargs` to its parameters."
            )
        if names.count(name) > 1:
            raise ValueError(f"Several rewards are named '{name}'. Give each its own `__name__`, which metrics have.")
    return names


def check_columns(reward_funcs: Callable | list[Callable], dataset: Dataset, where: str) -> None:
    """Check that a dataset has the columns (parameters, `needed_columns`) and panels (`min_panels`, `scores_grids`) of rewards."""
    if taken := sorted(_TRAINER_ARGUMENTS & set(dataset.column_names)):
        raise ValueError(f"Rewards get {', '.join(taken)} from the trainer, not from {where}: rename these columns.")
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
                    f"The reward '{name}' compares at least {least} panels, but row {row} of {where} has {rows} x {cols}. "
                    "Remove the row, or use another reward."
                )
        kinds = dataset["layout"] if "layout" in dataset.column_names else ()
        if getattr(function, "scores_grids", False) and SEPARATE in kinds:
            raise ValueError(
                f"The reward '{name}' scores the lines of a grid, but row {kinds.index(SEPARATE)} of {where} is a set of "
                "separate images. Leave the reward out."
            )
        arguments = _ALWAYS_PASSED | set(dataset.column_names)
        for parameter in parameters_of(function):
            if parameter.default is parameter.empty and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                if parameter.name not in arguments - {"prompt"}:
                    has = ", ".join(sorted(arguments))
                    raise ValueError(
                        f"The reward '{name}' has the parameter `{parameter.name}`, but {where} gives it {has}."
                    )
        for column in getattr(function, "needed_columns", ()):
            if column == "image" and "images" in dataset.column_names:
                continue  # several source images
            if column not in dataset.column_names:
                has = ", ".join(dataset.column_names)
                raise ValueError(f"The reward '{name}' requires the column `{column}`, but {where} has {has}. Add it.")
            feature = dataset.features[column]
            if isinstance(getattr(feature, "feature", feature), ImageFeature):
                continue  # it would be decoded; the reward checks it
            for row, value in enumerate(dataset[column]):
                if not (value.strip() if isinstance(value, str) else value):
                    raise ValueError(
                        f"The reward '{name}' requires the column `{column}`, which is {value!r} in row {row} of "
                        f"{where}. Fill it, or remove the row."
                    )


def parameters_of(function: Callable) -> list[inspect.Parameter]:
    """Return the parameters of a reward."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # it is not written in Python
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]
