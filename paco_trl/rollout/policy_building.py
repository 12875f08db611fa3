# SPDX-License-Identifier: Apache-2.0
"""Build a policy from a frozen pipeline: with a trainable adapter, or with all weights of its transformer trained."""

import copy
import inspect
import json
import warnings
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers import DiffusionPipeline
from diffusers.configuration_utils import FrozenDict
from diffusers.hooks import apply_layerwise_casting
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from . import Family, FlowMatchSDEScheduler, RecordingPipeline, cast_floating_inputs
from .adapters import SavedAdapter, check_target_modules, exclude_layers, load_transformer_adapter
from .kernels import round_like_eager, set_kernels


class PolicyConfig(FrozenDict):
    """Config of a diffusers transformer with the methods of a transformers config that Trainer's callbacks call."""

    model_type = "diffusers"

    def __getattr__(self, name: str) -> Any:
        # transformers computes the `auto` buckets of a DeepSpeed config from the width of the transformer
        if name == "hidden_size" and "dim" in self:  # Z-Image
            return self["dim"]
        if name == "hidden_size" and {"num_attention_heads", "attention_head_dim"} <= self.keys():
            return self["num_attention_heads"] * self["attention_head_dim"]
        raise AttributeError(f"The transformer's config has no `{name}`.")

    def to_dict(self) -> dict:
        """Return the public entries; the private ones hold paths of the machine the model was loaded on."""
        return {name: value for name, value in self.items() if not name.startswith("_")}

    def to_json_string(self) -> str:
        """Return the public entries as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, default=str) + "\n"


def build_recording_pipeline(
    pipeline: DiffusionPipeline,
    family: Family,
    peft_config: LoraConfig | SavedAdapter | None,
    dtype: torch.dtype,
    is_deepspeed: bool,
    reference: str | None,
    attention_backend: str | None = None,
    compile_blocks: bool = False,
    quantization: str | None = None,
) -> tuple[RecordingPipeline, nn.Module | None]:
    """Build the recording pipeline and, without an adapter, a frozen copy of the transformer as the `reference`."""
    ref_model = None
    if peft_config is None and reference is not None:
        ref_model = copy.deepcopy(pipeline.transformer)
        if ref_model.dtype != dtype:
            ref_model.to(dtype)
    transformer = pipeline.transformer
    for network in filter(None, (transformer, ref_model)):
        set_kernels(network, attention_backend, compile_blocks)
    # DeepSpeed keeps one dtype and its own float32 masters: mixed dtypes fail in ZeRO-3 (trl#6089)
    model = prepare_transformer(pipeline, family, peft_config, not is_deepspeed, copy_adapter=reference == "initial")
    if quantization == "fp8_storage":
        store_as_fp8(pipeline, family, transformer, dtype)
    recording_pipeline = wrap_pipeline(pipeline, family, model, dtype, is_deepspeed)
    if ref_model is not None and is_deepspeed:
        cast_floating_inputs(ref_model, dtype)
    return recording_pipeline, ref_model


def prepare_transformer(
    pipeline: DiffusionPipeline,
    family: Family,
    peft_config: LoraConfig | SavedAdapter | None,
    autocast_adapter_dtype: bool,
    copy_adapter: bool = False,
) -> nn.Module:
    """
    Make all weights trainable, or add a new or saved adapter in place, with `copy_adapter` also a frozen copy `ref`.
    """
    transformer = pipeline.transformer
    _check_no_dropout(transformer)
    round_like_eager(transformer)
    if peft_config is None:
        model = transformer.requires_grad_(True)
    else:
        model = _add_adapter(pipeline, family, peft_config, autocast_adapter_dtype)
        if copy_adapter:
            _copy_adapter(model, autocast_adapter_dtype)
    _set_config(model, PolicyConfig(transformer.config))
    _rename_checkpointing(model, transformer)
    return model


def _set_config(model: nn.Module, config: PolicyConfig) -> None:
    """Give a trained model the config that Trainer's callbacks can read."""
    if isinstance(model, PeftModel):
        model.config = config
    else:
        model._internal_dict = config  # the property `config` has no setter


