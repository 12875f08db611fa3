# SPDX-License-Identifier: Apache-2.0
"""Locate the toy models of the planted world; `pretraining/` has the scripts that trained them."""

from pathlib import Path


WEIGHTS = Path(__file__).parent / "weights"


def toy_flux_path() -> Path:
    """Return the toy FLUX; call it with `max_sequence_length=pipeline.tokenizer_2.model_max_length`."""
    return WEIGHTS / "flux"


def toy_clip_path() -> Path:
    """Return the toy CLIP, trained on panels and captions of their scene and color."""
    return WEIGHTS / "clip"


def toy_judge_path() -> Path:
    """Return the toy Qwen2.5-VL, which describes and compares panels but was never trained on consistency."""
    return WEIGHTS / "qwen2.5-vl"
