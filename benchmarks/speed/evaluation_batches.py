# SPDX-License-Identifier: Apache-2.0
"""
What generating the images of an evaluation in batches of four changes: time, and the pixels.

    python benchmarks/speed/evaluation_batches.py  # two minutes on one core

A FLUX with random weights at several sizes: the more tokens an image has, the less a batch saves. The decoder is that
of the tiny VAE.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

from paco_trl.tiny import build_tiny_flux


SIZES = (32, 64)  # pixels per side; the tiny VAE has 4 pixels a token
COUNT, BATCH = 4, 4


def build(folder: Path, dtype: torch.dtype, layers: int, heads: int) -> FluxPipeline:
    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        in_channels=16, num_layers=layers, num_single_layers=2 * layers, attention_head_dim=128,
        num_attention_heads=heads, joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True,
    )  # fmt: skip
    pipeline = FluxPipeline.from_pretrained(build_tiny_flux(folder), transformer=transformer.to(dtype), dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipeline: FluxPipeline, size: int, steps: int, batch: int) -> np.ndarray:
    images = []
    for first in range(0, COUNT, batch):
        generators = [torch.Generator().manual_seed(number) for number in range(first, first + batch)]
        prompts = [f"A story in {number} panels" for number in range(first, first + batch)]
        arguments = {"height": size, "width": size, "num_inference_steps": steps, "output_type": "np"}
        images.append(pipeline(prompts, generator=generators, **arguments).images)
    return np.concatenate(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4, help="attention heads of 128 channels")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in arguments.dtypes:
        with tempfile.TemporaryDirectory() as folder:
            pipeline = build(Path(folder), getattr(torch, dtype), arguments.layers, arguments.heads)
        results[dtype] = {}
        for size in SIZES:
            times: dict[int, list[float]] = {1: [], BATCH: []}
            images = {}
            for _ in range(arguments.repeats + 1):  # the first warms up
                for batch, measured in times.items():
                    started = time.process_time()
                    images[batch] = generate(pipeline, size, arguments.steps, batch)
                    measured.append(time.process_time() - started)
            one, four = (statistics.median(measured[1:]) for measured in times.values())
            difference = np.abs(images[1] - images[BATCH])
            results[dtype][f"{size} pixels"] = {
                "tokens of an image": (size // 4) ** 2,
                "time of batches of 4 / of 1": round(four / one, 3),
                "largest difference of a pixel, of 255": round(float(difference.max()) * 255, 4),
                "mean difference, of 255": round(float(difference.mean()) * 255, 5),
            }
            print(dtype, size, results[dtype][f"{size} pixels"], flush=True)
    ratios = {
        f"{dtype}, {size}": of_size["time of batches of 4 / of 1"]
        for dtype, of_dtype in results.items()
        for size, of_size in of_dtype.items()
    }
    setting = {"device": "cpu", "threads": 1, "layers": arguments.layers, "heads": arguments.heads}
    record = {"setting": setting, "torch": torch.__version__, "ratios": ratios, "results": results}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
