# SPDX-License-Identifier: Apache-2.0
"""Prompts from a language model: what is asked, what is refused of the answers, and a stage that is killed goes on."""

import hashlib
import importlib
import json
import logging
import multiprocessing
import random
import time
from collections import Counter

import numpy as np
import pytest

from chat_server import ChatServer, answer
from judge_server import LoopClock
from launching import free_port
from paco_trl.data import check_image_set_columns, format_image_set_prompt, parse_image_set_prompt
from paco_trl.dataset_building.answers import SAME_PROMPT
from paco_trl.dataset_building.prompt_writing import CATEGORIES, write_prompts
from paco_trl.utils.chat import ChatEndpoint, ChatRequest, EndpointUnavailableError, Reply
from paco_trl.utils.stage_folder import StageFolder
from testing_utils import wait_until


# The package has the function under this name
module = importlib.import_module("paco_trl.dataset_building.prompt_writing")


KEY = "key-that-nobody-may-see"
HELLO = [{"role": "user", "content": "Hello."}]


# ---- The format ----


@pytest.mark.parametrize("layout", [(1, 1), (1, 5), (2, 2), (5, 3)])
def test_what_is_written_is_read(layout):
    rows, cols = layout
    theme = "A fox, who speaks of PANEL-2: and [LEFT]: in a sentence. It is red!"
    panels = [f'Text {number}: "it jumps [TOP]-[LEFT]: there."' for number in range(rows * cols)]
    prompt = format_image_set_prompt(theme, rows, cols, panels)
    parsed = parse_image_set_prompt(prompt)
    assert (parsed.rows, parsed.cols, parsed.panels) == (rows, cols, panels)
    assert parsed.theme.endswith(f"-PANEL Images with a {rows}x{cols} grid layout: {theme}")
    assert format_image_set_prompt(*parsed) == prompt  # a theme that names the layout stays as it is


@pytest.mark.parametrize(
    ("theme", "panels", "said"),
    [
        ("A fox", ["It runs.", "It sleeps."], "theme"),
        ("A fox.", ["It runs", "It sleeps."], "panel 0"),
        ("A fox.", ["It runs.", "It sleeps. [LEFT]:It eats."], "3 panel markers"),
        ("A fox.", ["It runs.", " "], "empty"),
        ("A fox.", ["It runs."], "1 panel texts"),
        ("Images with a 2x1 grid layout of a fox.", ["It runs.", "It sleeps."], "1x2|2x1"),
    ],
)
def test_texts_that_would_break_the_markers(theme, panels, said):
    with pytest.raises(ValueError, match=said):
        format_image_set_prompt(theme, 1, 2, panels)


def test_a_layout_of_other_types():
    panels = ["It runs.", "It sleeps."]
    assert format_image_set_prompt("A fox.", *np.array([1, 2]), panels) == format_image_set_prompt(
        "A fox.", 1, 2, panels
    )
    with pytest.raises(ValueError, match="`rows` is '1' and `cols` 2; they must be whole numbers"):
        format_image_set_prompt("A fox.", "1", 2, panels)
    with pytest.raises(ValueError, match="`panels` is 'ab'; it must be a list"):
        format_image_set_prompt("A fox.", 1, 2, "ab")


# ---- The endpoint ----


@pytest.fixture
def server():
    with ChatServer(lambda body: "Hello, you.") as server:
        yield server


def ask(endpoint, seed=0) -> Reply:
    ((_, reply),) = endpoint.ask_all([ChatRequest(HELLO, seed, 9, 0.5)])
    return reply


