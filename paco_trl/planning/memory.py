# SPDX-License-Identifier: Apache-2.0
"""Estimates of a run's memory by phase, from configs alone: forward and backward passes run on tensors without data."""

import copy
import functools
import inspect
import logging
import math
import re
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any
from unittest.mock import patch

import torch
from accelerate import init_empty_weights
from datasets import Dataset
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForImageTextToText, CLIPConfig, CLIPModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from ..rewards.paco_reward import PaCoReward, read_judge_config
from ..rollout import EncodedImage, PipelinePolicy, cast_floating_inputs, family_of
from ..rollout.adapters import read_peft_config
from ..rollout.families.unlisted import TransformerReachedError
from ..rollout.kernels import keep_dtype_of_norms
from ..rollout.loading import load_without_weights
from ..rollout.policy_building import prepare_transformer
from ..rollout.prompt_rows import PromptRows
from ..trainer.paco_grpo_config import PaCoGRPOConfig
from ..trainer.paco_nft_config import PaCoNFTConfig
from ..trainer.paco_reward_config import PaCoRewardConfig
from ..trainer.paco_reward_trainer import complete_peft_config
from ..trainer.round_trainer import ROUNDS_AHEAD
from ..utils.model_files import hub_arguments
from .known_models import resolve_model_configs


logger = logging.getLogger(__name__)

# Fraction of a device that a plan may use. The rest is for CUDA, fragmentation, and what the plan leaves out
USABLE = 0.9
# Bytes per weight of a linear layer; NF4 has a float32 scale per 64 weights
BYTES_PER_WEIGHT = {"nf4": 0.5 + 4 / 64, "int8": 1, "fp8": 1, "fp8_storage": 1}
_FLOAT32 = 4
# States per weight, by the first word of an optimizer's name. Adafactor keeps row and column sums, here for rank 16
_OPTIMIZER_STATES = {"adamw": 2, "ademamix": 3, "adafactor": 1 / 16, "adagrad": 1, "lion": 1, "rmsprop": 1, "sgd": 0}
_LIBRARIES = 5 * 2**28  # host memory of torch, transformers and diffusers in a process, without CUDA
_QWEN_MAX_PIXELS = 12_845_056  # default of Qwen2.5-VL's processor


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
    """Autocast as on a GPU, except in float32: with norms in float32, which the CPU's autocast does not have."""

    def in_float32(norm: Callable, *args, **kwargs) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs))
        return norm(*args, **kwargs)

    norms = ("layer_norm", "group_norm", "rms_norm")  # AT_FORALL_FP32 in ATen/autocast_mode.h (torch 2.15)
    norm_patches: dict[str, Any] = {name: functools.partial(in_float32, getattr(functional, name)) for name in norms}
    with (
        patch.multiple(functional, **norm_patches),
        torch.autocast("cpu", dtype, enabled=autocasts and dtype != torch.float32),
    ):
        yield


def weights_bytes(module: nn.Module, trainable: bool | None = None, quantization: str | None = None) -> int:
    """Count the bytes of weights and buffers, optionally only trainable or frozen ones, with frozen layers quantized."""
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
    skipped_runs, block_types = [], getattr(model, "_no_split_modules", None) or ()
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
    """Measure the peak of what a call of a model allocates; in training including the backward pass, with gradients."""
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
    """Replace weights on the meta device with fake tensors of a mode, which can be on any device."""
    fakes: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    with mode:
        for module in model.modules():
            for name, weight in [(name, w) for name, w in module.named_parameters(recurse=False) if w.is_meta]:
                if weight not in fakes:
                    empty = torch.empty(weight.shape, dtype=weight.dtype)
                    fakes[weight] = nn.Parameter(empty, requires_grad=weight.requires_grad)
                setattr(module, name, fakes[weight])


def return_zeros(encoder: Any) -> None:
    """Let a text encoder return zeros in the shapes of its real outputs."""

    def forward(input_ids: torch.Tensor, *args, **kwargs) -> Any:
        config = encoder.config.get_text_config()
        states = torch.zeros(*input_ids.shape, config.hidden_size, dtype=encoder.dtype)  # (B, L, D)
        outputs = {"last_hidden_state": states, "hidden_states": (states,) * (config.num_hidden_layers + 1)}
        if hasattr(encoder, "text_projection"):
            return CLIPTextModelOutput(text_embeds=states.new_zeros(len(states), config.projection_dim), **outputs)
        return BaseModelOutputWithPooling(pooler_output=states[:, 0], **outputs)

    encoder.forward = forward


