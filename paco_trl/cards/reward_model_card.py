# SPDX-License-Identifier: Apache-2.0
"""The card of a trained judge, filled in from the trainer."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard
from peft import PeftModel

from ..trainer.training_clock import training_seconds
from ..utils.images import pixel_limit
from .content import JudgeCard, JudgeSettings
from .model_card import LIBRARIES, dataset_ids, hardware_of, license_of, lora_of, repo_id_of
from .rendering import render_card


if TYPE_CHECKING:
    from ..trainer.paco_reward_trainer import PaCoRewardTrainer


def render_reward_model_card(
    trainer: "PaCoRewardTrainer",
    model_name: str | None = None,
    dataset_name: str | None = None,
    tags: str | list[str] | None = None,
    license: str | None = None,
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
            Hub id of the dataset. If `None`, where the dataset says that it comes from.
        tags (`str` or `list[str]`, *optional*):
            Further tags.
        license (`str`, *optional*):
            Licence, as the Hub names it. If `None`, that of the base model, where it is known.

    Returns:
        [`~huggingface_hub.ModelCard`].
    """
    repo_id, base_model = repo_id_of(trainer), trainer.base_model_name
    max_pixels = pixel_limit(trainer.processing_class)
    card = JudgeCard(
        title=model_name or repo_id.split("/")[-1],
        repo_id=repo_id,
        base_model=base_model,
        lora=lora_of(trainer.model) if isinstance(trainer.model, PeftModel) else None,
        license=license_of(trainer, base_model, license),
        datasets=dataset_ids(trainer.train_dataset, dataset_name),
        tags=[*trainer._tag_names, *([tags] if isinstance(tags, str) else tags or [])],
        hardware=hardware_of(trainer),
        seconds=training_seconds(trainer.state),
        versions={name: version(name) for name in LIBRARIES},
        paper=trainer._paper,
        image_size=_image_size(trainer.processing_class) if max_pixels is not None else None,
        settings=_settings(trainer, max_pixels),
        evaluations=trainer.evaluations,
        pictures=sorted(trainer.pictures),
    )
    return render_card(card)


def _image_size(processor) -> dict[str, int]:
    return {name: limit for name, limit in dict(processor.image_processor.size).items() if limit is not None}


def _settings(trainer: "PaCoRewardTrainer", max_pixels: int | None) -> JudgeSettings:
    args = trainer.args
    return JudgeSettings(
        optimizer_steps=trainer.state.global_step,
        pairs=len(trainer.train_dataset),
        effective_batch=args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
        first_token_weight=args.first_token_weight,
        loss_variant=args.loss_variant,
        learning_rate=args.learning_rate,
        lr_scheduler_type=args.lr_scheduler_type.value,
        warmup_steps=args.warmup_steps,
        num_train_epochs=args.num_train_epochs,
        max_pixels=max_pixels,
        precision="bfloat16" if args.bf16 else "float32",
        seed=args.seed,
    )