def _rename_checkpointing(model: nn.Module, transformer: nn.Module) -> None:
    """Let Trainer enable gradient checkpointing by a method that has another name in diffusers."""
    # Layers use no random numbers, and saving the random state would copy it from the device for each block
    checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    model.activation_checkpointing_enable = lambda **kwargs: transformer.enable_gradient_checkpointing(checkpointed)


def _check_no_dropout(transformer: nn.Module) -> None:
    for name, module in transformer.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(
                f"`{name}` is a dropout layer with p = {module.p}, with which the replay scores an image with another "
                "network than the one that generated it. Set its `p` to 0."
            )


def _add_adapter(
    pipeline: DiffusionPipeline, family: Family, peft_config: LoraConfig | SavedAdapter, autocast_adapter_dtype: bool
) -> PeftModel:
    """Put a new or a saved adapter on a transformer, in place, except on layers that reach no prediction."""
    transformer = pipeline.transformer
    options = {"autocast_adapter_dtype": autocast_adapter_dtype}
    unused_layers = family.unused_layers(transformer)
    if isinstance(peft_config, SavedAdapter):
        model = load_transformer_adapter(transformer, peft_config, unused_layers, is_trainable=True, **options)
    else:
        config: Any = copy.deepcopy(peft_config)
        check_target_modules(config, transformer)
        if config.target_modules is None:
            config.target_modules = list(family.lora_target_modules)
        exclude_layers(config, unused_layers)
        model = get_peft_model(transformer, config, **options)
    # PEFT leaves the base model's name empty for diffusers models
    model.peft_config[model.active_adapter].base_model_name_or_path = pipeline.name_or_path
    return model


def _copy_adapter(model: PeftModel, autocast_adapter_dtype: bool) -> None:
    """Add a frozen copy `ref` of the adapter, as TRL does."""
    model.add_adapter("ref", model.peft_config["default"], autocast_adapter_dtype=autocast_adapter_dtype)
    for name, parameter in model.named_parameters():
        if ".default." in name:
            model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)
    model.set_requires_grad("ref", requires_grad=False)


def wrap_pipeline(
    pipeline: DiffusionPipeline, family: Family, model: nn.Module, dtype: torch.dtype, is_deepspeed: bool = False
) -> RecordingPipeline:
    """Wrap a pipeline and its transformer, with an adapter or without, for recording."""
    # DDP would broadcast frozen weights, although every process reads them from the same files
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
    transformer = model.get_base_model() if isinstance(model, PeftModel) else model
    recording_pipeline = RecordingPipeline(pipeline, family, model, inspect.signature(transformer.forward))
    if dtype != torch.float32:
        # The pipeline's latents are float32. Autocast casts them for the transformer, except with DeepSpeed, but not
        # for the VAE.
        if is_deepspeed:
            cast_floating_inputs(model, dtype)
        for name in ("post_quant_conv", "decoder"):
            module = getattr(pipeline.vae, name, None)
            if module is not None:
                cast_floating_inputs(module, dtype)
    return recording_pipeline


def store_as_fp8(pipeline: DiffusionPipeline, family: Family, transformer: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen weights of transformer and text encoders as float8, cast to `dtype` in each forward."""
    # The adapter is already in place, and left out here: PEFT would round the first weights of a later one to float8
    transformer.enable_layerwise_casting(torch.float8_e4m3fn, dtype)
    for encoder in (getattr(pipeline, name) for name in family.text_encoders):
        if encoder is not None:
            # Pipelines and T5 cast to the dtype of the first layer and of `wo`; the head may be tied to the embeddings
            kept = (*DEFAULT_SKIP_MODULES_PATTERN, "lm_head", r"\.wo$")
            apply_layerwise_casting(encoder, torch.float8_e4m3fn, dtype, kept, (nn.Embedding, nn.Conv2d))


def check_trained(pipeline: DiffusionPipeline, family: Family, peft_config: LoraConfig | SavedAdapter | None) -> None:
    """
    Check scheduler, layers and adapter of a pipeline without weights, as [`build_recording_pipeline`] does after
    loading.
    """
    with init_empty_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same warnings come when the weights are loaded
        FlowMatchSDEScheduler.from_scheduler(pipeline.scheduler)
        prepare_transformer(pipeline, family, peft_config, autocast_adapter_dtype=False)
