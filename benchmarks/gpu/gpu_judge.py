# SPDX-License-Identifier: Apache-2.0
"""
Measure a judge of the size of Qwen2.5-VL-7B, random weights in bf16, next to its alternatives: three steps of `gpu.py`.

    export PYTHONPATH=tests:benchmarks/speed:benchmarks/memory
    python benchmarks/gpu/gpu_judge.py --part scoring --real --device cuda --output gpu_judge-scoring.json

Scoring: all pairs of a set by `PaCoReward.score` and by the published usage, pair by pair. Training: a LoRA step of
`PaCoRewardTrainer`, the same from the logits of every position, with a differentiated vision tower, without cuDNN's
attention, and with flash-attn. Attention: scoring of sets of several sizes, each of which is new at first, as cuDNN's
attention makes a plan for each new shape.
"""

import argparse
import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from gpu_rounds import TOO_LARGE, machine, write_json
from paco_trl.data import theme_question
from reward_scoring import THEME, WAYS, largest_difference, load_judge, panels, speed_ratio, take_turns
from reward_training import clock, differentiated_tower_step, full_logits_step, fused_step, load_trainer


def without_cudnn(model: PreTrainedModel) -> contextlib.AbstractContextManager:
    """Leave PyTorch's attention its other kernels."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@contextlib.contextmanager
def flash_attention(model: PreTrainedModel):
    """Let a judge use flash-attn, or its kernel on the Hub."""
    before = model.config._attn_implementation
    model.set_attn_implementation("flash_attention_2")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


ATTENTION: dict[str, Callable] = {
    "as shipped": lambda model: contextlib.nullcontext(),
    "without cuDNN": without_cudnn,
    "flash-attn": flash_attention,
}


def step_with(attention, trainer, batch: dict) -> float:
    with attention(trainer.model.get_base_model()):
        return fused_step(trainer, batch)


STEPS: dict[str, Callable] = {
    "as shipped": fused_step,
    "logits of every position": full_logits_step,
    "differentiated tower": differentiated_tower_step,
    "without cuDNN": functools.partial(step_with, without_cudnn),
    "flash-attn": functools.partial(step_with, flash_attention),
}


def reset_peak(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(args: argparse.Namespace) -> float | None:
    """GiB, with the model."""
    return torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else None


def measure_scoring(args: argparse.Namespace) -> dict:
    judge, question = load_judge(args), theme_question(THEME)
    found = {"weights": sum(parameter.numel() for parameter in judge.model.parameters()), "layouts": {}}
    ratios = {}
    for layout, (rows, cols) in {"2x2": (2, 2), "2x3": (2, 3)}.items():
        pairs = list(combinations(panels(rows, cols, args.panel_size), 2))
        scores, peaks = {}, {}
        for name, way in WAYS.items():
            reset_peak(args)
            scores[name], peaks[name] = way(judge, pairs, question), peak(args)
        seconds = take_turns(args, [functools.partial(way, judge, pairs, question) for way in WAYS.values()])
        ratios[f"pairs per second / published usage, {layout}"], quartiles = speed_ratio(*seconds)
        found["layouts"][layout] = {
            "pairs per second": {
                name: len(pairs) / statistics.median(of_way) for name, of_way in zip(WAYS, seconds, strict=True)
            },
            "quartiles of the ratio": quartiles,
            "peak memory, GiB": peaks,
            "largest difference of a score": largest_difference(*scores.values()),
            "standard deviation of the scores": statistics.pstdev(scores["published"]),
        }
    return found | {"ratios": ratios}


def measure_training(args: argparse.Namespace) -> dict:
    trainer = load_trainer(args, vocabulary=None)  # of the real size, it is that of Qwen2.5-VL already
    batch = next(iter(trainer.get_train_dataloader()))
    seconds, losses, peaks = {name: [] for name in STEPS}, {}, {}
    left_out: dict[str, dict] = {}
    for _ in range(args.repeats + 1):  # the first one warms up
        for name in [name for name in STEPS if name not in left_out]:
            trainer.model.zero_grad()
            reset_peak(args)
            started = clock(args)
            try:
                losses[name] = STEPS[name](trainer, dict(batch))
            except (torch.OutOfMemoryError, ImportError) as error:
                reason = str(error).splitlines()[0] if isinstance(error, ImportError) else TOO_LARGE
                left_out[name] = {"setting": name, "reason": reason}
                continue
            seconds[name].append(clock(args) - started)
            peaks[name] = peak(args)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items() if name not in left_out}
    if not medians:
        raise torch.OutOfMemoryError
    ours, *others = medians
    return {
        "tokens of a step": int(batch["attention_mask"].sum()),
        "pairs of a step": args.batch_size,
        "seconds of a step": medians,
        "peak memory, GiB": peaks,
        "losses": losses,
        "ratios": {f"seconds of a step, {ours} / {name}": round(medians[ours] / medians[name], 3) for name in others},
        "left out": list(left_out.values()),
    }


def measure_attention(args: argparse.Namespace) -> dict:
    judge, question = load_judge(args), theme_question(THEME)
    sets = [list(combinations(panels(2, 2, args.panel_size + 28 * index), 2)) for index in range(8)]
    seconds, left_out = {}, []
    judge.score(sets.pop(), question)  # warms up
    for name, attention in ATTENTION.items():
        try:
            with attention(judge.model):
                for time_of in ("sets of new sizes", "the same again"):
                    started = time.perf_counter()
                    for pairs in sets:
                        judge.score(pairs, question)  # ends with numbers on the CPU
                    seconds[f"{name}, {time_of}"] = time.perf_counter() - started
        except ImportError as error:
            left_out.append({"setting": name, "reason": str(error).splitlines()[0]})
    first = seconds["as shipped, the same again"]
    ratios = {f"seconds of scoring, {name}": round(value / first, 3) for name, value in seconds.items()}
    return {"seconds": seconds, "ratios": ratios, "left out": left_out}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["scoring", "training", "attention"], required=True)
    parser.add_argument("--real", action="store_true", help="the size of Qwen2.5-VL-7B")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.dtype, args.model_size, args.panel_size = "bfloat16", "real", 512
    args.batch_size, args.repeats = (4, 4) if args.part == "training" else (8, 5)
    if not args.real:
        args.model_size, args.panel_size, args.batch_size, args.repeats = "tiny", 56, 2, 2
    setting = {name: value for name, value in vars(args).items() if name not in ("folder", "output")}
    try:
        parts = {"scoring": measure_scoring, "training": measure_training, "attention": measure_attention}
        found = parts[args.part](args)
    except torch.OutOfMemoryError:
        found = {"ratios": {}, "left out": [{"setting": args.part, "reason": TOO_LARGE}]}
    write_json(args.output, {"setting": setting, "machine": machine(args.device), **found})


if __name__ == "__main__":
    main()
