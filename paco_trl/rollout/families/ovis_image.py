# SPDX-License-Identifier: Apache-2.0
"""Ovis-Image: true guidance of two calls."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from PIL import Image

from .base import Family, encoding_by
from .flux import FluxFamily
from .longcat_image import LongCatImageFamily


# Default length to which the pipeline truncates prompts, next to its own words
MAX_TOKENS = 256


class OvisImageFamily(LongCatImageFamily):
    """[`~diffusers.OvisImagePipeline`]: the layers and calls of FLUX.1."""

    guide = Family.guide

    def encode_prompt(
        self, pipeline, prompt: str, device: torch.device, images: Sequence[Image.Image] = (), scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        options = {"do_classifier_free_guidance": False, "device": device, "max_sequence_length": MAX_TOKENS}
        return {"prompt_embeds": pipeline.encode_prompt(prompt, **options)[0]}  # (1, 256, 2048)

    def is_truncated(self, pipeline, prompt: str) -> bool:
        tokens = pipeline.tokenizer(*pipeline._get_messages(prompt), add_special_tokens=False).input_ids
        return len(tokens) > MAX_TOKENS + pipeline.user_prompt_begin_id

    def call_arguments(self, height: int, width: int, guidance_scale: float, images: list[Image.Image]) -> dict:
        # The pipeline refuses its default of "" next to embeddings
        return FluxFamily.call_arguments(self, height, width, guidance_scale, images) | {"negative_prompt": None}

    def generation_context(self, pipeline, images: list[Image.Image]) -> AbstractContextManager:
        own, names = pipeline.encode_prompt, ("prompt_embeds", "negative_prompt_embeds")
        # It casts embeddings, and thereby the latents, to the dtype of the text encoder
        return encoding_by(pipeline, lambda **given: (*(given[name] for name in names), *own(**given)[2:]))
