# SPDX-License-Identifier: Apache-2.0
"""Locate the toy models of the planted world; `pretraining/` has the scripts that trained them."""

from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from diffusers import FluxKontextPipeline

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


def toy_kontext_path() -> Path:
    """Return the toy FLUX Kontext without a VAE, which is that of the toy FLUX; [`load_toy_kontext`] loads both."""
    return WEIGHTS / "kontext"


def load_toy_kontext() -> "FluxKontextPipeline":
    """Load the toy FLUX Kontext; from then on Kontext's only training size in this process is 64 x 64, the toy's."""
    from diffusers import AutoencoderKL, FluxKontextPipeline
    from diffusers.pipelines.flux import pipeline_flux_kontext

    # Sources are scaled to the closest of these, of a megapixel, and nothing else reads them
    pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS[:] = [(64, 64)]
    vae = AutoencoderKL.from_pretrained(toy_flux_path() / "vae")
    pipeline = FluxKontextPipeline.from_pretrained(str(toy_kontext_path()), vae=vae)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def toy_edit_judge_path() -> Path:
    """Return the toy Qwen2.5-VL that was trained further on the questions about edits."""
    return WEIGHTS / "edit-judge"
