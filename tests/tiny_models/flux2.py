# SPDX-License-Identifier: Apache-2.0
"""Build tiny FLUX.2 pipelines."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from transformers import (
    LlamaTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    Qwen3ForCausalLM,
)

from paco_trl.tiny.flux import build_scheduler
from paco_trl.tiny.parts import ATTENTION, enlarge, save, weights_of
from paco_trl.tiny.qwen2_5_vl import token_ids, train_tokenizer

from .parts import CONFIGS, read_chat_template
from .z_image import qwen3_config, train_qwen3_tokenizer


MAX_TOKENS = 128
SPECIAL_TOKENS = (
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<pad>"),
)

# Renders the same text as the template of the real model
CHAT_TEMPLATE = read_chat_template("flux2_chat.jinja")


def build_tiny_flux2(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a FLUX.2-dev pipeline.

    The Mistral 3 has 31 layers, because the pipeline reads the states after 10, 20 and 30. Images are multiples of 4
    pixels, source images at least 64 x 64; a prompt with its system message has at most 128 tokens.
    """
    tokenizer = _train_mistral_tokenizer()
    with weights_of(seed):
        text_encoder = Mistral3ForConditionalGeneration(_mistral3_config(tokenizer))
        parts = _build_parts(guidance_embeds=True)
    image_processor = PixtralImageProcessor(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14})
    options = {"patch_size": 14, "spatial_merge_size": 2, "chat_template": CHAT_TEMPLATE}
    processor = PixtralProcessor(image_processor, tokenizer, **options)
    return save(Flux2Pipeline(**parts, text_encoder=text_encoder, tokenizer=processor), folder)


def build_tiny_flux2_klein(folder: str | Path, seed: int = 0, is_distilled: bool = False) -> Path:
    """
    Build a FLUX.2-klein pipeline like [`build_tiny_flux2`].

    It has no guidance embedding, and a Qwen3 of 28 layers, because the pipeline reads the states after 9, 18 and 27. A
    prompt with its template has at most 64 tokens. With `is_distilled`, the pipeline ignores the guidance scale.
    """
    tokenizer = train_qwen3_tokenizer()
    with weights_of(seed):
        text_encoder = Qwen3ForCausalLM(qwen3_config(tokenizer, num_hidden_layers=28))
        parts = _build_parts(guidance_embeds=False)
    pipeline = Flux2KleinPipeline(**parts, text_encoder=text_encoder, tokenizer=tokenizer, is_distilled=is_distilled)
    return save(pipeline, folder)


def _build_parts(guidance_embeds: bool) -> dict:
    """Build the parts that both pipelines have, by name."""
    transformer = Flux2Transformer2DModel(**CONFIGS["flux2_transformer"], guidance_embeds=guidance_embeds)
    enlarge(transformer, *ATTENTION, "double_stream_modulation_img.linear.weight")
    vae = AutoencoderKLFlux2(**CONFIGS["flux2_vae"])
    enlarge(vae, "encoder.conv_out.weight")
    # Statistics for which normalizing latents makes a difference
    torch.nn.init.normal_(vae.bn.running_mean, std=0.2)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 1.5)
    return {"scheduler": build_scheduler(), "vae": vae, "transformer": transformer}


def _mistral3_config(tokenizer: LlamaTokenizer) -> Mistral3Config:
    config = Mistral3Config(**CONFIGS["mistral3"], image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"))
    config.text_config.update(token_ids(tokenizer))
    return config


def _train_mistral_tokenizer() -> LlamaTokenizer:
    # On the system message of every prompt too, so that it is not hundreds of tokens
    tokenizer = train_tokenizer(LlamaTokenizer, [SYSTEM_MESSAGE] * 50, SPECIAL_TOKENS, MAX_TOKENS, vocab_size=1000)
    tokenizer.pad_token = "<pad>"
    return tokenizer
