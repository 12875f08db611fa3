# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl[deepspeed,tensorboard] @ git+<address of this repository>"]
# ///
"""
Trains a LoRA on FLUX.1-Kontext with PaCo-GRPO, to change in an image what an instruction names and nothing else.

The dataset has instructions in `prompt` and source images in `image`. One GPU:

    python examples/train_flux_kontext.py --dataset_name user/edit-prompts --max_steps 200 --output_dir paco-kontext

Several GPUs, DDP (`zero3.yaml` where training does not fit next to the model's weights):

    accelerate launch --config_file paco_trl/accelerate_configs/multi_gpu.yaml examples/train_flux_kontext.py ...
"""

from dataclasses import dataclass, field

from peft import LoraConfig
from trl import TrlParser

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.data import load_edit_prompts
from paco_trl.rewards import EditReward


@dataclass
class ScriptArguments:
    dataset_name: str = field(metadata={"help": "Hub id, directory or file of the edits."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on, with `--eval_strategy`."})
    model_name_or_path: str = field(
        default="black-forest-labs/FLUX.1-Kontext-dev", metadata={"help": "Hub id or path of the pipeline."}
    )
    judge_model: str = field(default="X-GenGroup/PaCo-Reward-7B", metadata={"help": "Hub id or path of the judge."})
    lora_r: int = field(default=64, metadata={"help": "Rank of the adapter."})
    lora_alpha: int | None = field(default=None, metadata={"help": "Scale of the adapter. If `None`, twice its rank."})


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PaCoGRPOConfig))
    # The paper's settings for this model, where they differ from the defaults
    parser.set_defaults(
        num_inference_steps=8,
        noise_level=0.9,
        guidance_scale=2.5,
        resolution_scale=0.375,  # train at 384 for images of 1024
        multi_objective_aggregation="sum_then_normalize",  # one reward, not tamed
    )
    script_args, training_args = parser.parse_args_and_config()

    # Dataset
    train_dataset = load_edit_prompts(script_args.dataset_name, script_args.dataset_train_split)
    eval_dataset = None
    if training_args.eval_strategy != "no":
        eval_dataset = load_edit_prompts(script_args.dataset_name, script_args.dataset_test_split)

    # Rewards
    reward_funcs = [EditReward(script_args.judge_model)]

    # Training
    trainer = PaCoGRPOTrainer(
        model=script_args.model_name_or_path,
        reward_funcs=reward_funcs,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=LoraConfig(
            r=script_args.lora_r,
            lora_alpha=script_args.lora_alpha or 2 * script_args.lora_r,
            init_lora_weights="gaussian",
        ),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    # Save and push to the Hub
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=script_args.dataset_name)

    trainer.end()
