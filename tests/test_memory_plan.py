# SPDX-License-Identifier: Apache-2.0
"""The memory plan: what it counts is what the allocator reports, and it knows what to change."""

import functools
import gc
import inspect
import math
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from accelerate import init_empty_weights
from datasets import Dataset, concatenate_datasets
from diffusers import AutoencoderKL, FluxTransformer2DModel
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoModelForImageTextToText, Trainer, TrainingArguments

import tiny_models
from paco_trl import PaCoReward, PaCoRewardConfig
from paco_trl.checkpointing.weights import use_weights
from paco_trl.commands.memory_plans import image_plan, skip_checkpointing
from paco_trl.commands.sample_generator import SampleGenerator
from paco_trl.commands.script_arguments import ScriptArguments
from paco_trl.planning import MemoryPlan, Phase, plan_memory
from paco_trl.planning.judge_run import QUESTION_TOKENS, judge_tokens
from paco_trl.planning.known_models import resolve_model_configs
from paco_trl.planning.peaks import (
    LiveBytes,
    extrapolate,
    measure_peak,
    quantized_layers,
    skip_equal_blocks,
    training_precision,
    weights_bytes,
)
from paco_trl.planning.plan import LIBRARIES_BYTES, PlanSettings, format_size, optimizer_bytes, training_memory
from paco_trl.rewards.paco_reward import read_judge_config
from paco_trl.rollout import get_family
from paco_trl.rollout.loading import load_without_weights
from paco_trl.rollout.policy_building import prepare_transformer
from paco_trl.trainer.round_trainer import ROUNDS_AHEAD
from testing_utils import entries_of


def allocated(function: Callable[[], object]) -> int:
    """The peak of the allocator while a function runs, above that before it."""
    gc.collect()  # so that nothing of earlier tests is freed meanwhile
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            function()
    finally:
        gc.enable()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        highest = max(highest, now)
    return highest


LORA = LoraConfig(r=4, lora_alpha=8)


@pytest.fixture
def make_plan(tiny_flux, prompts, make_trainer) -> Callable:
    def make(peft_config=LORA, **settings) -> MemoryPlan:
        return plan_memory(str(tiny_flux), make_trainer(**settings).args, prompts, peft_config, eval_dataset=prompts)

    return make


def device_of(plan: MemoryPlan, name: str = "train") -> dict[str, int]:
    return {phase.name: phase.device for phase in plan.phases}[name]


def recorded_by(trainer, count: int):
    """A generator as training has it, and what it records of a micro-batch."""
    generator = SampleGenerator(trainer.policy, trainer.train_rows, trainer.args, is_new_adapter=True)
    return generator, generator.generate(count, generator.sde_settings(0.7)).records


def allocated_in_a_step(trainer, count: int) -> int:
    generator, records = recorded_by(trainer, count)

    def step():
        with training_precision(trainer.compute_dtype):
            generator.replay(records[0]).mean().backward()

    step()
    return allocated(step)


def test_live_bytes():
    weight = torch.zeros(100)
    with LiveBytes() as live:
        first = weight + 1
        view = first[:50].view(5, 10)
        assert live.current == live.peak == 400
        second = first * 2
        del first
        assert live.current == 800  # the view keeps it
        del view
        assert live.current == 400 and live.peak == 800
        del second
        weight.add_(1)
        assert weight[:10].sum() == 10
    assert live.peak == 800


def test_gradients_that_exist_are_not_counted():
    model = nn.Linear(100, 10, bias=False)
    found = measure_peak(lambda: model(torch.zeros(1, 100)), model, is_training=True)
    # What the backward adds to the gradient, 4000 bytes, next to the input and what is smaller
    assert 4000 < found < 5500
    assert model.weight.grad is None


@pytest.mark.parametrize("is_training", [False, True])
def test_equal_blocks_are_not_all_called(is_training):
    class Blocks(nn.Module):
        _no_split_modules = ["Linear"]

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(50, 50, bias=False) for _ in range(20))

        def forward(self, x):
            calls.append(len(self.blocks))
            self.cache = getattr(self, "cache", None) or [torch.ones(1000)]  # once: 4000 bytes
            return functools.reduce(lambda x, block: block(x).tanh(), self.blocks, x)

    calls, model, inputs = [], Blocks(), torch.ones(3, 50)
    found = measure_peak(lambda: model(inputs), model, is_training)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    with LiveBytes() as live, torch.set_grad_enabled(is_training):
        outputs = model(inputs)
        if is_training:
            outputs.square().mean().backward()
    assert found == live.peak + 4000 and calls == [3, 20]


