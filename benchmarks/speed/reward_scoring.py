# SPDX-License-Identifier: Apache-2.0
"""
Measure scoring all pairs of an image set against the published usage example run pair by pair, in one run.

    OMP_NUM_THREADS=1 python benchmarks/speed/reward_scoring.py                 # the tiny Qwen2.5-VL
    python benchmarks/speed/reward_scoring.py --model_size real --device cuda --dtype bfloat16 --panel_size 512

Prints and saves ratios of pairs per second and of peak memory; the figures behind them depend on the machine. Scores
are compared in the dtype of the run and, whatever that is, in float32.
"""

import argparse
import functools
import gc
import json
import multiprocessing
import random
import resource
import statistics
import time
from itertools import combinations
from pathlib import Path

import torch
from PIL import Image
from qwen_vl_utils import process_vision_info
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

from paco_trl import PaCoReward
from paco_trl.data import theme_question
from paco_trl.planning.known_models import known_configs
from paco_trl.tiny import build_tiny_qwen2_5_vl


THEME = "A red fox walks through the four seasons of the same birch forest, drawn in watercolour"

# Of Qwen2.5-VL-7B, and of a model that a CPU runs in seconds
REAL = known_configs()["Qwen/Qwen2.5-VL-7B-Instruct"]["config.json"]
SMALL_TEXT = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
}
SMALL_VISION = {
    "depth": 6,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_heads": 4,
    "out_hidden_size": 256,
    "fullatt_block_indexes": [2, 5],
}


def load_model(args: argparse.Namespace, vocabulary: int | None = None):
    """A Qwen2.5-VL with random weights, of the real or of a small size, and its processor."""
    folder = build_tiny_qwen2_5_vl(Path(args.folder) / "qwen2_5_vl")
    processor = AutoProcessor.from_pretrained(folder)
    processor.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 2_097_152}
    if args.model_size == "tiny":
        return AutoModelForImageTextToText.from_pretrained(folder, dtype=args.dtype).to(args.device), processor
    config = Qwen2_5_VLConfig.from_pretrained(folder)
    text, vision = config.text_config.to_dict(), config.vision_config.to_dict()
    del text["layer_types"]  # follows from the number of layers
    is_real = args.model_size == "real"
    text.update(REAL["text_config"] if is_real else SMALL_TEXT)
    vision.update(REAL["vision_config"] if is_real else SMALL_VISION)
    if vocabulary is not None:
        text["vocab_size"] = vocabulary
    config = Qwen2_5_VLConfig(**{**config.to_dict(), "text_config": text, "vision_config": vision})
    config.name_or_path = str(folder)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, args.dtype))
    with torch.device(args.device):
        model = Qwen2_5_VLForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    return model, processor


def load_judge(args: argparse.Namespace) -> PaCoReward:
    return PaCoReward(*load_model(args), name="random weights", batch_size=args.batch_size)


def collect() -> None:
    """Free judges that have been deleted: a model and its judge's hook refer to one another."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def score_as_published(judge: PaCoReward, pairs: list, question: str) -> list[float]:
    """Pair by pair: chat template, both images through processor and vision tower, logits, softmax of Yes and No."""
    scores = []
    for first, second in pairs:
        content = [{"type": "image", "image": first}, {"type": "image", "image": second}]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
        text = judge.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images, _ = process_vision_info(messages)
        inputs = judge.processor(text=[text], images=images, padding=True, return_tensors="pt").to(judge.device)
        with torch.inference_mode():
            logits = judge.model(**inputs).logits[0, -1].double()
        scores.append(torch.softmax(logits[[judge.yes_id, judge.no_id]], dim=0)[0].item())
    return scores


def score_sets(judge: PaCoReward, pairs: list, question: str) -> list[float]:
    return judge.score(pairs, question)


WAYS = {"ours": score_sets, "published": score_as_published}


def peak_memory(args: argparse.Namespace, function, pairs: list) -> float:
    """Bytes at the peak of scoring, above those of the model: in a separate process on the CPU."""
    if args.device == "cuda":
        judge = load_judge(args)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(judge, pairs, theme_question(THEME))
        peak = torch.cuda.max_memory_allocated() - before
        del judge
        collect()  # two models of the real size need not fit
        return peak

    def measure(connection):
        judge = load_judge(args)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        function(judge, pairs, theme_question(THEME))
        connection.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)

    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=measure, args=(sender,))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise SystemExit(f"The process that measures memory ended with {process.exitcode}.")
    return receiver.recv()


def take_turns(args: argparse.Namespace, functions: list) -> list[list[float]]:
    """Seconds of each function in each repeat; they take turns, and end with numbers on the CPU: nothing is pending."""
    # A CPU has other work too: what counts is the time of the processor
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    seconds = [[] for _ in functions]
    for _ in range(args.repeats + 1):
        for function, of_function in zip(functions, seconds, strict=True):
            started = clock()
            function()
            of_function.append(clock() - started)
    return [of_function[1:] for of_function in seconds]  # the first one warms up


def speed_ratio(ours: list[float], published: list[float]) -> tuple[float, list[float]]:
    """Return how many times as fast ours is: median and quartiles over the repeats."""
    # Of adjacent calls: other work on the machine slows down both
    ratios = [other / own for own, other in zip(ours, published, strict=True)]
    lower, median, upper = statistics.quantiles(ratios, n=4)
    return round(median, 2), [round(lower, 2), round(upper, 2)]


def compare(judge: PaCoReward, pairs_of: dict[str, list]) -> dict[str, dict[str, list[float]]]:
    """Scores of each layout's pairs, by the name of the way."""
    return {
        layout: {name: way(judge, pairs, theme_question(THEME)) for name, way in WAYS.items()}
        for layout, pairs in pairs_of.items()
    }


