# SPDX-License-Identifier: Apache-2.0
"""An aesthetic predictor: linear layers on a tiny CLIP, against the arithmetic by hand."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPModel, CLIPProcessor

from paco_trl.evaluation import AestheticScorer
from testing_utils import noise


def layers(width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    # Eleven layers would be sorted wrongly as text: 10 comes before 2
    return {
        "mlp.2.weight": torch.randn(6, width, generator=generator),
        "mlp.2.bias": torch.randn(6, generator=generator),
        "mlp.10.weight": torch.randn(1, 6, generator=generator),
        "mlp.10.bias": torch.tensor([5.0]),
    }


def test_a_score_is_a_tenth_of_the_rating(tiny_clip, tmp_path):
    model, processor = CLIPModel.from_pretrained(tiny_clip), CLIPProcessor.from_pretrained(tiny_clip)
    images = [noise(seed) for seed in range(5)]
    weights = layers(model.config.projection_dim)
    save_file(weights, tmp_path / "head.safetensors")
    scorer = AestheticScorer(tmp_path / "head.safetensors", tiny_clip, device="cpu", batch_size=2)
    with torch.no_grad():
        pixels = processor(images=images, return_tensors="pt")["pixel_values"]
        embeds = model.get_image_features(pixel_values=pixels).pooler_output
        hidden = embeds / embeds.norm(dim=-1, keepdim=True) @ weights["mlp.2.weight"].T + weights["mlp.2.bias"]
        ratings = (hidden @ weights["mlp.10.weight"].T + weights["mlp.10.bias"]).squeeze(-1)
    scores = scorer.score_images(images)
    assert scores == pytest.approx((ratings / 10).tolist(), abs=1e-5)
    assert np.std(scores) > 1e-3  # pictures differ
    assert scorer.name == "head.safetensors on tiny-clip"
    assert scorer.score_images([]) == []


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda weights: weights.update({"mlp.2.weight": torch.ones(6, 3)}), "takes 3 numbers, but"),
        (
            lambda weights: weights.update({"mlp.10.weight": torch.ones(2, 6), "mlp.10.bias": torch.ones(2)}),
            "end in 2",
        ),
        (lambda weights: weights.clear() or weights.update(bias=torch.ones(1)), "there are none"),
    ],
)
def test_a_head_that_does_not_fit(tiny_clip, tmp_path, change, message):
    weights = layers(CLIPModel.from_pretrained(tiny_clip).config.projection_dim)
    change(weights)
    save_file(weights, tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match=message):
        AestheticScorer(tmp_path / "head.safetensors", tiny_clip)


def test_pickles_are_refused(tiny_clip, tmp_path):
    torch.save(layers(8), tmp_path / "head.pth")
    with pytest.raises(ValueError, match=r"head\.pth' is not a safetensors file"):
        AestheticScorer(tmp_path / "head.pth", tiny_clip)
