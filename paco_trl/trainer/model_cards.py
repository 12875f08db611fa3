# SPDX-License-Identifier: Apache-2.0
"""Contents of the model cards, from the settings, the log and the model of a run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from peft import PeftModel
from PIL import Image
from torch import nn
from transformers import SchedulerType, TrainerState

from ..data.image_sets import PANEL_OPTIONS, SEPARATE
from ..hub.card_data import EvaluationRow, LoRA, RewardRow, is_stated
from ..plots.contact_sheet import CARD, CARD_PROMPTS
from ..rollout import Family
from ..rollout.prompt_rows import ResolvedRows
from ..utils.fsdp import shards_weights
from ..utils.logs import get_logger
from ..utils.names import is_local, public_name
from .paco_grpo_config import PaCoGRPOConfig
from .paco_reward_config import PaCoRewardConfig


logger = get_logger(__name__)


TRAIN_SECONDS = "train_seconds"  # key of the log


def training_seconds(state: TrainerState, step: int | None = None) -> float | None:
    """Return the seconds of training logged up to a step, or to the last one; `None` without training."""
    logged = (entry for entry in reversed(state.log_history) if TRAIN_SECONDS in entry)
    return next((entry[TRAIN_SECONDS] for entry in logged if step is None or entry["step"] <= step), None)


def describe_hardware(device: torch.device, processes: int) -> str:
    """Name the hardware of a run, such as `"7 x NVIDIA H100"`."""
    if device.type == "cpu":
        return "CPU" if processes == 1 else f"CPU, {processes} processes"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return f"{processes} x {name}"


def cached_commit(model: str, revision: str | None) -> str | None:
    """Return the commit of a model that was loaded from the Hub, `None` for a directory."""
    if is_local(model) or "/" not in model:
        return None
    files = (try_to_load_from_cache(model, name, revision=revision) for name in ("model_index.json", "config.json"))
    return next((Path(path).parent.name for path in files if isinstance(path, str)), None)


def describe_lora(model: nn.Module, continued_from: str | None = None, quantization: str | None = None) -> LoRA | None:
    """Describe the adapter of a model and the quantization of its base; `None` without an adapter."""
    if not isinstance(model, PeftModel):
        return None
    config = model.peft_config[model.active_adapter]
    layers = config.target_modules
    # A pattern, or a long list that PEFT has expanded, tells a reader little
    layers = sorted(layers) if isinstance(layers, (list, set, tuple)) and len(layers) <= 16 else None
    return LoRA(config.r, config.lora_alpha, layers, continued_from, quantization)


def image_settings(
    args: PaCoGRPOConfig, rows: ResolvedRows, step: int, is_adapter: bool, use_ema: bool
) -> dict[str, Any]:
    """Return the settings that a run of `step` optimizer steps has used."""
    round_plan, saved_weights = args.round_plan, None
    if args.ema_decay is not None:
        saved_weights = f"moving average, decay {args.ema_decay} for each optimizer step"
        if not use_ema:
            saved_weights = f"those of the last step, not their {saved_weights}"
    is_separate = rows.has_separate and set(rows.image_layouts) == {(1, 1)}
    sizes = {"training_size": set(rows.training_sizes), "inference_size": set(rows.inference_sizes)}
    has_one_size = all(len(values) == 1 for values in sizes.values())
    unused = {"log_tame_threshold"} if args.multi_objective_aggregation != "log_tamed" else set()
    names = (
        "num_generations", "per_device_train_batch_size", "resolution_scale", "num_inference_steps", "guidance_scale",
        "sde_type", "noise_level", "sde_steps", "num_sde_steps", "tail_steps",
        *(PANEL_OPTIONS if rows.has_separate else ()), "loss_type", "learning_rate", "weight_decay", "epsilon",
        "beta", "advantage_clip", "multi_objective_aggregation", "log_tame_threshold", "seed",
    )  # fmt: skip
    settings = {
        "optimizer_steps": step,
        "num_prompts_per_generation": round_plan.num_prompts,
        "optimizer_steps_per_generation": round_plan.num_optimizer_steps,
        "effective_batch": round_plan.num_images // round_plan.num_optimizer_steps,
        **{name: list(*values) for name, values in sizes.items() if has_one_size},
        "set_layout": SEPARATE if is_separate else args.set_layout,
        **{name: getattr(args, name) for name in names if name not in unused},
        "negative_prompt": rows.negative_prompts[0] if len({*rows.negative_prompts}) == 1 else args.negative_prompt,
        "trained_weights": None if is_adapter else "all of the transformer",
        "saved_weights": saved_weights,
        "lr_scheduler_type": SchedulerType(args.lr_scheduler_type).value,
        "precision": "bfloat16" if args.bf16 else "float32",
    }
    return {name: value for name, value in settings.items() if value is not None}


def loading_settings(args: PaCoGRPOConfig, is_adapter: bool) -> dict[str, Any]:
    """
    Return how the pipeline was loaded. `offload` means that text encoders and transformer take turns on the GPU.
    """
    # Full fine-tuning needs more memory than inference with everything on the GPU, so there is no need to offload
    offload = is_adapter or shards_weights(args)
    return {"quantization": args.quantization, "offload": offload, "vae_tiling": args.vae_tiling}


def pipeline_call(pipeline, family: Family, args: PaCoGRPOConfig, rows: ResolvedRows) -> dict[str, Any]:
    """Return the arguments with which a pipeline generates the first prompt as in an evaluation."""
    height, width = rows.inference_sizes[0]
    has_images = rows.sources is not None or rows.is_anchored
    images = [Image.new("RGB", (width, height))] * min(family.max_source_images, 1) if has_images else []
    arguments = family.call_arguments(height, width, args.guidance_scale, images)
    if rows.kind == "edits":  # an edit has the size of its source
        arguments = {key: value for key, value in arguments.items() if key.endswith(("guidance_scale", "cfg_scale"))}
    arguments["num_inference_steps"] = args.num_inference_steps_eval
    arguments["max_sequence_length"] = family.max_sequence_length(pipeline)
    has_column = "negative_prompt" in rows.dataset.column_names
    arguments["negative_prompt"] = rows.negative_prompts[0] if has_column else args.negative_prompt
    if unstated := [name for name, value in arguments.items() if name != "image" and not is_stated(value)]:
        logger.warning_once(
            f"The card and `load_for_inference` leave out the pipeline's argument(s) {', '.join(unstated)}: they can state "
            "texts and numbers only. Pass them yourself to generate as in training."
        )
    arguments = {name: value for name, value in arguments.items() if is_stated(value)}
    return {name: value for name, value in arguments.items() if value is not None and name != "image"}


def _model_of(reward: Callable) -> str | None:
    return public_name(str(name)) if (name := getattr(reward, "model_name", None)) else None


def reward_rows(
    log_history: list[dict], functions: Sequence[Callable], names: Sequence[str], weights: Sequence[float]
) -> list[RewardRow]:
    """
    Describe each reward with its mean in the first and the last round, including rewards that the run had before it
    was resumed.
    """
    history = [entry for entry in log_history if "reward" in entry]
    first, last = (history[0], history[-1]) if history else ({}, {})
    rewards: dict[str, tuple[float | None, str | None]] = {
        name: (weight, _model_of(function)) for name, weight, function in zip(names, weights, functions, strict=True)
    }
    for key in (key for entry in history for key in entry):
        if key.startswith("rewards/") and key.endswith("/mean"):
            rewards.setdefault(key.removeprefix("rewards/").removesuffix("/mean"), (None, None))
    return [
        RewardRow(name, *weight_and_model, first.get(f"rewards/{name}/mean"), last.get(f"rewards/{name}/mean"))
        for name, weight_and_model in rewards.items()
    ]


def evaluation_rows(
    log_history: list[dict], datasets: Sequence[str | None], functions: Sequence[Callable], names: Sequence[str]
) -> list[EvaluationRow]:
    """Describe the last evaluation of each dataset, one row per reward."""
    rows = []
    for dataset in datasets:
        prefix = f"eval_{dataset}_" if dataset else "eval_"
        entry: dict = next((entry for entry in reversed(log_history) if f"{prefix}reward" in entry), {})
        for name, function in zip(names, functions, strict=True):
            key = f"{prefix}rewards/{name}/"
            if f"{key}mean" in entry:
                fields = ("mean", "baseline", "gain_ci_low", "gain_ci_high")
                values: dict[str, Any] = {field: entry.get(key + field) for field in fields}
                rows.append(
                    EvaluationRow(name, **values, dataset=dataset, model=_model_of(function), step=entry["step"])
                )
    return rows


def latest_pictures(args: PaCoGRPOConfig, step: int, use_ema: bool = True) -> dict[str, Path]:
    """Find the latest figures and sheets up to a step, by their names in the card's directory."""
    output_dir = Path(args.output_dir)

    # Sheets of later steps were left by an earlier run. Evaluation sheets show the averaged weights
    def latest(pattern: str, steps_per_number: int, end: int) -> Path | None:
        sheets = (output_dir / "contact_sheets" / CARD).glob(pattern)
        numbered = [(int(path.stem.rsplit("_", 1)[1]), path) for path in sheets]
        return max(((n, path) for n, path in numbered if n * steps_per_number < end), default=(None, None))[1]

    pictures: dict[str, Path | None] = {"curves.png": output_dir / "curves.png"}
    if args.log_completions:
        steps_per_round = args.round_plan.num_optimizer_steps * args.num_iterations
        pictures["contact_sheet.png"] = latest("round_*.png", steps_per_round, max(step, 1))
        if use_ema or args.ema_decay is None:
            pictures["evaluation.png"] = latest("eval*_step_*.png", 1, step + 1)
        if (sheet := pictures.get("evaluation.png") or pictures["contact_sheet.png"]) is not None:
            pictures |= {f"images/{n}.png": sheet.with_name(f"{n}_{sheet.name}") for n in range(CARD_PROMPTS)}
    return {name: path for name, path in pictures.items() if path is not None and path.is_file()}


