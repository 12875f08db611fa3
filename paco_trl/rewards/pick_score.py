# SPDX-License-Identifier: Apache-2.0
"""PickScore: which image would people pick for this prompt?"""

from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from .clip import ClipEmbedder, check_panels, score_texts


# A good image has a PickScore of about 20 to 23. Flow-GRPO and the published PaCo presets divide it by 26, so that it
# stands beside rewards in [0, 1]; weights of rewards taken from there fit only with the same divisor.
PICK_SCORE_DIVISOR = 26.0


class PickScoreReward(ClipEmbedder):
    """
    PickScore reward: a CLIP trained on which of two images people picked for a prompt. It rewards the look of an image
    as well as what it shows.

    With the column `panels`, each panel is compared with its own text, and the score is the mean over the panels of a
    grid; without it, the whole image is compared with its prompt. An image that is not square is cut to its central
    square by the processor.

    - Range: `exp(logit_scale)` * cosine / 26, with the published weights mostly in 0.7 to 0.9. The divisor is that of
      Flow-GRPO and of the published PaCo presets.
    - Cost: for each panel, or whole image, one forward pass of a ViT-H/14 at 224 x 224 pixels, and for each distinct
      text one of the text encoder. The model has about 1 billion parameters, 4 GB in float32.
    - Source: [Pick-a-Pic](https://arxiv.org/abs/2305.01569).
    - Licence of the weights: see the model card.

    The model is loaded at construction, frozen and in eval mode, and stays on the CPU until the first call.

    Args:
        model (`str` or `Path`, *optional*, defaults to `"yuvalkirstain/PickScore_v1"`):
            Hub id or folder of a [`~transformers.CLIPModel`].
        processor (`str` or `Path`, *optional*, defaults to `"laion/CLIP-ViT-H-14-laion2B-s32B-b79K"`):
            Hub id or folder of its [`~transformers.CLIPProcessor`]. The default is the one that PickScore was trained
            with. A `model` of another kind needs its own.
        device (`str` or `torch.device`, *optional*):
            Device to score on. Defaults to this process's own: its accelerator, or the CPU if there is none.
        dtype (`torch.dtype`, *optional*):
            Dtype of the model. Defaults to float32, whatever the dtype of the file: the advantage is made of the small
            differences within a group.
        batch_size (`int`, *optional*, defaults to `32`):
            Images, or texts, per forward pass.

    Example:

    ```python
    >>> from paco_trl.rewards import PickScoreReward

    >>> pick_score = PickScoreReward()
    >>> pick_score(prompts=["A cat wakes up."], completions=[image])  # a list of one float
    ```
    """

    def __init__(
        self,
        model: str | Path = "yuvalkirstain/PickScore_v1",
        processor: str | Path = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
    ):
        super().__init__(model, processor, device, dtype, batch_size)
        self.__name__ = "pick_score"  # TRL takes it for the metric names, `rewards/pick_score/mean`

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
        Score images, or grids of panels.

        Args:
            prompts (`list[str]`):
                Prompts of the whole images; used without `panels`.
            completions (`list[PIL.Image.Image]`):
                The whole images; used without `panels`.
            panels (`list[list[str]]`, *optional*):
                Texts of the panels, for each completion.
            panel_images (`list[list[PIL.Image.Image]]`, *optional*):
                Images of the panels, for each completion, in the order of the texts; used with `panels`.
            log_metric (`Callable`, *optional*):
                The trainer's; gets `pick_score/truncated_texts`, the share of texts that are longer than CLIP reads
                (77 tokens) and were cut.

        Returns:
            `list[float]`: one score per completion, with `panels` the mean over its panels.

        Raises:
            ValueError: If a completion has an empty prompt, with `panels` an empty panel text or not one per panel
                image, if an image cannot be converted to RGB, or if a score is not finite.
        """
        if panels is None:
            _check_prompts(completions, prompts)
            images, texts = [[image] for image in completions], [[prompt] for prompt in prompts]
        else:
            check_panels("PickScore", completions, panels, panel_images)
            images, texts = panel_images, panels
        scale = self.model.logit_scale.float().exp().item() / PICK_SCORE_DIVISOR
        return score_texts(self, "PickScore", images, texts, scale, log_metric)


def _check_prompts(completions, prompts):
    if len(prompts) != len(completions):
        raise ValueError(
            f"`prompts` has {len(prompts)} entries for {len(completions)} completions. Pass one per completion."
        )
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(
                f"The prompt of completion {index} is {prompt!r}, but PickScore needs a text. Fill the column `prompt` "
                "in the dataset."
            )
