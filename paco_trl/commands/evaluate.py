# SPDX-License-Identifier: Apache-2.0
r"""
Is an adapter better than its base model on your own prompts? One call generates, scores, and writes a page:

    paco-trl evaluate prompts --dataset_name sets.jsonl --adapter paco-flux \
        --rewards consistency clip_t --output_dir evaluation/prompts

An adapter and its base model on T2IS-Bench or GEdit-Bench, under the same settings, in one call or step by step:

    paco-trl evaluate images t2is --dataset_name t2is.jsonl --adapter user/paco-flux \
        --judges Qwen/Qwen2.5-VL-7B-Instruct google/gemma-3-4b-it --output_dir evaluation

    paco-trl evaluate generate --dataset_name t2is.jsonl --output_dir evaluation/base
    paco-trl evaluate generate --dataset_name t2is.jsonl --output_dir evaluation/tuned --adapter user/paco-flux
    paco-trl evaluate score --dataset_name t2is.jsonl --output_dir evaluation/base \
        --judges Qwen/Qwen2.5-VL-7B-Instruct google/gemma-3-4b-it
    paco-trl evaluate score --dataset_name t2is.jsonl --output_dir evaluation/tuned \
        --judges Qwen/Qwen2.5-VL-7B-Instruct google/gemma-3-4b-it
    paco-trl evaluate report --dataset_name t2is.jsonl --base evaluation/base --tuned evaluation/tuned \
        --train_dataset_name user/my-prompts

`paco-trl evaluate <stage> --help` lists the options of a stage, which a YAML file can give as well
(`--config file.yaml`). Interrupted stages resume. Images that were generated elsewhere are scored with `--images directory`.

A judge is evaluated on rankings by people, or on EditReward-Bench:

    paco-trl evaluate judge --judge_model X-GenGroup/PaCo-Reward-7B --output_dir results
"""

import gc
import inspect
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from rich.console import Console
from rich.markup import escape

from ..data import load_edit_prompts, load_image_set_prompts
from ..dataset_building import ChatEndpoint, StageFolder, digest, generate_grids
from ..evaluation import AestheticScorer
from ..image_benchmarks import (
    System,
    add_results_to_card,
    find_edits,
    find_image_sets,
    find_leaks,
    gedit_results,
    generate_edits,
    load_system,
    load_t2is_bench,
    print_report,
    save_generation_report,
    score_aesthetics,
    score_alignment,
    score_consistency,
    score_duplicates,
    score_edits,
    t2is_results,
)
from ..image_benchmarks.card_results import check_card
from ..image_benchmarks.edit_generation import edit_keys
from ..image_benchmarks.image_sets import find_generated_sets, write_panel_files
from ..rollout.hybrid_inference import check_adapter_fraction, hybrid_inference
from ..utils.addresses import check_base_url
from ..utils.files import adapter_weights_digest, sole_writer, write_atomically
from ..utils.names import public_name
from .evaluate_arguments import (
    DTYPES,
    SERVED_ONLY,
    GenerateArguments,
    GenerationOptions,
    ImagesArguments,
    PromptsArguments,
    ReportArguments,
    ReportOptions,
    ScoreArguments,
    ScoringOptions,
    load_judge,
    refuse_unused,
)
from .evaluate_judge import JudgedArguments, evaluate
from .evaluate_prompts import evaluate_prompts
from .options import judge_options
from .parser import run_stage


BENCHMARKS = ("t2is", "gedit")
# Options of `score` that only one of the benchmarks has
T2IS_ONLY = ("alignment_file", "alignment_model", "alignment_url", "aesthetics_head", "clip_model", "device", "dtype")
T2IS_ONLY += ("batch_size", "trust_remote_code", "judge_quantization", "judge_attn_implementation")
GEDIT_ONLY = ("protocol", "gedit_repo")
CALL = ("num_inference_steps", "guidance_scale", "true_cfg_scale", "negative_prompt")


def _load_benchmark(args) -> Dataset:
    if args.benchmark not in BENCHMARKS:
        raise ValueError(f"`--benchmark` is {args.benchmark!r}, but must be one of {', '.join(BENCHMARKS)}.")
    if args.dataset_name is None:
        raise ValueError("`--dataset_name` is missing: the prompts of the benchmark.")
    if args.benchmark == "t2is":
        return load_t2is_bench(args.dataset_name, args.dataset_split, getattr(args, "alignment_file", None))
    # The source that the published script shows its judge is not the one that is edited
    source = "input_image" if getattr(args, "protocol", None) == "published" else None
    return load_edit_prompts(
        args.dataset_name,
        args.dataset_split,
        source_column=source,
        allow_remote_images=args.allow_remote_images,
    )


