# SPDX-License-Identifier: Apache-2.0
"""A language model, or one that sees images, behind an OpenAI-compatible server."""

import asyncio
import os
import queue
import threading
from collections.abc import Coroutine, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from .addresses import check_base_url, is_loopback
from .chat_requests import ServerLimits, complete_chat


if TYPE_CHECKING:
    import openai


# Refused for what the request is, not for the state of the server: too long, an image that it does not take, ...
_REFUSALS = (400, 413, 415, 422)
# Everyone's key for a server that wants none
_NO_KEY = "EMPTY"


class EndpointUnavailableError(RuntimeError):
    """An endpoint cannot be asked at all: it is down, refuses the key, or does not have the model. It stops a stage."""


class ChatRequest(NamedTuple):
    """
    What a model is asked.

    Attributes:
        messages (`list[dict]`):
            Turns, as the interface takes them.
        seed (`int`, *optional*):
            Seed of the answer. If `None`, the server's.
        max_tokens (`int`):
            Length at which the answer is cut.
        temperature (`float`, *optional*):
            Temperature of the sampling. If `None`, the server's.
    """

    messages: list[dict[str, Any]]
    seed: int | None
    max_tokens: int
    temperature: float | None


class Reply(NamedTuple):
    """
    What came back.

    Attributes:
        text (`str`, *optional*):
            The whole answer; `None` if there is none that can be used.
        problem (`str`, *optional*):
            Why there is none: the server refused this one request, or the answer is empty, cut or cannot be read.
    """

    text: str | None
    problem: str | None = None


