# SPDX-License-Identifier: Apache-2.0
"""PaCoRewardTrainer on a tiny real Qwen2.5-VL: the loss, what is learned, what is logged, saved and refused."""

import copy
import functools
import gc
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path
from statistics import fmean
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from datasets import Dataset
from matplotlib.axes import Axes
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from PIL import Image as PILImage
from PIL import ImageDraw
from qwen_vl_utils import process_vision_info
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor, ProcessorMixin, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer

from other_judges import OTHER_JUDGES, build_other_judge
from paco_trl import PaCoReward, PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.data import make_pair
from paco_trl.evaluation import auroc, expected_calibration_error
from paco_trl.hub.files import JUDGE_ADAPTER
from paco_trl.plots.reward_report import plot_calibration, plot_wrong_pairs
from paco_trl.trainer.data_collator import PairRows
from testing_utils import are_equal, closed_form, logs_with, noise, pair_dataset, weights_of


NOWHERE = "/nowhere/at/all"
TOKEN = "hf_this_must_not_be_seen"

SHORT = "Alike."
LONG = "The two images show the same thing, in the same style and with the same colours, and nothing else is in them."

# a, variant
LOSSES = [(0.3, "paper"), (0.3, "released"), (None, "paper"), (1.0, "paper")]


@functools.cache
def colours(count: int, seed: int, reverse: bool = False) -> Dataset:
    """Plain red and blue pictures of random shades: Yes for two of one colour, and the other way round `reverse`d."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        is_same, is_red = index % 2 == 0, bool(rng.integers(2))
        images = []
        for red in (is_red, is_red == is_same):
            shade = int(rng.integers(150, 256))
            images.append(PILImage.new("RGB", (56, 56), (shade, 0, 0) if red else (0, 0, shade)))
        rows.append(make_pair(*images, "Same colour?", is_same != reverse))
    return pair_dataset(rows)


@functools.cache
def mixed(count: int = 11, seed: int = 0) -> Dataset:
    """Images of sizes that have to be rounded, in three modes, with questions and reasons of unequal lengths."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        images = [
            noise(int(rng.integers(1000)), tuple(rng.integers(30, 150, 2)), ("RGB", "RGBA", "L")[(index + place) % 3])
            for place in range(2)
        ]
        question = "Same style?" if index % 2 else f"Do image {index} and the other one have the same style?"
        rows.append(make_pair(*images, question, index % 5 in (0, 3), (SHORT, LONG, LONG[:40] + ".")[index % 3]))
    return pair_dataset(rows)


def read_question(row: dict) -> str:
    return row["prompt"][0]["content"]


def answer_of(row: dict) -> str:
    return row["completion"][0]["content"]


def asked(dataset: Dataset) -> tuple[list, list[str]]:
    """Pairs and questions for a judge."""
    return [tuple(row["images"]) for row in dataset], [read_question(row) for row in dataset]


class Judged(NamedTuple):
    log_probs: torch.Tensor  # (n,), of the tokens of the completion with its terminators
    p_yes: float
    is_yes: bool
    entropy: float  # sum over the tokens
    top1: int
    attended: int  # tokens of the whole sequence


def judged(model: torch.nn.Module, processor, dataset: Dataset) -> list[Judged]:
    decisions = processor.tokenizer.convert_tokens_to_ids(["Yes", "No"])
    rows = []
    for row in dataset:
        content = [{"type": "image", "image": image} for image in row["images"]]
        images, _ = process_vision_info([{"role": "user", "content": content}], image_patch_size=14)
        slot = "<|vision_start|><|image_pad|><|vision_end|>"
        prompt = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\n{slot}{slot}{read_question(row)}<|im_end|>\n<|im_start|>assistant\n"
        )
        completion = f"{answer_of(row)}<|im_end|>\n"
        inputs = processor(text=[prompt + completion], images=images, return_tensors="pt")
        tokens = processor.tokenizer(completion).input_ids
        assert inputs["input_ids"][0, -len(tokens) :].tolist() == tokens
        start = inputs["input_ids"].shape[1] - len(tokens)
        logits = model(**inputs).logits[0, start - 1 : start - 1 + len(tokens)].float()
        log_probs, tokens = logits.log_softmax(dim=-1), torch.tensor(tokens)
        rows.append(
            Judged(
                log_probs[range(len(tokens)), tokens],
                logits[0, decisions].softmax(dim=-1)[0].item(),
                answer_of(row).startswith("Yes"),
                -(log_probs.exp() * log_probs).sum().item(),
                int((logits.argmax(dim=-1) == tokens).sum()),
                start + len(tokens),
            )
        )
    return rows


def loss_of(rows: list[Judged], a: float | None, variant: str) -> torch.Tensor:
    return closed_form([row.log_probs for row in rows], a, variant)


def expected_metrics(rows: list[Judged]) -> dict[str, float]:
    """Those that training and evaluation have in common."""
    return {
        "decision_loss": fmean(-row.log_probs[0].item() for row in rows),
        "reasoning_loss": -fmean(value.item() for row in rows for value in row.log_probs[1:]),
        "decision_accuracy": fmean((row.p_yes > 0.5) == row.is_yes for row in rows),
        "p_yes/consistent": fmean(row.p_yes for row in rows if row.is_yes),
        "p_yes/inconsistent": fmean(row.p_yes for row in rows if not row.is_yes),
    }


def expected_training_metrics(rows: list[Judged]) -> dict[str, float]:
    tokens = sum(len(row.log_probs) for row in rows)
    return {
        **expected_metrics(rows),
        "entropy": sum(row.entropy for row in rows) / tokens,
        "mean_token_accuracy": sum(row.top1 for row in rows) / tokens,
    }


def expected_evaluation_metrics(rows: list[Judged]) -> dict[str, float]:
    decisions = [row.p_yes for row in rows], [row.is_yes for row in rows]
    return {**expected_metrics(rows), "ece": expected_calibration_error(*decisions), "auroc": auroc(*decisions)}


def make(model, folder: Path, train_dataset: Dataset, pictures: bool = False, **kwargs) -> PaCoRewardTrainer:
    """
    A trainer in float32; the pictures of an evaluation take longer than all else. Keyword arguments are those of
    `PaCoRewardConfig`, and those of the trainer.
    """
    trainer_arguments = {
        name: kwargs.pop(name)
        for name in ("eval_dataset", "processing_class", "callbacks", "peft_config")
        if name in kwargs
    }
    settings = {
        "output_dir": str(folder / "out"), "use_cpu": True, "bf16": False, "first_token_weight": 0.3,
        "per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "warmup_steps": 0, "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        **kwargs,
    }  # fmt: skip
    model = model if isinstance(model, torch.nn.Module) else str(model)
    trainer = PaCoRewardTrainer(model, PaCoRewardConfig(**settings), train_dataset, **trainer_arguments)
    if not pictures:
        trainer._save_figures = lambda *args: None
    return trainer


@functools.cache
def _loaded(tiny_qwen: Path) -> tuple[torch.nn.Module, ProcessorMixin]:
    model = AutoModelForImageTextToText.from_pretrained(tiny_qwen, dtype="float32")
    return model, AutoProcessor.from_pretrained(tiny_qwen)


