# SPDX-License-Identifier: Apache-2.0
"""Quantized frozen weights, of pipelines and of judges: what they train, save, score and refuse."""
# ruff: noqa: F811

import contextlib
import functools
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from diffusers import BitsAndBytesConfig, DiffusionPipeline, PipelineQuantizationConfig, TorchAoConfig
from diffusers.quantizers.bitsandbytes import BnB4BitDiffusersQuantizer
from safetensors.torch import load_file
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig
from trl import ModelConfig, get_quantization_config

import launching
import tiny_models
from paco_trl import (
    PaCoGRPOConfig,
    PaCoGRPOTrainer,
    PaCoReward,
    PaCoRewardConfig,
    PaCoRewardTrainer,
    load_for_inference,
)
from paco_trl.commands.evaluate_arguments import JudgeOptions, load_judge
from paco_trl.commands.evaluate_arguments import main as evaluate_main
from paco_trl.commands.merge import MergeArguments, merge
from paco_trl.commands.script_arguments import ScriptArguments, load_rewards
from paco_trl.hub.cards import render_card
from paco_trl.planning.peaks import weights_bytes
from paco_trl.rewards import ConsistencyReward, redness_reward
from paco_trl.trainer.config_checks import check_quantization
from paco_trl.utils.quantization import avoid_packed_nf4, describe_quantization
from test_doctor import HEALTHY, examine, make_arguments, prompt_rows, verdicts  # noqa: F401
from test_family_training import CASES, make_dataset
from test_paco_reward_trainer import colours
from testing_utils import LORA, SMALL_RUN, are_equal, logs_with, square_prompts, weights_of


# Largest fraction of the bytes in float32 that the weights of linear layers take: 4 bits and a scale for 64 weights, or
# 8 bits with a scale for each of their short rows; diffusers stores the linear layers of norms as they are
METHODS = {"nf4": 0.15, "int8": 0.4, "fp8": 0.4, "fp8_storage": 0.5}
# One of them in the quick tests
SLOW_METHODS = ["nf4", *(pytest.param(method, marks=pytest.mark.slow) for method in METHODS if method != "nf4")]
TWO_METHODS = [SLOW_METHODS[0], SLOW_METHODS[-1]]  # whose weights are cast in different ways
ADAPTER = "adapter_model.safetensors"


