# SPDX-License-Identifier: Apache-2.0
"""The package's rewards by name, for `--rewards` and `reward_funcs`."""

from collections.abc import Callable
from typing import NamedTuple


class NamedReward(NamedTuple):
    """A class or function of `paco_trl.rewards`, and the model that it loads: `judge`, `clip`, another, or `None`."""

    attribute: str
    model: str | None = None


NAMED_REWARDS = {
    "consistency": NamedReward("ConsistencyReward", "judge"),
    "edit": NamedReward("EditReward", "judge"),
    "reference": NamedReward("ReferenceReward", "judge"),
    "clip_t": NamedReward("ClipTReward", "clip"),
    "clip_i": NamedReward("ClipIReward", "clip"),
    "pick_score": NamedReward("PickScoreReward", "pick_score"),
    "no_duplicates": NamedReward("DuplicateReward"),
    "layout": NamedReward("LayoutReward"),
    "ocr": NamedReward("OcrReward", "ocr"),
    "redness": NamedReward("redness_reward"),
    "panel_similarity": NamedReward("panel_similarity_reward"),
}


def make_named_reward(name: str, *args, **kwargs) -> Callable:
    """
    Make a reward from its name, such as `"clip_t"`, with the arguments of its class.

    Raises:
        ValueError: There is no reward of this name.
    """
    from .. import rewards  # its attributes import their packages when they are read

    if name not in NAMED_REWARDS:
        raise ValueError(
            f"There is no reward {name!r}, only {', '.join(NAMED_REWARDS)}. Name one, or pass a callable, such as "
            "`ConsistencyReward(model)` or `RubricReward(model, rubric)` with a judge of yours."
        )
    reward = getattr(rewards, NAMED_REWARDS[name].attribute)
    return reward(*args, **kwargs) if isinstance(reward, type) else reward
