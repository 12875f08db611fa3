# SPDX-License-Identifier: Apache-2.0
"""Stages of `paco-trl evaluate`, see `evaluate_arguments.py`."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import PartialState
from accelerate.utils import release_memory
from datasets import Dataset
from rich.console import Console
from rich.markup import escape

from .. import image_benchmarks as benchmarks
from ..data import SourceImages, load_edit_prompts, load_image_set_prompts, load_stories
from ..data.image_sets import PANEL_OPTIONS, SEPARATE, arrange_sets, complete_image_sets
from ..evaluation import AestheticScorer
from ..generation import generate_edits, generate_grids
from ..generation.edits import edit_keys
from ..generation.grids import image_sizes
from ..generation.image_files import digest_of_prompts
from ..generation.inference import PipelineSpec
from ..image_benchmarks.gedit import check_gedit_prompts
from ..image_benchmarks.gedit_protocols import load_edit_protocol
from ..image_benchmarks.report import check_card, read_metrics
from ..image_benchmarks.system_images import SystemImages, find_generated_sets, write_panel_files
from ..rewards import ServedJudge
from ..rewards.paco_reward import PaCoReward
from ..trainer.paco_grpo_config import PaCoGRPOConfig
from ..utils.chat import ChatEndpoint
from ..utils.errors import OptionError, raise_errors
from ..utils.files import read_record, write_atomically
from ..utils.fingerprint import digest_model_files
from ..utils.locks import sole_writer
from ..utils.names import public_name
from ..utils.option_checks import check_panel_options
from ..utils.stage_folder import StageFolder
from . import evaluate_arguments as arguments
from .options import find_unused


_SYSTEM_FILE = "system.json"  # records the directory of images from elsewhere

Job = Callable[[], None]  # the work of a stage, once its checks have passed


def start_processes() -> None:
    """Form the group of processes. Without an accelerator, they only do so if told to use the CPU."""
    PartialState(cpu=not torch.accelerator.is_available())


def _load_benchmark(args) -> Dataset:
    if args.benchmark == "t2is":
        sets = benchmarks.load_t2is_bench(
            args.dataset_name, args.dataset_split, getattr(args, "alignment_file", None), args.dataset_config
        )
        return arrange_sets(sets, args.set_layout)
    raise_errors(find_unused(args, ("set_layout",), f"with `--benchmark {args.benchmark}`"))
    if args.benchmark == "stories":
        raise_errors(find_unused(args, ("dataset_config", "dataset_split"), "with `--benchmark stories`"))
        return complete_image_sets(load_stories(args.dataset_name))
    # The published script shows its judge another version of the source than the edited one
    source = "input_image" if getattr(args, "protocol", None) == "published" else None
    return load_edit_prompts(args.dataset_name, args.dataset_split, source_column=source, config=args.dataset_config)


def _load_as_trained(args: arguments.GenerateArguments | arguments.ImagesArguments, spec: PipelineSpec) -> Dataset:
    """Load the benchmark, and fill in `args` for its sets from the adapter's training run, or the defaults."""
    run = {} if spec.card is None or args.benchmark == "gedit" else spec.card.settings
    if args.benchmark == "t2is":
        args.set_layout = args.set_layout or run.get("set_layout")
    benchmark = _load_benchmark(args)
    options: dict[str, Any] = {}
    if is_separate := _has_separate(benchmark):
        options = {name: run.get(name) or getattr(PaCoGRPOConfig, name) for name in PANEL_OPTIONS}
    has_sizes = "height" in benchmark.column_names and None not in benchmark["height"]
    # The size of a set that is one image says nothing of separate images
    if "inference_size" in run and not has_sizes and is_separate == (run.get("set_layout") == SEPARATE):
        options |= dict(zip(("height", "width"), run["inference_size"], strict=True))
    for name, value in options.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return benchmark


def _has_separate(benchmark: Dataset) -> bool:
    return "layout" in benchmark.column_names and SEPARATE in benchmark["layout"]