@contextlib.contextmanager
def nf4_on_cpu():
    """Let diffusers quantize by bitsandbytes without a GPU, which bitsandbytes itself and transformers support."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BnB4BitDiffusersQuantizer, "validate_environment", lambda self, *args, **kwargs: None)
        patch.setattr(BnB4BitDiffusersQuantizer, "update_device_map", lambda self, device_map: device_map)
        # In eval mode bitsandbytes would repack the weights for the CPU's own kernel, which needs multiples of 32
        patch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
        yield


@pytest.fixture(autouse=True)
def _nf4_on_cpu():
    with nf4_on_cpu():
        yield


def stored(module: nn.Module) -> dict[str, list[torch.Tensor]]:
    """The tensors behind each frozen weight, as bytes."""
    tensors = {}
    for name, weight in module.named_parameters():
        if not weight.requires_grad:
            names = weight.__tensor_flatten__()[0] if hasattr(weight, "__tensor_flatten__") else []
            parts = [getattr(weight, part) for part in names] or [weight.data]
            scales = getattr(getattr(weight, "quant_state", None), "absmax", None)
            parts += [] if scales is None else [scales]
            tensors[name] = [part.detach().clone().contiguous().view(torch.uint8) for part in parts]
    return tensors


def stored_bytes(tensor: torch.Tensor) -> int:
    if hasattr(tensor, "__tensor_flatten__"):  # torchao, whose `dtype` is that of the computation
        return sum(getattr(tensor, name).nbytes for name in tensor.__tensor_flatten__()[0])
    state = getattr(tensor, "quant_state", None)  # bitsandbytes
    return tensor.nbytes + (0 if state is None else state.absmax.nbytes)


def linear_bytes(module: nn.Module) -> int:
    named = module.named_modules()
    layers = [each for name, each in named if isinstance(each, nn.Linear) and "lora_" not in name]
    return sum(stored_bytes(weight) for layer in layers for weight in layer.parameters())


def latent(pipeline) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    settings = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 32}
    return pipeline("a red fox", **settings, generator=generator, output_type="latent").images.float()


@pytest.fixture
def plain(tiny_flux) -> DiffusionPipeline:
    return DiffusionPipeline.from_pretrained(tiny_flux)


class TestTraining:
    @pytest.mark.parametrize("method", SLOW_METHODS)
    def test_a_quantized_base(self, make_trainer, plain, method, tmp_path):
        trainer = make_trainer(quantization=method)  # with gradient checkpointing and an average
        transformer, pipeline = trainer.model.get_base_model(), trainer.pipeline
        for module, exact in ((transformer, plain.transformer), (pipeline.text_encoder_2, plain.text_encoder_2)):
            assert linear_bytes(module) < METHODS[method] * linear_bytes(exact) + 4 * 2000  # biases, and `wo` of T5
        assert {weight.dtype for weight in weights_of(trainer).values()} == {torch.float32}
        exact, quantized = latent(plain), latent(pipeline)
        assert 0 < (quantized - exact).abs().max() < 0.3 * exact.abs().max()

        modules = {"transformer": transformer, "clip": pipeline.text_encoder, "t5": pipeline.text_encoder_2}
        before = {name: stored(module) for name, module in modules.items()}
        start = weights_of(trainer)
        trainer.train()
        assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0]
        for name, value in weights_of(trainer).items():
            assert not torch.equal(value, start[name]), name
        for name, module in modules.items():
            after = stored(module)
            assert all(map(torch.equal, sum(before[name].values(), []), sum(after.values(), []))), name

        # The same file as of an unquantized run, which acts on the unquantized base
        trainer.save_model(tmp_path / "saved")
        other = make_trainer(output_dir=str(tmp_path / "other"))
        other.save_model(tmp_path / "unquantized")
        saved, reference = (load_file(tmp_path / name / ADAPTER) for name in ("saved", "unquantized"))
        kinds = [{name: (t.shape, t.dtype) for name, t in each.items()} for each in (saved, reference)]
        assert kinds[0] == kinds[1]
        plain.load_lora_weights(tmp_path / "saved")
        assert (latent(plain) - exact).abs().max() > 1e-3 * exact.abs().max()
        card = (tmp_path / "saved" / "README.md").read_text()
        assert f"| base model in training | quantized: {trainer.quantization} |" in card
        assert "(text_encoder, text_encoder_2, transformer)" in trainer.quantization
        pages = [(tmp_path / name / "README.md").read_text() for name in ("saved", "unquantized")]
        assert ["load_for_inference(" in page for page in pages] == [True, False]
        loaded, _ = load_for_inference(tmp_path / "saved")
        for part in ("transformer", "text_encoder_2"):
            assert describe_quantization(getattr(loaded, part)) == describe_quantization(getattr(pipeline, part))

    @pytest.mark.parametrize("method", TWO_METHODS)
    def test_ratio_in_bf16(self, make_trainer, method):
        trainer = make_trainer(quantization=method, bf16=True, max_steps=1, loss_type="grpo_guard", beta=0.1)
        trainer.train()
        assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0]

    def test_nft(self, make_nft, tiny_flux):
        trainer = make_nft(model=str(tiny_flux), quantization="int8")
        before, start = stored(trainer.model), weights_of(trainer)
        trainer.train()
        assert all(map(torch.equal, sum(before.values(), []), sum(stored(trainer.model).values(), [])))
        assert any(not torch.equal(value, start[name]) for name, value in weights_of(trainer).items())

    @pytest.mark.slow
    @pytest.mark.parametrize("family", CASES)
    def test_every_family(self, make_trainer, family, tmp_path):
        case = CASES[family]
        folder = getattr(tiny_models, case.build)(tmp_path / "tiny")
        side, scale = (1024, 1 / 16) if case.num_images else (64, 1 / 2)
        method = list(METHODS)[list(CASES).index(family) % len(METHODS)]  # FLUX has all, above
        trainer = make_trainer(
            model=str(folder), quantization=method, train_dataset=make_dataset(case.num_images), height=side, width=side,
            resolution_scale=scale, num_prompts_per_generation=2, max_steps=1,
            **case.settings | {"num_generations": 2, "per_device_train_batch_size": 2},
        )  # fmt: skip
        assert "transformer" in trainer.quantization and "text_encoder" in trainer.quantization
        assert trainer.pipeline.text_encoder.dtype == torch.float32  # which pipelines cast embeddings to
        trainer.train()
        assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0]

    @pytest.mark.slow
    @pytest.mark.parametrize("method", ["int8", "fp8_storage"])
    def test_resume_is_bit_exact(self, make_trainer, method, tmp_path):
        settings = {"quantization": method, "num_prompts_per_generation": 2, "max_steps": 3}
        settings |= {"save_strategy": "steps", "save_steps": 1}
        whole = make_trainer(output_dir=str(tmp_path / "whole"), **settings)
        whole.train()
        shutil.copytree(tmp_path / "whole" / "checkpoint-1", tmp_path / "resumed" / "checkpoint-1")
        resumed = make_trainer(output_dir=str(tmp_path / "resumed"), **settings)
        resumed.train(resume_from_checkpoint=True)
        for file in (ADAPTER, "policy.safetensors"):
            assert are_equal(*(load_file(tmp_path / name / "checkpoint-3" / file) for name in ("whole", "resumed")))
        with pytest.raises(ValueError, match=f"quantization: '{method}', now None"):
            make_trainer(output_dir=str(tmp_path / "resumed"), resume_from_checkpoint=True)

    @pytest.mark.slow
    def test_two_processes_are_one(self, tiny_flux, tmp_path):
        script = tmp_path / "script.py"
        script.write_text(
            "import sys\nfrom pathlib import Path\nimport test_quantization\n"
            "test_quantization.train_all(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        )
        train_all(tiny_flux, tmp_path / "1")
        launching.check_run([script, tiny_flux, tmp_path / "2"], config=launching.CPU_DDP)
        for method in METHODS:
            one, two = (load_file(tmp_path / number / method / ADAPTER) for number in "12")
            size = max(value.abs().max() for value in one.values())
            assert all((value - two[name]).abs().max() < 1e-3 * size for name, value in one.items()), method


def train_all(model: Path, output: Path) -> None:
    """Train and save an adapter with each method, in this process or as one of several."""
    settings = SMALL_RUN | {"num_prompts_per_generation": 2, "per_device_train_batch_size": 2, "max_steps": 1}
    settings["ddp_backend"] = "gloo" if "RANK" in os.environ else None
    for method in METHODS:
        args = PaCoGRPOConfig(output_dir=str(output / method), quantization=method, **settings)
        with nf4_on_cpu():
            trainer = PaCoGRPOTrainer(str(model), redness_reward, args, square_prompts(), peft_config=LORA)
        trainer.train()
        trainer.save_model()


class TestOtherWays:
    @pytest.fixture
    def config(self) -> PipelineQuantizationConfig:
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": torch.float32}
        return PipelineQuantizationConfig(quant_mapping={"transformer": BitsAndBytesConfig(**settings)})

    def test_a_config_of_diffusers(self, make_trainer, config):
        trainer = make_trainer(model_init_kwargs={"quantization_config": config}, max_steps=1)
        assert trainer.quantization == "fp4 by bitsandbytes (transformer)"
        assert "fp4" in json.loads(trainer.args.to_json_string())["model_init_kwargs"]["quantization_config"]["config"]
        assert trainer.args.model_init_kwargs["quantization_config"] is config
        trainer.train()
        assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0]
        assert "fp4" in trainer._identity["quantization"]

    @pytest.mark.parametrize("is_whole", [True, False])
    def test_in_the_trainers_signature(self, make_trainer, config, tiny_flux, is_whole):
        """As of TRL's trainers; that of a single model is of the transformer alone."""
        given = config if is_whole else config.quant_mapping["transformer"]
        trainer = make_trainer(quantization_config=given, max_steps=1)
        assert describe_quantization(trainer.pipeline.transformer)
        assert bool(describe_quantization(trainer.pipeline.text_encoder_2)) is (
            is_whole and "text_encoder_2" in config.quant_mapping
        )
        trainer.train()
        with pytest.raises(ValueError, match="also in `model_init_kwargs`"):
            make_trainer(quantization_config=given, model_init_kwargs={"quantization_config": given})
        with pytest.raises(ValueError, match="Quantize the pipeline when you load it"):
            make_trainer(quantization_config=given, model=DiffusionPipeline.from_pretrained(tiny_flux))

    def test_a_loaded_pipeline(self, make_trainer, tiny_flux, config):
        pipeline = DiffusionPipeline.from_pretrained(tiny_flux, dtype=torch.float32, quantization_config=config)
        trainer = make_trainer(model=pipeline, max_steps=1)
        assert trainer.quantization == trainer._identity["quantization"] == "fp4 by bitsandbytes (transformer)"
        trainer.train()
        assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0]
        pipeline = DiffusionPipeline.from_pretrained(tiny_flux, dtype=torch.float32, quantization_config=config)
        with pytest.raises(ValueError, match="its own weights are trained, which get no gradients"):
            make_trainer(model=pipeline, peft_config=None)

    def test_twice(self, make_trainer, plain, config):
        with pytest.raises(ValueError, match="`quantization` is 'int8', but the pipeline is loaded, or"):
            make_trainer(model=plain, quantization="int8")
        with pytest.raises(ValueError, match="or `model_init_kwargs` has a `quantization_config`"):
            make_trainer(quantization="int8", model_init_kwargs={"quantization_config": config})