def test_gradients_of_two_calls_wait_for_each_other():
    """Those of weights that autocast has cast once, as of guided generation."""
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(50, 50, bias=False) for _ in range(20))})
    checkpointed = functools.partial(checkpoint, use_reentrant=False)

    def call():
        return functools.reduce(lambda x, block: checkpointed(block, x), model["blocks"], torch.ones(3, 50))

    found = []
    for model._no_split_modules in ([], ["Linear"]):
        with training_precision(torch.bfloat16):
            found.append(measure_peak(lambda: [call(), call()], model, is_training=True))
    casts = waiting = 20 * 50 * 50 * 2
    assert found[1] == pytest.approx(found[0], rel=0.02) and found[0] > casts + waiting


@pytest.mark.parametrize(("bf16", "checkpointing"), [(True, True), pytest.param(False, False, marks=pytest.mark.slow)])
def test_training_takes_what_is_planned(make_trainer, tiny_flux, prompts, bf16, checkpointing):
    trainer = make_trainer(bf16=bf16, gradient_checkpointing=checkpointing)
    measured = allocated_in_a_step(trainer, 4)
    run = plan_memory(str(tiny_flux), trainer.args, prompts, LORA).run
    assert measured > 100_000
    assert extrapolate(run.planned.training_peak, 4, run.image, checkpointing) == pytest.approx(measured, rel=0.05)
    # One image less, or the other checkpointing, is no longer within it
    for size, flag in ((3, checkpointing), (4, not checkpointing)):
        assert abs(run.planned.training_peak(size, run.image, flag) / measured - 1) > 0.1


def test_copies_of_quantized_weights_are_planned(make_trainer, tiny_flux, prompts, tmp_path):
    folder = shutil.copytree(tiny_flux, tmp_path / "wide")
    config = dict(FluxTransformer2DModel.load_config(folder / "transformer")) | {"num_attention_heads": 24}
    FluxTransformer2DModel.from_config(config).save_pretrained(folder / "transformer")
    trainer = make_trainer(model=str(folder), bf16=True, gradient_checkpointing=False, quantization="int8")
    measured = allocated_in_a_step(trainer, 1)
    plan = replace(plan_memory(str(folder), trainer.args, prompts, LORA), batch_size=1)
    assert device_of(plan)["activations"] == pytest.approx(measured, rel=0.15)
    without = plan.run.planned.training_peak(1, plan.run.image, False)
    assert without < 0.8 * measured
    assert device_of(replace(plan, quantization="nf4"))["activations"] == without


def test_the_round_is_what_the_policy_records(make_trainer, tiny_flux, prompts):
    trainer = make_trainer(sde_steps=[0, 2])
    _, records = recorded_by(trainer, 4)
    tensors = [tensor for record in records for tensor in (record.sample, record.prev_sample, record.mean)]
    tensors += [t for r in records for call in r.calls for t in call.values() if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    plan = plan_memory(str(tiny_flux), trainer.args, prompts, LORA, eval_dataset=prompts)
    kept = device_of(plan)["latents and embeddings"]
    assert device_of(plan, "evaluate")["weights set aside"] > 0
    assert device_of(plan, "generate")["weights set aside"] == 0
    # Four micro-batches, each of a prompt. Next to them only what is small: positions, timesteps, guidance
    assert kept <= 4 * sum(storages.values()) < 1.3 * kept
    offloaded = {phase.name: phase for phase in replace(plan, offload_embeddings=True).phases}["train"]
    assert 0 < offloaded.host["embeddings of the round"] == kept - offloaded.device["latents and embeddings"]


@pytest.mark.parametrize("loss_type", ["nft", "awm"])
def test_the_round_of_several_times(make_nft, tiny_flux, prompts, loss_type):
    trainer = make_nft(loss_type=loss_type, num_noise_levels=3, max_steps=1)
    trainer.train()
    leaves = tree_leaves([vars(entry["step"]) for entry in entries_of(trainer.round)])
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in leaves if torch.is_tensor(t)}
    plan = plan_memory(str(tiny_flux), trainer.args, prompts, LORA, eval_dataset=prompts)
    assert sum(storages.values()) == pytest.approx(device_of(plan)["latents and embeddings"], rel=0.05)
    # While an average generates, the weights in training are there as well
    for phase, average in (("generate", trainer.old_policy.average), ("evaluate", trainer.ema.average)):
        replacing = use_weights(trainer.model, average, 0)
        measured = allocated(replacing.__enter__)
        replacing.__exit__(None, None, None)
        assert device_of(plan, phase)["weights set aside"] == pytest.approx(measured, rel=0.01) and measured > 10_000


