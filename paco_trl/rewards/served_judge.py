# SPDX-License-Identifier: Apache-2.0
"""A judge behind an OpenAI-compatible server: the same questions and the same scores as in the process."""

import asyncio
import base64
import functools
import io
import logging
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import openai
from openai.types.chat import ChatCompletion
from PIL import Image
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_before_delay, wait_random_exponential

from ..data.questions import plain_question
from ..utils.addresses import check_base_url, is_loopback
from ..utils.chat_requests import ServerLimits, complete_chat
from ..utils.images import check_text, load_image
from ..utils.names import public_name
from .decision import yes_probability
from .judge import (
    Answer,
    ImageGroup,
    ImagePair,
    ImageSource,
    JudgeUnavailableError,
    image_key,
    name_image,
    one_question_each,
    single_images,
)


logger = logging.getLogger(__name__)

# The most that OpenAI's interface and vLLM give
_TOP_LOGPROBS = 20
# Tokens that did not come back have at most the probability of the last one that did. A score that this could change by
# more is not given.
_MAX_SCORE_ERROR = 1e-3
# The first wait after a failure is up to half a second, the later ones up to ten: a server that restarts is found soon,
# and one that is overloaded is not asked by all at once
_BACKOFF = wait_random_exponential(multiplier=0.5, max=10.0)
# Seconds before the end of the budget in which it is not worth to try again: the last error would be a timeout
_LAST_WAIT = 1.0
# What the chat templates of many models use, Qwen's among them. A server's tokenizer is not known here.
_CONTROL_TOKEN = re.compile(r"<\|\w+\|>")
_JPEG_QUALITY = 95
# Why there is no score although there is an answer
UNDECIDED = "Yes or No not among the likeliest tokens"
# Everyone's key for a server that wants none
_NO_KEY = "EMPTY"


