# SPDX-License-Identifier: Apache-2.0
"""
Train sets of separate images of the toy world, whose truth is read from pixels, and compare them with a grid.

    PYTHONPATH=examples python -m miniature.pretraining.train_panels --output_dir toy-models   # 10 minutes on one core
    python benchmarks/miniature/separate_sets.py --models toy-models --work_dir miniature-benchmark      # about an hour

A set is one image of 128 pixels, or four of 64 in as many steps: independent, from shared noise, or anchored, the first
the source of the others. The prompts leave the figure's color and accessory open, so that the panels of a set must agree on
them; before training, prompts that name both are read too. Otherwise everything is as in the demo, with its judges. Each
run is kept in `--work_dir` and not repeated.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from claims.common import before_and_after, prepared
from miniature.data import SIZE, make_prompts
from miniature.evaluation_step import generate_and_read
from miniature.generator_step import train_generator
from miniature.models import toy_flux_path
from miniature.run import Miniature
from miniature.truth import read_panels
from paco_trl.data import split_grid
from paco_trl.data.image_sets import arrange_sets, complete_image_sets


HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
PANEL = SIZE // 2
WAYS = {"grid": None, "independent": "independent", "shared noise": "shared_noise", "anchored": "anchored"}
SHOWN = 3  # sets in the sheet, before and after


def model_of(way: str, models: Path) -> Path:
    return toy_flux_path() if way == "grid" else models / ("kontext-panels" if way == "anchored" else "flux-panels")


def prompts_of(way: str, miniature: Miniature, named: bool) -> tuple[Dataset, Dataset]:
    """The demo's test and training prompts, or such prompts with the figure left open."""
    tests, trained = miniature.settings.num_test_prompts, miniature.settings.num_train_prompts
    prompts = make_prompts(tests + trained, miniature.settings.seed, named)
    if way != "grid":
        prompts = arrange_sets(complete_image_sets(prompts), "separate")
    return prompts.select(range(tests)), prompts.select(range(tests, tests + trained))


def options_of(way: str) -> dict[str, Any]:
    return {} if way == "grid" else {"height": PANEL, "width": PANEL, "panel_generation": WAYS[way]}


def read(
    way: str, named: bool, adapter: Path | None, folder: Path, seed: int, work: Path, models: Path
) -> dict[str, Any]:
    """The truth of each set, and the fraction of the panels with each color and accessory."""
    miniature = prepared(work, seed)
    options = options_of(way) | {"model": model_of(way, models)} | ({"batch_size": 1} if way == "anchored" else {})
    truths = generate_and_read(folder, adapter, prompts_of(way, miniature, named)[0], miniature.settings, **options)
    panels = read_panels([panel for prompt, noise in truths for panel in open_panels(folder, prompt, noise)])
    figures = Counter(f"{panel.color} {panel.accessory}" for panel in panels if panel is not None)
    return {
        "truths": {f"{prompt}/{noise}": list(truth) for (prompt, noise), truth in truths.items()},
        "figures": {name: count / len(panels) for name, count in figures.most_common()},
    }


