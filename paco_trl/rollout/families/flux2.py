# SPDX-License-Identifier: Apache-2.0
"""FLUX.2: dev, with distilled guidance, and klein, with true CFG of two calls. Both also edit images."""

import torch
from PIL import Image

from .base import DUAL_STREAM_ATTENTION, Family, count_chat_tokens, packed_call_at, true_guidance_prompt


# Default length to which the pipelines truncate and pad prompts
MAX_TOKENS = 512

# Larger source images are shrunk to this area, in pixels
IMAGE_AREA = 1024 * 1024

# The pipelines refuse source images with a shorter side, in pixels, or a larger aspect ratio
MIN_SIDE = 64
MAX_RATIO = 8


class Flux2Family(Family):
    """[`~diffusers.Flux2Pipeline`]: FLUX.2-dev."""

    # As the paper's targets for FLUX.1, and the fused projections of the single-stream blocks, where most of the depth
    # is. Their `attn.to_out` would also match a container of the other blocks; the paper leaves it out for FLUX.1 too.
    lora_target_modules = [*DUAL_STREAM_ATTENTION, "attn.to_qkv_mlp_proj"]
    lora_target_modules += ["ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"]
    text_encoders = ("text_encoder",)
    max_source_images = 6  # recommended maximum
    call_at = staticmethod(packed_call_at)

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        prompt_embeds, _ = pipeline.encode_prompt(prompt, device=device, max_sequence_length=MAX_TOKENS)
        return {"prompt_embeds": prompt_embeds}  # (1, 512, 15360)

    def is_truncated(self, pipeline, prompt):
        messages = [
            {"role": "system", "content": [{"type": "text", "text": pipeline.system_message}]},
            {"role": "user", "content": [{"type": "text", "text": prompt}]},
        ]
        tokens = pipeline.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        return torch.as_tensor(tokens).numel() > MAX_TOKENS

    def call_arguments(self, height, width, guidance_scale, images):
        arguments = super().call_arguments(height, width, guidance_scale, images)
        return arguments | {"image": images} if images else arguments

    def check_image_size(self, height, width):
        if min(width, height) < MIN_SIDE or max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(
                f"a source image has {width} x {height} pixels, but FLUX.2 takes none with a side under {MIN_SIDE} "
                f"or an aspect ratio above {MAX_RATIO}."
            )

    def prepare_image(self, pipeline, image, scale):
        processor = pipeline.image_processor
        step = self.size_multiple(pipeline)
        if image.width * image.height > IMAGE_AREA:
            image = processor._resize_to_target_area(image, IMAGE_AREA)
        if scale != 1.0:
            factor = max(scale, MIN_SIDE / min(image.size))
            image = image.resize([round(side * factor) for side in image.size], Image.Resampling.LANCZOS)
        # As in the pipeline: cropped, not resized, to the multiple
        return processor.resize(image, image.height // step * step, image.width // step * step, resize_mode="crop")


class Flux2KleinFamily(Flux2Family):
    """[`~diffusers.Flux2KleinPipeline`]: FLUX.2-klein, base or distilled."""

    max_calls = 2
    max_source_images = 4  # documented maximum
    # FLUX.2-klein-base-4B collapsed at 1e-4, and late at 1e-5: https://github.com/X-GenGroup/Flow-Factory/issues/108
    max_stable_epsilon = 1e-5

    def is_truncated(self, pipeline, prompt):
        return count_chat_tokens(pipeline.tokenizer, prompt, enable_thinking=False) > MAX_TOKENS

    def resolve_negative_prompt(self, pipeline, guidance_scale, negative_prompt):
        if not pipeline.config.is_distilled:
            return true_guidance_prompt(pipeline, guidance_scale, negative_prompt, default="")
        if guidance_scale > 1 or negative_prompt is not None:
            raise ValueError(
                f"`guidance_scale` is {guidance_scale} and `negative_prompt` {negative_prompt!r}, but this model, "
                "distilled to a few steps, ignores both. Set 1.0 and None."
            )
        return None
