# SPDX-License-Identifier: Apache-2.0
"""`paco-trl doctor`: checks of a training run, in minutes and without training."""

import asyncio
import functools
import importlib.metadata
import inspect
import logging
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils.modeling import convert_file_size_to_int
from datasets import Dataset
from huggingface_hub import HfApi
from packaging.requirements import Requirement
from peft import PeftModel
from PIL import Image
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from torch import nn
from transformers.trainer_utils import IntervalStrategy

from .. import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoNFTConfig
from ..checkpointing.checkpoints import checkpoints_of, find_checkpoint
from ..checkpointing.export import save_adapter, save_transformer
from ..checkpointing.weights import gather_weights, load_weights, trained_parameters
from ..data import split_grid
from ..data.texts import describe_repeated
from ..hub.account import check_base_model, check_repository
from ..hub.files import PIPELINE_ADAPTER, TRANSFORMER
from ..rewards.runner import RewardRunner
from ..rollout.loading import load_lora
from ..rollout.policy import split_record
from ..rollout.prompt_rows import PromptRows
from ..trainer.rounds import RoundSchedule
from . import reward
from .env import VERSIONS, version_of
from .grpo import parser_of
from .memory import (
    USABLE,
    ImagePlan,
    JudgePlan,
    Phase,
    format_size,
    image_plan,
    judge_plan,
    largest_batch,
    peak,
    smallest_change,
)
from .options import option
from .parser import CommandParser
from .sample_generator import Generation, SampleGenerator
from .script_arguments import (
    ScriptArguments,
    check_evaluation,
    check_reward_names,
    get_peft_config,
    load_eval_prompts,
    load_eval_rewards,
    load_rewards,
    load_train_prompts,
)


# Standard deviation of the adapter's B matrices in the round trip; they are 0 in a new adapter
_ADAPTER_STD = 0.02
# Noise that the round trip adds to trained weights, as a fraction of each one's root mean square
_WEIGHT_NOISE = 0.02
# Largest difference between two ways of loading an adapter, as a fraction of the adapter's effect. A wrong `lora_alpha`
# changes the adapter by a factor, so by about 1 on this scale.
_ROUND_TRIP_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
# Largest difference of the noise-free images, as a fraction of the largest number in the latent. In bf16 the pipeline's
# own scheduler rounds the latent after each step, by half a unit in the last place (2^-9), which the model amplifies.
_NOISE_FREE_TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 5e-2}

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
_COLORS = {OK: "green", WARNING: "yellow", FAILED: "red", SKIPPED: "dim"}
_PACKAGE = "paco_trl"
_MISSING: Any = None  # what no check has found yet


@dataclass
class Row:
    """Finding of a check, and what to do about it."""

    verdict: str
    finding: str
    advice: str = ""
    check: str = ""
    table: Table | None = None


@dataclass
class PlanArguments:
    """What the memory is planned for."""

    device_memory: str | None = option(
        None,
        "Memory of the card to plan for, such as 24GiB; no weights are loaded. If `None`, that of this machine's.",
    )

    def memory_of(self, args: Any) -> int | None:
        """Return the memory of the card."""
        if self.device_memory is not None:
            return parse_memory(self.device_memory)
        if torch.cuda.is_available() and not args.use_cpu:
            return torch.cuda.get_device_properties(args.device).total_memory
        return None


def parse_memory(text: str) -> int:
    """Read a size such as "24GiB"."""
    try:
        size = convert_file_size_to_int(text.strip().upper())  # a lower-case b would be bits
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ValueError(f"`--device_memory` is {text!r}; it must be a number with a unit, such as 24GiB or 80GB.")
    return size


@dataclass
class DoctorState:
    """State of the checks: each adds what later ones need."""

    parse: Callable[..., tuple[Any, Any, PlanArguments]]  # takes further options
    temporary_dir: str  # stands in for the output directory of the run
    # Of the run; `args` has other values, so that the doctor leaves nothing behind
    push_to_hub: bool = False
    lacks_gpu: bool = False
    output_dir: str = _MISSING
    resume_from_checkpoint: str | bool | None = None
    script_args: ScriptArguments = _MISSING
    args: PaCoGRPOConfig = _MISSING
    plan_args: PlanArguments = _MISSING
    train_dataset: Dataset | None = None
    eval_dataset: Dataset | None = None
    reward_funcs: list[Callable] | None = None
    eval_reward_funcs: list[Callable] | None = None
    rewards: dict[str, tuple[RewardRunner, int]] = field(default_factory=dict)
    trainer: PaCoGRPOTrainer = _MISSING
    generator: SampleGenerator = _MISSING
    images: list[Image.Image] = field(default_factory=list)


