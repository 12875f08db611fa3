# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl[deepspeed,tensorboard]"]
# ///
"""
Trains PaCo-Reward, a judge that says whether two images are consistent, as a LoRA on a vision-language model.

The code and its own options are in `paco_trl/commands/reward.py`: `paco-trl reward` takes the same options without a
checkout. Those of `PaCoRewardConfig` can be given as well; the paper's settings, model and data are the defaults.

One GPU, or the CPU:

    python examples/train_reward.py --output_dir paco-reward

Several GPUs, DDP (ZeRO-3, `zero3.yaml`, only where a GPU cannot hold the model):

    accelerate launch --config_file examples/accelerate_configs/multi_gpu.yaml examples/train_reward.py \
        --output_dir paco-reward --gradient_accumulation_steps 4

Own pairs or rankings, from the Hub or a directory:

    python examples/train_reward.py --dataset_name user/pairs --dataset_split train --eval_split test \
        --first_token_weight 1 --output_dir my-judge
"""

from paco_trl.commands.main import run_script


if __name__ == "__main__":
    run_script("reward")