def test_a_question(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_ORG_ID", "an-organisation")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):  # where nobody listens
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    endpoint = server.endpoint()
    endpoint.check()
    assert ask(endpoint, 7) == Reply("Hello, you.")
    (body,) = server.requests
    assert (body["seed"], body["max_tokens"], body["temperature"], body["messages"]) == (7, 9, 0.5, HELLO)
    assert len(server.headers) == 2
    for headers in server.headers:
        assert headers["authorization"] == "Bearer EMPTY"
        assert "openai-organization" not in headers and KEY not in str(headers)


def test_a_key_is_taken_from_the_variable_that_is_named(server, monkeypatch):
    server.key = KEY
    monkeypatch.setenv("OTHER_KEY", KEY + "\n")
    endpoint = server.endpoint(api_key_variable="OTHER_KEY")
    endpoint.check()
    assert ask(endpoint) == Reply("Hello, you.")
    monkeypatch.setenv("OTHER_KEY", "wrong-" + KEY)
    for refused, remedy in [(server.endpoint(api_key_variable="OTHER_KEY"), "OTHER_KEY"), (server.endpoint(), "Name")]:
        for call in (refused.check, lambda: ask(refused)):  # noqa: B023
            with pytest.raises(EndpointUnavailableError, match=remedy) as error:
                call()
            assert server.url in str(error.value)
    for value in ("", None):
        monkeypatch.setenv("OTHER_KEY", value) if value is not None else monkeypatch.delenv("OTHER_KEY")
        with pytest.raises(ValueError, match="'OTHER_KEY'.* not set"):
            server.endpoint(api_key_variable="OTHER_KEY")


def test_an_endpoint_that_cannot_be_reached(server):
    address = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(EndpointUnavailableError, match=f"{address} does not answer.*no connection"):
        ChatEndpoint(address, "writer", max_retries=0).check()
    with pytest.raises(EndpointUnavailableError, match="Correct"):
        ChatEndpoint(server.url + "/nowhere", "writer", max_retries=0).check()
    with pytest.raises(ValueError, match="user name") as error:
        ChatEndpoint(f"http://me:{KEY}@127.0.0.1:8000/v1", "writer")
    assert KEY not in str(error.value)


@pytest.mark.parametrize("fault", ["429", "cut before", "hang"])
def test_what_may_pass_is_tried_again(server, fault):
    server.retry_after = "0.01"
    with LoopClock() as clock:

        def fail(number):
            if fault == "hang":
                time.sleep(0.1)  # the timeout begins when the client has sent all
                clock.forward(5.0)
            return fault

        server.fault = lambda number: fail(number) if number == 0 else None
        assert ask(server.endpoint(max_retries=1)) == Reply("Hello, you.")
        assert len(server.requests) == 2
        server.fault = fail
        with pytest.raises(EndpointUnavailableError, match="does not answer"):
            ask(server.endpoint())
        assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("400", "refused by the server (HTTP 400"),
        ("garbage", "cannot be read"),
        ("no choices", "cannot be read"),
        (answer("Half a", finish_reason="length"), "cut after 9 tokens"),
        (answer("  "), "empty"),
        (answer(None), "empty"),
    ],
)
def test_an_answer_that_cannot_be_used_stops_nothing(server, said, problem):
    if isinstance(said, dict):
        server.say = lambda body: said if body["seed"] == 1 else "Hello, you."
    else:
        server.fault = lambda number: said if server.requests[number]["seed"] == 1 else None
    replies = dict(server.endpoint().ask_all(ChatRequest(HELLO, seed, 9, 1.0) for seed in range(3)))
    assert [replies[seed].text for seed in range(3)] == ["Hello, you.", None, "Hello, you."]
    assert problem in replies[1].reason


def test_no_more_at_once_than_allowed_and_each_when_there_is_room(server):
    server.answer_only_when_asked(3)
    taken = []

    def requests():
        for seed in range(12):
            taken.append((seed, len(server.requests)))
            yield ChatRequest(HELLO, seed, 9, 1.0)

    replies = server.endpoint(max_concurrency=3).ask_all(requests())
    indices = [next(replies)[0]]
    assert len(taken) == 3
    indices += [index for index, _ in replies]
    assert sorted(indices) == list(range(12)) and server.most_at_once == 3
    assert all(asked >= seed - 3 for seed, asked in taken) and taken[-1][1] > 0  # lazily


def test_what_is_under_way_is_cancelled(server):
    server.fault = lambda number: None if number == 0 else "hang"
    endpoint = server.endpoint(timeout=60.0)
    for _ in endpoint.ask_all(ChatRequest(HELLO, seed, 9, 1.0) for seed in range(20)):
        assert wait_until(lambda: server.at_once >= 7)  # the others do hang
        break
    assert wait_until(lambda: server.at_once == 0)  # the server sees them go
    endpoint.close()
    assert wait_until(lambda: server.open_connections == 0)


# ---- Prompts ----


def wanted(body):
    """How many prompts of how many panels a request asks for, and of which kind."""
    text = body["messages"][0]["content"]
    words = text.split()
    kind = next(line for line in text.splitlines() if line.startswith("Kind of set: ")).split(": ")[1]
    return int(words[1]), int(text.partition("one set of ")[2].split()[0]), kind


