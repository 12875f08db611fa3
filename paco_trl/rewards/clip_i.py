# SPDX-License-Identifier: Apache-2.0
"""CLIP-I: how alike do the panels of a set look to CLIP?"""

from itertools import combinations
from pathlib import Path

import torch
from PIL import Image

from .judge import Judge
from .judged_reward import column_of


class PairSimilarityReward:
    """
    Mean over all unordered pairs of panels of what a judge without questions says. Base of rewards from similarity.

    Args:
        judge ([`Judge`]):
            Judge.
    """

    __name__: str
    min_panels = 2  # the trainer looks at it before it loads a model

    def __init__(self, judge: Judge):
        self.judge = judge

    @property
    def model_name(self) -> str | None:
        """Name of the judge, for cards; `None` for one that does not say it."""
        return getattr(self.judge, "model_name", None)

    def __call__(self, prompts: list[str], completions: list[Image.Image], **columns) -> list[float]:
        """
        Scores grids of panels.

        Args:
            prompts (`list[str]`):
                Prompts, not used.
            completions (`list[PIL.Image.Image]`):
                The grids; not used, `panel_images` has them cut.
            **columns:
                `panel_images`, the images of the panels for each completion; others are not used.

        Returns:
            `list[float]`: one score per completion.

        Raises:
            ValueError: If there are no `panel_images`, or a set of fewer than two.
        """
        panel_images = column_of(columns, "panel_images", len(completions), f"`{self.__name__}`")
        for index, panels in enumerate(panel_images):
            if len(panels) < 2:
                raise ValueError(
                    f"Image {index} has {len(panels)} panel, but similarity is a matter of at least two. Take prompts "
                    "with more `rows` or `cols`."
                )
        pairs = [pair for panels in panel_images for pair in combinations(panels, 2)]
        scores = iter(self.judge.score(pairs, [""] * len(pairs)))
        counts = [len(panels) * (len(panels) - 1) // 2 for panels in panel_images]
        return [sum(next(scores) for _ in range(count)) / count for count in counts]


class ClipIReward(PairSimilarityReward):
    """
    CLIP-I: cosine similarity of the CLIP embeddings of panels, averaged over all unordered pairs of a set.

    - Range: [-1, 1]; with real CLIP weights the values lie around 0.6 to 0.95.
    - Cost: one forward of CLIP's vision tower for each panel.
    - Source and licence: `laion/CLIP-ViT-H-14-laion2B-s32B-b79K`, as in PaCo-RL's published code; see its model card.

    It does not know what should stay the same and what should change, and rewards copies. On ConsistencyRank, PaCo-RL
    finds it in the right order for .394 of the sets, a judge for .449.

    Args:
        model (`str` or `Path`, *optional*, defaults to `"laion/CLIP-ViT-H-14-laion2B-s32B-b79K"`):
            Hub id or folder of a [`~transformers.CLIPModel`] with its [`~transformers.CLIPProcessor`].
        device (`str` or `torch.device`, *optional*), dtype (`torch.dtype`, *optional*), batch_size (`int`, *optional*, defaults to `32`):
            As of [`~paco_trl.evaluation.ClipIScorer`].

    Example:

    ```python
    >>> from paco_trl.rewards import ClipIReward

    >>> ClipIReward()(["A cat's day, in 2 panels."], [grid], panel_images=[[left, right]])  # a list of one float
    ```
    """

    __name__ = "clip_i"

    def __init__(
        self,
        model: str | Path = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
    ):
        from .baselines import ClipIScorer

        super().__init__(ClipIScorer(model, device, dtype, batch_size))