def _digest_of(benchmark: Dataset) -> str:
    columns = ("id", "language", "prompt", "rows", "cols", "height", "width")
    return digest(benchmark.select_columns([name for name in columns if name in benchmark.column_names])[:])


def _settings_of(folder: str | Path, benchmark: Dataset) -> dict | None:
    """Read how the images of a system were generated; `None` for those from elsewhere."""
    file = Path(folder) / "settings.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if settings is not None and settings["prompts"] != _digest_of(benchmark):
        raise ValueError(f"The images in {folder} were generated with other prompts than those of `--dataset_name`.")
    return settings


################
# 1. Generate
################
def generate(args: GenerateArguments) -> None:
    """Generate the images of one system."""
    if args.dtype not in DTYPES:
        raise ValueError(f"`--dtype` is {args.dtype!r}, but must be one of {', '.join(DTYPES)}.")
    if args.benchmark == "gedit" and (len(args.seeds) > 1 or args.panel_files):
        raise ValueError("`--benchmark gedit` takes one of `--seeds`, and no `--panel_files`: an edit has no panels.")
    if args.panel_files and len(args.seeds) > 1:
        raise ValueError(
            f"`--panel_files` takes one of `--seeds`, not {len(args.seeds)}: their names have no place for it."
        )
    if args.num_inference_steps is not None and args.num_inference_steps < 1:
        raise ValueError(f"`--num_inference_steps` is {args.num_inference_steps}, but must be at least 1.")
    check_adapter_fraction(args.adapter_fraction, args.num_inference_steps or 0)
    if args.adapter is None and args.adapter_fraction < 1:
        raise ValueError(
            f"`--adapter_fraction` is {args.adapter_fraction}, but there is no `--adapter`. Leave it out."
        )
    benchmark = _load_benchmark(args)
    call = {name: getattr(args, name) for name in CALL if getattr(args, name) is not None}
    names = ("benchmark", "adapter", "dtype", "seeds", "batch_size", "height", "width")
    settings = (
        {name: getattr(args, name) for name in names}
        | call
        | {"model": args.model_name_or_path, "prompts": _digest_of(benchmark)}
    )
    if args.adapter is not None:
        settings["adapter_weights"] = adapter_weights_digest(args.adapter)
    if args.adapter_fraction < 1:
        settings["adapter_fraction"] = args.adapter_fraction
    with sole_writer(args.output_dir, "images"):
        folder = StageFolder(args.output_dir, settings)
        pipeline = load_system(args.model_name_or_path, getattr(torch, args.dtype), args.adapter)
        with hybrid_inference(pipeline, args.adapter_fraction) as callback:
            if callback is not None:
                call["callback_on_step_end"] = callback
            if "enable_prompt_rewrite" in inspect.signature(type(pipeline).__call__).parameters:
                call["enable_prompt_rewrite"] = False  # LongCat-Image reads the prompts that others read
            if args.benchmark == "gedit":
                size = {name: getattr(args, name) for name in ("height", "width") if getattr(args, name) is not None}
                generate_edits(pipeline, benchmark, folder, args.seeds[0], **call, **size)
            else:
                sides = (args.height, args.width)
                generate_grids(pipeline, benchmark, folder, args.seeds, args.batch_size, *sides, **call)
        if PartialState().is_main_process:
            if args.panel_files:
                found = find_generated_sets(folder.images, benchmark, args.seeds, args.height, args.width)
                write_panel_files(found, benchmark, folder.path / "panels")
            console = Console()
            console.print(f"The images are in {escape(str(folder.images))}.")
            console.print_json(json.dumps(folder.report, ensure_ascii=False))


################
# 2. Score
################
def _images_of(args, folder: str, benchmark: Dataset, settings: Any, images: str | None):
    """Find the images of a system: generated here, or elsewhere."""
    if settings is None and images is None:
        raise FileNotFoundError(
            f"There are no images in {folder}. Run `generate` first, or give a directory as `--images`."
        )
    if args.benchmark == "gedit":
        return find_edits(images or folder, benchmark)
    if images is not None:
        return find_image_sets(images, benchmark)
    return find_generated_sets(
        Path(folder) / "images", benchmark, settings["seeds"], settings["height"], settings["width"]
    )


