# SPDX-License-Identifier: Apache-2.0
"""Adapters of a transformer: read saved ones, check their configs, and put them on the transformer."""

import copy
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from torch import nn
from trl import ModelConfig

from ..utils.images import reading
from ..utils.model_files import check_generates, find_adapter_file, hub_arguments, peft_folder
from ..utils.names import check_adapter_base
from .loading import warn_on_first_process
from .lora_files import convert_lora


_DEFAULTS = LoraConfig()
# Fields of a saved config that only its adapter's training used, and fields that only its initialization used
_TRAINING_FIELDS = (
    "inference_mode", "task_type", "lora_dropout", "fan_in_fan_out", "qalora_group_size", "ensure_weight_tying",
)  # fmt: skip
_INITIALIZATION_FIELDS = ("init_lora_weights", "eva_config")
# Initial weights that leave the base weights as they are; PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change them
_WITHOUT_DATA = (True, False, "gaussian", "orthogonal")
_KEEP_BASE = (*_WITHOUT_DATA, "eva", "mica")
# Settings of adapters with two matrices and a scale for each layer. Other settings of PEFT are for variants, such as
# DoRA.
_PLAIN_LORA = vars(PeftConfig()).keys() | {
    *("r", "lora_alpha", "lora_dropout", "alpha_pattern", "rank_pattern", "init_lora_weights", "use_rslora"),
    *("target_modules", "exclude_modules", "layers_pattern", "layers_to_transform", "runtime_config"),
}


@dataclass(frozen=True)
class SavedAdapter:
    """A saved adapter as it was read, in PEFT's format or converted to it."""

    name: str  # its directory, file or Hub id
    config: LoraConfig
    weights: dict[str, torch.Tensor]

    @classmethod
    def read(cls, name: str, model: "str | DiffusionPipeline", **hub_arguments: Any) -> "SavedAdapter":
        """Read an adapter of a model; refuse files that cannot be read, in one sentence."""
        folder = peft_folder(name)
        if folder is None:
            return cls(name, *convert_lora(find_adapter_file(name), model, **hub_arguments))
        if os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, "adapter_config.json")):
            raise ValueError(
                f"The adapter '{name}' has no adapter_config.json beside adapter_model.safetensors, with the scale of "
                "its weights. Name the directory that has both files."
            )
        with reading(f"The adapter '{name}'", "Save it again, or name another"):
            config = PeftConfig.from_pretrained(folder)
            config.base_model_name_or_path = config.base_model_name_or_path and os.fspath(
                config.base_model_name_or_path
            )
            return cls(name, config, load_peft_weights(folder, device="cpu"))


# ---- Configs ----


def read_peft_config(
    peft_config: LoraConfig | SavedAdapter | str,
    model: "str | DiffusionPipeline",
    model_init_kwargs: dict | None = None,
) -> LoraConfig | SavedAdapter:
    """
    Read an adapter that is named, and return it without TRL's defaults and without settings that only an earlier
    training used. Refuse an adapter that cannot be trained or saved, or that was trained on another model.
    """
    if isinstance(peft_config, str | os.PathLike):
        name = os.fspath(peft_config)
        if (folder := peft_folder(name)) is not None:
            check_generates(name, folder)
        peft_config = SavedAdapter.read(name, model, **hub_arguments(model_init_kwargs or {}))
    saved = peft_config if isinstance(peft_config, SavedAdapter) else None
    config: Any = peft_config if saved is None else saved.config
    # AdaLoraConfig is a subclass of LoraConfig
    if not isinstance(config, LoraConfig) or config.peft_type != PeftType.LORA:
        raise TypeError(f"`peft_config` is a {type(config).__name__}; it must be a `peft.LoraConfig`.")
    # A config from TRL always has TRL's defaults. `LoraConfig.from_pretrained` returns a saved adapter's config.
    is_trl = config.task_type == ModelConfig.lora_task_type
    is_trl &= config.lora_dropout in (ModelConfig.lora_dropout, 0)
    if is_trl or saved is not None or config.inference_mode:
        config = _without_training(config, has_weights=saved is not None)
    _check_trainable(config)
    _check_plain(config, saved)
    if saved is None:
        return config
    base = model if isinstance(model, str) else getattr(model, "name_or_path", None)
    check_adapter_base(saved.name, config.base_model_name_or_path, base)
    return replace(saved, config=config)


def _without_training(config: LoraConfig, has_weights: bool) -> LoraConfig:
    """Return a config without settings of an earlier training; warn of settings that are not for image models."""
    cleared = copy.deepcopy(config)
    _forget_training(cleared, has_weights)
    names = [name for name in ("task_type", "lora_dropout") if getattr(config, name)]
    if names:
        dropped = " and ".join(f"`{name}` {getattr(config, name)!r}" for name in names)
        warn_on_first_process(f"`peft_config` has {dropped}, which no image model is trained with: left out.")
    return cleared


