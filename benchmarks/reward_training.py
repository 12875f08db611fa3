# SPDX-License-Identifier: Apache-2.0
"""
What a training step of PaCo-Reward costs, beside the same step with the logits of the whole vocabulary, in one run.

    python benchmarks/reward_training.py                                  # a small Qwen2.5-VL with random weights
    python benchmarks/reward_training.py --model_size real --device cuda --dtype bfloat16 --panel_size 512

Prints and saves ratios of tokens per second and of peak memory; the figures behind them depend on the machine.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from pathlib import Path

import torch
from datasets import Dataset
from PIL import Image

from paco_trl import PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.data import make_pair, theme_question
from paco_trl.trainer import first_token_weighted_loss
from reward_scoring import THEME, load_model


REASONS = "Both images show the same fox in the same forest, and the brush strokes and the colours agree. " * 8


def load_trainer(args: argparse.Namespace) -> PaCoRewardTrainer:
    model, processor = load_model(args, vocabulary=args.vocabulary)
    images = [Image.new("RGB", (args.panel_size, args.panel_size), colour) for colour in ("red", "green")]
    pairs = [make_pair(*images, theme_question(THEME), index % 2 == 0, REASONS) for index in range(args.batch_size)]
    config = PaCoRewardConfig(
        output_dir=str(Path(args.folder) / "training"),
        per_device_train_batch_size=args.batch_size,
        bf16=args.dtype == "bfloat16",
        use_cpu=args.device == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    return PaCoRewardTrainer(model, config, Dataset.from_list(pairs), processing_class=processor)


def fused_step(trainer: PaCoRewardTrainer, batch: dict) -> float:
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item()


def full_logits_step(trainer: PaCoRewardTrainer, batch: dict) -> float:
    """The same loss from the logits of every position and token."""
    inputs = {name: value for name, value in batch.items() if name not in ("rows", "labels")}
    logits = trainer.model(**inputs, use_cache=False).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    mask = labels != -100
    log_probs = logits.log_softmax(dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    loss = first_token_weighted_loss(log_probs, mask, trainer.args.first_token_weight)
    loss.backward()
    return loss.item()


def run(args: argparse.Namespace, steps: list, repeats: int) -> tuple[dict, dict, int]:
    """Median seconds and loss of each kind of step, which take turns, and the tokens of a step."""
    trainer = load_trainer(args)
    trainer.model.train()
    batch = next(iter(trainer.get_train_dataloader()))
    times, losses = {step: [] for step in steps}, {}
    for _ in range(repeats + 1):  # the first one warms up
        for step in steps:
            trainer.model.zero_grad()
            started = time.perf_counter()
            losses[step] = step(trainer, dict(batch))
            if args.device == "cuda":
                torch.cuda.synchronize()
            times[step].append(time.perf_counter() - started)
    seconds = {step: statistics.median(values[1:] or values) for step, values in times.items()}
    return seconds, losses, int(batch["attention_mask"].sum())


def peak_memory(args: argparse.Namespace, step) -> float:
    """Bytes at the peak of two steps, those of the model included: in a process of its own."""

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model_size", choices=["small", "real"], default="small", help="real: of Qwen2.5-VL-7B")
    parser.add_argument("--vocabulary", type=int, default=152064, help="that of Qwen2.5-VL-7B")
    parser.add_argument("--panel_size", type=int, default=112, help="pixels per side")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default="runs/benchmark")
    parser.add_argument("--output", default="benchmarks/reward_training.json")
    args = parser.parse_args()

    memory = {step: peak_memory(args, step) for step in (fused_step, full_logits_step)}
    seconds, losses, tokens = run(args, [fused_step, full_logits_step], args.repeats)
    report = {
        "setting": {name: value for name, value in vars(args).items() if name not in ("folder", "output")},
        "tokens of a step": tokens,
        "torch": torch.__version__,
        "ratios": {
            "tokens per second / with full logits": round(seconds[full_logits_step] / seconds[fused_step], 2),
            "peak memory / with full logits": round(memory[fused_step] / memory[full_logits_step], 3),
        },
        "relative difference of the losses": abs(losses[fused_step] / losses[full_logits_step] - 1),
    }
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
