# SPDX-License-Identifier: Apache-2.0
"""Rewards by their names on the command line, and the judges of training and evaluation."""

import dataclasses
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import CLIPModel

from hub_server import HubServer
from judge_server import JudgeServer
from paco_trl.commands import grpo
from paco_trl.commands.script_arguments import (
    ScriptArguments,
    check_reward_names,
    check_sizes,
    find_judges,
    get_peft_config,
    load_eval_rewards,
    load_reward,
    load_rewards,
)
from paco_trl.data import demo_prompts_path
from paco_trl.rewards import (
    ClipIReward,
    ClipTReward,
    DuplicateReward,
    JudgeUnavailableError,
    LayoutReward,
    redness_reward,
)
from paco_trl.rewards.errors import RewardError
from paco_trl.rollout.loading import check_config
from paco_trl.utils.errors import OptionError


@pytest.fixture
def server():
    with JudgeServer(lambda first, second, question: 0.0, models=["judge", "other"]) as server:
        yield server


def test_a_judge_is_no_pipeline(tiny_qwen, tiny_flux):
    with pytest.raises(OSError, match=f"'{tiny_qwen}' is no pipeline of diffusers.*`--judge_model`"):
        check_config(str(tiny_qwen), {})
    assert check_config(str(tiny_flux), {})["_class_name"] == "FluxPipeline"


def test_rewards_without_a_judge(tiny_clip):
    names = ["clip_t", "clip_i", "no_duplicates", "layout", "redness"]
    arguments = ScriptArguments(rewards=names, clip_model=str(tiny_clip))
    loaded = load_rewards(arguments)
    assert [type(reward) for reward in loaded[:4]] == [ClipTReward, ClipIReward, DuplicateReward, LayoutReward]
    assert loaded[4] is redness_reward
    assert load_eval_rewards(arguments, loaded) is None
    evaluation = load_eval_rewards(dataclasses.replace(arguments, eval_rewards=["layout", "clip_t"]), loaded)
    assert evaluation[1] is loaded[0] and evaluation[0] is loaded[3]  # loaded once
    with pytest.raises(ValueError, match="`clip_i`|`clip_t`"):
        check_reward_names(ScriptArguments(rewards=["clip"]))
    with pytest.raises(ValueError, match="'redness' twice"):
        check_reward_names(ScriptArguments(rewards=["redness", "redness"]))


def test_a_file_that_was_changed_is_read_again(tmp_path):
    """One process may call several commands, as a notebook does."""
    file = tmp_path / "mine.py"
    loaded = []
    for time, value in ((1, 0.5), (2, 0.1), (2, 0.1)):
        file.write_text(f"def f(prompts, completions, **kwargs):\n    return [{value}]\n")
        os.utime(file, (time, time))
        loaded += load_rewards(ScriptArguments(rewards=[str(file)]))
    assert [reward(["A fox."], [None]) for reward in loaded] == [[0.5], [0.1], [0.1]]
    assert loaded[1] is loaded[2]


OWN = """
instances = 0

def brightness(prompts, completions, **kwargs):
    return [0.5] * len(completions)

class Sharpness:
    def __init__(self):
        global instances
        instances += 1
    def __call__(self, prompts, completions, **kwargs):
        return [1.0] * len(completions)

made, threshold = Sharpness(), 0.5
"""


def test_own_rewards_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_own_rewards.py").write_text(OWN)
    (tmp_path / "my_broken_rewards.py").write_text("import a_package_that_is_missing")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    names = [f"my_own_rewards.{name}" for name in ("brightness", "Sharpness", "made")]
    first, second, third = load_rewards(ScriptArguments(rewards=["redness", *names]))[1:]
    module = sys.modules["my_own_rewards"]
    assert first is module.brightness and third is module.made
    assert type(second) is module.Sharpness and module.instances == 2
    for name, error, message in (
        ("my_own_rewards.sharpnes", ValueError, "Sharpness"),
        ("my_own_reward.brightness", ValueError, "my_own_reward.brightness"),
        ("my_own_rewards.py=1,5", ValueError, "py=1,5"),
        ("a_package/my_own_rewards.pyy", ValueError, "my_own_rewards.pyy"),
        ("my_own_rewards.threshold", ValueError, "0.5"),
        ("my_broken_rewards.brightness", RewardError, "'a_package_that_is_missing'"),
    ):
        with pytest.raises(error, match=message):
            load_reward(name, ScriptArguments())


