# SPDX-License-Identifier: Apache-2.0
"""
The package on a GPU that is host memory (see simulated_cuda/README.md): `make test-cuda` runs it after `test_gpu.py`,
which has each family, kind of quantized weights and attention backend.
"""

import functools
import gc
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from diffusers import FluxTransformer2DModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import CLIPTextModel, Qwen2_5_VLForConditionalGeneration, T5EncoderModel

from launching import ROOT, free_port
from paco_trl import (
    PaCoGRPOTrainer,
    PaCoNFTConfig,
    PaCoNFTTrainer,
    PaCoReward,
    PaCoRewardConfig,
    PaCoRewardTrainer,
    load_for_inference,
)
from paco_trl.commands import build_arguments as build
from paco_trl.commands import doctor, memory_plans
from paco_trl.commands import evaluate_arguments as evaluate
from paco_trl.commands.main import main
from paco_trl.data import demo_prompts_path, load_image_set_prompts
from paco_trl.hub.card_data import ImageModelCardData, save_card_data
from paco_trl.image_benchmarks.comparison_app import Comparison
from paco_trl.rewards import ClipTReward, ConsistencyReward, redness_reward
from paco_trl.rollout import sde
from paco_trl.rollout.rounds import Batch
from test_evaluate_generation import make_adapter
from test_gpu import ADAPTER, ON_DEVICE, check_ratio, check_same_and_moved, devices_of
from test_paco_reward_trainer import mixed
from testing_utils import LORA, SMALL_RUN, are_equal
from tiny_models import build_tiny_clip, build_tiny_qwen2_5_vl


sys.path += [str(ROOT / "benchmarks" / folder) for folder in ("gpu", "speed", "memory")]

import gpu  # noqa: E402


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif("SIMULATED_CUDA_OPERATORS" not in os.environ, reason="there is no simulated GPU"),
]
MIXED_DEVICES = "Expected all tensors to be on the same device"
EACH_STEP = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    """Directories of a tiny CLIP and a tiny judge."""
    folder = tmp_path_factory.mktemp("models")
    built = {"clip": build_tiny_clip(folder / "clip"), "judge": build_tiny_qwen2_5_vl(folder / "judge")}
    return {name: str(path) for name, path in built.items()}


def check_resuming(run, output_dir: Path, adapter: str = ADAPTER) -> None:
    """`run(**kwargs)` trains 4 steps: resumed after the third, it ends with the bits of the uninterrupted run."""
    run()
    whole = load_file(output_dir / "checkpoint-4" / adapter)
    middle = load_file(output_dir / "checkpoint-3" / adapter)
    assert not are_equal(middle, whole)
    shutil.rmtree(output_dir / "checkpoint-4")
    run(resume_from_checkpoint=True)
    assert are_equal(whole, load_file(output_dir / "checkpoint-4" / adapter))


class TestSimulation:
    """The device computes as CUDA does; what it refuses is in `TestPlantedErrors`."""

    def test_results_take_the_size_of_an_output(self):
        out = torch.empty(0, device="cuda")
        torch.add(torch.ones(2, 3, device="cuda"), 1, out=out)
        assert out.shape == (2, 3) and out.device.type == "cuda" and out.sum().item() == 12

    def test_gradients_are_those_of_the_cpu(self):
        gradients = {}
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            layers = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.RMSNorm(16))
            x = torch.randn(2, 3, 4, 4).to(device).requires_grad_()
            (layers.to(device)(x) * torch.arange(16.0, device=device)).mean().backward()
            gradients[device] = [x.grad, *(parameter.grad for parameter in layers.parameters())]
        for expected, found in zip(gradients["cpu"], gradients["cuda"], strict=True):
            assert found.device.type == "cuda" and expected.abs().max() > 1e-4
            assert torch.allclose(found.cpu(), expected, atol=1e-6)

    @pytest.mark.parametrize("kernel", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH"])
    @pytest.mark.parametrize("num_heads", [4, 2])
    def test_attention_is_that_of_the_cpu(self, kernel, num_heads):
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, 4, 6, 16), (2, num_heads, 6, 16), (2, num_heads, 6, 16)]  # (B, heads, length, E)
        inputs = [torch.randn(shape, generator=generator) for shape in shapes]
        results = {}
        for device in ("cpu", "cuda"):
            leaves = [each.to(device, torch.bfloat16).requires_grad_() for each in inputs]
            backend = getattr(torch.nn.attention.SDPBackend, "MATH" if device == "cpu" else kernel)
            with torch.nn.attention.sdpa_kernel([backend]):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *leaves, is_causal=True, enable_gqa=num_heads < 4
                )
            (out.float() * torch.arange(16.0, device=device)).sum().backward()
            results[device] = [each.detach().float().cpu() for each in (out, *(leaf.grad for leaf in leaves))]
        for expected, found in zip(results["cpu"], results["cuda"], strict=True):
            assert expected.abs().max() > 0.1
            assert torch.allclose(found, expected, atol=0.03 * expected.abs().max().item())

    def test_fresh_memory_is_not_zero(self):
        assert torch.empty(10**7, device="cuda").isnan().all()  # too large for what was returned

    def test_memory_is_counted_and_returned(self):
        before = torch.cuda.memory_allocated()
        held = torch.ones(1000, device="cuda")
        assert torch.cuda.memory_allocated() >= before + 4000
        del held
        assert torch.cuda.memory_allocated() == before


