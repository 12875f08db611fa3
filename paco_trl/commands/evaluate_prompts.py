# SPDX-License-Identifier: Apache-2.0
"""`paco-trl evaluate prompts`: compares adapters with their base model on your own prompts, with any rewards."""

import gc
import json
import os
import shutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape

from ..data.image_sets import PANEL_OPTIONS, check_panel_options
from ..generation.image_files import generate_missing
from ..hub.settings import ImageModelCard, load_settings
from ..image_benchmarks import print_report, save_generation_report
from ..image_benchmarks.own_prompts import image_files, own_results, score_images
from ..rewards.runner import RewardRunner, offloadable_models
from ..rollout import family_of
from ..rollout.loading import check_peft_config, load_pipeline, make_policy
from ..rollout.prompt_rows import Completions, PromptRows
from ..rollout.sampler import PromptEncoder, RolloutSampler, on_device
from ..rollout.sde import STREAMS
from ..trainer.paco_grpo_config import PaCoGRPOConfig
from ..utils.files import adapter_weights_digest, digest, peft_folder, sole_writer, to_png, write_atomically
from ..utils.names import public_name
from ..utils.stage_folder import StageFolder
from .evaluate_arguments import PromptsArguments, refuse_unused
from .script_arguments import (
    PromptDataArguments,
    RewardOptions,
    ScriptArguments,
    check_judged,
    load_rewards,
    load_train_prompts,
)


def evaluate_prompts(args: PromptsArguments) -> None:
    """Generate, score, and write a page for each adapter; a stopped evaluation resumes."""
    adapters = args.adapter or []
    folders = ["base", *(Path(os.path.abspath(adapter)).name for adapter in adapters)]
    if len({*folders, "sources"}) <= len(folders):
        raise ValueError(
            f"`--adapter` is {', '.join(adapters)}: the results of each go to a directory of its last name, and "
            "two are the same, or `base` or `sources`. Use another `--output_dir` for some."
        )
    for adapter in adapters:
        check_peft_config(adapter, args.model_name_or_path)
    shared = (*fields(PromptDataArguments), *fields(RewardOptions))
    script_args = ScriptArguments(**{field.name: getattr(args, field.name) for field in shared})
    dataset = load_train_prompts(script_args)
    settings = _settings(args)
    check_panel_options(*(settings[name] for name in PANEL_OPTIONS))
    rows = PromptRows(dataset, SimpleNamespace(**settings, resolution_scale=1.0), "the dataset")
    del settings["set_layout"]  # the rows have it
    if not rows.has_separate:
        refuse_unused(args, PANEL_OPTIONS, "without a set of separate images")
        settings = {name: value for name, value in settings.items() if name not in PANEL_OPTIONS}
    settings["prompts"] = digest(json.dumps([rows.content(number) for number in range(len(rows))], default=str))
    check_judged(script_args, rows.dataset)
    rewards = RewardRunner(load_rewards(script_args))
    rewards.check_dataset(rows.dataset, "the dataset")

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), mixed_precision="bf16" if settings["bf16"] else "no"
    )
    models = offloadable_models(rewards.functions, accelerator.device)
    output_dir = Path(args.output_dir)
    systems: list[dict[str, Any]] = []
    shown = {name: value for name, value in settings.items() if name != "prompts"}
    with sole_writer(output_dir, "images"):
        for name, adapter in zip(folders, [None, *adapters], strict=True):
            weights = {} if adapter is None else {"adapter": adapter, "weights": adapter_weights_digest(adapter)}
            files = image_files(
                StageFolder(output_dir / name, settings | weights).images, len(rows), args.num_generations
            )
            if not all(path.exists() for path in files.values()):
                embeddings = output_dir / ".embeddings" if accelerator.num_processes > 1 else None
                _generate(args.model_name_or_path, adapter, settings, rows, files, accelerator, embeddings)
                gc.collect()
            role, title = "tuned" if adapter else "base", public_name(adapter or args.model_name_or_path)
            systems.append({"role": role, "name": title, "settings": shown, "files": files})
        with on_device(models, accelerator.device):
            for name, system in zip(folders, systems, strict=True):
                system["scores"] = score_images(rewards, rows, system["files"], output_dir / name)
        if not accelerator.is_main_process:
            return
        rows.sources = rows.sources or rows.references  # whether or not any image was missing
        for number in range(len(rows)):
            for image in rows.images(number)[:1]:
                write_atomically(output_dir / "sources" / f"{number}.png", to_png(image))
        for name, system in list(zip(folders, systems, strict=True))[len(adapters) > 0 :]:
            compared = [systems[0], system] if adapters else [system]
            dataset_name = public_name(str(args.dataset_name))
            results = own_results(dataset_name, rows, rewards.names, compared, output_dir / "sources")
            paths = save_generation_report(results, output_dir / name, args.num_shown)
            print_report(results, console := Console())
            console.print(f"Page: {escape(str(paths['html']))}", soft_wrap=True)


