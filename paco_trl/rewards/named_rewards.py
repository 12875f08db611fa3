# SPDX-License-Identifier: Apache-2.0
"""Rewards by the names that `--rewards` takes, with their defaults."""

from collections.abc import Callable

from . import image_rewards


# Modules of models are imported when a reward is made
_CLASSES = {
    "consistency": "ConsistencyReward", "edit": "EditReward", "reference": "ReferenceReward", "clip_t": "ClipTReward",
    "clip_i": "ClipIReward", "pick_score": "PickScoreReward", "no_duplicates": "DuplicateReward",
    "layout": "LayoutReward", "ocr": "OcrReward",
}  # fmt: skip
_FUNCTIONS: dict[str, Callable] = {
    "redness": image_rewards.redness_reward,
    "panel_similarity": image_rewards.panel_similarity_reward,
}


def make_named_reward(name: str) -> Callable:
    """
    Make a reward of the package from its name, such as `"clip_t"`, with its defaults.

    Raises:
        ValueError: There is no reward of this name.
    """
    from .. import rewards

    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name in _CLASSES:
        return getattr(rewards, _CLASSES[name])()
    raise ValueError(
        f"There is no reward {name!r}, only {', '.join([*_CLASSES, *_FUNCTIONS])}. Name one, or pass a callable, such as "
        "`ConsistencyReward(model)` or `RubricReward(model, rubric)` with a judge of yours."
    )