def good(body, tag=""):
    """An answer that depends on nothing but the request."""
    count, panels, _ = wanted(body)
    key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:8] + tag
    names = [f"{key} {number}" for number in range(count)]
    prompts = [
        {"theme": f"A red fox of {name} in ink", "panels": [f"It does {name} {panel}." for panel in range(panels)]}
        for name in names
    ]
    return json.dumps({"prompts": prompts})


def plain(dataset):
    return dataset.with_format(None)[:]


def test_prompts_are_spread_evenly_and_ready(server, tmp_path):
    server.say = good
    dataset = write_prompts(server.endpoint(), StageFolder(tmp_path), 60, layouts=[(2, 2), (1, 3)], seed=1)
    assert len(dataset) == len(set(dataset["id"])) == len(set(dataset["prompt"])) == 60
    check_image_set_columns(dataset)
    by_category = Counter(dataset["category"])
    assert len(by_category) == 26 and set(by_category.values()) == {2, 3}
    assert set(Counter(zip(dataset["rows"], dataset["cols"], strict=True)).values()) == {30}
    dimensions = {category.name: list(category.dimensions) for category in CATEGORIES}
    for row in dataset:
        parsed = parse_image_set_prompt(row["prompt"])
        assert parsed[1:] == (row["rows"], row["cols"], row["panels"]) and parsed.theme.endswith(row["theme"])
        assert row["dimensions"] == dimensions[row["category"]]
    for body in server.requests:
        assert wanted(body)[2].split(" (")[0] in by_category
    assert len({body["seed"] for body in server.requests}) == len(server.requests)

    folder = StageFolder(tmp_path)
    assert folder.report["written"] == 60 and folder.report["left out"] == {}
    asked = len(server.requests)
    assert plain(write_prompts(server.endpoint(), folder, 60)) == plain(dataset)  # done is done
    assert len(server.requests) == asked


def test_chosen_categories_and_another_seed(server, tmp_path):
    server.say = lambda body: f"```json\n{good(body)}\n```"  # fences are read
    names = ["multi-view", "comic story"]
    sets = [write_prompts(server.endpoint(), StageFolder(tmp_path / str(n)), 7, names, seed=n) for n in (0, 1)]
    assert Counter(sets[0]["category"]) == {"multi-view": 4, "comic story": 3}
    assert not set(sets[0]["prompt"]) & set(sets[1]["prompt"])
    for arguments, said in [
        ({"categories": ["multi view"]}, "multi view"),
        ({"layouts": [(1, 1)]}, "layouts"),
        ({"max_attempts": 0}, "max_attempts"),
    ]:
        with pytest.raises(ValueError, match=said):
            write_prompts(server.endpoint(), StageFolder(tmp_path / "no"), **{"num_prompts": 1, **arguments})


def changed(change):
    """A good answer of which the first prompt is changed."""

    def say(body):
        content = json.loads(good(body))
        content["prompts"] = change(content["prompts"])
        return json.dumps(content)

    return say


def first(**columns):
    return changed(lambda prompts: [{**prompts[0], **columns}, *prompts[1:]])