# ---- Checks ----


def check_versions(state: DoctorState) -> Row:
    """Compare installed versions with the package's lower bounds, and describe the device."""
    device = "no CUDA device"
    if torch.cuda.is_available():
        bf16 = "with" if torch.cuda.is_bf16_supported() else "without"
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_properties(0).name}, {bf16} bf16"
    versions = {name: version_of(name) for name in (_PACKAGE, *VERSIONS)}
    finding = f"{', '.join(f'{name} {version}' for name, version in versions.items() if version)}; {device}"
    if versions[_PACKAGE] is None:
        return Row(WARNING, finding, f"{_PACKAGE} is not installed, so its requirements are unknown: install it.")
    unmet = {}
    for requirement in map(Requirement, importlib.metadata.requires(_PACKAGE) or []):
        name, version = requirement.name, version_of(requirement.name)
        is_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        if is_extra and (name not in VERSIONS or version is None):
            continue  # tools for development, or not used
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet[name] = f"{name} is {version or 'missing'}, needed is {requirement.specifier}"
    if not unmet:
        return Row(OK, finding)
    advice = f"Install them: `pip install -U {' '.join(unmet)}`."
    return Row(WARNING, f"{'; '.join(unmet.values())}. ({finding})", advice)


def read_options(state: DoctorState) -> tuple[Any, str, list[Row]]:
    """Parse the options; where only a GPU is missing, as for one, with a row that says so."""
    try:
        return *_with_warnings(state.parse), []
    except ValueError as error:
        if torch.accelerator.is_available():
            raise
        parsed, warned = _with_warnings(lambda: state.parse("--use_cpu", "True"))
        state.lacks_gpu = True
        if parsed[2].device_memory is not None:
            return parsed, warned, []
        advice = "On this machine the run stops with this message. All checks that need no GPU are made; `--use_cpu` makes the "
        return parsed, warned, [Row(WARNING, str(error), f"{advice}others as well, on the CPU.", "precision")]


def check_configuration(state: DoctorState) -> list[Row]:
    """Check the settings, and how a round divides."""
    (state.script_args, args, state.plan_args), warned, rows = read_options(state)
    state.output_dir, state.resume_from_checkpoint = args.output_dir, args.resume_from_checkpoint
    state.push_to_hub = args.push_to_hub
    args.output_dir, args.push_to_hub, args.resume_from_checkpoint = state.temporary_dir, False, None
    if args.embeddings_dir is not None:
        args.embeddings_dir = str(Path(state.temporary_dir) / "embeddings")
    finding = args.round_plan.describe()
    if args.num_iterations > 1:
        steps = args.round_plan.num_optimizer_steps * args.num_iterations
        finding += f" With `num_iterations` = {args.num_iterations}: {steps} optimizer steps a round."
    state.args = args
    return [Row(WARNING if warned else OK, finding, warned), *rows]


def check_output_folder(state: DoctorState) -> Row:
    """Check the real output directory for a checkpoint to resume from, or for other checkpoints."""
    checkpoint, warned = _with_warnings(lambda: find_checkpoint(state.output_dir, state.resume_from_checkpoint))
    if checkpoint is not None:
        return Row(WARNING if warned else OK, f"The run continues from '{checkpoint}'.", warned)
    found = checkpoints_of(state.output_dir)
    if found:
        finding = f"'{state.output_dir}' has {len(found)} checkpoint(s), the latest '{found[0].name}', but the run starts anew."
        advice = (
            "To resume, set `resume_from_checkpoint` to true. Otherwise choose another directory: the run refuses one "
            "with checkpoints of other settings, and replaces those of its own."
        )
        return Row(WARNING, finding, advice)
    return Row(OK, f"'{state.output_dir}' has no checkpoints; the run starts from the beginning.")


def check_hub(state: DoctorState) -> Row:
    """Check the token, the repository and the base model, without creating anything."""
    args, script_args = state.args, state.script_args
    if not state.push_to_hub:
        return Row(OK, "Nothing is pushed: `push_to_hub` is off.")
    api = HfApi(token=args.hub_token, library_name=_PACKAGE)
    base_model = script_args.model_name_or_path
    check_base_model(api, base_model)
    repo_id, is_there = check_repository(
        api, args.hub_model_id or Path(state.output_dir).absolute().name, private=args.hub_private_repo,
        revision=args.hub_revision, published_files=PIPELINE_ADAPTER if script_args.use_peft else TRANSFORMER,
        base_model=base_model,
    )  # fmt: skip
    plan = "exists and can be written to" if is_there else "will be created"
    return Row(OK, f"The repository {repo_id} at {api.endpoint} {plan}.")