class TestPlantedErrors:
    """What only a GPU refuses is found: a tensor, a generator, and an index left on the CPU."""

    @pytest.mark.parametrize("where", ["device", "tensor", "generator", "index"])
    def test_in_the_noise_of_a_step(self, where, make_trainer, monkeypatch):
        def noise(mean, generator):
            if where == "tensor":
                return torch.randn(mean.shape)
            if where == "generator":
                return torch.randn(mean.shape, device=mean.device, generator=torch.Generator())
            index = torch.arange(len(mean), device="cpu" if where == "index" else mean.device)
            return torch.randn_like(mean).index_select(0, index)

        monkeypatch.setattr(sde, "_noise_like", noise)
        trainer = make_trainer(**ON_DEVICE, max_steps=1)
        if where == "device":
            trainer.train()
            check_ratio(trainer)
        else:
            with pytest.raises(RuntimeError, match="generator" if where == "generator" else MIXED_DEVICES):
                trainer.train()

    def test_in_the_advantages(self, make_trainer, monkeypatch):
        column = Batch.column
        monkeypatch.setattr(Batch, "column", lambda self, name, device: column(self, name))
        with pytest.raises(RuntimeError, match=MIXED_DEVICES):
            make_trainer(**ON_DEVICE, max_steps=1).train()


