# SPDX-License-Identifier: Apache-2.0
"""(g) Log-taming next to a planted reward, whose coefficient of variation is above the paper's threshold."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paco_trl.image_benchmarks.paired_results import compute_difference

from .common import generator_figures, rounded, run_generator, runs_with, truths_of


METHODS = ("log_tamed", "sum_then_normalize")
NUM_SEEDS = 2  # at most
NUM_ROUNDS = 8  # as many as tell kinds of stochastic steps apart
# Colorfulness of the sets of the toy before training, mean and standard deviation
USUAL_COLORFULNESS, SPREAD = 76.0, 8.0
THRESHOLD = 0.2  # of h (paper)


def colorfulness(image: Image.Image) -> float:
    """Compute the colorfulness of Hasler and Suesstrunk (2003), 0 for gray images and up to about 110."""
    red, green, blue = np.asarray(image.convert("RGB"), dtype=float).transpose(2, 0, 1)  # (H, W) each
    red_green, yellow_blue = red - green, (red + green) / 2 - blue  # (H, W)
    spread = math.hypot(red_green.std(), yellow_blue.std())
    return spread + 0.3 * math.hypot(red_green.mean(), yellow_blue.mean())


def vividness(prompts, completions, **columns) -> list[float]:
    """A stand-in for aesthetics that has no upper end: colorfulness on an exponential scale, 10 for a usual set."""
    return [10 * math.exp((colorfulness(image) - USUAL_COLORFULNESS) / SPREAD) for image in completions]


def log_tame_planted_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    common = {"sde_steps": [1], "max_steps": 2 * NUM_ROUNDS, "reward_weights": [1.0, 1.0, 1.0]}
    return runs_with([common | {"multi_objective_aggregation": name} for name in METHODS], seeds[:NUM_SEEDS])


def run_log_tame_planted(run: dict[str, Any], folder: Path, common: Path) -> dict[str, Any]:
    return run_generator(run, folder, common, [vividness])


def planted_figures(by_label: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The truth as in (c), its difference from the plain sum, and over the rounds what the rewards are."""
    figures = {}
    for label, runs in by_label.items():
        of_label = generator_figures(runs) | {"rounds": rounds_of(runs)}
        for place, name in enumerate(("consistency", "prompt_following")):
            plain, own = (truths_of(each, "after", place) for each in (by_label["sum then normalize"], runs))
            of_label[name]["difference from the plain sum"] = rounded(compute_difference([plain], [own]))
        figures[label] = of_label
    return figures


def rounds_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over the runs: each reward, its h, and its fraction of the spread within groups."""
    spreads = [[logs["rewards/vividness/h"] for logs in run["rounds"]] for run in runs]
    if (first := min(of_run[0] for of_run in spreads)) <= THRESHOLD:
        raise RuntimeError(f"h of the planted reward is {first:.3f} in a first round, so it is not tamed.")
    rounds: dict[str, Any] = {}
    for reward in ("consistency", "clip_t", "vividness"):
        for name in ("mean", "h", "share"):
            values = np.array([[logs[f"rewards/{reward}/{name}"] for logs in run["rounds"]] for run in runs])
            rounds[f"{reward}/{name}"] = np.round(values.mean(axis=0), 3).tolist()
    return rounds | {"lowest h of vividness": round(min(map(min, spreads)), 3)}
