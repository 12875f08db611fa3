# SPDX-License-Identifier: Apache-2.0
"""Training at a reduced resolution: do the scores carry over, and do the images show the grid of their patches?"""

import json
import math
import sys
import warnings

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image

from paco_trl.evaluation import grid_artifact_score, resolution_transfer
from paco_trl.evaluation.transfer import (
    ResolutionTransfer,
    ScorePairs,
    save_resolution_transfer,
    transfer_table,
    transfer_warning,
)
from paco_trl.tiny import build_tiny_flux


NAN = float("nan")


def zigzag(length, period, on_line, elsewhere, phase=0, start=100):
    """
    Grey levels whose neighbours differ by `elsewhere`, and by `on_line` across every line of a grid.

    Each step goes back towards the start, so that the levels stay within a few steps of it.
    """
    levels = [start]
    for position in range(1, length):
        step = on_line if (position - phase) % period == 0 else elsewhere
        levels.append(levels[-1] + (step if levels[-1] <= start else -step))
    return np.array(levels)


def planted(size=128, period=16, on_line=4, elsewhere=4, phase=0, dtype=np.uint8):
    """An image whose differences across the lines are `on_line / elsewhere` of those elsewhere, in both directions."""
    levels = zigzag(size, period, on_line, elsewhere, phase, start=60)
    return Image.fromarray((levels[:, None] + levels[None]).astype(dtype))


def noise(size, seed=0, low=0, high=256):
    return Image.fromarray(np.random.default_rng(seed).integers(low, high, (size, size), dtype=np.uint8))


