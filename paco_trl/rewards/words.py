# SPDX-License-Identifier: Apache-2.0
"""A reward and a scorer for benchmarks by judges that answer in words and scores as JSON, such as EditScore."""

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import yaml
from PIL import Image

from ..utils.files import digest, read_template
from ..utils.option_checks import WORDS_PROMPTS
from ..utils.text import read_text
from .judge import Answer, ImageGroup, Judge, ServedJudge
from .judge_rewards import JudgedReward, sources_of


class WordsQuestion(NamedTuple):
    """
    A question about a source and an edit (2 `images`) or about the edit alone (1), and the names of the scores to be
    written.
    """

    text: str
    images: int
    scores: tuple[str, ...]


class WordsPrompt(NamedTuple):
    """
    Questions about an edit with its source, and about an image alone; scores are from 0 to `scale`, and `labels` are
    texts before the images.
    """

    scale: float
    edit: tuple[WordsQuestion, ...]
    image: tuple[WordsQuestion, ...]
    labels: Sequence[str] | None

    @property
    def needed_columns(self) -> tuple[str, ...]:
        """Return the columns that every question needs."""
        return () if self.image else ("image",)

    def questions(self, num_images: int) -> tuple[WordsQuestion, ...]:
        """Return the questions about a source and an edit, or about a single image."""
        return (self.edit or self.image) if num_images == 2 else self.image

    def check(self, judge: ServedJudge) -> None:
        """Ask the first question about test images; a `JudgeUnavailableError` if the answer cannot be read."""
        question = (self.edit or self.image)[0]
        text = question.text.replace("{prompt}", "Make it black.")
        judge.check_written(text, len(question.scores), self.scale, question.images)

    def ask(
        self, judge: ServedJudge, groups: Sequence[ImageGroup], texts: Sequence[str], num_answers: int
    ) -> Future[list[Answer[tuple[float, ...]]]]:
        """Start to ask about each group; each of the `num_answers` rounds asks all questions once."""
        seeds = range(num_answers) if num_answers > 1 else (None,)
        asked = [
            (group[-question.images :], question.text.replace("{prompt}", text), len(question.scores), seed)
            for group, text in zip(groups, texts, strict=True)
            for seed in seeds
            for question in self.questions(len(group))
        ]
        images, prompts, counts, answer_seeds = map(list, zip(*asked, strict=True))
        return judge.write(images, prompts, counts, self.scale, answer_seeds, self.labels)

    def rate(
        self, groups: Sequence[ImageGroup], answers: Sequence[Answer[tuple[float, ...]]], num_answers: int
    ) -> list[dict[str, float] | None]:
        """
        Return the scores of each group by name, from 0 to 1, and `overall`, the geometric mean of each question's
        lowest score. All of them are means over the rounds in which every answer could be read. A group without such a
        round gets `None`.
        """
        remaining = iter(answers)
        ratings: list[dict[str, float] | None] = []
        for group in groups:
            questions = self.questions(len(group))
            rounds = [[next(remaining).score for _ in questions] for _ in range(num_answers)]
            readable = [[numbers for numbers in written if numbers is not None] for written in rounds]
            scores = [self._scores(questions, written) for written in readable if len(written) == len(questions)]
            ratings.append(
                {name: fmean(by_name[name] for by_name in scores) for name in scores[0]} if scores else None
            )
        return ratings

    def _scores(self, questions: Sequence[WordsQuestion], written: Sequence[Sequence[float]]) -> dict[str, float]:
        names = [name for question in questions for name in question.scores]
        numbers = [number / self.scale for numbers in written for number in numbers]
        overall = math.prod(min(numbers) / self.scale for numbers in written) ** (1 / len(written))
        return {**dict(zip(names, numbers, strict=True)), "overall": overall}


def read_words_prompt(prompt: str | Path) -> WordsPrompt:
    """Read a packaged prompt by its name, or the user's prompt from a YAML file of the same form."""
    name = str(prompt)
    if name not in WORDS_PROMPTS and not Path(name).expanduser().is_file():
        raise ValueError(f"`prompt` is '{name}', which is neither a file nor one of {', '.join(WORDS_PROMPTS)}.")
    is_packaged = name in WORDS_PROMPTS
    text = read_template(f"words_{name.partition('_')[0]}.yaml") if is_packaged else read_text(name)
    try:
        content = yaml.safe_load(text) | WORDS_PROMPTS.get(name, {})
        edit, image = (
            tuple(
                WordsQuestion(str(each["text"]), each["images"], tuple(each["scores"]))
                for each in content.get(kind, ())
            )
            for kind in ("edit", "image")
        )
        read = WordsPrompt(float(content["scale"]), edit, image, content.get("labels"))
        is_complete = 0 < read.scale < math.inf and bool(edit + image)
        is_complete &= all(question.images in (1, 2) and question.scores for question in edit + image)
        is_complete &= all("{prompt}" in "".join(each.text for each in kind) for kind in (edit, image) if kind)
    except (AttributeError, KeyError, TypeError, ValueError, yaml.YAMLError):
        is_complete = False
    if not is_complete:
        raise ValueError(
            f"The prompt '{name}' is not complete: it must be YAML with a `scale` above 0 and, under `edit`, `image` "
            "or both, questions with `images` (2: source and edit, or 1), `scores` (their names) and `text`, one of "
            "them with {prompt}. See words_viescore.yaml in the package's `templates`."
        )
    return read


