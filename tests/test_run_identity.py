# SPDX-License-Identifier: Apache-2.0
"""What makes a run another run, or its baseline another: settings, model, rewards. And that a run has its directory."""

import copy
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_from_disk
from datasets import Image as DatasetImage
from diffusers import DiffusionPipeline
from peft import LoraConfig
from PIL import Image as PILImage
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
from paco_trl.commands.training import check_start
from paco_trl.rewards import ClipTReward, ConsistencyReward, DuplicateReward, redness_reward
from paco_trl.rewards.fingerprint import describe_reward
from paco_trl.rewards.weighting import Rewards
from paco_trl.rollout.families.flux import FluxFamily
from paco_trl.tiny import build_tiny_qwen2_5_vl
from paco_trl.trainer.config_utils import REFUSED_GRPO_FIELDS
from paco_trl.trainer.run_settings import HARMLESS, HARMLESS_UNTRAINED, describe_run, evaluation_settings
from paco_trl.utils.differences import differences
from paco_trl.utils.errors import OptionError
from paco_trl.utils.fingerprint import (
    describe,
    digest_model_files,
    file_digest,
    weights_fingerprint,
)
from paco_trl.utils.locks import sole_writer
from test_paco_reward_trainer import colours
from testing_utils import LORA, SMALL_RUN, noise, square_prompts
from tiny_models import build_tiny_clip


SETTINGS = {"use_cpu": True, "bf16": False, "report_to": "none"}
CONFIGS = (PaCoGRPOConfig, PaCoNFTConfig, PaCoRewardConfig)
PAIRS = colours(4, 0)


class TestSettings:
    def test_an_option_is_compared_unless_it_is_named_as_harmless(self, tmp_path):
        @dataclass
        class Mine(PaCoGRPOConfig):
            strength: float = 1.0
            module: nn.Module = None

        def settings(**changes):
            described = describe_run(Mine(str(tmp_path), **SETTINGS, **changes), PAIRS, None)
            assert described == tuple(json.loads(json.dumps(described)))
            return described

        plain, layer = settings(), nn.Linear(2, 2)
        assert plain == settings()
        assert plain != settings(strength=2.0)
        assert plain != settings(module=layer)
        assert settings(module=layer) == settings(module=copy.deepcopy(layer))
        assert plain == settings(logging_steps=7, save_steps=3, hub_token="hf_secret", offload_embeddings=True)
        assert "hf_secret" not in str(settings(hub_token="hf_secret"))

    def test_what_is_named_as_harmless_is_a_field(self):
        fields = {field.name for config in CONFIGS for field in dataclasses.fields(config)}
        assert not {*HARMLESS, *HARMLESS_UNTRAINED} - fields and not {*HARMLESS} & REFUSED_GRPO_FIELDS

    def test_what_is_loaded_is_identity_and_from_where_is_not(self, tmp_path):
        def identity(**kwargs):
            args = PaCoGRPOConfig(str(tmp_path), **SETTINGS, model_init_kwargs=kwargs)
            return describe_run(args, PAIRS, None)[0]

        assert identity() != identity(revision="v2") != identity(variant="fp16") != identity()
        assert identity(dtype=torch.float32) != identity(dtype=torch.bfloat16)
        assert identity() == identity(token="hf_secret", cache_dir="/elsewhere")

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
        resumed = make_trainer(
            vae_tiling=tiling, num_generations_eval=2, **settings
        )  # evaluations alone have the latter
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
        assert ("generated with other values of vae_tiling" in caplog.text) == tiling
        assert ("in the middle of round" in caplog.text) == tiling


# ---- What a checkpoint shares with the run that resumes it ----


def dataset_with(prompts, **columns):
    """Prompts with columns for rewards, two of them of nested values, and a reference."""
    rows = [row | {"note": "a", "criteria": [{"name": "style", "texts": ["same"]}]} for row in prompts]
    return Dataset.from_list([row | columns for row in rows])


def reward_above(threshold):
    def sensitive_reward(prompts, completions, **kwargs):
        return [float(value > threshold) for value in redness_reward(prompts, completions)]

    return sensitive_reward


