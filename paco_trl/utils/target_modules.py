# SPDX-License-Identifier: Apache-2.0
"""Checks of a new adapter: its scale, and the names of its layers."""

from difflib import get_close_matches
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn


def check_lora_alpha(peft_config: "LoraConfig") -> None:
    """Refuse a scale of 0, with which no weight has a gradient."""
    if peft_config.lora_alpha == 0:
        raise ValueError(
            "`lora_alpha` is 0: the adapter is multiplied by 0 and nothing is trained. Use 2 * r (paper)."
        )


def check_target_modules(peft_config: "LoraConfig", model: "nn.Module") -> None:
    """Refuse names in `target_modules` that no layer has: PEFT trains the others, without a word."""
    targets = peft_config.target_modules
    if targets is None or isinstance(targets, str):  # a pattern, which PEFT refuses if nothing matches
        return
    paths = [name.split(".") for name, _ in model.named_modules()]
    for target in sorted(map(str, targets)):
        ends = {".".join(path[-target.count(".") - 1 :]) for path in paths}
        if target not in ends:
            hint = [f" Did you mean {' or '.join(found)}?" for found in [get_close_matches(target, ends)] if found]
            raise ValueError(
                f"`target_modules` (`--lora_target_modules`) has {target!r}, but no layer of {type(model).__name__} is "
                f"named so.{''.join(hint)} Correct the name, or leave `target_modules` out for the default. (A pattern, or "
                "'all-linear', is a string and not in a list.)"
            )
