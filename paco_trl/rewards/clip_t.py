# SPDX-License-Identifier: Apache-2.0
"""CLIP-T: does each panel show what its prompt says?"""

from collections.abc import Callable

from PIL import Image

from .clip import ClipEmbedder, check_panels, score_texts


class ClipTReward(ClipEmbedder):
    """
    CLIP-T reward: cosine similarity of each panel's image and text embedding, averaged over the panels of a grid. This
    is the prompt-following reward of PaCo-GRPO for text-to-image-set generation.

    - Range: [-1, 1], about 0.2 to 0.4 with real CLIP weights. Similarities are not scaled by CLIP's `logit_scale`.
    - Columns: `panels`, the texts of the panels; `panel_images` from the trainer. It logs `clip_t/truncated_texts`,
      the fraction of texts that are longer than CLIP's 77 tokens.
    - Cost: per panel one forward pass of the vision tower (by default a ViT-H/14 at 224 x 224 pixels), and per
      distinct text one of the text encoder.
    - Source: [PaCo-RL](https://huggingface.co/papers/2512.04784), Part 3; the model is that of its published code, a
      [CLIP](https://arxiv.org/abs/2103.00020) trained by [OpenCLIP](https://arxiv.org/abs/2212.07143).
    - License of the weights: see the model card.

    The model is loaded at construction, frozen and in eval mode, and stays on the CPU until the first call.

    Args:
        model (`str` or `Path`, *optional*, defaults to `"laion/CLIP-ViT-H-14-laion2B-s32B-b79K"`):
            Hub id or directory of a [`~transformers.CLIPModel`] with its [`~transformers.CLIPProcessor`].
        device (`str` or `torch.device`, *optional*):
            Device to score on. Defaults to this process's own: its accelerator, or the CPU if there is none.
        dtype (`torch.dtype`, *optional*):
            Dtype of the model. Defaults to float32, whatever the dtype of the file: the advantage comes from small
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

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        panels: list[list[str]] | None = None,
        panel_images: list[list[Image.Image]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **kwargs,
    ) -> list[float]:
        """Return one score per completion, the mean over its `panel_images`, each with its text in `panels`."""
        texts, images = check_panels("CLIP-T", completions, panels, panel_images)
        return score_texts(self, "CLIP-T", images, texts, log_metric=log_metric)