def with_tiles(image, period, strength, seed=0, phase=0):
    """The image with a random offset on each patch, as a grid shows in real images."""
    pixels = np.asarray(image, dtype=float)
    count = -(-max(pixels.shape) // period) + 1
    tiles = np.kron(np.random.default_rng(seed).normal(size=(count, count)), np.ones((period, period)))
    shifted = tiles[period - phase :, period - phase :] if phase else tiles
    pixels = pixels + strength * shifted[: pixels.shape[0], : pixels.shape[1]].reshape(
        pixels.shape[:2] + (1,) * (pixels.ndim - 2)
    )
    return Image.fromarray(np.clip(np.round(pixels), 0, 255).astype(np.uint8))


class TestGridArtifactScore:
    @pytest.mark.parametrize(("size", "period"), [(128, 16), (96, 8), (64, 4), (40, 5), (33, 2)])
    @pytest.mark.parametrize(("on_line", "score"), [(2, -0.5), (4, 0.0), (6, 0.5), (8, 1.0), (20, 4.0)])
    def test_planted_strength(self, size, period, on_line, score):
        image = planted(size, period, on_line)
        assert grid_artifact_score(image, period) == pytest.approx(score, abs=1e-9)

    def test_both_directions_count_the_same(self):
        levels = zigzag(128, 16, 12, 4) + 0 * zigzag(128, 16, 4, 4)[:, None]
        plain = zigzag(128, 16, 4, 4)[:, None]
        only_across = (levels + plain - 100).astype(np.uint8)
        assert grid_artifact_score(Image.fromarray(only_across), 16) == pytest.approx(1.0)
        assert grid_artifact_score(Image.fromarray(only_across.T), 16) == pytest.approx(1.0)
        # A direction without any difference counts 0
        stripes = np.repeat(levels[:1], 128, axis=0).astype(np.uint8)
        assert grid_artifact_score(Image.fromarray(stripes), 16) == pytest.approx(1.0)

    def test_an_image_that_is_not_square(self):
        levels = [zigzag(length, 16, 12, 4, start=60) for length in (64, 208)]
        image = Image.fromarray((levels[0][:, None] + levels[1][None]).astype(np.uint8))
        assert image.size == (208, 64)
        assert grid_artifact_score(image, 16) == pytest.approx(2.0)
        assert grid_artifact_score(image, 16, cols=4) == pytest.approx(2.0)

    def test_is_that_of_luminance(self):
        grid, plain = (np.asarray(planted(on_line=on_line)) for on_line in (12, 4))
        colored = [np.stack([grid, plain, plain][i:] + [grid, plain, plain][:i], axis=-1) for i in range(3)]
        scores = [grid_artifact_score(Image.fromarray(array), 16) for array in colored]
        # A channel's planted 2 counts as much as the channel does in the luminance
        assert sorted(scores) == pytest.approx([2 * 0.114, 2 * 0.299, 2 * 0.587], rel=0.35)
        assert scores[2] > scores[0] > scores[1]  # green is last to get the grid, red first
        assert grid_artifact_score(Image.fromarray(grid).convert("RGBA"), 16) == pytest.approx(2.0)

    def test_constant_image_and_flat_patches(self):
        for color in ((0, 0, 0), (77, 130, 201), (255, 255, 255)):
            assert grid_artifact_score(Image.new("RGB", (64, 64), color), 16) == 0.0
        assert grid_artifact_score(planted(elsewhere=0, on_line=4), 16) == math.inf
        # Flat parts take no part: the score is that of the textured ones
        image = planted(160, on_line=8)
        image.paste(128, (88, 0, 160, 160))
        image.paste(128, (0, 88, 160, 160))
        assert grid_artifact_score(image, 16) == pytest.approx(1.0, abs=0.05)

    def test_noise_has_none(self):
        for size, period, bound in ((512, 16, 0.02), (64, 4, 0.1)):
            scores = [grid_artifact_score(noise(size, seed), period) for seed in range(20)]
            assert np.abs(scores).max() < bound
            assert abs(np.mean(scores)) < bound / 4
            shown = [
                grid_artifact_score(with_tiles(noise(size, seed, 78, 178), period, 30), period) for seed in range(5)
            ]
            assert min(shown) > 2 * bound  # an effect that this bound tells apart

    def test_another_period_or_a_shifted_grid_does_not_count(self):
        assert grid_artifact_score(planted(256, 16, 20), 16) == pytest.approx(4.0)
        for period in (11, 13, 15, 17, 20):
            assert abs(grid_artifact_score(planted(512, period, 20), 16)) < 0.05
            assert grid_artifact_score(planted(512, period, 20), period) == pytest.approx(4.0)
        for phase in (1, 5, 8, 15):
            assert grid_artifact_score(planted(256, 16, 20, phase=phase), 16) < 0
        # The lines of a finer grid are there as well
        assert grid_artifact_score(planted(256, 8, 20), 16) > 1

    def test_a_few_strong_edges_do_not_count(self):
        pixels = np.asarray(noise(256, low=100, high=120)).copy()
        clean = grid_artifact_score(Image.fromarray(pixels), 16)
        for line in (64, 144):  # on lines of the grid, over the whole image
            pixels[:, line:] = 255 - pixels[:, line:]
            pixels[line:] = 255 - pixels[line:]
        pixels[100:130, 100:130] = 250
        edges = np.abs(np.diff(pixels.astype(float), axis=1)).mean(axis=0)
        lines = edges[15::16]
        assert lines.mean() / np.delete(edges, np.s_[15::16]).mean() - 1 > 0.1  # a plain mean would count them
        assert grid_artifact_score(Image.fromarray(pixels), 16) == pytest.approx(clean, abs=0.03)

    def test_detailed_and_plain_parts_count_the_same(self):
        # Four periods whose neighbours differ by 1 and three by 10, and an edge on a line of the plain part
        steps = np.where(np.arange(127) < 71, 1, 10)
        steps[31] = 60
        levels = [60]
        for step in steps:
            levels.append(levels[-1] + (step if levels[-1] <= 60 else -step))
        image = Image.fromarray((np.array(levels)[:, None] + levels).astype(np.uint8))
        lines = np.abs(np.diff(levels))[15::16]
        assert np.median(lines) == 10 > np.median(np.abs(np.diff(levels))) == 1  # without regard to the parts
        assert grid_artifact_score(image, 16) == pytest.approx(0.0, abs=1e-9)

    @pytest.mark.parametrize(("rows", "cols"), [(2, 2), (1, 4), (4, 1), (3, 3)])
    def test_borders_of_panels_do_not_count(self, rows, cols):
        size = 192
        panels = [[160 * ((row + col) % 2) for col in range(cols)] for row in range(rows)]
        steps = np.kron(np.array(panels), np.ones((size // rows, size // cols)))
        for on_line, score in ((4, 0.0), (6, 0.5)):
            pixels = np.asarray(planted(size, 16, on_line)) / 2 + steps
            assert np.abs(np.diff(pixels, axis=int(cols > 1))).max() > 100  # the borders are strong
            image = Image.fromarray(pixels.astype(np.uint8))
            assert grid_artifact_score(image, 16, rows, cols) == pytest.approx(score, abs=1e-9)

    def test_soft_borders_of_panels_do_not_count_either(self):
        # Panels of 40 pixels: their borders fall between the lines, on positions 8 and 0 of 16
        levels = np.kron([0, 120, 0, 120], np.ones(40))
        soft = np.convolve(np.pad(levels, 2, mode="edge"), [0.05, 0.2, 0.5, 0.2, 0.05], mode="valid")
        texture = zigzag(160, 16, 8, 4, start=60)
        assert np.abs(np.diff(soft)).max() > 50
        image = Image.fromarray((texture[:, None] + texture[None] / 2 + soft[None]).astype(np.uint8))
        assert grid_artifact_score(image, 16, 1, 4) == pytest.approx(1.0, abs=0.1)
        # Flat panels, whose soft border reaches into the period around the line before it
        soft = np.convolve(np.pad(np.kron([0, 120], np.ones(40)), 2, mode="edge"), np.full(5, 0.2), mode="valid")
        assert len(np.flatnonzero(np.diff(soft))) == 5
        image = Image.fromarray(np.repeat(soft[None], 80, axis=0).astype(np.uint8))
        assert grid_artifact_score(image, 16, 1, 2) == 0.0
        assert grid_artifact_score(image, 16, 1, 1) != 0.0

    def test_images_of_a_pipeline(self, tmp_path):
        pipeline = FluxPipeline.from_pretrained(build_tiny_flux(tmp_path / "flux"))
        pipeline.set_progress_bar_config(disable=True)
        images = pipeline(
            ["A fox by the sea."] * 4,
            height=64,
            width=64,
            num_inference_steps=2,
            generator=[torch.Generator().manual_seed(seed) for seed in range(4)],
        ).images
        period = pipeline.vae_scale_factor * 2  # FLUX packs 2 x 2 latents into a patch
        assert period == 4
        clean = np.mean([grid_artifact_score(image, period) for image in images])
        shown = np.mean([grid_artifact_score(with_tiles(image, period, 20), period) for image in images])
        shifted = np.mean([grid_artifact_score(with_tiles(image, period, 20, phase=2), period) for image in images])
        assert abs(clean) < 0.06
        assert shown > 0.25
        assert shifted < 0.06


def correlated(num_prompts, per_prompt, rho, seed=0, share=0.0, reward="clip_t"):
    """Normal scores with a planted correlation; `share` of their variance is that of their prompt."""
    rng = np.random.default_rng(seed)
    scores = math.sqrt(share) * rng.normal(size=(num_prompts, 1, 2))
    scores = scores + math.sqrt(1 - share) * rng.normal(size=(num_prompts, per_prompt, 2))
    scores = (scores @ np.linalg.cholesky([[1, rho], [rho, 1]]).T).reshape(-1, 2)
    prompts = np.repeat(np.arange(num_prompts), per_prompt).tolist()
    return ScorePairs(prompts, {reward: scores[:, 0].tolist()}, {reward: scores[:, 1].tolist()})


class TestResolutionTransfer:
    def test_correlation_and_means_are_those_of_numpy(self):
        first, second = correlated(10, 4, 0.8), correlated(10, 4, -0.5, seed=1, reward="aesthetic")
        pairs = ScorePairs(first.prompts, first.training | second.training, first.inference | second.inference)
        results = resolution_transfer(pairs)
        assert [result.reward for result in results] == ["clip_t", "aesthetic"]
        for result in results:
            training, inference = pairs.training[result.reward], pairs.inference[result.reward]
            assert result.correlation == pytest.approx(np.corrcoef(training, inference)[0, 1], abs=1e-12)
            assert result.training_mean == pytest.approx(np.mean(training))
            assert result.inference_mean == pytest.approx(np.mean(inference))
            assert (result.num_images, result.num_prompts, result.note) == (40, 10, "")
            assert -1 <= result.low < result.correlation < result.high <= 1
        assert results[0].correlation > 0 > results[1].correlation

    @pytest.mark.parametrize("rho", [-0.9, 0.0, 0.5, 0.9])
    def test_planted_correlation(self, rho):
        (result,) = resolution_transfer(correlated(400, 4, rho))
        assert result.correlation == pytest.approx(rho, abs=0.06)
        assert result.low < rho < result.high
        # Images that do not depend on their prompt: Fisher's interval of 1600 independent pairs
        fisher = [math.tanh(math.atanh(result.correlation) + sign * 1.96 / math.sqrt(1597)) for sign in (-1, 1)]
        assert (result.low, result.high) == pytest.approx(fisher, abs=0.012)

    def test_resamples_are_of_full_prompts(self):
        pairs = correlated(7, 3, 0.6, share=0.9, seed=2)
        (result,) = resolution_transfer(pairs, n_resamples=2000)
        scores = np.stack([pairs.training["clip_t"], pairs.inference["clip_t"]]).reshape(2, 7, 3)
        rng = np.random.default_rng(5)
        draws = [np.corrcoef(scores[:, rng.integers(0, 7, 7)].reshape(2, -1))[0, 1] for _ in range(2000)]
        assert (result.low, result.high) == pytest.approx(np.percentile(draws, [2.5, 97.5]), abs=0.03)
        images = [
            np.corrcoef(scores.reshape(2, 21)[:, rng.integers(0, 21, 21)])[0, 1] for _ in range(2000)
        ]  # drawn one by one they would give another interval
        assert np.abs(np.percentile(images, [2.5, 97.5]) - [result.low, result.high]).max() > 0.06

    def test_scale_order_and_labels_do_not_matter_but_the_seed_does(self):
        pairs = correlated(12, 3, 0.7)
        (result,) = resolution_transfer(pairs)
        scaled = ScorePairs(
            [f"prompt {prompt}" for prompt in pairs.prompts],
            {"clip_t": [1e6 + 5 * score for score in pairs.training["clip_t"]]},
            {"clip_t": [1e-6 * score for score in pairs.inference["clip_t"]]},
        )
        (other,) = resolution_transfer(scaled)
        assert (other.correlation, other.low, other.high) == pytest.approx(
            (result.correlation, result.low, result.high), abs=1e-6
        )
        assert resolution_transfer(pairs)[0] == result
        (seeded,) = resolution_transfer(pairs, seed=1)
        assert (seeded.low, seeded.high) != (result.low, result.high)
        assert (seeded.low, seeded.high) == pytest.approx((result.low, result.high), abs=0.06)

    def test_missing_scores_are_left_out_for_their_reward_alone(self):
        pairs = correlated(10, 2, 0.7)
        whole = resolution_transfer(pairs)[0]
        training, inference = list(pairs.training["clip_t"]), list(pairs.inference["clip_t"])
        training[0], inference[1], training[5] = NAN, None, None  # both images of prompt 0, one of prompt 2
        missing = ScorePairs(
            pairs.prompts,
            {"clip_t": training, "whole": pairs.training["clip_t"]},
            {"clip_t": inference, "whole": pairs.inference["clip_t"]},
        )
        found, untouched = resolution_transfer(missing)
        rows = [row for row in range(20) if row not in (0, 1, 5)]
        kept = [[side["clip_t"][row] for row in rows] for side in (pairs.training, pairs.inference)]
        assert (found.num_images, found.num_prompts) == (17, 9)
        assert found.correlation == pytest.approx(np.corrcoef(kept)[0, 1])
        assert found.correlation != pytest.approx(whole.correlation)
        assert found.training_mean == pytest.approx(np.mean(kept[0]))  # of the same images as the correlation
        assert (untouched.correlation, untouched.low) == (whole.correlation, whole.low)

    def test_undefined_results_say_why(self):
        def only(training, inference, prompts):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                (result,) = resolution_transfer(ScorePairs(prompts, {"r": training}, {"r": inference}))
            return result

        for training, note in (
            ([0.1, 0.2, NAN, NAN], "no correlation: 2 images have both scores, and it needs 3"),
            ([NAN] * 4, "no correlation: 0 images have both scores, and it needs 3"),
            ([0.5] * 4, "no correlation: all scores at the training resolution are 0.5"),
            ([0.1 + 0.2, 0.3, 0.3, 0.3], "no correlation: all scores at the training resolution are 0.3"),
        ):
            result = only(training, [0.1, 0.3, 0.2, 0.4], [0, 0, 1, 1])
            assert result.note == note
            assert math.isnan(result.correlation) and math.isnan(result.low) and math.isnan(result.high)
            assert transfer_warning([result]) is None
            assert result.to_dict()["correlation"] is None
            assert "no correlation" in result.note and "nan" not in transfer_table([result])
        assert only([0.1, 0.3, 0.2, 0.4], [0.5] * 4, [0, 0, 1, 1]).note.endswith("at the inference resolution are 0.5")
        assert math.isnan(only([NAN] * 4, [NAN] * 4, [0, 0, 1, 1]).training_mean)
        # One prompt has a correlation and no interval; three images of two prompts have both
        alone = only([0.1, 0.2, 0.4], [0.1, 0.3, 0.2], [7, 7, 7])
        assert alone.correlation == pytest.approx(np.corrcoef([0.1, 0.2, 0.4], [0.1, 0.3, 0.2])[0, 1])
        assert math.isnan(alone.low) and alone.note == "no interval: how prompts differ cannot be told from one"
        both = only([0.1, 0.2, 0.4], [0.1, 0.3, 0.2], [7, 7, 8])
        assert not math.isnan(both.low) and both.note == ""

    def test_resamples_of_a_single_image_are_left_out_in_spite_of_rounding(self):
        for seed in range(20):
            rng = np.random.default_rng(seed)
            falling = [np.sort(rng.random(3)), np.sort(rng.random(3))[::-1]]
            (result,) = resolution_transfer(ScorePairs(["a", "b", "c"], {"r": falling[0]}, {"r": falling[1]}))
            assert result.correlation < 0
            # Every draw that has a correlation has a negative one
            assert -1 <= result.low <= result.high < 0


class TestTransferText:
    def test_table_and_json(self):
        pairs = correlated(10, 4, 0.8)
        pairs.training["flat"], pairs.inference["flat"] = [0.5] * 40, list(range(40))
        results = resolution_transfer(pairs)
        good, flat = results
        interval = f"{good.correlation:.3f} [{good.low:.3f}, {good.high:.3f}]"
        lines = transfer_table(results).splitlines()
        assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
        assert lines[2].startswith(f"| clip_t | {interval} | 40 | 10 | ") and lines[2].endswith("| - |")
        assert lines[3] == (
            "| flat | - | 40 | 10 | 0.500 | 19.500 | no correlation: all scores at the training resolution are 0.5 |"
        )
        loaded = json.loads(json.dumps([result.to_dict() for result in results], allow_nan=False))
        assert loaded[0]["correlation"] == good.correlation and loaded[0]["num_prompts"] == 10
        assert loaded[1]["correlation"] is loaded[1]["low"] is None and loaded[1]["training_mean"] == 0.5
        assert set(loaded[0]) == set(ResolutionTransfer.__dataclass_fields__)


class TestPicture:
    def test_shows_every_pair_where_it_belongs(self, tmp_path):
        # Two pairs far from the diagonal, of the first two prompts, whose colours are the first two
        prompts = ["a", "b", "b"]
        pairs = ScorePairs(prompts, {"r": [0.0, 1.0, 1.0]}, {"r": [1.0, 0.0, 0.5]})
        path = tmp_path / "folder" / "transfer.png"
        save_resolution_transfer(resolution_transfer(pairs), pairs, path)
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB")).astype(int)
        places = []
        for color in ((31, 119, 180), (174, 199, 232)):
            found = np.argwhere(np.abs(pixels - color).max(axis=-1) < 3)
            assert len(found) > 10
            places.append(found)
        middle = np.array(pixels.shape[:2]) / 2
        assert places[0][:, 0].max() < middle[0] and places[0][:, 1].max() < middle[1]  # upper left: (0, 1)
        assert places[1][:, 1].min() > middle[1]  # right: x = 1
        assert np.ptp(places[1][:, 0]) > 0.2 * pixels.shape[0]  # both of its pairs
        assert "matplotlib.pyplot" not in sys.modules or "pyplot" not in save_resolution_transfer.__code__.co_names
