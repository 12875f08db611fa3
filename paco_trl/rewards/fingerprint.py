# SPDX-License-Identifier: Apache-2.0
"""Descriptions of rewards and judges, to save and compare."""

from typing import Any

from ..utils.fingerprint import describe_code


# Arguments and attributes of rewards and judges that change where and how fast they score, but no score
HARMLESS_IN_SCORERS = (
    "device", "batch_size", "name", "model", "base_url", "max_concurrency", "timeout", "time_budget",
)  # fmt: skip


def describe_reward(reward: Any) -> dict[str, Any]:
    """Describe everything that the values of a reward or a judge depend on, see [`describe_code`]."""
    return describe_code(reward, HARMLESS_IN_SCORERS)


def describe_scorer(scorer: Any) -> dict[str, Any]:
    """Describe everything that stored scores depend on, without a user's own attributes: they may count calls."""
    return {name: value for name, value in describe_reward(scorer).items() if name != "attributes"}
