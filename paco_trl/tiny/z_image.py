# SPDX-License-Identifier: Apache-2.0
"""Build a tiny Z-Image pipeline."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model

from ..utils.files import read_template
from .flux import build_vae, enlarge
from .qwen2_5_vl import token_ids, train_tokenizer


MAX_TOKENS = 64
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")

# Renders the same text as the template of the real model
CHAT_TEMPLATE = read_template("tiny_z_image_chat.jinja").strip()


def build_tiny_z_image(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a Z-Image pipeline.

    The text encoder is a Qwen3. Images are multiples of 4 pixels, 256 at most; a prompt with its template has at most
    64 tokens.
    """
    tokenizer = train_qwen3_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = Qwen3Model(qwen3_config(tokenizer, num_hidden_layers=3))
        transformer = ZImageTransformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 64, 64],
        )
        for token in (transformer.x_pad_token, transformer.cap_pad_token):
            torch.nn.init.normal_(token, std=0.02)  # they are zero before training
        vae = build_vae(scaling_factor=0.3611, shift_factor=0.1159)
    enlarge(transformer, "all_final_layer.2-1.linear.weight")
    ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return Path(folder)


def qwen3_config(tokenizer: Qwen2Tokenizer, num_hidden_layers: int) -> Qwen3Config:
    """Build the config of a Qwen3 with states of 16 channels."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3Config(
        **sizes,
        **token_ids(tokenizer),
        num_hidden_layers=num_hidden_layers,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )


def train_qwen3_tokenizer() -> Qwen2Tokenizer:
    """Train a tokenizer on the shipped prompts, for at most 64 tokens, with the chat template of Qwen3."""
    tokenizer = train_tokenizer(Qwen2Tokenizer, ["user", "assistant"] * 20, SPECIAL_TOKENS, MAX_TOKENS)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
