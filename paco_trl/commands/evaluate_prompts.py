# SPDX-License-Identifier: Apache-2.0
"""`paco-trl evaluate prompts`: compares adapters with their base model on your own prompts, with any rewards."""

import asyncio
import gc
import hashlib
import inspect
import itertools
import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image
from rich.console import Console
from rich.markup import escape
from tqdm.auto import tqdm
from transformers import TrainerState

from ..data.image_sets import PANEL_OPTIONS, SEPARATE
from ..generation.image_files import generate_missing
from ..generation.inference import DEFAULT_MODEL, PipelineSpec, read_adapter, read_pipeline
from ..image_benchmarks import print_report, save_generation_report
from ..image_benchmarks.paired_results import GenerationResults, MetricRow, SampleKey, ShownSet, compute_table
from ..image_benchmarks.score_store import open_scores
from ..rewards.checks import check_columns
from ..rewards.scoring import COMPLETIONS_PER_CALL, offloadable_models, reward_arguments
from ..rewards.weighting import Rewards
from ..rollout import FAMILIES, get_family
from ..rollout.adapters import SavedAdapter
from ..rollout.encoder import ROWS_AHEAD
from ..rollout.kernels import keep_dtype_of_norms
from ..rollout.loading import is_buildable, load_without_weights, read_index
from ..rollout.policy import Policy
from ..rollout.policy_building import check_trained, wrap_pipeline
from ..rollout.prompt_rows import PromptRows
from ..rollout.rounds import Batch, Round
from ..rollout.sde import STREAMS
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
from .evaluate_arguments import PromptsArguments
from .main import print_message
from .options import config_options, find_unused
from .script_arguments import (
    PromptDataArguments,
    RewardOptions,
    ScriptArguments,
    check_judged,
    check_sizes,
    find_unused_edit_options,
    load_rewards,
    load_train_prompts,
)


logger = logging.getLogger(__name__)

# Row of the prompt, and number of its image
ImageIndex = tuple[int, int]


@dataclass
class PromptSystem:
    """The base model or an adapter, with its images and their scores."""

    role: str  # `"base"` or `"tuned"`
    name: str  # name in reports
    leak: str | None  # warns that it was trained on a prompt
    settings: dict[str, Any]  # settings of the images, as reports show them
    folder: Path
    files: dict[ImageIndex, Path]
    scores: dict[str, dict[SampleKey, float]] = field(default_factory=dict)  # by reward; NaN where it gave none

    def count_failures(self, reward: str) -> int:
        """Count the images without a score."""
        return sum(map(math.isnan, self.scores[reward].values()))

    def sum_scores(self) -> dict[SampleKey, float]:
        """Sum the rewards of each image; NaN if any gave none."""
        return {index: sum(values[index] for values in self.scores.values()) for index in self.files}

    def entry(self) -> dict[str, Any]:
        """Return the system as results have it, with the number of its images and of those without a score."""
        counts = {"images": len(self.files)} | {
            f"images without {name}": self.count_failures(name) for name in self.scores
        }
        return {"role": self.role, "name": self.name, "settings": self.settings, "counts": counts}


def evaluate_prompts(args: PromptsArguments) -> None:
    """Generate, score, and write a page per adapter. Interrupted evaluations resume."""
    base, *adapter_specs = _read_systems(args)
    script_args, rows, settings = _read_rows(args, base)
    leaks = [None, *(_find_leak(spec, rows) for spec in adapter_specs)]
    for leak in filter(None, leaks):
        logger.warning(f"{leak} Evaluate on others, or train without these (`paco-trl grpo --dataset_split`).")
    check_judged(script_args, rows.dataset)
    rewards = Rewards(load_rewards(script_args))
    rewards.check_group_size(args.num_generations, "num_generations")
    check_columns(rewards.functions, rows.dataset, "the dataset")

    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), mixed_precision="bf16" if settings["bf16"] else "no"
    )
    models = offloadable_models(rewards.functions, accelerator.device)
    with sole_writer(args.output_dir, "images"):
        systems = _generate_systems(args, [base, *adapter_specs], leaks, settings, rows, accelerator)
        with placed_on(models, accelerator.device):
            for system in systems:
                system.scores = _score(rewards, rows, system.files, system.folder)
        if accelerator.is_main_process:
            _write_pages(args, systems, rows, rewards.names)


