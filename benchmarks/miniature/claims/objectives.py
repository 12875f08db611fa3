# SPDX-License-Identifier: Apache-2.0
"""(h) Objectives: what each teaches in equal processor time, and what keeps training from only pleasing the rewards."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image

from miniature.generator_step import train_generator
from miniature.models import toy_flux_path
from miniature.run import Miniature
from miniature.truth import read_panels
from paco_trl import PaCoNFTConfig, PaCoNFTTrainer, load_for_inference
from paco_trl.data import split_grid

from .common import USUAL, before_and_after, prepared, read_truth, readings
from .speed import options_of, step_times


GRPO, FULL_RESOLUTION = "grpo", "grpo, full resolution"
# In place of what `train_generator` sets for stochastic steps: the defaults, which PaCoNFTConfig does not refuse
_NFT: dict[str, Any] = {
    "trainer_class": PaCoNFTTrainer, "config_class": PaCoNFTConfig, "sde_steps": [1], "sde_type": "flow_sde",
    "noise_level": 0.7, "epsilon": 1.0,
}  # fmt: skip
# At half resolution with one stochastic step, the paper's setting. Clip ranges and the number of times were chosen on
# seed 0; `max_steps` gives all about the same processor time
OBJECTIVES: dict[str, dict[str, Any]] = {
    GRPO: {},  # with the demo's clip range of 5e-3, which no ratio reaches
    "grpo_guard": {"loss_type": "grpo_guard", "epsilon": 2e-4},
    "nft": _NFT | {"num_noise_levels": 1},
    "awm": _NFT | {"loss_type": "awm", "num_noise_levels": 1, "old_policy_beta": 0.0},
}
# At full resolution with three stochastic steps, where two of three trainings learn to please the rewards
_FULL = {"resolution_scale": 1.0, "sde_steps": USUAL["sde_steps"]}
GUARDS: dict[str, dict[str, Any]] = {
    FULL_RESOLUTION: _FULL,
    "KL divergence": _FULL | {"beta": 0.3},
    "rank rewards": _FULL | {"multi_objective_aggregation": "rank_then_sum"},
}
HACKED_SEEDS = (0, 1)  # of the three, see (b)


def objective_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    objectives = {name: {"sde_steps": [1]} | change for name, change in OBJECTIVES.items()}
    return [
        USUAL | change | {"arm": arm, "seed": seed}
        for seed in seeds
        for arm, change in (objectives | (GUARDS if seed in HACKED_SEEDS else {})).items()
    ]


def run_objective(run: dict[str, Any], folder: Path, common: Path) -> dict[str, Any]:
    """Train, and read the truth of the adapters on the way, the norm of the velocity and the accessories at the end."""
    miniature = prepared(common, run["seed"])
    steps = [run["max_steps"]] if run["arm"] in GUARDS else [run["max_steps"] * 2 // 5, run["max_steps"]]
    options = options_of(run) | {"save_steps": steps[0], "save_total_limit": None}
    trainer = train_generator(
        folder / "adapter", miniature.step_folder("judge"), miniature.prompts("train"), miniature.settings, **options
    )
    names = ["rewards/consistency/mean", "rewards/clip_t/mean"]
    logs = [log for log in trainer.state.log_history if all(name in log for name in names)]
    before = read_truth(common / f"before-{run['seed']}", None, miniature)
    after = {
        step: read_truth(folder / f"step-{step}", folder / "adapter" / f"checkpoint-{step}", miniature)
        for step in steps
    }
    result = {
        "rewards": [[log[name] for name in names] for log in logs],
        "metrics": {name: [log[name] for log in logs if name in log] for name in METRICS},
        "before": before,
        "after": after,
        "accessory": most_common_accessory(folder / f"step-{steps[-1]}" / "images", miniature),
        "velocity norm": velocity_norm(folder / "adapter", miniature),
    }
    return result


METRICS = ("clip_ratio/region_mean", "velocity_deviation")


def most_common_accessory(images: Path, miniature: Miniature) -> float:
    """The fraction of readable panels with the accessory that most of them show: 1/3 where all are equally frequent."""
    counts: Counter[str] = Counter()
    for row in miniature.prompts("test").with_format(None):
        for file in sorted((images / row["id"]).glob("*.png")):
            with Image.open(file) as image:
                panels = read_panels(split_grid(image.convert("RGB"), row["rows"], row["cols"]))
            counts.update(panel.accessory for panel in panels if panel is not None)
    return counts.most_common(1)[0][1] / counts.total()


@torch.no_grad()
def velocity_norm(adapter: Path, miniature: Miniature) -> float:
    """The norm of the trained velocity over that of the base model, mean over test prompts and steps."""
    settings = miniature.settings
    pipeline, _ = load_for_inference(adapter, str(toy_flux_path()), dtype=torch.float32, device="cpu")
    transformer, ratios, is_own_call = pipeline.transformer, [], [False]

    def compare(module, args, kwargs, output):
        if is_own_call[0]:
            return
        is_own_call[0] = True
        with transformer.disable_adapter():
            base = module(*args, **kwargs)[0]
        is_own_call[0] = False
        ratios.append((output[0].flatten(1).norm(dim=1) / base.flatten(1).norm(dim=1)).mean().item())

    transformer.register_forward_hook(compare, with_kwargs=True)
    pipeline.set_progress_bar_config(disable=True)
    prompts = miniature.prompts("test")
    pipeline(
        prompts["prompt"][:], height=prompts["height"][0], width=prompts["width"][0], output_type="latent",
        num_inference_steps=settings.num_inference_steps, max_sequence_length=pipeline.tokenizer_2.model_max_length,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    return float(np.mean(ratios))


def objective_times(work: Path, seed: int) -> dict[str, dict[str, float]]:
    runs = [run for run in objective_runs([seed]) if run["arm"] in OBJECTIVES]
    return step_times(work, "objective-times", runs)


def objective_figures(
    by_label: dict[str, list[dict[str, Any]]], times: dict[str, dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """Compute the truth over processor time of the objectives, and before and after of the guards."""
    figures: dict[str, dict[str, Any]] = {}
    # The judge's work is the same for all, so its time tells how much slower the machine was while one was measured
    of_judge = float(np.mean([times[label]["judge"] for label in OBJECTIVES]))
    for label, runs in by_label.items():
        last = list(runs[0]["after"])[-1]
        ends = [run | {"after": run["after"][last]} for run in runs]
        figures[label] = before_and_after(ends) | {
            "most common accessory of each seed": [round(run["accessory"], 2) for run in runs],
            "velocity norm of each seed": [round(run["velocity norm"], 3) for run in runs],
            "metrics of the last round": {
                name: round(float(np.mean([run["metrics"][name][-1] for run in runs])), 6)
                for name in METRICS
                if runs[0]["metrics"][name]
            },
        }
        if label in OBJECTIVES:
            step = times[label]["all"] * of_judge / times[label]["judge"]
            seconds = [step * int(at) for at in (0, *runs[0]["after"])]
            figures[label] |= {"processor seconds": np.round(seconds, 1).tolist(), "readings": readings(runs)}
    return figures


def plot_objectives(results: dict[str, dict[str, Any]], num_seeds: int, path: Path) -> None:
    """Plot the truth over processor time of the objectives, and what the guards keep at full resolution."""
    figure = Figure(figsize=(14, 5.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    end = max(results[label]["processor seconds"][-1] for label in OBJECTIVES)
    for number, label in enumerate(OBJECTIVES):
        cells, place = results[label]["readings"]["consistency"], end + 12 * (number + 1)
        color, last = f"C{number}", cells[-1]
        places = results[label]["processor seconds"]
        left.plot(places, [one["mean"] for one in cells], "o-", color=color, label=label, linewidth=2.5)
        # Next to the curves, which end at the same time: the interval, and each training
        low, high = (abs(bound - last["mean"]) for bound in last["interval"])
        left.errorbar(place, last["mean"], [[low], [high]], fmt="o", color=color, capsize=3)
        each = [of_seed[-1] for of_seed in results[label]["readings"]["consistency of each seed"]]
        left.plot([place] * len(each), each, "_", color=color, markersize=9, alpha=0.7)
    left.set_xticks(range(0, int(end), 50))
    left.set_xlabel("processor seconds of training; on the right the end, with 95 % intervals")
    left.set_ylabel("true consistency: panel pairs with the same figure")
    left.set_title("Half resolution: what each objective learns", loc="left", fontsize=11)
    left.legend(frameon=False, loc="upper left")
    labels = [label for label in results if label not in OBJECTIVES]
    places = np.arange(len(labels))[::-1]
    for offset, name, color in ((0.13, "consistency", "tab:blue"), (-0.13, "prompt_following", "tab:orange")):
        cells = [results[label][name]["difference"] for label in labels]
        means = np.array([one["mean"] for one in cells])
        errors = np.abs(np.array([one["interval"] for one in cells]).T - means)
        words = name.replace("_", " ")
        right.errorbar(means, places + offset, xerr=errors, fmt="o", color=color, capsize=3, label=words)
        for place, label in zip(places, labels, strict=True):
            each = results[label][name]["difference of each seed"]
            right.plot(each, [place + offset] * len(each), "|", color=color, markersize=9, alpha=0.7)
    right.axvline(0, color="black", linewidth=0.8)
    right.set_yticks(places, ["no guard" if label == FULL_RESOLUTION else label for label in labels], fontsize=9)
    right.set_xlabel("true change by training; a bar is a seed")
    right.set_title("Full resolution, where the rewards are hacked: guards", loc="left", fontsize=11)
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"Objectives ({num_seeds} seeds) and guards ({len(HACKED_SEEDS)} seeds) in miniature, 95 % intervals",
        fontsize=13,
    )
    figure.savefig(path, dpi=110)
