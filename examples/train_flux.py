# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl[deepspeed,tensorboard]"]
# ///
"""
Trains a LoRA on a FLUX pipeline with PaCo-GRPO, to generate sets of images that belong together.

Every option of `PaCoGRPOConfig` and of `ScriptArguments` (`paco_trl/commands/script_arguments.py`: model, dataset,
rewards, adapter) can be given on the command line or in a YAML file (`--config file.yaml`); the paper's settings are the
defaults. `paco-trl doctor` takes the same options and checks them without training.

One GPU, or the CPU:

    python examples/train_flux.py --model_name_or_path black-forest-labs/FLUX.1-dev --dataset_name user/t2is-prompts \
        --output_dir paco-flux

Several GPUs, DDP (`zero3.yaml` where training does not fit next to the model's weights):

    accelerate launch --config_file examples/accelerate_configs/multi_gpu.yaml examples/train_flux.py ...

The judge on a GPU of its own, as in the paper (`paco-trl serve-reward --help`):

    CUDA_VISIBLE_DEVICES=7 paco-trl serve-reward --vllm ~/vllm/bin/vllm
    accelerate launch ... examples/train_flux.py --judge_url http://127.0.0.1:8000/v1 --judge_model paco-reward ...
"""

from trl import TrlParser

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.commands.script_arguments import (
    ScriptArguments,
    get_peft_config,
    load_eval_prompts,
    load_eval_rewards,
    load_rewards,
    load_train_prompts,
)
from paco_trl.utils.processes import end_training


def main(script_args: ScriptArguments, training_args: PaCoGRPOConfig) -> None:
    ################
    # Dataset
    ################
    train_dataset = load_train_prompts(script_args)
    eval_dataset = load_eval_prompts(script_args)

    ################
    # Rewards
    ################
    reward_funcs = load_rewards(script_args)
    eval_reward_funcs = load_eval_rewards(script_args, reward_funcs)

    ################
    # Training
    ################
    trainer = PaCoGRPOTrainer(
        model=script_args.model_name_or_path,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        eval_reward_funcs=eval_reward_funcs,
        peft_config=get_peft_config(script_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    # Save, or save and push to the Hub
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)
    else:
        trainer.save_model(training_args.output_dir)
    if trainer.accelerator.is_main_process:
        print(f"Adapter: {training_args.output_dir}")
        if training_args.log_completions:
            print(f"Images: {training_args.output_dir}/contact_sheets")
    end_training(trainer.accelerator)


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, PaCoGRPOConfig)).parse_args_and_config())
