# SPDX-License-Identifier: Apache-2.0
"""One of two processes with DDP or FSDP2, on a simulated device each: `two_devices.py PIPELINE OUTPUT`."""

import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.checkpointing.weights import gather_weights, local_weights, trained_parameters
from paco_trl.data import demo_prompts_path, load_image_set_prompts
from paco_trl.rewards import redness_reward


def main(model: str, output: Path) -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    found = set()

    def sync_reward(completions, **kwargs):
        found.add(torch.ones(1, device="cuda").device)
        return redness_reward(completions=completions, **kwargs)

    async def async_reward(completions, **kwargs):
        found.add(torch.ones(1, device="cuda").device)
        return redness_reward(completions=completions, **kwargs)

    prompts = load_image_set_prompts(demo_prompts_path())
    square = [index for index, (r, c) in enumerate(zip(prompts["rows"], prompts["cols"], strict=True)) if r == c == 2]
    prompts = prompts.select(square).remove_columns(["height", "width"])
    args = PaCoGRPOConfig(
        str(output / "out"), bf16=True, ddp_backend="gloo", height=64, width=64, num_generations=4,
        num_prompts_per_generation=4, per_device_train_batch_size=4, num_inference_steps=4, sde_steps=[1], max_steps=2,
        learning_rate=1e-2, report_to="none", save_strategy="no", log_completions=False, plot_curves=False,
        disable_tqdm=True, ema_decay=0.9, eval_strategy="steps", eval_steps=2, num_inference_steps_eval=2,
    )  # fmt: skip
    assert args.device == device
    trainer = PaCoGRPOTrainer(
        model, [sync_reward, async_reward], args, train_dataset=prompts, eval_dataset=prompts.select(range(2)),
        peft_config=LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian"),
    )  # fmt: skip
    trainer.train()
    assert {parameter.device for parameter in trainer.model.parameters()} == {device}
    assert found == {device}, found
    assert rank == 0 or torch.cuda.memory_reserved(0) == 0  # nothing was ever allocated where the other one computes
    is_sharded = [isinstance(parameter, DTensor) for parameter in trained_parameters(trainer.model).values()]
    assert is_sharded and set(is_sharded) == {os.environ.get("ACCELERATE_USE_FSDP") == "true"}
    save_file(gather_weights(trainer.model, local_weights(trainer.model, 0), 0), output / f"rank-{rank}.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