class ChatEndpoint:
    """
    Model behind an OpenAI-compatible server: vLLM, or a service.

    What may pass (no connection, a timeout, HTTP 408, 409, 429 and 5xx) is tried again by the `openai` client, which
    waits as long as the server asks for (`Retry-After`). When that does not help, the endpoint is taken to be down.

    Args:
        base_url (`str`):
            Address of the interface, for example `"http://127.0.0.1:8000/v1"`.
        model (`str`):
            Name under which the server has the model.
        api_key_variable (`str`, *optional*):
            Name of the environment variable that holds the key. If `None`, no key is sent; `OPENAI_API_KEY` goes to a
            server only if it is named here.
        max_concurrency (`int`, *optional*, defaults to `8`):
            Requests under way at the same time.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds that the server may stay silent during one request.
        max_retries (`int`, *optional*, defaults to `5`):
            How often a request that failed is tried again, after 0.5, 1, 2, ... up to 8 seconds.

    Raises:
        ValueError: If an argument is out of its range, or the variable holds no key.

    Example:

    ```python
    >>> from paco_trl.dataset_building import ChatEndpoint

    >>> endpoint = ChatEndpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen2.5-VL-7B-Instruct")
    >>> endpoint.check()
    >>> text = endpoint.ask([{"role": "user", "content": "What is ochre?"}], seed=0, max_tokens=100, temperature=1.0)
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
        host = check_base_url(base_url, "api_key_variable")
        if not model:
            raise ValueError("`model` is empty, but must be the name under which the server has the model.")
        for name, value, smallest in (("max_concurrency", max_concurrency, 1), ("max_retries", max_retries, 0)):
            if value < smallest:
                raise ValueError(f"`{name}` is {value}, but must be at least {smallest}.")
        if not timeout > 0:
            raise ValueError(f"`timeout` is {timeout}, but must be a positive number of seconds.")
        self.base_url = base_url
        self.model = model
        self.name = f"{model} at {base_url}"
        self.api_key_variable = api_key_variable
        self.max_concurrency = max_concurrency
        self.timeout = timeout
        self.max_retries = max_retries
        self._key = _NO_KEY if api_key_variable is None else _read_key(api_key_variable)
        self._limits = ServerLimits(self.name)
        self._is_loopback = is_loopback(host)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r} at {self.base_url!r})"

    def check(self) -> None:
        """
        Checks that the server is there and has the model.

        Raises:
            EndpointUnavailableError: If not, with the models that it has.
        """
        with self.asking() as asking:
            asking._start(None, self._check(asking._client))
            asking.next()

    def ask(self, messages: list[dict[str, Any]], seed: int, max_tokens: int, temperature: float) -> str:
        """
        Asks one question.

        Args:
            messages (`list[dict]`), seed (`int`), max_tokens (`int`), temperature (`float`):
                As in [`ChatRequest`].

        Returns:
            `str`: the answer.

        Raises:
            ValueError: If the server refuses this request, or its answer cannot be used.
            EndpointUnavailableError: If the endpoint cannot be asked at all.
        """
        ((_, reply),) = self.ask_all([ChatRequest(messages, seed, max_tokens, temperature)])
        if reply.text is None:
            raise ValueError(f"{self.name} gave no answer: {reply.problem}.")
        return reply.text

    def ask_all(self, requests: Iterable[ChatRequest]) -> Iterator[tuple[int, Reply]]:
        """
        Asks many questions, `max_concurrency` at a time. What is under way is cancelled when an error, Ctrl-C or the
        caller ends the iteration.

        Args:
            requests (`Iterable[ChatRequest]`):
                Questions. They are taken one by one, each when there is room for it.

        Yields:
            `tuple[int, Reply]`: number of a request and what came back, in the order in which they came back.

        Raises:
            EndpointUnavailableError: If the endpoint cannot be asked at all.
        """
        waiting = enumerate(requests)
        with self.asking() as asking:
            while True:
                while asking.has_room and (numbered := next(waiting, None)) is not None:
                    asking.start(*numbered)
                if not asking.under_way:
                    return
                yield asking.next()

    def asking(self) -> "Asking":
        """
        Opens connections, for questions that depend on earlier answers. [`~ChatEndpoint.ask_all`] is simpler where they
        do not.

        Returns:
            [`Asking`]: a context manager.
        """
        return Asking(self)

    # ---- On the event loop ----

    def _open_client(self) -> "openai.AsyncOpenAI":
        import openai

        client = openai.AsyncOpenAI(
            base_url=self.base_url,
            api_key=self._key,
            # Here it stands above one in OPENAI_CUSTOM_HEADERS
            default_headers={"Authorization": f"Bearer {self._key}"},
            timeout=self.timeout,
            max_retries=self.max_retries,
            # A proxy that the environment names does not know this machine's own addresses
            http_client=openai.DefaultAsyncHttpxClient(trust_env=not self._is_loopback),
        )
        # OPENAI_ORG_ID and OPENAI_PROJECT_ID: whose they are is nothing for other servers
        client.organization = client.project = None
        return client

    async def _check(self, client: "openai.AsyncOpenAI") -> Reply:
        names = await self._model_names(client)
        if self.model not in names:
            raise EndpointUnavailableError(self._unknown_model(names))
        return Reply("")

    async def _model_names(self, client: "openai.AsyncOpenAI") -> list[str]:
        import openai

        try:
            page = await client.models.list()
            return [model.id for model in page.data]
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise EndpointUnavailableError(self._refused_key(error)) from None
        except openai.APIConnectionError as error:
            raise EndpointUnavailableError(self._no_answer(error)) from None
        except (openai.APIError, AttributeError, TypeError, ValueError) as error:
            raise EndpointUnavailableError(
                f"{self.base_url}/models gives no list of models ({self._detailed(error)}). Is it the address of an "
                "OpenAI-compatible server? It usually ends in /v1."
            ) from None

    async def _answer(self, client: "openai.AsyncOpenAI", request: ChatRequest) -> Reply:
        # Nothing is raised from what it comes of: the key may stand in there
        import openai

        options = {name: value for name, value in request._asdict().items() if value is not None}
        body = {"model": self.model, **options}
        try:
            completion = await complete_chat(client, body, self._limits)
            return _read(completion, body["max_tokens"])
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise EndpointUnavailableError(self._refused_key(error)) from None
        except openai.NotFoundError as error:
            names = await self._model_names(client)
            if self.model not in names:
                raise EndpointUnavailableError(self._unknown_model(names)) from None
            raise EndpointUnavailableError(
                f"{self.base_url} has the model {self.model!r}, but does not answer questions with it "
                f"({self._detailed(error)}). It needs the interface for chat, /chat/completions."
            ) from None
        except openai.APIStatusError as error:
            if error.status_code in _REFUSALS:
                return Reply(None, f"refused by the server ({self._detailed(error)})")
            raise EndpointUnavailableError(self._no_answer(error)) from None
        except openai.APIConnectionError as error:
            raise EndpointUnavailableError(self._no_answer(error)) from None
        except (openai.APIError, ValueError):  # 200, and then no JSON
            return Reply(None, "an answer that cannot be read")

    # ---- Words ----

    def _refused_key(self, error: Exception) -> str:
        remedy = (
            f"The variable {self.api_key_variable} holds another one."
            if self.api_key_variable
            else "Name the environment variable that holds one, as `api_key_variable`."
        )
        return f"{self.base_url} refuses the key ({self._detailed(error)}). {remedy}"

    def _no_answer(self, error: Exception) -> str:
        return (
            f"{self.name} does not answer ({self._detailed(error)}, tried {self.max_retries + 1} times). Start the "
            "server, wait until it is less busy, or correct `base_url`; then run the same again: it goes on where it was."
        )

    def _unknown_model(self, names: list[str]) -> str:
        return (
            f"{self.base_url} has no model {self.model!r}. It has: {', '.join(names) or 'none'}. Take one of them as "
            "`model`."
        )

    def _detailed(self, error: Exception) -> str:
        """A failure with what the server, or the network, says of it; without the key."""
        import openai

        if isinstance(error, openai.APIStatusError):
            kind = f"HTTP {error.status_code}"
        elif isinstance(error, openai.APITimeoutError):
            return f"nothing came for {self.timeout:g} seconds"
        else:
            kind = "no connection" if isinstance(error, openai.APIConnectionError) else type(error).__name__
        said = str(error.__cause__ or "") if isinstance(error, openai.APIConnectionError) else str(error)
        if self._key != _NO_KEY:
            said = said.replace(self._key, "***")
        # Some servers send the request back, images and all
        return f"{kind}: {said[:300]}" if said else kind


class Asking:
    """
    Questions under way at an endpoint. A context manager: what is still under way at its end is cancelled.

    Args:
        endpoint ([`ChatEndpoint`]):
            Endpoint.

    Attributes:
        under_way (`int`):
            Questions whose replies were not taken yet.
    """

    # Tasks on a loop, not threads: a task ends at once when it is cancelled, a thread when its server has answered. The
    # loop has a thread of its own, so that this also runs in a notebook, which has a loop already.

    def __init__(self, endpoint: ChatEndpoint):
        self.under_way = 0
        self._endpoint = endpoint
        self._replies: queue.SimpleQueue[tuple[Hashable, Reply | BaseException]] = queue.SimpleQueue()

    def __enter__(self) -> "Asking":
        self._client = self._endpoint._open_client()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="paco-trl-chat", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def has_room(self) -> bool:
        """Whether fewer than `max_concurrency` questions are under way."""
        return self.under_way < self._endpoint.max_concurrency

    def start(self, key: Hashable, request: ChatRequest) -> None:
        """
        Sends a question.

        Args:
            key (`Hashable`):
                What [`~Asking.next`] gives back with the reply.
            request ([`ChatRequest`]):
                The question.
        """
        self._start(key, self._endpoint._answer(self._client, request))

    def next(self) -> tuple[Any, Reply]:
        """
        Waits for the next reply.

        Returns:
            `tuple[Hashable, Reply]`: key of a question, and what came back.

        Raises:
            EndpointUnavailableError: If the endpoint cannot be asked at all.
        """
        key, reply = self._replies.get()
        self.under_way -= 1
        if isinstance(reply, BaseException):
            raise reply
        return key, reply

    def _start(self, key: Hashable, answer: Coroutine[Any, Any, Reply]) -> None:
        async def put() -> None:
            try:
                reply: Reply | BaseException = await answer
            except Exception as error:
                reply = error
            self._replies.put((key, reply))

        self.under_way += 1
        asyncio.run_coroutine_threadsafe(put(), self._loop)

    async def _cancel(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()


def _read_key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ValueError(
            f"The environment variable {variable!r} (`api_key_variable`) is not set or empty. Set it to the key; it is "
            "the name of a variable and not the key itself."
        )
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"The key in the environment variable {variable!r} has characters that no header can hold.")
    return key


def _read(completion: Any, max_tokens: int) -> Reply:
    try:
        choice = completion.choices[0]
        text = choice.message.content
    except (AttributeError, IndexError, TypeError):
        return Reply(None, "an answer that cannot be read")
    if choice.finish_reason == "length":
        return Reply(None, f"an answer cut after {max_tokens} tokens")
    if not isinstance(text, str) or not text.strip():
        return Reply(None, "an empty answer")
    # Half of a pair of code units, which JSON can hold and no file
    return Reply(text.encode("utf-8", "replace").decode())