def test_own_rewards_by_their_file(tmp_path, monkeypatch):
    (tmp_path / "several.py").write_text("import helper\n" + OWN)
    (tmp_path / "helper.py").write_text("")
    (tmp_path / "random.py").write_text(
        "from statistics import mean\ndef _one(): pass\ndef bright(prompts, completions, **kwargs): return [1.0]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    named, made = (load_reward(f"{tmp_path}/several.py:{name}", ScriptArguments()) for name in ("brightness", "made"))
    assert named([], [0, 0]) == [0.5, 0.5] and made([], [0]) == [1.0]
    alone = load_reward("./random.py", ScriptArguments())  # its only one
    assert alone([], []) == [1.0] and alone is load_reward("random.py:bright", ScriptArguments())
    (tmp_path / "none.py").write_text("from functools import partial\nbright = partial(max, 1)\n")
    for name, error, message in (
        ("none.py", ValueError, "none.py. has no function or class"),
        ("several.py", ValueError, "several.py:brightness`, `several.py:Sharpness`, `several.py:made"),
        ("missing.py", ValueError, "no file 'missing.py'"),
        ("random.bright", ValueError, "random.py:bright"),  # Python's own module
        ("several", ValueError, "`several.py`"),
    ):
        arguments = ScriptArguments(rewards=[name])
        with pytest.raises(error, match=message):
            check_reward_names(arguments)
            load_rewards(arguments)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (64, 128)),
        ({"lora_r": 8}, (8, 16)),
        ({"lora_alpha": 8}, (64, 8)),
        ({"lora_r": 8, "lora_alpha": 1}, (8, 1)),
    ],
    ids=str,
)
def test_the_scale_of_an_adapter(options, expected):
    adapter = get_peft_config(ScriptArguments(**options))
    assert (adapter.r, adapter.lora_alpha) == expected


@pytest.mark.parametrize(
    ("words", "expected"), [(["all-linear"], "all-linear"), (["to_q"], {"to_q"}), (["to_q", "to_k"], {"to_q", "to_k"})]
)
def test_all_linear_is_a_string_for_peft(words, expected):
    assert get_peft_config(ScriptArguments(lora_target_modules=words)).target_modules == expected


