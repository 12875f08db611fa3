# SPDX-License-Identifier: Apache-2.0
"""Edited images: consistent with their source, and as the instruction says."""

import math
from pathlib import Path

from PIL import Image

from ..data.questions import edit_consistency_question, edit_following_question
from .judge import Judge
from .judged_reward import JudgedReward, WeightedQuestion, column_of


class EditReward(JudgedReward):
    """
    Quality of an edited image ([PaCo-RL](https://huggingface.co/papers/2512.04784), Part 2): the square root of a
    judge's P(Yes) for consistency with the source times that for following the instruction.

    - Range: [0, 1].
    - Cost: two forwards of the judge for each image.
    - Source and licence: as [`ConsistencyReward`].

    The prompt is the instruction, and the column `image` has the source. An image that is a copy of its source does not
    follow the instruction, and one that ignores it is not consistent: neither alone is rewarded.

    Args:
        model (`str`, `Path` or [`Judge`], *optional*, defaults to `"X-GenGroup/PaCo-Reward-7B"`):
            Hub id or folder of the judge, merged or a LoRA adapter; with `base_url`, the name that the server has for
            it; or a judge that was loaded already.
        base_url (`str`, *optional*):
            Address of a server, for example `"http://127.0.0.1:8000/v1"`. It is checked at once.
        **kwargs:
            Further arguments of [`ServedJudge`] with `base_url`, and of [`~paco_trl.PaCoReward.from_pretrained`]
            without.

    Raises:
        JudgeUnavailableError: If the server is not there, or has no such model.

    Example:

    ```python
    >>> from paco_trl.rewards import EditReward

    >>> reward = EditReward("X-GenGroup/PaCo-Reward-7B", dtype="bfloat16")
    >>> reward(["Paint the car red."], [edited], image=[source])  # a list of one float
    ```
    """

    __name__ = "edit"  # TRL takes it for the metric names, `rewards/edit/mean`
    needed_columns = ("image",)  # the trainer looks at it before it loads a model

    def __init__(self, model: str | Path | Judge = "X-GenGroup/PaCo-Reward-7B", base_url: str | None = None, **kwargs):
        super().__init__(model, base_url, **kwargs)

    def _questions(
        self, prompts: list[str], completions: list[Image.Image], **columns
    ) -> list[list[WeightedQuestion]]:
        sources = column_of(columns, "image", len(completions), "An edit reward")
        for index, source in enumerate(sources):
            if not isinstance(source, Image.Image):
                raise ValueError(
                    f"`image` of image {index} is {str(source)[:100]}, not a PIL image. Cast the column to "
                    "`datasets.Image()`, or fill it."
                )
        return [
            [
                WeightedQuestion(source, edited, edit_consistency_question(prompt)),
                WeightedQuestion(source, edited, edit_following_question(prompt)),
            ]
            for prompt, source, edited in zip(prompts, sources, completions, strict=True)
        ]

    def _combine(self, questions: list[WeightedQuestion], scores: list[float]) -> float:
        consistency, following = scores
        return math.sqrt(consistency * following)
