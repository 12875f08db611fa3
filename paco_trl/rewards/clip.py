# SPDX-License-Identifier: Apache-2.0
"""Rewards from CLIP embeddings: CLIP-T, PickScore and CLIP-I."""

from collections.abc import Callable, Sequence
from itertools import chain, combinations
from pathlib import Path

import torch
from accelerate import PartialState
from PIL import Image
from transformers import CLIPModel, CLIPProcessor
from transformers.masking_utils import create_causal_mask

from ..utils.deepspeed import without_zero3_init
from ..utils.images import to_rgb
from ..utils.names import check_model_name, public_name
from ..utils.tensors import to_device
from ..utils.text import is_text
from .columns import PanelImages, require_column, require_panels
from .judge import check_list


CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

# PickScores of good images are about 20 to 23. Flow-GRPO and the published PaCo presets divide them by 26 to bring
# them close to [0, 1], and their reward weights assume this divisor.
PICK_SCORE_DIVISOR = 26.0


class ClipEmbedder:
    """Embed images and texts with a frozen CLIP, in float32 by default and on the CPU until the first use."""

    __name__: str  # set by subclasses that are rewards

    def __init__(
        self,
        model: str | Path = CLIP_H,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
        *,
        processor: str | Path | None = None,
    ):
        check_model_name(model)
        self.device = device
        self.batch_size = batch_size
        self.model_name = public_name(str(model))  # name on cards
        try:
            with without_zero3_init():
                self.model = CLIPModel.from_pretrained(model, dtype=dtype or torch.float32, use_safetensors=True)
        except OSError as error:  # its message may not name the model
            raise OSError(f"The reward model '{model}' cannot be read. {error}") from error
        self.model.eval().requires_grad_(False)
        self.processor = CLIPProcessor.from_pretrained(model if processor is None else processor)

    def embed(
        self, images: list[Image.Image], image_names: list[str], texts: Sequence[str] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embed images (named in errors) and truncated texts, each once, as unit vectors on the CPU."""
        distinct_images = {id(image): (image, name) for image, name in zip(images, image_names, strict=True)}
        distinct_texts = dict.fromkeys(texts)
        device = torch.device(self.device) if self.device is not None else PartialState().device
        self.model.to(device)
        # A surrounding autocast would change the scores
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            embeds = [
                encode(items[start : start + self.batch_size])
                for items, encode in (
                    (list(distinct_images.values()), self._image_features),
                    (list(distinct_texts), self._text_features),
                )
                for start in range(0, len(items), self.batch_size)
            ]
        # Copy once, since indexing on the accelerator would also wait for it
        embeds = torch.cat(embeds).float().cpu() if embeds else torch.empty(0, self.model.config.projection_dim)
        if not embeds.isfinite().all():
            raise ValueError(f"Embeddings of {self.model.name_or_path} are not finite. Use `dtype=torch.float32`.")
        embeds = torch.nn.functional.normalize(embeds, dim=-1)
        rows = {key: row for row, key in enumerate((*distinct_images, *distinct_texts))}
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
            # A tokenizer saved without `model_max_length` reports 1e30
            max_length=self.model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        )
        # The mask that the model would build, without a device sync; `None` if nothing is padded
        shape = torch.empty(*inputs["input_ids"].shape, 1, dtype=self.model.dtype)
        mask = create_causal_mask(
            self.model.text_model.config, shape, attention_mask=inputs["attention_mask"], past_key_values=None
        )
        return self.model.get_text_features(
            input_ids=to_device(inputs["input_ids"], self.model.device),
            attention_mask=None if mask is None else to_device(mask, self.model.device),
        ).pooler_output  # (B, D)


class ClipTReward(ClipEmbedder):
    """
    CLIP-T reward: cosine similarity of the image and text embeddings of each panel, averaged over the panels of a
    grid. PaCo-GRPO uses it as the prompt-following reward for text-to-image-set generation.

    - Range: [-1, 1], about 0.2 to 0.4 with real CLIP weights. Similarities are not scaled by CLIP's `logit_scale`.
    - Columns: `panels`, the texts of the panels; `panel_images` from the trainer.
    - Metric: `clip_t/truncated_texts`, the fraction of texts longer than CLIP's 77 tokens.
    - Cost: one forward pass of the vision tower per panel (by default a ViT-H/14 at 224 x 224 pixels), and one of the
      text encoder per distinct text.
    - Source: [PaCo-RL](https://huggingface.co/papers/2512.04784), Part 3, with the model of its published code. See
      the model card for the license of the weights.

    The model is loaded at construction and stays on the CPU until the first call.

    Args:
        model (`str` or `Path`, *optional*, defaults to `"laion/CLIP-ViT-H-14-laion2B-s32B-b79K"`):
            Hub id or directory of a [`~transformers.CLIPModel`] with its [`~transformers.CLIPProcessor`].
        device (`str` or `torch.device`, *optional*):
            Device to score on. Defaults to this process's accelerator, or the CPU if there is none.
        dtype (`torch.dtype`, *optional*):
            Dtype of the model. Defaults to float32, whatever the dtype of the file, because advantages come from small
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

    __name__ = "clip_t"  # names TRL's metrics, `rewards/clip_t/mean`
    needed_columns: tuple[str, ...] = ("panels",)  # the trainer checks them before it loads a model
    scale = 1.0

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        panels: list[list[str]] | None = None,
        panel_images: PanelImages | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs,
    ) -> list[float]:
        """Return one score per completion: the mean similarity of its `panel_images` to their texts in `panels`."""
        if panels is None and not self.needed_columns:
            panels = [[prompt] for prompt in prompts]
            panel_images = [[image] for image in completions]
        panels = require_column(panels, "panels", len(completions), f"`{type(self).__name__}`")
        panel_images = require_column(panel_images, "panel_images", len(completions), f"`{type(self).__name__}`")
        for index, (texts, images) in enumerate(zip(panels, panel_images, strict=True)):
            if not texts or not all(map(is_text, texts)) or len(images) != len(texts):
                raise ValueError(
                    f"`panels` of completion {index} is {texts!r}, but each of its {len(images)} panel images needs a "
                    "text: check `rows`, `cols` and `panels`."
                )
        distinct_texts = list(dict.fromkeys(chain(*panels)))
        if log_metric is not None and distinct_texts:
            lengths = [len(ids) for ids in self.processor.tokenizer(distinct_texts)["input_ids"]]
            limit = self.model.config.text_config.max_position_embeddings
            log_metric(f"{self.__name__}/truncated_texts", sum(length > limit for length in lengths) / len(lengths))
        names = [f"Image {i} of completion {index}" for index, row in enumerate(panels) for i in range(len(row))]
        image_embeds, text_embeds = self.embed(list(chain(*panel_images)), names, list(chain(*panels)))  # (images, D)
        similarities = self.scale * (image_embeds * text_embeds).sum(dim=-1)  # (images,)
        return [row.mean().item() for row in similarities.split([len(row) for row in panels])]


class PickScoreReward(ClipTReward):
    """
    PickScore reward: a CLIP fine-tuned on human preferences between two images of a prompt. It rewards the look of an
    image as well as its content.

    With the column `panels`, each panel is compared with its own text, and the score is the mean over the panels of a
    grid; without it, the full image is compared with its prompt. The processor crops an image that is not square to
    its central square. Like [`ClipTReward`], it logs `pick_score/truncated_texts`.

    - Range: `exp(logit_scale)` * cosine / 26, mostly 0.7 to 0.9 with the published weights. Flow-GRPO and the
      published PaCo presets use the same divisor.
    - Cost: like [`ClipTReward`]; about 1 billion parameters, 4 GB in float32.
    - Source: [Pick-a-Pic](https://arxiv.org/abs/2305.01569). See the model card for the license of the weights.

    Args:
        model (`str` or `Path`, *optional*, defaults to `"yuvalkirstain/PickScore_v1"`):
            Hub id or directory of a [`~transformers.CLIPModel`].
        processor (`str` or `Path`, *optional*, defaults to `"laion/CLIP-ViT-H-14-laion2B-s32B-b79K"`):
            Hub id or directory of its [`~transformers.CLIPProcessor`]. PickScore was trained with the default.
        device (`str` or `torch.device`, *optional*), dtype (`torch.dtype`, *optional*), batch_size (`int`, *optional*,
        defaults to `32`):
            See [`ClipTReward`].
    """

    __name__ = "pick_score"  # names TRL's metrics, `rewards/pick_score/mean`
    needed_columns = ()  # without `panels` it scores the whole image

    def __init__(
        self,
        model: str | Path = "yuvalkirstain/PickScore_v1",
        processor: str | Path = CLIP_H,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
    ):
        super().__init__(model, device, dtype, batch_size, processor=processor)
        self.scale = self.model.logit_scale.float().exp().item() / PICK_SCORE_DIVISOR


class ClipIScorer(ClipEmbedder):
    """Score pairs by CLIP-I, the cosine of their CLIP embeddings. Arguments: see [`~paco_trl.rewards.ClipTReward`]."""

    reads_questions = False

    @property
    def name(self) -> str:
        """Return the name for reports."""
        return f"CLIP-I ({self.model.name_or_path})"

    def score(self, images: list[tuple[Image.Image, Image.Image]], prompts: list[str]) -> list[float]:
        """Return one cosine per pair; questions are ignored. An image object shared by pairs is embedded once."""
        images = check_list(images)
        names = [f"An image of pair {index}" for index in range(len(images)) for _ in range(2)]
        embeds = self.embed(list(chain(*images)), names)[0]  # (2N, D)
        return (embeds[0::2] * embeds[1::2]).sum(dim=-1).tolist()


class ClipIReward(ClipIScorer):
    """
    CLIP-I: cosine similarity of the CLIP embeddings of panels, averaged over all unordered pairs of a set.

    - Range: [-1, 1], about 0.6 to 0.95 with real CLIP weights.
    - Cost: one forward pass of CLIP's vision tower per panel.
    - Source and license: `laion/CLIP-ViT-H-14-laion2B-s32B-b79K`, as in PaCo-RL's published code; see its model card.

    It rewards copies, since it does not know what should stay the same and what should change. On ConsistencyRank,
    PaCo-RL reports an accuracy of .394 for it and .449 for a judge.

    The arguments are the same as for [`ClipTReward`].
    """

    __name__ = "clip_i"
    min_panels = 2  # the trainer checks it before it loads a model

    def __call__(
        self, prompts: list[str], completions: list[Image.Image], panel_images: PanelImages | None = None, **kwargs
    ) -> list[float]:
        """Return one score per completion from the images of its panels."""
        panel_images = require_panels(panel_images, len(completions), "`ClipIReward`")
        sets = [list(combinations(panels, 2)) for panels in panel_images]
        scores = iter(self.score(list(chain(*sets)), []))
        return [sum(next(scores) for _ in pairs) / len(pairs) for pairs in sets]