def own_family(version: int):
    """A family of the user's own, that is edited."""

    class Flux(FluxFamily):
        if version == 0:

            def encode_prompt(self, *args, **kwargs):
                return super().encode_prompt(*args, **kwargs)
        else:

            def encode_prompt(self, *args, **kwargs):
                return {name: -tensor for name, tensor in super().encode_prompt(*args, **kwargs).items()}

    return Flux()


@dataclass
class Scale:
    """Settings of a reward of the user's."""

    value: float


def with_default(value):
    def reward(prompts, completions, scale=value, **kwargs):
        return [1.0] * len(prompts)

    return reward


ERROR, WARNING, SILENT = "cannot be resumed", "is resumed with other settings", ""
COLUMNS = {
    "note": "b", "criteria": [{"name": "style", "texts": ["other"]}], "theme": "Another theme.",
    "panels": ["1", "2", "3", "4"], "mine": 7, "picture": PILImage.new("RGB", (8, 8), "blue"),
}  # fmt: skip
CHANGES = {
    "nothing": ({}, SILENT, ""),
    "more steps": ({"max_steps": 9}, SILENT, ""),
    "saving and logging": ({"save_steps": 3, "logging_steps": 7, "run_name": "x", "save_total_limit": 2}, SILENT, ""),
    "placement": ({"offload_embeddings": True, "gradient_checkpointing": False}, SILENT, ""),
    "learning rate": ({"learning_rate": 2e-2}, ERROR, "learning_rate: 0.01, now 0.02"),
    "optimizer": ({"adam_beta2": 0.9}, ERROR, "adam_beta2"),
    "steps of a round": ({"num_iterations": 2}, ERROR, "num_iterations"),
    "precision": ({"bf16": True}, ERROR, "bf16"),
    "adapter": ({"peft_config": LoraConfig(r=2, lora_alpha=8, init_lora_weights="gaussian")}, ERROR, "adapter/r: 4, now 2"),
    "its scale": ({"peft_config": LoraConfig(r=4, lora_alpha=8, use_rslora=True)}, ERROR, "adapter/use_rslora"),
    "another loss": ({"epsilon": 2e-4}, WARNING, "epsilon: 0.0001, now 0.0002"),
    "more noise": ({"noise_level": 0.5}, WARNING, "noise_level"),
    "code of a family": ({"family": own_family(1)}, WARNING, "family/source"),
    "a reward's argument": ({"reward_funcs": reward_above(0.6)}, WARNING, "rewards/sensitive_reward/variables"),
    **{f"column {name}": ({"column": {name: value}}, ERROR, f"dataset/{name}") for name, value in COLUMNS.items()},
}  # fmt: skip


