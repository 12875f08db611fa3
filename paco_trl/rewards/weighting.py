# SPDX-License-Identifier: Apache-2.0
"""
The rewards of a run or of its evaluation, with their weights: call them, check their values, sum these, and describe them.

Failures never become numbers: what a reward returns as `None` is NaN in the table `(completions, rewards)` and excluded, and
an exception stops the run with the reward's name.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from accelerate.logging import get_logger
from PIL import Image

from ..utils.fingerprint import describe_code
from ..utils.option_checks import check_required, check_reward_weights
from ..utils.text import shorten
from .aggregation import AggregationDetails, aggregate_rewards
from .checks import RewardFunction, check_reward_functions, is_async_reward, parameters_of
from .errors import RewardError, named_error


logger = get_logger(__name__)


class Rewards:
    """
    Reward functions with their weights.

    Args:
        reward_funcs (`Callable` or `list[Callable]`):
            The rewards.
        weights (`list[float]`, *optional*):
            Weight of each in the sum. If `None`, 1.
        required (`list[bool]`, *optional*):
            Whether an image that lacks the reward is left out. If `None`, all are.
        method, threshold:
            Those of [`aggregate_rewards`].
    """

    def __init__(
        self,
        reward_funcs: Callable | list[Callable],
        weights: list[float] | None = None,
        required: list | None = None,
        method: str = "sum_then_normalize",
        threshold: float | str = "mean",
    ):
        self.functions: list[RewardFunction] = [*reward_funcs] if isinstance(reward_funcs, list) else [reward_funcs]
        self.names = check_reward_functions(self.functions)
        checked = check_reward_weights(weights, self.names, method)
        self.weights = torch.tensor(checked, dtype=torch.float32)
        self.required = check_required(required, self.names, checked)
        if method == "log_tamed" and int((self.weights != 0).sum()) == 1:
            method = "sum_then_normalize"  # one reward has nothing to be balanced with
        self.method, self.threshold = method, threshold
        # An image that lacks one of these is not scored
        self.excludes_if_missing = torch.tensor(self.required) & (self.weights != 0)  # (K,)
        self._warned_of: set[str] = set()
        self.is_async = [is_async_reward(function) for function in self.functions]
        self.compares_group = [
            any(p.name == "num_generations" for p in parameters_of(function)) for function in self.functions
        ]

    def check_group_size(self, num_generations: int, option: str) -> None:
        """Refuse groups of one image for rewards that compare the images of a prompt."""
        compared = [name for name, is_compared in zip(self.names, self.compares_group, strict=True) if is_compared]
        if compared and num_generations < 2:
            raise ValueError(
                f"The reward '{compared[0]}' compares the images of a prompt (`num_generations` among its parameters), but "
                f"`{option}` is {num_generations}. Set it to at least 2, or evaluate by other rewards."
            )

    @cached_property
    def descriptions(self) -> dict[str, dict[str, Any]]:
        """What the values of each reward depend on, by its name."""
        settings = zip(self.names, self.functions, self.weights.tolist(), self.required, strict=True)
        return {
            name: {**describe_code(function), "weight": weight, "required": required}
            for name, function, weight, required in settings
        }

    def call(self, index: int, **arguments) -> Any:
        """Call a reward: values, or a coroutine of them. Raises `RewardError` with its name."""
        name, count = self.names[index], len(arguments["completions"])
        if self.is_async[index]:
            return self._call_async(index, arguments)
        try:
            return _check_rewards(self.functions[index](**_copied(arguments, {})), name, count)
        except RewardError:
            raise
        except (Exception, SystemExit) as error:
            raise named_error(name, error, __file__) from error

    async def _call_async(self, index: int, arguments: dict) -> list[float | None]:
        name = self.names[index]
        try:
            values = self.functions[index](**_copied(arguments, {}))
            if inspect.isawaitable(values):  # a subclass may have a call of its own
                values = await values
            return _check_rewards(values, name, len(arguments["completions"]))
        except RewardError:
            raise
        except (Exception, SystemExit) as error:  # raised as it is, it would end the event loop's thread alone
            raise named_error(name, error, __file__) from error

    # ---- Aggregation ----

    def aggregate(self, rewards: torch.Tensor, num_generations: int) -> tuple[torch.Tensor, AggregationDetails]:
        """Aggregate `(images, K)` rewards to `(images,)`, NaN where an image is not scored; see [`aggregate_rewards`]."""
        lowest = rewards.nan_to_num(torch.inf).amin(dim=0).tolist()
        for name, value, weight in zip(self.names, lowest, self.weights.tolist(), strict=True):
            if self.method == "geometric_mean" and weight and value < 0:
                raise RewardError(
                    f"The reward '{name}' is down to {value:g}, but a geometric mean is for rewards from 0 up. Rescale it, to "
                    "[0, 1] for example, or use another `multi_objective_aggregation`."
                )
            if self.method == "log_tamed" and weight and value < 0 and name not in self._warned_of:
                self._warned_of.add(name)
                logger.warning(
                    f"The reward '{name}' is down to {value:g}: log-taming is for rewards from 0 up and leaves it as it is "
                    f"in such rounds, where it may outweigh the others (see `rewards/{name}/share`). Rescale it, to [0, 1] "
                    "for example, or use another `multi_objective_aggregation`."
                )
        return aggregate_rewards(rewards, self.weights, self.method, self.threshold, num_generations, self.required)

    def total(self, rewards: torch.Tensor, num_generations: int | None = None) -> torch.Tensor:
        """Compute the weighted sum whatever the aggregation, as TRL's `reward`: taming would make it jump."""
        # Without groups an optional reward cannot be replaced, and an image that lacks it has no sum
        required = None if num_generations is None else self.required
        return aggregate_rewards(
            rewards, self.weights, "sum_then_normalize", num_generations=num_generations, required=required
        )[0]

    # ---- Metrics ----

    def metrics(self, rewards: torch.Tensor, total: torch.Tensor, details: AggregationDetails) -> dict[str, float]:
        """Describe rewards and their sums (`total`) that could be computed; leave out what is undefined."""
        metrics: dict[str, float] = {}
        described = zip(details.coefficient_of_variation, details.tamed, details.share, strict=True)
        for name, values, (h, tamed, share) in zip(self.names, rewards.T, described, strict=True):
            scored = values[~torch.isnan(values)]
            mean, first = scored.mean().item() if len(scored) else None, metrics.get(f"rewards/{self.names[0]}/mean")
            values_of_reward = {
                "mean": mean,
                "std": scored.std().item() if len(scored) > 1 else None,
                "failure_rate": torch.isnan(values).float().mean().item(),
                "ratio": mean / first if first and mean is not None else None,
                "h": h,  # undefined for a reward with a negative value
                "tamed": float(tamed),
                "share": share,  # undefined where no reward differs within a group
            }
            metrics |= {f"rewards/{name}/{key}": value for key, value in values_of_reward.items() if value is not None}
        summed = total[~torch.isnan(total)]
        if len(summed):
            metrics["reward"] = summed.mean().item()
        if len(summed) > 1:
            metrics["reward_std"] = summed.std().item()
        return metrics


