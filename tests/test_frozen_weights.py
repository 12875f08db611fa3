# SPDX-License-Identifier: Apache-2.0
"""DDP leaves frozen weights alone: it broadcasts neither them nor their checks, and training is the same."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

import launching
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.rewards import redness_reward
from testing_utils import LORA, SMALL_RUN, are_equal, square_prompts


def train_both(model: str, output: Path) -> None:
    """Train as one of several processes, with and without what DDP ignores, and save the names and the adapters."""
    for name in ("ignored", "all"):
        settings = SMALL_RUN | {"num_prompts_per_generation": 2, "per_device_train_batch_size": 2}
        args = PaCoGRPOConfig(str(output / name), ddp_backend="gloo", **settings | {"learning_rate": 0.1})
        if name == "all":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model = lambda model, names: None
        trainer = PaCoGRPOTrainer(model, redness_reward, args, square_prompts(), peft_config=LORA)
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
    assert are_equal(*adapters)
    assert any(value.any() for name, value in adapters[0].items() if "lora_B" in name)
