# SPDX-License-Identifier: Apache-2.0
"""Values of options that several packages know, and checks of them, without torch."""

import math
import os
from collections.abc import Iterable
from string import Formatter
from typing import Any

from .errors import OptionError


DTYPES = ("bfloat16", "float16", "float32")
# Quantizations of frozen weights. The last one is diffusers' layerwise casting, which is applied to a loaded model
QUANTIZATIONS = ("nf4", "int8", "fp8", "fp8_storage")
# Layouts of an image set, and ways to generate separate images
SET_LAYOUTS = (None, "grid", "separate")
PANEL_GENERATIONS = ("independent", "shared_noise", "anchored")
PROTOCOLS = ("default", "published")  # protocols of evaluations
# Packaged prompts of `words:`, in paco_trl/templates/words_*.yaml. EditScore's judges from Qwen3-VL get no labels
WORDS_PROMPTS: dict[str, dict[str, Any]] = {"editscore": {}, "editscore_qwen3": {"labels": None}, "viescore": {}}


def check_panel_options(panel_template: str, panel_generation: str) -> None:
    """Check that a template gives each panel a prompt of its own, and that there is this way to generate images."""
    literal_text = (None, None, None)  # what `Formatter.parse` returns for text after the last field
    try:  # a name, a format and a conversion
        fields = {tuple(field) for _, *field in Formatter().parse(panel_template)} - {literal_text}
    except ValueError:
        fields = set()
    if ("panel", "", None) not in fields or not fields <= {("panel", "", None), ("theme", "", None)}:
        raise OptionError(
            f"`panel_template` is {panel_template!r}; it must be a text with `{{panel}}`, and `{{theme}}` where the "
            "text of the set belongs, and no other field.", "panel_template",
        )  # fmt: skip
    if panel_generation not in PANEL_GENERATIONS:
        message = f"`panel_generation` is {panel_generation!r}, but must be one of {PANEL_GENERATIONS}."
        raise OptionError(message, "panel_generation")


def check_reward_weights(weights: list[float] | None, names: list[str], aggregation: str) -> list[float]:
    """Check the weights of the rewards (`None`: all 1) before generation, and return them."""
    weights = _value_per_reward(weights, 1.0, "reward_weights", names)
    if not all(math.isfinite(weight) for weight in weights) or not any(weights):
        message = f"`reward_weights` is {weights}; weights must be finite, and at least one of them not 0."
        raise OptionError(message, "reward_weights")
    if aggregation == "geometric_mean" and min(weights) < 0:
        message = f"`reward_weights` is {weights}, but a geometric mean has no negative weights: negate the reward."
        raise OptionError(message, "reward_weights", "multi_objective_aggregation")
    return weights


def check_required(required: list | None, names: list[str], weights: Iterable[float]) -> list[bool]:
    """Check which rewards are required (`None`: all); one of nonzero weight must be."""
    required = _value_per_reward(required, True, "reward_required", names)
    if not any(is_required and weight != 0 for is_required, weight in zip(required, weights, strict=True)):
        message = f"`reward_required` is {required}: no reward of nonzero weight is required. Require one."
        raise OptionError(message, "reward_required", "reward_weights")
    return required


def _value_per_reward(values: list | None, default: Any, option: str, names: list[str]) -> list:
    values = [default] * len(names) if values is None else values
    if not isinstance(values, list | tuple) or len(values) != len(names):
        message = f"`{option}` is {values}; pass one value for each of {len(names)} rewards: {', '.join(names)}."
        raise OptionError(message, option, "rewards")
    return values


def uses_fsdp() -> bool:
    """Return whether accelerate's launcher asks for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes")
