# SPDX-License-Identifier: Apache-2.0
"""`paco-trl doctor`: what would go wrong in a training run, found out in minutes and without training."""

import asyncio
import functools
import importlib.metadata
import inspect
import logging
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import diffusers
import torch
from datasets import Dataset
from packaging.requirements import Requirement
from peft import PeftModel
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from trl import TrlParser

from .. import PaCoGRPOConfig, PaCoGRPOTrainer
from ..data import check_image_set_columns, load_image_set_prompts, panel_size, split_grid
from ..rollout import RecordedStep, SDESettings, replay
from ..rollout.noise import keyed_generator
from ..trainer.export import save_adapter
from ..trainer.resolution import training_size
from ..trainer.reward_calls import check_reward_functions, check_reward_weights
from .memory import MemoryEstimate, estimate_memory, latent_elements, rollout_buffer_bytes, weights_bytes
from .script_arguments import ScriptArguments, get_peft_config, load_reward


OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
_COLOURS = {OK: "green", WARNING: "yellow", FAILED: "red", SKIPPED: "dim"}

# Standard deviation that the round trip gives to the adapter's B matrices, which are 0 in a new adapter
_ADAPTER_STD = 0.02
# How far two ways of loading an adapter may be apart, as a part of what the adapter changes. A wrong `lora_alpha`
# changes the adapter by a factor, so by about 1 on this scale.
_ROUND_TRIP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
# How far the noise-free images may be apart, as a part of the largest number in the latent. In bf16 the pipeline's own
# scheduler rounds the latent after each step, half a unit in the last place (2^-9), and the model makes more of it.
_NOISE_FREE_TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 5e-2}
# Part of the device's memory from which on activations hardly fit beside what is estimated
_MEMORY_LIMIT = 0.9

_PACKAGE = "paco_trl"
_VERSIONS = ("trl", "transformers", "diffusers", "peft", "accelerate", "datasets", "torch", "deepspeed")


@dataclass
class Row:
    """
    What a check found.

    Attributes:
        check (`str`):
            Name of the check.
        verdict (`str`):
            `"ok"`, `"warning"`, `"failed"` or `"skipped"`.
        finding (`str`):
            What was found, with its numbers.
        advice (`str`):
            What to do about it; empty if nothing is to be done.
    """

    check: str
    verdict: str
    finding: str
    advice: str = ""


@dataclass
class Patient:
    """
    What is examined, as far as it is known: each check adds what later ones need.

    Attributes:
        parse (`Callable`):
            Makes the arguments, or raises what is wrong with them.
        output_dir (`str`):
            Temporary folder that stands in for the run's output folder.
    """

    parse: Callable[[], tuple[ScriptArguments, PaCoGRPOConfig]]
    output_dir: str
    script_args: ScriptArguments | None = None
    args: PaCoGRPOConfig | None = None
    train_dataset: Dataset | None = None
    eval_dataset: Dataset | None = None
    reward_funcs: list[Callable] | None = None
    rewards: dict[str, Callable] = field(default_factory=dict)
    trainer: PaCoGRPOTrainer | None = None
    studio: "Studio | None" = None
    images: list[Image.Image] = field(default_factory=list)


class Drawing(NamedTuple):
    """Images of one prompt, their last latents (B, ...), and the recorded stochastic steps."""

    images: list[Image.Image]
    latents: torch.Tensor
    records: list[RecordedStep]


