# SPDX-License-Identifier: Apache-2.0
"""The card of a trained image model, filled in from the trainer."""

import glob
import json
import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import ModelCard
from huggingface_hub.constants import HF_HUB_CACHE
from peft import PeftModel
from PIL import Image

from ..hub.licenses import License, base_license
from ..trainer.training_clock import training_seconds
from ..utils.names import public_name
from .content import Evaluation, ImageModelCard, ImageSettings, LoRA, Reward
from .rendering import render_card


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

    from ..trainer.paco_grpo_trainer import PaCoGRPOTrainer

LIBRARIES = ("paco_trl", "trl", "transformers", "diffusers", "peft", "accelerate", "datasets", "torch")

# Where `datasets` keeps the rows of a dataset of the Hub: <user>___<name>/<configuration>/<version>/<commit>/<file>. Of
# a folder of this machine the last is a shorter hash
_ROWS_IN_CACHE = re.compile(r"([^/\\]+?)___[^/\\]+[/\\][^/\\]+[/\\][^/\\]+[/\\]([0-9a-f]{40})[/\\][^/\\]+$")


def render_model_card(
    trainer: "PaCoGRPOTrainer",
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
    license: str | None = None,
    use_ema: bool = True,
) -> ModelCard:
    """
    Renders the card of what a trainer has trained, as it is now.

    A section appears only when there is something to put in it.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer.
        model_name (`str`, *optional*):
            Title. If `None`, the name of the Hub repository or of the output folder.
        dataset_name (`str`, *optional*):
            Hub id of the dataset. If `None`, where the dataset says that it comes from.
        tags (`str` or `list[str]`, *optional*):
            Further tags.
        license (`str`, *optional*):
            Licence, as the Hub names it. If `None`, that of the base model, where it is known.
        use_ema (`bool`, *optional*, defaults to `True`):
            Whether the weights are their average, where there is one. Evaluations are of the average, and are left out
            with `False`.

    Returns:
        [`~huggingface_hub.ModelCard`].
    """
    repo_id = repo_id_of(trainer)
    pipeline, args = trainer.pipeline, trainer.args
    # A pipeline that was put together in memory has no name
    base_model = pipeline.name_or_path or type(pipeline).__name__
    # All weights are trained where there is no adapter
    is_adapter = isinstance(trainer.model, PeftModel)
    is_evaluated = use_ema or args.ema_decay is None
    step = saved_step(trainer)
    card = ImageModelCard(
        title=model_name or repo_id.split("/")[-1],
        repo_id=repo_id,
        base_model=base_model,
        lora=lora_of(trainer.model, trainer.trained_from) if is_adapter else None,
        license=license_of(trainer, base_model, license),
        datasets=dataset_ids(trainer.train_dataset, dataset_name),
        tags=[*trainer._tag_names, *([tags] if isinstance(tags, str) else tags or [])],
        hardware=hardware_of(trainer),
        seconds=training_seconds(trainer.state, step),
        versions={name: version(name) for name in LIBRARIES},
        paper=trainer._paper,
        weights="adapter" if is_adapter else "transformer",
        pipeline_class=type(pipeline).__name__,
        transformer_class=type(trainer.policy.pipeline.transformer).__name__,
        dtype=str(trainer.compute_dtype).removeprefix("torch."),
        call=_call(trainer),
        is_editing=trainer.train_rows.sources is not None,
        method="DiffusionNFT" if hasattr(args, "nft_beta") else "PaCo-GRPO",
        settings=_settings(trainer, is_adapter, use_ema),
        rewards=_rewards(trainer, step),
        evaluations=_evaluations(trainer, step) if is_evaluated else [],
        pictures=latest_pictures(trainer, use_ema),
    )
    return render_card(card)


def repo_id_of(trainer: "Trainer") -> str:
    """
    The name under which what a trainer saves is loaded.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer.

    Returns:
        `str`: Hub id, with the user's name once the repository exists; the name of the output folder without one.
    """
    return (
        getattr(trainer, "hub_model_id", None)
        or trainer.args.hub_model_id
        or os.path.basename(os.path.normpath(trainer.args.output_dir))
    )


def license_of(trainer: "Trainer", base_model: str, license: str | None) -> License | None:
    """
    The licence that a card names: the given one, or else the base model's. The Hub is asked only when the trainer
    pushes to it.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer.
        base_model (`str`):
            Hub id or folder of the base model.
        license (`str`, *optional*):
            Given licence.

    Returns:
        [`~paco_trl.hub.licenses.License`], or `None` if it is not known.
    """
    if license is not None:
        return License(license)
    pusher = trainer.pusher  # where the run pushes; it was asked for the licence before training
    return base_license(base_model, online=pusher is not None, token=pusher.api.token if pusher else None)


