# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl[deepspeed,tensorboard]"]
# ///
"""
Trains a LoRA on Qwen-Image-Edit with PaCo-GRPO, to change in an image what an instruction names and nothing else.

The paper's settings for this model are the defaults: 10 steps of which steps 1 to 4 are stochastic, noise 1.0, true
guidance 4.0, trained at 384 pixels for images of 1024, rewarded by the judge's edit score. The other
options are those of `train_flux.py`.

    python examples/train_qwen_image_edit.py --dataset_name user/edit-prompts --max_steps 200 \
        --output_dir paco-qwen-image-edit

`Qwen/Qwen-Image-Edit-2509` and its successors take up to three source images a prompt, in a column `images`.

Several GPUs, DDP (`zero3.yaml` where training does not fit next to the model's weights):

    accelerate launch --config_file examples/accelerate_configs/multi_gpu.yaml examples/train_qwen_image_edit.py ...
"""

import sys
from dataclasses import dataclass

from paco_trl import PaCoGRPOConfig
from paco_trl.commands.grpo import main
from paco_trl.commands.main import answer
from paco_trl.commands.options import option
from paco_trl.commands.script_arguments import ScriptArguments


@dataclass
class QwenImageEditArguments(ScriptArguments):
    model_name_or_path: str = option("Qwen/Qwen-Image-Edit", "Hub id or directory of the pipeline.")
    edits: bool = option(True, "Whether the prompts are instructions with source images.")
    rewards: list[str] = option(["edit"], "Rewards, as in `train_flux.py` (paper: edit).")


@dataclass
class QwenImageEditConfig(PaCoGRPOConfig):
    num_inference_steps: int = option(10, "Denoising steps of a rollout (paper).")
    sde_steps: list[int] = option(
        [1, 2, 3, 4], "Indices of the denoising steps that are stochastic, and are trained (paper)."
    )
    noise_level: float = option(1.0, "Noise level `a` of the stochastic steps (paper).")
    guidance_scale: float = option(4.0, "Scale of true guidance (paper).")
    negative_prompt: str | None = option(" ", "Negative prompt of true guidance: that of the model's own examples.")
    resolution_scale: float = option(0.375, "Factor per side from inference to training: 384 for 1024 (paper).")
    multi_objective_aggregation: str = option(
        "sum_then_normalize", "How several rewards become one. The paper has one here, and tames none."
    )


if __name__ == "__main__":
    if code := answer(
        "grpo", lambda: main(sys.argv[1:], QwenImageEditArguments, QwenImageEditConfig, "train_qwen_image_edit.py")
    ):
        sys.exit(code)
