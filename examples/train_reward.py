# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl[deepspeed,tensorboard] @ git+<address of this repository>"]
# ///
"""
Trains PaCo-Reward, a judge that says whether two images are consistent, as a LoRA on a vision-language model.

The paper's model, data and settings are the defaults. One GPU:

    python examples/train_reward.py --output_dir paco-reward

Several GPUs, DDP (`zero3.yaml` only where a GPU cannot hold the model):

    accelerate launch --config_file paco_trl/accelerate_configs/multi_gpu.yaml examples/train_reward.py ...
"""

from dataclasses import dataclass, field

from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from paco_trl import PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.data import load_paco_dataset


@dataclass
class ScriptArguments:
    dataset_name: str = field(
        default="X-GenGroup/PaCo-Dataset", metadata={"help": "Hub id or directory of PaCo-Dataset."}
    )
    eval_file: str = field(
        default="consistency_reward_cot_test", metadata={"help": "Its file to evaluate on, with `--eval_strategy`."}
    )


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PaCoRewardConfig, ModelConfig))
    # The paper's settings, where they differ from the defaults
    parser.set_defaults(
        model_name_or_path="Qwen/Qwen2.5-VL-7B-Instruct",
        dtype="bfloat16",
        use_peft=True,
        lora_r=32,
        lora_alpha=64,
        lora_dropout=0.0,
    )
    script_args, training_args, model_args = parser.parse_args_and_config()
    if not model_args.use_peft:
        parser.error("`PaCoRewardTrainer` trains a LoRA: leave `--use_peft False` out.")
    model_init_kwargs = dict(
        revision=model_args.model_revision,
        attn_implementation=model_args.attn_implementation,
        dtype=model_args.dtype,
    )
    training_args.model_init_kwargs = model_init_kwargs | (training_args.model_init_kwargs or {})

    # Dataset
    # For your own pairs, with the columns `images`, `prompt` and `completion`: load_dataset("user/pairs", split="train")
    train_dataset = load_paco_dataset(script_args.dataset_name)
    eval_dataset = None
    if training_args.eval_strategy != "no":
        eval_dataset = load_paco_dataset(script_args.dataset_name, [script_args.eval_file])

    # Training
    trainer = PaCoRewardTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    # Save and push to the Hub
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)

    trainer.end()