class ServedJudge:
    """
    Judge behind an OpenAI-compatible endpoint that gives log-probabilities, such as vLLM (`paco-trl serve-reward`).

    The score is that of [`~paco_trl.PaCoReward`]: P(Yes) / (P(Yes) + P(No)) at the first position of the answer, from
    the log-probabilities of its 20 likeliest tokens. Images go through the same function as there, so that the model
    sees the same pixels, and are sent as PNG.

    A request that fails in a way that can pass (no connection, a timeout, HTTP 408, 429 or 5xx) is sent again, after
    random waits that grow up to ten seconds. What can still not be answered has the score `None`; it never becomes a
    number. If the server answered nothing at all in `time_budget` seconds, it is taken to be down.

    Requests run on an event loop of their own, through one pool of connections, so that a judge may be asked from any
    thread and any other loop.

    Args:
        base_url (`str`):
            Address of the interface, for example `"http://127.0.0.1:8000/v1"`.
        model (`str`):
            Name under which the server has the model (`--served-model-name` of vLLM, or the name of a LoRA module).
        api_key (`str`, *optional*):
            Key. If `None`, the environment variable `VLLM_API_KEY`, which vLLM reads too. (`OPENAI_API_KEY` is not
            read: it is not for other servers.)
        max_concurrency (`int`, *optional*, defaults to `32`):
            Requests under way at the same time. Each process of a run has its own.
        timeout (`float`, *optional*, defaults to `60.0`):
            Seconds for a request.
        time_budget (`float`, *optional*, defaults to `300.0`):
            Seconds for a question with all its requests and waits, from its first request. A server has that long to
            be restarted. When it is over, a test question tells whether the server is down; it has a tenth of the
            budget, at least five seconds, but no more than `timeout`.
        image_format (`str`, *optional*, defaults to `"png"`):
            `"png"`, which is lossless, or `"jpeg"` (quality 95, full colour resolution), which is smaller and changes
            pixels, and with them scores; benchmarks/README.md has both in numbers.
        system_prompt (`str`, *optional*):
            System turn in front of each question, for a judge that was trained with one.
        patch_size (`int`, *optional*, defaults to `14`):
            Pixels of a patch of the model's vision tower, to whose multiples images are scaled: 14 for Qwen2-VL and
            Qwen2.5-VL, 16 for Qwen3-VL.

    Raises:
        ValueError: If an argument is out of its range.

    Example:

    ```python
    >>> from paco_trl.data import theme_question
    >>> from paco_trl.rewards import ServedJudge

    >>> judge = ServedJudge("http://127.0.0.1:8000/v1", "paco-reward")
    >>> judge.check()
    >>> judge.score([("spring.png", "summer.png")], theme_question("A fox through the four seasons"))  # one float
    ```
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        max_concurrency: int = 32,
        timeout: float = 60.0,
        time_budget: float = 300.0,
        image_format: str = "png",
        system_prompt: str | None = None,
        patch_size: int = 14,
    ):
        host = check_base_url(base_url, "api_key")
        if max_concurrency < 1:
            raise ValueError(f"`max_concurrency` is {max_concurrency}, but must be at least 1.")
        if not 0 < timeout <= time_budget:
            raise ValueError(
                f"`timeout` is {timeout} and `time_budget` {time_budget}, but they must be positive, and a question "
                "(`time_budget`) takes at least as long as one request (`timeout`)."
            )
        if image_format not in ("png", "jpeg"):
            raise ValueError(f"`image_format` is {image_format!r}, but must be 'png' or 'jpeg'.")
        self.base_url = base_url
        self.model = model
        self.name = f"{model} at {base_url}"
        self.max_concurrency = max_concurrency
        self.timeout = timeout
        self.time_budget = time_budget
        self.image_format = image_format
        self.system_prompt = system_prompt
        self.patch_size = patch_size
        self._limits = ServerLimits(self.name)
        key = api_key or os.environ.get("VLLM_API_KEY") or _NO_KEY
        self._client = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=key,
            # Here it stands above one in OPENAI_CUSTOM_HEADERS
            default_headers={"Authorization": f"Bearer {key}"},
            max_retries=0,  # here, where there is a budget of time
            # A proxy that the environment names does not know this machine's own addresses
            http_client=openai.DefaultAsyncHttpxClient(trust_env=not is_loopback(host)),
        )
        # OPENAI_ORG_ID and OPENAI_PROJECT_ID: whose they are is nothing for other servers
        self._client.organization = self._client.project = None
        self._process = os.getpid()
        self._slots = asyncio.Semaphore(max_concurrency)
        self._reported: set[str] = set()  # reasons of which an example has been logged
        self._is_outage_reported = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r} at {self.base_url!r})"

    @property
    def model_name(self) -> str:
        """Name of the model as others may see it, for cards: never the address."""
        return public_name(self.model)

    def check(self, time_budget: float = 30.0) -> None:
        """
        Checks that the server is there, has the model, and that the model can be used as a judge.

        One real question is asked: servers that call themselves healthy may fail at their first request.

        Args:
            time_budget (`float`, *optional*, defaults to `30.0`):
                Seconds for which a server that does not answer is asked again, but no more than the judge's own
                `time_budget`.

        Raises:
            JudgeUnavailableError: with what is wrong, and the models that the server has.
        """
        self._run(self._check(min(self.time_budget, time_budget)))

    def score(self, images: list[ImagePair], prompts: str | list[str], symmetric: bool = False) -> list[float | None]:
        """
        Scores pairs of images, as [`~paco_trl.PaCoReward.score`] does.

        Args:
            images (`list[tuple]`):
                Pairs; each image a PIL image, a path, a URL, or the bytes of an image file.
            prompts (`str` or `list[str]`):
                Question for each pair, or one for all.
            symmetric (`bool`, *optional*, defaults to `False`):
                Whether to score both orders of each pair and take the mean, at the cost of a second request.

        Returns:
            `list[float | None]`: P(Yes) / (P(Yes) + P(No)) of each pair, `None` where there is no answer; a warning
            has the reasons.

        Raises:
            ValueError: A pair that is not two images, an image that cannot be read, or not one question a pair.
            JudgeUnavailableError: The server is down, refuses the key, or does not have the model.
        """
        return [answer.score for answer in self._run(self._answer(images, prompts, symmetric))]

    def score_images(self, images: list[ImageSource], prompts: str | list[str]) -> list[float | None]:
        """
        Scores questions about one image each, as [`~paco_trl.PaCoReward.score_images`] does.

        Args:
            images (`list`):
                Image of each question: a PIL image, a path, a URL, or the bytes of an image file.
            prompts (`str` or `list[str]`):
                Question for each image, or one for all.

        Returns:
            `list[float | None]`: P(Yes) / (P(Yes) + P(No)) of each question, `None` where there is no answer; a warning
            has the reasons.

        Raises:
            ValueError: An image that cannot be read, or not one question an image.
            JudgeUnavailableError: As in [`~ServedJudge.score`].
        """
        return [answer.score for answer in self._run(self._answer_images(images, prompts))]

    def top_logprobs(
        self, images: list[ImagePair], prompts: str | list[str], image_labels: tuple[str, str] | None = None
    ) -> list[dict[str, float] | None]:
        """
        Gives the likeliest first tokens of each answer, as [`~paco_trl.PaCoReward.top_logprobs`] does.

        Args:
            images (`list[tuple]`), prompts (`str` or `list[str]`):
                As in [`~ServedJudge.score`].
            image_labels (`tuple[str, str]`, *optional*):
                Text in front of the first and of the second image. If `None`, none.

        Returns:
            `list[dict[str, float] | None]`: token -> log-probability of each pair, `None` where there is no answer; a
            warning has the reasons.

        Raises:
            ValueError, JudgeUnavailableError: As in [`~ServedJudge.score`], or the server gives fewer than 20.
        """
        pairs, prompts = _check_pairs(images, prompts)
        answers = self._run(self._ask_all(pairs, prompts, {"max_tokens": 1}, _read_tokens, image_labels))
        if (largest := self._limits.largest.get("top_logprobs", _TOP_LOGPROBS)) < _TOP_LOGPROBS:
            raise JudgeUnavailableError(
                f"{self.name} allows `top_logprobs` of {largest} at most, but the published protocol reads the "
                f"{_TOP_LOGPROBS} likeliest tokens. Start vLLM with `--max-logprobs {_TOP_LOGPROBS}`."
            )
        return [answer.score for answer in answers]

    async def answer(self, images: list[ImagePair], prompts: str | list[str], symmetric: bool = False) -> list[Answer]:
        """
        As [`~ServedJudge.score`], for a running event loop, and with the reasons for what has no score.

        Args:
            images (`list[tuple]`), prompts (`str` or `list[str]`), symmetric (`bool`, *optional*, defaults to `False`):
                As in [`~ServedJudge.score`].

        Returns:
            `list[Answer]`.

        Raises:
            ValueError, JudgeUnavailableError: As in [`~ServedJudge.score`].
        """
        return await asyncio.wrap_future(self._start(self._answer(images, prompts, symmetric)))

    def explain(
        self, images: list[ImagePair], prompts: str | list[str], max_new_tokens: int = 512
    ) -> list[str | None]:
        """
        Generates the answers, greedily: Yes or No, and the reasons.

        Args:
            images (`list[tuple]`), prompts (`str` or `list[str]`):
                As in [`~ServedJudge.score`].
            max_new_tokens (`int`, *optional*, defaults to `512`):
                Length at which an answer is cut.

        Returns:
            `list[str | None]`: answer for each pair, `None` where there is none; a warning has the reasons.

        Raises:
            ValueError, JudgeUnavailableError: As in [`~ServedJudge.score`].
        """
        return self._run(self._explain(images, prompts, max_new_tokens))

    def close(self) -> None:
        """Closes the connections. The judge cannot be asked afterwards."""
        self._run(self._client.close())

    def _run(self, coroutine: Coroutine) -> Any:
        future = self._start(coroutine)
        try:
            return future.result()
        except BaseException:  # Ctrl-C: what is under way is not for anyone
            future.cancel()
            raise

    def _start(self, coroutine: Coroutine) -> Future:
        if os.getpid() != self._process:
            coroutine.close()
            raise RuntimeError(
                f"{self.name} was made in another process, whose connections cannot be used in this one. Make it anew "
                "after the fork."
            )
        return asyncio.run_coroutine_threadsafe(coroutine, _event_loop())

    # ---- On the event loop ----

    async def _check(self, budget: float) -> None:
        names = await self._model_names(budget)
        if self.model not in names:
            raise JudgeUnavailableError(self._unknown_model(names))
        try:
            content = await self._until_answered(self._call(self._test_body()), budget, is_start=True)
        except (openai.APIError, ValueError) as error:
            raise JudgeUnavailableError(
                f"{self.name} cannot be used as a judge. Asked '{plain_question()}' about two images, it gave no answer: "
                f"{self._detailed(error)}."
            ) from error
        answer = _read_score(content)
        if answer.score is None:
            tokens = ", ".join(repr(token) for token in list(_top_tokens(content) or {})[:_TOP_LOGPROBS])
            largest = self._limits.largest.get("top_logprobs")
            raise JudgeUnavailableError(
                f"{self.name} cannot be used as a judge. Asked '{plain_question()}', it gave no score: {answer.reason}. "
                f"The likeliest tokens: {tokens or 'none came back'}. A judge answers with Yes or No first, and its "
                "server gives log-probabilities (`logprobs`, `top_logprobs` of 20)."
                + (f" This one allows `top_logprobs` of {largest} at most." if largest else "")
            )

    async def _answer(self, images: list[ImagePair], prompts: str | list[str], symmetric: bool) -> list[Answer]:
        pairs, prompts = _check_pairs(images, prompts)
        if symmetric:
            pairs = [order for first, second in pairs for order in ((first, second), (second, first))]
            prompts = [prompt for prompt in prompts for _ in range(2)]
        answers = await self._ask_all(pairs, prompts, {"max_tokens": 1}, _read_score)
        if symmetric:
            answers = [_mean(*orders) for orders in zip(answers[::2], answers[1::2], strict=True)]
        return answers

    async def _answer_images(self, images: list[ImageSource], prompts: str | list[str]) -> list[Answer]:
        groups = single_images(images)
        prompts = _check_prompts(prompts, len(groups), "images")
        return await self._ask_all(groups, prompts, {"max_tokens": 1}, _read_score)

    async def _explain(
        self, images: list[ImagePair], prompts: str | list[str], max_new_tokens: int
    ) -> list[str | None]:
        pairs, prompts = _check_pairs(images, prompts)
        return [
            answer.score for answer in await self._ask_all(pairs, prompts, {"max_tokens": max_new_tokens}, _read_text)
        ]

    async def _ask_all(
        self,
        groups: list[ImageGroup],
        prompts: list[str],
        length: dict,
        read,
        labels: tuple[str, str] | None = None,
    ) -> list[Answer]:
        # An image is encoded once, in however many questions it is
        sources = {
            image_key(image): (image, name_image(group, place, index))
            for index, group in reversed(list(enumerate(groups)))
            for place, image in enumerate(group)
        }
        encoded = await asyncio.to_thread(self._encode, sources)
        bodies = (
            self._body([encoded[image_key(image)] for image in group], prompt, labels) | length
            for group, prompt in zip(groups, prompts, strict=True)
        )
        try:
            # When one finds the judge unavailable, the others are cancelled
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._ask(body, read)) for body in bodies]
        except BaseExceptionGroup as problems:
            raise problems.exceptions[0] from None
        answers = [task.result() for task in tasks]
        reasons = Counter(answer.reason for answer in answers if answer.reason is not None)
        if reasons:
            counted = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
            logger.warning(f"{reasons.total()} of {len(answers)} questions to {self.name} have no answer: {counted}.")
        return answers

    async def _ask(self, body: dict, read) -> Answer:
        async with self._slots:
            asked = asyncio.get_running_loop().time()
            try:
                return read(await self._until_answered(self._call(body), self.time_budget))
            except (TimeoutError, openai.APIError, ValueError) as error:
                # Is it this question, or the server?
                if _can_pass(error) and not await self._answers_a_test():
                    raise JudgeUnavailableError(
                        f"{self.name} has not answered for {asyncio.get_running_loop().time() - asked:.0f} seconds "
                        f"(`time_budget`: {self.time_budget:g}); the last error: {self._detailed(error)}. Is it still "
                        "running?"
                    ) from error
                reason = _reason(error)
                if reason not in self._reported:
                    self._reported.add(reason)
                    logger.warning(f"{self.name} cannot answer a question: {self._detailed(error)}.")
                return Answer(None, reason)

    async def _answers_a_test(self) -> bool:
        limit = min(self.timeout, max(self.time_budget / 10, 5.0))
        try:
            async with asyncio.timeout(limit):
                await self._call(self._test_body())(timeout=limit)
        except (TimeoutError, openai.APIError, ValueError):
            return False
        return True

    def _call(self, body: dict):
        return functools.partial(complete_chat, self._client, body, self._limits)

    async def _model_names(self, budget: float) -> list[str]:
        try:
            page = await self._until_answered(self._client.models.list, budget, is_start=True)
            return [model.id for model in page.data]
        except (openai.APIError, AttributeError, TypeError, ValueError) as error:
            raise JudgeUnavailableError(
                f"{self.base_url}/models gives no list of models ({self._detailed(error)}). Is it the address of an "
                "OpenAI-compatible server? It usually ends in /v1."
            ) from error

    async def _until_answered(self, call, budget: float, is_start: bool = False):
        """Calls until there is an answer, or a failure that will not pass, or the budget is used up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + budget
        failure = None
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception(_can_pass),
                wait=functools.partial(_wait, budget=budget),
                stop=stop_before_delay(budget),
                before_sleep=functools.partial(self._report_waiting, budget=budget),
                reraise=True,
            ):
                with attempt:
                    if self._client.is_closed():
                        raise RuntimeError(f"{self.name} was closed, and cannot be asked any more. Make another.")
                    limit = max(min(self.timeout, deadline - loop.time()), 0.01)
                    try:
                        async with asyncio.timeout(limit):
                            answer = await call(timeout=limit)
                    except (TimeoutError, openai.APIError) as error:
                        # A try that the budget cut short says nothing of the server; the failure before it does
                        is_cut = limit < self.timeout and isinstance(error, (TimeoutError, openai.APITimeoutError))
                        failure = failure if is_cut and failure is not None else error
                        raise failure from failure.__cause__
                    self._is_outage_reported = False
                    return answer
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise JudgeUnavailableError(
                f"{self.base_url} refuses the key ({self._detailed(error)}). Pass `api_key`, or set VLLM_API_KEY."
            ) from error
        except openai.NotFoundError as error:
            names = [] if call == self._client.models.list else await self._model_names(budget)
            if self.model in names:
                raise JudgeUnavailableError(
                    f"{self.base_url} has the model {self.model!r}, but does not answer questions with it "
                    f"({self._detailed(error)}). It needs the interface for chat, /chat/completions."
                ) from error
            if not names:
                raise JudgeUnavailableError(
                    f"{self.base_url} is not the address of an OpenAI-compatible server ({self._detailed(error)}). It "
                    "usually ends in /v1."
                ) from error
            raise JudgeUnavailableError(self._unknown_model(names)) from error
        except (TimeoutError, openai.APIError) as error:
            if is_start and _can_pass(error):
                raise JudgeUnavailableError(
                    f"No judge answers at {self.base_url} ({self._detailed(error)}, for {budget:g} seconds). Start one with "
                    "`paco-trl serve-reward`, which says when it is ready, or correct `base_url`."
                ) from error
            raise

    def _report_waiting(self, state: RetryCallState, budget: float) -> None:
        # Once it is worth a word, and by one question for all that are under way
        if state.attempt_number >= 4 and not self._is_outage_reported:
            self._is_outage_reported = True
            logger.warning(
                f"{self.name} does not answer: {self._detailed(state.outcome.exception())}. Trying again for up to "
                f"{budget - state.seconds_since_start:.0f} seconds."
            )

    def _unknown_model(self, names: list[str]) -> str:
        return (
            f"{self.base_url} has no model {self.model!r}. It has: {', '.join(names) or 'none'}. Take one of them as "
            "`model`."
        )

    def _detailed(self, error: BaseException) -> str:
        """A failure with what the server, or the network, says of it; without what is not for a log."""
        said = str(error.__cause__ or "") if isinstance(error, openai.APIConnectionError) else str(error)
        said = re.sub(r"data:image/\S+", "data:image/...", said)  # some servers send the request back
        if self._client.api_key != _NO_KEY:
            said = said.replace(self._client.api_key, "***")
        wanted = _retry_after(error)
        wait = f"; it is to be asked again after {wanted:g} seconds" if wanted > 0 else ""
        return f"{_reason(error)}{f' ({said[:300]})' if said else ''}{wait}"

    # ---- Requests and answers ----

    def _body(self, urls: list[str], prompt: str, labels: tuple[str, str] | None = None) -> dict:
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        if labels is not None:
            texts = [{"type": "text", "text": label} for label in labels]
            content = [part for pair in zip(texts, content, strict=True) for part in pair]
        return {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": [*content, {"type": "text", "text": prompt}]}],
            "temperature": 0.0,
            "max_tokens": 1,
            "logprobs": True,
            "top_logprobs": _TOP_LOGPROBS,
        }

    def _test_body(self) -> dict:
        images = {colour: (Image.new("RGB", (112, 112), colour), "A test image") for colour in ("white", "black")}
        encoded = self._encode(images)
        return self._body([encoded["white"], encoded["black"]], plain_question())

    def _encode(self, sources: dict[Any, tuple[ImageSource, str]]) -> dict[Any, str]:
        """Images as data URLs, with the pixels that a judge in the process would see."""
        encoded = {}
        for key, (source, where) in sources.items():
            image, file = load_image(source, self.patch_size, where), io.BytesIO()
            if self.image_format == "png":
                image.save(file, "PNG", compress_level=1)  # higher levels take longer than they save in sending
            else:
                image.save(file, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
            encoded[key] = f"data:image/{self.image_format};base64,{base64.b64encode(file.getvalue()).decode()}"
        return encoded


_event_loop_lock = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """The loop of all served judges of the process."""
    with _event_loop_lock:  # several threads may be the first
        return _started_event_loop(os.getpid())


@functools.cache
def _started_event_loop(process: int) -> asyncio.AbstractEventLoop:
    # A forked process has none of the threads of the one it comes from
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="paco-trl-judges", daemon=True).start()
    return loop


