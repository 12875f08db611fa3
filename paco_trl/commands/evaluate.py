# SPDX-License-Identifier: Apache-2.0
"""The stages of `paco-trl evaluate`, see `evaluate_arguments.py`."""

import json
from collections.abc import Callable, Generator
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
from ..generation.inference import LoadingSpec
from ..image_benchmarks.gedit import check_gedit_prompts
from ..image_benchmarks.gedit_protocols import edit_protocol
from ..image_benchmarks.image_sets import SystemImages, find_generated_sets, write_panel_files
from ..image_benchmarks.report import check_card
from ..rewards import ServedJudge
from ..rewards.paco_reward import PaCoReward
from ..trainer.paco_grpo_config import PaCoGRPOConfig
from ..utils.chat import ChatEndpoint
from ..utils.errors import OptionError, refuse
from ..utils.files import read_record, write_atomically
from ..utils.fingerprint import digest_model_files
from ..utils.locks import sole_writer
from ..utils.names import public_name
from ..utils.option_checks import check_panel_options
from ..utils.stage_folder import StageFolder
from . import evaluate_arguments as arguments
from .evaluate_judge import evaluate
from .evaluate_prompts import evaluate_prompts
from .options import find_unused


_SYSTEM_FILE = "system.json"  # says where the scored images are that were generated elsewhere

# The work behind its `yield` takes hours: what can be wrong is found before
Step = Generator[None, None, None]


def run(*steps: Step) -> None:
    """Run steps one after the other, each of them up to its `yield` before the first goes on."""
    with ExitStack() as stack:
        for step in steps:
            stack.callback(step.close)
            next(step, None)
        for step in steps:
            next(step, None)
            release_memory()  # a judge and its hook on the model refer to one another


def _load_benchmark(args) -> Dataset:
    if args.benchmark == "t2is":
        sets = benchmarks.load_t2is_bench(
            args.dataset_name, args.dataset_split, getattr(args, "alignment_file", None), args.dataset_config
        )
        return arrange_sets(sets, args.set_layout)
    refuse(find_unused(args, ("set_layout",), f"with `--benchmark {args.benchmark}`"))
    if args.benchmark == "stories":
        refuse(find_unused(args, ("dataset_config", "dataset_split"), "with `--benchmark stories`"))
        return complete_image_sets(load_stories(args.dataset_name))
    # The source that the published script shows its judge is not the one that is edited
    source = "input_image" if getattr(args, "protocol", None) == "published" else None
    return load_edit_prompts(args.dataset_name, args.dataset_split, source_column=source, config=args.dataset_config)


def _load_as_trained(args: arguments.GenerateArguments | arguments.ImagesArguments, spec: LoadingSpec) -> Dataset:
    """Load the benchmark; of its sets, `args` gets what it leaves out from the adapter's training run, or the defaults."""
    run = {} if spec.card is None or args.benchmark == "gedit" else spec.card.settings
    if args.benchmark == "t2is":
        args.set_layout = args.set_layout or run.get("set_layout")
    benchmark = _load_benchmark(args)
    if _has_separate(benchmark):
        options = {name: run.get(name) or getattr(PaCoGRPOConfig, name) for name in PANEL_OPTIONS}
        has_sizes = "height" in benchmark.column_names and None not in benchmark["height"]
        if run.get("set_layout") == SEPARATE and "inference_size" in run and not has_sizes:
            options |= dict(zip(("height", "width"), run["inference_size"], strict=True))
        for name, value in options.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    return benchmark


def _has_separate(benchmark: Dataset) -> bool:
    return "layout" in benchmark.column_names and SEPARATE in benchmark["layout"]


def _find_images(args, folder: str, benchmark: Dataset, images: str | None = None) -> tuple[SystemImages, dict]:
    """Find the images of a system, and how they were generated: nothing is known of those from elsewhere."""
    settings = read_record(Path(folder) / "settings.json")
    if not settings and images is None:
        raise FileNotFoundError(f"There are no images in {folder}. Run `generate`, or give a directory as `--images`.")
    if settings and settings["prompts"] != digest_of_prompts(benchmark):
        raise ValueError(f"The images in {folder} were generated with other prompts, or another `--set_layout`.")
    if settings and images is not None:
        raise OptionError(f"{folder} has generated images. Give `--images` another `--output_dir`.")
    if args.benchmark == "gedit":
        return benchmarks.find_edits(images or folder, benchmark), settings
    if not settings:
        return benchmarks.find_image_sets(cast(str, images), benchmark), settings
    seeds_and_size = (settings[name] for name in ("seeds", "height", "width"))
    return find_generated_sets(Path(folder) / "images", benchmark, *seeds_and_size), settings


