# SPDX-License-Identifier: Apache-2.0
"""Load a pipeline, freeze it, and add a trainable adapter or make its transformer trainable."""

import copy
import inspect
import json
import logging
import os
import re
import warnings
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from accelerate.utils import extract_model_from_parallel, is_compiled_module
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from diffusers.configuration_utils import FrozenDict
from diffusers.hooks import apply_layerwise_casting
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN
from diffusers.models import attention_dispatch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, OfflineModeIsEnabled
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors import safe_open
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from trl import ModelConfig

from ..utils.deepspeed import without_zero3_init
from ..utils.images import reading
from ..utils.model_files import check_generates, find_adapter_file, hub_arguments, peft_folder
from ..utils.names import check_adapter_base, check_model_name
from ..utils.quantization import describe_quantization, pipeline_quantization_config
from . import (
    FAMILIES,
    Family,
    FlowMatchSDEScheduler,
    PipelinePolicy,
    cast_floating_inputs,
    check_flow_matching,
    family_of,
)
from .lora_files import convert_lora


logger = logging.getLogger(__name__)

_DEFAULTS = LoraConfig()
# What a saved config has of its adapter's training, and what only mattered until the adapter had weights
_TRAINING_FIELDS = (
    "inference_mode", "task_type", "lora_dropout", "fan_in_fan_out", "qalora_group_size", "ensure_weight_tying",
)  # fmt: skip
_INITIALIZATION_FIELDS = ("init_lora_weights", "eva_config")
# Initial weights that leave the base weights as they are; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change them
_KEEP_BASE = (True, False, "gaussian", "orthogonal", "eva", "mica")
# Settings of adapters with two matrices and a scale for each layer. PEFT's others are for variants, such as DoRA.
_PLAIN_LORA = vars(PeftConfig()).keys() | {
    *("r", "lora_alpha", "lora_dropout", "alpha_pattern", "rank_pattern", "init_lora_weights", "use_rslora"),
    *("target_modules", "exclude_modules", "layers_pattern", "layers_to_transform", "runtime_config"),
}


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


def load_pipeline(
    model: "str | DiffusionPipeline",
    dtype: torch.dtype,
    transformer_dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    quantization: str | None = None,
    family: Family | None = None,
    **model_init_kwargs,
) -> DiffusionPipeline:
    """Load a pipeline, or cast a loaded one, and freeze it; bf16 would lose updates of weights trained themselves."""
    if quantization is not None and (not isinstance(model, str) or "quantization_config" in model_init_kwargs):
        raise ValueError(
            f"`quantization` is {quantization!r}, but the pipeline is loaded, or `model_init_kwargs` has a "
            "`quantization_config`. Use one of them."
        )
    if isinstance(model, str):
        components = check_config(model, model_init_kwargs, family)
        if (config := pipeline_quantization_config(quantization, dtype, components)) is not None:
            model_init_kwargs["quantization_config"] = config
        dtypes = {"transformer": transformer_dtype, "default": dtype}
        options = {"dtype": dtype if transformer_dtype in (None, dtype) else dtypes, "use_safetensors": True}
        # An active ZeRO-3 config would partition the text encoders too, which no engine gathers
        with without_zero3_init():
            pipeline = DiffusionPipeline.from_pretrained(
                model, trust_remote_code=trust_remote_code, **options | model_init_kwargs
            )
    else:
        pipeline = model
        if isinstance(pipeline.name_or_path, Path):  # names in JSON and on cards are strings
            pipeline.register_to_config(_name_or_path=str(pipeline.name_or_path))
    for name, component in pipeline.components.items():
        if is_compiled_module(component):
            setattr(pipeline, name, extract_model_from_parallel(component, keep_torch_compile=False))
            _warn(
                f"`{name}` of the pipeline is used as it was before `torch.compile`, which would compile other kernels with "
                "gradients than without. Set `compile_repeated_blocks` to compile the transformer."
            )
    transformer = getattr(pipeline, "transformer", None)
    if transformer is None:
        raise ValueError(f"{type(pipeline).__name__} has no `transformer`. Pass a flow-matching pipeline with one.")
    if isinstance(transformer, PeftModel) or getattr(transformer, "peft_config", None):
        raise ValueError(
            "The pipeline's transformer already has an adapter. Pass it as `peft_config`, or merge it: "
            "`pipeline.fuse_lora()`, `pipeline.unload_lora_weights()`, and `pipeline.save_pretrained(directory)`, "
            "whose directory is the model."
        )
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            if any(hasattr(parameter, "ds_id") for parameter in component.parameters()):
                raise ValueError(
                    f"`{name}` of the pipeline was loaded after the arguments, so ZeRO-3 has partitioned it. Pass the "
                    "pipeline's Hub id or directory, or load it before."
                )
            component.requires_grad_(False)
            component.eval()
            component_dtype = transformer_dtype if name == "transformer" and transformer_dtype is not None else dtype
            if component.dtype != component_dtype:
                component.to(component_dtype)
    return pipeline


