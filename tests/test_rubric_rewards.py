# SPDX-License-Identifier: Apache-2.0
"""Ratings by a rubric: any vision-language model, in the process and served, by the published rule."""

import asyncio
import copy
import json
import math
import shutil
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, GPT2Tokenizer

from judge_server import JudgeServer, completion, pictures_of
from other_judges import build_other_judge, first_logits
from paco_trl import PaCoReward
from paco_trl.commands import grpo
from paco_trl.commands.script_arguments import (
    ScriptArguments,
    check_reward_names,
    find_judges,
    load_eval_rewards,
    load_rewards,
)
from paco_trl.rewards import JudgeUnavailableError, RubricReward
from paco_trl.rewards.fingerprint import describe_reward
from paco_trl.rewards.judge import Answer, _read_rating, expected_rating
from paco_trl.rewards.judge_rewards import read_rubric
from paco_trl.tiny.qwen2_5_vl import SPECIAL_TOKENS, train_tokenizer
from testing_utils import close, noise


SOURCES = [noise(seed, (56 + 28 * (seed % 2), 56)) for seed in range(4)]
EDITED = [noise(seed) for seed in range(10, 14)]
INSTRUCTIONS = ["Add a hat.", "Make it blue {scale}.", "Remove the fox from the picture.", "Add a hat."]
OPTIONS = {"device": "cpu", "dtype": "float32"}


def plant_digits(model, processor):
    """Makes a random model answer with a digit: along the mean of what the head sees, to which each row is as long."""
    judge = PaCoReward(model, processor)
    seen = []
    hook = model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0][:, -1]))
    judge.score(list(zip(SOURCES, EDITED, strict=True)), INSTRUCTIONS)
    hook.remove()
    mean = torch.cat(seen).mean(0)
    vocabulary = processor.tokenizer.get_vocab()
    digits = [space + str(k) for k in range(10) for space in ("", "Ġ")]
    digits = [digit for digit in digits if digit in vocabulary]
    ids = [vocabulary[digit] for digit in digits]
    logits = torch.tensor([15.0 if digit[-1] < "6" else 10.0 for digit in digits])
    with torch.no_grad():
        rows = 2 * model.lm_head.weight[ids]  # ratings of different images differ more
        model.lm_head.weight[ids] = rows + (logits - rows @ mean)[:, None] * mean / mean.dot(mean)
    return model, processor


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_qwen):
    """Folders of judges that answer with digits."""
    root = tmp_path_factory.mktemp("judges")
    processor = AutoProcessor.from_pretrained(tiny_qwen)
    judges = {"qwen2.5": (AutoModelForImageTextToText.from_pretrained(tiny_qwen), processor)}
    judges |= {name: build_other_judge(name, processor) for name in ("qwen3", "llava")}
    # One whose digits are also tokens together with a space before them
    texts = ["Yes", "No", *(f" {k} of {k}{k}" for k in range(10))] * 30
    processor = copy.copy(processor)
    processor.tokenizer = train_tokenizer(GPT2Tokenizer, texts, SPECIAL_TOKENS, 2048)
    processor.tokenizer.pad_token = "<|endoftext|>"
    judges["llava, spaces"] = build_other_judge("llava", processor)
    for name, (model, processor) in judges.items():
        for part in plant_digits(model, processor):
            part.save_pretrained(root / name)
    return {name: root / name for name in judges}


def published_rating(logits, tokenizer, max_score=5):
    """PKU-YuanGroup/Edit-R1, reward_server/reward_server.py: the softmax over the logits of the tokens 0 to 5."""
    probabilities = torch.softmax(logits[[tokenizer.convert_tokens_to_ids(str(k)) for k in range(max_score + 1)]], 0)
    return sum(k * p for k, p in enumerate(probabilities.tolist())) / max_score


def rate_edits(reward, sources=SOURCES, edited=EDITED, **columns):
    result = reward(INSTRUCTIONS, edited, image=sources, **columns)
    return asyncio.run(result) if asyncio.iscoroutine(result) else result


