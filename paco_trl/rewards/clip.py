# SPDX-License-Identifier: Apache-2.0
"""CLIP embeddings for the rewards and scorers that compare them."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState
from PIL import Image
from transformers import CLIPModel, CLIPProcessor
from transformers.masking_utils import create_causal_mask

from ..utils.deepspeed import without_zero3_init
from ..utils.devices import to_device
from ..utils.images import to_rgb
from ..utils.names import check_model_name, public_name
from .columns import column_of


CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


class ClipEmbedder:
    """Unit vectors of images and texts from a CLIP, frozen, in float32 by default, on the CPU until the first use."""

    __name__: str  # of the subclasses that are rewards

    def __init__(
        self,
        model: str | Path = CLIP_H,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
        *,
        processor: str | Path | None = None,
    ):
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}, but must be at least 1.")
        check_model_name(model)
        self.device = device
        self.batch_size = batch_size
        self.model_name = public_name(str(model))  # for cards
        with without_zero3_init():
            self.model = CLIPModel.from_pretrained(model, dtype=dtype or torch.float32, use_safetensors=True)
        self.model.eval().requires_grad_(False)
        self.processor = CLIPProcessor.from_pretrained(model if processor is None else processor)

    def embed_images(self, images: list[Image.Image], names: list[str]) -> torch.Tensor:
        """Embed images as unit vectors `(len(images), D)` on the CPU, each object once; `names` are for errors."""
        return self.embed(images, names, [])[0]

    def embed_texts(self, texts: list[str]) -> torch.Tensor:
        """Embed texts, truncated to the model's length, as unit vectors `(len(texts), D)` on the CPU, each text once."""
        return self.embed([], [], texts)[1]

    def embed(
        self, images: list[Image.Image], names: list[str], texts: list[str]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embed images and texts as [`embed_images`] and [`embed_texts`] do, with one wait for the device."""
        objects = {id(image): (image, name) for image, name in zip(images, names, strict=True)}
        distinct = dict.fromkeys(texts)
        device = torch.device(self.device) if self.device is not None else PartialState().device
        self.model.to(device)
        # A surrounding autocast would change the scores
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            embeds = [
                features(items[start : start + self.batch_size])
                for items, features in (
                    (list(objects.values()), self._image_features),
                    (list(distinct), self._text_features),
                )
                for start in range(0, len(items), self.batch_size)
            ]
        # One copy: indexing on the accelerator waits for it as well
        embeds = torch.cat(embeds).float().cpu() if embeds else torch.empty(0, self.model.config.projection_dim)
        embeds = torch.nn.functional.normalize(embeds, dim=-1)
        rows = {key: row for row, key in enumerate((*objects, *distinct))}
        return embeds[[rows[id(image)] for image in images]], embeds[[rows[text] for text in texts]]  # (..., D)

    def _image_features(self, batch):
        inputs = self.processor.image_processor(
            images=[to_rgb(image, name) for image, name in batch], return_tensors="pt"
        )
        pixel_values = to_device(inputs["pixel_values"], self.model.device).to(self.model.dtype)  # (B, 3, H, W)
        return self.model.get_image_features(pixel_values=pixel_values).pooler_output  # (B, D)

    def _text_features(self, batch):
        inputs = self.processor.tokenizer(
            batch,
            padding=True,
            truncation=True,
            # A tokenizer saved without a length claims 1e30
            max_length=self.model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        )
        # As the model makes it, which reads it back from the device; `None` where nothing is padded
        shape = torch.empty(*inputs["input_ids"].shape, 1, dtype=self.model.dtype)
        mask = create_causal_mask(
            self.model.text_model.config, shape, attention_mask=inputs["attention_mask"], past_key_values=None
        )
        return self.model.get_text_features(
            input_ids=to_device(inputs["input_ids"], self.model.device),
            attention_mask=None if mask is None else to_device(mask, self.model.device),
        ).pooler_output  # (B, D)


def check_panels(
    metric: str,
    completions: list[Image.Image],
    panels: list[list[str]] | None,
    panel_images: list[list[Image.Image]] | None,
) -> tuple[list[list[str]], list[list[Image.Image]]]:
    """Check that each completion has a text for each of its panels, and return the two columns."""
    panels = column_of(panels, "panels", len(completions), metric)
    panel_images = column_of(panel_images, "panel_images", len(completions), metric)
    for index, (texts, images) in enumerate(zip(panels, panel_images, strict=True)):
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(
                f"`panels` of completion {index} is {texts!r}, but {metric} requires a text for each panel. Fill it in."
            )
        if not images or len(images) != len(texts):
            raise ValueError(
                f"Completion {index} has {len(images or [])} panel images and {len(texts)} panel texts. Check "
                "`rows`, `cols` and `panels` in the dataset."
            )
    return panels, panel_images


def score_texts(
    embedder: ClipEmbedder,
    metric: str,
    images: list[list[Image.Image]],
    texts: list[list[str]],
    scale: float = 1.0,
    log_metric: Callable[[str, float], None] | None = None,
) -> list[float]:
    """Average the cosine of each image with its text, times `scale`, over the images of a completion."""
    distinct = list(dict.fromkeys(text for row in texts for text in row))
    if log_metric is not None and distinct:
        lengths = [len(ids) for ids in embedder.processor.tokenizer(distinct)["input_ids"]]
        limit = embedder.model.config.text_config.max_position_embeddings
        truncated = sum(length > limit for length in lengths) / len(lengths)
        log_metric(f"{embedder.__name__}/truncated_texts", truncated)

    names = [
        f"Completion {index}" if len(row) == 1 else f"Panel {number} of completion {index}"
        for index, row in enumerate(images)
        for number in range(len(row))
    ]
    image_embeds, text_embeds = embedder.embed(
        [image for row in images for image in row], names, [text for row in texts for text in row]
    )  # (images, D)
    similarities = scale * (image_embeds * text_embeds).sum(dim=-1)  # (images,)

    scores = [row.mean().item() for row in similarities.split([len(row) for row in images])]
    return check_finite(scores, f"{metric} score of completion")


def check_finite(scores: list[float], what: str) -> list[float]:
    """Check that all scores are finite; `what` names one, followed by its index."""
    for index, score in enumerate(scores):
        if not math.isfinite(score):
            raise ValueError(
                f"The {what} {index} is {score}: the weights of the model are not finite, or overflow in its dtype. Use "
                "`dtype=torch.float32`, or check the weights."
            )
    return scores
