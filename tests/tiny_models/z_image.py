# SPDX-License-Identifier: Apache-2.0
"""Build a tiny Z-Image pipeline."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from paco_trl.tiny.flux import build_vae
from paco_trl.tiny.parts import enlarge, save, weights_of
from paco_trl.tiny.qwen2_5_vl import token_ids, train_tokenizer

from .parts import CONFIGS, read_chat_template


MAX_TOKENS = 64
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")

# Renders the same text as the template of the real model
CHAT_TEMPLATE = read_chat_template("z_image_chat.jinja")


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


def qwen3_config(tokenizer: Qwen2Tokenizer, num_hidden_layers: int) -> Qwen3Config:
    """Build the config of a Qwen3 with states of 16 channels."""
    return Qwen3Config(**CONFIGS["qwen3"], **token_ids(tokenizer), num_hidden_layers=num_hidden_layers)


def train_qwen3_tokenizer() -> Qwen2Tokenizer:
    """Train a tokenizer on the shipped prompts, for at most 64 tokens, with the chat template of Qwen3."""
    tokenizer = train_tokenizer(Qwen2Tokenizer, ["user", "assistant"] * 20, SPECIAL_TOKENS, MAX_TOKENS)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
