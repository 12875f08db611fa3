# SPDX-License-Identifier: Apache-2.0
"""What makes a run another run, or its baseline another: settings, model, rewards. And that a run has its directory."""

import copy
import dataclasses
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from torch import nn

from paco_trl import (
    PaCoGRPOConfig,
    PaCoGRPOTrainer,
    PaCoNFTConfig,
    PaCoNFTTrainer,
    PaCoReward,
    PaCoRewardConfig,
    PaCoRewardTrainer,
)
from paco_trl.rewards import ClipTReward, ConsistencyReward, DuplicateReward, redness_reward
from paco_trl.rewards.runner import RewardRunner
from paco_trl.rollout.prompt_rows import PromptRows
from paco_trl.tiny import build_tiny_clip, build_tiny_qwen2_5_vl
from paco_trl.trainer.config_utils import REFUSED_GRPO_FIELDS
from paco_trl.trainer.run_settings import HARMLESS, adjustable_settings, evaluation_settings, run_identity
from paco_trl.utils.fingerprint import describe_scorer
from test_paco_reward_trainer import colours
from testing_utils import SMALL_RUN


SETTINGS = {"use_cpu": True, "bf16": False, "report_to": "none"}


class TestSettings:
    def test_an_option_is_compared_unless_it_is_named_as_harmless(self, tmp_path):
        @dataclass
        class Mine(PaCoGRPOConfig):
            strength: float = 1.0
            module: nn.Module = None

        def settings(**changes):
            args = Mine(str(tmp_path), **SETTINGS, **changes)
            rewards = RewardRunner(redness_reward)
            return json.loads(json.dumps(adjustable_settings(args, rewards, rewards)))

        plain, layer = settings(), nn.Linear(2, 2)
        assert plain == settings()
        assert plain != settings(strength=2.0)
        assert plain != settings(module=layer)
        assert settings(module=layer) == settings(module=copy.deepcopy(layer))
        assert plain == settings(logging_steps=7, save_steps=3, hub_token="hf_secret", offload_embeddings=True)
        assert "hf_secret" not in str(settings(hub_token="hf_secret"))

    def test_what_is_named_as_harmless_is_a_field(self):
        fields = {field.name for field in dataclasses.fields(PaCoGRPOConfig)}
        assert not set(HARMLESS) - fields and not set(HARMLESS) & REFUSED_GRPO_FIELDS

    def test_what_is_loaded_is_identity_and_from_where_is_not(self, tmp_path, make_trainer):
        rows = make_trainer().train_rows

        def identity(**kwargs):
            args = PaCoGRPOConfig(str(tmp_path), **SETTINGS, model_init_kwargs=kwargs)
            return run_identity(args, "base", None, None, rows)

        assert identity() != identity(revision="v2") != identity(variant="fp16") != identity()
        assert identity(dtype=torch.float32) != identity(dtype=torch.bfloat16)
        assert identity() == identity(token="hf_secret", cache_dir="/elsewhere")

    @pytest.mark.parametrize("with_source", [False, True])
    def test_references_and_sources_are_identity(self, tmp_path, with_source):
        args = PaCoGRPOConfig(str(tmp_path), **SETTINGS)

        def identity(width, color="red"):
            row = {"prompt": "A.", "references": [Image.new("RGB", (width, 64))]}
            row |= {"image": Image.new("RGB", (64, 64), color)} if with_source else {}
            return run_identity(args, "base", None, None, PromptRows(Dataset.from_list([row]), args, "it"))

        assert identity(64) == identity(64) != identity(72)
        assert (identity(64) != identity(64, "blue")) is with_source

    def test_a_baseline_belongs_to_what_evaluations_see(self, tmp_path):
        def settings(**changes):
            return evaluation_settings(PaCoGRPOConfig(str(tmp_path), **SETTINGS | changes))

        assert settings() == settings(epsilon=2e-4, max_steps=7, num_inference_steps=5)
        assert settings() != settings(guidance_scale=2.0) and settings() != settings(num_inference_steps_eval=5)

    @pytest.mark.slow
    @pytest.mark.parametrize("tiling", [False, True])
    def test_a_pending_round_is_generated_again_where_rewards_would_see_something_else(
        self, make_trainer, tmp_path, caplog, tiling
    ):
        settings = {"save_strategy": "steps", "save_steps": 1}
        make_trainer(max_steps=1, **settings).train()
        resumed = make_trainer(vae_tiling=tiling, epsilon=2e-4, **settings)  # the loss alone has the latter
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
        assert ("generated with other values of vae_tiling" in caplog.text) == tiling
        assert ("in the middle of round" in caplog.text) == tiling


class Own:
    """A user's reward with a model."""

    __name__ = "own"

    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        self.head, self.api_key, self.calls = nn.Linear(2, 1), "secret", []

    def __call__(self, prompts, completions, **kwargs):
        return redness_reward(prompts, completions)