def check_base_weights(pipeline: DiffusionPipeline, skipped: Sequence[str] = ()) -> None:
    """
    Refuse a pipeline that has other weights than the model that it is named after, as after `fuse_lora`: its adapter would
    name that model as its base. Beginnings of weights are compared, where the model's files are on this machine.
    """
    name = pipeline.name_or_path
    folder = name if name and os.path.isdir(name) else None
    if name and folder is None:
        with suppress(OSError, ValueError):  # not in the cache, or no name of the Hub
            folder = snapshot_download(name, local_files_only=True)
    for component, module in pipeline.components.items():
        if folder is None or component in skipped or not isinstance(module, nn.Module):
            continue
        weights = {} if describe_quantization(module) else dict(module.named_parameters())
        for path in sorted(Path(folder, component).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for key in weights.keys() & {*file.keys()}:
                    weight, stored = weights[key].detach(), file.get_slice(key)
                    if list(weight.shape) != (shape := stored.get_shape()) or not shape:
                        continue
                    rows = max(1, 1024 // max(1, weight[0].numel()))
                    # As far as it was rounded from, or by way of, a smaller dtype
                    if not torch.allclose(weight[:rows].float().cpu(), stored[:rows].float(), 2**-6, 1e-6):
                        raise ValueError(
                            f"`{component}` of the pipeline has other weights than '{name}' (`{key}`), which the "
                            "trained model would name as its base. Save it, `pipeline.save_pretrained(directory)`, "
                            "and pass the directory as `model`."
                        )


def store_as_fp8(pipeline: DiffusionPipeline, family: Family, transformer: nn.Module, dtype: torch.dtype) -> None:
    """Store the frozen weights of transformer and text encoders as float8, cast to `dtype` in each forward."""
    # With the adapter in place, which is left out: PEFT would round the first weights of a later one to float8
    transformer.enable_layerwise_casting(torch.float8_e4m3fn, dtype)
    for encoder in (getattr(pipeline, name) for name in family.text_encoders):
        if encoder is not None:
            # Pipelines and T5 cast to the dtype of the first layer and of `wo`; the head may be tied to the embeddings
            kept = (*DEFAULT_SKIP_MODULES_PATTERN, "lm_head", r"\.wo$")
            apply_layerwise_casting(encoder, torch.float8_e4m3fn, dtype, kept, (nn.Embedding, nn.Conv2d))


def pipeline_quantization(pipeline: DiffusionPipeline) -> str | None:
    """Describe how the components of a pipeline are quantized; `None` if none is."""
    named: dict[str, list[str]] = {}
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module) and (how := describe_quantization(component)):
            named.setdefault(how, []).append(name)
    return "; ".join(f"{how} ({', '.join(names)})" for how, names in named.items()) or None


def quantization_text(config: PipelineQuantizationConfig) -> str:
    """Return the settings of a quantization as text."""
    return str({name: value for name, value in vars(config).items() if name != "config_mapping"})  # filled by loading


def read_index(model: str, model_init_kwargs: dict) -> dict:
    """Return a pipeline's index file; refuse one that cannot be read."""
    check_model_name(model)
    try:
        return DiffusionPipeline.load_config(model, **hub_arguments(model_init_kwargs))
    except OSError as error:
        files = ("adapter_config.json", "pytorch_lora_weights.safetensors")
        if any(os.path.isfile(os.path.join(model, name)) for name in files):
            raise ValueError(
                f"'{model}' is an adapter: give it as `--adapter` (`peft_config`), and here its base."
            ) from error
        reason = error.__context__
        if isinstance(reason, LocalEntryNotFoundError):  # diffusers says that the repository lacks the file
            is_offline = isinstance(reason.__cause__, OfflineModeIsEnabled)
            cause = "`HF_HUB_OFFLINE` is set" if is_offline else reason.__cause__
            raise ConnectionError(
                f"The Hub cannot be reached for the model {model} ({cause}), which is not in the cache. Pass a directory, or "
                "download it once: the cache needs no network then, and with `HF_HUB_OFFLINE=1` no waiting."
            ) from error
        if not isinstance(reason, GatedRepoError):
            raise
        raise PermissionError(
            f"The model {model} is gated. Accept its terms on its page, and log in with the same account: `hf auth "
            "login`."
        ) from error


def check_config(model: str, model_init_kwargs: dict, family: Family | None = None) -> dict:
    """Return a pipeline's index file; refuse one that cannot be read or trained before gigabytes are loaded."""
    config = read_index(model, model_init_kwargs)
    name = config["_class_name"]
    if family is None:
        family_of(name if isinstance(name, str) else name[-1])  # of code in the repository: the module and the class
    _, scheduler = config.get("scheduler") or (None, None)
    scheduler_class = getattr(diffusers, scheduler or "", None)  # None for code in the repository
    if scheduler_class is not None:
        check_flow_matching(scheduler_class)
    return config


def load_without_weights(
    model: str, dtypes: dict[str, torch.dtype], encodes: bool = True, **model_init_kwargs: Any
) -> DiffusionPipeline:
    """Load a pipeline whose models are built from their configs, on the meta device; with text encoders if `encodes`."""
    parts: dict[str, Any] = {}
    hub_kwargs = hub_arguments(model_init_kwargs)
    for name, entry in read_index(model, model_init_kwargs).items():
        if name in model_init_kwargs or not encodes and name.startswith(("text_encoder", "tokenizer")):
            parts[name] = model_init_kwargs.get(name)
            continue
        if not isinstance(entry, list | tuple) or entry[0] is None:  # a setting, or a part that is left out
            continue
        kind = getattr(import_module(entry[0]), entry[1])
        if not issubclass(kind, nn.Module):
            continue
        is_diffusers = hasattr(kind, "load_config")
        read = kind.load_config if is_diffusers else kind.config_class.from_pretrained
        config = read(model, subfolder=name, **hub_kwargs)
        with init_empty_weights():
            part = (kind.from_config if is_diffusers else kind)(config)
        if not is_diffusers:
            part.tie_weights()  # in the context each would be a weight of its own
        nn.Module.to(part, dtypes.get(name, dtypes["default"]))  # that of diffusers warns of lists that are empty
        parts[name] = part.requires_grad_(False).eval()
    return DiffusionPipeline.from_pretrained(model, **parts, **hub_kwargs)


def is_buildable(model: "str | DiffusionPipeline", model_init_kwargs: dict, family: Family | None) -> bool:
    """Tell whether a pipeline can be built from configs: one that is named, listed, and has no parts of the caller's own."""
    if not isinstance(model, str) or "custom_pipeline" in model_init_kwargs:
        return False
    has_modules = any(isinstance(value, nn.Module) for value in model_init_kwargs.values())
    return not has_modules and check_config(model, model_init_kwargs, family)["_class_name"] in FAMILIES


def check_trained(pipeline: DiffusionPipeline, family: Family, peft_config: LoraConfig | str | None) -> None:
    """Check scheduler, layers and adapter of a pipeline without weights, as [`make_policy`] would after loading them."""
    with init_empty_weights(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come again with the weights
        FlowMatchSDEScheduler.from_scheduler(pipeline.scheduler)
        prepare_transformer(pipeline, family, peft_config, autocast_adapter_dtype=False)


def base_model_name(model: "str | DiffusionPipeline") -> str:
    """Return the base model's Hub id, the last part of its path, or the class of an unnamed pipeline."""
    name = model if isinstance(model, str) else str(getattr(model, "name_or_path", None) or type(model).__name__)
    return Path(os.path.normpath(name)).name if os.path.exists(name) else name


def read_peft_config(
    peft_config: LoraConfig | str, model: "str | DiffusionPipeline", model_init_kwargs: dict | None = None
) -> LoraConfig:
    """Return the config of a new adapter, or of an existing one for a pipeline."""
    if not isinstance(peft_config, str):
        return peft_config
    return _read_adapter(peft_config, model, **hub_arguments(model_init_kwargs or {}))[0]


def check_image_adapter(adapter: str) -> None:
    """Refuse the adapter of a judge."""
    if (folder := peft_folder(adapter)) is not None:
        check_generates(adapter, folder)


def _read_adapter(
    adapter: str, model: "str | DiffusionPipeline", **hub_arguments: Any
) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Return config and weights of an existing adapter; refuse files that cannot be read, in one sentence."""
    folder = peft_folder(adapter)
    if folder is None:
        return convert_lora(find_adapter_file(adapter), model, **hub_arguments)
    if os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, "adapter_config.json")):
        raise ValueError(
            f"The adapter '{adapter}' has no adapter_config.json beside adapter_model.safetensors, with the scale of "
            "its weights. Name the directory that has both files."
        )
    with reading(f"The adapter '{adapter}'", "Save it again, or name another"):
        config = PeftConfig.from_pretrained(folder)
        config.base_model_name_or_path = config.base_model_name_or_path and os.fspath(config.base_model_name_or_path)
        return config, load_peft_weights(folder, device="cpu")


def _warn(message: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # of the processes of a run, which may not know one another yet
        logger.warning(message)


def _forget_training(config: LoraConfig, has_weights: bool) -> None:
    """Reset fields that only the training of a saved adapter used to PEFT's defaults."""
    names = _TRAINING_FIELDS
    if has_weights and getattr(config, "init_lora_weights", None) in _KEEP_BASE:
        names += _INITIALIZATION_FIELDS
    for name in names:
        setattr(config, name, getattr(_DEFAULTS, name))


def check_peft_config(
    peft_config: LoraConfig | str, model: "str | DiffusionPipeline", model_init_kwargs: dict | None = None
) -> LoraConfig | str:
    """Refuse an adapter that cannot be trained or saved, or is of another model; return it without TRL's defaults."""
    peft_config = os.fspath(peft_config) if isinstance(peft_config, os.PathLike) else peft_config
    if isinstance(peft_config, str):
        check_image_adapter(peft_config)
    adapter, peft_config = peft_config, read_peft_config(peft_config, model, model_init_kwargs)
    if not isinstance(peft_config, LoraConfig) or peft_config.peft_type != PeftType.LORA:  # AdaLoraConfig is one too
        raise TypeError(f"`peft_config` is a {type(peft_config).__name__}; it must be a `peft.LoraConfig`.")
    # TRL's defaults, which cannot be left out, and a saved adapter's config (`LoraConfig.from_pretrained`)
    is_trl = peft_config.task_type == ModelConfig.lora_task_type
    is_trl &= peft_config.lora_dropout in (ModelConfig.lora_dropout, 0)
    if is_trl or isinstance(adapter, str) or peft_config.inference_mode:
        original_config, peft_config = peft_config, copy.deepcopy(peft_config)
        _forget_training(peft_config, has_weights=isinstance(adapter, str))
        dropped = [
            f"`{name}` {getattr(original_config, name)!r}"
            for name in ("task_type", "lora_dropout")
            if getattr(original_config, name)
        ]
        if dropped:
            _warn(f"`peft_config` has {' and '.join(dropped)}, which no image model is trained with: left out.")
    if peft_config.task_type is not None:
        raise TypeError(f"`task_type` is {peft_config.task_type!r}, which is for language models. Leave it out.")
    if peft_config.lora_dropout:
        raise ValueError(
            f"`lora_dropout` is {peft_config.lora_dropout}, with which the replay scores an image with another "
            "network than the one that generated it. Set it to 0."
        )
    check_lora_start(peft_config)
    of, advice = "", "Use the default, {!r}."
    if isinstance(adapter, str):
        of, advice = f" of the adapter '{adapter}'", "Merge it into its model, and train a new adapter on that."
    for name, default in vars(_DEFAULTS).items():
        value = getattr(peft_config, name)
        if name not in _PLAIN_LORA and value and value != default:
            raise ValueError(
                f"`{name}`{of} is {value!r}, but only plain LoRA is trained here: most programs ignore the rest in "
                f"diffusers' format. {advice.format(default)}"
            )
    if isinstance(adapter, str):
        base = model if isinstance(model, str) else getattr(model, "name_or_path", None)
        check_adapter_base(adapter, peft_config.base_model_name_or_path, base)
        return adapter
    return peft_config


def check_attention_backend(name: str, queries: torch.Tensor | None = None) -> None:
    """Refuse a backend that diffusers does not have, that lacks a package, or that cannot be trained with `queries`."""
    names = [backend.value for backend in attention_dispatch.AttentionBackendName if "sage" not in backend.value]
    if name not in names:
        raise ValueError(
            f"`attention_backend` is {name!r}; it must be one of diffusers' with a backward pass: {', '.join(names)}."
        )
    try:
        with attention_dispatch.attention_backend(name):
            if queries is not None:  # (B, L, heads, D), on the device and in the dtype of training
                attention_dispatch.dispatch_attention_fn(queries, queries, queries).sum().backward()
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"`attention_backend` is {name!r}, which cannot be used here: {error}") from error


# Kernels of PyTorch's own attention, by diffusers' names
_SDPA_KERNELS = {
    "_native_flash": SDPBackend.FLASH_ATTENTION,
    "_native_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "_native_cudnn": SDPBackend.CUDNN_ATTENTION,
    "_native_math": SDPBackend.MATH,
}
_preferred_kernel = ExitStack()  # of this process


def _prefer_kernel(kernel: SDPBackend | None) -> None:
    """Prefer a kernel of PyTorch's attention in this process, until another is set; `MATH` is then the only one."""
    # diffusers enables a kernel alone, for the whole process, during each call of attention. A reward that computes on
    # another thread then finds no kernel for its dtype or mask.
    _preferred_kernel.close()
    if kernel is not None:
        fallbacks = [] if kernel is SDPBackend.MATH else [k for k in _SDPA_KERNELS.values() if k is not kernel]
        _preferred_kernel.enter_context(sdpa_kernel([kernel, *fallbacks], set_priority=True))


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
        with attention_dispatch.attention_backend(name):  # restores the default of other models
            transformer.set_attention_backend(name)
    if compile_blocks:
        # diffusers 0.42 names the blocks of Stable Diffusion 3 only here
        transformer._repeated_blocks = transformer._repeated_blocks or transformer._no_split_modules
        # Kernels of an image must not depend on the shapes before it, and torch compiles only 8 by default
        torch.compiler.config.recompile_limit = 256
        transformer.compile_repeated_blocks(dynamic=False)


def prepare_transformer(
    pipeline: DiffusionPipeline,
    family: Family,
    peft_config: LoraConfig | str | None,
    autocast_adapter_dtype: bool,
    copy_adapter: bool = False,
) -> nn.Module:
    """Make all weights trainable, or add a new or saved adapter in place, with `copy_adapter` also frozen as `ref`."""
    transformer = pipeline.transformer
    for name, module in transformer.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(
                f"`{name}` is a dropout layer with p = {module.p}, with which the replay scores an image with another "
                "network than the one that generated it. Set its `p` to 0."
            )
    if any(module._compiled_call_impl is not None for module in transformer.modules()):
        from torch._inductor import config as inductor

        # Fused kernels skip rounding to bf16, and kernels with gradients are fused differently from those without
        inductor.emulate_precision_casts = True

    config = PolicyConfig(transformer.config)
    if peft_config is None:
        transformer.requires_grad_(True)
        model = transformer
        model._internal_dict = config  # the property `config` has no setter
    else:
        unused_layers = family.unused_layers(transformer)
        if isinstance(peft_config, str):
            options = {"autocast_adapter_dtype": autocast_adapter_dtype}
            model = load_transformer_adapter(
                transformer, peft_config, pipeline, unused_layers, is_trainable=True, **options
            )
            if copy_adapter:  # as TRL does
                model.add_adapter("ref", model.peft_config["default"], **options)
                for name, parameter in model.named_parameters():
                    if ".default." in name:
                        model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)
                model.set_requires_grad("ref", requires_grad=False)
        else:
            adapter_config: Any = copy.deepcopy(peft_config)
            check_target_modules(adapter_config, transformer)
            if adapter_config.target_modules is None:
                adapter_config.target_modules = list(family.lora_target_modules)
            _exclude(adapter_config, unused_layers)
            model = get_peft_model(transformer, adapter_config, autocast_adapter_dtype=autocast_adapter_dtype)
        model.config = config
        # PEFT leaves the base model's name empty for diffusers models
        model.peft_config[model.active_adapter].base_model_name_or_path = pipeline.name_or_path

    # Trainer calls another name than diffusers'. No layer is random, and the state of the generators would be copied from
    # the device for each block
    checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    model.activation_checkpointing_enable = lambda **kwargs: transformer.enable_gradient_checkpointing(checkpointed)
    return model


