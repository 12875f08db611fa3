# SPDX-License-Identifier: Apache-2.0
"""Judges that answer in words: the published prompts, planted answers of a real server, and what becomes of them."""

import asyncio
import hashlib
import json
import math
import re

import numpy as np
import pytest
import yaml

from chat_server import ChatServer, answer
from judge_server import LoopClock, pictures_of
from paco_trl.commands import evaluate_judge, grpo
from paco_trl.commands.evaluate_arguments import main as evaluate_main
from paco_trl.commands.script_arguments import ScriptArguments, check_reward_columns, find_judges, load_rewards
from paco_trl.data.columns import typed_dataset
from paco_trl.image_benchmarks.gedit_protocols import read_answer
from paco_trl.rewards import JudgeUnavailableError, RubricReward, WordsReward
from paco_trl.rewards.fingerprint import describe_reward
from paco_trl.rewards.words import read_words_prompt
from paco_trl.rewards.written_scores import read_scores
from paco_trl.utils.errors import OptionError
from paco_trl.utils.files import read_template
from testing_utils import close, noise, plain


SOURCES = [noise(seed, (56 + 28 * (seed % 2), 56)) for seed in range(4)]
EDITED = [noise(seed) for seed in range(10, 14)]
INSTRUCTIONS = ["Add a hat.", 'Make it {prompt} and "blue".', "Remove the fox from the picture.", "Add a hat."]
# SHA-256 of each text as the published code makes it of "Add a hat.", from the commits that the files name
PUBLISHED = {
    ("editscore", "edit"): (
        "ebe7cd0d8b8ffca1dbfc5a3ea756705d7ffd6bce2965cd418297ccb48eae2726",
        "8249deba103d112dddd4c2e7fe1d5a1c40fe3143dc640a422a19aced0d260c78",
    ),
    ("viescore", "edit"): (
        "c19353f7f2d39354fcdf58de641bdc63b5abf242582e13d05fe9220dac06ffb8",
        "2473ff2c7406e06545c5c039ceb039ff2604ebacf150868a48f0bf07c9e733b0",
    ),
    ("viescore", "image"): (
        "a59136f714359597c4847996cd0a029fa0120091d5c9d7d066764ee82f1f9f4b",
        "2473ff2c7406e06545c5c039ceb039ff2604ebacf150868a48f0bf07c9e733b0",
    ),
}


def written(*scores, reasoning="Seen."):
    return json.dumps({"reasoning": reasoning, "score": scores})


def is_quality(body):
    return "naturalness" in body["messages"][0]["content"][-1]["text"]


def by_pixel(body):
    """What the planted judge says: numbers that depend on the last image it sees, and on the one before."""
    images, text = pictures_of(body)
    numbers = [int(image.getpixel((3, 3))[0]) % 11 for image in images[::-1]]
    return written(
        *(numbers if "a list such that output score = [score]" in text or len(numbers) == 2 else numbers * 2)
    )


@pytest.fixture
def server():
    with ChatServer(by_pixel) as server:
        yield server


@pytest.fixture
def make(server):
    rewards = []

    def make(prompt="viescore", **options):
        rewards.append(WordsReward("writer", prompt, server.url, **{"timeout": 30.0, "time_budget": 60.0, **options}))
        server.requests.clear()  # the check
        return rewards[-1]

    yield make
    for reward in rewards:
        reward.judge.close()


def rate(reward, sources=SOURCES, edited=EDITED, **columns):
    return asyncio.run(reward(INSTRUCTIONS[: len(edited)], edited, image=sources, **columns))