class PlanMode(FakeTensorMode):
    """Run operations on tensors without data, except those whose inputs all have data: they run, and return data."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        has_data = bool(tensors) or func is torch.ops.aten.scalar_tensor.default
        if has_data and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass(frozen=True)
class Phase:
    """
    Memory of one process in a phase of a run.

    Attributes:
        name (`str`):
            `load`, `encode`, `generate`, `decode`, `score`, `train` or `evaluate`; for a judge `load`, `train`,
            `evaluate`.
        device (`dict[str, int]`):
            Bytes on the device by use, for example `frozen weights`, `optimizer` and `activations`.
        host (`dict[str, int]`):
            Bytes of host memory by use.
    """

    name: str
    device: dict[str, int]
    host: dict[str, int]

    @property
    def total(self) -> int:
        """Return the bytes on the device."""
        return sum(self.device.values())


def optimizer_bytes(optim: str) -> float | None:
    """Return the bytes that an optimizer of `Trainer` keeps per trained weight, `None` if it is unknown."""
    name = getattr(optim, "value", optim).removeprefix("paged_")  # pages stay on the device unless it is full
    states = _OPTIMIZER_STATES.get(name.split("_")[0])
    return states and states * (1 if name.endswith("8bit") else 0.5 if name.endswith("4bit") else _FLOAT32)


def training_memory(
    frozen_bytes: int,
    num_trained: int,
    element_size: int,
    plan: "MemoryPlan",
    num_averages: int = 0,
    optim: str = "adamw_torch",
) -> tuple[dict[str, int], dict[str, int]]:
    """Count the bytes that training always keeps on the device, and those of a micro-batch besides activations."""
    # DeepSpeed keeps float32 master weights. ZeRO shards them and the optimizer's states from stage 1, gradients from
    # stage 2, and weights from stage 3.
    stage = plan.zero_stage or 0
    optimizer_shards, gradient_shards, weight_shards = (
        plan.num_processes if stage >= first_stage else 1 for first_stage in (1, 2, 3)
    )
    float32_bytes = _FLOAT32 * num_trained
    bytes_per_weight = optimizer_bytes(optim)
    states = int(num_trained * (2 * _FLOAT32 if bytes_per_weight is None else bytes_per_weight))
    masters = 0 if plan.zero_stage is None else float32_bytes // optimizer_shards
    persistent = {
        "frozen weights": frozen_bytes // weight_shards,
        "trained weights": element_size * num_trained // weight_shards + masters,
        "optimizer": states // optimizer_shards,
        "average": 0 if plan.ema_offload else num_averages * float32_bytes // weight_shards,
    }
    has_buckets = plan.num_processes > 1 and plan.zero_stage is None
    return persistent, {
        "gradients": float32_bytes // gradient_shards,
        "DDP's buckets": float32_bytes if has_buckets else 0,
    }


def judge_tokens(pixels: int) -> int:
    """Count the tokens of a pair for a Qwen2.5-VL: one per 28 x 28 pixels of each image, and 512 of text."""
    return 2 * pixels // 28**2 + 512


def extrapolate(measure: Callable[..., int], batch_size: int, *settings: Any) -> int:
    """Extrapolate a measurement for one and two images linearly to a batch."""
    if batch_size <= 2:
        return measure(batch_size, *settings)
    single_image = measure(1, *settings)
    return single_image + (batch_size - 1) * (measure(2, *settings) - single_image)


class JudgeNetwork:
    """A judge as in a reward. Only the language model is run; the vision tower counts by its weights."""

    def __init__(
        self,
        model: str,
        quantization: str | None,
        dtype: torch.dtype = torch.bfloat16,
        peft_config: LoraConfig | None = None,
    ):
        self.mode, self.quantization, self.dtype = PlanMode(), quantization, dtype
        with init_empty_weights():
            config = read_judge_config(model)
            self.network = AutoModelForImageTextToText.from_config(config, dtype=self.dtype).requires_grad_(False)
            self.model = self.network if peft_config is None else get_peft_model(self.network, peft_config)
        with skip_equal_blocks(self.model):
            fake_weights(self.model, self.mode)
        self.weights_bytes = functools.cache(weights_bytes)

    @functools.cache  # noqa: B019  (lives as long as the plan)
    def peak(self, batch_size: int, num_tokens: int, trains: bool = False, checkpointing: bool = False) -> int:
        decoder, width = self.network.get_decoder(), self.network.config.get_text_config().hidden_size
        getattr(self.network, f"activation_checkpointing_{'enable' if checkpointing else 'disable'}")()
        with self.mode, training_precision(self.dtype, trains):
            embeds = torch.empty(batch_size, num_tokens, width, dtype=self.dtype, requires_grad=trains)
            forward = lambda: decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state  # noqa: E731
            return measure_peak(forward, self.model.train(trains), trains)


class JudgeRun(JudgeNetwork):
    """Memory model of a judge's training."""

    max_batch_size = 1024

    def __init__(self, model: str, args: PaCoRewardConfig, peft_config: LoraConfig, quantization: str | None):
        super().__init__(model, quantization, torch.bfloat16 if args.bf16 else torch.float32, peft_config)
        self.args = args
        self.num_trained = sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)
        pixels = _QWEN_MAX_PIXELS if args.max_pixels is None else args.max_pixels
        self.num_tokens = min(judge_tokens(pixels), args.max_length or math.inf)  # of the longest pair
        self.size = f"{self.num_tokens} tokens"
        self.settings = {
            "batch_size": args.per_device_train_batch_size, "gradient_checkpointing": args.gradient_checkpointing,
            "quantization": quantization, "num_processes": args.world_size,
        }  # fmt: skip

    def phases(self, plan: "MemoryPlan") -> list[Phase]:
        frozen_bytes = self.weights_bytes(self.model, False, plan.quantization)
        element_size = _FLOAT32 if plan.zero_stage is None else 2
        persistent, per_batch = training_memory(
            frozen_bytes, self.num_trained, element_size, plan, optim=self.args.optim
        )
        training = extrapolate(self.peak, plan.batch_size, self.num_tokens, True, plan.gradient_checkpointing)
        evaluation = extrapolate(self.peak, self.args.per_device_eval_batch_size, self.num_tokens)
        return [
            Phase("load", {}, {"libraries": _LIBRARIES, "weights": frozen_bytes}),
            Phase("train", {**persistent, **per_batch, "activations": training}, {}),
            Phase("evaluate", {**persistent, "activations": evaluation}, {}),
        ]

    def commands(self, plan: "MemoryPlan") -> list[Phase]:
        return []


