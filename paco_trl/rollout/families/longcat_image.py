# SPDX-License-Identifier: Apache-2.0
"""LongCat-Image: true guidance of two calls, shortened to the norm of the conditional prediction; editing with it."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from PIL import Image

from ..resolution import training_size
from .base import Family, encoding_by, true_guidance_prompt
from .flux import FluxFamily
from .qwen_image import IMAGE_AREA, dimensions, fixed_sizes


class LongCatImageFamily(FluxFamily):
    """[`~diffusers.LongCatImagePipeline`]: the layers and calls of FLUX.1. It does not rewrite prompts here."""

    text_encoders = ("text_encoder",)
    max_calls = 2

    def encode_prompt(
        self, pipeline, prompt: str, device: torch.device, images: Sequence[Image.Image] = (), scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        return {"prompt_embeds": pipeline.encode_prompt(prompt)[0]}  # (1, 512, 3584)

    def max_sequence_length(self, pipeline) -> None:
        return None  # its call takes none

    def resolve_negative_prompt(self, pipeline, guidance_scale: float, negative_prompt: str | None) -> str | None:
        return true_guidance_prompt(pipeline, guidance_scale, negative_prompt, default="")

    def call_arguments(self, height: int, width: int, guidance_scale: float, images: list[Image.Image]) -> dict:
        return super().call_arguments(height, width, guidance_scale, images) | {"enable_prompt_rewrite": False}

    def generation_context(self, pipeline, images: list[Image.Image]) -> AbstractContextManager:
        own = pipeline.encode_prompt
        # It counts prompts even if it is given their embeddings (diffusers 0.42)
        return encoding_by(pipeline, lambda **given: own(**given | {"prompt": list(given["prompt_embeds"])}))

    def guide(self, conditional: torch.Tensor, unconditional: torch.Tensor, guidance_scale: float) -> torch.Tensor:
        combined = super().guide(conditional, unconditional, guidance_scale)  # (B, tokens, channels)
        norm = torch.norm(conditional, dim=-1, keepdim=True)
        return combined * (norm / (torch.norm(combined, dim=-1, keepdim=True) + 1e-8)).clamp(min=0.0, max=1.0)


class LongCatImageEditFamily(LongCatImageFamily):
    """[`~diffusers.LongCatImageEditPipeline`]: the edited image has the size at which the source is read."""

    max_images = 1
    needs_images = True
    prompt_sees_images = True
    guide = Family.guide

    def encode_prompt(
        self, pipeline, prompt: str, device: torch.device, images: Sequence[Image.Image] = (), scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        image = self.prepare_image(pipeline, images[0], scale)
        seen = pipeline.image_processor.resize(image, image.height // 2, image.width // 2)
        try:
            return {"prompt_embeds": pipeline.encode_prompt(prompt, image=seen)[0]}  # (1, of the source + 512, 3584)
        except TypeError as error:  # of the warning that it truncates (diffusers 0.42)
            limit = f"{type(pipeline).__name__} fails on an instruction of more than {pipeline.tokenizer_max_length} tokens"
            raise ValueError(f"{limit} ({error}). Shorten {prompt[:50]!r}...") from error

    def call_arguments(self, height: int, width: int, guidance_scale: float, images: list[Image.Image]) -> dict:
        if (width, height) != images[0].size:
            raise ValueError(
                f"{width} x {height} pixels were requested, but LongCat-Image-Edit generates images of the size at which "
                f"it reads the source, {images[0].width} x {images[0].height}. Leave out size and layout of the row."
            )
        return {"guidance_scale": guidance_scale, "image": images[0]}

    def edited_size(self, pipeline, sizes: list[tuple[int, int]], area: int) -> tuple[int, int]:
        if area != IMAGE_AREA:
            problem = f"`height` x `width` is {area} pixels, but {type(pipeline).__name__} always generates about 1024 x 1024"
            raise ValueError(f"{problem}. Set both to 1024, and `resolution_scale` for the size in training.")
        return dimensions(pipeline, area, sizes[0][0] / sizes[0][1])[::-1]

    def prepare_image(self, pipeline, image: Image.Image, scale: float) -> Image.Image:
        size = self.edited_size(pipeline, [image.size], IMAGE_AREA)
        return pipeline.image_processor.resize(image, *training_size(*size, 1, 1, scale, self.size_multiple(pipeline)))

    @contextmanager
    def generation_context(self, pipeline, images: list[Image.Image]) -> Iterator[None]:
        with super().generation_context(pipeline, images), fixed_sizes(pipeline, images):
            yield