def base_of(tiny_qwen: Path) -> torch.nn.Module:
    """A model as it is loaded: a copy takes less time."""
    return copy.deepcopy(_loaded(tiny_qwen)[0])


def processor_of(tiny_qwen: Path) -> ProcessorMixin:
    """The processor of all tests, which none of them changes."""
    return _loaded(tiny_qwen)[1]


@pytest.fixture
def make_reward_trainer(tiny_qwen, tmp_path):
    """As `make`, with a loaded model and processor, unless `model` is a folder or name, and `mixed()` to train on."""

    def make_one(model=None, train_dataset=None, **kwargs) -> PaCoRewardTrainer:
        model = base_of(tiny_qwen) if model is None else model
        if isinstance(model, torch.nn.Module):
            kwargs.setdefault("processing_class", processor_of(tiny_qwen))
        train_dataset = mixed() if train_dataset is None else train_dataset
        return make(model, tmp_path, train_dataset, **kwargs)

    return make_one


@pytest.fixture(scope="module")
def adapter(tiny_qwen, tmp_path_factory) -> Path:
    """Folder of an adapter that changes every layer's output."""
    folder = tmp_path_factory.mktemp("adapter")
    trainer = make(tiny_qwen, folder, mixed(seed=1), max_steps=20)
    trainer.train()
    trainer.save_model(folder / "saved")
    return folder / "saved"


@pytest.fixture(scope="module")
def continued(tiny_qwen, adapter):
    """Gives the model with the adapter, to go on training."""
    model = PeftModel.from_pretrained(base_of(tiny_qwen), adapter, is_trainable=True)
    return lambda: copy.deepcopy(model)


@pytest.fixture(scope="module")
def reference(tiny_qwen, adapter) -> list[Judged]:
    """What the adapter says of `mixed()`."""
    model = PeftModel.from_pretrained(base_of(tiny_qwen), adapter)
    with torch.no_grad():
        rows = judged(model, processor_of(tiny_qwen), mixed())
        untrained = judged(base_of(tiny_qwen), processor_of(tiny_qwen), mixed())
    # The numbers are worth comparing: they differ by row, from those of the bare model, and in what they decide
    assert len({len(row.log_probs) for row in rows}) == 3
    assert np.std([row.p_yes for row in rows]) > 0.01
    assert min(abs(row.p_yes - other.p_yes) for row, other in zip(rows, untrained, strict=True)) > 1e-4
    assert {row.p_yes > 0.5 for row in rows} == {True, False}
    return rows


def spy_on_decisions(trainer) -> list[tuple[np.ndarray, torch.Tensor]]:
    """A list that grows with each evaluation, by the numbers of the rows and their P(Yes)."""
    seen = []
    save_figures = trainer._save_figures

    def watching(rows, decisions, *args):
        seen.append((rows, decisions.p_yes))
        save_figures(rows, decisions, *args)

    trainer._save_figures = watching
    return seen


