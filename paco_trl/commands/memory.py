# SPDX-License-Identifier: Apache-2.0
"""Memory of a run by phase, from configs alone: forwards and backwards run on tensors that have no data."""

import copy
import functools
import inspect
import itertools
import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import diffusers
import torch
from accelerate import init_empty_weights
from datasets import Dataset
from diffusers import DiffusionPipeline
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPConfig, CLIPModel
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.clip.modeling_clip import CLIPTextModelOutput

from .. import PaCoGRPOConfig, PaCoRewardConfig
from ..rollout import EncodedImage, PipelinePolicy, cast_floating_inputs, family_of
from ..rollout.loading import keep_dtype_of_norms, prepare_transformer, read_peft_config
from ..rollout.prompt_rows import PromptRows
from ..trainer.paco_reward_trainer import complete_peft_config
from ..utils.files import find_model_file
from . import reward
from .script_arguments import ScriptArguments, get_peft_config, judges_of


# Fraction of a device that a plan may take: the rest is for CUDA, fragmentation, and what the plan leaves out
USABLE = 0.9
# Bytes of a weight of a linear layer; nf4 has a float32 scale for each 64 weights
BYTES_PER_WEIGHT = {"nf4": 0.5 + 4 / 64, "int8": 1, "fp8": 1, "fp8_storage": 1}
_FLOAT32 = 4
_QWEN_MAX_PIXELS = 12_845_056  # of Qwen2.5-VL's own processor


class LiveBytes(TorchDispatchMode):
    """Track the bytes of the tensors that operations allocate within the context, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for storage in _storages((args, kwargs)):
            self._known[storage] = True  # weights and inputs, which a view would bring in again
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage not in self._known:
                self._known[storage] = True
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextmanager
def as_in_training(dtype: torch.dtype, autocasts: bool = True) -> Iterator[None]:
    """Run what follows under autocast, except in float32, with norms in float32 as on a GPU; the CPU's are not."""
    is_on = autocasts and dtype != torch.float32

    def in_float32(function: Callable, *args, **kwargs) -> torch.Tensor:
        if is_on and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.float, (args, kwargs))
        return function(*args, **kwargs)

    # AT_FORALL_FP32 in ATen/autocast_mode.h (torch 2.15)
    norms = {name: getattr(functional, name) for name in ("layer_norm", "group_norm", "rms_norm")}
    replaced: dict[str, Any] = {name: functools.partial(in_float32, norm) for name, norm in norms.items()}
    with patch.multiple(functional, **replaced), torch.autocast("cpu", dtype, enabled=is_on):
        yield


def weights_bytes(module: nn.Module, trainable: bool | None = None, quantization: str | None = None) -> int:
    """Count the bytes of weights and buffers, or of trained or frozen ones, with frozen linear layers quantized."""
    parameters = [p for p in module.parameters() if trainable is None or p.requires_grad is trainable]
    total = sum(tensor.nbytes for tensor in (*parameters, *([] if trainable else module.buffers())))
    if quantization is None:
        return total
    for layer in quantized_layers(module, quantization):
        total -= int(layer.weight.numel() * (layer.weight.element_size() - BYTES_PER_WEIGHT[quantization]))
    return total


def quantized_layers(module: nn.Module, quantization: str) -> Iterator[nn.Linear]:
    """Yield the frozen linear layers that are quantized."""
    # A head of words is not quantized; neither is what `_store_as_fp8` keeps, such as modulation layers, named "norm"
    kept = ("lm_head$", *((*DEFAULT_SKIP_MODULES_PATTERN, r"\.wo$") if quantization == "fp8_storage" else ()))
    for name, layer in module.named_modules():
        is_kept = any(re.search(pattern, name.removeprefix("base_model.model.")) for pattern in kept)
        if isinstance(layer, nn.Linear) and not layer.weight.requires_grad and not is_kept:
            yield layer


