# SPDX-License-Identifier: Apache-2.0
"""Rewards that query a judge about pairs of images: consistency of a set, and quality of an edit."""

import asyncio
import hashlib
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..data.image_sets import criteria_dict
from ..data.questions import (
    criterion_question,
    edit_consistency_question,
    edit_following_question,
    theme_question,
)
from .columns import column_of, panels_of
from .judge import NO_SCORE, Answer, Judge, ServedJudge, both_orders


# Several rounds at the paper's settings (672 images with 6 pairs each), in about 15 MB
_MAX_ANSWERS = 50_000
# Limit of the source images that the paper's judge was trained with
_MAX_SOURCE_PIXELS = 2_097_152


class WeightedQuestion(NamedTuple):
    """A question about two images, and the weight of its score in the reward."""

    first: Image.Image
    second: Image.Image
    text: str
    weight: float = 1.0


def image_digest(image: Image.Image) -> str:
    """Compute a digest of what makes images equal: mode, size, palette, transparent color and pixels."""
    pixels = image.tobytes()  # first: it loads the file
    description = f"{image.mode} {image.size} {image.getpalette(None)} {image.info.get('transparency')} "
    return hashlib.sha256(description.encode() + pixels).hexdigest()


class CachedJudge:
    """Caches the answers of a judge. Pending questions are shared; those without an answer are asked again."""

    def __init__(self, judge: Judge):
        self.judge: Any = judge  # with `answer` if it is served
        # Pending answers are futures
        self._answers: OrderedDict[bytes, Answer | Future[Answer]] = OrderedDict()
        self._lock = threading.Lock()

    def query(self, questions: list[WeightedQuestion]) -> tuple[list[Answer], int]:
        """Query a judge in the process; also return how many of the questions were new to it."""
        answers, new = self._claim(questions)
        with self._resolving(new) as resolved:
            if new:
                scores = self.judge.score(*_arguments(new))
                resolved += [Answer(score, "undecided" if score is None else None) for score in scores]
        return [answer.result() if isinstance(answer, Future) else answer for answer in answers], len(new)

    async def query_server(self, questions: list[WeightedQuestion]) -> tuple[list[Answer], int]:
        """Query a served judge, as `query` does one in the process."""
        answers, new = self._claim(questions)
        with self._resolving(new) as resolved:
            if new:
                resolved += await self.judge.answer(*_arguments(new))
        return [
            await asyncio.shield(asyncio.wrap_future(answer)) if isinstance(answer, Future) else answer
            for answer in answers
        ], len(new)

    def _claim(self, questions: list[WeightedQuestion]) -> tuple[list, dict[bytes, tuple[WeightedQuestion, Future]]]:
        """Return the answers, available or pending, and the new questions by their keys, with their pending answers."""
        digests = {id(image): image_digest(image) for question in questions for image in question[:2]}
        names = [
            (self.judge.name, text, digests[id(first)], digests[id(second)]) for first, second, text, _ in questions
        ]
        keys = [hashlib.sha256(repr(name).encode()).digest() for name in names]
        new = {}
        with self._lock:
            for question, key in zip(questions, keys, strict=True):
                if key not in self._answers:
                    pending: Future[Answer] = Future()
                    self._answers[key], new[key] = pending, (question, pending)
                self._answers.move_to_end(key)
            answers = [self._answers[key] for key in keys]
            while len(self._answers) > _MAX_ANSWERS and isinstance(next(iter(self._answers.values())), Answer):
                self._answers.popitem(last=False)
        return answers, new

    @contextmanager
    def _resolving(self, new: dict[bytes, tuple[WeightedQuestion, Future]]) -> Iterator[list[Answer]]:
        """Finalize the pending answers of new questions, also on failure, since other threads may wait for them."""
        resolved: list[Answer] = []
        try:
            yield resolved
            answers = dict(zip(new, resolved, strict=True))
        except BaseException as error:
            problem = error if isinstance(error, Exception) else RuntimeError("The question was canceled.")
            for key, (_, future) in new.items():
                with self._lock:
                    del self._answers[key]
                future.set_exception(problem)
            raise
        for key, answer in answers.items():
            with self._lock:
                if answer.score is None:
                    del self._answers[key]
                else:
                    self._answers[key] = answer
            new[key][1].set_result(answer)


def _arguments(new: dict[bytes, tuple[WeightedQuestion, Future]]) -> tuple[list, list[str]]:
    questions = [question for question, _ in new.values()]
    return [question[:2] for question in questions], [question.text for question in questions]


