# SPDX-License-Identifier: Apache-2.0
"""`paco-trl doctor`: checks of a training run, in minutes and without training."""

import asyncio
import copy
import inspect
import logging
import os
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import psutil  # accelerate requires it
import torch
from datasets import Dataset
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import get_session
from peft import PeftModel
from PIL import Image
from rich.console import Console, Group
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from transformers import TrainerState

from .. import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoNFTConfig
from ..checkpointing.checkpoints import find_checkpoint, list_checkpoints
from ..checkpointing.weights import trained_parameters
from ..hub.files import JUDGE_ADAPTER, PIPELINE_ADAPTER, TRANSFORMER
from ..hub.repositories import HTTPError, check_repo, check_repo_contents
from ..planning import MemoryPlan
from ..planning.known_models import resolve_model_configs
from ..planning.plan import USABLE_FRACTION, format_size
from ..rewards.errors import RewardError
from ..rewards.scoring import reward_arguments
from ..rewards.weighting import Rewards
from ..rollout import RecordedStep, get_family
from ..rollout.encoder import describe_truncated
from ..rollout.loading import load_without_weights
from ..rollout.prompt_rows import PromptRows
from ..rollout.resolution import training_size
from ..trainer.checks import (
    check_panels_used,
    fit_round_to_dataset,
    offload_models,
    read_eval_rows,
    read_train_rows,
    warn_of_trained_pairs,
    warn_of_trained_rows,
)
from ..trainer.round_schedule import RoundSchedule
from ..utils.errors import frames_of_cause, is_user_error
from ..utils.fsdp import shards_weights
from ..utils.pipelines import truncations_counted
from . import reward
from .doctor_arguments import PlanArguments, parser_for
from .env import VERSIONS, get_version, newer_than_tested
from .memory_plans import image_plan, judge_plan, skip_checkpointing
from .messages import format_as_flags
from .parser import CommandParser
from .sample_generator import SampleGenerator
from .script_arguments import (
    check_reward_columns,
    check_rewards,
    fit_panel_options,
    fit_reward_options,
    get_peft_config,
    has_model,
    load_eval_prompts,
    load_eval_rewards,
    load_rewards,
    load_train_prompts,
    user_functions,
)
from .training import check_start


# Tolerance of the noise-free images, as a fraction of the latent's largest absolute value. In bf16, the pipeline's
# scheduler rounds the latent after each step by up to half a unit in the last place (2^-9), which the model amplifies.
_NOISE_FREE_TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 5e-2}

_HUB_SECONDS = 5.0

OK = "ok"
WARNING = "warning"
FAILED = "failed"
SKIPPED = "skipped"
_COLORS = {OK: "green", WARNING: "yellow", FAILED: "red", SKIPPED: "dim"}
_PACKAGE = "paco_trl"
_T = TypeVar("_T")


@dataclass
class Row:
    """Finding of a check, with advice."""

    verdict: str
    finding: str
    advice: str = ""
    check: str = ""
    table: Table | None = None


@dataclass
class DoctorState:
    """State of the checks, to which each adds what later ones require."""

    parser: CommandParser
    argv: list[str]
    temporary_dir: str  # replaces the run's output directory, so that the doctor leaves nothing behind
    skips: str = ""  # why no weights are loaded
    script_args: Any = None
    args: Any = None  # config of the doctor
    run_args: Any = None  # config of the run
    plan_args: PlanArguments | None = None
    train_dataset: Dataset | None = None
    eval_dataset: Dataset | None = None
    rows: list[PromptRows] | None = None  # prompts of both datasets
    reward_funcs: list[Callable] | None = None
    eval_reward_funcs: list[Callable] | None = None
    trainer: PaCoGRPOTrainer | None = None
    generator: SampleGenerator | None = None

    def parse(self, *extra_arguments: str, use_presets: bool) -> tuple[Any, Any, PlanArguments]:
        """Parse the options, with extra ones."""
        return self.parser.parse_args_and_config([*self.argv, *extra_arguments], use_presets)


def _require(value: _T | None) -> _T:
    """Return a value of the state that an earlier check has set, which `CHECKS` requires."""
    if value is None:
        raise RuntimeError("A check of the doctor ran before one that it requires.")
    return value


# ---- Checks. They return a finding or rows; an error is a failed row, and logged warnings are its advice ----