class Studio:
    """
    The trainer, ready to draw one of its prompts as in training.

    The prompt is the first one of the smallest training size.

    Args:
        trainer ([`PaCoGRPOTrainer`]):
            Trainer, before training.
    """

    def __init__(self, trainer: PaCoGRPOTrainer):
        self.trainer, self.args, self.pipeline = trainer, trainer.args, trainer.pipeline
        dataset = trainer.train_dataset
        columns = [name for name in ("rows", "cols", "height", "width") if name in dataset.column_names]
        sizes = [self._training_size(row) for row in dataset.select_columns(columns)]
        self.sizes = Counter(sizes)
        self.height, self.width = min(self.sizes, key=math.prod)
        self.row = dataset[sizes.index((self.height, self.width))]

    def _training_size(self, row: dict) -> tuple[int, int]:
        return training_size(
            row.get("height") or self.args.height,
            row.get("width") or self.args.width,
            row["rows"],
            row["cols"],
            self.args.resolution_scale,
            self.trainer.size_multiple,
        )

    def prepare(self) -> None:
        """Wraps the model as training does: train mode, checkpointing, autocast, DDP."""
        self.trainer.model.train()
        if self.args.activation_checkpointing:
            self.trainer.model.activation_checkpointing_enable()
        self.model = self.trainer.accelerator.prepare_model(self.trainer.model)

    def encode(self) -> dict[str, torch.Tensor]:
        """Encodes the prompt, the first time; returns its embeddings, batch dimension 1."""
        self.trainer.prompt_encoder.encode([self.row["prompt"]])
        return self.trainer.prompt_encoder.fetch([self.row["prompt"]])[self.row["prompt"]]

    def draw(self, count: int = 1, sde: SDESettings | None = None) -> Drawing:
        """Draws images of the prompt with the policy."""

        def with_policy(prompt_arguments: dict, noise_keys: list) -> tuple[list[Image.Image], list[RecordedStep]]:
            return self.trainer.policy.draw(
                prompt_arguments,
                self.height,
                self.width,
                self.args.num_inference_steps,
                self.args.guidance_scale,
                noise_keys,
                sde,
            )

        return self._draw(count, with_policy)

    def draw_untouched(self) -> Drawing:
        """Draws the prompt with the pipeline as it was loaded: its own scheduler, the adapter switched off."""
        _, class_name = self.pipeline.config["scheduler"]
        where = {
            name: value
            for name, value in (self.args.model_init_kwargs or {}).items()
            if name in ("revision", "cache_dir", "token")
        }
        own = getattr(diffusers, class_name).from_pretrained(
            self.pipeline.name_or_path, subfolder="scheduler", **where
        )

        def with_own_scheduler(prompt_arguments: dict, noise_keys: list) -> tuple[list[Image.Image], list]:
            images = self.pipeline(
                **prompt_arguments,
                height=self.height,
                width=self.width,
                num_inference_steps=self.args.num_inference_steps,
                generator=[keyed_generator(*key, 0) for key in noise_keys],
                **self.trainer.family.call_arguments(self.args.guidance_scale),
            ).images
            return images, []

        with self._component("scheduler", own), self.trainer.model.disable_adapter():
            return self._draw(1, with_own_scheduler)

    def draw_with(self, transformer: nn.Module) -> Drawing:
        """Draws the prompt with another transformer."""
        with self._component("transformer", transformer):
            return self.draw()

    def sde_settings(self, noise_level: float) -> SDESettings:
        """All steps that may be stochastic in a round."""
        return SDESettings(tuple(sorted(self.args.sde_steps)), noise_level, self.args.sde_type)

    def replay(self, record: RecordedStep) -> torch.Tensor:
        """Log-probability of a recorded step, with gradient, as in the training step."""
        sde = self.sde_settings(self.args.noise_level)
        with self.trainer.compute_loss_context_manager():
            log_prob, _, _ = replay(self.model, record, self.trainer.family, self.args.guidance_scale, sde)
        return log_prob  # (B,)

    def _draw(self, count: int, call: Callable) -> Drawing:
        # The same noise in every drawing; generations beyond the first are further images of the group
        noise_keys = [(self.args.seed, generation) for generation in range(count)]
        # Float32, which makes the pipeline keep its latents in float32, as in training
        prompt_arguments = {
            name: tensor.to(
                self.trainer.accelerator.device, torch.float32 if tensor.is_floating_point() else None
            ).expand(count, *tensor.shape[1:])
            for name, tensor in self.encode().items()
        }  # (B, ...)
        # The one thing that is not public: the VAE on the device, and the autocast of training
        with self.trainer._rollout_components(), _last_sample(self.pipeline.scheduler) as samples:
            images, records = call(prompt_arguments, noise_keys)
        return Drawing(images, samples[0].float(), records)

    @contextmanager
    def _component(self, name: str, component) -> Iterator[None]:
        # Past DiffusionPipeline.__setattr__, as the policy does it
        replaced = getattr(self.pipeline, name)
        object.__setattr__(self.pipeline, name, component)
        try:
            yield
        finally:
            object.__setattr__(self.pipeline, name, replaced)


