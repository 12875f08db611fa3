# SPDX-License-Identifier: Apache-2.0
"""Chat models on OpenAI-compatible servers."""

import asyncio
import os
import re
import threading
from collections.abc import Coroutine, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from .addresses import check_base_url, is_loopback
from .background import abandon_at_exit
from .errors import OptionError


if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion


# Placeholder for servers that require no key
_NO_KEY = "EMPTY"
# Servers whose newer models refuse `max_tokens`. Many other servers do not know `max_completion_tokens`
_NEW_LENGTH_OPTION = ("api.openai.com", ".openai.azure.com")


class EndpointUnavailableError(RuntimeError):
    """An endpoint cannot be used at all: it is down, refuses the key, or does not have the model. It stops a stage."""


class NoAnswerError(Exception):
    """Request without an answer; its `kind` is `"refused"`, `"unreadable"`, or `"unavailable"`, which may pass."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def read_api_key(variable: str | None) -> str | None:
    """Return the key in an environment variable, or `None` if no variable is named."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key.isascii() or not key.isprintable() or not key:
        message = f"The environment variable {variable!r} (`api_key_variable`: its name, not the key) is not set, or "
        raise OptionError(f"{message}does not hold a key. Set it.", "api_key_variable")
    return key


class ChatClient:
    """Client of a model on an OpenAI-compatible server, connected on an event loop of its own, for any thread."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None,
        max_concurrency: int,
        timeout: float,
        max_retries: int,
        key_remedy: str,
        unavailable: type[Exception] = EndpointUnavailableError,
    ):
        try:
            import openai  # takes seconds
        except ImportError as error:
            raise ImportError('A model on a server requires `openai`: pip install "paco_trl[served]".') from error

        host = check_base_url(base_url)
        if max_concurrency < 1 or not timeout > 0:
            raise ValueError(f"`max_concurrency` is {max_concurrency} and `timeout` {timeout}: one is too small.")
        self.base_url = base_url
        self.model = model
        self.max_concurrency = max_concurrency
        self.name = f"{model} at {base_url}"
        self._key = api_key or _NO_KEY
        self._key_remedy = key_remedy
        self._unavailable = unavailable
        self._process = os.getpid()
        self._length_option = "max_completion_tokens" if host.endswith(_NEW_LENGTH_OPTION) else "max_tokens"
        # Settings for OpenAI's own service (OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS) are not sent elsewhere
        headers: dict[str, Any] = dict.fromkeys(("OpenAI-Organization", "OpenAI-Project"), openai.Omit())
        headers["Authorization"] = f"Bearer {self._key}"
        self._openai = openai.AsyncOpenAI(
            base_url=base_url,
            api_key=self._key,
            timeout=timeout,
            max_retries=max_retries,
            default_headers=headers,
            # A proxy that the environment names does not know this machine's own addresses
            http_client=openai.DefaultAsyncHttpxClient(trust_env=not is_loopback(host)),
        )

    # ---- From any thread ----

    def start(self, coroutine: Coroutine) -> Future:
        """Start a coroutine on the client's event loop."""
        if self._openai.is_closed() or os.getpid() != self._process:
            coroutine.close()
            raise RuntimeError(f"The client of {self.name} was closed, or made in another process. Create another.")
        return asyncio.run_coroutine_threadsafe(coroutine, _event_loop())

    def run(self, coroutine: Coroutine) -> Any:
        """Run a coroutine on the client's event loop and wait for its result."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:  # Ctrl-C
            future.cancel()
            raise

    def close(self) -> None:
        """Close the connections."""
        if not self._openai.is_closed():
            self.run(self._openai.close())

    # ---- On the event loop ----

    async def list_models(self, max_retries: int | None = None) -> dict[str, Any]:
        """Return the server's models by name; `max_retries` replaces the client's number of retries."""
        with self._failures():
            return {model.id: model for model in (await self._client(max_retries).models.list()).data}

    async def find_model(self, max_retries: int | None = None) -> dict[str, Any]:
        """Check that the server has the model; return all its models."""
        models = await self.list_models(max_retries)
        if self.model not in models:
            served = ", ".join(models) or "none"
            raise self._unavailable(f"{self.base_url} has no model {self.model!r}. It has: {served}. Use one of them.")
        return models

    async def complete(self, body: dict[str, Any], max_retries: int | None = None) -> "ChatCompletion":
        """Send a query; a temporary failure is retried by openai's client."""
        request = {self._length_option if name == "max_tokens" else name: value for name, value in body.items()}
        with self._failures():
            return await self._client(max_retries).chat.completions.create(model=self.model, **request)

    def _client(self, max_retries: int | None) -> Any:
        return self._openai if max_retries is None else self._openai.with_options(max_retries=max_retries)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Convert exceptions of openai's client to this module's, with the report of the server or the network."""
        import openai

        try:
            yield
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            refusal = f"{self.base_url} refuses the key ({self._error_text(error)}). {self._key_remedy}"
            raise self._unavailable(refusal) from None
        except openai.NotFoundError as error:
            raise self._unavailable(
                f"{self.base_url} has no model {self.model!r} for chat ({self._error_text(error)}). Correct the name "
                "or the address."
            ) from None
        except openai.APIStatusError as error:
            may_pass = error.status_code in (408, 409, 429) or error.status_code >= 500
            raise NoAnswerError("unavailable" if may_pass else "refused", self._error_text(error)) from None
        except openai.APITimeoutError:
            raise NoAnswerError("unavailable", "timeout") from None
        except openai.APIConnectionError as error:
            raise NoAnswerError("unavailable", f"no connection: {error.__cause__ or error}") from None
        except (openai.APIError, AttributeError, TypeError, ValueError):
            raise NoAnswerError("unreadable", "the answer cannot be read") from None

    def _error_text(self, error: Any) -> str:
        # Some servers send the request back
        text = str(error).removeprefix(f"Error code: {error.status_code} - ")
        text = re.sub(r"data:image/\S+", "data:image/...", text)
        return f"HTTP {error.status_code}: {text if self._key == _NO_KEY else text.replace(self._key, '***')}"[:300]


class ChatRequest(NamedTuple):
    """Query of a chat model; the server's defaults replace `None`."""

    messages: list[dict[str, Any]]
    seed: int | None
    max_tokens: int
    temperature: float | None


