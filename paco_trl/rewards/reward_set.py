# SPDX-License-Identifier: Apache-2.0
"""Rewards of a run or of its evaluation with their weights: checks, aggregation, failure limits, metrics."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset
from torch import nn
from trl.trainer.utils import is_async_callable

from ..utils.fingerprint import describe_scorer
from .aggregation import AggregationDetails, aggregate_rewards, choose_tamed, coefficient_of_variation, log_tame
from .reward_calls import RewardError, check_columns, check_required, check_reward_functions, check_reward_weights


logger = get_logger(__name__)


class RewardSet:
    """Rewards with their weights, and how they are aggregated; see [`aggregate_rewards`]."""

    def __init__(
        self,
        reward_funcs: Callable | list[Callable],
        weights: list[float] | None = None,
        required: list | None = None,
        method: str = "sum_then_normalize",
        threshold: float | str = "mean",
    ):
        self.given = reward_funcs
        self.functions, self.names = check_reward_functions(reward_funcs)
        self.weights = check_reward_weights(weights, self.names, method)
        self.required = check_required(required, self.names, self.weights)
        self.method, self.threshold = method, threshold
        # An image that lacks one of these is not scored
        self.is_needed = torch.tensor(self.required) & (self.weights != 0)  # (K,)
        # One reward has nothing to be balanced with
        self.is_tamed = method == "log_tamed" and int((self.weights != 0).sum()) > 1
        self._is_first_round = True
        self._warned_of: set[str] = set()

    @cached_property
    def descriptions(self) -> dict[str, dict[str, Any]]:
        """What the values of each reward depend on, by its name."""
        given = self.given if isinstance(self.given, list) else [self.given]
        own = zip(self.names, given, self.weights.tolist(), self.required, strict=True)
        return {
            name: {**describe_scorer(reward), "weight": weight, "required": required}
            for name, reward, weight, required in own
        }

    def check_dataset(self, dataset: Dataset, where: str) -> None:
        """Check that a dataset has the columns and panels that the rewards require."""
        check_columns(self.given, dataset, where)

    def offload(self, device: torch.device) -> list[nn.Module]:
        """Move models to the CPU, except from devices other than `device`: `model` of a sync reward or its `judge`."""
        rewards = self.given if isinstance(self.given, list) else [self.given]
        owners = [getattr(reward, "judge", reward) for reward in rewards if not is_async_callable(reward)]
        found = [model for each in owners if isinstance(model := getattr(each, "model", None), nn.Module)]
        here = {torch.device("cpu"), device}
        models = [model for model in found if {weight.device for weight in model.parameters()} <= here]
        return [model.to("cpu") for model in dict.fromkeys(models)]  # rewards may share a judge

    def aggregate(self, rewards: torch.Tensor, num_generations: int) -> tuple[torch.Tensor, AggregationDetails]:
        """
        Aggregate `(images, K)` rewards to `(images,)`, NaN where an image is not scored.

        `log_tamed` leaves a reward that log(1 + R) cannot take as it is, with a warning: the round is paid for. A single
        reward is not tamed.
        """
        if self.method != "log_tamed":
            return aggregate_rewards(
                rewards, self.weights, self.method, self.threshold, num_generations, self.required
            )
        h, tamed = coefficient_of_variation(rewards), [False] * len(self.names)
        limit, above = choose_tamed(h, (self.weights != 0).tolist(), self.threshold)
        if self.is_tamed:
            rates = self._untamable_rates(rewards)
            tamed = [is_above and not rate for is_above, rate in zip(above, rates, strict=True)]
            for name, rate, lowest in zip(self.names, rates, rewards.nan_to_num(torch.inf).amin(dim=0), strict=True):
                if rate and name not in self._warned_of:
                    self._warned_of.add(name)
                    logger.warning(
                        f"The reward '{name}' is down to {lowest:g}, and log(1 + R) does not exist at -1 or below: "
                        "rounds with such values are trained with the reward as it is, not log-tamed, and it may "
                        f"outweigh the others (see `rewards/{name}/share`). Shift or rescale it, to [0, 1] for example, "
                        "or use another `multi_objective_aggregation`. You are told once."
                    )
        terms = log_tame(rewards, tamed)
        aggregate, details = aggregate_rewards(
            terms, self.weights, "sum_then_normalize", num_generations=num_generations, required=self.required
        )
        return aggregate, replace(details, coefficient_of_variation=h, tamed=tamed, threshold=limit)

    def _untamable_rates(self, rewards: torch.Tensor) -> list[float]:
        """Return the fraction of images for which each reward, if it counts, is outside the range of log-taming."""
        return ((rewards <= -1) & (self.weights != 0)).float().mean(dim=0).tolist()

    def total(self, rewards: torch.Tensor, num_generations: int | None = None) -> torch.Tensor:
        """Compute the weighted sum whatever the aggregation, as TRL's `reward`: taming would make it jump."""
        # Without groups an optional reward cannot be replaced, and an image that lacks it has no sum
        required = None if num_generations is None else self.required
        return aggregate_rewards(
            rewards, self.weights, "sum_then_normalize", num_generations=num_generations, required=required
        )[0]

    def describe_missing(self, rewards: torch.Tensor) -> str:
        """Count the images without a value, by reward."""
        counts = zip(self.names, torch.isnan(rewards).sum(dim=0).tolist(), strict=True)
        return f"Images without a value (None), by reward: {', '.join(f'{name} {count}' for name, count in counts)}."

    def check_failures(self, rewards: torch.Tensor, ceiling: float, where: str) -> None:
        """Stop a run in which a required reward fails too often."""
        fractions = torch.isnan(rewards).float().mean(dim=0).tolist()
        for name, fraction, is_needed in zip(self.names, fractions, self.is_needed.tolist(), strict=True):
            if is_needed and fraction > ceiling:
                raise RewardError(
                    f"In {where} the required reward '{name}' gave no value (None) for {fraction:.1%} of "
                    f"{len(rewards)} images; the limit is `max_reward_failures` = {ceiling:g}. The warnings above may "
                    "say why. To continue anyway, raise the limit or make the reward optional (`reward_required`)."
                )

    def warn_of_constants(self, rewards: torch.Tensor, num_generations: int, where: str) -> None:
        """Warn in the first round of a process of rewards that do not differ within any group."""
        is_first, self._is_first_round = self._is_first_round, False
        for name, values, weight in zip(self.names, rewards.T, self.weights.tolist(), strict=True):
            groups = [group[~group.isnan()] for group in values.view(-1, num_generations)]
            groups = [group for group in groups if len(group) > 1]
            if is_first and weight and groups and all((group == group[0]).all() for group in groups):
                logger.warning(
                    f"In {where} the reward '{name}' gave the same value to all images of each prompt (for the first, "
                    f"{groups[0][0]:g}): where nothing differs, nothing is learned. If that is not only at the start, correct "
                    "the reward, or use a finer one or other prompts."
                )

    def check_excluded(
        self,
        rewards: torch.Tensor,
        is_valid: torch.Tensor,
        num_generations: int,
        max_images: float,
        max_groups: float,
        where: str,
    ) -> None:
        """Stop a run in which too many images or groups could not be scored."""
        groups = is_valid.view(-1, num_generations).any(dim=1)
        images_lost, groups_lost = 1 - is_valid.float().mean().item(), 1 - groups.float().mean().item()
        if is_valid.any() and images_lost <= max_images and groups_lost <= max_groups:
            return
        raise RewardError(
            f"In {where} {(~is_valid).sum().item()} of {len(is_valid)} images ({images_lost:.0%}) are "
            f"excluded and {(~groups).sum().item()} of {len(groups)} prompts ({groups_lost:.0%}) have fewer than two "
            f"scored images. The limits are `max_excluded_images` = {max_images:g} and "
            f"`max_excluded_groups` = {max_groups:g}. {self.describe_missing(rewards)} Find out why None is returned; to "
            "continue anyway, raise the limits."
        )

    def check_scored(self, rewards: torch.Tensor, ceiling: float) -> None:
        """Stop if too many images of an evaluation could not be scored: the mean of the rest would mislead."""
        missing = torch.isnan(rewards[:, self.is_needed]).any(dim=1)
        if not missing.all() and missing.float().mean().item() <= ceiling:
            return
        raise RewardError(
            f"{missing.sum().item()} of {len(missing)} evaluation images could not be scored, more than "
            f"`max_excluded_images` = {ceiling:g} allows. {self.describe_missing(rewards)} Find out why, or raise it."
        )

    def metrics(self, rewards: torch.Tensor, details: AggregationDetails, num_generations: int) -> dict[str, float]:
        """Describe the rewards that could be computed; leave out what is undefined."""
        metrics = {}

        def add_statistics(mean_name: str, std_name: str, values: torch.Tensor) -> None:
            values = values[~torch.isnan(values)]
            if len(values):
                metrics[mean_name] = values.mean().item()
            if len(values) > 1:
                metrics[std_name] = values.std().item()

        for name, values in zip(self.names, rewards.T, strict=True):
            add_statistics(f"rewards/{name}/mean", f"rewards/{name}/std", values)
            metrics[f"rewards/{name}/failure_rate"] = torch.isnan(values).float().mean().item()
        add_statistics("reward", "reward_std", self.total(rewards, num_generations))
        # Relative to the mean of the first reward
        first = metrics.get(f"rewards/{self.names[0]}/mean")
        for name in self.names[1:]:
            if first and f"rewards/{name}/mean" in metrics:
                metrics[f"rewards/{name}/ratio"] = metrics[f"rewards/{name}/mean"] / first
        rates = self._untamable_rates(rewards)
        for name, h, tamed, share, rate in zip(
            self.names, details.coefficient_of_variation, details.tamed, details.share, rates, strict=True
        ):
            if h is not None:  # undefined for a reward whose mean is not positive
                metrics[f"rewards/{name}/h"] = h
            metrics[f"rewards/{name}/tamed"] = float(tamed)
            if self.is_tamed and rate:
                metrics[f"rewards/{name}/untamable_rate"] = rate
            if share is not None:  # undefined where no reward differs within a group
                metrics[f"rewards/{name}/share"] = share
        return metrics
