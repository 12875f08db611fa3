# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-2.1: one pipeline for generation and editing, with true CFG of two calls, usually off."""

from contextlib import contextmanager

import torch

from .base import DUAL_STREAM_ATTENTION, Family, encoding_by, packed_call_at
from .qwen_image import QwenImageEditFamily, QwenImageFamily


class QwenImage21Family(QwenImageEditFamily):
    """[`~diffusers.QwenImage21Pipeline`]: the tokens of the image are the last of a single stream."""

    # As the paper's targets for FLUX.1
    lora_target_modules = [*DUAL_STREAM_ATTENTION[:4], "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out"]
    max_source_images = 3  # as for Qwen-Image-Edit-Plus; the pipeline has no limit
    requires_source_image = False
    training_defaults = {}  # it is made for a guidance of 1
    guide = Family.guide

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        prepared = [self.prepare_image(pipeline, image, scale) for image in images]
        prompt_embeds, _, is_image = pipeline.encode_prompt(prompt, image=prepared or None, device=device)
        expected = sum(image.width * image.height for image in prepared) // 32**2  # each is 2 x 2 of the transformer's
        if is_image.sum() != expected:
            limits = dict(pipeline.processor.image_processor.size)
            raise ValueError(f"at `resolution_scale` {scale} the processor resizes sources. Keep to {limits} pixels.")
        # (1, L, D), (1, L): 1 for text, 2 for source images
        return {"prompt_embeds": prompt_embeds, "prompt_embeds_mask": 1 + is_image.long()}

    def unused_layers(self, transformer):
        return []

    def call_arguments(self, height, width, guidance_scale, images):
        arguments = QwenImageFamily.call_arguments(self, height, width, guidance_scale, images)
        # Keys and values of the text that are kept from the first step would have no gradient
        return arguments | {"use_kv_cache": False} | ({"image": images} if images else {})

    def edited_size(self, pipeline, sizes, area):
        return super().edited_size(pipeline, sizes[-1:], area)  # the pipeline uses the last source

    def prepare_image(self, pipeline, image, scale):
        return super().prepare_image(pipeline, image.convert("RGBA"), scale)

    @contextmanager
    def generation_context(self, pipeline, images):
        def encode(prompt_embeds_mask: torch.Tensor, **arguments) -> tuple:
            # The call has no argument for the places of source images (diffusers 0.42)
            return original_encode_prompt(
                prompt_embeds_mask=prompt_embeds_mask, image_pad_mask=prompt_embeds_mask == 2, **arguments
            )

        original_encode_prompt = pipeline.encode_prompt
        with encoding_by(pipeline, encode), super().generation_context(pipeline, images):
            yield

    def branches(self, outputs, sample):
        return super().branches([output[:, -sample.shape[1] :] for output in outputs], sample)

    def call_at(self, call, sample, sigma):
        tokens = call["hidden_states"]
        tokens = torch.cat([tokens[:, : tokens.shape[1] - sample.shape[1]], sample.to(tokens.dtype)], dim=1)
        return packed_call_at(call, sample, sigma) | {"hidden_states": tokens}
