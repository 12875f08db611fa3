# SPDX-License-Identifier: Apache-2.0
"""
Test claims of the PaCo-RL paper on the toy models of `examples/miniature`, with several seeds.

    python benchmarks/miniature/paper_claims.py --claims first_token              # about 20 minutes on one core
    python benchmarks/miniature/paper_claims.py --claims resolution log_tame sde  # about an hour and a half
    python benchmarks/miniature/paper_claims.py --claims                          # only results and plot, of finished runs

Each run is kept in `--work_dir` and not repeated; two of these commands can run at the same time with different
`--seeds`. Truth is read from pixels. Intervals are bootstrapped over test prompts, or held-out rankings, of all seeds together.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from claims.common import USUAL, generator_figures, rounded, run_generator
from claims.first_token import (
    FLIPPED,
    NUM_PAIRS,
    UNTRAINED,
    first_token_long_runs,
    first_token_runs,
    judge_figures,
    long_figures,
    run_first_token,
)
from claims.generator import log_tame_runs, resolution_runs, sde_runs
from claims.log_tame_planted import log_tame_planted_runs, planted_figures, run_log_tame_planted
from claims.objectives import objective_figures, objective_runs, objective_times, plot_objectives, run_objective
from claims.speed import LEVELS, plot_speed, run_speed, speed_figures, speed_runs, speed_times
from miniature.run import Miniature, read_settings
from miniature.settings import MiniatureSettings


HERE = Path(__file__).parent
SEEDS = (0, 1, 2)

CLAIMS: dict[str, tuple[Callable, Callable]] = {
    "first_token": (first_token_runs, run_first_token),
    "first_token_long": (first_token_long_runs, run_first_token),
    "resolution": (resolution_runs, run_generator),
    "log_tame": (log_tame_runs, run_generator),
    "sde": (sde_runs, run_generator),
    "speed": (speed_runs, run_speed),
    "log_tame_planted": (log_tame_planted_runs, run_log_tame_planted),
    "objectives": (objective_runs, run_objective),
}

COMPARED = {"first_token_long": long_figures, "log_tame_planted": planted_figures}
# Of runs, in the working directory
FOLDERS = {
    "first_token": "judge", "first_token_long": "judge", "speed": "speed", "log_tame_planted": "planted",
    "objectives": "objectives",
}  # fmt: skip


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
    if claim.startswith("first_token"):
        if run.get("reasons") == UNTRAINED:
            return UNTRAINED
        weight = run["first_token_weight"]
        return "plain likelihood" if weight is None else f"a = {weight:g}, {run['loss_variant']}"
    if claim == "resolution":
        return f"{run['resolution_scale']:g}x"
    if claim.startswith("log_tame"):
        return run["multi_objective_aggregation"].replace("_", " ")
    if "arm" in run:
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
        return speed_figures(by_label, speed_times(work, runs[0]["seed"]))
    if claim == "objectives":
        return objective_figures(by_label, objective_times(work, runs[0]["seed"]))
    if claim in COMPARED:
        return COMPARED[claim](by_label)
    figures = judge_figures if claim == "first_token" else generator_figures
    return {label: figures(of_label) for label, of_label in by_label.items()}


def draw(results: dict[str, dict[str, Any]], num_seeds: int, path: Path) -> None:
    figure = Figure(figsize=(13, 9), layout="constrained")
    titles = {
        "first_token": "(a) First-token weighting: a judge trained with reasons",
        "resolution": "(b) Resolution of training",
        "log_tame": "(c) Aggregation of the rewards",
        "sde": "(d) Stochastic steps",
    }
    axes = dict(zip(titles, figure.subplots(2, 2).flat, strict=True))
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


def plot_planted(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot the claims under planted conditions: long reasons with wrong labels, and a reward that runs away."""
    judges, generators = results["first_token_long"], results["log_tame_planted"]
    figure = Figure(figsize=(14, 5), layout="constrained")
    axes = figure.subplots(1, 3)
    places = np.arange(len(judges))[::-1]
    plot_cells(axes[0], places, [one["accuracy"] for one in judges.values()], "tab:blue", None)
    axes[0].axvline(1 / 3, color="black", linewidth=0.8)
    axes[0].set_yticks(places, list(judges), fontsize=9)
    axes[0].set_xlabel("share of three candidates at their right rank (line: chance)")
    axes[0].set_title(f"(f) Judge: reasons of 220 tokens, {FLIPPED:.0%} of labels wrong", loc="left", fontsize=11)
    places = np.arange(len(generators))[::-1]
    for offset, name, color in ((0.12, "consistency", "tab:blue"), (-0.12, "prompt_following", "tab:orange")):
        cells = [one[name]["difference"] for one in generators.values()]
        plot_cells(axes[1], places + offset, cells, color, name.replace("_", " "))
    axes[1].axvline(0, color="black", linewidth=0.8)
    axes[1].set_yticks(places, list(generators), fontsize=9)
    axes[1].set_xlabel("true change at full resolution")
    axes[1].set_title("(g) Next to a planted reward, vividness", loc="left", fontsize=11)
    axes[1].legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    for number, (label, one) in enumerate(generators.items()):
        shares = one["rounds"]["vividness/share"]
        axes[2].plot(range(1, len(shares) + 1), shares, "o-", color=f"C{number}", markersize=4, label=label)
    axes[2].axhline(1 / 3, color="black", linewidth=0.8)
    axes[2].set(xlabel="round", ylim=(0, 1.02))
    axes[2].set_title("(g) Vividness in the spread of groups", loc="left", fontsize=11)
    axes[2].legend(frameon=False, fontsize=9, loc="lower left")
    for axis in axes:
        axis.grid(axis="x", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Claims of PaCo-RL under planted conditions: toy models, 95 % intervals by bootstrap", fontsize=13)
    figure.savefig(path, dpi=110)


def ratios_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures that the page quotes."""
    ratios: dict[str, Any] = {}
    for claim, of_claim in results.items():
        if claim.startswith("first_token"):
            name = "accuracy of the judge" + (", long reasons" if claim == "first_token_long" else "")
            ratios[name] = {label: figures["accuracy"]["mean"] for label, figures in of_claim.items()}
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


def find_judges(folder: Path) -> dict[str, Any]:
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
    if results.keys() - {"first_token", "first_token_long"}:
        record["judges of the demo"] = {seed: find_judges(folder) for seed, folder in folders.items()}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(results, len(arguments.seeds), arguments.output.with_suffix(".png"))
    if "speed" in results:
        speed_plot = arguments.output.with_name(f"{arguments.output.stem}_speed.png")
        plot_speed(results["speed"], len(arguments.seeds), speed_plot)
    if "objectives" in results:
        plot = arguments.output.with_name(f"{arguments.output.stem}_objectives.png")
        plot_objectives(results["objectives"], len(arguments.seeds), plot)
    if {"first_token_long", "log_tame_planted"} <= results.keys():
        plot_planted(results, arguments.output.with_name(f"{arguments.output.stem}_planted.png"))
    print(json.dumps(record["ratios"], indent=1))


if __name__ == "__main__":
    main()
