# SPDX-License-Identifier: Apache-2.0
"""Text encoders and transformer that take turns on a device, for inference."""

from typing import TYPE_CHECKING, Any

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.utils import send_to_device
from torch import nn

from ..utils.placement import cpu_memory, to_cpu


if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


class ComponentOffloader:
    """
    Alternates the text encoders and the other components of a pipeline on a device.

    Unlike with `enable_model_cpu_offload`, the transformer stays until the next text is encoded, and leaving weights
    are not copied, since the CPU still has them.
    """

    def __init__(self, pipeline: "DiffusionPipeline", device: torch.device):
        from ..rollout.families import find_family

        self.device = device
        self._current = list[nn.Module]()
        self._memory = cpu_memory(self._current)
        modules = {name: module for name, module in pipeline.components.items() if isinstance(module, nn.Module)}
        family = find_family(pipeline)
        names = [name for name in modules if "encoder" in name] if family is None else family.text_encoders
        encoders = [module for name, module in modules.items() if name in names]
        others = [module for name, module in modules.items() if name not in names]
        for group in (encoders, others):
            for module in group:
                module.to("cpu")  # bitsandbytes quantizes on the device
                add_hook_to_module(module, OffloadHook(self, group))

    def activate(self, modules: list[nn.Module]) -> None:
        """Move a group to the device, and the current one to the CPU."""
        if modules is not self._current:
            to_cpu(self._current, self._memory)
            self._current = modules
            self._memory = cpu_memory(modules)
            for module in modules:
                module.to(self.device)


class OffloadHook(ModelHook):
    """Moves the group of a component to the device before its forward pass."""

    def __init__(self, offloader: ComponentOffloader, group: list[nn.Module]):
        self.offloader, self.group = offloader, group
        self.execution_device = offloader.device  # read by diffusers

    def pre_forward(self, module: nn.Module, *args, **kwargs) -> tuple[tuple, dict]:
        self.offloader.activate(self.group)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


def offload_components(pipeline: Any, device: torch.device) -> None:
    """Give a pipeline a [`ComponentOffloader`], which [`offloader_of`] returns."""
    pipeline.paco_trl_offloader = ComponentOffloader(pipeline, device)


def offloader_of(pipeline: "DiffusionPipeline") -> ComponentOffloader | None:
    """Return the offloader of a pipeline, `None` if all its components are on the device together."""
    return getattr(pipeline, "paco_trl_offloader", None)
