# SPDX-License-Identifier: Apache-2.0
"""Build a tiny FLUX.2-klein pipeline."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from ..utils.files import read_template
from .flux import build_scheduler
from .parts import ATTENTION, CONFIGS, enlarge, save, weights_of
from .qwen2_5_vl import token_ids, train_tokenizer


MAX_TOKENS = 64
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")

# Renders the same text as the template of the real model
CHAT_TEMPLATE = read_template("tiny_qwen3_chat.jinja").strip()


def build_tiny_flux2_klein(folder: str | Path, seed: int = 0, is_distilled: bool = False) -> Path:
    """
    Build a FLUX.2-klein pipeline.

    It has a Qwen3 of 28 layers, because the pipeline reads the states after 9, 18 and 27. Images are multiples of 4
    pixels, source images at least 64 x 64; a prompt with its template has at most 64 tokens. With `is_distilled`, the
    pipeline ignores the guidance scale.
    """
    tokenizer = train_qwen3_tokenizer()
    with weights_of(seed):
        text_encoder = Qwen3ForCausalLM(qwen3_config(tokenizer, num_hidden_layers=28))
        parts = build_flux2_parts(guidance_embeds=False)
    pipeline = Flux2KleinPipeline(**parts, text_encoder=text_encoder, tokenizer=tokenizer, is_distilled=is_distilled)
    return save(pipeline, folder)


def build_flux2_parts(guidance_embeds: bool) -> dict:
    """Build the parts that all FLUX.2 pipelines have, by name."""
    transformer = Flux2Transformer2DModel(**CONFIGS["flux2_transformer"], guidance_embeds=guidance_embeds)
    enlarge(transformer, *ATTENTION, "double_stream_modulation_img.linear.weight")
    vae = AutoencoderKLFlux2(**CONFIGS["flux2_vae"])
    enlarge(vae, "encoder.conv_out.weight")
    # Statistics for which normalizing latents makes a difference
    torch.nn.init.normal_(vae.bn.running_mean, std=0.2)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 1.5)
    return {"scheduler": build_scheduler(), "vae": vae, "transformer": transformer}


def qwen3_config(tokenizer: Qwen2Tokenizer, num_hidden_layers: int) -> Qwen3Config:
    """Build the config of a Qwen3 with states of 16 channels."""
    return Qwen3Config(**CONFIGS["qwen3"], **token_ids(tokenizer), num_hidden_layers=num_hidden_layers)


def train_qwen3_tokenizer() -> Qwen2Tokenizer:
    """Train a tokenizer on the shipped prompts, for at most 64 tokens, with the chat template of Qwen3."""
    tokenizer = train_tokenizer(Qwen2Tokenizer, ["user", "assistant"] * 20, SPECIAL_TOKENS, MAX_TOKENS)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