class TestResume:
    @pytest.fixture(scope="class")
    @classmethod
    def earlier(cls, tiny_flux, tmp_path_factory):
        """A run that has made a step: it is in the middle of a round."""
        output = tmp_path_factory.mktemp("earlier") / "out"
        cls.make(tiny_flux, output).train()
        return output

    @staticmethod
    def make(model, output, column=None, **changes) -> PaCoGRPOTrainer:
        arguments = {
            "train_dataset": dataset_with(square_prompts(), **column or {}),
            "reward_funcs": reward_above(0.5),
            "peft_config": LORA, "family": own_family(0),
        }  # fmt: skip
        arguments |= {name: changes.pop(name) for name in arguments if name in changes}
        settings = SMALL_RUN | {"max_steps": 1, "save_strategy": "steps", "save_steps": 1, **changes}
        return PaCoGRPOTrainer(str(model), args=PaCoGRPOConfig(str(output), **settings), **arguments)

    @pytest.mark.parametrize("change", CHANGES)
    def test_before_its_model_loads(self, tiny_flux, earlier, tmp_path, caplog, change):
        changes, outcome, named = CHANGES[change]
        nowhere = tmp_path / tiny_flux.name
        nowhere.mkdir()
        with pytest.raises(ValueError if outcome is ERROR else OSError) as error:
            self.make(nowhere, earlier, resume_from_checkpoint="True", **changes)
        text = str(error.value) if outcome is ERROR else caplog.text
        if outcome is SILENT:
            assert "with other settings" not in text
        else:
            assert outcome in text and named in text
            assert text.count(", now ") + text.count(": its contents have changed") == 1  # only what differs is named
            assert not re.search(r"\b[0-9a-f]{16}\b", text)
            adapter = f"`--adapter {earlier / 'checkpoint-1'}`"
            assert (adapter in text) == (outcome is ERROR)

    @pytest.mark.parametrize(
        "component", ["transformer", "text_encoder_2", "vae", "vae.scaling_factor", "scheduler.shift", None]
    )
    def test_once_its_model_is_loaded(self, tiny_flux, earlier, tmp_path, caplog, component):
        model = shutil.copytree(tiny_flux, tmp_path / tiny_flux.name)  # moved, of the same name
        if component is not None:
            pipeline = DiffusionPipeline.from_pretrained(model)
            component, _, setting = component.partition(".")
            part = getattr(pipeline, component)
            if setting:
                part.register_to_config(**{setting: 1.05 * part.config[setting]})
            else:
                next(part.parameters()).data.mul_(1.05)
            pipeline.save_pretrained(model)
        output = shutil.copytree(earlier, tmp_path / "out")
        with nullcontext() if component is None else pytest.raises(ValueError, match=f"weights/{component}: "):
            trainer = self.make(model, output, max_steps=2, resume_from_checkpoint="True")
        with nullcontext() if component is None else pytest.raises(ValueError, match=f"weights/{component}: "):
            trainer = trainer if component is None else self.make(model, tmp_path / "new", max_steps=2)
            trainer.train(resume_from_checkpoint=str(output / "checkpoint-1"))
        assert component is not None or trainer.state.global_step == 2 and "generated again" not in caplog.text

    def test_a_finished_run_keeps_its_settings(self, tiny_flux, earlier, tmp_path):
        """Nothing is trained by other ones, so that a saved model must not name them."""
        output = shutil.copytree(earlier, tmp_path / "out")
        trainer = self.make(tiny_flux, output, noise_level=0.3, reward_funcs=reward_above(0.6))
        with pytest.raises(
            ValueError, match="(?s)at step 1 of 1: no step is left.*noise_level: 0.7, now 0.3.*a larger `max_steps`"
        ):
            trainer.train(resume_from_checkpoint=True)
        for changes in ({}, {"max_steps": 2, "noise_level": 0.3}):  # as it was, and with a step left
            trainer = self.make(tiny_flux, shutil.copytree(earlier, tmp_path / f"{len(changes)}"), **changes)
            trainer.train(resume_from_checkpoint=True)

    def test_a_pending_round_is_generated_again_by_another_reward(self, tiny_flux, earlier, tmp_path, caplog):
        output = shutil.copytree(earlier, tmp_path / "out")
        trainer = self.make(tiny_flux, output, max_steps=2, reward_funcs=reward_above(0.6))
        trainer.train(resume_from_checkpoint=True)
        assert "rewards/sensitive_reward/variables: it is generated again" in caplog.text


def with_images(first: PILImage.Image, where: Path | None = None, **columns) -> Dataset:
    """Two rows with images: embedded, or in files of a directory."""
    images = [first, PILImage.new("RGB", (8, 8), "red")]
    if where is not None:
        where.mkdir(parents=True)
        paths = [str(where / f"{number}.png") for number in (0, 1)]
        for image, path in zip(images, paths, strict=True):
            image.save(path)
        images = paths
    columns = {"prompt": ["a", "b"], "sizes": [[1, 2], None], "set": [[image] for image in images], **columns}
    features = {"image": DatasetImage(), "set": List(DatasetImage())}
    dataset = Dataset.from_dict({"image": images, **columns})
    return dataset.cast(Features(dataset.features | features))