def _read_rows(args: PromptsArguments, base: PipelineSpec) -> tuple[ScriptArguments, PromptRows, dict[str, Any]]:
    """Read the prompts; return them with the options of training that they have, and the settings of all images."""
    class_name = read_index(base.model, base.hub_arguments)["_class_name"]
    class_name = class_name if isinstance(class_name, str) else class_name[-1]
    family = FAMILIES.get(class_name)
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
    del settings["set_layout"]  # the rows have it
    if not rows.has_separate:
        raise_errors(find_unused(args, PANEL_OPTIONS, "without a set of separate images"))
        settings = {name: value for name, value in settings.items() if name not in PANEL_OPTIONS}
    settings |= {"prompts": digest(describe(rows.dataset)), "model_files": digest_model_files(base.model)}
    if set(rows.negative_prompts) != {None} and is_buildable(base.model, base.hub_arguments, None):
        pipeline = load_without_weights(base.model, {"default": torch.float32}, encodes=False, **base.hub_arguments)
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
        weights = {} if adapter is None else {"adapter": adapter, "weights": spec.weights["adapter_weights"]}
        folder = Path(args.output_dir) / name
        images = StageFolder(folder, settings | weights).images
        indices = itertools.product(range(len(rows)), range(args.num_generations))
        files = {(row, image): images / str(row) / f"{image}.png" for row, image in indices}
        if not all(path.exists() for path in files.values()):
            _generate(spec, settings, rows, files, accelerator)
            gc.collect()
        role = "tuned" if adapter else "base"
        systems.append(PromptSystem(role, public_name(adapter or spec.model), leak, public_settings, folder, files))
    return systems


def _write_pages(
    args: PromptsArguments, systems: list[PromptSystem], rows: PromptRows, reward_names: list[str]
) -> None:
    """Write and print the results of each adapter beside its base model, or of the base model alone."""
    sources = Path(args.output_dir) / "base" / "sources"  # source images of prompts
    rows.sources = rows.sources or rows.references  # whether or not any image was missing
    for number in range(len(rows)):
        for image in rows.images(number)[:1]:
            write_atomically(sources / f"{number}.png", to_png(image))
    base, *tuned = systems
    for page_systems in [[base, system] for system in tuned] or [[base]]:
        results = _results(public_name(str(args.dataset_name)), rows, reward_names, page_systems, sources)
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
            f"Adapters must have the same base model, here '{first_spec.model}', but one has another. Evaluate them "
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


def _find_leak(spec: PipelineSpec, rows: PromptRows) -> str | None:
    """Find an evaluation prompt that a trained model saw: the first of its training, by its record."""
    prompt = spec.card.prompt if spec.card else None
    first = prompt[0] if isinstance(prompt, list) else prompt
    row = next((image.row_index for image in rows.image_prompts if image.prompt == first), None)
    if row is None:
        return None
    name = public_name(spec.name)
    return f"{name} was trained on the prompt of row {row}, and maybe on others: it may be better on these alone."


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


def _describe_work(rows: PromptRows, files: Mapping[ImageIndex, Path], num_steps: int) -> str:
    """Describe what the missing images take, by size: `12 image(s) of 1024 x 1024, 20 steps`."""
    counts: Counter[tuple[int, int]] = Counter()
    for (row, _), path in files.items():
        counts[rows.inference_sizes[row]] += 0 if path.exists() else rows.lengths[row]
    sizes = [f"{count} image(s) of {height} x {width}" for (height, width), count in counts.most_common() if count]
    return f"{', '.join(sizes)}, {num_steps} steps"


def _generate(spec: PipelineSpec, settings: dict, rows: PromptRows, files: dict, accelerator: Accelerator) -> None:
    """Generate the missing images of a system like `evaluate()` of training, from the same noise."""
    dtype = torch.bfloat16 if settings["bf16"] else torch.float32
    scale = settings["guidance_scale"]
    pipeline = spec.load("cpu")
    family = get_family(pipeline)
    model = pipeline.transformer
    rows.resolve_for_pipeline(pipeline, family)
    if accelerator.is_main_process:
        print_message("evaluate", _describe_work(rows, files, settings["num_inference_steps"]))
    keep_dtype_of_norms(model)
    # Frozen weights make room for the text encoders
    recording_pipeline = wrap_pipeline(pipeline, family, model.requires_grad_(False), dtype)
    policy = Policy(recording_pipeline, accelerator, scale, offload_embeddings=True)
    key = (settings["seed"], STREAMS["evaluation"], 0)
    sizes = rows.inference_sizes
    evaluation_round = Round(rows, range(len(rows)), settings["num_generations"], key, sizes)
    calls = [{f"{row + 1}/{image + 1}": path} for (row, image), path in files.items()]

    def generate(number: int) -> dict:
        completion = evaluation_round.completions[number]
        with torch.no_grad():
            policy.encoder.prefetch(
                rows, [completion.row_index], ahead=range(completion.row_index + 1, len(rows))[:ROWS_AHEAD]
            )
            batches = [Batch([sample]) for sample in completion.samples]
            # The last image completes a set
            *_, (completed_set,) = policy.rollout(
                evaluation_round, batches, settings["num_inference_steps"], is_collective=False
            )
        image, completed_set.image = completed_set.image, None
        return dict(zip(calls[number], [image], strict=True))

    call_sizes = [(*sizes[row], rows.lengths[row]) for row, _ in files]
    with policy.on_device():
        generate_missing(pipeline, calls, generate, f"images of {public_name(spec.name)}", call_sizes)
    accelerator.wait_for_everyone()


