# SPDX-License-Identifier: Apache-2.0
"""Build tiny FLUX pipelines."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from .qwen2_5_vl import read_corpus, token_ids


MAX_TOKENS = 32


def build_tiny_flux(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a FLUX pipeline: images are multiples of 4 pixels, and a prompt has at most 32 tokens.
    """
    FluxPipeline(**_components(seed)).save_pretrained(folder)
    return Path(folder)


def build_tiny_flux_kontext(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a FLUX Kontext pipeline from the parts of [`build_tiny_flux`].

    The pipeline enlarges every source image to about a megapixel, so the VAE shrinks images sixteenfold: images are
    multiples of 32 pixels, and a source is about 1024 tokens. Some weights are larger, so that the source image
    changes pixels visibly. Pass `max_area=height * width` to the pipeline, which otherwise generates about a megapixel
    too.
    """
    components = _components(seed, num_halvings=4)
    enlarge(components["vae"], "encoder.conv_out.weight")
    enlarge(components["transformer"], "attn.to_v.weight", "attn.to_out.0.weight", "proj_out.weight")
    FluxKontextPipeline(**components).save_pretrained(folder)
    return Path(folder)


def enlarge(module: torch.nn.Module, *endings: str) -> None:
    """Multiply weights by 4 where the usual initial ones are so small that an input changes no pixel."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(endings):
                parameter.mul_(4)


def _components(seed: int, num_halvings: int = 1) -> dict:
    """Build the parts of both pipelines, by name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_tokenizer, t5_tokenizer = train_clip_and_t5_tokenizers()
        text_encoder = CLIPTextModel(clip_text_config(clip_tokenizer, num_hidden_layers=1))
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
        vae = build_vae(scaling_factor=0.3611, shift_factor=0.1159, num_halvings=num_halvings)
    return {
        "scheduler": build_scheduler(),
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": clip_tokenizer,
        "text_encoder_2": text_encoder_2,
        "tokenizer_2": t5_tokenizer,
        "transformer": transformer,
    }


def clip_text_config(tokenizer: CLIPTokenizer, num_hidden_layers: int) -> CLIPTextConfig:
    """Build the config of a CLIP text encoder."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "projection_dim": 16}
    return CLIPTextConfig(
        **sizes, **token_ids(tokenizer), num_hidden_layers=num_hidden_layers, max_position_embeddings=MAX_TOKENS
    )


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """Build a scheduler with dynamic shifting."""
    return FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)


def build_vae(scaling_factor: float, shift_factor: float, num_halvings: int = 1) -> AutoencoderKL:
    """Build the VAE of most pipelines, with 4 latent channels; it halves the sides of images `num_halvings` times."""
    return AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * (num_halvings + 1),
        up_block_types=("UpDecoderBlock2D",) * (num_halvings + 1),
        block_out_channels=(8,) * (num_halvings + 1),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,  # more groups would normalize away the color of the image
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def train_clip_and_t5_tokenizers() -> tuple[CLIPTokenizer, T5Tokenizer]:
    """Train a CLIP and a T5 tokenizer on the shipped prompts, for at most 32 tokens."""
    corpus = read_corpus()
    clip_tokenizer = CLIPTokenizer().train_new_from_iterator(corpus, vocab_size=600)
    t5_tokenizer = T5Tokenizer(extra_ids=0).train_new_from_iterator(corpus, vocab_size=600)
    clip_tokenizer.model_max_length = t5_tokenizer.model_max_length = MAX_TOKENS
    return clip_tokenizer, t5_tokenizer