@contextmanager
def dequantizing(module: nn.Module, quantization: str | None) -> Iterator[None]:
    """Let quantized layers compute with a copy of their weights in the compute dtype, which autograd keeps."""
    layers = [] if quantization is None else list(quantized_layers(module, quantization))

    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if quantization == "fp8_storage":
            return functional.linear(x, layer.weight.clone(), layer.bias)
        # torchao takes the dtype of the inputs, which autocast leaves in float32 behind a norm
        return functional.linear(x, layer.weight.to(x.dtype, copy=True), layer.bias).to(x.dtype)

    for layer in layers:
        layer.forward = functools.partial(forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def measure_peak(function: Callable[[], Any], model: nn.Module | None = None) -> int:
    """Return the peak of what a call allocates, with the backward of a `model` that already has gradients."""
    for parameter in [] if model is None else model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # of an earlier micro-batch, counted elsewhere
    with LiveBytes() as live, torch.set_grad_enabled(model is not None):
        outputs = function()
        if model is not None:
            sum(output.float().square().mean() for output in tree_leaves(outputs)).backward()
            model.zero_grad(set_to_none=True)
    return live.peak


class _TransformerReachedError(Exception):
    """The call of the transformer is recorded."""


def fake_weights(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace the weights of a model on the meta device by those of a mode, which can be on any device."""
    known: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
    for module in model.modules():
        for name, weight in [each for each in module.named_parameters(recurse=False) if each[1].is_meta]:
            if weight not in known:
                with mode:
                    empty = torch.empty(weight.shape, dtype=weight.dtype)
                    known[weight] = nn.Parameter(empty, requires_grad=weight.requires_grad)
            setattr(module, name, known[weight])


class _ZeroEncoder(nn.Module):
    """Text encoder that returns zeros of the real one's shapes, and keeps the largest input."""

    def __init__(self, encoder: Any):
        super().__init__()
        self.config, self.dtype, self.device = encoder.config, encoder.dtype, torch.device("cpu")
        self.has_projection = hasattr(encoder, "text_projection")
        self.num_tokens = 0
        self.model = SimpleNamespace(norm=nn.Identity())  # which Qwen-Image-2.1's pipeline hooks

    def forward(self, input_ids: torch.Tensor, *args, **kwargs) -> Any:
        config = self.config.get_text_config()
        self.num_tokens = max(self.num_tokens, input_ids.numel())
        states = torch.zeros(*input_ids.shape, config.hidden_size, dtype=self.dtype)  # (B, L, D)
        each = {"last_hidden_state": states, "hidden_states": (states,) * (config.num_hidden_layers + 1)}
        if self.has_projection:
            return CLIPTextModelOutput(text_embeds=states.new_zeros(len(states), config.projection_dim), **each)
        return BaseModelOutputWithPooling(pooler_output=states[:, 0], **each)


class _PlanMode(FakeTensorMode):
    """Tensors without data; operations on tensors that all have data are run, and their results have data too."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        has_data = bool(tensors) or func is torch.ops.aten.scalar_tensor.default
        if has_data and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def build_components(model: str, dtypes: dict[str, torch.dtype], **where) -> tuple[type, dict[str, Any]]:
    """Build the parts of a pipeline from its configs, the models without data; return its class too."""
    index = DiffusionPipeline.load_config(model, **where)
    parts: dict[str, Any] = {}
    for name, entry in index.items():
        if name.startswith("_"):
            continue
        if not isinstance(entry, list | tuple) or entry[0] is None:  # a setting, or a part that is left out
            parts[name] = None if isinstance(entry, list | tuple) else entry
            continue
        kind = getattr(import_module(entry[0]), entry[1])
        if not issubclass(kind, nn.Module):
            parts[name] = kind.from_pretrained(model, subfolder=name, **where)
            continue
        is_diffusers = hasattr(kind, "load_config")
        read = kind.load_config if is_diffusers else kind.config_class.from_pretrained
        config = read(model, subfolder=name, **where)
        with init_empty_weights():
            part = (kind.from_config if is_diffusers else kind)(config)
            if not is_diffusers:
                part.tie_weights()
        parts[name] = part.to(dtypes.get(name, dtypes["default"])).requires_grad_(False).eval()
    return getattr(diffusers, index["_class_name"]), parts


@dataclass(frozen=True)
class Setting:
    """Settings of a run that a plan may propose to change."""

    batch_size: int = 1
    gradient_checkpointing: bool = True
    quantization: str | None = None
    offload_embeddings: bool = False
    offload_rewards: bool = False
    ema_offload: bool = False
    vae_tiling: bool = False
    serves_judge: bool = False
    zero_stage: int | None = None
    num_processes: int = 1


class Phase(NamedTuple):
    """Bytes of one process in a phase of a run, by what takes them."""

    name: str
    device: dict[str, int]
    host: dict[str, int]


def peak(phases: list[Phase]) -> int:
    """Return the largest number of bytes on the device."""
    return max(sum(phase.device.values()) for phase in phases)


def training_parts(
    frozen: int, num_trained: int, element_size: int, setting: Setting, num_averages: int = 0
) -> tuple[dict[str, int], dict[str, int]]:
    """Count what a training always keeps on the device, and what a micro-batch adds next to its activations."""
    # DeepSpeed keeps float32 masters. ZeRO divides them and the optimizer's states from stage 1, gradients from stage 2,
    # weights from stage 3.
    stage = setting.zero_stage or 0
    optimizer, gradient, weight = (setting.num_processes if stage >= first else 1 for first in (1, 2, 3))
    full = _FLOAT32 * num_trained
    masters = 0 if setting.zero_stage is None else full // optimizer
    always = {
        "frozen weights": frozen // weight,
        "trained weights": element_size * num_trained // weight + masters,
        "optimizer": 2 * full // optimizer,  # AdamW's two averages
        "average": 0 if setting.ema_offload else num_averages * full // weight,
    }
    has_buckets = setting.num_processes > 1 and setting.zero_stage is None
    return always, {"gradients": full // gradient, "DDP's buckets": full if has_buckets else 0}


def affine(measure: Callable[[int], int], batch_size: int) -> int:
    """Extend what is measured for one and two images to a batch: all but a constant grows with it."""
    if batch_size <= 2:
        return measure(batch_size)
    one = measure(1)
    return one + (batch_size - 1) * (measure(2) - one)


class JudgePlan:
    """Memory of a vision-language judge, in training or as a reward; its vision tower is counted by its weights."""

    def __init__(self, model: str, args: Any, peft_config: LoraConfig | None = None, quantization: str | None = None):
        self.args, self.mode, self.quantization = args, FakeTensorMode(allow_non_fake_inputs=True), quantization
        self.dtype = torch.bfloat16 if args.bf16 else torch.float32
        with init_empty_weights():
            config = AutoConfig.from_pretrained(model)
            self.network = AutoModelForImageTextToText.from_config(config, dtype=self.dtype).requires_grad_(False)
            self.model = self.network if peft_config is None else get_peft_model(self.network, peft_config)
        fake_weights(self.model, self.mode)
        self.num_trained = sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)
        pixels = _QWEN_MAX_PIXELS if args.max_pixels is None else args.max_pixels
        self.num_tokens = min(judge_tokens(pixels), args.max_length or math.inf)  # of the longest pair
        self.size = f"{self.num_tokens} tokens"

    @functools.cache  # noqa: B019  (lives as long as the plan)
    def peak(self, batch_size: int, num_tokens: int, trains: bool = False, checkpointing: bool = False) -> int:
        """Return the peak of the language model for sequences of `num_tokens`, images included."""
        decoder, width = self.network.get_decoder(), self.network.config.get_text_config().hidden_size
        getattr(self.network, f"activation_checkpointing_{'enable' if checkpointing else 'disable'}")()
        with self.mode, as_in_training(self.dtype, trains):
            embeds = torch.empty(batch_size, num_tokens, width, dtype=self.dtype, requires_grad=trains)
            model = self.model.train() if trains else None
            return measure_peak(lambda: decoder(inputs_embeds=embeds, use_cache=False).last_hidden_state, model)

    def setting(self) -> Setting:
        """Return the setting of the run."""
        args = self.args
        return Setting(
            args.per_device_train_batch_size, args.gradient_checkpointing, self.quantization, serves_judge=True,
            zero_stage=zero_stage(args), num_processes=args.world_size,
        )  # fmt: skip

    def phases(self, setting: Setting) -> list[Phase]:
        """Return the phases of a run."""
        frozen = weights_bytes(self.model, False, setting.quantization)
        element_size = _FLOAT32 if setting.zero_stage is None else 2
        always, adds = training_parts(frozen, self.num_trained, element_size, setting)
        checkpointing, count = setting.gradient_checkpointing, self.num_tokens
        trained = affine(lambda size: self.peak(size, count, True, checkpointing), setting.batch_size)
        evaluated = affine(lambda size: self.peak(size, count), self.args.per_device_eval_batch_size)
        return [
            Phase("load", {}, {"weights": weights_bytes(self.network)}),
            Phase("train", {**always, **adds, "activations": trained}, {}),
            Phase("evaluate", {**always, "activations": evaluated}, {}),
        ]


class ImagePlan:
    """Memory of a run of PaCo-GRPO, DiffusionNFT or AWM, for the row with the largest images and the longest prompt."""

    # Prompts are read by the real tokenizers and by text encoders that return zeros, and the pipeline itself makes the
    # transformer's arguments. The transformer, its backward and the VAE run on tensors without data.

    def __init__(
        self, model: str, args: Any, peft_config: LoraConfig | None, dataset: Dataset,
        judges: Sequence[JudgePlan] = (), reward_bytes: int = 0, **where,
    ):  # fmt: skip
        self.args, self.judges, self.reward_bytes, self.mode = args, judges, reward_bytes, _PlanMode()
        dtype = torch.bfloat16 if args.bf16 else torch.float32
        is_deepspeed = args.deepspeed_plugin is not None
        self.in_training = functools.partial(as_in_training, dtype, not is_deepspeed)
        dtypes = {"default": dtype} | ({"transformer": torch.float32} if not (peft_config or is_deepspeed) else {})
        pipeline_class, parts = build_components(model, dtypes, **where)
        pipeline, transformer = pipeline_class(**parts), parts["transformer"]
        self.pipeline, self.family, self.transformer = pipeline, family_of(pipeline), transformer
        self.signature = inspect.signature(transformer.forward)
        with init_empty_weights():
            keep_dtype_of_norms(pipeline.transformer)
            self.model = prepare_transformer(pipeline, self.family, peft_config, not is_deepspeed)
        self.vae = copy.deepcopy(pipeline.vae)  # without the policy's check of pixels, which reads their values
        for part in (self.model, self.vae, *parts.values()):
            if isinstance(part, nn.Module):
                fake_weights(part, self.mode)
        self.policy = PipelinePolicy(pipeline, self.family, self.model.train(), self.signature)
        if is_deepspeed:
            cast_floating_inputs(self.model, dtype)
        has_reference = args.has_reference and peft_config is None
        self.reference_bytes = sum(p.numel() for p in transformer.parameters()) * dtype.itemsize * has_reference
        self.text_encoders = {name: parts[name] for name in self.family.text_encoders if parts[name] is not None}
        for name, encoder in self.text_encoders.items():
            object.__setattr__(pipeline, name, _ZeroEncoder(encoder))
        guidance = (args.guidance_scale, args.negative_prompt)
        self.negative_prompt = self.family.resolve_negative_prompt(pipeline, *guidance)
        rows = self.rows = PromptRows(dataset, args, "the dataset").measure(pipeline, self.family)
        self.number = max(range(len(rows)), key=lambda i: (math.prod(rows.training_sizes[i]), len(rows.prompts[i])))
        # By `is_full`, the inference size
        self.sizes = rows.training_sizes[self.number], rows.inference_sizes[self.number]
        self.scales, self.size = (args.resolution_scale, 1.0), "{} x {}".format(*self.sizes[0])
        self.channels = self.vae.config.get("latent_channels") or self.vae.config.z_dim
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.num_trained, self.element_size = sum(w.numel() for w in weights), weights[0].element_size()

    @functools.cache  # noqa: B019  (lives as long as the plan)
    def embeddings(self, is_full: bool) -> dict[str, torch.Tensor]:
        """Encode the prompt and the negative prompt: zeros of the real shapes, batch dimension 1."""
        images = self.rows.images(self.number) if self.family.prompt_sees_images else []
        where = (torch.device("cpu"), images, self.scales[is_full])
        found = dict(self.family.encode_prompt(self.pipeline, self.rows.prompts[self.number], *where))
        if self.negative_prompt is not None:
            negative = self.family.encode_prompt(self.pipeline, self.negative_prompt, *where)
            found |= {f"negative_{name}": tensor for name, tensor in negative.items()}
        return found

    @functools.cache  # noqa: B019
    def calls(self, batch_size: int, is_full: bool = False) -> list[dict]:
        """Return the arguments of the transformer's calls in a step, as tensors without data."""
        recorded: list[dict] = []
        expected = self.family.max_calls if self.negative_prompt is not None else 1

        def record(module: nn.Module, args: tuple, kwargs: dict) -> None:
            recorded.append(dict(self.signature.bind(*args, **kwargs).arguments))
            if len(recorded) == expected:
                raise _TransformerReachedError

        sources = []
        for image in self.rows.images(self.number):
            prepared = self.family.prepare_image(self.pipeline, image, self.scales[is_full])
            pixels = self.family.image_pixels(self.pipeline, prepared).to(self.vae.dtype)
            with self.mode:
                latents = self.vae.encode(self.mode.from_tensor(pixels)).latent_dist.mode()
            sources.append(EncodedImage(prepared, torch.zeros(latents.shape)))
        arguments = {n: t.expand(batch_size, *t.shape[1:]) for n, t in self.embeddings(is_full).items()}
        arguments = {n: t.float() if t.is_floating_point() else t for n, t in arguments.items()}
        keys: list[tuple[int, ...]] = [(0, image) for image in range(batch_size)]
        handle = self.model.register_forward_pre_hook(record, with_kwargs=True, prepend=True)
        try:
            steps, scale = self.args.num_inference_steps, self.args.guidance_scale
            with self.in_training():
                self.policy.generate(arguments, *self.sizes[is_full], steps, scale, keys, sources=sources)
        except _TransformerReachedError:
            pass
        finally:
            handle.remove()
        # Qwen-Image-2.1's transformer reads the values of its mask
        faked = lambda tensor: tensor if tensor.dtype == torch.bool else self.mode.from_tensor(tensor)  # noqa: E731
        return tree_map_only(torch.Tensor, faked, recorded)

    @functools.cache  # noqa: B019
    def encoding(self) -> int:
        """Return the peak of the text encoders for the longest prompt they have seen."""
        peaks = [0]
        for name, encoder in self.text_encoders.items():
            count, config = getattr(self.pipeline, name).num_tokens, encoder.config
            with self.mode:
                inputs = {"input_ids": torch.zeros(1, count, dtype=torch.long)}
                if hasattr(config, "vision_config"):  # whose images become tokens of the language model
                    width = config.get_text_config().hidden_size
                    inputs = {"inputs_embeds": torch.empty(1, count, width, dtype=encoder.dtype), "use_cache": False}
                    encoder = encoder.get_decoder()
                peaks.append(measure_peak(functools.partial(encoder, **inputs)))
        return max(peaks)

    @functools.cache  # noqa: B019
    def peak(
        self, kind: str, batch_size: int, is_full: bool = False, flag: bool = False, quantization: str | None = None
    ) -> int:
        """Return the peak of "training" (`flag`: checkpointing), "generation" or "decoding" (`flag`: tiled)."""
        if kind == "decoding":
            sides = [side // self.pipeline.vae_scale_factor for side in self.sizes[is_full]]
            frames = [1] if "z_dim" in self.vae.config else []  # of a video
            (self.vae.enable_tiling if flag else self.vae.disable_tiling)()
            with self.mode, self.in_training():
                latents = torch.empty(batch_size, self.channels, *frames, *sides, dtype=self.vae.dtype)
                return measure_peak(lambda: self.vae.decode(latents, return_dict=False))
        calls, is_training = self.calls(batch_size, is_full), kind == "training"
        checkpoints = is_training and flag
        getattr(self.transformer, f"{'enable' if checkpoints else 'disable'}_gradient_checkpointing")()
        with self.mode, self.in_training(), dequantizing(self.model, quantization):
            forward = lambda: [self.model(**dict(call))[0] for call in calls]  # noqa: E731
            return measure_peak(forward, self.model if is_training else None)

    @functools.cache  # noqa: B019
    def frozen_bytes(self, quantization: str | None) -> tuple[int, int]:
        """Count the frozen weights of the transformer and of the text encoders."""
        encoders = [weights_bytes(each, False, quantization) for each in self.text_encoders.values()]
        return weights_bytes(self.model, False, quantization), sum(encoders)

    def setting(self) -> Setting:
        """Return the setting of the run."""
        args, layout = self.args, self.args.round_plan
        names = ("offload_embeddings", "offload_rewards", "ema_offload", "vae_tiling")
        return Setting(
            layout.batch_size, args.activation_checkpointing, getattr(args, "quantization", None),
            **{name: getattr(args, name) for name in names}, serves_judge=not self.judges,
            zero_stage=zero_stage(args), num_processes=layout.num_processes,
        )  # fmt: skip

    def phases(self, setting: Setting, is_full: bool = False) -> list[Phase]:
        """Return the phases of a run; `is_full` trains at the inference size."""
        args, layout, tiled = self.args, self.args.round_plan, setting.vae_tiling
        is_nft, has_old_policy = hasattr(args, "nft_beta"), getattr(args, "keeps_old_policy", False)  # another average
        averages = (args.ema_decay is not None) + has_old_policy
        frozen, encoders = self.frozen_bytes(setting.quantization)
        always, adds = training_parts(frozen, self.num_trained, self.element_size, setting, averages)
        vae, stage3 = weights_bytes(self.vae), setting.num_processes if setting.zero_stage == 3 else 1
        always["reference"] = self.reference_bytes // stage3
        judges = () if setting.serves_judge else self.judges
        judged = sum(weights_bytes(judge.network, False, judge.quantization) for judge in judges)
        rewards = self.reward_bytes + judged
        always["rewards"] = 0 if setting.offload_rewards else rewards

        # A round: float32 latents of each image and step, and embeddings, which images of a prompt share unless batches
        # cross prompts. With source images the transformer's input is kept as well; in DiffusionNFT and AWM an image's two
        # latents are those of all its times, each of which has an input, a target and a velocity.
        images = layout.micro_batches_per_process * layout.batch_size
        crosses_prompts = layout.num_generations % layout.rollout_batch_size != 0
        prompts = images if crosses_prompts else min(layout.num_prompts, layout.micro_batches_per_process)
        prompt = sum(tensor.numel() for tensor in self.embeddings(is_full).values())
        latent = math.prod(side // self.pipeline.vae_scale_factor for side in self.sizes[is_full]) * self.channels
        once, kept = (2, 3) if is_nft else (0, 3)
        kept += 2 * bool(self.rows.sources)
        kept += has_old_policy and args.loss_type == "awm"  # whose velocity is kept besides that of the rollout
        embeddings = _FLOAT32 * prompts * prompt
        always["round"] = _FLOAT32 * (once + kept * layout.num_trained_steps) * images * latent
        always["round"] += 0 if setting.offload_embeddings else embeddings

        # bitsandbytes dequantizes again in the backward, so that no copies of NF4's weights are kept
        copied = None if setting.quantization == "nf4" else setting.quantization

        def allocated(kind: str, count: int, is_full: bool = is_full, flag: bool = False) -> int:
            quantization = None if kind == "decoding" else copied
            return affine(lambda size: self.peak(kind, size, is_full, flag, quantization), count)

        batch, evaluated = setting.batch_size * layout.num_merged_batches, args.per_device_eval_batch_size
        step, decode = allocated("generation", batch), allocated("decoding", batch, flag=tiled)
        full = max(allocated("generation", evaluated, True), allocated("decoding", evaluated, True, tiled))
        # A branch takes one row where only its stochastic step is trained
        shared = args.branch_size if layout.num_trained_steps == 1 else 1
        trained = allocated("training", -(-setting.batch_size // shared), flag=setting.gradient_checkpointing)
        count = judge_tokens(math.prod(self.sizes[is_full]))
        scored = max((judge.peak(8, count) for judge in judges), default=0)
        is_gathered = stage3 > 1 and args.ds3_gather_for_generation
        gathered = frozen + self.element_size * self.num_trained if is_gathered else 0
        rollout = {**always, "gathered weights": gathered, "VAE": vae}
        # Rewards are computed while the next images are generated; offloaded ones visit after the last
        visits, judging = setting.offload_rewards, {"activations of the judge": scored}
        score = {**always, "rewards": rewards} if visits else {**rollout, "activations": max(step, decode)}
        # Weights come to the device after the prompts are encoded, except those that bitsandbytes quantizes there
        encoding = {"text encoders": encoders, "activations": self.encoding()}
        encoding["frozen weights"] = frozen if setting.quantization == "nf4" else 0
        encoding["rewards"] = 0 if visits else judged  # CLIP comes with its first image
        host = {
            "text encoders": self.frozen_bytes(None)[1],
            "VAE": vae,
            "average": averages * _FLOAT32 * self.num_trained // stage3 if setting.ema_offload else 0,
            "round": embeddings if setting.offload_embeddings else 0,
            "rewards": rewards if visits else 0,
        }
        if not getattr(args, "embeddings_dir", None):
            size = sum(tensor.nbytes for tensor in self.embeddings(is_full).values())
            host["embeddings"] = len(set(self.rows.prompts)) * size // layout.num_processes
        loaded = {**host, "transformer": weights_bytes(self.model)}
        return [
            Phase("load", {}, loaded),
            Phase("encode", encoding, loaded),
            Phase("generate", {**rollout, "activations": step}, host),
            Phase("decode", {**rollout, "activations": decode}, host),
            Phase("score", {**score, **judging}, host),
            Phase("train", {**always, **adds, "activations": trained}, host),
            Phase("evaluate", {**rollout, "activations": full, **({} if visits else judging)}, host),
        ]


def changes_of(plan: "ImagePlan | JudgePlan", setting: Setting) -> dict[str, dict[str, Any]]:
    """Return the options that take less memory, the cheapest first, with what they change in a setting."""
    is_judge, half = isinstance(plan, JudgePlan), max(setting.batch_size // 2, 1)
    names = () if is_judge else ("vae_tiling", "ema_offload", "offload_embeddings", "offload_rewards")
    changes: dict[str, dict[str, Any]] = {f"`--{name} True`": {name: True} for name in names}
    several = isinstance(plan, ImagePlan) and len(plan.judges) > 1
    served = "judges on another GPU (`--judge_url`, `--eval_judge_url`)"
    changes[served if several else "a judge on another GPU (`--judge_url`)"] = {"serves_judge": True}
    sizes = [size for size in (half, 1) if size % getattr(plan.args, "branch_size", 1) == 0]
    changes |= {f"`--per_device_train_batch_size {size}`": {"batch_size": size} for size in sizes}
    changes["`--gradient_checkpointing True`"] = {"gradient_checkpointing": True}
    if setting.zero_stage is None and isinstance(plan.model, PeftModel):
        names = ("nf4",) if getattr(plan.args, "compile_repeated_blocks", False) else ("int8", "nf4")
        texts = {name: f"`--quantization {name}`" for name in names}
        if is_judge:
            instead = "" if setting.quantization is None else " --load_in_8bit False"
            texts = {"nf4": f"`--load_in_4bit True{instead}`"}
        changes |= {text: {"quantization": name} for name, text in texts.items()}
    if setting.quantization is None:
        changes["ZeRO-3 on eight GPUs (`zero3.yaml`)"] = {"zero_stage": 3, "num_processes": 8}
    return {text: new for text, new in changes.items() if replace(setting, **new) != setting}


def zero_stage(args: Any) -> int | None:
    """Return the stage of DeepSpeed's ZeRO, `None` without DeepSpeed."""
    return None if args.deepspeed_plugin is None else args.deepspeed_plugin.zero_stage


def judge_tokens(pixels: int) -> int:
    """Count the tokens of a pair for a Qwen2.5-VL: one for 28 x 28 pixels of two images, and 512 of text."""
    return 2 * pixels // 28**2 + 512


def smallest_change(plan: ImagePlan | JudgePlan, setting: Setting, limit: float) -> list[str] | None:
    """Return the fewest changes that make a plan fit into `limit` bytes; `None` if none do."""
    changes = changes_of(plan, setting)
    for count in range(1, len(changes) + 1):
        for texts in itertools.combinations(changes, count):
            new = [item for text in texts for item in changes[text].items()]
            # Not two values of one setting, and DeepSpeed takes no quantized weights
            is_possible = len(dict(new)) == len(new) and not {"quantization", "zero_stage"} <= dict(new).keys()
            if is_possible and peak(plan.phases(replace(setting, **dict(new)))) <= limit:
                return list(texts)
    return None


def largest_batch(phases: Callable[[Setting], list[Phase]], setting: Setting, limit: float) -> int:
    """Return the largest micro-batch that fits into `limit` bytes, a power of two; 0 if none does."""
    size = 1
    while peak(phases(replace(setting, batch_size=size))) <= limit and size <= 1024:
        size *= 2
    return size // 2


def judge_plan(script_args: reward.ScriptArguments, args: PaCoRewardConfig) -> JudgePlan:
    """Plan the memory of the training of a judge."""
    model = script_args.model_name_or_path
    peft_config = LoraConfig(r=script_args.lora_r, target_modules=script_args.lora_target_modules)
    peft_config = complete_peft_config(peft_config, model, None, args.trust_remote_code)
    quantization = "nf4" if script_args.load_in_4bit else "int8" if script_args.load_in_8bit else None
    return JudgePlan(model, args, peft_config, quantization)


def image_plan(script_args: ScriptArguments, args: PaCoGRPOConfig, dataset: Dataset) -> ImagePlan:
    """Plan the memory of a run of PaCo-GRPO, DiffusionNFT or AWM."""
    peft_config = get_peft_config(script_args)
    is_copied = isinstance(peft_config, str) and args.has_reference and args.reference == "initial"
    if isinstance(peft_config, str):
        peft_config = read_peft_config(peft_config, script_args.model_name_or_path, args.model_init_kwargs)
        peft_config.inference_mode = False
    init, hub = args.model_init_kwargs or {}, ("revision", "cache_dir", "token")
    where = {name: init[name] for name in hub if name in init}
    names = [model for model, url in judges_of(script_args) if url is None]
    plans = {name: _plan_reward_judge(name, script_args.judge_quantization) for name in set(names)}
    judges = [plans[name] for name in names]
    clip_bytes, rewards = 0, {*script_args.rewards, *(script_args.eval_rewards or ())}
    if count := len(rewards & {"clip_t", "clip_i"}):
        with init_empty_weights():
            clip_bytes = count * weights_bytes(CLIPModel(CLIPConfig.from_pretrained(script_args.clip_model)))
    plan = ImagePlan(script_args.model_name_or_path, args, peft_config, dataset, judges, clip_bytes, **where)
    if is_copied:  # the adapter `ref`
        plan.reference_bytes = plan.element_size * plan.num_trained
    return plan


def _plan_reward_judge(name: str, quantization: str | None) -> JudgePlan:
    if find_model_file(name, "adapter_config.json") is not None:
        name = PeftConfig.from_pretrained(name).base_model_name_or_path
    # A `PaCoRewardConfig` would reset the device of the trainer that earlier checks have made
    return JudgePlan(name, SimpleNamespace(bf16=True, max_pixels=None, max_length=None), None, quantization)


def format_size(num_bytes: int) -> str:
    """Format a number of bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"
