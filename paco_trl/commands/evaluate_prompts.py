# SPDX-License-Identifier: Apache-2.0
"""`paco-trl evaluate prompts`: compares adapters with their base model on your own prompts, with any rewards."""

import gc
import itertools
import logging
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape

from ..data.image_sets import PANEL_OPTIONS
from ..generation.inference import DEFAULT_MODEL, PipelineSpec, read_adapter, read_pipeline
from ..image_benchmarks import print_report, save_generation_report
from ..image_benchmarks.prompt_results import prompt_results
from ..image_benchmarks.prompt_systems import PromptSystem, find_leak, generate_images, score_images
from ..image_benchmarks.report import read_metrics
from ..rewards.checks import check_columns
from ..rewards.scoring import move_models_to_cpu
from ..rewards.weighting import Rewards
from ..rollout import get_family
from ..rollout.adapters import SavedAdapter
from ..rollout.families import find_family
from ..rollout.loading import is_buildable, load_without_weights, read_index
from ..rollout.policy_building import check_trained
from ..rollout.prompt_rows import PromptRows
from ..trainer.paco_grpo_config import PaCoGRPOConfig
from ..utils.errors import raise_errors
from ..utils.files import digest, write_atomically
from ..utils.fingerprint import describe, digest_model_files
from ..utils.images import to_png
from ..utils.locks import sole_writer
from ..utils.names import OtherBaseError, public_name
from ..utils.option_checks import check_panel_options
from ..utils.placement import placed_on
from ..utils.stage_folder import StageFolder
from .evaluate import start_processes
from .evaluate_arguments import PromptsArguments
from .messages import print_message
from .options import config_options, find_unused
from .script_arguments import (
    PromptDataArguments,
    RewardOptions,
    ScriptArguments,
    check_reward_columns,
    check_sizes,
    find_unused_edit_options,
    load_rewards,
    load_train_prompts,
)


logger = logging.getLogger(__name__)


def evaluate_prompts(args: PromptsArguments) -> None:
    """Generate, score, and write a page per adapter. Interrupted evaluations resume."""
    start_processes()
    base, *adapter_specs = _read_systems(args)
    script_args, rows, settings = _read_rows(args, base)
    leaks = [None, *(find_leak(spec, rows) for spec in adapter_specs)]
    for leak in filter(None, leaks):
        logger.warning(f"{leak} Evaluate on others, or train without these (`paco-trl grpo --dataset_split`).")
    check_reward_columns(script_args, rows.dataset)
    rewards = Rewards(load_rewards(script_args))
    rewards.check_group_size(args.num_generations, "num_generations")
    check_columns(rewards.functions, rows.dataset, "the dataset")

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), mixed_precision="bf16" if settings["bf16"] else "no"
    )
    for name in args.folders[1:] or args.folders:  # the pages of adapters, or that of the base model alone
        read_metrics(Path(args.output_dir) / name)  # so that it is not refused after hours of generation
    models = move_models_to_cpu(rewards.functions, accelerator.device)
    with sole_writer(args.output_dir, "images"):
        systems = _generate_systems(args, [base, *adapter_specs], leaks, settings, rows, accelerator)
        with placed_on(models, accelerator.device):
            for system in systems:
                system.scores = score_images(rewards, rows, system.images, system.folder)
        if accelerator.is_main_process:
            _write_pages(args, systems, rows, rewards.names)


def _read_rows(args: PromptsArguments, base: PipelineSpec) -> tuple[ScriptArguments, PromptRows, dict[str, Any]]:
    """Read the prompts; return their options as training has them, their rows, and the settings of all images."""
    class_name = read_index(base.model, base.hub_arguments)["_class_name"]
    class_name = class_name if isinstance(class_name, str) else class_name[-1]
    family = find_family(class_name)
    if family is not None and family.requires_source_image:
        is_editing = True
    elif base.card is not None:
        is_editing = base.card.trained_on == "edits"
    else:
        is_editing = config_options()["family_defaults"].get(class_name, {}).get("edits", False)
    args.edits |= is_editing and "edits" not in args.chosen  # as in training
    raise_errors(find_unused_edit_options(args))
    shared_fields = (*fields(PromptDataArguments), *fields(RewardOptions))
    script_args: Any = ScriptArguments(**{field.name: getattr(args, field.name) for field in shared_fields})
    script_args.model_name_or_path, script_args.chosen = base.model, args.chosen
    dataset = load_train_prompts(script_args)
    settings = _settings(args, base)
    check_panel_options(*(settings[name] for name in PANEL_OPTIONS))
    rows = PromptRows(dataset, SimpleNamespace(**settings, resolution_scale=1.0), "the dataset")
    check_sizes(args, args, rows.dataset)
    del settings["set_layout"]  # each row has its layout
    if not rows.has_separate:
        raise_errors(find_unused(args, PANEL_OPTIONS, "without a set of separate images"))
        settings = {name: value for name, value in settings.items() if name not in PANEL_OPTIONS}
    settings |= {"prompts": digest(describe(rows.dataset)), "model_files": digest_model_files(base.model)}
    if set(rows.negative_prompts) != {None} and is_buildable(base.model, base.hub_arguments, None):
        pipeline = load_without_weights(base.model, {"default": torch.float32}, encodes=False, **base.hub_arguments)
        # Check the negative prompts before weights are loaded
        rows.resolve_for_pipeline(pipeline, get_family(pipeline))
    return script_args, rows, settings