def _score(
    rewards: Rewards, rows: PromptRows, files: Mapping[ImageIndex, Path], folder: Path
) -> dict[str, dict[SampleKey, float]]:
    """Score the images of a system with each reward; a missing score is NaN, and the next run requests it again."""
    indices = {f"{row}/{image}": (row, image) for row, image in files}
    digests = {key: hashlib.sha256(files[index].read_bytes()).hexdigest() for key, index in indices.items()}
    num_generations = len(indices) // len({row for row, _ in files})
    values: dict[str, dict[SampleKey, float]] = {}
    for index, name in enumerate(rewards.names):
        with (
            open_scores(folder, name, rewards.descriptions[name], digests) as store,
            asyncio.Runner() as runner,
            torch.no_grad(),
            tqdm(total=len(store.pending), desc=f"Scoring {name}", disable=not store.is_main_process) as progress,
        ):
            pending = set(store.pending)
            batches = [
                store.pending[i : i + COMPLETIONS_PER_CALL] for i in range(0, len(pending), COMPLETIONS_PER_CALL)
            ]
            if rewards.compares_group[index]:  # all images of a prompt
                batches = [list(keys) for _, keys in itertools.groupby(indices, key=lambda key: indices[key][0])]
                batches = [keys for keys in batches if not pending.isdisjoint(keys)]
            for keys in batches:
                batch = []
                for key in keys:
                    with Image.open(files[indices[key]]) as image:
                        batch.append({**rows.row(indices[key][0]), "completions": image.convert("RGB")})
                arguments = reward_arguments(
                    batch, num_generations, TrainerState(), log_extra=lambda *_: None, log_metric=lambda *_: None
                )
                scores = rewards.call(index, **arguments)
                scores = runner.run(scores) if inspect.iscoroutine(scores) else scores
                records = [
                    {"key": key, "score": None if score is None else float(score), "incomplete": score is None}
                    for key, score in zip(keys, scores, strict=True)
                    if key in pending
                ]
                store.append(*records)
                progress.update(len(records))
            score_by_key = {key: record["score"] for key, record in store.finish().items()}
        values[name] = {indices[key]: math.nan if score is None else score for key, score in score_by_key.items()}
    return values


def _results(
    dataset: str, rows: PromptRows, names: list[str], systems: Sequence[PromptSystem], sources: Path
) -> GenerationResults:
    """Compute the means of the rewards and of their sum, with intervals over prompts, and the paired gains."""
    labels = {name: name for name in names}
    columns = [dict(system.scores) for system in systems]
    if len(names) > 1:
        labels["sum"] = "sum of the rewards"
        columns = [values | {"sum": system.sum_scores()} for system, values in zip(systems, columns, strict=True)]
    lines = [
        MetricRow(name, label, "dimension" if name in names else "average", "", [name])
        for name, label in labels.items()
    ]
    alerts = [
        f"{name} gave no score for {count} of {len(system.files)} images of {system.name}, which are left out of its "
        "results."
        for system in systems
        for name in names
        if (count := system.count_failures(name))
    ]
    alerts += [system.leak for system in systems if system.leak]
    leakage = (
        "An adapter that was trained on these prompts may only be better on them. Of its training prompts only the "
        "first was looked for."
    )
    noise = (
        "Image k of a prompt starts from the same noise for all models, as in `evaluate()` of training with this seed."
    )
    return {
        "benchmark": None,
        "dataset": dataset,
        "num_prompts": len(rows),
        "systems": [system.entry() for system in systems],
        "scorers": {},
        "tables": [compute_table("Rewards", lines, columns)],
        "breakdowns": [],
        "alerts": alerts,
        "notes": [noise, leakage],
        "sets": _sets(rows, systems, columns, labels, sources),
        "headline": list(labels)[-1],
    }


def _sets(
    rows: PromptRows,
    systems: Sequence[PromptSystem],
    columns: Sequence[dict[str, dict[SampleKey, float]]],
    metrics: Iterable[str],
    sources: Path,
) -> list[ShownSet]:
    """Return each image of the systems side by side, with its scores, as the page shows them."""
    dataset = rows.dataset
    prompt_ids = dataset["id"] if "id" in dataset.column_names else [f"prompt {row + 1}" for row in range(len(rows))]
    layouts = dataset["layout"] if "layout" in dataset.column_names else [None] * len(rows)
    has_several = len(systems[0].files) > len(rows)
    return [
        {
            "key": f"{prompt_ids[row]}" + f", image {image + 1}" * has_several,
            "prompt": rows.prompts[row],
            "source": None if rows.sources is None else str(sources / f"{row}.png"),
            "pictures": [[str(system.files[row, image])] for system in systems],
            "panels": list(rows.layouts[row]),
            "is_separate": layouts[row] == SEPARATE,
            "scores": [{name: values[name][row, image] for name in metrics} for values in columns],
        }
        for row, image in systems[0].files
    ]
