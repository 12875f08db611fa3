# SPDX-License-Identifier: Apache-2.0
"""Inputs of vision-language models, the same in training and scoring: images, texts, arguments of the vision tower."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from .images import open_image, reading, to_rgb
from .tensors import to_device
from .text import shorten_path


if TYPE_CHECKING:
    import torch
    from transformers import ProcessorMixin


def patch_size_of(processor: "ProcessorMixin") -> int:
    """Return the side in pixels of the processor's patches."""
    # Not every image processor cuts patches; 14 is the default of qwen_vl_utils
    patch_size = getattr(processor.image_processor, "patch_size", None) or 14
    return patch_size if isinstance(patch_size, int) else patch_size["height"]


def load_image(image, patch_size: int, where: str) -> Image.Image:
    """Open an image as training and scoring see it: in RGB, its sides multiples of a merged patch."""
    from qwen_vl_utils import process_vision_info

    name = image.get("path") if isinstance(image, dict) else image if isinstance(image, str | Path) else None
    with reading(f"{where} ({shorten_path(name)})" if name else where):
        # Not opened by the library: it would convert it differently
        opened = to_rgb(open_image(image), "The image")
        check_sides(*opened.size, patch_size)
        message = {"role": "user", "content": [{"type": "image", "image": opened}]}
        images, _ = process_vision_info([message], image_patch_size=patch_size)
    return images[0]


def check_sides(width: int, height: int, patch_size: int) -> None:
    """Raise the `ValueError` of a judge's libraries for sides they cannot resize: one over 200 times the other."""
    from qwen_vl_utils.vision_process import smart_resize

    for _ in range(2):  # `process_vision_info` resizes, and the processor resizes its result
        height, width = smart_resize(height, width, 2 * patch_size)


def pixel_limit(processor: "ProcessorMixin") -> int | None:
    """Return the pixels to which the processor scales down a larger image, or `None` if it has no such limit."""
    size = getattr(processor.image_processor, "size", None)
    return size["longest_edge"] if size is not None and "shortest_edge" in size and "longest_edge" in size else None


def limit_pixels(processor: "ProcessorMixin", max_pixels: int) -> None:
    """Lower the pixels to which the processor scales down a larger image; the processor's own lower limit stays."""
    from transformers.image_utils import SizeDict

    limit = pixel_limit(processor)
    if limit is not None and limit > max_pixels:
        size = {**dict(processor.image_processor.size), "longest_edge": max_pixels}
        processor.image_processor.size = SizeDict(**size)


def find_control_tokens(processor: "ProcessorMixin") -> list[str]:
    """Return the tokens that are not text, such as tokens of turns, of images and of the end."""
    tokens = {str(token) for token in processor.tokenizer.added_tokens_decoder.values() if token.special}
    tokens.update(getattr(processor, name, None) or "" for name in ("image_token", "video_token"))
    return sorted(token for token in tokens if token)


def check_text(text: str, control_tokens: list[str], where: str) -> None:
    """Check that a text has no control token. A model would read it as an image or as the end of the turn."""
    token = next((token for token in control_tokens if token in text), None)
    if token is not None:
        raise ValueError(f"{where} has {token!r}, which the model reads as a control token, not as text. Remove it.")


def tower_arguments(tower: "torch.nn.Module", grids: "torch.Tensor", device: "torch.device") -> dict[str, Any]:
    """Compute on the CPU, from patch grids there, values that a Qwen-VL vision tower would read from the device."""
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
    if is_flash_attention_requested(config):  # other implementations of attention split by these lengths on the host
        indices = indices | lengths
        lengths = {}
    return longest | lengths | {name: to_device(tensor, device) for name, tensor in indices.items()}