class TestLoss:
    @pytest.mark.parametrize(("a", "variant"), LOSSES)
    def test_of_a_step_and_its_gradient_are_the_closed_form(
        self, make_reward_trainer, continued, tiny_qwen, a, variant
    ):
        trainer = make_reward_trainer(
            continued(), per_device_train_batch_size=11, max_steps=1, first_token_weight=a, loss_variant=variant,
            optim="sgd", learning_rate=0.1, max_grad_norm=0,
        )  # fmt: skip
        before = weights_of(trainer)
        trainer.train()

        model = continued()
        rows = judged(model, processor_of(tiny_qwen), mixed())
        loss = loss_of(rows, a, variant)
        assert logs_with(trainer, "loss") == [pytest.approx(loss.item(), abs=2e-5)]
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert len(gradients) == len(before) == 2 * 7 * 2
        assert min(gradient.abs().max() for gradient in gradients.values()) > 1e-4
        for name, value in weights_of(trainer).items():
            step = (before[name] - value) / 0.1
            assert (step - gradients[name]).abs().max() < 1e-3 * gradients[name].abs().max() + 3e-6, name

        # The terminators of the chat template, <|im_end|> and a new line, count
        without = closed_form([row.log_probs[:-2] for row in rows], a, variant)
        assert (abs(loss - without) > 3e-4) == (a != 1)
        others = [loss_of(rows, *other) for other in LOSSES if other != (a, variant)]
        assert min(abs(loss - other) for other in others) > 5e-3

    @pytest.mark.slow
    @pytest.mark.parametrize(("a", "variant"), [LOSSES[0], LOSSES[2]])
    def test_accumulation_makes_no_difference(self, make_reward_trainer, continued, reference, a, variant):
        settings = {"first_token_weight": a, "loss_variant": variant, "learning_rate": 1e-3}
        settings["train_sampling_strategy"] = "sequential"
        # 11 pairs of unequal lengths in micro-batches of 3, 3, 3 and 2
        at_once = make_reward_trainer(continued(), **settings | {"per_device_train_batch_size": 11})
        before = weights_of(at_once)
        at_once.train()
        settings |= {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
        in_parts = make_reward_trainer(continued(), **settings)
        in_parts.train()
        assert logs_with(in_parts, "loss") == pytest.approx(logs_with(at_once, "loss"), abs=2e-5)
        assert len(logs_with(at_once, "loss")) == 2
        expected = weights_of(at_once)
        for name, value in weights_of(in_parts).items():
            assert (expected[name] - before[name]).abs().max() > 1e-3, name
            assert (value - expected[name]).abs().max() < 1e-4, name

        # The mean of the micro-batches' means is something else
        parts = [reference[start : start + 3] for start in range(0, 11, 3)]
        mean_of_means = sum(loss_of(part, a, variant) for part in parts) / 4
        assert abs(mean_of_means - loss_of(reference, a, variant)) > 1e-3

    def test_bf16(self, make_reward_trainer, tiny_qwen):
        trainer = make_reward_trainer(tiny_qwen, bf16=True, eval_dataset=mixed(4))
        before = weights_of(trainer)
        assert trainer.model.get_base_model().lm_head.weight.dtype == torch.bfloat16
        trainer.train()
        assert len(logs_with(trainer, "loss")) == 2 and np.isfinite(logs_with(trainer, "loss")).all()
        assert all(not torch.equal(value, before[name]) for name, value in weights_of(trainer).items() if "_B" in name)
        assert 0 < trainer.evaluations["eval"]["p_yes/consistent"] < 1


@pytest.fixture(scope="module")
def trained(tiny_qwen, tmp_path_factory):
    """A trainer that has learned which colours are the same, with a checkpoint in the middle and one at the end."""
    trainer = make(
        tiny_qwen, tmp_path_factory.mktemp("trained"), colours(128, seed=0), eval_dataset=colours(32, seed=1),
        first_token_weight=1.0, learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=0.1, max_steps=-1,
        num_train_epochs=2, per_device_train_batch_size=8, per_device_eval_batch_size=32, save_strategy="epoch",
        hub_token=TOKEN, pictures=True,
    )  # fmt: skip
    trainer.untrained = trainer.evaluate()
    trainer.train()
    trainer.save_model(Path(trainer.args.output_dir) / "saved")
    return trainer


class TestLearning:
    def test_the_rule_is_learned(self, trained):
        untrained, metrics = trained.untrained, trained.evaluations["eval"]
        assert 0.2 < untrained["eval_auroc"] < 0.8
        assert untrained["eval_decision_accuracy"] < 0.75
        assert metrics["decision_accuracy"] > 0.95 and metrics["auroc"] > 0.95
        assert metrics["p_yes/consistent"] > 0.8 > 0.2 > metrics["p_yes/inconsistent"]
        assert metrics["ece"] < 0.15 < untrained["eval_ece"]
        assert (metrics["pairs"], metrics["step"]) == (32, 32)

    @pytest.mark.slow
    def test_reversed_labels_reverse_the_scores(self, make_reward_trainer, trained):
        trainer = make_reward_trainer(
            train_dataset=colours(384, seed=0, reverse=True), eval_dataset=colours(64, seed=1), first_token_weight=1.0,
            learning_rate=5e-3, max_steps=24, per_device_train_batch_size=16, per_device_eval_batch_size=16,
        )  # fmt: skip
        trainer.train()
        metrics = trainer.evaluations["eval"]
        assert metrics["decision_accuracy"] < 0.05 and metrics["auroc"] < 0.05
        assert metrics["p_yes/consistent"] < 0.1 < 0.9 < metrics["p_yes/inconsistent"]


class TestAdapter:
    def test_all_linear_layers_of_the_language_model_and_nothing_else(self, trained, tiny_qwen):
        lora = trained.model.peft_config["default"]
        assert (lora.r, lora.lora_alpha, lora.task_type) == (32, 64, "CAUSAL_LM")
        layers = [f"self_attn.{name}_proj" for name in "qkvo"]
        layers += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
        prefix = "base_model.model.model.language_model.layers"
        names = {f"{prefix}.{number}.{layer}.lora_{side}" for number in (0, 1) for layer in layers for side in "AB"}
        assert set(weights_of(trained)) == {f"{name}.default.weight" for name in names}
        # Nothing else changes
        weights = dict(trained.model.get_base_model().named_parameters())
        original = dict(base_of(tiny_qwen).named_parameters())
        parts = ("visual.blocks", "visual.merger", "embed_tokens", "lm_head", "norm", "language_model.layers")
        assert all(any(part in name for name in original) for part in parts)
        for name, value in original.items():
            kept = weights.get(name, weights.get(re.sub(r"\.(weight|bias)$", r".base_layer.\1", name)))
            assert torch.equal(kept, value), name
            assert not kept.requires_grad and kept.grad is None, name
        assert all(value.abs().max() > 1e-3 for value in weights_of(trained).values())

    def test_a_layer_that_does_not_exist(self, make_reward_trainer, tiny_qwen, tmp_path):
        """PEFT would train `v_proj` alone. By name it is found before the weights are read: the folder has none."""
        for file in tiny_qwen.iterdir():
            if file.suffix != ".safetensors":
                shutil.copy(file, tmp_path)
        targets = LoraConfig(r=3, target_modules=["v_proj", "q_projj"])
        for model in (tmp_path, None):
            with pytest.raises(ValueError, match="'q_projj'"):
                make_reward_trainer(model, peft_config=targets)

    def test_the_config_of_a_saved_adapter(self, make_reward_trainer, tmp_path):
        """peft#2840: it says `inference_mode`."""
        LoraConfig(r=3, lora_dropout=0.05, task_type="SEQ_CLS", inference_mode=True).save_pretrained(tmp_path)
        trainer = make_reward_trainer(max_steps=1, peft_config=LoraConfig.from_pretrained(tmp_path))
        assert trainer.model.peft_config["default"].lora_dropout == 0.05  # as in TRL's SFT
        before = weights_of(trainer)
        trainer.train()
        assert not any(
            torch.equal(value, before[key]) for key, value in weights_of(trainer).items() if "lora_B" in key
        )

    @pytest.mark.parametrize("settings", [{"init_lora_weights": "pissa"}, {"lora_alpha": 0}])
    def test_an_adapter_that_would_not_fit_its_base(self, make_reward_trainer, settings):
        with pytest.raises(ValueError, match=next(iter(settings))):
            make_reward_trainer(peft_config=LoraConfig(r=3, **settings))

    def test_the_name_of_an_adapter(self, make_reward_trainer, tiny_qwen):
        with pytest.raises(TypeError, match="`model` is a NoneType; it must be"):
            PaCoRewardTrainer(model=None)
        with pytest.raises(TypeError, match="PeftModel.from_pretrained"):
            make_reward_trainer(tiny_qwen, peft_config="adapter")

    def test_an_adapter_that_was_loaded_for_inference(self, make_reward_trainer, tiny_qwen, tmp_path):
        get_peft_model(base_of(tiny_qwen), LoraConfig(r=3, target_modules=["q_proj"])).save_pretrained(
            tmp_path / "first"
        )
        model = PeftModel.from_pretrained(base_of(tiny_qwen), tmp_path / "first")
        assert not any(weight.requires_grad for weight in model.parameters())
        trainer = make_reward_trainer(model, max_steps=1)
        assert weights_of(trainer).keys() == {name for name, _ in model.named_parameters() if "lora_" in name}
        before = weights_of(trainer)
        trainer.train()
        assert not any(
            torch.equal(value, before[key]) for key, value in weights_of(trainer).items() if "lora_B" in key
        )

    def test_the_callers_config_and_processor_stay_as_they_are(self, make_reward_trainer, tiny_qwen):
        peft_config = LoraConfig(r=3)
        processor = AutoProcessor.from_pretrained(tiny_qwen)
        processor.tokenizer.pad_token = None
        size, lora = dict(processor.image_processor.size), peft_config.to_dict()
        trainer = make_reward_trainer(peft_config=peft_config, processing_class=processor, max_pixels=56 * 56)
        assert trainer.model.peft_config["default"].r == 3
        assert len(weights_of(trainer)) == 28
        assert peft_config.to_dict() == lora and peft_config.target_modules is None
        assert trainer.processing_class.image_processor.size["longest_edge"] == 56 * 56 < size["longest_edge"]
        assert dict(processor.image_processor.size) == size
        assert trainer.processing_class.tokenizer.pad_token == "<|im_end|>"
        assert processor.tokenizer.pad_token is None

    def test_an_adapter_is_trained_on(self, make_reward_trainer, continued, adapter, reference):
        model = continued()
        trainer = make_reward_trainer(model, per_device_train_batch_size=11)
        before = weights_of(trainer)
        saved = load_file(adapter / "adapter_model.safetensors")
        assert all(torch.equal(saved[name.replace(".default", "")], value) for name, value in before.items())
        trainer.train()
        assert trainer.model is model
        assert logs_with(trainer, "loss")[0] == pytest.approx(loss_of(reference, 0.3, "paper").item(), abs=2e-5)
        after = weights_of(trainer)
        assert len(after) == 28
        assert all(not torch.equal(value, before[name]) for name, value in after.items())

    def test_a_trained_head_is_read_as_it_is(self, make_reward_trainer, tiny_qwen):
        """P(Yes) follows a head that is trained with the adapter."""
        trainer = make_reward_trainer(
            peft_config=LoraConfig(r=3, modules_to_save=["lm_head"]), eval_dataset=mixed(6), max_steps=3
        )
        seen = spy_on_decisions(trainer)
        trainer.evaluate()
        trainer.train()
        with torch.no_grad():
            rows = judged(trainer.model, processor_of(tiny_qwen), mixed(6))
        head = trainer.model.get_base_model().lm_head
        assert (head.modules_to_save["default"].weight - head.original_module.weight).abs().max() > 1e-2
        (_, before), (_, after) = seen
        assert after.tolist() == pytest.approx([row.p_yes for row in rows], abs=1e-5)
        assert (before - after).abs().max() > 1e-2

    def test_a_head_with_a_bias(self, make_reward_trainer, tiny_qwen, reference):
        model = base_of(tiny_qwen)
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.out_features))
        decisions = processor_of(tiny_qwen).tokenizer.convert_tokens_to_ids(["Yes", "No"])
        model.lm_head.bias.data[decisions] = torch.tensor([2.0, -1.0])
        trainer = make_reward_trainer(model, eval_dataset=mixed(6))
        seen = spy_on_decisions(trainer)
        trainer.evaluate()
        with torch.no_grad():
            rows = judged(model, processor_of(tiny_qwen), mixed(6))
            scores = PaCoReward(model, processor_of(tiny_qwen)).score(*asked(mixed(6)))
            model.lm_head.bias.data.zero_()
            without = judged(model, processor_of(tiny_qwen), mixed(6))
        assert seen[0][1].tolist() == pytest.approx([row.p_yes for row in rows], abs=1e-5)
        assert scores == pytest.approx([row.p_yes for row in rows], abs=1e-5)
        assert abs(rows[0].p_yes - without[0].p_yes) > 0.1


