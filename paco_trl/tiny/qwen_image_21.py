# SPDX-License-Identifier: Apache-2.0
"""Build a tiny Qwen-Image-2.1 pipeline."""

from pathlib import Path

from diffusers import (
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImage21Transformer2DModel,
)
from transformers import (
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from .parts import CONFIGS, enlarge, save, weights_of
from .qwen2_5_vl import CHAT_TEMPLATE, token_ids, train_judge_tokenizer, vision_token_ids
from .qwen_image import sample_weights


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