class TestDescriptions:
    def test_a_judge(self, tiny_qwen, tmp_path):
        other = build_tiny_qwen2_5_vl(tmp_path / tiny_qwen.name, seed=1)
        judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu")
        plain = describe_scorer(ConsistencyReward(judge))
        assert plain == describe_scorer(ConsistencyReward(tiny_qwen, device="cpu", batch_size=3))
        assert plain["model_name"] == tiny_qwen.name and str(tiny_qwen) not in str(plain)
        changed = [
            ConsistencyReward(other, device="cpu"),  # of the same name
            ConsistencyReward(judge, question="criteria"),
            ConsistencyReward(judge, max_pairs=2),
        ]
        template = PaCoReward.from_pretrained(tiny_qwen, device="cpu")
        template.processor.chat_template += " "
        changed.append(ConsistencyReward(template))
        found = [describe_scorer(reward) for reward in changed]
        assert plain not in found and len({json.dumps(each) for each in found}) == len(found)

    def test_other_rewards_of_the_package(self, tmp_path):
        clips = [ClipTReward(build_tiny_clip(tmp_path / f"{number}" / "clip")) for number in (0, 1)]
        assert describe_scorer(clips[0]) == describe_scorer(clips[1])
        with torch.no_grad():
            clips[1].model.visual_projection.weight.add_(1e-3)
        assert describe_scorer(clips[0])["model_name"] == describe_scorer(clips[1])["model_name"]
        assert describe_scorer(clips[0]) != describe_scorer(clips[1])
        assert describe_scorer(DuplicateReward()) != describe_scorer(DuplicateReward(0.5))
        assert describe_scorer(DuplicateReward()) == describe_scorer(DuplicateReward())

    def test_a_function_and_an_object_of_the_user(self):
        def of_kind(kind):
            if kind:

                def reward(prompts, completions, **kwargs):
                    return [1.0] * len(prompts)
            else:

                def reward(prompts, completions, **kwargs):
                    return [0.0] * len(prompts)

            return reward

        assert describe_scorer(of_kind(0)) == describe_scorer(of_kind(0)) != describe_scorer(of_kind(1))
        assert describe_scorer(Own()) == describe_scorer(Own()) != describe_scorer(Own(seed=1))
        assert describe_scorer(Own().__call__) == describe_scorer(Own())
        assert "secret" not in str(describe_scorer(Own()))
        stricter = Own()
        stricter.threshold = 0.3
        assert describe_scorer(stricter) != describe_scorer(Own())
        versions = [Own(), Own()]
        versions[1].fingerprint = "version 2"
        assert describe_scorer(versions[0]) != describe_scorer(versions[1])
        typed: dict = {}
        exec("def reward(**kwargs): ...", typed)
        assert describe_scorer(len) and describe_scorer(typed["reward"])  # without a source


class TestBaseline:
    def test_it_belongs_to_the_judge_and_to_the_model(self, make_trainer, prompts, tiny_qwen, tmp_path):
        judges = [PaCoReward.from_pretrained(tiny_qwen, device="cpu")]
        judges.append(PaCoReward.from_pretrained(build_tiny_qwen2_5_vl(tmp_path / tiny_qwen.name, seed=1)))
        trainer = make_trainer(reward_funcs=ConsistencyReward(judges[0]), eval_dataset=prompts.select(range(2)))
        evaluator, rows = trainer.evaluator, trainer.evaluator.rows_of(trainer.eval_dataset)
        keys = [evaluator.baseline_key(rows)]
        evaluator.rewards = RewardRunner(ConsistencyReward(judges[0]))
        assert evaluator.baseline_key(rows) == keys[0]
        for judge, options in ((judges[1], {}), (judges[0], {"question": "criteria"})):
            evaluator.rewards = RewardRunner(ConsistencyReward(judge, **options))
            assert evaluator.rewards.names == ["consistency"]
            keys.append(evaluator.baseline_key(rows))
        for name, value in (("model_init_kwargs", {"revision": "v2"}), ("quantization", "int8"), ("tf32", True)):
            setattr(trainer.args, name, value)
            keys.append(evaluator.baseline_key(rows))
        assert len(set(keys)) == len(keys) == 6
        harmless = (("max_steps", 7), ("save_steps", 3), ("offload_embeddings", True), ("branch_size", 2))
        for name, value in harmless:
            setattr(trainer.args, name, value)
            assert evaluator.baseline_key(rows) == keys[-1]


PAIRS = colours(4, 0)


def state_of(config) -> dict:
    return copy.deepcopy({name: value for name, value in vars(config).items() if "distributed" not in name})


