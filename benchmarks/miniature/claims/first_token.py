# SPDX-License-Identifier: Apache-2.0
"""(a) First-token weighting with short reasons and true labels, (f) with long ones and wrong labels among them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, List, Value

from miniature.data import shared_properties
from miniature.judge_step import train_judge
from miniature.models import toy_judge_path
from miniature.settings import MiniatureSettings
from miniature.world import ACCESSORIES, COLORS, SHAPES, Panel, draw_panel, sample_specs, write_prompt
from paco_trl import PaCoReward
from paco_trl.data import make_pair, parse_image_set_prompt, theme_question
from paco_trl.evaluation import evaluate_rankings
from paco_trl.image_benchmarks.paired_results import compute_difference, mean_over_prompts

from .common import rounded


WEIGHTS = (None, 0.05, 0.1, 0.3, 1.0)
VARIANTS = ("paper", "released")
NUM_PAIRS = 3840  # fewer than in the demo, so that there is something left to learn
# With long reasons, which make a training several times as long
NUM_LONG_PAIRS, LONG_BATCH_SIZE = 1920, 16  # as many steps as with short ones
FLIPPED = 0.2  # of the labels
UNTRAINED = "untrained"
NUM_TOKENS, TOKENS_OF_FACT = 220, 5


def describe(panel: Panel) -> str:
    return f"A {panel.color} {panel.shape} figure with a {panel.accessory}."


def another_figure(panel: Panel, shared: int, random: np.random.Generator) -> Panel:
    """A figure that has a number of properties in common with that of a panel."""
    values = {"shape": SHAPES, "color": tuple(COLORS), "accessory": ACCESSORIES}
    changed = {}
    for name in random.permutation(list(values))[: 3 - shared]:
        others = [value for value in values[name] if value != getattr(panel, name)]
        changed[name] = others[random.integers(len(others))]
    return panel._replace(**changed)


def draw_figures(random: np.random.Generator, shared: Sequence[int]) -> tuple[str, str, Panel, list[Panel]]:
    """A prompt, its theme, a panel of it, and panels of another place with figures that share so many properties."""
    specs = sample_specs(random, named=False)
    prompt = write_prompt(specs)
    colors = tuple(COLORS)
    first = Panel(
        specs[0].shape,
        colors[random.integers(len(colors))],
        ACCESSORIES[random.integers(len(ACCESSORIES))],
        *specs[0][3:],
    )
    others = [
        another_figure(first, count, random)._replace(**dict(zip(("ground", "place"), specs[1][3:], strict=True)))
        for count in shared
    ]
    return prompt, parse_image_set_prompt(prompt).theme, first, others


def write_short(first: Panel, second: Panel, random: np.random.Generator) -> str:
    return f"{describe(first)} {describe(second)}"


def facts(panel: Panel, number: str) -> list[str]:
    values = (panel.shape, panel.color, panel.accessory, panel.ground.capitalize(), panel.place)
    return [f"image {number} shows {value}." for value in values]


def write_long(first: Panel, second: Panel, random: np.random.Generator) -> str:
    """Say what both images show in words that the toy knows: facts in random order, most of them several times."""
    return " ".join(random.choice([*facts(first, "one"), *facts(second, "two")], NUM_TOKENS // TOKENS_OF_FACT))


WRITERS = {"short": write_short, "long": write_long}


def make_pairs(count: int, seed: int, reasons: str = "short", flipped: float = 0.0) -> Dataset:
    """Pairs, half of them consistent, of whose labels a fraction is flipped."""
    random = np.random.default_rng(seed)
    chance = np.random.default_rng([seed, count])  # of labels and wording: figures are the same with all of them
    rows = []
    for number in range(count):
        is_same = number % 2 == 0
        _, theme, first, (second,) = draw_figures(random, [3 if is_same else int(random.integers(1, 3))])
        images = (draw_panel(first, 64), draw_panel(second, 64))
        label = is_same != (chance.random() < flipped)
        rows.append(make_pair(*images, theme_question(theme), label, WRITERS[reasons](first, second, chance)))
    return Dataset.from_list(rows).cast_column("images", List(Image()))


def make_rankings(count: int, seed: int) -> Dataset:
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        prompt, theme, first, others = draw_figures(random, (3, 2, 1))
        order = random.permutation(3)
        rows.append(
            {
                "reference": draw_panel(first, 64),
                "candidates": [draw_panel(others[place], 64) for place in order],
                "ranking": np.argsort(order).tolist(),
                "prompt": prompt,
                "theme": theme,
                "group": str(number),
            }
        )
        if [shared_properties(first, other) for other in others] != [3, 2, 1]:
            raise RuntimeError("The candidates do not share 3, 2 and 1 properties with the reference.")
    features = {"reference": Image(), "candidates": List(Image()), "ranking": List(Value("int64"))}
    texts = {name: Value("string") for name in ("prompt", "theme", "group")}
    return Dataset.from_list(rows, features=Features(features | texts))


def first_token_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    # Without a weight the variants are the same loss
    settings = [(weight, variant) for weight in WEIGHTS for variant in VARIANTS[: 1 if weight is None else 2]]
    return [
        {"first_token_weight": weight, "loss_variant": variant, "seed": seed}
        for seed in seeds
        for weight, variant in settings
    ]


def first_token_long_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    common = {"reasons": "long", "flipped": FLIPPED}
    trained = [
        common | {"first_token_weight": weight, "loss_variant": variant, "seed": seed}
        for weight, variant, of_setting in (
            (None, "paper", seeds),
            (0.1, "paper", seeds),
            (0.1, "released", seeds[:1]),
        )
        for seed in of_setting
    ]
    return trained + [{"reasons": UNTRAINED, "seed": seed} for seed in seeds]


def train_with(run: dict[str, Any], folder: Path) -> Path:
    seed = run["seed"]
    options = {name: run[name] for name in ("first_token_weight", "loss_variant")}
    kind, count = {}, NUM_PAIRS
    if "reasons" in run:
        kind, count = {name: run[name] for name in ("reasons", "flipped")}, NUM_LONG_PAIRS
        options["per_device_train_batch_size"] = LONG_BATCH_SIZE
    pairs = {"train": make_pairs(count, seed, **kind), "test": make_pairs(200, 1000 + seed, **kind)}
    train_judge(folder, pairs, MiniatureSettings(seed=seed), **options)
    return folder


def run_first_token(run: dict[str, Any], folder: Path, _: Path) -> dict[str, Any]:
    path = toy_judge_path() if run.get("reasons") == UNTRAINED else train_with(run, folder / "judge")
    judge = PaCoReward.from_pretrained(path, batch_size=120)
    scores = folder / "scores.jsonl"
    evaluate_rankings(judge, make_rankings(200, 2000 + run["seed"]), output_path=scores, batch_size=120)
    rows = [json.loads(line) for line in scores.read_text(encoding="utf-8").splitlines()]
    return {"accuracy": [row["metrics"]["accuracy"] for row in rows if "metrics" in row]}


def accuracies_of(runs: list[dict[str, Any]]) -> dict[tuple[str, int], float]:
    return {(f"{run['seed']}/{row}", 0): value for run in runs for row, value in enumerate(run["accuracy"])}


def judge_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    each = [float(np.mean(run["accuracy"])) for run in runs]
    return {
        "accuracy": rounded(mean_over_prompts([accuracies_of(runs)])),
        "of each seed": [round(value, 3) for value in each],
    }


def long_figures(by_label: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The accuracies, and their differences from plain likelihood on the same rankings."""
    (plain,) = (accuracies_of(runs) for label, runs in by_label.items() if "plain" in label)
    return {
        label: judge_figures(runs)
        | {"difference from plain likelihood": rounded(compute_difference([plain], [accuracies_of(runs)]))}
        for label, runs in by_label.items()
    }