@pytest.mark.parametrize(
    "stage, frozen, trained, gradients, optimizer, average",
    [
        (None, 1000, 40, 40, 80, 40),
        (0, 1000, 40 + 40, 40, 80, 40),
        (1, 1000, 40 + 20, 40, 40, 40),
        (2, 1000, 40 + 20, 20, 40, 40),
        (3, 500, 20 + 20, 20, 40, 20),
    ],
)
def test_deepspeed_divides_by_stage(stage, frozen, trained, gradients, optimizer, average):
    plan = PlanSettings(zero_stage=stage, num_processes=2)
    always, adds = training_memory(1000, 10, 4, plan, num_averages=1)
    assert list(always.values()) == [frozen, trained, optimizer, average]
    assert adds == {"gradients": gradients, "DDP's buckets": 40 if stage is None else 0}
    assert training_memory(1000, 10, 4, replace(plan, ema_offload=True), 1)[0]["EMA weights"] == 0


def test_fsdp_divides_everything():
    plan = PlanSettings(is_fsdp=True, num_processes=2)
    always, adds = training_memory(1000, 10, 4, plan, num_averages=1)
    assert list(always.values()) == [500, 20, 40, 20]
    assert adds == {"gradients": 20, "DDP's buckets": 0}


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"])
def test_an_optimizer_keeps_what_is_planned(optim, tmp_path):
    args = TrainingArguments(str(tmp_path), optim=optim, use_cpu=True)
    weight = nn.Parameter(torch.zeros(16, 4096))
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    optimizer = kind([weight], **settings)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = sum(tensor.nbytes for tensor in tree_leaves(optimizer.state[weight]) if isinstance(tensor, torch.Tensor))
    assert kept == pytest.approx(optimizer_bytes(args.optim) * weight.numel(), rel=0.01, abs=8)


def test_the_optimizer_of_a_run_is_counted(make_plan, tiny_qwen, tmp_path):
    sizes = {"adamw_bnb_8bit": 2, "paged_adamw_8bit": 2, "paged_adamw_32bit": 8, "lion_8bit": 1, "paged_lion_32bit": 4}
    sizes |= {"rmsprop_bnb": 4, "ademamix_8bit": 3, "adamw_torch_4bit": 1, "galore_adamw_8bit": 8, "lomo": 8}
    plan = make_plan()
    judge_args = PaCoRewardConfig(str(tmp_path), bf16=False, use_cpu=True, max_length=64)
    judge_plan = plan_memory(str(tiny_qwen), judge_args)
    for found, num_trained in ((plan, plan.run.planned.num_trained), (judge_plan, judge_plan.run.num_trained)):
        for found.run.args.optim, size in sizes.items():
            changed = replace(found)
            assert device_of(changed)["optimizer"] == size * num_trained, found.run.args.optim
            is_known = found.run.args.optim not in ("galore_adamw_8bit", "lomo")
            assert ("is counted as AdamW" in changed.summary()) is not is_known


def test_the_judges_batch(make_trainer, tiny_flux, tiny_qwen, prompts):
    plan = plan_memory(str(tiny_flux), make_trainer().args, prompts, LORA, [str(tiny_qwen)])
    small = replace(plan, judge_batch_size=2)
    for before, after in zip((*plan.phases, *plan.commands), (*small.phases, *small.commands), strict=True):
        is_judging = before.device.get("activations of the judge", 0) > 0
        assert (after.total < before.total) is is_judging, before.name
    assert device_of(small, "score")["activations of the judge"] == small.run.judges[0].peak(
        2, judge_tokens(32 * 32, QUESTION_TOKENS)
    )