class TestPublishedRule:
    @pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llava"])
    def test_is_the_reward(self, folders, name):
        reward = RubricReward(folders[name], "instruction", batch_size=3, **OPTIONS)
        judge, rubric = reward.judge, read_rubric("instruction").replace("{scale}", "5")
        expected = [
            published_rating(
                first_logits(judge.model, judge.processor, pair, rubric.replace("{prompt}", text)),
                judge.processor.tokenizer,
            )
            for *pair, text in zip(SOURCES, EDITED, INSTRUCTIONS, strict=True)
        ]
        assert np.std(expected) > 0.01 and all(0 < rating < 1 for rating in expected)
        assert rate_edits(reward) == close(expected)
        # Twins: the order of the images, the rubric, the scale
        assert rate_edits(reward, EDITED, SOURCES) != close(expected, 1e-3)
        for other in (RubricReward(judge, "unchanged"), RubricReward(judge, "instruction", scale=9)):
            assert rate_edits(other) != close(expected, 1e-3)

    def test_tokens_with_a_space_count(self, folders):
        reward = RubricReward(folders["llava, spaces"], "instruction", **OPTIONS)
        model, processor = reward.judge.model, reward.judge.processor
        vocabulary, expected, without = processor.tokenizer.get_vocab(), [], []
        for *pair, text in zip(SOURCES, EDITED, INSTRUCTIONS, strict=True):
            question = reward.rubric.replace("{prompt}", text)
            logits = first_logits(model, processor, pair, question)
            odds = [sum(math.exp(logits[vocabulary[space + str(k)]]) for space in ("", "Ġ")) for k in range(6)]
            expected.append(sum(k * value for k, value in enumerate(odds)) / sum(odds) / 5)
            without.append(published_rating(logits, processor.tokenizer))
        assert rate_edits(reward) == close(expected) and expected != close(without, 1e-3)

    def test_a_bf16_model_is_read_in_float32(self, folders):
        reward = RubricReward(folders["qwen2.5"], "instruction", device="cpu", dtype="bfloat16")
        pairs = [(noise(index), noise(index + 1)) for index in range(24)]
        head, states = reward.judge.model.lm_head, []
        hook = head.register_forward_hook(lambda module, args, output: states.append((args[0][:, -1], output[:, -1])))
        ratings = reward.judge.rate(pairs, "Alike?")
        hook.remove()
        hidden, coarse = (torch.cat([state[index] for state in states]) for index in (0, 1))
        logits = hidden.float() @ head.weight.float().T
        tokenizer = reward.judge.processor.tokenizer
        expected, rough = ([published_rating(row, tokenizer) for row in each] for each in (logits, coarse.float()))
        # The order of the questions is that of the pairs: no two share an image in front
        assert sorted(ratings) == close(sorted(expected)) and sorted(rough) != close(sorted(expected), 1e-4)

    def test_a_model_that_changes_its_logits_is_read_from_them(self, folders):
        judge = PaCoReward.from_pretrained(folders["qwen2.5"], **OPTIONS)
        plain = judge.rate([(SOURCES[0], EDITED[0])], "Alike?")
        judge.model.config.get_text_config().logit_scale = 0.9
        judge.model.lm_head.register_forward_hook(lambda module, args, output: output * 0.9)
        logits = first_logits(judge.model, judge.processor, (SOURCES[0], EDITED[0]), "Alike?")
        scaled = [published_rating(logits, judge.processor.tokenizer)]
        assert judge.rate([(SOURCES[0], EDITED[0])], "Alike?") == close(scaled) and scaled != close(plain, 1e-3)


class TestExpectedRating:
    def test_closed_forms(self):
        logs = {"0": 0.2, "3": 0.1, " 3": 0.2, "Ġ5": 0.1, "▁5": 0.1, "6": 0.2, "35": 0.1}
        entries = [(token, math.log(value)) for token, value in logs.items()]
        assert expected_rating(entries, 5) == pytest.approx((3 * 0.3 + 5 * 0.2) / 0.7 / 5, rel=1e-12)
        assert expected_rating(entries, 6) == pytest.approx((3 * 0.3 + 5 * 0.2 + 6 * 0.2) / 0.9 / 6, rel=1e-12)
        # A server may list tokens of the same text, and round 0 to a little more
        assert expected_rating([("1", math.log(0.3)), ("1", math.log(0.3)), ("0", math.log(0.3))], 1) == close(2 / 3)
        assert expected_rating([("4", 1e-4), ("0", -9999.0)], 5) == close(0.8)

    @pytest.mark.parametrize("entries", [[], [("4", -0.7)] * 3, [("4", math.nan)], [("4", math.log(0.499))]])
    def test_there_is_none(self, entries):
        assert expected_rating(entries, 5) is None
        assert expected_rating([("4", math.log(0.501))], 5) == close(0.8)


