# SPDX-License-Identifier: Apache-2.0
"""FLUX pipelines small enough to train on a laptop's CPU in seconds."""

import json
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
    FluxPipeline(**_components(seed)).save_pretrained(folder)
    return folder


def build_tiny_flux_kontext(folder: str | Path, seed: int = 0) -> Path:
    """
    Builds a FLUX Kontext pipeline with random weights and saves it in the format of the real one.

    Its parts have the classes of [`build_tiny_flux`]: like the real one, it differs in what the pipeline does with a
    source image. The VAE shrinks images sixteenfold, because the pipeline enlarges every source image to about a
    megapixel: images are multiples of 32 pixels, one token for each 32 x 32, and a source is about 1024 tokens of the
    transformer. Some weights are larger, else the source image would change no pixel visibly. Pass
    `max_area=height * width` to the pipeline, which otherwise draws about a megapixel too.

    Args:
        folder (`str` or `Path`):
            Where to save it; `DiffusionPipeline.from_pretrained(folder)` loads it.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights.

    Returns:
        `Path`: the folder.
    """
    folder = Path(folder)
    components = _components(seed, num_halvings=4)
    enlarge(components["vae"], "encoder.conv_out.weight")
    enlarge(components["transformer"], "attn.to_v.weight", "attn.to_out.0.weight", "proj_out.weight")
    FluxKontextPipeline(**components).save_pretrained(folder)
    return folder


def enlarge(module: torch.nn.Module, *endings: str) -> None:
    """
    Multiplies weights by 4, in place, where the usual initial ones are so small that an input changes no pixel.

    Args:
        module (`torch.nn.Module`):
            Module.
        endings (`str`):
            Endings of the names of the parameters.
    """
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(endings):
                parameter.mul_(4)


def _components(seed: int, num_halvings: int = 1) -> dict:
    # Parts of both pipelines, by name
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_tokenizer, t5_tokenizer = train_clip_and_t5_tokenizers()
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
        vae = build_vae(scaling_factor=0.3611, shift_factor=0.1159, num_halvings=num_halvings)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15)
    return {
        "scheduler": scheduler,
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": clip_tokenizer,
        "text_encoder_2": text_encoder_2,
        "tokenizer_2": t5_tokenizer,
        "transformer": transformer,
    }


def build_vae(scaling_factor: float, shift_factor: float, num_halvings: int = 1) -> AutoencoderKL:
    """
    Builds the VAE of most pipelines, with 4 latent channels.

    Args:
        scaling_factor (`float`):
            By which the pipeline multiplies latents.
        shift_factor (`float`):
            What the pipeline subtracts from latents before that.
        num_halvings (`int`, *optional*, defaults to `1`):
            How many times it halves the sides of an image: with 1, a latent pixel stands for 2 x 2 pixels.

    Returns:
        [`~diffusers.AutoencoderKL`]: with weights of torch's random state.
    """
    return AutoencoderKL(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * (num_halvings + 1),
        up_block_types=("UpDecoderBlock2D",) * (num_halvings + 1),
        block_out_channels=(8,) * (num_halvings + 1),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,  # more groups would normalise away the colour of the whole image
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def read_corpus() -> list[str]:
    """The shipped prompts, on which tokenizers are trained so that the words of the demo are in the vocabulary."""
    return [json.loads(line)["prompt"] for line in demo_prompts_path().read_text(encoding="utf-8").splitlines()]


def train_clip_and_t5_tokenizers() -> tuple[CLIPTokenizer, T5Tokenizer]:
    """
    Trains a CLIP and a T5 tokenizer on [`read_corpus`].

    Returns:
        `tuple`: both, for at most 32 tokens.
    """
    corpus = read_corpus()
    clip_tokenizer = CLIPTokenizer().train_new_from_iterator(corpus, vocab_size=600)
    t5_tokenizer = T5Tokenizer(extra_ids=0).train_new_from_iterator(corpus, vocab_size=600)
    clip_tokenizer.model_max_length = t5_tokenizer.model_max_length = MAX_TOKENS
    return clip_tokenizer, t5_tokenizer
