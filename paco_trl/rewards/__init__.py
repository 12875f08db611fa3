# SPDX-License-Identifier: Apache-2.0
"""
Rewards, the judges that some of them query, and their aggregation.

A reward is a callable `(prompts, completions, **columns) -> list[float | None]`, sync or async: `completions` are PIL
images, `columns` are the dataset's columns with one entry per completion, and `None` means that the completion could
not be scored. The trainer adds the column `panel_images`: each completion split into its panels, row-major.

A judge answers questions about pairs of images: [`~paco_trl.PaCoReward`] in the process, [`ServedJudge`] on a server.
"""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .aggregation import AggregationDetails, aggregate_rewards
    from .baselines import ClipIReward, DreamSimReward
    from .clip_t import ClipTReward
    from .consistency import ConsistencyReward
    from .decision import yes_probability
    from .duplicates import DuplicateReward
    from .edit import EditReward
    from .judge import Answer, Judge, JudgeUnavailableError
    from .layout import LayoutReward
    from .ocr import OcrReward
    from .pick_score import PickScoreReward
    from .pixels import panel_similarity_reward, redness_reward
    from .served_judge import ServedJudge


# Public name -> module. Lazy imports keep `aggregate_rewards` free of transformers, and this package free of torch.
_MODULE_OF = {
    "AggregationDetails": ".aggregation",
    "Answer": ".judge",
    "ClipIReward": ".baselines",
    "ClipTReward": ".clip_t",
    "ConsistencyReward": ".consistency",
    "DreamSimReward": ".baselines",
    "DuplicateReward": ".duplicates",
    "EditReward": ".edit",
    "Judge": ".judge",
    "JudgeUnavailableError": ".judge",
    "LayoutReward": ".layout",
    "OcrReward": ".ocr",
    "PickScoreReward": ".pick_score",
    "ServedJudge": ".served_judge",
    "aggregate_rewards": ".aggregation",
    "panel_similarity_reward": ".pixels",
    "redness_reward": ".pixels",
    "yes_probability": ".decision",
}

__all__ = [
    "AggregationDetails",
    "Answer",
    "ClipIReward",
    "ClipTReward",
    "ConsistencyReward",
    "DreamSimReward",
    "DuplicateReward",
    "EditReward",
    "Judge",
    "JudgeUnavailableError",
    "LayoutReward",
    "OcrReward",
    "PickScoreReward",
    "ServedJudge",
    "aggregate_rewards",
    "panel_similarity_reward",
    "redness_reward",
    "yes_probability",
]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paco_trl.rewards' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
