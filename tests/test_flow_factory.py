# SPDX-License-Identifier: Apache-2.0
"""A file for Flow-Factory is refused with the same settings by the names of this package."""

import subprocess
import sys

import pytest
import yaml

from paco_trl.commands.config_files import read_config
from paco_trl.commands.flow_factory import describe, is_flow_factory
from paco_trl.commands.grpo import ImageCommandParser
from paco_trl.commands.script_arguments import ScriptArguments
from paco_trl.utils.errors import OptionError


GRPO = """
num_processes: 8
config_file: config/deepspeed/deepspeed_zero2.yaml
mixed_precision: bf16
data: {dataset_dir: dataset/t2is, cache_dir: cache, max_dataset_size: 1000}
model:
  {finetune_type: lora, lora_rank: 32, lora_alpha: 64, target_modules: default, model_type: flux1,
   model_name_or_path: black-forest-labs/FLUX.1-dev, resume_path: null}
log: {save_dir: saves, save_freq: 20, logging_backend: none, verbose: true}
train:
  trainer_type: grpo
  advantage_aggregation: gdpo
  clip_range: 2.0e-4
  adv_clip_range: 4.0
  kl_type: v-based
  kl_beta: 0.01
  resolution: 512
  num_inference_steps: 10
  guidance_scale: 3.5
  per_device_batch_size: 2
  group_size: 16
  global_std: false
  unique_sample_num_per_epoch: 48
  gradient_step_per_epoch: 2
  max_epochs: 30
  learning_rate: 3.0e-4
  adam_betas: [0.9, 0.99]
  ema_decay: 0
  ema_device: cpu
scheduler: {dynamics_type: CPS, noise_level: 0.7, num_sde_steps: 1, sde_steps: [1, 2, 3]}
eval: {resolution: [1024, 2048], num_inference_steps: 20, eval_freq: 10}
rewards:
  - {name: pick, reward_model: PickScore, weight: 0.5}
  - {name: text, reward_model: OCR}
eval_rewards: {name: pick, reward_model: PickScore}
"""
EXPECTED = {
    "model_name_or_path": "black-forest-labs/FLUX.1-dev", "lora_r": 32, "lora_alpha": 64, "dataset_name": "dataset/t2is",
    "output_dir": "saves", "report_to": "none", "epsilon": 2e-4, "advantage_clip": 4.0,
    "multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "group", "num_inference_steps": 10,
    "guidance_scale": 3.5, "per_device_train_batch_size": 2, "num_generations": 16, "num_prompts_per_generation": 48,
    "optimizer_steps_per_generation": 2, "max_steps": 60, "learning_rate": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.99,
    "ema_offload": True, "sde_type": "cps", "noise_level": 0.7, "num_sde_steps": 1, "sde_steps": [1, 2, 3],
    "height": 1024, "width": 2048, "resolution_scale": 0.5, "num_inference_steps_eval": 20, "save_steps": 40,
    "eval_strategy": "steps", "eval_steps": 20, "eval_split": "test", "num_processes": 8, "accelerate_config": "zero2",
    "bf16": True, "rewards": [{"pick_score": 0.5}, "ocr"], "eval_rewards": ["pick_score"],
}  # fmt: skip
NFT = """
model: {finetune_type: full, model_name_or_path: a/kontext, model_type: flux1-kontext, lora_rank: 8}
train: {trainer_type: nft, nft_beta: 0.5, kl_beta: 0.001, ema_decay: 0.5, resolution: 512, clip_range: 1.0e-4,
        num_train_timesteps: 3}
scheduler: {dynamics_type: ODE}
rewards: {name: mine, reward_model: my_package.MyReward}
"""


def options_in(text: str) -> dict:
    return yaml.safe_load(text.partition(":\n\n")[2])


def test_every_setting_has_its_name_here():
    text = describe(yaml.safe_load(GRPO), "theirs.yaml")
    assert "`paco-trl grpo --config`" in text and options_in(text) == EXPECTED
    for reason in ("choose rows by a slice", "`beta` multiplies another divergence", "prompts are encoded when"):
        assert f"# {reason}" in text
    assert "train.kl_beta" in text and "verbose" not in text


def test_nft_of_an_edit_model_with_a_reward_of_theirs():
    text = describe(yaml.safe_load(NFT), "theirs.yaml")
    assert "`paco-trl nft --config`" in text and "in my_rewards.py: my_package.MyReward" in text
    assert options_in(text) == {
        "model_name_or_path": "a/kontext", "nft_beta": 0.5, "num_noise_levels": 3, "beta": 0.001, "use_peft": False,
        "edits": True, "multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "batch",
        "advantage_clip": 5.0, "height": 512, "width": 512, "resolution_scale": 1.0, "rewards": ["my_rewards.py"],
        # What the file does not set is as there
        "learning_rate": 1e-5, "num_prompts_per_generation": 8, "optimizer_steps_per_generation": 2,
        "num_inference_steps": 10, "guidance_scale": 3.5, "save_steps": 20,
    }  # fmt: skip


