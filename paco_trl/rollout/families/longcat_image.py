# SPDX-License-Identifier: Apache-2.0
"""LongCat-Image, editing with it, and Ovis-Image: the layers and calls of FLUX.1, with true CFG of two calls."""

from contextlib import contextmanager

import torch
from diffusers.pipelines.longcat_image.pipeline_longcat_image import split_quotation

from ..resolution import training_size
from .base import Family, encoding_by, true_guidance_prompt
from .flux import FluxFamily
from .qwen_image import IMAGE_AREA, dimensions, fixed_sizes


# Default length to which Ovis-Image truncates prompts, next to its own words
OVIS_MAX_TOKENS = 256


class LongCatImageFamily(FluxFamily):
    """[`~diffusers.LongCatImagePipeline`], without its rewriting of prompts."""

    text_encoders = ("text_encoder",)
    max_calls = 2

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        return {"prompt_embeds": pipeline.encode_prompt(prompt)[0]}  # (1, 512, 3584)

    def max_sequence_length(self, pipeline):
        return None  # its call takes none

    def is_truncated(self, pipeline, prompt):
        # Each character in quotation marks is tokenized on its own
        parts = [list(text) if is_quoted else [text] for text, is_quoted in split_quotation(prompt)]
        tokens = [pipeline.tokenizer(part, add_special_tokens=False).input_ids for part in sum(parts, [])]
        return sum(map(len, tokens)) > pipeline.tokenizer_max_length

    def resolve_negative_prompt(self, pipeline, guidance_scale, negative_prompt):
        return true_guidance_prompt(pipeline, guidance_scale, negative_prompt, default="")

    def call_arguments(self, height, width, guidance_scale, images):
        return super().call_arguments(height, width, guidance_scale, images) | {"enable_prompt_rewrite": False}

    def generation_context(self, pipeline, images):
        original_encode_prompt = pipeline.encode_prompt
        # The pipeline counts prompts even if it is given their embeddings (diffusers 0.42)
        return encoding_by(
            pipeline,
            lambda **arguments: original_encode_prompt(**arguments | {"prompt": list(arguments["prompt_embeds"])}),
        )

    def guide(self, conditional, unconditional, guidance_scale):
        combined = super().guide(conditional, unconditional, guidance_scale)  # (B, tokens, channels)
        norm = torch.norm(conditional, dim=-1, keepdim=True)
        return combined * (norm / (torch.norm(combined, dim=-1, keepdim=True) + 1e-8)).clamp(min=0.0, max=1.0)


class LongCatImageEditFamily(LongCatImageFamily):
    """[`~diffusers.LongCatImageEditPipeline`]: the edited image has the size at which the source is read."""

    max_source_images = 1
    requires_source_image = True
    prompt_sees_images = True
    guide = Family.guide

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        image = self.prepare_image(pipeline, images[0], scale)
        seen = pipeline.image_processor.resize(image, image.height // 2, image.width // 2)
        return {
            "prompt_embeds": pipeline.encode_prompt(prompt, image=seen)[0]
        }  # (1, tokens of the source + 512, 3584)

    def call_arguments(self, height, width, guidance_scale, images):
        if (width, height) != images[0].size:
            raise ValueError(
                f"{width} x {height} pixels were requested, but LongCat-Image-Edit generates the size at which it "
                f"reads the source, {images[0].width} x {images[0].height}. Leave out size and layout of the row."
            )
        return {"guidance_scale": guidance_scale, "image": images[0]}

    def edited_size(self, pipeline, sizes, area):
        if area != IMAGE_AREA:
            raise ValueError(
                f"`height` x `width` is {area} pixels, but {type(pipeline).__name__} always generates about 1024 x "
                "1024. Set both to 1024, and `resolution_scale` for the size in training."
            )
        return dimensions(pipeline, area, sizes[0][0] / sizes[0][1])[::-1]

    def prepare_image(self, pipeline, image, scale):
        height, width = self.edited_size(pipeline, [image.size], IMAGE_AREA)
        height, width = training_size(height, width, 1, 1, scale, self.size_multiple(pipeline))
        return pipeline.image_processor.resize(image, height, width)

    @contextmanager
    def generation_context(self, pipeline, images):
        with super().generation_context(pipeline, images), fixed_sizes(pipeline, images):
            yield


class OvisImageFamily(LongCatImageFamily):
    """[`~diffusers.OvisImagePipeline`]."""

    guide = Family.guide

    def encode_prompt(self, pipeline, prompt, device, images=(), scale=1.0):
        options = {"do_classifier_free_guidance": False, "device": device, "max_sequence_length": OVIS_MAX_TOKENS}
        return {"prompt_embeds": pipeline.encode_prompt(prompt, **options)[0]}  # (1, 256, 2048)

    def is_truncated(self, pipeline, prompt):
        tokens = pipeline.tokenizer(*pipeline._get_messages(prompt), add_special_tokens=False).input_ids
        return len(tokens) > OVIS_MAX_TOKENS + pipeline.user_prompt_begin_id

    def call_arguments(self, height, width, guidance_scale, images):
        # The pipeline refuses its default of "" next to embeddings
        return FluxFamily.call_arguments(self, height, width, guidance_scale, images) | {"negative_prompt": None}

    def generation_context(self, pipeline, images):
        original_encode_prompt = pipeline.encode_prompt
        names = ("prompt_embeds", "negative_prompt_embeds")
        # The pipeline casts embeddings, and thereby the latents, to the dtype of the text encoder
        return encoding_by(
            pipeline,
            lambda **arguments: (*(arguments[name] for name in names), *original_encode_prompt(**arguments)[2:]),
        )