class TestServed:
    @pytest.fixture
    def inner(self, folders):
        return PaCoReward.from_pretrained(folders["qwen2.5"], **OPTIONS)

    @pytest.fixture
    def server(self, inner):
        lock = threading.Lock()

        def logprobs(*images_and_question):
            *images, question = images_and_question
            with lock:
                return inner._query([tuple(images)], [question], inner._top_tokens)[0]

        with JudgeServer(logprobs) as server:
            yield server

    def test_is_the_rating_in_the_process(self, server, inner):
        served = RubricReward("judge", "unchanged", server.url)
        assert "0 to 5" in pictures_of(server.requests[0])[1] and len(server.requests) == 1  # the check
        ratings = rate_edits(served)
        assert ratings == close(rate_edits(RubricReward(inner, "unchanged")), 1e-4) and np.std(ratings) > 1e-3
        sent = [pictures_of(body) for body in server.requests[1:]]
        assert [len(images) for images, _ in sent] == [2] * 4
        assert all(read_rubric("unchanged")[:40] in question for _, question in sent)
        served.judge.close()

    def test_a_set_is_seen_as_its_grid(self, server, inner):
        reward = RubricReward("judge", "consistency", server.url)
        panels = [[EDITED[0], EDITED[1]]] * 2
        ratings = asyncio.run(reward(["a fox", "a hare"], EDITED[:2], panel_images=panels, theme=["", ""]))
        bodies = sorted((pictures_of(body) for body in server.requests[1:]), key=lambda sent: "hare" in sent[1])
        assert [[np.array(image).tolist() for image in images] for images, _ in bodies] == [
            [np.array(image).tolist()] for image in EDITED[:2]
        ]
        assert ratings == close(RubricReward(inner, "consistency")(["a fox", "a hare"], EDITED[:2]), 1e-4)
        assert abs(ratings[0] - ratings[1]) > 1e-3
        reward.judge.close()

    @pytest.mark.parametrize("fault", ["no logprobs", "neither", "400"])
    def test_a_server_that_cannot_rate(self, server, fault):
        server.fault = lambda number: fault
        with pytest.raises(JudgeUnavailableError, match="with a digit, without thinking"):
            RubricReward("judge", "instruction", server.url)

    @pytest.mark.parametrize(("last", "rating"), [(-12.0, 0.8), (-4.0, None), (math.nan, None)])
    def test_digits_that_are_not_listed(self, last, rating):
        class Part(dict):
            __getattr__ = dict.__getitem__

        def read(logprobs):
            return _read_rating(json.loads(json.dumps(completion(logprobs)), object_hook=Part), 5)

        assert read({"4": -1e-5, "Maybe": last}) == Answer(rating, None if rating else "undecided")
        full = {str(k): -12.0 for k in range(6)} | {"4": -1e-4, "Maybe": last}
        assert read(full).score == pytest.approx(0.8, abs=1e-4)  # nothing is missing


def test_a_judge_that_does_not_answer_with_a_digit(tiny_qwen):
    logged = {}
    reward = RubricReward(tiny_qwen, "instruction", **OPTIONS)
    assert rate_edits(reward, log_metric=logged.__setitem__) == [None] * 4
    assert logged["rubric_instruction/unanswered/undecided"] == 1


