# SPDX-License-Identifier: Apache-2.0
"""Load the pipeline that generates, with or without an adapter."""

from typing import TYPE_CHECKING

from ..utils.names import check_adapter_base, check_model_name


if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


def load_pipeline(
    model: str, dtype: "torch.dtype", adapter: str | None = None, device: "torch.device | str | None" = None
) -> "DiffusionPipeline":
    """
    Load a diffusers pipeline to generate images, with its progress bar disabled. Weights are read from safetensors, and
    no code of the model is run.

    Args:
        model (`str`):
            Hub id or directory of a diffusers pipeline.
        dtype (`torch.dtype`):
            Compute dtype.
        adapter (`str`, *optional*):
            Adapter of its transformer, as [`PaCoGRPOTrainer`] takes it.
        device (`torch.device` or `str`, *optional*):
            Device. If `None`, that of this process (see [`~accelerate.PartialState`]).

    Returns:
        [`~diffusers.DiffusionPipeline`].
    """
    from accelerate import PartialState
    from diffusers import DiffusionPipeline

    check_model_name(model)
    # Not the loader of the trainer, which refuses what cannot be trained
    pipeline = DiffusionPipeline.from_pretrained(model, dtype=dtype, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to(PartialState().device if device is None else device)
    if adapter is not None:
        from ..rollout.loading import load_transformer_adapter

        adapter = str(adapter)
        check_adapter(adapter, pipeline)
        transformer = load_transformer_adapter(pipeline.transformer, adapter, pipeline)
        pipeline.transformer = transformer.to(pipeline.transformer.device)  # in eval mode, as PEFT loads it
    return pipeline


def check_adapter(adapter: str, model: "str | DiffusionPipeline") -> None:
    """Refuse an adapter of another model."""
    from ..rollout.loading import read_peft_config

    base = model if isinstance(model, str) else model.name_or_path
    check_adapter_base(adapter, read_peft_config(adapter, model).base_model_name_or_path, base)
