# SPDX-License-Identifier: Apache-2.0
"""Quantization of frozen weights: by name, and how those of a loaded model are."""

import importlib
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn


_PACKAGES = {"nf4": "bitsandbytes", "int8": "torchao", "fp8": "torchao"}
# The last one is diffusers' layerwise casting, which is applied to a loaded model
QUANTIZATIONS = (*_PACKAGES, "fp8_storage")


def quantization_config(name: str, dtype: torch.dtype, library: str = "transformers") -> Any:
    """Build the quantization config of a model of `transformers` or `diffusers` that computes in `dtype`."""
    if name not in _PACKAGES:
        raise ValueError(f"`quantization` is {name!r}; it must be one of {', '.join(map(repr, _PACKAGES))}.")
    package = _PACKAGES[name]
    if find_spec(package) is None:
        raise ImportError(f'`quantization` {name!r} requires `{package}`: pip install "paco_trl[quantization]".')
    configs = importlib.import_module(library)
    if name == "nf4":
        return configs.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    return configs.TorchAoConfig(Int8WeightOnlyConfig() if name == "int8" else Float8WeightOnlyConfig())


def describe_quantization(module: nn.Module) -> str | None:
    """Describe how the weights of a model are quantized; `None` if they are not."""
    if any(parameter.is_meta for parameter in module.parameters()):  # built from its config
        return (getattr(module, "config", {}).get("quantization_config") or {}).get("quant_method")
    quantizer = getattr(module, "hf_quantizer", None)  # of diffusers and transformers
    if quantizer is not None:
        config = quantizer.quantization_config
        is_bnb = hasattr(config, "quantization_method")
        kind = config.quantization_method() if is_bnb else type(getattr(config, "quant_type", config)).__name__
        return f"{kind} by {getattr(config.quant_method, 'value', config.quant_method)}"
    is_cast = any(parameter.dtype == torch.float8_e4m3fn for parameter in module.parameters())
    return "float8_e4m3fn storage by diffusers" if is_cast else None