def check_versions(state: DoctorState) -> Row:
    """Describe packages and device."""
    device = "no CUDA device"
    if torch.cuda.is_available():
        bf16 = "with" if torch.cuda.is_bf16_supported() else "without"
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_properties(0).name}, {bf16} bf16"
    versions = [f"{name} {version}" for name in (_PACKAGE, *VERSIONS) if (version := get_version(name))]
    network = (
        "" if check_hub_connection() else f"; {constants.ENDPOINT} cannot be reached, so only cached files are found"
    )
    version_warnings = newer_than_tested()
    return Row(
        WARNING if version_warnings else OK, f"{', '.join(versions)}; {device}{network}", " ".join(version_warnings)
    )


def check_hub_connection() -> bool:
    """Check the connection to the Hub. Without one, set the clients offline, which would wait 30 s for each file."""
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except (HTTPError, OfflineModeIsEnabled):
        constants.HF_HUB_OFFLINE = True
    return not constants.HF_HUB_OFFLINE


def check_configuration(state: DoctorState, use_presets: bool = True) -> Row:
    """Check the settings and the plan of a round, on the CPU if only a GPU is missing."""
    row = Row(OK, "")
    try:
        state.script_args, args, state.plan_args = state.parse(use_presets=use_presets)
    except OSError as error:
        if not use_presets:  # presets require the model
            raise
        row = check_configuration(state, use_presets=False)
        return replace(
            row, verdict=WARNING, advice=f"{error} The defaults of its family are not applied. {row.advice}"
        )
    except ValueError as error:
        if torch.accelerator.is_available():
            raise
        state.script_args, args, state.plan_args = state.parse("--use_cpu", "True", use_presets=use_presets)
        state.skips = "There is no GPU, so no weights are loaded."
        if state.plan_args.device_memory is None:
            row.verdict = WARNING
            row.advice = f"The run stops here: {format_as_flags(error)} `--use_cpu` runs the other checks on the CPU."
    state.args = args
    state.run_args = copy.copy(args)
    if not isinstance(args, PaCoGRPOConfig):
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        return replace(row, finding=f"{batch} pairs for each optimizer step.")
    if state.plan_args.device_memory is not None:
        state.skips = "The memory is planned for another card, so no weights are loaded."
    elif isinstance(args, PaCoNFTConfig):
        state.skips = "The checks of a rollout are for `grpo`, so no weights are loaded."
    args.output_dir = state.temporary_dir
    args.push_to_hub = False
    args.resume_from_checkpoint = None
    if args.embeddings_dir is not None:
        args.embeddings_dir = str(Path(state.temporary_dir) / "embeddings")
    return replace(row, finding=args.round_plan.summary())


def check_output_folder(state: DoctorState) -> Row | str:
    """Check the real output directory like the run at its start."""
    run = state.run_args
    check_start(run, _published_files(state))
    if (checkpoint := find_checkpoint(run.output_dir, run.resume_from_checkpoint)) is not None:
        return f"The run continues from '{checkpoint}'."
    if checkpoints := list_checkpoints(run.output_dir):
        finding = f"'{run.output_dir}' has checkpoints up to '{checkpoints[0].name}', which the run does not continue."
        return Row(WARNING, finding, "It deletes them." if run.overwrite_output_dir else "")
    return f"'{run.output_dir}' has no checkpoints; the run starts from the beginning."


def _published_files(state: DoctorState) -> list[str]:
    if not isinstance(state.args, PaCoGRPOConfig):
        return JUDGE_ADAPTER
    return PIPELINE_ADAPTER if state.script_args.use_peft else TRANSFORMER


def check_hub(state: DoctorState) -> str:
    """Check the token and the repository, without creating anything."""
    args = state.run_args
    if not args.push_to_hub:
        return "Nothing is pushed: `push_to_hub` is off."
    api = HfApi(token=args.hub_token, library_name=_PACKAGE)
    repo_id = args.hub_model_id or Path(args.output_dir).absolute().name
    repo_id, info = check_repo(api, repo_id, args.hub_private_repo, revision=args.hub_revision)
    if info is None:
        return f"The repository {repo_id} at {api.endpoint} will be created."
    check_repo_contents(api, info, state.script_args.model_name_or_path, _published_files(state))
    return f"The repository {repo_id} at {api.endpoint} exists and can be written to."


