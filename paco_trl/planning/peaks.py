# SPDX-License-Identifier: Apache-2.0
"""Peaks of memory, measured by forward and backward passes on tensors without data."""

import functools
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain, groupby
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


# Bytes per weight of a linear layer; NF4 has a float32 scale per 64 weights
BYTES_PER_WEIGHT = {"nf4": 0.5 + 4 / 64, "int8": 1, "fp8": 1, "fp8_storage": 1}


Result = TypeVar("Result")


def cached_method(method: Callable[..., Result]) -> Callable[..., Result]:
    """Cache the results of a method on its object, with which they are freed."""

    @functools.wraps(method)
    def wrapper(self, *arguments):
        results = vars(self).setdefault(f"_{method.__name__}_results", {})
        if arguments not in results:
            results[arguments] = method(self, *arguments)
        return results[arguments]

    return wrapper


class PlanMode(FakeTensorMode):
    """Run operations on tensors without data; operations whose inputs all have data return data."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        has_data = bool(tensors) or func is torch.ops.aten.scalar_tensor.default
        if has_data and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class LiveBytes(TorchDispatchMode):
    """Track the bytes of tensors allocated by operations within the context, and their peak."""

    def __init__(self):
        super().__init__()
        self.current = self.peak = 0
        self._storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # two thirds of all calls
            return args[0].fake_device
        self._count((args, kwargs), is_new=False)  # weights and inputs, which views would count again
        result = func(*args, **(kwargs or {}))
        self._count(result, is_new=True)
        self.peak = max(self.peak, self.current)
        return result

    def _count(self, tree: Any, is_new: bool) -> None:
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)):
            if id(storage) not in self._storages:
                self._storages.add(id(storage))
                size = storage.nbytes() if is_new else 0
                self.current += size
                weakref.finalize(storage, self._free, id(storage), size)

    def _free(self, storage: int, size: int) -> None:
        self._storages.discard(storage)
        self.current -= size


@contextmanager
def training_precision(dtype: torch.dtype, autocasts: bool = True) -> Iterator[None]:
    """Autocast as on a GPU, with norms in float32, as the CPU's autocast does not; in float32, do not autocast."""

    def in_float32(norm: Callable, *args, **kwargs) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs))
        return norm(*args, **kwargs)

    norms = ("layer_norm", "group_norm", "rms_norm")  # AT_FORALL_FP32 in ATen/autocast_mode.h (torch 2.15)
    # Patched, since torch registers no such rule for the CPU, and `patch` puts its functions back after errors too
    norm_patches: dict[str, Any] = {name: functools.partial(in_float32, getattr(functional, name)) for name in norms}
    with (
        patch.multiple(functional, **norm_patches),
        torch.autocast("cpu", dtype, enabled=autocasts and dtype != torch.float32),
    ):
        yield


def weights_bytes(module: nn.Module, trainable: bool | None = None, quantization: str | None = None) -> int:
    """Count the bytes of weights and buffers, optionally of trainable or frozen ones, with frozen layers quantized."""
    parameters = [p for p in module.parameters() if trainable is None or p.requires_grad is trainable]
    total = sum(tensor.nbytes for tensor in (*parameters, *([] if trainable else module.buffers())))
    if quantization is None:
        return total
    for layer in quantized_layers(module, quantization):
        total -= int(layer.weight.numel() * (layer.weight.element_size() - BYTES_PER_WEIGHT[quantization]))
    return total


def quantized_layers(module: nn.Module, quantization: str) -> Iterator[nn.Linear]:
    # Not the language model's head, nor layers that `store_as_fp8` skips, such as modulation layers, named "norm"
    skip_patterns = ("lm_head$", *((*DEFAULT_SKIP_MODULES_PATTERN, r"\.wo$") if quantization == "fp8_storage" else ()))
    for name, layer in module.named_modules():
        is_skipped = any(re.search(pattern, name.removeprefix("base_model.model.")) for pattern in skip_patterns)
        if isinstance(layer, nn.Linear) and not layer.weight.requires_grad and not is_skipped:
            yield layer


