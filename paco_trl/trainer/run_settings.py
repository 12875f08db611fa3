# SPDX-License-Identifier: Apache-2.0
"""Settings that a checkpoint must share with a resumed run, those that may change with a warning, and the harmless."""

import dataclasses
import re
from enum import Enum
from typing import Any

from peft import LoraConfig
from torch import nn

from ..checkpointing.checkpoints import dataset_digest
from ..rewards.runner import RewardRunner
from ..rollout.loading import adapter_digest, quantization_text
from ..rollout.prompt_rows import PromptRows
from ..utils.files import adapter_weights_digest, digest
from ..utils.fingerprint import weights_fingerprint
from .config_utils import REFUSED_GRPO_FIELDS
from .paco_grpo_config import PaCoGRPOConfig


# Every field of the config is compared, except these, and those that begin with one of the prefixes
_HARMLESS_PREFIXES = (
    "activation_checkpointing", "dataloader_", "ddp_", "do_", "eval_", "gradient_checkpointing", "hub_", "log_level",
    "logging_", "offload_", "save_", "trackio_",
)  # fmt: skip
HARMLESS = (
    # Paths and reports
    "output_dir", "overwrite_output_dir", "embeddings_dir", "resume_from_checkpoint",
    "restore_callback_states_from_checkpoint", "run_name", "project", "report_to", "log_on_each_node", "log_completions",
    "plot_curves", "include_num_input_tokens_seen", "disable_tqdm", "skip_memory_metrics", "debug",
    # When to save and to push
    "enable_jit_checkpoint", "jit_checkpoint_signals", "load_best_model_at_end", "push_to_hub",
    # Devices, memory and communication
    "use_cpu", "local_rank", "accelerator_config", "fsdp_config", "deepspeed", "ds3_gather_for_generation",
    "torch_empty_cache_steps", "ema_offload",
    # Limits that only stop a run
    "ratio_tolerance", "max_reward_failures", "max_excluded_images", "max_excluded_groups",
    # Derived from other settings and the number of processes
    "generation_batch_size", "steps_per_generation", "gradient_accumulation_steps",
    # Part of the rewards' descriptions
    "reward_weights", "reward_required",
)  # fmt: skip

# Restored with the optimizer's state, so that other values would have no effect
_OPTIMIZER = (
    "learning_rate", "lr_scheduler_type", "weight_decay", "optim", "optim_args", "adam_beta1", "adam_beta2",
    "adam_epsilon",
)  # fmt: skip
# And which round a step belongs to, and the base model
_IDENTITY = (*_OPTIMIZER, "optimizer_steps_per_generation", "num_iterations", "model_init_kwargs", "quantization")

# How weights are updated and chosen
_UPDATES = (
    "epsilon", "epsilon_high", "divergence_threshold", "beta", "norm_penalty", "reference", "ema_decay",
    "max_grad_norm", "max_steps", "num_train_epochs", "warmup_steps", "adapter_fraction", "metric_for_best_model",
    "greater_is_better",
)  # fmt: skip
# What a round that has been generated and scored does not depend on
LOSS_ONLY_FIELDS = (
    *_UPDATES, "num_generations_eval", "num_inference_steps_eval", "per_device_eval_batch_size", "eval_rewards",
)  # fmt: skip
# What an evaluation of the untrained model does not depend on; its sizes are compared row by row
_IN_TRAINING = (
    *_OPTIMIZER, *_UPDATES, "optimizer_steps_per_generation", "num_iterations", "height", "width", "resolution_scale",
    "num_inference_steps", "sde_type", "sde_steps", "num_sde_steps", "noise_level", "tail_steps", "num_generations",
    "num_prompts_per_generation", "per_device_train_batch_size", "multi_objective_aggregation", "log_tame_threshold",
    "scale_rewards", "advantage_clip", "min_reward_std", "max_reward_mean", "max_resample_times", "shuffle_dataset",
    "loss_type", "detach_unconditional", "branch_size", "per_device_rollout_batch_size", "nft_beta", "awm_weighting",
    "num_noise_levels", "old_policy_decay_rate", "old_policy_max_decay", "old_policy_beta", "lr_scheduler_kwargs",
)  # fmt: skip

# Arguments of `from_pretrained` that do not decide what is loaded
_HARMLESS_KWARGS = ("cache_dir", "token", "local_files_only", "force_download", "proxies")


def compared_settings(args: PaCoGRPOConfig) -> dict[str, Any]:
    """Return all settings but the harmless and the refused ones, as JSON has them."""
    left_out = {*HARMLESS, *REFUSED_GRPO_FIELDS}
    names = [field.name for field in dataclasses.fields(args) if not field.name.startswith(_HARMLESS_PREFIXES)]
    settings = {name: _plain(getattr(args, name)) for name in names if name not in left_out}
    if args.lr_scheduler_type == "constant":  # one that ends depends on where
        settings["max_steps"] = settings["num_train_epochs"] = None
    elif args.max_steps > 0:
        settings["num_train_epochs"] = None
    kwargs = {name: value for name, value in (args.model_init_kwargs or {}).items() if name not in _HARMLESS_KWARGS}
    if (config := kwargs.pop("quantization_config", None)) is not None:
        settings["quantization"] = quantization_text(config)
    return settings | {"model_init_kwargs": _plain(kwargs)}


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return weights_fingerprint(value)
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | int | float):
        return value
    return re.sub(r" at 0x\w+", "", str(value))  # without an address in memory


def run_identity(
    args: PaCoGRPOConfig, base_model: str, loaded: str | None, adapter: LoraConfig | None, rows: PromptRows
) -> dict[str, Any]:
    """Return what a checkpoint and the run that resumes it must share; `loaded` is a loaded pipeline's quantization."""
    settings = compared_settings(args)
    settings["quantization"] = settings["quantization"] or loaded
    return {
        "base_model": base_model,
        "adapter": adapter_digest(adapter),
        "dataset_size": len(rows),
        "dataset": dataset_digest(rows.dataset, *rows.image_columns),
        # Of separate images, whose prompts are made of the theme, the panels and the template
        **({"panels": digest(rows.calls)} if rows.has_separate else {}),
        **{name: settings[name] for name in _IDENTITY},
    }


def reference_setting(args: PaCoGRPOConfig, peft_config: LoraConfig | str | None) -> str | None:
    """Return what the loss compares with; `None` for nothing, or for the base model under a new adapter."""
    if not args.has_reference or not isinstance(peft_config, str):
        return None
    if args.reference == "base":
        return "base"
    return f"{args.reference}: {adapter_weights_digest(peft_config)[:16]}"


def adjustable_settings(args: PaCoGRPOConfig, rewards: RewardRunner, eval_rewards: RewardRunner) -> dict[str, Any]:
    """Return the settings that a resumed run may change with a warning."""
    settings = {name: value for name, value in compared_settings(args).items() if name not in _IDENTITY}
    settings |= {f"rewards/{name}": description for name, description in rewards.descriptions.items()}
    if eval_rewards is not rewards:
        settings |= {f"eval_rewards/{name}": each for name, each in eval_rewards.descriptions.items()}
    return settings


def evaluation_settings(args: PaCoGRPOConfig) -> dict[str, Any]:
    """Return the settings that an evaluation of the untrained model depends on."""
    return {name: value for name, value in compared_settings(args).items() if name not in _IN_TRAINING}
