# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image, Qwen-Image-Edit and Qwen-Image-Edit-Plus pipelines small enough to train on a laptop's CPU."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor, Qwen2VLProcessor

from .qwen2_5_vl import build_tiny_qwen2_5_vl


LATENT_CHANNELS = 4


def build_tiny_qwen_image(folder: str | Path, seed: int = 0) -> Path:
    """
    Builds a Qwen-Image pipeline with random weights and saves it in the format of the real one.

    All parts are the real classes at tiny size: two double-stream blocks, the Qwen2.5-VL of
    [`build_tiny_qwen2_5_vl`] as text encoder, a VAE, the scheduler with the real settings. Images are multiples of 4
    pixels, one token for each 4 x 4 pixels. The weights are such that the prompt and its guidance show in the pixels.

    Args:
        folder (`str` or `Path`):
            Where to save it; `DiffusionPipeline.from_pretrained(folder)` loads it.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights.

    Returns:
        `Path`: the folder.
    """
    folder = Path(folder)
    parts, _ = _build_parts(num_halvings=1, seed=seed)
    QwenImagePipeline(**parts).save_pretrained(folder)
    return folder


def build_tiny_qwen_image_edit(folder: str | Path, seed: int = 0) -> Path:
    """
    Builds a Qwen-Image-Edit pipeline with random weights and saves it in the format of the real one.

    As [`build_tiny_qwen_image`], with two differences. The VAE shrinks images eightfold, as the real one does, because
    the pipeline enlarges every source image to about 1024 x 1024 pixels: images are multiples of 16 pixels, one token
    for each 16 x 16, and a source is about 4096 tokens of the transformer. The text encoder sees a source as 16 tokens
    at most.

    Args:
        folder (`str` or `Path`):
            Where to save it; `DiffusionPipeline.from_pretrained(folder)` loads it.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights.

    Returns:
        `Path`: the folder.
    """
    folder = Path(folder)
    parts, processor = _build_parts(num_halvings=3, seed=seed)
    QwenImageEditPipeline(**parts, processor=processor).save_pretrained(folder)
    return folder


def build_tiny_qwen_image_edit_plus(folder: str | Path, seed: int = 0) -> Path:
    """
    Builds a Qwen-Image-Edit-Plus pipeline, which takes several source images, with random weights.

    The parts, and for a seed the weights, are those of [`build_tiny_qwen_image_edit`].

    Args:
        folder (`str` or `Path`):
            Where to save it; `DiffusionPipeline.from_pretrained(folder)` loads it.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights.

    Returns:
        `Path`: the folder.
    """
    folder = Path(folder)
    parts, processor = _build_parts(num_halvings=3, seed=seed)
    QwenImageEditPlusPipeline(**parts, processor=processor).save_pretrained(folder)
    return folder


def _build_parts(num_halvings: int, seed: int) -> tuple[dict, Qwen2VLProcessor]:
    """What the three pipelines share, by argument name, and the processor of the edit pipelines."""
    text_encoder, processor = _build_text_encoder(seed)
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random state as it is
        torch.manual_seed(seed)
        transformer = QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=text_encoder.config.text_config.hidden_size,
            axes_dims_rope=(4, 6, 6),
        )
        vae = AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1] + [2] * num_halvings,
            num_res_blocks=1,
            temperal_downsample=[False] + [True] * (num_halvings - 1),
            latents_mean=[0.1, -0.1, 0.2, -0.2],
            latents_std=[0.3, 0.4, 0.3, 0.4],
        )
        _draw_weights(transformer)
        _draw_weights(vae, gain=3**0.5)  # of an image, one of the three time steps of a kernel sees anything
    # Random blocks all but ignore what they attend to. With larger gates, sharper attention and louder text, the
    # prompt and the source images show in the pixels.
    with torch.no_grad():
        for block in transformer.transformer_blocks:
            for modulation in (block.img_mod, block.txt_mod):
                modulation[1].weight *= 2
            for query_norm in (block.attn.norm_q, block.attn.norm_added_q):
                query_norm.weight *= 3
            block.attn.add_v_proj.weight *= 3
    parts = {
        "transformer": transformer,
        "vae": vae,
        "text_encoder": text_encoder,
        "tokenizer": processor.tokenizer,
        "scheduler": FlowMatchEulerDiscreteScheduler(
            shift=1.0,
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
            time_shift_type="exponential",
        ),
    }
    return parts, processor


def _build_text_encoder(seed: int) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2VLProcessor]:
    with TemporaryDirectory() as folder:
        build_tiny_qwen2_5_vl(folder, seed=seed)
        text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
        processor = Qwen2_5_VLProcessor.from_pretrained(folder)
    # The edit pipelines name the class of Qwen2-VL, whose images are processed in the same way
    return text_encoder, Qwen2VLProcessor(
        image_processor=processor.image_processor,
        tokenizer=processor.tokenizer,
        video_processor=processor.video_processor,
        chat_template=processor.chat_template,
    )


def _draw_weights(model: nn.Module, gain: float = 1.0) -> None:
    # Outputs as large as inputs and no biases: with the small weights and the biases of the layers' own initialisation
    # every image comes out nearly the same
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d):
            nn.init.normal_(layer.weight, std=gain * layer.weight[0].numel() ** -0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
