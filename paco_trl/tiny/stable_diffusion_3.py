# SPDX-License-Identifier: Apache-2.0
"""Build a tiny Stable Diffusion 3.5 pipeline."""

from pathlib import Path

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel

from .flux import build_vae, clip_text_config, train_clip_and_t5_tokenizers
from .parts import ATTENTION, CONFIGS, enlarge, save, weights_of


def build_tiny_stable_diffusion_3(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a Stable Diffusion 3.5 pipeline.

    It has a block with dual attention and a last one without feed-forward of the text. Images are multiples of 4
    pixels, 256 at most; a prompt has at most 32 tokens.
    """
    with weights_of(seed):
        clip_tokenizer, t5_tokenizer = train_clip_and_t5_tokenizers()
        # Two layers: the pipeline reads the output of the last but one
        clip_config = clip_text_config(clip_tokenizer, num_hidden_layers=2)
        text_encoder = CLIPTextModelWithProjection(clip_config)
        text_encoder_2 = CLIPTextModelWithProjection(clip_config)
        # Wider than both CLIPs together, as in the real one: the pipeline pads those with zeros
        text_encoder_3 = T5EncoderModel(T5Config(vocab_size=len(t5_tokenizer), d_model=40, **CONFIGS["t5"]))
        transformer = SD3Transformer2DModel(**CONFIGS["stable_diffusion_3_transformer"])
        vae = build_vae(scaling_factor=1.5305, shift_factor=0.0609)
    enlarge(transformer, *ATTENTION)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    encoders = {"text_encoder": text_encoder, "text_encoder_2": text_encoder_2, "text_encoder_3": text_encoder_3}
    tokenizers = {"tokenizer": clip_tokenizer, "tokenizer_2": clip_tokenizer, "tokenizer_3": t5_tokenizer}
    return save(StableDiffusion3Pipeline(transformer, scheduler, vae, **encoders, **tokenizers), folder)
