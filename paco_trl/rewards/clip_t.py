# SPDX-License-Identifier: Apache-2.0
"""CLIP-T: does each panel show what its prompt says?"""

from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from .clip import ClipEmbedder, check_panels, score_texts


class ClipTReward(ClipEmbedder):
    """
    CLIP-T reward: cosine similarity of each panel's image and text embedding, averaged over the panels of a grid.

    This is the prompt-following reward of PaCo-GRPO on text-to-image-set generation.

    - Range: [-1, 1]; with real CLIP weights the values lie around 0.2 to 0.4. Similarities are not scaled by CLIP's
      `logit_scale`.
    - Cost: for each panel one forward pass of the vision tower (by default a ViT-H/14 at 224 x 224 pixels), and for
      each distinct text one of the text encoder.
    - Source: [PaCo-RL](https://huggingface.co/papers/2512.04784), Part 3; the model is that of its published code, a
      [CLIP](https://arxiv.org/abs/2103.00020) trained by [OpenCLIP](https://arxiv.org/abs/2212.07143).
    - Licence of the weights: see the model card.

    The model is loaded at construction, frozen and in eval mode, and stays on the CPU until the first call.

    Args:
        model (`str` or `Path`, *optional*, defaults to `"laion/CLIP-ViT-H-14-laion2B-s32B-b79K"`):
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
        model: str | Path = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
    ):
        super().__init__(model, device=device, dtype=dtype, batch_size=batch_size)
        self.__name__ = "clip_t"  # TRL takes it for the metric names, `rewards/clip_t/mean`

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
            ValueError: If a completion has no panel texts, an empty one, or not one per panel image, if an image cannot
                be converted to RGB, or if a score is not finite.
        """
        check_panels("CLIP-T", completions, panels, panel_images)
        return score_texts(self, "CLIP-T", panel_images, panels, log_metric=log_metric)
