# SPDX-License-Identifier: Apache-2.0
"""Servers that refuse options of a request: they are asked in their way, as real ones phrase it, and it is remembered."""

import logging
import math

import pytest
from PIL import Image

from chat_server import ChatServer, answer
from judge_server import OTHER_NAME, TOO_MANY_LOGPROBS, JudgeServer, top_logprobs_refused
from paco_trl.dataset_building import ChatEndpoint
from paco_trl.rewards import JudgeUnavailableError, ServedJudge


PAIR = (Image.new("RGB", (28, 28), "red"), Image.new("RGB", (28, 28), "blue"))
QUESTION = "Alike?"
LOG_ODDS = 1.5
RIGHT = pytest.approx(1 / (1 + math.exp(-LOG_ODDS)), abs=1e-9)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def server():
    with JudgeServer(lambda first, second, question: LOG_ODDS) as server:
        yield server


@pytest.fixture
def judge(server):
    judge = ServedJudge(server.url, "judge", timeout=5.0, time_budget=20.0)
    yield judge
    judge.close()


@pytest.fixture
def writer():
    """Says how long its answer may be."""
    with ChatServer(lambda body: str(body.get("max_tokens") or body["max_completion_tokens"])) as server:
        yield server


def ask(endpoint: ChatEndpoint, max_tokens: int) -> str:
    return endpoint.ask(HELLO, seed=0, max_tokens=max_tokens, temperature=1.0)


class TestTopLogprobs:
    @pytest.mark.parametrize("message", TOO_MANY_LOGPROBS.values(), ids=TOO_MANY_LOGPROBS)
    def test_the_largest_that_is_allowed(self, server, judge, caplog, message):
        server.refuse = top_logprobs_refused(message, 5)
        judge.check()
        assert [body["top_logprobs"] for body in server.requests] == [20, 5]
        assert judge.score([PAIR] * 3, QUESTION) == [RIGHT] * 3
        # Remembered, and said once
        assert [body["top_logprobs"] for body in server.requests[2:]] == [5] * 3
        said = f"judge at {server.url} allows `top_logprobs` of 5 at most"
        assert caplog.text.count(said) == 1 and "cannot answer" not in caplog.text

    def test_many_at_once_are_all_asked_again(self, server, judge, caplog):
        server.refuse = top_logprobs_refused(TOO_MANY_LOGPROBS["vLLM"], 5)
        server.answer_only_when_asked(8)
        assert judge.score([PAIR] * 8, QUESTION) == [RIGHT] * 8
        assert sorted(body["top_logprobs"] for body in server.requests) == [5] * 8 + [20] * 8
        assert caplog.text.count("`top_logprobs` of 5 at most") == 1

    def test_a_score_that_needs_more_is_none(self, server, judge):
        server.others = -1.0  # No, at -1.7, is the third
        assert judge.score([PAIR], QUESTION) == [RIGHT]
        server.refuse = top_logprobs_refused(TOO_MANY_LOGPROBS["vLLM"], 2)
        assert judge.score([PAIR], QUESTION) == [None]
        with pytest.raises(
            JudgeUnavailableError, match=r"not among .*\. This one allows `top_logprobs` of at most 2\."
        ):
            judge.check()

    def test_the_published_protocol_needs_all(self, server, judge):
        assert judge.top_logprobs([PAIR], QUESTION)[0]
        server.refuse = top_logprobs_refused(TOO_MANY_LOGPROBS["vLLM"], 5)
        with pytest.raises(
            JudgeUnavailableError, match="of at most 5, but the published protocol reads the 20 likeliest"
        ):
            judge.top_logprobs([PAIR], QUESTION)

    @pytest.mark.parametrize(
        "message",
        [
            "`top_logprobs` is not supported.",
            TOO_MANY_LOGPROBS["vLLM"].format(20, 0),
            TOO_MANY_LOGPROBS["vLLM"].format(20, 30),
            # Of something else
            "Requested prompt of 9000 tokens, which is greater than max allowed: 5",
            "At most 1 image(s) may be provided in one prompt.",
        ],
    )
    def test_other_refusals_are_not_asked_again(self, server, judge, message):
        server.refuse = lambda body: message
        assert judge.score([PAIR], QUESTION) == [None]
        assert len(server.requests) == 1


