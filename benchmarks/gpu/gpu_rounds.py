# SPDX-License-Identifier: Apache-2.0
"""
Measure rounds of `PaCoGRPOTrainer` with FLUX.1-dev, FLUX.1-Kontext or Qwen-Image-Edit, setting next to setting: steps of
`gpu.py`.

    export PYTHONPATH=tests:benchmarks/speed:benchmarks/memory
    python benchmarks/gpu/gpu_rounds.py --sweep flux-512 --real --device cuda --output gpu_flux-512.json

The models have the real configs and random weights, but text encoders of one layer unless a run asks for the real ones.
Each run of a sweep builds its own model, and results are written after each one. What cannot be done here (too little
memory, a kernel or a package that is missing) is left out with its reason; any other error is a failure, after which the
other runs follow. The ratios are to the first run of the sweep that succeeded.
"""

import argparse
import gc
import importlib.metadata
import itertools
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
from diffusers import DiffusionPipeline, FluxPipeline, ModelMixin
from peft import LoraConfig
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPConfig, CLIPModel, TrainerCallback

import reward_scoring
from editing_round import MODELS, SCALE, SETTINGS, Model, dataset_of, kontext_parts
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.planning.known_models import known_configs
from paco_trl.plots.figures import new_figure, png_bytes
from paco_trl.rewards import ClipTReward, ConsistencyReward, redness_reward
from paco_trl.tiny import build_tiny_flux
from tiny_models import build_tiny_clip


# Dense bf16 operations a second, by the exact name of the card (data sheets of the SXM modules)
PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}

CLIP = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

BATCH, BACKEND, COMPILED = "per_device_train_batch_size", "attention_backend", "compile_repeated_blocks"
CHECKPOINTING, ROLLOUT_BATCH = "gradient_checkpointing", "per_device_rollout_batch_size"
TAIL = "tail_steps"
FORWARD, ROUND = "seconds of a forward, an image", "seconds of a round, an image"
MEMORY, RESERVED, CURVE = "peak memory, GiB", "most memory reserved, GiB", "mean reward of each round"
DEVIATIONS = "largest mean |ratio - 1| on policy, by round"  # the adapter is zero in the first one alone
# Of a run, not options of the trainer: which of `REWARDS`, and whether the text encoders have their real depth
REWARD, ENCODERS = "reward", "real text encoders"


def blueness_reward(completions, **kwargs) -> list[float]:
    """The opposite of redness."""
    return [-value for value in redness_reward(completions=completions, **kwargs)]


PROMPT = "A red fox in four seasons"
SEASONS = ["A red fox in spring", "A red fox in summer", "A red fox in autumn", "A red fox in winter"]
TOO_LARGE = "it does not fit in the card's memory"
STEPS_OF_A_ROUND = 2
REWARDS = {"redness": redness_reward, "its opposite": blueness_reward}


def judge_reward(args: argparse.Namespace) -> ConsistencyReward:
    """A judge in the process, of the size of Qwen2.5-VL-7B."""
    size = {"model_size": "real" if args.real else "tiny", "dtype": "bfloat16", "batch_size": 8}
    return ConsistencyReward(reward_scoring.load_judge(argparse.Namespace(**vars(args) | size)))


def clip_reward(args: argparse.Namespace) -> ClipTReward:
    """A CLIP in float32, as deep and wide as CLIP-H."""
    reward = ClipTReward(build_tiny_clip(args.folder / "clip"))
    if args.real:
        with torch.device(args.device):
            reward.model = CLIPModel(CLIPConfig(**known_configs()[CLIP]["config.json"])).eval().requires_grad_(False)
        reward.processor.image_processor.size = {"shortest_edge": 224}
        reward.processor.image_processor.crop_size = {"height": 224, "width": 224}
    return reward


MODEL_REWARDS = {"judge": judge_reward, "CLIP-T": clip_reward}


