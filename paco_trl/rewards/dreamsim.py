# SPDX-License-Identifier: Apache-2.0
"""DreamSim: how alike do the panels of a set look to people?"""

from collections.abc import Callable

import torch
from PIL import Image

from .clip_i import PairSimilarityReward


class DreamSimReward(PairSimilarityReward):
    """
    DreamSim ([Fu et al.](https://huggingface.co/papers/2306.09344)): 1 minus the perceptual distance of panels,
    averaged over all unordered pairs of a set. Needs `pip install "paco_trl[dreamsim]"`, unless a model is given.

    - Range: [0, 1] in practice; the distance is not bounded.
    - Cost: a forward of an ensemble of three vision transformers for each panel of each pair.
    - Source and licence: the package `dreamsim` (MIT), which downloads its weights.

    It rewards copies, as [`ClipIReward`] does.

    Args:
        model (`Callable`, *optional*), preprocess (`Callable`, *optional*), device (`str` or `torch.device`, *optional*), batch_size (`int`, *optional*, defaults to `32`):
            As of [`~paco_trl.evaluation.DreamSimScorer`].
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether the package may run code from GitHub, where it gets its networks. Needed unless a model is given.

    Raises:
        ImportError: If no model is given and `dreamsim` is not installed.
        ValueError: If no model is given and code from elsewhere is not trusted.
    """

    __name__ = "dreamsim"

    def __init__(
        self,
        model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        preprocess: Callable[[Image.Image], torch.Tensor] | None = None,
        device: str | torch.device | None = None,
        batch_size: int = 32,
        trust_remote_code: bool = False,
    ):
        from .baselines import DreamSimScorer

        super().__init__(DreamSimScorer(model, preprocess, device, batch_size, trust_remote_code))