def check_data(state: DoctorState) -> Row:
    """Check the prompts, their sizes, and whether there are enough of them."""
    script_args, args = state.script_args, state.args
    check_evaluation(script_args, args)
    dataset = load_train_prompts(script_args)
    findings = [_examine_prompts(dataset, args, "the dataset")]
    state.eval_dataset = load_eval_prompts(script_args)
    if state.eval_dataset is not None:
        findings.append("Evaluation: " + _examine_prompts(state.eval_dataset, args, "the evaluation dataset"))
    faults, remedies = [], []
    if state.eval_dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
        requested = f"`eval_strategy` is '{args.eval_strategy.value}' and `eval_on_start` {args.eval_on_start}"
        faults.append(f"{requested}, but there are no prompts to evaluate on.")
        remedies.append(
            "Name a split with `--eval_split`, or set `eval_strategy` to 'no' and `eval_on_start` to false."
        )
        # The later checks do not evaluate, so they can still run
        args.eval_strategy, args.eval_on_start, args.load_best_model_at_end = IntervalStrategy.NO, False, False

    layout = args.round_plan
    rounds = len(dataset) // layout.num_prompts
    if rounds == 0:
        faults.append(f"A round takes {layout.num_prompts} different prompts.")
        remedies.append(f"Set `num_prompts_per_generation` to at most {len(dataset)}, or add prompts.")
        # The later checks use a single prompt, so they can still run
        dataset = dataset.select([index % len(dataset) for index in range(layout.num_prompts)])
    state.train_dataset = dataset
    if faults:
        return Row(FAILED, " ".join([*findings, *faults]), " ".join(remedies))
    steps_per_round = layout.num_optimizer_steps * args.num_iterations
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * rounds * steps_per_round)
    findings.append(
        f"{rounds} round(s) of {layout.num_prompts} in an epoch; the run: {steps} optimizer steps, "
        f"{steps / steps_per_round:g} round(s)."
    )
    surplus = describe_repeated([] if script_args.edits else dataset["prompt"])
    if surplus is None:
        return Row(OK, " ".join(findings))
    advice = "They are used more often than the others: remove them if that is not intended."
    return Row(WARNING, " ".join([*findings, surplus]), advice)


def _examine_prompts(dataset: Dataset, args: PaCoGRPOConfig, where: str) -> str:
    rows = PromptRows(dataset, args, where)
    sizes = Counter(
        (height or args.height, width or args.width)
        for height, width in rows.own_sizes
        if rows.sources is None or (height is not None and width is not None)
    )
    described = [_listed(sizes, with_counts=True)] if sizes else []
    if rows.sources is not None and len(rows) > sizes.total():
        described.append(f"that of the source image for {len(rows) - sizes.total()}")
    sources = "" if rows.sources is None else f"; up to {rows.sources.max_count} source image(s) each"
    return (
        f"{len(dataset)} prompts (columns: {', '.join(dataset.column_names)}){sources}; panels "
        f"{_listed(Counter(rows.layouts), with_counts=True)}; sizes {', '.join(described)}, generated in training at "
        f"{args.resolution_scale:g} of it."
    )


def check_transfer(state: DoctorState) -> Row:
    """Describe what the reports before training generate, and warn of a short tail without one."""
    args, prompts, found, advice = state.args, len(state.train_dataset or []), [], ""
    if count := min(args.resolution_transfer_prompts, prompts):
        images, steps = 2 * count * args.num_generations_eval, args.num_inference_steps_eval
        found.append(f"`resolution_transfer_prompts`: {images} images in {images * steps} forwards.")
    if args.tail_steps is not None:
        full, images = args.num_inference_steps, args.num_generations * min(args.tail_transfer_prompts, prompts)
        short = RoundSchedule(args, prompts).sde(round_index=0).num_steps(full)
        found.append(f"`tail_steps`: images of round 0 take {short} denoising steps in place of {full}.")
        found.append(f"`tail_transfer_prompts`: {2 * images} images in up to {images * (short + full)} forwards.")
        if not images:
            advice = "Whether the rewards rank a group alike with both tails is not measured: set `tail_transfer_prompts` to 16."
    return Row(WARNING if advice else OK, " ".join(found) or "None.", advice)