class ImageRun:
    """Memory model of an image model's training, for the row with the largest images and the longest prompt."""

    # Prompts go through the real tokenizers and through text encoders that return zeros, and the pipeline itself
    # computes the transformer's arguments. The transformer, its backward pass and the VAE run on tensors without data.

    def __init__(
        self, model: str, args: PaCoGRPOConfig, peft_config: Any, dataset: Dataset | None,
        reward_models: Sequence[str], judge_quantization: str | None,
    ):  # fmt: skip
        self.args, self.mode, self.weights_bytes = args, PlanMode(), functools.cache(weights_bytes)
        self._read_rewards(reward_models, judge_quantization)
        self._load(model, peft_config)
        self._read_prompts(dataset)
        names = ("quantization", "offload_embeddings", "offload_rewards", "ema_offload", "vae_tiling")
        self.settings = {name: getattr(args, name) for name in names} | {
            "batch_size": args.round_plan.batch_size, "gradient_checkpointing": args.activation_checkpointing,
            "serves_judge": not self.judges, "num_processes": args.round_plan.num_processes,
        }  # fmt: skip

    def _load(self, model: str, peft_config: Any) -> None:
        args, init = self.args, self.args.model_init_kwargs or {}
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        is_deepspeed, is_continued = args.deepspeed_plugin is not None, isinstance(peft_config, str)
        self.training_precision = functools.partial(training_precision, dtype, not is_deepspeed)
        dtypes = {"default": dtype} | ({"transformer": torch.float32} if not (peft_config or is_deepspeed) else {})
        pipeline = load_without_weights(model, dtypes, **hub_arguments(init))
        transformer, components = pipeline.transformer, pipeline.components
        self.pipeline, self.family, self.transformer = pipeline, family_of(pipeline), transformer
        self.signature = inspect.signature(transformer.forward)
        if is_continued:
            peft_config = read_peft_config(peft_config, model, init)
            peft_config.inference_mode = False
        with init_empty_weights():
            keep_dtype_of_norms(pipeline.transformer)
            self.model = prepare_transformer(pipeline, self.family, peft_config, not is_deepspeed)
        self.vae = copy.deepcopy(pipeline.vae)  # without the policy's check of pixel values
        for component in (self.model, self.vae, *components.values()):
            if isinstance(component, nn.Module):
                with skip_equal_blocks(component):  # skipped blocks are counted, but not called
                    fake_weights(component, self.mode)
        self.policy = PipelinePolicy(pipeline, self.family, self.model.train(), self.signature)
        if is_deepspeed:
            cast_floating_inputs(self.model, dtype)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.num_trained, self.element_size = sum(w.numel() for w in weights), weights[0].element_size()
        self.reference_bytes = 0
        if args.has_reference and peft_config is None:
            self.reference_bytes = sum(p.numel() for p in transformer.parameters()) * dtype.itemsize
        elif args.has_reference and is_continued and args.reference == "initial":  # the adapter `ref`
            self.reference_bytes = self.element_size * self.num_trained
        self.text_encoders = [components[name] for name in self.family.text_encoders if components[name] is not None]
        for encoder in self.text_encoders:
            return_zeros(encoder)
        self.channels = self.vae.config.get("latent_channels") or self.vae.config.z_dim

    def _read_prompts(self, dataset: Dataset | None) -> None:
        """Find the row with the largest images and the longest prompt."""
        args = self.args
        rows = self.rows = PromptRows(dataset, args, "the dataset").measure(self.pipeline, self.family)
        size = lambda prompt: (math.prod(rows.training_sizes[prompt.row_number]), len(prompt.prompt))  # noqa: E731
        self.row_number, self.prompt = max(rows.image_prompts, key=size)
        self.negative_prompt = rows.negative_prompts[self.row_number]
        self.max_batch_size = (
            1 if rows.is_anchored and not self.family.batches_sources else self.family.max_batch_size or 1024
        )
        # Indexed by `is_full`: the training size, and the full inference size
        self.sizes = rows.training_sizes[self.row_number], rows.inference_sizes[self.row_number]
        self.scales, self.size = (args.resolution_scale, 1.0), "{} x {}".format(*self.sizes[0])

    def _read_rewards(self, models: Sequence[str], quantization: str | None) -> None:
        self.judges, self.clip_bytes = list[JudgeNetwork](), 0
        make = functools.cache(lambda base: JudgeNetwork(base, quantization))
        for config in map(read_judge_config, models):
            if isinstance(config, CLIPConfig):
                with init_empty_weights():
                    self.clip_bytes += weights_bytes(CLIPModel(config))
            else:
                self.judges.append(make(config.name_or_path))

    @functools.cache  # noqa: B019  (lives as long as the plan)
    def embeddings(self, is_full: bool = False) -> dict[str, torch.Tensor]:
        """Encode the prompt and the negative prompt, as zeros in the real shapes with batch dimension 1."""
        images = self.rows.images(self.row_number) if self.family.prompt_sees_images else []
        encoding_arguments = (torch.device("cpu"), images, self.scales[is_full])
        embeddings = dict(self.family.encode_prompt(self.pipeline, self.prompt, *encoding_arguments))
        if self.negative_prompt is not None:
            negative = self.family.encode_prompt(self.pipeline, self.negative_prompt, *encoding_arguments)
            embeddings |= {f"negative_{name}": tensor for name, tensor in negative.items()}
        return embeddings

    def panel(self, is_full: bool) -> Image.Image:
        return self.family.prepare_panel(self.pipeline, Image.new("RGB", self.sizes[is_full][::-1]))

    def encode_image(self, image: Image.Image) -> torch.Tensor:
        """Encode a prepared source image, never in tiles."""
        pixels = self.family.image_pixels(self.pipeline, image).to(self.vae.dtype)
        self.vae.disable_tiling()
        with self.mode:
            return self.vae.encode(self.mode.from_tensor(pixels)).latent_dist.mode()

    @functools.cache  # noqa: B019
    def transformer_calls(self, batch_size: int, is_full: bool = False) -> list[dict]:
        """Record the arguments of the transformer's calls in a step, as tensors without data."""
        calls: list[dict] = []
        num_calls = self.family.max_calls if self.negative_prompt is not None else 1

        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            calls.append(dict(self.signature.bind(*args, **kwargs).arguments))
            if len(calls) == num_calls:
                raise TransformerReachedError

        images = self.rows.images(self.row_number)
        source_images = [self.family.prepare_image(self.pipeline, image, self.scales[is_full]) for image in images]
        if self.rows.is_anchored:
            source_images.append(self.panel(is_full))
        sources = [EncodedImage(image, torch.zeros(self.encode_image(image).shape)) for image in source_images]
        arguments = {n: t.expand(batch_size, *t.shape[1:]) for n, t in self.embeddings(is_full).items()}
        arguments = {n: t.float() if t.is_floating_point() else t for n, t in arguments.items()}
        keys: list[tuple[int, ...]] = [(0, image) for image in range(batch_size)]
        handle = self.model.register_forward_pre_hook(record, with_kwargs=True, prepend=True)
        steps, scale = self.args.num_inference_steps, self.args.guidance_scale
        with handle, self.training_precision(), skip_equal_blocks(self.model), suppress(TransformerReachedError):
            self.policy.generate(arguments, *self.sizes[is_full], steps, scale, keys, sources=sources)
        # Keep masks, whose values Qwen-Image-2.1's transformer reads
        to_fake = lambda tensor: tensor if tensor.dtype == torch.bool else self.mode.from_tensor(tensor)  # noqa: E731
        return tree_map_only(torch.Tensor, to_fake, calls)

    @functools.cache  # noqa: B019
    def training_peak(self, batch_size: int, checkpoints: bool, quantization: str | None = None) -> int:
        """Measure the peak of a micro-batch's forward and backward pass."""
        getattr(self.transformer, f"{'enable' if checkpoints else 'disable'}_gradient_checkpointing")()
        return self._transformer_peak(self.transformer_calls(batch_size), quantization, is_training=True)

    @functools.cache  # noqa: B019
    def step_peak(self, batch_size: int, is_full: bool = False, quantization: str | None = None) -> int:
        """Measure the peak of a sampling step."""
        return self._transformer_peak(self.transformer_calls(batch_size, is_full), quantization)

    def _transformer_peak(self, calls: list[dict], quantization: str | None, is_training: bool = False) -> int:
        with self.mode, self.training_precision(), dequantize_in_forward(self.model, quantization):
            return measure_peak(lambda: [self.model(**call)[0] for call in calls], self.model, is_training)

    @functools.cache  # noqa: B019
    def decoding_peak(self, batch_size: int, is_full: bool, tiled: bool) -> int:
        """Measure the peak of the VAE's decoder."""
        sides = [side // self.pipeline.vae_scale_factor for side in self.sizes[is_full]]
        frames = [1] if "z_dim" in self.vae.config else []  # the VAE of a video model
        (self.vae.enable_tiling if tiled else self.vae.disable_tiling)()
        with self.mode, self.training_precision():
            latents = torch.empty(batch_size, self.channels, *frames, *sides, dtype=self.vae.dtype)
            return measure_peak(lambda: self.vae.decode(latents, return_dict=False), self.vae)

    @functools.cache  # noqa: B019
    def first_panel_peak(self, is_full: bool) -> int:
        """Measure the peak of the VAE's encoder for a first panel."""
        return measure_peak(lambda: self.encode_image(self.panel(is_full)), self.vae)

    @property
    def has_old_policy(self) -> bool:
        return isinstance(self.args, PaCoNFTConfig) and self.args.keeps_old_policy

    @property
    def prompts_per_round(self) -> int:
        """Count the embeddings that a round holds; images of a prompt share them unless batches span prompts."""
        round_plan = self.args.round_plan
        if round_plan.num_generations % round_plan.rollout_batch_size:
            return round_plan.micro_batches_per_process * round_plan.batch_size
        return min(round_plan.num_prompts, round_plan.micro_batches_per_process)

    @property
    def latents_bytes(self) -> int:
        """Count the bytes of the float32 latents that a round keeps for each image and step."""
        args, round_plan = self.args, self.args.round_plan
        # The latents before and after a step, and its mean; in DiffusionNFT and AWM an input, a target and a velocity
        # per time. With source images, the transformer's input as well
        num_latents = 3 + 2 * bool(self.rows.sources or self.rows.is_anchored)
        num_latents += (
            self.has_old_policy and args.loss_type == "awm"
        )  # the old policy's velocity besides the rollout's
        latent = math.prod(side // self.pipeline.vae_scale_factor for side in self.sizes[0]) * self.channels
        images = round_plan.micro_batches_per_process * round_plan.batch_size
        return _FLOAT32 * num_latents * round_plan.num_trained_steps * images * latent

    def _activations(self, plan: "MemoryPlan") -> dict[str, int]:
        """Return the activations of each phase of the image model."""
        args = self.args
        batch, eval_batch = plan.batch_size * args.round_plan.num_merged_batches, args.per_device_eval_batch_size
        train = extrapolate(self.training_peak, plan.batch_size, plan.gradient_checkpointing, plan.quantization)
        step = extrapolate(self.step_peak, batch, False, plan.quantization)
        decode = extrapolate(self.decoding_peak, batch, False, plan.vae_tiling)
        is_full = args.resolution_scale != 1  # otherwise the same as in training
        evaluate = extrapolate(self.step_peak, eval_batch, is_full, plan.quantization)
        evaluate = max(evaluate, extrapolate(self.decoding_peak, eval_batch, is_full, plan.vae_tiling))
        if self.rows.is_anchored:  # a first panel is encoded in between
            step = max(step, self.first_panel_peak(False))
            evaluate = max(evaluate, self.first_panel_peak(is_full))
        return {"generate": step, "decode": decode, "train": train, "evaluate": evaluate}

    def _judge_activations(self, plan: "MemoryPlan", size: tuple[int, int]) -> int:
        """Return the activations of the largest judge."""
        judges = () if plan.serves_judge else self.judges
        return max((judge.peak(plan.judge_batch_size, judge_tokens(math.prod(size))) for judge in judges), default=0)

    def phases(self, plan: "MemoryPlan") -> list[Phase]:
        args, prompt_embeddings = self.args, self.embeddings().values()
        frozen_bytes = self.weights_bytes(self.model, False, plan.quantization)
        encoders = sum(self.weights_bytes(encoder, False, plan.quantization) for encoder in self.text_encoders)
        vae, num_shards = self.weights_bytes(self.vae), plan.num_processes if plan.zero_stage == 3 else 1
        judges = () if plan.serves_judge else self.judges
        rewards = sum(self.weights_bytes(judge.network, False, judge.quantization) for judge in judges)
        rewards += self.clip_bytes
        embeddings = _FLOAT32 * self.prompts_per_round * sum(tensor.numel() for tensor in prompt_embeddings)

        averages = (args.ema_decay is not None) + self.has_old_policy
        persistent, per_batch = training_memory(
            frozen_bytes, self.num_trained, self.element_size, plan, averages, args.optim
        )
        persistent["reference"] = self.reference_bytes // num_shards
        persistent["rewards"] = 0 if plan.offload_rewards else rewards
        persistent["round"] = self.latents_bytes + (0 if plan.offload_embeddings else embeddings)
        is_gathered = num_shards > 1 and args.ds3_gather_for_generation
        gathered_bytes = frozen_bytes + self.element_size * self.num_trained if is_gathered else 0
        generation = {**persistent, "gathered weights": gathered_bytes, "VAE": vae}
        # While an average generates, `use_weights` keeps the trained weights, in the dtype of the forward pass
        replaced_bytes = self.element_size * self.num_trained // num_shards
        rollout = {**generation, "replaced weights": replaced_bytes * self.has_old_policy}
        evaluation = {**generation, "replaced weights": replaced_bytes * (args.ema_decay is not None)}
        # Between rounds, when the text encoders replace the frozen weights on the device, except with DeepSpeed
        encoding = {**persistent, "round": 0, "text encoders": encoders}
        encoding["frozen weights"] = 0 if plan.zero_stage is None else persistent["frozen weights"]

        activations = self._activations(plan)
        judge_activations = {"activations of the judge": self._judge_activations(plan, self.sizes[0])}
        # Rewards run while the next images are generated, and offloaded ones after the last
        is_offloaded, generation_peak = plan.offload_rewards, max(activations["generate"], activations["decode"])
        score = {**persistent, "rewards": rewards} if is_offloaded else {**rollout, "activations": generation_peak}
        evaluation |= {"activations": activations["evaluate"], **({} if is_offloaded else judge_activations)}

        host = {
            "libraries": _LIBRARIES,
            "text encoders": encoders,
            "VAE": vae,
            "average": averages * _FLOAT32 * self.num_trained // num_shards if plan.ema_offload else 0,
            "round": embeddings if plan.offload_embeddings else 0,
            "rewards": rewards if is_offloaded else 0,
        }
        if args.embeddings_dir is None:
            count = min(len(self.rows.image_prompts), ROUNDS_AHEAD * self.prompts_per_round)
            host["embeddings"] = count * sum(tensor.nbytes for tensor in prompt_embeddings)
        # Weights are quantized one by one while they are read from memory-mapped files
        loading_memory = {**host, "transformer": self.weights_bytes(self.model, None, plan.quantization)}
        return [
            Phase("load", {}, loading_memory),
            Phase("encode", encoding, loading_memory),
            Phase("generate", {**rollout, "activations": activations["generate"]}, host),
            Phase("decode", {**rollout, "activations": activations["decode"]}, host),
            Phase("score", {**score, **judge_activations}, host),
            Phase("train", {**persistent, **per_batch, "activations": activations["train"]}, host),
            Phase("evaluate", evaluation, host),
        ]

    def commands(self, plan: "MemoryPlan") -> list[Phase]:
        """Return the memory of commands that generate with the trained model, loaded as in training, at inference size."""
        is_adapter, is_full = isinstance(self.model, PeftModel), self.args.resolution_scale != 1
        frozen_bytes_of = functools.partial(self.weights_bytes, trainable=False, quantization=plan.quantization)
        encoding = {"text encoders": sum(map(frozen_bytes_of, self.text_encoders))}
        trained_bytes = self.num_trained * (_FLOAT32 if is_adapter else self.vae.dtype.itemsize)
        network = {
            "frozen weights": frozen_bytes_of(self.model),
            "trained weights": trained_bytes,
            "VAE": self.weights_bytes(self.vae),
        }
        if not is_adapter and plan.zero_stage is None:  # as in training, they stay on the device together
            network |= encoding
        judges = () if plan.serves_judge else self.judges
        weights = [self.weights_bytes(judge.network, False, judge.quantization) for judge in judges]
        judge_activations = self._judge_activations(plan, self.sizes[1])

        activations = max(
            self.step_peak(1, is_full, plan.quantization), self.decoding_peak(1, is_full, plan.vae_tiling)
        )
        images = {**network, "activations": activations}  # generated one by one

        def scoring(size: int) -> dict[str, int]:
            return {"rewards": size, "activations of the judge": judge_activations}

        host = {"libraries": _LIBRARIES, **encoding, "transformer": network["frozen weights"] + trained_bytes}
        turns = {
            "evaluate prompts": [encoding, images, scoring(sum(weights) + self.clip_bytes)],
            "evaluate images": [encoding, images],
            "build grids": [encoding, images],
            "space": [encoding, images, scoring(max((weights_bytes(judge.network) for judge in judges), default=0))],
        }
        return [
            Phase(name, max(name_turns, key=lambda turn: sum(turn.values())), host)
            for name, name_turns in turns.items()
        ]


@dataclass(frozen=True)
class MemoryPlan:
    """
    Memory of each process of a run. `print(plan)` shows a table, and `dataclasses.replace(plan, batch_size=4).peak` is
    the peak of the same run with another setting.

    Attributes:
        batch_size (`int`):
            Images or pairs per micro-batch.
        gradient_checkpointing, offload_embeddings, offload_rewards, ema_offload, vae_tiling (`bool`):
            Options of the trainer's config.
        quantization (`str` or `None`):
            `nf4`, `int8`, `fp8` or `fp8_storage`, of the frozen weights.
        serves_judge (`bool`):
            Whether the judges run on a server instead of the device.
        zero_stage (`int` or `None`):
            Stage of DeepSpeed's ZeRO; `None` without DeepSpeed.
        num_processes (`int`):
            Number of processes.
        judge_batch_size (`int`):
            `batch_size` of the judges in rewards.
    """

    run: ImageRun | JudgeRun
    batch_size: int = 1
    gradient_checkpointing: bool = True
    quantization: str | None = None
    offload_embeddings: bool = False
    offload_rewards: bool = False
    ema_offload: bool = False
    vae_tiling: bool = False
    serves_judge: bool = True
    zero_stage: int | None = None
    num_processes: int = 1
    judge_batch_size: int = inspect.signature(PaCoReward).parameters["batch_size"].default

    @functools.cached_property
    def phases(self) -> list[Phase]:
        """Return the phases of the run, in order. Tabulate with `pd.DataFrame({p.name: p.device for p in plan.phases})`."""
        return self.run.phases(self)

    @functools.cached_property
    def commands(self) -> list[Phase]:
        """
        Return the memory of `evaluate prompts`, `evaluate images`, `build grids` and `space` with the trained model,
        loaded as in training. Text encoders, transformer and judge take turns on the device; each row is the largest
        turn.
        """
        return self.run.commands(self)

    @property
    def peak(self) -> int:
        """Return the most bytes on the device in any phase."""
        return max(phase.total for phase in self.phases)

    @property
    def host_peak(self) -> int:
        """Return the most bytes of host memory in any phase."""
        return max(sum(phase.host.values()) for phase in self.phases)

    def largest_batch(self, limit: float) -> int:
        """Return the largest micro-batch that fits into `limit` bytes, as a power of two, or 0 if none fits."""
        size = 1
        while size <= self.run.max_batch_size and replace(self, batch_size=size).peak <= limit:
            size *= 2
        return size // 2

    def describe(self) -> str:
        """Summarize the peak of the run in one line."""
        largest = max(self.phases, key=lambda phase: phase.total)
        optim: Any = getattr(self.run.args.optim, "value", self.run.args.optim)
        note = f" The optimizer `{optim}` is counted as AdamW in float32." if optimizer_bytes(optim) is None else ""
        return (
            f"Micro-batches of {self.batch_size} at {self.run.size}: {format_size(largest.total)} on the device "
            f"of each process, in `{largest.name}`.{note}"
        )

    def table(self) -> Table:
        """Tabulate phases and commands, with the uses that take more than a hundredth of their memory."""
        table = Table("phase", "device", "host", "on the device", box=None, pad_edge=False)
        for phase in [*self.phases, *self.commands]:
            uses = sorted(phase.device.items(), key=lambda use: -use[1])
            summary = ", ".join(f"{use} {format_size(size)}" for use, size in uses if size > phase.total / 100)
            table.add_row(phase.name, format_size(phase.total), format_size(sum(phase.host.values())), summary)
        return table

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self.describe(), self.table(), sep="\n", highlight=False, markup=False)
        return capture.get()


def plan_memory(
    model: str,
    args: PaCoGRPOConfig | PaCoRewardConfig,
    train_dataset: Dataset | None = None,
    peft_config: LoraConfig | str | None = None,
    reward_models: Sequence[str] = (),
    judge_quantization: str | None = None,
) -> MemoryPlan:
    """
    Plan the memory of a training run from configs alone: no weights are loaded, and no GPU is needed.

    The first four arguments are the trainer's. Forward and backward passes run on tensors without data, at the run's
    batch size, image size and prompt length. The plan leaves out other rewards, activations of text encoders, CUDA
    itself, and fragmentation.

    Args:
        model (`str`):
            Hub id or directory of the pipeline, or of the judge to train. Only its configs and tokenizers are read.
        args ([`PaCoGRPOConfig`], [`PaCoNFTConfig`] or [`PaCoRewardConfig`]):
            Arguments of the trainer. Without a GPU, set `use_cpu=True`.
        train_dataset ([`~datasets.Dataset`], *optional*):
            Prompts, required for an image model. A judge's plan takes the longest pairs from `args`.
        peft_config ([`~peft.LoraConfig`] or `str`, *optional*):
            Adapter, or for image models the directory of an adapter to continue. If `None`, all weights of an image
            model are trained, and a judge gets the paper's adapter.
        reward_models (`Sequence[str]`, *optional*, defaults to `()`):
            Hub ids or directories of the judges and CLIP models that rewards load into the process, once per load.
        judge_quantization (`str`, *optional*):
            Quantization of the judges in `reward_models`, or of the judge to train: `nf4`, `int8` or `fp8`.

    Returns:
        [`MemoryPlan`]: `phases` with their bytes by use, and the `peak`.

    Raises:
        `ValueError`: If the dataset or the adapter does not fit the model.
        `OSError`: If a config is missing.

    Example:

    ```python
    plan = plan_memory("black-forest-labs/FLUX.1-dev", args, prompts, LoraConfig(r=64, lora_alpha=128))
    print(plan)
    ```
    """
    run: ImageRun | JudgeRun
    stage = None if args.deepspeed_plugin is None else args.deepspeed_plugin.zero_stage
    with tempfile.TemporaryDirectory() as folder:
        models = (model, *reward_models)
        model, *reward_models = resolved_models = [resolve_model_configs(name, folder) for name in models]
        if packaged_models := ", ".join(sorted({*models} - {*resolved_models})):
            logger.warning(
                f"The configs of {packaged_models} cannot be read from the Hub. The plan uses the packaged copies."
            )
        if isinstance(args, PaCoRewardConfig):
            read_judge_config(model)
            peft_config = complete_peft_config(peft_config, model, None, args.trust_remote_code)
            run = JudgeRun(model, args, peft_config, judge_quantization)
        else:
            if train_dataset is None:
                raise ValueError("The plan of an image model requires its prompts. Pass them as `train_dataset`.")
            run = ImageRun(model, args, peft_config, train_dataset, reward_models, judge_quantization)
    return MemoryPlan(run, zero_stage=stage, **run.settings)


def format_size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