def read_gallery_prompts(pictures: dict[str, Path]) -> dict[str, str]:
    """Return the prompts of a card's single images."""
    images = {name: path for name, path in pictures.items() if name.startswith("images/")}
    path = next(iter(images.values()), Path())
    scores = path.parent.parent / f"{path.stem.partition('_')[2]}.jsonl"
    if not images or not scores.is_file():  # the user may have deleted the sheets
        return {}
    with open(scores, encoding="utf-8") as file:
        prompts = [row["prompt"] for row in map(json.loads, file) if row["generation"] == 0]
    return {name: prompts[int(path.stem.partition("_")[0])] for name, path in images.items()}


def judge_settings(
    args: PaCoRewardConfig, num_pairs: int, question: str | None, max_pixels: int | None, step: int
) -> dict[str, Any]:
    """Return the settings of a judge's training that has made `step` optimizer steps."""
    names = ["first_token_weight", "loss_variant", "learning_rate", "warmup_steps", "seed"]
    names += ["num_train_epochs"] * (args.max_steps <= 0)
    settings = {
        "optimizer_steps": step,
        "pairs": num_pairs,
        "question": question,
        "effective_batch": args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        **{name: getattr(args, name) for name in names},
        "lr_scheduler_type": SchedulerType(args.lr_scheduler_type).value,
        "max_pixels": max_pixels,
        "precision": "bfloat16" if args.bf16 else "float32",
    }
    return {name: value for name, value in settings.items() if value is not None}
