# SPDX-License-Identifier: Apache-2.0
"""Settings that a checkpoint must share with a resumed run, and those that may change with a warning."""

import dataclasses
from typing import Any

from peft import LoraConfig

from ..checkpointing.checkpoints import dataset_digest
from ..rewards.reward_set import RewardSet
from ..rollout.loading import adapter_digest, adapter_file_digest
from ..rollout.prompt_rows import PromptRows
from .paco_grpo_config import PaCoGRPOConfig


# Restored with the optimizer's state, so that other values would have no effect
_OPTIMIZER = (
    "learning_rate", "lr_scheduler_type", "weight_decay", "optim", "adam_beta1", "adam_beta2", "adam_epsilon",
)  # fmt: skip

_ADJUSTABLE = (
    "seed", "per_device_train_batch_size", "height", "width", "resolution_scale", "num_inference_steps",
    "guidance_scale", "negative_prompt", "detach_unconditional", "sde_type", "sde_steps", "num_sde_steps",
    "noise_level", "tail_steps", "loss_type", "epsilon", "epsilon_high", "beta", "ema_decay",
    "multi_objective_aggregation", "log_tame_threshold", "scale_rewards", "advantage_clip", "shuffle_dataset", "bf16",
    "max_grad_norm", "warmup_steps", "per_device_rollout_batch_size", "attention_backend",
)  # fmt: skip

# Settings that a round which has been generated and scored does not depend on
AFTER_GENERATION = (
    "epsilon", "epsilon_high", "divergence_threshold", "beta", "norm_penalty", "reference", "ema_decay", "max_grad_norm",
    "max_steps", "warmup_steps",
)  # fmt: skip


def run_identity(
    args: PaCoGRPOConfig, base_model: str, peft_config: LoraConfig | str | None, rows: PromptRows
) -> dict[str, Any]:
    """Return what a checkpoint and the run that resumes it must share."""
    return {
        "base_model": base_model,
        "adapter": adapter_digest(peft_config),
        "dataset_size": len(rows),
        "dataset": dataset_digest(rows.dataset, rows.sources),
        # Which round a step belongs to
        "optimizer_steps_per_generation": args.round_layout.num_optimizer_steps,
        "num_iterations": args.num_iterations,
        **{name: str(getattr(args, name)) for name in _OPTIMIZER},
    }


def reference_setting(args: PaCoGRPOConfig, peft_config: LoraConfig | str | None) -> str | None:
    """Return what the loss compares with; `None` for nothing, or for the base model under a new adapter."""
    if not args.has_reference or not isinstance(peft_config, str):
        return None
    return args.reference if args.reference == "base" else f"{args.reference}: {adapter_file_digest(peft_config)}"


def adjustable_settings(
    args: PaCoGRPOConfig, rewards: RewardSet, config_class: type[PaCoGRPOConfig]
) -> dict[str, Any]:
    """Return the settings that a resumed run may change with a warning, with those that another config adds."""
    layout = args.round_layout
    # Not those of a user's subclass
    own = {f.name for f in dataclasses.fields(config_class)} - {f.name for f in dataclasses.fields(PaCoGRPOConfig)}
    return {
        "num_prompts_per_generation": layout.num_prompts,
        "num_generations": layout.num_generations,
        **{name: getattr(args, name) for name in _ADJUSTABLE},
        # `None` is what a checkpoint from before this option is read as
        "images_per_prefix": args.images_per_prefix if args.images_per_prefix > 1 else None,
        "compile_repeated_blocks": args.compile_repeated_blocks or None,
        "norm_penalty": args.norm_penalty or None,
        "divergence_threshold": args.divergence_threshold if args.loss_type == "flow_dppo" else None,
        # A schedule that ends depends on where
        "max_steps": None if args.lr_scheduler_type == "constant" else args.max_steps,
        "rewards": rewards.names,
        "reward_weights": rewards.weights.tolist(),
        "reward_required": rewards.required,
        **{name: getattr(args, name) for name in sorted(own)},
    }
