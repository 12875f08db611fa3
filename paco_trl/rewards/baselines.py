# SPDX-License-Identifier: Apache-2.0
"""Similarity of images as a judge of consistency: CLIP-I and DreamSim, the baselines of the PaCo-RL paper."""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import PartialState
from PIL import Image

from ..utils.images import to_rgb
from .clip import ClipEmbedder


class ClipIScorer(ClipEmbedder):
    """
    CLIP-I: cosine similarity of the CLIP embeddings of two images, in [-1, 1]. The questions are not read.

    The model is loaded at construction, frozen and in eval mode, and stays on the CPU until the first call.

    Args:
        model (`str` or `Path`, *optional*, defaults to `"laion/CLIP-ViT-H-14-laion2B-s32B-b79K"`):
            Hub id or folder of a [`~transformers.CLIPModel`] with its [`~transformers.CLIPProcessor`].
        device (`str` or `torch.device`, *optional*):
            Device to score on. Defaults to this process's own: its accelerator, or the CPU if there is none.
        dtype (`torch.dtype`, *optional*):
            Dtype of the model. Defaults to float32, whatever the dtype of the file: a ranking is made of small
            differences.
        batch_size (`int`, *optional*, defaults to `32`):
            Images per forward pass.

    Example:

    ```python
    >>> from paco_trl.evaluation import ClipIScorer

    >>> ClipIScorer().score([(first, second)], ["Are the two images consistent?"])  # a list of one float
    ```
    """

    reads_questions = False

    def __init__(
        self,
        model: str | Path = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
    ):
        super().__init__(model, device=device, dtype=dtype, batch_size=batch_size)
        self.name = f"CLIP-I ({model})"

    def score(self, images: list[tuple[Image.Image, Image.Image]], prompts: list[str]) -> list[float]:
        """
        Score pairs of images.

        Args:
            images (`list[tuple[PIL.Image.Image, PIL.Image.Image]]`):
                Pairs. An image object that is in several pairs is embedded once.
            prompts (`list[str]`):
                Questions, not read.

        Returns:
            `list[float]`: one cosine per pair.

        Raises:
            ValueError: If an image cannot be converted to RGB, or a cosine is not finite.
        """
        if not images:
            return []
        names = [f"An image of pair {index}" for index in range(len(images)) for _ in range(2)]
        embeds = self.embed_images([image for pair in images for image in pair], names)  # (2N, D)
        firsts, seconds = embeds[0::2], embeds[1::2]  # (N, D)
        return _finite((firsts * seconds).sum(dim=-1).tolist(), self.name)


class DreamSimScorer:
    """
    DreamSim (https://arxiv.org/abs/2306.09344): 1 minus the perceptual distance of two images. The questions are not
    read.

    Needs the package `dreamsim`, unless a model is given: `pip install "paco_trl[dreamsim]"`. Its weights are
    downloaded at the first use, into the cache folder of the Hub; it runs code from GitHub (`torch.hub`) to build them.

    Args:
        model (`Callable`, *optional*):
            Built model: takes two batches of preprocessed images of shape (B, 3, H, W), and gives their distances, of
            shape (B,). It stays on its device. If `None`, the published ensemble.
        preprocess (`Callable`, *optional*):
            Makes a (1, 3, H, W) tensor of a PIL image. Goes with `model`.
        device (`str` or `torch.device`, *optional*):
            Device to score on. Defaults to this process's own: its accelerator, or the CPU if there is none.
        batch_size (`int`, *optional*, defaults to `32`):
            Pairs per forward pass.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether `dreamsim` may run code from GitHub. Needed unless a model is given.

    Raises:
        ImportError: If no model is given and `dreamsim` is not installed.
        ValueError: If only one of `model` and `preprocess` is given, or none and code from elsewhere is not trusted.
    """

    reads_questions = False

    def __init__(
        self,
        model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        preprocess: Callable[[Image.Image], torch.Tensor] | None = None,
        device: str | torch.device | None = None,
        batch_size: int = 32,
        trust_remote_code: bool = False,
    ):
        if batch_size < 1:
            raise ValueError(f"`batch_size` is {batch_size}, but must be at least 1.")
        if model is None and preprocess is None and not trust_remote_code:
            raise ValueError(
                "The package dreamsim runs code from GitHub (`torch.hub`, facebookresearch/dino) and downloads weights "
                "that are no safetensors. If you trust it, pass `trust_remote_code=True`; or pass a built `model` with "
                "its `preprocess`."
            )
        if (model is None) != (preprocess is None):
            raise ValueError("`model` and `preprocess` belong together, but only one is given. Pass both or neither.")
        self.name = "DreamSim"
        self.model_name = self.name if model is None else None  # for cards
        self.device = torch.device(device) if device is not None else PartialState().device
        self.batch_size = batch_size
        self.model, self.preprocess = (model, preprocess) if model is not None else _load_dreamsim(self.device)

    def score(self, images: list[tuple[Image.Image, Image.Image]], prompts: list[str]) -> list[float]:
        """
        Score pairs of images.

        Args:
            images (`list[tuple[PIL.Image.Image, PIL.Image.Image]]`):
                Pairs.
            prompts (`list[str]`):
                Questions, not read.

        Returns:
            `list[float]`: 1 - distance, one per pair.

        Raises:
            ValueError: If an image cannot be converted to RGB, or a distance is not finite.
        """
        inputs = {}  # by the id of the image object, each once
        for index, pair in enumerate(images):
            for image in pair:
                if id(image) not in inputs:
                    inputs[id(image)] = self.preprocess(to_rgb(image, f"An image of pair {index}"))
        similarities = []
        for batch in _split(images, self.batch_size):
            firsts = torch.cat([inputs[id(first)] for first, _ in batch]).to(self.device)  # (B, 3, H, W)
            seconds = torch.cat([inputs[id(second)] for _, second in batch]).to(self.device)  # (B, 3, H, W)
            with torch.no_grad():
                distances = self.model(firsts, seconds)  # (B,)
            similarities += (1 - distances.float().reshape(len(batch))).tolist()
        return _finite(similarities, self.name)


def _load_dreamsim(device):
    try:
        from dreamsim import dreamsim
    except ImportError as error:
        raise ImportError(
            'DreamSimScorer needs the package `dreamsim`, which is not installed: `pip install "paco_trl[dreamsim]"`. '
            "Or pass a built `model` with its `preprocess`."
        ) from error
    from huggingface_hub.constants import HF_HOME

    # The default of dreamsim is a folder `models` wherever the process was started
    cache_dir = Path(HF_HOME) / "dreamsim"
    cache_dir.mkdir(parents=True, exist_ok=True)
    return dreamsim(pretrained=True, device=str(device), cache_dir=str(cache_dir))


def _split(items: list, size: int) -> list[list]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _finite(scores: list[float], name: str) -> list[float]:
    for index, score in enumerate(scores):
        if not math.isfinite(score):
            raise ValueError(
                f"The score of pair {index} by {name} is {score}: the weights of the model are not finite, or "
                "overflow in its dtype. Use `dtype=torch.float32` or check the weights."
            )
    return scores