class TestDatasets:
    def test_rows_are_what_they_contain(self, tmp_path):
        plain = describe(with_images(noise(0)))
        # From elsewhere, in another place, of other pieces, in another type of the same values
        same = with_images(noise(0), tmp_path / "a")
        assert describe(same) == describe(with_images(noise(0), tmp_path / "b" / "c")) == plain
        same.save_to_disk(tmp_path / "saved")
        pieces = concatenate_datasets([same.select([0]), same.select([1])])
        turned = same.select([1, 0]).select([1, 0]).with_format("torch")
        for dataset in (load_from_disk(tmp_path / "saved"), pieces, turned):
            assert describe(dataset) == plain
        alone = turned.select_columns("image")  # images alone, in another order
        assert describe(alone)["image"] == plain["image"]
        sizes = List(Value("int32"))
        assert describe(same.cast_column("sizes", sizes).cast_column("prompt", Value("large_string"))) == plain

    @pytest.mark.parametrize("in_files", [False, True])
    def test_each_column_tells_what_changed(self, tmp_path, in_files):
        plain = with_images(noise(0), tmp_path / "a" if in_files else None)
        other = with_images(noise(1), tmp_path / "b" if in_files else None)  # of the same size and kind

        def changed(dataset):
            return {
                line.partition(":")[0].split("/")[1]
                for line in differences({"": describe(plain)}, {"": describe(dataset)})
            }

        assert changed(other) == {"image", "set"}
        assert changed(plain.select([1, 0])) == {"prompt", "sizes", "image", "set"}
        assert changed(with_images(noise(0), sizes=[[1, 2], []])) == {"sizes"}
        assert changed(plain.add_column("mine", [0, 0])) == changed(plain.add_column("mine", [None, None])) == {"mine"}
        assert changed(plain.remove_columns("prompt")) == {"prompt"}
        assert changed(plain.add_column("rows", [2, 2])) == {"rows"}  # image sets have it
        assert changed(plain.select([0])) == {"number of rows", "prompt", "sizes", "image", "set"}

    def test_of_large_files_both_ends_are_read(self, tmp_path):
        """Embedded or not, and never all of it."""
        content = bytearray(os.urandom(200_000))
        file = tmp_path / "file"

        def digest():
            file.write_bytes(content)
            embedded = describe(Dataset.from_dict({"file": [bytes(content)]}))["file"]
            return embedded, file_digest(file), file_digest(file, 2)

        digests = [digest()]
        for place in (0, -1):
            content[place] ^= 1
            digests.append(digest())
        content[100_000] ^= 1  # in the middle, where those of weights are read
        digests.append(digest())
        assert [len({*found}) for found in zip(*digests, strict=True)] == [3, 4, 3]


class TestWeights:
    def test_a_buffer_that_is_saved_counts(self):
        norms = [nn.BatchNorm1d(4) for _ in range(3)]
        norms[1].running_mean += 1
        norms[2].register_buffer("cache", torch.ones(2), persistent=False)
        first, *others = map(weights_fingerprint, norms)
        assert [other == first for other in others] == [False, True]

    def test_the_scale_of_a_quantized_weight_counts(self):
        """Its values are codes, which the scale does not change."""
        bitsandbytes = pytest.importorskip("bitsandbytes")

        def quantized(factor, double):
            torch.manual_seed(0)
            layer = nn.Linear(64, 64)
            weight = bitsandbytes.nn.Params4bit(
                layer.weight.data * factor, quant_type="nf4", compress_statistics=double
            )
            layer.weight = weight.to("cpu")
            return layer

        for double in (False, True):
            layers = [quantized(1.0, double), quantized(1.0, double), quantized(1.1, double)]
            assert torch.equal(layers[0].weight, layers[2].weight)
            first, same, other = map(weights_fingerprint, layers)
            assert first == same != other


def test_the_files_of_a_model(tiny_flux, tmp_path):
    """Before it is loaded: changed in place, and moved."""
    model = shutil.copytree(tiny_flux, tmp_path / "model")
    before = digest_model_files(str(model))
    assert before == digest_model_files(str(tiny_flux)) and digest_model_files("user/name") is None
    transformer = DiffusionPipeline.from_pretrained(model).transformer
    with torch.no_grad():
        transformer.transformer_blocks[0].attn.to_q.weight.mul_(1.01)
    transformer.save_pretrained(model / "transformer")
    assert digest_model_files(str(model)) != before