def check_rewards_load(state: DoctorState) -> Row:
    """Check the rewards and their weights, before a model is loaded."""
    script_args, args = state.script_args, state.args
    functions = load_rewards(script_args)
    rewards = RewardRunner(functions, args.reward_weights, args.reward_required, args.multi_objective_aggregation)
    state.reward_funcs = functions
    state.rewards = {f"reward {name}": (rewards, index) for index, name in enumerate(rewards.names)}
    described = [f"{name} (weight {w:g})" for name, w in zip(rewards.names, rewards.weights.tolist(), strict=True)]
    finding = f"{', '.join(described)}; {args.multi_objective_aggregation}."
    eval_functions = load_eval_rewards(script_args, functions)
    if eval_functions is not None:
        rewards = RewardRunner(eval_functions)
        state.eval_reward_funcs = eval_functions
        for index, name in enumerate(rewards.names):
            if not any(rewards.functions[index] is other for other in functions):  # shared ones are checked once
                state.rewards[f"evaluation reward {name}"] = (rewards, index)
        finding += f" Evaluation: {', '.join(rewards.names)}."
    return Row(OK, finding)


def check_model(state: DoctorState) -> Row:
    """Check that the model loads and that its adapter fits."""
    args, script_args = state.args, state.script_args
    reward_funcs: Any = state.reward_funcs
    if reward_funcs is None:
        # That check has failed; the model can be checked without
        reward_funcs, args.reward_weights, args.reward_required = [_no_reward], None, None
    trainer = PaCoGRPOTrainer(
        model=script_args.model_name_or_path, reward_funcs=reward_funcs, args=args, train_dataset=state.train_dataset,
        eval_dataset=state.eval_dataset, eval_reward_funcs=state.eval_reward_funcs,
        peft_config=get_peft_config(script_args),
    )  # fmt: skip
    is_new_adapter = isinstance(trainer.model, PeftModel) and trainer.trained_from is None
    generator = SampleGenerator(trainer.sampler, trainer.train_rows, args, is_new_adapter)
    if args.deepspeed_plugin is None:
        generator.prepare()
    state.trainer, state.generator = trainer, generator
    trained_weights = list(trained_parameters(trainer.model).values())
    num_trained = sum(p.numel() for p in trained_weights)
    num_frozen = sum(p.numel() for p in trainer.model.parameters()) - num_trained
    if isinstance(trainer.model, PeftModel):
        num_frozen = trainer.model.get_nb_trainable_parameters()[1] - num_trained  # two weights of 4 bits are one byte
        adapter = trainer.model.peft_config[trainer.model.active_adapter]
        layers = trainer.model.base_model.targeted_module_names
        existing = script_args.adapter
        origin = f", continued from '{existing}'" if existing is not None else ""
        trained = (
            f"LoRA r = {adapter.r}, alpha = {adapter.lora_alpha} on {len(layers)} layers{origin}: {num_trained:,} "
            f"parameters trained, {num_frozen:,} frozen."
        )
    else:
        dtype = trained_weights[0].dtype
        trained = f"no adapter: all weights of the transformer are trained, {num_trained:,} parameters in {dtype}"
        trained += f", {num_frozen:,} frozen." if num_frozen else "."
    finding = (
        f"{type(trainer.pipeline).__name__} ({type(trainer.family).__name__}) on {trainer.accelerator.device}, "
        f"{trainer.compute_dtype}; {trained} Trained at {_listed(generator.sizes)} (multiples of "
        f"{trainer.size_multiple} pixels)."
    )
    limit, epsilon = trainer.family.max_stable_epsilon, max(args.epsilon, args.epsilon_high or 0.0)
    if limit is None or args.loss_type != "grpo" or epsilon <= limit:
        return Row(OK, finding)
    finding += f" The clip range is {epsilon:g}; this model was seen to collapse above {limit:g}."
    advice = f"Set `epsilon` and `epsilon_high` to at most {limit:g}. Training may still collapse later."
    return Row(WARNING, finding, advice)


def _no_reward(prompts: list[str], completions: list[Image.Image], **kwargs) -> list[None]:
    """Stand in for rewards that could not be loaded."""
    return [None] * len(completions)


def check_memory(state: DoctorState) -> Row:
    """Plan the memory of a process by phase, from configs alone, and compare it with a device's."""
    args, plan_args = state.args, state.plan_args
    return memory_row(image_plan(state.script_args, args, state.train_dataset), plan_args.memory_of(args))


def check_judge_memory(state: DoctorState) -> list[Row]:
    """Plan the memory of the training of a judge."""
    (script_args, args, plan_args), _, rows = read_options(state)
    return [*rows, memory_row(judge_plan(script_args, args), plan_args.memory_of(args))]