@contextmanager
def _last_sample(scheduler) -> Iterator[list[torch.Tensor]]:
    """Keeps what the last step of the scheduler returned: a picture has 8 bits a channel, which hide differences."""
    samples = []
    step = scheduler.step

    @functools.wraps(step)  # pipelines look for options in its signature
    def keeping(*args, **kwargs):
        output = step(*args, **kwargs)
        samples[:] = [output[0]]
        return output

    scheduler.step = keeping
    try:
        yield samples
    finally:
        del scheduler.step


# ---- Checks ----


def check_versions(patient: Patient) -> Row:
    """Versions of the packages against the lower bounds of this one, and what the device can do."""
    versions = {}
    for name in (_PACKAGE, *_VERSIONS):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        bf16 = "with" if torch.cuda.is_bf16_supported() else "without"
        device = f"{torch.cuda.device_count()} x {properties.name}, {bf16} bf16"
    else:
        device = "no CUDA device"
    finding = f"{', '.join(f'{name} {version}' for name, version in versions.items())}; {device}"

    try:
        requirements = map(Requirement, importlib.metadata.requires(_PACKAGE) or [])
    except importlib.metadata.PackageNotFoundError:
        return Row("", WARNING, finding, f"{_PACKAGE} is not installed, so its requirements are unknown: install it.")
    unmet = {}
    for requirement in requirements:
        is_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if is_extra and requirement.name not in _VERSIONS:
            continue  # tools for development
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            if not is_extra:
                unmet[requirement.name] = f"{requirement.name} is missing, needed is {requirement.specifier}"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet[requirement.name] = f"{requirement.name} is {version}, needed is {requirement.specifier}"
    if unmet:
        return Row(
            "",
            WARNING,
            f"{'; '.join(unmet.values())}. ({finding})",
            f"Install them: `pip install -U {' '.join(unmet)}`.",
        )
    return Row("", OK, finding)


def check_configuration(patient: Patient) -> Row:
    """The settings, and how a round divides."""
    with _warnings_of(_PACKAGE) as warned:
        patient.script_args, args = patient.parse()
    # Nothing of the examination is left behind, here or on the Hub
    args.output_dir, args.push_to_hub = patient.output_dir, False
    layout = args.round_layout
    finding = layout.describe()
    if args.num_iterations > 1:
        steps = layout.num_optimizer_steps * args.num_iterations
        finding += f" With `num_iterations` = {args.num_iterations}: {steps} optimizer steps a round."
    patient.args = args
    if warned:
        return Row("", WARNING, finding, " ".join(warned))
    return Row("", OK, finding)


def check_data(patient: Patient) -> Row:
    """The prompts, their sizes, and whether there are enough of them."""
    script_args, args = patient.script_args, patient.args
    if script_args.dataset_name is None:
        raise ValueError("`--dataset_name` is missing: a Hub id, a folder or a JSON-lines file of image-set prompts.")
    dataset = load_image_set_prompts(script_args.dataset_name, script_args.dataset_split)
    findings = [_examine_prompts(dataset, args, "the dataset")]
    if script_args.eval_split is not None:
        patient.eval_dataset = load_image_set_prompts(script_args.dataset_name, script_args.eval_split)
        findings.append("Evaluation: " + _examine_prompts(patient.eval_dataset, args, "the evaluation dataset"))

    layout = args.round_layout
    rounds = len(dataset) // layout.num_prompts
    if rounds == 0:
        # The checks that follow draw a single prompt: they can be made all the same
        repeated = [index % len(dataset) for index in range(layout.num_prompts)]
        patient.train_dataset = dataset.select(repeated)
        return Row(
            "",
            FAILED,
            f"{findings[0]} A round takes {layout.num_prompts} different prompts.",
            f"Set `num_prompts_per_generation` to at most {len(dataset)}, or add prompts.",
        )
    patient.train_dataset = dataset
    steps_per_round = layout.num_optimizer_steps * args.num_iterations
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * rounds * steps_per_round)
    findings.append(
        f"{rounds} round(s) of {layout.num_prompts} in an epoch; the run: {steps} optimizer steps, "
        f"{steps / steps_per_round:g} round(s)."
    )
    repeated = Counter(dataset["prompt"])
    surplus = len(dataset) - len(repeated)
    if surplus:
        prompt, count = repeated.most_common(1)[0]
        findings.append(f"{surplus} row(s) repeat a prompt; {prompt[:40]!r}... is there {count} times.")
        return Row(
            "", WARNING, " ".join(findings), "They are drawn more often than the others: take them out if not meant."
        )
    return Row("", OK, " ".join(findings))