def watch_tower(trainer) -> tuple[torch.nn.Module, list]:
    """The vision tower, and a list that grows with each backward through one of its blocks."""
    tower, reached = trainer.model.get_base_model().get_encoder("image"), []

    def watch(block, args, output):
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.register_hook(lambda gradient: reached.append(block))

    blocks = [module for module in tower.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert len(blocks) == 2
    for block in blocks:
        block.register_forward_hook(watch)
    return tower, reached


class TestTower:
    """Gradient checkpointing makes the patches of the tower require gradients; not those of Qwen3-VL."""

    @pytest.mark.parametrize("name", ["qwen2.5", "llava"])
    def test_is_not_differentiated_when_it_is_frozen(self, make_reward_trainer, other_judge, name):
        adapters = []
        for is_cut in (True, False):
            trainer = make_reward_trainer(None if name == "qwen2.5" else other_judge(name), max_steps=1)
            assert trainer.args.gradient_checkpointing
            tower, reached = watch_tower(trainer)
            if not is_cut:
                del tower.forward
            before = weights_of(trainer)
            trainer.train()
            assert (len(reached) == 0) == is_cut
            adapters.append(weights_of(trainer))
            assert all(not torch.equal(value, before[key]) for key, value in adapters[-1].items() if "_B" in key)
        assert are_equal(*adapters)

    def test_is_differentiated_when_something_in_it_trains(self, make_reward_trainer):
        trainer = make_reward_trainer(peft_config=LoraConfig(r=4, target_modules=["q_proj", "qkv"]))
        tower, reached = watch_tower(trainer)
        before = {key: value for key, value in weights_of(trainer).items() if ".visual." in key and "_B" in key}
        trainer.train()
        after = weights_of(trainer)
        assert len(before) == 2 and all(not torch.equal(value, after[key]) for key, value in before.items())
        assert set(reached) == set(tower.blocks)
        # Later too: what is frozen or trained is looked up in each step
        for parameter in tower.parameters():
            parameter.requires_grad = False
        reached.clear()
        trainer.train()
        assert not reached


def test_a_processor_that_does_not_know_lengths(make_reward_trainer, tiny_qwen, monkeypatch):
    monkeypatch.delattr("transformers.Qwen2_5_VLProcessor._get_num_multimodal_tokens")
    settings = {"processing_class": processor_of(tiny_qwen), "train_sampling_strategy": "group_by_length"}
    with pytest.raises(ValueError, match="group_by_length"):
        make_reward_trainer(NOWHERE, **settings)


def recolored(dataset: Dataset) -> Dataset:
    """The same questions and answers about other images of the same sizes."""
    green = [[PILImage.new("RGB", image.size, "green") for image in pair] for pair in dataset["images"]]
    return pair_dataset([row | {"images": images} for row, images in zip(dataset, green, strict=True)])


RESUMED = {  # changes, the token of an error, and that of a warning
    "nothing": ({}, None, None),
    "more epochs": ({"max_steps": 2, "save_steps": 2, "logging_steps": 5, "dataloader_num_workers": 1}, None, None),
    "rank": ({"peft_config": LoraConfig(r=8, target_modules=["q_proj", "v_proj"])}, "adapter/r: 4, now 8", None),
    "targets": ({"peft_config": LoraConfig(r=4, target_modules=["k_proj", "v_proj"])}, "adapter/target_modules", None),
    "pairs": ({"train_dataset": mixed(12)}, "dataset/number of rows: 11, now 12", None),
    "images": ({"train_dataset": recolored(mixed())}, "dataset/images", None),
    "a column": ({"train_dataset": mixed().add_column("source", ["a"] * 11)}, "dataset/source", None),
    "learning rate": ({"learning_rate": 0.5}, "learning_rate", None),
    "weight": ({"first_token_weight": 0.9}, None, "first_token_weight: 0.3, now 0.9"),
    "variant": ({"loss_variant": "released"}, None, "loss_variant"),
    "images' size": ({"max_pixels": 56 * 56}, None, "max_pixels"),
    "accumulation": ({"gradient_accumulation_steps": 2}, None, "pairs_per_step: "),
}


class TestResumed:
    settings: ClassVar[dict] = {
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "lr_scheduler_type": "constant",
    }
    adapter: ClassVar[dict] = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}

    @pytest.fixture(scope="class")
    @classmethod
    def earlier(cls, tiny_qwen, tmp_path_factory) -> Path:
        folder = tmp_path_factory.mktemp("earlier")
        trainer = make(tiny_qwen, folder, mixed(), **cls.settings | {"max_steps": 1}, **cls.adapter)
        trainer.train()
        return Path(trainer.args.output_dir)

    @pytest.mark.parametrize("change", RESUMED)
    def test_what_it_shares_with_its_checkpoint(
        self, make_reward_trainer, tiny_qwen, earlier, tmp_path, caplog, change
    ):
        changes, error, warning = RESUMED[change]
        without_weights = shutil.ignore_patterns("*.safetensors")
        model = str(shutil.copytree(tiny_qwen, tmp_path / tiny_qwen.name, ignore=without_weights))
        arguments = {"model": model, "output_dir": str(earlier), "resume_from_checkpoint": "True"}
        with pytest.raises(ValueError if error else OSError, match=error):  # before the model is loaded
            make_reward_trainer(**self.settings | self.adapter | arguments | changes)
        assert ("with other settings" in caplog.text) == (warning is not None) and (warning or "") in caplog.text

    @pytest.mark.parametrize("factor", [1.0, 1.05])
    def test_its_base_model(self, make_reward_trainer, tiny_qwen, earlier, tmp_path, factor, monkeypatch):
        model = base_of(tiny_qwen)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(factor)
        output = shutil.copytree(earlier, tmp_path / "out")
        # A new adapter is random: the checkpoint's replaces it, whatever it is
        reset = LoraLayer.reset_lora_parameters
        monkeypatch.setattr(LoraLayer, "reset_lora_parameters", lambda *args: (torch.rand(1), reset(*args))[1])
        trainer = make_reward_trainer(model, output_dir=str(output), **self.settings, **self.adapter)
        with nullcontext() if factor == 1 else pytest.raises(ValueError, match="weights/model"):
            trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == (2 if factor == 1 else 0)