class Reply(NamedTuple):
    """Answer of a chat model, or the reason why there is no usable answer."""

    text: str | None
    reason: str | None = None  # the server refused this one request, or the answer is empty, cut or cannot be read


class ChatEndpoint(ChatClient):
    """
    Model behind an OpenAI-compatible server: vLLM, or a service.

    Temporary failures (no connection, a timeout, HTTP 408, 409, 429 and 5xx) are retried by openai's client. When that
    does not help, the endpoint is considered down.

    Args:
        base_url (`str`):
            Address of the interface, for example `"http://127.0.0.1:8000/v1"`.
        model (`str`):
            Name of the model on the server.
        api_key_variable (`str`, *optional*):
            Name of the environment variable that holds the key. If `None`, no key is sent; `OPENAI_API_KEY` goes to a
            server only if it is named here.
        max_concurrency (`int`, *optional*, defaults to `8`):
            Number of concurrent requests.
        timeout (`float`, *optional*, defaults to `120.0`):
            Maximum number of seconds without data during one request.
        max_retries (`int`, *optional*, defaults to `5`):
            Maximum number of retries of a request, after waits of 0.5, 1, 2, 4, 8, 8, ... seconds, or as the server
            asks.

    Example:

    ```python
    >>> from paco_trl.dataset_building import ChatEndpoint

    >>> endpoint = ChatEndpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen2.5-VL-7B-Instruct")
    >>> endpoint.check()
    ```
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_variable: str | None = None,
        max_concurrency: int = 8,
        timeout: float = 120.0,
        max_retries: int = 5,
    ):
        key = read_api_key(api_key_variable)
        remedy = "Name the environment variable that holds one, as `api_key_variable`."
        remedy = remedy if api_key_variable is None else f"It is that of {api_key_variable}."
        super().__init__(base_url, model, key, max_concurrency, timeout, max_retries, remedy)

    def check(self) -> None:
        """Check that the server answers and has the model; otherwise an `EndpointUnavailableError` has its models."""
        try:
            self.run(self.find_model())
        except NoAnswerError as failure:
            raise self._is_down(failure) from None

    def ask_all(self, requests: Iterable[ChatRequest]) -> Generator[tuple[int, Reply], None, None]:
        """Send queries as there is room, and yield the number and the reply of each, in the order of the replies."""
        # An iteration that ends early cancels the rest
        waiting = enumerate(requests)
        pending: dict[Future[Reply], int] = {}
        try:
            while True:
                while len(pending) < self.max_concurrency:
                    numbered = next(waiting, None)
                    if numbered is None:
                        break
                    pending[self.start(self._reply(numbered[1]))] = numbered[0]
                if not pending:
                    return
                query = next(iter(wait(pending, return_when=FIRST_COMPLETED).done))
                yield pending.pop(query), query.result()
        finally:
            for query in pending:
                query.cancel()

    async def _reply(self, request: ChatRequest) -> Reply:
        body = {name: value for name, value in request._asdict().items() if value is not None}
        try:
            return read_reply(await self.complete(body), request.max_tokens)
        except NoAnswerError as failure:
            if failure.kind == "unavailable":
                raise self._is_down(failure) from None
            # `cause_of` cuts the details off
            return Reply(None, f"refused by the server ({failure})" if failure.kind == "refused" else str(failure))

    def _is_down(self, failure: NoAnswerError) -> EndpointUnavailableError:
        return EndpointUnavailableError(
            f"{self.name} does not answer ({failure}). Start the server, wait until it is less busy, or correct the "
            "address; then rerun the same command to resume."
        )


def read_reply(completion: "ChatCompletion", max_tokens: int) -> Reply:
    """Read the text of an answer, which must be there and whole."""
    try:
        choice = completion.choices[0]
        text = choice.message.content
    except (AttributeError, IndexError, TypeError):
        return Reply(None, "an answer that cannot be read")
    if choice.finish_reason == "length":
        return Reply(None, f"an answer cut after {max_tokens} tokens")
    if not isinstance(text, str) or not text.strip():
        return Reply(None, "an empty answer")
    # JSON can hold half of a surrogate pair, and no file can
    return Reply(text.encode("utf-8", "replace").decode())


# Process id -> event loop: a forked process has none of its parent's threads
_event_loops: dict[int, asyncio.AbstractEventLoop] = {}
_event_loop_lock = threading.Lock()


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all clients of the process."""
    with _event_loop_lock:  # several threads may be the first
        if (process := os.getpid()) not in _event_loops:
            abandon_at_exit(loop := asyncio.new_event_loop())
            threading.Thread(target=loop.run_forever, name="paco-trl-chat", daemon=True).start()
            _event_loops[process] = loop
        return _event_loops[process]