def _examine_prompts(dataset: Dataset, args: PaCoGRPOConfig, where: str) -> str:
    check_image_set_columns(dataset)
    if len(dataset) == 0:
        raise ValueError(f"{where[0].upper()}{where[1:]} has no rows.")
    layouts, sizes = Counter(), Counter()
    columns = [name for name in ("rows", "cols", "height", "width") if name in dataset.column_names]
    for index, row in enumerate(dataset.select_columns(columns)):
        height, width = row.get("height") or args.height, row.get("width") or args.width
        try:
            panel_size(height, width, row["rows"], row["cols"])
        except ValueError as error:
            raise ValueError(f"Row {index} of {where}: {error}") from error
        layouts[row["rows"], row["cols"]] += 1
        sizes[height, width] += 1
    return (
        f"{len(dataset)} prompts (columns: {', '.join(dataset.column_names)}); panels {_listed(layouts, with_counts=True)}; sizes "
        f"{_listed(sizes, with_counts=True)}, drawn in training at {args.resolution_scale:g} of it."
    )


def check_rewards_load(patient: Patient) -> Row:
    """The rewards and their weights, before a model is loaded."""
    script_args, args = patient.script_args, patient.args
    functions = [load_reward(name, script_args) for name in script_args.rewards]
    checked, names = check_reward_functions(functions)
    weights = check_reward_weights(args.reward_weights, names, args.multi_objective_aggregation)
    patient.reward_funcs, patient.rewards = functions, dict(zip(names, checked, strict=True))
    described = [f"{name} (weight {weight:g})" for name, weight in zip(names, weights.tolist(), strict=True)]
    return Row("", OK, f"{', '.join(described)}; {args.multi_objective_aggregation}.")


def check_model(patient: Patient) -> Row:
    """The model loads, its adapter fits, and every named layer is there."""
    args, script_args = patient.args, patient.script_args
    reward_funcs = patient.reward_funcs
    if reward_funcs is None:
        # That row has failed; the model can be examined without
        reward_funcs, args.reward_weights = [_no_reward], None
    peft_config = get_peft_config(script_args)
    trainer = PaCoGRPOTrainer(
        model=script_args.model_name_or_path,
        reward_funcs=reward_funcs,
        args=args,
        train_dataset=patient.train_dataset,
        eval_dataset=patient.eval_dataset,
        peft_config=peft_config,
    )
    studio = Studio(trainer)
    if args.deepspeed_plugin is None:
        studio.prepare()
    patient.trainer = trainer
    adapter = trainer.model.peft_config[trainer.model.active_adapter]
    layers = trainer.model.base_model.targeted_module_names
    num_trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    num_frozen = sum(p.numel() for p in trainer.model.parameters() if not p.requires_grad)
    finding = (
        f"{type(trainer.pipeline).__name__} ({type(trainer.family).__name__}) on {trainer.accelerator.device}, "
        f"{trainer.compute_dtype}; LoRA r = {adapter.r}, alpha = {adapter.lora_alpha} on {len(layers)} layers: "
        f"{num_trainable:,} parameters trained, {num_frozen:,} frozen. Trained at {_listed(studio.sizes)} "
        f"(multiples of {trainer.size_multiple} pixels)."
    )
    patient.studio = studio
    missing = [
        target
        for target in sorted(adapter.target_modules)
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers)
    ]
    if missing:
        return Row(
            "",
            FAILED,
            f"No layer of the transformer is named {', '.join(missing)}. {finding}",
            "Correct `lora_target_modules`, or leave it out for the family's default: "
            f"{', '.join(trainer.family.lora_target_modules)}.",
        )
    return Row("", OK, finding)


