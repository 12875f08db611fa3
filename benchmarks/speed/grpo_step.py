# SPDX-License-Identifier: Apache-2.0
"""
Measure a round of PaCo-GRPO with its optimizer steps against the published recipe, in one run.

    python benchmarks/speed/grpo_step.py                                        # the tiny FLUX
    python benchmarks/speed/grpo_step.py --size medium --repeats 3 --output benchmarks/speed/grpo_step_medium.json
    python benchmarks/speed/grpo_step.py --published <clone of https://github.com/X-GenGroup/PaCo-RL>
    python benchmarks/speed/grpo_step.py --size flux-dev --device cuda --dtype bfloat16 --resolutions 512 --batch_sizes 1 4

Real rounds of `PaCoGRPOTrainer`, timed by hooks around the model calls: with the defaults and with short tails
(`tail_steps`).
"published costs" has the cost structure of the published recipe, built from the same trainer, model and prompts: the
text encoders stay on the device and encode the prompts of each call again, and a trained step is three forwards (old
policy, reference, trained). `--published` also runs the published loop itself. Rounds of all recipes and resolutions
take turns; medians and ratios of rounds of the same turn are saved.
"""

import argparse
import ctypes
import gc
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from datasets import Dataset
from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from diffusers.utils import logging as diffusers_logging
from peft import LoraConfig
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel, TrainerCallback

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.data import demo_prompts_path
from paco_trl.planning.known_models import known_configs
from paco_trl.plots.curves import CurvesCallback
from paco_trl.rewards import panel_similarity_reward, redness_reward
from paco_trl.rollout.encoder import EncodedRows
from paco_trl.rollout.policy import BatchInputs
from paco_trl.tiny import build_tiny_flux
from paco_trl.trainer.callbacks import ContactSheetsCallback
from paco_trl.trainer.round_schedule import TrainingRound
from published_loop import PublishedLoop, count_forwards, forwards_by_kind


# Dense bf16 of the data sheets, https://www.nvidia.com/en-us/data-center/h200/ (H100 SXM: the same)
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12}

FLUX = known_configs()["black-forest-labs/FLUX.1-dev"]  # file -> content
ROWS, COLS = 2, 2  # panels of an image
SWEPT = ("batch_size", "attention_backend", "compiled", "gradient_checkpointing")
DEFAULTS, COSTS = "defaults", "published costs"
LOOP, LOOP_STORED = "published loop", "published loop, no checkpointing"


@dataclass(frozen=True)
class Size:
    """What differs from the tiny pipeline, and the defaults of a run."""

    transformer: dict | None = None
    clip: dict | None = None
    t5: dict | None = None
    vae: dict | None = None
    max_tokens: int | None = None
    lora_rank: int = 4
    resolutions: tuple[int, ...] = (32, 64)
    num_generations: int = 16
    num_prompts: int = 2
    batch_size: int = 16