def _generate_systems(
    args: PromptsArguments,
    specs: list[PipelineSpec],
    leaks: list[str | None],
    settings: dict[str, Any],
    rows: PromptRows,
    accelerator: Accelerator,
) -> list[PromptSystem]:
    """Generate the missing images of the base model and the adapters."""
    systems: list[PromptSystem] = []
    public_settings = {name: value for name, value in settings.items() if name not in ("prompts", "model_files")}
    for name, adapter, spec, leak in zip(args.folders, [None, *(args.adapter or [])], specs, leaks, strict=True):
        weights = {} if adapter is None else {"adapter": adapter, "weights": spec.digest_weights()["adapter_weights"]}
        folder = Path(args.output_dir) / name
        images = StageFolder(folder, settings | weights).images
        indices = itertools.product(range(len(rows)), range(args.num_generations))
        files = {(row, image): images / str(row) / f"{image}.png" for row, image in indices}
        if not all(path.exists() for path in files.values()):
            generate_images(spec, settings, rows, files, accelerator, partial(print_message, "evaluate"))
            gc.collect()
        role, system_name = "tuned" if adapter else "base", public_name(adapter or spec.model)
        systems.append(PromptSystem(role, system_name, files, folder, public_settings, leak))
    return systems


def _write_pages(
    args: PromptsArguments, systems: list[PromptSystem], rows: PromptRows, reward_names: list[str]
) -> None:
    """Write and print the results of each adapter beside its base model, or of the base model alone."""
    source_images = rows.sources or rows.references
    sources = None if source_images is None else Path(args.output_dir) / "base" / "sources"
    if source_images is not None and sources is not None:
        for number in range(len(rows)):
            for image in source_images.load(number)[:1]:
                write_atomically(sources / f"{number}.png", to_png(image))
    base, *tuned = systems
    for page_systems in [[base, system] for system in tuned] or [[base]]:
        results = prompt_results(public_name(str(args.dataset_name)), rows, reward_names, page_systems, sources)
        paths = save_generation_report(results, page_systems[-1].folder, args.num_shown)
        print_report(results, console := Console())
        console.print(f"Page: {escape(str(paths['html']))}", soft_wrap=True)


def _read_systems(args: PromptsArguments) -> list[PipelineSpec]:
    """Read the base model and the adapters, which are all loaded with the settings of the first."""
    dtype = "auto" if args.bf16 is None else "bfloat16" if args.bf16 else "float32"
    options: dict[str, Any] = {"dtype": dtype, "quantization": args.quantization, "vae_tiling": args.vae_tiling}
    adapters = args.adapter or []
    model = args.model_name_or_path
    first_spec = (
        read_adapter(adapters[0], model, **options) if adapters else read_pipeline(model or DEFAULT_MODEL, **options)
    )
    try:
        others = [read_adapter(adapter, first_spec.model, **options) for adapter in adapters[1:]]
    except OtherBaseError as error:
        raise ValueError(
            f"{str(error).partition('. ')[0]}. Adapters that are evaluated together have one base model: evaluate them "
            "separately."
        ) from error
    adapter_specs = [first_spec, *others] if adapters else []
    systems = [
        replace(first_spec, adapter=t.adapter, lora=t.lora, transformer=t.transformer, card=t.card)
        for t in adapter_specs
    ]
    if is_buildable(first_spec.model, first_spec.hub_arguments, None):
        for system in systems:
            pipeline = load_without_weights(
                first_spec.model, {"default": torch.float32}, encodes=False, **first_spec.hub_arguments
            )
            if system.adapter is not None:
                check_trained(pipeline, get_family(pipeline), SavedAdapter.read(system.adapter, pipeline))
    return [first_spec.base, *systems]


def _settings(args: PromptsArguments, base: PipelineSpec) -> dict[str, Any]:
    """Return the settings of all images: the options, the first adapter's run, or the defaults, in this order."""
    names = ("height", "width", "guidance_scale", "negative_prompt", "set_layout", *PANEL_OPTIONS)
    settings: dict[str, Any] = {
        **{name: getattr(PaCoGRPOConfig, name) for name in names},
        "num_inference_steps": PaCoGRPOConfig.num_inference_steps_eval,
    }
    if base.card is not None:
        run = base.card.settings
        # Files of other versions or programs may lack any of these
        settings |= {name: run[name] for name in ("guidance_scale", "negative_prompt", *PANEL_OPTIONS) if name in run}
        settings |= {name: base.call[name] for name in ("num_inference_steps",) if name in base.call}
        settings["set_layout"] = None if args.edits else run.get("set_layout")
        if "inference_size" in run:
            settings |= dict(zip(("height", "width"), run["inference_size"], strict=True))
    settings |= {name: value for name in settings if (value := getattr(args, name)) is not None}
    settings |= {"bf16": base.dtype != torch.float32, **base.settings}
    del settings["dtype"]
    return settings | {"model": base.model, "num_generations": args.num_generations, "seed": args.seed}
