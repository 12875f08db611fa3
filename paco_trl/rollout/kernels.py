# SPDX-License-Identifier: Apache-2.0
"""The kernels of a transformer: attention backends, and compiled blocks."""

from contextlib import ExitStack
from typing import Any

import torch
from diffusers.models import attention_dispatch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def check_attention_backend(name: str, queries: torch.Tensor | None = None) -> None:
    """
    Refuse a backend that diffusers does not have, that lacks a package, or that cannot be trained with `queries`
    `(B, L, heads, D)`, on the device and in the dtype of training.
    """
    names = [backend.value for backend in attention_dispatch.AttentionBackendName if "sage" not in backend.value]
    if name not in names:
        raise ValueError(
            f"`attention_backend` is {name!r}; it must be one of diffusers' with a backward pass: {', '.join(names)}."
        )
    try:
        with attention_dispatch.attention_backend(name):
            if queries is not None:
                attention_dispatch.dispatch_attention_fn(queries, queries, queries).sum().backward()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"`attention_backend` is {name!r}, which cannot be used here: {error}") from error


def example_queries(transformer: nn.Module, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return queries (B, L, heads, D) with the head size of a transformer, to try an attention backend with."""
    config = transformer.config
    head_size = config.get("attention_head_dim") or config.get("dim", 64) // config.get("n_heads", 1)
    return torch.zeros(1, 128, 1, head_size, dtype=dtype, device=device, requires_grad=True)


# Kernels of PyTorch's own attention, by diffusers' names
_SDPA_KERNELS = {
    "_native_flash": SDPBackend.FLASH_ATTENTION,
    "_native_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "_native_cudnn": SDPBackend.CUDNN_ATTENTION,
    "_native_math": SDPBackend.MATH,
}
# The preference that this process has set
_preferred_kernel = ExitStack()


def _prefer_kernel(kernel: SDPBackend | None) -> None:
    """Prefer a kernel of PyTorch's attention in this process until another one is set. `MATH` excludes the others."""
    # diffusers enables a kernel alone, for the whole process, during each call of attention. A reward that computes on
    # another thread then finds no kernel for its dtype or mask.
    _preferred_kernel.close()
    if kernel is not None:
        fallbacks = [] if kernel is SDPBackend.MATH else [k for k in _SDPA_KERNELS.values() if k is not kernel]
        _preferred_kernel.enter_context(sdpa_kernel([kernel, *fallbacks], set_priority=True))


def round_like_eager(transformer: nn.Module) -> None:
    """Let the compiled blocks of a transformer round to bf16 where eager blocks do, by a setting of this process."""
    if any(module._compiled_call_impl is not None for module in transformer.modules()):
        from torch._inductor import config as inductor

        # Fused kernels skip roundings, and kernels with gradients are fused differently from those without
        inductor.emulate_precision_casts = True


def keep_dtype_of_norms(transformer: nn.Module) -> None:
    """Cast the outputs of the norms of queries and keys to the dtype of their inputs."""
    # CUDA's autocast computes them in float32 since torch 2.12, and flash attention takes no float32
    # (https://github.com/huggingface/diffusers/issues/14104)
    for module in transformer.modules():
        if isinstance(module, nn.RMSNorm):
            module.register_forward_hook(lambda norm, args, output: output.to(args[0].dtype))


def set_kernels(transformer: Any, attention_backend: str | None, compile_blocks: bool) -> None:
    """Set the attention backend and compile the blocks, in place; an adapter that is added later is compiled too."""
    keep_dtype_of_norms(transformer)
    _prefer_kernel(_SDPA_KERNELS.get(attention_backend or ""))
    if attention_backend is not None:
        # No effect on Stable Diffusion 3, nor on Qwen-Image-2.1 without its cache, as it is trained
        name = "native" if attention_backend in _SDPA_KERNELS else attention_backend
        with attention_dispatch.attention_backend(name):  # on exit, other models have their default again
            transformer.set_attention_backend(name)
    if compile_blocks:
        # diffusers 0.42 names the blocks of Stable Diffusion 3 only here
        transformer._repeated_blocks = transformer._repeated_blocks or transformer._no_split_modules
        # The kernels of an image must not depend on earlier shapes, and torch compiles only 8 shapes by default
        torch.compiler.config.recompile_limit = 256
        transformer.compile_repeated_blocks(dynamic=False)
