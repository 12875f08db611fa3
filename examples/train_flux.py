# SPDX-License-Identifier: Apache-2.0
# /// script
# dependencies = ["paco_trl[deepspeed,tensorboard]"]
# ///
"""
Trains a LoRA on a FLUX pipeline with PaCo-GRPO, to draw sets of images that belong together.

Every option of `PaCoGRPOConfig` and of the arguments below can be given on the command line or in a YAML file
(`--config file.yaml`); the paper's settings are the defaults.

One GPU, or the CPU:

    python examples/train_flux.py --model_name_or_path black-forest-labs/FLUX.1-dev --dataset_name user/t2is-prompts \
        --clip_model openai/clip-vit-large-patch14 --output_dir paco-flux

Several GPUs, DeepSpeed ZeRO-3:

    accelerate launch --config_file examples/accelerate_configs/zero3.yaml examples/train_flux.py ...
"""

from dataclasses import dataclass, field

from datasets import Dataset
from peft import LoraConfig
from trl import TrlParser

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.data import load_image_set_prompts
from paco_trl.rewards import ClipTReward, panel_similarity_reward, redness_reward


@dataclass
class ScriptArguments:
    """
    Arguments of this script.

    Args:
        model_name_or_path (`str`, *optional*, defaults to `"black-forest-labs/FLUX.1-dev"`):
            Hub id or folder of the FLUX pipeline.
        dataset_name (`str`, *optional*):
            Image-set prompts: Hub id, folder, or JSON-lines file; raw T2IS rows are converted.
        dataset_split (`str`, *optional*, defaults to `"train"`):
            Split to train on.
        eval_split (`str`, *optional*):
            Split of the same dataset to evaluate on.
        rewards (`list[str]`, *optional*, defaults to `["clip_t"]`):
            Rewards: `clip_t`, `redness`, `panel_similarity`. The last two need no model and are for trying things out.
        clip_model (`str`, *optional*, defaults to `"openai/clip-vit-large-patch14"`):
            CLIP of the reward `clip_t`.
        lora_r (`int`, *optional*, defaults to `64`):
            Rank of the adapter (paper).
        lora_alpha (`int`, *optional*, defaults to `128`):
            Scale of the adapter (paper).
        lora_target_modules (`list[str]`, *optional*):
            Layers that get an adapter. If `None`, the family's default.
    """

    model_name_or_path: str = field(
        default="black-forest-labs/FLUX.1-dev", metadata={"help": "Hub id or folder of the FLUX pipeline."}
    )
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Image-set prompts: Hub id, folder, or JSON-lines file; raw T2IS rows are converted."},
    )
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: str | None = field(default=None, metadata={"help": "Split of the same dataset to evaluate on."})
    rewards: list[str] = field(
        default_factory=lambda: ["clip_t"], metadata={"help": "Rewards: clip_t, redness, panel_similarity."}
    )
    clip_model: str = field(default="openai/clip-vit-large-patch14", metadata={"help": "CLIP of the reward `clip_t`."})
    lora_r: int = field(default=64, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=128, metadata={"help": "Scale of the adapter."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Layers that get an adapter. If `None`, the family's default."}
    )


def load_reward(name: str, script_args: ScriptArguments):
    if name == "clip_t":
        return ClipTReward(script_args.clip_model)
    if name == "redness":
        return redness_reward
    if name == "panel_similarity":
        return panel_similarity_reward
    raise ValueError(f"Unknown reward {name!r}: `--rewards` takes clip_t, redness and panel_similarity.")


def main(script_args: ScriptArguments, training_args: PaCoGRPOConfig) -> None:
    ################
    # Dataset
    ################
    if script_args.dataset_name is None:
        raise ValueError("`--dataset_name` is missing: a Hub id, a folder or a JSON-lines file of image-set prompts.")
    train_dataset: Dataset = load_image_set_prompts(script_args.dataset_name, script_args.dataset_split)
    eval_dataset = None
    if script_args.eval_split is not None:
        eval_dataset = load_image_set_prompts(script_args.dataset_name, script_args.eval_split)

    ################
    # Training
    ################
    trainer = PaCoGRPOTrainer(
        model=script_args.model_name_or_path,
        reward_funcs=[load_reward(name, script_args) for name in script_args.rewards],
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=LoraConfig(
            r=script_args.lora_r,
            lora_alpha=script_args.lora_alpha,
            target_modules=script_args.lora_target_modules,
            init_lora_weights="gaussian",
        ),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)

    # Save and push to the Hub
    trainer.save_model(training_args.output_dir)
    if trainer.accelerator.is_main_process:
        print(f"Adapter: {training_args.output_dir}")
        if training_args.log_completions:
            print(f"Pictures: {training_args.output_dir}/contact_sheets")
    # The processes end together: one that leaves early can take the others down
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, PaCoGRPOConfig)).parse_args_and_config())