def _find_images(args, folder: str, benchmark: Dataset, images: str | None = None) -> tuple[SystemImages, dict]:
    """Find the images of a system and the settings of their generation, empty for images from elsewhere."""
    settings = read_record(Path(folder) / "settings.json")
    if not settings and images is None:
        raise FileNotFoundError(f"There are no images in {folder}. Run `generate`, or pass a directory as `--images`.")
    if settings and settings["prompts"] != digest_of_prompts(benchmark):
        raise ValueError(f"The images in {folder} were generated with other prompts, or another `--set_layout`.")
    if settings and images is not None:
        raise OptionError(f"{folder} has generated images. Use another `--output_dir` with `--images`.")
    if args.benchmark == "gedit":
        return benchmarks.find_edits(images or folder, benchmark), settings
    if not settings:
        return benchmarks.find_image_sets(cast(str, images), benchmark), settings
    seeds_and_size = (settings[name] for name in ("seeds", "height", "width"))
    return find_generated_sets(Path(folder) / "images", benchmark, *seeds_and_size), settings


def _check_references(benchmark: Dataset) -> None:
    """Read the headers of reference images, so that a broken one shows before the pipeline is loaded."""
    if "references" in benchmark.column_names:
        SourceImages(benchmark, "the benchmark", "references")


def prepare_generation(args: arguments.GenerateArguments, locks: ExitStack, spec: PipelineSpec | None = None) -> Job:
    """Check and lock the directory of a system, by default that of the options; return the generating job."""
    spec = args.read_loading_spec() if spec is None else spec
    benchmark = _load_as_trained(args, spec)
    panels = {}
    if _has_separate(benchmark):
        panels = {name: getattr(args, name) for name in PANEL_OPTIONS}
        check_panel_options(**panels)
    else:
        raise_errors(find_unused(args, PANEL_OPTIONS, "without a set of separate images"))
    call = args.get_call_arguments(spec)
    names = ("benchmark", "adapter", "seeds", "batch_size", "height", "width")
    settings = spec.digest_weights() | {name: getattr(args, name) for name in names} | spec.settings | call | panels
    settings |= {"model": spec.model, "model_files": digest_model_files(spec.model)}
    settings["prompts"] = digest_of_prompts(benchmark)
    if args.benchmark != "gedit":
        image_sizes(benchmark, args.height, args.width)
    _check_references(benchmark)
    locks.enter_context(sole_writer(args.output_dir, "images"))
    folder = StageFolder(args.output_dir, settings)
    call |= {"height": args.height, "width": args.width} | panels

    def generate() -> None:
        pipeline = spec.load()
        if args.benchmark == "gedit":
            call_arguments = {name: value for name, value in call.items() if value is not None}
            generate_edits(pipeline, benchmark, folder, args.seeds[0], **call_arguments)
        else:
            generate_grids(pipeline, benchmark, folder, args.seeds, args.batch_size, **call)
        if PartialState().is_main_process:
            if args.panel_files:
                images = find_generated_sets(folder.images, benchmark, args.seeds, args.height, args.width)
                write_panel_files(images, benchmark, folder.path / "panels")
            Console().print(f"The images are in {escape(str(folder.images))}.")

    return generate


def prepare_scoring(args: arguments.ScoreArguments) -> Job:
    """Check the judges of a system's images; return the job that scores the images."""
    is_gedit = args.benchmark == "gedit"
    benchmark = _load_benchmark(args)
    scorers: Any = _prepare_edit_judge(args, benchmark) if is_gedit else _prepare_judges(args)

    def score() -> None:
        images, _ = _find_images(args, args.output_dir, benchmark, args.images)
        if args.missing == "error":
            images.check_complete()
        if args.images is not None and PartialState().is_main_process:  # for the report
            write_atomically(
                Path(args.output_dir) / _SYSTEM_FILE, json.dumps({"images": str(Path(args.images).absolute())})
            )
        if is_gedit:
            benchmarks.score_edits(
                scorers, benchmark, images, args.output_dir, protocol=args.protocol, gedit_repo=args.gedit_repo
            )
        else:
            _score_t2is(args, scorers, benchmark, images)

    return score


