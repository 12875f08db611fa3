# SPDX-License-Identifier: Apache-2.0
"""
Weighted rewards of a run or its evaluation: call them, check and aggregate their values, and describe them.

Failures never become numbers: a `None` from a reward becomes NaN in the table `(completions, rewards)` and is
excluded, and an exception stops the run with the reward's name.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

import torch
from PIL import Image

from ..utils.logs import get_logger
from ..utils.option_checks import check_required, check_reward_weights
from ..utils.text import shorten
from .aggregation import AggregationDetails, aggregate_rewards
from .checks import RewardFunction, check_reward_functions, is_async_reward
from .errors import RewardError, parameters_of, wrap_reward_error
from .fingerprint import describe_reward
from .named_rewards import make_named_reward


logger = get_logger(__name__)


class Rewards:
    """
    Reward functions with their weights.

    Args:
        reward_funcs (`Callable`, `str` or a list of them):
            Rewards, or their names.
        weights (`list[float]`, *optional*):
            Weight of each reward in the sum. If `None`, all are 1.
        required (`list[bool]`, *optional*):
            Whether completions without the reward are excluded. If `None`, all rewards are required.
        method, threshold:
            See [`aggregate_rewards`].
    """

    def __init__(
        self,
        reward_funcs: Callable | str | Sequence[Callable | str],
        weights: list[float] | None = None,
        required: list | None = None,
        method: str = "sum_then_normalize",
        threshold: float | str = "mean",
    ):
        given: list[Any] = [*reward_funcs] if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        self.functions: list[RewardFunction] = [
            make_named_reward(function) if isinstance(function, str) else function for function in given
        ]
        self.names = check_reward_functions(self.functions)
        weights = check_reward_weights(weights, self.names, method)
        self.weights = torch.tensor(weights, dtype=torch.float32)
        self.required = check_required(required, self.names, weights)
        if method == "log_tamed" and int((self.weights != 0).sum()) == 1:
            method = "sum_then_normalize"  # a single reward needs no balance
        self.method, self.threshold = method, threshold
        # A completion without one of these is not scored
        self.excludes_if_missing = torch.tensor(self.required) & (self.weights != 0)  # (K,)
        self._warned_rewards: set[str] = set()
        self.is_async = [is_async_reward(function) for function in self.functions]
        self.compares_group = [
            any(p.name == "num_generations" for p in parameters_of(function)) for function in self.functions
        ]

    def check_group_size(self, num_generations: int, option: str) -> None:
        """Reject groups of one completion if a reward compares the completions of a group."""
        comparing = [name for name, compares in zip(self.names, self.compares_group, strict=True) if compares]
        if comparing and num_generations < 2:
            raise ValueError(
                f"The reward '{comparing[0]}' compares the images of a prompt (`num_generations` among its "
                f"parameters), but `{option}` is {num_generations}. Set it to at least 2, or evaluate with other "
                "rewards."
            )

    @cached_property
    def descriptions(self) -> dict[str, dict[str, Any]]:
        """Return what the values of each reward depend on, by its name."""
        settings = zip(self.names, self.functions, self.weights.tolist(), self.required, strict=True)
        return {
            name: {**describe_reward(function), "weight": weight, "required": required}
            for name, function, weight, required in settings
        }

    def call(self, index: int, **arguments) -> Any:
        """Call a reward; return its values, or a coroutine that does. Errors become a `RewardError` that names it."""
        if self.is_async[index]:
            return self._call_async(index, arguments)
        with _naming_errors(self.names[index]):
            values = self.functions[index](**_copy_images(arguments, {}))
            return _check_values(values, self.names[index], len(arguments["completions"]))

    async def _call_async(self, index: int, arguments: dict) -> list[float | None]:
        with _naming_errors(self.names[index]):
            values = self.functions[index](**_copy_images(arguments, {}))
            if inspect.isawaitable(values):  # a subclass may override `__call__` with a sync one
                values = await values
            return _check_values(values, self.names[index], len(arguments["completions"]))

    # ---- Aggregation ----

    def aggregate(self, values: torch.Tensor, num_generations: int) -> tuple[torch.Tensor, AggregationDetails]:
        """
        Aggregate the values of K rewards, `(completions, K)` with NaN where one is missing, to `(completions,)` by
        [`aggregate_rewards`].
        """
        minima = values.nan_to_num(torch.inf).amin(dim=0).tolist()
        for name, value, weight in zip(self.names, minima, self.weights.tolist(), strict=True):
            if self.method == "geometric_mean" and weight and value < 0:
                raise RewardError(
                    f"The reward '{name}' is down to {value:g}, but a geometric mean requires rewards >= 0. Rescale "
                    "it, for example to [0, 1], or use another `multi_objective_aggregation`."
                )
            if self.method == "log_tamed" and weight and value < 0 and name not in self._warned_rewards:
                self._warned_rewards.add(name)
                logger.warning(
                    f"The reward '{name}' is down to {value:g}. Log-taming requires rewards >= 0 and skips it in such "
                    f"rounds, so that it may outweigh the others (see `rewards/{name}/share`). Rescale it, for "
                    "example to [0, 1], or use another `multi_objective_aggregation`."
                )
        return aggregate_rewards(values, self.weights, self.method, self.threshold, num_generations, self.required)

    def total(self, values: torch.Tensor, num_generations: int | None = None) -> torch.Tensor:
        """Compute the weighted sum that TRL logs as `reward`, whatever the aggregation: taming would make it jump."""
        # Without groups, an optional reward cannot be made neutral, so completions without it have no sum
        required = None if num_generations is None else self.required
        return aggregate_rewards(
            values, self.weights, "sum_then_normalize", num_generations=num_generations, required=required
        )[0]

    # ---- Metrics ----

    def metrics(self, values: torch.Tensor, total: torch.Tensor, details: AggregationDetails) -> dict[str, float]:
        """Compute metrics of the rewards' values and of their sums (`total`). Undefined metrics are left out."""
        metrics: dict[str, float] = {}
        per_reward = zip(details.coefficient_of_variation, details.tamed, details.share, strict=True)
        for name, column, (h, tamed, share) in zip(self.names, values.T, per_reward, strict=True):
            valid_values = column[~torch.isnan(column)]
            mean = valid_values.mean().item() if len(valid_values) else None
            first = metrics.get(f"rewards/{self.names[0]}/mean")
            reward_metrics = {
                "mean": mean,
                "std": valid_values.std().item() if len(valid_values) > 1 else None,
                "failure_rate": torch.isnan(column).float().mean().item(),
                "ratio": mean / first if first and mean is not None else None,
                "h": h,  # `None` for a reward with a negative value
                "tamed": float(tamed),
                "share": share,  # `None` if no reward differs within a group
            }
            metrics |= {f"rewards/{name}/{key}": value for key, value in reward_metrics.items() if value is not None}
        totals = total[~torch.isnan(total)]
        if len(totals):
            metrics["reward"] = totals.mean().item()
        if len(totals) > 1:
            metrics["reward_std"] = totals.std().item()
        return metrics


