# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl[deepspeed,tensorboard]"]
# ///
"""
Trains a LoRA on FLUX.1-Kontext with PaCo-GRPO, to change in an image what an instruction names and nothing else.

The paper's settings for this model are the defaults: 8 steps, noise 0.9, guidance 2.5, trained at 384 pixels for
images of 1024, rewarded by the judge's edit score. The other options are
those of `train_flux.py`.

    python examples/train_flux_kontext.py --dataset_name user/edit-prompts --max_steps 200 --output_dir paco-kontext

ShareGPT-4o-Image, without the images of GEdit-Bench:

    python examples/train_flux_kontext.py --dataset_name ShareGPT-4o-Image/text_and_image_to_image.json \
        --image_folder ShareGPT-4o-Image --exclude_dataset_name stepfun-ai/GEdit-Bench --max_steps 200 \
        --output_dir paco-kontext

Several GPUs, DDP (`zero3.yaml` where training does not fit next to the model's weights):

    accelerate launch --config_file examples/accelerate_configs/multi_gpu.yaml examples/train_flux_kontext.py ...
"""

import sys
from dataclasses import dataclass

from paco_trl import PaCoGRPOConfig
from paco_trl.commands.grpo import main
from paco_trl.commands.main import answer
from paco_trl.commands.options import option
from paco_trl.commands.script_arguments import ScriptArguments


@dataclass
class KontextArguments(ScriptArguments):
    model_name_or_path: str = option("black-forest-labs/FLUX.1-Kontext-dev", "Hub id or directory of the pipeline.")
    edits: bool = option(True, "Whether the prompts are instructions with source images.")
    max_source_images: int | None = option(1, "Maximum number of source images per row; the pipeline takes one.")
    rewards: list[str] = option(["edit"], "Rewards, as in `train_flux.py` (paper: edit).")


@dataclass
class KontextConfig(PaCoGRPOConfig):
    num_inference_steps: int = option(8, "Denoising steps of a rollout (paper).")
    noise_level: float = option(0.9, "Noise level `a` of the stochastic steps (paper).")
    guidance_scale: float = option(2.5, "Guidance scale (paper).")
    resolution_scale: float = option(0.375, "Factor per side from inference to training: 384 for 1024 (paper).")
    multi_objective_aggregation: str = option(
        "sum_then_normalize", "How several rewards become one. The paper has one here, and tames none."
    )


if __name__ == "__main__":
    if code := answer("grpo", lambda: main(sys.argv[1:], KontextArguments, KontextConfig, "train_flux_kontext.py")):
        sys.exit(code)
