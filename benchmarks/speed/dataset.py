# SPDX-License-Identifier: Apache-2.0
"""
Measure the time, memory and disk space of cutting the grids of a full dataset, pairing the panels, and saving both.

    python benchmarks/speed/dataset.py                  # 708 prompts x 4 seeds of 2x2 panels, 1024 x 1024 pixels: the paper's
    python benchmarks/speed/dataset.py --prompts 40     # a quick look

The grids are a few different images, hard-linked under the names of the others: each is still read, cut, compressed and
hashed separately. The stages run in a separate process, whose memory is sampled.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import psutil


MIB = 2**20


def make_image(size: int, seed: int, path: Path) -> None:
    """Save an image that compresses like a photo: colors at several scales, and a little grain."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    pixels = np.full((size, size, 3), 128.0)
    for side, strength in ((4, 60), (16, 30), (64, 12), (size // 4, 4)):
        coarse = rng.normal(size=(side, side, 3)).astype(np.float32)
        for band in range(3):
            layer = Image.fromarray(coarse[..., band]).resize((size, size), Image.Resampling.BICUBIC)
            pixels[..., band] += strength * np.asarray(layer)
    pixels += rng.normal(scale=2, size=pixels.shape)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, compress_level=1)


def make_grids(folder: Path, args: argparse.Namespace) -> None:
    pictures = folder / "pictures"
    pictures.mkdir()
    for number in range(args.pictures):
        make_image(args.size, number, pictures / f"{number}.png")
    for number in range(args.prompts * args.seeds):
        prompt, seed = divmod(number, args.seeds)
        path = grid_path(folder, prompt, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(pictures / f"{number % args.pictures}.png", path)


def grid_path(folder: Path, prompt: int, seed: int) -> Path:
    return folder / "grids" / str(prompt) / f"{seed}.png"


def build(folder: Path, args: argparse.Namespace, figures: multiprocessing.Queue) -> None:
    """Cut, pair, rank and save."""
    from datasets import Dataset, Image, disable_progress_bars

    from paco_trl.dataset_building.panels import cut_panels, instances_to_rankings, make_instances
    from paco_trl.utils.stage_folder import StageFolder

    disable_progress_bars()
    names = [f"prompt-{prompt}" for prompt in range(args.prompts)]
    prompts = Dataset.from_dict({"id": names, "prompt": [f"A red fox in scene {name}." for name in names]})
    rows = [
        {
            "id": f"{name}/{seed}",
            "prompt_id": name,
            "seed": seed,
            "rows": args.rows,
            "cols": args.cols,
            "image": str(grid_path(folder, prompt, seed)),
        }
        for prompt, name in enumerate(names)
        for seed in range(args.seeds)
    ]
    grids = Dataset.from_list(rows).cast_column("image", Image())
    seconds, started = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal started
        seconds[name], started = time.perf_counter() - started, time.perf_counter()

    panels = cut_panels(grids, StageFolder(folder / "panels"))
    lap("cutting, and saving the panels")
    instances = make_instances(panels)
    StageFolder(folder / "instances").finish(instances, {})
    lap("pairing, and saving the instances")
    order = list(range(args.seeds))
    rankings = instances_to_rankings(instances, panels, prompts, dict.fromkeys(instances["id"], order))
    StageFolder(folder / "rankings").finish(rankings, {})
    lap("rankings of all instances, and saving them")
    figures.put({"seconds": seconds, "panels": len(panels), "instances": len(instances)})


def resident(process: psutil.Process) -> int:
    """Return the bytes in memory of a process and its children."""
    total = 0
    try:
        for each in (process, *process.children(recursive=True)):
            total += each.memory_info().rss
    except psutil.NoSuchProcess:  # it has ended
        pass
    return total


def run(folder: Path, args: argparse.Namespace) -> dict:
    """Build in a separate process; return its figures with the peak of memory."""
    context = multiprocessing.get_context("spawn")
    figures = context.Queue()
    process = context.Process(target=build, args=(folder, args, figures))
    process.start()
    watched, peak = psutil.Process(process.pid), 0
    while process.is_alive():
        peak = max(peak, resident(watched))
        time.sleep(0.05)
    if process.exitcode != 0:
        raise SystemExit(f"The process that builds ended with {process.exitcode}.")
    return figures.get() | {"peak memory, MiB": round(peak / MIB)}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=708)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--cols", type=int, default=2)
    parser.add_argument("--size", type=int, default=1024, help="pixels per side of a grid")
    parser.add_argument("--pictures", type=int, default=40, help="different grids; the others link to them")
    parser.add_argument(
        "--folder", help="directory for 5 GB of images, removed at the end; by default a temporary one"
    )
    parser.add_argument("--output", default="benchmarks/speed/dataset.json")
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="dataset-benchmark-", dir=args.folder))
    try:
        make_grids(folder, args)
        figures = run(folder, args)
        pictures = [path.stat().st_size for path in (folder / "pictures").iterdir()]
        panels = size_of(folder / "panels" / "images")
        datasets = sum(size_of(folder / name / "dataset") for name in ("panels", "instances", "rankings"))
    finally:
        shutil.rmtree(folder)

    seconds = figures.pop("seconds")
    total = sum(seconds.values())
    copied = figures["instances"] * (1 + args.seeds) * panels / figures["panels"]
    report = {
        "setting": {name: value for name, value in vars(args).items() if name not in ("folder", "output")},
        "cores": os.cpu_count(),
        "grids": args.prompts * args.seeds,
        **figures,
        "seconds": {name: round(value, 1) for name, value in seconds.items()} | {"all": round(total, 1)},
        "bytes of a grid": round(statistics.mean(pictures)),
        "bytes of all panels": panels,
        "bytes of the saved datasets": datasets,
        "ratios": {
            "peak memory / 2 GiB": round(figures["peak memory, MiB"] / 2048, 3),
            "share of the time that cutting takes": round(seconds["cutting, and saving the panels"] / total, 3),
            "images on disk / images copied into the rankings": round(panels / copied, 4),
            "saved datasets / images on disk": round(datasets / panels, 4),
        },
    }
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
