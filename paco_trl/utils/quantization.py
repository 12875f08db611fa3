# SPDX-License-Identifier: Apache-2.0
"""Quantization of frozen weights: configs by name, and a description for loaded models."""

import importlib
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn


_PACKAGES = {"nf4": "bitsandbytes", "int8": "torchao", "fp8": "torchao"}


def quantization_config(name: str, dtype: torch.dtype, library: str = "transformers") -> Any:
    """Build the quantization config of a model of `transformers` or `diffusers` that computes in `dtype`."""
    if name not in _PACKAGES:
        raise ValueError(f"`quantization` is {name!r}; it must be one of {', '.join(map(repr, _PACKAGES))}.")
    package = _PACKAGES[name]
    if find_spec(package) is None:
        raise ImportError(f'`quantization` {name!r} requires `{package}`: pip install "paco_trl[quantization]".')
    configs = importlib.import_module(library)
    if name == "nf4":
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
        config = configs.BitsAndBytesConfig(**options)
    else:
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

        config = configs.TorchAoConfig(Int8WeightOnlyConfig() if name == "int8" else Float8WeightOnlyConfig())
    if library == "diffusers":
        from diffusers.quantizers import DiffusersAutoQuantizer

        try:
            DiffusersAutoQuantizer.from_config(config).validate_environment()
        except (RuntimeError, ImportError) as error:
            advice = "Set 'int8', or None." if name == "nf4" else "Set None if that cannot be."
            raise ValueError(f"`quantization` is {name!r}, which diffusers refuses here: {error} {advice}") from error
    return config


def pipeline_quantization_config(name: str | None, dtype: torch.dtype, components: Iterable[str]) -> Any:
    """Build the config that quantizes transformer and text encoders of a pipeline while they load, if there is one."""
    if name in (None, "fp8_storage"):
        return None
    from diffusers import PipelineQuantizationConfig

    libraries = {"transformer": "diffusers"} | {
        part: "transformers" for part in components if part.startswith("text_encoder")
    }
    mapping = {part: quantization_config(name, dtype, library) for part, library in libraries.items()}
    return PipelineQuantizationConfig(quant_mapping=mapping)


def avoid_packed_nf4(module: nn.Module) -> None:
    """Let layers in NF4 that are narrow, as in tiny models, compute on any CPU."""
    # bitsandbytes 0.50 packs weights for CPUs with AVX512, and fails if their sizes are no multiples of its blocks:
    # https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/functional.py
    for layer in module.modules():
        state = getattr(getattr(layer, "weight", None), "quant_state", None)
        if state is not None and (state.shape[0] % 32 or state.shape[1] % state.blocksize):
            layer.support_avx512bf16_for_cpu = False


def describe_quantization(module: nn.Module) -> str | None:
    """Describe how the weights of a model are quantized; `None` if they are not."""
    if any(parameter.is_meta for parameter in module.parameters()):  # built from its config
        return (getattr(module, "config", {}).get("quantization_config") or {}).get("quant_method")
    quantizer = getattr(module, "hf_quantizer", None)  # diffusers and transformers set it
    if quantizer is not None:
        config = quantizer.quantization_config
        is_bnb = hasattr(config, "quantization_method")
        kind = config.quantization_method() if is_bnb else type(getattr(config, "quant_type", config)).__name__
        return f"{kind} by {getattr(config.quant_method, 'value', config.quant_method)}"
    is_cast = any(parameter.dtype == torch.float8_e4m3fn for parameter in module.parameters())
    return "float8_e4m3fn storage by diffusers" if is_cast else None