def open_panels(folder: Path, prompt: str, noise: int) -> list[Image.Image]:
    picture = Image.open(folder / "images" / prompt / f"{noise}.png").convert("RGB")
    return split_grid(picture, picture.height // PANEL, picture.width // PANEL)


def train(way: str, folder: Path, seed: int, work: Path, models: Path) -> dict[str, Any]:
    miniature = prepared(work, seed)
    options = options_of(way)
    if way != "grid":
        prompts = 4 * miniature.settings.num_prompts_per_round  # of panels
        size = miniature.settings.num_generations * (1 if way == "anchored" else prompts // 2)
        options |= {"num_prompts_per_generation": prompts, "per_device_train_batch_size": size}
        options |= {"optimizer_steps_per_generation": 2}
    started = time.process_time()
    trainer = train_generator(
        folder,
        miniature.step_folder("judge"),
        prompts_of(way, miniature, named=False)[1],
        miniature.settings,
        model=model_of(way, models),
        save_strategy="no",
        **options,
    )
    seconds = round(time.process_time() - started)
    logs = [log for log in trainer.state.log_history if "rewards/consistency/mean" in log]
    return {"cpu_seconds": seconds, "rewards": [log["rewards/consistency/mean"] for log in logs[::2]]}


def once(file: Path, do: Callable[..., dict], *given: Any) -> dict[str, Any]:
    if not file.exists():
        print(file, flush=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(do(*given)), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def do_runs(way: str, seeds: list[int], work: Path, models: Path) -> list[dict[str, Any]]:
    runs = []
    for seed in seeds:
        folder, common = work / "separate" / f"{way}_seed-{seed}", (seed, work, models)
        run = {
            "seed": seed,
            "named": once(folder / "named.json", read, way, True, None, folder / "named", *common),
            "open": once(folder / "before.json", read, way, False, None, folder / "before", *common),
            "training": once(folder / "training.json", train, way, folder / "adapter", *common),
            "trained": once(folder / "after.json", read, way, False, folder / "adapter", folder / "after", *common),
        }
        runs.append(run | {"before": run["open"]["truths"], "after": run["trained"]["truths"]})
    return runs


def figures_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    figures = before_and_after(runs)
    named = before_and_after([run | {"before": run["named"]["truths"]} for run in runs])
    figures["before training, with prompts that name color and accessory"] = {
        name: named[name]["before"] for name in ("consistency", "prompt_following")
    }
    # What consistency would be if a set had panels of any sets: where it is as high, nothing is shared but a habit
    figures["panels of any sets alike, of each seed"] = {
        when: [round(sum(share**2 for share in run[name]["figures"].values()), 3) for run in runs]
        for when, name in (("before", "open"), ("after", "trained"))
    }
    figures["judge's score of each seed"] = {
        name: [round(run["training"]["rewards"][at], 3) for run in runs]
        for name, at in (("first round", 0), ("last round", -1))
    }
    figures["processor seconds of training, median"] = int(np.median([run["training"]["cpu_seconds"] for run in runs]))
    return figures


def ratios_of(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures that the page quotes."""
    named = "before training, with prompts that name color and accessory"
    ratios = {
        f"true consistency, {when}": {way: one["consistency"][when]["mean"] for way, one in results.items()}
        for when in ("before", "after", "difference")
    }
    return ratios | {
        f"true consistency {named}": {way: one[named]["consistency"]["mean"] for way, one in results.items()},
        "panels of any sets alike, after": {
            way: round(float(np.mean(one["panels of any sets alike, of each seed"]["after"])), 3)
            for way, one in results.items()
        },
    }


def draw(ways: list[str], work: Path, seed: int, path: Path) -> None:
    """Draw the sets of the first prompts from one noise; panels with another figure than the first have a frame."""
    figure = Figure(figsize=(1.6 * 2 * SHOWN, 1.7 * len(ways)), layout="constrained")
    axes = figure.subplots(len(ways), 2 * SHOWN)
    for way, line in zip(ways, axes, strict=True):
        for column, axis in enumerate(line):
            when = "before" if column < SHOWN else "after"
            folder = work / "separate" / f"{way}_seed-{seed}" / when
            panels = open_panels(folder, f"prompt-{column % SHOWN:03d}", 0)
            shown = [None if panel is None else panel.identity for panel in read_panels(panels)]
            for place, panel in enumerate(panels):
                x, y = place % 2 * (PANEL + 4), place // 2 * (PANEL + 4)
                axis.imshow(panel, extent=(x, x + PANEL, y + PANEL, y), interpolation="nearest")
                if shown[place] is None or shown[place] != shown[0]:
                    frame = {"fill": False, "edgecolor": "#d0201b", "linewidth": 2.5}
                    axis.add_patch(Rectangle((x + 1, y + 1), PANEL - 2, PANEL - 2, **frame))
            axis.set(xlim=(-1, 2 * PANEL + 5), ylim=(2 * PANEL + 5, -1), xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if way == ways[0] and column % SHOWN == 0:
                axis.set_title(f"{when} training", loc="left", fontsize=11)
        line[0].set_ylabel(way, fontsize=11)
    figure.savefig(path, dpi=60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--models", type=Path, default=Path("toy-models"))
    parser.add_argument("--work_dir", type=Path, default=Path("miniature-benchmark"))
    parser.add_argument(
        "--output", type=Path, default=HERE / "separate_sets.json", help="results; the sheet is saved next to it"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    runs = {way: do_runs(way, arguments.seeds, arguments.work_dir, arguments.models) for way in arguments.ways}
    results = {way: figures_of(of_way) for way, of_way in runs.items()}
    record = {
        "setting": {"device": "cpu", "threads": 1, "seeds": arguments.seeds},
        "torch": torch.__version__,
        "ratios": ratios_of(results),
        "results": results,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(arguments.ways, arguments.work_dir, arguments.seeds[0], arguments.output.with_suffix(".png"))
    print(json.dumps(record["ratios"], indent=1))


if __name__ == "__main__":
    main()