@dataclass(frozen=True)
class Sweep:
    """Runs, each a dictionary of options of `PaCoGRPOConfig`, and what they have in common."""

    runs: list[dict]
    side: int  # pixels of an image; of the source, for Kontext
    model: str = "flux"
    rounds: int = 2  # the first one warms up
    settings: dict = field(default_factory=dict)
    vae: dict = field(default_factory=dict)  # replaces entries of its config


SWEEPS = {
    # 8 images fill two optimizer steps of at most 4
    "flux-512": Sweep(
        [{BATCH: 4}, {BATCH: 1}, {BATCH: 2}, {BATCH: 8, "num_generations": 16}, {BATCH: 1, ROLLOUT_BATCH: 4}], 512
    ),
    "flux-512-kernels": Sweep([
        {BATCH: 4}, {BATCH: 4, BACKEND: "_native_cudnn"}, {BATCH: 4, BACKEND: "_native_flash"},
        {BATCH: 4, BACKEND: "_flash_3"}, {BATCH: 4, COMPILED: True},
    ], 512),
    "flux-512-memory": Sweep([
        {BATCH: 4}, {BATCH: 4, CHECKPOINTING: False}, {BATCH: 1, CHECKPOINTING: False}, {BATCH: 4, ENCODERS: True},
        {BATCH: 4, "quantization": "nf4"}, {BATCH: 4, "quantization": "fp8_storage"},
    ], 512),
    "flux-512-tail": Sweep([{BATCH: 4}, {BATCH: 4, TAIL: 4}], 512),
    "flux-1024": Sweep([{BATCH: 4}, {BATCH: 1}, {BATCH: 1, CHECKPOINTING: False}], 1024),
    # 32 images: the first 16 are scored while others are generated
    "flux-512-rewards": Sweep([
        {BATCH: 4, "num_generations": 32, **options}
        for options in ({}, {REWARD: "judge"}, {REWARD: "CLIP-T"}, {REWARD: "CLIP-T", BACKEND: "_native_cudnn"})
    ], 512, settings={"num_inference_steps": 4}),
    "kontext-384": Sweep([{BATCH: 4}, {BATCH: 1}], 1024, "kontext", settings=SETTINGS["kontext"]),
    "qwen-image-edit-384": Sweep(
        [{BATCH: 1}, {BATCH: 1, CHECKPOINTING: False}], 1024, "qwen-image-edit",
        settings={**SETTINGS["qwen-image-edit"], "num_generations": 4},
    ),
    "training": Sweep(
        [{BATCH: 4, REWARD: name, "num_generations": 16} for name in REWARDS], 256, rounds=10,
        settings={"learning_rate": 1e-3}, vae={"norm_num_groups": 1},  # more normalize away the color of an image
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


def build_pipeline(sweep: Sweep, device: str, is_real: bool, has_encoders: bool, folder: Path) -> DiffusionPipeline:
    """Build a pipeline with random bf16 weights; its encoders and its VAE are on the CPU, as after loading."""
    flux = Model("black-forest-labs/FLUX.1-dev", FluxPipeline, build_tiny_flux, kontext_parts)
    model = flux if sweep.model == "flux" else MODELS[sweep.model]
    tiny = model.pipeline_class.from_pretrained(model.build_tiny(folder / sweep.model))
    with torch.device("meta"):
        models = model.parts(tiny, None, None, is_real)
    configs = {name: part.config for name, part in models.items()}
    configs["vae"] = {**configs["vae"], **sweep.vae}
    if not has_encoders:  # T5-XXL would be copied between host and device for every run
        configs["text_encoder"].get_text_config().num_hidden_layers = 1
        if "text_encoder_2" in configs:
            configs["text_encoder_2"].num_layers = 1
    parts = {}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        for name, part in models.items():
            with torch.device(device):  # where 12 billion weights are initialized in a second
                parts[name] = getattr(type(part), "from_config", type(part))(configs[name])
            parts[name].to(device if name == "transformer" else "cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    pipeline = model.pipeline_class(**{**tiny.components, **parts})  # sets what depends on the VAE's factor
    if sweep.model == "qwen-image-edit":
        # Of Qwen2.5-VL-7B: images of the sizes here are not downscaled
        pipeline.processor.image_processor.size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
        return pipeline
    pipeline.tokenizer_2.model_max_length = 512 if is_real else 64
    if is_real:
        pipeline.tokenizer.model_max_length = 77
    return pipeline


def forward_flops(transformer_class: type[ModelMixin], config: dict, shapes: tuple, **others) -> float:
    """Count the operations of a forward without an adapter, on the meta device."""
    with torch.device("meta"):
        transformer = transformer_class.from_config(config)
        inputs = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in shapes}
        inputs = {name: each.bfloat16() if each.is_floating_point() else each for name, each in inputs.items()}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            transformer.to(torch.bfloat16)(**inputs, **others)
    return counter.get_total_flops()


class Watch:
    """Times the transformer's forwards, without waiting for them, and keeps the peak of memory of each phase."""

    def __init__(self, transformer: nn.Module, device: str):
        self.device = device
        self.phase = "encoding"
        self.stamps: dict[str, list] = defaultdict(list)  # by phase: (start, end, images)
        self.peaks: dict[str, float] = {}
        self.reserved = 0.0
        self.shapes: tuple = ()  # of the last call's tensors
        self.others: dict = {}  # what else it had
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
        self.others = {name: value for name, value in kwargs.items() if name not in tensors}
        self.images = len(kwargs["hidden_states"])
        self.started = self.stamp()

    def _leave(self, *_) -> None:
        self.stamps[self.phase].append((self.started, self.stamp(), self.images))

    def end_phase(self) -> None:
        """Keep the peak of the phase that ends."""
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0.0))
            self.reserved = max(self.reserved, torch.cuda.max_memory_reserved() / 2**30)
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


