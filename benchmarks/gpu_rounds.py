# SPDX-License-Identifier: Apache-2.0
"""
Measure rounds of `PaCoGRPOTrainer` with FLUX.1-dev or FLUX.1-Kontext, setting next to setting: steps of `gpu.py`.

    python benchmarks/gpu_rounds.py --sweep flux-512 --real --device cuda --output gpu_flux-512.json

The models have the real configs and random weights. Each run of a sweep builds its own model, and results are written
after each one; what a run cannot do (an option that is not there, too little memory) is left out with its reason. The
ratios are to the first run of the sweep that succeeded.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from diffusers import FluxKontextPipeline, FluxPipeline
from peft import LoraConfig
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from editing_round import SCALE, SETTINGS, dataset_of, kontext_parts
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.plots.figures import new_figure, png_bytes
from paco_trl.rewards import redness_reward
from paco_trl.tiny import build_tiny_flux, build_tiny_flux_kontext


# Dense bf16 operations a second, by the exact name of the card (data sheets of the SXM modules)
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}

BATCH, BACKEND, COMPILED = "per_device_train_batch_size", "attention_backend", "compile_repeated_blocks"
CHECKPOINTING = "gradient_checkpointing"
FORWARD, ROUND = "seconds of a forward, an image", "seconds of a round, an image"
MEMORY, CURVE = "peak memory, GiB", "mean reward of each round"
REWARD = "reward"  # of a run: which of `REWARDS`


def blueness_reward(completions, **kwargs) -> list[float]:
    """The opposite of redness."""
    return [-value for value in redness_reward(completions=completions, **kwargs)]


PROMPT = "A red fox in four seasons"
REWARDS = {"redness": redness_reward, "its opposite": blueness_reward}


@dataclass(frozen=True)
class Sweep:
    """Runs, each a dictionary of options of `PaCoGRPOConfig`, and what they have in common."""

    runs: list[dict]
    side: int  # pixels of an image; of the source, for Kontext
    model: str = "flux"
    rounds: int = 2  # the first one warms up
    settings: dict = field(default_factory=dict)


SWEEPS = {
    # 8 images fill two optimizer steps of at most 4
    "flux-512": Sweep([{BATCH: 4}, {BATCH: 1}, {BATCH: 2}, {BATCH: 8, "num_generations": 16}], 512),
    "flux-512-kernels": Sweep([
        {BATCH: 4}, {BATCH: 4, BACKEND: "_native_cudnn"}, {BATCH: 4, BACKEND: "_native_flash"},
        {BATCH: 4, COMPILED: True}, {BATCH: 1, "per_device_rollout_batch_size": 4},
    ], 512),
    "flux-512-memory": Sweep([
        {BATCH: 4}, {BATCH: 4, CHECKPOINTING: False}, {BATCH: 1, CHECKPOINTING: False},
        {BATCH: 4, "quantization": "nf4"},
    ], 512),
    "flux-1024": Sweep([{BATCH: 4}, {BATCH: 1}, {BATCH: 1, CHECKPOINTING: False}], 1024),
    "kontext-384": Sweep([{BATCH: 4}, {BATCH: 1}], 1024, "kontext", settings=SETTINGS["kontext"]),
    "training": Sweep(
        [{BATCH: 4, REWARD: name, "num_generations": 16} for name in REWARDS], 256, rounds=10,
        settings={"learning_rate": 1e-3},
    ),
}  # fmt: skip


def machine(device: str) -> dict:
    """In general words."""
    names = ("torch", "diffusers", "transformers", "trl", "peft", "accelerate")
    found = {"device": "CPU", "cores": os.cpu_count(), "python": platform.python_version()}
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        found |= {"device": card.name, "memory, GiB": round(card.total_memory / 2**30, 1), "cuda": torch.version.cuda}
    return found | {name: importlib.metadata.version(name) for name in names}


def write_json(path: Path, report: dict) -> None:
    """Write a report that is never half there."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def build_pipeline(model: str, device: str, is_real: bool, folder: Path) -> FluxPipeline | FluxKontextPipeline:
    """Build a pipeline with random bf16 weights; its encoders and its VAE are on the CPU, as after loading."""
    pipeline_class = {"flux": FluxPipeline, "kontext": FluxKontextPipeline}[model]
    build_tiny = {"flux": build_tiny_flux, "kontext": build_tiny_flux_kontext}[model]
    tiny = pipeline_class.from_pretrained(build_tiny(folder / model))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            parts = kontext_parts(tiny, None, None, is_real)  # FLUX.1-dev has the same
    finally:
        torch.set_default_dtype(torch.float32)
    for name, part in parts.items():
        if name != "transformer":
            part.to("cpu")
    pipeline = pipeline_class(**{**tiny.components, **parts})  # sets what depends on the VAE's factor
    pipeline.tokenizer_2.model_max_length = 512 if is_real else 64
    if is_real:
        pipeline.tokenizer.model_max_length = 77
    return pipeline