class TestBaseWeights:
    """Of a pipeline that is loaded, and so may have others than the model that it is named after."""

    @pytest.mark.parametrize("component", ["transformer", "text_encoder", "vae"])
    def test_a_change_is_refused(self, make_trainer, tiny_flux, component):
        pipeline = DiffusionPipeline.from_pretrained(tiny_flux)
        weight = max(getattr(pipeline, component).parameters(), key=lambda weight: weight.numel())
        with torch.no_grad():
            weight.add_(1e-3 * weight.std() * torch.randn_like(weight))
        with pytest.raises(ValueError, match=f"`{component}` of the pipeline has other weights"):
            make_trainer(model=pipeline)
        with pytest.raises(ValueError, match=f"`{component}` of the pipeline has other weights"):
            make_trainer(model_init_kwargs={component: getattr(pipeline, component)})
        pipeline.register_to_config(_name_or_path=None)  # it names no base
        make_trainer(model=pipeline)

    def test_what_was_only_rounded_is_the_same(self, make_trainer, tiny_flux, tmp_path):
        half = DiffusionPipeline.from_pretrained(tiny_flux, dtype=torch.float16)
        for name in ("transformer", "vae"):
            module = getattr(half, name).to(torch.bfloat16)
            make_trainer(model_init_kwargs={name: module})
        shutil.copytree(tiny_flux, gone := tmp_path / "gone")
        pipeline = DiffusionPipeline.from_pretrained(gone)
        shutil.rmtree(gone)
        make_trainer(model=pipeline)


class Own:
    """A user's reward with a model."""

    __name__ = "own"

    def __init__(self, seed: int = 0):
        torch.manual_seed(seed)
        self.head, self.api_key, self.calls = nn.Linear(2, 1), "secret", []

    def __call__(self, prompts, completions, **kwargs):
        return redness_reward(prompts, completions)


class Other(Own):
    def __call__(self, prompts, completions, **kwargs):
        return [-value for value in super().__call__(prompts, completions, **kwargs)]


class Scaled(Own):
    def __init__(self, scale: float):
        super().__init__()
        self._scale = scale


class TestDescriptions:
    def test_a_judge(self, tiny_qwen, tmp_path):
        other = build_tiny_qwen2_5_vl(tmp_path / tiny_qwen.name, seed=1)
        judge = PaCoReward.from_pretrained(tiny_qwen, device="cpu")
        plain = describe_reward(ConsistencyReward(judge))
        assert plain == describe_reward(ConsistencyReward(tiny_qwen, device="cpu", batch_size=3))
        assert plain["model_name"] == tiny_qwen.name and str(tiny_qwen) not in str(plain)
        changed = [
            ConsistencyReward(other, device="cpu"),  # of the same name
            ConsistencyReward(judge, question="criteria"),
            ConsistencyReward(judge, max_pairs=2),
        ]
        template = PaCoReward.from_pretrained(tiny_qwen, device="cpu")
        template.processor.chat_template += " "
        changed.append(ConsistencyReward(template))
        found = [describe_reward(reward) for reward in changed]
        assert plain not in found and len({json.dumps(each) for each in found}) == len(found)

    def test_other_rewards_of_the_package(self, tmp_path):
        clips = [ClipTReward(build_tiny_clip(tmp_path / f"{number}" / "clip")) for number in (0, 1)]
        assert describe_reward(clips[0]) == describe_reward(clips[1])
        with torch.no_grad():
            clips[1].model.visual_projection.weight.add_(1e-3)
        assert describe_reward(clips[0])["model_name"] == describe_reward(clips[1])["model_name"]
        assert describe_reward(clips[0]) != describe_reward(clips[1])
        assert describe_reward(DuplicateReward()) != describe_reward(DuplicateReward(0.5))
        assert describe_reward(DuplicateReward()) == describe_reward(DuplicateReward())

    def test_a_function_and_an_object_of_the_user(self):
        def of_kind(kind):
            if kind:

                def reward(prompts, completions, **kwargs):
                    return [1.0] * len(prompts)
            else:

                def reward(prompts, completions, **kwargs):
                    return [0.0] * len(prompts)

            return reward

        assert describe_reward(of_kind(0)) == describe_reward(of_kind(0)) != describe_reward(of_kind(1))
        assert (
            describe_reward(reward_above(0.5))
            == describe_reward(reward_above(0.5))
            != describe_reward(reward_above(0.6))
        )
        part = functools.partial(redness_reward, threshold=0.5)
        assert describe_reward(part) != describe_reward(functools.partial(redness_reward, threshold=0.6))
        assert describe_reward(own_family(0)) == describe_reward(own_family(0)) != describe_reward(own_family(1))
        assert describe_reward(type("Derived", (Own,), {})()) != describe_reward(type("Derived", (Other,), {})())
        assert describe_reward(Own()) == describe_reward(Own()) != describe_reward(Own(seed=1))
        assert describe_reward(Own().__call__) == describe_reward(Own())
        assert "secret" not in str(describe_reward(Own()))
        stricter, counting = Own(), Own()
        stricter.threshold, counting._calls = 0.3, 7
        assert describe_reward(stricter) != describe_reward(Own()) == describe_reward(counting)
        assert describe_reward(Scaled(1)) == describe_reward(Scaled(1)) != describe_reward(Scaled(2))
        for values in (
            [np.arange(9), np.arange(9) + 1],
            [noise(0), noise(1)],
            [Scale(1), Scale(2)],
            [np.float32(1), np.float32(2)],
        ):
            found = []
            for value in [*values, copy.deepcopy(values[0])]:
                stricter.threshold = {"mine": value}
                found += [describe_reward(stricter), describe_reward(with_default(value))]
            assert found[:2] == found[4:] and found[0] != found[2] and found[1] != found[3]
            json.dumps(found)
        versions = [Own(), Own()]
        versions[1].fingerprint = "version 2"
        assert describe_reward(versions[0]) != describe_reward(versions[1])
        typed: dict = {}
        exec("def reward(**kwargs): ...", typed)
        assert describe_reward(len) and describe_reward(typed["reward"])  # without a source


