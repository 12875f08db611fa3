# SPDX-License-Identifier: Apache-2.0
"""Judges answer questions about pairs of images: their protocol, and a judge on an OpenAI-compatible server."""

import asyncio
import functools
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
from PIL import Image
from scipy.special import expit, logsumexp

from ..data.questions import plain_question
from ..utils.chat import ChatClient, NoAnswerError, read_reply
from ..utils.files import read_record
from ..utils.images import data_url
from ..utils.model_files import CARD_DATA_FILE, find_model_file
from ..utils.names import public_name
from ..utils.text import is_text, shorten
from ..utils.vision_language import check_text, load_image, patch_size_of
from .written_scores import read_scores


if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

logger = logging.getLogger(__name__)

# Types of images that judges accept
ImageSource = Image.Image | str | Path | bytes
ImagePair = tuple[ImageSource, ImageSource]
# Images of one question: a pair, or a single image
ImageGroup = ImagePair | tuple[ImageSource]
# Why a question has no score: the server refused it, did not answer, or answered something that cannot be parsed; or
# Yes and No (or the digits of a rating) have less than half of the probability
NO_SCORE = ("refused", "unavailable", "unreadable", "undecided")
# Log-probabilities to request: the most that OpenAI's API and vLLM return
TOP_LOGPROBS = 20
# vLLM's log-probability of 0
_LOG_ZERO = -9999.0
# A missing token is at most as likely as the last one returned. A score that this could change by more is `None`.
_MAX_SCORE_ERROR = 1e-3
LEAST_MASS = 0.5  # probability of Yes and No, or of all digits of a rating, at the first position
# The space before a digit: in text, and in the vocabularies of byte-level and SentencePiece tokenizers
SPACES = " Ġ▁"
_TEST_RATING = "How alike are the two images? Answer with a whole number from 0 to {scale}, and with nothing else."
# Control tokens in the chat templates of many models, such as Qwen's. The server's tokenizer is not known here.
CONTROL_TOKEN = re.compile(r"<\|\w+\|>")
_MAX_RETRIES = 10_000  # for each question; in practice, the time budget ends before
_CHECK_SECONDS = 30.0
# Length and temperature of an answer in words. The temperature is EditScore's, for several sampled answers.
_MAX_WORDS_TOKENS, _WORDS_TEMPERATURE = 1024, 0.7


class JudgeUnavailableError(RuntimeError):
    """Stops a run: the judge cannot be queried at all, because it is down, refuses the key, or lacks the model."""


Score = TypeVar("Score")


class Answer(NamedTuple, Generic[Score]):
    """
    A judge's answer to a question, or why there is none (`NO_SCORE`).

    Attributes:
        score (`float` or `None`):
            P(Yes) / (P(Yes) + P(No)) or a rating from 0 to 1. An answer in words has a tuple of the numbers that the
            judge wrote instead.
        reason (`str` or `None`):
            Why `score` is `None`.
    """

    score: Score | None
    reason: str | None = None


class _RequestSpec(NamedTuple, Generic[Score]):
    """Options of a request, and functions that read its answer, or describe an answer that cannot be read."""

    options: dict[str, Any]
    read: Callable[["ChatCompletion"], Answer[Score]]
    describe: Callable[["ChatCompletion"], str]


class Judge(Protocol):
    """
    Protocol of a judge: [`~paco_trl.PaCoReward`] in the process, [`ServedJudge`] on a server, or any object with this
    method and a name.

    A judge with `answer`, like [`ServedJudge.answer`], is queried while other images are generated. Rewards prefer
    `decide`, like [`~paco_trl.PaCoReward.decide`], to `score`. [`RubricReward`] requires
    [`~paco_trl.PaCoReward.rate`] or [`ServedJudge.answer`].
    """

    name: str  # name in reports

    def score(self, images: list[ImagePair], prompts: list[str]) -> Sequence[float | None]:
        """
        Score pairs of images, each with a question: P(Yes) / (P(Yes) + P(No)) for a vision-language model, `None` for
        a pair that could not be scored. Raise a `JudgeUnavailableError` if the judge cannot be queried at all.
        """
        ...