def test_quantized_weights():
    model = nn.Sequential(nn.Linear(64, 10), nn.LayerNorm(10)).to(torch.bfloat16).requires_grad_(False)
    rest = 2 * (10 + 10 + 10)  # a bias, and the norm
    assert weights_bytes(model, False) == 2 * 640 + rest
    assert weights_bytes(model, False, "int8") == 640 + rest
    assert weights_bytes(model, False, "nf4") == 640 // 2 + 4 * 640 // 64 + rest
    model[0].weight.requires_grad_(True)
    assert weights_bytes(model, False, "nf4") == weights_bytes(model, trainable=False) == rest


def test_the_host_has_quantized_weights_and_the_embeddings_of_some_rounds(make_trainer, tiny_flux, prompts):
    args = make_trainer(num_prompts_per_generation=1, optimizer_steps_per_generation=1).args
    plan = plan_memory(str(tiny_flux), args, concatenate_datasets([prompts] * 5), LORA)
    load, mapped = plan.phases[0].host, plan.phases[0].mapped
    one = sum(tensor.nbytes for tensor in plan.run.planned.embeddings(plan.run.image).values())
    assert load["embeddings"] == ROUNDS_AHEAD * one
    assert plan_memory(str(tiny_flux), args, prompts.select(range(2)), LORA).phases[0].host["embeddings"] == 2 * one
    quantized = replace(plan, quantization="int8").phases[0].host
    for part, models in (
        ("text encoders", plan.run.planned.text_encoders),
        ("frozen weights", [plan.run.planned.model]),
    ):
        layers = [layer for model in models for layer in quantized_layers(model, "int8")]
        saved = sum(layer.weight.nbytes - layer.weight.numel() for layer in layers)
        assert mapped[part] - quantized[part] == saved > 0 and part not in load
    assert plan.host_peak == max(sum(phase.host.values()) for phase in plan.phases) > load["libraries"]
    assert replace(plan, quantization="int8").phases[0].mapped == {
        "VAE": mapped["VAE"]
    }  # the only one that is as in its file
    assert plan.mapped_peak == sum(mapped.values()) and format_size(plan.mapped_peak) in str(plan)


def test_what_takes_turns_in_commands_is_planned_alone(make_trainer, tiny_flux, tiny_qwen, prompts):
    args = make_trainer(per_device_eval_batch_size=1).args
    plan = plan_memory(str(tiny_flux), args, prompts, LORA, [str(tiny_qwen)], eval_dataset=prompts)
    rows = {phase.name: phase.device for phase in plan.commands}
    assert [*rows] == ["evaluate prompts", "evaluate images", "build grids", "space"]
    # The tiny judge is larger than a turn of the pipeline
    judge = weights_bytes(plan.run.judges[0].network)
    for name in ("evaluate prompts", "space"):
        assert rows[name]["rewards"] == judge and rows[name].keys() == {"rewards", "activations of the judge"}
    for name in ("evaluate images", "build grids"):
        assert rows[name].keys() == {"frozen weights", "trained weights", "VAE", "activations"}
    images, evaluate = rows["evaluate images"], device_of(plan, "evaluate")
    assert all(images[part] == evaluate[part] for part in images)  # one image at a time
    assert rows["build grids"] == images
    without_judge = {phase.name: phase.device for phase in replace(plan, uses_judge_server=True).commands}
    assert without_judge["space"] == images
    quantized = {phase.name: phase.device for phase in replace(plan, quantization="int8").commands}
    assert quantized["evaluate images"]["frozen weights"] < images["frozen weights"]
    # All weights: everything is on the device, as in their training
    full = {p.name: p.device for p in plan_memory(str(tiny_flux), args, prompts, None).commands}["evaluate images"]
    assert full["text encoders"] > 0 and full["trained weights"] > images["trained weights"]
    assert full["frozen weights"] == 0


