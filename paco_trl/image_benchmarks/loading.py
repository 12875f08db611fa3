# SPDX-License-Identifier: Apache-2.0
"""Load the pipeline of a system, with or without an adapter."""

from typing import TYPE_CHECKING

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
            Adapter of its transformer, as [`PaCoGRPOTrainer`] takes it.
        device (`torch.device` or `str`, *optional*):
            Device. If `None`, that of this process.

    Returns:
        [`~diffusers.DiffusionPipeline`].
    """
    pipeline = load_pipeline(model, dtype, device)
    if adapter is not None:
        from ..rollout.loading import load_transformer_adapter, read_peft_config
        from ..utils.names import check_adapter_base

        adapter = str(adapter)
        config = read_peft_config(adapter, pipeline)
        check_adapter_base(adapter, config.base_model_name_or_path, model)
        transformer = load_transformer_adapter(pipeline.transformer, adapter, pipeline)
        pipeline.transformer = transformer.to(pipeline.transformer.device)  # in eval mode, as PEFT loads it
    return pipeline