class TestRefused:
    @pytest.mark.parametrize(("method", "package"), [("nf4", "bitsandbytes"), ("int8", "torchao")])
    def test_not_installed(self, make_trainer, tiny_qwen, method, package, monkeypatch):
        monkeypatch.setattr("paco_trl.utils.quantization.find_spec", lambda name: None)
        message = rf"`quantization` '{method}' requires `{package}`: pip install \"paco_trl\[quantization\]\""
        with pytest.raises(ImportError, match=message):
            make_trainer(quantization=method)
        with pytest.raises(ImportError, match=message):
            PaCoReward.from_pretrained(tiny_qwen, quantization=method)

    def test_deepspeed(self):
        check_quantization(None, is_full=True, is_sharded=True, is_compiled=True)
        with pytest.raises(ValueError, match="quantized .nf4., but DeepSpeed and FSDP .*multi_gpu.yaml"):
            check_quantization("nf4", is_full=False, is_sharded=True, is_compiled=False)

    def test_fsdp(self, make_trainer, monkeypatch):
        """Before a model is loaded."""
        with pytest.raises(OSError, match="nowhere"):
            make_trainer(quantization="nf4", model="/nowhere")
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", "2")
        with pytest.raises(ValueError, match="quantized .nf4., but DeepSpeed and FSDP .*multi_gpu.yaml"):
            make_trainer(quantization="nf4", model="/nowhere")

    def test_compiled_blocks(self, make_trainer, tiny_flux):
        for method in ("int8", "fp8", "fp8_storage"):
            with pytest.raises(ValueError, match=f"quantized .{method}., but only 'nf4' works with `compile_repeated"):
                make_trainer(quantization=method, compile_repeated_blocks=True, model="/nowhere")
        make_trainer(quantization="nf4", compile_repeated_blocks=True)
        config = TorchAoConfig(Float8WeightOnlyConfig())
        config = PipelineQuantizationConfig(quant_mapping={"transformer": config})
        pipeline = DiffusionPipeline.from_pretrained(tiny_flux, dtype=torch.float32, quantization_config=config)
        with pytest.raises(ValueError, match="Float8WeightOnlyConfig by torchao., but only 'nf4'"):
            make_trainer(model=pipeline, compile_repeated_blocks=True)

    def test_merging_into_quantized_files(self, make_trainer, tiny_flux, tmp_path):
        make_trainer(quantization="int8").save_model(tmp_path / "adapter")
        merge(MergeArguments(str(tmp_path / "adapter"), str(tmp_path / "merged")))  # the base itself is not quantized
        files = load_file(tmp_path / "merged" / "transformer" / "diffusion_pytorch_model.safetensors")
        assert {weight.dtype for weight in files.values()} == {torch.float32}
        base = tmp_path / "quantized" / tiny_flux.name
        shutil.copytree(tiny_flux, base)
        path = base / "transformer" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"load_in_4bit": True}}))
        with pytest.raises(ValueError, match="are quantized, and quantizing"):
            merge(MergeArguments(str(tmp_path / "adapter"), str(tmp_path / "other"), str(base)))
        assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("method", SLOW_METHODS)