def check_data(state: DoctorState) -> str | list[Row]:
    """Check the prompts, their sizes and their number."""
    script_args, args = state.script_args, state.args
    state.train_dataset = load_train_prompts(script_args)
    state.eval_dataset = load_eval_prompts(script_args)
    fit_panel_options(script_args, args, state.train_dataset, state.eval_dataset)
    rewards = Rewards([_no_reward])  # the real rewards are loaded later
    rows = [read_train_rows(state.train_dataset, args, rewards)]
    if state.eval_dataset is None:
        read_eval_rows(None, args, rewards)
    else:
        rows.append(PromptRows(state.eval_dataset, args, "the evaluation dataset"))
    check_panels_used(args, *rows)
    if state.skips:  # in place of the trainer, which would warn
        warn_of_trained_rows(rows[0], rows[1:])
    state.rows, findings = rows, []
    for split in rows:
        images = f" of {len(split.image_prompts)} images" if split.has_separate else ""
        sources = "" if split.sources is None else f", up to {split.sources.max_count} source image(s) each"
        columns = ", ".join(split.dataset.column_names)
        findings.append(
            f"{len(split)} prompts{images}{sources} ({columns}); panels {_format_counts(Counter(split.layouts))}."
        )
    finding = " Evaluation: ".join(findings)
    try:
        fit_round_to_dataset(args, rows[0])
    except ValueError as error:  # the plan does not depend on it
        return [Row(OK, finding), Row(FAILED, str(error), check="number of prompts")]
    schedule = RoundSchedule(args, rows[0].images_per_row)
    steps = schedule.max_steps
    rounds = steps / schedule.optimizer_steps_per_round
    plan = f"{schedule.rounds_per_epoch} round(s) in an epoch; {steps} optimizer steps, {rounds:g} round(s)."
    return f"{finding} {plan}{schedule.describe_unused()}"


def check_pairs(state: DoctorState) -> Row | str:
    """Check the pairs of a judge, where they need no download."""
    script_args = state.script_args
    if not Path(script_args.dataset_name).expanduser().exists():
        return Row(SKIPPED, f"'{script_args.dataset_name}' is on the Hub. `paco-trl reward` downloads and checks it.")
    pairs, eval_pairs = reward.load_datasets(script_args, state.args)
    if eval_pairs is not None:  # in place of the trainer, which would warn
        warn_of_trained_pairs(pairs, {"eval_dataset": eval_pairs})
    return f"{len(pairs)} pair(s)." + ("" if eval_pairs is None else f" Evaluation: {len(eval_pairs)} pair(s).")


def _no_reward(prompts: list[str], completions: list[Image.Image], **kwargs) -> list[None]:
    return [None] * len(completions)


def check_rewards_load(state: DoctorState) -> Row | str:
    """Check the rewards and their weights, before a model is loaded."""
    args, script_args = state.args, state.script_args
    check_rewards(script_args)
    if state.train_dataset is not None:
        check_reward_columns(script_args, state.train_dataset)
    if state.rows is not None:
        for function in user_functions([*script_args.rewards, *(script_args.eval_rewards or ())]):
            _try_reward(Rewards([function]), state.rows[0], args)
    if state.skips and any(map(has_model, [*script_args.rewards, *(script_args.eval_rewards or ())])):
        return Row(SKIPPED, f"Names, weights and columns fit. {state.skips}")
    functions = load_rewards(script_args)
    rewards = Rewards(functions, args.reward_weights, args.reward_required, args.multi_objective_aggregation)
    state.reward_funcs = functions
    state.eval_reward_funcs = load_eval_rewards(state.script_args, functions)
    fit_reward_options(script_args, args, [*functions, *(state.eval_reward_funcs or ())])
    if state.skips:  # in place of the trainer, which would warn
        offload_models(args, rewards)
    weighted_names = [
        f"{name} (weight {w:g})" for name, w in zip(rewards.names, rewards.weights.tolist(), strict=True)
    ]
    finding = f"{', '.join(weighted_names)}; {args.multi_objective_aggregation}."
    if state.eval_reward_funcs is not None:
        finding += f" Evaluation: {', '.join(Rewards(state.eval_reward_funcs).names)}."
    return finding


