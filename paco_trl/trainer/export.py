# SPDX-License-Identifier: Apache-2.0
"""The adapter in both formats: PEFT's and diffusers'."""

from pathlib import Path

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict


# All that a published adapter consists of. The rest of a checkpoint (optimizer, arguments with the Hub token) stays.
PUBLISHED_FILES = [
    "adapter_config.json",
    "adapter_model.safetensors",
    "pytorch_lora_weights.safetensors",
    "README.md",
    "*.png",
]

# Prefix that PeftModel puts in front of the transformer's own names
_PEFT_PREFIX = "base_model.model."


def trainable_state_dict(model: PeftModel, is_deepspeed: bool) -> dict[str, torch.Tensor]:
    """
    The trained weights on the CPU, whole and in full precision. Every process calls it.

    Under DeepSpeed they are the float32 masters that the optimizer works on; only they are gathered, one at a time,
    never the frozen model.

    Args:
        model ([`~peft.PeftModel`]):
            Model with the adapter.
        is_deepspeed (`bool`):
            Whether a DeepSpeed engine holds the weights.

    Returns:
        `dict[str, torch.Tensor]`.
    """
    state_dict = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if is_deepspeed:
            from deepspeed.utils import safe_get_full_fp32_param

            value = safe_get_full_fp32_param(parameter)
            value = parameter if value is None else value  # before the engine exists there are no masters
        else:
            value = parameter
        state_dict[name] = value.detach().to("cpu", copy=True)
    return state_dict


def save_adapter(model: PeftModel, pipeline, state_dict: dict[str, torch.Tensor], folder: str | Path) -> None:
    """
    Saves an adapter so that both ways of loading give the same image.

    `PeftModel.from_pretrained(pipe.transformer, folder)` reads `adapter_model.safetensors`,
    `pipe.load_lora_weights(folder)` reads `pytorch_lora_weights.safetensors`. The latter carries the adapter's config
    in its metadata; without it diffusers takes `lora_alpha` for the rank and silently draws something else.

    Args:
        model ([`~peft.PeftModel`]):
            Model with the adapter.
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Its pipeline, for the family's LoRA format.
        state_dict (`dict[str, torch.Tensor]`):
            Trained weights, from [`trainable_state_dict`].
        folder (`str` or `Path`):
            Where to save.
    """
    # `save_embedding_layers="auto"` would ask the Hub for the base model's vocabulary
    model.save_pretrained(folder, state_dict=state_dict, save_embedding_layers=False)
    lora = get_peft_model_state_dict(model, state_dict=state_dict, save_embedding_layers=False)
    metadata = model.peft_config[model.active_adapter].to_dict()
    metadata["base_model_name_or_path"] = None  # for PEFT's file only; it may be a folder of this machine
    pipeline.save_lora_weights(
        folder,
        transformer_lora_layers={name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in lora.items()},
        transformer_lora_adapter_metadata=metadata,
    )
