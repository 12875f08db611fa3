# SPDX-License-Identifier: Apache-2.0
"""Client of OpenAI-compatible servers: connections, retries and failures."""

import asyncio
import functools
import itertools
import logging
import math
import os
import random
import re
import ssl
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any

from .addresses import check_base_url, is_loopback
from .chat_requests import NO_CONNECTION, TIMEOUT, UNREADABLE, NoAnswerError, ServerLimits


try:
    import openai
except ImportError as error:
    raise ImportError('A model on a server requires `openai`: pip install "paco_trl[served]".') from error

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

logger = logging.getLogger(__name__)

# Seconds: a restarted server is found soon, and an overloaded one is not queried by all at once
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 10.0
# Near the end of a budget a retry is not worthwhile: the last error would be a timeout
_LAST_WAIT = 1.0
# An outage is reported this often. Whoever waits for a whole call is told after the first time, then at the interval
_REPORT_INTERVAL = 60.0
_FIRST_NOTICE = 2.0
# Longest `Retry-After` to respect where there is no budget
_LONGEST_RETRY_AFTER = 120.0
# Placeholder for servers that require no key
_NO_KEY = "EMPTY"
# Not the global generator: waiting must not change what a run samples
_random = random.Random()


@dataclass(repr=False, eq=False)
class ChatClient:
    """Connections to a model on an OpenAI-compatible server, on their own event loop, for any thread or loop."""

    # Temporary failures are retried, `max_retries` times or until the budget of a request is used up; then it raises a
    # `NoAnswerError`. A server that cannot be used at all raises an `unavailable` at once.

    base_url: str
    model: str
    key: InitVar[str | None]
    key_remedy: str
    unavailable: type[Exception]
    limits: ServerLimits
    max_concurrency: int
    timeout: float
    max_retries: float = math.inf
    first_wait: float = _FIRST_WAIT

    def __post_init__(self, key: str | None):
        host = check_base_url(self.base_url, "api_key")
        self.name = self.limits.name
        self.slots = asyncio.Semaphore(self.max_concurrency)  # for callers that start more requests than that
        self.process = os.getpid()
        self._key = key or _NO_KEY
        self._openai = openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self._key,
            # Takes precedence over one in OPENAI_CUSTOM_HEADERS
            default_headers={"Authorization": f"Bearer {self._key}"},
            max_retries=0,  # they ignore the budget
            http_client=openai.DefaultAsyncHttpxClient(
                # A proxy that the environment names does not know this machine's own addresses
                trust_env=not is_loopback(host),
                # Certificates take 0.07 s to read. Without them a redirect of an http:// server to https:// is refused
                verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if self.base_url.startswith("http://") else True,
            ),
        )
        # OPENAI_ORG_ID and OPENAI_PROJECT_ID are not for other servers
        self._openai.organization = self._openai.project = None
        self._next_report = -math.inf

    # ---- From any thread ----

    def run(self, coroutine: Coroutine, notice: str | None = None) -> Any:
        """Run a coroutine on the client's event loop and wait for its result; log the notice if that takes long."""
        future = self.start(coroutine)
        try:
            if notice is not None and not wait_for([future], _FIRST_NOTICE).done:
                logger.warning(notice)
            return future.result()
        except BaseException:  # Ctrl-C
            future.cancel()
            raise

    def start(self, coroutine: Coroutine) -> Future:
        """Start a coroutine on the client's event loop."""
        if os.getpid() != self.process:
            coroutine.close()
            raise RuntimeError(
                f"{self.name} was made in another process, whose connections cannot be used in this one. Create it again "
                "after the fork."
            )
        return asyncio.run_coroutine_threadsafe(coroutine, _event_loop())

    def close(self) -> None:
        """Close the connections."""
        self.run(self._openai.close())

    # ---- On the event loop ----

    async def check(self, budget: float = math.inf) -> None:
        """Check that the server has the model."""
        try:
            page = await self._until_answered(self._openai.models.list, budget, self.max_retries)
            names = [model.id for model in page.data]
        except (NoAnswerError, AttributeError, TypeError) as error:
            failure = error if isinstance(error, NoAnswerError) else NoAnswerError(UNREADABLE)
            if failure.may_pass:
                raise
            raise self.unavailable(
                f"{self.base_url}/models gives no list of models ({failure}): {self.base_url} is not the address of an "
                "OpenAI-compatible server, which usually ends in /v1."
            ) from None
        if self.model not in names:
            raise self.unavailable(
                f"{self.base_url} has no model {self.model!r}. It has: {', '.join(names) or 'none'}. Use one of them "
                "as `model`."
            )

    async def complete(
        self, body: dict[str, Any], budget: float = math.inf, max_retries: float | None = None
    ) -> "ChatCompletion":
        """Send a query; `budget` is in seconds, for all requests and waits."""
        body["model"] = self.model
        max_retries = self.max_retries if max_retries is None else max_retries
        try:
            return await self._until_answered(functools.partial(self._create, body), budget, max_retries)
        except NoAnswerError as failure:
            if failure.status != 404:
                raise
            await self.check(budget)
            raise self.unavailable(
                f"{self.base_url} has the model {self.model!r}, but does not answer queries with it ({failure}). It "
                "requires the interface for chat, /chat/completions."
            ) from None

    async def _create(self, body: dict[str, Any], timeout: float) -> "ChatCompletion":
        while True:
            request = self.limits.request(body)
            try:
                return await self._openai.chat.completions.create(**request, timeout=timeout)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if not self.limits.learn(str(error), request, body):
                    raise

    async def _until_answered(self, call: Callable, budget: float, max_retries: float) -> Any:
        """Call until there is an answer, a permanent failure, or no try is left."""
        clock = asyncio.get_running_loop().time
        deadline, backoff, failure = clock() + budget, self.first_wait, None
        for tries in itertools.count(1):
            if self._openai.is_closed():
                raise RuntimeError(f"{self.name} was closed and cannot be used any more. Create another.")
            limit = max(min(self.timeout, deadline - clock()), 0.01)
            try:
                # openai's own timeout is of silence: a trickling answer would outlast any budget
                async with asyncio.timeout(None if math.isinf(budget) else limit):
                    answer = await call(timeout=limit)
                self._next_report = -math.inf
                return answer
            except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
                raise self.unavailable(
                    f"{self.base_url} refuses the key ({self._no_answer(error)}). {self.key_remedy}"
                ) from None
            except (TimeoutError, openai.APIError, ValueError) as error:
                latest = self._no_answer(error)
            # A try that the budget cut short says nothing about the server; the failure before it does
            if failure is None or limit == self.timeout or latest.reason != TIMEOUT:
                failure = latest
            failure.tries, left = tries, deadline - clock()
            # A long wait is shortened near the end, or a query would be given up too early
            longest = max(left / 2, min(_LAST_WAIT, budget / 10))
            wait = max(min(_random.uniform(backoff / 2, backoff), longest), failure.retry_after)
            patience = _LONGEST_RETRY_AFTER if math.isinf(budget) else left
            if not failure.may_pass or tries > max_retries or wait >= patience:
                raise failure
            if tries >= 4 and clock() >= self._next_report:  # by one query for all in flight
                self._next_report = clock() + _REPORT_INTERVAL
                limit = "" if math.isinf(budget) else f" for up to {left:.0f} seconds"
                logger.warning(f"{self.name} does not answer: {failure}. Trying again{limit}.")
            backoff = min(2 * backoff, _LONGEST_WAIT)
            await asyncio.sleep(wait)

    def _no_answer(self, error: Exception) -> NoAnswerError:
        """Build a failure with what the server or the network reports, without secrets and images."""
        # openai's timeout is one of its connection errors
        said = str(error.__cause__ or "") if isinstance(error, openai.APIConnectionError) else str(error)
        said = re.sub(r"data:image/\S+", "data:image/...", said)  # some servers send the request back
        said = said.replace(self._key, "***")[:300] if self._key != _NO_KEY else said[:300]
        if isinstance(error, openai.APIStatusError):
            return NoAnswerError(f"HTTP {error.status_code}", said, error.status_code, error.response.headers)
        if isinstance(error, (TimeoutError, openai.APITimeoutError)):
            return NoAnswerError(TIMEOUT, said)
        return NoAnswerError(NO_CONNECTION if isinstance(error, openai.APIConnectionError) else UNREADABLE, said)


_event_loop_lock = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients of the process."""
    with _event_loop_lock:  # several threads may be the first
        return _started_event_loop(os.getpid())


@functools.cache
def _started_event_loop(process: int) -> asyncio.AbstractEventLoop:
    # A forked process has none of its parent's threads
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="paco-trl-chat", daemon=True).start()
    return loop
