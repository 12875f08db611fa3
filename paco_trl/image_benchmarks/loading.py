# SPDX-License-Identifier: Apache-2.0
"""Load the pipeline of a system, with or without an adapter."""

import hashlib
from typing import TYPE_CHECKING

from ..utils.files import find_model_file
from ..utils.generation import load_pipeline


if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline


def load_system(
    model: str, dtype: "torch.dtype", adapter: str | None = None, device: "torch.device | str | None" = None
) -> "DiffusionPipeline":
    """
    Load a pipeline, with or without a trained adapter.

    Args:
        model (`str`):
            Hub id or directory of a diffusers pipeline.
        dtype (`torch.dtype`):
            Compute dtype.
        adapter (`str`, *optional*):
            Hub id or directory of an adapter of its transformer, in PEFT's format (which a checkpoint of
            [`PaCoGRPOTrainer`] has), or a diffusers LoRA.
        device (`torch.device` or `str`, *optional*):
            Device. If `None`, that of this process.

    Returns:
        [`~diffusers.DiffusionPipeline`].
    """
    pipeline = load_pipeline(model, dtype, device)
    if adapter is None:
        return pipeline
    if find_model_file(adapter, "adapter_config.json") is not None:
        from ..rollout.loading import base_model_name, load_transformer_adapter, read_peft_config
        from ..utils.names import check_adapter_base

        config = read_peft_config(adapter)
        check_adapter_base(adapter, config.base_model_name_or_path, model)
        transformer = load_transformer_adapter(pipeline.transformer, adapter, base_model_name(pipeline))
        pipeline.transformer = transformer.to(pipeline.transformer.device)  # in eval mode, as PEFT loads it
    else:
        from ..rollout.loading import load_lora

        load_lora(pipeline, adapter)
        if not getattr(pipeline.transformer, "peft_config", None):
            raise ValueError(f"{adapter!r} has no LoRA for the pipeline {model!r}: nothing was loaded.")
    return pipeline


def adapter_weights_digest(adapter: str) -> str:
    """Digest the weights of an adapter: checkpoints of one run can have the same name."""
    for name in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors"):
        path = find_model_file(adapter, name)
        if path is not None:
            with open(path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    raise ValueError(f"The adapter {adapter!r} has no safetensors file of weights; other formats are pickles.")
