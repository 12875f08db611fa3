# SPDX-License-Identifier: Apache-2.0
"""Similarity of images as a measure of consistency: CLIP-I and DreamSim, the baselines of the PaCo-RL paper."""

import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import torch
from accelerate import PartialState
from PIL import Image

from ..utils.images import to_rgb
from .clip import ClipEmbedder
from .columns import panels_of


class ClipIScorer(ClipEmbedder):
    """CLIP-I: cosine of the CLIP embeddings of two images; questions are ignored. Arguments: [`~paco_trl.rewards.ClipTReward`]."""

    reads_questions = False

    @property
    def name(self) -> str:
        """Return the name for reports."""
        return f"CLIP-I ({self.model.name_or_path})"

    def score(self, images: list[tuple[Image.Image, Image.Image]], prompts: list[str]) -> list[float]:
        """Return one cosine per pair. An image object of several pairs is embedded once."""
        if not images:
            return []
        names = [f"An image of pair {index}" for index in range(len(images)) for _ in range(2)]
        embeds = self.embed_images([image for pair in images for image in pair], names)  # (2N, D)
        return (embeds[0::2] * embeds[1::2]).sum(dim=-1).tolist()


class DreamSimScorer:
    """
    DreamSim (https://arxiv.org/abs/2306.09344): 1 minus the perceptual distance of two images. Questions are ignored.

    Unless a model is given, it requires `pip install "paco_trl[dreamsim]"`, downloads the weights into the Hub's cache
    directory, and runs code from GitHub (`torch.hub`) to build the model.

    Args:
        model (`Callable`, *optional*):
            Built model: takes two batches of preprocessed images of shape (B, 3, H, W) and returns their distances of
            shape (B,). It stays on its device. If `None`, the published ensemble.
        preprocess (`Callable`, *optional*):
            Converts a PIL image to a (1, 3, H, W) tensor. Required with `model`.
        device (`str` or `torch.device`, *optional*):
            Device to score on. Defaults to this process's own: its accelerator, or the CPU if there is none.
        batch_size (`int`, *optional*, defaults to `32`):
            Pairs per forward pass.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether `dreamsim` may run code from GitHub. Required unless a model is given.
    """

    name = "DreamSim"
    reads_questions = False

    def __init__(
        self,
        model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        preprocess: Callable[[Image.Image], torch.Tensor] | None = None,
        device: str | torch.device | None = None,
        batch_size: int = 32,
        trust_remote_code: bool = False,
    ):
        if (model is None or preprocess is None) and not trust_remote_code:
            raise ValueError(
                "The package dreamsim runs code from GitHub (`torch.hub`, facebookresearch/dino) and downloads weights "
                "that are not safetensors. If you trust it, pass `trust_remote_code=True`; or pass a built `model` with "
                "its `preprocess`."
            )
        self.model_name = self.name if model is None else None  # for cards
        self.device = torch.device(device) if device is not None else PartialState().device
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}; it must be at least 1.")
        self.batch_size = batch_size
        if model is None or preprocess is None:
            model, preprocess = _load_dreamsim(self.device)
        self.model, self.preprocess = model, preprocess

    def score(self, images: list[tuple[Image.Image, Image.Image]], prompts: list[str]) -> list[float]:
        """Return 1 - distance for each pair."""
        numbered = {id(image): (image, index) for index, pair in enumerate(images) for image in pair}
        inputs = {
            key: self.preprocess(to_rgb(image, f"An image of pair {index}"))
            for key, (image, index) in numbered.items()
        }
        similarities = []
        for start in range(0, len(images), self.batch_size):
            batch = images[start : start + self.batch_size]
            firsts, seconds = (
                torch.cat([inputs[id(image)] for image in side]).to(self.device) for side in zip(*batch, strict=True)
            )  # (B, 3, H, W)
            with torch.no_grad():
                distances = self.model(firsts, seconds)  # (B,)
            similarities += (1 - distances.float().reshape(len(batch))).tolist()
        if not all(map(math.isfinite, similarities)):
            raise ValueError(f"A score of {self.name} is not finite. Check the weights of the model.")
        return similarities


def _load_dreamsim(device):
    try:
        from dreamsim import dreamsim
    except ImportError as error:
        raise ImportError('DreamSim requires its package: `pip install "paco_trl[dreamsim]"`.') from error
    from huggingface_hub.constants import HF_HOME

    # dreamsim's default is `models` in the working directory
    cache_dir = Path(HF_HOME) / "dreamsim"
    cache_dir.mkdir(parents=True, exist_ok=True)
    return dreamsim(pretrained=True, device=str(device), cache_dir=str(cache_dir))


class PairSimilarityReward:
    """Mixin of scorers without questions: a reward that averages the scores of all unordered pairs of panels."""

    __name__: str
    score: Callable[[list, list[str]], list[float]]
    min_panels = 2  # the trainer checks it before it loads a model

    def __call__(
        self,
        prompts: list[str],
        completions: list[Image.Image],
        panel_images: list[list[Image.Image]] | None = None,
        **kwargs,
    ) -> list[float]:
        """Return one score per completion from the images of its panels."""
        panel_images = panels_of(panel_images, len(completions), f"`{self.__name__}`")
        pairs = [pair for panels in panel_images for pair in combinations(panels, 2)]
        scores = iter(self.score(pairs, [""] * len(pairs)))
        counts = [len(panels) * (len(panels) - 1) // 2 for panels in panel_images]
        return [sum(next(scores) for _ in range(count)) / count for count in counts]


class ClipIReward(PairSimilarityReward, ClipIScorer):
    """
    CLIP-I: cosine similarity of the CLIP embeddings of panels, averaged over all unordered pairs of a set.

    - Range: [-1, 1], about 0.6 to 0.95 with real CLIP weights.
    - Cost: one forward pass of CLIP's vision tower per panel.
    - Source and license: `laion/CLIP-ViT-H-14-laion2B-s32B-b79K`, as in PaCo-RL's published code; see its model card.

    It does not know what should stay the same and what should change, and rewards copies. On ConsistencyRank, PaCo-RL
    reports an accuracy of .394 for it and of .449 for a judge.

    Arguments are those of [`ClipTReward`].
    """

    __name__ = "clip_i"


class DreamSimReward(PairSimilarityReward, DreamSimScorer):
    """
    DreamSim ([Fu et al.](https://huggingface.co/papers/2306.09344)): 1 minus the perceptual distance of panels,
    averaged over all unordered pairs of a set.

    - Range: [0, 1] in practice; the distance is not bounded.
    - Cost: a forward pass of an ensemble of three vision transformers per panel of each pair.
    - Source and license: the package `dreamsim` (MIT), which downloads its weights.

    It rewards copies, as [`ClipIReward`] does. Arguments are those of [`~paco_trl.evaluation.DreamSimScorer`].
    """

    __name__ = "dreamsim"