def test_an_adapter_is_continued_with_its_own_settings(tmp_path):
    LoraConfig(r=8, lora_alpha=16, target_modules=["to_q", "to_v"]).save_pretrained(tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    for options in ({}, {"lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["to_v", "to_q"]}):
        arguments = ScriptArguments(adapter=str(tmp_path), **options)
        assert get_peft_config(arguments).name == str(tmp_path)
    # 64 is the value of a new adapter
    for option, value in (("lora_r", 4), ("lora_r", 64), ("lora_alpha", 1), ("lora_target_modules", ["to_q"])):
        with pytest.raises(ValueError, match=f"--{option}"):
            get_peft_config(ScriptArguments(adapter=str(tmp_path), **{option: value}))


def test_prompts_that_a_judge_cannot_compare_are_refused_before_it_is_loaded(tiny_flux, tmp_path):
    (tmp_path / "prompts.txt").write_text("A fox.\nA hare.\n")
    words = f"--dataset_name {tmp_path / 'prompts.txt'} --output_dir {tmp_path / 'out'} --use_cpu --bf16 False"
    words += f" --model_name_or_path {tiny_flux} --num_prompts_per_generation 2 --rewards"
    words = words.split()
    with pytest.raises(ValueError, match="'ConsistencyReward'.*1 x 1"):
        grpo.main([*words, "redness", "consistency"])
    with pytest.raises(ValueError, match="`edit` is for `--edits`"):
        grpo.main([*words, "edit"])
    with pytest.raises(OSError, match="load the files"):  # a reward without a judge takes them
        grpo.main([*words, "clip_t", "--clip_model", "nobody/clip"])


class TestBeforeAnythingIsLoaded:
    """What is missing or may not be read, of all models of a run, is found before one of them is loaded."""

    EVALUATION = {"eval_split": "train", "eval_on_start": True}

    @pytest.fixture
    def train(self, monkeypatch, tmp_path, tiny_flux, tiny_clip):
        loaded = []
        monkeypatch.setattr(CLIPModel, "from_pretrained", lambda *args, **kwargs: loaded.append("reward"))
        monkeypatch.setattr(DiffusionPipeline, "from_pretrained", lambda *args, **kwargs: loaded.append("pipeline"))

        def run(error: type[Exception], key: str, **options) -> list[str]:
            """What is loaded until a run is refused, with CLIP as its first reward."""
            options = {"model_name_or_path": tiny_flux, "rewards": "clip_t consistency", **options}
            words = f"--dataset_name {demo_prompts_path()} --output_dir {tmp_path / 'out'} --clip_model {tiny_clip}"
            words += " --use_cpu --bf16 False --num_prompts_per_generation 2"
            words += "".join(f" --{name} {value}" for name, value in options.items())
            loaded.clear()
            with pytest.raises(error, match=key):
                grpo.main(words.split())
            return loaded

        return run

    def test_a_missing_judge(self, train, tiny_qwen):
        assert train(OSError, "nobody/judge", judge_model="nobody/judge") == []
        options = {"judge_model": tiny_qwen, "eval_judge_model": "nobody/other", **self.EVALUATION}
        assert train(OSError, "nobody/other", **options) == []
        # The stand-in for CLIP is none, with which a run ends
        assert train(AttributeError, "eval", judge_model=tiny_qwen) == ["reward"]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="diffusers takes it")
    def test_a_quantization_that_needs_a_gpu(self, train, tiny_qwen):
        assert train(ValueError, "`quantization` is 'nf4'.*GPU", judge_model=tiny_qwen, quantization="nf4") == []
        assert train(AttributeError, "eval", judge_model=tiny_qwen, quantization="int8") == ["reward"]

    def test_a_server_that_has_another_judge(self, train, server):
        options = {"judge_url": server.url, "judge_model": "judge"}
        assert train(JudgeUnavailableError, "'missing'", judge_url=server.url, judge_model="missing") == []
        evaluated = {"eval_judge_url": server.url, "eval_judge_model": "bad", **self.EVALUATION}
        assert train(JudgeUnavailableError, "'bad'", **options, **evaluated) == []
        assert train(AttributeError, "eval", **options) == ["reward"]

    def test_a_gated_model(self, train, tiny_flux, tiny_qwen, tmp_path):
        with HubServer({"hf_a": "tester"}) as hub, hub.connected(tmp_path / "cache", "hf_a"):
            index = (tiny_flux / "model_index.json").read_bytes()
            hub.add_repo("makers/flux", {"model_index.json": index})
            hub.add_repo("makers/judge", {"config.json": (tiny_qwen / "config.json").read_bytes()})
            options = {"model_name_or_path": "makers/flux", "judge_model": "makers/judge"}
            hub.gated = {"makers/flux"}
            assert train(PermissionError, "makers/flux is gated", **options) == []
            hub.gated = {"makers/judge"}
            assert train(OSError, "makers/judge", **options) == []
            hub.gated = set()
            assert train(AttributeError, "eval", **options) == ["reward"]


def test_served_judges_of_training_and_evaluation(server):
    with JudgeServer(lambda first, second, question: 1.0, models=["gemma"]) as second:
        arguments = ScriptArguments(
            rewards=["consistency", "redness"], judge_url=server.url, judge_model="judge", judge_max_pairs=2
        )
        loaded = load_rewards(arguments)
        assert loaded[0].judge.base_url == server.url and loaded[0].max_pairs == 2
        assert load_eval_rewards(arguments, loaded) is None

        def evaluation(**options):
            return load_eval_rewards(dataclasses.replace(arguments, **options), loaded)

        rewards = evaluation(eval_judge_url=second.url, eval_judge_model="gemma")
        assert [reward.__name__ for reward in rewards] == ["consistency", "redness_reward"]
        assert (rewards[0].judge.base_url, rewards[0].judge.model) == (second.url, "gemma")
        assert rewards[1] is loaded[1]
        # Another name at another address is looked for there, and a name alone is that of a judge in the process
        with pytest.raises(JudgeUnavailableError, match="has no model 'judge'. It has: gemma"):
            evaluation(eval_judge_url=second.url)
        with pytest.raises(ValueError, match="eval_judge_url"):
            evaluation(eval_judge_url=second.url, eval_rewards=["redness"])


def test_each_judge_is_asked_what_its_rewards_ask():
    """A judge of Yes and No need not write scores, and one that writes need not have log-probabilities."""
    of = {"judge_model": "a", "judge_url": "http://a", "eval_judge_model": "b", "eval_judge_url": "http://b"}
    arguments = ScriptArguments(rewards=["edit", "clip_t"], eval_rewards=["words:editscore"], **of)
    assert find_judges(arguments) == {("a", "http://a"): ["edit"], ("b", "http://b"): ["words:editscore"]}
    same = ScriptArguments(rewards=["edit"], eval_rewards=["words:editscore"], judge_model="a", judge_url="http://a")
    assert find_judges(same) == {("a", "http://a"): ["edit", "words:editscore"]}


@pytest.mark.parametrize("field", ["rewards", "eval_rewards"])
def test_a_reward_that_is_named_twice(field):
    """Before a model is loaded, also those of the evaluation."""
    settings = {"model_name_or_path": "nowhere", "dataset_name": "demo", "rewards": ["redness"]}
    check_reward_names(ScriptArguments(**settings | {field: ["redness", "layout"]}))
    with pytest.raises(OptionError, match=f"`--{field}` has 'layout' twice. Name it once"):
        check_reward_names(ScriptArguments(**settings | {field: ["layout", "layout"]}))


@pytest.mark.parametrize("heights", [[64, 96], [128, 128]])
def test_a_size_beside_rows_with_sizes_of_their_own(heights, caplog):
    """It would do nothing. The one that all rows have is right."""
    rows = Dataset.from_list([{"prompt": "A cat.", "height": height, "width": 64} for height in heights])
    args = SimpleNamespace(chosen={"height"}, typed={"height"})
    sizes = SimpleNamespace(height=128, width=512, resolution_scale=1.0)
    message = r"`--height` is 128, but each row .* a height of its own \(64, 96\).*`--resolution_scale` trains"
    with pytest.raises(OptionError, match=message) if 64 in heights else nullcontext():
        check_sizes(args, sizes, rows)
    check_sizes(args, sizes, rows.remove_columns("height"))
    check_sizes(SimpleNamespace(chosen=set()), sizes, rows)
    assert not caplog.text
    check_sizes(SimpleNamespace(chosen={"height"}, typed=set()), sizes, rows)  # of a copied recipe
    assert ("`--height` is 128" in caplog.text) == (64 in heights)