@contextmanager
def _naming_errors(name: str) -> Iterator[None]:
    """Raise an error of a reward as a `RewardError` that names the reward."""
    try:
        yield
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        # Unwrapped, `SystemExit` would only end the thread of an async reward
        raise wrap_reward_error(name, error, __file__) from error


def _copy_images(value: Any, images: dict[int, Image.Image]) -> Any:
    """Copy images, each once, and their lists and dicts, since rewards and the image sheet share them."""
    if isinstance(value, Image.Image):
        return images[id(value)] if id(value) in images else images.setdefault(id(value), value.copy())
    if isinstance(value, list):
        return [_copy_images(entry, images) for entry in value]
    if isinstance(value, dict):
        return {key: _copy_images(entry, images) for key, entry in value.items()}
    return value


def _check_values(values, name: str, count: int) -> list[float | None]:
    # A set has no order, and a dict would yield its keys
    is_list = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | Set)
    if not is_list or getattr(values, "ndim", 1) == 0:
        raise RewardError(f"The reward '{name}' returned {values!r}, but must return a list of one value per image.")
    values = list(values)
    if len(values) != count:
        raise RewardError(
            f"The reward '{name}' returned {len(values)} value(s) for {count} image(s); it must return one each."
        )
    for index, value in enumerate(values):
        # Any other value than a number raises one of these errors
        with suppress(TypeError, ValueError, OverflowError):
            if value is None or math.isfinite(value) and abs(value) <= torch.finfo(torch.float32).max:
                continue
        raise RewardError(
            f"The reward '{name}' returned {shorten(value)} for image {index}, which is not a finite number. Return "
            "None for an image that could not be scored, to exclude and count it."
        )
    return [None if value is None else float(value) for value in values]
