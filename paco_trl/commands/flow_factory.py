# SPDX-License-Identifier: Apache-2.0
"""Names of the options of [Flow-Factory](https://github.com/X-GenGroup/Flow-Factory) here."""

from collections.abc import Mapping
from typing import Any

import yaml


# Command and loss of a `trainer_type`
_METHODS = {"grpo": ("grpo", None), "grpo-guard": ("grpo", "grpo_guard"), "nft": ("nft", None), "awm": ("nft", "awm")}
_REWARDS = {"pickscore": "pick_score", "clip": "clip_t", "ocr": "ocr"}
# Options with the same value and, if it is different, another name
_RENAMED = {
    "model": {
        "model_name_or_path": "model_name_or_path", "lora_rank": "lora_r", "lora_alpha": "lora_alpha",
        "resume_path": "adapter", "attn_backend": "attention_backend",
    },
    "data": {"dataset_dir": "dataset_name", "image_dir": "image_folder"},
    "train": {
        "group_size": "num_generations", "unique_sample_num_per_epoch": "num_prompts_per_generation",
        "gradient_step_per_epoch": "optimizer_steps_per_generation", "num_inner_epochs": "num_iterations",
        "per_device_batch_size": "per_device_train_batch_size", "num_inference_steps": "num_inference_steps",
        "guidance_scale": "guidance_scale", "learning_rate": "learning_rate", "adam_weight_decay": "weight_decay",
        "adam_epsilon": "adam_epsilon", "max_grad_norm": "max_grad_norm", "seed": "seed",
        "enable_gradient_checkpointing": "gradient_checkpointing", "nft_beta": "nft_beta",
        "num_train_timesteps": "num_noise_levels",
    },
    "scheduler": {"noise_level": "noise_level", "num_sde_steps": "num_sde_steps", "sde_steps": "sde_steps"},
    "eval": {"num_inference_steps": "num_inference_steps_eval", "per_device_batch_size": "per_device_eval_batch_size"},
    "log": {"save_dir": "output_dir", "run_name": "run_name", "logging_backend": "report_to"},
}  # fmt: skip
# Defaults there that are others here, for what a file does not set
_DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {"lora_rank": 8},
    "train": {
        "unique_sample_num_per_epoch": 8, "gradient_step_per_epoch": 2, "num_inference_steps": 10,
        "guidance_scale": 3.5, "learning_rate": 1e-5,
    },
    "scheduler": {"noise_level": 0.7, "num_sde_steps": 1},
    "eval": {"resolution": 1024, "num_inference_steps": 30, "eval_freq": 10},
    "log": {"save_freq": 10},
}  # fmt: skip
_SDE_TYPES = {"Flow-SDE": "flow_sde", "Dance-SDE": "dance_sde", "CPS": "cps"}
# Why an option is left out. What is read elsewhere in this module, or has one value here, needs no reason
_REASONS = {
    **dict.fromkeys(
        ("preprocessing_batch_size", "enable_preprocess", "force_reprocess", "cache_dir", "preprocess_parallelism"),
        "prompts are encoded when they are needed; `embeddings_dir` keeps them",
    ),
    "max_dataset_size": "choose rows by a slice, such as `dataset_split: train[:1000]`",
    "gradient_accumulation_steps": "it follows from `optimizer_steps_per_generation`",
    "ema_update_interval": "the average follows each optimizer step",
    "offload_samples_to_cpu": "see `offload_embeddings`",
    "condition_image_size": "source images follow the size of the image, and `resolution_scale`",
    "kl_beta": "`beta` multiplies another divergence, which has the step's variance in it: choose it anew",
    "off_policy": "the old policy generates",
    "project": "set the environment variable `WANDB_PROJECT` or `SWANLAB_PROJECT`",
}
_UNSAID = (
    "model_type", "finetune_type", "target_modules", "trainer_type", "resolution", "height", "width", "adam_betas",
    "global_std", "advantage_aggregation", "clip_range", "adv_clip_range", "ema_decay", "ema_device", "max_epochs",
    "dynamics_type", "eval_freq", "save_freq", "guidance_scale", "seed", "verbose", "save_model_only", "kl_type",
    "ref_param_device", "latent_storage_dtype", "sampler_type", "dataloader_num_workers", "resume_type",
    "master_weight_dtype",
)  # fmt: skip


