# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image: true CFG of two calls, rescaled to the norm of the conditional prediction; editing with it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image

from .base import DUAL_STREAM_ATTENTION, Family, feed_forward, packed_call_at, true_guidance_prompt


# Default length to which the pipeline truncates prompts
MAX_TOKENS = 512

# Areas in pixels at which source images are read: by the VAE, and by the text encoder of the plus version
IMAGE_AREA = 1024 * 1024
PLUS_CONDITION_AREA = 384 * 384


class QwenImageFamily(Family):
    """[`~diffusers.QwenImagePipeline`]."""

    # As the paper's targets for FLUX.1
    lora_target_modules = [*DUAL_STREAM_ATTENTION, *feed_forward("img_mlp", "txt_mlp")]
    text_encoders = ("text_encoder",)
    max_calls = 2
    has_fixed_prompt_length = False
    call_at = staticmethod(packed_call_at)

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        return _embeddings(pipeline.encode_prompt(prompt, device=device, max_sequence_length=MAX_TOKENS))

    def is_truncated(self, pipeline, prompt):
        tokens = pipeline.tokenizer(pipeline.prompt_template_encode.format(prompt)).input_ids
        return len(tokens) - pipeline.prompt_template_encode_start_idx > MAX_TOKENS

    def resolve_negative_prompt(self, pipeline, guidance_scale, negative_prompt):
        return true_guidance_prompt(pipeline, guidance_scale, negative_prompt, default=None)

    def unused_layers(self, transformer):
        # The text output of the last block is unused, but the image attends to the text's keys and values
        layers = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
        return [f"transformer_blocks.{transformer.config.num_layers - 1}.{layer}" for layer in layers]

    def call_arguments(self, height, width, guidance_scale, images):
        return {"height": height, "width": width, "true_cfg_scale": guidance_scale}

    def guide(self, conditional, unconditional, guidance_scale):
        combined = super().guide(conditional, unconditional, guidance_scale)  # (B, tokens, channels)
        norm = torch.norm(conditional, dim=-1, keepdim=True)
        return combined * (norm / torch.norm(combined, dim=-1, keepdim=True))


class QwenImageEditFamily(QwenImageFamily):
    """[`~diffusers.QwenImageEditPipeline`]: its text encoder and its VAE both see the source image."""

    max_source_images = 1
    requires_source_image = True
    prompt_sees_images = True
    # The paper's settings, Part 3. As in the published code, the only reward is not tamed; the negative prompt is from
    # the model's own examples.
    training_defaults = {
        "edits": True, "rewards": ["edit"], "multi_objective_aggregation": "sum_then_normalize",
        "num_inference_steps": 10, "sde_steps": [1, 2, 3, 4], "noise_level": 1.0, "guidance_scale": 4.0,
        "negative_prompt": " ", "resolution_scale": 0.375,
    }  # fmt: skip

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        image = self.prepare_image(pipeline, images[0], scale)
        return _embeddings(pipeline.encode_prompt(prompt, image=image, device=device))

    def is_truncated(self, pipeline, prompt):
        return False  # the pipeline reads the whole prompt

    def call_arguments(self, height, width, guidance_scale, images):
        return super().call_arguments(height, width, guidance_scale, images) | {"image": images[0]}

    def edited_size(self, pipeline, sizes, area):
        width, height = dimensions(pipeline, area, sizes[0][0] / sizes[0][1])
        return height, width

    def prepare_image(self, pipeline, image, scale):
        width, height = dimensions(pipeline, IMAGE_AREA * scale**2, image.width / image.height)
        return pipeline.image_processor.resize(image, height, width)

    def image_pixels(self, pipeline, image):
        return super().image_pixels(pipeline, image).unsqueeze(2)  # (1, 3, 1, H, W): a video of one frame

    def generation_context(self, pipeline, images):
        return fixed_sizes(pipeline, images)


class QwenImageEditPlusFamily(QwenImageEditFamily):
    """[`~diffusers.QwenImageEditPlusPipeline`] (2509 and later): up to three source images."""

    max_source_images = 3  # number in training, according to the model cards

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        seen = []  # always at its own small size
        for image in images:
            width, height = dimensions(pipeline, PLUS_CONDITION_AREA, image.width / image.height)
            seen.append(pipeline.image_processor.resize(image, height, width))
        return _embeddings(pipeline.encode_prompt(prompt, image=seen, device=device))

    def edited_size(self, pipeline, sizes, area):
        return super().edited_size(pipeline, sizes[-1:], area)  # the pipeline uses the last source

    def call_arguments(self, height, width, guidance_scale, images):
        return super().call_arguments(height, width, guidance_scale, images) | {"image": images}

    def batch_arguments(self, arguments):
        # The pipeline refuses several prompts in a call, but not several images of one
        batch_size = len(arguments["prompt_embeds"])
        return {name: tensor[:1] for name, tensor in arguments.items()} | {"num_images_per_prompt": batch_size}


@contextmanager
def fixed_sizes(pipeline, images: list[Image.Image]) -> Iterator[None]:
    """Keep the pipeline from resizing source images."""
    # The area is hard-coded in the pipeline's call (diffusers 0.42). Within the context, the module's function that
    # computes a size from area and aspect ratio returns the size that each image already has.
    module: Any = sys.modules[type(pipeline).__module__]
    original_calculate_dimensions = module.calculate_dimensions
    extra = original_calculate_dimensions(IMAGE_AREA, 1.0)[2:]  # a third value in some pipelines
    sizes = {image.width / image.height: image.size for image in images}
    module.calculate_dimensions = lambda area, ratio: (*sizes[ratio], *extra)
    try:
        yield
    finally:
        module.calculate_dimensions = original_calculate_dimensions


def dimensions(pipeline, area: float, ratio: float) -> tuple[int, int]:
    """Return width and height for an area and an aspect ratio as the pipeline does, at least 32."""
    width, height, *_ = sys.modules[type(pipeline).__module__].calculate_dimensions(area, ratio)
    return max(width, 32), max(height, 32)


def _embeddings(encoded: tuple[torch.Tensor, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    prompt_embeds, mask = encoded
    if mask is None:  # all tokens are valid; without a mask the pipeline warns
        mask = torch.ones(prompt_embeds.shape[:2], dtype=torch.long, device=prompt_embeds.device)
    return {"prompt_embeds": prompt_embeds, "prompt_embeds_mask": mask}  # (1, L, D), (1, L)