class TestLength:
    def test_the_other_name(self, server, judge, writer, caplog):
        caplog.set_level(logging.INFO)
        for one in (server, writer):
            one.refuse = lambda body: OTHER_NAME if "max_tokens" in body else None
        endpoint = ChatEndpoint(writer.url, "writer", max_retries=0)
        assert judge.score([PAIR], QUESTION) == [RIGHT] == judge.score([PAIR], QUESTION)
        assert [ask(endpoint, 9), ask(endpoint, 8)] == ["9", "8"]
        for one in (server, writer):
            assert ["max_tokens" in body for body in one.requests] == [True, False, False]
            assert ["max_completion_tokens" in body for body in one.requests] == [False, True, True]
        assert caplog.text.count("takes `max_completion_tokens` instead of `max_tokens`") == 2

    @pytest.mark.parametrize(
        "message",
        [
            # https://github.com/ChatGPTNextWeb/NextChat/issues/3195
            "max_tokens is too large: {0}. This model supports at most 4096 completion tokens, whereas you provided {0}.",
            # DeepSeek, https://github.com/HELPMEEADICE/doge-code/issues/5
            "Invalid max_tokens value, the valid range of max_tokens is [1, 4096]",
            # Doubao, https://github.com/Gitlawb/openclaude/issues/331
            "The parameter `max_tokens` specified in the request are not valid: integer above maximum value, expected a "
            "value <= 4096, but got {0} instead.",
        ],
    )
    def test_the_longest_that_is_allowed(self, writer, caplog, message):
        writer.refuse = lambda body: message.format(body["max_tokens"]) if body["max_tokens"] > 4096 else None
        endpoint = ChatEndpoint(writer.url, "writer", max_retries=0)
        assert [ask(endpoint, length) for length in (6000, 5000, 100)] == ["4096", "4096", "100"]
        assert [body["max_tokens"] for body in writer.requests] == [6000, 4096, 4096, 100]
        assert caplog.text.count("allows `max_tokens` of 4096 at most") == 1
        # What is cut is cut there
        writer.say = lambda body: answer("Half a", "length")
        with pytest.raises(ValueError, match="an answer cut after 4096 tokens"):
            ask(endpoint, 6000)

    def test_of_an_explanation(self, server, judge):
        server.refuse = lambda body: (
            f"max_tokens is too large: {body['max_tokens']}. This model supports at most 64 completion tokens"
            if body["max_tokens"] > 64
            else None
        )
        assert judge.explain([PAIR], QUESTION) == [f"Yes. {QUESTION}"]
        assert [body["max_tokens"] for body in server.requests] == [512, 64]

    @pytest.mark.parametrize(
        "message",
        [
            # vLLM in 2025, https://github.com/claude-code-best/claude-code/issues/272
            "'max_tokens' or 'max_completion_tokens' is too large: {1}. This model's maximum context length is 8192 tokens "
            "and your request has {0} input tokens ({1} > 8192 - {0}).",
            # vLLM 0.25
            "This model's maximum context length is 8192 tokens. However, you requested {1} output tokens and your prompt "
            "contains {0} input tokens, for a total of {2} tokens. Please reduce the length of the input prompt or the "
            "number of requested output tokens.",
            # SGLang 0.5
            "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of {2} "
            "tokens: {0} tokens from the input messages and {1} tokens for the completion.",
            # OpenAI
            "This model's maximum context length is 8192 tokens. However, you requested {2} tokens ({0} in the messages, "
            "{1} in the completion). Please reduce the length of the messages or completion.",
        ],
    )
    def test_what_a_question_leaves(self, writer, message):
        """For this question alone: a shorter one leaves more."""
        tokens = {0: 5000, 1: 100, 2: 9000}

        def refuse(body: dict) -> str | None:
            prompt, length = tokens[body["seed"]], body["max_tokens"]
            # SGLang wants the sum to stay below
            return message.format(prompt, length, prompt + length) if prompt + length >= 8192 else None

        writer.refuse = refuse
        endpoint = ChatEndpoint(writer.url, "writer", max_retries=0)
        assert [endpoint.ask(HELLO, seed, 4000, 1.0) for seed in (0, 1)] == ["3191", "4000"]
        # Nothing is left
        before = len(writer.requests)
        with pytest.raises(ValueError, match="refused by the server .HTTP 400"):
            endpoint.ask(HELLO, 2, 4000, 1.0)
        assert len(writer.requests) == before + 1

    def test_a_bound_is_no_count(self, writer):
        # https://github.com/vllm-project/vllm/issues/42474
        writer.refuse = lambda body: (
            "This model's maximum context length is 8192 tokens. However, you requested 4096 output tokens and your "
            "prompt contains at least 4097 input tokens, for a total of at least 8193 tokens."
        )
        with pytest.raises(ValueError, match="refused by the server"):
            ask(ChatEndpoint(writer.url, "writer", max_retries=0), 4096)
        assert len(writer.requests) == 1
