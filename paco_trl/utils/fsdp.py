# SPDX-License-Identifier: Apache-2.0
"""FSDP2: weights and optimizer states that are sharded over the processes, as accelerate's launcher asks for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, recursively_apply
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import TrainingArguments

from .option_checks import uses_fsdp


def activate_on_cpu(args: TrainingArguments) -> None:
    """Let accelerate shard weights on the CPU too: it does so for devices, and would silently run DDP."""
    if uses_fsdp() and args.distributed_state.distributed_type == DistributedType.MULTI_CPU:
        args.distributed_state.distributed_type = DistributedType.MULTI_GPU


def is_sharded(accelerator: Accelerator) -> bool:
    """Return whether DeepSpeed or FSDP places the weights of the model."""
    return accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP)


def shards_weights(args: TrainingArguments) -> bool:
    """Return whether DeepSpeed or FSDP places the weights, when training begins."""
    return args.deepspeed_plugin is not None or uses_fsdp()


def prepare_sharding(accelerator: Accelerator, transformer: nn.Module) -> None:
    """Let FSDP shard a transformer block by block, and compute as DDP does: autocast casts within the layers."""
    plugin = accelerator.state.fsdp_plugin
    if plugin.transformer_cls_names_to_wrap is None and getattr(transformer, "_no_split_modules", None) is None:
        # As LongCat-Image names them
        plugin.transformer_cls_names_to_wrap = getattr(transformer, "_repeated_blocks", None)
    # It would cast the arguments of the transformer, times included, and sum up gradients in bf16
    plugin.mixed_precision_policy = None
    transformer.forward = accelerator.autocast()(transformer.forward)
    # Without it each process keeps whole gradients until the last micro-batch of a step
    accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True


def _fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Free weights that the last forward pass has gathered, so that each process holds only its shard again."""
    for module in _fsdp_modules(model):
        module.reshard()


@contextmanager
def kept_gathered(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Gather each weight once for many forward passes."""
    root, *modules = _fsdp_modules(model)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(accelerator.state.fsdp_plugin.reshard_after_forward, recurse=False)
        reshard(model)


def model_class(model: nn.Module) -> type:
    """Return the class of a model, of which FSDP makes a subclass."""
    return type(model).__bases__[1] if isinstance(model, FSDPModule) else type(model)


# ---- Tensors ----


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of this process's part of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that is sharded. Collective: call on all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def unshard_like(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that is sharded `like` another. Collective: call on all ranks."""
    if not isinstance(like, DTensor):
        return local
    where = (like.device_mesh, like.placements)
    return DTensor.from_local(local.to(like.device), *where, shape=like.shape, stride=like.stride()).full_tensor()


def shard_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Divide a tensor `like` another, the inverse of [`unshard_like`], without communication."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


# ---- The optimizer's state, saved as that of one process ----


def gather_state(optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
    """Return an optimizer's whole state on the CPU, without tensors unless `keep`. Collective: call on all ranks."""
    gather = lambda tensor: full(tensor).cpu() if keep else full(tensor).new_empty(0)  # noqa: E731
    return recursively_apply(gather, optimizer.state_dict())


def load_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load what [`gather_state`] returned, on every process."""
    for index, parameter in enumerate(weight for group in optimizer.param_groups for weight in group["params"]):
        moments = state["state"].get(index, {})
        # A step has no dimension; all other tensors have the parameter's dimensions
        moments |= {
            name: shard_like(value, parameter) for name, value in moments.items() if value.shape == parameter.shape
        }
    optimizer.load_state_dict(state)
