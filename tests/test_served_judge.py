# SPDX-License-Identifier: Apache-2.0
"""The served judge against a server that does everything a server can do wrong: a right score or None, never a number."""

import asyncio
import json
import logging
import math
import multiprocessing
import os
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace as Part

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from judge_server import JudgeServer, LoopClock, pictures_of
from paco_trl import PaCoReward
from paco_trl.data import criterion_question, theme_question
from paco_trl.data.questions import plain_question
from paco_trl.rewards import Answer, ConsistencyReward, JudgeUnavailableError, ServedJudge, yes_probability
from paco_trl.rewards.judge import _read_score
from paco_trl.utils.chat import _event_loop
from paco_trl.utils.vision_language import load_image
from testing_utils import noise, plain, wait_until


KEY = "key-that-nobody-may-see"
# In a question: the server fails for ever at it
POISON = "poison"
# Answers that will be the same the next time, and why they have no score
FINAL_FAULTS = {
    "400": "refused", "garbage": "unreadable", "page": "unreadable", "no choices": "unreadable",
    "choice is null": "unreadable", "no logprobs": "unreadable", "log-probabilities are words": "unreadable",
    "NaN": "unreadable", "neither": "undecided", "only Yes": "undecided", "the logarithm of 0": "undecided",
}  # fmt: skip


def log_odds(first, second, question):
    """Sees images, their order and the question."""
    return (first.getpixel((0, 0))[0] - 2 * second.getpixel((0, 0))[0]) / 100 + len(question) / 10


def sigmoid(value):
    return 1 / (1 + math.exp(-value))


def right(first, second, question):
    return pytest.approx(sigmoid(log_odds(first, second, question)), abs=1e-9)


PAIR = (plain(120), plain(50))
QUESTION = "Alike?"
RIGHT = right(*PAIR, QUESTION)


def read_question(request):
    return request["messages"][-1]["content"][-1]["text"]


def tasks_under_way():
    return asyncio.all_tasks(_event_loop())


@pytest.fixture
def server():
    with JudgeServer(log_odds) as server:
        yield server


@pytest.fixture
def make_judge():
    judges = []

    def make(server, model="judge", **kwargs):
        url = server if isinstance(server, str) else server.url
        judges.append(ServedJudge(url, model, **{"timeout": 30.0, "time_budget": 120.0, **kwargs}))
        return judges[-1]

    yield make
    for judge in judges:
        judge.close()


@pytest.fixture
def judge(server, make_judge):
    return make_judge(server)


@pytest.fixture
def clock():
    with LoopClock() as clock:
        yield clock


class TestYesProbability:
    @pytest.mark.parametrize(
        ("logprobs", "expected"),
        [
            ({"Yes": math.log(0.6), "No": math.log(0.2), "Maybe": math.log(0.2)}, 0.75),
            ({"Yes": -3.0}, 1.0),
            ({"No": -3.0, "yes": -0.1}, 0.0),
            ({"Yes": -700.0, "No": -1e-9}, math.exp(-700 + 1e-9)),
            ({"Yes": -9999.0, "No": -1e-9}, 0.0),
            ({"Yes": -math.inf, "No": -2.0}, 0.0),
            # Both would underflow
            ({"Yes": -800.0, "No": -801.0}, sigmoid(1)),
            # A server may round 0 to a little more
            ({"Yes": 1e-4, "No": -20.0}, sigmoid(20)),
        ],
    )
    def test_closed_forms(self, logprobs, expected):
        assert yes_probability(logprobs) == pytest.approx(expected, rel=1e-12, abs=0)

    @pytest.mark.parametrize(
        "logprobs",
        [{"yes": -0.1, " Yes": -0.2, "no": -0.4, " No": -0.5}]
        + [{"Yes": value, "No": value} for value in (-9999.0, -math.inf)],
    )
    def test_there_is_none(self, logprobs):
        assert yes_probability(logprobs) is None
        assert yes_probability({**logprobs, "Yes": -0.7, "No": -0.7}) == 0.5

    @pytest.mark.parametrize(("token", "value"), [("Yes", math.nan), ("No", 0.1)])
    def test_invalid_log_probabilities_are_refused(self, token, value):
        with pytest.raises(ValueError, match=f"'{token}' is {value}"):
            yes_probability({"Yes": -0.1, "No": -0.1, token: value})
        assert yes_probability({"Yes": -0.1, "No": -0.1, "Maybe": value}) == 0.5

    def test_spellings_are_added_up(self):
        logprobs = {"Yes": math.log(0.3), "y": math.log(0.1), "no": math.log(0.2), "Maybe": math.log(0.4)}
        assert yes_probability(logprobs, ("Yes", "y"), ("No", "no")) == pytest.approx(0.4 / 0.6, rel=1e-12)
        assert yes_probability(logprobs) == 1.0
        assert yes_probability(logprobs, ("YES",), ("No",)) is None
        with pytest.raises(ValueError, match="log-probability of 'y' is nan"):
            yes_probability(logprobs | {"y": math.nan}, ("Yes", "y"))