def _try_reward(rewards: Rewards, rows: PromptRows, args: PaCoGRPOConfig) -> None:
    """
    Call a reward once, on images of noise for the first prompt: blank ones have no contrast to divide by. A run does
    not, since a user's function may count its calls, draw random numbers, or pay for each image.
    """
    (height, width) = rows.requested_sizes[0]
    layout = rows.image_layouts[0]
    size = training_size(height or args.height, width or args.width, *layout, args.resolution_scale, 1)
    # Separate images are joined
    height, width = (side * count // own for side, count, own in zip(size, rows.layouts[0], layout, strict=True))
    noise = np.random.default_rng(args.seed)
    images = [
        Image.fromarray(noise.integers(256, size=(height, width, 3), dtype=np.uint8))
        for _ in range(args.num_generations)
    ]
    batch = [rows.row(0) | {"completions": image} for image in images]
    arguments = reward_arguments(batch, len(batch), TrainerState(), lambda *_: None, lambda *_: None)
    try:
        values = rewards.call(0, **arguments)
        if inspect.iscoroutine(values):
            asyncio.run(values)
    except RewardError as error:
        raise RewardError(f"{error} It was called on images of noise.") from error.__cause__


def check_model(state: DoctorState) -> Row | str:
    """Check that the model loads and that its adapter fits."""
    args, script_args = state.args, state.script_args
    if state.skips:
        if state.eval_dataset is not None:
            rewards = Rewards(state.eval_reward_funcs or _require(state.reward_funcs))
            read_eval_rows(state.eval_dataset, args, rewards)
        return Row(SKIPPED, state.skips)
    trainer = PaCoGRPOTrainer(
        model=script_args.model_name_or_path, reward_funcs=_require(state.reward_funcs), args=args,
        train_dataset=state.train_dataset, eval_dataset=state.eval_dataset, eval_reward_funcs=state.eval_reward_funcs,
        peft_config=get_peft_config(script_args, args.model_init_kwargs),
    )  # fmt: skip
    model = trainer.model
    weights = list(trained_parameters(trainer.model).values())
    description = f"no adapter: all weights of the transformer are trained, in {weights[0].dtype}"
    is_new = False
    if isinstance(model, PeftModel):
        is_new = trainer.trained_from is None
        adapter = model.peft_config[model.active_adapter]
        layers = model.base_model.targeted_module_names
        description = f"LoRA r = {adapter.r}, alpha = {adapter.lora_alpha} on {len(layers)} layers"
        description += "" if is_new else f", continued from '{script_args.adapter}'"
    if not shards_weights(args):  # nothing is generated then, see `run_check`
        state.generator = SampleGenerator(trainer.policy, trainer.train_rows, args, is_new)
    state.trainer = trainer
    finding = (
        f"{type(trainer.pipeline).__name__} ({type(trainer.family).__name__}) on {trainer.accelerator.device}, "
        f"{trainer.compute_dtype}; {description}: {sum(p.numel() for p in weights):,} parameters trained. "
        f"Trained at {_format_counts(Counter(trainer.train_rows.training_sizes))} (multiples of "
        f"{trainer.family.size_multiple(trainer.pipeline)} pixels)."
    )
    limit = trainer.family.max_stable_epsilon
    epsilon = max(args.clip_range)
    if limit is None or args.loss_type != "grpo" or epsilon <= limit:
        return finding
    finding += f" The clip range is {epsilon:g}; this model was seen to collapse above {limit:g}."
    return Row(WARNING, finding, f"Set `epsilon` to at most {limit:g}. Training may still collapse later.")


def check_prompt_lengths(state: DoctorState) -> Row | str:
    """Check that the model does not truncate prompts."""
    if state.trainer is not None:
        pipeline = state.trainer.pipeline
    else:
        model = state.script_args.model_name_or_path
        if resolve_model_configs(model, str(Path(state.temporary_dir) / "tokenizers")) != model:
            return Row(SKIPPED, f"The tokenizers of '{model}' cannot be read from the Hub.")
        pipeline = load_without_weights(model, {"default": torch.bfloat16}, **(state.args.model_init_kwargs or {}))
    splits = _require(state.rows)
    with truncations_counted(pipeline):  # tokenizers warn of each long text
        family = get_family(pipeline)
        described = [describe_truncated(pipeline, family, rows.named_prompts, rows.where) for rows in splits]
    if warnings := [text for text in described if text is not None]:
        return Row(WARNING, " ".join(warnings))
    count = sum(len(rows.named_prompts) for rows in splits)
    return f"{type(pipeline).__name__} reads each of {count} prompts to its end."


def check_memory(state: DoctorState) -> Row:
    """Plan the memory of a process by phase, from configs alone, and compare it with a device."""
    plan_args = _require(state.plan_args)
    total = plan_args.device_bytes(state.args)
    if isinstance(state.args, PaCoGRPOConfig):
        plan = image_plan(state.script_args, state.args, _require(state.train_dataset), state.eval_dataset)
        if total is not None:
            plan = skip_checkpointing(plan, state.script_args, total)
    else:
        plan = judge_plan(state.script_args, state.args)
    host = host_memory() if plan_args.device_memory is None else None  # another card may be in another machine
    return memory_row(plan, total, host)


def host_memory() -> int:
    """Return the memory of this machine, or of the process's container."""
    limit = Path("/sys/fs/cgroup/memory.max")
    total = psutil.virtual_memory().total
    content = limit.read_text().strip() if limit.exists() else "max"
    return total if content == "max" else min(int(content), total)


def memory_row(plan: MemoryPlan, total: int | None, host: int | None = None) -> Row:
    """Describe the phases of a run, compared with a device of `total` bytes and a machine of `host` bytes."""
    lines = [plan.summary()]
    verdict = OK
    advice = ""
    limit = USABLE_FRACTION * (total or 0)
    if total is None:
        lines.append("There is no CUDA device to compare with; `--device_memory 24GiB` plans for one.")
    else:
        lines.append(f"The device has {format_size(total)}, of which the plan may take {USABLE_FRACTION:.0%}.")
    if total is not None and plan.peak > limit:
        verdict = FAILED if plan.peak > total else WARNING
        savings = [option for option, saves in plan.run.savings(plan).items() if saves]
        advice = f"What saves memory: {', '.join([*savings, 'smaller images or models', 'a larger device'])}."
    elif total is not None:
        if plan.run.args.gradient_checkpointing and not plan.gradient_checkpointing:
            lines.append("This is without gradient checkpointing: the run switches it off, since it fits without.")
        lines.append(f"The largest micro-batch that fits: {plan.largest_batch(limit)}.")
        if plan.gradient_checkpointing and replace(plan, gradient_checkpointing=False).peak <= limit:
            lines.append(
                "It fits without gradient checkpointing, too: `--gradient_checkpointing False` saves one forward of each "
                "trained step."
            )
    if total is not None and (large_commands := [phase.name for phase in plan.commands if phase.total > limit]):
        names = ", ".join(f"`paco-trl {name}`" for name in large_commands)
        lines.append(f"With the trained model, {names} takes more than that. See the row, and `--quantization` there.")
    count = int(os.environ.get("LOCAL_WORLD_SIZE", plan.num_processes))
    lines.append(f"Host memory: {format_size(plan.host_peak)} for each of {count} process(es) of a machine.")
    if host is not None:
        lines[-1] = f"{lines[-1][:-1]}; this one has {format_size(host)}."
        if count * plan.host_peak > host:
            verdict = verdict if verdict == FAILED else WARNING
            advice += " Host memory is short: fewer processes, no `offload` options, or `embeddings_dir`."
    if plan.mapped_peak:
        dtype = "bfloat16" if plan.run.args.bf16 else "float32"
        lines.append(
            f"Besides, {format_size(plan.mapped_peak)} are mapped from files, which the system can drop, if these are "
            f"in {dtype}; other files are converted, and need as much host memory."
        )
    return Row(verdict, "\n".join(lines), advice.strip(), table=plan.table())


def check_noise_free(state: DoctorState) -> Row | str:
    """Check that the policy without noise generates the same latents as the pipeline."""
    generator = _require(state.generator)
    pipeline_output = generator.generate_untouched()
    policy = generator.generate(sde=generator.sde_settings(noise_level=0.0))
    difference = (policy.latents - pipeline_output.latents).abs().max().item()
    scale = pipeline_output.latents.abs().max().item()
    tolerance = _NOISE_FREE_TOLERANCE[_require(state.trainer).compute_dtype] * scale
    finding = (
        f"{generator.height} x {generator.width} pixels, {state.args.num_inference_steps} steps: the last latents of "
        f"the untouched pipeline and of the policy at noise level 0 differ by {difference:.3g} (largest number "
        f"{scale:.3g}, accepted {tolerance:.3g})."
    )
    if difference <= tolerance:  # NaN is not
        return finding
    return Row(FAILED, finding, "Look for a changed scheduler, or a new adapter that is not the identity.")


def check_ratio(state: DoctorState) -> Row | str:
    """Check that the replay reproduces the log-probabilities of the rollout, and has a gradient."""
    generator = _require(state.generator)
    trainer = _require(state.trainer)
    args = state.args
    device = trainer.accelerator.device
    layout = args.round_plan
    ratios = defaultdict(list)
    rng = torch.Generator().manual_seed(args.seed)
    # Fill the zero weights of a new adapter, which a rollout or replay might otherwise ignore unnoticed
    zero_weights = [
        weight for name, weight in trainer.model.named_parameters() if ".lora_B." in name and not weight.any()
    ]
    try:
        for weight in zero_weights:
            weight.data.copy_(1e-2 * torch.randn(weight.shape, generator=rng))
        round = generator.rollout()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for batch in round.batches[0]:
            for micro_batch in batch.split(layout.micro_batches_per_rollout_batch, trainer.family):
                for step in cast(list[RecordedStep], micro_batch.steps):
                    log_prob = generator.replay(step)
                    log_prob.mean().backward()
                    ratios[step.index].append(torch.exp(log_prob.detach() - step.log_prob))
    finally:  # even without enough memory, since the rewards of the untrained model are checked next
        for weight in zero_weights:
            weight.data.zero_()
    deviations = {index: (torch.cat(values) - 1).abs().max().item() for index, values in ratios.items()}
    has_gradient = any(p.grad is not None and p.grad.any() for p in trainer.model.parameters())
    trainer.model.zero_grad(set_to_none=True)
    steps = ", ".join(f"step {index}: {value:.3g}" for index, value in deviations.items())
    finding = (
        f"{len(round.samples)} image(s), max |ratio - 1| before the first update "
        f"{max(deviations.values()):.3g} ({steps}); the run stops above {trainer.statistics.tolerance:.3g}."
    )
    if device.type == "cuda":
        peak_memory = format_size(torch.cuda.max_memory_allocated(device))
        finding += f" Forward and backward took {peak_memory} on the device, without the optimizer's states."
    limit = min(trainer.statistics.tolerance, args.epsilon / 10)  # above which a run warns
    if not all(value <= limit for value in deviations.values()):  # NaN is not
        is_good = all(value <= trainer.statistics.tolerance for value in deviations.values())
        advice = (
            "Rollout and training compute different numbers. Look for dropout, layers that behave differently with "
            f"gradients, or a compiled replay. In bf16, it may be rounding if `epsilon` ({args.epsilon:g}) is small: "
            "then set `ratio_tolerance` above it."
        )
        return Row(WARNING if is_good else FAILED, finding, advice)
    if not has_gradient:
        return Row(FAILED, f"{finding} What is trained gets no gradient.", "Find out what cuts the graph.")
    return finding


def check_reward_values(state: DoctorState) -> list[Row]:
    """Check each reward on the images of a prompt, scored like in a round."""
    trainer = _require(state.trainer)
    rows = dict[Callable, Row]()  # rewards shared with the evaluation are shown once
    round = _require(state.generator).rollout()
    for scorer in dict.fromkeys((trainer.scorer, trainer.evaluator.scorer)):
        with scorer.scoring(round, trainer.state) as scoring:
            scoring.add(round.completions)
        rewards, values = scorer.rewards, scoring.scores.rewards  # (completions, rewards)
        for function, name, column in zip(rewards.functions, rewards.names, values.T, strict=True):
            if function in rows:
                continue
            label = "reward" if rewards is trainer.rewards else "evaluation reward"
            values_text = ", ".join(f"{value:.4g}" for value in column.tolist())
            row = rows[function] = Row(
                OK, f"{len(values)} images of one prompt: {values_text}.", check=f"{label} {name}"
            )
            if column.isnan().any():
                row.verdict = FAILED if column.isnan().all() else WARNING
                reason = getattr(function, "missing_score_reason", None) or "find out why the reward gives None"
                row.advice = f"Images without a value (nan) are left out: {reason}."
            elif len(values) > 1 and column.min() == column.max():
                row.verdict = WARNING
                row.advice = "A group of equal values teaches nothing. Watch `frac_reward_zero_std`."
    return list(rows.values())


# ---- The command ----

# Checks of a judge. The other commands have no pairs, and a judge has no rollout
JUDGE_CHECKS = ("versions", "configuration", "output directory", "hub", "pairs", "memory")
# Name -> check, and the checks that it requires
CHECKS: dict[str, tuple[Callable[[DoctorState], Any], tuple[str, ...]]] = {
    "versions": (check_versions, ()),
    "configuration": (check_configuration, ()),
    "output directory": (check_output_folder, ("configuration",)),
    "hub": (check_hub, ("configuration",)),
    "data": (check_data, ("configuration",)),
    "pairs": (check_pairs, ("configuration",)),
    "rewards": (check_rewards_load, ("configuration",)),
    "model and adapter": (check_model, ("data", "number of prompts", "rewards")),
    "prompt lengths": (check_prompt_lengths, ("data",)),
    "memory": (check_memory, ("configuration", "data")),
    "noise-free image": (check_noise_free, ("model and adapter",)),
    "ratio": (check_ratio, ("model and adapter",)),
    "reward values": (check_reward_values, ("noise-free image",)),
}


def examine(command: str, argv: list[str], console: Console) -> list[Row]:
    """Run all possible checks for the options of a training command."""
    rows: list[Row] = []
    names = JUDGE_CHECKS if command == "reward" else CHECKS.keys() - {"pairs"}
    checks = {name: check for name, check in CHECKS.items() if name in names}
    with tempfile.TemporaryDirectory() as temporary_dir, ExitStack() as stack:
        stack.callback(setattr, constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)
        state = DoctorState(parser_for(command), argv, temporary_dir)
        for number, (name, (check, requirements)) in enumerate(checks.items(), start=1):
            console.print(f"\\[{number}/{len(checks)}] {name} ...", highlight=False)
            missing = [row.check for row in rows if row.check in requirements and row.verdict in (FAILED, SKIPPED)]
            for row in [Row(SKIPPED, f"needs: {', '.join(missing)}")] if missing else run_check(check, state):
                row.check = row.check or name
                advice = f"\n[bold]->[/] {escape(row.advice)}" if row.advice else ""
                text = f"{escape(row.check)}: [{_COLORS[row.verdict]}]{row.verdict}[/]\n{escape(row.finding)}{advice}"
                content = text if row.table is None else Group(row.table, text)  # the verdict is seen last
                console.print(Padding(content, (0, 0, 0, 6)), highlight=False)
                rows.append(row)
        if state.trainer is not None:
            state.trainer.accelerator.end_training()
    return rows


def run_check(check: Callable[[DoctorState], Any], state: DoctorState) -> list[Row]:
    """Run a check if its model is available. Its errors and warnings become rows."""
    is_generating = check in (check_noise_free, check_ratio)
    handler = BufferingHandler(1000)
    logger = logging.getLogger(_PACKAGE)
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        if is_generating and shards_weights(state.args):
            reason = "DeepSpeed or FSDP places the model only when training begins."
            return [Row(SKIPPED, reason, "Run the doctor without it.")]
        result = check(state)
    except Exception as error:
        frames = "" if is_user_error(error) else frames_of_cause(error)
        sys.stderr.write(traceback.format_exc() if frames is None else frames)
        return [Row(FAILED, f"{type(error).__name__}: {error}" if frames is None else format_as_flags(error))]
    finally:
        logger.removeHandler(handler)
    rows = result if isinstance(result, list) else [Row(OK, result) if isinstance(result, str) else result]
    if (
        handler.buffer and rows[0].verdict == OK and not is_generating
    ):  # which warns about every prompt that CLIP truncates
        warnings_text = " ".join(dict.fromkeys(record.getMessage() for record in handler.buffer))
        rows[0] = replace(rows[0], verdict=WARNING, advice=warnings_text)
    return rows


def _format_counts(counter: Counter) -> str:
    """Format `Counter({(2, 2): 12})` as "2 x 2 (12)", the most frequent first."""
    entries = [f"{a} x {b} ({count})" for (a, b), count in counter.most_common(4)]
    return ", ".join(entries) + (f" and {len(counter) - 4} more" if len(counter) > 4 else "")


def diagnose(command: str, argv: list[str]) -> int:
    """Run all checks; return 0 if none failed, else 1."""
    # Under `accelerate launch` every process runs the checks, and one of them prints
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    rows = examine(command, argv, console)
    verdicts = Counter(row.verdict for row in rows)
    console.print(
        ", ".join(f"{verdicts[name]} [{color}]{name}[/]" for name, color in _COLORS.items() if verdicts[name])
    )
    return 1 if verdicts[FAILED] else 0
