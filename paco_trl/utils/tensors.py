# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors to a device that do not wait for its computations, and of the lists and dicts around tensors."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch


def to_device(tensor: "torch.Tensor", device: "torch.device | str") -> "torch.Tensor":
    """Copy a tensor to a device; to a GPU from pinned memory, so that the host does not wait for queued work."""
    if str(device).startswith("cuda") and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=tensor.is_pinned())


def copy_containers(value: Any) -> Any:
    """Copy lists, tuples and dicts, also nested ones; the tensors in them stay the same."""
    from accelerate.utils import recursively_apply

    return recursively_apply(lambda tensor: tensor, value)
