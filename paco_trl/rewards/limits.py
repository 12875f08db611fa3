# SPDX-License-Identifier: Apache-2.0
"""Limits on missing rewards. Beyond them a run stops, because the remaining rewards would mislead it."""

import math
from collections.abc import Iterable
from typing import Any

import torch

from ..utils.logs import get_logger
from .errors import RewardError
from .weighting import Rewards


logger = get_logger(__name__)


def check_failures(rewards: Rewards, values: torch.Tensor, is_valid: torch.Tensor, args: Any, where: str) -> None:
    """
    Stop a run in which a required reward fails too often, or too many completions or groups could not be scored.

    `values` `(N, K)` is NaN where a reward is missing; `is_valid` `(N,)` marks the completions that enter the loss.
    """
    counts = torch.isnan(values).sum(dim=0).tolist()
    for name, count, excludes_if_missing in zip(
        rewards.names, counts, rewards.excludes_if_missing.tolist(), strict=True
    ):
        # The limit is rounded up, so that one image may fail in a small round
        if excludes_if_missing and count > math.ceil(args.max_reward_failures * len(values)):
            raise RewardError(
                f"In {where} the required reward '{name}' gave no value (None) for {count} of {len(values)} images, "
                f"more than `max_reward_failures` = {args.max_reward_failures:g} allows{_reasons(rewards, [name])}. "
                "Fix the reward, raise the limit, or make the reward optional (`reward_required`)."
            )
    groups = is_valid.view(-1, args.num_generations).any(dim=1)
    images_lost = 1 - is_valid.float().mean().item()
    groups_lost = 1 - groups.float().mean().item()
    if not is_valid.any() or images_lost > args.max_excluded_images or groups_lost > args.max_excluded_groups:
        raise RewardError(
            f"In {where} {(~is_valid).sum().item()} of {len(is_valid)} images ({images_lost:.0%}) are excluded and "
            f"{(~groups).sum().item()} of {len(groups)} prompts ({groups_lost:.0%}) have fewer than two scored "
            f"images; `max_excluded_images` = {args.max_excluded_images:g} and `max_excluded_groups` = "
            f"{args.max_excluded_groups:g}. {_describe_missing(rewards, values)} Fix the rewards, or raise the limits."
        )


def check_evaluation_scores(rewards: Rewards, values: torch.Tensor, max_excluded: float) -> None:
    """Stop if too many images of an evaluation could not be scored: the mean of the rest would mislead."""
    missing = torch.isnan(values[:, rewards.excludes_if_missing]).any(dim=1)
    if missing.all() or missing.float().mean().item() > max_excluded:
        raise RewardError(
            f"{missing.sum().item()} of {len(missing)} evaluation images could not be scored, more than "
            f"`max_excluded_images` = {max_excluded:g} allows. {_describe_missing(rewards, values)} Fix the rewards, "
            "or raise it."
        )


def warn_of_constant_rewards(rewards: Rewards, values: torch.Tensor, num_generations: int, where: str) -> None:
    """Warn about rewards that do not differ within any group."""
    for name, column, weight in zip(rewards.names, values.T, rewards.weights.tolist(), strict=True):
        groups = [group[~group.isnan()] for group in column.view(-1, num_generations)]
        groups = [group for group in groups if len(group) > 1]
        if weight and groups and all((group == group[0]).all() for group in groups):
            logger.warning(
                f"In {where} the reward '{name}' gave the same value to all images of each prompt (for the first, "
                f"{groups[0][0]:g}), so the policy learns nothing from it."
            )


def _describe_missing(rewards: Rewards, values: torch.Tensor) -> str:
    counts = dict(zip(rewards.names, torch.isnan(values).sum(dim=0).tolist(), strict=True))
    missing = ", ".join(f"{name} {count}" for name, count in counts.items())
    return f"Images without a value (None), by reward: {missing}{_reasons(rewards, [n for n in counts if counts[n]])}."


def _reasons(rewards: Rewards, names: Iterable[str]) -> str:
    """Join the last reasons for a missing value that rewards recorded in this process."""
    functions = dict(zip(rewards.names, rewards.functions, strict=True))
    reasons = [(name, getattr(functions[name], "missing_score_reason", None)) for name in names]
    return "".join(f"; {name}: {reason}" for name, reason in reasons if reason)