class TestScore:
    def test_top_tokens_with_text_in_front_of_each_image(self, server, judge, caplog):
        server.fault = lambda number: "no logprobs" if number == 1 else None
        first, second = judge.top_logprobs([PAIR, PAIR[::-1]], QUESTION, ("<img1>: ", "<img2>: "))
        answers = {"Yes", "No"} | {f"other{index}" for index in range(18)}
        found = first if second is None else second
        assert set(found) == answers and None in (first, second)
        assert "1 of 2 questions" in caplog.text
        parts = server.requests[0]["messages"][-1]["content"]
        assert [part.get("text", "image") for part in parts] == ["<img1>: ", "image", "<img2>: ", "image", QUESTION]
        assert (server.requests[0]["max_tokens"], server.requests[0]["temperature"]) == (1, 0)

    @pytest.mark.parametrize("mass", [2e-4, 0.49, 0.51])
    def test_yes_and_no_need_half_of_the_probability(self, server, judge, caplog, mass):
        """A model that thinks first has them among its tokens, and they say nothing."""
        yes, no = math.log(0.62 * mass), math.log(0.38 * mass)
        server.log_odds = lambda *_: {"<think>": math.log(1 - mass), "Yes": yes, "No": no}
        (answer,) = asyncio.run(judge.answer([PAIR], QUESTION))
        if mass > 0.5:
            assert answer == Answer(pytest.approx(0.62))
            judge.check()
            return
        assert answer == Answer(None, "undecided")
        assert "'<think>'" in caplog.text and "'<think>'" in judge.missing_score_reason
        with pytest.raises(JudgeUnavailableError, match="<think>.*without thinking"):
            judge.check()

    def test_an_answer_without_the_other_that_is_sure_has_a_score(self, server, judge):
        server.fault = {0: "only Yes, surely"}.get
        assert judge.score([PAIR], QUESTION) == [1.0]

    def test_of_tokens_with_one_text_the_likelier_counts(self):
        top = [Part(token=token, logprob=value) for token, value in (("Yes", -0.1), ("Yes", -9.0), ("No", -2.4))]
        completion = Part(choices=[Part(logprobs=Part(content=[Part(top_logprobs=top)]))])
        assert _read_score(completion) == Answer(yes_probability({"Yes": -0.1, "No": -2.4}))

    def test_scores_and_requests(self, server, judge):
        pairs = [PAIR, PAIR[::-1], (plain(3), plain(9))]
        questions = [QUESTION, "Like?", "Is it?"]
        scores = judge.score(pairs, questions)
        assert scores == [right(*pair, question) for pair, question in zip(pairs, questions, strict=True)]
        assert len({round(score, 3) for score in scores}) == 3 == len(server.requests)
        assert judge.score(pairs, QUESTION) == [right(*pair, QUESTION) for pair in pairs]
        assert judge.score([], []) == [] and len(server.requests) == 6

    def test_symmetric_needs_both_orders(self, server, judge):
        there, back = judge.score([PAIR], QUESTION) + judge.score([PAIR[::-1]], QUESTION)
        assert abs(there - back) > 0.1
        assert judge.score([PAIR], QUESTION, symmetric=True) == pytest.approx([(there + back) / 2])
        server.fault = {len(server.requests) + 1: "400"}.get
        assert judge.score([PAIR], QUESTION, symmetric=True) == [None]

    @pytest.mark.parametrize(
        ("kwargs", "message"),
        [
            ({"base_url": "127.0.0.1:8000"}, "'127.0.0.1:8000'"),
            ({"base_url": f"http://a/v1?api_key={KEY}"}, "query"),
            ({"max_concurrency": 0}, "`max_concurrency`"),
            ({"timeout": 3.0, "time_budget": 2.0}, "`time_budget`"),
        ],
    )
    def test_arguments(self, kwargs, message):
        with pytest.raises(ValueError, match=message) as error:
            ServedJudge(**{"base_url": "http://a/v1", "model": "judge", **kwargs})
        assert KEY not in str(error.value)