def _no_reward(prompts: list[str], completions: list[Image.Image], **kwargs) -> list[None]:
    """Stands in for rewards that could not be loaded."""
    return [None] * len(completions)


def check_memory(patient: Patient) -> Row:
    """Memory that a process needs, by arithmetic, against what its device has."""
    trainer, args, layout = patient.trainer, patient.args, patient.args.round_layout
    pipeline = trainer.pipeline
    embeddings = patient.studio.encode()
    images = layout.micro_batches_per_process * layout.batch_size
    # A prompt's embeddings are shared by its images, unless micro-batches cross prompts; or they wait in CPU memory
    crosses_prompts = layout.num_generations % layout.batch_size != 0
    num_embeddings = images if crosses_prompts else min(layout.num_prompts, layout.micro_batches_per_process)
    buffer = rollout_buffer_bytes(
        images,
        layout.num_trained_steps,
        max(
            latent_elements(*size, pipeline.vae_scale_factor, pipeline.vae.config.latent_channels)
            for size in patient.studio.sizes
        ),
        0 if getattr(args, "offload_embeddings", False) else num_embeddings,
        sum(tensor.numel() for tensor in embeddings.values()),
        latents_per_step=3 if args.loss_type == "grpo_guard" else 2,
    )
    zero_stage = args.deepspeed_plugin.zero_stage if args.deepspeed_plugin is not None else None
    encoders = {name: weights_bytes(getattr(pipeline, name)) for name in trainer.family.text_encoders}
    estimate = estimate_memory(
        weights_bytes(trainer.model, trainable=False),
        sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        sum(encoders.values()),
        weights_bytes(pipeline.vae),
        buffer,
        layout.num_processes,
        zero_stage,
        next(p.element_size() for p in trainer.model.parameters() if p.requires_grad),
        args.ds3_gather_for_generation,
        has_ema=getattr(args, "ema_decay", None) is not None and not args.ema_offload,
    )
    lines = [
        f"{_size(estimate.peak)} on the device of each process, without activations and the models of rewards:",
        f"training {_size(estimate.training)}: transformer {_size(estimate.transformer)}, adapter "
        f"{_size(estimate.adapter)}, gradients {_size(estimate.gradients)}, AdamW {_size(estimate.optimizer)}"
        + (f", average {_size(estimate.ema)}" if estimate.ema else "")
        + f", round {_size(estimate.buffer)}",
        f"drawing {_size(estimate.drawing)}: without gradients, with the VAE {_size(estimate.vae)}"
        + (f", gathered weights {_size(estimate.gathered)}" if estimate.gathered else ""),
        f"encoding {_size(estimate.encoding)}: without gradients, with "
        + ", ".join(f"{name} {_size(size)}" for name, size in encoders.items()),
    ]
    device = trainer.accelerator.device
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    lines.append("No CUDA device to compare with." if total is None else f"The device has {_size(total)}.")
    verdict, advice = _fits(estimate, total)
    return Row("", verdict, "\n".join(lines), advice)


def _fits(estimate: MemoryEstimate, total: int | None) -> tuple[str, str]:
    """Verdict and advice for a device with so many bytes."""
    remedy = (
        "Use DeepSpeed ZeRO-3 on several GPUs (`examples/accelerate_configs/zero3.yaml`), a smaller `lora_r`, or fewer "
        "images a round."
    )
    if total is None:
        return OK, ""
    # In the encoding of the first round there are no averages yet, so that phase alone is not certain to fail
    if max(estimate.training, estimate.drawing) > total:
        return FAILED, f"It does not fit, even without activations. {remedy}"
    if estimate.peak > _MEMORY_LIMIT * total:
        return WARNING, f"Little is left for activations. {remedy}"
    return OK, ""


