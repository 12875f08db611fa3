# SPDX-License-Identifier: Apache-2.0
"""Build a tiny FLUX.2-dev pipeline."""

from pathlib import Path

from diffusers import Flux2Pipeline
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from transformers import (
    LlamaTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
)

from paco_trl.tiny.flux2 import build_flux2_parts
from paco_trl.tiny.parts import save, weights_of
from paco_trl.tiny.qwen2_5_vl import token_ids, train_tokenizer

from .parts import CONFIGS, read_chat_template


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
        parts = build_flux2_parts(guidance_embeds=True)
    image_processor = PixtralImageProcessor(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14})
    options = {"patch_size": 14, "spatial_merge_size": 2, "chat_template": CHAT_TEMPLATE}
    processor = PixtralProcessor(image_processor, tokenizer, **options)
    return save(Flux2Pipeline(**parts, text_encoder=text_encoder, tokenizer=processor), folder)


def _mistral3_config(tokenizer: LlamaTokenizer) -> Mistral3Config:
    config = Mistral3Config(**CONFIGS["mistral3"], image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"))
    config.text_config.update(token_ids(tokenizer))
    return config


def _train_mistral_tokenizer() -> LlamaTokenizer:
    # On the system message of every prompt too, so that it is not hundreds of tokens
    tokenizer = train_tokenizer(LlamaTokenizer, [SYSTEM_MESSAGE] * 50, SPECIAL_TOKENS, MAX_TOKENS, vocab_size=1000)
    tokenizer.pad_token = "<pad>"
    return tokenizer