def generate(args: arguments.GenerateArguments, spec: LoadingSpec | None = None) -> Step:
    """Generate the images of one system: `spec`, or else what the options name."""
    spec = args.read_loading_spec() if spec is None else spec
    benchmark, panels = _load_as_trained(args, spec), {}
    if _has_separate(benchmark):
        panels = {name: getattr(args, name) for name in PANEL_OPTIONS}
        check_panel_options(**panels)
    else:
        refuse(find_unused(args, PANEL_OPTIONS, "without a set of separate images"))
    call = args.call_of(spec)
    names = ("benchmark", "adapter", "seeds", "batch_size", "height", "width")
    settings = spec.weights | {name: getattr(args, name) for name in names} | spec.settings | call | panels
    settings |= {"model": spec.model, "model_files": digest_model_files(spec.model)}
    settings["prompts"] = digest_of_prompts(benchmark)
    if args.benchmark != "gedit":
        image_sizes(benchmark, args.height, args.width)
    if "references" in benchmark.column_names:
        SourceImages(benchmark, "the benchmark", "references")  # reads their headers
    with sole_writer(args.output_dir, "images"):
        folder = StageFolder(args.output_dir, settings)
        yield
        pipeline = spec.load()
        call |= {"height": args.height, "width": args.width} | panels
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


def score(args: arguments.ScoreArguments) -> Step:
    """Score the images of one system."""
    is_gedit = args.benchmark == "gedit"
    benchmark = _load_benchmark(args)
    scorers: Any = _edit_judge(args, benchmark) if is_gedit else _judges(args)
    yield
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


def _edit_judge(args: arguments.ScoreArguments, benchmark: Dataset) -> ChatEndpoint:
    edit_protocol(args.protocol, args.gedit_repo)
    check_gedit_prompts(benchmark)
    endpoint = ChatEndpoint(str(args.judge_url), (args.judges or [""])[0], args.api_key_variable, args.max_concurrency)
    endpoint.check()
    return endpoint


def _judges(args: arguments.ScoreArguments) -> dict[tuple[str, str | None], list]:
    """List the scores that each judge is asked for, by its name and address; check that each is there."""
    # One model at a time, and one that is asked for both things once
    work: dict[tuple[str, str | None], list] = {}
    if args.alignment_model is not None:
        work[args.alignment_model, args.alignment_url] = [benchmarks.score_alignment]
    for name in args.judges or []:
        work.setdefault((name, args.judge_url), []).append(benchmarks.score_consistency)
    for name, url in work:
        if url is None:
            PaCoReward.load_processor(name, args.trust_remote_code)
        else:
            cast(ServedJudge, arguments.load_judge(args, name, url)).check()
    if args.aesthetics_head is not None:
        AestheticScorer(args.aesthetics_head, args.clip_model, "cpu")  # reads all of it: it is small
    return work


def _score_t2is(args: arguments.ScoreArguments, work: dict, benchmark: Dataset, images: SystemImages) -> None:
    benchmarks.score_duplicates(images, benchmark, args.output_dir)
    size = max(64, args.batch_size)  # how often scores are saved; the judge cuts its own batches
    if args.aesthetics_head is not None:
        scorer = AestheticScorer(args.aesthetics_head, args.clip_model, args.device, batch_size=args.batch_size)
        benchmarks.score_aesthetics(scorer, images, benchmark, args.output_dir, size)
        del scorer
        release_memory()
    for judge, tasks in work.items():
        loaded = arguments.load_judge(args, *judge)
        for task in tasks:
            task(loaded, images, benchmark, args.output_dir, size)
        del loaded
        release_memory()


