# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors to a device that do not wait for what it computes."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    import torch


def to_device(tensor: "torch.Tensor", device: "torch.device | str") -> "torch.Tensor":
    """Copy a tensor to a device; to a GPU from pinned memory, so that the host does not wait for what is queued."""
    if str(device).startswith("cuda") and tensor.device.type == "cpu":
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=tensor.is_pinned())


def tower_arguments(tower: "torch.nn.Module", grids: "torch.Tensor", device: "torch.device") -> dict[str, Any]:
    """Compute on the CPU, from patch grids there, arguments that a Qwen-VL vision tower would read back from the device."""
    from transformers.utils.generic import is_flash_attention_requested
    from transformers.vision_utils import (
        get_vision_attention_seqlens,
        get_vision_position_ids,
        get_vision_window_index,
    )

    config: Any = tower.config
    lengths, longest = {}, {}
    if config.model_type not in ("qwen2_vl_vision", "qwen2_5_vl_vision"):
        return {}
    merge_size = config.spatial_merge_size
    indices = {"position_ids": get_vision_position_ids(grids, merge_size)}
    lengths["cu_seqlens"], longest["max_seqlen"] = get_vision_attention_seqlens(grids, config)
    if hasattr(config, "window_size"):
        indices["window_index"], lengths["cu_window_seqlens"] = get_vision_window_index(
            grids, merge_size, config.window_size, config.patch_size
        )
    if is_flash_attention_requested(config):  # others split by these lengths on the host
        indices, lengths = indices | lengths, {}
    return longest | lengths | {name: to_device(tensor, device) for name, tensor in indices.items()}
