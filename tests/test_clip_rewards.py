# SPDX-License-Identifier: Apache-2.0
"""CLIP-T, PickScore, CLIP-I and an aesthetic predictor on a tiny CLIP."""

import inspect
from itertools import combinations

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPModel, CLIPProcessor

from paco_trl.evaluation import AestheticScorer
from paco_trl.rewards import ClipIReward, ClipTReward, PickScoreReward
from paco_trl.rewards.clip import ClipEmbedder, ClipIScorer
from testing_utils import count_images, noise, plain


TEXTS = ["a red house near the sea", "a cat that wakes up", "a blue car in the rain"]


@pytest.fixture(scope="module")
def pick_score(tiny_clip):
    return PickScoreReward(tiny_clip, tiny_clip, device="cpu")


@pytest.fixture(scope="module")
def outputs_of(tiny_clip):
    """What the whole CLIPModel gives for images and texts."""
    model, processor = CLIPModel.from_pretrained(tiny_clip).eval(), CLIPProcessor.from_pretrained(tiny_clip)

    def outputs(images, texts):
        with torch.no_grad():
            return model(**processor(text=texts, images=images, padding=True, return_tensors="pt"))

    outputs.scale = model.logit_scale.exp().item()
    return outputs


@pytest.fixture(scope="module")
def logit(outputs_of):
    """`logits_per_image` of one image and one text."""
    return lambda image, text: outputs_of([image], [text]).logits_per_image.item()


