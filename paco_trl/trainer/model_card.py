# SPDX-License-Identifier: Apache-2.0
"""The card of a trained adapter, filled in from the trainer."""

import os
import textwrap
from importlib.metadata import version
from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData


if TYPE_CHECKING:
    from .paco_grpo_trainer import PaCoGRPOTrainer

# Of both trainers' cards
PAPER = {
    "title": "PaCo-RL: Advancing Reinforcement Learning for Consistent Image Generation with Pairwise Reward Modeling",
    "id": "2512.04784",
    # docstyle-ignore
    "citation": textwrap.dedent("""\
        @article{pacorl2025,
            title        = {{PaCo-RL: Advancing Reinforcement Learning for Consistent Image Generation with Pairwise Reward Modeling}},
            year         = 2025,
            eprint       = {arXiv:2512.04784},
        }"""),
}

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
    lora = trainer.model.peft_config[trainer.model.active_adapter]
    card_data = ModelCardData(
        library_name="diffusers",
        pipeline_tag="text-to-image",
        # A folder means nothing to anybody else
        base_model=None if is_local else base_model,
        base_model_relation=None if is_local else "adapter",
        datasets=dataset_name,
        tags=sorted({*trainer._tag_names, *([tags] if isinstance(tags, str) else tags or [])}),
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
            compute_dtype=str(trainer.compute_dtype).removeprefix("torch."),
            global_step=trainer.state.global_step,
            rewards=rewards,
            has_scores=bool(last),
            has_sheet=trainer._last_sheet is not None,
            paper=trainer._paper,
            versions={name: version(name) for name in LIBRARIES},
        )