def largest_difference(scores: list[float], others: list[float]) -> float:
    return max(abs(score - other) for score, other in zip(scores, others, strict=True))


def panels(rows: int, cols: int, size: int) -> list[Image.Image]:
    rng = random.Random(0)
    colors = [tuple(rng.randrange(256) for _ in range(3)) for _ in range(rows * cols)]
    return [Image.new("RGB", (size, size), color) for color in colors]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--model_size", choices=["tiny", "small", "real"], default="tiny", help="real: of Qwen2.5-VL-7B"
    )
    parser.add_argument("--panel_size", type=int, default=112, help="pixels per side")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--folder", default="runs/benchmark")
    parser.add_argument("--output", default="benchmarks/speed/reward_scoring.json")
    args = parser.parse_args()
    if args.repeats < 2:
        parser.error("--repeats must be at least 2, for quartiles")

    pairs_of = {
        f"{rows}x{cols}": list(combinations(panels(rows, cols, args.panel_size), 2)) for rows, cols in ((2, 2), (2, 3))
    }
    memory = {}  # first: on the CPU its processes are copies of this one
    for layout, pairs in pairs_of.items():
        ours, published = peak_memory(args, score_sets, pairs), peak_memory(args, score_as_published, pairs)
        memory[layout] = round(ours / published, 3)
    judge = load_judge(args)
    question = theme_question(THEME)
    speed, quartiles = {}, {}
    for layout, pairs in pairs_of.items():
        seconds = take_turns(args, [functools.partial(way, judge, pairs, question) for way in WAYS.values()])
        speed[layout], quartiles[layout] = speed_ratio(*seconds)

    scores = {args.dtype: compare(judge, pairs_of)}
    if args.dtype != "float32":
        judge.model.float()  # the same weights
        scores["float32"] = compare(judge, pairs_of)
    exact = scores["float32"]

    report = {
        "setting": {name: value for name, value in vars(args).items() if name not in ("folder", "output")},
        "parameters": sum(parameter.numel() for parameter in judge.model.parameters()),
        "torch": torch.__version__,
        "ratios": {
            "pairs per second / published usage, pair by pair": speed,
            "peak memory above the model / published usage": memory,
        },
        "quartiles of the speed over the repeats": quartiles,
        "largest difference of a score": {
            dtype: {layout: largest_difference(*of_layout.values()) for layout, of_layout in of_dtype.items()}
            for dtype, of_dtype in scores.items()
        },
        "standard deviation of the scores": {
            layout: statistics.pstdev(of_layout["published"]) for layout, of_layout in exact.items()
        },
    }
    if args.dtype != "float32":
        # The published usage reads Yes and No from logits in that dtype, PaCoReward in float32 from the hidden state
        report["largest error of a score against float32"] = {
            name: {
                layout: largest_difference(of_layout[name], exact[layout]["published"])
                for layout, of_layout in scores[args.dtype].items()
            }
            for name in ("ours", "published")
        }
    Path(args.output).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