def test_offloaded_rewards_visit_after_generation(make_trainer, tiny_flux, tiny_qwen, prompts, tmp_path):
    models = [str(tiny_qwen), str(tiny_models.build_tiny_clip(tmp_path / "clip"))]
    plan = plan_memory(str(tiny_flux), make_trainer().args, prompts, LORA, models, eval_dataset=prompts)
    without = replace(plan, uses_judge_server=True)
    offloaded = replace(plan, offload_rewards=True)
    stays, visits = ({phase.name: phase for phase in each.phases} for each in (plan, offloaded))
    rewards, clip = stays["train"].device["rewards"], device_of(without)["rewards"]
    assert rewards - clip == weights_bytes(plan.run.judges[0].network) and clip > 0
    for phase in ("generate", "decode", "train"):
        assert stays[phase].device["rewards"] == rewards and visits[phase].device["rewards"] == 0
    # Next to it: what a round keeps and the weights; no images are generated meanwhile
    assert visits["score"].device["rewards"] == rewards == visits["score"].mapped["rewards"]
    assert {"VAE", "activations"} <= stays["score"].device.keys() - visits["score"].device.keys()
    shared = stays["score"].device.keys() & visits["score"].device.keys()
    assert all(stays["score"].device[part] == visits["score"].device[part] for part in shared)
    assert {"activations of the judge"} <= shared and "activations" in stays["evaluate"].device
    # The tiny judge is larger than what generates, so the evaluation's peak is its visit
    assert visits["evaluate"].device["rewards"] == rewards and "activations" not in visits["evaluate"].device
    assert offloaded.peak < plan.peak


def test_checkpointing_is_skipped_with_a_margin(make_plan):
    plan = make_plan()
    skipped = replace(plan, gradient_checkpointing=False)
    assert plan.gradient_checkpointing and skipped.peak > plan.peak  # it is needed for something
    enough = math.ceil(1.25 * skipped.peak / 0.9)
    options = ScriptArguments()
    assert not skip_checkpointing(plan, options, enough).gradient_checkpointing
    assert skip_checkpointing(plan, options, enough - 2).gradient_checkpointing
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        options.chosen = {name}
        assert skip_checkpointing(plan, options, enough) is plan


@pytest.mark.slow
def test_the_largest_batch(make_plan):
    plan = make_plan(per_device_train_batch_size=1, height=128, width=128, resolution_scale=1.0)
    assert [plan.largest_batch(limit) for limit in (plan.peak - 1, plan.peak)] == [0, 1]
    assert plan.largest_batch(replace(plan, batch_size=4).peak) == 4


def test_the_longest_prompt_is_that_of_an_image(make_trainer, tiny_flux):
    rows = [("A fox.", ["It runs."] * 4), ("A hare.", ["It sits.", "It eats slowly."])]
    sets = [{"layout": "separate", "theme": theme, "panels": panels} for theme, panels in rows]
    assert len(" ".join(rows[0][1])) > len(" ".join(rows[1][1]))
    plan = plan_memory(str(tiny_flux), make_trainer().args, Dataset.from_list(sets), LORA)
    assert plan.run.image.prompt == "A hare. It eats slowly."


def test_an_evaluation_is_that_of_its_rows(make_trainer, tiny_flux, tiny_qwen, prompts):
    sizes = [{"prompt": "A fox.", "height": 64, "width": 64}, {"prompt": "A hare.", "height": 96, "width": 64}]
    make = functools.partial(plan_memory, str(tiny_flux), make_trainer().args, prompts, LORA, [str(tiny_qwen)])
    without, same, found = make(), make(eval_dataset=prompts), make(eval_dataset=Dataset.from_list(sizes))
    *phases, evaluate = same.phases
    assert evaluate.name == "evaluate" and phases == without.phases and without.commands == same.commands
    assert (same.run.eval_image.size, found.run.eval_image.size) == ((64, 64), (96, 64))
    assert found.run.eval_image.prompt == "A hare." and found.phases[:-1] == phases
    # Two images without panels, and not the panels of one grid
    for plan, pixels in ((same, 64 * 64), (found, 2 * 96 * 64)):
        uses, run = device_of(plan, "evaluate"), plan.run
        assert uses["activations of the judge"] == run.judges[0].peak(8, judge_tokens(pixels, QUESTION_TOKENS))
        size = plan.run.args.per_device_eval_batch_size
        peaks = [
            extrapolate(peak, size, run.eval_image, None)
            for peak in (run.planned.step_peak, run.planned.decoding_peak)
        ]
        assert uses["activations"] == max(peaks)
    for before, after in zip(same.commands, found.commands, strict=True):
        assert (after.total > before.total) is ("rewards" in after.device or "activations" in after.device)
    assert found.phases[-1].total > evaluate.total


def test_a_question_about_two_images_has_fewer_tokens_than_an_answered_one():
    """Measured with the published tokenizer, at 512 and 1024 pixels: 725 and 2815."""
    for size, measured in ((512, 725), (1024, 2815)):
        assert measured < judge_tokens(2 * size**2, QUESTION_TOKENS) < 1.2 * measured


