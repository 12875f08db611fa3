# SPDX-License-Identifier: Apache-2.0
"""PickScore on a tiny CLIP, and the embeddings that it shares with CLIP-T and CLIP-I."""

import inspect
import math

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPProcessor
from trl.trainer.utils import get_callable_name, is_async_callable

from paco_trl.evaluation import ClipIScorer
from paco_trl.rewards import ClipTReward, PickScoreReward
from paco_trl.rewards.clip import ClipEmbedder
from paco_trl.tiny.clip import build_tiny_clip


NAN = float("nan")
TEXTS = ["a red house near the sea", "a cat that wakes up", "a blue car in the rain"]


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory):
    return build_tiny_clip(tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture(scope="module")
def pick_score(tiny_clip):
    return PickScoreReward(tiny_clip, tiny_clip, device="cpu")


def noise(seed, size=(40, 40)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def logit(folder, image, text):
    """`logits_per_image` of the whole CLIPModel for one image and one text."""
    model = CLIPModel.from_pretrained(folder).eval()
    inputs = CLIPProcessor.from_pretrained(folder)(text=[text], images=[image], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits_per_image.item()


def count_rows(model):
    """Lists that fill with the batch sizes of the text and the vision tower."""
    text_rows, image_rows = [], []
    model.text_model.register_forward_pre_hook(
        lambda module, args, kwargs: text_rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    model.vision_model.register_forward_pre_hook(
        lambda module, args, kwargs: image_rows.append(len(kwargs["pixel_values"])), with_kwargs=True
    )
    return text_rows, image_rows


class TestPickScoreReward:
    def test_is_the_logit_of_clip_divided_by_26(self, tiny_clip, pick_score):
        images = [noise(seed) for seed in range(3)]
        expected = [logit(tiny_clip, image, text) / 26 for image, text in zip(images, TEXTS, strict=True)]
        scores = pick_score(TEXTS, images)
        assert scores == pytest.approx(expected, abs=1e-5)
        assert all(isinstance(score, float) for score in scores)
        assert len({round(score, 3) for score in scores}) == 3

    def test_scales_with_the_weight_of_the_model(self, tiny_clip):
        reward = PickScoreReward(tiny_clip, tiny_clip, device="cpu")
        (before,) = reward(TEXTS[:1], [noise(0)])
        reward.model.logit_scale.data += math.log(3)
        assert reward(TEXTS[:1], [noise(0)]) == pytest.approx([3 * before], rel=1e-5)

    def test_images_and_texts_have_an_effect(self, pick_score):
        def score(seed, text):
            return pick_score([text], [noise(seed)])[0]

        assert abs(score(0, TEXTS[0]) - score(1, TEXTS[0])) > 0.001
        assert abs(score(0, TEXTS[0]) - score(0, TEXTS[1])) > 0.001
        # Twin: the same pixels and the same text, in another object and at another place in the batch
        scores = pick_score([TEXTS[0], TEXTS[1], TEXTS[0]], [noise(0), noise(1), noise(0)])
        assert scores[0] == pytest.approx(scores[2], abs=1e-6)
        assert abs(scores[0] - scores[1]) > 0.001

    def test_with_panels_it_is_the_mean_over_each_panel_and_its_own_text(self, tiny_clip, pick_score):
        panels, panel_images = [TEXTS[:2], TEXTS[2:]], [[noise(0), noise(1)], [noise(2)]]
        columns = {"completions": [noise(8), noise(9)], "panels": panels, "panel_images": panel_images}
        by_hand = [
            [logit(tiny_clip, image, text) / 26 for image, text in zip(images, texts, strict=True)]
            for images, texts in zip(panel_images, panels, strict=True)
        ]
        assert abs(by_hand[0][0] - by_hand[0][1]) > 0.001
        scores = pick_score(prompts=["p", "q"], **columns)
        assert scores == pytest.approx([sum(by_hand[0]) / 2, by_hand[1][0]], abs=1e-5)
        # The whole images and prompts are not read
        assert pick_score(prompts=["", ""], **(columns | {"completions": [noise(7)] * 2})) == scores
        swapped = pick_score(prompts=["p", "q"], **(columns | {"panels": [TEXTS[1::-1], TEXTS[2:]]}))
        assert abs(swapped[0] - scores[0]) > 0.001 and swapped[1] == pytest.approx(scores[1], abs=1e-6)

    def test_without_the_column_panels_the_cut_images_are_not_read(self, tiny_clip, pick_score):
        # The trainer adds `panel_images` to every call
        scores = pick_score([TEXTS[0]], [noise(0)], panel_images=[[noise(1), noise(2)]], rows=[1], cols=[2])
        assert scores == pytest.approx([logit(tiny_clip, noise(0), TEXTS[0]) / 26], abs=1e-5)

    def test_a_group_encodes_each_text_once_and_images_go_in_batches(self, tiny_clip):
        reward = PickScoreReward(tiny_clip, tiny_clip, device="cpu", batch_size=4)
        text_rows, image_rows = count_rows(reward.model)
        scores = reward([TEXTS[0]] * 4 + [TEXTS[1]] * 4, [noise(seed) for seed in range(8)])
        assert text_rows == [2] and image_rows == [4, 4]
        assert len({round(score, 4) for score in scores}) == 8

        text_rows.clear(), image_rows.clear()
        panel_images = [[noise(10 * seed), noise(10 * seed + 1)] for seed in range(3)]
        reward(["p"] * 3, [noise(0)] * 3, panels=[TEXTS[:2]] * 3, panel_images=panel_images)
        assert text_rows == [2] and image_rows == [4, 2]

    @pytest.mark.parametrize("by_panel", [False, True])
    def test_reports_texts_that_are_longer_than_77_tokens(self, pick_score, by_panel):
        def truncated(texts):
            logged = {}
            images = [noise(seed) for seed in range(len(texts))]
            if by_panel:
                columns = {"panels": [[text] for text in texts], "panel_images": [[image] for image in images]}
                pick_score(["p"] * len(texts), images, log_metric=logged.__setitem__, **columns)
            else:
                pick_score(texts, images, log_metric=logged.__setitem__)
            return logged

        # "a" is one token; 77 positions hold 75 of them between the two special tokens.
        assert truncated(["a " * 75, "a cat"]) == {"pick_score/truncated_texts": 0.0}
        assert truncated(["a " * 76, "a cat"]) == {"pick_score/truncated_texts": 0.5}
        assert truncated(["a " * 76, "a " * 76, "a cat"]) == {"pick_score/truncated_texts": 0.5}
        assert truncated([]) == {}

    def test_long_texts_are_cut(self, pick_score):
        scores = pick_score(["a " * 200, "a " * 75, "a " * 70], [noise(0)] * 3)
        assert scores[0] == pytest.approx(scores[1], abs=1e-6)
        assert abs(scores[0] - scores[2]) > 1e-5

    def test_nothing_to_score(self, pick_score):
        assert pick_score([], []) == []
        assert pick_score([], [], panels=[], panel_images=[]) == []

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prompts": ["a cat"]}, "`prompts` has 1 entries for 2 images. Pass one for each"),
            ({"prompts": ["a cat", " "]}, "The prompt of completion 1 is ' ', not a text for PickScore"),
            ({"prompts": ["a cat", None]}, "The prompt of completion 1 is None, not a text for PickScore"),
            ({"completions": [noise(0), Image.new("RGB", (0, 8))]}, "Completion 1 has 0 x 8 pixels"),
            ({"panels": [["a"], ["b"]]}, "PickScore requires the column `panel_images`"),
            ({"panels": [["a"]], "panel_images": [[noise(0)]] * 2}, "`panels` has 1 entries for 2 images"),
            ({"panels": [["a"], ["b"]], "panel_images": [[noise(0)]]}, "`panel_images` has 1 entries for 2"),
            (
                {"panels": [["a"], None], "panel_images": [[noise(0)]] * 2},
                "`panels` of completion 1 is None, but PickScore requires a text for each panel",
            ),
            ({"panels": [["a"], [""]], "panel_images": [[noise(0)]] * 2}, "`panels` of completion 1"),
            (
                {"panels": [["a"], ["b", "c"]], "panel_images": [[noise(0)]] * 2},
                "Completion 1 has 1 panel images and 2 panel texts",
            ),
            (
                {"panels": [["a"], ["b", "c"]], "panel_images": [[noise(0)], [noise(0), Image.new("RGB", (0, 8))]]},
                "Panel 1 of completion 1 has 0 x 8 pixels",
            ),
        ],
    )
    def test_errors(self, pick_score, changes, message):
        columns = {"prompts": TEXTS[:2], "completions": [noise(0), noise(1)]}
        assert len(pick_score(**columns)) == 2
        with pytest.raises(ValueError, match=message):
            pick_score(**(columns | changes))

    def test_a_score_that_is_not_finite_is_an_error(self, tiny_clip):
        reward = PickScoreReward(tiny_clip, tiny_clip, device="cpu")
        assert all(math.isfinite(score) for score in reward(TEXTS, [noise(0)] * 3))
        reward.model.logit_scale.data.fill_(1000.0)
        with pytest.raises(ValueError, match="The PickScore score of completion 0 is -?inf: the weights of the model"):
            reward(TEXTS, [noise(0)] * 3)
        reward.model.logit_scale.data.fill_(NAN)
        with pytest.raises(ValueError, match="completion 0 is nan"):
            reward(TEXTS, [noise(0)] * 3)

    def test_is_a_reward_for_trl_frozen_and_float32(self, tiny_clip, pick_score):
        assert get_callable_name(pick_score) == "pick_score"
        assert not is_async_callable(pick_score)
        assert not isinstance(pick_score, torch.nn.Module)  # TRL would call a module with token ids
        assert not any(parameter.requires_grad for parameter in pick_score.model.parameters())
        assert not any(module.training for module in pick_score.model.modules())
        assert pick_score.model.dtype == torch.float32
        half = PickScoreReward(tiny_clip, tiny_clip, device="cpu", dtype=torch.bfloat16)
        assert half.model.dtype == torch.bfloat16
        full_scores, half_scores = (reward(TEXTS, [noise(0)] * 3) for reward in (pick_score, half))
        assert half_scores != full_scores and half_scores == pytest.approx(full_scores, abs=0.1)

    def test_autocast_does_not_change_the_scores(self, pick_score):
        scores = pick_score(TEXTS, [noise(0)] * 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert pick_score(TEXTS, [noise(0)] * 3) == scores

    def test_the_processor_is_loaded_from_its_own_place(self, tiny_clip, tmp_path):
        # As on the Hub: weights in one repository, processor in another
        CLIPModel.from_pretrained(tiny_clip).save_pretrained(tmp_path / "weights")
        CLIPProcessor.from_pretrained(tiny_clip).save_pretrained(tmp_path / "processor")
        apart = PickScoreReward(tmp_path / "weights", tmp_path / "processor", device="cpu")
        together = PickScoreReward(tiny_clip, tiny_clip, device="cpu")
        assert apart(TEXTS, [noise(0)] * 3) == together(TEXTS, [noise(0)] * 3)
        defaults = {name: value.default for name, value in inspect.signature(PickScoreReward).parameters.items()}
        assert defaults["model"] == "yuvalkirstain/PickScore_v1"
        assert defaults["processor"] == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

    def test_batch_size_must_be_positive(self, tiny_clip):
        with pytest.raises(ValueError, match="`batch_size` is 0, but must be at least 1"):
            PickScoreReward(tiny_clip, tiny_clip, batch_size=0)


class TestClipEmbedder:
    def test_gives_unit_vectors_of_clip_in_the_order_of_the_list(self, tiny_clip):
        embedder = ClipEmbedder(tiny_clip, device="cpu", batch_size=2)
        images = [noise(seed) for seed in range(3)]
        names = ["a", "b", "c"]
        image_embeds, text_embeds = embedder.embed_images(images, names), embedder.embed_texts(TEXTS)
        model = CLIPModel.from_pretrained(tiny_clip).eval()
        processor = CLIPProcessor.from_pretrained(tiny_clip)
        inputs = processor(text=TEXTS, images=images, padding=True, return_tensors="pt")
        with torch.no_grad():
            outputs = model(**inputs)
        torch.testing.assert_close(image_embeds, outputs.image_embeds, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(text_embeds, outputs.text_embeds, atol=1e-5, rtol=1e-5)
        assert image_embeds.dtype == text_embeds.dtype == torch.float32
        torch.testing.assert_close(image_embeds.norm(dim=-1), torch.ones(3))
        torch.testing.assert_close(
            embedder.embed_images(images[::-1], names), image_embeds.flip(0), atol=1e-6, rtol=1e-5
        )
        assert embedder.embed_images([], []).shape == embedder.embed_texts([]).shape == (0, 16)

    def test_an_object_goes_through_the_model_once(self, tiny_clip):
        embedder = ClipEmbedder(tiny_clip, device="cpu")
        text_rows, image_rows = count_rows(embedder.model)
        image = noise(0)
        image_embeds = embedder.embed_images([image, noise(1), image], ["a", "b", "c"])
        text_embeds = embedder.embed_texts([TEXTS[0], TEXTS[1], TEXTS[0]])
        assert text_rows == image_rows == [2]
        for embeds in (image_embeds, text_embeds):
            assert torch.equal(embeds[0], embeds[2]) and not torch.allclose(embeds[0], embeds[1], atol=1e-3)

    def test_the_rewards_and_the_scorer_agree_on_the_embeddings(self, tiny_clip, pick_score):
        clip_t, clip_i = ClipTReward(tiny_clip, device="cpu"), ClipIScorer(tiny_clip, device="cpu")
        images = [noise(seed) for seed in range(3)]
        image_embeds = clip_t.embed_images(images, TEXTS)
        for other in (clip_i, pick_score):
            assert torch.equal(other.embed_images(images, TEXTS), image_embeds)
            assert torch.equal(other.embed_texts(TEXTS), clip_t.embed_texts(TEXTS))

        panels, panel_images = [[text] for text in TEXTS], [[image] for image in images]
        cosines = clip_t(["p"] * 3, images, panels=panels, panel_images=panel_images)
        scale = clip_t.model.logit_scale.exp().item()
        picked = pick_score(TEXTS, images)
        assert cosines == pytest.approx([26 * score / scale for score in picked], abs=1e-6)
        assert pick_score(["p"] * 3, images, panels=panels, panel_images=panel_images) == pytest.approx(picked)
        pair = clip_i.score([(images[0], images[1])], ["?"])
        assert pair == pytest.approx([(image_embeds[0] @ image_embeds[1]).item()], abs=1e-6)

    def test_transparency_is_put_on_white_and_16_bits_are_scaled(self, tiny_clip, pick_score):
        clip_t, clip_i = ClipTReward(tiny_clip, device="cpu"), ClipIScorer(tiny_clip, device="cpu")
        alpha = Image.fromarray(np.random.default_rng(5).integers(0, 2, (40, 40), dtype=np.uint8) * 255)
        transparent, on_white = noise(0), Image.new("RGB", (40, 40), "white")
        on_white.paste(transparent, mask=alpha)
        transparent.putalpha(alpha)
        grey = np.random.default_rng(6).integers(0, 256, (40, 40), dtype=np.uint8)
        deep = Image.fromarray(grey.astype(np.uint16) * 257)
        for image, expected in ((transparent, on_white), (deep, Image.fromarray(grey))):
            assert clip_i.score([(image, expected)], ["?"]) == pytest.approx([1.0], abs=1e-5)
            # Pillow's own conversion is another image: what this test would not see without an effect
            plain = image.convert("RGB")
            assert clip_i.score([(plain, expected)], ["?"])[0] < 0.9999
            scores = pick_score([TEXTS[0]] * 2, [image, expected])
            assert scores[0] == pytest.approx(scores[1], abs=1e-6)
            columns = {"panels": [[TEXTS[0]]] * 2, "panel_images": [[image], [expected]]}
            scores = clip_t(["p"] * 2, [image, expected], **columns)
            assert scores[0] == pytest.approx(scores[1], abs=1e-6)

    def test_an_image_without_pixels_is_named(self, tiny_clip):
        empty = Image.new("RGB", (8, 0))
        clip_t, clip_i = ClipTReward(tiny_clip, device="cpu"), ClipIScorer(tiny_clip, device="cpu")
        with pytest.raises(ValueError, match="Panel 1 of completion 0 has 8 x 0 pixels"):
            clip_t(["p"], [noise(0)], panels=[["a", "b"]], panel_images=[[noise(0), empty]])
        with pytest.raises(ValueError, match="An image of pair 1 has 8 x 0 pixels"):
            clip_i.score([(noise(0), noise(1)), (noise(0), empty)], ["?"] * 2)