class StepClock(TrainerCallback):
    """Notes when training begins and when the device has finished each optimizer step, whose backward is not awaited."""

    def __init__(self, device: str):
        self.device = device
        self.ends: list[float] = []

    def on_train_begin(self, *args, **kwargs):
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    on_step_end = on_train_begin


def make_trainer(args: argparse.Namespace, sweep: Sweep, options: dict, folder: Path) -> PaCoGRPOTrainer:
    """Build a trainer and its model."""
    options = {**sweep.settings, **options}
    if not args.real:
        options["num_inference_steps"] = max(4, max(options.get("sde_steps", [1])) + 2)
    reward_name, has_encoders = options.pop(REWARD, "redness"), options.pop(ENCODERS, False)
    if COMPILED in options and not args.real:
        raise NotImplementedError("nothing is compiled in a rehearsal")
    is_edit, side = sweep.model != "flux", sweep.side if args.real else sweep.side // 8
    config = PaCoGRPOConfig(
        output_dir=str(folder / "run"),
        use_cpu=args.device == "cpu",
        bf16=True,
        ratio_tolerance=float("inf"),  # it is measured
        height=side,
        width=side,
        resolution_scale=SCALE if is_edit else 1.0,
        num_prompts_per_generation=1,
        optimizer_steps_per_generation=STEPS_OF_A_ROUND,
        max_steps=(sweep.rounds if args.real else 2) * STEPS_OF_A_ROUND,
        report_to="none",
        save_strategy="no",
        log_completions=False,
        plot_curves=False,
        disable_tqdm=True,
        **{"num_generations": 8 if args.real else 4, **options, **args.overrides},
    )
    saved = args.folder / "pipeline"  # weights are quantized as they are loaded
    pipeline: DiffusionPipeline | str = str(saved)
    if not options.get("quantization"):
        pipeline = build_pipeline(sweep, args.device, args.real, has_encoders, folder)
    elif not saved.exists():
        build_pipeline(sweep, args.device, args.real, has_encoders, folder).save_pretrained(saved)
    collect()
    prompts = [{"prompt": PROMPT, "theme": PROMPT, "rows": 2, "cols": 2, "panels": SEASONS}]
    return PaCoGRPOTrainer(
        model=pipeline,
        reward_funcs=MODEL_REWARDS[reward_name](args) if reward_name in MODEL_REWARDS else REWARDS[reward_name],
        args=config,
        train_dataset=dataset_of(1, side) if is_edit else Dataset.from_list(prompts),
        peft_config=LoraConfig(r=64, lora_alpha=128, init_lora_weights="gaussian"),
    )