SIZES = {
    "tiny": Size(),
    # 36 million weights. Its T5 takes the fraction of a transformer's forward that T5-XXL takes of FLUX.1-dev's at 512
    # pixels, 0.2, so that what encoding again costs is in proportion.
    "medium": Size(
        transformer={
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 4,
            "num_attention_heads": 4,
            "joint_attention_dim": 512,
            "pooled_projection_dim": 16,
        },
        t5={"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 8},
        lora_rank=16,
        num_prompts=1,
    ),
    "flux-dev": Size(
        transformer=FLUX["transformer/config.json"],
        clip=FLUX["text_encoder/config.json"],
        t5=FLUX["text_encoder_2/config.json"],
        vae=FLUX["vae/config.json"],
        max_tokens=512,
        lora_rank=64,
        resolutions=(512, 1024),
        num_prompts=1,
        batch_size=1,
    ),
}


def build_pipeline(args: argparse.Namespace) -> FluxPipeline:
    """A FLUX with random weights: the tiny one, with the parts that the size replaces."""
    size = SIZES[args.size]
    pipeline = FluxPipeline.from_pretrained(build_tiny_flux(Path(args.folder) / "flux"), dtype=args.torch_dtype)
    torch.manual_seed(0)
    torch.set_default_dtype(args.torch_dtype)
    with torch.device(args.device):
        if size.clip is not None:
            config = {**pipeline.text_encoder.config.to_dict(), **size.clip}
            pipeline.text_encoder = CLIPTextModel(CLIPTextConfig(**config))
            pipeline.tokenizer.model_max_length = pipeline.text_encoder.config.max_position_embeddings
        if size.t5 is not None:
            t5 = {**size.t5, "num_layers": args.encoder_layers or size.t5["num_layers"]}
            pipeline.text_encoder_2 = T5EncoderModel(T5Config(vocab_size=len(pipeline.tokenizer_2), **t5))
        if size.vae is not None:
            vae = AutoencoderKL(**{**pipeline.vae.config, **size.vae})
            pipeline = FluxPipeline(**{**pipeline.components, "vae": vae})  # sets what depends on the VAE's factor
        if size.transformer is not None:
            shape = {**size.transformer}
            for name in ("num_layers", "num_single_layers", "num_attention_heads"):
                if getattr(args, name) is not None:
                    shape[name] = getattr(args, name)
            pipeline.transformer = FluxTransformer2DModel.from_config({**shape, "guidance_embeds": True})
    torch.set_default_dtype(torch.float32)
    if size.max_tokens is not None:
        pipeline.tokenizer_2.model_max_length = size.max_tokens
    for name in ("text_encoder", "text_encoder_2", "vae"):  # where a pipeline is that was loaded
        getattr(pipeline, name).to("cpu")
    if args.size != "tiny":
        pipeline.register_to_config(_name_or_path=None)  # its weights are not those of the directory
    return pipeline


def forward_flops(config: dict, image_tokens: int, text_tokens: int) -> float:
    """
    Floating-point operations of one image's forward through a FLUX transformer, without the adapter.

    12 d^2 multiply-adds a token in each block, double or single, and the attention; what remains (modulation, once an
    image, and embeddings) is below 0.1 % at FLUX.1-dev's size, where `torch.utils.flop_counter` counts 21.50 TFLOP at
    512 pixels and 74.38 at 1024. Twice the number of parameters a token would be 1.7 times as many: a token passes
    through one stream of a double block, and the modulation's 3.2 billion parameters see no tokens at all.
    """
    width = config["num_attention_heads"] * config["attention_head_dim"]
    blocks = config["num_layers"] + config["num_single_layers"]
    tokens = image_tokens + text_tokens
    return blocks * (24 * width**2 * tokens + 4 * tokens**2 * width)


class Stopwatch:
    """
    Divides the time of a round over sections, each without those inside it: their sum is the whole.

    Synchronised, the accelerator's time goes to the section that asked for it. On one CPU thread it counts the seconds
    that the processor worked for this process, in which other work on the machine does not show.
    """

    def __init__(self, device: str):
        self.device = device
        self.is_synchronized = True
        self.clock = time.process_time if is_processor_time(device) else time.perf_counter
        self._stack = ["trainer: loop, clipping, logs"]
        self.counts: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """A new round begins, in the section that is open."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts.clear()
        self.started = self._last = self.now()
        self.wall_started = time.perf_counter()

    def now(self) -> float:
        if self.device == "cuda" and self.is_synchronized:
            torch.cuda.synchronize()
        return self.clock()

    def _charge(self) -> None:
        now = self.now()
        self.seconds[self._stack[-1]] += now - self._last
        self._last = now

    def enter(self, section: str) -> None:
        self._charge()
        self._stack.append(section)

    def leave(self) -> None:
        self._charge()
        self._stack.pop()

    @contextmanager
    def section(self, name: str):
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def end(self) -> tuple[float, float]:
        """Seconds of the round, by the clock and on the wall."""
        self._charge()
        return self._last - self.started, time.perf_counter() - self.wall_started


def is_processor_time(device: str) -> bool:
    return device == "cpu" and torch.get_num_threads() == 1


@dataclass
class Round:
    """What was measured in a round."""

    recipe: str
    resolution: int
    is_synchronized: bool
    num_prompts: int
    whole: float = 0.0
    wall: float = 0.0
    rollout: float = 0.0
    flops: float = 0.0  # of a forward
    seconds: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    memory_before: float = 0.0
    memory_peak: float = 0.0

    @property
    def is_encoded_before(self) -> bool:
        return "published" not in self.recipe

    @property
    def figures(self) -> float:
        """Seconds of contact sheets and curves: the same in a large round as in a small one, so shown apart."""
        return sum(seconds for name, seconds in self.seconds.items() if name.split(": ")[1] in FIGURES)

    def time(self, encode: float) -> float:
        """Seconds of the round without figures; a prompt is encoded in `encode` where it was done before the round."""
        return self.whole - self.figures + (self.num_prompts * encode if self.is_encoded_before else 0.0)


# Whose time a section is, by what its name ends with; the rest is that of paco_trl, TRL and Trainer
MODEL_CALLS = ("transformer", "backward", "VAE", "text encoders")
FIGURES = ("contact sheet", "curves")
OPTIMIZER = ("optimizer and average of the weights",)
PIPELINE = ("diffusers' pipeline", "tokenizers")


class MeasuredTrainer(PaCoGRPOTrainer):
    """The trainer, measured. `recipes` has what differs in their stochastic steps."""

    def __init__(
        self,
        watch: Stopwatch,
        plan: list[tuple[str, int, bool]],
        recipes: dict[str, dict],
        loop: PublishedLoop | None,
        **kwargs,
    ):
        self.watch, self.plan, self.loop = watch, plan, loop
        self.rounds: list[Round] = []
        self.phase, self.encode_seconds = "rollout", []
        self._current: Round | None = None
        super().__init__(**kwargs)
        self._own_inputs, self.policy.inputs = self.policy.inputs, self._inputs
        self._own_scoring, self.scorer.scoring = self.scorer.scoring, self._scoring
        own_sde = self.schedule.sde
        self.schedule.sde = lambda index: replace(own_sde(index), **recipes[self.plan[index][0]])
        transformer = self.accelerator.unwrap_model(self.model).get_base_model()
        count_forwards(transformer, watch.counts, self._kind)
        self._time_module(transformer, "transformer")
        self._time_module(self.pipeline.vae.decoder, "VAE")
        for name in self.family.text_encoders:
            self._time_module(getattr(self.pipeline, name), "text encoders")
        getattr(self.pipeline, self.family.text_encoders[-1]).register_forward_pre_hook(self._count_encode)
        # So that what diffusers' own code takes is seen apart
        self.pipeline.__class__ = _timed_class(type(self.pipeline), self)
        self._time_method(self.policy.scheduler, "step", "rollout: sampler's steps")
        self._time_method(self.accelerator, "backward", "training: backward")
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, CurvesCallback):
                self._time_method(callback, "on_log", "trainer: curves")
            if isinstance(callback, ContactSheetsCallback):
                self._time_method(callback, "save", "scoring: contact sheet")
        self.add_callback(_RoundCallback(self))

    # ---- Hooks ----

    def _time_module(self, module: nn.Module, name: str) -> None:
        module.register_forward_pre_hook(lambda *_: self.watch.enter(f"{self.phase}: {name}"))
        module.register_forward_hook(lambda *_: self.watch.leave())

    def _time_method(self, owner: object, method: str, section: str) -> None:
        function = getattr(owner, method)

        def timed(*args, **kwargs):
            with self.watch.section(section):
                return function(*args, **kwargs)

        setattr(owner, method, timed)

    def _kind(self, module: nn.Module, kwargs: dict) -> str:
        rows, tokens, _ = kwargs["hidden_states"].shape
        self.flops_of_forward = forward_flops(module.config, tokens, kwargs["encoder_hidden_states"].shape[1])
        if self.phase != "rollout":
            return {"training": "trained"}.get(self.phase, "old policy and reference")
        return "generated" if rows == self.args.per_device_train_batch_size else "generated, shared prefix"

    def _count_encode(self, module: nn.Module, args: tuple) -> None:
        self.watch.counts["encodes"] += args[0].shape[0]

    @contextmanager
    def _scoring(self, *args):
        with self._own_scoring(*args) as scoring:
            self._time_method(scoring, "finish", "scoring: waiting for rewards, gathering")
            yield scoring

    # ---- A round ----

    def _encode(self, *args) -> EncodedRows:
        """Encode the prompts, before the first round and ahead of others, and time each."""
        encode_prompt = self.family.encode_prompt

        def timed(*arguments, **kwargs):
            started = self.watch.now()
            result = encode_prompt(*arguments, **kwargs)
            self.encode_seconds.append(self.watch.now() - started)
            return result

        self.family.encode_prompt = timed
        encoded = super()._encode(*args)
        del self.family.encode_prompt
        return encoded

    def _generate_and_score_completions(self, index: int) -> TrainingRound:
        self.end_round()
        recipe, resolution, is_synchronized = self.plan[index]
        self._current = Round(recipe, resolution, is_synchronized, self.schedule.plan.num_prompts)
        if self.loop is not None and recipe == DEFAULTS and (self.watch.device == "cpu" or not is_synchronized):
            for name, is_checkpointed in {LOOP: self.args.gradient_checkpointing, LOOP_STORED: False}.items():
                seconds, counts = self.loop.run(resolution, is_checkpointed)
                self.rounds.append(Round(name, resolution, is_synchronized, 0, seconds, seconds, counts=counts))
        self.is_published = recipe == COSTS
        for name in self.family.text_encoders:
            getattr(self.pipeline, name).to(self.accelerator.device if self.is_published else "cpu")
        self._current.memory_before = reset_peak_memory(self.watch.device)
        self.watch.is_synchronized = self._current.is_synchronized
        self.watch.begin()
        with self.watch.section("scoring: advantages, metrics, buffer"):
            round = super()._generate_and_score_completions(index)
        self._prompts_of = {
            id(step): [self.train_rows.prompts[sample.row_index] for sample in batch.samples]
            for batch in round.micro_batches
            for step in batch.steps
        }
        return round

    def end_round(self) -> None:
        if self._current is None:
            return
        done, self._current = self._current, None
        done.whole, done.wall = self.watch.end()
        done.rollout = self._rollout_seconds
        done.seconds, done.counts = dict(self.watch.seconds), dict(self.watch.counts)
        done.flops = self.flops_of_forward
        done.memory_peak = peak_memory(self.watch.device)
        self.rounds.append(done)

    @contextmanager
    def _generating(self, round: TrainingRound):
        self.phase, started = "rollout", self.watch.now()
        with self.watch.section("rollout: recording, prompts, moving the VAE"):
            with super()._generating(round) as recording:
                yield recording
        self._rollout_seconds = self.watch.now() - started  # ends with images on the CPU: nothing is pending

    def training_step(self, *args, **kwargs):
        with self.watch.section("training: loss, statistics"):
            return super().training_step(*args, **kwargs)

    # ---- The published recipe ----

    def _encode_again(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        with torch.no_grad(), self.watch.section(f"{self.phase}: tokenizers"):
            encoded = self.family.encode_prompt(self.pipeline, prompts, self.accelerator.device)
        return {name: tensor.float() for name, tensor in encoded.items()}

    def _inputs(self, encoded: EncodedRows, calls: list[int]):
        if not self.is_published:
            return self._own_inputs(encoded, calls)
        arguments = self._encode_again([self.train_rows.image_prompts[call].prompt for call in calls])
        return BatchInputs(arguments, arguments, [])

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.is_published:
            prompts = self._prompts_of[id(inputs["step"])]
            # Their results are not needed here, only their cost: the numbers of both recipes are the same
            with torch.no_grad():
                self.phase = "old policy"
                self._encode_again(prompts)
                self.policy.predict(model, inputs["step"])
                self.phase = "reference"
                self._encode_again(prompts)
                with self._reference(model) as reference:
                    self.policy.predict(reference, inputs["step"])
            self.phase = "training"
            self._encode_again(prompts)
        self.phase = "training"
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def _timed_class(pipeline_class: type, trainer: MeasuredTrainer) -> type:
    """The pipeline's class under the same name, whose call is a section of the stopwatch."""

    def call(self, *args, **kwargs):
        with trainer.watch.section("rollout: diffusers' pipeline"):
            return pipeline_class.__call__(self, *args, **kwargs)

    names = {"__call__": call, "__module__": pipeline_class.__module__}
    return type(pipeline_class.__name__, (pipeline_class,), names)


class _RoundCallback(TrainerCallback):
    def __init__(self, trainer: MeasuredTrainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.watch.enter(f"training: {OPTIMIZER[0]}")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.trainer.watch.leave()  # after the trainer's own callback, which takes the average

    def on_epoch_end(self, args, state, control, **kwargs):
        self.trainer.end_round()


def reset_peak_memory(device: str) -> float:
    """Begins to look for a peak; MiB in use."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**20
    if platform.system() == "Linux":
        ctypes.CDLL(None).malloc_trim(0)  # what the last round has freed
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets VmHWM, see proc(5)
    return _proc_status("VmRSS")


def peak_memory(device: str) -> float:
    """MiB at the peak: on the accelerator, or resident in memory."""
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else _proc_status("VmHWM")


def _proc_status(name: str) -> float:
    if platform.system() != "Linux":
        return float("nan")
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def dataset_of(plan: list[tuple[str, int, bool]], num_prompts: int) -> Dataset:
    """A prompt for each place of the plan's rounds, in their order and with their size; all of them different."""
    demo_rows = map(json.loads, demo_prompts_path().read_text(encoding="utf-8").splitlines())
    demo = [row["prompt"] for row in demo_rows if (row["rows"], row["cols"]) == (ROWS, COLS)]
    rows = []
    for _, resolution, _ in plan:
        for _ in range(num_prompts):
            prompt = f"{len(rows)}. {demo[len(rows) % len(demo)]}"
            panels = ["a panel"] * (ROWS * COLS)
            sizes = {"height": resolution, "width": resolution}
            rows.append({"prompt": prompt, "rows": ROWS, "cols": COLS, "panels": panels, **sizes})
    return Dataset.from_list(rows)


def recipes_of(args: argparse.Namespace) -> dict[str, dict]:
    """What differs in the stochastic steps of each recipe."""
    recipes: dict[str, dict] = {COSTS: {}, DEFAULTS: {}}
    return recipes | {f"tail_steps={tail}": {"tail_steps": tail} for tail in args.tail_steps}


def measure(
    args: argparse.Namespace, batch_size: int, backend: str | None, is_compiled: bool, is_checkpointed: bool
) -> dict:
    """Trains with one setting, and says what it cost."""
    # On an accelerator the rounds whose sections are timed wait for it at each of them: their wall is not that of a run
    modes = [True] if args.device == "cpu" else [True, False]
    recipes = recipes_of(args)
    plan = [
        (recipe, resolution, mode) for resolution, recipe, mode in itertools.product(args.resolutions, recipes, modes)
    ] * (args.repeats + 1)
    optimizer_steps = min(2, args.num_prompts * args.num_generations // batch_size)
    pipeline = build_pipeline(args)
    config = PaCoGRPOConfig(
        output_dir=tempfile.mkdtemp(dir=args.folder),  # a run does not resume another one
        use_cpu=args.device == "cpu",
        bf16=args.torch_dtype == torch.bfloat16,
        # The untrained replay is compared with the rollout, and reported; in bf16 it is not known before
        ratio_tolerance=None if args.torch_dtype == torch.float32 and not is_compiled else float("inf"),
        resolution_scale=1.0,
        num_inference_steps=args.num_inference_steps,
        num_generations=args.num_generations,
        num_prompts_per_generation=args.num_prompts,
        per_device_train_batch_size=batch_size,
        gradient_checkpointing=is_checkpointed,
        optimizer_steps_per_generation=optimizer_steps,
        max_steps=len(plan) * optimizer_steps,
        attention_backend=backend,
        compile_repeated_blocks=is_compiled,
        shuffle_dataset=False,
        log_completions=not args.no_contact_sheets,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    rank = SIZES[args.size].lora_rank
    watch, dataset, loop = Stopwatch(args.device), dataset_of(plan, args.num_prompts), None
    if args.published:
        loop = PublishedLoop(
            args.published, build_pipeline=build_pipeline, args=args, clock=watch.clock, lora_rank=rank,
            batch_size=batch_size, num_prompts=args.num_prompts, num_optimizer_steps=optimizer_steps,
            prompts=dataset["prompt"][:],
        )  # fmt: skip
    trainer = MeasuredTrainer(
        watch,
        plan,
        recipes,
        loop,
        model=pipeline,
        reward_funcs=[redness_reward, panel_similarity_reward],
        args=config,
        train_dataset=dataset,
        peft_config=LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights="gaussian"),
    )
    trainer.train()
    trained = {DEFAULTS: sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)}
    if loop is not None:
        trained[LOOP] = loop.trained_weights
        loop.close()
    encode = statistics.median(trainer.encode_seconds)
    rounds: dict[tuple[int, str], list[Round]] = defaultdict(list)
    for done in trainer.rounds:
        rounds[done.resolution, done.recipe].append(done)
    # Without the first round of each kind, which warms up
    rounds = {key: done[len(modes) if done[0].seconds else 1 :] for key, done in rounds.items()}
    results: dict[str, dict] = {str(resolution): {} for resolution in args.resolutions}
    for (resolution, recipe), done in rounds.items():
        turns = {
            other: time_ratios(done, rounds[resolution, other], encode)
            for other in (COSTS, LOOP, LOOP_STORED)
            if (resolution, other) in rounds
        }
        results[str(resolution)][recipe] = {
            **summary(args, done, trainer.schedule.plan.num_images, encode),
            "time per image / published": {other: round(statistics.median(turns[other]), 3) for other in turns},
            "of each turn": {other: [round(ratio, 3) for ratio in turns[other]] for other in turns},
        }
    on_policy = [
        value
        for entry in trainer.state.log_history
        for name, value in entry.items()
        if name.startswith("ratio_deviation_on_policy")
    ]
    return {
        "batch_size": batch_size,
        "attention_backend": backend or "default",
        "compiled": is_compiled,
        "gradient_checkpointing": is_checkpointed,
        "images in a round": trainer.schedule.plan.num_images,
        "transformer weights": sum(p.numel() for name, p in trainer.model.named_parameters() if "lora_" not in name),
        "trained weights": trained,
        "published commit": loop and loop.commit,
        "seconds to encode a prompt": round(encode, 6),
        "largest mean |ratio - 1| on policy": max(on_policy),
        "resolutions": results,
    }


def summary(args: argparse.Namespace, rounds: list[Round], num_images: int, encode: float) -> dict:
    """Medians over the rounds of a kind, for an image."""
    timed = [done for done in rounds if done.is_synchronized]
    free = [done for done in rounds if not done.is_synchronized] or timed
    first = rounds[0]
    forwards = forwards_by_kind(first.counts, num_images)
    seconds = statistics.median(done.time(encode) for done in free)
    found = {
        "forwards per image": {name: round(count, 4) for name, count in forwards.items()},
        "seconds per image": round(seconds / num_images, 6),
    }
    if not first.seconds:  # of the published loop
        return found
    # Most recipes encode a prompt once in a run, outside these rounds
    apart = encode * first.num_prompts if first.is_encoded_before else 0.0
    encodes = first.num_prompts if first.is_encoded_before else first.counts["encodes"]
    sections = {
        name: statistics.median(done.seconds.get(name, 0.0) for done in timed)
        for name in sorted({name for done in timed for name in done.seconds})
    }
    if apart:
        sections["encoding, once in a run: text encoders"] = apart

    def shares(done: Round) -> dict[str, float]:
        whole = done.time(encode)

        def share(kinds: tuple[str, ...]) -> float:
            return sum(seconds for name, seconds in done.seconds.items() if name.split(": ")[1] in kinds) / whole

        found = {
            "model calls": share(MODEL_CALLS) + apart / whole,
            "optimizer": share(OPTIMIZER),
            "diffusers' pipeline": share(PIPELINE),
        }
        found["paco_trl, TRL and Trainer"] = 1 - sum(found.values())
        return {**found, "outside model calls": 1 - found["model calls"]}

    each = [shares(done) for done in timed]
    rollout = statistics.median(done.rollout for done in free)
    generated = sum(count for name, count in forwards.items() if name.startswith("generated"))
    rollout_flops = first.flops * generated * num_images
    speed = rollout_flops / rollout
    name = torch.cuda.get_device_name() if args.device == "cuda" else ""
    peak = next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)
    return {
        **found,
        "encodes per image": encodes / num_images,
        "rollout images per second": round(num_images / rollout, 4),
        "TFLOP of a forward": round(first.flops / 1e12, 6),
        "TFLOP/s in rollout": round(speed / 1e12, 4),
        "TFLOP/s in its forwards": round(rollout_flops / sections["rollout: transformer"] / 1e12, 4),
        **(
            {"share of the card's peak in rollout": round(speed / peak, 4)}
            if peak is not None and args.torch_dtype == torch.bfloat16
            else {}
        ),
        "shares of time": {name: round(statistics.median(found[name] for found in each), 4) for name in each[0]},
        "seconds of figures in a round": round(statistics.median(done.figures for done in timed), 4),
        "time / wall time": round(statistics.median(done.whole / done.wall for done in free), 3),
        "peak memory, MiB": round(statistics.median(done.memory_peak for done in rounds), 1),
        "above the beginning of the round, MiB": round(
            statistics.median(done.memory_peak - done.memory_before for done in rounds), 1
        ),
        "milliseconds per image by section": {
            name: round(seconds / num_images * 1000, 4) for name, seconds in sections.items()
        },
    }


def time_ratios(rounds: list[Round], others: list[Round], encode: float) -> list[float]:
    """Return the ratios of two recipes in the same turn."""
    pairs = [[done for done in kind if not done.is_synchronized] or kind for kind in (rounds, others)]
    return [one.time(encode) / other.time(encode) for one, other in zip(*pairs, strict=True)]


def machine(args: argparse.Namespace) -> dict:
    """In general words."""
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    return {
        "device": device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "time": "of the processor" if is_processor_time(args.device) else "on the wall",
        "load average at the start": round(os.getloadavg()[0], 1),
        "versions": {
            "python": platform.python_version(),
            **{
                name: importlib.metadata.version(name)
                for name in ("torch", "diffusers", "transformers", "trl", "peft", "accelerate")
            },
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--resolutions", type=int, nargs="+", help="pixels per side; the size's own if left out")
    parser.add_argument("--batch_sizes", type=int, nargs="+", help="images in a micro-batch, one run for each")
    parser.add_argument("--num_generations", type=int)
    parser.add_argument("--num_prompts", type=int, help="prompts in a round")
    parser.add_argument("--num_inference_steps", type=int, default=10)
    parser.add_argument("--tail_steps", type=int, nargs="*", default=[4, 2], help="short tails to measure")
    parser.add_argument(
        "--published", help="clone of https://github.com/X-GenGroup/PaCo-RL, whose loop to run as well"
    )
    parser.add_argument("--compile", choices=["no", "yes"], nargs="+", default=["no"], help="compile_repeated_blocks")
    parser.add_argument(
        "--attention_backends",
        nargs="+",
        default=["default"],
        help="of diffusers: native, _native_cudnn, _flash_3 ...",
    )
    parser.add_argument(
        "--gradient_checkpointing",
        choices=["no", "yes"],
        nargs="+",
        default=["yes"],  # that of TRL's and PaCoGRPOConfig
        help="recomputes a forward in each backward",
    )
    parser.add_argument("--no_contact_sheets", action="store_true", help="as log_completions=False")
    parser.add_argument("--num_layers", type=int, help="another depth than the size's")
    parser.add_argument("--num_single_layers", type=int, help="another depth than the size's")
    parser.add_argument("--num_attention_heads", type=int, help="another width than the size's, 128 a head")
    parser.add_argument("--encoder_layers", type=int, help="another depth of the T5 than the size's")
    parser.add_argument(
        "--repeats", type=int, default=5, help="rounds of each kind, not counting the first, which warms up"
    )
    parser.add_argument("--folder", default="runs/benchmark")
    parser.add_argument("--output", default="benchmarks/speed/grpo_step.json")
    args = parser.parse_args()
    size = SIZES[args.size]
    args.resolutions = args.resolutions or list(size.resolutions)
    args.batch_sizes = args.batch_sizes or [size.batch_size]
    args.num_generations = args.num_generations or size.num_generations
    args.num_prompts = args.num_prompts or size.num_prompts
    report = {
        "setting": {
            name: value for name, value in vars(args).items() if name not in ("folder", "output", "published")
        },
        "machine": machine(args),
    }
    args.torch_dtype = getattr(torch, args.dtype)
    diffusers_logging.set_verbosity_error()  # the published recipe would say in each round which prompts are cut short

    sweep = (args.attention_backends, args.compile, args.gradient_checkpointing, args.batch_sizes)
    runs = []
    for backend, compiled, checkpointed, batch_size in itertools.product(*sweep):
        gc.collect()
        torch.compiler.reset()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        setting = (batch_size, None if backend == "default" else backend, compiled == "yes", checkpointed == "yes")
        try:
            runs.append(measure(args, *setting))
        except torch.cuda.OutOfMemoryError:
            print(f"Out of memory with batch size, attention backend, compiled, checkpointed = {setting}")
            continue
        print(json.dumps(runs[-1], indent=2), flush=True)
        # After each run: what a sweep that breaks off has measured is not lost
        Path(args.output).write_text(json.dumps(report | results_of(args, runs), indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results_of(args, runs)["ratios"], indent=2))


def results_of(args: argparse.Namespace, runs: list[dict]) -> dict:
    """All runs, and the ratios of the one that is fastest with the defaults at the first resolution."""
    best = min(runs, key=lambda run: run["resolutions"][str(args.resolutions[0])][DEFAULTS]["seconds per image"])
    ratios: dict[str, dict] = {"forwards per image": {}}
    for size, recipes in best["resolutions"].items():
        for recipe, found in recipes.items():
            ratios["forwards per image"][recipe] = round(found["forwards per image"]["all"], 2)
            for other, ratio in found["time per image / published"].items():
                if recipe != other and "published" not in recipe.replace(COSTS, ""):
                    ratios.setdefault(f"{size} pixels, time per image / {other}", {})[recipe] = ratio
        for name in ("outside model calls", "paco_trl, TRL and Trainer"):
            share = recipes[DEFAULTS]["shares of time"][name]
            ratios.setdefault(f"share of time {name}, defaults", {})[size] = share
    return {"best run": {name: best[name] for name in SWEPT}, "ratios": ratios, "runs": runs}


if __name__ == "__main__":
    main()
