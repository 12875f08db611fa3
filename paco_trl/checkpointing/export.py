# SPDX-License-Identifier: Apache-2.0
"""Export trained weights in the formats that users load: an adapter for PEFT and diffusers, or a full transformer."""

import json
from pathlib import Path

import torch
from diffusers.loaders import FluxLoraLoaderMixin
from huggingface_hub import save_torch_state_dict
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.utils import get_peft_model_state_dict
from torch import nn


# Prefix that PeftModel puts in front of the transformer's own names
_PEFT_PREFIX = "base_model.model."


def save_adapter(model: PeftModel, pipeline, state_dict: dict[str, torch.Tensor], folder: str | Path) -> None:
    """Save an adapter for `PeftModel.from_pretrained` and for `load_lora_weights`, which give the same image."""
    # `save_embedding_layers="auto"` would request from the Hub the base model's vocabulary
    adapter = model.active_adapter  # without the reference's
    model.save_pretrained(folder, state_dict=state_dict, selected_adapters=[adapter], save_embedding_layers=False)
    lora = get_peft_model_state_dict(model, state_dict=state_dict, save_embedding_layers=False)
    scales = {name: layer.scaling[adapter] for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    layers = {}  # with their scale, `lora_alpha / r`: ComfyUI and others read no metadata and scale by 1
    for name, tensor in lora.items():
        layer, is_up, _ = name.partition(".lora_B.")
        if is_up:
            tensor = (tensor.float() * scales[layer]).to(tensor.dtype)
        layers[name.removeprefix(_PEFT_PREFIX)] = tensor
    config = model.peft_config[adapter]
    metadata = config.to_dict() | {
        "lora_alpha": config.r,
        "alpha_pattern": dict(config.rank_pattern),
        "use_rslora": False,
        "base_model_name_or_path": None,  # for PEFT's file only; it may be a local path
    }
    # Some pipelines have no such method (LongCat-Image in diffusers 0.42); in all that have one it writes the same
    save = getattr(pipeline, "save_lora_weights", FluxLoraLoaderMixin.save_lora_weights)
    save(folder, transformer_lora_layers=layers, transformer_lora_adapter_metadata=metadata)


def save_transformer(transformer: nn.Module, state_dict: dict[str, torch.Tensor], folder: str | Path) -> None:
    """Save a full trained transformer in diffusers' format, in the directory `transformer`, in float32."""
    folder = Path(folder) / "transformer"
    folder.mkdir(parents=True, exist_ok=True)
    transformer.save_config(folder)
    # diffusers adds where the model was loaded from, which may be a local path
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    buffers = {name: value for name, value in transformer.state_dict().items() if name not in state_dict}
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    save_torch_state_dict({**buffers, **state_dict}, folder, filename_pattern=pattern)


def save_trained(model: nn.Module, pipeline, state_dict: dict[str, torch.Tensor], folder: str | Path) -> None:
    """Save trained weights: an adapter, or the full transformer."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    if isinstance(model, PeftModel):
        save_adapter(model, pipeline, state_dict, folder)
    else:
        save_transformer(model, state_dict, folder)
