# SPDX-License-Identifier: Apache-2.0
"""
What only a GPU can show, with tiny models: `make gpu` runs it first, and without CUDA every test is skipped.

`PACO_TRL_TEST_DEVICE=cpu` runs the same code on the CPU, which `benchmarks/gpu/gpu.py --rehearse` does.
"""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms.functional import pil_to_tensor

import tiny_models
from paco_trl import PaCoReward
from paco_trl.rewards import ClipTReward, redness_reward
from paco_trl.utils.placement import placed_on
from test_family_training import CASES, Case, make_dataset
from testing_utils import are_equal, weights_of


DEVICE = os.environ.get("PACO_TRL_TEST_DEVICE", "cuda")
# Read when cuBLAS is first used: its sums are then the same each time
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
ON_DEVICE = {"use_cpu": DEVICE == "cpu", "bf16": True}
ADAPTER = "adapter_model.safetensors"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture
def deterministic() -> dict:
    """Options of runs that are compared bit by bit: some backward kernels add in another order each time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    # The fused kernels of attention stay as they are unless an operation without such a kernel is an error
    yield {"attention_backend": "_native_math"}
    torch.use_deterministic_algorithms(False)


@contextmanager
def skipping_what_is_missing(message: str = "requires `|No GPU found") -> Iterator[None]:
    try:
        yield
    except (ImportError, RuntimeError, ValueError) as error:
        if not re.search(message, str(error)):
            raise
        pytest.skip(str(error))


def check_ratio(trainer) -> None:
    """Before the first update the ratio is within a tenth of the clip range of 1."""
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    deviations = [value for name, value in first.items() if name.startswith("ratio_deviation_on_policy")]
    assert deviations and max(deviations) <= trainer.args.epsilon / 10
    assert first["rewards/redness_reward/std"] > 0  # the images of a group differ


@pytest.mark.parametrize("name", ["flux", *CASES])
def test_ratio_in_bf16(name, make_trainer, tmp_path):
    case = CASES.get(name, Case("build_tiny_flux"))
    trainer = make_trainer(
        model=str(getattr(tiny_models, case.build)(tmp_path / "tiny")), train_dataset=make_dataset(case.num_images),
        num_prompts_per_generation=2, sde_steps=[1, 2], **case.sizes, **ON_DEVICE | case.settings,
    )  # fmt: skip
    trainer.train()
    check_ratio(trainer)


@pytest.mark.parametrize(
    "backend", ["native", "_native_math", "_native_efficient", "_native_flash", "_native_cudnn", "flash", "_flash_3"]
)
def test_attention_backend(backend, make_trainer):
    if DEVICE == "cpu" and backend != "native":
        pytest.skip("its kernels run on a GPU")
    with skipping_what_is_missing("cannot be used here|No (available kernel|viable backend)|execution plan"):
        trainer = make_trainer(attention_backend=backend, **ON_DEVICE)
        trainer.train()
    check_ratio(trainer)


def test_compiled_blocks(make_trainer):
    if DEVICE == "cpu":
        pytest.skip("compiling for the CPU is in test_kernels.py")
    trainer = make_trainer(compile_repeated_blocks=True, **ON_DEVICE)
    trainer.train()
    check_ratio(trainer)
    assert any(module._compiled_call_impl is not None for module in trainer.pipeline.transformer.modules())


@pytest.mark.parametrize("quantization", ["nf4", "int8", "fp8", "fp8_storage"])
def test_quantized_weights(quantization, make_trainer, prompts):
    with skipping_what_is_missing():
        trainer = make_trainer(quantization=quantization, **ON_DEVICE, num_inference_steps_eval=2, eval_baseline=False)
    trainer.train()
    check_ratio(trainer)
    # The transformer leaves the device while the prompts of an evaluation are encoded, and comes back the same
    first, other, again = (trainer.evaluate(prompts.select([row]))["eval_reward"] for row in (5, 6, 5))
    assert first == again != other


def devices_of(module: torch.nn.Module) -> set[str]:
    return {parameter.device.type for parameter in module.parameters()}


def check_same_and_moved(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert are_equal(first, second)
    assert any(value.abs().max() > 1e-3 for name, value in first.items() if "lora_B" in name)


def test_offloading_changes_no_weight(make_trainer, tmp_path, deterministic):
    trained = {}
    for is_offloaded in (False, True):
        options = {"offload_embeddings": is_offloaded, "ema_offload": is_offloaded}
        trainer = make_trainer(output_dir=str(tmp_path / str(is_offloaded)), **ON_DEVICE, **deterministic, **options)
        trainer.train()
        assert devices_of(trainer.model) == {DEVICE}
        assert devices_of(trainer.pipeline.text_encoder) == devices_of(trainer.pipeline.text_encoder_2) == {"cpu"}
        average = next(iter(trainer.ema.average.values()))
        assert average.device.type == ("cpu" if is_offloaded else DEVICE)
        # Not the average, which CPU and GPU may round differently
        trainer.save_model(str(tmp_path / f"{is_offloaded}-adapter"), use_ema=False)
        trained[is_offloaded] = load_file(tmp_path / f"{is_offloaded}-adapter" / ADAPTER)
    check_same_and_moved(trained[False], trained[True])


def test_reward_model_and_transformer_take_turns(make_trainer, tmp_path, deterministic):
    trained, folder = {}, tiny_models.build_tiny_clip(tmp_path / "clip")  # once: its tokenizer differs with each build
    for is_offloaded in (False, True):
        reward, scoring, generating = ClipTReward(folder), set(), set()
        # Which kernel its attention takes would depend on what the transformer asks for at the same time
        reward.model.set_attn_implementation("eager")
        options = {"reward_funcs": reward, "offload_rewards": is_offloaded, "output_dir": str(tmp_path / "out")}
        trainer = make_trainer(**ON_DEVICE, **deterministic, **options)
        reward.model.vision_model.register_forward_pre_hook(
            lambda *_, s=scoring, r=reward: s.update(devices_of(r.model))
        )
        trainer.model.register_forward_pre_hook(lambda *_, g=generating, r=reward: g.update(devices_of(r.model)))
        trainer.train()
        assert scoring == {DEVICE}
        # By default it comes with the first images that are scored, and stays
        assert generating == {"cpu"} if is_offloaded else DEVICE in generating
        trained[is_offloaded] = weights_of(trainer)
    check_same_and_moved(trained[False], trained[True])


@pytest.mark.parametrize("quantization", [None, "nf4", "int8"])
def test_judge_scores_the_same_after_it_was_away(quantization, tmp_path):
    if DEVICE == "cpu" and quantization == "nf4":
        pytest.skip("the CPU's kernel takes no layers as small as these")
    folder = tiny_models.build_tiny_qwen2_5_vl(tmp_path / "judge")
    with skipping_what_is_missing():
        judge = PaCoReward.from_pretrained(folder, DEVICE, torch.bfloat16, quantization=quantization)
    pair = tuple(Image.new("RGB", (56, 56), color) for color in ("red", "blue"))
    before = judge.score([pair], "Are they alike?")
    judge.model.to("cpu")
    for _ in range(2):
        with placed_on([judge.model], torch.device(DEVICE)):
            assert devices_of(judge.model) == {DEVICE}
            assert judge.score([pair], "Are they alike?") == before
        assert devices_of(judge.model) == {"cpu"}


def test_reward_that_computes_on_the_device(make_trainer):
    threads = set()

    def device_redness(completions, **kwargs):
        threads.add(threading.current_thread().name.split("_")[0])
        pixels = torch.stack([pil_to_tensor(image) for image in completions]).to(DEVICE, torch.float32)
        assert not torch.is_grad_enabled()
        red, green, blue = pixels.mean(dim=(2, 3)).unbind(dim=1)
        return ((red - (green + blue) / 2) / 255).tolist()

    trainer = make_trainer(reward_funcs=[redness_reward, device_redness], **ON_DEVICE)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert threads == {"rewards"}
    for entry in logged:
        expected = entry["rewards/redness_reward/mean"]
        assert entry["rewards/device_redness/mean"] == pytest.approx(expected, abs=1e-5) and expected != 0


def test_evaluation(make_trainer, prompts):
    settings = {"eval_strategy": "no", "num_inference_steps_eval": 2, "learning_rate": 5e-2}
    trainer = make_trainer(eval_dataset=prompts.select(range(2)), **ON_DEVICE, **settings)
    trainer.train()
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first["eval_reward"] == second["eval_reward"]
    assert first["eval_reward"] != first["eval_reward_baseline"]


def test_resumed_run_ends_with_the_same_bits(make_trainer, tmp_path, deterministic):
    settings = {**ON_DEVICE, **deterministic, "sde_steps": [0, 1]}
    settings |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 1}

    def run(name, **kwargs):
        trainer = make_trainer(output_dir=str(tmp_path / name), **settings)
        trainer.train(**kwargs)
        return load_file(tmp_path / name / "checkpoint-4" / ADAPTER)

    whole = run("whole")
    middle = load_file(tmp_path / "whole" / "checkpoint-3" / ADAPTER)
    assert not are_equal(middle, whole)
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed", ignore=shutil.ignore_patterns("checkpoint-[234]"))
    resumed = run("resumed", resume_from_checkpoint=True)  # in the middle of a round
    assert are_equal(whole, resumed)