# ---- Questions, for all judges ----


def image_key(image: ImageSource) -> Hashable:
    """Return a key that identifies an image without reading it: its path, or the identity of the object."""
    return str(image) if isinstance(image, (str, Path)) else id(image)


def check_list(images: Any, name: str = "images") -> list:
    """Check that images are a list: each letter of a single path would be taken for an image."""
    if not isinstance(images, Sequence) or isinstance(images, str | bytes):
        raise ValueError(
            f"`{name}` is {shorten(images)}, which is not a list. Pass a list, even of a single one: `[...]`."
        )
    return list(images)


def check_pairs(images: list[ImagePair]) -> list[ImagePair]:
    """Check that images are pairs, and make each a tuple."""
    images = check_list(images)
    for index, pair in enumerate(images):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(f"`images[{index}]` is not a pair. Pass `[(first, second), ...]`.")
    return [(first, second) for first, second in images]


def both_orders(pairs: list[tuple]) -> list[tuple]:
    """Return each pair followed by its reverse."""
    return [order for first, second in pairs for order in ((first, second), (second, first))]


def score_both_orders(score: Callable[[list, list[str]], list], pairs: list[tuple], prompts: list[str]) -> list:
    """Score each pair and its reverse, and return the means, `None` if either has no score."""
    scores = iter(score(both_orders(pairs), [prompt for prompt in prompts for _ in range(2)]))
    return [None if None in pair_scores else sum(pair_scores) / 2 for pair_scores in zip(scores, scores, strict=True)]


def broadcast_questions(prompts: str | list[str], count: int, find_control: Callable[[str], list[str]]) -> list[str]:
    """Repeat a single question `count` times, or check that there are `count`; reject control tokens in them."""
    if not isinstance(prompts, Iterable):
        raise TypeError(f"`prompts` is {prompts!r}; it must be a question, or one for each pair.")
    prompts = [prompts] * count if isinstance(prompts, str) else list(prompts)
    if len(prompts) != count:
        raise ValueError(
            f"`prompts` has {len(prompts)} texts for {count} questions. Pass one per question, or one for all."
        )
    for index, prompt in enumerate(prompts):
        if not is_text(prompt):
            raise ValueError(f"`prompts[{index}]` is {prompt!r}; it must be a question.")
        check_text(prompt, find_control(prompt), f"`prompts[{index}]`")
    return prompts


def yes_probability(
    logprobs: Mapping[str, float], yes: Sequence[str] = ("Yes",), no: Sequence[str] = ("No",)
) -> float | None:
    """
    Compute the score of a judge from the log-probabilities of the first position: P(Yes) / (P(Yes) + P(No)).

    Args:
        logprobs (`Mapping[str, float]`):
            Token -> log-probability.
        yes (`Sequence[str]`, *optional*, defaults to `("Yes",)`), no (`Sequence[str]`, *optional*, defaults to
        `("No",)`):
            Tokens of each answer; their probabilities are added. The published weights were trained on these two:
            `yes` and ` Yes` are other tokens.

    Returns:
        `float` or `None`: the score. An answer has probability 0 if all of its tokens are absent or have -inf or
        vLLM's -9999. The score is then 1 or 0, or `None` if both answers have probability 0.

    Example:

    ```python
    >>> from paco_trl.rewards import yes_probability

    >>> round(yes_probability({"Yes": -0.1, "No": -2.4, "Maybe": -5.0}), 4)
    0.9089
    ```
    """
    for token in (*yes, *no):
        # A server may round 0 to a little more
        if not logprobs.get(token, -math.inf) <= 1e-3:
            raise ValueError(f"The log-probability of {token!r} is {logprobs[token]}, but must be at most 0.")
    values = ([logprobs.get(token, -math.inf) for token in tokens] for tokens in (yes, no))
    log_yes, log_no = map(np.logaddexp.reduce, values)
    if max(log_yes, log_no) <= _LOG_ZERO:
        return None
    return float(expit(log_yes - log_no))


def digits_of(scale: int) -> list[str]:
    """Return the possible ratings, 0 to `scale`. Each must be one digit."""
    if scale not in range(1, 10):
        raise ValueError(f"`scale` is {scale!r}, but must be 1 to 9: the first token cannot tell 1 from 10.")
    return [str(number) for number in range(scale + 1)]


