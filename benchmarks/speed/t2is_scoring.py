# SPDX-License-Identifier: Apache-2.0
"""
Measure scoring an image set by the criteria of T2IS-Bench against querying one pair and criterion at a time.

    OMP_NUM_THREADS=1 python benchmarks/speed/t2is_scoring.py                   # a small Qwen2.5-VL
    python benchmarks/speed/t2is_scoring.py --model_size real --device cuda --dtype bfloat16

A set has four images of 512 x 512 pixels, six pairs and ten criteria: sixty questions. The other way is that of the
benchmark's own script, which asks them one after the other, with both images through the vision tower each time. Prints
and saves ratios; the figures behind them depend on the machine, except for the counts of tokens and patches.
"""

import argparse
import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import torch

from paco_trl import PaCoReward
from paco_trl.data import t2is_bench_question
from reward_scoring import (
    largest_difference,
    load_judge,
    panels,
    peak_memory,
    score_as_published,
    speed_ratio,
    take_turns,
)


CRITERIA = [
    "The fox has the same red fur, white chest and dark paws in both images.",
    "The fox is of the same size and build.",
    "The shape of the snout and of the ears does not change from one image to the other.",
    "Both images are painted in watercolour, with the same soft edges and visible paper.",
    "The palette is of the same warmth.",
    "Lines, shading and the grain of the paper look as if one hand had made them in one sitting.",
    "The birch forest is the same one: trunks, paths and the stream are where they were.",
    "The seasons follow one another, and what the trees carry fits the season of each image.",
    "The light comes from a side that fits the time of day.",
    "Nothing is in one image that cannot be there after what the other one shows.",
]


def ask_all(judge: PaCoReward, pairs: list) -> list[float]:
    questions = [t2is_bench_question(criterion) for criterion in CRITERIA]
    return judge.score([pair for pair in pairs for _ in questions], questions * len(pairs))


def ask_one_at_a_time(judge: PaCoReward, pairs: list) -> list[float]:
    return [
        score
        for pair in pairs
        for criterion in CRITERIA
        for score in score_as_published(judge, [pair], t2is_bench_question(criterion))
    ]


@contextmanager
def counting(judge: PaCoReward) -> Iterator[dict[str, int]]:
    """Tokens, padding included, and patches of images that go through the two towers."""
    counts = {"tokens in the language model": 0, "patches in the vision tower": 0}

    def count_tokens(module, args, kwargs):
        counts["tokens in the language model"] += kwargs["inputs_embeds"].shape[:2].numel()

    def count_patches(module, args, kwargs):
        counts["patches in the vision tower"] += len(args[0] if args else kwargs["hidden_states"])

    model = judge.model.model
    handles = [
        model.language_model.register_forward_pre_hook(count_tokens, with_kwargs=True),
        model.visual.register_forward_pre_hook(count_patches, with_kwargs=True),
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--model_size", choices=["small", "real"], default="small", help="real: of Qwen2.5-VL-7B")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[8, 60], help="60 is a set in one batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default="runs/benchmark")
    parser.add_argument("--output", default="benchmarks/speed/t2is_scoring.json")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, for quartiles")

    pairs = list(combinations(panels(2, 2, 512), 2))
    ways = {f"batches of {batch_size}": batch_size for batch_size in args.batch_sizes}
    memory = {}  # first: on the CPU its processes are copies of this one
    of_one = peak_memory_of(args, ask_one_at_a_time, pairs[:1], 1)
    for name, batch_size in ways.items():
        memory[name] = round(peak_memory_of(args, ask_all, pairs, batch_size) / of_one, 2)

    args.batch_size = 1
    judge = load_judge(args)
    judges = {name: PaCoReward(judge.model, judge.processor, judge.name, size) for name, size in ways.items()}
    functions = [functools.partial(ask_one_at_a_time, judge, pairs)]
    functions += [functools.partial(ask_all, other, pairs) for other in judges.values()]
    one_at_a_time, *ours = take_turns(args, functions)
    with counting(judge) as counts_of_one:
        expected = ask_one_at_a_time(judge, pairs)
    speed, quartiles, differences = {}, {}, {}
    work = {name: {} for name in counts_of_one}
    for (name, other), seconds in zip(judges.items(), ours, strict=True):
        speed[name], quartiles[name] = speed_ratio(seconds, one_at_a_time)
        with counting(judge) as counts:
            differences[name] = largest_difference(ask_all(other, pairs), expected)
        for kind, count in counts.items():
            work[kind][name] = round(count / counts_of_one[kind], 4)

    report = {
        "setting": {
            **{name: value for name, value in vars(args).items() if name not in ("folder", "output", "batch_size")},
            **{"pairs": len(pairs), "criteria": len(CRITERIA), "threads": torch.get_num_threads()},
        },
        "parameters": sum(parameter.numel() for parameter in judge.model.parameters()),
        "torch": torch.__version__,
        "ratios": {
            "questions per second / one at a time": speed,
            **{f"{kind} / one at a time": of_kind for kind, of_kind in work.items()},
            "peak memory above the model / one at a time": memory,
        },
        "quartiles of the speed over the repeats": quartiles,
        "one at a time": counts_of_one,
        "largest difference of a score": differences,
        "range of the scores": [min(expected), max(expected)],
    }
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


def peak_memory_of(args: argparse.Namespace, function, pairs: list, batch_size: int) -> float:
    args.batch_size = batch_size
    # The question that comes with it is that of the other benchmark
    return peak_memory(args, lambda judge, pairs, _: function(judge, pairs), pairs)


if __name__ == "__main__":
    main()