def load_run_card(adapter: str | None) -> Any:
    """Load the card of an adapter's training run, which has `settings`; `None` for an adapter without, and for none."""
    folder = peft_folder(adapter) if adapter else None
    card = load_settings(folder) if folder else None
    return card if isinstance(card, ImageModelCard) and card.settings else None


def _settings(args: PromptsArguments) -> dict[str, Any]:
    """Return what all images depend on: options, or else the settings of the first adapter's run, or else the defaults."""
    names = ("height", "width", "guidance_scale", "negative_prompt", "set_layout", *PANEL_OPTIONS)
    settings: dict[str, Any] = {
        **{name: getattr(PaCoGRPOConfig, name) for name in names},
        "num_inference_steps": PaCoGRPOConfig.num_inference_steps_eval,
        "bf16": True,
    }
    if (card := load_run_card(args.adapter[0] if args.adapter else None)) is not None:
        run = card.settings
        settings |= {"guidance_scale": run["guidance_scale"], "negative_prompt": run.get("negative_prompt")}
        settings |= {"num_inference_steps": card.call["num_inference_steps"], "bf16": run["precision"] == "bfloat16"}
        settings["set_layout"] = None if args.edits else run.get("set_layout")
        settings |= {name: run[name] for name in PANEL_OPTIONS if name in run}
        if "inference_size" in run:
            settings |= dict(zip(("height", "width"), run["inference_size"], strict=True))
    settings |= {name: value for name in settings if (value := getattr(args, name)) is not None}
    return settings | {"model": args.model_name_or_path, "num_generations": args.num_generations, "seed": args.seed}


def _generate(
    model: str, adapter: str | None, settings: dict, rows: PromptRows, files: dict, accelerator: Accelerator,
    embeddings: Path | None,
) -> None:  # fmt: skip
    """Generate the missing images of one system as `evaluate()` of training does, from the same noise."""
    dtype, scale = torch.bfloat16 if settings["bf16"] else torch.float32, settings["guidance_scale"]
    pipeline = load_pipeline(model, dtype)
    family = family_of(pipeline)
    negative_prompt = family.resolve_negative_prompt(pipeline, scale, settings["negative_prompt"])
    rows.measure(pipeline, family)
    policy, _ = make_policy(pipeline, family, adapter, dtype, is_deepspeed=False, reference=None)
    policy.model.eval().to(accelerator.device)
    encoder = PromptEncoder(pipeline, family, accelerator, negative_prompt, embeddings)
    sampler = RolloutSampler(policy, encoder, accelerator, scale, offload_embeddings=True)
    numbers, calls = list(range(len(rows))), [{f"{row + 1}/{image + 1}": path} for (row, image), path in files.items()]
    encoder.encode(rows, numbers)
    how = {"fetched": sampler.fetch(rows, numbers), "num_inference_steps": settings["num_inference_steps"]}
    key, sizes = (settings["seed"], STREAMS["evaluation"], 0), rows.inference_sizes

    def generate(number: int) -> dict:
        with torch.no_grad():
            completions = Completions(rows, numbers, settings["num_generations"])
            images = [[image] for image in completions.images_of(number)]
            # The last image finishes a set
            *_, generated = sampler.rollout(completions, images, key, sizes, is_collective=False, **how)
            return dict(zip(calls[number], generated.images, strict=True))

    sizes_of_calls = [(*sizes[row], rows.lengths[row]) for row, _ in files]
    with sampler.ready():
        generate_missing(pipeline, calls, generate, f"images of {public_name(adapter or model)}", sizes_of_calls)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process and embeddings is not None:
        shutil.rmtree(embeddings, ignore_errors=True)
