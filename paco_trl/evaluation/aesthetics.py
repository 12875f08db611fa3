# SPDX-License-Identifier: Apache-2.0
"""Aesthetic scores, predicted from the CLIP embedding of an image."""

import re
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from transformers.utils import cached_file

from ..rewards.clip import ClipEmbedder
from ..rewards.judge import check_list
from ..utils.fingerprint import weights_fingerprint
from ..utils.names import public_name


class AestheticScorer:
    """
    Predict aesthetic scores like the [LAION predictor](https://github.com/LAION-AI/aesthetic-predictor): linear layers
    on the unit CLIP embedding of an image. Its ratings are from 1 to 10, and a score is a tenth of a rating.

    Not comparable with T2IS-Bench and the PaCo-RL paper, whose scorer is not published.

    Args:
        head (`str` or `Path`):
            Safetensors file of the linear layers, or Hub id or directory with a `model.safetensors`. Layers are
            ordered by the numbers in their names (`layers.0.weight`, `layers.2.weight`, ...). The published files are
            pickles: convert them first.
        clip_model (`str` or `Path`, *optional*, defaults to `"openai/clip-vit-large-patch14"`):
            Hub id or directory of the CLIP that the head was trained on.
        device (`str` or `torch.device`, *optional*), dtype (`torch.dtype`, *optional*), batch_size (`int`, *optional*,
        defaults to `32`):
            See [`ClipIScorer`].

    Attributes:
        name (`str`):
            Name for reports, from the head and the CLIP.
    """

    def __init__(
        self,
        head: str | Path,
        clip_model: str | Path = "openai/clip-vit-large-patch14",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int = 32,
    ):
        path = Path(head)
        if not path.is_file():
            path = Path(cached_file(str(head), "model.safetensors"))
        if path.suffix != ".safetensors":
            raise ValueError(
                f"The head {str(head)!r} is not a safetensors file. Convert it, since other formats can run code."
            )
        self.clip = ClipEmbedder(clip_model, device=device, dtype=dtype, batch_size=batch_size)
        self.head = _linear_layers(load_file(path), self.clip.model.config.projection_dim, str(head))
        self.name = f"{public_name(str(head))} on {public_name(str(clip_model))}"

    @property
    def fingerprint(self) -> str:
        """Return a digest of sampled weights, which identifies the scorer."""
        return weights_fingerprint(self.clip.model, self.head)

    @torch.inference_mode()
    def score_images(self, images: list[Image.Image]) -> list[float]:
        """Return a tenth of the rating of each image."""
        if not check_list(images):
            return []
        embeds = self.clip.embed(images, [f"Image {number}" for number in range(len(images))])[0]  # (N, D)
        return (self.head(embeds.float().cpu()).squeeze(-1) / 10).tolist()


def _linear_layers(weights: dict[str, torch.Tensor], width: int, where: str) -> nn.Sequential:
    names = [name for name in weights if name.endswith(".weight") and weights[name].ndim == 2]
    names.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    layers = []
    for name in names:
        rows, columns = weights[name].shape
        if columns != width:
            raise ValueError(
                f"`{name}` of {where} takes {columns} numbers, but gets {width}. Pass the CLIP that it was trained on."
            )
        layer = nn.Linear(columns, rows)
        layer.weight.data = weights[name].float()
        bias = weights.get(name.removesuffix("weight") + "bias")
        layer.bias.data = torch.zeros(rows) if bias is None else bias.float()
        layers.append(layer)
        width = rows
    if width != 1 or not layers:
        raise ValueError(
            f"The layers of {where} end in {width} numbers, not in one rating: {names or 'there are none'}."
        )
    return nn.Sequential(*layers).eval().requires_grad_(False)
