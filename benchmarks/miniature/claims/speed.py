# SPDX-License-Identifier: Apache-2.0
"""(e) Speed: short tails, and the published recipe, whose trained numbers are those of the defaults."""

import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from matplotlib.figure import Figure
from transformers import TrainerCallback

from miniature.generator_step import train_generator
from miniature.settings import MiniatureSettings
from paco_trl import PaCoGRPOTrainer
from paco_trl.rewards import ClipTReward, ConsistencyReward

from .common import prepared, read_truth, readings, runs_with


PUBLISHED, DEFAULTS = "published recipe", "defaults"
# Of 8 steps, the second is stochastic: a full tail has 6
SPEED_ARMS: dict[str, dict[str, Any]] = {
    DEFAULTS: {},
    "tail of 3 steps": {"tail_steps": 3},
    "tail of 2 steps": {"tail_steps": 2},
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
            self.policy.predict(model, inputs["step"])
            with self._reference(model) as reference:
                self.policy.predict(reference, inputs["step"])
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


def options_of(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name not in ("seed", "arm")} | {"log_completions": False}


def run_speed(run: dict[str, Any], folder: Path, common: Path) -> dict[str, Any]:
    """Train as in [`run_generator`], and read the truth of the adapters on the way."""
    miniature = prepared(common, run["seed"])
    options = options_of(run) | {"save_steps": STEPS_BETWEEN_READINGS, "save_total_limit": None}
    adapter = folder / "adapter"
    train_generator(adapter, miniature.step_folder("judge"), miniature.prompts("train"), miniature.settings, **options)
    steps = range(options["save_steps"], run["max_steps"] + 1, options["save_steps"])
    return {
        "before": read_truth(common / f"before-{run['seed']}", None, miniature),
        "after": {
            step: read_truth(folder / f"step-{step}", adapter / f"checkpoint-{step}", miniature) for step in steps
        },
    }


def speed_times(work: Path, seed: int) -> dict[str, dict[str, float]]:
    runs = speed_runs([seed])
    return step_times(work, "speed-times", [*runs, runs[0] | {"arm": PUBLISHED, "trainer_class": PublishedRecipe}])


def step_times(work: Path, name: str, runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Measure the processor time of an optimizer step of each setting, with its share of a round, in turns."""
    folder = work / name
    if (file := folder / "result.json").exists():
        return json.loads(file.read_text(encoding="utf-8"))
    miniature = prepared(work, runs[0]["seed"])
    measured: dict[str, list[dict[str, float]]] = {run["arm"]: [] for run in runs}
    steps = 2 * (1 + ROUNDS_OF_TURN)  # two a round; the first round warms up
    for turn in range(NUM_TURNS):
        for run in runs:
            watch = Stopwatch()
            options = options_of(run) | {"max_steps": steps, "save_strategy": "no", "callbacks": [watch]}
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


def speed_figures(
    by_label: dict[str, list[dict[str, Any]]], times: dict[str, dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """The truth over processor time, and when it first reaches some levels."""
    step_seconds = {arm: of_arm["all"] for arm, of_arm in times.items()}
    figures: dict[str, dict[str, Any]] = {}
    for label, runs in {PUBLISHED: by_label[DEFAULTS], **by_label}.items():
        seconds = [step_seconds[label] * int(step) for step in (0, *runs[0]["after"])]
        forwards = forwards_of(runs[0]) + (2 if label == PUBLISHED else 0)  # of the old policy and the reference
        work = [forwards * int(step) for step in (0, *runs[0]["after"])]
        of_label: dict[str, Any] = {
            "forwards per image": forwards, "processor seconds": np.round(seconds, 1).tolist(), "forwards": work,
        }  # fmt: skip
        of_label |= readings(runs)
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
    return step + 1 + 2 + tail


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