def memory_row(plan: ImagePlan | JudgePlan, total: int | None) -> Row:
    """Show the phases of a run, and compare them with a device of `total` bytes."""
    setting = plan.setting()
    phases = plan.phases(setting)
    largest, needed = max(phases, key=lambda phase: peak([phase])), peak(phases)
    lines = [
        f"Micro-batches of {setting.batch_size} at {plan.size}: {format_size(needed)} on the device of each "
        f"process, in `{largest.name}`."
    ]
    optim = getattr(plan.args.optim, "value", plan.args.optim)
    if not optim.startswith("adamw_torch") or "8bit" in optim or "4bit" in optim:
        fraction = "; 8-bit: a quarter of the states" if "8bit" in optim else ""
        lines.append(f"The optimizer `{optim}` is counted as AdamW in float32{fraction}.")
    verdict, advice = OK, ""
    if total is None:
        lines.append("No CUDA device to compare with; `--device_memory 24GiB` plans for one.")
    else:
        limit = USABLE * total
        lines.append(f"The device has {format_size(total)}, of which the plan may take {USABLE:.0%}.")
        if needed > limit:
            verdict = FAILED if needed > total else WARNING
            changes = smallest_change(plan, setting, limit)
            nothing = (
                "Nothing that the plan can change makes it fit: use a larger device, or smaller images or models."
            )
            advice = f"The smallest change that fits: {' with '.join(changes)}." if changes else nothing
        else:
            fits = [f"{largest_batch(plan.phases, setting, limit)} at {plan.size}"]
            if isinstance(plan, ImagePlan) and plan.sizes[0] != plan.sizes[1]:
                batch = largest_batch(functools.partial(plan.phases, is_full=True), setting, limit)
                fits.append("{} at {} x {}".format(batch or "none", *plan.sizes[1]))
            lines.append(f"The largest micro-batch that fits: {', '.join(fits)}.")
            without = replace(setting, gradient_checkpointing=False)
            if without != setting and peak(plan.phases(without)) <= limit:
                lines.append("`--gradient_checkpointing False` fits too, and saves a forward of each image.")
    return Row(verdict, "\n".join(lines), advice, table=_table(phases))


def _table(phases: list[Phase]) -> Table:
    table = Table("phase", "device", "host", "on the device", box=None, pad_edge=False)
    for name, device, host in phases:
        parts = sorted(device.items(), key=lambda part: -part[1])
        shown = ", ".join(f"{part} {format_size(size)}" for part, size in parts if size > sum(device.values()) / 100)
        table.add_row(name, format_size(sum(device.values())), format_size(sum(host.values())), shown)
    return table


def check_noise_free(state: DoctorState) -> Row:
    """Check that without noise the policy generates what the pipeline itself generates."""
    generator, trainer = state.generator, state.trainer
    untouched = generator.generate_untouched()
    policy = generator.generate(sde=generator.sde_settings(noise_level=0.0))
    state.images.extend(policy.images)
    difference = (policy.latents - untouched.latents).abs().max().item()
    scale = untouched.latents.abs().max().item()
    tolerance = _NOISE_FREE_TOLERANCE[trainer.compute_dtype]
    finding = (
        f"{generator.height} x {generator.width} pixels, {state.args.num_inference_steps} steps: the last latents of the "
        f"untouched pipeline and of the policy at noise level 0 differ by {difference:.3g} (largest number "
        f"{scale:.3g}, accepted {tolerance * scale:.3g})."
    )
    # `not <=` instead of `>`: it finds NaN as well
    if not difference <= tolerance * scale:
        advice = "Look for a changed scheduler, or an adapter that is not the identity when it is new."
        return Row(FAILED, finding, f"The policy does not generate what the pipeline generates. {advice}")
    return Row(OK, finding)


@contextmanager
def nonzero_adapter(model: nn.Module) -> Iterator[None]:
    """Fill the matrices of a new adapter that are zero: a rollout or replay that leaves it out would not show."""
    new = [weight for name, weight in model.named_parameters() if ".lora_B." in name and not weight.any()]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in new:
            weight.copy_(1e-3 * torch.randn(weight.shape, generator=generator))
    try:
        yield
    finally:
        for weight in new:
            nn.init.zeros_(weight)