class TestTraining:
    def test_every_option_that_moves_tensors(self, make_trainer, prompts, models, tmp_path):
        settings = {
            "offload_embeddings": True, "offload_rewards": True, "ema_decay": 0.9, "ema_offload": True, "beta": 0.01,
            "tail_steps": 2, "sde_steps": [1], "vae_tiling": True,
            "embeddings_dir": str(tmp_path / "embeddings"), "gradient_checkpointing": True, "log_completions": True,
            "reward_weights": [1.0, 1.0], "eval_strategy": "steps", "eval_steps": 2, "num_inference_steps_eval": 4,
        }  # fmt: skip

        turns: list[list[str]] = []

        def run(**kwargs):
            rewards = [ClipTReward(models["clip"]), ConsistencyReward(models["judge"])]
            options = {"reward_funcs": rewards, "eval_dataset": prompts.select([0]), **ON_DEVICE, **settings}
            trainer = make_trainer(**options, **EACH_STEP)
            encoder, frozen = trainer.pipeline.text_encoder, trainer.model.get_base_model().proj_out
            encoder.register_forward_pre_hook(lambda *_: turns.append([*devices_of(encoder), *devices_of(frozen)]))
            trainer.train(**kwargs)
            assert devices_of(trainer.model) == {"cuda"}
            for module in (trainer.pipeline.text_encoder, trainer.pipeline.vae, rewards[0].model):
                assert devices_of(module) == {"cpu"}
            assert {average.device.type for average in trainer.ema.average.values()} == {"cpu"}
            assert any(entry.get("kl", 0) > 0 for entry in trainer.state.log_history)

        check_resuming(run, tmp_path / "out")
        assert any((tmp_path / "embeddings").rglob("*.safetensors"))
        # Also of the evaluation, when the transformer was on the device
        assert len(turns) > 2 and set(map(tuple, turns)) == {("cuda", "cpu")}

    @pytest.mark.parametrize("loss_type", ["nft", "awm"])
    def test_objectives_without_stochastic_steps(self, loss_type, tiny_flux, prompts, tmp_path):
        def run(**kwargs):
            settings = SMALL_RUN | {"num_prompts_per_generation": 2, "num_inference_steps": 3} | ON_DEVICE | EACH_STEP
            args = PaCoNFTConfig(str(tmp_path / "out"), **settings, loss_type=loss_type)
            trainer = PaCoNFTTrainer(str(tiny_flux), redness_reward, args, prompts, peft_config=LORA)
            trainer.train(**kwargs)
            assert devices_of(trainer.model) == {"cuda"}

        check_resuming(run, tmp_path / "out")

    def test_judge(self, models, tmp_path):
        """Two workers and pinned memory, the defaults on a GPU alone; the trained judge scores on the GPU."""

        def run(**kwargs):
            args = PaCoRewardConfig(
                str(tmp_path / "out"), bf16=True, first_token_weight=0.1, per_device_train_batch_size=2,
                gradient_accumulation_steps=2, learning_rate=1e-2, logging_steps=2, report_to="none",
                disable_tqdm=True, eval_strategy="steps", eval_steps=2, **EACH_STEP,
            )  # fmt: skip
            trainer = PaCoRewardTrainer(models["judge"], args, mixed(8), eval_dataset=mixed(3, 1))
            assert trainer.get_train_dataloader().num_workers == 2 and args.dataloader_pin_memory
            trainer.train(**kwargs)
            assert devices_of(trainer.model) == {"cuda"}
            trainer.save_model(str(tmp_path / "judge"))

        check_resuming(run, tmp_path / "out")
        judge = PaCoReward.from_pretrained(tmp_path / "judge")
        assert judge.device.type == "cuda"
        pairs = [tuple(row["images"]) for row in mixed(3, 2)]
        assert all(0 < score < 1 for score in judge.score(pairs, "Are they alike?"))

    @pytest.mark.parametrize(
        "launched",
        [
            {},
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"},
        ],
    )
    def test_two_devices(self, tiny_flux, tmp_path, launched):
        """DDP and FSDP2 by gloo: each process keeps to its device, and both have the same weights."""
        variables = {
            "SIMULATED_CUDA_DEVICES": "2", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()), "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)]),
        }  # fmt: skip
        script = ROOT / "tests" / "simulated_cuda" / "two_devices.py"
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), str(tiny_flux), str(tmp_path)],
                env=os.environ | variables | launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            printed = [process.communicate(timeout=540)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert [process.returncode for process in processes] == [0, 0], "\n".join(text[-3000:] for text in printed)
        first, second = (load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(2))
        check_same_and_moved(first, second)

    def test_out_of_memory(self, make_trainer):
        """It ends the run, and is no failed reward or missing image."""
        total = torch.cuda.get_device_properties(0).total_memory
        trainer = make_trainer(**ON_DEVICE, max_steps=1)
        torch.cuda.empty_cache()
        try:
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (2 << 20)) / total)
            with pytest.raises(torch.OutOfMemoryError):
                trainer.train()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        make_trainer(**ON_DEVICE, max_steps=1).train()


KINDS = {
    "text": (CLIPTextModel, T5EncoderModel),
    "transformer": (FluxTransformer2DModel,),
    "judge": (Qwen2_5_VLForConditionalGeneration,),
}


@pytest.fixture
def beside(monkeypatch) -> list[frozenset[str]]:
    """Kinds of models that were on the device together, each time that one of them computed."""
    built: WeakKeyDictionary = WeakKeyDictionary()
    found: list[frozenset[str]] = []
    for kind, classes in KINDS.items():
        for model in classes:

            def init(self, *args, _kind=kind, _init=model.__init__, **kwargs):
                built[self] = _kind
                _init(self, *args, **kwargs)

            def forward(self, *args, _forward=model.forward, **kwargs):
                found.append(frozenset(name for one, name in built.items() if "cuda" in devices_of(one)))
                return _forward(self, *args, **kwargs)

            monkeypatch.setattr(model, "__init__", functools.wraps(model.__init__)(init))
            monkeypatch.setattr(model, "forward", functools.wraps(model.forward)(forward))
    return found


