# SPDX-License-Identifier: Apache-2.0
"""
Rewards and their aggregation.

A reward is a callable `(prompts, completions, **columns) -> list[float | None]`: `completions` are PIL images,
`columns` are the dataset's columns, one entry per completion, and `None` means that the completion could not be
scored. The trainer adds the column `panel_images`: each completion cut into its panels, row-major.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .aggregation import AggregationDetails, aggregate_rewards
    from .clip_t import ClipTReward
    from .pixels import panel_similarity_reward, redness_reward


# Public name -> module. Importing a module only when one of its names is asked for keeps `aggregate_rewards` free of
# transformers, and this package free of torch.
_MODULE_OF = {
    "AggregationDetails": ".aggregation",
    "ClipTReward": ".clip_t",
    "aggregate_rewards": ".aggregation",
    "panel_similarity_reward": ".pixels",
    "redness_reward": ".pixels",
}

__all__ = [
    "AggregationDetails",
    "ClipTReward",
    "aggregate_rewards",
    "panel_similarity_reward",
    "redness_reward",
]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paco_trl.rewards' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