def wrap_pipeline(
    pipeline: DiffusionPipeline, family: Family, model: nn.Module, dtype: torch.dtype, is_deepspeed: bool = False
) -> PipelinePolicy:
    """Make a policy of a pipeline and its transformer, with an adapter or without."""
    # DDP would broadcast frozen weights, which every process reads from the same files
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
    transformer = model.get_base_model() if isinstance(model, PeftModel) else model
    policy = PipelinePolicy(pipeline, family, model, inspect.signature(transformer.forward))
    if dtype != torch.float32:
        # The pipeline's latents are float32. Autocast casts them for the transformer, except with DeepSpeed, but not for
        # the VAE.
        if is_deepspeed:
            cast_floating_inputs(model, dtype)
        for name in ("post_quant_conv", "decoder"):
            module = getattr(pipeline.vae, name, None)
            if module is not None:
                cast_floating_inputs(module, dtype)
    return policy


def make_policy(
    pipeline: DiffusionPipeline,
    family: Family,
    peft_config: LoraConfig | str | None,
    dtype: torch.dtype,
    is_deepspeed: bool,
    reference: str | None,
    attention_backend: str | None = None,
    compile_blocks: bool = False,
    quantization: str | None = None,
) -> tuple[PipelinePolicy, nn.Module | None]:
    """Build the policy, and without an adapter a copy of the transformer as the `reference`, if there is one."""
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
    policy = wrap_pipeline(pipeline, family, model, dtype, is_deepspeed)
    if ref_model is not None and is_deepspeed:
        cast_floating_inputs(ref_model, dtype)
    return policy, ref_model