def check_noise_free(patient: Patient) -> Row:
    """Without noise the policy draws what the pipeline itself draws."""
    studio, trainer = patient.studio, patient.trainer
    untouched = studio.draw_untouched()
    policy = studio.draw(sde=studio.sde_settings(noise_level=0.0))
    patient.images.extend(policy.images)
    difference = (policy.latents - untouched.latents).abs().max().item()
    scale = untouched.latents.abs().max().item()
    tolerance = _NOISE_FREE_TOLERANCE[trainer.compute_dtype]
    finding = (
        f"{studio.height} x {studio.width} pixels, {patient.args.num_inference_steps} steps: the last latents of the "
        f"untouched pipeline and of the policy at noise level 0 differ by {difference:.3g} (largest number {scale:.3g}, "
        f"accepted {tolerance * scale:.3g})."
    )
    # `not <=` instead of `>`: it finds NaN as well
    if not difference <= tolerance * scale:
        return Row(
            "",
            FAILED,
            finding,
            "Images are not drawn as the pipeline draws them. Look for a changed scheduler, or an adapter that is not "
            "the identity when it is new.",
        )
    return Row("", OK, finding)


def check_ratio(patient: Patient) -> Row:
    """The replay gives the log-probabilities of the rollout, and a gradient."""
    studio, trainer, args = patient.studio, patient.trainer, patient.args
    device = trainer.accelerator.device
    drawing = studio.draw(args.per_device_train_batch_size, studio.sde_settings(args.noise_level))
    patient.images.extend(drawing.images)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    deviations = {}
    for record in drawing.records:
        log_prob = studio.replay(record)
        deviations[record.index] = (torch.exp(log_prob.detach() - record.log_prob) - 1).abs().max().item()
        log_prob.mean().backward()
    gradients = [p.grad.abs().max().item() for p in trainer.model.parameters() if p.grad is not None]
    trainer.model.zero_grad(set_to_none=True)
    worst = max(deviations.values(), key=lambda value: math.inf if math.isnan(value) else value)
    steps = ", ".join(f"step {index}: {value:.3g}" for index, value in deviations.items())
    finding = (
        f"{args.per_device_train_batch_size} image(s), max |ratio - 1| before the first update {worst:.3g} ({steps}); "
        f"`ratio_tolerance` is {args.ratio_tolerance:.3g}."
    )
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        finding += f" Forward and backward took {_size(peak)} on the device, without AdamW's states."
    if not worst <= args.ratio_tolerance:
        return Row(
            "",
            FAILED,
            finding,
            "The model draws with other numbers than it is trained with: look for dropout, for layers that behave "
            "differently with gradients, for a compiled replay. In bf16 a deviation below `epsilon` "
            f"({args.epsilon:g}) can be rounding: then set `ratio_tolerance` above it.",
        )
    if not any(gradients):
        return Row(
            "", FAILED, f"{finding} The adapter gets no gradient.", "Look at what cuts the graph in the transformer."
        )
    return Row("", OK, finding)


def check_round_trip(patient: Patient) -> Row:
    """A saved adapter draws the same image again, loaded as PEFT adapter and as diffusers LoRA."""
    studio, trainer = patient.studio, patient.trainer
    model, pipeline = trainer.model, trainer.pipeline
    generator = torch.Generator().manual_seed(patient.args.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator) * _ADAPTER_STD
                parameter.copy_(noise.to(parameter.device, parameter.dtype))
    with model.disable_adapter():
        base = studio.draw()
    drawn = studio.draw()
    effect = (drawn.latents - base.latents).abs().max().item()

    # The same weights serve all three ways, as a second copy of a large model may not fit: the adapter's layers are
    # taken out of the transformer, and read back in from the files
    differences = {}
    with tempfile.TemporaryDirectory() as folder:
        trained = {name: p.detach().to("cpu", copy=True) for name, p in model.named_parameters() if p.requires_grad}
        save_adapter(model, pipeline, trained, folder)
        transformer = model.unload()
        loaded = PeftModel.from_pretrained(transformer, folder)
        with_peft = studio.draw_with(loaded)
        transformer = loaded.unload()
        object.__setattr__(pipeline, "transformer", transformer)  # `load_lora_weights` changes it in place
        pipeline.load_lora_weights(folder)
        with_diffusers = studio.draw()
    for name, other in (("PeftModel.from_pretrained", with_peft), ("pipe.load_lora_weights", with_diffusers)):
        differences[name] = (other.latents - drawn.latents).abs().max().item()
    tolerance = _ROUND_TRIP_TOLERANCE[trainer.compute_dtype]
    finding = (
        f"Random weights in the adapter change the last latents by {effect:.3g}. Saved and loaded again they differ by "
        + " and ".join(f"{value:.3g} with `{name}`" for name, value in differences.items())
        + f" (accepted {tolerance * effect:.3g})."
    )
    if not (math.isfinite(effect) and effect > 0):
        return Row("", FAILED, finding, "The adapter has no effect on the image: look at `lora_target_modules`.")
    if not all(value <= tolerance * effect for value in differences.values()):
        return Row(
            "",
            FAILED,
            finding,
            "The saved files do not hold the adapter that was trained: checkpoints of this run would draw something "
            "else. Check the versions of peft and diffusers (first row), and that `lora_alpha` is in the files.",
        )
    return Row("", OK, finding)