@contextmanager
def dequantize_in_forward(module: nn.Module, quantization: str | None) -> Iterator[None]:
    """Let quantized layers compute with a copy of their weights in the compute dtype, which autograd keeps."""

    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if quantization == "fp8_storage":
            return functional.linear(x, layer.weight.clone(), layer.bias)
        # torchao computes in the dtype of the inputs, which autocast leaves in float32 after a norm
        return functional.linear(x, layer.weight.to(x.dtype, copy=True), layer.bias).to(x.dtype)

    # bitsandbytes dequantizes again in the backward pass, so that no copies of NF4 weights are kept
    layers = [] if quantization in (None, "nf4") else list(quantized_layers(module, quantization))
    for layer in layers:
        layer.forward = functools.partial(forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def skip_equal_blocks(model: nn.Module) -> Iterator[list[tuple[list[nn.Module], int]]]:
    """Leave out all but three of each run of equal blocks; yield the second, the third, and the number left out."""
    skipped_runs = []
    block_types = getattr(model, "_no_split_modules", None) or ()
    lists = [(name, blocks) for name, blocks in model.named_modules() if isinstance(blocks, nn.ModuleList)]
    with ExitStack() as stack:
        for name, blocks in lists:
            if not all(type(block).__name__ in block_types for block in blocks):
                continue
            runs = [[*run] for _, run in groupby(blocks, _signature)]
            skipped_runs += [(run[1:3], len(run) - 3) for run in runs if len(run) > 3]
            parent, _, attribute = name.rpartition(".")
            stack.callback(setattr, model.get_submodule(parent), attribute, blocks)
            setattr(model.get_submodule(parent), attribute, nn.ModuleList(chain(*(run[:3] for run in runs))))
        yield skipped_runs


def _signature(block: nn.Module) -> list[tuple]:
    return [(type(block),), *((name, w.shape, w.requires_grad) for name, w in block.named_parameters())]


def measure_peak(function: Callable[[], Any], model: nn.Module, is_training: bool = False) -> int:
    """Measure the peak memory that a call of a model allocates, in training including the backward pass."""
    live = LiveBytes()
    # Bytes allocated before a block, in each call of the model
    starts = defaultdict[nn.Module, list[int]](list)
    torch.clear_autocast_cache()  # weights cast by an earlier call
    with skip_equal_blocks(model) as skipped_runs, ExitStack() as hooks:
        for block in chain(*(pair for pair, _ in skipped_runs)):
            hook = block.register_forward_pre_hook(lambda block, _: starts[block].append(live.current))
            hooks.enter_context(hook)
        for weight in model.parameters() if is_training else ():
            if weight.requires_grad:
                weight.grad = torch.zeros_like(weight)  # from an earlier micro-batch, and counted elsewhere
        with live, torch.set_grad_enabled(is_training):
            outputs = function()
            hooks.close()  # gradient checkpointing calls blocks again
            if is_training:
                sum(output.float().square().mean() for output in tree_leaves(outputs)).backward()
        model.zero_grad(set_to_none=True)
    peak = live.peak
    for (second, third), count in skipped_runs:
        # Each skipped block would keep as much as the second one
        kept_bytes = [end - start for start, end in zip(starts[second], starts[third], strict=True)]
        if is_training and len(kept_bytes) > 1 and torch.is_autocast_enabled("cpu"):
            # Autocast casts a weight once for all calls, so its gradient stays in that dtype until the first call's
            # backward
            num_trained = sum(weight.numel() for weight in second.parameters() if weight.requires_grad)
            kept_bytes[-1] = max(kept_bytes[-1], num_trained * torch.get_autocast_dtype("cpu").itemsize)
        peak += count * sum(kept_bytes)
    return peak


def fake_weights(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace weights on the meta device with fake tensors of a mode, which may be on any device."""
    fakes: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    with mode:
        for module in model.modules():
            for name, weight in [(name, w) for name, w in module.named_parameters(recurse=False) if w.is_meta]:
                if weight not in fakes:
                    empty = torch.empty(weight.shape, dtype=weight.dtype)
                    fakes[weight] = nn.Parameter(empty, requires_grad=weight.requires_grad)
                setattr(module, name, fakes[weight])


def extrapolate(measure: Callable[..., int], batch_size: int, *settings: Any) -> int:
    """Extrapolate a measurement for one and two images linearly to a batch."""
    if batch_size <= 2:
        return measure(batch_size, *settings)
    single_image = measure(1, *settings)
    return single_image + (batch_size - 1) * (measure(2, *settings) - single_image)
