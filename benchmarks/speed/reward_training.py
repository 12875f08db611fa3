# SPDX-License-Identifier: Apache-2.0
"""
Measure a training step of PaCo-Reward against the same step with the logits of the full vocabulary, with a
differentiated vision tower, with random batches and without workers; and the checks of the images. In one run.

    python benchmarks/speed/reward_training.py                                  # a small Qwen2.5-VL with random weights
    python benchmarks/speed/reward_training.py --model_size real --device cuda --dtype bfloat16 --panel_size 512

Prints and saves ratios; the figures behind them depend on the machine. On the CPU, times of steps are those of the
processor, which other work on the machine does not change as much.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from itertools import combinations
from pathlib import Path

import datasets
import numpy as np
import torch
from datasets import Dataset
from PIL import Image

from paco_trl import PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.data import make_pair, theme_question, validate_pairs
from paco_trl.data.pairs import pair_features
from paco_trl.trainer import first_token_weighted_loss
from paco_trl.trainer.data_collator import PairCollator
from reward_scoring import THEME, load_model


SENTENCE = "Both images show the same fox in the same forest, and the brush strokes and the colours agree. "
REASONS = SENTENCE * 8
# The paper's pairs of a micro-batch, and 50 micro-batches, among which transformers' sampler sorts
BATCH_SIZE, NUM_BATCHES = 8, 50
TIMED = slice(2, None, 5)  # of the 50, which may be sorted by length


def equal_pairs(args: argparse.Namespace) -> Dataset:
    red, green = (Image.new("RGB", (args.panel_size, args.panel_size), color) for color in ("red", "green"))
    return Dataset.from_list(
        [make_pair(red, green, theme_question(THEME), index % 2 == 0, REASONS) for index in range(args.batch_size)]
    )


def mixed_pairs(args: argparse.Namespace, collator: PairCollator) -> Dataset:
    """Pairs of which one in ten has about three times the tokens of the others, whose reasons vary."""
    sides = {"short": args.panel_size, "long": args.panel_size}
    images = {}
    while True:  # images of the long ones grow until they are
        for name, side in sides.items():
            images[name] = str(Path(args.folder) / f"mix-{side}.png")
            Image.new("RGB", (side, side), "red").save(images[name])
        pairs = [
            make_pair(
                images["long" if index % 10 == 0 else "short"],
                images["long" if index % 10 == 0 else "short"],
                theme_question(THEME),
                index % 2 == 0,
                SENTENCE * (1 + index % 3),
            )
            for index in range(4 * BATCH_SIZE * NUM_BATCHES)
        ]
        dataset = Dataset.from_list(pairs, features=pair_features())
        lengths = collator.lengths(dataset.select(range(30)), "mix")
        if np.mean(lengths[::10]) >= 3 * np.mean([length for i, length in enumerate(lengths) if i % 10]):
            return dataset
        sides["long"] += 28


def load_trainer(
    args: argparse.Namespace, pairs: Dataset | None = None, vocabulary: int | None = None, **settings
) -> PaCoRewardTrainer:
    model, processor = load_model(args, vocabulary=vocabulary)
    config = PaCoRewardConfig(
        output_dir=str(Path(args.folder) / "training"),
        **{"per_device_train_batch_size": args.batch_size, **settings},
        bf16=args.dtype == "bfloat16",
        use_cpu=args.device == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    pairs = equal_pairs(args) if pairs is None else pairs
    trainer = PaCoRewardTrainer(model, config, pairs, processing_class=processor)
    trainer.model.activation_checkpointing_enable()  # as `train` does
    trainer.model.train()
    return trainer


def clock(args: argparse.Namespace) -> float:
    if args.device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def fused_step(trainer: PaCoRewardTrainer, batch: dict) -> float:
    with trainer.accelerator.autocast():  # `train` adds it to the model
        loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item()


def full_logits_step(trainer: PaCoRewardTrainer, batch: dict) -> float:
    """The same loss from the logits of every position and token."""
    inputs = {name: value for name, value in batch.items() if name not in ("rows", "grids", "labels")}
    with trainer.accelerator.autocast():
        logits = trainer.model(**inputs, use_cache=False).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    mask = labels != -100
    log_probs = logits.log_softmax(dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    loss = first_token_weighted_loss(log_probs, mask, trainer.args.first_token_weight)
    loss.backward()
    return loss.item()


def differentiated_tower_step(trainer: PaCoRewardTrainer, batch: dict) -> float:
    """The same step without the cut behind the vision tower."""
    tower = trainer.model.get_base_model().get_encoder("image")
    cut = tower.__dict__.pop("forward")
    try:
        return fused_step(trainer, batch)
    finally:
        tower.forward = cut


def run(args: argparse.Namespace, steps: list, repeats: int) -> tuple[dict, dict, int]:
    """Median seconds and loss of each kind of step, which take turns, and the tokens of a step."""
    trainer = load_trainer(args, vocabulary=args.vocabulary)
    batch = next(iter(trainer.get_train_dataloader()))
    times, losses = {step: [] for step in steps}, {}
    for _ in range(repeats + 1):  # the first one warms up
        for step in steps:
            trainer.model.zero_grad()
            started = clock(args)
            losses[step] = step(trainer, dict(batch))
            times[step].append(clock(args) - started)
    seconds = {step: statistics.median(values[1:] or values) for step, values in times.items()}
    return seconds, losses, int(batch["attention_mask"].sum())


def peak_memory(args: argparse.Namespace, step) -> float:
    """Bytes at the peak of two steps, those of the model included: in a separate process."""

    def measure(connection):
        run(args, [step], 1)
        on_device = torch.cuda.max_memory_allocated() if args.device == "cuda" else None
        connection.send(on_device or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)

    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=measure, args=(sender,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"The process that measures memory ended with {process.exitcode}.")
    return receiver.recv()


def measure_orders(args: argparse.Namespace) -> dict:
    """Steps of random batches and of batches of equal lengths, which take turns."""
    trainer = load_trainer(args, vocabulary=None, per_device_train_batch_size=BATCH_SIZE)
    pairs = trainer.train_dataset = mixed_pairs(args, trainer.data_collator)
    started = clock(args)
    lengths = np.array(trainer.data_collator.lengths(pairs, "pairs"))
    counting = (clock(args) - started) / len(pairs)
    batches, attended, positions, seconds = {}, {}, {}, {}
    for order in ("random", "group_by_length"):
        trainer.args.train_sampling_strategy = order
        torch.manual_seed(0)
        rows = np.array(list(trainer._get_train_sampler(pairs))).reshape(-1, BATCH_SIZE)
        batches[order] = rows[:NUM_BATCHES]
        attended[order] = lengths[batches[order]].sum()
        positions[order] = BATCH_SIZE * lengths[batches[order]].max(axis=1).sum()
        seconds[order] = 0.0
    rows = trainer._remove_unused_columns(pairs)
    for numbers in zip(*(of_order[TIMED] for of_order in batches.values()), strict=True):
        for order, chosen in zip(batches, numbers, strict=True):
            batch = trainer.data_collator([rows[row] for row in chosen])
            batch = {name: value.to(args.device) for name, value in batch.items()}
            trainer.model.zero_grad()
            started = clock(args)
            fused_step(trainer, batch)
            seconds[order] += clock(args) - started
    timed = {order: lengths[batches[order][TIMED]].sum() for order in batches}
    speed = {order: timed[order] / seconds[order] for order in batches}
    return {
        "long / short pairs, tokens": round(np.percentile(lengths, 95) / np.median(lengths), 2),
        "padding, random": round(1 - attended["random"] / positions["random"], 3),
        "padding, group_by_length": round(1 - attended["group_by_length"] / positions["group_by_length"], 3),
        "tokens per second, group_by_length / random": round(speed["group_by_length"] / speed["random"], 2),
        "counting the lengths / steps": round(
            counting * batches["random"][TIMED].size / seconds["group_by_length"], 4
        ),
    }


def noisy_panels(folder: Path, number: int, size: int) -> list[str]:
    """Save images that are neither plain, which decode too fast, nor pure noise."""
    rng = np.random.default_rng(0)
    paths = []
    for index in range(number):
        coarse = Image.fromarray(rng.integers(0, 256, (size // 16, size // 16, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC)).astype(int)
        pixels = (pixels + rng.integers(-8, 8, pixels.shape)).clip(0, 255).astype(np.uint8)
        paths.append(str(folder / f"panel-{index}.png"))
        Image.fromarray(pixels).save(paths[-1])
    return paths


def measure_workers(args: argparse.Namespace) -> dict:
    """Epochs in which a model computes for as long as a batch is collated, without workers and with two, in turns."""
    paths = noisy_panels(Path(args.folder), 16, args.worker_panel_size)
    pairs = [make_pair(paths[2 * i], paths[2 * i + 1], theme_question(THEME), True, REASONS) for i in range(8)] * 8
    trainer = load_trainer(
        args, Dataset.from_list(pairs, features=pair_features()), per_device_train_batch_size=BATCH_SIZE
    )

    def epoch(workers: int, step: float) -> tuple[float, int]:
        trainer.args.dataloader_num_workers = workers
        started, size = time.perf_counter(), 0
        for batch in trainer.get_train_dataloader():
            time.sleep(step)  # a GPU, which leaves the processor alone
            size = sum(value.nbytes for value in batch.values())
        return time.perf_counter() - started, size

    step = epoch(0, 0)[0] / 8
    seconds = {0: [], 2: []}
    for _ in range(args.repeats):
        for workers in seconds:
            elapsed, size = epoch(workers, step)
            seconds[workers].append(elapsed)
    return {
        "step that takes as long as collating, 2 workers / none": round(
            statistics.median(seconds[2]) / statistics.median(seconds[0]), 2
        ),
        "megabytes of a batch": round(size / 1e6),
    }


def measure_checks(args: argparse.Namespace) -> dict:
    """Measure validating pairs whose panels occur in nine rows each against decoding the images of every row."""
    datasets.config.HF_DATASETS_CACHE = Path(args.folder) / "cache"
    paths = noisy_panels(Path(args.folder), 10, 512)
    pairs = [make_pair(*pair, theme_question(THEME), True) for pair in combinations(paths, 2)]
    dataset = Dataset.from_list(pairs, features=pair_features())

    def seconds(function) -> float:
        started = time.process_time()
        function()
        return time.process_time() - started

    every = seconds(lambda: [dataset[row] for row in range(len(dataset))])
    first = seconds(lambda: validate_pairs(dataset))
    return {
        "validate_pairs / decoding each row": round(first / every, 3),
        "validate_pairs, started again / decoding each row": round(
            seconds(lambda: validate_pairs(dataset)) / every, 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model_size", choices=["small", "real"], default="small", help="real: of Qwen2.5-VL-7B")
    parser.add_argument("--vocabulary", type=int, default=152064, help="that of Qwen2.5-VL-7B")
    parser.add_argument("--panel_size", type=int, default=112, help="pixels per side")
    parser.add_argument("--worker_panel_size", type=int, default=1024, help="pixels per side of what workers collate")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default="runs/benchmark")
    parser.add_argument("--output", default="benchmarks/speed/reward_training.json")
    args = parser.parse_args()

    Path(args.folder).mkdir(parents=True, exist_ok=True)
    memory = {step: peak_memory(args, step) for step in (fused_step, full_logits_step)}
    seconds, losses, tokens = run(args, [fused_step, full_logits_step, differentiated_tower_step], args.repeats)
    report = {
        "setting": {name: value for name, value in vars(args).items() if name not in ("folder", "output")},
        "tokens of a step": tokens,
        "torch": torch.__version__,
        "ratios": {
            "tokens per second / with full logits": round(seconds[full_logits_step] / seconds[fused_step], 2),
            "peak memory / with full logits": round(memory[fused_step] / memory[full_logits_step], 3),
            "seconds / with a differentiated tower": round(
                seconds[fused_step] / seconds[differentiated_tower_step], 2
            ),
        },
        "relative difference of the losses": abs(losses[fused_step] / losses[full_logits_step] - 1),
        "a tenth of the pairs three times as long": measure_orders(args),
        "workers": measure_workers(args),
        "checks": measure_checks(args),
    }
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
