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

from ..utils.files import read_template
from .flux import build_scheduler, enlarge
from .qwen2_5_vl import token_ids, train_tokenizer
from .z_image import qwen3_config, train_qwen3_tokenizer


MAX_TOKENS = 128
SPECIAL_TOKENS = (
    *("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<pad>"),
)

# Renders the same text as the template of the real model
CHAT_TEMPLATE = read_template("tiny_flux2_chat.jinja").strip()


def build_tiny_flux2(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a FLUX.2-dev pipeline.

    The Mistral 3 has 31 layers, because the pipeline reads the states after 10, 20 and 30. Images are multiples of 4
    pixels, source images at least 64 x 64; a prompt with its system message has at most 128 tokens.
    """
    tokenizer = _train_mistral_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = Mistral3ForConditionalGeneration(_mistral3_config(tokenizer))
        transformer = _build_transformer(guidance_embeds=True)
        vae = _build_vae()
    Flux2Pipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=PixtralProcessor(
            image_processor=PixtralImageProcessor(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14}),
            tokenizer=tokenizer,
            patch_size=14,
            spatial_merge_size=2,
            chat_template=CHAT_TEMPLATE,
        ),
        transformer=transformer,
    ).save_pretrained(folder)
    return Path(folder)


def build_tiny_flux2_klein(folder: str | Path, seed: int = 0, is_distilled: bool = False) -> Path:
    """
    Build a FLUX.2-klein pipeline like [`build_tiny_flux2`].

    It has no guidance embedding, and a Qwen3 of 28 layers, because the pipeline reads the states after 9, 18 and 27. A
    prompt with its template has at most 64 tokens. With `is_distilled`, the pipeline ignores the guidance scale.
    """
    tokenizer = train_qwen3_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        text_encoder = Qwen3ForCausalLM(qwen3_config(tokenizer, num_hidden_layers=28))
        transformer = _build_transformer(guidance_embeds=False)
        vae = _build_vae()
    Flux2KleinPipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
        is_distilled=is_distilled,
    ).save_pretrained(folder)
    return Path(folder)


def _build_transformer(guidance_embeds: bool) -> Flux2Transformer2DModel:
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,  # three layers of the language model
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    enlarge(transformer, "attn.to_v.weight", "attn.add_v_proj.weight", "attn.to_out.0.weight", "proj_out.weight")
    enlarge(transformer, "double_stream_modulation_img.linear.weight")
    return transformer


def _build_vae() -> AutoencoderKLFlux2:
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,  # more groups would normalize away the color of the image
        sample_size=32,
    )
    enlarge(vae, "encoder.conv_out.weight")
    # Statistics for which normalizing latents makes a difference
    torch.nn.init.normal_(vae.bn.running_mean, std=0.2)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 1.5)
    return vae


def _mistral3_config(tokenizer: LlamaTokenizer) -> Mistral3Config:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return Mistral3Config(
        text_config={
            "model_type": "mistral",
            **sizes,
            **token_ids(tokenizer),
            "num_hidden_layers": 31,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 4096,
            "sliding_window": None,
            "initializer_range": 0.1,
        },
        vision_config={**sizes, "model_type": "pixtral", "num_hidden_layers": 1, "patch_size": 14, "image_size": 56},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )


def _train_mistral_tokenizer() -> LlamaTokenizer:
    # On the system message of every prompt too, so that it is not hundreds of tokens
    tokenizer = train_tokenizer(LlamaTokenizer, [SYSTEM_MESSAGE] * 50, SPECIAL_TOKENS, MAX_TOKENS, vocab_size=1000)
    tokenizer.pad_token = "<pad>"
    return tokenizer