def _check_pairs(images: list[ImagePair], prompts: str | list[str]) -> tuple[list[ImagePair], list[str]]:
    for index, pair in enumerate(images):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            what = f"{len(pair)} images" if isinstance(pair, (list, tuple)) else type(pair).__name__
            raise ValueError(
                f"`images[{index}]` is {what}, not a pair. A judge takes pairs, `[(first, second), ...]`."
            )
    return [tuple(pair) for pair in images], _check_prompts(prompts, len(images), "pairs")


def _check_prompts(prompts: str | list[str], count: int, what: str) -> list[str]:
    prompts = one_question_each(prompts, count, what)
    for index, prompt in enumerate(prompts):
        check_text(prompt, _CONTROL_TOKEN.findall(prompt), f"`prompts[{index}]`")
    return prompts


def _top_tokens(completion: ChatCompletion) -> dict[str, float] | None:
    """The likeliest first tokens with their log-probabilities, or `None` if the answer has none."""
    try:
        entries = completion.choices[0].logprobs.content[0].top_logprobs
        tokens = [(entry.token, float(entry.logprob)) for entry in entries]
    except (AttributeError, IndexError, TypeError, ValueError):
        return None
    logprobs: dict[str, float] = {}
    for token, logprob in tokens:
        # Different tokens may have the same text (pieces of a character): the likelier one comes first
        logprobs.setdefault(token, logprob)
    return logprobs or None


