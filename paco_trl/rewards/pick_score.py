# SPDX-License-Identifier: Apache-2.0
"""PickScore: which image would people pick for this prompt?"""

from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from .clip import CLIP_H, ClipEmbedder, check_panels, score_texts
from .columns import column_of


# PickScores of good images are about 20 to 23. Flow-GRPO and the published PaCo presets divide them by 26, which
# brings them close to [0, 1]; their reward weights assume this divisor.
PICK_SCORE_DIVISOR = 26.0


class PickScoreReward(ClipEmbedder):
    """
    PickScore reward: a CLIP trained on which of two images people preferred for a prompt. It rewards the look of an
    image as well as its content.

    With the column `panels`, each panel is compared with its own text, and the score is the mean over the panels of a
    grid; without it, the full image is compared with its prompt. The processor crops an image that is not square to
    its central square. It logs `pick_score/truncated_texts` as [`ClipTReward`] does.

    - Range: `exp(logit_scale)` * cosine / 26, mostly 0.7 to 0.9 with the published weights. The divisor is that of
      Flow-GRPO and of the published PaCo presets.
    - Cost: per panel or image one forward pass of a ViT-H/14 at 224 x 224 pixels, and per distinct text one of the
      text encoder. The model has about 1 billion parameters, 4 GB in float32.
    - Source: [Pick-a-Pic](https://arxiv.org/abs/2305.01569).
    - License of the weights: see the model card.

    Args:
        model (`str` or `Path`, *optional*, defaults to `"yuvalkirstain/PickScore_v1"`):
            Hub id or directory of a [`~transformers.CLIPModel`].
        processor (`str` or `Path`, *optional*, defaults to `"laion/CLIP-ViT-H-14-laion2B-s32B-b79K"`):
            Hub id or directory of its [`~transformers.CLIPProcessor`]. The default is the one that PickScore was
            trained with.
        device (`str` or `torch.device`, *optional*), dtype (`torch.dtype`, *optional*), batch_size (`int`, *optional*, defaults to `32`):
            See [`ClipTReward`].
    """

    __name__ = "pick_score"  # names TRL's metrics, `rewards/pick_score/mean`

    def __init__(
        self,
        model: str | Path = "yuvalkirstain/PickScore_v1",
        processor: str | Path = CLIP_H,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
    ):
        super().__init__(model, device, dtype, batch_size, processor=processor)

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        panels: list[list[str]] | None = None,
        panel_images: list[list[Image.Image]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs,
    ) -> list[float]:
        """Return one score per completion; with `panels`, the mean over its `panel_images`."""
        if panels is None:
            for index, prompt in enumerate(column_of(prompts, "prompts", len(completions), "PickScore")):
                if not isinstance(prompt, str) or not prompt.strip():
                    raise ValueError(
                        f"The prompt of completion {index} is {prompt!r}, not a text for PickScore. Fill it in."
                    )
            images, texts = [[image] for image in completions], [[prompt] for prompt in prompts]
        else:
            texts, images = check_panels("PickScore", completions, panels, panel_images)
        scale = self.model.logit_scale.float().exp().item() / PICK_SCORE_DIVISOR
        return score_texts(self, "PickScore", images, texts, scale, log_metric)
