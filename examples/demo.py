# SPDX-License-Identifier: Apache-2.0
"""
The main job on a laptop: trains a tiny FLUX pipeline with random weights on the shipped prompts, offline, on the CPU.

    make demo

What it shows is the method at work, not beautiful images: noise turns redder, round by round, because a reward asks
for it. It runs `examples/train_flux.py` the way it is run on real models, and prints where adapter and pictures are.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from diffusers import FluxPipeline
from diffusers.utils import logging
from matplotlib.figure import Figure
from PIL import Image

from paco_trl.data import demo_prompts_path
from paco_trl.tiny import build_tiny_clip, build_tiny_flux


ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "demo"
ROUNDS = 24


def write_prompts(path: Path) -> None:
    """The shipped 2x2 prompts, at sizes that fit the tiny model: 64 pixels, trained at 32."""
    with open(path, "w", encoding="utf-8") as file:
        for line in demo_prompts_path().read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["rows"] == row["cols"] == 2:
                file.write(json.dumps(row | {"height": 64, "width": 64}) + "\n")


def read_rewards(folder: Path) -> list[float]:
    """Mean redness of each round, from the scores beside the contact sheets."""
    means = []
    for path in sorted(folder.glob("round_*.jsonl")):
        scores = [json.loads(line)["redness_reward"] for line in path.read_text(encoding="utf-8").splitlines()]
        means.append(sum(scores) / len(scores))
    return means


def draw_images(adapter: Path) -> list[list[Image.Image]]:
    """Four images without the adapter and four with it, from the same noise, as a user would draw them."""
    logging.set_verbosity_error()  # the prompts are longer than the tiny model reads, which was said in training
    pipeline = FluxPipeline.from_pretrained(FOLDER / "tiny-flux")
    pipeline.set_progress_bar_config(disable=True)
    prompt = json.loads((FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[0])["prompt"]
    rows = []
    for use_adapter in (False, True):
        if use_adapter:
            pipeline.load_lora_weights(adapter)
        generators = [torch.Generator().manual_seed(seed) for seed in range(4)]
        rows.append(
            pipeline(
                [prompt] * 4, height=64, width=64, num_inference_steps=8, generator=generators, max_sequence_length=32
            ).images
        )
    return rows


def draw_picture(rewards: list[float], images: list[list[Image.Image]], path: Path) -> None:
    """The reward of each round, and the images before and after."""
    figure = Figure(figsize=(12, 4), dpi=100, layout="constrained")
    curve, pictures = figure.subfigures(1, 2, width_ratios=[1, 1.4])
    axes = curve.subplots()
    axes.plot(range(len(rewards)), rewards, marker="o", markersize=3)
    axes.set_xlabel("round")
    axes.set_ylabel("redness (mean of 48 images)")
    axes.set_title("The reward that is trained for")
    for row, title in enumerate(("before", "after, from the same noise")):
        for column in range(4):
            axes = pictures.add_subplot(2, 4, 4 * row + column + 1)
            axes.imshow(images[row][column], interpolation="nearest")
            axes.set_axis_off()
            if column == 0:
                axes.set_title(title, loc="left", fontsize=10)
    figure.savefig(path)


def main() -> None:
    started = time.time()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    print("Building a tiny FLUX pipeline and a tiny CLIP with random weights ...")
    build_tiny_flux(FOLDER / "tiny-flux")
    build_tiny_clip(FOLDER / "tiny-clip")
    write_prompts(FOLDER / "prompts.jsonl")

    output = FOLDER / "adapter"
    command = [sys.executable, str(ROOT / "examples" / "train_flux.py")]
    command += ["--model_name_or_path", str(FOLDER / "tiny-flux"), "--dataset_name", str(FOLDER / "prompts.jsonl")]
    command += ["--rewards", "redness", "clip_t", "--clip_model", str(FOLDER / "tiny-clip")]
    command += ["--reward_weights", "1.0", "0.01", "--multi_objective_aggregation", "sum_then_normalize"]
    command += ["--output_dir", str(output), "--use_cpu", "--bf16", "False", "--gradient_checkpointing", "False"]
    command += ["--num_generations", "8", "--num_prompts_per_generation", "6", "--per_device_train_batch_size", "8"]
    command += ["--num_inference_steps", "4", "--max_steps", str(2 * ROUNDS), "--lora_r", "8", "--lora_alpha", "16"]
    # At full size, with the averaged weights: before training, after half of it, and at the end
    command += ["--eval_split", "train", "--eval_strategy", "steps", "--eval_steps", str(ROUNDS)]
    command += ["--num_inference_steps_eval", "8", "--eval_on_start", "True"]
    # The gradients of a tiny model are small: a higher learning rate and clip range than the paper's
    command += ["--learning_rate", "1e-2", "--epsilon", "2e-3", "--report_to", "none", "--save_strategy", "no"]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"})

    picture = FOLDER / "before_and_after.png"
    rewards = read_rewards(output / "contact_sheets")
    draw_picture(rewards, draw_images(output), picture)
    print(f"\nRedness of the images: {rewards[0]:+.4f} in the first round, {rewards[-1]:+.4f} in the last.")
    print(f"The curve, and images before and after from the same noise: {picture}")
    print(f"Adapter, in PEFT's and diffusers' formats, with its card: {output}")
    print(f"A contact sheet of every round and evaluation: {output / 'contact_sheets'}")
    print(f"Everything that was logged, as a table and a picture: {output / 'curves.csv'}, {output / 'curves.png'}")
    print(f"Took {time.time() - started:.0f} s.")


if __name__ == "__main__":
    main()