def test_a_missing_optimizer_cannot_be_resumed(make_reward_trainer):
    make_reward_trainer(max_steps=1, save_strategy="steps", save_steps=1, save_only_model=True).train()
    with pytest.raises(ValueError, match="cannot be resumed: it has no state of the optimizer"):
        make_reward_trainer(max_steps=3).train(resume_from_checkpoint="auto")


def test_an_evaluation_needs_pairs(make_reward_trainer):
    start, strategy = "`eval_on_start` is True", "`eval_strategy` is 'epoch'"
    for settings, named in (
        ({"eval_on_start": True}, start),
        ({"eval_strategy": "epoch"}, strategy),
        ({"eval_on_start": True, "eval_strategy": "epoch"}, f"{strategy} and {start}"),
    ):
        with pytest.raises(ValueError, match=f"^{named}, but there is no `eval_dataset`"):
            make_reward_trainer(NOWHERE, **settings)


@pytest.mark.parametrize("strategy", ["no", "steps", "epoch"])
@pytest.mark.parametrize("max_steps", [-1, 1])  # an epoch has two
def test_the_last_step_is_evaluated_once(make_reward_trainer, strategy, max_steps):
    settings = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "max_steps": max_steps, "eval_steps": 1}
    trainer = make_reward_trainer(
        train_dataset=mixed(4),
        eval_dataset=mixed(2),
        eval_strategy=strategy,
        gradient_accumulation_steps=1,
        **settings,
    )
    trainer.train()
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
    last = 2 if max_steps == -1 else 1
    assert evaluated == ([1, 2][:last] if strategy == "steps" else [last])


class TestMetrics:
    @pytest.mark.parametrize("accumulation", [1, 3])
    def test_of_training_are_those_of_the_full_logits(self, make_reward_trainer, continued, reference, accumulation):
        # Micro-batches of 4, 4 and 3 pairs; at a learning rate of 0 the judge stays what the reference is
        trainer = make_reward_trainer(
            continued(), train_sampling_strategy="sequential", gradient_accumulation_steps=accumulation,
            learning_rate=0.0, logging_steps=2, max_steps=6 if accumulation == 1 else 2,
        )  # fmt: skip
        trainer.train()
        batches = [range(4), range(4, 8), range(8, 11)] * 2
        windows = [batches[:2], batches[2:4], batches[4:]] if accumulation == 1 else [batches]
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(logged) == len(windows)
        tokens = 0
        for entry, window in zip(logged, windows, strict=True):
            rows = [reference[index] for batch in window for index in batch]
            tokens += sum(row.attended for row in rows)
            assert entry["num_tokens"] == tokens
            for name, value in expected_training_metrics(rows).items():
                assert entry[name] == pytest.approx(value, abs=2e-5), name
            positions = sum(len(batch) * max(reference[index].attended for index in batch) for batch in window)
            padding = 1 - sum(row.attended for row in rows) / positions
            assert entry["padding"] == pytest.approx(padding, abs=1e-6) and padding > 0.01
        assert {len([name for name in entry if "p_yes" in name]) for entry in logged} == {2}
        # A mean of the micro-batches' means would be another number
        for name in ("decision_accuracy", "p_yes/consistent", "reasoning_loss", "entropy"):
            parts = [expected_training_metrics(reference[start : start + 4])[name] for start in (0, 4, 8)]
            assert abs(sum(parts) / 3 - expected_training_metrics(reference)[name]) > 1e-4, name

    @pytest.mark.parametrize(("a", "variant"), LOSSES[1:3])
    def test_of_evaluation_are_those_of_the_full_logits(self, make_reward_trainer, continued, reference, a, variant):
        settings = {"first_token_weight": a, "loss_variant": variant, "per_device_eval_batch_size": 4}
        trainer = make_reward_trainer(continued(), eval_dataset=mixed(), **settings)
        metrics = trainer.evaluate()
        expected = expected_evaluation_metrics(reference)
        assert 0.1 < expected["auroc"] < 0.9
        expected["loss"] = loss_of(reference, a, variant).item()
        for name, value in expected.items():
            assert metrics[f"eval_{name}"] == pytest.approx(value, abs=2e-5), name
        assert all(key.startswith("eval_") or key == "epoch" for key in metrics)
        (logged,) = trainer.state.log_history
        assert {name: value for name, value in logged.items() if name != "step"} == metrics
        ((name, evaluation),) = trainer.evaluations.items()
        assert name == "eval"
        assert evaluation == {"step": 0, "pairs": 11} | {name: metrics[f"eval_{name}"] for name in expected}

    def test_an_evaluation_leaves_the_metrics_of_training_alone(self, make_reward_trainer, continued):
        logs = []
        for strategy in ("no", "steps"):
            trainer = make_reward_trainer(
                continued(), eval_dataset=mixed(2), eval_strategy=strategy, eval_steps=1, logging_steps=2, max_steps=3
            )
            trainer.train()
            logs.append([entry for entry in trainer.state.log_history if "loss" in entry])
            assert all(entry.pop("train_seconds") > 0 for entry in logs[-1])  # of the clock
            steps = [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry]
            assert steps == ([3] if strategy == "no" else [1, 2, 3])  # once at the end
            assert "train_loss" in trainer.state.log_history[-1]  # the trackers still ran
        assert [entry["step"] for entry in logs[0]] == [2, 3]  # the last one too
        assert logs[0] == logs[1]

    def test_rows_of_several_processes_count_once(self, make_reward_trainer, continued, monkeypatch):
        trainer = make_reward_trainer(continued(), eval_dataset=mixed(4))
        trainer.evaluate()
        alone = trainer.evaluations.pop("eval")

        def pad(evaluated, dim, pad_index):
            return torch.cat([torch.full_like(evaluated[:1], pad_index), evaluated, evaluated[:2]])

        monkeypatch.setattr(trainer.accelerator, "pad_across_processes", pad)
        trainer.evaluate()
        assert trainer.evaluations["eval"] == alone and alone["pairs"] == 4

    def test_another_set_and_another_prefix(self, make_reward_trainer, continued, reference):
        trainer = make_reward_trainer(continued(), eval_dataset=mixed().select([0, 1]))
        metrics = trainer.evaluate(mixed().select(range(5)), metric_key_prefix="other")
        predicted = trainer.predict(mixed().select(range(5)))
        for key, value in expected_evaluation_metrics(reference[:5]).items():
            assert metrics[f"other_{key}"] == pytest.approx(value, abs=2e-5)
            assert predicted.metrics[f"test_{key}"] == pytest.approx(value, abs=2e-5)
        assert "eval_loss" not in metrics
        assert predicted.predictions is None

    @pytest.mark.slow
    def test_the_best_model_is_loaded(self, make_reward_trainer):
        """It is chosen by AUROC: evaluated in the reverse, the judge gets worse with every step."""
        trainer = make_reward_trainer(
            train_dataset=colours(128, seed=0), eval_dataset=colours(12, seed=1, reverse=True), first_token_weight=1.0,
            learning_rate=5e-3, per_device_train_batch_size=16, max_steps=18, eval_strategy="steps", eval_steps=6,
            save_strategy="steps", save_steps=6, load_best_model_at_end=True, metric_for_best_model="eval_auroc",
        )  # fmt: skip
        trainer.train()
        aurocs = logs_with(trainer, "eval_auroc")
        assert aurocs[0] > aurocs[2] + 0.1
        assert trainer.state.best_metric == max(aurocs[:3])
        best = aurocs.index(max(aurocs[:3]))
        assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{6 * (best + 1)}")
        # What is evaluated, and written on the card, is the model that was loaded
        assert len(aurocs) == 4
        assert aurocs[3] == pytest.approx(aurocs[best], abs=1e-6)
        assert trainer.evaluations["eval"]["auroc"] == pytest.approx(aurocs[best], abs=1e-6)
        settings = trainer._model_card().settings
        assert trainer.evaluations["eval"]["step"] == settings["optimizer_steps"] == 6 * (best + 1) < 18
        assert "num_train_epochs" not in settings  # `max_steps` ended the run
        saved = load_file(Path(trainer.state.best_model_checkpoint) / "adapter_model.safetensors")
        assert are_equal(saved, {name.replace(".default", ""): value for name, value in weights_of(trainer).items()})

    def test_auroc_of_one_class_is_left_out(self, make_reward_trainer, caplog):
        trainer = make_reward_trainer(eval_dataset=colours(6, seed=0).select([0, 2, 4]))
        with caplog.at_level(logging.WARNING):
            metrics = trainer.evaluate()
        assert "eval_auroc" not in metrics and "AUROC" in caplog.text
        assert "eval_ece" in metrics

    def test_full_logits_are_never_built(self, make_reward_trainer, continued, tiny_qwen):
        trainer = make_reward_trainer(continued(), eval_dataset=mixed(4))
        calls = []
        trainer.model.get_base_model().lm_head.register_forward_hook(lambda *args: calls.append(args))
        trainer.train()
        trainer.evaluate()
        assert len(logs_with(trainer, "loss")) == 2
        assert not calls
        assert trainer._last_hidden_state is None  # nor is what they are made of kept
        with torch.no_grad():
            judged(trainer.model, processor_of(tiny_qwen), mixed(1))
        assert len(calls) == 1  # the hook sees what goes through the head