def _read_score(completion: ChatCompletion) -> Answer:
    if not getattr(completion, "choices", None):
        return Answer(None, "the answer cannot be read")
    logprobs = _top_tokens(completion)
    if logprobs is None:
        return Answer(None, "no log-probabilities in the answer")
    try:
        score = yes_probability(logprobs)
    except ValueError:
        return Answer(None, "a log-probability that is none")
    found = [logprobs[token] for token in ("Yes", "No") if token in logprobs]
    # Turned around, so that a NaN among the others gives no score
    if len(found) == 1 and not math.exp(min(logprobs.values()) - found[0]) <= _MAX_SCORE_ERROR:
        score = None
    return Answer(score, UNDECIDED if score is None else None)


def _read_tokens(completion: ChatCompletion) -> Answer:
    logprobs = _top_tokens(completion)
    return Answer(logprobs, "no log-probabilities in the answer" if logprobs is None else None)


def _read_text(completion: ChatCompletion) -> Answer:
    try:
        text = completion.choices[0].message.content
    except (AttributeError, IndexError, TypeError):
        text = None
    return Answer(text, None) if isinstance(text, str) and text else Answer(None, "the answer cannot be read")


def _mean(first: Answer, second: Answer) -> Answer:
    for answer in (first, second):
        if answer.score is None:
            return answer
    return Answer((first.score + second.score) / 2)


