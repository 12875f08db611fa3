# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl[deepspeed,tensorboard]"]
# ///
"""
Trains a LoRA on a FLUX pipeline with PaCo-GRPO, to generate sets of images that belong together.

The code is in `paco_trl/commands/grpo.py`: `paco-trl grpo` takes the same options without a checkout. All of
`PaCoGRPOConfig` and of `ScriptArguments` (`paco_trl/commands/script_arguments.py`) can be given on the command line or in
a YAML file (`--config file.yaml`); the paper's settings are the defaults. `paco-trl doctor` checks them without training.

One GPU, or the CPU:

    python examples/train_flux.py --model_name_or_path black-forest-labs/FLUX.1-dev --dataset_name user/t2is-prompts \
        --output_dir paco-flux

Several GPUs, DDP (`zero3.yaml` where training does not fit next to the model's weights):

    accelerate launch --config_file examples/accelerate_configs/multi_gpu.yaml examples/train_flux.py ...

The judge on a GPU of its own, as in the paper (`paco-trl serve --help`):

    CUDA_VISIBLE_DEVICES=7 paco-trl serve --vllm ~/vllm/bin/vllm
    accelerate launch ... examples/train_flux.py --judge_url http://127.0.0.1:8000/v1 --judge_model paco-reward ...
"""

from paco_trl.commands.main import run_script


if __name__ == "__main__":
    run_script("grpo")
