# SPDX-License-Identifier: Apache-2.0
"""Statistics of images that no reward sees: closed forms, and when their drift is reported."""

import itertools
import json
import math

import numpy as np
import pytest
from PIL import Image

from paco_trl.rewards.image_statistics import STATISTICS, DriftAlarm, measure_image, statistics_of_prompts


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
    for prompt, diversity in enumerate(statistics_of_prompts(measured, 3)["diversity"]):
        pairs = itertools.combinations(images[3 * prompt : 3 * prompt + 3], 2)
        assert diversity == pytest.approx(math.sqrt(np.mean([((one - other) ** 2).mean() for one, other in pairs])))
    assert np.isnan(statistics_of_prompts(measured, 1)["diversity"]).all()


def test_statistics_are_those_of_thumbnails_by_prompt():
    """A mean over the images of each prompt, whatever the order, mode and size of the images."""
    colors = [(255, 0, 0), (255, 0, 0), (0, 0, 0), (255, 255, 255)]  # two prompts with two images each
    sizes = [(512, 256), (40, 40), (130, 300), (16, 16)]
    images = [Image.new("RGB", size, color) for size, color in zip(sizes, colors, strict=True)]
    measured = [(number, measure_image(images[number])) for number in (2, 0, 3, 1)]
    values = statistics_of_prompts(measured, 2)
    assert values["saturation"].tolist() == [1.0, 0.0]
    assert values["brightness"] == pytest.approx([1 / 3, 0.5])
    assert values["diversity"].tolist() == [0.0, 1.0]
    # Edges are those of the thumbnail: detail below its pixels is none
    fine = Image.fromarray((255 * np.kron(np.ones((128, 128)), CHECKERBOARD[:2, :2, 0])).astype(np.uint8))
    statistics, small = measure_image(fine)
    assert statistics[0] < 0.01 and small.shape == (16, 16, 3)
    assert measure_image(fine.crop((0, 0, 64, 64)))[0][0] == pytest.approx(1.0)


def rounds(mean, prompts=42):
    """Values of a round: the statistics of prompts differ by 0.1, around a mean."""
    values = np.random.default_rng(0).normal(size=prompts)
    values = 0.1 * (values - values.mean()) / values.std(ddof=1)
    return {"sharpness": 0.5 + values, "brightness": mean + values}


@pytest.mark.parametrize(
    ("change", "reward", "prompts", "is_reported"),
    [
        (-0.11, 2.0, 60, True),
        (0.11, 2.0, 60, True),
        (-0.09, 2.0, 60, False),  # less than the spread of prompts
        (-0.11, 0.5, 60, False),  # the reward fell as well
        (-0.11, math.nan, 60, False),  # no image was scored
        (-0.3, 2.0, 4, False),  # other prompts can do that
        (-0.4, 2.0, 4, True),
    ],
)
def test_drift_is_reported_once(caplog, change, reward, prompts, is_reported):
    alarm = DriftAlarm()
    metrics = alarm.compare(rounds(0.6, prompts), 1.0)
    assert metrics["images/brightness"] == pytest.approx(0.6) and metrics["images/brightness_drift"] == 0.0
    metrics = alarm.compare(rounds(0.6 + change, prompts), reward)
    assert metrics["images/brightness_drift"] == pytest.approx(change / 0.1)
    assert metrics["images/sharpness_drift"] == 0.0
    assert [record.getMessage().count("brightness") for record in caplog.records] == [1] * is_reported
    assert not any("sharpness" in record.getMessage() for record in caplog.records)
    # Restored from a checkpoint, it goes on
    restored = DriftAlarm()
    restored.state = json.loads(json.dumps(alarm.state))
    assert restored.compare(rounds(0.1, prompts), 3.0) == alarm.compare(rounds(0.1, prompts), 3.0)
    assert len(caplog.records) == (1 if is_reported else 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_run_reports_what_changed_and_its_evaluation_shows_it(make_trainer, prompts, caplog, sign):
    calls = []

    def rising(prompts, completions, **kwargs):
        """Rises with each call, whatever the images are; falls as its twin."""
        calls.append(completions)
        return [sign * len(calls) + 0.1 * (number % 3) for number in range(len(completions))]

    trainer = make_trainer(
        reward_funcs=rising, learning_rate=1.0, max_steps=6, eval_dataset=prompts.select(range(2)),
        eval_strategy="steps", eval_steps=6, ema_decay=None, num_generations_eval=2, log_completions=True,
    )  # fmt: skip
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "images/sharpness" in entry]
    drifts = [max(abs(value) for name, value in entry.items() if name.endswith("_drift")) for entry in logged]
    assert drifts[0] == 0.0 and drifts[-1] > 5 * math.sqrt(2 / 4)  # the images did change
    reports = [record.getMessage() for record in caplog.records if "spreads of prompts" in record.getMessage()]
    assert bool(reports) == (sign > 0)
    evaluated = next(entry for entry in trainer.state.log_history if "eval_images/diversity" in entry)
    assert evaluated["eval_images/sharpness"] > 0