def expected_rating(logprobs: Iterable[tuple[str, float]], scale: int) -> float | None:
    """Compute the expected rating over `scale` from the digits' probabilities; `None` if their sum is below half."""
    by_digit: dict[str, list[float]] = {digit: [] for digit in digits_of(scale)}
    for token, logprob in logprobs:
        by_digit.get(token.lstrip(SPACES), []).append(logprob)
    sums = np.array([logsumexp([-np.inf, *values]) for values in by_digit.values()])  # (scale + 1,)
    mass = logsumexp(sums)
    # Negated, so that NaN gives `None`; a server may round 0 to a little more
    if not math.log(LEAST_MASS) <= mass <= 1e-3:
        return None
    return float(np.exp(sums - mass) @ np.arange(scale + 1) / scale)


# ---- A judge on a server ----


@dataclass(eq=False)
class ServedJudge:
    """
    Judge behind an OpenAI-compatible endpoint that returns log-probabilities, such as vLLM (`paco-trl serve`).

    The score is the same as [`~paco_trl.PaCoReward`]'s: P(Yes) / (P(Yes) + P(No)) at the first position of the answer,
    from the log-probabilities of its 20 likeliest tokens. It is `None` if the two have less than half of the
    probability, for example because the model thinks first. Images are resized by the same function, so that the model
    sees the same pixels, and sent as PNG.

    openai's client retries requests that fail temporarily (no connection, a timeout, HTTP 408, 409, 429 or 5xx), and
    logs that at level `INFO`. A question without an answer after `time_budget` seconds gets the score `None` if the
    server answers a test question then; otherwise the judge is considered down. A judge can be queried from any thread
    or event loop.

    Args:
        base_url (`str`):
            Address of the API, for example `"http://127.0.0.1:8000/v1"`.
        model (`str`):
            Name of the model on the server (`--served-model-name` of vLLM, or the name of a LoRA module).
        api_key (`str`, *optional*):
            API key. Defaults to the environment variable `VLLM_API_KEY`, as in vLLM.
        max_concurrency (`int`, *optional*, defaults to `32`):
            Concurrent requests per process.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds per request.
        time_budget (`float`, *optional*, defaults to `300.0`):
            Seconds per question, with all retries and waits: a server may take this long to restart. Afterwards a test
            question tells whether the server is down. It gets a tenth of the budget, at least five seconds and at most
            `timeout`.
        patch_size (`int`, *optional*):
            Patch size of the model's vision tower in pixels: images are resized to multiples of it. 14 for Qwen2-VL
            and Qwen2.5-VL, 16 for Qwen3-VL. If `None`, it is read from the model that the server reports (`root` in
            the model list of vLLM and SGLang), locally or from the Hub; failing that, it is 14, with a warning.

    Example:

    ```python
    >>> from paco_trl.data import theme_question
    >>> from paco_trl.rewards import ServedJudge

    >>> judge = ServedJudge("http://127.0.0.1:8000/v1", "paco-reward")
    >>> judge.check()
    >>> judge.score([("spring.png", "summer.png")], theme_question("A fox through the four seasons"))  # one float
    ```
    """

    base_url: str
    model: str
    api_key: InitVar[str | None] = None
    max_concurrency: int = 32
    timeout: float = 60.0
    time_budget: float = 300.0
    patch_size: int | None = None

    def __post_init__(self, api_key: str | None):
        if not self.timeout <= self.time_budget:
            raise ValueError(f"`timeout` is {self.timeout}, but must be at most `time_budget` ({self.time_budget}).")
        key = api_key or os.environ.get("VLLM_API_KEY")
        remedy = "Pass `api_key`, or set VLLM_API_KEY."
        limits = (self.max_concurrency, self.timeout, _MAX_RETRIES)
        self._client = ChatClient(self.base_url, self.model, key, *limits, remedy, JudgeUnavailableError)
        self.name, self.model_name = self._client.name, public_name(self.model)  # cards do not show the address
        self._request_slots = asyncio.Semaphore(self.max_concurrency)
        self._model_lock = asyncio.Lock()
        self._logged_reasons: set[str] = set()  # reasons for a missing score that have been logged with an example
        self.missing_score_reason: str | None = None  # why the last question without a score has none
        self._has_read_model = False
        # The question that the judge was trained on, if it is a single one and the server reports its model
        self.question: str | None = None

    def check(self, scale: int | None = None) -> None:
        """Ask a test question, for a rating if `scale` is set; a `JudgeUnavailableError` within 30 s if it fails."""
        question = plain_question() if scale is None else _TEST_RATING.format(scale=scale)
        remedy = (
            f"A judge must begin its answer with {'Yes or No' if scale is None else 'a digit'}, without thinking, and "
            f"its server must return {TOP_LOGPROBS} log-probabilities (vLLM: `--max-logprobs {TOP_LOGPROBS}`)."
        )
        self._client.run(self._check(question, _first_token(scale), remedy, min(self.timeout, _CHECK_SECONDS)))

    def check_written(self, question: str, count: int, best: float, num_images: int) -> None:
        """Ask a test question as [`~ServedJudge.write`] does; `JudgeUnavailableError` if its answer is unreadable."""
        remedy = (
            f'An answer must have one JSON object whose "score" has {count} number(s) from 0 to {best:g}. Serve a '
            "model that follows this prompt, or use another prompt."
        )
        self._client.run(self._check(question, _in_words(count, best), remedy, self.timeout, num_images))

    def score(self, images: list[ImagePair], prompts: str | list[str], symmetric: bool = False) -> list[float | None]:
        """
        Score pairs of images. The arguments of all methods are the same as in [`~paco_trl.PaCoReward`].

        Returns:
            `list[float | None]`: P(Yes) / (P(Yes) + P(No)) of each pair, `None` without an answer. A warning gives the
            reasons.

        Raises:
            JudgeUnavailableError: If the server is down, refuses the key, or does not have the model.
        """
        pairs = check_pairs(images)
        prompts = broadcast_questions(prompts, len(images), CONTROL_TOKEN.findall)
        return score_both_orders(self._scores, pairs, prompts) if symmetric else self._scores(pairs, prompts)

    async def answer(
        self, images: Sequence[ImageGroup], prompts: str | list[str], scale: int | None = None
    ) -> list[Answer[float]]:
        """
        Score pairs like [`~ServedJudge.score`], or rate pairs or single images like [`~paco_trl.PaCoReward.rate`] if
        `scale` is set, but as a coroutine and with the reasons for missing scores.
        """
        return await asyncio.wrap_future(self._client.start(self._query_all(images, prompts, _first_token(scale))))

    def write(
        self,
        images: Sequence[ImageGroup],
        prompts: list[str],
        counts: Sequence[int],
        best: float,
        seeds: Sequence[int | None],
        labels: Sequence[str] | None = None,
    ) -> Future[list[Answer[tuple[float, ...]]]]:
        """
        Let the model answer in words, and read the scores that it writes: for each question, a tuple of `count`
        numbers from 0 to `best`, by [`~paco_trl.rewards.written_scores.read_scores`]. An answer with a seed is
        sampled. `labels` are texts before the images.
        """
        specs = [_in_words(count, best, seed) for count, seed in zip(counts, seeds, strict=True)]
        return self._client.start(self._query_all(images, prompts, specs, labels))

    def score_images(self, images: list[ImageSource], prompts: str | list[str]) -> list[float | None]:
        """Score questions about one image each, like [`~paco_trl.PaCoReward.score_images`]."""
        return self._scores([(image,) for image in check_list(images)], prompts)

    def top_logprobs(
        self, images: list[ImagePair], prompts: str | list[str], image_labels: tuple[str, str] | None = None
    ) -> list[dict[str, float] | None]:
        """Return the likeliest first tokens of each answer, like [`~paco_trl.PaCoReward.top_logprobs`]."""
        answers = self._client.run(self._query_all(check_pairs(images), prompts, _FIRST_TOKENS, image_labels))
        return [answer.score for answer in answers]

    def find_patch_size(self) -> int:
        """Return the patch size of the vision tower, after asking the server for its model if it is unknown."""
        return self._client.run(self._find_patch_size())

    def find_question(self) -> str | None:
        """Return the question that the judge was trained on, if it is a single one, after asking the server for it."""
        self.find_patch_size()
        return self.question

    def close(self) -> None:
        """Close the connections. The judge cannot be queried afterwards."""
        self._client.close()

    def _scores(self, groups: Sequence[ImageGroup], prompts: str | list[str]) -> list[float | None]:
        return [answer.score for answer in self._client.run(self._query_all(groups, prompts, _first_token()))]

    # ---- On the event loop ----

    async def _check(
        self, question: str, spec: _RequestSpec, remedy: str, seconds: float, num_images: int = 2
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                models = await self._client.find_model(max_retries=2)
                body = self._test_body(question, spec.options, num_images)
                completion = await self._client.complete(body, max_retries=2)
            if spec.read(completion).score is None:
                raise NoAnswerError("unreadable", spec.describe(completion))
            await self._find_patch_size(models)
        except (NoAnswerError, TimeoutError) as failure:
            if not isinstance(failure, NoAnswerError) or failure.kind == "unavailable":
                raise JudgeUnavailableError(
                    f"No judge answers at {self.base_url} ({str(failure) or f'timeout after {seconds:g} seconds'}). "
                    "Start one with `paco-trl serve` and wait until vLLM has started, or correct the address."
                ) from None
            raise JudgeUnavailableError(
                f"{self.name} gave no score for {shorten(question)} ({failure}). {remedy}"
            ) from None

    async def _find_patch_size(self, models: dict[str, Any] | None = None) -> int:
        """Return the patch size; the first call reads it and the training question from the server's model."""
        async with self._model_lock:
            if not self._has_read_model:
                await self._read_model(models)
                self._has_read_model = True
        return cast(int, self.patch_size)

    async def _read_model(self, models: dict[str, Any] | None) -> None:
        try:
            async with asyncio.timeout(self.time_budget):
                models = await self._client.list_models() if models is None else models
        except (NoAnswerError, TimeoutError) as failure:
            raise JudgeUnavailableError(
                f"{self.name} does not list its models ({str(failure) or 'timeout'}). Is it still running?"
            ) from None
        entry = models.get(self.model)
        entries = (entry, models.get(str(getattr(entry, "parent", None))))  # entries of an adapter and its base model
        roots = [getattr(model, "root", None) or model.id for model in entries if model is not None]
        roots = [root for root in roots if "/" in root]  # Hub ids or paths
        is_question_read = False
        for root in roots:
            if not is_question_read:
                with suppress(OSError):
                    self.question = await asyncio.to_thread(_read_question, root)
                    is_question_read = True
            if self.patch_size is None:
                with suppress(OSError, ValueError, ImportError):
                    self.patch_size = await asyncio.to_thread(_read_patch_size, root)
        if not is_question_read:
            logger.warning(
                f"The record of the question that {self.name} was trained on cannot be read here. Pass `question` if "
                "it was trained on a single one."
            )
        if self.patch_size is not None:
            return
        self.patch_size = 14
        model = " and ".join(map(repr, roots)) or "its model, which the server does not report,"
        logger.warning(
            f"Assuming a patch size of 14 for {self.name}, as for Qwen2.5-VL, because the processor of {model} cannot "
            "be read here. A different patch size resizes images twice: serve the model by its Hub id, or pass "
            "`patch_size`."
        )

    async def _query_all(
        self,
        groups: Sequence[ImageGroup],
        prompts: str | list[str],
        specs: _RequestSpec[Score] | Sequence[_RequestSpec[Score]],
        labels: Sequence[str] | None = None,
    ) -> list[Answer[Score]]:
        groups = [check_list(group, "images[...]") for group in check_list(groups)]
        prompts = broadcast_questions(prompts, len(groups), CONTROL_TOKEN.findall)
        specs = [specs] * len(groups) if isinstance(specs, _RequestSpec) else specs
        await self._find_patch_size()
        # Each image is encoded once, and errors name the first question about it
        sources = {
            image_key(image): (image, f"An image of question {index}")
            for index, group in reversed(list(enumerate(groups)))
            for image in group
        }
        data_urls = await asyncio.to_thread(self._encode, sources)
        bodies = (
            self._body([data_urls[image_key(image)] for image in group], prompt, spec.options, labels)
            for group, prompt, spec in zip(groups, prompts, specs, strict=True)
        )
        try:
            # A judge that is unavailable for one question cancels the others
            async with asyncio.TaskGroup() as task_group:
                tasks = [task_group.create_task(self._query(*query)) for query in zip(bodies, specs, strict=True)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        answers = [task.result() for task in tasks]
        if reasons := Counter(answer.reason for answer in answers if answer.reason is not None):
            counts = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
            logger.warning(f"{self.name} did not answer {reasons.total()} of {len(answers)} questions: {counts}.")
        return answers

    async def _query(self, body: dict, spec: _RequestSpec[Score]) -> Answer[Score]:
        async with self._request_slots:
            try:
                async with asyncio.timeout(self.time_budget):
                    completion = await self._client.complete(body)
                answer = spec.read(completion)
                if answer.reason is None:
                    return answer
                failure = NoAnswerError(answer.reason, spec.describe(completion))
            except TimeoutError:
                await self._check_is_up(spec.options | {"max_tokens": 1})
                failure = NoAnswerError("unavailable", f"no answer within {self.time_budget:g} seconds")
            except NoAnswerError as error:
                failure = error
        self.missing_score_reason = f"{self.name} has {failure.kind} answers ({failure})"
        if failure.kind not in self._logged_reasons:
            self._logged_reasons.add(failure.kind)
            logger.warning(f"{self.name} cannot answer a question: {failure}.")
        return Answer(None, failure.kind)

    async def _check_is_up(self, options: dict[str, Any]) -> None:
        """Ask a test question, to tell a bad question from a server that is down."""
        try:
            async with asyncio.timeout(min(self.timeout, max(self.time_budget / 10, 5.0))):
                await self._client.complete(self._test_body(plain_question(), options), max_retries=0)
        except (NoAnswerError, TimeoutError) as failure:
            raise JudgeUnavailableError(
                f"{self.name} has not answered for {self.time_budget:g} seconds (`time_budget`): "
                f"{str(failure) or 'timeout'}. Is it still running?"
            ) from None

    # ---- Requests ----

    def _body(
        self, urls: list[str], prompt: str, options: dict[str, Any], labels: Sequence[str] | None = None
    ) -> dict[str, Any]:
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        if labels is not None:
            texts = [{"type": "text", "text": label} for label in labels[: len(urls)]]
            content = [part for pair in zip(texts, content, strict=True) for part in pair]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}]
        return {"messages": messages, **options}

    def _test_body(self, question: str, options: dict[str, Any], num_images: int = 2) -> dict[str, Any]:
        colors = ("white", "black")[:num_images]
        images = {color: (Image.new("RGB", (112, 112), color), "A test image") for color in colors}
        return self._body(list(self._encode(images).values()), question, options)

    def _encode(self, sources: Mapping[Any, tuple[ImageSource, str]]) -> dict[Any, str]:
        """Encode images as data URLs, with the pixels that a judge in the process would see."""
        return {
            # Higher compression levels cost more time than they save
            key: data_url(load_image(source, self.patch_size or 14, where), "png", compress_level=1)
            for key, (source, where) in sources.items()
        }