class TestPublishedPrompts:
    @pytest.mark.parametrize(("name", "kind"), PUBLISHED)
    def test_is_the_text_of_the_authors(self, name, kind):
        questions = getattr(read_words_prompt(name), kind)
        texts = [question.text.replace("{prompt}", "Add a hat.") for question in questions]
        assert tuple(hashlib.sha256(text.encode()).hexdigest() for text in texts) == PUBLISHED[name, kind]
        # The twin: a text with another ending
        assert hashlib.sha256(texts[0].rstrip().encode()).hexdigest() not in PUBLISHED[name, kind]

    def test_what_is_asked_for(self):
        editscore, viescore = map(read_words_prompt, ("editscore", "viescore"))
        assert (editscore.scale, viescore.scale) == (25, 10) and editscore.needed_columns == ("image",)
        assert not editscore.image and viescore.needed_columns == ()
        assert "From scale 0 to 25" in editscore.edit[0].text and "From scale 0 to 10" in viescore.edit[0].text
        for prompt in (editscore, viescore):
            assert [(question.images, len(question.scores)) for question in prompt.edit] == [(2, 2), (1, 2)]
        assert [(question.images, len(question.scores)) for question in viescore.image] == [(1, 1), (1, 2)]
        # EditScore's judges from Qwen2.5-VL saw "<img1>: " before an image, those from Qwen3-VL did not
        assert editscore.labels == ["<img1>: ", "<img2>: "] and viescore.labels is None
        assert read_words_prompt("editscore_qwen3") == editscore._replace(labels=None)

    @pytest.mark.parametrize("name", ["editscore", "viescore"])
    def test_the_source_is_named(self, name):
        text = read_template(f"words_{name}.yaml")
        assert re.search(r"# https://github.com/\S+/blob/[0-9a-f]{40}/\S+vie_prompts.py", text)


class TestParser:
    @pytest.mark.parametrize(
        ("text", "count", "scores"),
        [
            (written(20, 25), 2, (20, 25)),
            ('```json\n{"reasoning": "A hat.", "score": [20, 24.5]}\n```', 2, (20, 24.5)),
            ('The hat is red,\nbut too large.\n{"score": [3, 4], "reasoning": "x"}', 2, (3, 4)),
            ('{"score": [7]}', 1, (7,)),
            ('{"score": 7}', 1, (7,)),
            ('{"score": 7}', 2, None),
            ('{"score": [7, 8]}', 1, None),
            ('{"score": true}', 1, None),
            ('{"score": null}', 1, None),
            (written(26, 3), 2, None),
            (written(-1, 3), 2, None),
            ('{"score": [NaN, 3]}', 2, None),
            ('{"score": ["20", "21"]}', 2, None),
            (written(20, 21, 22), 2, None),
            ("I would give it 20 and 21.", 2, None),
            ("[20, 21]", 2, None),
            ("", 2, None),
            ("I'm sorry, but I can't assist with that request.", 2, None),
            (written(20, 25)[:-2], 2, None),
            (written(20, 25) + written(1, 2), 2, None),
        ],
    )
    def test_answers(self, text, count, scores):
        assert read_scores(text, count, 25) == scores

    def test_is_that_of_gedit_bench(self, monkeypatch):
        from paco_trl.image_benchmarks import gedit_protocols
        from paco_trl.rewards import judge

        assert gedit_protocols.read_scores is judge.read_scores is read_scores
        assert read_answer(written(9, 7)) == (9, 7) and read_answer(written(11, 7)) is None  # from 0 to 10


class TestScore:
    def test_is_the_published_formula_of_edits(self, server, make):
        reward = make("viescore")
        expected = []
        for source, edited in zip(SOURCES, EDITED, strict=True):
            first, second = (int(image.getpixel((3, 3))[0]) % 11 for image in (edited, source))
            expected.append(math.sqrt(min(first, second) * first) / 10)
        logged = {}
        assert rate(reward, log_metric=logged.__setitem__) == close(expected) and np.std(expected) > 0.05
        assert logged["words_viescore/unanswered"] == 0 and reward.__name__ == "words_viescore"
        # Twins: sources and edits the other way round
        assert rate(reward, EDITED, SOURCES) != close(expected, 1e-3)

    def test_an_image_alone(self, server, make):
        reward = make("viescore")
        numbers = [int(image.getpixel((3, 3))[0]) % 11 for image in EDITED]
        assert asyncio.run(reward(INSTRUCTIONS, EDITED)) == close([number / 10 for number in numbers])
        sent = [pictures_of(body) for body in server.requests]
        assert all(len(images) == 1 for images, _ in sent) and len(sent) == 8
        prompts = [text.rpartition("Text Prompt: ")[2].strip() for _, text in sent if "Text Prompt" in text]
        assert sorted(prompts) == sorted(INSTRUCTIONS)  # and braces stay

    def test_editscore(self, server, make):
        reward = make("editscore")
        server.say = lambda body: written(15, 22) if is_quality(body) else written(20, 5)
        assert rate(reward) == close([math.sqrt(5 * 15) / 25] * 4)
        body = next(body for body in server.requests if not is_quality(body))
        texts = [part["text"] for part in body["messages"][0]["content"] if part["type"] == "text"]
        assert texts[:2] == ["<img1>: ", "<img2>: "] and "<img" not in texts[2]
        assert body["max_tokens"] == 1024 and body["temperature"] == 0 and not {"seed", "logprobs"} & {*body}
        server.requests.clear()
        rate(make("editscore_qwen3"))
        assert all("<img" not in pictures_of(body)[1] for body in server.requests) and len(server.requests) == 8

    def test_several_sources_are_averaged(self, server, make):
        reward = make("viescore")
        both = [[SOURCES[0], SOURCES[1]]]
        single = [rate(reward, [source], EDITED[:1])[0] for source in both[0]]
        averaged = asyncio.run(reward(INSTRUCTIONS[:1], EDITED[:1], images=both))
        assert averaged == close([sum(single) / 2]) and single[0] != single[1]
        # The mean over one of them would not be comparable
        planted, color = server.say, SOURCES[1].getpixel((3, 3))
        server.say = lambda body: "No." if pictures_of(body)[0][0].getpixel((3, 3)) == color else planted(body)
        assert asyncio.run(reward(INSTRUCTIONS[:1], EDITED[:1], images=both)) == [None]

    def test_no_source_for_an_edit(self, make):
        with pytest.raises(ValueError, match="`image`"):
            asyncio.run(make("editscore")(INSTRUCTIONS, EDITED))