@pytest.mark.slow
def test_a_first_panel_is_a_source(make_trainer, tmp_path):
    model = str(tiny_models.build_tiny_flux_kontext(tmp_path / "model"))
    sizes = dict(per_device_train_batch_size=1, per_device_eval_batch_size=1, height=128, width=128)
    args = make_trainer(**sizes, resolution_scale=1.0).args
    sets = Dataset.from_list([{"layout": "separate", "theme": "A fox.", "panels": ["It sits.", "It runs."]}] * 4)
    found, tokens, trained = {}, {}, {}
    for way in ("independent", "anchored"):
        plan = plan_memory(model, replace(args, panel_generation=way), sets, LORA, eval_dataset=sets)
        plan = replace(plan, vae_tiling=True)
        tokens[way] = plan.run.planned.transformer_calls(1, plan.run.image)[0]["hidden_states"].shape[1]
        trained[way] = sum(device_of(plan).values())
        found[way] = [device_of(plan, name)["activations"] for name in ("generate", "evaluate")]
    assert tokens["anchored"] == 2 * tokens["independent"] and trained["anchored"] > trained["independent"]
    # It is encoded without tiles, unlike what is decoded
    encoded = plan.run.planned.first_panel_peak(plan.run.image)
    vae = AutoencoderKL.from_pretrained(model, subfolder="vae").requires_grad_(False)
    assert encoded == pytest.approx(allocated(lambda: vae.encode(torch.zeros(1, 3, 128, 128))), rel=0.2)
    assert found["anchored"] == [encoded] * 2 and max(found["independent"]) < encoded


@pytest.mark.slow
@pytest.mark.parametrize(("model", "is_one"), [("flux_kontext", False), ("flux2_klein", True)])
def test_first_panels_may_need_micro_batches_of_one(make_trainer, tmp_path, model, is_one):
    folder = str(getattr(tiny_models, f"build_tiny_{model}")(tmp_path / "model"))
    sets = Dataset.from_list([{"layout": "separate", "theme": "A fox.", "panels": ["It sits.", "It runs."]}] * 4)
    args = make_trainer(per_device_train_batch_size=1, resolution_scale=1.0).args
    for way, most in (("independent", 1024), ("anchored", 1 if is_one else 1024)):
        plan = plan_memory(folder, replace(args, panel_generation=way), sets, LORA)
        assert plan.run.max_batch_size == most


def test_all_weights_and_the_reference(make_plan):
    plan = make_plan(peft_config=None, ema_decay=0.9, beta=0.01)
    weights = weights_bytes(plan.run.planned.model, trainable=True)
    factors = {"trained weights": 1, "gradients": 1, "optimizer": 2, "EMA weights": 1, "reference": 1}
    for part, factor in factors.items():
        assert device_of(plan)[part] == factor * weights


