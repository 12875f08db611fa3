# SPDX-License-Identifier: Apache-2.0
"""Build a tiny Stable Diffusion 3.5 pipeline."""

from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel

from .flux import build_vae, clip_text_config, enlarge, train_clip_and_t5_tokenizers


def build_tiny_stable_diffusion_3(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a Stable Diffusion 3.5 pipeline.

    It has a block with dual attention and a last one without feed-forward of the text. Images are multiples of 4
    pixels, 256 at most; a prompt has at most 32 tokens.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_tokenizer, t5_tokenizer = train_clip_and_t5_tokenizers()
        # Two layers: the pipeline reads the output of the last but one
        clip_config = clip_text_config(clip_tokenizer, num_hidden_layers=2)
        text_encoder = CLIPTextModelWithProjection(clip_config)
        text_encoder_2 = CLIPTextModelWithProjection(clip_config)
        text_encoder_3 = T5EncoderModel(
            # Wider than both CLIPs together, as in the real one: the pipeline pads those with zeros
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
    return Path(folder)