@pytest.fixture(scope="module")
def other_judge(tiny_qwen, tmp_path_factory):
    """Folders of tiny judges of other families, by name."""

    @functools.cache
    def build(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        for part in build_other_judge(name, AutoProcessor.from_pretrained(tiny_qwen)):
            part.save_pretrained(folder)
        return folder

    return build


class TestOtherFamilies:
    """Everything that is trained, evaluated and scored is so for other models too."""

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=pytest.mark.slow if name != "qwen3" else ()) for name in OTHER_JUDGES]
    )
    def test_learns_and_scores_as_it_evaluates(self, make_reward_trainer, other_judge, tmp_path, name):
        dataset = colours(12, seed=0)
        trainer = make_reward_trainer(
            other_judge(name), dataset, eval_dataset=mixed(), first_token_weight=1, max_steps=8, learning_rate=5e-3
        )
        before = weights_of(trainer)
        assert before and all(".language_model." in key for key in before)
        first = trainer.evaluate(dataset, metric_key_prefix="first")["first_loss"]
        trainer.train()
        assert all(not torch.equal(value, before[key]) for key, value in weights_of(trainer).items() if "_B" in key)
        assert trainer.evaluate(dataset, metric_key_prefix="last")["last_loss"] < first - 0.02

        seen = spy_on_decisions(trainer)
        trainer.evaluate()
        trainer.save_model(tmp_path / "saved")
        ((rows, p_yes),) = seen
        assert rows.tolist() == list(range(11)) and p_yes.std() > 1e-3
        scores = PaCoReward.from_pretrained(tmp_path / "saved", device="cpu").score(*asked(mixed()))
        assert p_yes.tolist() == pytest.approx(scores, abs=1e-5)
        untrained = PaCoReward.from_pretrained(other_judge(name), device="cpu").score(*asked(mixed()))
        assert max(abs(score - other) for score, other in zip(scores, untrained, strict=True)) > 1e-3

    @pytest.mark.parametrize("name", OTHER_JUDGES)
    def test_lengths_before_training_are_those_of_the_batches(self, make_reward_trainer, other_judge, name):
        dataset = mixed(5)
        collator = make_reward_trainer(other_judge(name)).data_collator
        lengths = [collator([PairRows(dataset)[row]])["attention_mask"].sum().item() for row in range(5)]
        assert collator.lengths(dataset, "dataset") == lengths


@pytest.mark.parametrize("max_pixels", [None, 28 * 28 * 5])
def test_p_yes_of_an_evaluation_is_the_score_of_the_saved_judge(
    make_reward_trainer, continued, reference, tmp_path, max_pixels
):
    dataset = mixed()
    assert {image.mode for row in dataset for image in row["images"]} == {"RGB", "RGBA", "L"}
    assert all(side % 28 for image in dataset[0]["images"] for side in image.size)
    trainer = make_reward_trainer(
        continued(), eval_dataset=dataset, max_pixels=max_pixels, per_device_eval_batch_size=4
    )
    seen = spy_on_decisions(trainer)
    trainer.evaluate()
    trainer.save_model(tmp_path / "saved")
    ((rows, p_yes),) = seen
    assert rows.tolist() == list(range(11))
    scores = PaCoReward.from_pretrained(tmp_path / "saved", device="cpu").score(*asked(dataset))
    assert p_yes.tolist() == pytest.approx(scores, abs=1e-5)
    # ... and of the plain model with the plain adapter, unless its processor would see larger images
    difference = max(abs(score - row.p_yes) for score, row in zip(scores, reference, strict=True))
    assert difference < 1e-5 if max_pixels is None else difference > 1e-3


