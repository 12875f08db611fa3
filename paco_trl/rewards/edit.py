# SPDX-License-Identifier: Apache-2.0
"""Edited images: consistent with their source, and as the instruction says."""

import math

from PIL import Image

from ..data.questions import edit_consistency_question, edit_following_question
from .columns import column_of
from .judged_reward import JudgedReward, WeightedQuestion


# Limit of the images that the paper's judge was trained with
MAX_PIXELS = 2_097_152


class EditReward(JudgedReward):
    """
    Quality of an edited image ([PaCo-RL](https://huggingface.co/papers/2512.04784), Part 2): the square root of a
    judge's P(Yes) for consistency with the source times that for following the instruction.

    - Range: [0, 1].
    - Cost: two forward passes of the judge per image and source.
    - Source and license: see [`ConsistencyReward`].

    The prompt is the instruction. The column `image` has the source, or `images` several, over which the score is
    averaged (the paper has one source only). Sources of more than 2,097,152 pixels are downscaled to that, the paper's
    limit for the judge. A copy of its source does not follow the instruction, and an image that ignores the source is
    not consistent: neither alone is rewarded.

    Args:
        model (`str`, `Path` or [`Judge`], *optional*, defaults to `"X-GenGroup/PaCo-Reward-7B"`), base_url (`str`, *optional*), **kwargs:
            See [`ConsistencyReward`].
    """

    __name__ = "edit"  # names TRL's metrics, `rewards/edit/mean`
    needed_columns = ("image",)  # the trainer checks them before it loads a model

    def _questions(
        self, prompts: list[str], completions: list[Image.Image], **columns
    ) -> list[list[WeightedQuestion]]:
        name = "images" if columns.get("images") is not None else "image"
        rows = column_of(columns.get(name), name, len(completions), "`EditReward`")
        rows = [list(row) if name == "images" else [row] for row in rows]
        for index, sources in enumerate(rows):
            for source in sources:
                if not isinstance(source, Image.Image):
                    raise ValueError(
                        f"`{name}` of image {index} is {str(source)[:100]}, not a PIL image. Cast the column to "
                        "`datasets.Image()`, or fill it."
                    )
        return [
            [
                WeightedQuestion(_shrunk(source), edited, question(prompt))
                for source in sources
                for question in (edit_consistency_question, edit_following_question)
            ]
            for prompt, sources, edited in zip(prompts, rows, completions, strict=True)
        ]

    def _combine(self, questions: list[WeightedQuestion], scores: list[float]) -> float:
        pairs = zip(scores[::2], scores[1::2], strict=True)  # of each source: consistency, following
        return sum(math.sqrt(consistency * following) for consistency, following in pairs) / (len(scores) // 2)


def _shrunk(source: Image.Image) -> Image.Image:
    factor = math.sqrt(MAX_PIXELS / (source.width * source.height))
    if factor >= 1:
        return source
    width, height = (max(1, int(side * factor)) for side in source.size)
    return source.resize((width, height), Image.Resampling.LANCZOS)
