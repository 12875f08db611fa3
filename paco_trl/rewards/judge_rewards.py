# SPDX-License-Identifier: Apache-2.0
"""Rewards that query a judge: consistency of a set, quality of an edit, likeness to references, rubric ratings."""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import combinations
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..data.columns import criteria_dict, roles_of
from ..data.questions import (
    criterion_question,
    edit_consistency_question,
    edit_following_question,
    reference_question,
    theme_question,
)
from ..utils.files import read_template
from ..utils.text import read_text
from .columns import require_column, require_panels
from .judge import NO_SCORE, Answer, ImageGroup, Judge, ServedJudge, both_orders, digits_of


logger = logging.getLogger(__name__)

# The paper's limit for source images. The judge was trained with it, too.
_MAX_SOURCE_PIXELS = 2_097_152
# Packaged rubric -> the columns and panels that it needs. The texts are in paco_trl/templates/rubric_*.txt.
_EDIT_REQUIREMENTS: dict[str, Any] = {"needed_columns": ("image",)}
RUBRICS = {"instruction": _EDIT_REQUIREMENTS, "unchanged": _EDIT_REQUIREMENTS, "consistency": {"min_panels": 2}}


class WeightedQuestion(NamedTuple):
    """A question about a pair of images, or a single one, and the weight of its score in the reward."""

    images: ImageGroup
    text: str
    weight: float = 1.0


Questions = list[list[WeightedQuestion]]  # one list per image


class JudgedReward:
    """Base class of rewards that query a judge. With a judge on a server, calls return coroutines."""

    __name__: str
    scale: int | None = None  # best rating; if `None`, the judge answers Yes or No
    topic = ""  # topic of the questions, if they do not depend on the arguments
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
            # Ask a test question before anything else is loaded
            self._check_judge()
        # An async judge is queried while other images are generated
        self.is_async = hasattr(self.judge, "answer")
        self.model_name = getattr(self.judge, "model_name", None)  # name on cards
        self._options = {} if self.scale is None else {"scale": self.scale}
        # Name of the judge's method that answers the questions
        if self.is_async:
            self._method = "answer"
        elif self.scale is not None:
            self._method = "rate"
        else:
            self._method = "decide" if hasattr(self.judge, "decide") else "score"
        if self.topic:
            self._warn_if_untrained(self.topic, "Use a judge that was trained for it.")

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None] | Awaitable[list[float | None]]:
        """Return one reward per image, `None` if a question about it has no answer."""
        questions = self._questions(prompts, completions, **columns)
        images = [question.images for row in questions for question in row]
        texts = [question.text for row in questions for question in row]
        ask = getattr(self.judge, self._method)
        if self.is_async:

            async def query_server() -> list[float | None]:
                return self._rewards(questions, await ask(images, texts, **self._options), log_metric)

            return query_server()
        scores = ask(images, texts, **self._options)
        answers = [Answer(score, "undecided" if score is None else None) for score in scores]
        return self._rewards(questions, answers, log_metric)

    @property
    def missing_score_reason(self) -> str | None:
        """Why the last unanswered question has no answer, for messages."""
        return getattr(self.judge, "missing_score_reason", None)

    def _check_judge(self) -> None:
        self.judge.check(scale=self.scale)

    def _warn_if_untrained(self, question: str, remedy: str) -> None:
        """Warn if the judge was trained on a single question, and is asked another one."""
        if (trained_question := getattr(self.judge, "question", None)) not in (None, question):
            topics = {"theme": "about themes", "criteria": "about criteria"}
            question = topics.get(question, question if question.startswith("about ") else repr(question))
            logger.warning(
                f"The reward '{self.__name__}' asks the judge {question}, but the judge was only trained on the "
                f"question {trained_question!r}. {remedy}"
            )

    def _questions(self, prompts: list[str], completions: list[Image.Image], **columns) -> Questions:
        raise NotImplementedError

    def _combine(self, questions: list[WeightedQuestion], scores: list[float]) -> float:
        """Combine the scores of an image's questions: by default their mean."""
        return sum(scores) / len(scores)

    def _rewards(
        self, questions: Questions, answers: list[Answer], log_metric: Callable[[str, float], None] | None
    ) -> list[float | None]:
        self._log_unanswered(answers, log_metric)
        answer_iterator = iter(answers)
        rewards = []
        for row in questions:
            scores: list = [next(answer_iterator).score for _ in row]
            # The mean over the answered pairs would not be comparable with the prompt's other images
            rewards.append(None if None in scores else self._combine(row, scores))
        return rewards

    def _log_unanswered(self, answers: list[Answer], log_metric: Callable[[str, float], None] | None) -> None:
        if log_metric is None or not answers:
            return
        name = self.__name__
        reasons = Counter(answer.reason for answer in answers if answer.score is None)
        log_metric(f"{name}/unanswered", reasons.total() / len(answers))
        # Log all reasons in every call: the trainer averages over the calls that logged a metric
        for reason in NO_SCORE:
            log_metric(f"{name}/unanswered/{reason}", reasons[reason] / len(answers))