def read_question(model: str, **hub_kwargs) -> str | None:
    """Return the question saved with a judge, if it was trained on a single one."""
    try:
        return _read_question(model, **hub_kwargs)
    except OSError as error:
        logger.warning(
            f"The record of the question that the judge '{model}' was trained on cannot be read here "
            f"({str(error).splitlines()[0]}). Pass `question` if it was trained on a single one."
        )
        return None


def _read_question(model: str, **hub_kwargs: Any) -> str | None:
    path = find_model_file(model, CARD_DATA_FILE, **hub_kwargs)
    settings = read_record(path).get("settings") if path else None
    question = settings.get("question") if isinstance(settings, dict) else None
    return question if is_text(question) else None


def _read_patch_size(model: str) -> int:
    from transformers import AutoProcessor  # a slow import

    return patch_size_of(AutoProcessor.from_pretrained(model))


def _read_entries(completion: "ChatCompletion") -> list[tuple[str, float]]:
    """Read the likeliest first tokens with their log-probabilities, or nothing if the response has another form."""
    try:
        choice: Any = completion.choices[0]
        return [(str(entry.token), float(entry.logprob)) for entry in choice.logprobs.content[0].top_logprobs]
    except (AttributeError, IndexError, TypeError, ValueError):
        return []


def _describe_tokens(completion: "ChatCompletion") -> str:
    tokens = [f"{token!r} {math.exp(min(logprob, 0)):.2%}" for token, logprob in _read_entries(completion)[:5]]
    return f"its likeliest first tokens: {', '.join(tokens) or 'none'}"


