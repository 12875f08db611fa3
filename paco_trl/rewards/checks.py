# SPDX-License-Identifier: Apache-2.0
"""Checks of reward functions, and of the columns they need, before anything is generated."""

from collections.abc import Callable
from typing import Any, Protocol

from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image
from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable

from ..data.image_sets import SEPARATE
from .errors import check_keywords, parameters_of


# Arguments of a reward besides the columns of the dataset, see `reward_arguments`
_TRAINER_ARGUMENTS = {
    "prompts", "completions", "completion_ids", "num_generations", "panel_images", "trainer_state", "log_extra",
    "log_metric",
}  # fmt: skip
_ALWAYS_PASSED = _TRAINER_ARGUMENTS | {"rows", "cols"}


class RewardFunction(Protocol):
    """
    Protocol of a reward function. All attributes are optional.

    Attributes:
        __name__ (`str`):
            Name in metrics and messages. Defaults to the name of the class.
        is_async (`bool`):
            Whether a call returns a coroutine, for objects without an `async def __call__`.
        needed_columns (`tuple[str, ...]`):
            Columns that must be filled in every row of the dataset.
        min_panels (`int`):
            Fewest panels of a prompt.
        scores_grids (`bool`):
            Whether it scores the lines of a grid, so that it cannot score a set of separate images.
        model, judge (`Any`):
            A `torch.nn.Module`, or an object with one as its `model`, for `offload_rewards` to move.
        model_name (`str`):
            Name of the underlying model, for model cards.
        missing_score_reason (`str` or `None`):
            Why the last `None` was returned, for messages.
        fingerprint (`Any`):
            Anything else that its values depend on. A resumed run notices a change of it, of attributes with plain
            values, and of private attributes named after an argument (`_threshold`).

    A parameter named `num_generations` marks a reward that compares the images of a prompt: it gets all of them in one
    call.
    """

    def __call__(self, prompts: list[str], completions: list[Image.Image], **columns: Any) -> Any:
        """Return one `float` per completion, `None` if it could not be scored, or a coroutine of that list."""
        ...


def is_async_reward(function: RewardFunction) -> bool:
    """Return whether calls return coroutines, by the type or by the attribute `is_async` (a judge on a server)."""
    return getattr(function, "is_async", False) or is_async_callable(function)


def check_reward_functions(reward_funcs: list[Callable]) -> list[str]:
    """Check reward functions and return their names."""
    if not reward_funcs:
        raise ValueError("`reward_funcs` is empty. Pass at least one reward.")
    for function in reward_funcs:
        if not callable(function) or isinstance(function, nn.Module | type):
            raise TypeError(
                "A reward must be a callable `(prompts, completions, **columns) -> list[float | None]`, got "
                f"{function!r}. TRL's reward models score text; see `paco_trl.rewards` for images."
            )
    names = [get_callable_name(function) for function in reward_funcs]
    for name, function in zip(names, reward_funcs, strict=True):
        check_keywords(name, function)
        if names.count(name) > 1:
            raise ValueError(
                f"Several rewards are named '{name}'. Give each its own `__name__`, which names its metrics."
            )
    return names


def check_columns(reward_funcs: Callable | list[Callable], dataset: Dataset, where: str) -> None:
    """Check that a dataset has the columns and the panels that rewards need."""
    if reserved := sorted(_TRAINER_ARGUMENTS & set(dataset.column_names)):
        raise ValueError(f"The trainer passes {', '.join(reserved)} to rewards. Rename these columns of {where}.")
    for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        name = get_callable_name(function)
        min_panels = getattr(function, "min_panels", 1)
        # Rows without a layout, such as editing prompts, have one panel
        layouts = [
            [count or 1 for count in dataset[side]] if side in dataset.column_names else [1] * len(dataset)
            for side in ("rows", "cols")
        ]
        for row, (rows, cols) in enumerate(zip(*layouts, strict=True)):
            if rows * cols < min_panels:
                raise ValueError(
                    f"The reward '{name}' compares at least {min_panels} panels, but row {row} of {where} has {rows} "
                    f"x {cols}. Remove the row, or use another reward."
                )
        layout_kinds = dataset["layout"] if "layout" in dataset.column_names else ()
        if getattr(function, "scores_grids", False) and SEPARATE in layout_kinds:
            raise ValueError(
                f"The reward '{name}' scores the lines of a grid, but row {layout_kinds.index(SEPARATE)} of {where} "
                "is a set of separate images. Leave the reward out."
            )
        arguments = _ALWAYS_PASSED | set(dataset.column_names)
        for parameter in parameters_of(function):
            if parameter.default is parameter.empty and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                if parameter.name not in arguments - {"prompt"}:
                    available = ", ".join(sorted(arguments))
                    raise ValueError(
                        f"The reward '{name}' has the parameter `{parameter.name}`, but {where} only provides "
                        f"{available}. Add the column, or give the parameter a default."
                    )
        for column in getattr(function, "needed_columns", ()):
            if column == "image" and "images" in dataset.column_names:
                continue  # several source images
            if column not in dataset.column_names:
                available = ", ".join(dataset.column_names)
                raise ValueError(
                    f"The reward '{name}' requires the column `{column}`, but {where} has {available}. Add it."
                )
            feature = dataset.features[column]
            if isinstance(getattr(feature, "feature", feature), ImageFeature):
                continue  # reading it here would decode every image; the reward checks it
            for row, value in enumerate(dataset[column]):
                if not (value.strip() if isinstance(value, str) else value):
                    raise ValueError(
                        f"The reward '{name}' requires the column `{column}`, which is {value!r} in row {row} of "
                        f"{where}. Fill it, or remove the row."
                    )
