# SPDX-License-Identifier: Apache-2.0
"""The editing examples as users start them, their defaults, and `paco-trl doctor` on editing prompts."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from PIL import Image, ImageDraw
from rich.console import Console
from trl import TrlParser

import launching
from launching import ROOT
from paco_trl import tiny
from paco_trl.commands import doctor
from paco_trl.commands.script_arguments import (
    ScriptArguments,
    get_peft_config,
    load_eval_prompts,
)
from paco_trl.data import load_edit_prompts
from testing_utils import check_same_training, jsonl


sys.path.insert(0, str(ROOT / "examples"))

from train_flux_kontext import KontextArguments, KontextConfig  # noqa: E402
from train_qwen_image_edit import QwenImageEditArguments, QwenImageEditConfig  # noqa: E402


# Beside what the scripts set. The pipelines read sources at about a megapixel times this scale squared
SETTINGS = {
    "rewards": ["redness"],
    "height": 1024,
    "width": 1024,
    "resolution_scale": 1 / 16,
    "num_generations": 4,
    "num_prompts_per_generation": 4,
    "per_device_train_batch_size": 2,
    "num_inference_steps": 3,
    "max_steps": 4,
    "learning_rate": 1e-2,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "lora_r": 4,
    "lora_alpha": 8,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}
SIZES = [(64, 64), (96, 64), (64, 80)]
INSTRUCTIONS = ["Paint the house red.", "Add a tree.", "Remove the car.", "Make it night.", "Turn it upside down."]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """A folder with a JSON-lines file of edits, whose paths are relative to it, and a benchmark that has one of them."""
    folder = tmp_path_factory.mktemp("editing-examples")
    (folder / "pictures").mkdir()
    rows = []
    for number, instruction in enumerate(INSTRUCTIONS):
        width, height = SIZES[number % 3]
        image = Image.new("RGB", (width, height), ["#fa1e96", "#1efa96", "#961efa", "#fa961e", "#1e96fa"][number])
        ImageDraw.Draw(image).ellipse((8, 8, width // 2, height - 8 * number), fill="#202020")
        image.save(folder / "pictures" / f"{number}.png")
        rows.append({"prompt": instruction, "image": f"pictures/{number}.png"})
    (folder / "edits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    benchmark = {"prompt": "What else could be asked?", "image": "pictures/4.png"}
    (folder / "benchmark.jsonl").write_text(json.dumps(benchmark) + "\n")
    (folder / "settings.yaml").write_text(yaml.safe_dump({"dataset_name": str(folder / "edits.jsonl"), **SETTINGS}))
    return folder


def train(workspace: Path, script: str, model: Path, name: str, *options: str, config: Path | None = None) -> Path:
    output = workspace / name
    command = [f"examples/{script}", "--config", workspace / "settings.yaml"]
    command += ["--model_name_or_path", model, "--output_dir", output, *options]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    assert f"Adapter: {output}" in launching.check_run(command, config=config, cwd=ROOT, env=environment)
    return output


@pytest.fixture(scope="module")
def kontext(tmp_path_factory) -> Path:
    return tiny.build_tiny_flux_kontext(tmp_path_factory.mktemp("models") / "tiny-flux-kontext")


@pytest.fixture(scope="module")
def qwen_edit(tmp_path_factory) -> Path:
    return tiny.build_tiny_qwen_image_edit(tmp_path_factory.mktemp("models") / "tiny-qwen-image-edit")


@pytest.fixture(scope="module")
def klein(tmp_path_factory) -> Path:
    return tiny.build_tiny_flux2_klein(tmp_path_factory.mktemp("models") / "tiny-flux2-klein")


@pytest.fixture(scope="module")
def kontext_alone(workspace, kontext) -> Path:
    return train(workspace, "train_flux_kontext.py", kontext, "kontext-alone")


# Two trained steps, one round: the run is short
QWEN_OPTIONS = ("--sde_steps", "0", "1", "--max_steps", "2", "--num_prompts_per_generation", "2")


@pytest.fixture(scope="module")
def qwen_alone(workspace, qwen_edit) -> Path:
    return train(workspace, "train_qwen_image_edit.py", qwen_edit, "qwen-alone", *QWEN_OPTIONS)


class TestScripts:
    @pytest.mark.slow
    def test_kontext_alone(self, kontext_alone):
        assert {"adapter_model.safetensors", "pytorch_lora_weights.safetensors", "README.md"} <= {
            path.name for path in kontext_alone.iterdir()
        }
        card = (kontext_alone / "README.md").read_text()
        assert "pipeline_tag: image-to-image" in card
        assert "| sampler | 3 steps, guidance 2.5 |" in card  # the script's own guidance
        assert "noise level 0.9, steps [1]" in card
        prompts = [
            entry["prompt"]
            for index in (0, 1)
            for entry in jsonl(kontext_alone / f"contact_sheets/round_{index:05d}.jsonl")
        ]
        assert set(prompts) <= set(INSTRUCTIONS) and len(prompts) == 2 * 16
        assert (kontext_alone / "contact_sheets" / "round_00001.png").exists()

    @pytest.mark.slow
    def test_kontext_on_two_processes_equals_one(self, workspace, kontext, kontext_alone):
        config = launching.CPU_DDP
        output = train(
            workspace, "train_flux_kontext.py", kontext, "kontext-ddp", "--ddp_backend", "gloo", config=config
        )  # fmt: skip
        check_same_training(output, kontext_alone, 2, 16, tolerance=1e-4)

    @pytest.mark.slow
    def test_qwen_image_edit_with_zero3_equals_one_process(self, workspace, qwen_edit, qwen_alone):
        options = ("--ddp_backend", "gloo", *QWEN_OPTIONS)
        output = train(
            workspace, "train_qwen_image_edit.py", qwen_edit, "qwen-zero3", *options, config=launching.CPU_ZERO3
        )  # fmt: skip
        check_same_training(output, qwen_alone, 1, 8, tolerance=1e-4)
        card = (output / "README.md").read_text()
        assert 'guidance 4.0 against the negative prompt " "' in card and "noise level 1.0, steps [0, 1]" in card

    @pytest.mark.slow
    def test_the_edit_reward_with_another_script_and_a_benchmark_left_out(self, workspace, klein, tiny_qwen, tmp_path):
        command = ["examples/train_flux.py", "--config", str(workspace / "settings.yaml")]
        command += ["--model_name_or_path", str(klein), "--output_dir", str(tmp_path / "out"), "--edits"]
        command += ["--rewards", "edit", "--judge_model", str(tiny_qwen), "--guidance_scale", "4"]
        command += ["--exclude_dataset_name", str(workspace / "benchmark.jsonl")]
        command += ["--resolution_scale", "1", "--height", "32", "--width", "32", "--max_steps", "2"]
        done = launching.run(command, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-6000:]
        assert "Left out 1 of 5 rows" in done.stderr
        entries = jsonl(tmp_path / "out/contact_sheets/round_00000.jsonl")
        assert len(entries) == 16
        assert {entry["prompt"] for entry in entries} == set(INSTRUCTIONS[:4])
        assert all(0 < entry["edit"] < 1 for entry in entries)


class TestDefaults:
    """The paper's table."""

    COMMON = {
        "num_generations": 16,
        "num_prompts_per_generation": 42,
        "resolution_scale": 384 / 1024,
        "height": 1024,
        "width": 1024,
        "learning_rate": 3e-4,
        "epsilon": 1e-4,
        "advantage_clip": 5.0,
        "multi_objective_aggregation": "sum_then_normalize",
        "beta": 0.0,
        "per_device_train_batch_size": 1,
    }
    CASES = [
        (
            KontextArguments, KontextConfig, "FLUX.1-Kontext-dev",
            {"num_inference_steps": 8, "sde_steps": [1], "noise_level": 0.9, "guidance_scale": 2.5,
             "negative_prompt": None},
        ),
        (
            QwenImageEditArguments, QwenImageEditConfig, "Qwen-Image-Edit",
            {"num_inference_steps": 10, "sde_steps": [1, 2, 3, 4], "noise_level": 1.0, "guidance_scale": 4.0,
             "negative_prompt": " "},
        ),
    ]  # fmt: skip

    @pytest.mark.parametrize(("arguments", "config", "name", "settings"), CASES)
    def test_defaults(self, arguments, config, name, settings, tmp_path):
        parser = TrlParser((arguments, config))
        script_args, args = parser.parse_args_and_config(
            ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", "--dataset_name", "edits.jsonl"]
        )
        assert {field: getattr(args, field) for field in settings} == settings
        assert {field: getattr(args, field) for field in self.COMMON} == self.COMMON
        assert args.round_plan.num_images == 672 and args.round_plan.num_optimizer_steps == 2
        assert args.ema_decay is not None
        assert script_args.model_name_or_path.endswith(f"/{name}")
        assert script_args.edits and script_args.rewards == ["edit"]
        adapter = get_peft_config(script_args)
        assert (adapter.r, adapter.lora_alpha, adapter.init_lora_weights) == (64, 128, "gaussian")
        # They can be changed, and have the options of `train_flux.py`
        changed = ["--guidance_scale", "3", "--rewards", "redness", "--edits", "False", "--output_dir", str(tmp_path)]
        script_args, args = parser.parse_args_and_config(
            [*changed, "--use_cpu", "--bf16", "False", "--dataset_name", "edits.jsonl"]
        )
        assert args.guidance_scale == 3.0 and script_args.rewards == ["redness"] and not script_args.edits


