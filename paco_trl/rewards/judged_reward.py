# SPDX-License-Identifier: Apache-2.0
"""Base of the rewards that query a judge."""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from .cached_judge import CachedJudge
from .judge import Answer, Judge
from .served_judge import UNDECIDED, ServedJudge


# Kinds of questions without an answer in the metrics; the warnings have the details
_KINDS = ("refused", "unavailable", "unreadable", "undecided")


def _kind(reason: str | None) -> str:
    if reason is None or reason in ("no score", UNDECIDED):
        return "undecided"
    if reason in ("timeout", "no connection", "HTTP 408", "HTTP 409", "HTTP 429") or reason.startswith("HTTP 5"):
        return "unavailable"
    return "refused" if reason.startswith("HTTP") else "unreadable"


def _check_options(options: dict, is_served: bool) -> None:
    """Refuse options of a judge in the process for one on a server, and the other way round."""
    here = {
        "device",
        "dtype",
        "batch_size",
        "system_prompt",
        "trust_remote_code",
        "quantization",
        "attn_implementation",
    }
    there = inspect.signature(ServedJudge).parameters.keys() - {"base_url", "model"}
    for name in options:
        if is_served and name not in there:
            remedy = "Its server decides it (`paco-trl serve-reward`)" if name in here else "There is no such option"
            raise TypeError(
                f"`{name}` is not for a judge at a `base_url`, which takes {', '.join(sorted(there))}. {remedy}."
            )
        if not is_served and name in there - here:
            raise TypeError(
                f"`{name}` is for a judge on a server. Give its address, `base_url`, or leave `{name}` out."
            )


class WeightedQuestion(NamedTuple):
    """A question about two images, and the weight of its score in the reward."""

    first: Image.Image
    second: Image.Image
    text: str
    weight: float = 1.0


class JudgedReward:
    """Base of rewards that query a judge; with a served judge, an instance is a coroutine function."""

    __name__: str

    def __init__(self, model: str | Path | Judge = "X-GenGroup/PaCo-Reward-7B", base_url: str | None = None, **kwargs):
        if isinstance(model, (str, Path)):
            _check_options(kwargs, base_url is not None)
        if base_url is not None:
            if not isinstance(model, (str, Path)):
                raise TypeError(f"`base_url` is for a served model, but {model!r} is loaded. Pass one of the two.")
            model = ServedJudge(base_url, str(model), **kwargs)
            model.check()  # before anything else is loaded
        elif isinstance(model, (str, Path)):
            from .paco_reward import PaCoReward

            model = PaCoReward.from_pretrained(model, **kwargs)
        elif kwargs:
            raise TypeError(f"{', '.join(kwargs)} is for loading a judge, but {model!r} is already loaded.")
        self.judge = model
        if hasattr(model, "answer"):
            # Not in `__new__`: a subclass may take other arguments
            # https://github.com/python/mypy/issues/11470
            self.__class__ = _served(type(self))  # type: ignore[arg-type]
        self._cached = CachedJudge(model)

    @property
    def model_name(self) -> str | None:
        """Return the name of the judge for cards, `None` if it has none."""
        return getattr(self.judge, "model_name", None)

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None]:
        """Return the reward of each image, `None` if a question about it has no answer."""
        questions = self._questions(prompts, completions, **columns)
        answers, asked = self._cached.query([question[:3] for row in questions for question in row])
        return self._rewards(questions, answers, asked, log_metric)

    def _questions(
        self, prompts: list[str], completions: list[Image.Image], **columns
    ) -> list[list[WeightedQuestion]]:
        """Return the questions about each image."""
        raise NotImplementedError

    def _combine(self, questions: list[WeightedQuestion], scores: list[float]) -> float:
        """Combine the scores of an image's questions."""
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
            # All kinds in each call: the trainer averages over the calls that logged a metric
            for kind in _KINDS:
                log_metric(f"{name}/unanswered/{kind}", kinds[kind] / len(answers))
        rest, rewards = iter(answers), []
        for row in questions:
            scores: list = [next(rest).score for _ in row]
            # The mean of the answered pairs would not be comparable with other images of the prompt
            rewards.append(None if None in scores else self._combine(row, scores))
        return rewards


class ServedReward(JudgedReward):
    """Mixin: the reward of a served judge, which is queried while other images are generated."""

    async def __call__(  # type: ignore[override]  # `is_async_callable` tells them apart
        self,
        prompts: list[str],
        completions: list[Image.Image],
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None]:
        questions = self._questions(prompts, completions, **columns)
        answers, asked = await self._cached.query_server([question[:3] for row in questions for question in row])
        return self._rewards(questions, answers, asked, log_metric)


@functools.cache
def _served(cls: type[JudgedReward]) -> type[JudgedReward]:
    # What `cls` itself defines takes precedence over the mixin
    return type(f"Served{cls.__name__}", (cls, ServedReward), {"__doc__": cls.__doc__})