def test_an_adapter_that_is_trained_further_is_there_twice(tiny_flux, prompts, make_trainer, tmp_path):
    LoraConfig(r=4, lora_alpha=8, target_modules=["to_q"]).save_pretrained(tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    options = ScriptArguments(str(tiny_flux), rewards=["redness"], adapter=str(tmp_path))
    for settings, copies in (({}, 0), ({"beta": 0.1}, 1), ({"beta": 0.1, "reference": "base"}, 0)):
        run = image_plan(options, make_trainer(**settings).args, prompts).run
        assert run.reference_bytes == copies * weights_bytes(run.planned.model, trainable=True)


def test_a_plan_is_a_table(tiny_qwen, tmp_path):
    args = PaCoRewardConfig(str(tmp_path), bf16=False, use_cpu=True, max_length=64, per_device_train_batch_size=2)
    plan = plan_memory(str(tiny_qwen), args)
    load, train, evaluate = plan.phases
    assert load.host == train.host == evaluate.host == {"libraries": LIBRARIES_BYTES}
    assert load.mapped == {"frozen weights": train.device["frozen weights"]} and not train.mapped
    quantized = replace(plan, quantization="int8").phases[0]
    own = sum(quantized.host.values())
    assert not quantized.mapped and LIBRARIES_BYTES < own < LIBRARIES_BYTES + sum(load.mapped.values())
    assert isinstance(train, Phase) and train.total == sum(train.device.values()) > 0
    assert plan.peak == max(train.total, evaluate.total) > load.total == 0
    lines = {line.split()[0]: line for line in str(plan).splitlines() if line.split()}
    assert "optimizer" in lines["train"] and f"{train.total / 2**20:.1f} MiB" in lines["train"]
    assert "optimizer" in lines["evaluate"] and "optimizer" not in lines["load"]


def test_the_plan_is_silent_about_long_prompts(make_plan, caplog):
    """The prompts are longer than the tokenizers read, which a check of their own says."""
    run = make_plan().run
    run.planned.embeddings(run.image)
    assert not caplog.messages
    planned = run.planned
    planned.family.encode_prompt(planned.pipeline, run.image.prompt, torch.device("cpu"), [], 1.0)
    assert "was truncated" in caplog.text


def test_a_list_of_blocks_that_has_none():
    """As that of a VAE without attention in its middle block."""
    model = nn.ModuleDict({"few": nn.ModuleList([None]), "many": nn.ModuleList([nn.Linear(2, 2) for _ in range(9)])})
    model._no_split_modules = ["Linear"]
    with skip_equal_blocks(model) as ((blocks, left_out),):
        assert (blocks, left_out) == (list(model["many"][1:]), 6)
    assert len(model["many"]) == 9


class TestKnownModels:
    """Planned where the Hub cannot be reached; their weights are counted by what the published ones have."""

    @pytest.mark.parametrize(
        "model, transformer, text_encoders, adapter",
        [
            ("black-forest-labs/FLUX.1-dev", 11_901_408_320, 123_060_480 + 4_762_310_656, 179_306_496),
            ("black-forest-labs/FLUX.2-klein-base-4B", 3_875_544_576, 4_022_468_096, None),
            ("Qwen/Qwen-Image", 20_430_401_088, 8_292_166_656, None),
            ("Qwen/Qwen-Image-Edit", 20_430_401_088, 8_292_166_656, None),
            (
                "stabilityai/stable-diffusion-3.5-medium",
                2_243_171_520,
                123_650_304 + 694_659_840 + 4_762_310_656,
                None,
            ),
        ],
    )
    def test_a_pipeline(self, tmp_path, model, transformer, text_encoders, adapter):
        count = lambda part: sum(weight.numel() for weight in part.parameters())  # noqa: E731
        folder = resolve_model_configs(model, str(tmp_path))
        pipeline = load_without_weights(folder, {"default": torch.bfloat16})
        family = get_family(pipeline)
        assert count(pipeline.transformer) == transformer
        assert (
            getattr(pipeline.vae, "tile_sample_min_size", 1024) == 1024
        )  # pixels of a tile; that of Qwen-Image has no entry
        assert sum(count(getattr(pipeline, name)) for name in family.text_encoders) == text_encoders
        assert family.text_encoders and not family.is_truncated(pipeline, "A fox through the four seasons")
        if adapter is not None:  # of rank 64, on 342 layers
            with init_empty_weights():
                adapted = prepare_transformer(pipeline, family, LoraConfig(r=64), False)
            assert sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad) == adapter

    @pytest.mark.parametrize(
        "model, kind, weights",
        [
            ("X-GenGroup/PaCo-Reward-7B", AutoModelForImageTextToText, 8_292_166_656),
            ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", AutoModel, 986_109_441),
        ],
    )
    def test_a_model_of_a_reward(self, tmp_path, model, kind, weights):
        with init_empty_weights():
            found = kind.from_config(read_judge_config(resolve_model_configs(model, str(tmp_path))))
        assert sum(weight.numel() for weight in found.parameters()) == weights

    def test_a_plan_says_what_it_read(self, tmp_path, tiny_qwen, caplog):
        args = PaCoRewardConfig(str(tmp_path), use_cpu=True)
        assert resolve_model_configs(str(tiny_qwen), "") == str(tiny_qwen)
        with pytest.raises(OSError, match="someone/judge"):
            plan_memory("someone/judge", args)
        assert not caplog.records
        plan = plan_memory("Qwen/Qwen2.5-VL-7B-Instruct", args)
        assert ["Qwen/Qwen2.5-VL-7B-Instruct" in record.message for record in caplog.records] == [True]
        assert 15.4 * 2**30 < plan.phases[1].device["frozen weights"] < 15.5 * 2**30


def test_the_judges_batch_size_is_its_default():
    assert PlanSettings().judge_batch_size == inspect.signature(PaCoReward).parameters["batch_size"].default