class TestPrompts:
    def arguments(self, workspace: Path, **kwargs) -> ScriptArguments:
        return ScriptArguments(dataset_name=str(workspace / "edits.jsonl"), **kwargs)

    def test_evaluation(self, workspace):
        assert load_eval_prompts(self.arguments(workspace, edits=True)) is None
        assert len(load_eval_prompts(self.arguments(workspace, edits=True, eval_split="train"))) == 5
        with pytest.raises(ValueError, match="--eval_split"):
            load_eval_prompts(self.arguments(workspace, edits=True, eval_split="test"))
        # The benchmark is left out of the training only
        benchmark = str(workspace / "benchmark.jsonl")
        arguments = self.arguments(workspace, edits=True, eval_dataset_name=benchmark, exclude_dataset_name=benchmark)
        assert len(load_eval_prompts(arguments)) == len(load_edit_prompts(benchmark)) > 0


class TestDoctor:
    def examine(self, workspace: Path, model: Path, *options: str) -> dict[str, doctor.Row]:
        arguments = ["--config", str(workspace / "settings.yaml"), "--output_dir", str(workspace / "out")]
        arguments += ["--model_name_or_path", str(model), "--rewards", "redness", "--guidance_scale", "4"]
        arguments += ["--epsilon", "1e-5"]  # more is warned of for FLUX.2-klein
        arguments += "--resolution_scale 1 --height 32 --width 32 --num_prompts_per_generation 2".split()
        return {row.check: row for row in doctor.examine("grpo", [*arguments, *options], Console(quiet=True))}

    @pytest.mark.slow
    def test_edits_pass(self, workspace, klein):
        rows = self.examine(workspace, klein, "--edits")
        assert {row.verdict for row in rows.values()} == {"ok"} and "reward redness_reward" in rows
        assert not (workspace / "out").exists()
