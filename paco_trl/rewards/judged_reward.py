# SPDX-License-Identifier: Apache-2.0
"""What rewards have in common that ask a judge."""

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from .asked_once import AskedOnce
from .judge import Answer, Judge
from .served_judge import UNDECIDED, ServedJudge


# Why a question has no answer, in the metrics; the warnings have the details
_KINDS = ("refused", "unavailable", "unreadable", "undecided")


def _kind(reason: str | None) -> str:
    if reason is None or reason in ("no score", UNDECIDED):
        return "undecided"
    if reason in ("timeout", "no connection", "HTTP 408", "HTTP 409", "HTTP 429") or reason.startswith("HTTP 5"):
        return "unavailable"
    return "refused" if reason.startswith("HTTP") else "unreadable"


class WeightedQuestion(NamedTuple):
    """A question about two images, and the weight of its score in the reward."""

    first: Image.Image
    second: Image.Image
    text: str
    weight: float = 1.0


class JudgedReward:
    """
    Reward that puts questions to a judge. Subclasses say which, and what the scores make. With a served judge it is a
    coroutine function, with one in the process it is not.
    """

    __name__: str

    def __init__(self, model: str | Path | Judge, base_url: str | None, **kwargs):
        if base_url is not None:
            model = ServedJudge(base_url, model, **kwargs)
            # Before anything else is loaded: an address that is wrong is found now
            model.check()
        elif isinstance(model, (str, Path)):
            from .paco_reward import PaCoReward

            model = PaCoReward.from_pretrained(model, **kwargs)
        elif kwargs:
            raise TypeError(f"{', '.join(kwargs)} is for loading a judge, but {model!r} is one already.")
        self.judge = model
        if hasattr(model, "answer"):
            # Here and not in `__new__`: a subclass may take other arguments
            self.__class__ = _served(type(self))
        self._asked = AskedOnce(model)

    @property
    def model_name(self) -> str | None:
        """Name of the judge, for cards; `None` for one that does not say it."""
        return getattr(self.judge, "model_name", None)

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None]:
        """
        Scores images.

        Args:
            prompts (`list[str]`), completions (`list[PIL.Image.Image]`), **columns:
                Prompts, images, and columns of the dataset with an entry for each image.
            log_metric (`Callable`, *optional*):
                The trainer's; gets how many questions an image took, and the shares of those without an answer, by
                reason.

        Returns:
            `list[float | None]`: reward of each image, `None` if a question about it has no answer. With a served
            judge it is a coroutine that gives the list.
        """
        questions = self._questions(prompts, completions, **columns)
        answers, asked = self._asked.ask([question[:3] for row in questions for question in row])
        return self._rewards(questions, answers, asked, log_metric)

    def _questions(
        self, prompts: list[str], completions: list[Image.Image], **columns
    ) -> list[list[WeightedQuestion]]:
        """Questions about each image."""
        raise NotImplementedError

    def _combine(self, questions: list[WeightedQuestion], scores: list[float]) -> float:
        """Reward of an image from the scores of its questions."""
        raise NotImplementedError

    def _rewards(
        self,
        questions: list[list[WeightedQuestion]],
        answers: list[Answer],
        asked: int,
        log_metric: Callable[[str, float], None] | None,
    ) -> list[float | None]:
        if log_metric is not None and answers:
            name = self.__name__
            log_metric(f"{name}/questions_per_image", asked / len(questions))
            kinds = Counter(_kind(answer.reason) for answer in answers if answer.score is None)
            log_metric(f"{name}/unanswered", kinds.total() / len(answers))
            # All of them in each call: the trainer averages over the calls in which a metric was logged
            for kind in _KINDS:
                log_metric(f"{name}/unanswered/{kind}", kinds[kind] / len(answers))
        rest, rewards = iter(answers), []
        for row in questions:
            scores = [next(rest).score for _ in row]
            # The mean of what was answered would be that of other pairs than its siblings have
            rewards.append(None if None in scores else self._combine(row, scores))
        return rewards


class ServedReward(JudgedReward):
    """Mixin: the reward of a served judge, which is asked while other images are drawn."""

    async def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None]:
        questions = self._questions(prompts, completions, **columns)
        answers, asked = await self._asked.ask_server([question[:3] for row in questions for question in row])
        return self._rewards(questions, answers, asked, log_metric)


@functools.cache
def _served(cls: type[JudgedReward]) -> type[JudgedReward]:
    # What `cls` defines itself stands above the mixin
    return type(f"Served{cls.__name__}", (cls, ServedReward), {"__doc__": cls.__doc__})


def column_of(columns: dict, name: str, count: int, needed_by: str) -> list:
    """Get a column that a reward cannot do without, with one entry for each image."""
    column = columns.get(name)
    if column is None:
        raise ValueError(f"{needed_by} needs the column `{name}`, which the dataset does not have. Add it.")
    if len(column) != count:
        raise ValueError(f"`{name}` has {len(column)} entries for {count} images. Pass one for each.")
    return column