class WordsReward(JudgedReward):
    """
    Score by a judge on a server that answers in words: EditScore
    ([2509.23909](https://huggingface.co/papers/2509.23909)), or any vision-language model with the prompts of VIEScore
    ([2312.14867](https://huggingface.co/papers/2312.14867)) or your own.

    The published formula: sqrt(SC * PQ). SC is the lowest score for following the prompt (for an edit, also for
    leaving the rest as it was), PQ the lowest score for naturalness and absence of artifacts.

    - Range: [0, 1], the published score (0 to 10) divided by 10. EditScore's judge writes 0 to 25, VIEScore's 0 to 10.
      `None` without a readable answer: there is no repair and no guess, unlike in the published code.
    - Cost: two answers of about a hundred tokens per image (or image and source), times `num_answers`.

    If rows have a source (the column `image`, or several in `images`, over which the score is averaged), the judge
    sees it, at no more than 2,097,152 pixels, followed by the edited image. Otherwise, with VIEScore's prompts, it
    sees the generated image alone, the whole grid in case of a set.

    Args:
        model (`str`, `Path` or [`ServedJudge`]):
            Name of the judge on the server, or a judge.
        prompt (`str` or `Path`):
            `"editscore"`, `"editscore_qwen3"` (without labels of images, for EditScore's judges from Qwen3-VL),
            `"viescore"`, or the path of a YAML file like theirs (`paco_trl/templates/words_viescore.yaml`), with
            `{prompt}` in its texts.
        base_url (`str`, *optional*):
            Address of the server, required with a name. A test question is asked immediately.
        num_answers (`int`, *optional*, defaults to `1`):
            Answers to each question. A single one is the likeliest (temperature 0). Several are sampled, at the
            published temperature of 0.7, and scores are averaged over the readable answers.
        **kwargs:
            Further arguments of [`ServedJudge`].

    Raises:
        ValueError: If the prompt is missing or incomplete.
        JudgeUnavailableError: If the server does not answer or lacks the model, or the first answer cannot be read.

    Example:

    ```python
    >>> from paco_trl.rewards import WordsReward

    >>> reward = WordsReward("EditScore-7B", "editscore", "http://127.0.0.1:8000/v1", num_answers=4)
    ```
    """

    def __init__(
        self,
        model: str | Path | Judge,
        prompt: str | Path,
        base_url: str | None = None,
        num_answers: int = 1,
        **kwargs,
    ):
        if num_answers < 1:
            raise ValueError(f"`num_answers` is {num_answers}, but must be at least 1.")
        if not hasattr(model, "write") and base_url is None:
            raise ValueError(
                f"A judge that answers in words must be on a server, but `base_url` is None for {str(model)!r}. Serve "
                "it, and pass its address."
            )
        self.prompt = read_words_prompt(prompt)
        self.num_answers = num_answers
        self.__name__ = f"words_{Path(prompt).stem}"  # names TRL's metrics, `rewards/words_editscore/mean`
        self.needed_columns = self.prompt.needed_columns  # the trainer checks them before it loads a model
        super().__init__(model, base_url, **kwargs)

    async def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        log_metric: Callable[[str, float], None] | None = None,
        **columns,
    ) -> list[float | None]:
        """Return one reward per image, `None` if it has no readable answer."""
        rows: list[list[ImageGroup]] = [[(image,)] for image in completions]
        if self.needed_columns or columns.get("image") is not None or columns.get("images") is not None:
            sources = sources_of(columns, len(completions), "`WordsReward`")
            rows = [[(source, image) for source in row] for row, image in zip(sources, completions, strict=True)]
        groups = [group for row in rows for group in row]
        texts = [prompt for row, prompt in zip(rows, prompts, strict=True) for _ in row]
        answers = await asyncio.wrap_future(self.prompt.ask(self.judge, groups, texts, self.num_answers))
        self._log_unanswered(answers, log_metric)
        ratings = iter(self.prompt.rate(groups, answers, self.num_answers))
        rewards: list[float | None] = []
        for row in rows:
            scores = [rating["overall"] for rating in (next(ratings) for _ in row) if rating is not None]
            rewards.append(fmean(scores) if len(scores) == len(row) else None)
        return rewards

    def _check_judge(self) -> None:
        self.prompt.check(self.judge)


class WordsJudge:
    """
    Scorer for [`~paco_trl.evaluation.evaluate_rankings`]: a judge on a server that answers in words. The arguments are
    the same as for [`WordsReward`].
    """

    rates = True

    def __init__(self, judge: ServedJudge, prompt: str | Path, num_answers: int = 1):
        self.judge = judge
        self.prompt = read_words_prompt(prompt)
        self.num_answers = num_answers
        self.name, self.model_name = judge.name, judge.model_name
        self.template = f"{Path(prompt).stem} x {num_answers} ({digest(self.prompt)[:8]})"

    def score(self, images: Sequence[ImageGroup], prompts: Sequence[str]) -> list[dict[str, float] | None]:
        """Score edits, each with its source, by the instructions: scores by name and `overall`, or `None`."""
        answers = self.prompt.ask(self.judge, images, prompts, self.num_answers).result()
        return self.prompt.rate(images, answers, self.num_answers)
