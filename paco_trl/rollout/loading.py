# SPDX-License-Identifier: Apache-2.0
"""From a Hub id, a folder or a pipeline to a frozen pipeline with a trainable adapter, or a trainable transformer."""

import copy
import inspect
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.configuration_utils import FrozenDict
from peft import LoraConfig, PeftConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict, load_peft_weights
from torch import nn
from transformers.utils import cached_file

from ..utils.deepspeed import without_zero3_init
from ..utils.names import check_adapter_base
from . import Family, PipelinePolicy, cast_floating_inputs, check_flow_matching, family_of


# Settings of an adapter that is two matrices and a scale for each layer. The rest of PEFT's are for variants, such as
# DoRA, and for the first values of the matrices.
_PLAIN_LORA = {
    *vars(PeftConfig()),
    "alpha_pattern",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "r",
    "rank_pattern",
    "runtime_config",
    "target_modules",
    "use_rslora",
}


class PolicyConfig(FrozenDict):
    """Config of a diffusers transformer, with the methods of a transformers config that Trainer's callbacks call."""

    model_type = "diffusers"

    def __getattr__(self, name: str) -> int:
        # Width of the transformer, from which transformers fills the `auto` buckets of a DeepSpeed config. Only asked
        # for where the config has no entry of that name.
        if name == "hidden_size" and "dim" in self:  # Z-Image
            return self["dim"]
        if name == "hidden_size" and {"num_attention_heads", "attention_head_dim"} <= self.keys():
            return self["num_attention_heads"] * self["attention_head_dim"]
        raise AttributeError(f"The transformer's config has no `{name}`.")

    def to_dict(self) -> dict:
        """Public entries; the private ones hold paths of the machine the model was loaded on."""
        return {name: value for name, value in self.items() if not name.startswith("_")}

    def to_json_string(self) -> str:
        """The public entries as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True, default=str) + "\n"


def load_pipeline(
    model: "str | DiffusionPipeline",
    dtype: torch.dtype,
    transformer_dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    **model_init_kwargs,
) -> DiffusionPipeline:
    """
    Loads a pipeline on the CPU, frozen, in the compute dtype.

    Args:
        model (`str` or [`~diffusers.DiffusionPipeline`]):
            Hub id, folder, or a pipeline that is loaded already.
        dtype (`torch.dtype`):
            Compute dtype.
        transformer_dtype (`torch.dtype`, *optional*):
            Dtype of the transformer. If `None`, the compute dtype. Weights that are trained themselves are float32:
            in bf16 most updates are smaller than half a unit in the last place.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to run code that comes with the model.
        **model_init_kwargs:
            Further arguments of [`~diffusers.DiffusionPipeline.from_pretrained`].

    Returns:
        [`~diffusers.DiffusionPipeline`].

    Raises:
        TypeError: `model` is neither.
        ValueError: there is no page for the pipeline's family, its scheduler is not flow matching, its transformer
            already has an adapter, or its weights were partitioned when they were loaded.
    """
    if isinstance(model, str):
        _check_config(model, model_init_kwargs)
        is_uniform = transformer_dtype in (None, dtype)
        model_init_kwargs.setdefault(
            "dtype", dtype if is_uniform else {"transformer": transformer_dtype, "default": dtype}
        )
        model_init_kwargs.setdefault("use_safetensors", True)
        # A live ZeRO-3 config would partition the text encoders too, which no engine ever gathers
        with without_zero3_init():
            pipeline = DiffusionPipeline.from_pretrained(
                model, trust_remote_code=trust_remote_code, **model_init_kwargs
            )
    elif isinstance(model, DiffusionPipeline):
        pipeline = model
    else:
        raise TypeError(
            f"`model` must be a Hub id, a folder or a `DiffusionPipeline`, got {type(model).__name__}. To train a bare "
            "transformer, put it into its pipeline."
        )
    transformer = getattr(pipeline, "transformer", None)
    if transformer is None:
        raise ValueError(
            f"{type(pipeline).__name__} has no `transformer`: only flow-matching transformer pipelines can be trained."
        )
    if isinstance(transformer, PeftModel) or getattr(transformer, "peft_config", None):
        raise ValueError(
            "The pipeline's transformer already has an adapter. To continue training it, pass its Hub id or folder as "
            "`peft_config` and the pipeline without it; to train another one on top, merge it first "
            "(`pipeline.fuse_lora()` and `pipeline.unload_lora_weights()`)."
        )
    for name, component in pipeline.components.items():
        if isinstance(component, nn.Module):
            if any(hasattr(parameter, "ds_id") for parameter in component.parameters()):
                raise ValueError(
                    f"`{name}` of the pipeline is partitioned by DeepSpeed ZeRO-3: it was loaded after the training "
                    "arguments were made. Pass the pipeline's Hub id or folder, or load it before the arguments."
                )
            component.requires_grad_(False)
            component.eval()
            wanted = transformer_dtype if name == "transformer" and transformer_dtype is not None else dtype
            if component.dtype != wanted:
                component.to(wanted)
    return pipeline


def _check_config(model: str, model_init_kwargs: dict) -> None:
    # A pipeline that cannot be trained is known from its small index file, before gigabytes are read
    where = {name: model_init_kwargs[name] for name in ("revision", "cache_dir", "token") if name in model_init_kwargs}
    config = DiffusionPipeline.load_config(model, **where)
    name = config["_class_name"]
    family_of(name if isinstance(name, str) else name[-1])  # of code in the repository: the module and the class
    _, scheduler = config.get("scheduler") or (None, None)
    scheduler_class = getattr(diffusers, scheduler or "", None)  # None for a scheduler of the repository's own
    if scheduler_class is not None:
        check_flow_matching(scheduler_class)


def base_model_name(model: "str | DiffusionPipeline") -> str:
    """
    A name of the base model that another machine understands: the Hub id, or the last part of a folder's path.

    Args:
        model (`str` or [`~diffusers.DiffusionPipeline`]):
            Hub id, folder or pipeline.

    Returns:
        `str`: the class of a pipeline that was put together in memory and has no name.
    """
    name = model if isinstance(model, str) else (getattr(model, "name_or_path", None) or type(model).__name__)
    return Path(os.path.normpath(name)).name if os.path.isdir(name) else name


def adapter_digest(peft_config: LoraConfig | str | None) -> dict | str:
    """
    What of an adapter decides whether a checkpoint fits it.

    Args:
        peft_config ([`~peft.LoraConfig`] or `str`, *optional*):
            The adapter that is trained.

    Returns:
        `dict` or `str`: its shape; a sentence where all weights are trained.
    """
    if peft_config is None:
        return "none, all weights of the transformer are trained"
    config = read_peft_config(peft_config)
    targets = config.target_modules
    return {
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted(targets) if isinstance(targets, set | list) else targets,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
    }


def read_peft_config(peft_config: LoraConfig | str) -> LoraConfig:
    """
    The config of an adapter that is new or that exists.

    Args:
        peft_config ([`~peft.LoraConfig`] or `str`):
            A new adapter, or the Hub id or folder of one to continue from.

    Returns:
        [`~peft.LoraConfig`].

    Raises:
        ValueError: the folder or repository has no adapter in PEFT's format with safetensors.
    """
    if not isinstance(peft_config, str):
        return peft_config
    if os.path.isdir(peft_config):
        for name in ("adapter_config.json", SAFETENSORS_WEIGHTS_NAME):
            if not os.path.isfile(os.path.join(peft_config, name)):
                raise ValueError(
                    f"`peft_config` is '{peft_config}', a folder without `{name}`: there is no adapter in PEFT's "
                    "format to continue from. Pass a checkpoint or an adapter's folder."
                )
    elif cached_file(peft_config, SAFETENSORS_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False) is None:
        raise ValueError(
            f"`peft_config` is '{peft_config}', a repository without `{SAFETENSORS_WEIGHTS_NAME}`: there is no adapter "
            "in PEFT's format to continue from. Other formats are pickles, which can run code."
        )
    return PeftConfig.from_pretrained(peft_config)


def check_peft_config(peft_config: LoraConfig | str, model: "str | DiffusionPipeline") -> None:
    """
    Refuses an adapter that cannot be trained or saved, or that was made for another model. Reads no weights.

    Args:
        peft_config ([`~peft.LoraConfig`] or `str`):
            A new adapter, or the Hub id or folder of one to continue from.
        model (`str` or [`~diffusers.DiffusionPipeline`]):
            Hub id, folder or pipeline that it is to be put on.

    Raises:
        TypeError: it is not a `LoraConfig`.
        ValueError: an adapter of another model, dropout above 0, or what cannot be saved as a diffusers LoRA.
    """
    adapter, peft_config = peft_config, read_peft_config(peft_config)
    if not isinstance(peft_config, LoraConfig) or peft_config.peft_type != PeftType.LORA:  # AdaLoraConfig is one too
        raise TypeError(
            f"`peft_config` must be a `peft.LoraConfig`, got {type(peft_config).__name__}: checkpoints are also saved "
            "in diffusers' LoRA format, which knows no other adapter."
        )
    if peft_config.lora_dropout:
        raise ValueError(
            f"`lora_dropout` is {peft_config.lora_dropout}. With dropout the replay scores an image with another "
            "network than the one that drew it, and the probability ratio is noise. Set it to 0."
        )
    if peft_config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
        raise ValueError(
            f"`init_lora_weights` is {peft_config.init_lora_weights!r}, which changes the base weights: without its "
            "adapter the model would not be the base model, which evaluations and `beta` compare with, and the saved "
            "adapter would not fit it. Use True or 'gaussian' (paper)."
        )
    for name, default in vars(LoraConfig()).items():
        value = getattr(peft_config, name)
        if name not in _PLAIN_LORA and value and value != default:
            raise ValueError(
                f"`{name}` is {value!r}, but only plain LoRA is trained here: checkpoints are also saved in diffusers' "
                "LoRA format, and most programs read no more than two matrices for each layer from it. They would leave "
                f"out the rest without an error. Use the default, {default!r}."
            )
    if isinstance(adapter, str):
        base = model if isinstance(model, str) else getattr(model, "name_or_path", None)
        check_adapter_base(adapter, peft_config.base_model_name_or_path, base)


def prepare_transformer(
    pipeline: DiffusionPipeline, family: Family, peft_config: LoraConfig | str | None, autocast_adapter_dtype: bool
) -> nn.Module:
    """
    Makes the pipeline's transformer trainable: a LoRA adapter, new or continued, or all of its weights.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Pipeline; its transformer gets the adapter's layers in place.
        family ([`Family`]):
            Page of the family, for the default targets and the layers that get no adapter.
        peft_config ([`~peft.LoraConfig`] or `str`, *optional*):
            Adapter, left as it is; or the Hub id or folder of one to continue from. If `None`, all weights are
            trained.
        autocast_adapter_dtype (`bool`):
            Whether the adapter is float32 while the frozen weights are in a lower precision.

    Returns:
        `nn.Module`: a [`~peft.PeftModel`], or the transformer.

    Raises:
        ValueError: the transformer has a dropout layer that is active, or an adapter was made for another base model.
    """
    transformer = pipeline.transformer
    for name, module in transformer.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            raise ValueError(
                f"`{name}` of the transformer is a dropout layer with p = {module.p}. With dropout the replay scores an "
                "image with another network than the one that drew it. Set its `p` to 0 before training."
            )

    if any(module._compiled_call_impl is not None for module in transformer.modules()):
        from torch._inductor import config as inductor

        # Fused kernels skip roundings to bf16, and those with gradients are fused differently from those without
        inductor.emulate_precision_casts = True

    config = PolicyConfig(transformer.config)
    if peft_config is None:
        transformer.requires_grad_(True)
        model = transformer
        model._internal_dict = config  # what `config` gives; it has no setter
    elif isinstance(peft_config, str):
        model = load_transformer_adapter(
            transformer,
            peft_config,
            base_model_name(pipeline),
            family.unused_layers(transformer),
            is_trainable=True,
            autocast_adapter_dtype=autocast_adapter_dtype,
        )
        model.config = config
    else:
        peft_config = copy.deepcopy(peft_config)
        if peft_config.target_modules is None:
            peft_config.target_modules = list(family.lora_target_modules)
        _exclude(peft_config, family.unused_layers(transformer))
        model = get_peft_model(transformer, peft_config, autocast_adapter_dtype=autocast_adapter_dtype)
        model.config = config
    if isinstance(model, PeftModel):
        # PEFT leaves the base model's name empty for diffusers models
        model.peft_config[model.active_adapter].base_model_name_or_path = str(pipeline.name_or_path)

    def enable_checkpointing(**kwargs) -> None:
        transformer.enable_gradient_checkpointing()

    # diffusers' name for it is another than the one Trainer calls
    model.activation_checkpointing_enable = enable_checkpointing
    return model


def make_policy(
    pipeline: DiffusionPipeline,
    family: Family,
    peft_config: LoraConfig | str | None,
    dtype: torch.dtype,
    is_deepspeed: bool,
    with_reference: bool,
) -> tuple[PipelinePolicy, nn.Module | None]:
    """
    Make a pipeline the policy that is trained.

    Args:
        pipeline ([`~diffusers.DiffusionPipeline`]):
            Pipeline from [`load_pipeline`].
        family ([`Family`]):
            Page of its family.
        peft_config ([`~peft.LoraConfig`] or `str`, *optional*):
            As in [`prepare_transformer`].
        dtype (`torch.dtype`):
            Compute dtype.
        is_deepspeed (`bool`):
            Whether DeepSpeed trains it, which switches autocast off.
        with_reference (`bool`):
            Whether a KL divergence is measured.

    Returns:
        `tuple[PipelinePolicy, nn.Module | None]`: the policy, and the copy that the divergence is measured from, where
        there is no adapter to switch off.
    """
    reference = None
    if peft_config is None and with_reference:
        reference = copy.deepcopy(pipeline.transformer)
        if reference.dtype != dtype:
            reference.to(dtype)
    signature = inspect.signature(pipeline.transformer.forward)
    # DeepSpeed keeps one dtype and its own float32 masters: mixed dtypes fail in ZeRO-3 (trl#6089)
    model = prepare_transformer(pipeline, family, peft_config, autocast_adapter_dtype=not is_deepspeed)
    policy = PipelinePolicy(pipeline, family, model, signature)
    if dtype != torch.float32:
        # The pipeline's latents are float32. Autocast takes care of the transformer, but not under DeepSpeed; and
        # nothing does for the VAE.
        if is_deepspeed:
            cast_floating_inputs(model, dtype)
        for name in ("post_quant_conv", "decoder"):
            module = getattr(pipeline.vae, name, None)
            if module is not None:
                cast_floating_inputs(module, dtype)
    if reference is not None and is_deepspeed:
        cast_floating_inputs(reference, dtype)
    return policy, reference


def _exclude(config: LoraConfig, layers: list[str]) -> None:
    """Leaves layers out of an adapter's config, which is saved with it. PEFT warns of names that fit nothing."""
    layers = [
        name for name in layers if config.target_modules == "all-linear" or check_target_module_exists(config, name)
    ]
    if layers and isinstance(config.exclude_modules, str):
        config.exclude_modules = "|".join([f"(?:{config.exclude_modules})", *map(re.escape, layers)])
    elif layers:
        config.exclude_modules = {*(config.exclude_modules or ()), *layers}