def _read_tokens(completion: "ChatCompletion") -> Answer[dict[str, float]]:
    """Read the likeliest first tokens with their log-probabilities, in place of a score."""
    logprobs: dict[str, float] = {}
    for token, logprob in _read_entries(completion):
        # Tokens may share a text (pieces of a character). The likelier one comes first: keep it.
        logprobs.setdefault(token, logprob)
    return Answer(logprobs) if logprobs else Answer(None, "unreadable")


def _read_score(completion: "ChatCompletion") -> Answer[float]:
    logprobs, reason = _read_tokens(completion)
    if logprobs is None:
        return Answer(None, reason)
    try:
        score = yes_probability(logprobs)
    except ValueError:  # NaN
        return Answer(None, "unreadable")
    present = [logprobs[token] for token in ("Yes", "No") if token in logprobs]
    # The last condition is negated, so that a NaN among the others gives no score
    is_sure = len(present) == 2 or math.exp(min(logprobs.values()) - sum(present)) <= _MAX_SCORE_ERROR
    if not is_sure or not sum(map(math.exp, present)) >= LEAST_MASS:
        score = None
    return Answer(score, "undecided" if score is None else None)


def _first_token(scale: int | None = None) -> _RequestSpec[float]:
    """Return the request for a score, or a rating, by the first token."""
    read = _read_score if scale is None else functools.partial(_read_rating, scale=scale)
    return _RequestSpec(_FIRST_TOKENS.options, read, _FIRST_TOKENS.describe)


