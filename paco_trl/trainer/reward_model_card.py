# SPDX-License-Identifier: Apache-2.0
"""The card of a trained judge, filled in from the trainer."""

import os
from importlib.metadata import version
from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData
from peft import PeftModel

from ..utils.images import pixel_limit
from .model_card import LIBRARIES


if TYPE_CHECKING:
    from .paco_reward_trainer import PaCoRewardTrainer


def render_reward_model_card(
    trainer: "PaCoRewardTrainer",
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
) -> ModelCard:
    """
    Renders the card of the trainer's judge as it is now.

    A section appears only when there is something to put in it.

    Args:
        trainer ([`PaCoRewardTrainer`]):
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
    args = trainer.args
    base_model = trainer.base_model_name
    is_local = os.path.isdir(base_model)
    # `hub_model_id` of the trainer has the user's name, once the repository exists
    repo_id = (
        getattr(trainer, "hub_model_id", None)
        or args.hub_model_id
        or os.path.basename(os.path.normpath(args.output_dir))
    )
    lora = trainer.model.peft_config[trainer.model.active_adapter] if isinstance(trainer.model, PeftModel) else None
    card_data = ModelCardData(
        library_name="peft",
        pipeline_tag="image-text-to-text",
        # A folder means nothing to anybody else
        base_model=None if is_local else base_model,
        base_model_relation=None if is_local else "adapter",
        datasets=dataset_name,
        tags=sorted({*trainer._tag_names, *([tags] if isinstance(tags, str) else tags or [])}),
    )
    with as_file(files("paco_trl") / "templates" / "paco_reward_model_card.md.jinja") as template:
        return ModelCard.from_template(
            card_data,
            template_path=str(template),
            model_name=model_name or repo_id.split("/")[-1],
            base_model=os.path.basename(os.path.normpath(base_model)) if is_local else base_model,
            repo_id=repo_id,
            args=args,
            lora=lora,
            effective_batch=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
            num_pairs=len(trainer.train_dataset),
            max_pixels=pixel_limit(trainer.processing_class),
            dtype="bfloat16" if args.bf16 else "float32",
            global_step=trainer.state.global_step,
            evaluations=trainer.evaluations,
            pictures=sorted(trainer.pictures),
            paper=trainer._paper,
            versions={name: version(name) for name in LIBRARIES},
        )
