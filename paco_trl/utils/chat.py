# SPDX-License-Identifier: Apache-2.0
"""Chat models on OpenAI-compatible servers."""

import os
import queue
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .addresses import check_base_url
from .chat_requests import UNREADABLE, NoAnswerError, ServerLimits


if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

    from .chat_client import ChatClient


# Refused because of the request, not of the state of the server: too long, an unsupported image, ...
_REFUSALS = (400, 413, 415, 422)


class EndpointUnavailableError(RuntimeError):
    """An endpoint cannot be used at all: it is down, refuses the key, or does not have the model. It stops a stage."""


class ChatRequest(NamedTuple):
    """Query of a chat model; the server has defaults for what is `None`."""

    messages: list[dict[str, Any]]
    seed: int | None
    max_tokens: int
    temperature: float | None


class Reply(NamedTuple):
    """Answer of a chat model, or why there is none that can be used."""

    text: str | None
    problem: str | None = None  # the server refused this one request, or the answer is empty, cut or cannot be read


@dataclass(repr=False, eq=False)
class ChatEndpoint:
    """
    Model behind an OpenAI-compatible server: vLLM, or a service.

    Temporary failures (no connection, a timeout, HTTP 408, 409, 429 and 5xx) are retried, after `Retry-After` of up to
    2 minutes. When that does not help, the endpoint is considered down.

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
            Maximum number of retries of a request, after random waits of at most 0.5, 1, 2, ... up to 10 seconds.

    Example:

    ```python
    >>> from paco_trl.dataset_building import ChatEndpoint

    >>> endpoint = ChatEndpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen2.5-VL-7B-Instruct")
    >>> endpoint.check()
    >>> text = endpoint.ask([{"role": "user", "content": "What is ochre?"}], seed=0, max_tokens=100, temperature=1.0)
    ```
    """

    base_url: str
    model: str
    api_key_variable: str | None = None
    max_concurrency: int = 8
    timeout: float = 120.0
    max_retries: int = 5

    def __post_init__(self):
        check_base_url(self.base_url, "api_key_variable")
        if not self.model:
            raise ValueError("`model` is empty, but must be the name of the model on the server.")
        for name, smallest in (("max_concurrency", 1), ("max_retries", 0)):
            if getattr(self, name) < smallest:
                raise ValueError(f"`{name}` is {getattr(self, name)}, but must be at least {smallest}.")
        if not self.timeout > 0:
            raise ValueError(f"`timeout` is {self.timeout}, but must be a positive number of seconds.")
        self.name = f"{self.model} at {self.base_url}"
        self._key = None if self.api_key_variable is None else _read_key(self.api_key_variable)
        self._limits = ServerLimits(self.name)  # shared by all connections

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r} at {self.base_url!r})"

    def check(self) -> None:
        """Check that the server is there and has the model; an `EndpointUnavailableError` lists those that it has."""
        client = self._connect()
        try:
            client.run(client.check())
        except NoAnswerError as failure:
            raise _unavailable(client, failure) from None
        finally:
            client.close()

    def ask(self, messages: list[dict[str, Any]], seed: int, max_tokens: int, temperature: float) -> str:
        """Send one query and return the answer; raise a `ValueError` if the server refuses it or gives no usable one."""
        ((_, reply),) = self.ask_all([ChatRequest(messages, seed, max_tokens, temperature)])
        if reply.text is None:
            raise ValueError(f"{self.name} gave no answer: {reply.problem}.")
        return reply.text

    def ask_all(
        self, requests: Iterable[ChatRequest], again: deque[tuple[int, ChatRequest]] | None = None
    ) -> Generator[tuple[int, Reply], None, None]:
        """Send queries, those in `again` first, as there is room, and yield the number and the reply of each."""
        # In the order of the replies. The caller may append to `again`; an iteration that ends early cancels the rest
        waiting, client = enumerate(requests), self._connect()
        under_way: dict[Future[Reply], int] = {}
        done: queue.SimpleQueue[Future[Reply]] = queue.SimpleQueue()
        try:
            while True:
                while len(under_way) < self.max_concurrency:
                    numbered = again.popleft() if again else next(waiting, None)
                    if numbered is None:
                        break
                    query = client.start(_reply(client, numbered[1]))
                    under_way[query] = numbered[0]
                    query.add_done_callback(done.put)
                if not under_way:
                    return
                query = done.get()
                yield under_way.pop(query), query.result()
        finally:
            for query in under_way:
                query.cancel()
            client.close()

    def _connect(self) -> "ChatClient":
        from .chat_client import ChatClient  # openai takes seconds to import

        remedy = "Name the environment variable that holds one, as `api_key_variable`."
        if self.api_key_variable is not None:
            remedy = f"The variable {self.api_key_variable} holds another one."
        settings = (self._limits, self.max_concurrency, self.timeout, self.max_retries)
        return ChatClient(self.base_url, self.model, self._key, remedy, EndpointUnavailableError, *settings)


async def _reply(client: "ChatClient", request: ChatRequest) -> Reply:
    body = {name: value for name, value in request._asdict().items() if value is not None}
    try:
        return _read(await client.complete(body), body["max_tokens"])
    except NoAnswerError as failure:
        if failure.status in _REFUSALS:
            return Reply(None, f"refused by the server ({failure})")
        if failure.reason == UNREADABLE:  # 200 without JSON
            return Reply(None, "an answer that cannot be read")
        raise _unavailable(client, failure) from None


def _unavailable(client: "ChatClient", failure: NoAnswerError) -> EndpointUnavailableError:
    return EndpointUnavailableError(
        f"{client.name} does not answer ({failure}, tried {failure.tries} times). Start the server, wait until it is "
        "less busy, or correct the address; then rerun the same command to resume."
    )


def _read_key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"The environment variable {variable!r} (`api_key_variable`) is not set or empty. Set it to the key; the "
            "argument is the name of the variable, not the key itself."
        )
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"The key in the environment variable {variable!r} has characters that no header can hold.")
    return key


def _read(completion: "ChatCompletion", max_tokens: int) -> Reply:
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
