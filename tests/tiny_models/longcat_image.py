# SPDX-License-Identifier: Apache-2.0
"""Build tiny LongCat-Image, LongCat-Image-Edit and Ovis-Image pipelines."""

from pathlib import Path

from diffusers import (
    LongCatImageEditPipeline,
    LongCatImagePipeline,
    LongCatImageTransformer2DModel,
    OvisImagePipeline,
    OvisImageTransformer2DModel,
)
from transformers import Qwen2VLProcessor, Qwen3Model

from paco_trl.tiny.flux import build_scheduler, build_vae
from paco_trl.tiny.flux2 import qwen3_config, train_qwen3_tokenizer
from paco_trl.tiny.parts import ATTENTION, enlarge, save, weights_of
from paco_trl.tiny.qwen2_5_vl import build_model_and_processor

from .parts import CONFIGS


def build_tiny_longcat_image(folder: str | Path, seed: int = 0) -> Path:
    """Build a LongCat-Image pipeline: images are multiples of 4 pixels, and a prompt is 512 tokens."""
    return save(LongCatImagePipeline(**_build_parts(num_halvings=1, seed=seed)), folder)


def build_tiny_longcat_image_edit(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a LongCat-Image-Edit pipeline, whose VAE shrinks images eightfold like the real one.

    A source and its edited image have about 1024 x 1024 pixels, 4096 tokens each.
    """
    return save(LongCatImageEditPipeline(**_build_parts(num_halvings=3, seed=seed)), folder)


def _build_parts(num_halvings: int, seed: int) -> dict:
    text_encoder, processor = build_model_and_processor(seed, Qwen2VLProcessor)
    with weights_of(seed):
        transformer = LongCatImageTransformer2DModel(**CONFIGS["longcat_image_transformer"])
        vae = build_vae(num_halvings=num_halvings, latent_channels=16)
    enlarge(vae, "encoder.conv_out.weight")
    enlarge(transformer, *ATTENTION)
    parts = {"vae": vae, "transformer": transformer, "text_encoder": text_encoder, "text_processor": processor}
    return {**parts, "tokenizer": processor.tokenizer, "scheduler": build_scheduler()}


def build_tiny_ovis_image(folder: str | Path, seed: int = 0) -> Path:
    """Build an Ovis-Image pipeline: images are multiples of 4 pixels, and a prompt is 256 tokens."""
    tokenizer = train_qwen3_tokenizer()
    with weights_of(seed):
        text_encoder = Qwen3Model(qwen3_config(tokenizer, num_hidden_layers=3))
        transformer = OvisImageTransformer2DModel(**CONFIGS["ovis_image_transformer"])
        vae = build_vae()
    enlarge(transformer, *ATTENTION)
    return save(OvisImagePipeline(build_scheduler(), vae, text_encoder, tokenizer, transformer), folder)
