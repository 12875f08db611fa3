# SPDX-License-Identifier: Apache-2.0
"""
How long diversification takes, how much memory, and how much more it covers than random prompts.

    OMP_NUM_THREADS=1 python benchmarks/speed/diversify.py
    python benchmarks/speed/diversify.py --rows 5000 --select 50 --output runs/diversify.json      # does it run?

The embeddings are planted: subjects of very different frequency (the k-th as often as 1 / k), each with its prompts
around it, and every tenth prompt a near-copy of another one. Memory is the peak of a separate process, given along with
what it has before it begins (the interpreter, numpy, torch and the embeddings).
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from paco_trl.dataset_building.diversify import diversify


DUPLICATES = 0.95
GIB = 2**20  # in the KiB that Linux counts


def planted(rows: int, dimensions: int, subjects: int) -> np.ndarray:
    """Unit vectors, float32: cosine 0.83 on average within a subject, 0.98 between a prompt and its near-copy."""
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, subjects + 1)
    of_subject = rng.choice(subjects, rows, p=frequency / frequency.sum())
    vectors = rng.standard_normal((rows, dimensions), dtype=np.float32)
    vectors *= 0.45
    centers = rng.standard_normal((subjects, dimensions), dtype=np.float32)
    for start in range(0, rows, 4096):  # without a second array of this size
        vectors[start : start + 4096] += centers[of_subject[start : start + 4096]]
    copies = np.arange(0, rows, 10)
    originals = rng.integers(0, rows, len(copies))
    vectors[copies] = vectors[originals] + 0.2 * rng.standard_normal((len(copies), dimensions), dtype=np.float32)
    vectors /= np.sqrt(np.einsum("nd,nd->n", vectors, vectors))[:, None]
    return vectors


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB


def measure(args: argparse.Namespace) -> dict:
    embeddings = planted(args.rows, args.dimensions, args.subjects)
    before, started, worked = peak(), time.perf_counter(), time.process_time()
    selected, report = diversify(embeddings, args.select, DUPLICATES)
    seconds, worked = time.perf_counter() - started, time.process_time() - worked
    chosen = embeddings[selected]
    return {
        "seconds": round(seconds, 1),
        "processor seconds": round(worked, 1),
        "peak memory, GiB": round(peak(), 3),
        "peak memory before it begins, GiB": round(before, 3),
        **{name: report[name] for name in ("coverage", "coverage of random ones", "near-duplicates left out")},
        "largest similarity between two selected": round(float(np.triu(chosen @ chosen.T, 1).max()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--dimensions", type=int, default=512)
    parser.add_argument("--subjects", type=int, default=2_000)
    parser.add_argument("--select", type=int, default=708)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args)))
        return
    child = subprocess.run([sys.executable, *sys.argv, "--child"], check=True, stdout=subprocess.PIPE, text=True)
    setting = {name: getattr(args, name) for name in ("rows", "dimensions", "subjects", "select")}
    measured = json.loads(child.stdout)
    ratios = [name for name in measured if name.startswith("coverage")]
    result = {
        "setting": setting,
        "ratios": {name: measured.pop(name) for name in ratios},
        "results": measured,
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2, sort_keys=True))


if __name__ == "__main__":
    main()