def load_transformer_adapter(
    transformer: nn.Module, adapter: str, base: str, unused_layers: Sequence[str] = (), **kwargs
) -> PeftModel:
    """
    Puts an adapter that exists on a pipeline's transformer.

    Args:
        transformer (`nn.Module`):
            Transformer; it gets the adapter's layers in place.
        adapter (`str`):
            Hub id or folder of an adapter in PEFT's format.
        base (`str`):
            Name of the pipeline, for the message.
        unused_layers (`Sequence[str]`, *optional*):
            Layers that are left without an adapter if the saved one has them, see [`Family.unused_layers`].
        **kwargs:
            Further arguments of [`~peft.PeftModel.from_pretrained`].

    Returns:
        [`~peft.PeftModel`].

    Raises:
        ValueError: the adapter was made for another base model.
    """
    config = read_peft_config(adapter)
    _exclude(config, unused_layers)
    try:
        model = PeftModel.from_pretrained(transformer, adapter, config=config, **kwargs)
    except RuntimeError as error:  # shapes
        raise ValueError(
            f"The adapter '{adapter}' does not fit {base}: it was made for another base model.\n{error}"
        ) from error
    # Weights without a place are dropped by PEFT, and layers without weights begin anew
    left_out = tuple(f"base_model.model.{layer}.lora_" for layer in unused_layers)
    saved = {name for name in load_peft_weights(adapter, device="cpu") if not name.startswith(left_out)}
    expected = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    if saved != expected:
        some = ", ".join(sorted(saved ^ expected)[:3])
        raise ValueError(
            f"The adapter '{adapter}' does not fit {base}: it was made for another base model. {len(saved - expected)} "
            f"of its {len(saved)} weights have no place in the transformer, and for {len(expected - saved)} places it "
            f"has none ({some}, ...)."
        )
    return model


def adapter_is_new(weights: dict[str, torch.Tensor]) -> bool:
    """
    Whether a model is still its base model: every LoRA `B` of its adapter is 0.

    Args:
        weights (`dict[str, torch.Tensor]`):
            The trained weights, or this process's share of them.

    Returns:
        `bool`: `False` for weights without an adapter.
    """
    matrices = [weight for name, weight in weights.items() if ".lora_B." in name]
    return bool(matrices) and not any(matrix.any() for matrix in matrices)