class TestBadInput:
    def test_scale(self):
        for scale in (0, 10):
            with pytest.raises(ValueError, match="`scale`"):
                RubricReward("nobody/judge", "instruction", scale=scale)

    @pytest.mark.parametrize(
        ("text", "key"), [(None, "unchanged"), ("Rate 0 to {scale}", "{prompt}"), ("{prompt}", "{scale}")]
    )
    def test_rubric(self, tmp_path, text, key):
        if text is not None:
            (tmp_path / "own.txt").write_text(text)
        with pytest.raises(ValueError, match=key):
            RubricReward("nobody/judge", tmp_path / "own.txt")

    def test_no_chat_template(self, folders, tmp_path):
        shutil.copytree(folders["llava"], tmp_path / "judge")
        (tmp_path / "judge" / "chat_template.jinja").unlink()
        with pytest.raises(ValueError, match="chat template"):
            RubricReward(tmp_path / "judge", "instruction")

    def test_a_tokenizer_without_a_digit(self, tiny_qwen):
        judge = PaCoReward.from_pretrained(tiny_qwen, **OPTIONS)
        vocabulary = judge.processor.tokenizer.get_vocab()
        del vocabulary["4"]
        judge.processor.tokenizer.get_vocab = lambda: vocabulary
        assert judge.rate([(SOURCES[0], EDITED[0])], "Alike?", scale=3) == [None]
        with pytest.raises(ValueError, match="'4'"):
            judge.rate([(SOURCES[0], EDITED[0])], "Alike?")

    def test_an_edit_without_a_source(self, tiny_qwen):
        reward = RubricReward(PaCoReward.from_pretrained(tiny_qwen, **OPTIONS), "unchanged")
        with pytest.raises(ValueError, match="`image`"):
            reward(INSTRUCTIONS, EDITED)


def test_what_a_rating_depends_on(tiny_qwen, tmp_path):
    judge = PaCoReward.from_pretrained(tiny_qwen, **OPTIONS)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.txt").write_text("{prompt} 0 to {scale}")
    first, moved = (describe_reward(RubricReward(judge, tmp_path / name / "own.txt")) for name in ("a", "b"))
    assert first == moved
    (tmp_path / "b" / "own.txt").write_text("{prompt} zero to {scale}")
    changed = [
        RubricReward(judge, tmp_path / "b" / "own.txt"),
        RubricReward(judge, tmp_path / "a" / "own.txt", scale=4),
    ]
    assert first not in map(describe_reward, changed)


class TestCommandLine:
    def test_rubrics_share_a_judge(self, folders, tmp_path):
        (tmp_path / "mine.txt").write_text("{prompt} 0 to {scale}")
        names = ["rubric:instruction", "redness", "rubric:unchanged", f"rubric:{tmp_path / 'mine.txt'}"]
        arguments = ScriptArguments(rewards=names, judge_model=str(folders["qwen2.5"]), judge_quantization="int8")
        first, _, second, third = load_rewards(arguments)
        names = [each.__name__ for each in (first, second, third)]
        assert names == ["rubric_instruction", "rubric_unchanged", "rubric_mine"]
        assert first.judge is second.judge is third.judge and "0 to 5" in third.rubric
        assert any(hasattr(weight, "__tensor_flatten__") for weight in first.judge.model.parameters())
        assert [*find_judges(arguments)] == [(str(folders["qwen2.5"]), None)]
        arguments.eval_judge_model = str(folders["llava"])
        evaluation = load_eval_rewards(arguments, [first, load_rewards, second, third])
        assert evaluation[1] is load_rewards and evaluation[0].judge is evaluation[3].judge is not first.judge
        assert evaluation[0].judge.model.config.model_type == "llava" and len(find_judges(arguments)) == 2

    def test_unknown(self):
        for name in ("rubric:", "rubric"):
            with pytest.raises(ValueError, match="unchanged"):
                check_reward_names(ScriptArguments(rewards=[name]))

    @pytest.mark.parametrize(("rubric", "key"), [("unchanged", "`image`"), ("consistency", "1 x 1")])
    def test_prompts_that_do_not_fit_are_refused_before_a_model_is_loaded(self, tmp_path, rubric, key):
        (tmp_path / "prompts.txt").write_text("A fox.\nA hare.\n")
        (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
        words = f"--dataset_name {tmp_path / 'prompts.txt'} --output_dir {tmp_path / 'out'} --use_cpu --bf16 False"
        words += f" --model_name_or_path {tmp_path} --num_prompts_per_generation 2 --rewards rubric:{rubric}"
        with pytest.raises(ValueError, match=f"'rubric:{rubric}'.*{key}"):
            grpo.main(words.split())