def measure(args: argparse.Namespace, sweep: Sweep, options: dict, folder: Path) -> dict:
    """Train some rounds with one setting, and return what they cost."""
    before = torch.cuda.memory_allocated() / 2**30 if args.device == "cuda" else None  # of earlier runs: nothing
    trainer = make_trainer(args, sweep, options, folder)
    transformer = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    watch = Watch(transformer, args.device)
    clock = StepClock(args.device)
    trainer.add_callback(clock)
    trainer.train()
    watch.end_phase()
    logs = [entry for entry in trainer.state.log_history if "time/rollout" in entry]
    by_round = [logs[index : index + STEPS_OF_A_ROUND] for index in range(0, len(logs), STEPS_OF_A_ROUND)]
    ends = clock.ends[::STEPS_OF_A_ROUND]
    seconds = statistics.median(end - start for start, end in itertools.pairwise(ends[1:]))
    rollout = statistics.median(each[0]["time/rollout"] for each in by_round[1:])  # ends with images on the CPU
    num_images = trainer.schedule.plan.num_images
    # The same for an image whatever the batch, so counted once
    tokens = tuple(shape[1:] for _, shape, _ in watch.shapes if len(shape) == 3)
    if tokens not in args.flops:
        flops = forward_flops(type(transformer), transformer.config, watch.shapes, **watch.others)
        args.flops[tokens] = flops / watch.images
    flops = args.flops[tokens]
    forward = watch.seconds_per_image("rollout")
    # Fewer than the denoising steps, with a short tail
    forwards = sum(images for *_, images in watch.stamps["rollout"]) / len(by_round)
    deviations = [
        max(v for entry in each for name, v in entry.items() if name.startswith("ratio_deviation_on_policy"))
        for each in by_round
    ]
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name()) if args.device == "cuda" else None
    reward = trainer.reward_func_names[0]
    return {
        "images in a round": num_images,
        "seconds to encode": logs[0]["time/encode"],
        FORWARD: forward,
        "seconds of a replayed forward, an image": watch.seconds_per_image("training"),
        ROUND: seconds / num_images,
        "seconds of the rollout, an image": rollout / num_images,
        "seconds of the training, an image": (seconds - rollout) / num_images,
        "forwards of the rollout, an image": forwards / num_images,
        "TFLOP of a forward, an image": flops / 1e12,
        "share of the card's peak in a forward": peak and flops / forward / peak,
        "share of the card's peak in the rollout": peak and flops * forwards / rollout / peak,
        MEMORY: watch.peaks,
        RESERVED: watch.reserved or None,
        "memory before the model was built, GiB": before,
        DEVIATIONS: deviations,
        "seconds that rewards were waited for": [each[0]["time/reward"] for each in by_round],
        "seconds of rewards during the rollout": [each[0]["time/reward_hidden"] for each in by_round],
        CURVE: [each[0][f"rewards/{reward}/mean"] for each in by_round],
        "first standard deviation": logs[0][f"rewards/{reward}/std"],
    }