def _open_system(args: arguments.ReportArguments, folder: str, role: str, benchmark: Dataset) -> benchmarks.System:
    record_file = Path(folder) / _SYSTEM_FILE
    elsewhere = read_record(record_file).get("images")
    images, settings = _find_images(args, folder, benchmark, elsewhere)
    if not settings:
        return benchmarks.System(role, Path(cast(str, elsewhere)).name, images, Path(folder))
    hidden = ("prompts", "benchmark", "adapter_weights", "model_files")
    shown = {name: value for name, value in settings.items() if name not in hidden}
    shown |= {name: public_name(shown[name]) for name in ("model", "adapter") if shown[name] is not None}
    return benchmarks.System(role, shown["adapter"] or shown["model"], images, Path(folder), shown)


def _find_trained_on(args: arguments.ReportArguments, benchmark: Dataset) -> dict | None:
    if args.train_dataset_name is None:
        return None
    is_t2is = args.benchmark == "t2is"
    training = (load_image_set_prompts if is_t2is else load_edit_prompts)(args.train_dataset_name)
    ids = benchmark["id"][:] if is_t2is else edit_keys(benchmark)  # the same id in two languages is two edits
    return benchmarks.find_leaks(
        training.with_format(None)["prompt"][:], benchmark.with_format(None)["prompt"][:], ids
    )


def report(args: arguments.ReportArguments) -> Step:
    """Write the report of one system, or of two and their difference."""
    if args.card is not None:
        check_card(args.card)
    benchmark = _load_benchmark(args)
    leakage, name = _find_trained_on(args, benchmark), public_name(str(args.dataset_name))
    yield
    if not PartialState().is_main_process:
        return
    folders = {"base": args.base, **({} if args.tuned is None else {"tuned": args.tuned})}
    systems = [_open_system(args, folder, role, benchmark) for role, folder in folders.items()]
    adapters = [system.settings.get("adapter") for system in systems]
    if len(systems) == 2 and adapters[0] is not None and systems[1].settings and adapters[1] is None:
        message = f"`--base` has the adapter {adapters[0]!r} and `--tuned` none: the wrong way around. Swap them."
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
    for what, path in paths.items():
        console.print(f"{what}: {escape(str(path))}")


def images(args: arguments.ImagesArguments) -> None:
    """Generate, score and report the base model and the adapter; what is there is not made again."""
    spec = args.read_loading_spec()
    if args.benchmark == "t2is":
        _load_as_trained(args, spec)  # the base model gets what the adapter gets
    systems, folder = {"base": spec.base, "tuned": spec}, Path(args.output_dir)
    if args.adapter is None:
        del systems["tuned"]

    def of(kind: type, role: str, **changed: Any) -> Any:
        shared = {field.name: getattr(args, field.name) for field in fields(kind) if hasattr(args, field.name)}
        part = kind(**shared | changed | {"output_dir": str(folder / role)})
        part.typed = {name for name in getattr(args, "typed", ()) if name not in changed}
        refuse(part.errors())
        return part

    judging: dict[str, Any] = {"dtype": "auto", "batch_size": 16}  # those of the pipeline are not the judge's
    if args.benchmark == "t2is":
        judging["protocol"] = "default"  # the published one is of its report
    compared = {"base": str(folder / "base"), "tuned": str(folder / "tuned") if "tuned" in systems else None}
    run(
        *(
            generate(of(arguments.GenerateArguments, role, adapter=None if role == "base" else args.adapter), system)
            for role, system in systems.items()
        ),
        *(score(of(arguments.ScoreArguments, role, **judging)) for role in systems),
        report(of(arguments.ReportArguments, "report", **compared)),
    )


def run_stage(stage: str, args: Any) -> None:
    """Run a stage."""
    if stage != "judge":
        # Without an accelerator the processes of a launch know of each other only if they are told to use the CPU
        PartialState(cpu=not torch.accelerator.is_available())
    stages: dict[str, Callable] = {
        "prompts": evaluate_prompts,
        "images": images,
        "generate": lambda args: run(generate(args)),
        "score": lambda args: run(score(args)),
        "report": lambda args: run(report(args)),
        "judge": evaluate,
    }
    stages[stage](args)