BAD = {
    "out of range": written(11, 5),
    "garbage": "{{[",
    "empty": "",
    "null": answer(None),
    "a refusal": "I'm sorry, but I can't assist with that request.",
    "truncated": answer('{"reasoning": "The hat is', "length"),
    "cut, though the JSON is whole": answer(written(5, 5), "length"),
    "one number for two": written(5),
    "refused by the server": (400, "too many images"),
}


class TestUnreadable:
    @pytest.mark.parametrize("bad", BAD)
    def test_is_none_and_never_a_number(self, server, make, bad):
        reward = make("viescore")
        server.say = lambda body: BAD[bad] if "Add a hat." in pictures_of(body)[1] else written(8, 8)
        logged = {}
        assert rate(reward, log_metric=logged.__setitem__) == [None, close(0.8), close(0.8), None]
        reason = "refused" if bad == "refused by the server" else "unreadable"
        assert logged[f"words_viescore/unanswered/{reason}"] == logged["words_viescore/unanswered"] == 2 / 8
        assert reason in reward.missing_score_reason
        server.say = lambda body: written(8, 8)  # the twin
        assert rate(reward) == close([0.8] * 4)

    def test_an_answer_is_quoted(self, server, make, caplog):
        reward = make("viescore")
        server.say = lambda body: "I would say nine."
        assert rate(reward) == [None] * 4
        assert "I would say nine." in caplog.text and "I would say nine." in reward.missing_score_reason

    def test_several_answers(self, server, make):
        reward, scores = make("viescore", num_answers=3), {0: 4, 1: 9, 2: 8}
        server.say = lambda body: written(9, scores[body["seed"]])
        expected = sum(scores.values()) / 3 / 10
        assert rate(reward) == close([expected] * 4)
        assert len(server.requests) == 4 * 2 * 3 and {body["temperature"] for body in server.requests} == {0.7}
        # The average is of each answer's score: sqrt(9 * 4) is not that of averages
        server.say = lambda body: written(9, 9) if is_quality(body) else written(9, scores[body["seed"]])
        averaged = sum(math.sqrt(9 * score) for score in scores.values()) / 3 / 10
        assert rate(reward) == close([averaged] * 4) and averaged != close(math.sqrt(9 * 7) / 10, 1e-3)

    def test_one_of_several_is_left_out(self, server, make):
        reward = make("viescore", num_answers=3)
        # The first answers about quality, and the second about the edit
        server.say = lambda body: (
            "No." if body["seed"] == (0 if is_quality(body) else 1) else written(9, body["seed"] + 2)
        )
        logged = {}
        assert rate(reward, log_metric=logged.__setitem__) == close([0.4] * 4)  # of the third alone
        assert logged["words_viescore/unanswered"] == 1 / 3
        server.say = lambda body: "No." if body["seed"] < 2 or is_quality(body) else written(9, 4)
        assert rate(reward) == [None] * 4  # no round has both