BAD_ANSWERS = {
    "words": (lambda body: "Gladly! Here they are.", module.NO_JSON, 4),
    "cut": (lambda body: answer(good(body)[:50], "length"), "an answer cut after 3840 tokens", 4),
    "three panels": (first(panels=["a", "b", "c"]), module.PANEL_COUNT, 1),
    "an empty panel": (first(panels=["a", "b", "c", " "]), module.EMPTY, 1),
    "the same panel": (first(panels=["a b", "c", "A  b", "d"]), module.SAME_PANEL, 1),
    "a marker": (first(panels=["a", "b. [TOP]-[LEFT]: c", "d", "e"]), module.MARKERS, 1),
    "a layout": (first(theme="Images with a 2x2 grid layout of a fox."), module.MARKERS, 1),
    "too few": (changed(lambda prompts: prompts[1:]), module.TOO_FEW, 1),
    "the same in other letters": (
        changed(lambda prompts: [{**prompts[-1], "theme": prompts[-1]["theme"].upper() + "!"}, *prompts[1:]]),
        SAME_PROMPT,
        1,
    ),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_bad_answer_is_requested_again(server, tmp_path, name):
    say, cause, count = BAD_ANSWERS[name]
    server.say = lambda body: say(body) if len(server.requests) == 1 else good(body)
    arguments = {"num_prompts": 8, "categories": ["multi-view"]}
    dataset = write_prompts(server.endpoint(max_concurrency=1), StageFolder(tmp_path / "a"), **arguments)
    report = StageFolder(tmp_path / "a").report
    assert len(dataset) == 8 and report["rejected"] == {cause: count} and report["left out"] == {}
    assert len(server.requests) == report["requests"] == 3
    assert wanted(server.requests[2])[0] == count  # only what is missing, with another seed
    assert len({body["seed"] for body in server.requests}) == 3


def test_what_is_always_bad_is_left_out(server, tmp_path, caplog):
    """In one category: it is counted, and said."""
    say, cause, _ = BAD_ANSWERS["three panels"]
    server.say = lambda body: say(body) if "multi-view" in wanted(body)[2] else good(body)
    arguments = {"num_prompts": 8, "categories": ["multi-view", "comic story"]}
    with caplog.at_level(logging.WARNING):
        dataset = write_prompts(server.endpoint(), StageFolder(tmp_path), max_attempts=2, **arguments)
    report = StageFolder(tmp_path).report
    assert report["left out"] == {cause: 1} and len(dataset) == 7 and "left out" in caplog.text
    assert Counter(dataset["category"])["comic story"] == 4 and report["rejected"] == {cause: 2}


def test_which_of_two_equal_prompts_is_left_out_does_not_depend_on_the_time(server, tmp_path):
    """All requests get the same answer; of those at once, the last one gets it first."""

    def say(body):
        if concurrency > 1:
            time.sleep(0.02 * (8 - min(len(server.requests), 8)))
        content = json.loads(good({**body, "seed": 0, "messages": [{"content": body["messages"][0]["content"]}]}))
        return json.dumps(content)

    server.say = say
    found = []
    for concurrency in (1, 8):
        server.forget_requests()
        folder = StageFolder(tmp_path / str(concurrency))
        found.append(write_prompts(server.endpoint(max_concurrency=concurrency), folder, 16, ["multi-pose"]))
        assert folder.report["rejected"][SAME_PROMPT] >= 8
    assert plain(found[0]) == plain(found[1]) and 4 <= len(found[0]) < 16


def test_only_nonsense_ends_with_an_example(server, tmp_path):
    server.say = lambda body: "I am a teapot, " * 100
    with pytest.raises(ValueError, match="None of .* answers of writer at http.*I am a teapot") as error:
        write_prompts(server.endpoint(), StageFolder(tmp_path / "many"), 1000)
    assert len(server.requests) < 40 and len(str(error.value)) < 800
    assert not StageFolder(tmp_path / "many").is_done
    server.forget_requests()
    with pytest.raises(ValueError, match="None of 3 answers.*I am a teapot"):
        write_prompts(server.endpoint(), StageFolder(tmp_path / "few"), 1)


def moody(body):
    """Good or bad by the request alone."""
    chance = random.Random(body["seed"]).random()
    if chance < 0.2:
        return "No."
    return changed(lambda prompts: prompts[1:])(body) if chance < 0.4 else good(body)


def test_killed_and_resumed(server, tmp_path):
    server.say = moody
    arguments = {"num_prompts": 70, "layouts": [(2, 2), (1, 2)]}
    whole = write_prompts(server.endpoint(), StageFolder(tmp_path / "whole"), **arguments)
    assert StageFolder(tmp_path / "whole").report["rejected"]
    asked = len(server.requests)
    server.forget_requests()
    server.fault = lambda number: "hang" if number >= 12 else None  # so that it cannot end before it is killed
    journal = tmp_path / "killed" / "prompts.jsonl"
    # Forked, so that nothing is imported anew
    process = multiprocessing.get_context("fork").Process(
        target=lambda: write_prompts(server.endpoint(), StageFolder(tmp_path / "killed"), **arguments)
    )
    process.start()
    try:
        assert wait_until(lambda: journal.exists() and len(journal.read_bytes().splitlines()) >= 5, 60)
    finally:
        process.kill()
        process.join()
    assert not StageFolder(tmp_path / "killed").is_done
    with open(journal, "ab") as file:
        file.write(b'{"name": 3, "rep')  # torn in the middle of a line
    kept = len(StageFolder(tmp_path / "killed").journal("prompts").records)
    server.forget_requests()
    server.fault = lambda number: None
    resumed = write_prompts(server.endpoint(), StageFolder(tmp_path / "killed"), **arguments)
    assert plain(resumed) == plain(whole) and len(server.requests) == asked - kept > 0
    assert StageFolder(tmp_path / "killed").report == StageFolder(tmp_path / "whole").report
