# SPDX-License-Identifier: Apache-2.0
"""Identity of a run: its data, model, rewards, and every setting that is not named as harmless."""

import dataclasses
from typing import Any

from datasets import Dataset
from peft import PeftConfig
from transformers import TrainingArguments

from ..rollout.adapters import SavedAdapter
from ..rollout.loading import quantization_text
from ..utils.fingerprint import describe, file_digest, versions
from ..utils.model_files import find_adapter_file
from .config_utils import REFUSED_GRPO_FIELDS, REFUSED_SFT_FIELDS
from .paco_grpo_config import PaCoGRPOConfig


# Every field of a config is compared, except `HARMLESS` and the fields with one of these prefixes
_HARMLESS_PREFIXES = (
    "activation_", "dataloader_", "ddp_", "do_", "eval_", "gradient_checkpointing", "hub_", "log_level", "logging_",
    "offload_", "save_", "trackio_",
)  # fmt: skip
HARMLESS = (
    # Paths and reports
    "output_dir", "overwrite_output_dir", "embeddings_dir", "resume_from_checkpoint",
    "restore_callback_states_from_checkpoint", "run_name", "project", "report_to", "log_on_each_node",
    "log_completions", "plot_curves", "include_num_input_tokens_seen", "disable_tqdm", "skip_memory_metrics", "debug",
    "dataset_num_proc",
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
# Harmless to an evaluation of the untrained model, in which nothing is trained and every row has its inference size
HARMLESS_UNTRAINED = (
    "advantage_clip", "beta", "detach_unconditional", "ema_decay", "epsilon", "epsilon_high", "greater_is_better",
    "height", "log_tame_threshold", "loss_type", "max_grad_norm", "max_resample_times", "max_reward_mean", "max_steps",
    "metric_for_best_model", "min_reward_std", "multi_objective_aggregation", "noise_level", "num_generations",
    "num_inference_steps", "num_iterations", "num_noise_levels", "num_prompts_per_generation", "num_sde_steps",
    "num_train_epochs", "per_device_rollout_batch_size", "per_device_train_batch_size", "reference", "resolution_scale",
    "scale_rewards", "sde_steps", "sde_type", "shuffle_dataset", "tail_steps", "warmup_steps", "width",
)  # fmt: skip
# `optim` is also the beginning of `optimizer_steps_per_generation`, which decides which round a step belongs to
_OPTIMIZER_PREFIXES = ("adam_", "learning_rate", "lr_", "optim", "weight_decay")  # prefixes
_OBJECTIVE_PREFIXES = ("awm_", "nft_", "old_policy_")  # prefixes of PaCoNFTTrainer's options
# Arguments of `from_pretrained` and fields of an adapter that do not decide what is trained
_HARMLESS_KWARGS = ("cache_dir", "token", "local_files_only", "force_download", "proxies")
_HARMLESS_IN_ADAPTERS = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "peft_version", "revision",
    "runtime_config",
)  # fmt: skip

# Prefixes of settings that a resumed run must share with its checkpoint: the optimizer's state restores them, or they
# decide which round a step belongs to, or what is loaded
_FIXED = (*_OPTIMIZER_PREFIXES, "bf16", "fp16", "model_init_kwargs", "num_iterations", "quantization")


def compared_settings(args: TrainingArguments) -> dict[str, Any]:
    """Return all settings but the harmless and the refused ones, and the versions, as JSON has them."""
    left_out = {*HARMLESS, *(REFUSED_GRPO_FIELDS if isinstance(args, PaCoGRPOConfig) else REFUSED_SFT_FIELDS)}
    names = [field.name for field in dataclasses.fields(args) if not field.name.startswith(_HARMLESS_PREFIXES)]
    kwargs = {name: value for name, value in (args.model_init_kwargs or {}).items() if name not in _HARMLESS_KWARGS}
    settings = {name: describe(getattr(args, name)) for name in names if name not in left_out}
    is_warm = args.lr_scheduler_type == "constant_with_warmup" and args.warmup_steps >= 1
    if args.lr_scheduler_type == "constant" or is_warm:  # a schedule that ends depends on where
        settings["max_steps"] = settings["num_train_epochs"] = None
    elif args.max_steps > 0:
        settings["num_train_epochs"] = None
    if (config := kwargs.pop("quantization_config", None)) is not None:
        settings["quantization"] = quantization_text(config)
    return settings | {"model_init_kwargs": describe(kwargs), "versions": versions()}


def describe_run(
    args: TrainingArguments, dataset: Dataset, adapter: PeftConfig | None, **parts: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """
    Describe a run: first what a resumed run must share with its checkpoint, then what may change with a warning.

    The former are the `dataset`, with all columns, the adapter, and the settings that cannot change in a run; the
    weights of the model are added once they are loaded. The latter are all other settings, and `parts`.
    """
    settings = compared_settings(args) | parts
    described = "none, all weights of the transformer are trained"
    if adapter is not None:
        values = {name: value for name, value in adapter.to_dict().items() if name not in _HARMLESS_IN_ADAPTERS}
        described = describe({name: sorted(v) if isinstance(v, list) else v for name, v in values.items()})
    fixed = {name: settings.pop(name) for name in [*settings] if name.startswith(_FIXED)}
    return {"adapter": described, "dataset": describe(dataset), **fixed}, settings


def reference_setting(args: PaCoGRPOConfig, saved: SavedAdapter | None) -> str | None:
    """Return the reference of the loss; `None` without one, or if it is the base model under a new adapter."""
    if not args.has_reference or saved is None:
        return None
    if args.reference == "base":
        return "base"
    return f"{args.reference}: {file_digest(find_adapter_file(saved.name))}"


def evaluation_settings(args: PaCoGRPOConfig) -> dict[str, Any]:
    """Return the settings that an evaluation of the untrained model depends on."""
    left_out = (*_OPTIMIZER_PREFIXES, *_OBJECTIVE_PREFIXES)
    return {
        n: v for n, v in compared_settings(args).items() if n not in HARMLESS_UNTRAINED and not n.startswith(left_out)
    }