def is_flow_factory(config: Mapping[str, Any]) -> bool:
    """Return whether the content of a YAML file is for Flow-Factory, whose options are in sections."""
    train = config.get("train")
    is_theirs = isinstance(train, dict) and ("trainer_type" in train or "group_size" in train)
    return is_theirs and isinstance(config.get("model"), dict)


def describe(config: Mapping[str, Any], name: str) -> str:
    """Write the options of a file for Flow-Factory as a file for this package, with what is left out and why."""
    trainer = config["train"].get("trainer_type", "grpo")
    if trainer not in _METHODS:
        return (
            f"`--config` is {name!r}, a file for the trainer {trainer!r} of Flow-Factory, which is not here. Choose "
            f"one of {', '.join(_METHODS)}."
        )
    command = _METHODS[trainer][0]
    try:
        options, left_out = translate(config)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        return (
            f"`--config` is {name!r}, a file for Flow-Factory with a value of another type than there ({error}). "
            "Correct it, and you get its options by their names here."
        )
    lines = "".join(f"# {reason}: {', '.join(names)}\n" for reason, names in left_out.items())
    text = yaml.safe_dump(options, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1000)
    return (
        f"`--config` is {name!r}, a file for Flow-Factory. Save these lines as a file, and pass that to `paco-trl "
        f"{command} --config`:\n\n{text}{lines}"
    )