class TestFaultsThatPass:
    """Asked again, for the right score."""

    @pytest.mark.parametrize("fault", ["429", "500", "cut in the middle", "hang"])
    def test_once(self, server, judge, clock, fault):
        server.retry_after = "0.1"
        server.fault = lambda number: clock.after(judge.timeout * (fault == "hang"), fault) if number == 0 else None
        assert judge.score([PAIR], QUESTION) == [RIGHT]
        assert len(server.requests) == 2 and server.requests[0] == server.requests[1]

    def test_restarted_in_the_middle_of_many(self, server, make_judge, caplog):
        caplog.set_level(logging.INFO, "openai")
        server.fault = lambda number: "hang" if number > 10 else None
        judge = make_judge(server, max_concurrency=4)
        scores = []
        pairs = [(plain(index), plain(90)) for index in range(40)]
        thread = threading.Thread(target=lambda: scores.extend(judge.score(pairs, QUESTION)))
        thread.start()
        assert wait_until(lambda: len(server.requests) > 11)  # one of them hangs
        server.stop()
        assert wait_until(lambda: "Retrying" in caplog.text)
        server.fault = lambda number: None
        server.start()
        thread.join(120)
        assert scores == [right(*pair, QUESTION) for pair in pairs]
        assert len(server.requests) > 40


class TestFaultsThatStay:
    """None with the reason, after one request."""

    @pytest.mark.parametrize("fault", FINAL_FAULTS)
    def test_are_not_asked_again(self, server, make_judge, caplog, fault):
        server.fault = {1: fault}.get
        judge = make_judge(server, max_concurrency=1)
        answers = asyncio.run(judge.answer([PAIR] * 3, QUESTION))
        assert answers == [Answer(RIGHT), Answer(None, FINAL_FAULTS[fault]), Answer(RIGHT)]
        assert len(server.requests) == 3
        assert f"1 x {FINAL_FAULTS[fault]}" in caplog.text
        assert "data:image/png;base64" not in caplog.text
        # Twin: the next time the server is well
        assert judge.score([PAIR], QUESTION) == [RIGHT]

    def test_the_only_question_for_ever(self, server, judge, clock):
        """Nobody else asks: a question of another kind tells that the server is not down."""
        server.fault = lambda number: (
            clock.after(20.0, "500") if POISON in read_question(server.requests[number]) else None
        )
        assert asyncio.run(judge.answer([PAIR], [POISON])) == [Answer(None, "unavailable")]
        assert Counter(map(read_question, server.requests))[plain_question()] == 1


