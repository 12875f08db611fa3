# SPDX-License-Identifier: Apache-2.0
"""Statistics of images that no reward sees: closed forms, and where they are logged."""

import itertools
import math

import numpy as np
import pytest
from PIL import Image

from paco_trl.rewards.image_statistics import STATISTICS, image_metrics, measure_image


def flat(*color, size=(8, 8)):
    return np.broadcast_to(np.array(color, dtype=float), (*size, 3))


CHECKERBOARD = np.repeat((np.indices((8, 8)).sum(axis=0) % 2)[..., None], 3, axis=-1).astype(float)
STRIPES = np.repeat((np.indices((8, 8))[1] % 2)[..., None], 3, axis=-1).astype(float)
HALVES = np.concatenate([flat(1, 0, 0, size=(8, 4)), flat(0, 0, 1, size=(8, 4))], axis=1)
LEVELS = np.array(list(itertools.product([0, 0.3, 0.6, 1], repeat=3))).reshape(8, 8, 3)


def drawn(pixels):
    return Image.fromarray(np.rint(pixels * 255).astype(np.uint8))


@pytest.mark.parametrize(
    ("pixels", "values"),
    [
        (flat(0.2, 0.4, 0.8), (0.0, 0.0, 1.4 / 3, 0.6)),
        (flat(0.4, 0.4, 0.4), (0.0, 0.0, 0.4, 0.0)),
        (CHECKERBOARD, (1.0, 1.0, 0.5, 0.0)),
        (0.2 * STRIPES, (0.1, 0.0, 0.1, 0.0)),  # only the half of the neighbors that are in a row differ
        (HALVES, (0.0, 1.0, 1 / 3, 1.0)),  # of one brightness
        (LEVELS, (None, 6.0, None, None)),
    ],
)
def test_closed_forms(pixels, values):
    for name, found, value in zip(STATISTICS, measure_image(drawn(pixels))[0], values, strict=True):
        assert value is None or found == pytest.approx(value, abs=1e-6), name


def test_diversity_is_the_distance_of_pairs():
    group = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    measured = [(number, measure_image(Image.fromarray(image))) for number, image in enumerate(group)]
    images = group / 255
    pairs = [itertools.combinations(images[start : start + 3], 2) for start in (0, 3)]
    distances = [math.sqrt(np.mean([((one - other) ** 2).mean() for one, other in prompt])) for prompt in pairs]
    assert image_metrics(measured, 3)["images/diversity"] == pytest.approx(np.mean(distances))
    assert "images/diversity" not in image_metrics(measured, 1)


def test_statistics_are_means_over_thumbnails():
    """Whatever the order, mode and size of the images."""
    colors = [(255, 0, 0), (255, 0, 0), (0, 0, 0), (255, 255, 255)]  # two prompts with two images each
    sizes = [(512, 256), (40, 40), (130, 300), (16, 16)]
    images = [Image.new("RGB", size, color) for size, color in zip(sizes, colors, strict=True)]
    measured = [(number, measure_image(images[number])) for number in (2, 0, 3, 1)]
    values = image_metrics(measured, 2)
    assert values["images/saturation"] == 0.5
    assert values["images/brightness"] == pytest.approx((1 / 3 + 0.5) / 2)
    assert values["images/diversity"] == 0.5  # 0 and 1
    # Edges are those of the thumbnail: detail below its pixels is none
    fine = Image.fromarray((255 * np.kron(np.ones((128, 128)), CHECKERBOARD[:2, :2, 0])).astype(np.uint8))
    statistics, small = measure_image(fine)
    assert statistics[0] < 0.01 and small.shape == (16, 16, 3)
    assert measure_image(fine.crop((0, 0, 64, 64)))[0][0] == pytest.approx(1.0)


def test_a_run_logs_them_and_its_evaluation_too(make_trainer, prompts):
    trainer = make_trainer(
        learning_rate=1.0, max_steps=6, eval_dataset=prompts.select(range(2)), eval_strategy="steps", eval_steps=6,
        ema_decay=None, num_generations_eval=2,
    )  # fmt: skip
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "images/sharpness" in entry]
    for name in (*STATISTICS, "diversity"):
        assert logged[0][f"images/{name}"] != logged[-1][f"images/{name}"] > 0  # the images did change
    evaluated = next(entry for entry in trainer.state.log_history if "eval_images/diversity" in entry)
    assert evaluated["eval_images/sharpness"] > 0
