# SPDX-License-Identifier: Apache-2.0
"""
Test claims of the PaCo-RL paper on the toy models of `examples/miniature`, with several seeds.

    python benchmarks/miniature.py --claims first_token              # about 20 minutes on one core
    python benchmarks/miniature.py --claims resolution log_tame sde  # about an hour and a half
    python benchmarks/miniature.py --claims                          # only results and plot, of finished runs

Each run is kept in `--work_dir` and not repeated; two of these commands can run at the same time with different
`--seeds`. Truth is read from pixels. Intervals are bootstrapped over test prompts, or held-out rankings, of all seeds together.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset, Features, Image, List, Value
from diffusers import AutoencoderKL, FluxTransformer2DModel
from matplotlib.figure import Figure
from transformers import TrainerCallback

from paco_trl import PaCoGRPOTrainer, PaCoReward
from paco_trl.data import make_pair, parse_image_set_prompt, theme_question
from paco_trl.evaluation import evaluate_rankings
from paco_trl.image_benchmarks.statistics import cell, difference
from paco_trl.rewards import ClipTReward, ConsistencyReward
from paco_trl.rollout import replay


HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))  # before this directory, where a module has the package's name

from miniature.data import shared_properties  # noqa: E402
from miniature.evaluation_step import generate_and_read  # noqa: E402
from miniature.generator_step import train_generator  # noqa: E402
from miniature.judge_step import train_judge  # noqa: E402
from miniature.run import Miniature, read_settings  # noqa: E402
from miniature.settings import MiniatureSettings  # noqa: E402
from miniature.world import ACCESSORIES, COLORS, SHAPES, Panel, draw_panel, sample_specs, write_prompt  # noqa: E402


SEEDS = (0, 1, 2)


# ---- (a) First-token weighting ----

WEIGHTS = (None, 0.05, 0.1, 0.3, 1.0)
VARIANTS = ("paper", "released")
NUM_PAIRS = 3840  # fewer than in the demo, so that there is something left to learn


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


def make_pairs(count: int, seed: int) -> Dataset:
    """Pairs with true labels, half of them consistent; the reasons say what both images show."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        is_same = number % 2 == 0
        _, theme, first, (second,) = draw_figures(random, [3 if is_same else int(random.integers(1, 3))])
        reasons = f"{describe(first)} {describe(second)}"
        images = [draw_panel(panel, 64) for panel in (first, second)]
        rows.append(make_pair(*images, theme_question(theme), is_same, reasons))
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


def run_first_token(run: dict[str, Any], folder: Path, _: Path) -> dict[str, Any]:
    seed = run["seed"]
    pairs = {"train": make_pairs(NUM_PAIRS, seed), "test": make_pairs(200, 1000 + seed)}
    settings = MiniatureSettings(seed=seed)
    options = {name: run[name] for name in ("first_token_weight", "loss_variant")}
    train_judge(folder / "judge", pairs, settings, **options)
    judge = PaCoReward.from_pretrained(folder / "judge", batch_size=120)
    scores = folder / "scores.jsonl"
    evaluate_rankings(judge, make_rankings(200, 2000 + seed), output_path=scores, batch_size=120)
    rows = [json.loads(line) for line in scores.read_text(encoding="utf-8").splitlines()]
    return {"accuracy": [row["metrics"]["accuracy"] for row in rows if "metrics" in row]}


# ---- (b), (c), (d) The generator ----

USUAL: dict[str, Any] = {
    "resolution_scale": 0.5,
    "multi_objective_aggregation": "log_tamed",
    "reward_weights": [1.0, 1.0],
    "sde_type": "flow_sde",
    "noise_level": 0.7,
    "sde_steps": [1, 2, 3],
    "max_steps": 2 * MiniatureSettings().num_rounds,
}
SDE_ROUNDS = 8  # of the demo's 20: enough to tell kinds of steps apart


