# SPDX-License-Identifier: Apache-2.0
"""Read LoRA files of other programs by diffusers' converters, exactly as `load_lora_weights` does."""

import json
import re
from collections import Counter
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import SD3LoraLoaderMixin
from peft import LoraConfig
from safetensors import SafetensorError, safe_open


# Weights that a plain LoRA has, by the names of diffusers, PEFT, kohya and DiffSynth
_PLAIN_WEIGHT = re.compile(r"\.(?:alpha|(?:lora_[AB]|(?:lora_)?(?:down|up))(?:\.default)?\.weight)$")
_MATRIX_WEIGHT = re.compile(r"(.+\.)(?:(lora_A|(?:lora_)?down)|lora_B|(?:lora_)?up)(?:\.default)?\.weight")
# Patterns of the names of weights that are refused, and how a message describes such names
_REFUSED_WEIGHTS = {
    r"^(?:lora_te|text_encoder|te\d?\.)": "train a text encoder. Train the LoRA without them, or merge it into its "
    "model and train a new adapter on that.",
    r"^lycoris_": "have LyCORIS's names (SimpleTuner), which diffusers does not read. Convert the file to kohya's.",
    r"base_model\.model\.": "have PEFT's names, and PEFT has their scale in `adapter_config.json`. Name the directory "
    "that has it, with the weights as `adapter_model.safetensors`.",
    r"\.lora_(?:[AB]|down|up)\.(?!default\.weight$).+\.weight$": "have the name of a PEFT adapter in theirs, which "
    "diffusers does not read. Save the adapter again with PEFT's `save_pretrained`, or the pipeline's "
    "`save_lora_weights`.",
    rf"^(?!.*{_PLAIN_WEIGHT.pattern})": "are not those of a plain LoRA, but of DoRA or LoKr, say. Train the LoRA "
    "without them, or merge it into its model and train a new adapter on that.",
}
# diffusers saves the settings of a LoRA's training with it. These change the output of a plain LoRA.
_SCALE_SETTINGS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")


def convert_lora(
    file: str, model: "str | DiffusionPipeline", **hub_arguments: Any
) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """Return a LoRA file of a pipeline's transformer as the config and the float32 weights of a PEFT adapter."""
    try:
        with safe_open(file, "pt") as opened:
            saved = dict(json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}")))
            # Converters multiply weights by alpha / rank. They do so in float32, because half precision would round.
            raw = {name: opened.get_tensor(name).float() for name in opened.keys()}
    except (SafetensorError, TypeError, ValueError) as error:
        raise ValueError(f"The adapter '{file}' cannot be read: {error}") from error
    for pattern, reason in _REFUSED_WEIGHTS.items():
        if names := [name for name in raw if re.search(pattern, name)]:
            raise ValueError(f"{len(names)} weights in '{file}' ({', '.join(names[:3])}, ...) {reason}")
    pairs: dict[str, dict[bool, torch.Tensor]] = {}  # layer -> the down matrix by `True`, the up matrix by `False`
    for match in filter(None, map(_MATRIX_WEIGHT.fullmatch, raw)):
        pairs.setdefault(match[1], {})[match[2] is not None] = raw[match[0]]
    shapes = {layer: [tuple(pair[key].shape) for key in sorted(pair)] for layer, pair in pairs.items()}
    # (rows, rank) and (rank, columns)
    if broken := [layer for layer, pair in shapes.items() if len(pair) < 2 or pair[0][1:] != pair[1][:1]]:
        listed = ", ".join(f"{layer}* {shapes[layer]}" for layer in broken[:3])
        raise ValueError(
            f"'{file}' is broken: {len(broken)} layers lack two matrices that fit together ({listed}, ...)."
        )
    if isinstance(model, str):
        name = DiffusionPipeline.load_config(model, **hub_arguments)["_class_name"]
        # A class from code in the repository is named by its module and its own name
        kind = getattr(diffusers, name if isinstance(name, str) else name[-1], None)
    else:
        kind = type(model)
    # Stable Diffusion 3 has no converter: its method only reads diffusers' names
    read = getattr(kind, "lora_state_dict", SD3LoraLoaderMixin.lora_state_dict)
    try:
        result = read(raw.copy(), return_alphas=True)
    except Exception as error:  # converters expect the names that they know, so that any error may occur
        raise ValueError(f"{_misfit(file, kind)}: {error}") from error
    converted, alphas = result if isinstance(result, tuple) else (result, None)
    unexpected = [name for name in converted if not re.fullmatch(r"transformer\..+\.lora_[AB]\.weight", name)]
    # Converters split matrices, and drop what they do not know: compare the numbers of rows before and after
    ups = [weight for name, weight in converted.items() if name.endswith(".lora_B.weight")]
    rows = [sum(map(len, matrices)) for matrices in ((pair[False] for pair in pairs.values()), ups)]
    if unexpected or not converted or rows[0] != rows[1]:
        lost = unexpected or [f"{rows[0] - rows[1]} of {rows[0]} rows are dropped"]
        raise ValueError(f"{_misfit(file, kind)}: {', '.join(lost[:3])}")
    weights = {name.removeprefix("transformer."): weight for name, weight in converted.items()}
    ranks = {name.partition(".lora_A.")[0]: len(weight) for name, weight in weights.items() if ".lora_A." in name}
    settings = {name: saved[f"transformer.{name}"] for name in _SCALE_SETTINGS if f"transformer.{name}" in saved}
    if not settings:
        scales = {name: float((alphas or {}).get(f"transformer.{name}.alpha", rank)) for name, rank in ranks.items()}
        r, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, scales))
        settings = {
            "r": r,
            "lora_alpha": alpha,
            # Without an anchor, PEFT also applies a name to layers whose names end with it
            "rank_pattern": {f"^{re.escape(name)}": rank for name, rank in ranks.items() if rank != r},
            "alpha_pattern": {f"^{re.escape(name)}": scale for name, scale in scales.items() if scale != alpha},
        }
    targets = "|".join(map(re.escape, sorted(ranks)))  # PEFT matches whole names with a pattern
    prefixed = {f"base_model.model.{name}": weight for name, weight in weights.items()}
    return LoraConfig(target_modules=targets, **settings), prefixed


def _misfit(file: str, kind: type | None) -> str:
    name = getattr(kind, "__name__", "this pipeline")
    return f"'{file}' is no LoRA that diffusers reads for {name}. If it is of this model, save it in its format"