class TestPickScoreReward:
    def test_is_the_logit_of_clip_divided_by_26(self, logit, pick_score):
        images, texts = [noise(seed) for seed in range(3)], [*TEXTS[:2], TEXTS[0]]  # one text twice
        expected = [logit(image, text) / 26 for image, text in zip(images, texts, strict=True)]
        scores = pick_score(texts, images)
        assert scores == pytest.approx(expected, abs=1e-5)
        assert all(isinstance(score, float) for score in scores)
        assert len({round(score, 3) for score in scores}) == 3

    @pytest.mark.parametrize("reward_class", [ClipTReward, PickScoreReward])
    def test_with_panels_it_is_the_mean_over_each_panel_and_its_own_text(
        self, tiny_clip, outputs_of, logit, reward_class
    ):
        reward = reward_class(tiny_clip, processor=tiny_clip, device="cpu")
        panels, panel_images = [TEXTS[:2], TEXTS[2:]], [[noise(0), noise(1)], [noise(2)]]
        columns = {"completions": [noise(8), noise(9)], "panels": panels, "panel_images": panel_images}
        divisor = 26 if reward_class is PickScoreReward else outputs_of.scale  # CLIP-T is the cosine
        by_hand = [
            [logit(image, text) / divisor for image, text in zip(images, texts, strict=True)]
            for images, texts in zip(panel_images, panels, strict=True)
        ]
        assert abs(by_hand[0][0] - by_hand[0][1]) > 0.001
        scores = reward(prompts=["p", "q"], **columns)
        assert scores == pytest.approx([sum(by_hand[0]) / 2, by_hand[1][0]], abs=1e-5)
        # The whole images and prompts are not read
        assert reward(prompts=["", ""], **(columns | {"completions": [noise(7)] * 2})) == scores
        swapped = reward(prompts=["p", "q"], **(columns | {"panels": [TEXTS[1::-1], TEXTS[2:]]}))
        assert abs(swapped[0] - scores[0]) > 0.001 and swapped[1] == pytest.approx(scores[1], abs=1e-6)

    def test_a_group_encodes_each_text_once_and_images_go_in_batches(self, tiny_clip):
        reward = PickScoreReward(tiny_clip, tiny_clip, device="cpu", batch_size=4)
        text_rows, image_rows = count_images(reward.model.text_model), count_images(reward.model.vision_model)
        scores = reward([TEXTS[0]] * 4 + [TEXTS[1]] * 4, [noise(seed) for seed in range(8)])
        assert text_rows == [2] and image_rows == [4, 4]
        assert len({round(score, 4) for score in scores}) == 8

        text_rows.clear(), image_rows.clear()
        panel_images = [[noise(10 * seed), noise(10 * seed + 1)] for seed in range(3)]
        reward(["p"] * 3, [noise(0)] * 3, panels=[TEXTS[:2]] * 3, panel_images=panel_images)
        assert text_rows == [2] and image_rows == [4, 2]

    def test_reports_texts_that_are_longer_than_77_tokens(self, pick_score):
        def truncated(texts):
            logged = {}
            pick_score(texts, [noise(seed) for seed in range(len(texts))], log_metric=logged.__setitem__)
            return logged

        # "a" is one token; 77 positions hold 75 of them between the two special tokens.
        assert truncated(["a " * 75, "a cat"]) == {"pick_score/truncated_texts": 0.0}
        assert truncated(["a " * 76, "a cat"]) == {"pick_score/truncated_texts": 0.5}
        assert truncated(["a " * 76, "a " * 76, "a cat"]) == {"pick_score/truncated_texts": 0.5}
        assert truncated([]) == {}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prompts": ["a cat"]}, "1 entries for 2"),
            ({"completions": [noise(0), Image.new("RGB", (0, 8))]}, "completion 1"),
            ({"panels": [["a"], ["b", "c"]], "panel_images": [[noise(0)]] * 2}, "completion 1"),
            ({"panels": [["a"], [" "]], "panel_images": [[noise(0)]] * 2}, "completion 1"),
            ({"panels": [["a"], None], "panel_images": [[noise(0)]] * 2}, "completion 1"),
            ({"panels": [["a"], ["b"]], "panel_images": [[noise(0)]]}, "`panel_images`"),
        ],
    )
    def test_errors(self, pick_score, changes, message):
        columns = {"prompts": TEXTS[:2], "completions": [noise(0), noise(1)]}
        assert len(pick_score(**columns)) == 2
        with pytest.raises(ValueError, match=message):
            pick_score(**(columns | changes))

    def test_is_a_reward_for_trl_frozen_and_float32(self, tiny_clip, pick_score, tmp_path):
        assert not isinstance(pick_score, torch.nn.Module)  # TRL would call a module with token ids
        assert not any(parameter.requires_grad for parameter in pick_score.model.parameters())
        assert not any(module.training for module in pick_score.model.modules())
        assert pick_score.model.dtype == torch.float32
        half = PickScoreReward(tiny_clip, tiny_clip, device="cpu", dtype=torch.bfloat16)
        assert half.model.dtype == torch.bfloat16
        half.model.save_pretrained(tmp_path)
        # Whatever the file has. As on the Hub, the processor is in another repository
        assert PickScoreReward(tmp_path, tiny_clip).model.dtype == torch.float32
        defaults = {name: value.default for name, value in inspect.signature(PickScoreReward).parameters.items()}
        assert defaults["model"] == "yuvalkirstain/PickScore_v1"
        assert defaults["processor"] == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
        full_scores, half_scores = (reward(TEXTS, [noise(0)] * 3) for reward in (pick_score, half))
        assert half_scores != full_scores and half_scores == pytest.approx(full_scores, abs=0.1)

    def test_autocast_does_not_change_the_scores(self, pick_score):
        scores = pick_score(TEXTS, [noise(0)] * 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert pick_score(TEXTS, [noise(0)] * 3) == scores


def test_clip_weights_that_are_not_finite_are_an_error(tiny_clip):
    embedder = ClipEmbedder(tiny_clip, device="cpu")
    with torch.no_grad():
        embedder.model.text_projection.weight[0, 0] = float("inf")
    assert embedder.embed([noise(0)], ["a"])[0].isfinite().all()
    with pytest.raises(ValueError, match="not finite"):
        embedder.embed([], [], TEXTS)


class TestClipI:
    def call(self, reward, panel_images):
        return reward(["p"] * len(panel_images), [plain(0)] * len(panel_images), panel_images=panel_images)

    def test_is_the_mean_cosine_of_pairs(self, tiny_clip, outputs_of):
        panel_images = [[noise(seed) for seed in range(4)], [noise(5), plain(200)]]
        expected = []
        for panels in panel_images:
            embeds = outputs_of(panels, TEXTS).image_embeds
            cosines = [(first @ second).item() for first, second in combinations(embeds, 2)]
            expected.append(sum(cosines) / len(cosines))
        reward = ClipIReward(tiny_clip, device="cpu")
        assert abs(expected[0] - expected[1]) > 0.001
        assert self.call(reward, panel_images) == pytest.approx(expected, abs=1e-5)

    def test_copies_and_single_panels(self, tiny_clip):
        reward = ClipIReward(tiny_clip, device="cpu")
        copies = [plain(80).copy() for _ in range(3)]
        first, second = self.call(reward, [copies, [*copies[:2], noise(1)]])
        assert first == pytest.approx(1, abs=1e-5) and second < 0.999
        with pytest.raises(ValueError, match="Image 1"):
            self.call(reward, [copies, copies[:1]])
        assert self.call(reward, []) == []


# ---- The aesthetic predictor: linear layers on a CLIP ----


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
    for of_list in (scorer.score_images, lambda images: ClipIScorer(tiny_clip, device="cpu").score(images, [])):
        for images in (noise(0), str(tmp_path)):
            with pytest.raises(ValueError, match="Pass a list"):
                of_list(images)


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