def select_pairs(count: int, max_pairs: int | None, seed: int, prompt: str) -> list[tuple[int, int]]:
    """Return all unordered pairs of a set, or `max_pairs` of them that depend only on the seed and the prompt."""
    pairs = list(combinations(range(count), 2))
    if max_pairs is None or len(pairs) <= max_pairs:
        return pairs
    digest = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")
    indices = np.random.default_rng((seed, digest)).choice(len(pairs), max_pairs, replace=False)
    return [pairs[index] for index in sorted(indices.tolist())]


def criteria_weights(criteria: Any) -> dict[str, float]:
    """Weight the questions so that their sum is the mean over dimensions of the mean over each one's criteria."""
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
    panels ([`ClipTReward`]) or against near-identical panels ([`DuplicateReward`]).

    With `base_url` the judge is on a server, and images are scored while others are generated. Otherwise it is loaded
    into the process. The scores are the same.

    Args:
        model (`str`, `Path` or [`Judge`], *optional*, defaults to `"X-GenGroup/PaCo-Reward-7B"`):
            Hub id or directory of the judge, merged or a LoRA adapter; with `base_url`, its name on the server; or a
            loaded judge.
        base_url (`str`, *optional*):
            Address of a server, for example `"http://127.0.0.1:8000/v1"`. A test question is asked immediately.
        question (`str`, *optional*):
            Question for the judge. If `None`, the question that it was trained on, if its `paco_trl.json` records a
            single one (for a server, the file of the model that it reports); otherwise `"theme"`.

            - `"theme"`: one question per pair, with the column `theme`. This is the published reward's default; its
              theme is the text before the first panel marker, `parse_image_set_prompt(prompt).theme`.
            - `"criteria"`: one question per criterion of the column `criteria`, averaged within each dimension
              (identity, style, logic) and then over the dimensions.
            - a question in your own words: asked verbatim for each pair.
        max_pairs (`int`, *optional*):
            Largest number of pairs per set. Larger sets (7 panels have 21 pairs) use a random sample, the same for all
            images of a prompt. If `None`, all pairs.
        seed (`int`, *optional*, defaults to `0`):
            Seed of that sample.
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
        if question is not None and question not in ("theme", "criteria") and len(str(question).split()) < 2:
            raise ValueError(
                f"`question` is {question!r}, but must be 'theme', 'criteria' or a question in your own words."
            )
        if max_pairs is not None and not (isinstance(max_pairs, Integral) and max_pairs >= 1):
            raise ValueError(f"`max_pairs` is {max_pairs!r}; it must be a whole number, at least 1, or None for all.")
        super().__init__(model, base_url, **kwargs)
        if question is None and isinstance(self.judge, ServedJudge):
            self.judge.find_question()
        self.question = question or getattr(self.judge, "question", None) or "theme"
        remedy = "Leave `judge_question` (`question`) out to ask that one, or use a judge that was trained on yours."
        self._warn_if_untrained(self.question, remedy)
        self.max_pairs = max_pairs
        self.seed = seed
        self.symmetric = symmetric
        # The trainer checks them before it loads a model
        self.needed_columns = (self.question,) if self.question in ("theme", "criteria") else ()

    def _questions(self, prompts: list[str], completions: list[Image.Image], **columns) -> Questions:
        panel_images = require_panels(columns.get("panel_images"), len(completions), "`ConsistencyReward`")
        texts: list = [self.question] * len(completions)
        for name in self.needed_columns:
            texts = require_column(columns.get(name), name, len(completions), f"`question={name!r}`")
        questions = []
        for index, (prompt, panels, text) in enumerate(zip(prompts, panel_images, texts, strict=True)):
            pairs = select_pairs(len(panels), self.max_pairs, self.seed, prompt)
            pairs = both_orders(pairs) if self.symmetric else pairs
            if self.question == "criteria":
                weights = criteria_weights(text)
            else:
                weights = {theme_question(text) if self.question == "theme" else text: 1.0}
            if not weights:
                raise ValueError(f"`criteria` of image {index} is empty. Fill it, or use `question='theme'`.")
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
    judge's P(Yes) for consistency with the source times its P(Yes) for following the instruction.

    - Range: [0, 1].
    - Cost: two forward passes of the judge per image and source.
    - Source and license: see [`ConsistencyReward`].

    The prompt is the instruction. The column `image` has the source; `images` has several, and the score is their mean
    (the paper only has one). Sources of more than 2,097,152 pixels, the paper's limit for the judge, are downscaled to
    it.

    Args:
        model (`str`, `Path` or [`Judge`], *optional*, defaults to `"X-GenGroup/PaCo-Reward-7B"`), base_url (`str`,
        *optional*), **kwargs:
            See [`ConsistencyReward`].
    """

    topic = "about edits"
    __name__ = "edit"  # names TRL's metrics, `rewards/edit/mean`
    needed_columns = ("image",)  # the trainer checks them before it loads a model

    def _questions(self, prompts: list[str], completions: list[Image.Image], **columns) -> Questions:
        rows = sources_of(columns, len(completions), "`EditReward`")
        return [
            [
                WeightedQuestion((source, edited_image), question(prompt))
                for source in sources
                for question in (edit_consistency_question, edit_following_question)
            ]
            for prompt, sources, edited_image in zip(prompts, rows, completions, strict=True)
        ]

    def _combine(self, questions: list[WeightedQuestion], scores: list[float]) -> float:
        pairs = zip(scores[::2], scores[1::2], strict=True)  # one pair per source: consistency, following
        return sum(math.sqrt(consistency * following) for consistency, following in pairs) / (len(scores) // 2)


class ReferenceReward(JudgedReward):
    """
    Likeness to reference images of a character, a product or a style: the mean of a judge's P(Yes) over all pairs of a
    reference and a panel, or over the references of an edit or a single image.

    - Range: [0, 1].
    - Cost: one forward pass of the judge per pair: for a set of n panels, n per reference.
    - Source and license: see [`ConsistencyReward`]. The criteria are ours, worded like the published code's question.

    The column `references` has lists of images. The optional column `reference_roles` says what to keep of each:
    `"identity"` (the default), `"style"` or `"logic"`. References of more than 2,097,152 pixels are downscaled to
    that.

    It rewards copies of a reference: combine it with a reward for the content, such as [`ClipTReward`].

    Args:
        model (`str`, `Path` or [`Judge`], *optional*, defaults to `"X-GenGroup/PaCo-Reward-7B"`), base_url (`str`,
        *optional*), **kwargs:
            See [`ConsistencyReward`].
    """

    topic = "about references"
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

    - Range: [0, 1]. `None` if these numbers have less than half of the probability; the published code does not check
      that. Models that think first have no rating.
    - Cost: one forward pass of the judge per image, or per image and source.

    If rows have a source (the column `image`, or several in `images`; the rating is then their mean), the judge sees
    the source, at no more than 2,097,152 pixels, followed by the edited image. Otherwise it sees only the
    generated image, the whole grid in case of a set.

    Args:
        model (`str`, `Path` or [`Judge`]), base_url (`str`, *optional*), **kwargs:
            See [`ConsistencyReward`]. Any model that [`~transformers.AutoModelForImageTextToText`] loads and that
            follows instructions.
        rubric (`str` or `Path`):
            `"instruction"` (whether an edit follows its instruction), `"unchanged"` (whether it leaves everything else
            as it was), `"consistency"` (whether the panels of a set belong together), or the path of a UTF-8 text file
            with the placeholders `{prompt}` and `{scale}`.
        scale (`int`, *optional*, defaults to `5`):
            Best rating, 1 to 9. The published code uses 5.

    Raises:
        ValueError: If the rubric is missing or lacks a placeholder, or the scale has more than one digit.
        JudgeUnavailableError: If the server does not answer or lacks the model, or the model does not answer with a
            digit.
    """

    def __init__(
        self, model: str | Path | Judge, rubric: str | Path, base_url: str | None = None, scale: int = 5, **kwargs
    ):
        digits_of(scale)  # check the scale before a model is loaded
        self.rubric = read_rubric(rubric).replace("{scale}", str(scale))
        self.scale = scale
        self.__name__ = f"rubric_{Path(rubric).stem}"  # names TRL's metrics, `rewards/rubric_instruction/mean`
        requirements = RUBRICS.get(str(rubric), {})  # the trainer checks them before it loads a model
        self.needed_columns = requirements.get("needed_columns", ())
        self.min_panels = requirements.get("min_panels", 1)
        super().__init__(model, base_url, **kwargs)

    def _questions(self, prompts: list[str], completions: list[Image.Image], **columns) -> Questions:
        texts = [self.rubric.replace("{prompt}", prompt) for prompt in prompts]
        if not self.needed_columns and columns.get("image") is None and columns.get("images") is None:
            return [[WeightedQuestion((image,), text)] for image, text in zip(completions, texts, strict=True)]
        rows = sources_of(columns, len(completions), "`RubricReward`")
        return [
            [WeightedQuestion((source, edited_image), text) for source in sources]
            for sources, edited_image, text in zip(rows, completions, texts, strict=True)
        ]


