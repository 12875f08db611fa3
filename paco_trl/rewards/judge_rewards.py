# SPDX-License-Identifier: Apache-2.0
"""Rewards that query a judge: consistency of a set, quality of an edit, likeness to references, ratings by a rubric."""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..data.columns import column_of, criteria_dict, panels_of, roles_of
from ..data.questions import (
    criterion_question,
    edit_consistency_question,
    edit_following_question,
    reference_question,
    theme_question,
)
from ..utils.files import read_template
from ..utils.text import read_text
from .judge import NO_SCORE, Answer, ImageGroup, Judge, ServedJudge, both_orders, digits_of


logger = logging.getLogger(__name__)

# Limit of the source images that the paper's judge was trained with
_MAX_SOURCE_PIXELS = 2_097_152
# Packaged rubrics -> columns and panels that they need; the texts are in paco_trl/templates/rubric_*.txt
_FOR_EDITS: dict[str, Any] = {"needed_columns": ("image",)}
RUBRICS = {"instruction": _FOR_EDITS, "unchanged": _FOR_EDITS, "consistency": {"min_panels": 2}}


class WeightedQuestion(NamedTuple):
    """A question about two images, or about one, and the weight of its score in the reward."""

    images: ImageGroup
    text: str
    weight: float = 1.0


Questions = list[list[WeightedQuestion]]  # a list for each image


class JudgedReward:
    """Base of rewards that query a judge; with a judge on a server, a call returns a coroutine."""

    __name__: str
    scale: int | None = None  # best rating; without one the judge answers Yes or No
    asked = ""  # the question, if it is always the same
    needed_columns: tuple[str, ...] = ()

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
            self.judge.check(scale=self.scale)  # before anything else is loaded
        self.is_async = hasattr(self.judge, "answer")  # it is then queried while other images are generated
        self.model_name = getattr(self.judge, "model_name", None)  # for cards
        self._options = {} if self.scale is None else {"scale": self.scale}
        if self.asked:
            self._warn_of(self.asked)

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Return the reward of each image, `None` if a question about it has no answer."""
        questions = self._questions(prompts, completions, **columns)
        images = [question.images for row in questions for question in row]
        texts = [question.text for row in questions for question in row]
        if self.is_async:

            async def query_server() -> list[float | None]:
                return self._rewards(questions, await self.judge.answer(images, texts, **self._options), log_metric)

            return query_server()
        if self.scale is not None:
            scores = self.judge.rate(images, texts, scale=self.scale)
        elif hasattr(self.judge, "decide"):
            scores = self.judge.decide(images, texts)
        else:
            scores = self.judge.score(images, texts)
        answers = [Answer(score, "undecided" if score is None else None) for score in scores]
        return self._rewards(questions, answers, log_metric)

    @property
    def missing_score_reason(self) -> str | None:
        """Why the last question without an answer has none, for messages."""
        return getattr(self.judge, "missing_score_reason", None)

    def _warn_of(self, asked: str) -> None:
        """Warn of a judge that was trained on one question alone, and is asked another."""
        if (trained := getattr(self.judge, "question", None)) not in (None, asked):
            named = {"theme": "about themes", "criteria": "about criteria"}
            asked = named.get(asked, asked if asked.startswith("about ") else repr(asked))
            logger.warning(
                f"The reward '{self.__name__}' asks the judge {asked}, but it was trained on the one question {trained!r}."
            )

    def _questions(self, prompts: list[str], completions: list[Image.Image], **columns) -> Questions:
        raise NotImplementedError

    def _combine(self, questions: list[WeightedQuestion], scores: list[float]) -> float:
        """Combine the scores of an image's questions: by default their mean."""
        return sum(scores) / len(scores)

    def _rewards(
        self, questions: Questions, answers: list[Answer], log_metric: Callable[[str, float], None] | None
    ) -> list[float | None]:
        if log_metric is not None and answers:
            name = self.__name__
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


