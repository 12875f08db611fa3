# SPDX-License-Identifier: Apache-2.0
"""DDP leaves frozen weights alone: it broadcasts neither them nor their checks, and training is the same."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

import launching
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.data import demo_prompts_path, load_image_set_prompts
from paco_trl.rewards import redness_reward


def train_both(model: str, output: Path) -> None:
    """Train as one of several processes, with and without what DDP ignores, and save the names and the adapters."""
    dataset = load_image_set_prompts(demo_prompts_path()).remove_columns(["height", "width"])
    dataset = dataset.filter(lambda row: row["rows"] == row["cols"] == 2)
    for name in ("ignored", "all"):
        args = PaCoGRPOConfig(
            str(output / name), ddp_backend="gloo", use_cpu=True, bf16=False, height=64, width=64, num_generations=4,
            num_prompts_per_generation=2, per_device_train_batch_size=2, num_inference_steps=4, max_steps=2,
            learning_rate=0.1, report_to="none", log_completions=False, disable_tqdm=True,
        )  # fmt: skip
        if name == "all":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model = lambda model, names: None
        trainer = PaCoGRPOTrainer(
            model, redness_reward, args, dataset, peft_config=LoraConfig(r=2, init_lora_weights="gaussian")
        )
        trainer.train()
        trainer.save_model()
        if trainer.is_world_process_zero():
            weights = dict(trainer.model.named_parameters())
            names = {
                "ignored": sorted(trainer.model_wrapped.parameters_to_ignore),
                "frozen": sorted(name for name, weight in weights.items() if not weight.requires_grad),
                "trained": sorted(name for name, weight in weights.items() if weight.requires_grad),
            }
            (output / f"{name}.json").write_text(json.dumps(names))


@pytest.mark.slow
def test_ddp_ignores_what_is_frozen(tiny_flux, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nimport test_frozen_weights\n"
        "test_frozen_weights.train_both(sys.argv[1], Path(sys.argv[2]))\n"
    )
    launching.check_run([script, tiny_flux, tmp_path], config=launching.CPU_DDP)
    ignored, everything = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("ignored", "all"))
    assert ignored["ignored"] == ignored["frozen"] and len(ignored["trained"]) > 10
    assert everything["ignored"] == []
    adapters = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ignored", "all")]
    assert all(torch.equal(value, adapters[1][name]) for name, value in adapters[0].items())
    assert any(value.any() for name, value in adapters[0].items() if "lora_B" in name)
