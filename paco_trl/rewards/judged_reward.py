# SPDX-License-Identifier: Apache-2.0
"""Base of the rewards that query a judge."""

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from .cached_judge import CachedJudge
from .judge import NO_SCORE, Answer, Judge


class WeightedQuestion(NamedTuple):
    """A question about two images, and the weight of its score in the reward."""

    first: Image.Image
    second: Image.Image
    text: str
    weight: float = 1.0


class JudgedReward:
    """Base of rewards that query a judge; with a judge on a server, a call returns a coroutine."""

    __name__: str

    def __init__(self, model: str | Path | Judge = "X-GenGroup/PaCo-Reward-7B", base_url: str | None = None, **kwargs):
        if not isinstance(model, (str, Path)):
            options = [*kwargs] if base_url is None else ["base_url", *kwargs]
            if options:
                raise TypeError(f"`{'`, `'.join(options)}` is for loading a judge, but {model!r} is already loaded.")
            self.judge = model
        elif base_url is None:
            from .paco_reward import PaCoReward

            self.judge = PaCoReward.from_pretrained(model, **kwargs)
        else:
            from .served_judge import ServedJudge

            self.judge = ServedJudge(base_url, str(model), **kwargs)
            self.judge.check()  # before anything else is loaded
        self.is_async = hasattr(self.judge, "answer")  # it is then queried while other images are generated
        self._cached = CachedJudge(self.judge)

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
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Return the reward of each image, `None` if a question about it has no answer."""
        questions = self._questions(prompts, completions, **columns)
        asked = [question[:3] for row in questions for question in row]
        if not self.is_async:
            return self._rewards(questions, *self._cached.query(asked), log_metric)

        async def query_server() -> list[float | None]:
            return self._rewards(questions, *await self._cached.query_server(asked), log_metric)

        return query_server()

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
            kinds = Counter(answer.reason for answer in answers if answer.score is None)
            log_metric(f"{name}/unanswered", kinds.total() / len(answers))
            # All kinds in each call: the trainer averages over the calls that logged a metric
            for kind in NO_SCORE:
                log_metric(f"{name}/unanswered/{kind}", kinds[kind] / len(answers))
        rest, rewards = iter(answers), []
        for row in questions:
            scores: list = [next(rest).score for _ in row]
            # The mean of the answered pairs would not be comparable with other images of the prompt
            rewards.append(None if None in scores else self._combine(row, scores))
        return rewards