def _exclude(config: LoraConfig, layers: Sequence[str]) -> None:
    """Exclude layers in an adapter's config, which is saved with it. PEFT warns of names that match nothing."""
    is_all = config.target_modules == "all-linear"
    layers = [name for name in layers if is_all or check_target_module_exists(config, name)]
    if layers and isinstance(config.exclude_modules, str):
        config.exclude_modules = "|".join([f"(?:{config.exclude_modules})", *map(re.escape, layers)])
    elif layers:
        config.exclude_modules = {*(config.exclude_modules or ()), *layers}


def load_transformer_adapter(
    transformer: nn.Module,
    adapter: str,
    base: "str | DiffusionPipeline",
    unused_layers: Sequence[str] = (),
    is_trainable: bool = False,
    **kwargs: Any,
) -> PeftModel:
    """Put an existing adapter on a transformer, in place, except on `unused_layers`; refuse one of another base."""
    config, weights = _read_adapter(adapter, base)
    _exclude(config, unused_layers)
    _forget_training(config, has_weights=True)
    config.inference_mode = not is_trainable
    try:
        model = PeftModel(transformer, config, **kwargs)
        if not is_trainable:
            model.eval()
        set_peft_model_state_dict(model, weights)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of many kinds: PEFT trusts a config
        reason = f"{type(error).__name__}: {error}"[:400]
        raise ValueError(f"The adapter '{adapter}' does not fit {base_model_name(base)}: {reason}") from error
    # PEFT drops weights without a layer, and initializes layers without weights
    left_out = tuple(f"base_model.model.{layer}.lora_" for layer in unused_layers)
    saved = {name for name in weights if not name.startswith(left_out)}
    expected = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    if saved != expected:
        examples, misplaced = (
            ", ".join(sorted(saved ^ expected)[:3]),
            f"{len(saved - expected)} of its {len(saved)} weights",
        )
        raise ValueError(
            f"The adapter '{adapter}' does not fit {base_model_name(base)}: {misplaced} have no place, and "
            f"{len(expected - saved)} places have no weight ({examples}, ...)."
        )
    return model


