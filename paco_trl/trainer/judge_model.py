# SPDX-License-Identifier: Apache-2.0
"""LoRA adapter of a judge's language model."""

import copy
import functools
import re
from collections.abc import Callable

import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from ..utils.deepspeed import without_zero3_init
from ..utils.devices import tower_arguments
from ..utils.target_modules import check_lora_alpha, check_target_modules


def language_model_targets(model: PreTrainedModel) -> str:
    """Match the linear layers of the language model for `LoraConfig.target_modules`; all else stays frozen."""
    decoder = model.get_decoder()
    names = [name for name, module in model.named_modules() if module is decoder]
    if not names or not names[0]:
        raise ValueError(
            f"The language model of {type(model).__name__} is not a named module of it. Name the layers to train in "
            "`peft_config`, as `LoraConfig(target_modules=...)`."
        )
    layers = {name.split(".")[-1] for name, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    return rf"{re.escape(names[0])}\..*\.({'|'.join(sorted(layers))})"


def cut_graph_behind_tower(model: PreTrainedModel, grids: list[list[int]]) -> None:
    """Run the vision tower without gradients as long as nothing in it trains; `grids` has the patch grids, or nothing."""
    tower = model.get_encoder("image")
    if model.get_decoder() not in tower.modules():  # else the model has no separate tower
        forward = tower.forward
        tower.forward = functools.update_wrapper(functools.partial(_forward_tower, tower, forward, grids), forward)


def _forward_tower(tower: PreTrainedModel, forward: Callable, grids: list[list[int]], *args, **kwargs):
    if grids:
        kwargs |= tower_arguments(tower, torch.tensor(grids), tower.device)
        grids.clear()  # another call has other images
    # With gradient checkpointing, transformers makes the tower's patches require gradients
    # (`enable_input_require_grads`), so that frozen blocks would be recomputed and differentiated for nothing
    trains = any(parameter.requires_grad for parameter in tower.parameters())
    with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
        return forward(*args, **kwargs)


def complete_peft_config(
    peft_config: LoraConfig | None, model: str | PreTrainedModel, revision: str | None, trust_remote_code: bool
) -> LoraConfig:
    """Fill in the paper's adapter, the task type and the layers of the language model where left out; check the layers."""
    if peft_config is None:
        peft_config = LoraConfig(r=32, lora_alpha=64)  # the paper's
    if not isinstance(peft_config, LoraConfig):
        kind = type(peft_config).__name__
        raise TypeError(
            f"`peft_config` is a {kind}; judges are LoRA adapters: pass a `LoraConfig`, or None (the paper's)."
        )
    check_lora_alpha(peft_config)
    peft_config = copy.deepcopy(peft_config)
    peft_config.task_type = peft_config.task_type or "CAUSAL_LM"
    if isinstance(peft_config.target_modules, str):  # a pattern
        return peft_config
    if isinstance(model, str):
        # SFTTrainer loads it later: build it without weights for the names of its layers
        config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
        with without_zero3_init(), torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config, trust_remote_code=trust_remote_code)
    if peft_config.target_modules is None:
        peft_config.target_modules = language_model_targets(model)
    check_target_modules(peft_config, model)
    return peft_config