class TestUnavailable:
    """A server that is down, or the wrong one, stops a run, with what is wrong."""

    @pytest.mark.parametrize(("fault", "message"), [("500", "HTTP 500"), ("hang", "timeout")])
    def test_for_ever(self, server, make_judge, clock, fault, message):
        # The fourth is the test question
        server.fault = lambda number: clock.after(40.0 if fault == "hang" or number < 3 else 0.0, fault)
        judge = make_judge(server, timeout=40.0 if fault == "hang" else 100.0, time_budget=100.0)
        with pytest.raises(JudgeUnavailableError, match=message):
            judge.score([PAIR], QUESTION)
        assert len(server.requests) == 4
        # It recovers, and so does the judge
        server.fault = lambda number: None
        assert judge.score([PAIR], QUESTION) == [RIGHT]

    def test_nobody_listens_at_start(self, make_judge):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
            with pytest.raises(JudgeUnavailableError, match=rf"{url} \(no connection"):
                make_judge(url).check()

    def test_wrong_model(self, server, make_judge):
        server.models = ["paco-reward", "base"]
        judge = make_judge(server, "paco")
        with pytest.raises(JudgeUnavailableError, match="no model 'paco'. It has: paco-reward, base"):
            judge.check()
        assert server.requests == []
        with pytest.raises(JudgeUnavailableError, match="model 'paco'"):
            judge.score([PAIR], QUESTION)
        assert len(server.requests) == 1  # no retries
        assert make_judge(server, "base").score([PAIR], QUESTION) == [RIGHT]

    def test_after_one_is_found_the_others_are_not_asked(self, server, make_judge):
        server.key, server.latency = "another", 0.05
        with pytest.raises(JudgeUnavailableError, match="refuses the key"):
            make_judge(server, max_concurrency=4).score([PAIR] * 100, QUESTION)
        assert len(server.paths) <= 8
        assert wait_until(lambda: not tasks_under_way())


class TestCheck:
    def test_asks_one_real_question(self, server, judge):
        judge.check()
        (body,) = server.requests
        images, question = pictures_of(body)
        assert question == plain_question() and [image.size for image in images] == [(112, 112)] * 2
        assert images[0].getpixel((0, 0)) != images[1].getpixel((0, 0))
        assert server.paths == ["/v1/models", "/v1/chat/completions"]

    def test_does_not_wait_for_a_full_request(self, server, make_judge, clock):
        """A server that takes a connection and says nothing: at the first address, and at the second."""
        server.fault = lambda number: clock.after(30.0, "hang")
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            threading.Thread(target=lambda: (silent.accept(), clock.forward(30.0)), daemon=True).start()
            for url in (f"http://127.0.0.1:{silent.getsockname()[1]}/v1", server.url):
                started = time.monotonic()
                with pytest.raises(JudgeUnavailableError, match=f"{url}.*30 seconds"):
                    make_judge(url, timeout=100.0).check()
                assert time.monotonic() - started < 20
        assert len(server.requests) == 1

    @pytest.mark.parametrize(("fault", "message"), [("neither", "'Maybe'"), ("page", "none"), ("400", "HTTP 400")])
    def test_a_server_that_cannot_judge(self, server, judge, fault, message):
        server.fault = lambda number: fault
        with pytest.raises(JudgeUnavailableError, match=message):
            judge.check()
        assert len(server.requests) == 1


class TestKey:
    @pytest.fixture
    def locked(self, server):
        server.key = KEY
        return server

    def test_wrong_and_right(self, locked, make_judge, monkeypatch):
        monkeypatch.delenv("VLLM_API_KEY", raising=False)
        for kwargs in ({}, {"api_key": "wrong"}):
            wrong = make_judge(locked, **kwargs)
            for ask in (wrong.check, lambda wrong=wrong: wrong.score([PAIR], QUESTION)):
                before = len(locked.paths)
                with pytest.raises(JudgeUnavailableError, match="HTTP 401.*VLLM_API_KEY"):
                    ask()
                assert len(locked.paths) == before + 1
        assert make_judge(locked, api_key=KEY).score([PAIR], QUESTION) == [RIGHT]
        monkeypatch.setenv("VLLM_API_KEY", KEY)
        assert make_judge(locked).score([PAIR], QUESTION) == [RIGHT]
        with pytest.raises(JudgeUnavailableError, match="refuses the key"):
            make_judge(locked, api_key="wrong").check()

    def test_is_in_no_log_repr_or_error(self, locked, make_judge, clock, caplog):
        caplog.set_level(logging.DEBUG)
        judge = make_judge(locked, api_key=KEY)
        judge.check()
        locked.refuse = lambda body: f"The key {KEY} may not ask this."
        assert judge.score([PAIR], QUESTION) == [None] and "*** may not ask" in caplog.text
        locked.refuse, locked.fault = lambda body: None, lambda number: clock.after(30.0, "500")
        with pytest.raises(JudgeUnavailableError) as unavailable:
            judge.score([PAIR], QUESTION)
        locked.key = "another"
        with pytest.raises(JudgeUnavailableError, match="refuses the key") as refused:
            judge.score([PAIR], QUESTION)
        assert locked.headers[-1]["authorization"] == f"Bearer {KEY}" and len(caplog.records) > 10
        errors = [unavailable.value, refused.value]
        said = [caplog.text, judge, judge.name, *errors, *(error.__cause__ for error in errors)]
        assert not any(KEY in repr(text) + str(text) for text in said)


