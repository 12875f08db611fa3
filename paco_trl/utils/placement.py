# SPDX-License-Identifier: Apache-2.0
"""Modules that take turns on a device, and go back to the CPU memory that they came from."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils.memory import clear_device_cache
from torch import nn


@contextmanager
def placed_on(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Move frozen modules to a device, then back to the same CPU memory: files that are mapped stay shared."""
    memory = cpu_memory(modules)
    for module in modules:
        module.to(device)
    try:
        yield
    finally:
        to_cpu(modules, memory)


def cpu_memory(modules: list[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]]:
    """Return the weights that are in CPU memory, with their memory, for [`to_cpu`]."""
    return [
        (layer, name, weight, weight.data)
        for module in modules
        for layer in module.modules()
        for name, weight in layer.named_parameters(recurse=False)
        if type(weight) is nn.Parameter and weight.device.type == "cpu"  # a quantized weight is more than its data
    ]


def to_cpu(modules: list[nn.Module], memory: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor]]) -> None:
    """Move modules to the CPU: weights that were on the CPU get their memory back, without a copy."""
    for layer, name, weight, data in memory:
        weight.data = data
        setattr(layer, name, weight)
    for module in modules:
        module.to("cpu")
    clear_device_cache()  # frees the memory that they had reserved
