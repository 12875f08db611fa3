# SPDX-License-Identifier: Apache-2.0
"""
Rewards, the judges that some of them query, and their aggregation.

A reward is a callable `(prompts, completions, **columns) -> list[float | None]`, sync or async: `completions` are PIL
images, `columns` are the dataset's columns with one entry per completion, and `None` means that the completion could
not be scored. The trainer adds the column `panel_images`: each completion split into its panels, row-major. A reward
with a parameter `num_generations` receives all completions of a group in one call, and may compare them.

A judge answers questions about pairs of images: [`~paco_trl.PaCoReward`] in the process, [`ServedJudge`] on a server.
"""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


if TYPE_CHECKING:
    from .aggregation import AggregationDetails, aggregate_rewards
    from .clip import ClipIReward, ClipTReward, PickScoreReward
    from .image_rewards import DuplicateReward, LayoutReward, OcrReward, panel_similarity_reward, redness_reward
    from .judge import Answer, Judge, JudgeUnavailableError, ServedJudge, yes_probability
    from .judge_rewards import ConsistencyReward, EditReward, ReferenceReward, RubricReward
    from .words import WordsJudge, WordsReward

__all__ = [
    "AggregationDetails", "Answer", "ClipIReward", "ClipTReward", "ConsistencyReward",
    "DuplicateReward", "EditReward", "Judge", "JudgeUnavailableError", "LayoutReward", "OcrReward",
    "PickScoreReward", "ReferenceReward", "RubricReward", "ServedJudge", "WordsJudge", "WordsReward",
    "aggregate_rewards", "panel_similarity_reward", "redness_reward", "yes_probability",
]  # fmt: skip

# Lazy: importing this package does not import torch, and `aggregate_rewards` does not import transformers
__getattr__, __dir__ = lazy_imports(__name__, __file__)
