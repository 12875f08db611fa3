# SPDX-License-Identifier: Apache-2.0
"""`paco-trl grpo` alone, with DDP, and with DeepSpeed ZeRO-3: image sets and edits."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

import launching
import tiny_models
from launching import ROOT
from paco_trl.commands import doctor
from paco_trl.commands.script_arguments import ScriptArguments, load_eval_prompts, load_train_prompts
from testing_utils import check_frozen_weights_are_not_saved, check_same_training, jsonl, noise, prompts_of_two_sizes


# Two sizes and micro-batches of two images; the learning rate is high because the tiny model's gradients are small
SETTINGS = {
    "rewards": ["redness"], "num_generations": 4, "num_prompts_per_generation": 4, "per_device_train_batch_size": 2,
    "num_inference_steps": 4, "max_steps": 4, "learning_rate": 1e-2, "report_to": "none", "save_strategy": "steps",
    # 15 prompts: over two processes one is drawn twice, and must not count twice
    "save_steps": 2, "eval_split": "train", "eval_strategy": "steps", "eval_steps": 4, "num_inference_steps_eval": 2,
    "use_cpu": True, "bf16": False, "lora_r": 4, "lora_alpha": 8, "disable_tqdm": True, "gradient_checkpointing": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def workspace(tiny_flux, tmp_path_factory):
    """A folder with prompts of two sizes and the settings in a YAML file."""
    folder = tmp_path_factory.mktemp("examples")
    lines = [json.dumps(row) + "\n" for row in prompts_of_two_sizes()]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    settings = {"model_name_or_path": str(tiny_flux), "dataset_name": str(folder / "prompts.jsonl"), **SETTINGS}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return folder


def train(
    workspace: Path, name: str, *options: str, start=("-m", "paco_trl.commands.main", "grpo"), **launched
) -> Path:
    """Train by the command; `start` is what follows `python`, and `launched` are arguments of the launcher."""
    output = workspace / name
    command = [*start, "--config", workspace / "settings.yaml", "--output_dir", output, *options]
    assert launching.check_run(command, cwd=ROOT, **launched).count(f"Adapter: {output}") == 1
    return output


@pytest.fixture(scope="module")
def alone(workspace) -> Path:
    return train(workspace, "alone")


def check(output: Path, reference: Path) -> None:
    """The same training in two rounds, evaluations and losses included; four steps of Adam move a weight by 4e-2."""
    check_same_training(output, reference, rounds=2, images=16, tolerance=1e-3)
    states = [json.loads((path / "checkpoint-4" / "trainer_state.json").read_text()) for path in (output, reference)]
    for key, count in (("eval_reward", 1), ("loss", 4)):
        values, expected = ([entry[key] for entry in state["log_history"] if key in entry] for state in states)
        assert len(expected) == count and values == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_two_processes_equal_one(workspace, alone):
    folder = workspace / "embeddings"
    options = ("--ddp_backend", "gloo", "--embeddings_dir", folder)
    output = train(workspace, "ddp", *options, config=launching.CPU_DDP)
    assert len({path.name for path in folder.rglob("*.*")}) > 12  # each prompt is encoded by one of the processes
    check(output, alone)


def zero3(workspace: Path, name: str, *options: str, **kwargs) -> Path:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    return train(
        workspace, name, "--ddp_backend", "gloo", *options, config=launching.CPU_ZERO3, env=environment, **kwargs
    )


@pytest.mark.slow
def test_zero3_equals_one_process(workspace, alone):
    output = zero3(workspace, "zero3")
    check(output, alone)
    check_frozen_weights_are_not_saved(output / "checkpoint-4")


# Of each weight that is moved to the device: how many are there whole, it included. And of each module that is moved
# as a whole, while DeepSpeed's engine is made: its weights that are not divided.
WATCHED = """
import json, sys
import deepspeed, torch
from deepspeed.runtime.zero.partition_parameters import Init
from paco_trl.commands.main import main

moved, whole, modules, own = [], [], [], (Init._zero_init_param, torch.nn.Module.to, deepspeed.initialize)

def init_parameter(self, parameter):
    moved.append(parameter)
    whole.append(sum(each.numel() > 0 for each in moved))
    own[0](self, parameter)

def to(self, *args, **kwargs):
    modules.append(sum(parameter.numel() > 0 for parameter in self.parameters()))
    return own[1](self, *args, **kwargs)

def initialize(*args, **kwargs):
    torch.nn.Module.to = to
    try:
        return own[2](*args, **kwargs)
    finally:
        torch.nn.Module.to = own[1]