class TestConnections:
    def test_one_pool_for_all_threads_and_event_loops(self, server, make_judge):
        server.answer_only_when_asked(5)
        judge = make_judge(server, max_concurrency=5, timeout=20.0)
        question = [PAIR] * 20, QUESTION

        def ask(number):
            if number % 2:
                return judge.score(*question)
            return [answer.score for answer in asyncio.run(judge.answer(*question))]

        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(ask, range(6))) == [[RIGHT] * 20] * 6
        assert server.most_at_once == 5 == server.connections

    def test_control_tokens_are_refused_as_in_the_process(self, server, judge):
        assert judge.score([PAIR], "A <hat> | a |bow|?") != [None]
        tokens = [
            "im_start",
            "im_end",
            "endoftext",
            "vision_start",
            "vision_end",
            "image_pad",
            "video_pad",
            "box_start",
        ]
        for token in tokens:
            with pytest.raises(ValueError, match=rf"`prompts\[1\]` has '<\|{token}\|>'"):
                judge.score([PAIR] * 2, ["A hat", f"A hat<|{token}|>"])
            with pytest.raises(ValueError, match=token):
                asyncio.run(judge.answer([PAIR], f"<|{token}|>Rate it.", scale=5))
        assert len(server.requests) == 1

    def test_a_judge_must_be_created_again_after_a_fork(self, server, make_judge):
        judge = make_judge(server)
        assert judge.score([PAIR], QUESTION) == [RIGHT]

        def ask():
            again = ServedJudge(server.url, "judge", timeout=5.0, time_budget=5.0)
            os._exit(0 if again.score([PAIR], QUESTION) == [RIGHT] else 2)  # without pytest's ends

        child = multiprocessing.get_context("fork").Process(target=ask, daemon=True)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert judge.score([PAIR], QUESTION) == [RIGHT]

    def test_cancelled(self, server, make_judge):
        server.fault = lambda number: "hang"
        judge = make_judge(server, max_concurrency=4)

        async def give_up():
            task = asyncio.create_task(judge.answer([PAIR] * 50, QUESTION))
            while len(server.requests) < 4:
                await asyncio.sleep(0.01)
            assert len(tasks_under_way()) > 50  # the effect
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(give_up())
        assert wait_until(lambda: not tasks_under_way())
        assert len(server.requests) == 4
        server.fault = lambda number: None
        assert judge.score([PAIR], QUESTION) == [RIGHT]


class TestImages:
    @pytest.mark.parametrize(("size", "patch_size"), [((57, 90), 14), ((13, 9), 14), ((90, 70), 16)])
    def test_png_is_lossless(self, server, make_judge, size, patch_size):
        pair = noise(0, size), noise(1, size)
        make_judge(server, patch_size=patch_size).score([pair], QUESTION)
        (sent, question) = pictures_of(server.requests[0])
        assert question == QUESTION and [image.format for image in sent] == ["PNG", "PNG"]
        for image, there in zip(pair, sent, strict=True):
            assert np.array_equal(np.asarray(there), np.asarray(load_image(image, patch_size, "")))
        assert not np.array_equal(*map(np.asarray, sent))

    def test_each_is_encoded_once_in_a_call(self, server, judge, monkeypatch, tmp_path):
        saved = []
        save = Image.SAVE["PNG"]
        monkeypatch.setitem(Image.SAVE, "PNG", lambda image, *args: (saved.append(image), save(image, *args)))
        images = [noise(index) for index in range(4)]
        noise(9).save(path := tmp_path / "image.webp", lossless=True)
        pairs = list(combinations(images, 2)) + [(str(path), images[0]), (images[1], path)]
        judge.score(pairs * 3, QUESTION)
        assert len(saved) == 5 and len(server.requests) == 3 * 8
        # Twin: copies are images of their own
        judge.score([tuple(image.copy() for image in pair) for pair in combinations(images, 2)], QUESTION)
        assert len(saved) == 5 + 12