def _prepare_edit_judge(args: arguments.ScoreArguments, benchmark: Dataset) -> ChatEndpoint:
    load_edit_protocol(args.protocol, args.gedit_repo)
    check_gedit_prompts(benchmark)
    endpoint = ChatEndpoint(str(args.judge_url), (args.judges or [""])[0], args.api_key_variable, args.max_concurrency)
    endpoint.check()
    return endpoint


def _prepare_judges(args: arguments.ScoreArguments) -> dict[tuple[str, str | None], list]:
    """Map the name and address of each judge to its scoring functions, and check that each is available."""
    # One model at a time, and only once if it scores both alignment and consistency
    tasks_by_judge: dict[tuple[str, str | None], list] = {}
    if args.alignment_model is not None:
        tasks_by_judge[args.alignment_model, args.alignment_url] = [benchmarks.score_alignment]
    for name in args.judges or []:
        tasks_by_judge.setdefault((name, args.judge_url), []).append(benchmarks.score_consistency)
    for name, url in tasks_by_judge:
        if url is None:
            PaCoReward.load_processor(name, args.trust_remote_code)
        else:
            cast(ServedJudge, arguments.load_judge(args, name, url)).check()
    if args.aesthetics_head is not None:
        _check_aesthetics(args.aesthetics_head, args.clip_model)
    return tasks_by_judge


def _check_aesthetics(head: str, clip_model: str) -> None:
    """Load the aesthetic predictor, which is small, so that a wrong one shows before a judge is loaded."""
    AestheticScorer(head, clip_model, "cpu")


def _score_t2is(
    args: arguments.ScoreArguments, tasks_by_judge: dict, benchmark: Dataset, images: SystemImages
) -> None:
    benchmarks.score_duplicates(images, benchmark, args.output_dir)
    size = max(64, args.batch_size)  # images between saves; the judge splits them into batches
    if args.aesthetics_head is not None:
        scorer = AestheticScorer(args.aesthetics_head, args.clip_model, args.device, batch_size=args.batch_size)
        benchmarks.score_aesthetics(scorer, images, benchmark, args.output_dir, size)
        del scorer
        release_memory()
    for name_and_url, tasks in tasks_by_judge.items():
        judge = arguments.load_judge(args, *name_and_url)
        for task in tasks:
            task(judge, images, benchmark, args.output_dir, size)
        del judge
        release_memory()


def _open_system(args: arguments.ReportArguments, folder: str, role: str, benchmark: Dataset) -> benchmarks.System:
    record_file = Path(folder) / _SYSTEM_FILE
    external_folder = read_record(record_file).get("images")
    images, settings = _find_images(args, folder, benchmark, external_folder)
    if not settings:
        return benchmarks.System(role, Path(cast(str, external_folder)).name, images, Path(folder))
    hidden_names = ("prompts", "benchmark", "adapter_weights", "model_files")
    public_settings = {name: value for name, value in settings.items() if name not in hidden_names}
    public_settings |= {
        name: public_name(public_settings[name]) for name in ("model", "adapter") if public_settings[name] is not None
    }
    return benchmarks.System(
        role, public_settings["adapter"] or public_settings["model"], images, Path(folder), public_settings
    )


def _find_leakage(args: arguments.ReportArguments, benchmark: Dataset) -> dict | None:
    if args.train_dataset_name is None:
        return None
    is_t2is = args.benchmark == "t2is"
    training = (load_image_set_prompts if is_t2is else load_edit_prompts)(args.train_dataset_name)
    ids = benchmark["id"][:] if is_t2is else edit_keys(benchmark)  # ids occur in two languages
    return benchmarks.find_leaks(
        training.with_format(None)["prompt"][:], benchmark.with_format(None)["prompt"][:], ids
    )