def check_reward_values(patient: Patient) -> list[Row]:
    """Each reward on the images that were drawn."""
    row, images = patient.studio.row, patient.images
    # As in training: the columns of the dataset, the panels, and TRL's hooks
    arguments = {name: [value] * len(images) for name, value in row.items() if name != "prompt"}
    arguments |= {
        "prompts": [row["prompt"]] * len(images),
        "completions": images,
        "completion_ids": None,
        "panel_images": [split_grid(image, row["rows"], row["cols"]) for image in images],
        "trainer_state": patient.trainer.state,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    rows = []
    for name, function in patient.rewards.items():
        title = f"reward {name}"
        try:
            values = function(**arguments)
            if inspect.isawaitable(values):
                values = asyncio.run(_awaited(values))
        except Exception as error:
            rows.append(Row(title, FAILED, _message(error), "Correct the reward: in training this stops the run."))
            continue
        scored = [value for value in values if value is not None]
        shown = ", ".join("None" if value is None else f"{value:.4g}" for value in values)
        finding = f"{len(images)} images of one prompt: {shown}; {len(values) - len(scored)} None."
        if not scored:
            rows.append(Row(title, FAILED, finding, "No image could be scored: look at why the reward returns None."))
        elif len(scored) > 1 and len(set(scored)) == 1:
            advice = (
                "A group whose values are all equal teaches nothing. If it is like that for most prompts, use a finer "
                "reward or another prompt; watch `frac_reward_zero_std`."
            )
            rows.append(Row(title, WARNING, finding, advice))
        elif len(scored) < len(values):
            rows.append(Row(title, WARNING, finding, "Images that get None are left out: look at why."))
        else:
            rows.append(Row(title, OK, finding))
    return rows


async def _awaited(values: Awaitable) -> list[float | None]:
    return await values


class Check(NamedTuple):
    """A check: its name, its function, and the attributes of [`Patient`] that it needs."""

    name: str
    examine: Callable[[Patient], Row | list[Row]]
    needs: tuple[str, ...] = ()


CHECKS = (
    Check("versions", check_versions),
    Check("configuration", check_configuration),
    Check("data", check_data, ("args",)),
    Check("rewards", check_rewards_load, ("args",)),
    Check("model and adapter", check_model, ("args", "train_dataset")),
    Check("memory", check_memory, ("studio",)),
    Check("noise-free image", check_noise_free, ("studio",)),
    Check("ratio", check_ratio, ("studio",)),
    Check("adapter files", check_round_trip, ("studio",)),
    Check("reward values", check_reward_values, ("studio", "images", "rewards")),
)
# The check that an attribute comes from
_FOUND_BY = {
    "args": "configuration",
    "train_dataset": "data",
    "rewards": "rewards",
    "studio": "model and adapter",
    "images": "noise-free image",
}
# These draw, and DeepSpeed places the model on its device only when training begins
_DRAWING = (check_noise_free, check_ratio, check_round_trip, check_reward_values)


def examine(arguments: list[str], console: Console) -> list[Row]:
    """
    Makes all checks that can be made.

    Args:
        arguments (`list[str]`):
            Options, as on the command line.
        console ([`~rich.console.Console`]):
            Where progress is shown.

    Returns:
        `list[Row]`.
    """
    rows = []
    with tempfile.TemporaryDirectory() as output_dir:
        patient = Patient(lambda: _parser().parse_args_and_config(arguments), output_dir)
        for number, check in enumerate(CHECKS, start=1):
            console.print(f"\\[{number}/{len(CHECKS)}] {check.name} ...", highlight=False)
            started = time.perf_counter()
            found = _make(check, patient)
            for row in found:
                row.check = row.check or check.name
                seconds = time.perf_counter() - started
                console.print(f"      {row.check}: {_coloured(row.verdict)}, {seconds:.1f} s", highlight=False)
            rows.extend(found)
        if patient.trainer is not None:
            patient.trainer.accelerator.end_training()
    return rows


def _make(check: Check, patient: Patient) -> list[Row]:
    missing = [name for name in check.needs if not getattr(patient, name)]
    if missing:
        return [Row("", SKIPPED, f"needs: {', '.join(_FOUND_BY[name] for name in missing)}")]
    if check.examine in _DRAWING and patient.args.deepspeed_plugin is not None:
        finding = "DeepSpeed places the model on its device only when training begins."
        return [Row("", SKIPPED, finding, "Run the doctor without it, on one GPU, to make this check.")]
    try:
        found = check.examine(patient)
    except Exception as error:
        return [Row("", FAILED, _message(error))]
    return found if isinstance(found, list) else [found]


def _parser() -> TrlParser:
    return TrlParser(
        (ScriptArguments, PaCoGRPOConfig),
        prog="paco-trl doctor",
        description="Checks a model, a dataset and settings without training. Takes the arguments of "
        "examples/train_flux.py.",
    )


@contextmanager
def _warnings_of(name: str) -> Iterator[list[str]]:
    """Collects what a logger warns of, instead of showing it."""
    messages = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logging.getLogger(name).addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger(name).removeHandler(handler)


def _message(error: Exception) -> str:
    # The package's own errors say all themselves; of others the kind is worth knowing
    text = str(error) or "no message"
    return text if isinstance(error, ValueError | TypeError | RuntimeError) else f"{type(error).__name__}: {text}"


def _listed(counter: Counter, with_counts: bool = False) -> str:
    """`Counter({(2, 2): 12})` as "2 x 2 (12)", the most frequent first."""
    shown = [f"{a} x {b}" + f" ({count})" * with_counts for (a, b), count in counter.most_common(4)]
    return ", ".join(shown) + (f" and {len(counter) - 4} more" if len(counter) > 4 else "")


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def _coloured(verdict: str) -> str:
    return f"[{_COLOURS[verdict]}]{verdict}[/]"


def report(rows: list[Row]) -> Table:
    """
    The table of what was found.

    Args:
        rows (`list[Row]`):
            From [`examine`].

    Returns:
        [`~rich.table.Table`].
    """
    table = Table(title="paco-trl doctor", show_lines=True)
    table.add_column("check", max_width=16, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("finding, and what to do", overflow="fold")
    for row in rows:
        text = escape(row.finding) + (f"\n[bold]->[/] {escape(row.advice)}" if row.advice else "")
        table.add_row(escape(row.check), _coloured(row.verdict), text)
    return table


def main(arguments: list[str]) -> int:
    """
    Runs the command.

    Args:
        arguments (`list[str]`):
            Options of the command.

    Returns:
        `int`: 0 when no check failed, else 1.
    """
    if {"--help", "-h"} & set(arguments):
        _parser().print_help()
        return 0
    # Under `accelerate launch` every process makes the checks, and one of them speaks
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    rows = examine(arguments, console)
    console.print(report(rows))
    verdicts = Counter(row.verdict for row in rows)
    console.print(", ".join(f"{verdicts[name]} {_coloured(name)}" for name in _COLOURS if verdicts[name]))
    return 1 if verdicts[FAILED] else 0