def _forget_training(config: LoraConfig, has_weights: bool) -> None:
    """Reset fields that only the training of a saved adapter used to PEFT's defaults."""
    names = _TRAINING_FIELDS
    if has_weights and getattr(config, "init_lora_weights", None) in _KEEP_BASE:
        names += _INITIALIZATION_FIELDS
    for name in names:
        setattr(config, name, getattr(_DEFAULTS, name))


def _check_trainable(config: LoraConfig) -> None:
    """Refuse settings that are for other models, or with which rollout and replay would differ."""
    if config.task_type is not None:
        raise TypeError(f"`task_type` is {config.task_type!r}, which is for language models. Leave it out.")
    if config.lora_dropout:
        raise ValueError(
            f"`lora_dropout` is {config.lora_dropout}, with which the replay scores an image with another "
            "network than the one that generated it. Set it to 0."
        )
    check_lora_start(config)


def _check_plain(config: LoraConfig, saved: SavedAdapter | None) -> None:
    """Refuse variants of LoRA, such as DoRA."""
    of, advice = "", "Use the default, {!r}."
    if saved is not None:
        of = f" of the adapter '{saved.name}'"
        advice = "Merge it into its model, and train a new adapter on that."
    for name, default in vars(_DEFAULTS).items():
        value = getattr(config, name)
        if name not in _PLAIN_LORA and value and value != default:
            raise ValueError(
                f"`{name}`{of} is {value!r}, but only plain LoRA is trained here: most programs ignore the rest in "
                f"diffusers' format. {advice.format(default)}"
            )


def check_lora_start(peft_config: LoraConfig) -> None:
    """Refuse a scale of 0, because no weight would have a gradient, and starts that change the base weights."""
    if peft_config.lora_alpha == 0:
        raise ValueError("`lora_alpha` is 0: nothing is trained. Use 2 * r (paper).")
    if peft_config.init_lora_weights not in _WITHOUT_DATA:
        raise ValueError(
            f"`init_lora_weights` is {peft_config.init_lora_weights!r}, for which PEFT changes the base weights or "
            "asks for data: the adapter would not fit the model itself. Use True or 'gaussian'."
        )


def check_target_modules(peft_config: LoraConfig, model: nn.Module) -> None:
    """Refuse names in `target_modules` that no layer has: PEFT would train the other layers without a warning."""
    targets = peft_config.target_modules
    # A text is a pattern, and PEFT refuses a pattern that matches nothing
    if targets is None or isinstance(targets, str):
        return
    paths = [name.split(".") for name, _ in model.named_modules()]
    for target in sorted(map(str, targets)):
        ends = {".".join(path[-target.count(".") - 1 :]) for path in paths}
        if target not in ends:
            hint = [f" Did you mean {' or '.join(names)}?" for names in [get_close_matches(target, ends)] if names]
            raise ValueError(
                f"`target_modules` has {target!r}, which no layer of {type(model).__name__} is named.{''.join(hint)} "
                "A list has names; a pattern is a string, in Python (`LoraConfig(target_modules=...)`)."
            )


# ---- Adapters on a transformer ----


def exclude_layers(config: LoraConfig, layers: Sequence[str]) -> None:
    """Exclude layers in the config that an adapter is saved with. PEFT warns of names that match nothing."""
    is_all = config.target_modules == "all-linear"
    layers = [name for name in layers if is_all or check_target_module_exists(config, name)]
    if layers and isinstance(config.exclude_modules, str):
        config.exclude_modules = "|".join([f"(?:{config.exclude_modules})", *map(re.escape, layers)])
    elif layers:
        config.exclude_modules = {*(config.exclude_modules or ()), *layers}


def load_transformer_adapter(
    transformer: nn.Module,
    adapter: SavedAdapter,
    unused_layers: Sequence[str] = (),
    is_trainable: bool = False,
    **kwargs: Any,
) -> PeftModel:
    """Put a saved adapter on a transformer, in place, except on `unused_layers`. Refuse it if it does not fit."""
    misfit = f"The adapter '{adapter.name}' does not fit {type(transformer).__name__}"
    config = copy.deepcopy(adapter.config)
    exclude_layers(config, unused_layers)
    _forget_training(config, has_weights=True)
    config.inference_mode = not is_trainable
    try:
        model = PeftModel(transformer, config, **kwargs)
        if not is_trainable:
            model.eval()
        set_peft_model_state_dict(model, adapter.weights)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # PEFT trusts a config, so that any error may occur
        reason = f"{type(error).__name__}: {error}"[:400]
        raise ValueError(f"{misfit}: {reason}") from error
    # PEFT drops weights without a layer, and initializes layers without weights
    left_out = tuple(f"base_model.model.{layer}.lora_" for layer in unused_layers)
    saved = {name for name in adapter.weights if not name.startswith(left_out)}
    expected = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    if saved != expected:
        raise ValueError(
            f"{misfit}: {len(saved - expected)} of its {len(saved)} weights have no place, and "
            f"{len(expected - saved)} places have no weight ({', '.join(sorted(saved ^ expected)[:3])}, ...)."
        )
    return model