def dataset_ids(dataset: "Dataset", dataset_name: str | None) -> list[str]:
    """
    Hub ids of the datasets that a dataset is made of.

    Args:
        dataset ([`~datasets.Dataset`]):
            Dataset.
        dataset_name (`str`, *optional*):
            What the user says that it is, which counts.

    Returns:
        `list[str]`: nothing if it does not say where it comes from.
    """
    if dataset_name is not None:
        return [public_name(dataset_name)]
    rows = (_ROWS_IN_CACHE.search(file["filename"]) for file in getattr(dataset, "cache_files", ()))
    return sorted({name for match in rows if match and (name := _downloaded(*match.groups()))})


def _downloaded(user: str, commit: str) -> str | None:
    """
    Hub id of the dataset of which the Hub's cache has a commit: the name in the cache of the rows is another one,
    `pa_co-dataset` for `PaCo-Dataset`. `None` where nothing, or more than one dataset, is found.
    """
    prefix = f"datasets--{user}--"
    found = list(Path(HF_HUB_CACHE).glob(f"{glob.escape(prefix)}*/snapshots/{commit}"))
    return f"{user}/{found[0].parts[-3].removeprefix(prefix)}" if len(found) == 1 else None


def hardware_of(trainer: "Trainer") -> str:
    """
    What a trainer runs on, such as `"7 x NVIDIA H100"`.

    Args:
        trainer ([`~transformers.Trainer`]):
            Trainer.

    Returns:
        `str`.
    """
    device, processes = trainer.accelerator.device, trainer.accelerator.num_processes
    if device.type == "cpu":
        return "CPU" if processes == 1 else f"CPU, {processes} processes"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return f"{processes} x {name}"


def lora_of(model: PeftModel, continued_from: str | None = None) -> LoRA:
    """
    What a card says of an adapter.

    Args:
        model ([`~peft.PeftModel`]):
            Model with the adapter.
        continued_from (`str`, *optional*):
            Adapter that training went on from.

    Returns:
        [`LoRA`].
    """
    config = model.peft_config[model.active_adapter]
    layers = config.target_modules
    # A pattern, or a long list that PEFT has made of one, says little to a reader
    layers = sorted(layers) if isinstance(layers, (list, set, tuple)) and len(layers) <= 16 else None
    return LoRA(config.r, config.lora_alpha, layers, continued_from)


def _settings(trainer: "PaCoGRPOTrainer", is_adapter: bool, use_ema: bool) -> ImageSettings:
    args, layout, rows = trainer.args, trainer.layout, trainer.train_rows
    is_nft = hasattr(args, "nft_beta")
    saved_weights = None
    if args.ema_decay is not None:
        saved_weights = f"moving average, decay {args.ema_decay} for each optimizer step"
        if not use_ema:
            saved_weights = f"those of the last step, not their {saved_weights}"
    training_sizes, inference_sizes = set(rows.training_sizes), set(rows.inference_sizes)
    has_one_size = len(training_sizes) == len(inference_sizes) == 1
    return ImageSettings(
        optimizer_steps=saved_step(trainer),
        num_prompts_per_generation=layout.num_prompts,
        num_generations=layout.num_generations,
        optimizer_steps_per_generation=layout.num_optimizer_steps,
        per_device_train_batch_size=args.per_device_train_batch_size,
        training_size=list(*training_sizes) if has_one_size else None,
        inference_size=list(*inference_sizes) if has_one_size else None,
        resolution_scale=args.resolution_scale,
        num_inference_steps=args.num_inference_steps,
        guidance_scale=args.guidance_scale,
        negative_prompt=trainer.prompt_encoder.negative_prompt,
        sde_type=args.sde_type,
        noise_level=args.noise_level,
        sde_steps=args.sde_steps,
        num_sde_steps=args.num_sde_steps,
        nft_beta=args.nft_beta if is_nft else None,
        num_trained_steps=layout.num_trained_steps,
        trained_weights=None if is_adapter else "all of the transformer",
        saved_weights=saved_weights,
        loss_type=None if is_nft else args.loss_type,
        learning_rate=args.learning_rate,
        lr_scheduler_type=args.lr_scheduler_type.value,
        weight_decay=args.weight_decay,
        epsilon=None if is_nft else args.epsilon,
        beta=args.beta,
        advantage_clip=args.advantage_clip,
        multi_objective_aggregation=args.multi_objective_aggregation,
        log_tame_threshold=args.log_tame_threshold if args.multi_objective_aggregation == "log_tamed" else None,
        precision=str(trainer.compute_dtype).removeprefix("torch."),
        seed=args.seed,
    )