def check_ratio(state: DoctorState) -> Row:
    """Check that the replay gives the log-probabilities of the rollout, and a gradient."""
    generator, trainer, args = state.generator, state.trainer, state.args
    device, layout = trainer.accelerator.device, args.round_plan
    deviations = {}
    with nonzero_adapter(trainer.model):
        generated = generator.generate(layout.rollout_batch_size, generator.sde_settings(args.noise_level))
        state.images.extend(generated.images)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for batch in generated.records:
            log_probs = []
            for record in split_record(batch, layout.num_merged_batches, trainer.family):
                log_prob = generator.replay(record)
                log_prob.mean().backward()
                log_probs.append(log_prob.detach())
            deviations[batch.index] = (torch.exp(torch.cat(log_probs) - batch.log_prob) - 1).abs().max().item()
    gradients = [p.grad.abs().max().item() for p in trainer.model.parameters() if p.grad is not None]
    trainer.model.zero_grad(set_to_none=True)
    worst = max(deviations.values(), key=lambda value: math.inf if math.isnan(value) else value)
    steps = ", ".join(f"step {index}: {value:.3g}" for index, value in deviations.items())
    finding = (
        f"{layout.rollout_batch_size} image(s), max |ratio - 1| before the first update {worst:.3g} ({steps}); "
        f"`ratio_tolerance` is {args.ratio_tolerance:.3g}."
    )
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        finding += (
            f" Forward and backward took {format_size(allocated)} on the device, without the optimizer's states."
        )
    if args.activation_checkpointing:
        finding += (
            " Checkpointing costs a forward of each image: see if it fits with `--gradient_checkpointing False`."
        )
    if not worst <= args.ratio_tolerance:
        advice = (
            "Rollout and training compute different numbers: look for dropout, for layers that behave differently with "
            f"gradients, for a compiled replay. In bf16 a deviation below `epsilon` ({args.epsilon:g}) can be rounding: "
            "then set `ratio_tolerance` above it."
        )
        return Row(FAILED, finding, advice)
    if not any(gradients):
        return Row(FAILED, f"{finding} What is trained gets no gradient.", "Find out what cuts the graph.")
    return Row(OK, finding)


def check_round_trip(state: DoctorState) -> Row:
    """Check that what is saved generates the same image again: an adapter in both formats, or the transformer."""
    is_adapter = isinstance(state.trainer.model, PeftModel)
    return _adapter_round_trip(state) if is_adapter else _transformer_round_trip(state)


def _adapter_round_trip(state: DoctorState) -> Row:
    generator, trainer = state.generator, state.trainer
    model, pipeline = trainer.model, trainer.pipeline
    rng = torch.Generator().manual_seed(state.args.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=rng) * _ADAPTER_STD)
    with model.disable_adapter():
        base = generator.generate()
    tuned = generator.generate()

    # A second copy of a large model may not fit: the adapter's layers are removed from the transformer, and loaded again
    # from the files
    with tempfile.TemporaryDirectory() as folder:
        save_adapter(model, pipeline, gather_weights(model, trained_parameters(model), zero_stage=0), folder)
        transformer = model.unload()
        loaded = PeftModel.from_pretrained(transformer, folder)
        with_peft = generator.generate_with(loaded)
        transformer = loaded.unload()
        if state.args.quantization == "fp8_storage":
            transformer.to(trainer.compute_dtype)  # diffusers rounds an adapter to the dtype of its layers
        object.__setattr__(pipeline, "transformer", transformer)  # `load_lora_weights` changes it in place
        logging.disable(logging.WARNING)  # diffusers': an adapter has no layers in the text encoders
        try:
            load_lora(pipeline, folder)
        finally:
            logging.disable(logging.NOTSET)
        with_diffusers = generator.generate()
    return _compare_loaded(
        trainer.compute_dtype, base, tuned,
        {"PeftModel.from_pretrained": with_peft, "pipe.load_lora_weights": with_diffusers},
        "Random weights in the adapter", "The adapter has no effect on the image: check `lora_target_modules`.",
        "adapter", "the versions of peft and diffusers (first row), and the scale `lora_alpha / r` in the files",
    )  # fmt: skip


def _transformer_round_trip(state: DoctorState) -> Row:
    generator, trainer = state.generator, state.trainer
    model, device = trainer.model, trainer.accelerator.device
    rng = torch.Generator().manual_seed(state.args.seed)
    base = generator.generate()
    weights = trained_parameters(model)
    originals = gather_weights(model, weights, zero_stage=0)
    try:
        with torch.no_grad():
            for parameter in weights.values():
                scale = _WEIGHT_NOISE * parameter.float().square().mean().sqrt().item()
                parameter.add_((torch.randn(parameter.shape, generator=rng) * scale).to(parameter))
        tuned = generator.generate()
        with tempfile.TemporaryDirectory() as folder:
            save_transformer(model, {name: p.detach() for name, p in weights.items()}, folder)
            loaded = type(model).from_pretrained(folder, subfolder="transformer")
            # A second copy of a large model may not fit on the device
            model.to("cpu")
            reloaded = generator.generate_with(loaded.to(device).train(model.training))
    finally:
        loaded = None
        model.to(device)
        load_weights(model, originals, zero_stage=0)
    return _compare_loaded(
        trainer.compute_dtype, base, tuned, {f"{type(model).__name__}.from_pretrained": reloaded},
        "Noise in the transformer's weights",
        "The weights have no effect on the image: find out which weights the pipeline uses.", "transformer",
        "the version of diffusers (first row), and that the transformer's config and weights can be saved",
    )  # fmt: skip