def test_what_is_left_out_is_named():
    theirs = yaml.safe_load(GRPO)
    assert "one `seed`" not in describe(theirs, "theirs.yaml")
    theirs |= {"mixed_precision": "fp16", "config_file": "config/accelerate_configs/fsdp1.yaml"}
    theirs["eval"] |= {"seed": 1, "guidance_scale": 1.0}
    theirs["log"]["project"] = "mine"
    theirs["rewards"][0]["reward_model"] = theirs["eval_rewards"]["reward_model"] = "my_package.MyReward"
    text = describe(theirs, "theirs.yaml")
    assert "my_rewards.py: my_package.MyReward with the weight 0.5, my_package.MyReward\n" in text
    assert not {"bf16", "accelerate_config"} & options_in(text).keys()
    for line in (
        "# there is one `seed`: eval.seed\n", "# there is one `guidance_scale`: eval.guidance_scale\n",
        "or a file of your own: config_file\n", "`bf16: false`: mixed_precision\n",
        "`WANDB_PROJECT` or `SWANLAB_PROJECT`: log.project\n",
    ):  # fmt: skip
        assert line in text
    theirs["mixed_precision"] = yaml.safe_load("no")
    assert options_in(describe(theirs, "theirs.yaml"))["bf16"] is False


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("adam_betas: [0.9, 0.99]", "adam_betas: 0.9"),
        ("resolution: 512", "resolution: '512'"),
        ("rewards:\n", "rewards: 5\nunused:\n"),
    ],
)
def test_a_value_of_another_type(old, new):
    assert old in GRPO
    text = describe(yaml.safe_load(GRPO.replace(old, new, 1)), "theirs.yaml")
    assert "'theirs.yaml', a file for Flow-Factory with a value of another type" in text


def test_sections_of_another_trainer():
    assert is_flow_factory({"model": {}, "train": {"group_size": 4}})
    assert not is_flow_factory({"model": {"name_or_path": "a/b"}, "train": {"batch_size": 4}})


def test_what_it_writes_is_a_file_of_this_package(tmp_path, monkeypatch):
    """And what is not for Flow-Factory is read as it is."""
    monkeypatch.setenv("RANK", "1")
    options = options_in(describe(yaml.safe_load(GRPO), "theirs.yaml"))
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "train.jsonl").write_text('{"prompt": "A cat."}')
    # This machine has no GPU, and no launcher of eight processes
    options |= {"dataset_name": str(tmp_path / "prompts"), "use_cpu": True, "bf16": False}
    del options["num_processes"], options["accelerate_config"]
    file = tmp_path / "ours.yaml"
    file.write_text(yaml.safe_dump(options))
    parser = ImageCommandParser(ScriptArguments, "PaCoGRPOConfig", prog="paco-trl grpo")
    read = parser.read(["--config", str(file)]).values()
    assert (read["reward_weights"], read["rewards"]) == ([0.5, 1.0], ["pick_score", "ocr"])
    assert {name: read[name] for name in ("epsilon", "sde_steps", "max_steps")} == {
        "epsilon": 2e-4, "sde_steps": [1, 2, 3], "max_steps": 60,
    }  # fmt: skip
    assert not is_flow_factory(options)
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(GRPO)
    with pytest.raises(OptionError, match="a file for Flow-Factory. Save these lines"):
        read_config(["--config", str(theirs)])
    # As YAML 1.2 reads numbers, and what may be a revision remains one
    theirs.write_text(GRPO.replace("clip_range: 2.0e-4", "clip_range: [-1e-4, 3e-4]"))
    with pytest.raises(OptionError, match=r"(?s)epsilon: 0.0001.*epsilon_high: 0.0003"):
        read_config(["--config", str(theirs)])
    file.write_text("learning_rate: 1e-4\nrevision: 695e0514\n")
    assert read_config(["--config", str(file)])[0] == {"learning_rate": 1e-4, "revision": "695e0514"}


def test_a_trainer_that_is_not_here(tmp_path):
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(NFT.replace("trainer_type: nft", "trainer_type: dgpo"))
    command = [sys.executable, "-m", "paco_trl.commands.main", "grpo", "--config", str(theirs)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the trainer 'dgpo' of Flow-Factory, which is not here. Choose one of grpo" in done.stderr