def prepare_report(args: arguments.ReportArguments) -> Job:
    """Check the card and the training data; return the job that reports one system, or two and their difference."""
    if args.card is not None:
        check_card(args.card)
    read_metrics(Path(args.output_dir))  # so that it is not refused after hours of generation
    benchmark = _load_benchmark(args)
    leakage = _find_leakage(args, benchmark)
    name = public_name(str(args.dataset_name))

    def report() -> None:
        if not PartialState().is_main_process:
            return
        folders = {"base": args.base, **({} if args.tuned is None else {"tuned": args.tuned})}
        systems = [_open_system(args, folder, role, benchmark) for role, folder in folders.items()]
        adapters = [system.settings.get("adapter") for system in systems]
        if len(systems) == 2 and adapters[0] is not None and systems[1].settings and adapters[1] is None:
            message = f"`--base` has the adapter {adapters[0]!r} and `--tuned` has none. Swap them."
            raise OptionError(message, "base", "tuned")
        if args.benchmark == "t2is":
            results = benchmarks.t2is_results(benchmark, systems, args.missing, name, leakage, args.protocol)
        else:
            seed = systems[0].settings.get("seeds", [0])[0]
            sources = Path(args.output_dir) / "sources"
            results = benchmarks.gedit_results(
                benchmark, systems, args.missing, name, leakage, seed, sources, args.protocol
            )
        paths = benchmarks.save_generation_report(results, args.output_dir, args.num_shown)
        if args.card is not None:
            paths["card"] = benchmarks.add_results_to_card(args.card, results)
        benchmarks.print_report(results, console := Console())
        for title, path in paths.items():
            console.print(f"{title}: {escape(str(path))}")

    return report


def evaluate_images(args: arguments.ImagesArguments) -> None:
    """Generate, score and report the base model and the adapter, without repeating finished work."""
    start_processes()
    spec = args.read_loading_spec()
    if args.benchmark == "t2is":
        _load_as_trained(args, spec)  # the base model gets the adapter's settings
    systems = {"base": spec.base, "tuned": spec}
    folder = Path(args.output_dir)
    if args.adapter is None:
        del systems["tuned"]

    def stage_arguments(cls: type, role: str, **overrides: Any) -> Any:
        shared_options = {field.name: getattr(args, field.name) for field in fields(cls) if hasattr(args, field.name)}
        stage_args = cls(**shared_options | overrides | {"output_dir": str(folder / role)})
        stage_args.chosen = {name for name in getattr(args, "chosen", ()) if name not in overrides}
        raise_errors(stage_args.errors())
        return stage_args

    score_overrides: dict[str, Any] = {
        "dtype": "auto",
        "batch_size": 16,
    }  # the pipeline's options do not apply to the judge
    if args.benchmark == "t2is":
        score_overrides["protocol"] = "default"  # only the report has a published protocol
    report_overrides = {"base": str(folder / "base"), "tuned": str(folder / "tuned") if "tuned" in systems else None}
    generations = [
        stage_arguments(arguments.GenerateArguments, role, adapter=None if role == "base" else args.adapter)
        for role in systems
    ]
    scorings = [stage_arguments(arguments.ScoreArguments, role, **score_overrides) for role in systems]
    report = stage_arguments(arguments.ReportArguments, "report", **report_overrides)
    with ExitStack() as locks:
        # The checks of all stages come first: each job may take hours
        jobs = [
            prepare_generation(stage, locks, spec) for stage, spec in zip(generations, systems.values(), strict=True)
        ]
        jobs += [prepare_scoring(stage) for stage in scorings]
        for job in [*jobs, prepare_report(report)]:
            job()
            release_memory()  # a judge and its hook on the model reference each other


def generate_images(args: arguments.GenerateArguments) -> None:
    """Generate the images of the system in the options."""
    start_processes()
    with ExitStack() as locks:
        prepare_generation(args, locks)()


def score_images(args: arguments.ScoreArguments) -> None:
    """Score the images of the system in the options."""
    start_processes()
    prepare_scoring(args)()


def report_images(args: arguments.ReportArguments) -> None:
    """Report the systems in the options."""
    start_processes()
    prepare_report(args)()