def test_doctor(examine, method):
    rows = examine(quantization=method, plans=True)
    assert verdicts(rows) == HEALTHY


@pytest.mark.parametrize("method", METHODS)
def test_the_plan_counts_the_stored_bytes(make_trainer, method):
    plain, quantized = (make_trainer(quantization=each).model.base_model for each in (None, method))
    planned = weights_bytes(plain, False, method)
    stored = sum(stored_bytes(weight) for weight in quantized.parameters() if not weight.requires_grad)
    assert planned < 0.9 * weights_bytes(plain, False)
    assert planned == pytest.approx(stored, rel=0.1)  # scales of rows are not planned: they are short here


class TestJudge:
    pairs = functools.cached_property(lambda self: [tuple(row["images"]) for row in colours(8, 1)])

    @pytest.mark.parametrize("method", SLOW_METHODS[:-1])
    def test_scores(self, tiny_qwen, method):
        exact = PaCoReward.from_pretrained(tiny_qwen)
        judge = ConsistencyReward(tiny_qwen, quantization=method, dtype="float32").judge
        assert linear_bytes(judge.model) < 0.6 * linear_bytes(exact.model)  # the head stays exact
        scores = [np.array(each.score(self.pairs, "Same colour?")) for each in (exact, judge)]
        assert 0 < np.abs(scores[0] - scores[1]).max() < 0.1
        assert np.ptp(scores[0]) > 0
        assert judge.fingerprint != exact.fingerprint
        again = PaCoReward.from_pretrained(tiny_qwen, dtype="float32", quantization=method)
        assert judge.fingerprint == again.fingerprint

    @pytest.mark.parametrize(
        "kind, checkpointing", [("4bit", True), pytest.param("4bit", False, marks=pytest.mark.slow), ("8bit", True)]
    )
    def test_qlora(self, tiny_qwen, tmp_path, kind, checkpointing):
        config = get_quantization_config(ModelConfig(dtype="float32", **{f"load_in_{kind}": True}))  # as the example
        args = PaCoRewardConfig(
            output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            max_steps=6, per_device_train_batch_size=8, learning_rate=1e-2, disable_tqdm=True, logging_steps=1,
            warmup_steps=0, gradient_checkpointing=checkpointing, max_pixels=None, first_token_weight=1.0,
        )  # fmt: skip
        trainer = PaCoRewardTrainer(str(tiny_qwen), args, colours(48, 0), quantization_config=config)
        adapter = weights_of(trainer)
        assert {value.dtype for value in adapter.values()} == {torch.float32}
        before = stored(trainer.model)
        base = PaCoReward.from_pretrained(tiny_qwen)
        size = sum(weight.nbytes for weight in base.model.parameters())
        assert sum(part.nbytes for parts in before.values() for part in parts) < 0.75 * size
        trainer.train()
        losses = logs_with(trainer, "loss")
        assert losses[-1] < losses[0]
        assert any(not torch.equal(value, adapter[name]) for name, value in weights_of(trainer).items())
        assert all(map(torch.equal, sum(before.values(), []), sum(stored(trainer.model).values(), [])))
        # On the unquantized model
        trainer.save_model()
        judge = PaCoReward.from_pretrained(tmp_path / "out")
        assert np.abs(np.subtract(*(each.score(self.pairs, "Same colour?") for each in (judge, base)))).max() > 1e-3
        name = {"4bit": "nf4", "8bit": "llm_int8"}[kind]
        card = render_card(trainer._model_card()).text
        assert f"| base model in training | quantized: {name} by bitsandbytes |" in card

    def test_narrow_layers_on_any_cpu(self, tiny_qwen, monkeypatch):
        """bitsandbytes packs weights on CPUs with AVX512, which fails for the layers of tiny models."""
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)
        layers = nn.Sequential(Linear4bit(32, 32), Linear4bit(64, 24), Linear4bit(64, 32)).to("cpu").eval()
        assert all(layer.support_avx512bf16_for_cpu for layer in layers)
        with pytest.raises(RuntimeError, match="is invalid for input of size"), torch.no_grad():
            layers[0](torch.zeros(1, 32))
        layers[0] = Linear4bit(32, 32).to("cpu").eval()
        avoid_packed_nf4(layers)
        assert [layer.support_avx512bf16_for_cpu for layer in layers] == [False, False, True]
        assert None not in PaCoReward.from_pretrained(tiny_qwen, quantization="nf4").score(self.pairs, "Same colour?")

    def test_on_the_command_line(self, tiny_qwen):
        arguments = ScriptArguments(
            rewards=["consistency", "edit"], judge_model=str(tiny_qwen), judge_quantization="int8"
        )
        for reward in load_rewards(arguments):
            assert type(reward.judge.model.lm_head.weight) is nn.Parameter
            assert any(hasattr(weight, "__tensor_flatten__") for weight in reward.judge.model.parameters())
        judge = load_judge(JudgeOptions(judge_quantization="int8", device="cpu"), str(tiny_qwen), None)
        assert any(hasattr(weight, "__tensor_flatten__") for weight in judge.model.parameters())
        arguments.judge_attn_implementation = "eager"
        assert {reward.judge.model.config._attn_implementation for reward in load_rewards(arguments)} == {"eager"}
        judge = load_judge(JudgeOptions(device="cpu"), str(tiny_qwen), None)
        assert judge.model.config._attn_implementation == "sdpa"
        assert not any(hasattr(weight, "__tensor_flatten__") for weight in judge.model.parameters())
        for words in (["m", "--judge_url", "http://127.0.0.1:1/v1"], ["clip-i"]):
            for name, value in (("judge_quantization", "int8"), ("judge_attn_implementation", "eager")):
                with pytest.raises(ValueError, match=f"`--{name}.*Leave it out"):
                    evaluate_main(["judge", f"--{name}", value, "--judge_model", *words])
        arguments.judge_attn_implementation = "nope"
        with pytest.raises(ValueError, match="`--judge_attn_implementation` is 'nope'.* sdpa"):
            load_rewards(arguments)
        arguments.judge_attn_implementation = None
        arguments.judge_url = "http://127.0.0.1:1/v1"
        with pytest.raises(ValueError, match="'int8', but a served judge"):
            load_rewards(arguments)
        with pytest.raises(ValueError, match="'fp8_storage'; it must be one of 'nf4', 'int8', 'fp8'"):
            PaCoReward.from_pretrained(tiny_qwen, quantization="fp8_storage")