class TestDown:
    def test_stops_with_the_address(self, server, make):
        reward = make("viescore", timeout=1.0, time_budget=1.0)
        server.stop()
        with pytest.raises(JudgeUnavailableError, match=re.escape(server.url)):
            rate(reward)

    def test_before_anything_else(self, server):
        server.stop()
        with pytest.raises(JudgeUnavailableError, match=re.escape(server.url)):
            WordsReward("writer", "viescore", server.url, timeout=1.0)

    def test_a_judge_that_does_not_write_scores(self, server):
        server.say = lambda body: "Yes"
        with pytest.raises(JudgeUnavailableError, match="'Yes'.*2 number.* 0 to 25"):
            WordsReward("writer", "editscore", server.url)
        with pytest.raises(JudgeUnavailableError, match="no model 'other'"):
            WordsReward("other", "editscore", server.url)

    def test_a_question_that_takes_too_long_is_none_if_the_server_is_up(self, server, make):
        reward = make("viescore")
        with LoopClock() as clock:
            server.say = lambda body: clock.after(1000.0 * ("fox" in pictures_of(body)[1])) or written(8, 8)
            scores = asyncio.run(reward(["A fox."], EDITED[:1]))
        assert scores == [None] and "no answer within 60 seconds" in reward.missing_score_reason
        assert "Do the two images" in pictures_of(server.requests[-1])[1] and server.requests[-1]["max_tokens"] == 1


OWN = {
    "scale": 5,
    "edit": [{"images": 2, "scores": ["likeness"], "text": 'Alike, but for {prompt}? Write {"score": [number]}.'}],
}


class TestOwnPrompt:
    def test_one_question(self, server, make, tmp_path):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(OWN))
        server.say = lambda body: "Very much.\n" + written(4)
        reward = make(tmp_path / "mine.yaml")
        assert rate(reward) == close([0.8] * 4) and reward.__name__ == "words_mine" and len(server.requests) == 4
        assert 'but for Make it {prompt} and "blue".? Write {"score"' in "".join(
            pictures_of(body)[1] for body in server.requests
        )

    @pytest.mark.parametrize(
        "change",
        [
            {"scale": 0},
            {"scale": "five"},
            {"scale": None},
            {"edit": []},
            {"edit": [{**OWN["edit"][0], "images": 3}]},
            {"edit": [{**OWN["edit"][0], "text": "Alike?"}]},
            {"edit": [{**OWN["edit"][0], "scores": []}]},
            {"edit": [{"text": "{prompt}"}]},
            {"image": [{**OWN["edit"][0], "text": "Good?"}]},
            [],
        ],
    )
    def test_incomplete(self, tmp_path, change):
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(OWN))
        assert read_words_prompt(path).edit[0].images == 2  # the twin
        path.write_text(yaml.safe_dump({**OWN, **change} if change else change))
        with pytest.raises(ValueError, match="mine.yaml.*words_viescore.yaml"):
            read_words_prompt(path)

    def test_unknown(self):
        with pytest.raises(ValueError, match="nobody.*editscore, editscore_qwen3, viescore"):
            read_words_prompt("nobody")

    def test_what_a_score_depends_on(self, server, make):
        rewards = [make("viescore"), make("viescore"), make("editscore"), make("viescore", num_answers=2)]
        same, again, *others = map(describe_reward, rewards)
        assert same == again and same not in others


def test_num_answers_and_address():
    with pytest.raises(ValueError, match="`num_answers` is 0"):
        WordsReward("writer", "viescore", "http://127.0.0.1:9/v1", num_answers=0)
    with pytest.raises(ValueError, match="on a server"):
        WordsReward("writer", "viescore")


class TestCommandLine:
    def test_shares_a_judge(self, server):
        names = ["words:viescore", "redness", "words:editscore"]
        options = {"judge_model": "writer", "judge_url": server.url, "judge_answers": 2}
        arguments = ScriptArguments(rewards=names, **options)
        first, _, second = load_rewards(arguments)
        assert first.judge is second.judge and (first.num_answers, second.prompt.scale) == (2, 25)
        assert [*find_judges(arguments)] == [("writer", server.url)]
        (rubric,) = [RubricReward(first.judge, "instruction")]
        assert rubric.judge is first.judge
        first.judge.close()

    @pytest.mark.parametrize(
        ("words", "key"),
        [
            ("--rewards words:editscore --edits", "--judge_url"),
            ("--rewards words:nobody --edits --judge_url http://127.0.0.1:9/v1", "editscore_qwen3"),
            ("--rewards word:editscore", "words:editscore"),
            ("--rewards redness --judge_answers 4", "judge_answers"),
        ],
    )
    def test_what_is_refused_first(self, tmp_path, words, key):
        (tmp_path / "prompts.txt").write_text("A fox.\nA hare.\n")
        command = f"--dataset_name {tmp_path / 'prompts.txt'} --output_dir {tmp_path / 'out'} {words}"
        with pytest.raises((OptionError, SystemExit, ValueError), match=key):
            grpo.main(command.split())

    def test_prompts_without_sources(self, server):
        dataset = typed_dataset([("A fox.",)], prompt="string")
        arguments = ScriptArguments(rewards=["words:editscore"], judge_url=server.url)
        with pytest.raises(ValueError, match="'words:editscore'.*`image`"):
            check_reward_columns(arguments, dataset)
        check_reward_columns(ScriptArguments(rewards=["words:viescore"], judge_url=server.url), dataset)