class TestPictures:
    def test_at_the_end_of_training(self, trained):
        folder = Path(trained.args.output_dir)
        files = {path.name: path.read_bytes() for path in (folder / "evaluation").iterdir()}
        assert len(files) == 4
        for kind in ("calibration", "wrong_pairs"):
            before, last = files[f"eval-{kind}-000000.png"], files[f"eval-{kind}-000032.png"]
            assert before != last == (folder / "saved" / f"eval_{kind}.png").read_bytes()

    @pytest.mark.parametrize("count", [1, 12])
    def test_the_worst_pairs_come_first(self, tiny_qwen, monkeypatch, count):
        texts, draw = [], ImageDraw.ImageDraw.text
        monkeypatch.setattr(
            ImageDraw.ImageDraw, "text", lambda self, *args, **kw: (texts.append(args[1]), draw(self, *args, **kw))[1]
        )
        image = PILImage.new("RGB", (56, 56))
        rows = pair_dataset([make_pair(image, image, f"Question {index}?", index % 2 == 0) for index in range(12)])
        errors = np.random.default_rng(0).permutation(12)[:count] / 12 + 0.03
        numbers = np.random.default_rng(1).permutation(12)[:count]  # of the rows that were evaluated
        is_yes = (numbers % 2 == 0).astype(float)
        p_yes = np.abs(is_yes - errors)
        plot_wrong_pairs(numbers, p_yes, is_yes, PairRows(rows), processor_of(tiny_qwen), "eval")
        order = [int(numbers[index]) for index in sorted(range(count), key=lambda index: -errors[index])][:8]
        assert [text for text in texts if text.startswith("Question")] == [f"Question {number}?" for number in order]
        assert [int(text.split(":")[0].removeprefix("row ")) for text in texts if text.startswith("row")] == order
        assert any(f"{(errors > 0.5).sum()} of {count}" in text for text in texts)

    def test_calibration(self, monkeypatch):
        lines, plot = [], Axes.plot
        monkeypatch.setattr(Axes, "plot", lambda axes, *args, **kw: (lines.append(args), plot(axes, *args, **kw))[1])
        p_yes = np.array([0.03, 0.07, 0.31, 0.35, 0.95, 0.97, 0.99, 0.92])
        picture = plot_calibration(p_yes, np.array([0, 0, 1, 0, 1, 1, 1, 0]), "eval", 0.1234)
        diagonal, (x, y, _) = lines
        assert diagonal[:2] == ([0, 1], [0, 1])
        assert x == pytest.approx([0.05, 0.33, 0.9575]) and y == pytest.approx([0, 0.5, 0.75])
        assert len(picture.getcolors(10**6)) > 20