def forward_flops(transformer_class: type, config: str, shapes: tuple) -> float:
    """Count the operations of a forward without an adapter, on the meta device."""
    with torch.device("meta"):
        transformer = transformer_class.from_config(json.loads(config))
        inputs = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in shapes}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            transformer.to(torch.bfloat16)(**inputs)
    return counter.get_total_flops()


class Watch:
    """Times the transformer's forwards, without waiting for them, and keeps the peak of memory of each phase."""

    def __init__(self, transformer: nn.Module, device: str):
        self.device = device
        self.phase = "encoding"
        self.stamps: dict[str, list] = defaultdict(list)  # by phase: (start, end, images)
        self.peaks: dict[str, float] = {}
        self.shapes: tuple = ()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        transformer.register_forward_pre_hook(self._enter, with_kwargs=True)
        transformer.register_forward_hook(self._leave)

    def stamp(self):
        if self.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        phase = "training" if torch.is_grad_enabled() else "rollout"
        if phase != self.phase:
            self.end_phase()
            self.phase = phase
        tensors = {name: value for name, value in kwargs.items() if torch.is_tensor(value)}
        self.shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in tensors.items())
        self.images = len(kwargs["hidden_states"])
        self.started = self.stamp()

    def _leave(self, *_) -> None:
        self.stamps[self.phase].append((self.started, self.stamp(), self.images))

    def end_phase(self) -> None:
        """Keep the peak of the phase that ends."""
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0.0))
            torch.cuda.reset_peak_memory_stats()

    def seconds_per_image(self, phase: str) -> float:
        """Median over the second half of the forwards: the others warm up."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        stamps = self.stamps[phase][len(self.stamps[phase]) // 2 :]
        return statistics.median(
            (start.elapsed_time(end) / 1000 if self.device == "cuda" else end - start) / images
            for start, end, images in stamps
        )


def measure(args: argparse.Namespace, sweep: Sweep, options: dict) -> dict:
    """Train some rounds with one setting, and return what they cost."""
    options = {**sweep.settings, **options}
    reward = REWARDS[options.pop(REWARD, "redness")]
    unknown = [name for name in options if name not in PaCoGRPOConfig.__dataclass_fields__]
    if unknown:
        raise NotImplementedError(f"PaCoGRPOConfig has no option `{'`, `'.join(unknown)}`")
    if COMPILED in options and not args.real:
        raise NotImplementedError("nothing is compiled in a rehearsal")
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    before = torch.cuda.memory_allocated() / 2**30 if args.device == "cuda" else None  # of earlier runs: nothing
    pipeline = build_pipeline(sweep.model, args.device, args.real, folder)
    transformer_class, transformer_config = type(pipeline.transformer), pipeline.transformer.to_json_string()
    is_edit, side = sweep.model == "kontext", sweep.side if args.real else sweep.side // 8
    prompts = [{"prompt": PROMPT, "rows": 1, "cols": 1, "panels": [PROMPT]}]
    config = PaCoGRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=args.device == "cpu",
        bf16=True,
        ratio_tolerance=float("inf"),  # it is measured
        height=side,
        width=side,
        resolution_scale=SCALE if is_edit else 1.0,
        num_prompts_per_generation=1,
        max_steps=(sweep.rounds if args.real else 2) * PaCoGRPOConfig.optimizer_steps_per_generation,
        report_to="none",
        save_strategy="no",
        log_completions=False,
        plot_curves=False,
        disable_tqdm=True,
        **{"num_generations": 8 if args.real else 4, **options, **args.overrides},
    )
    if options.get("quantization"):
        pipeline.save_pretrained(folder / "pipeline")  # weights are quantized as they are loaded
        pipeline = str(folder / "pipeline")
        collect()
    trainer = PaCoGRPOTrainer(
        model=pipeline,
        reward_funcs=reward,
        args=config,
        train_dataset=dataset_of(1, side) if is_edit else Dataset.from_list(prompts),
        peft_config=LoraConfig(r=64, lora_alpha=128, init_lora_weights="gaussian"),
    )
    watch = Watch(trainer.accelerator.unwrap_model(trainer.model).get_base_model(), args.device)
    trainer.train()
    watch.end_phase()
    logs = [entry for entry in trainer.state.log_history if "time/rollout" in entry]
    by_round = [logs[index : index + 2] for index in range(0, len(logs), 2)]
    warm = by_round[1:]
    rollout = statistics.median(each[0]["time/rollout"] for each in warm)
    training = statistics.median(sum(step["time/train"] for step in each) for each in warm)
    num_images = trainer.layout.num_images
    # The same for an image whatever the batch, so counted once
    tokens = tuple(shape[1:] for _, shape, _ in watch.shapes if len(shape) == 3)
    if tokens not in args.flops:
        args.flops[tokens] = forward_flops(transformer_class, transformer_config, watch.shapes) / watch.images
    flops = args.flops[tokens]
    forward = watch.seconds_per_image("rollout")
    deviations = [
        value for entry in logs for name, value in entry.items() if name.startswith("ratio_deviation_on_policy")
    ]
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name()) if args.device == "cuda" else None
    steps = config.num_inference_steps
    return {
        "images in a round": num_images,
        "seconds to encode": logs[0]["time/encode"],
        FORWARD: forward,
        "seconds of a replayed forward, an image": watch.seconds_per_image("training"),
        ROUND: (rollout + training) / num_images,
        "seconds of the rollout, an image": rollout / num_images,
        "seconds of the training, an image": training / num_images,
        "TFLOP of a forward, an image": flops / 1e12,
        "share of the card's peak in a forward": peak and flops / forward / peak,
        "share of the card's peak in the rollout": peak and flops * steps * num_images / rollout / peak,
        MEMORY: watch.peaks,
        "memory before the model was built, GiB": before,
        "largest mean |ratio - 1| on policy": max(deviations) if deviations else None,
        CURVE: [each[0][f"rewards/{reward.__name__}/mean"] for each in by_round],
        "first standard deviation": logs[0][f"rewards/{reward.__name__}/std"],
    }


def summary_of(run: dict) -> str:
    """The figures of a run in a line."""
    fraction, off = run["share of the card's peak in a forward"], run["largest mean |ratio - 1| on policy"]
    return ", ".join([
        f"forward {1000 * run[FORWARD]:.3g} ms" + (f" ({100 * fraction:.0f} % of the peak)" if fraction else ""),
        f"round {run[ROUND]:.3g} s an image",
        *(f"{phase} {peak:.1f} GiB" for phase, peak in run[MEMORY].items()),
        f"|ratio - 1| {off:.1e}",
    ])  # fmt: skip


def ratios_of(runs: list[dict]) -> dict[str, dict[str, float]]:
    """Each run against the first one."""
    first = {FORWARD: runs[0][FORWARD], ROUND: runs[0][ROUND], **runs[0][MEMORY]}
    return {
        f"{run['setting']} / {runs[0]['setting']}": {
            name: round(value / first[name], 3)
            for name, value in {FORWARD: run[FORWARD], ROUND: run[ROUND], **run[MEMORY]}.items()
        }
        for run in runs[1:]
    }


def compare_training(runs: list[dict], path: Path) -> dict[str, float]:
    """Plot the redness of both trainings, and return how far apart they end."""
    up, down = ([sign * value for value in run[CURVE]] for sign, run in zip((1, -1), runs, strict=True))
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for curve, label in ((up, "trained for redness"), (down, "trained for its opposite")):
        axes.plot(curve, marker="o", label=label)
    axes.set(xlabel="round", ylabel="mean redness of the images")
    axes.legend()
    path.write_bytes(png_bytes(figure))
    last = -max(1, len(up) // 4)
    apart, spread = statistics.mean(up[last:]) - statistics.mean(down[last:]), runs[0]["first standard deviation"]
    return {"difference of the last rounds / standard deviation of the first round": spread and apart / spread}


def collect() -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def label_of(options: dict) -> str:
    names = {BATCH: "batch", BACKEND: "attention", COMPILED: "compiled", CHECKPOINTING: "checkpointing"}
    return ", ".join(
        f"{names.get(name, name)} {value}" for name, value in options.items() if name != "num_generations"
    )


def small(options: dict) -> dict:
    """The same for a rehearsal."""
    return options | {BATCH: min(options[BATCH], 2)} | ({"num_generations": 4} if "num_generations" in options else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=list(SWEEPS), required=True)
    parser.add_argument("--real", action="store_true", help="the sizes of the published models")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--num_generations", type=int, help="images of a prompt; the sweep's own if left out")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.overrides = {} if args.num_generations is None else {"num_generations": args.num_generations}
    args.flops = {}  # of an image's forward, by its tokens
    sweep = SWEEPS[args.sweep]
    report = {"sweep": args.sweep, "real": args.real, "machine": machine(args.device), "runs": [], "left out": []}
    for options in sweep.runs:
        options = options if args.real else small(options)
        entry = {"setting": label_of(options), **options}
        if entry["setting"] in {run["setting"] for run in report["runs"]}:
            continue  # the same in a rehearsal
        collect()
        try:
            run, reason = entry | measure(args, sweep, dict(options)), None
            report["runs"].append(run | {"summary": summary_of(run)})
        except NotImplementedError as error:
            reason = str(error)
        except torch.OutOfMemoryError:
            reason = "it does not fit in the card's memory"
        except Exception as error:  # the others of the sweep may work
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if reason is not None:
            report["left out"].append({"setting": entry["setting"], "reason": reason})
        if report["runs"]:
            report["ratios"] = ratios_of(report["runs"])
        if args.sweep == "training" and len(report["runs"]) == len(REWARDS):
            report["ratios"] = compare_training(report["runs"], args.output.with_suffix(".png"))
        write_json(args.output, report)
    if not report["runs"]:
        sys.exit(f"no setting worked: {report['left out'][0]['reason']}")


if __name__ == "__main__":
    main()