def _call(trainer: "PaCoGRPOTrainer") -> str:
    """Arguments with which the pipeline draws as in training, beside the prompt: without them some leave guidance out."""
    images = [Image.new("RGB", (64, 64))] * min(trainer.family.max_images, 1)
    arguments = trainer.family.call_arguments(64, 64, trainer.args.guidance_scale, images)
    kept = {name: value for name, value in arguments.items() if name.endswith(("guidance_scale", "cfg_scale"))}
    if trainer.args.negative_prompt is not None:
        kept["negative_prompt"] = trainer.args.negative_prompt
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in kept.items())


def _model_of(reward: Callable) -> str | None:
    name = getattr(reward, "model_name", None)
    return public_name(str(name)) if name else None


def _rewards(trainer: "PaCoGRPOTrainer", step: int) -> list[Reward]:
    history = [entry for entry in trainer.state.log_history if "reward" in entry and entry["step"] <= step]
    first, last = (history[0], history[-1]) if history else ({}, {})
    return [
        Reward(
            name,
            weight,
            _model_of(function),
            first.get(f"rewards/{name}/mean"),
            last.get(f"rewards/{name}/mean"),
        )
        for name, weight, function in zip(
            trainer.reward_func_names, trainer.reward_weights.tolist(), trainer.reward_funcs, strict=True
        )
    ]


def _evaluations(trainer: "PaCoGRPOTrainer", step: int) -> list[Evaluation]:
    """The last evaluation of each dataset, a row for each reward: before, after, and the interval of the gain."""
    datasets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": None}
    history = [entry for entry in trainer.state.log_history if entry["step"] <= step]
    rows = []
    for dataset in datasets:
        prefix = f"eval_{dataset}_" if dataset else "eval_"
        entry = next((e for e in reversed(history) if f"{prefix}reward" in e), {})
        for name, function in zip(trainer.eval_scorer.names, trainer.eval_scorer.reward_funcs, strict=True):
            key = f"{prefix}rewards/{name}/"
            if f"{key}mean" in entry:
                values = {
                    field: entry.get(key + field) for field in ("mean", "baseline", "gain_ci_low", "gain_ci_high")
                }
                rows.append(
                    Evaluation(name, **values, dataset=dataset or None, model=_model_of(function), step=entry["step"])
                )
    return rows


def latest_pictures(trainer: "PaCoGRPOTrainer", use_ema: bool = True) -> dict[str, Path]:
    """
    The latest pictures of what a trainer holds, by the name that they have beside the card.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer.
        use_ema (`bool`, *optional*, defaults to `True`):
            Whether the weights are their average, where there is one. Evaluations are of the average, and are left out
            with `False`.

    Returns:
        `dict[str, Path]`: without those that do not exist. Pictures of steps behind the trainer's, of an earlier run
        in the same folder or of before a resume, are left out.
    """
    args, step = trainer.args, saved_step(trainer)
    sheets = Path(args.output_dir) / "contact_sheets"

    def latest(pattern: str, steps_of_one: int, end: int) -> Path | None:
        numbered = [(int(path.stem.rsplit("_", 1)[1]), path) for path in sheets.glob(pattern)]
        return max(((n, path) for n, path in numbered if n * steps_of_one < end), default=(None, None))[1]

    steps_per_round = trainer.layout.num_optimizer_steps * args.num_iterations
    found = {"curves.png": Path(args.output_dir) / "curves.png"}
    if args.log_completions:
        found["contact_sheet.png"] = latest("round_*.png", steps_per_round, max(step, 1))
        if use_ema or args.ema_decay is None:
            found["evaluation.png"] = latest("eval*_step_*.png", 1, step + 1)
    if args.resolution_transfer_prompts:
        found["resolution_transfer.png"] = Path(args.output_dir) / "evaluation" / "resolution_transfer.png"
    return {name: path for name, path in found.items() if path is not None and path.is_file()}


def saved_step(trainer: "PaCoGRPOTrainer") -> int:
    """
    The optimizer step whose weights a trainer holds.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer.

    Returns:
        `int`: the last one, or that of the best checkpoint once it is loaded.
    """
    return trainer.state.global_step if trainer.loaded_step is None else trainer.loaded_step