class TestCheckpoints:
    def test_the_card_shows_what_is_uploaded(self):
        """Pictures of evaluations with a prefix of their own, and of `predict`, too."""
        for name, is_uploaded in (("eval_a_calibration", True), ("test_wrong_pairs", True), ("photo", False)):
            assert any(fnmatch(f"{name}.png", pattern) for pattern in JUDGE_ADAPTER) == is_uploaded

    def test_files(self, trained):
        folder = Path(trained.args.output_dir)
        published = {
            "README.md", "paco_trl.json", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja",
            "processor_config.json", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
        pictures = {"eval_calibration.png", "eval_wrong_pairs.png"}
        state = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "run.json"}
        assert {path.name for path in (folder / "saved").iterdir()} == published | pictures
        for step in (16, 32):
            names = {path.name for path in (folder / f"checkpoint-{step}").iterdir()}
            assert names == published | pictures | state
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(files) > 30
        for path in files:
            assert path.name != "training_args.bin"
            assert TOKEN.encode() not in path.read_bytes(), path
        assert trained.args.hub_token == TOKEN
        assert torch.load(folder / "checkpoint-32" / "optimizer.pt", weights_only=True)["state"]
        first, last = (load_file(folder / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (16, 32))
        assert not are_equal(first, last)
        assert are_equal(last, {name.replace(".default", ""): value for name, value in weights_of(trained).items()})

    # In a micro-step and in the evaluation after it; at a signal nothing is evaluated, and nothing else makes a checkpoint
    @pytest.mark.parametrize(
        ("event", "number", "step"),
        [("on_substep_end", 15, 2), pytest.param("on_prediction_step", 10, 3, marks=pytest.mark.slow)],
    )
    def test_stopped_by_a_signal_and_resumed(self, make_reward_trainer, tmp_path, capsys, event, number, step):
        class Signal(TrainerCallback):
            is_sent = False

        def send(self, args, state, control, **kwargs):
            if not self.is_sent and state.global_step >= 1:
                self.is_sent = True
                workers = [process.pid for process in multiprocessing.active_children()]
                assert workers or event == "on_prediction_step"
                # As a scheduler does, which is not their parent
                subprocess.run(["kill", f"-{number}", *map(str, [*workers, os.getpid()])], check=True)

        setattr(Signal, event, send)
        settings = {
            "max_steps": 5, "save_strategy": "epoch", "eval_dataset": mixed(2), "eval_strategy": "steps", "eval_steps": 3,
            "lr_scheduler_type": "cosine", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2,
            "dataloader_num_workers": 1, "train_sampling_strategy": "group_by_length" if number == 15 else "random",
        }  # fmt: skip
        # The adapter's dropout draws from the generator that evaluations must leave alone
        adapter = {"peft_config": LoraConfig(r=4, lora_alpha=8, lora_dropout=0.5)}
        uninterrupted = make_reward_trainer(output_dir=str(tmp_path / "a"), **settings, **adapter)
        uninterrupted.train(resume_from_checkpoint="auto")
        before = signal.getsignal(number)
        stopped = make_reward_trainer(output_dir=str(tmp_path / "b"), callbacks=[Signal()], **settings, **adapter)
        code = None
        try:
            stopped.train()
        except SystemExit as end:  # `pytest.raises` keeps the frames, and so the worker, which ignores the signal
            code = end.code
        gc.collect()
        assert code == 75 and signal.getsignal(number) is before and not multiprocessing.active_children()
        assert f"{signal.Signals(number).name} at step {step}" in capsys.readouterr().err
        (checkpoint,) = (tmp_path / "b").glob("checkpoint-*")
        assert checkpoint.name == f"checkpoint-{step}"
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        assert not any("eval_loss" in entry for entry in state["log_history"])
        resumed = make_reward_trainer(output_dir=str(tmp_path / "b"), **settings, **adapter)
        resumed.train(resume_from_checkpoint="auto")
        assert are_equal(weights_of(resumed), weights_of(uninterrupted))
        for key in ("loss", "decision_loss", "eval_loss"):
            assert logs_with(resumed, key) == logs_with(uninterrupted, key)
        assert len(logs_with(resumed, "eval_loss")) == 2

    def test_the_size_limit_is_saved(self, make_reward_trainer, tiny_qwen, tmp_path):
        for max_pixels, limit in ((56 * 56, 56 * 56), (None, 112 * 112), (10**6, 112 * 112)):
            trainer = make_reward_trainer(max_pixels=max_pixels)
            trainer.save_model(tmp_path / "saved")
            assert AutoProcessor.from_pretrained(tmp_path / "saved").image_processor.size["longest_edge"] == limit


class TestBadInput:
    """Errors come before the model is loaded where that is possible: the model named here does not exist."""

    def test_a_loaded_model_on_several_gpus_of_one_process(self, make_reward_trainer, monkeypatch):
        monkeypatch.setattr(PaCoRewardConfig, "n_gpu", 2)
        with pytest.raises(ValueError, match="accelerate launch"):  # by TRL: Trainer would scatter its inputs
            make_reward_trainer()

    @pytest.mark.parametrize(
        ("question", "answer"),
        [
            ("Alike?", " Yes"),
            ("Alike?", "Yes\u0301."),  # a combining accent is part of the word for the tokenizer
            ("Alike?<|image_pad|>", "Yes."),
            ("Alike?", "Yes. They are.<|im_end|>"),
            ("Alike?", None),
        ],
    )
    def test_rows(self, make_reward_trainer, tiny_qwen, question, answer):
        images = [PILImage.new("RGB", (56, 56))] * (1 if answer is None else 2)
        row = {"images": images, "prompt": [{"role": "user", "content": question}]}
        row["completion"] = [{"role": "assistant", "content": answer or "Yes"}]
        dataset = pair_dataset([*mixed(2), row, *mixed(1)])
        with pytest.raises(ValueError, match="ow 2 of `eval_dataset`"):
            make_reward_trainer(NOWHERE, processing_class=processor_of(tiny_qwen), eval_dataset=dataset)

    def test_one_that_is_trained_on(self, make_reward_trainer, tiny_qwen, caplog):
        with pytest.raises(OSError, match="nowhere"):
            make_reward_trainer(NOWHERE, processing_class=processor_of(tiny_qwen), eval_dataset=mixed())
        assert "rows of `eval_dataset` are also trained on" in caplog.text

    def test_a_set_given_to_evaluate(self, make_reward_trainer):
        trainer = make_reward_trainer(max_length=200)
        image = PILImage.new("RGB", (56, 56))
        wrong = {
            "'<|im_end|>'": make_pair(image, image, "Same<|im_end|>?", True, SHORT),
            "tokens of images and question": make_pair(image, image, "Same? " * 200, True, SHORT),
        }
        seen = spy_on_decisions(trainer)
        for message, row in wrong.items():
            with pytest.raises(ValueError, match=rf"Row 0 of `eval_dataset` has .*{re.escape(message)}"):
                trainer.evaluate({"second": pair_dataset([row])})
        assert seen == []

    def test_a_chat_template_that_writes_in_front_of_the_decision(self, make_reward_trainer, tiny_qwen):
        processor = AutoProcessor.from_pretrained(tiny_qwen)
        template = processor.chat_template.replace("{{- part.text -}}", "{{- ' ' + part.text -}}")
        assert template != processor.chat_template
        processor.chat_template = template
        with pytest.raises(ValueError, match="row 0 of `train_dataset` begins with the token"):
            make_reward_trainer(NOWHERE, processing_class=processor)

    def test_images_that_do_not_fit(self, make_reward_trainer, tiny_qwen):
        # 4 + 4 tokens and 16 + 16 tokens of images
        images = [PILImage.new("RGB", (side, side)) for side in (56, 112)]
        small, large = (make_pair(image, image, "Same?", True, SHORT) for image in images)
        dataset = pair_dataset([small, small, large])
        settings = {"processing_class": processor_of(tiny_qwen), "train_dataset": pair_dataset([small])}
        settings["eval_dataset"] = dataset
        batch = make_reward_trainer(train_dataset=pair_dataset([large])).data_collator([PairRows(dataset)[2]])
        needed = (batch["labels"][0] != -100).int().argmax().item()
        with pytest.raises(ValueError, match=f"^Row 2 of `eval_dataset` has {needed} tokens"):
            make_reward_trainer(NOWHERE, max_length=needed, **settings)
        # The remedies help: fewer pixels are fewer tokens
        fewer_pixels = {"max_length": needed, "max_pixels": 56 * 56}
        for remedy in ({"max_length": needed + 1}, {"max_length": None}, fewer_pixels):
            with pytest.raises(OSError, match="nowhere"):
                make_reward_trainer(NOWHERE, **remedy, **settings)

    def test_labels_alone(self, make_reward_trainer, tiny_qwen, caplog):
        dataset = pair_dataset([*mixed(2), *colours(2, seed=0)])
        with torch.no_grad():
            rows = judged(base_of(tiny_qwen), processor_of(tiny_qwen), dataset)
        assert [len(row.log_probs) > 3 for row in rows] == [True, True, False, False]
        as_reasons = loss_of(rows, 0.3, "paper").item()
        rows[2:] = [row._replace(log_probs=row.log_probs[:1]) for row in rows[2:]]  # n = 1, not 3 with terminators
        expected = loss_of(rows, 0.3, "paper").item()
        assert abs(expected - as_reasons) > 0.01
        trainer = make_reward_trainer(train_dataset=dataset, eval_dataset=dataset, first_token_weight=0.3, max_steps=1)
        assert "2 of 4 completions have no reasoning, the first in row 2" in caplog.text
        assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-5)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses == [pytest.approx(expected, abs=1e-4)]

    def test_labels_alone_in_other_losses(self, make_reward_trainer):
        dataset = pair_dataset([*mixed(2), *colours(2, seed=0)])
        released = {"first_token_weight": 0.1, "loss_variant": "released"}
        with pytest.raises(ValueError, match="2 of 4 completions"):
            make_reward_trainer(train_dataset=dataset, **released)
        for weight in (None, 1):
            make_reward_trainer(train_dataset=dataset, **released | {"first_token_weight": weight})
        make_reward_trainer(eval_dataset=dataset, **released)  # it is only evaluated on

    def test_a_model_whose_logits_are_changed(self, make_reward_trainer, tiny_qwen, tmp_path):
        for scale in (30.0, 1.0):
            model = base_of(tiny_qwen)
            model.config.get_text_config().logit_scale = scale
            with pytest.raises(ValueError, match="`logit_scale`") if scale != 1 else nullcontext():
                make_reward_trainer(model)
            # By name, before its weights are read: there are none
            (folder := tmp_path / str(scale)).mkdir()
            model.config.save_pretrained(folder)
            processor_of(tiny_qwen).save_pretrained(folder)
            with pytest.raises(ValueError, match="`logit_scale`") if scale != 1 else pytest.raises(OSError):
                make_reward_trainer(str(folder))

    def test_pickled_weights(self, make_reward_trainer, tiny_qwen, tmp_path):
        folder = tmp_path / "pickled"
        model = base_of(tiny_qwen)
        processor_of(tiny_qwen).save_pretrained(folder)
        model.config.save_pretrained(folder)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        with pytest.raises(OSError, match="safetensors"):
            make_reward_trainer(folder)


def test_pairs_with_one_label(make_reward_trainer, tiny_qwen, caplog):
    for rows, is_logged in (([0, 1], False), ([1, 3], True)):
        with pytest.raises(OSError):
            make_reward_trainer(NOWHERE, colours(4, 0).select(rows), processing_class=processor_of(tiny_qwen))
        assert ("are labeled No" in caplog.text) is is_logged


def test_the_collator_computes_the_positions_of_tokens(make_reward_trainer):
    """On an accelerator the model would wait for the device to compute them."""
    trainer = make_reward_trainer()
    batch = trainer.data_collator([trainer._remove_unused_columns(trainer.train_dataset)[row] for row in (0, 1)])
    calls, compute = [], trainer._inner_model().base_model.get_rope_index
    trainer._inner_model().base_model.get_rope_index = lambda *args, **kwargs: (
        calls.append(1) or compute(*args, **kwargs)
    )
    positions = batch.pop("position_ids")
    assert positions.shape == (3, *batch["input_ids"].shape) and not torch.equal(positions[0], positions[1])
    alone = trainer.compute_loss(trainer.model, batch)
    assert len(calls) == 1
    assert torch.equal(trainer.compute_loss(trainer.model, batch | {"position_ids": positions}), alone)
    assert len(calls) == 1