def translate(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return a file's options by the names of this package, and names that are left out, by the reason."""
    sections = {name: config.get(name) or {} for name in _RENAMED}
    for name, defaults in _DEFAULTS.items():
        if name != "eval" or sections[name]:  # without the section, the dataset may have no prompts for it
            sections[name] = defaults | sections[name]
    model = sections["model"]
    train = sections["train"]
    evaluation = sections["eval"]
    command, loss_type = _METHODS[train.get("trainer_type", "grpo")]
    options: dict[str, Any] = {}
    left_out: dict[str, list[str]] = {}
    for section, renamed in _RENAMED.items():
        for name, value in sections[section].items():
            if name in renamed:
                options[renamed[name]] = value
            elif name not in _UNSAID and not (name == "kl_beta" and (command == "nft" or not value)):
                left_out.setdefault(_REASONS.get(name, "no such option here"), []).append(f"{section}.{name}")
    options |= _model_options(model) | {"edits": _edits(model, train)} | _training_options(train)
    options |= _sde_options(sections["scheduler"], train) if command == "grpo" else {}
    options |= _size_options(train, evaluation) | _periods(sections["log"], train, evaluation)
    launch_options = _launch_options(config)
    options |= {"loss_type": loss_type} | launch_options
    for key in ("rewards", "eval_rewards"):
        options[key], unknown = _reward_options(config.get(key) or [])
        mine = left_out.setdefault("write these rewards as functions in my_rewards.py", []) if unknown else []
        mine += [name for name in unknown if name not in mine]
    for section, name in (("eval", "guidance_scale"), ("eval", "seed"), ("scheduler", "seed")):
        value = sections[section].get(name)
        if value is not None and value != train.get(name, 42):  # the default seed
            left_out.setdefault(f"there is one `{name}`", []).append(f"{section}.{name}")
    if config.get("config_file") and not launch_options["accelerate_config"]:
        left_out["choose an `accelerate_config`, or a file of your own"] = ["config_file"]
    if config.get("mixed_precision") not in (None, False, "no", "bf16"):
        left_out["training is in bfloat16, or float32 with `bf16: false`"] = ["mixed_precision"]
    unused = ("lora_r", "lora_alpha", "adapter") if options.get("use_peft") is False else ()
    unused += ("noise_level", "num_sde_steps", "sde_steps") if command == "nft" else ("nft_beta", "num_noise_levels")
    options = {name: value for name, value in options.items() if value not in (None, []) and name not in unused}
    return options, left_out


def _model_options(model: Mapping[str, Any]) -> dict[str, Any]:
    layers = model.get("target_modules")
    if isinstance(layers, str):
        layers = {"default": None, "all": ["all-linear"]}.get(layers, [layers])
    is_full = model.get("finetune_type", "full") == "full"
    return {"use_peft": False} if is_full else {"lora_target_modules": layers}


def _edits(model: Mapping[str, Any], train: Mapping[str, Any]) -> bool | None:
    kind = str(model.get("model_type"))
    return "edit" in kind or "kontext" in kind or "condition_image_size" in train or None


def _training_options(train: Mapping[str, Any]) -> dict[str, Any]:
    low, high = _range(train.get("clip_range", 1e-4))
    betas = train.get("adam_betas") or (None, None)
    is_sum = train.get("advantage_aggregation") == "sum"
    is_grpo = "grpo" in train.get("trainer_type", "grpo")
    options = {
        # "gdpo" normalizes the rewards one by one
        "multi_objective_aggregation": "sum_then_normalize" if is_sum else "normalize_then_sum",
        "scale_rewards": "batch" if train.get("global_std", True) else "group",
        "advantage_clip": _range(train.get("adv_clip_range", 5.0))[1],
        "adam_beta1": betas[0],
        "adam_beta2": betas[1],
    }
    if train.get("trainer_type") != "nft":  # which clips nothing
        options |= {"epsilon": low, "epsilon_high": high if high != low else None}
    if is_grpo:
        return options | {
            "ema_decay": train.get("ema_decay", 0.995) or None,
            "ema_offload": train.get("ema_device") == "cpu" or None,
        }
    return options | {"beta": train.get("kl_beta")}  # the average is the old policy


def _range(value: float | list[float]) -> tuple[float, float]:
    """Return how far a value may be below and above."""
    low, high = value if isinstance(value, list) else (value, value)
    return abs(float(low)), abs(float(high))


def _sde_options(scheduler: Mapping[str, Any], train: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sde_type": _SDE_TYPES.get(scheduler.get("dynamics_type", "Flow-SDE")),
        "sde_steps": scheduler.get("sde_steps") or list(range(train.get("num_inference_steps", 10) - 1)),
    }


def _size_options(train: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of evaluations, which is that of use, and the fraction of it in which training generates."""
    trained = _size(train, 512)
    height, width = _size(evaluation, trained[0])
    return {"height": height, "width": width, "resolution_scale": trained[0] / height}


def _size(section: Mapping[str, Any], default: int) -> tuple[int, int]:
    sides = section.get("resolution", default)
    sides = list(sides) if isinstance(sides, list) else [sides]
    return section.get("height") or sides[0], section.get("width") or sides[-1]


def _periods(log: Mapping[str, Any], train: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return periods in optimizer steps; an epoch there is a round here."""
    steps = train.get("gradient_step_per_epoch", 2) * train.get("num_inner_epochs", 1)
    epochs = train.get("max_epochs")
    save = log.get("save_freq")
    evaluate = evaluation.get("eval_freq")
    options = {"max_steps": epochs * steps if epochs and epochs > 0 else None}
    options |= {"save_steps": save * steps} if save else {}
    options |= {"eval_strategy": "steps", "eval_steps": evaluate * steps, "eval_split": "test"} if evaluate else {}
    return options


def _launch_options(config: Mapping[str, Any]) -> dict[str, Any]:
    file = str(config.get("config_file"))
    stage = next((stage for stage in ("zero2", "zero3", "fsdp2") if stage in file), None)
    count = config.get("num_processes")
    precision = config.get("mixed_precision")
    return {
        "num_processes": count if count != 1 else None,
        "accelerate_config": stage,
        "bf16": {"bf16": True, "no": False, "False": False}.get(str(precision)),  # YAML reads `no` as false
    }


def _reward_options(rewards: Any) -> tuple[list[Any], list[str]]:
    """Return rewards with their weights, and names of those that are not here."""
    entries = rewards if isinstance(rewards, list) else [rewards]
    names = [str(entry.get("reward_model", entry.get("name"))) for entry in entries]
    known = [_REWARDS.get(name.lower()) for name in names]
    weights = [entry.get("weight", 1.0) for entry in entries]
    found = [name if weight == 1 else {name: weight} for name, weight in zip(known, weights, strict=True) if name]
    unknown = [
        name if weight == 1 else f"{name} with the weight {weight}"
        for name, here, weight in zip(names, known, weights, strict=True)
        if here is None
    ]
    return [*found, *["my_rewards.py"] * bool(unknown)], unknown
