# SPDX-License-Identifier: Apache-2.0
"""Build a tiny Ovis-Image pipeline."""

from pathlib import Path

from diffusers import OvisImagePipeline, OvisImageTransformer2DModel
from transformers import Qwen3Model

from .flux import build_scheduler, build_vae
from .parts import ATTENTION, CONFIGS, enlarge, save, weights_of
from .z_image import qwen3_config, train_qwen3_tokenizer


def build_tiny_ovis_image(folder: str | Path, seed: int = 0) -> Path:
    """
    Build an Ovis-Image pipeline: images are multiples of 4 pixels, and a prompt is 256 tokens.
    """
    tokenizer = train_qwen3_tokenizer()
    with weights_of(seed):
        text_encoder = Qwen3Model(qwen3_config(tokenizer, num_hidden_layers=3))
        transformer = OvisImageTransformer2DModel(**CONFIGS["ovis_image_transformer"])
        vae = build_vae()
    enlarge(transformer, *ATTENTION)
    return save(OvisImagePipeline(build_scheduler(), vae, text_encoder, tokenizer, transformer), folder)