@pytest.mark.parametrize(
    ("roots", "patch_size"),
    [
        ({}, 14), ({"judge": "/nowhere/judge"}, 14), ({"judge": "{qwen3}"}, 16), ({"judge": "{qwen2.5}"}, 14),
        ({"judge": ("/nowhere/lora", "judge-base"), "judge-base": "{qwen3}"}, 16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_checked", [False, True])
def test_images_have_multiples_of_the_served_models_patches(
    tmp_path, tiny_qwen, make_judge, caplog, roots, patch_size, is_checked
):
    """Its server resizes others again, so that it would see other pixels than in the process."""
    processor = AutoProcessor.from_pretrained(tiny_qwen)
    processor.image_processor.patch_size = 16
    processor.save_pretrained(tmp_path)
    (tmp_path / "paco_trl.json").write_text(json.dumps({"settings": {"question": "Do they match?"}}))
    folders = {"{qwen3}": str(tmp_path), "{qwen2.5}": str(tiny_qwen)}
    images = noise(0, (512, 512)), noise(1, (90, 70))
    with JudgeServer(log_odds, models=["judge", "judge-base"]) as server:
        server.roots = {
            name: folders.get(root, root) if isinstance(root, str) else root for name, root in roots.items()
        }
        judge = make_judge(server)
        if is_checked:
            judge.check()
        judge.score([images] * 2, QUESTION)
        for body in server.requests[-2:]:
            for image, sent in zip(images, pictures_of(body)[0], strict=True):
                assert np.array_equal(np.asarray(sent), np.asarray(load_image(image, patch_size, "")))
        is_known = any(root in folders for root in roots.values())
        assert judge.find_patch_size() == patch_size and ("patch size" in caplog.text) != is_known
        question = "Do they match?" if patch_size == 16 else None  # which it was trained on
        assert judge.question == question
        reward = ConsistencyReward(make_judge(server, **({} if is_checked else {"patch_size": 14})))
        assert reward.question == (question or "theme") and ("cannot be read here" in caplog.text) != is_known


def test_a_client_of_another_process_is_refused(make_judge, monkeypatch):
    """As of a worker that was forked: its event loop does not run there."""
    with JudgeServer(lambda *_: 0.0) as server:
        judge = make_judge(server)
        assert judge.score([(noise(0), noise(1))], QUESTION) == [0.5]
        monkeypatch.setattr(judge._client, "_process", 0)
        with pytest.raises(RuntimeError, match="another process"):
            judge.score([(noise(0), noise(1))], QUESTION)


def test_scores_are_those_in_the_process(tiny_qwen, make_judge):
    inner = PaCoReward.from_pretrained(tiny_qwen, device="cpu", dtype="float32")
    lock = threading.Lock()

    def log_odds(first, second, question):
        with lock:
            (score,) = inner.score([(first, second)], question)
        return math.log(score) - math.log1p(-score)

    sizes, modes = [(56, 56), (90, 61), (28, 140), (200, 130)], ["RGB", "RGBA", "P", "L"]
    images = [noise(seed, size, mode) for seed, (size, mode) in enumerate(zip(sizes, modes, strict=True))]
    pairs = [*combinations(images, 2), (images[1], images[0]), (images[2], images[0])]
    questions = [theme_question("A fox through the year"), criterion_question("The fox is red")] * 4
    expected = inner.score(pairs, questions)
    assert np.std(expected) > 0.01 and abs(expected[0] - expected[-2]) > 1e-3
    with JudgeServer(log_odds) as server:
        assert make_judge(server).score(pairs, questions) == pytest.approx(expected, abs=1e-6, rel=0)