def runs_with(changes: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    return [USUAL | change | {"seed": seed} for seed in seeds for change in changes]


def resolution_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    return runs_with([{"resolution_scale": scale} for scale in (0.25, 0.5, 1.0)], seeds)


def log_tame_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    return runs_with([{"multi_objective_aggregation": name} for name in ("log_tamed", "sum_then_normalize")], seeds)


def sde_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    kinds = [{"sde_type": kind} for kind in ("flow_sde", "dance_sde", "cps")]
    steps = [{"sde_steps": steps} for steps in ([1], [1, 2, 3, 4, 5, 6])]
    noises = [{"noise_level": level} for level in (0.3, 1.0)]
    changes = [change | {"max_steps": 2 * SDE_ROUNDS} for change in (*kinds, *steps, *noises)]
    return runs_with(changes, seeds)


def prepared(common: Path, seed: int) -> Miniature:
    """The dataset and the judge of the demo, with a seed."""
    miniature = Miniature(common / f"seed-{seed}", MiniatureSettings(seed=seed), say=print)
    for step in ("dataset", "judge"):
        if miniature.result(step) is None:
            miniature.run(alone=step)
    return miniature


def read_truth(folder: Path, adapter: Path | None, miniature: Miniature) -> dict[str, list[float]]:
    truths = generate_and_read(folder, adapter, miniature.prompts("test"), miniature.settings)
    return {f"{prompt}/{seed}": list(truth) for (prompt, seed), truth in truths.items()}


def run_generator(run: dict[str, Any], folder: Path, common: Path) -> dict[str, Any]:
    """Trains with the judge of the demo, and reads the truth at full resolution."""
    miniature = prepared(common, run["seed"])
    options = {name: value for name, value in run.items() if name != "seed"}
    started = time.process_time()
    trainer = train_generator(
        folder / "adapter",
        miniature.step_folder("judge"),
        miniature.prompts("train"),
        miniature.settings,
        save_strategy="no",
        **options,
    )
    seconds = time.process_time() - started
    names = ["rewards/consistency/mean", "rewards/clip_t/mean"]
    rounds = [[log[name] for name in names] for log in trainer.state.log_history if all(name in log for name in names)]
    return {
        "cpu_seconds": round(seconds, 1),
        "rewards": rounds,
        "before": read_truth(common / f"before-{run['seed']}", None, miniature),
        "after": read_truth(folder / "after", folder / "adapter", miniature),
    }


# ---- (e) Speed ----

PUBLISHED, DEFAULTS = "published recipe", "defaults"
# Of 8 steps, the second is stochastic: a full tail has 6
SPEED_ARMS: dict[str, dict[str, Any]] = {
    DEFAULTS: {},
    "branches of 4": {"images_per_prefix": 4},
    "branches of 16": {"images_per_prefix": 16},
    "tail of 3 steps": {"tail_steps": 3},
    "tail of 2 steps": {"tail_steps": 2},
    "branches of 4, tail of 3 steps": {"images_per_prefix": 4, "tail_steps": 3, "max_steps": 64},  # at equal time
}
STEPS_BETWEEN_READINGS = 8  # of the truth
LEVELS = (0.72, 0.74, 0.76)  # of true consistency, 0.65 before and 0.78 after the published recipe
NUM_TURNS, ROUNDS_OF_TURN = 3, 2  # in which each setting is timed


def speed_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    return runs_with([{"sde_steps": [1]} | change | {"arm": arm} for arm, change in SPEED_ARMS.items()], seeds)


class PublishedRecipe(PaCoGRPOTrainer):
    """
    The defaults at the cost of the published code, whose trained numbers are the same.

    As counted in its own loop (`grpo_step.py`): it decodes each image twice, encodes a prompt for each image in the
    rollout and in each forward of a trained step, and a trained step is three forwards: old policy, reference, trained.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        own = self.pipeline.vae.decode
        self.pipeline.vae.decode = lambda *args, **kwargs: (own(*args, **kwargs), own(*args, **kwargs))[1]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with torch.no_grad():
            for _ in range(4):
                prompts = self.train_rows.prompts[: len(inputs["advantages"])]
                self.family.encode_prompt(self.pipeline, prompts, self.accelerator.device)
            replayed = (inputs["record"], self.family, self.args.guidance_scale, inputs["sde"])
            replay(model, *replayed)
            with self._reference(model) as reference:
                replay(reference, *replayed)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class Stopwatch(TrainerCallback):
    """Note the processor time at the end of each optimizer step, and what of it was in some methods by then."""

    METHODS = {
        "transformer": ((FluxTransformer2DModel, "forward"), (torch.Tensor, "backward")),
        "VAE": ((AutoencoderKL, "decode"),),
        "judge": ((ConsistencyReward, "__call__"),),
        "CLIP-T": ((ClipTReward, "__call__"),),
    }

    def __init__(self):
        self.times: list[float] = []
        self.parts: list[dict[str, float]] = []
        self.now = dict.fromkeys(self.METHODS, 0.0)

    def on_step_end(self, args, state, control, **kwargs):
        self.times.append(time.process_time())
        self.parts.append(dict(self.now))

    @contextmanager
    def timing(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part, methods in self.METHODS.items():
                for owner, name in methods:
                    stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name), part)))
            yield

    def _timed(self, method: Callable, part: str) -> Callable:
        @functools.wraps(method)
        def timed(*args, **kwargs):
            started = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.now[part] += time.thread_time() - started

        return timed


def speed_options(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in ("seed", "arm")} | {"log_completions": False}


def run_speed(run: dict[str, Any], folder: Path, common: Path) -> dict[str, Any]:
    """Train as in [`run_generator`], and read the truth of the adapters on the way."""
    miniature = prepared(common, run["seed"])
    options = speed_options(run) | {"save_steps": STEPS_BETWEEN_READINGS, "save_total_limit": None}
    adapter = folder / "adapter"
    train_generator(adapter, miniature.step_folder("judge"), miniature.prompts("train"), miniature.settings, **options)
    steps = range(options["save_steps"], run["max_steps"] + 1, options["save_steps"])
    return {
        "before": read_truth(common / f"before-{run['seed']}", None, miniature),
        "after": {
            step: read_truth(folder / f"step-{step}", adapter / f"checkpoint-{step}", miniature) for step in steps
        },
    }


def step_times(work: Path, seed: int) -> dict[str, dict[str, float]]:
    """Measure the processor time of an optimizer step of each setting, with its share of a round, in turns."""
    folder = work / "speed-times"
    if (file := folder / "result.json").exists():
        return json.loads(file.read_text(encoding="utf-8"))
    miniature = prepared(work, seed)
    runs = speed_runs([seed])
    runs.append(runs[0] | {"arm": PUBLISHED})
    measured: dict[str, list[dict[str, float]]] = {run["arm"]: [] for run in runs}
    steps = 2 * (1 + ROUNDS_OF_TURN)  # two a round; the first round warms up
    for turn in range(NUM_TURNS):
        for run in runs:
            watch = Stopwatch()
            options = speed_options(run) | {"max_steps": steps, "save_strategy": "no", "callbacks": [watch]}
            if run["arm"] == PUBLISHED:
                options["trainer_class"] = PublishedRecipe
            given = miniature.step_folder("judge"), miniature.prompts("train"), miniature.settings
            with watch.timing():
                train_generator(folder / f"{turn}-{run['arm']}", *given, **options)
            parts = {name: watch.parts[-1][name] - watch.parts[1][name] for name in watch.now}
            parts = {"all": watch.times[-1] - watch.times[1], **parts}
            measured[run["arm"]].append({name: value / (steps - 2) for name, value in parts.items()})
    medians = {
        arm: {name: float(np.median([turn[name] for turn in turns])) for name in turns[0]}
        for arm, turns in measured.items()
    }
    file.write_text(json.dumps(medians), encoding="utf-8")
    return medians


# ---- All of them ----

CLAIMS = {
    "first_token": (first_token_runs, run_first_token),
    "resolution": (resolution_runs, run_generator),
    "log_tame": (log_tame_runs, run_generator),
    "sde": (sde_runs, run_generator),
    "speed": (speed_runs, run_speed),
}


# Of runs, in the working directory
FOLDERS = {"first_token": "judge", "speed": "speed"}


def name_of(run: dict[str, Any]) -> str:
    if "arm" in run:
        return f"{run['arm']}_seed-{run['seed']}"
    words = []
    for name, value in run.items():
        text = "-".join(map(str, value)) if isinstance(value, list) else str(value)
        words.append(f"{name.replace('_', '')}-{text}")
    return "_".join(words)


def do_runs(claim: str, seeds: Sequence[int], work: Path) -> list[dict[str, Any]]:
    """Do the missing runs, each in its own directory; finished runs are shared between the claims."""
    list_runs, do = CLAIMS[claim]
    done = []
    runs = list_runs(seeds)
    for number, run in enumerate(runs, start=1):
        folder = work / FOLDERS.get(claim, "generator") / name_of(run)
        file = folder / "result.json"
        if not file.exists():
            print(f"{claim}, run {number} of {len(runs)}: {run}", flush=True)
            folder.mkdir(parents=True, exist_ok=True)
            result = do(run, folder, work)
            file.write_text(json.dumps(result), encoding="utf-8")
        done.append(run | json.loads(file.read_text(encoding="utf-8")))
    return done


# ---- What came of them ----


def label_of(claim: str, run: dict[str, Any]) -> str:
    """The setting in words: what is not as in the demo."""
    if claim == "first_token":
        weight = run["first_token_weight"]
        return "plain likelihood" if weight is None else f"a = {weight:g}, {run['loss_variant']}"
    if claim == "resolution":
        return f"{run['resolution_scale']:g}x"
    if claim == "log_tame":
        return run["multi_objective_aggregation"].replace("_", " ")
    if claim == "speed":
        return run["arm"]
    names = ("sde_type", "sde_steps", "noise_level")
    changed = {name: run[name] for name in names if run[name] != USUAL[name]}
    words = {
        "sde_type": lambda value: value,
        "sde_steps": lambda value: f"step {value[0]}" if len(value) == 1 else f"steps {value[0]} to {value[-1]}",
        "noise_level": lambda value: f"noise {value:g}",
    }
    return ", ".join(words[name](value) for name, value in changed.items()) or "flow_sde, steps 1 to 3, noise 0.7"


def summarize(claim: str, runs: list[dict[str, Any]], work: Path) -> dict[str, dict[str, Any]]:
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_label.setdefault(label_of(claim, run), []).append(run)
    if claim == "speed":
        return speed_figures(by_label, step_times(work, runs[0]["seed"]))
    return {
        label: (judge_figures if claim == "first_token" else generator_figures)(of_label)
        for label, of_label in by_label.items()
    }


def speed_figures(
    by_label: dict[str, list[dict[str, Any]]], times: dict[str, dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """The truth over processor time, and when it first reaches some levels."""
    step_seconds = {arm: of_arm["all"] for arm, of_arm in times.items()}
    figures: dict[str, dict[str, Any]] = {}
    for label, runs in {PUBLISHED: by_label[DEFAULTS], **by_label}.items():
        truths = [[run["before"], *run["after"].values()] for run in runs]
        seconds = [step_seconds[label] * int(step) for step in (0, *runs[0]["after"])]
        forwards = forwards_of(runs[0]) + (2 if label == PUBLISHED else 0)  # of the old policy and the reference
        work = [forwards * int(step) for step in (0, *runs[0]["after"])]
        of_label: dict[str, Any] = {
            "forwards per image": forwards, "processor seconds": np.round(seconds, 1).tolist(), "forwards": work,
        }  # fmt: skip
        for place, name in enumerate(("consistency", "prompt_following")):
            each = [[float(np.mean([one[place] for one in at.values()])) for at in of_run] for of_run in truths]
            cells = [
                cell(
                    [
                        {
                            (f"{run['seed']}/{unit.rsplit('/', 1)[0]}", int(unit.rsplit("/", 1)[1])): truth[place]
                            for run, of_run in zip(runs, truths, strict=True)
                            for unit, truth in of_run[at].items()
                        }
                    ]
                )
                for at in range(len(truths[0]))
            ]
            of_label[name] = [rounded(one) for one in cells]
            of_label[f"{name} of each seed"] = np.round(each, 3).tolist()
        of_label["time of a step / published recipe"] = round(step_seconds[label] / step_seconds[PUBLISHED], 3)
        of_label["share of that time"] = {
            name: round(value / step_seconds[label], 2) for name, value in times[label].items() if name != "all"
        }
        figures[label] = of_label
    whole = figures[PUBLISHED]["forwards"][-1]
    for of_label in figures.values():
        of_label["forwards"] = [round(value / whole, 3) for value in of_label["forwards"]]
    for name in ("processor seconds", "forwards"):
        for of_label in figures.values():
            of_label[f"{name} to a consistency / published recipe"] = {
                f"{level:.2f}": ratio_to_reach(level, of_label, figures[PUBLISHED], name) for level in LEVELS
            }
    return figures


def forwards_of(run: dict[str, Any]) -> float:
    """The forwards of the transformer for an image, of which a backward counts as one."""
    (step,) = run["sde_steps"]
    tail = run.get("tail_steps", MiniatureSettings().num_inference_steps - step - 1)
    return (step + 1 + 2) / run.get("images_per_prefix", 1) + tail


def ratio_to_reach(level: float, of_label: dict[str, Any], published: dict[str, Any], price: str) -> float | None:
    """What a setting pays until the truth is at a level, as a fraction of what the published recipe pays."""
    paid, whole = (
        time_to_reach(level, each[price], [one["mean"] for one in each["consistency"]])
        for each in (of_label, published)
    )
    return None if paid is None or whole is None else round(paid / whole, 2)


def time_to_reach(target: float, seconds: Sequence[float], values: Sequence[float]) -> float | None:
    """When values, read at some times and linear in between, first reach a target."""
    for place in range(1, len(values)):
        if values[place] >= target:
            fraction = (target - values[place - 1]) / (values[place] - values[place - 1])
            return seconds[place - 1] + max(fraction, 0.0) * (seconds[place] - seconds[place - 1])
    return None


def judge_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    values = {(f"{run['seed']}/{row}", 0): value for run in runs for row, value in enumerate(run["accuracy"])}
    each = [float(np.mean(run["accuracy"])) for run in runs]
    return {"accuracy": rounded(cell([values])), "of each seed": [round(value, 3) for value in each]}


def generator_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for place, name in enumerate(("consistency", "prompt_following", "copies")):
        before, after = (
            {
                (f"{run['seed']}/{unit.rsplit('/', 1)[0]}", int(unit.rsplit("/", 1)[1])): truth[place]
                for run in runs
                for unit, truth in run[when].items()
            }
            for when in ("before", "after")
        )
        figures[name] = {
            "before": rounded(cell([before])),
            "after": rounded(cell([after])),
            "difference": rounded(difference([before], [after])),
            "difference of each seed": [
                round(
                    float(np.mean([run["after"][unit][place] - run["before"][unit][place] for unit in run["after"]])),
                    3,
                )
                for run in runs
            ],
        }
    first, last = (np.mean([run["rewards"][at] for run in runs], axis=0) for at in (0, -1))
    figures["ratio of the rewards, consistency to CLIP-T"] = {
        "first round": round(float(first[0] / first[1]), 2),
        "last round": round(float(last[0] / last[1]), 2),
    }
    figures["rewards of each seed, consistency and CLIP-T"] = {
        "first round": [np.round(run["rewards"][0], 3).tolist() for run in runs],
        "last round": [np.round(run["rewards"][-1], 3).tolist() for run in runs],
    }
    figures["processor seconds of training"] = round(float(np.mean([run["cpu_seconds"] for run in runs])))
    return figures


def rounded(value: dict[str, Any]) -> dict[str, Any]:
    return {
        "mean": round(value["mean"], 3),
        "interval": [None if limit is None else round(limit, 3) for limit in value["interval"]],
    }


def draw(results: dict[str, dict[str, Any]], num_seeds: int, path: Path) -> None:
    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = dict(zip([claim for claim in CLAIMS if claim != "speed"], figure.subplots(2, 2).flat, strict=True))
    titles = {
        "first_token": "(a) First-token weighting: a judge trained with reasons",
        "resolution": "(b) Resolution of training",
        "log_tame": "(c) Aggregation of the rewards",
        "sde": "(d) Stochastic steps",
    }
    for claim, axis in axes.items():
        axis.set_title(titles[claim], loc="left", fontsize=11)
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        labels = list(results.get(claim, {}))
        places = np.arange(len(labels))[::-1]
        if claim == "first_token":
            cells = [results[claim][label]["accuracy"] for label in labels]
            plot_cells(axis, places, cells, "tab:blue", None)
            axis.set_xlabel("share of three candidates at their right rank (chance is 1/3)")
        else:
            for offset, name, color in ((0.12, "consistency", "tab:blue"), (-0.12, "prompt_following", "tab:orange")):
                cells = [results[claim][label][name]["difference"] for label in labels]
                plot_cells(axis, places + offset, cells, color, name.replace("_", " "))
            axis.axvline(0, color="black", linewidth=0.8)
            axis.set_xlabel("true change at full resolution")
        seconds = {name: results[claim][name].get("processor seconds of training") for name in labels}
        names = [f"{name}\n{seconds[name]} s" if seconds[name] and claim == "resolution" else name for name in labels]
        axis.set_yticks(places, names, fontsize=9)
    title = f"Claims of PaCo-RL in miniature: toy models, {num_seeds} seeds, 95 % intervals by bootstrap over prompts"
    figure.suptitle(title, fontsize=13)
    shown = {
        label: mark for axis in axes.values() for mark, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)


def plot_cells(axis, places, cells: list[dict[str, Any]], color: str, label: str | None) -> None:
    if not cells:
        return
    means = np.array([one["mean"] for one in cells])
    limits = np.array([one["interval"] for one in cells], dtype=float)
    errors = np.abs(limits - means[:, None]).T
    axis.errorbar(means, places, xerr=errors, fmt="o", color=color, capsize=3, markersize=5, label=label)


def plot_speed(results: dict[str, dict[str, Any]], num_seeds: int, path: Path) -> None:
    """Plot the truth over processor time and over work of the transformer, with the interval at the end."""
    figure = Figure(figsize=(13, 5.4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    shown = {
        "processor seconds": "processor seconds of training, with judge, CLIP and VAE",
        "forwards": "forwards of the transformer, as a fraction of all of the published recipe",
    }
    for axis, (name, title) in zip(axes, shown.items(), strict=True):
        for number, (label, of_label) in enumerate(results.items()):
            color = "black" if label == PUBLISHED else f"C{number - 1}"
            places, means = of_label[name], [one["mean"] for one in of_label["consistency"]]
            axis.plot(places, means, "o-", color=color, label=label, linewidth=2.5, markersize=4)
            end = of_label["consistency"][-1]
            low, high = (abs(bound - end["mean"]) for bound in end["interval"])
            axis.errorbar(places[-1], end["mean"], [[low], [high]], color=color, capsize=3, linewidth=1, alpha=0.6)
        axis.set_xlabel(title)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("true consistency: panel pairs with the same figure")
    title = (
        f"Shorter ways to a trained adapter, in miniature: means of {num_seeds} trainings, 95 % interval at the end"
    )
    figure.suptitle(title, fontsize=13)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)


def ratios_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures that the page quotes."""
    ratios: dict[str, Any] = {}
    for claim, of_claim in results.items():
        if claim == "first_token":
            ratios["accuracy of the judge"] = {
                label: figures["accuracy"]["mean"] for label, figures in of_claim.items()
            }
        elif claim == "speed":
            name = "time of a step / published recipe"
            ratios[f"speed: {name}"] = {label: figures[name] for label, figures in of_claim.items()}
            for name in ("processor seconds", "forwards"):
                name = f"{name} to a consistency / published recipe"
                for level in map("{:.2f}".format, LEVELS):
                    reached = {label: figures[name][level] for label, figures in of_claim.items()}
                    reached = {label: value for label, value in reached.items() if value is not None}
                    ratios[f"speed: {name}: {level}"] = reached
        else:
            for name in ("consistency", "prompt_following"):
                ratios[f"{claim}: true change of {name}"] = {
                    label: figures[name]["difference"]["mean"] for label, figures in of_claim.items()
                }
    return ratios


def judges_of(folder: Path) -> dict[str, Any]:
    """What the dataset and the judge of a seed came to."""
    found = {step: Miniature(folder, read_settings(folder)).result(step) for step in ("dataset", "judge")}
    accuracies = {
        name: rounded(found["judge"][name]["metrics"]["accuracy"]) for name in ("trained", "untrained", "clip_i")
    }
    return {"accuracy": accuracies, "share of pairs with the same figure, by label": found["dataset"]["true_share"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--claims", nargs="*", choices=CLAIMS, default=list(CLAIMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--work_dir", type=Path, default=Path("miniature-benchmark"))
    parser.add_argument(
        "--output", type=Path, default=HERE / "miniature.json", help="results; the plot is saved next to it"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    for claim in arguments.claims:
        do_runs(claim, arguments.seeds, arguments.work_dir)
    # Claims whose runs are elsewhere keep their results
    record = json.loads(arguments.output.read_text(encoding="utf-8")) if arguments.output.exists() else {}
    results = record.get("results", {})
    for claim, (list_runs, _) in CLAIMS.items():
        folder = arguments.work_dir / FOLDERS.get(claim, "generator")
        runs = list_runs(arguments.seeds)
        if all((folder / name_of(run) / "result.json").exists() for run in runs):
            runs = do_runs(claim, arguments.seeds, arguments.work_dir)
            results[claim] = summarize(claim, runs, arguments.work_dir)
    setting = {"device": "cpu", "threads": 1, "seeds": arguments.seeds, "pairs of (a)": NUM_PAIRS}
    setting |= {name: getattr(MiniatureSettings(), name) for name in ("num_test_prompts", "test_seeds", "num_rounds")}
    record = {"setting": setting, "torch": torch.__version__, "ratios": ratios_of(results), "results": results}
    folders = {str(seed): arguments.work_dir / f"seed-{seed}" for seed in arguments.seeds}
    if results.keys() - {"first_token"}:
        record["judges of the demo"] = {seed: judges_of(folder) for seed, folder in folders.items()}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(results, len(arguments.seeds), arguments.output.with_suffix(".png"))
    if "speed" in results:
        speed_plot = arguments.output.with_name(f"{arguments.output.stem}_speed.png")
        plot_speed(results["speed"], len(arguments.seeds), speed_plot)
    print(json.dumps(record["ratios"], indent=1))


if __name__ == "__main__":
    main()
