# SPDX-License-Identifier: Apache-2.0
"""The trained weights, wherever they live: in the model, or in DeepSpeed's float32 masters, whole or divided.

What a process holds of them is called its share: under ZeRO-3 its partition of each weight, otherwise whole weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from peft import PeftModel
from torch import nn


def zero_stage_of(accelerator: Accelerator, model: nn.Module, wrapped: nn.Module) -> int:
    """
    Give the stage of the DeepSpeed engine that holds a model's weights.

    0 without DeepSpeed, and before `train()`, from whose beginning on an engine wraps the model. An engine of stage 0
    has float32 masters as well, whole like those of stage 1, and counts as 1.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return 0 if plugin is None or wrapped is model else max(plugin.zero_stage, 1)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """
    The parameters that are trained, by name.

    Args:
        model (`nn.Module`):
            Model.

    Returns:
        `dict[str, nn.Parameter]`.
    """
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@contextmanager
def all_gradients_needed(model: nn.Module, unused_layers: Sequence[str] = ()) -> Iterator[None]:
    """
    Stops a run, on every process, if a backward made meanwhile leaves a trained weight without a gradient.

    DDP would wait for it: gradients are then not averaged over the processes in the first step, and the second fails.

    Args:
        model (`nn.Module`):
            Model.
        unused_layers (`Sequence[str]`, *optional*):
            Layers that may have none.

    Raises:
        ValueError: with the names of the layers.
    """
    # By hooks: DeepSpeed takes gradients out of `.grad` as they come
    parameters, seen = trained_parameters(model), set()
    handles = [
        parameter.register_hook(lambda gradient, name=name: seen.add(name)) for name, parameter in parameters.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    expected = [name for name in parameters if not name.startswith(tuple(f"{layer}." for layer in unused_layers))]
    missing = gather_object([name for name in expected if name not in seen])
    if not missing:
        return
    if isinstance(model, PeftModel):
        remedy = "Leave these layers out with `exclude_modules` of the `LoraConfig`, or"
    else:
        remedy = "Leave `ddp_find_unused_parameters` unset, and"
    layers = dict.fromkeys(
        name.removeprefix("base_model.model.").partition(".lora_")[0].removesuffix(".weight").removesuffix(".bias")
        for name in missing
    )
    raise ValueError(
        f"{len(set(missing))} of {len(parameters)} trained weights have no gradient after the first backward: what "
        f"their layers give reaches no prediction. They would not be trained, and with DDP nothing would be. {remedy} "
        f"name them in `unused_layers` of the family's page (docs/add_a_family.md): {', '.join(map(repr, layers))}."
    )


def shares(model: nn.Module, zero_stage: int) -> dict[str, torch.Tensor]:
    """
    This process's share of the trained weights in float32; not copied where that can be avoided.

    Args:
        model (`nn.Module`):
            Model.
        zero_stage (`int`):
            Stage of the DeepSpeed engine that holds the weights; 0 without an engine.

    Returns:
        `dict[str, torch.Tensor]`.
    """
    parameters = trained_parameters(model)
    if zero_stage == 0:
        # Under DeepSpeed they are in the compute dtype until the engine exists
        return {name: parameter.detach().float() for name, parameter in parameters.items()}
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_fp32_param

    read = safe_get_local_fp32_param if zero_stage == 3 else safe_get_full_fp32_param
    masters = {name: read(parameter) for name, parameter in parameters.items()}
    # An engine that trains in float32 may have no masters beside the weights
    return {name: (parameters[name] if m is None else m).detach().float() for name, m in masters.items()}


def gather_whole(
    model: nn.Module, local: dict[str, torch.Tensor], zero_stage: int, keep: bool = True
) -> dict[str, torch.Tensor]:
    """
    Whole weights on the CPU, from the shares of all processes. Every process calls it.

    Args:
        model (`nn.Module`):
            Model.
        local (`dict[str, torch.Tensor]`):
            This process's share, from [`shares`] or of the same layout.
        zero_stage (`int`):
            As in [`shares`].
        keep (`bool`, *optional*, defaults to `True`):
            Whether this process keeps the result: the weights of a whole transformer need not be in memory once for
            each process.

    Returns:
        `dict[str, torch.Tensor]`: copies; empty where they are not kept.
    """
    whole = {}
    for name, parameter in trained_parameters(model).items():
        value = local[name]
        if zero_stage == 3:
            share = value.to(parameter.device)
            parts = [torch.empty_like(share) for _ in range(dist.get_world_size(parameter.ds_process_group))]
            dist.all_gather(parts, share, group=parameter.ds_process_group)
            # The partitions are padded to the same size
            value = torch.cat(parts)[: parameter.ds_numel].view(parameter.ds_shape)
        if keep:
            whole[name] = value.detach().to("cpu", copy=True)
    return whole


def cut_shares(model: nn.Module, whole: dict[str, torch.Tensor], zero_stage: int) -> dict[str, torch.Tensor]:
    """
    This process's share of whole weights: the inverse of [`gather_whole`].

    Args:
        model (`nn.Module`):
            Model.
        whole (`dict[str, torch.Tensor]`):
            Whole weights, on every process.
        zero_stage (`int`):
            As in [`shares`].

    Returns:
        `dict[str, torch.Tensor]`.
    """
    local = {}
    for name, parameter in trained_parameters(model).items():
        value = whole[name].to(torch.float32)
        if zero_stage == 3:
            group = parameter.ds_process_group
            size = parameter.ds_tensor.numel()
            padded = value.new_zeros(size * dist.get_world_size(group))
            padded[: value.numel()] = value.flatten()
            value = padded[size * dist.get_rank(group) :][:size].clone()
        local[name] = value
    return local


@torch.no_grad()
def load_whole(model: nn.Module, whole: dict[str, torch.Tensor], zero_stage: int) -> None:
    """
    Makes whole weights the trained ones, in the model and in DeepSpeed's masters. Every process calls it.

    Args:
        model (`nn.Module`):
            Model.
        whole (`dict[str, torch.Tensor]`):
            Whole weights, on every process.
        zero_stage (`int`):
            As in [`shares`].
    """
    local = cut_shares(model, whole, zero_stage)
    _write(model, local, zero_stage)
    if zero_stage == 0:
        return
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    write = safe_set_local_fp32_param if zero_stage == 3 else safe_set_full_fp32_param
    for name, parameter in trained_parameters(model).items():
        write(parameter, local[name].to(parameter.device))


@contextmanager
def swapped(model: nn.Module, local: dict[str, torch.Tensor] | None, zero_stage: int) -> Iterator[None]:
    """
    Lets the model's forwards use other weights for a while; afterwards it has its own again, to the bit.

    Args:
        model (`nn.Module`):
            Model.
        local (`dict[str, torch.Tensor]`, *optional*):
            This process's share of the weights to use. Without it nothing is changed.
        zero_stage (`int`):
            As in [`shares`]. DeepSpeed's masters are not touched: only the weights that a forward reads are.
    """
    if local is None:
        yield
        return
    own = {name: tensor.clone() for name, tensor in _read(model, zero_stage).items()}
    _write(model, local, zero_stage)
    try:
        yield
    finally:
        _write(model, own, zero_stage)


def _read(model: nn.Module, zero_stage: int) -> dict[str, torch.Tensor]:
    """What forwards read, in the model's dtype: a partition under ZeRO-3, otherwise the parameter."""
    return {
        name: (parameter.ds_tensor if zero_stage == 3 else parameter).data
        for name, parameter in trained_parameters(model).items()
    }


@torch.no_grad()
def _write(model: nn.Module, local: dict[str, torch.Tensor], zero_stage: int) -> None:
    parameters = trained_parameters(model)
    gathered = []
    if zero_stage == 3:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        # Small weights stay gathered between forwards: what they hold would be stale
        gathered = [p for p in parameters.values() if p.ds_status == ZeroParamStatus.AVAILABLE]
    for name, target in _read(model, zero_stage).items():
        target.copy_(local[name])
    for parameter in gathered:
        parameter.partition()
    if gathered:
        gathered[0].all_gather(param_list=gathered)
