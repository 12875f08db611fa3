# SPDX-License-Identifier: Apache-2.0
"""CLIP-T: does each panel show what its prompt says?"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState
from PIL import Image
from transformers import CLIPModel, CLIPProcessor

from ..utils.deepspeed import without_zero3_init


class ClipTReward:
    """
    CLIP-T reward: cosine similarity of each panel's image and text embedding, averaged over the panels of a grid.

    This is the prompt-following reward of PaCo-GRPO on text-to-image-set generation
    ([PaCo-RL](https://huggingface.co/papers/2512.04784), Part 3), in [-1, 1]; with real CLIP weights the values lie
    around 0.2 to 0.3. Similarities are not scaled by CLIP's `logit_scale`.

    The model is loaded at construction, frozen and in eval mode, and stays on the CPU until the first call.

    Args:
        model (`str` or `Path`, *optional*, defaults to `"openai/clip-vit-large-patch14"`):
            Hub id or folder of a [`~transformers.CLIPModel`] with its [`~transformers.CLIPProcessor`].
        device (`str` or `torch.device`, *optional*):
            Device to score on. Defaults to this process's own: its accelerator, or the CPU if there is none.
        dtype (`torch.dtype`, *optional*):
            Dtype of the model. Defaults to float32, whatever the dtype of the file: the advantage is made of the small
            differences within a group.
        batch_size (`int`, *optional*, defaults to `32`):
            Panels, or texts, per forward pass.

    Example:

    ```python
    >>> from paco_trl.rewards import ClipTReward

    >>> clip_t = ClipTReward()
    >>> scores = clip_t(  # a list of one float
    ...     prompts=["A cat's day, in 2 panels."],
    ...     completions=[grid],
    ...     panels=[["A cat wakes up.", "A cat sleeps."]],
    ...     panel_images=[[left, right]],
    ... )
    ```
    """

    def __init__(
        self,
        model: str | Path = "openai/clip-vit-large-patch14",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
    ):
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}, but must be at least 1.")
        self.__name__ = "clip_t"  # TRL takes it for the metric names, `rewards/clip_t/mean`
        self.device = device
        self.batch_size = batch_size
        with without_zero3_init():
            self.model = CLIPModel.from_pretrained(model, dtype=dtype or torch.float32, use_safetensors=True)
        self.model.eval().requires_grad_(False)
        self.processor = CLIPProcessor.from_pretrained(model)

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        panels: list[list[str]] | None = None,
        panel_images: list[list[Image.Image]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs,
    ) -> list[float]:
        """
        Score grids of panels.

        Args:
            prompts (`list[str]`):
                Prompts of the whole grids; not used, the panels have their own.
            completions (`list[PIL.Image.Image]`):
                The grids; not used, `panel_images` has them cut.
            panels (`list[list[str]]`):
                Texts of the panels, for each completion.
            panel_images (`list[list[PIL.Image.Image]]`):
                Images of the panels, for each completion, in the order of the texts.
            log_metric (`Callable`, *optional*):
                The trainer's; gets `clip_t/truncated_texts`, the share of texts that are longer than CLIP reads (77
                tokens) and were cut.

        Returns:
            `list[float]`: one score per completion, the mean over its panels.

        Raises:
            ValueError: If a completion has no panel texts, an empty one, or not one per panel image, or if a score is
                not finite.
        """
        self._check_panels(completions, panels, panel_images)
        # Without an explicit device this is the process's own, known to accelerate in every kind of launch.
        device = torch.device(self.device) if self.device is not None else PartialState().device
        self.model.to(device)

        images = [image for row in panel_images for image in row]
        texts = [text for row in panels for text in row]
        # The generations of a group share their texts: each distinct text is encoded once.
        text_rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        if log_metric is not None and text_rows:
            lengths = [len(ids) for ids in self.processor.tokenizer(list(text_rows))["input_ids"]]
            limit = self.model.config.text_config.max_position_embeddings
            log_metric("clip_t/truncated_texts", sum(length > limit for length in lengths) / len(lengths))
        # A surrounding autocast would change the scores with the place they are computed in.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            image_embeds = self._embed(images, self._image_features)  # (panels, D)
            text_embeds = self._embed(list(text_rows), self._text_features)  # (distinct texts, D)
        text_embeds = text_embeds[[text_rows[text] for text in texts]]  # (panels, D)
        similarities = (image_embeds * text_embeds).sum(dim=-1)  # (panels,)

        scores = [row.mean().item() for row in similarities.split([len(row) for row in panels])]
        for index, score in enumerate(scores):
            if not math.isfinite(score):
                raise ValueError(
                    f"The CLIP-T score of completion {index} is {score}: the weights of the model are not finite, or "
                    f"overflow in `dtype` {self.model.dtype}. Use `dtype=torch.float32` or check the weights."
                )
        return scores

    def _check_panels(self, completions, panels, panel_images):
        for name, column in (("panels", panels), ("panel_images", panel_images)):
            if column is None:
                raise ValueError(
                    f"CLIP-T compares each panel with its text, but got no `{name}`. `panels` (list of str) is a "
                    "column of the dataset; `panel_images` comes from the trainer, or from `paco_trl.data.split_grid`."
                )
            if len(column) != len(completions):
                raise ValueError(
                    f"`{name}` has {len(column)} entries for {len(completions)} completions. Pass one per completion."
                )
        for index, (texts, images) in enumerate(zip(panels, panel_images, strict=True)):
            if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError(
                    f"`panels` of completion {index} is {texts!r}, but CLIP-T needs a text for each panel. Fill the "
                    "column `panels` in the dataset."
                )
            if not images or len(images) != len(texts):
                raise ValueError(
                    f"Completion {index} has {len(images or [])} panel images and {len(texts)} panel texts. Check "
                    "`rows`, `cols` and `panels` in the dataset."
                )

    def _embed(self, items, features):
        """Embed items in batches and give unit vectors, float32, of shape (len(items), D)."""
        batches = [items[start : start + self.batch_size] for start in range(0, len(items), self.batch_size)]
        embeds = [features(batch) for batch in batches]
        # An empty list of completions has no batches.
        embeds = torch.cat(embeds).float() if embeds else torch.empty(0, self.model.config.projection_dim)
        return torch.nn.functional.normalize(embeds, dim=-1)

    def _image_features(self, images):
        inputs = self.processor.image_processor(images=[image.convert("RGB") for image in images], return_tensors="pt")
        pixel_values = inputs["pixel_values"].to(self.model.device, self.model.dtype)  # (B, 3, H, W)
        # Since transformers 5 a model output whose pooler_output is the projected embedding.
        return self.model.get_image_features(pixel_values=pixel_values).pooler_output  # (B, D)

    def _text_features(self, texts):
        inputs = self.processor.tokenizer(
            texts,
            padding=True,
            truncation=True,
            # From the model, because a tokenizer saved without a length claims 1e30.
            max_length=self.model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.model.device)
        return self.model.get_text_features(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).pooler_output  # (B, D)