def summary_of(run: dict) -> str:
    """The figures of a run in a line."""
    fraction, reserved = run["share of the card's peak in a forward"], run[RESERVED]
    return ", ".join([
        f"forward {1000 * run[FORWARD]:.3g} ms" + (f" ({100 * fraction:.0f} % of the peak)" if fraction else ""),
        f"round {run[ROUND]:.3g} s an image",
        *(f"{phase} {peak:.1f} GiB" for phase, peak in run[MEMORY].items()),
        *([f"reserved {reserved:.1f} GiB"] if reserved else []),
        f"|ratio - 1| {max(run[DEVIATIONS]):.1e}",
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


def compare_training(runs: list[dict], path: Path) -> dict[str, dict]:
    """Plot the redness of both trainings, and return where they end."""
    figure, ends = new_figure(6, 4), {}
    axes = figure.subplots()
    for run, sign, label in zip(runs, (1, -1), ("trained for redness", "trained for its opposite"), strict=True):
        curve = [sign * value for value in run[CURVE]]
        axes.plot(curve, marker="o", label=label)
        ends[label] = statistics.mean(curve[-max(1, len(curve) // 4) :])
    axes.set(xlabel="round", ylabel="mean redness of the images")
    axes.legend()
    path.write_bytes(png_bytes(figure))
    up, down = ends.values()
    if spread := runs[0]["first standard deviation"]:
        ends["difference / standard deviation of the first round"] = (up - down) / spread
    return {"redness of the last rounds": {name: round(value, 4) for name, value in ends.items()}}


def collect() -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


LABELS = {
    BATCH: "batch", ROLLOUT_BATCH: "rollout batch", BACKEND: "attention", COMPILED: "compiled",
    CHECKPOINTING: "checkpointing", TAIL: "tail of",
}  # fmt: skip


def label_of(options: dict) -> str:
    return ", ".join(
        f"{LABELS.get(name, name)} {value}" for name, value in options.items() if name != "num_generations"
    )


def small(options: dict) -> dict:
    """The same for a rehearsal."""
    limits = {BATCH: 2, ROLLOUT_BATCH: 2, TAIL: 1, "num_generations": 4}
    return {name: min(value, limits.get(name, value)) for name, value in options.items()}


def reason_to_leave_out(error: Exception) -> str | None:
    """Return why a setting cannot be run here; `None` if it should have run."""
    if isinstance(error, torch.OutOfMemoryError):
        return TOO_LARGE
    cannot = isinstance(error, NotImplementedError | ImportError)
    # Of `attention_backend`, of PyTorch's kernels, and of bitsandbytes in diffusers
    known = ("cannot be used here", "No available kernel", "No viable backend", "execution plan", "No GPU found")
    if cannot or any(words in str(error) for words in known):
        return str(error).splitlines()[0]
    return None


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
    runs = list({label_of(options): options for options in map(small if not args.real else dict, sweep.runs)}.items())
    report = {"sweep": args.sweep, "real": args.real, "machine": machine(args.device), "runs": [], "left out": []}
    report |= {"failed": [], "ratios": {}}

    def save(pending: list) -> None:
        # If the process is stopped, the file says what it did not do
        not_reached = [{"setting": label, "reason": "it was not finished in time"} for label, _ in pending]
        write_json(args.output, report | {"left out": report["left out"] + not_reached})

    for index, (label, options) in enumerate(runs):
        save(runs[index:])
        collect()
        try:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                run = {"setting": label, **options, **measure(args, sweep, options, Path(folder))}
            report["runs"].append(run | {"summary": summary_of(run)})
        except Exception as error:  # the others of the sweep may work
            reason, kind = reason_to_leave_out(error), "left out"
            if reason is None:
                traceback.print_exc()
                reason, kind = f"{type(error).__name__}: {error}".splitlines()[0], "failed"
            report[kind].append({"setting": label, "reason": reason})
        if report["runs"]:
            report["ratios"] = ratios_of(report["runs"])
        if args.sweep == "training" and len(report["runs"]) == len(REWARDS):
            report["ratios"] = compare_training(report["runs"], args.output.with_suffix(".png"))
    save([])
    if report["failed"]:
        sys.exit("; ".join(f"{entry['setting']}: {entry['reason']}" for entry in report["failed"]))


if __name__ == "__main__":
    main()