class JudgedReward:
    """Base of rewards that query a judge; with a judge on a server, a call returns a coroutine."""

    __name__: str

    def __init__(self, model: str | Path | Judge = "X-GenGroup/PaCo-Reward-7B", base_url: str | None = None, **kwargs):
        if not isinstance(model, (str, Path)):
            options = [*kwargs] if base_url is None else ["base_url", *kwargs]
            if options:
                raise TypeError(f"`{'`, `'.join(options)}` is for loading a judge, but {model!r} is already loaded.")
            self.judge: Any = model
        elif base_url is None:
            from .paco_reward import PaCoReward

            self.judge = PaCoReward.from_pretrained(model, **kwargs)
        else:
            self.judge = ServedJudge(base_url, str(model), **kwargs)
            self.judge.check()  # before anything else is loaded
        self.is_async = hasattr(self.judge, "answer")  # it is then queried while other images are generated
        self.model_name = getattr(self.judge, "model_name", None)  # for cards
        self._cached = CachedJudge(self.judge)

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Return the reward of each image, `None` if a question about it has no answer."""
        questions = self._questions(prompts, completions, **columns)
        flat = [question for row in questions for question in row]
        if not self.is_async:
            return self._rewards(questions, *self._cached.query(flat), log_metric)

        async def query_server() -> list[float | None]:
            return self._rewards(questions, *await self._cached.query_server(flat), log_metric)

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
        num_queries: int,
        log_metric: Callable[[str, float], None] | None,
    ) -> list[float | None]:
        if log_metric is not None and answers:
            name = self.__name__
            log_metric(f"{name}/questions_per_image", num_queries / len(questions))
            kinds = Counter(answer.reason for answer in answers if answer.score is None)
            log_metric(f"{name}/unanswered", kinds.total() / len(answers))
            # All kinds in each call: the trainer averages over the calls that logged a metric
            for kind in NO_SCORE:
                log_metric(f"{name}/unanswered/{kind}", kinds[kind] / len(answers))
        remaining, rewards = iter(answers), []
        for row in questions:
            scores: list = [next(remaining).score for _ in row]
            # The mean of the answered pairs would not be comparable with other images of the prompt
            rewards.append(None if None in scores else self._combine(row, scores))
        return rewards


def chosen_pairs(count: int, max_pairs: int | None, seed: int, prompt: str) -> list[tuple[int, int]]:
    """Return all unordered pairs of a set, or `max_pairs` of them that depend on seed and prompt alone."""
    pairs = list(combinations(range(count), 2))
    if max_pairs is None or len(pairs) <= max_pairs:
        return pairs
    digest = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")
    chosen = np.random.default_rng((seed, digest)).choice(len(pairs), max_pairs, replace=False)
    return [pairs[index] for index in sorted(chosen.tolist())]


def criteria_weights(criteria: dict[str, dict[str, str]]) -> dict[str, float]:
    """Return the weight of each criterion's question in a mean over dimensions of means over their criteria."""
    dimensions = [list(texts.values()) for texts in criteria.values() if texts]
    weights: dict[str, float] = {}
    for texts in dimensions:
        for question in map(criterion_question, texts):
            weights[question] = weights.get(question, 0.0) + 1 / (len(dimensions) * len(texts))
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
    panels ([`ClipTReward`]) or against near-identical ones ([`DuplicateReward`]).

    With `base_url` the judge is on a server, and images are scored while others are generated. Otherwise it is loaded
    into the process. The scores are the same.

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
            weights = (
                {theme_question(text): 1.0} if self.question == "theme" else criteria_weights(criteria_dict(text))
            )
            if not weights:
                raise ValueError(
                    f"`criteria` of image {index} has no text. Fill the column, or use `question='theme'`."
                )
            questions.append(
                [
                    WeightedQuestion(panels[first], panels[second], question, weight / len(pairs))
                    for first, second in pairs
                    for question, weight in weights.items()
                ]
            )
        return questions

    def _combine(self, questions: list[WeightedQuestion], scores: list[float]) -> float:
        return sum(question.weight * score for question, score in zip(questions, scores, strict=True))


class EditReward(JudgedReward):
    """
    Quality of an edited image ([PaCo-RL](https://huggingface.co/papers/2512.04784), Part 2): the square root of a
    judge's P(Yes) for consistency with the source times that for following the instruction.

    - Range: [0, 1].
    - Cost: two forward passes of the judge per image and source.
    - Source and license: see [`ConsistencyReward`].

    The prompt is the instruction. The column `image` has the source, or `images` several, over which the score is
    averaged (the paper has one source only). Sources of more than 2,097,152 pixels are downscaled to that, the paper's
    limit for the judge.

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
        if not all(isinstance(source, Image.Image) for sources in rows for source in sources):
            raise ValueError(f"`{name}` must have PIL images. Cast the column to `datasets.Image()`, and fill it.")
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
    factor = math.sqrt(_MAX_SOURCE_PIXELS / (source.width * source.height))
    if factor >= 1:
        return source
    width, height = (max(1, int(side * factor)) for side in source.size)
    return source.resize((width, height), Image.Resampling.LANCZOS)
