# SPDX-License-Identifier: Apache-2.0
"""Step 3: train the generator with PaCo-GRPO at half resolution."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft import LoraConfig
from transformers import TrainerCallback

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.checkpointing.checkpoints import list_checkpoints
from paco_trl.rewards import ClipTReward, ConsistencyReward

from .models import toy_clip_path, toy_flux_path
from .progress import show_figures
from .settings import MiniatureSettings


if TYPE_CHECKING:
    from datasets import Dataset
    from diffusers import DiffusionPipeline


def train_generator(
    folder: Path,
    judge: Path,
    prompts: "Dataset",
    settings: MiniatureSettings,
    extra_rewards: Sequence[Callable] = (),
    model: Path | None = None,
    **kwargs: Any,
) -> PaCoGRPOTrainer:
    """Train a LoRA of the toy FLUX on the judge's score and CLIP-T, resuming from the last checkpoint."""
    rewards = [ConsistencyReward(judge, batch_size=128), ClipTReward(toy_clip_path(), batch_size=128), *extra_rewards]
    return train_with_rewards(folder, str(model or toy_flux_path()), rewards, prompts, settings, **kwargs)


def train_with_rewards(
    folder: Path,
    model: "str | DiffusionPipeline",
    rewards: Sequence[Callable],
    prompts: "Dataset",
    settings: MiniatureSettings,
    callbacks: Sequence[TrainerCallback] = (),
    trainer_class: type[PaCoGRPOTrainer] = PaCoGRPOTrainer,
    config_class: type[PaCoGRPOConfig] = PaCoGRPOConfig,
    **options: Any,
) -> PaCoGRPOTrainer:
    """Train a LoRA of a toy generator on rewards, resuming from the last checkpoint."""
    images = settings.num_prompts_per_round * settings.num_generations
    usual = {
        "num_generations": settings.num_generations,
        "num_prompts_per_generation": settings.num_prompts_per_round,
        "per_device_train_batch_size": images // 2,  # two optimizer steps a round (paper)
        "num_inference_steps": settings.num_inference_steps,
        "sde_steps": list(settings.sde_steps),
        "guidance_scale": 1.0,  # the toy has none
        "resolution_scale": settings.resolution_scale,
        "multi_objective_aggregation": "log_tamed",
        "noise_level": settings.noise_level,
        "learning_rate": settings.learning_rate,
        "epsilon": settings.epsilon,
        "max_steps": 2 * settings.num_rounds,
        "save_steps": max(2, settings.num_rounds // 4 * 2),
        "save_total_limit": 1,
        "overwrite_output_dir": not list_checkpoints(folder),  # of a run that was killed before its result was written
        "seed": settings.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
    }
    trainer = trainer_class(
        model=model,
        reward_funcs=list(rewards),
        args=config_class(str(folder), **(usual | options)),
        train_dataset=prompts,
        callbacks=list(callbacks),
        peft_config=LoraConfig(r=16, lora_alpha=32, init_lora_weights="gaussian"),
    )
    show_figures(trainer, {f"rewards/{reward.__name__}/mean": reward.__name__ for reward in rewards})
    trainer.train(resume_from_checkpoint=bool(list_checkpoints(folder)))
    trainer.save_model()
    return trainer
