# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl[deepspeed,tensorboard] @ git+<address of this repository>"]
# ///
"""
Trains a LoRA on FLUX.1-dev with PaCo-GRPO, to generate sets of images that belong together.

The defaults of `PaCoGRPOConfig` are the paper's settings for this model. One GPU:

    python examples/train_flux.py --dataset_name user/t2is-prompts --max_steps 200 --output_dir paco-flux

Several GPUs, DDP (`zero3.yaml` where training does not fit next to the model's weights):

    accelerate launch --config_file paco_trl/accelerate_configs/multi_gpu.yaml examples/train_flux.py ...

`paco-trl grpo` trains the same without a clone, with rewards by name, a served judge, quantized weights and recipes.
"""

from dataclasses import dataclass, field

from peft import LoraConfig
from trl import TrlParser

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.data import load_image_set_prompts
from paco_trl.rewards import ClipTReward, ConsistencyReward


@dataclass
class ScriptArguments:
    dataset_name: str = field(metadata={"help": "Prompts: Hub id, directory or file, also raw T2IS rows."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str = field(default="test", metadata={"help": "Split to evaluate on, with `--eval_strategy`."})
    model_name_or_path: str = field(
        default="black-forest-labs/FLUX.1-dev", metadata={"help": "Hub id or path of the pipeline."}
    )
    judge_model: str = field(default="X-GenGroup/PaCo-Reward-7B", metadata={"help": "Hub id or path of the judge."})
    clip_model: str = field(
        default="laion/CLIP-ViT-H-14-laion2B-s32B-b79K", metadata={"help": "Hub id or path of CLIP."}
    )
    lora_r: int = field(default=64, metadata={"help": "Rank of the adapter."})
    lora_alpha: int | None = field(default=None, metadata={"help": "Scale of the adapter. If `None`, twice its rank."})


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PaCoGRPOConfig))
    script_args, training_args = parser.parse_args_and_config()

    # Dataset
    train_dataset = load_image_set_prompts(script_args.dataset_name, script_args.dataset_train_split)
    eval_dataset = None
    if training_args.eval_strategy != "no":
        eval_dataset = load_image_set_prompts(script_args.dataset_name, script_args.dataset_test_split)

    # Rewards
    reward_funcs = [ConsistencyReward(script_args.judge_model), ClipTReward(script_args.clip_model)]

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
