# SPDX-License-Identifier: Apache-2.0
"""Build tiny Qwen-Image, Qwen-Image-Edit, Qwen-Image-Edit-Plus and Qwen-Image-2.1 pipelines."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import nn
from transformers import (
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from paco_trl.tiny.parts import enlarge, save, weights_of
from paco_trl.tiny.qwen2_5_vl import (
    CHAT_TEMPLATE,
    build_model_and_processor,
    token_ids,
    train_judge_tokenizer,
    vision_token_ids,
)

from .parts import CONFIGS


def build_tiny_qwen_image(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a Qwen-Image pipeline.

    The text encoder is [`build_tiny_qwen2_5_vl`]. Images are multiples of 4 pixels, one token for each 4 x 4 pixels.
    Prompt and guidance change the pixels visibly.
    """
    parts, _ = _build_parts(num_halvings=1, seed=seed)
    return save(QwenImagePipeline(**parts), folder)


def build_tiny_qwen_image_edit(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a Qwen-Image-Edit pipeline like [`build_tiny_qwen_image`].

    The pipeline enlarges every source image to about 1024 x 1024 pixels, so the VAE shrinks images eightfold: images
    are multiples of 16 pixels, and a source is about 4096 tokens, 16 at most for the text encoder.
    """
    parts, processor = _build_parts(num_halvings=3, seed=seed)
    return save(QwenImageEditPipeline(**parts, processor=processor), folder)


def build_tiny_qwen_image_edit_plus(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a Qwen-Image-Edit-Plus pipeline, which takes several source images.

    For a seed, its parts and weights are those of [`build_tiny_qwen_image_edit`].
    """
    parts, processor = _build_parts(num_halvings=3, seed=seed)
    return save(QwenImageEditPlusPipeline(**parts, processor=processor), folder)


def _build_parts(num_halvings: int, seed: int) -> tuple[dict, Qwen2VLProcessor]:
    """Build the parts of all three pipelines, by name, and the processor of the editing pipelines."""
    text_encoder, processor = build_model_and_processor(seed, Qwen2VLProcessor)  # which editing pipelines require
    with weights_of(seed):
        transformer = QwenImageTransformer2DModel(**CONFIGS["qwen_image_transformer"])
        vae = AutoencoderKLQwenImage(
            **CONFIGS["qwen_image_vae"],
            dim_mult=[1] + [2] * num_halvings,
            temperal_downsample=[False] + [True] * (num_halvings - 1),
        )
        sample_weights(transformer)
        sample_weights(vae, gain=3**0.5)  # only one of a kernel's three time steps sees an image
    # Random blocks almost ignore what they attend to. With larger gates, sharper attention and larger text values, the
    # prompt and the source images change the pixels.
    with torch.no_grad():
        for block in transformer.transformer_blocks:
            for modulation in (block.img_mod, block.txt_mod):
                modulation[1].weight *= 2
            for query_norm in (block.attn.norm_q, block.attn.norm_added_q):
                query_norm.weight *= 3
            block.attn.add_v_proj.weight *= 3
    scheduler = FlowMatchEulerDiscreteScheduler(**CONFIGS["qwen_image_scheduler"])
    parts = {"scheduler": scheduler, "vae": vae, "text_encoder": text_encoder, "transformer": transformer}
    return {**parts, "tokenizer": processor.tokenizer}, processor


def sample_weights(model: nn.Module, gain: float = 1.0) -> None:
    """Sample weights with outputs as large as inputs and no biases; the usual ones make all images nearly the same."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d):
            nn.init.normal_(layer.weight, std=gain * layer.weight[0].numel() ** -0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def build_tiny_qwen_image_21(folder: str | Path, seed: int = 0) -> Path:
    """
    Build a Qwen-Image-2.1 pipeline, which generates and edits.

    As in the real one, the VAE shrinks images sixteenfold and has an alpha channel, and images are multiples of 32
    pixels. The pipeline reads a source image at about 1024 x 1024 pixels, 4096 tokens.
    """
    tokenizer = train_judge_tokenizer()
    config = Qwen3VLConfig(**CONFIGS["qwen3_vl"], **vision_token_ids(tokenizer))
    config.text_config.update(token_ids(tokenizer))
    with weights_of(seed):
        text_encoder = Qwen3VLForConditionalGeneration(config)
        transformer = QwenImage21Transformer2DModel(**CONFIGS["qwen_image_21_transformer"])
        vae = AutoencoderKLQwenImage21(**CONFIGS["qwen_image_21_vae"])
        sample_weights(transformer)
        sample_weights(vae)
    # So that the prompt, the source images and the time change the pixels
    enlarge(transformer, "attn.to_q.weight", "modulation.1.weight")
    image_processor = Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 32**2, "longest_edge": 2048**2})
    processor = Qwen3VLProcessor(image_processor, tokenizer, Qwen3VLVideoProcessor(), CHAT_TEMPLATE)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return save(QwenImage21Pipeline(scheduler, vae, text_encoder, processor, transformer), folder)
