# SPDX-License-Identifier: Apache-2.0
"""The card of a trained adapter, filled in from the trainer."""

import json
import os
from importlib.metadata import version
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData
from peft import PeftModel
from PIL import Image


if TYPE_CHECKING:
    from .paco_grpo_trainer import PaCoGRPOTrainer

LIBRARIES = ("paco_trl", "trl", "transformers", "diffusers", "peft", "accelerate", "datasets", "torch")


def render_model_card(
    trainer: "PaCoGRPOTrainer",
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
) -> ModelCard:
    """
    Renders the card of the trainer's adapter as it is now.

    A section appears only when there is something to put in it.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer.
        model_name (`str`, *optional*):
            Title. If `None`, the name of the Hub repository or of the output folder.
        dataset_name (`str`, *optional*):
            Hub id of the dataset.
        tags (`str` or `list[str]`, *optional*):
            Further tags.

    Returns:
        [`~huggingface_hub.ModelCard`].
    """
    args, layout = trainer.args, trainer.layout
    # A pipeline that was put together in memory has no name
    base_model = trainer.pipeline.name_or_path or type(trainer.pipeline).__name__
    is_local = trainer.pipeline.name_or_path is None or os.path.isdir(base_model)
    repo_id = args.hub_model_id or os.path.basename(os.path.normpath(args.output_dir))
    # All weights are trained where there is no adapter
    is_adapter = isinstance(trainer.model, PeftModel)
    lora = trainer.model.peft_config[trainer.model.active_adapter] if is_adapter else None
    card_data = ModelCardData(
        library_name="diffusers",
        pipeline_tag="image-to-image" if trainer.train_rows.sources is not None else "text-to-image",
        # A folder means nothing to anybody else
        base_model=None if is_local else base_model,
        base_model_relation=None if is_local else "adapter" if is_adapter else "finetune",
        datasets=dataset_name,
        tags=sorted(
            {
                *trainer._tag_names,
                *(["lora"] if is_adapter else []),
                *([tags] if isinstance(tags, str) else tags or []),
            }
        ),
    )
    rewards = []
    last = next((entry for entry in reversed(trainer.state.log_history) if "reward" in entry), {})
    first = next((entry for entry in trainer.state.log_history if "reward" in entry), {})
    for name, weight in zip(trainer.reward_func_names, trainer.reward_weights.tolist(), strict=True):
        key = f"rewards/{name}/mean"
        rewards.append({"name": name, "weight": weight, "first": first.get(key), "last": last.get(key)})
    with as_file(files("paco_trl") / "templates" / "paco_grpo_model_card.md.jinja") as template:
        return ModelCard.from_template(
            card_data,
            template_path=str(template),
            model_name=model_name or repo_id.split("/")[-1],
            base_model=os.path.basename(os.path.normpath(base_model)) if is_local else base_model,
            pipeline_class=type(trainer.pipeline).__name__,
            repo_id=repo_id,
            args=args,
            layout=layout,
            lora=lora,
            transformer_class=type(trainer.policy.pipeline.transformer).__name__,
            trained_from=trainer.trained_from,
            compute_dtype=str(trainer.compute_dtype).removeprefix("torch."),
            global_step=saved_step(trainer),
            rewards=rewards,
            has_scores=bool(last),
            evaluations=_evaluations(trainer),
            pictures=latest_pictures(trainer),
            is_editing=trainer.train_rows.sources is not None,
            call=_call(trainer),
            negative_prompt=trainer.prompt_encoder.negative_prompt,
            paper=trainer._paper,
            versions={name: version(name) for name in LIBRARIES},
        )


def _call(trainer: "PaCoGRPOTrainer") -> str:
    """Arguments with which the pipeline draws as in training, beside the prompt: without them some leave guidance out."""
    images = [Image.new("RGB", (64, 64))] * min(trainer.family.max_images, 1)
    arguments = trainer.family.call_arguments(64, 64, trainer.args.guidance_scale, images)
    kept = {name: value for name, value in arguments.items() if name.endswith(("guidance_scale", "cfg_scale"))}
    if trainer.args.negative_prompt is not None:
        kept["negative_prompt"] = trainer.args.negative_prompt
    return ", ".join(f"{name}={json.dumps(value)}" for name, value in kept.items())


def latest_pictures(trainer: "PaCoGRPOTrainer") -> dict[str, Path]:
    """
    The latest pictures of what a trainer holds, by the name that they have beside the card.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer.

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


def _evaluations(trainer: "PaCoGRPOTrainer") -> list[dict]:
    """The last evaluation of each dataset, a row for each reward: before, after, and the interval of the gain."""
    datasets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": None}
    history = [entry for entry in trainer.state.log_history if entry["step"] <= saved_step(trainer)]
    rows = []
    for dataset in datasets:
        prefix = f"eval_{dataset}_" if dataset else "eval_"
        entry = next((e for e in reversed(history) if f"{prefix}reward" in e), {})
        for name in trainer.eval_reward_func_names:
            key = f"{prefix}rewards/{name}/"
            if f"{key}mean" in entry:
                values = {
                    field: entry.get(key + field) for field in ("mean", "baseline", "gain_ci_low", "gain_ci_high")
                }
                rows.append({"dataset": dataset, "reward": name, "step": entry["step"], **values})
    return rows