def _in_words(count: int, best: float, seed: int | None = None) -> _RequestSpec[tuple[float, ...]]:
    """Return the request for an answer in words with `count` numbers from 0 to `best`, sampled if there is a seed."""
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": _MAX_WORDS_TOKENS}
    options |= {} if seed is None else {"temperature": _WORDS_TEMPERATURE, "seed": seed}

    def read(completion: "ChatCompletion") -> Answer[tuple[float, ...]]:
        text = read_reply(completion, _MAX_WORDS_TOKENS).text
        scores = None if text is None else read_scores(text, count, best)
        return Answer(scores, "unreadable" if scores is None else None)

    return _RequestSpec(options, read, _describe_words)


def _describe_words(completion: "ChatCompletion") -> str:
    reply = read_reply(completion, _MAX_WORDS_TOKENS)
    return reply.reason or f"its answer: {shorten(reply.text)}"


def _read_rating(completion: "ChatCompletion", scale: int) -> Answer[float]:
    entries = _read_entries(completion)
    if not entries:
        return Answer(None, "unreadable")
    score = expected_rating(entries, scale)
    num_missing = len({*digits_of(scale)} - {token.lstrip(SPACES) for token, _ in entries})
    max_missing = np.exp(np.min([logprob for _, logprob in entries]))  # probability; NaN if any is
    # A missing digit changes the score at most by its share of the digits' mass
    if num_missing and not num_missing * max_missing <= _MAX_SCORE_ERROR * LEAST_MASS:
        score = None
    return Answer(score, "undecided" if score is None else None)


# Asks for the likeliest first tokens
_FIRST_TOKENS = _RequestSpec(
    {"temperature": 0.0, "max_tokens": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS},
    _read_tokens,
    _describe_tokens,
)
