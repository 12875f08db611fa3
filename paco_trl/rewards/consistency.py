# SPDX-License-Identifier: Apache-2.0
"""Consistency of a set of images: a judge is queried about its pairs."""

import hashlib
from itertools import combinations
from pathlib import Path

import numpy as np
from PIL import Image

from ..data.image_sets import criteria_dict
from ..data.questions import criterion_question, theme_question
from .columns import column_of, panels_of
from .judge import Judge, both_orders
from .judged_reward import JudgedReward, WeightedQuestion


def chosen_pairs(count: int, max_pairs: int | None, seed: int, prompt: str) -> list[tuple[int, int]]:
    """Return all unordered pairs of a set, or `max_pairs` of them that depend on seed and prompt alone."""
    pairs = list(combinations(range(count), 2))
    if max_pairs is None or len(pairs) <= max_pairs:
        return pairs
    digest = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")
    chosen = np.random.default_rng((seed, digest)).choice(len(pairs), max_pairs, replace=False)
    return [pairs[index] for index in sorted(chosen.tolist())]


def criteria_weights(criteria: dict[str, dict[str, str]]) -> dict[str, float]:
    """Return the weight of each criterion's text in a mean over dimensions of means over their criteria."""
    dimensions = [list(texts.values()) for texts in criteria.values() if texts]
    weights: dict[str, float] = {}
    for texts in dimensions:
        for text in texts:
            weights[text] = weights.get(text, 0.0) + 1 / (len(dimensions) * len(texts))
    return weights


class ConsistencyReward(JudgedReward):
    """
    Consistency of an image set ([PaCo-RL](https://huggingface.co/papers/2512.04784), Part 2): the mean of a judge's
    P(Yes) over all unordered pairs of panels.

    - Range: [0, 1].
    - Cost: a set of n panels has n (n - 1) / 2 pairs, 6 for a 2 x 2 grid. Each is one forward pass of the judge, per
      criterion with `question="criteria"`. Identical questions about identical images are asked once.
    - Source and license: `X-GenGroup/PaCo-Reward-7B`, trained from Qwen2.5-VL-7B-Instruct (Apache-2.0); see its model
      card.

    It rewards copies: identical panels are perfectly consistent. Combine it with a reward for the content of the
    panels ([`ClipTReward`]) or against near-identical ones ([`DuplicateReward`]), and look at the contact sheets.

    With `base_url` the judge is on a server, and a call returns a coroutine: images are scored while others are
    generated. Otherwise it is loaded into the process. The scores are the same.

    Args:
        model (`str`, `Path` or [`Judge`], *optional*, defaults to `"X-GenGroup/PaCo-Reward-7B"`):
            Hub id or directory of the judge, merged or a LoRA adapter; with `base_url`, its name on the server; or a
            loaded judge.
        base_url (`str`, *optional*):
            Address of a server, for example `"http://127.0.0.1:8000/v1"`. It is checked immediately.
        question (`str`, *optional*, defaults to `"theme"`):
            - `"theme"`: one question per pair, with the column `theme`; the published reward's default, which uses the
              text before the first panel marker as the theme, `parse_image_set_prompt(prompt).theme`.
            - `"criteria"`: one question per criterion of the column `criteria`, averaged within each dimension
              (identity, style, logic) and then over the dimensions.
        max_pairs (`int`, *optional*):
            Largest number of pairs per set. Larger sets (7 panels have 21 pairs) use a random choice that is the same
            for all images of a prompt. If `None`, all pairs.
        seed (`int`, *optional*, defaults to `0`):
            Seed of that choice.
        symmetric (`bool`, *optional*, defaults to `False`):
            Whether to average both orders of each pair, at twice the cost.
        **kwargs:
            Further arguments of [`ServedJudge`] with `base_url` (`api_key`, `max_concurrency`, `time_budget`, ...),
            and of [`~paco_trl.PaCoReward.from_pretrained`] without (`device`, `dtype`, `batch_size`, ...).

    Raises:
        JudgeUnavailableError: If the server does not answer, or has no such model.

    Example:

    ```python
    >>> from paco_trl.rewards import ConsistencyReward

    >>> reward = ConsistencyReward("X-GenGroup/PaCo-Reward-7B", dtype="bfloat16")
    >>> reward = ConsistencyReward(base_url="http://127.0.0.1:8000/v1", model="paco-reward")
    ```
    """

    __name__ = "consistency"  # names TRL's metrics, `rewards/consistency/mean`
    min_panels = 2

    def __init__(
        self,
        model: str | Path | Judge = "X-GenGroup/PaCo-Reward-7B",
        base_url: str | None = None,
        question: str = "theme",
        max_pairs: int | None = None,
        seed: int = 0,
        symmetric: bool = False,
        **kwargs,
    ):
        if question not in ("theme", "criteria"):
            raise ValueError(f"`question` is {question!r}, but must be 'theme' or 'criteria'.")
        if max_pairs is not None and max_pairs < 1:
            raise ValueError(f"`max_pairs` is {max_pairs}, but must be at least 1. Omit it for all pairs.")
        self.question, self.max_pairs, self.seed, self.symmetric = question, max_pairs, seed, symmetric
        self.needed_columns = (question,)  # the trainer checks them before it loads a model
        super().__init__(model, base_url, **kwargs)

    def _questions(
        self, prompts: list[str], completions: list[Image.Image], **columns
    ) -> list[list[WeightedQuestion]]:
        panel_images = panels_of(columns.get("panel_images"), len(completions), "`ConsistencyReward`")
        texts = column_of(columns.get(self.question), self.question, len(completions), f"`question={self.question!r}`")
        questions = []
        for index, (prompt, panels, text) in enumerate(zip(prompts, panel_images, texts, strict=True)):
            pairs = chosen_pairs(len(panels), self.max_pairs, self.seed, prompt)
            if self.symmetric:
                pairs = both_orders(pairs)
            questions.append(
                [
                    WeightedQuestion(panels[first], panels[second], question, weight / len(pairs))
                    for first, second in pairs
                    for question, weight in self._texts(text, index).items()
                ]
            )
        return questions

    def _texts(self, text, index: int) -> dict[str, float]:
        if self.question == "theme":
            return {theme_question(text): 1.0}
        weights = criteria_weights(criteria_dict(text))
        if not weights:
            raise ValueError(f"`criteria` of image {index} has no text. Fill the column, or use `question='theme'`.")
        return {criterion_question(criterion): weight for criterion, weight in weights.items()}

    def _combine(self, questions: list[WeightedQuestion], scores: list[float]) -> float:
        return sum(question.weight * score for question, score in zip(questions, scores, strict=True))