def _check_options(args: ScoreArguments) -> None:
    if args.missing not in ("error", "zero"):
        raise ValueError(f"`--missing` is {args.missing!r}, but must be 'error' or 'zero'.")
    others = GEDIT_ONLY if args.benchmark == "t2is" else T2IS_ONLY
    refuse_unused(args, others, f"with `--benchmark {args.benchmark}`")
    if args.judge_url is None and args.alignment_url is None:
        refuse_unused(args, SERVED_ONLY, "without `--judge_url` or `--alignment_url`")
    for url in (args.judge_url, args.alignment_url):
        if url is not None:
            check_base_url(url)
    if args.alignment_model is not None and args.alignment_file is None:
        raise ValueError("`--alignment_model` needs `--alignment_file`: what each panel should show.")


def score(args: ScoreArguments) -> None:
    """Score the images of one system."""
    _check_options(args)
    benchmark = _load_benchmark(args)
    settings = _settings_of(args.output_dir, benchmark)
    if settings is not None and args.images is not None:
        raise ValueError(f"{args.output_dir} has generated images. Give `--images` another `--output_dir`.")
    found = _images_of(args, args.output_dir, benchmark, settings, args.images)
    if args.missing == "error":
        found.check_complete()
    if args.images is not None:
        _remember_images(args)
    if args.benchmark == "gedit":
        _score_gedit(args, benchmark, found)
    else:
        _score_t2is(args, benchmark, found)


def _remember_images(args) -> None:
    """Write down for the report where the scored images are."""
    images, file = Path(args.images).absolute(), Path(args.output_dir) / "system.json"
    known = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"images": str(images), "name": images.name}
    )
    if known["images"] != str(images):
        raise ValueError(
            f"{args.output_dir} has scores of the images in {known['images']}. Choose another `--output_dir` for {images}."
        )
    if PartialState().is_main_process:
        system = {**known, "name": args.name or known["name"]}
        write_atomically(file, json.dumps(system, indent=2) + "\n")


def _score_t2is(args: ScoreArguments, benchmark: Dataset, found) -> None:
    # One model at a time, and one that is asked for both things once
    work: dict[tuple[str, str | None], list] = {}
    if args.alignment_model is not None:
        work.setdefault((args.alignment_model, args.alignment_url), []).append(score_alignment)
    for name in args.judges or []:
        work.setdefault((name, args.judge_url), []).append(score_consistency)
    # What is wrong with the last one is to be known before the first is asked
    if work and None not in [url for _, url in work]:
        judge_options(args, next(iter(work))[1])
    for name, url in work:
        if url is None:
            from .. import PaCoReward

            PaCoReward.load_processor(name, args.trust_remote_code)
        else:
            judge: Any = load_judge(args, name, url)
            judge.check()
    options: dict[str, Any] = {"rescore_changed": args.rescore_changed}
    score_duplicates(found, benchmark, args.output_dir, **options)
    # How often scores are saved; the judge cuts its own batches
    options["batch_size"] = max(64, args.batch_size)
    if args.aesthetics_head is not None:
        scorer = AestheticScorer(args.aesthetics_head, args.clip_model, args.device, batch_size=args.batch_size)
        score_aesthetics(scorer, found, benchmark, args.output_dir, **options)
        del scorer
        _free_memory()
    for (name, url), tasks in work.items():
        judge = load_judge(args, name, url)
        for task in tasks:
            task(judge, found, benchmark, args.output_dir, **options)
        del judge
        _free_memory()


def _free_memory() -> None:
    gc.collect()  # a judge and its hook on the model refer to one another
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _score_gedit(args: ScoreArguments, benchmark: Dataset, found) -> None:
    if args.judge_url is None or args.judges is None or len(args.judges) != 1:
        raise ValueError("`--benchmark gedit` takes one judge on a server: `--judge_url` and its name in `--judges`.")
    endpoint = ChatEndpoint(args.judge_url, args.judges[0], args.api_key_variable, args.max_concurrency)
    score_edits(
        endpoint,
        benchmark,
        found,
        args.output_dir,
        rescore_changed=args.rescore_changed,
        protocol=args.protocol,
        gedit_repo=args.gedit_repo,
    )


################
# 3. Report
################
def _open_system(args: ReportArguments, folder: str, role: str, benchmark: Dataset) -> System:
    settings, other = _settings_of(folder, benchmark), Path(folder) / "system.json"
    known = json.loads(other.read_text(encoding="utf-8")) if settings is None and other.exists() else {}
    found = _images_of(args, folder, benchmark, settings, known.get("images"))
    if settings is None:
        return System(role, known["name"], found, Path(folder), {})
    shown = {
        name: value for name, value in settings.items() if name not in ("prompts", "benchmark", "adapter_weights")
    }
    shown |= {name: public_name(shown[name]) for name in ("model", "adapter") if shown[name] is not None}
    return System(role, shown["adapter"] or shown["model"], found, Path(folder), shown)


