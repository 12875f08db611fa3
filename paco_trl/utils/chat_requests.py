# SPDX-License-Identifier: Apache-2.0
"""Requests for chat completions within the limits of a server, and their failures."""

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


logger = logging.getLogger(__name__)

# Reasons for no answer other than an HTTP status
TIMEOUT = "timeout"
NO_CONNECTION = "no connection"
UNREADABLE = "the answer cannot be read"

_AT_MOST = r"(?:max allowed:|less than or equal to|at most|<=|between \d+ and|\[\d+,)\s*(\d+)"
# Refusals of an option that is larger than the server allows
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
# vLLM's "at least 4097 input tokens" is not a count, see https://github.com/vllm-project/vllm/issues/42474.
_CONTEXT = re.compile(
    r"maximum context length (?:is|of) (\d+) tokens.{0,100}?(?<!at least )\b(\d+) "
    r"(?:input tokens|tokens from the input|in the messages)",
    re.DOTALL,
)
# OpenAI: "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.", see
# https://github.com/griptape-ai/ComfyUI-Griptape/issues/312. Many servers do not know that name.
_OTHER_NAME = re.compile(r"use \W{0,2}max_completion_tokens", re.IGNORECASE)


class NoAnswerError(Exception):
    """Request without an answer after some `tries`: its `reason`, and whether a retry may help (`may_pass`)."""

    def __init__(self, reason: str, said: str = "", status: int = 0, headers: Mapping[str, str] | None = None):
        self.reason = reason
        self.status = status
        self.tries = 1
        self.may_pass = reason in (TIMEOUT, NO_CONNECTION) or status in (408, 409, 429) or status >= 500
        self.retry_after = _seconds((headers or {}).get("retry-after"))
        wait = f"; retry after {self.retry_after:g} seconds" if self.retry_after > 0 else ""
        super().__init__(f"{reason}{f' ({said})' if said else ''}{wait}")


def _seconds(retry_after: str | None) -> float:
    try:
        wanted = float(retry_after or 0)
    except ValueError:  # a date
        return 0.0
    return wanted if math.isfinite(wanted) else 0.0


@dataclass
class ServerLimits:
    """Limits of a server, as far as its refusals reported them; `name` is for the log."""

    name: str
    largest: dict[str, int] = field(default_factory=dict)  # of `top_logprobs` and `max_tokens`
    length_option: str = "max_tokens"

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Build a request from a body, which has `max_tokens`; what is too large is lowered in both."""
        for option in self.largest.keys() & body.keys():
            body[option] = min(body[option], self.largest[option])
        request = dict(body)
        request[self.length_option] = request.pop("max_tokens")
        return request

    def learn(self, refusal: str, request: dict[str, Any], body: dict[str, Any]) -> bool:
        """Learn from a refusal; tell whether the server may accept another request of the same body."""
        # Requests in flight may be refused for a known limit. Each round lowers an option, or ends.
        if "max_tokens" in request and _OTHER_NAME.search(refusal):
            if self.length_option == "max_tokens":
                self.length_option = "max_completion_tokens"
                logger.info(f"{self.name} takes `max_completion_tokens` instead of `max_tokens`.")
            return True
        found = _CONTEXT.search(refusal)
        # SGLang requires the sum to stay below its limit
        if found and 0 < (room := int(found[1]) - int(found[2]) - 1) < body["max_tokens"]:
            body["max_tokens"] = room  # for this query alone
            return True
        for option, pattern in _REFUSALS.items():
            found = pattern.search(refusal)
            if found and 0 < (largest := int(found[1])) < body.get(option, 0):
                if largest < self.largest.get(option, math.inf):
                    self.largest[option] = largest
                    logger.warning(f"{self.name} allows `{option}` of {largest} at most, which is used from now on.")
                return True
        return False
