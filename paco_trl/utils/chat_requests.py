# SPDX-License-Identifier: Apache-2.0
"""Requests for chat completions, in the way that a server takes them, and why they got no answer."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import openai
    from openai.types.chat import ChatCompletion


logger = logging.getLogger(__name__)

# Why a request got no answer, where it is no status of HTTP
TIMEOUT = "timeout"
NO_CONNECTION = "no connection"
UNREADABLE = "the answer cannot be read"

_AT_MOST = r"(?:max allowed:|less than or equal to|at most|<=|between \d+ and|\[\d+,)\s*(\d+)"
# What servers say of an option that is larger than they allow
_REFUSALS = {
    # vLLM: "Requested sample logprobs of 20, which is greater than max allowed: 5" (`--max-logprobs`), see
    # https://github.com/vllm-project/vllm/pull/5312. Azure and the newer models of OpenAI: "Invalid value for
    # 'top_logprobs': must be less than or equal to 5.", see https://github.com/confident-ai/deepeval/issues/843.
    "top_logprobs": re.compile(rf"logprobs\b.{{0,80}}?{_AT_MOST}", re.DOTALL),
    # OpenAI: "max_tokens is too large: 6000. This model supports at most 4096 completion tokens, whereas you provided
    # 6000.", see https://github.com/ChatGPTNextWeb/NextChat/issues/3195. DeepSeek: "Invalid max_tokens value, the valid
    # range of max_tokens is [1, 8192]".
    "max_tokens": re.compile(rf"max_(?:completion_)?tokens\b.{{0,120}}?{_AT_MOST}", re.DOTALL),
}
# Question and answer together are too long. vLLM 0.25: "This model's maximum context length is 8192 tokens. However, you
# requested 4096 output tokens and your prompt contains 5000 input tokens, for a total of 9096 tokens."; before: "... is
# 8192 tokens and your request has 5000 input tokens"; SGLang 0.5: "... maximum context length of 8192 tokens. You
# requested a total of 9096 tokens: 5000 tokens from the input messages and ..."; OpenAI: "(5000 in the messages, ...)".
# vLLM's "at least 4097 input tokens" is no count, see https://github.com/vllm-project/vllm/issues/42474.
_CONTEXT = re.compile(
    r"maximum context length (?:is|of) (\d+) tokens.{0,100}?(?<!at least )\b(\d+) "
    r"(?:input tokens|tokens from the input|in the messages)",
    re.DOTALL,
)
# OpenAI: "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.", see
# https://github.com/griptape-ai/ComfyUI-Griptape/issues/312. Many servers do not know that name.
_OTHER_NAME = re.compile(r"use \W{0,2}max_completion_tokens", re.IGNORECASE)


class NoAnswerError(Exception):
    """A request that got no answer after some `tries`: the `reason` in few words, and whether it `may_pass`."""

    def __init__(self, reason: str, said: str = "", status: int = 0, headers: Mapping[str, str] | None = None):
        self.reason = reason
        self.status = status
        self.tries = 1
        self.may_pass = reason in (TIMEOUT, NO_CONNECTION) or status in (408, 409, 429) or status >= 500
        self.retry_after = _seconds((headers or {}).get("retry-after"))
        wait = f"; it is to be asked again after {self.retry_after:g} seconds" if self.retry_after > 0 else ""
        super().__init__(f"{reason}{f' ({said})' if said else ''}{wait}")


def _seconds(retry_after: str | None) -> float:
    try:
        wanted = float(retry_after or 0)
    except ValueError:  # a date
        return 0.0
    return wanted if math.isfinite(wanted) else 0.0


@dataclass
class ServerLimits:
    """What a server takes, as far as its refusals have said; `name` is for the log."""

    name: str
    largest: dict[str, int] = field(default_factory=dict)  # of `top_logprobs` and `max_tokens`
    length_option: str = "max_tokens"


async def complete_chat(
    client: "openai.AsyncOpenAI", body: dict[str, Any], limits: ServerLimits, **kwargs
) -> "ChatCompletion":
    """
    Asks for a chat completion, and again with other options where the server refuses them and says what it takes.

    `body` has `max_tokens`, and is changed to what was asked in the end; `limits` to what the server is known to take.
    """
    import openai

    while True:
        for option, largest in limits.largest.items():
            if option in body:
                body[option] = min(body[option], largest)
        request = dict(body)
        request[limits.length_option] = request.pop("max_tokens")
        try:
            return await client.chat.completions.create(**request, **kwargs)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            said = str(error)
            # Others that are under way may be refused for what is known by now. Each round asks for less, or ends.
            if "max_tokens" in request and _OTHER_NAME.search(said):
                if limits.length_option == "max_tokens":
                    limits.length_option = "max_completion_tokens"
                    logger.info(f"{limits.name} takes `max_completion_tokens` and no `max_tokens`.")
            elif 0 < (room := _room(said)) < body["max_tokens"]:
                body["max_tokens"] = room  # for this question alone
            elif (refused := _refused_option(said, body)) is not None:
                option, largest = refused
                if largest < limits.largest.get(option, math.inf):
                    limits.largest[option] = largest
                    logger.warning(
                        f"{limits.name} allows `{option}` of {largest} at most, and is asked for no more from now on."
                    )
            else:
                raise


def _room(refusal: str) -> int:
    """Tokens that a question leaves for the answer, 0 if a refusal does not say it."""
    found = _CONTEXT.search(refusal)
    # SGLang wants the sum to stay below its limit
    return int(found[1]) - int(found[2]) - 1 if found else 0


def _refused_option(refusal: str, body: dict[str, Any]) -> tuple[str, int] | None:
    """The option that was too large, and its largest value."""
    for option, pattern in _REFUSALS.items():
        found = pattern.search(refusal)
        if found and 0 < int(found[1]) < body.get(option, 0):
            return option, int(found[1])
    return None