def _find_trained_on(args: ReportArguments, benchmark: Dataset) -> dict | None:
    if args.train_dataset_name is None:
        return None
    name, split = args.train_dataset_name, args.train_dataset_split
    if args.benchmark == "t2is":
        training = load_image_set_prompts(name, split)
    else:
        training = load_edit_prompts(name, split, allow_remote_images=args.allow_remote_images)
    prompts = [dataset.with_format(None)["prompt"][:] for dataset in (training, benchmark)]
    # The same id in two languages is two edits
    ids = benchmark["id"][:] if args.benchmark == "t2is" else edit_keys(benchmark)
    return {"dataset": public_name(args.train_dataset_name), **find_leaks(prompts[0], prompts[1], ids)}


def report(args: ReportArguments) -> None:
    """Write the report of one system, or of two and their difference."""
    if not PartialState().is_main_process:
        return
    if args.card is not None:
        if args.tuned is None:
            raise ValueError("`--card` is for the adapter of a tuned system: give `--tuned` as well.")
        check_card(args.card)
    benchmark = _load_benchmark(args)
    folders = {"base": args.base, **({} if args.tuned is None else {"tuned": args.tuned})}
    systems = [_open_system(args, folder, role, benchmark) for role, folder in folders.items()]
    adapters = [system.settings.get("adapter") for system in systems]
    if len(systems) == 2 and adapters[0] is not None and systems[1].settings and adapters[1] is None:
        raise ValueError(
            f"`--base` has the adapter {adapters[0]!r} and `--tuned` none: they are the wrong way around."
        )
    leakage, name = _find_trained_on(args, benchmark), public_name(str(args.dataset_name))
    if args.benchmark == "t2is":
        results = t2is_results(benchmark, systems, args.missing, name, leakage, args.protocol)
    else:
        seed = systems[0].settings.get("seeds", [0])[0]
        sources = Path(args.output_dir) / "sources"
        results = gedit_results(benchmark, systems, args.missing, name, leakage, seed, sources, args.protocol)
    paths = save_generation_report(results, args.output_dir, args.num_shown)
    if args.card is not None:
        paths["card"] = add_results_to_card(args.card, results)
    console = Console()
    print_report(results, console)
    for what, path in paths.items():
        console.print(f"{what}: {escape(str(path))}")


################
# All of it
################
def images(args: ImagesArguments) -> None:
    """Generate, score and report the base model and the adapter; what is there is not made again."""
    folders = {role: str(Path(args.output_dir) / role) for role in ("base", "tuned", "report")}
    systems = ["base"] if args.adapter is None else ["base", "tuned"]
    # The pipeline's dtype and batch are not the judge's; T2IS-Bench's protocol is one of the report
    judging: dict[str, Any] = {"dtype": "auto", "batch_size": 16}
    if args.benchmark == "t2is":
        judging["protocol"] = "default"
    scoring = [
        ScoreArguments(**_options(args, ScoringOptions) | judging, output_dir=folders[role]) for role in systems
    ]
    _check_options(scoring[0])  # before anything is generated
    for role in systems:
        own = {} if role == "tuned" else {"adapter": None, "adapter_fraction": 1.0}
        generate(GenerateArguments(**_options(args, GenerationOptions) | own, output_dir=folders[role]))
        _free_memory()
    PartialState().wait_for_everyone()
    for each in scoring:
        score(each)
    PartialState().wait_for_everyone()
    tuned = folders["tuned"] if "tuned" in systems else None
    report(
        ReportArguments(
            **_options(args, ReportOptions), base=folders["base"], tuned=tuned, output_dir=folders["report"]
        )
    )


def _options(args: ImagesArguments, kind: type) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in fields(kind)}


STEPS = {
    "prompts": (PromptsArguments, evaluate_prompts),
    "images": (ImagesArguments, images),
    "generate": (GenerateArguments, generate),
    "score": (ScoreArguments, score),
    "report": (ReportArguments, report),
    "judge": (JudgedArguments, evaluate),
}


def main(words: list[str]) -> int:
    """Run a stage."""
    if words and words[0] in STEPS and words[0] != "judge":
        # Without an accelerator the processes of a launch know of each other only if they are told to use the CPU
        PartialState(cpu=not torch.accelerator.is_available())
    return run_stage(words, STEPS, "paco-trl evaluate", __doc__, positional={"images": "benchmark"})