def _compare_loaded(
    dtype: torch.dtype,
    base: Generation,
    tuned: Generation,
    loaded: dict[str, Generation],
    change: str,
    without_effect: str,
    saved: str,
    possible_causes: str,
) -> Row:
    """Compare what was loaded again, by the name of the loading function, with what was saved."""
    effect = (tuned.latents - base.latents).abs().max().item()
    differences = {name: (other.latents - tuned.latents).abs().max().item() for name, other in loaded.items()}
    tolerance = _ROUND_TRIP_TOLERANCE[dtype]
    finding = (
        f"{change} change the last latents by {effect:.3g}. Saved and loaded again they differ by "
        + " and ".join(f"{value:.3g} with `{name}`" for name, value in differences.items())
        + f" (accepted {tolerance * effect:.3g})."
    )
    if not (math.isfinite(effect) and effect > 0):
        return Row(FAILED, finding, without_effect)
    if not all(value <= tolerance * effect for value in differences.values()):
        effect_of = f"do not hold the {saved} that was trained: checkpoints of this run would generate something else"
        return Row(FAILED, finding, f"The saved files {effect_of}. Check {possible_causes}.")
    return Row(OK, finding)


def check_reward_values(state: DoctorState) -> list[Row]:
    """Check each reward on the generated images."""
    row, images = state.generator.row, state.images
    # As in training: the columns of the dataset, the panels, and TRL's hooks
    arguments: dict[str, Any] = {name: [value] * len(images) for name, value in row.items() if name != "prompt"}
    arguments |= {
        "prompts": [row["prompt"]] * len(images),
        "completions": images,
        "completion_ids": None,
        "num_generations": len(images),
        "panel_images": [split_grid(image, row["rows"], row["cols"]) for image in images],
        "trainer_state": state.trainer.state,
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    rows = []
    for title, (rewards, index) in state.rewards.items():
        try:
            values = rewards.call(index, **arguments)
            values = asyncio.run(values) if inspect.iscoroutine(values) else values
        except Exception as error:
            rows.append(Row(FAILED, _message(error), "Correct the reward: in training this stops the run.", title))
            continue
        scored = [value for value in values if value is not None]
        shown = ", ".join("None" if value is None else f"{value:.4g}" for value in values)
        finding = f"{len(images)} images of one prompt: {shown}; {len(values) - len(scored)} None."
        verdict, advice = OK, ""
        if not scored:
            verdict, advice = FAILED, "No image could be scored: find out why the reward returns None."
        elif len(scored) > 1 and len(set(scored)) == 1:
            verdict, advice = WARNING, "A group of equal values teaches nothing. Watch `frac_reward_zero_std`."
        elif len(scored) < len(values):
            verdict, advice = WARNING, "Images that get None are left out: find out why."
        rows.append(Row(verdict, finding, advice, title))
    return rows


class Check(NamedTuple):
    """Check, with the attributes of [`DoctorState`] that it requires."""

    name: str
    examine: Callable[[DoctorState], Row | list[Row]]
    needs: tuple[str, ...] = ()


CHECKS = (
    Check("versions", check_versions),
    Check("configuration", check_configuration),
    Check("output directory", check_output_folder, ("args",)),
    Check("hub", check_hub, ("args",)),
    Check("data", check_data, ("args",)),
    Check("reports before training", check_transfer, ("args", "train_dataset")),
    Check("rewards", check_rewards_load, ("args",)),
    Check("model and adapter", check_model, ("args", "train_dataset")),
    Check("memory", check_memory, ("args", "train_dataset")),
    Check("noise-free image", check_noise_free, ("generator",)),
    Check("ratio", check_ratio, ("generator",)),
    Check("saved files", check_round_trip, ("generator",)),
    Check("reward values", check_reward_values, ("generator", "images", "rewards")),
)
# Attribute -> the check that sets it
_FOUND_BY = {
    "args": "configuration",
    "train_dataset": "data",
    "rewards": "rewards",
    "generator": "model and adapter",
    "images": "noise-free image",
}
# These generate images, and DeepSpeed places the model on its device only when training begins
_GENERATING = (check_noise_free, check_ratio, check_round_trip, check_reward_values)


def examine(command: str, words: list[str], console: Console) -> list[Row]:
    """Run all checks that can run, with the options of a training command."""
    rows, parse = [], _parser(command).parse_args_and_config
    checks = CHECKS if command != "reward" else (CHECKS[0], Check("memory", check_judge_memory))
    with tempfile.TemporaryDirectory() as temporary_dir:
        state = DoctorState(lambda *more: parse([*words, *more]), temporary_dir)
        for number, check in enumerate(checks, start=1):
            console.print(f"\\[{number}/{len(checks)}] {check.name} ...", highlight=False)
            started = time.perf_counter()
            found = _make(check, state)
            for row in found:
                row.check = row.check or check.name
                seconds = time.perf_counter() - started
                console.print(f"      {row.check}: {_colored(row.verdict)}, {seconds:.1f} s", highlight=False)
            rows.extend(found)
        if state.trainer is not None:
            state.trainer.accelerator.end_training()
    return rows


def _make(check: Check, state: DoctorState) -> list[Row]:
    if missing := [_FOUND_BY[name] for name in check.needs if not getattr(state, name)]:
        return [Row(SKIPPED, f"needs: {', '.join(missing)}")]
    if check.examine in _GENERATING and state.args.deepspeed_plugin is not None:
        finding = "DeepSpeed places the model on its device only when training begins."
        return [Row(SKIPPED, finding, "Run the doctor without it, on one GPU, to make this check.")]
    try:
        if check.examine in (check_rewards_load, check_model):
            if check.examine is check_rewards_load:
                check_reward_names(state.script_args)
            if state.plan_args.device_memory is not None:
                return [Row(SKIPPED, "The memory is planned for another card: no weights are loaded.")]
            if isinstance(state.args, PaCoNFTConfig):
                return [Row(SKIPPED, "The checks of a rollout are for `grpo`: no weights are loaded.")]
            if state.lacks_gpu:
                return [Row(SKIPPED, "There is no GPU: no weights are loaded.")]
        found = check.examine(state)
    except Exception as error:
        return [Row(FAILED, _message(error))]
    return found if isinstance(found, list) else [found]


def _parser(command: str) -> CommandParser:
    text = f"Checks a model, a dataset and settings without training. Takes the options of `paco-trl {command}`."
    program = f"paco-trl doctor {command}"
    if command == "reward":
        return reward.parser_of(PlanArguments, prog=program, description=text)
    config = PaCoNFTConfig if command == "nft" else PaCoGRPOConfig
    return parser_of(ScriptArguments, config, PlanArguments, prog=program, description=text)


def _with_warnings(function: Callable[[], Any]) -> tuple[Any, str]:
    """Call a function, and return its result with the warnings that the package logged."""
    handler, logger = BufferingHandler(1000), logging.getLogger(_PACKAGE)
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        return function(), " ".join(record.getMessage() for record in handler.buffer)
    finally:
        logger.removeHandler(handler)


def _message(error: Exception) -> str:
    # Errors of the package are self-explanatory; of others the type helps
    text = str(error) or "no message"
    return text if isinstance(error, ValueError | TypeError | RuntimeError) else f"{type(error).__name__}: {text}"


def _colored(verdict: str) -> str:
    return f"[{_COLORS[verdict]}]{verdict}[/]"


def _listed(counter: Counter, with_counts: bool = False) -> str:
    """Format `Counter({(2, 2): 12})` as "2 x 2 (12)", the most frequent first."""
    shown = [f"{a} x {b}" + f" ({count})" * with_counts for (a, b), count in counter.most_common(4)]
    return ", ".join(shown) + (f" and {len(counter) - 4} more" if len(counter) > 4 else "")


def main(arguments: list[str]) -> int:
    """Run the command; return 0 if no check failed, else 1."""
    command, *words = arguments or ["--help"]
    if command in ("-h", "--help"):
        sys.stdout.write("usage: paco-trl doctor {grpo,nft,reward} [the options of that command]\n")
        return 0
    if command not in ("grpo", "nft", "reward"):
        raise ValueError(f"it got {command!r}; the first word is the command to check: grpo, nft or reward.")
    if {"--help", "-h"} & set(words):
        _parser(command).print_help()
        return 0
    # Under `accelerate launch` every process runs the checks, and one of them prints
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    rows = examine(command, words, console)
    table = Table(title="paco-trl doctor", show_lines=True)
    table.add_column("check", max_width=16, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("finding, and what to do", overflow="fold")
    for row in rows:
        text = escape(row.finding) + (f"\n[bold]->[/] {escape(row.advice)}" if row.advice else "")
        table.add_row(escape(row.check), _colored(row.verdict), text if row.table is None else Group(text, row.table))
    console.print(table)
    verdicts = Counter(row.verdict for row in rows)
    console.print(", ".join(f"{verdicts[name]} {_colored(name)}" for name in _COLORS if verdicts[name]))
    return 1 if verdicts[FAILED] else 0