class TestBaseline:
    def test_it_belongs_to_the_judge_and_to_the_model(self, make_trainer, prompts, tiny_qwen, tmp_path):
        judges = [PaCoReward.from_pretrained(tiny_qwen, device="cpu")]
        judges.append(PaCoReward.from_pretrained(build_tiny_qwen2_5_vl(tmp_path / tiny_qwen.name, seed=1)))
        trainer = make_trainer(reward_funcs=ConsistencyReward(judges[0]), eval_dataset=prompts.select(range(2)))
        evaluator, rows = trainer.evaluator, trainer.evaluator.rows_of(trainer.eval_dataset)
        keys = [evaluator.baseline_key(rows)]
        evaluator.rewards = Rewards(ConsistencyReward(judges[0]))
        assert evaluator.baseline_key(rows) == keys[0]
        for judge, options in ((judges[1], {}), (judges[0], {"question": "criteria"})):
            evaluator.rewards = Rewards(ConsistencyReward(judge, **options))
            assert evaluator.rewards.names == ["consistency"]
            keys.append(evaluator.baseline_key(rows))
        for name, value in (("model_init_kwargs", {"revision": "v2"}), ("quantization", "int8"), ("tf32", True)):
            setattr(trainer.args, name, value)
            keys.append(evaluator.baseline_key(rows))
        assert len(set(keys)) == len(keys) == 6
        harmless = (("max_steps", 7), ("save_steps", 3), ("offload_embeddings", True))
        for name, value in harmless:
            setattr(trainer.args, name, value)
            assert evaluator.baseline_key(rows) == keys[-1]


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

    def test_the_command_refuses_it_at_once(self, running, tmp_path):
        args = SimpleNamespace(
            output_dir=str(tmp_path / "out"), resume_from_checkpoint=None, overwrite_output_dir=False
        )
        with pytest.raises(OptionError, match="Another run"):
            check_start(args, [], is_early=True)
        running.kill()
        running.wait()
        check_start(args, [], is_early=True)

    def test_a_place_that_cannot_be_written_to(self):
        with (
            pytest.raises(ValueError, match="The images belong in /proc/images, but '/proc' cannot be"),
            sole_writer("/proc/images", "images"),
        ):
            pass

    def test_a_place_without_locks_is_not_refused(self, make_trainer, tmp_path):
        (tmp_path / "out" / ".lock").mkdir(parents=True)  # as where it cannot be written
        make_trainer(max_steps=1).train()
