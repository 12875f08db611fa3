# SPDX-License-Identifier: Apache-2.0
"""Build a tiny Z-Image pipeline."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from paco_trl.tiny.flux import build_vae
from paco_trl.tiny.flux2 import qwen3_config, train_qwen3_tokenizer
from paco_trl.tiny.parts import enlarge, save, weights_of

from .parts import CONFIGS


def build_tiny_z_image(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a Z-Image pipeline.

    The text encoder is a Qwen3. Images are multiples of 4 pixels, 256 at most; a prompt with its template has at most
    64 tokens.
    """
    tokenizer = train_qwen3_tokenizer()
    with weights_of(seed):
        text_encoder = Qwen3Model(qwen3_config(tokenizer, num_hidden_layers=3))
        transformer = ZImageTransformer2DModel(**CONFIGS["z_image_transformer"])
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            torch.nn.init.normal_(token, std=0.02)  # they are zero before training
        vae = build_vae()
    enlarge(transformer, "all_final_layer.2-1.linear.weight")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return save(ZImagePipeline(scheduler, vae, text_encoder, tokenizer, transformer), folder)
