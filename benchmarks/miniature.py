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
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Image, List, Value
from matplotlib.figure import Figure

from paco_trl import PaCoReward
from paco_trl.data import make_pair, parse_image_set_prompt, theme_question
from paco_trl.evaluation import evaluate_rankings
from paco_trl.image_benchmarks.statistics import cell, difference


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


# ---- All of them ----

CLAIMS = {
    "first_token": (first_token_runs, run_first_token),
    "resolution": (resolution_runs, run_generator),
    "log_tame": (log_tame_runs, run_generator),
    "sde": (sde_runs, run_generator),
}


def name_of(run: dict[str, Any]) -> str:
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
        folder = work / ("judge" if claim == "first_token" else "generator") / name_of(run)
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
    names = ("sde_type", "sde_steps", "noise_level")
    changed = {name: run[name] for name in names if run[name] != USUAL[name]}
    words = {
        "sde_type": lambda value: value,
        "sde_steps": lambda value: f"step {value[0]}" if len(value) == 1 else f"steps {value[0]} to {value[-1]}",
        "noise_level": lambda value: f"noise {value:g}",
    }
    return ", ".join(words[name](value) for name, value in changed.items()) or "flow_sde, steps 1 to 3, noise 0.7"


def summarize(claim: str, runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    by_label: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_label.setdefault(label_of(claim, run), []).append(run)
    return {
        label: (judge_figures if claim == "first_token" else generator_figures)(of_label)
        for label, of_label in by_label.items()
    }


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
    axes = dict(zip(CLAIMS, figure.subplots(2, 2).flat, strict=True))
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


def ratios_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures that the page quotes."""
    ratios: dict[str, Any] = {}
    for claim, of_claim in results.items():
        if claim == "first_token":
            ratios["accuracy of the judge"] = {
                label: figures["accuracy"]["mean"] for label, figures in of_claim.items()
            }
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
    results = {}
    for claim, (list_runs, _) in CLAIMS.items():
        folder = arguments.work_dir / ("judge" if claim == "first_token" else "generator")
        runs = list_runs(arguments.seeds)
        if all((folder / name_of(run) / "result.json").exists() for run in runs):
            results[claim] = summarize(claim, do_runs(claim, arguments.seeds, arguments.work_dir))
    setting = {"device": "cpu", "threads": 1, "seeds": arguments.seeds, "pairs of (a)": NUM_PAIRS}
    setting |= {name: getattr(MiniatureSettings(), name) for name in ("num_test_prompts", "test_seeds", "num_rounds")}
    record = {"setting": setting, "torch": torch.__version__, "ratios": ratios_of(results), "results": results}
    folders = {str(seed): arguments.work_dir / f"seed-{seed}" for seed in arguments.seeds}
    if results.keys() - {"first_token"}:
        record["judges of the demo"] = {seed: judges_of(folder) for seed, folder in folders.items()}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(results, len(arguments.seeds), arguments.output.with_suffix(".png"))
    print(json.dumps(record["ratios"], indent=1))


if __name__ == "__main__":
    main()