class TestWhatIsOnTheDevice:
    """Text encoders, transformer and judge take turns in every command that generates, as in training."""

    @pytest.fixture(scope="class")
    def trained(self, tiny_flux, tmp_path_factory) -> Path:
        """An adapter of a run on NF4 weights."""
        folder = tmp_path_factory.mktemp("trained") / "nf4"
        make_adapter(folder, str(tiny_flux), 0)
        loading = {"quantization": "nf4", "offload": True, "vae_tiling": True}
        call = {"height": 32, "width": 32, "num_inference_steps": 2, "guidance_scale": 1.0}
        run = {"inference_size": [32, 32], "guidance_scale": 1.0, "precision": "bfloat16"}
        card = ImageModelCardData("nf4", "nf4", str(tiny_flux), loading=loading, call=call, settings=run)
        save_card_data(card, folder)
        return folder

    @pytest.fixture(scope="class")
    def sets(self, tmp_path_factory) -> Path:
        file = tmp_path_factory.mktemp("prompts") / "sets.jsonl"
        rows = load_image_set_prompts(demo_prompts_path()).filter(lambda row: row["rows"] == row["cols"] == 2)
        criteria = {"Style": {"paint": "All images are painted alike."}}
        rows = [{**row, "criteria": criteria, "height": 32, "width": 32} for row in rows.select(range(3))]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    @pytest.mark.parametrize("offload", [True, False])
    @pytest.mark.parametrize("quantization", ["nf4", "int8", "fp8_storage", None])
    def test_load_for_inference(self, trained, beside, quantization, offload):
        pipe, call = load_for_inference(trained, quantization=quantization, offload=offload)
        images = [pipe(prompt, **call).images[0] for prompt in ("a fox", "a lighthouse at dusk")]
        assert images[0].tobytes() != images[1].tobytes()
        assert (frozenset(["text", "transformer"]) in beside) is not offload
        if offload:
            assert {*beside} == {frozenset(["text"]), frozenset(["transformer"])}

    def test_commands_for_datasets(self, trained, sets, beside, tmp_path):
        """All prompts of a command are encoded in one turn, and the images are those without turns."""
        for name, words in (("turns", ""), ("together", "--offload False")):
            data, common = f"--dataset_name {sets}", f"--adapter {trained} {words}".split()
            evaluate.main([*f"generate {data} --output_dir {tmp_path}/{name}/images".split(), *common])
            gc.collect()  # of a pipeline and its hooks, which reference each other: in use, its process has ended
            build.main(f"prompts {data} --build_dir {tmp_path}/{name}/build".split())
            build.main([*f"grids --build_dir {tmp_path}/{name}/build --seeds 0 1".split(), *common])
            if name == "turns":
                assert [kinds for kinds, _ in groupby(beside)] == [frozenset(["text"]), frozenset(["transformer"])] * 2
                beside.clear()
        assert frozenset(["text", "transformer"]) in beside
        files = {path.relative_to(tmp_path / "turns"): path for path in (tmp_path / "turns").rglob("images/*/*.png")}
        assert len(files) == 9
        for path, file in files.items():
            assert (tmp_path / "together" / path).read_bytes() == file.read_bytes()
        for folder in ("images", "build/grids"):
            settings = json.loads((tmp_path / "turns" / folder / "settings.json").read_text())
            assert settings["quantization"] == "nf4" and settings["num_inference_steps"] == 2

    def test_evaluate_prompts(self, trained, sets, models, beside, tmp_path):
        words = f"prompts --dataset_name {sets} --adapter {trained} --output_dir {tmp_path}/out"
        words += f" --rewards rubric:consistency --judge_model {models['judge']}"
        evaluate.main(words.split())
        assert {*beside} == {frozenset(["text"]), frozenset(["transformer"]), frozenset(["judge"])}
        (results,) = (tmp_path / "out").glob("*/results.json")
        systems = json.loads(results.read_text())["systems"]
        assert [system["settings"]["quantization"] for system in systems] == ["nf4", "nf4"]

    @pytest.mark.parametrize("offload", [True, False])
    def test_space(self, trained, models, beside, offload):
        pipeline = load_for_inference(trained, offload=offload)[0]
        comparison = Comparison(pipeline, PaCoReward.from_pretrained(models["judge"]), (32, 32), 1.0)
        beside.clear()
        base, adapted = comparison.generate("A red panda.", 2, 2, seed=1, steps=2)
        assert [panel.tobytes() for panel in base] != [panel.tobytes() for panel in adapted]
        scores = comparison.score("A red panda.", [base, adapted])
        assert [len(row) for row in scores] == [6, 6]
        next(comparison.generate("A red panda.", 2, 2, seed=2, steps=2))
        alone = {frozenset(["text"]), frozenset(["transformer"]), frozenset(["judge"])}
        assert {*beside} == (alone if offload else {frozenset(KINDS)})