def _wait(state: RetryCallState, budget: float) -> float:
    """Seconds until the next attempt: random and growing, and not before the server wants to be asked again."""
    # A long wait is shortened near the end, or a question would be given up before its time
    longest = max((budget - state.seconds_since_start) / 2, min(_LAST_WAIT, budget / 10))
    return max(min(_BACKOFF(state), longest), _retry_after(state.outcome.exception()))


def _retry_after(error: BaseException) -> float:
    """Seconds that a server wants to be left alone, 0 if it says nothing of it."""
    response = getattr(error, "response", None)
    try:
        wanted = float(response.headers["retry-after"])
    except (AttributeError, KeyError, ValueError):  # there is none, or it is a date
        return 0.0
    return wanted if math.isfinite(wanted) else 0.0


def _can_pass(error: BaseException) -> bool:
    """Whether a request that failed may succeed later."""
    if isinstance(error, openai.APIStatusError):
        return error.status_code in (408, 429) or error.status_code >= 500
    # A timeout of the client's own is a connection error of openai
    return isinstance(error, (TimeoutError, openai.APIConnectionError))


def _reason(error: BaseException) -> str:
    """The kind of a failure, for counts and metrics."""
    if isinstance(error, openai.APIStatusError):
        return f"HTTP {error.status_code}"
    if isinstance(error, (TimeoutError, openai.APITimeoutError)):
        return "timeout"
    return "no connection" if isinstance(error, openai.APIConnectionError) else "the answer cannot be read"