def criteria_weights(criteria: Any) -> dict[str, float]:
    """Return the weight of each criterion's question in a mean over dimensions of means over their criteria."""
    dimensions = [list(texts.values()) for texts in criteria_dict(criteria).values()]
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
      criterion with `question="criteria"`.
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
        question (`str`, *optional*):
            What the judge is asked. If `None`, the question of its training, if its `paco_trl.json` (a server's is found
            by the model's name) records exactly one; otherwise `"theme"`.

            - `"theme"`: one question per pair, with the column `theme`; the published reward's default, which uses the
              text before the first panel marker as the theme, `parse_image_set_prompt(prompt).theme`.
            - `"criteria"`: one question per criterion of the column `criteria`, averaged within each dimension
              (identity, style, logic) and then over the dimensions.
            - a question in your own words: asked of each pair as it is.
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
        question: str | None = None,
        max_pairs: int | None = None,
        seed: int = 0,
        symmetric: bool = False,
        **kwargs,
    ):
        if question is not None and question not in ("theme", "criteria") and len(question.split()) < 2:
            raise ValueError(
                f"`question` is {question!r}, but must be 'theme', 'criteria' or a question in your own words."
            )
        super().__init__(model, base_url, **kwargs)
        if question is None and isinstance(self.judge, ServedJudge):
            self.judge.find_question()
        self.question = question or getattr(self.judge, "question", None) or "theme"
        self._warn_of(self.question)
        self.max_pairs, self.seed, self.symmetric = max_pairs, seed, symmetric
        # The trainer checks them before it loads a model
        self.needed_columns = (self.question,) if self.question in ("theme", "criteria") else ()

    def _questions(self, prompts: list[str], completions: list[Image.Image], **columns) -> Questions:
        panel_images = panels_of(columns.get("panel_images"), len(completions), "`ConsistencyReward`")
        texts: list = [self.question] * len(completions)
        for name in self.needed_columns:
            texts = column_of(columns.get(name), name, len(completions), f"`question={name!r}`")
        questions = []
        for index, (prompt, panels, text) in enumerate(zip(prompts, panel_images, texts, strict=True)):
            pairs = chosen_pairs(len(panels), self.max_pairs, self.seed, prompt)
            pairs = both_orders(pairs) if self.symmetric else pairs
            if self.question == "criteria":
                weights = criteria_weights(text)
            else:
                weights = {theme_question(text) if self.question == "theme" else text: 1.0}
            if not weights:
                raise ValueError(f"`criteria` of image {index} has no text. Use `question='theme'`, or fill it.")
            questions.append(
                [
                    WeightedQuestion((panels[first], panels[second]), question, weight / len(pairs))
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

    asked = "about edits"
    __name__ = "edit"  # names TRL's metrics, `rewards/edit/mean`
    needed_columns = ("image",)  # the trainer checks them before it loads a model

    def _questions(self, prompts: list[str], completions: list[Image.Image], **columns) -> Questions:
        rows = _sources_of(columns, len(completions), "`EditReward`")
        return [
            [
                WeightedQuestion((source, edited), question(prompt))
                for source in sources
                for question in (edit_consistency_question, edit_following_question)
            ]
            for prompt, sources, edited in zip(prompts, rows, completions, strict=True)
        ]

    def _combine(self, questions: list[WeightedQuestion], scores: list[float]) -> float:
        pairs = zip(scores[::2], scores[1::2], strict=True)  # a pair for each source: consistency, following
        return sum(math.sqrt(consistency * following) for consistency, following in pairs) / (len(scores) // 2)


class ReferenceReward(JudgedReward):
    """
    Whether an image keeps what its references show, a character, a product or a style: the mean of a judge's P(Yes)
    over all pairs of a reference and a panel, or over the references of an edit or a single image.

    - Range: [0, 1].
    - Cost: one forward pass of the judge per pair: for a set of n panels, n per reference.
    - Source and license: see [`ConsistencyReward`]. The criteria are ours, in the words of the published code's question.

    The column `references` has lists of images, and `reference_roles`, if there, what of each counts: `"identity"` (also
    where there is none), `"style"` or `"logic"`. References of more than 2,097,152 pixels are downscaled to that.

    It rewards copies of a reference: combine it with a reward for the content, such as [`ClipTReward`].

    Args:
        model (`str`, `Path` or [`Judge`], *optional*, defaults to `"X-GenGroup/PaCo-Reward-7B"`), base_url (`str`, *optional*), **kwargs:
            See [`ConsistencyReward`].
    """

    asked = "about references"
    __name__ = "reference"  # names TRL's metrics, `rewards/reference/mean`
    needed_columns = ("references",)  # the trainer checks them before it loads a model

    def _questions(self, prompts: list[str], completions: list[Image.Image], **columns) -> Questions:
        rows = _images_of(columns, "references", len(completions), "`ReferenceReward`")
        roles = columns.get("reference_roles") or [None] * len(completions)
        panel_images = columns.get("panel_images") or [[image] for image in completions]
        questions = []
        for index, (references, panels) in enumerate(zip(rows, panel_images, strict=True)):
            texts = map(reference_question, roles_of(len(references), roles[index], f"image {index}"))
            pairs = zip(references, texts, strict=True)
            questions.append([WeightedQuestion((image, panel), text) for image, text in pairs for panel in panels])
        return questions


class RubricReward(JudgedReward):
    """
    Rating by any vision-language model with a rubric, as in Edit-R1
    ([UniWorld-V2](https://huggingface.co/papers/2510.16888)): the mean of the numbers 0 to `scale`, weighted by their
    probabilities at the first token of the answer, divided by `scale`, as the published code does with 0 to 5.

    - Range: [0, 1]. `None` where these numbers have less than half of the probability, which the published code does not
      check. Models that think first have no rating.
    - Cost: one forward pass of the judge per image, or per image and source.

    Where rows have a source (the column `image`, or `images` with several, over which the rating is averaged), the judge
    sees it, at no more than 2,097,152 pixels, and then the edited image; else the generated image alone, which for a set
    is the whole grid.

    Args:
        model (`str`, `Path` or [`Judge`]), base_url (`str`, *optional*), **kwargs:
            See [`ConsistencyReward`]. Any model that [`~transformers.AutoModelForImageTextToText`] loads and that
            follows instructions.
        rubric (`str` or `Path`):
            `"instruction"` (whether an edit follows its instruction), `"unchanged"` (whether it leaves everything else as
            it was), `"consistency"` (whether the panels of a set belong together), or the path of a text file (UTF-8) with
            `{prompt}` and `{scale}`, which are replaced.
        scale (`int`, *optional*, defaults to `5`):
            Best rating, 1 to 9; 5 is that of the published code.

    Raises:
        ValueError: If the rubric is missing or lacks a placeholder, or the scale has more than one digit.
        JudgeUnavailableError: If the server does not answer, lacks the model, or this does not answer with a digit.
    """

    def __init__(
        self, model: str | Path | Judge, rubric: str | Path, base_url: str | None = None, scale: int = 5, **kwargs
    ):
        digits_of(scale)  # checked before a model is loaded
        self.rubric, self.scale = read_rubric(rubric).replace("{scale}", str(scale)), scale
        self.__name__ = f"rubric_{Path(rubric).stem}"  # names TRL's metrics, `rewards/rubric_instruction/mean`
        needs = RUBRICS.get(str(rubric), {})  # the trainer checks them before it loads a model
        self.needed_columns, self.min_panels = needs.get("needed_columns", ()), needs.get("min_panels", 1)
        super().__init__(model, base_url, **kwargs)

    def _questions(self, prompts: list[str], completions: list[Image.Image], **columns) -> Questions:
        texts = [self.rubric.replace("{prompt}", prompt) for prompt in prompts]
        if not self.needed_columns and columns.get("image") is None and columns.get("images") is None:
            return [[WeightedQuestion((image,), text)] for image, text in zip(completions, texts, strict=True)]
        rows = _sources_of(columns, len(completions), "`RubricReward`")
        return [
            [WeightedQuestion((source, edited), text) for source in sources]
            for sources, edited, text in zip(rows, completions, texts, strict=True)
        ]


def read_rubric(rubric: str | Path) -> str:
    """Read a packaged rubric by its name, or the user's own from a file."""
    if str(rubric) in RUBRICS:
        return read_template(f"rubric_{rubric}.txt").strip()
    path = Path(rubric).expanduser()
    if not path.is_file():
        raise ValueError(f"`rubric` is '{rubric}', which is neither a file nor one of {', '.join(RUBRICS)}.")
    text = read_text(path).strip()
    if missing := [name for name in ("{prompt}", "{scale}") if name not in text]:
        raise ValueError(f"The rubric '{rubric}' has no {missing[0]}. Write it where the judge is to read its value.")
    return text


def _sources_of(columns: dict[str, Any], count: int, reward: str) -> list[list[Image.Image]]:
    return _images_of(columns, "images" if columns.get("images") is not None else "image", count, reward)


def _images_of(columns: dict[str, Any], name: str, count: int, reward: str) -> list[list[Image.Image]]:
    rows = column_of(columns.get(name), name, count, reward)
    rows = [[row] if name == "image" else list(row or ()) for row in rows]
    if not all(isinstance(source, Image.Image) for sources in rows for source in sources):
        raise ValueError(f"`{name}` must have PIL images. Cast the column to `datasets.Image()`, and fill it.")
    return [[_shrunk(source) for source in sources] for sources in rows]


def _shrunk(source: Image.Image) -> Image.Image:
    factor = math.sqrt(_MAX_SOURCE_PIXELS / (source.width * source.height))
    if factor >= 1:
        return source
    return source.resize([max(1, int(side * factor)) for side in source.size], Image.Resampling.LANCZOS)