class TestConfig:
    """A config that was passed in is not written to, and serves several trainers."""

    @pytest.mark.parametrize("config_class", [PaCoGRPOConfig, PaCoNFTConfig])
    def test_image_trainers(self, prompts, tiny_flux, tmp_path, config_class):
        arguments = {"low_cpu_mem_usage": True}
        own = {"num_noise_levels": 1} if config_class is PaCoNFTConfig else {}
        settings = {"output_dir": str(tmp_path / "shared"), "max_steps": 1, "model_init_kwargs": arguments, **own}
        args = config_class(**SMALL_RUN | settings)
        before = state_of(args)
        peft_config = LoraConfig(r=4)
        adapter = copy.deepcopy(vars(peft_config))
        trainer_class = PaCoNFTTrainer if own else PaCoGRPOTrainer
        trainer = trainer_class(str(tiny_flux), redness_reward, args, prompts, peft_config=peft_config)
        trainer.train()
        trainer.args.model_init_kwargs["dtype"] = "float32"  # as transformers' `to_dict` does
        assert trainer.args.ddp_find_unused_parameters is False
        assert state_of(args) == before and args.ddp_find_unused_parameters is None
        assert arguments == {"low_cpu_mem_usage": True} and vars(peft_config) == adapter

    def test_judge_trainer(self, tiny_qwen, tmp_path):
        args = PaCoRewardConfig(
            str(tmp_path / "judge"), **SETTINGS, max_steps=1, per_device_train_batch_size=2, save_strategy="no",
            disable_tqdm=True, max_pixels=None, learning_rate=1e-3,
        )  # fmt: skip
        before = state_of(args)
        trainer = PaCoRewardTrainer(str(tiny_qwen), args, PAIRS)
        trainer.train()
        assert trainer.args.model_init_kwargs and state_of(args) == before


class TestBestMetric:
    def test_a_misspelt_one_is_refused_before_the_model_is_loaded(self, make_trainer, prompts):
        settings = {"model": "/nowhere/at/all", "eval_dataset": prompts.select(range(2)), "eval_strategy": "steps"}
        settings |= {"eval_steps": 1}
        with pytest.raises(ValueError, match="`metric_for_best_model`.*'rewards/redness_reward/mean'"):
            make_trainer(metric_for_best_model="rewards/rednes_reward/mean", **settings)
        for metric in ("reward", "eval_rewards/redness_reward/gain", "redness_reward/logged", "grid_artifact"):
            with pytest.raises(OSError):  # it goes on to load the model
                make_trainer(metric_for_best_model=metric, **settings)

    def test_of_a_judge(self, tmp_path):
        def make(metric, eval_dataset):
            settings = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": metric}
            args = PaCoRewardConfig(str(tmp_path / "judge"), **SETTINGS, **settings)
            return PaCoRewardTrainer("/nowhere/at/all", args, PAIRS, eval_dataset)

        with pytest.raises(ValueError, match="'auroc'"):
            make("eval_aurco", PAIRS)
        with pytest.raises(ValueError, match="'easy_auroc'"):
            make("auroc", {"easy": PAIRS})
        for metric, dataset in (("eval_auroc", PAIRS), ("easy_auroc", {"easy": PAIRS}), ("loss", PAIRS)):
            with pytest.raises(OSError):
                make(metric, dataset)


HOLD = "import sys; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); print(flush=True); input()"


class TestOneRunInADirectory:
    @pytest.fixture
    def running(self, tmp_path):
        """Another process that holds the lock of the output directory."""
        (tmp_path / "out").mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path / "out" / ".lock")],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
        )
        process.stdout.readline()
        yield process
        process.kill()
        process.wait()

    def test_the_second_is_refused_until_the_first_is_killed(self, running, make_trainer, tmp_path):
        with pytest.raises(ValueError, match="Another run"):
            make_trainer(model="/nowhere/at/all")
        trainer = make_trainer(output_dir=str(tmp_path / "other"), max_steps=1)
        trainer.args.output_dir = str(tmp_path / "out")
        with pytest.raises(ValueError, match="Another run"):
            trainer.train()
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        trainer.train()
        trainer.train()  # and again in the same process

    def test_of_a_judge(self, running, tmp_path):
        with pytest.raises(ValueError, match="Another run"):
            PaCoRewardTrainer("/nowhere/at/all", PaCoRewardConfig(str(tmp_path / "out"), **SETTINGS), PAIRS)
        with pytest.raises(OSError):
            PaCoRewardTrainer("/nowhere/at/all", PaCoRewardConfig(str(tmp_path / "other"), **SETTINGS), PAIRS)

    def test_a_place_without_locks_is_not_refused(self, make_trainer, tmp_path):
        (tmp_path / "out" / ".lock").mkdir(parents=True)  # as where it cannot be written
        make_trainer(max_steps=1).train()
