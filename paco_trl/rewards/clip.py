# SPDX-License-Identifier: Apache-2.0
"""Embeddings of a CLIP: one way for every reward and scorer that compares them."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

from ..utils.deepspeed import without_zero3_init
from ..utils.images import to_rgb
from ..utils.names import public_name


class ClipEmbedder:
    """
    Unit vectors of images and texts, from a CLIP.

    The model is loaded at construction, frozen and in eval mode, and stays on the CPU until the first use. An image
    that is not square is cut to its central square if the processor does so, as those of the published CLIPs do.

    Args:
        model (`str` or `Path`):
            Hub id or folder of a [`~transformers.CLIPModel`], with weights in safetensors.
        processor (`str` or `Path`, *optional*):
            Hub id or folder of its [`~transformers.CLIPProcessor`]. If `None`, the model's.
        device (`str` or `torch.device`, *optional*):
            Device to embed on. Defaults to this process's own: its accelerator, or the CPU if there is none.
        dtype (`torch.dtype`, *optional*):
            Dtype of the model. Defaults to float32, whatever the dtype of the file.
        batch_size (`int`, *optional*, defaults to `32`):
            Images, or texts, per forward pass.
    """

    def __init__(
        self,
        model: str | Path,
        processor: str | Path | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
    ):
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}, but must be at least 1.")
        self.device = device
        self.batch_size = batch_size
        self.model_name = public_name(str(model))  # for cards
        with without_zero3_init():
            self.model = CLIPModel.from_pretrained(model, dtype=dtype or torch.float32, use_safetensors=True)
        self.model.eval().requires_grad_(False)
        self.processor = CLIPProcessor.from_pretrained(model if processor is None else processor)

    def embed_images(self, images: list[Image.Image], names: list[str]) -> torch.Tensor:
        """
        Embeds images. An object that is in the list several times goes through the model once.

        Args:
            images (`list[PIL.Image.Image]`):
                Images.
            names (`list[str]`):
                What each image is, for the error.

        Returns:
            `torch.Tensor` of shape (len(images), D): unit vectors, float32.

        Raises:
            ValueError: If an image cannot be converted to RGB.
        """
        objects = {id(image): (image, name) for image, name in zip(images, names, strict=True)}
        rows = {key: row for row, key in enumerate(objects)}
        return self._embed(list(objects.values()), self._image_features)[[rows[id(image)] for image in images]]

    def embed_texts(self, texts: list[str]) -> torch.Tensor:
        """
        Embeds texts, cut at the length that the model reads. Equal texts go through the model once.

        Args:
            texts (`list[str]`):
                Texts.

        Returns:
            `torch.Tensor` of shape (len(texts), D): unit vectors, float32.
        """
        rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        return self._embed(list(rows), self._text_features)[[rows[text] for text in texts]]

    def _embed(self, items, features):
        # Without an explicit device this is the process's own, known to accelerate in every kind of launch.
        device = torch.device(self.device) if self.device is not None else PartialState().device
        self.model.to(device)
        batches = [items[start : start + self.batch_size] for start in range(0, len(items), self.batch_size)]
        # A surrounding autocast would change the scores with the place they are computed in.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            embeds = [features(batch) for batch in batches]
        # An empty list has no batches.
        embeds = torch.cat(embeds).float() if embeds else torch.empty(0, self.model.config.projection_dim)
        return torch.nn.functional.normalize(embeds, dim=-1)  # (len(items), D)

    def _image_features(self, batch):
        inputs = self.processor.image_processor(
            images=[to_rgb(image, name) for image, name in batch], return_tensors="pt"
        )
        pixel_values = inputs["pixel_values"].to(self.model.device, self.model.dtype)  # (B, 3, H, W)
        # Since transformers 5 a model output whose pooler_output is the projected embedding.
        return self.model.get_image_features(pixel_values=pixel_values).pooler_output  # (B, D)

    def _text_features(self, batch):
        inputs = self.processor.tokenizer(
            batch,
            padding=True,
            truncation=True,
            # From the model, because a tokenizer saved without a length claims 1e30.
            max_length=self.model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.model.device)
        return self.model.get_text_features(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).pooler_output  # (B, D)


def check_panels(
    metric: str,
    completions: list[Image.Image],
    panels: list[list[str]] | None,
    panel_images: list[list[Image.Image]] | None,
) -> None:
    """
    Checks that each completion has a text for each of its panels.

    Args:
        metric (`str`):
            What compares them, for the error.
        completions (`list[PIL.Image.Image]`):
            Whole images.
        panels (`list[list[str]]`):
            Texts of the panels, for each completion.
        panel_images (`list[list[PIL.Image.Image]]`):
            Images of the panels, for each completion.

    Raises:
        ValueError: If a completion has no panel texts, an empty one, or not one per panel image.
    """
    for name, column in (("panels", panels), ("panel_images", panel_images)):
        if column is None:
            raise ValueError(
                f"{metric} compares each panel with its text, but got no `{name}`. `panels` (list of str) is a "
                "column of the dataset; `panel_images` comes from the trainer, or from `paco_trl.data.split_grid`."
            )
        if len(column) != len(completions):
            raise ValueError(
                f"`{name}` has {len(column)} entries for {len(completions)} completions. Pass one per completion."
            )
    for index, (texts, images) in enumerate(zip(panels, panel_images, strict=True)):
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError(
                f"`panels` of completion {index} is {texts!r}, but {metric} needs a text for each panel. Fill the "
                "column `panels` in the dataset."
            )
        if not images or len(images) != len(texts):
            raise ValueError(
                f"Completion {index} has {len(images or [])} panel images and {len(texts)} panel texts. Check "
                "`rows`, `cols` and `panels` in the dataset."
            )


def score_texts(
    embedder: ClipEmbedder,
    metric: str,
    images: list[list[Image.Image]],
    texts: list[list[str]],
    scale: float = 1.0,
    log_metric: Callable[[str, float], None] | None = None,
) -> list[float]:
    """
    Cosine of each image with its text, times `scale`, averaged over the images of a completion.

    Args:
        embedder ([`ClipEmbedder`]):
            A reward; its `__name__` is the group of the logged metric.
        metric (`str`):
            What the scores are, for the error.
        images (`list[list[PIL.Image.Image]]`):
            Images of each completion.
        texts (`list[list[str]]`):
            Their texts.
        scale (`float`, *optional*, defaults to `1.0`):
            Factor of the scores.
        log_metric (`Callable`, *optional*):
            The trainer's; gets `truncated_texts`, the share of the distinct texts that are longer than the model reads.

    Returns:
        `list[float]`: one score per completion.

    Raises:
        ValueError: If a score is not finite.
    """
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
    image_embeds = embedder.embed_images([image for row in images for image in row], names)  # (images, D)
    text_embeds = embedder.embed_texts([text for row in texts for text in row])  # (images, D)
    similarities = scale * (image_embeds * text_embeds).sum(dim=-1)  # (images,)

    scores = [row.mean().item() for row in similarities.split([len(row) for row in images])]
    for index, score in enumerate(scores):
        if not math.isfinite(score):
            raise ValueError(
                f"The {metric} score of completion {index} is {score}: the weights of the model are not finite, or "
                f"overflow in `dtype` {embedder.model.dtype}. Use `dtype=torch.float32` or check the weights."
            )
    return scores
