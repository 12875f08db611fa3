# SPDX-License-Identifier: Apache-2.0
"""A FLUX pipeline small enough to train on a laptop's CPU in seconds."""

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from ..data import demo_prompts_path


MAX_TOKENS = 32


def build_tiny_flux(folder: str | Path, seed: int = 0) -> Path:
    """
    Builds a FLUX pipeline with random weights and saves it in the format of the real one.

    All parts are the real classes at tiny size: double- and single-stream blocks, guidance embedding, CLIP and T5
    encoders with tokenizers trained in place, a VAE, the scheduler with dynamic shifting. Images are multiples of 4
    pixels; a prompt is at most 32 tokens.

    Args:
        folder (`str` or `Path`):
            Where to save it; `DiffusionPipeline.from_pretrained(folder)` loads it.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights.

    Returns:
        `Path`: the folder.
    """
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_tokenizer, t5_tokenizer = _train_tokenizers()
        text_encoder = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(clip_tokenizer),
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=MAX_TOKENS,
                projection_dim=16,
                bos_token_id=clip_tokenizer.bos_token_id,
                eos_token_id=clip_tokenizer.eos_token_id,
                pad_token_id=clip_tokenizer.pad_token_id,
            )
        )
        text_encoder_2 = T5EncoderModel(
            T5Config(vocab_size=len(t5_tokenizer), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        )
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        )
        vae = AutoencoderKL(
            sample_size=32,
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=1,  # more groups would normalise away the colour of the whole image
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15
        ),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=clip_tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=t5_tokenizer,
        transformer=transformer,
    )
    pipeline.save_pretrained(folder)
    return folder


def _train_tokenizers() -> tuple[CLIPTokenizer, T5Tokenizer]:
    # On the shipped prompts, so that the words of the demo are in the vocabulary
    corpus = [json.loads(line)["prompt"] for line in demo_prompts_path().read_text(encoding="utf-8").splitlines()]
    clip_tokenizer = CLIPTokenizer().train_new_from_iterator(corpus, vocab_size=600)
    t5_tokenizer = T5Tokenizer(extra_ids=0).train_new_from_iterator(corpus, vocab_size=600)
    clip_tokenizer.model_max_length = t5_tokenizer.model_max_length = MAX_TOKENS
    return clip_tokenizer, t5_tokenizer
