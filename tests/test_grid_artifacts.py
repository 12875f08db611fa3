# SPDX-License-Identifier: Apache-2.0
"""Grids of patches in images: planted ones are found, and what looks like one is not."""

import math

import numpy as np
import pytest
from PIL import Image

from paco_trl.evaluation import grid_artifact_score


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


def planted(size=128, period=16, on_line=4, elsewhere=4, phase=0):
    """An image whose differences across the lines are `on_line / elsewhere` of those elsewhere, in both directions."""
    levels = zigzag(size, period, on_line, elsewhere, phase, start=60)
    return Image.fromarray((levels[:, None] + levels[None]).astype(np.uint8))


def noise(size, seed=0, low=0, high=256):
    return Image.fromarray(np.random.default_rng(seed).integers(low, high, (size, size), dtype=np.uint8))


def with_tiles(image, period, strength):
    """The image with a random offset on each patch, as a grid shows in real images."""
    count = image.width // period
    tiles = np.kron(np.random.default_rng(0).normal(size=(count, count)), np.ones((period, period)))
    return Image.fromarray(np.clip(np.asarray(image) + strength * tiles, 0, 255).round().astype(np.uint8))


class TestGridArtifactScore:
    @pytest.mark.parametrize(("size", "period"), [(128, 16), (96, 8), (64, 4), (40, 5), (33, 2)])
    @pytest.mark.parametrize(("on_line", "score"), [(2, -0.5), (4, 0.0), (6, 0.5), (8, 1.0), (20, 4.0)])
    def test_planted_strength(self, size, period, on_line, score):
        image = planted(size, period, on_line)
        assert grid_artifact_score(image, period) == pytest.approx(score, abs=1e-9)

    def test_both_directions_count_the_same(self):
        across, flat = zigzag(128, 16, 12, 4), zigzag(128, 16, 4, 4)[:, None]
        image = Image.fromarray((across + flat - 100).astype(np.uint8))
        turned = image.transpose(Image.Transpose.TRANSPOSE)
        # A direction without any difference counts 0
        stripes = Image.fromarray(np.tile(across, (128, 1)).astype(np.uint8))
        assert [grid_artifact_score(each, 16) for each in (image, turned, stripes)] == pytest.approx([1.0] * 3)

    def test_is_that_of_luminance(self):
        grid, plain = (np.asarray(planted(on_line=on_line)) for on_line in (12, 4))
        colored = [np.stack([grid, plain, plain][i:] + [grid, plain, plain][:i], axis=-1) for i in range(3)]
        scores = [grid_artifact_score(Image.fromarray(array), 16) for array in colored]
        # A channel's planted 2 counts as much as the channel does in the luminance: green, red, blue
        assert sorted(scores) == pytest.approx([2 * 0.114, 2 * 0.299, 2 * 0.587], rel=0.35)
        assert scores[2] > scores[0] > scores[1]
        assert grid_artifact_score(Image.fromarray(grid).convert("RGBA"), 16) == pytest.approx(2.0)

    def test_constant_image_and_flat_patches(self):
        assert grid_artifact_score(Image.new("RGB", (64, 64), (77, 130, 201)), 16) == 0.0
        assert grid_artifact_score(planted(elsewhere=0, on_line=4), 16) == math.inf
        # Flat parts take no part: the score is that of the textured ones
        image = planted(160, on_line=8)
        image.paste(128, (88, 0, 160, 160))
        image.paste(128, (0, 88, 160, 160))
        assert grid_artifact_score(image, 16) == pytest.approx(1.0, abs=0.05)

    def test_the_first_line_counts(self):
        image = np.zeros((4, 4, 3), dtype=np.uint8)
        image[:2, :2] = image[2:, 2:] = 255
        assert grid_artifact_score(Image.fromarray(image), 2) == math.inf

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