def read_rubric(rubric: str | Path) -> str:
    """Read a packaged rubric by its name, or the user's rubric from a file."""
    if str(rubric) in RUBRICS:
        return read_template(f"rubric_{rubric}.txt").strip()
    path = Path(rubric).expanduser()
    if not path.is_file():
        raise ValueError(f"`rubric` is '{rubric}', which is neither a file nor one of {', '.join(RUBRICS)}.")
    text = read_text(path).strip()
    if missing := [name for name in ("{prompt}", "{scale}") if name not in text]:
        raise ValueError(f"The rubric '{rubric}' has no {missing[0]}. Add it where the judge should read that value.")
    return text


def sources_of(columns: dict[str, Any], count: int, reward: str) -> list[list[Image.Image]]:
    """Return the sources of each image, at most as large as a judge should see them."""
    return _images_of(columns, "images" if columns.get("images") is not None else "image", count, reward)


def _images_of(columns: dict[str, Any], name: str, count: int, reward: str) -> list[list[Image.Image]]:
    rows = require_column(columns.get(name), name, count, reward)
    rows = [[row] if name == "image" else list(row or ()) for row in rows]
    if not all(isinstance(source, Image.Image) for sources in rows for source in sources):
        raise ValueError(f"`{name}` must contain PIL images. Fill the column, and cast it to `datasets.Image()`.")
    return [[_shrink(source) for source in sources] for sources in rows]


def _shrink(source: Image.Image) -> Image.Image:
    factor = math.sqrt(_MAX_SOURCE_PIXELS / (source.width * source.height))
    if factor >= 1:
        return source
    return source.resize([max(1, int(side * factor)) for side in source.size], Image.Resampling.LANCZOS)
