# SPDX-License-Identifier: Apache-2.0
"""Train the toy generator with a setting, and read the truth before and after."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from miniature.evaluation_step import generate_and_read
from miniature.generator_step import train_generator
from miniature.run import Miniature
from miniature.settings import MiniatureSettings
from paco_trl.image_benchmarks.paired_results import compute_difference, mean_over_prompts


USUAL: dict[str, Any] = {
    "resolution_scale": 0.5,
    "multi_objective_aggregation": "log_tamed",
    "reward_weights": [1.0, 1.0],
    "sde_type": "flow_sde",
    "noise_level": 0.7,
    "sde_steps": [1, 2, 3],
    "max_steps": 2 * MiniatureSettings().num_rounds,
}


def runs_with(changes: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    return [USUAL | change | {"seed": seed} for seed in seeds for change in changes]


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


def run_generator(
    run: dict[str, Any], folder: Path, common: Path, extra_rewards: Sequence[Callable] = ()
) -> dict[str, Any]:
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
        extra_rewards=extra_rewards,
        **options,
    )
    seconds = time.process_time() - started
    names = ["rewards/consistency/mean", "rewards/clip_t/mean"]
    logs = [log for log in trainer.state.log_history if all(name in log for name in names)]
    return {
        "cpu_seconds": round(seconds, 1),
        "rewards": [[log[name] for name in names] for log in logs],
        # Both optimizer steps of a round log the same rewards
        "rounds": [{name: value for name, value in log.items() if name.startswith("rewards/")} for log in logs[::2]],
        "before": read_truth(common / f"before-{run['seed']}", None, miniature),
        "after": read_truth(folder / "after", folder / "adapter", miniature),
    }


def truths_of(runs: list[dict[str, Any]], when: str, place: int) -> dict[tuple[str, int], float]:
    """One of the figures of the truth, by seed and prompt, and by noise."""
    return {
        (f"{run['seed']}/{unit.rsplit('/', 1)[0]}", int(unit.rsplit("/", 1)[1])): truth[place]
        for run in runs
        for unit, truth in run[when].items()
    }


def before_and_after(
    runs: list[dict[str, Any]], names: Sequence[str] = ("consistency", "prompt_following", "copies")
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for place, name in enumerate(names):
        before, after = truths_of(runs, "before", place), truths_of(runs, "after", place)
        figures[name] = {
            "before": rounded(mean_over_prompts([before])),
            "after": rounded(mean_over_prompts([after])),
            "difference": rounded(compute_difference([before], [after])),
            "difference of each seed": [
                round(
                    float(np.mean([run["after"][unit][place] - run["before"][unit][place] for unit in run["after"]])),
                    3,
                )
                for run in runs
            ],
        }
    return figures


def generator_figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    figures = before_and_after(runs)
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


def readings(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The truth at each reading, over the prompts of all trainings and of each."""
    found: dict[str, Any] = {}
    for place, name in enumerate(("consistency", "prompt_following")):
        truths = [[run["before"], *run["after"].values()] for run in runs]
        cells = [
            mean_over_prompts(
                [truths_of([run | {"at": of_run[at]} for run, of_run in zip(runs, truths, strict=True)], "at", place)]
            )
            for at in range(len(truths[0]))
        ]
        each = [[float(np.mean([one[place] for one in at.values()])) for at in of_run] for of_run in truths]
        found |= {name: [rounded(one) for one in cells], f"{name} of each seed": np.round(each, 3).tolist()}
    return found


def rounded(value: dict[str, Any]) -> dict[str, Any]:
    return {
        "mean": round(value["mean"], 3),
        "interval": [None if limit is None else round(limit, 3) for limit in value["interval"]],
    }