def check_lora_start(peft_config: LoraConfig) -> None:
    """Refuse a scale of 0, with which no weight has a gradient, and initial weights that also change the base weights."""
    if peft_config.lora_alpha == 0:
        raise ValueError("`lora_alpha` is 0: nothing is trained. Use 2 * r (paper).")
    if peft_config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        raise ValueError(
            f"`init_lora_weights` is {peft_config.init_lora_weights!r}, for which PEFT changes the base weights or "
            "asks for data: the adapter would not fit the model itself. Use True or 'gaussian'."
        )


def check_target_modules(peft_config: LoraConfig, model: nn.Module) -> None:
    """Refuse names in `target_modules` that no layer has: PEFT trains the others, without a word."""
    targets = peft_config.target_modules
    if targets is None or isinstance(targets, str):  # a pattern, which PEFT refuses if nothing matches
        return
    paths = [name.split(".") for name, _ in model.named_modules()]
    for target in sorted(map(str, targets)):
        ends = {".".join(path[-target.count(".") - 1 :]) for path in paths}
        if target not in ends:
            hint = [f" Did you mean {' or '.join(names)}?" for names in [get_close_matches(target, ends)] if names]
            raise ValueError(
                f"`target_modules` has {target!r}, which no layer of {type(model).__name__} is named.{''.join(hint)} "
                "A pattern, or 'all-linear', is a string and not in a list."
            )