class TestEvaluateJudge:
    @pytest.fixture
    def edits(self, tmp_path):
        """Two rows of each dimension; of the last, people prefer the edit with the lower numbers."""
        rows = []
        for number, dimension in enumerate(["prompt_following", "consistency", "overall"] * 2):
            pair = [plain(10 - number % 3), plain(number % 3 + 1)][:: -1 if number == 5 else 1]
            rows.append(([f"{number}-a", f"{number}-b"], f"Add a hat {number}.", plain(9), pair, "add", dimension))
        types = {"key": ["string"], "instruction": "string", "input_image": "image", "output_images": ["image"]}
        typed_dataset(rows, **types, task_type="string", dimension="string").to_parquet(
            tmp_path / "edits" / "train.parquet"
        )
        return tmp_path / "edits"

    def arguments(self, server, edits, output, **options):
        options = {"judge_model": "writer", "judge_url": server.url, "template": "words:editscore", **options}
        options = {"benchmark": "edit_reward", "dataset_name": str(edits), "output_dir": str(output), **options}
        return evaluate_judge.JudgeArguments(**options)

    def test_dimensions(self, server, edits, tmp_path):
        evaluate_judge.evaluate(self.arguments(server, edits, tmp_path / "results"))
        (results,) = json.loads((tmp_path / "results" / "results.json").read_text())
        accuracy = {name: dimension["strict"]["mean"] for name, dimension in results["dimensions"].items()}
        assert accuracy == {"prompt_following": 1.0, "consistency": 0.0, "overall": 0.5}  # it says 9 of both
        assert results["num_keys"] == 12 and results["num_unanswered"] == 0
        assert results["settings"]["template"].startswith("editscore x 1 (")
        assert len(server.requests) == 1 + 12 * 2  # the check, and two questions about each edit
        assert "| editscore x 1 (" in (tmp_path / "results" / "results.md").read_text()
        (scores,) = (tmp_path / "results").glob("*.jsonl")
        record = json.loads(scores.read_text().splitlines()[1])
        assert {*record["scores"]} == {"prompt_following", "consistency", "naturalness", "artifacts", "overall"}
        evaluate_judge.evaluate(self.arguments(server, edits, tmp_path / "results"))
        assert len(server.requests) == 1 + 12 * 2 + 1  # resumed: only the check

    def test_unreadable_is_never_right(self, server, edits, tmp_path):
        planted = server.say
        server.say = lambda body: "No." if "hat 0" in pictures_of(body)[1] else planted(body)
        evaluate_judge.evaluate(self.arguments(server, edits, tmp_path, judge_answers=2))
        (results,) = json.loads((tmp_path / "results.json").read_text())
        assert results["num_unanswered"] == 2 and results["settings"]["template"].startswith("editscore x 2")
        assert results["dimensions"]["prompt_following"]["geq"]["mean"] == 0.5

    def test_down(self, server, edits, tmp_path):
        server.stop()
        with pytest.raises(JudgeUnavailableError, match=re.escape(server.url)):
            evaluate_judge.evaluate(self.arguments(server, edits, tmp_path))

    @pytest.mark.parametrize(
        ("words", "key"),
        [
            ("--benchmark rankings --template words:editscore --judge_url http://127.0.0.1:9/v1", "edit_reward"),
            ("--benchmark edit_reward --template words:editscore", "--judge_url"),
            ("--benchmark edit_reward --template words:nobody --judge_url http://127.0.0.1:9/v1", "viescore"),
            ("--benchmark edit_reward --template plain", "template"),
            ("--benchmark edit_reward --judge_answers 2", "judge_answers"),
        ],
    )
    def test_what_is_refused_first(self, words, key):
        with pytest.raises((OptionError, SystemExit, ValueError), match=key):
            evaluate_main(["judge", *words.split()])