def test_doctor(tiny_flux, prompts, tmp_path):
    prompts.to_json(tmp_path / "prompts.jsonl")
    words = f"--model_name_or_path {tiny_flux} --dataset_name {tmp_path}/prompts.jsonl --output_dir {tmp_path}/out"
    words += " --rewards redness --height 64 --width 64 --num_prompts_per_generation 2 --num_generations 4 --lora_r 4"
    words += " --per_device_train_batch_size 2 --num_inference_steps 3 --sde_steps 0 --max_steps 1 --report_to none"
    rows = {row.check: row for row in doctor.examine("grpo", words.split(), Console(quiet=True))}
    assert {row.verdict for row in rows.values()} <= {"ok", "warning"}, rows
    assert "Forward and backward took" in rows["ratio"].finding


@pytest.mark.parametrize(
    ("words", "usable", "is_checkpointed"),
    [("", 0.9, False), ("--gradient_checkpointing True", 0.9, True), ("", 1e-6, True), ("", None, True)],
)
def test_checkpointing_is_off_where_it_is_not_needed(
    words, usable, is_checkpointed, tiny_flux, prompts, tmp_path, monkeypatch, capfd, caplog
):
    found, compute_loss = set(), PaCoGRPOTrainer.compute_loss

    def watch(self, model, *args, **kwargs):
        found.add(model.get_base_model().is_gradient_checkpointing)
        return compute_loss(self, model, *args, **kwargs)

    monkeypatch.setattr(PaCoGRPOTrainer, "compute_loss", watch)
    monkeypatch.setattr(memory_plans, "USABLE_FRACTION", usable)  # with `None` the plan fails
    prompts.to_json(tmp_path / "prompts.jsonl")
    words += f" --model_name_or_path {tiny_flux} --dataset_name {tmp_path}/prompts.jsonl --output_dir {tmp_path}/out"
    words += " --rewards redness --height 64 --width 64 --num_prompts_per_generation 2 --num_generations 4 --lora_r 4"
    words += " --per_device_train_batch_size 2 --num_inference_steps 3 --sde_steps 0 --max_steps 1 --report_to none"
    assert main(["grpo", *words.split()]) == 0
    assert found == {is_checkpointed}
    said = re.findall("gradient checkpointing is off.*planned to take [0-9.]+ [KMG]iB of ", capfd.readouterr().err)
    assert len(said) == (not is_checkpointed)
    assert ("stays on, since the memory cannot be planned: " in caplog.text) == (usable is None)


# Settings that cannot run here
LEFT_OUT = ("compiled", "_flash_3", "flash-attn")


@pytest.mark.parametrize("name", [name for name in gpu.STEPS if name != "tests"])
def test_a_step_of_make_gpu(name, monkeypatch, tmp_path):
    """With small models, and in this process, where everything is imported."""

    def execute(command: list[str], log: Path, seconds: float) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", command)
            runpy.run_path(command[0], run_name="__main__")
        return 0

    monkeypatch.setattr(gpu, "execute", execute)
    assert gpu.main(["--rehearse", "--device", "cuda", "--steps", name, "--output", str(tmp_path)]) == 0
    report = json.loads((tmp_path / f"gpu_{name}.json").read_text())
    left_out = [entry for entry in report.get("left out", []) if not any(x in entry["setting"] for x in LEFT_OUT)]
    assert report["ratios"] and left_out == []
    if name == "flux-512-memory":  # every setting ran
        settings = [run["setting"] for run in report["runs"]]
        assert settings[:2] == ["batch 2", "batch 2, checkpointing False"] and "batch 2, quantization nf4" in settings
    for run in report.get("runs", []):
        assert run["peak memory, GiB"].keys() == {"encoding", "rollout", "training"}
        assert run["most memory reserved, GiB"] > 0
        assert max(run["largest mean |ratio - 1| on policy, by round"]) < 1e-4
