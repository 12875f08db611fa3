# SPDX-License-Identifier: Apache-2.0
"""A Stable Diffusion 3.5 pipeline small enough to train on a laptop's CPU in seconds."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from .flux import MAX_TOKENS, build_vae, enlarge, train_clip_and_t5_tokenizers


def build_tiny_stable_diffusion_3(folder: str | Path, seed: int = 0) -> Path:
    """
    Builds a Stable Diffusion 3.5 pipeline with random weights and saves it in the format of the real one.

    All parts are the real classes at tiny size: a block with dual attention and a last one without feed-forward of the
    text, normalised queries and keys, two CLIP encoders with projections and a T5 encoder with tokenizers trained in
    place, a VAE, the scheduler with a fixed shift. Images are multiples of 4 pixels, 256 at most; a prompt is at most
    32 tokens.

    Args:
        folder (`str` or `Path`):
            Where to save it; `DiffusionPipeline.from_pretrained(folder)` loads it.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights.

    Returns:
        `Path`: the folder.
    """
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state as it is
        torch.manual_seed(seed)
        clip_tokenizer, t5_tokenizer = train_clip_and_t5_tokenizers()
        clip_config = CLIPTextConfig(
            vocab_size=len(clip_tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,  # the pipeline takes the output of the last but one
            num_attention_heads=2,
            max_position_embeddings=MAX_TOKENS,
            projection_dim=16,
            bos_token_id=clip_tokenizer.bos_token_id,
            eos_token_id=clip_tokenizer.eos_token_id,
            pad_token_id=clip_tokenizer.pad_token_id,
        )
        text_encoder = CLIPTextModelWithProjection(clip_config)
        text_encoder_2 = CLIPTextModelWithProjection(clip_config)
        text_encoder_3 = T5EncoderModel(
            # Wider than both CLIPs side by side, as in the real one: the pipeline pads those with zeros
            T5Config(vocab_size=len(t5_tokenizer), d_model=40, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        )
        transformer = SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=40,
            caption_projection_dim=32,
            pooled_projection_dim=32,
            pos_embed_max_size=64,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        vae = build_vae(scaling_factor=1.5305, shift_factor=0.0609)
    enlarge(transformer, "attn.to_v.weight", "attn.add_v_proj.weight", "attn.to_out.0.weight", "proj_out.weight")
    StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=clip_tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=clip_tokenizer,
        text_encoder_3=text_encoder_3,
        tokenizer_3=t5_tokenizer,
    ).save_pretrained(folder)
    return folder