def _copied(value: Any, images: dict[int, Image.Image]) -> Any:
    """Copy images, each once, and the lists and dicts that hold them: other rewards and the sheet have the same."""
    if isinstance(value, Image.Image):
        return images[id(value)] if id(value) in images else images.setdefault(id(value), value.copy())
    if isinstance(value, list):
        return [_copied(entry, images) for entry in value]
    if isinstance(value, dict):
        return {key: _copied(entry, images) for key, entry in value.items()}
    return value


def _check_rewards(rewards, name: str, count: int) -> list[float | None]:
    # A set has no order, and a dict would give its keys
    is_list = isinstance(rewards, Iterable) and not isinstance(rewards, str | bytes | Mapping | Set)
    if not is_list or getattr(rewards, "ndim", 1) == 0:
        raise RewardError(f"The reward '{name}' returned {rewards!r}, but must return a list of one value per image.")
    rewards = list(rewards)
    if len(rewards) != count:
        raise RewardError(f"The reward '{name}' returned {len(rewards)} values for {count} images, not one for each.")
    for index, reward in enumerate(rewards):
        with suppress(TypeError, ValueError, OverflowError):  # it is no number of float32
            if reward is None or math.isfinite(reward) and abs(reward) <= torch.finfo(torch.float32).max:
                continue
        raise RewardError(
            f"The reward '{name}' returned {shorten(reward)} for image {index}, which is no finite number. Return None for an "
            "image that could not be scored: the image is then excluded and counted."
        )
    return [None if reward is None else float(reward) for reward in rewards]