Init._zero_init_param, deepspeed.initialize = init_parameter, initialize
assert main(["grpo", *sys.argv[1:]]) == 0
with open(sys.argv[sys.argv.index("--output_dir") + 1] + "/watched.json", "w") as file:
    json.dump({"whole": whole, "modules": modules}, file)
"""


@pytest.mark.slow
def test_zero3_without_gathering_for_the_rollout(workspace, alone):
    (workspace / "watched.py").write_text(WATCHED)
    options = ("--ds3_gather_for_generation", "False", "--gradient_checkpointing", "True")
    output = zero3(workspace, "zero3-sharded", *options, start=[workspace / "watched.py"])
    check(output, alone)
    # No GPU ever has to hold the transformer: its weights are divided one after the other
    watched = json.loads((output / "watched.json").read_text())
    assert len(watched["whole"]) > 50 and set(watched["whole"]) == {1}
    assert not any(watched["modules"])


@pytest.mark.slow
def test_zero3_in_bf16(workspace, alone):
    # The ratio before the first update is within epsilon / 10, or the self-test would have stopped the run
    options = ("--bf16", "True", "--max_steps", "2", "--beta", "0.01", "--adapter", str(alone))
    output = zero3(workspace, "zero3-bf16", *options)
    log = json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert log[0]["ratio_deviation_on_policy/step_1"] <= 1e-5
    assert log[0]["kl"] == 0.0 < log[1]["kl"]  # the reference is the adapter that is continued
    assert not (output / "ref").exists()
    adapter = load_file(output / "adapter_model.safetensors")
    assert all(value.dtype == torch.float32 for value in adapter.values())


EDITS = SETTINGS | {
    "edits": True, "guidance_scale": 4.0, "negative_prompt": " ", "num_prompts_per_generation": 2, "sde_steps": [0, 1],
    "num_inference_steps": 3, "max_steps": 2, "save_strategy": "no",
    # The pipeline reads sources at about a megapixel times this scale squared
    "height": 1024, "width": 1024, "resolution_scale": 1 / 16,
}  # fmt: skip
INSTRUCTIONS = ["Paint the house red.", "Add a tree.", "Make it night."]


@pytest.fixture(scope="module")
def edits(tmp_path_factory) -> Path:
    """A folder with a file of edits, whose paths are relative to it, and a benchmark that has the last source."""
    folder = tmp_path_factory.mktemp("edits")
    for number, size in enumerate([(64, 64), (96, 64), (64, 80)]):
        noise(number, size).save(folder / f"{number}.png")
    rows = [{"prompt": prompt, "image": f"{number}.png"} for number, prompt in enumerate(INSTRUCTIONS)]
    benchmark = rows[-1] | {"prompt": "What else could be asked?"}
    for name, its_rows in (("edits", rows), ("benchmark", [benchmark])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in its_rows))
    model = tiny_models.build_tiny_qwen_image_edit(folder / "model")
    settings = {"model_name_or_path": str(model), "dataset_name": str(folder / "edits.jsonl"), **EDITS}
    settings |= {"exclude_dataset_name": str(folder / "benchmark.jsonl"), "eval_strategy": "no", "eval_split": None}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.mark.slow
def test_edits_with_zero3_equal_one_process(edits):
    reference = train(edits, "alone")
    entries = jsonl(reference / "contact_sheets" / "round_00000.jsonl")
    assert {entry["prompt"] for entry in entries} == set(INSTRUCTIONS[:2])  # without the benchmark's source
    check_same_training(zero3(edits, "zero3"), reference, rounds=1, images=8, tolerance=1e-4)


def test_the_benchmark_is_left_out_of_the_training_only(edits):
    benchmark = str(edits / "benchmark.jsonl")
    arguments = ScriptArguments(dataset_name=str(edits / "edits.jsonl"), edits=True, exclude_dataset_name=benchmark)
    assert load_eval_prompts(arguments) is None
    assert len(load_train_prompts(arguments)) == 2
    assert len(load_eval_prompts(replace(arguments, eval_split="train"))) == 3
    assert len(load_eval_prompts(replace(arguments, eval_dataset_name=benchmark))) == 1


@pytest.mark.slow
def test_doctor_passes_edits(edits):
    options = ["--config", str(edits / "settings.yaml"), "--output_dir", str(edits / "out")]
    rows = {row.check: row for row in doctor.examine("grpo", options, Console(quiet=True))}
    # One of the rows is in the benchmark that is left out
    assert {row.check: row.verdict for row in rows.values() if row.verdict != "ok"} == {"data": "warning"}
    assert "reward redness_reward" in rows
    assert not (edits / "out").exists()
