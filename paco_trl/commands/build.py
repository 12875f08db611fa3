# SPDX-License-Identifier: Apache-2.0
"""Stages of `paco-trl build`, see `build_arguments.py`."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, concatenate_datasets
from rich.console import Console
from rich.markup import escape

from .. import dataset_building as building
from ..data import load_image_set_prompts
from ..generation.image_files import digest_of_prompts
from ..plots.sample_sheet import pairs_sheet
from ..utils.chat import ChatEndpoint
from ..utils.errors import OptionError
from ..utils.files import digest
from ..utils.fingerprint import digest_model_files
from ..utils.stage_folder import StageFolder
from . import build_arguments as arguments


def stage(args, name: str, settings: dict | None = None) -> StageFolder:
    """Open the directory of a stage."""
    return StageFolder(Path(args.build_dir) / name, settings)


def result(args, name: str) -> Dataset | DatasetDict:
    """Load the output of an earlier stage."""
    return stage(args, name).load("panels" if name == "instances" else name)  # one stage writes both


def grid_prompts(args) -> Dataset:
    """Load the prompts, and check that the grids were generated from them, as all later stages assume."""
    prompts = result(args, "prompts")
    grids = stage(args, "grids")
    if not grids.is_done:
        grids.load()  # raises an error with advice
    if digest_of_prompts(prompts) != grids.settings["prompts"]:
        raise ValueError(
            f"The prompts in {args.build_dir} are not those that the grids were generated from. Rerun the stage "
            "`prompts` as before, or choose another `--build_dir`."
        )
    return prompts


def _annotations_dir(args) -> Path:
    return Path(args.build_dir) / "annotations"


def finish(folder: StageFolder) -> None:
    """Print the location of a stage's output, and its report."""
    console = Console()
    console.print(f"[bold]{escape(folder.path.name)}[/] is in {escape(str(folder.path / 'dataset'))}")
    console.print_json(json.dumps(folder.report, ensure_ascii=False))


def _endpoint_of(args) -> ChatEndpoint:
    return ChatEndpoint(args.base_url, args.model, args.api_key_variable, args.max_concurrency)


# 1. Prompts
def make_prompts(args: arguments.PromptsArguments) -> None:
    """Load prompts or let a language model write them, and select the most diverse."""
    if args.dataset_name is None:
        endpoint = _endpoint_of(args)
        layouts = [(int(rows), int(cols)) for rows, cols in (text.split("x") for text in args.layouts)]
        settings = {name: getattr(args, name) for name in ("model", "num_written", "categories", "layouts", "seed")}
        written_stage = stage(args, "written_prompts", settings)
        prompts = building.write_prompts(
            endpoint, written_stage, args.num_written, args.categories, layouts, args.seed
        )
        report: dict[str, Any] = {"model": args.model, **written_stage.report}
    else:
        prompts = load_image_set_prompts(args.dataset_name, args.dataset_split, args.dataset_config)
        report = {"source": Path(args.dataset_name).name if Path(args.dataset_name).exists() else args.dataset_name}
    if "id" not in prompts.column_names:
        prompts = prompts.add_column("id", [f"{row:06}" for row in range(len(prompts))])
    report["prompts"] = len(prompts)
    single_panel_ids = [
        row["id"] for row in prompts.select_columns(["id", "rows", "cols"]) if row["rows"] * row["cols"] < 2
    ]
    if single_panel_ids:
        raise ValueError(
            f"The prompt {single_panel_ids[0]!r} has only one panel, so there is nothing to compare. Leave it out."
        )

    if args.num_selected is not None and args.embedding_model is not None:
        prompts, diversity = building.diversify_prompts(
            prompts, args.embedding_model, args.num_selected, args.duplicate_threshold
        )
        report["diversification"] = diversity
    folder = stage(args, "prompts")
    if folder.is_done and digest_of_prompts(folder.load()) != digest_of_prompts(prompts):
        raise ValueError(
            f"{folder.path} has other prompts, from {folder.report.get('source', 'a language model')}. Delete the "
            "directory to replace them, or choose another `--build_dir`."
        )
    folder.finish(prompts, report)
    finish(folder)


# 2. Grids
def make_grids(args: arguments.GridsArguments) -> None:
    """Generate grids."""
    import torch
    from accelerate import PartialState

    prompts = result(args, "prompts")
    spec = args.read_loading_spec()
    call = args.get_call_arguments(spec)
    settings = {name: getattr(args, name) for name in ("seeds", "batch_size", "height", "width")}
    settings |= (
        spec.settings | {"model": spec.model, "model_files": digest_model_files(spec.model)} | spec.digest_weights()
    )
    # Without an accelerator, processes only form a group if told to use the CPU
    state = PartialState(cpu=not torch.accelerator.is_available())
    folder = stage(args, "grids", settings | call | {"prompts": digest_of_prompts(prompts)})

    size = (args.height, args.width)
    building.generate_grids(spec.load(), prompts, folder, args.seeds, args.batch_size, *size, **call)
    if state.is_main_process:
        finish(folder)


# 3. Panels and ranking instances
def make_panels(args: arguments.PanelsArguments) -> None:
    """Cut the grids into panels, and combine them into ranking instances."""
    prompts = grid_prompts(args)
    grids = result(args, "grids")
    unknown = set(args.exclude_prompts) - set(prompts["id"][:])
    if unknown:
        raise OptionError(f"`--exclude_prompts` has {sorted(unknown)[0]!r}, which is not the id of a prompt.")
    rows = [row for row, name in enumerate(grids["prompt_id"][:]) if name not in args.exclude_prompts]
    grids = grids.select(rows)
    generated_with = digest(stage(args, "grids").settings)
    panels = building.cut_panels(grids, stage(args, "panels", {"generated_with": generated_with}))
    instances = building.make_instances(panels)
    folder = stage(args, "instances")
    folder.finish(instances, {"instances": len(instances), "candidates": len(instances[0]["candidates"])})
    finish(folder)


# 4. Ranking: by people in a Gradio app, by a judge, by construction
def annotate(args: arguments.AnnotateArguments) -> None:
    """Serve the app for ranking by people."""
    from ..dataset_building.annotate import AnnotationWork, serve_annotation

    data = (result(args, "instances"), result(args, "panels"), grid_prompts(args))
    work = AnnotationWork(*data, _annotations_dir(args), args.annotations_per_instance)
    serve_annotation(work, args.host, args.port)


def rank(args: arguments.RankArguments) -> None:
    """Rank by construction, or with a judge."""
    instances = result(args, "instances")
    panels = result(args, "panels")
    if args.judge_model == "automatic":
        count = building.rank_automatically(instances, panels, _annotations_dir(args))
        Console().print(f"{count} instances are ranked by construction, in {escape(str(_annotations_dir(args)))}.")
        return
    annotator = args.annotator or building.judge_annotator_name(args.judge_model)
    if args.judge_url is not None:
        from ..rewards import ServedJudge

        judge = ServedJudge(args.judge_url, args.judge_model)
        judge.check()
    else:
        from .. import PaCoReward

        judge = PaCoReward.from_pretrained(args.judge_model, dtype=args.dtype)
    counts = building.rank_with_judge(instances, panels, grid_prompts(args), judge, annotator, _annotations_dir(args))
    Console().print_json(json.dumps({"annotator": annotator, **counts}))


# 5. Pairs and held-out rankings
def make_pairs(args: arguments.PairsArguments) -> None:
    """Convert rankings to pairs, and hold some rankings out. More rankings make new pairs, another split does not."""
    split = {name: getattr(args, name) for name in ("test_size", "max_rankings", "num_negatives", "seed")}
    folder = stage(args, "pairs", split)
    held_out = stage(args, "rankings")
    instances = result(args, "instances")
    panels = result(args, "panels")
    prompts = grid_prompts(args)
    files = building.annotation_files(_annotations_dir(args), args.annotators)
    if args.annotators is None and len(files) > 1:  # ignore rankings by construction if there are others
        files = [file for file in files if file.stem != "automatic"]
    annotations = building.read_annotations(files, instances)
    kinds = building.annotator_kinds(annotations)
    pairs, rankings, counts = building.build_pairs(
        instances, panels, prompts, annotations, args.num_negatives, args.test_size, args.max_rankings, args.seed
    )
    ranking = building.agreement_report(annotations) | {
        "by": sorted(set(kinds.values())),
        "judges": [name for name, kind in kinds.items() if kind == "judge"],
    }
    folder.finish(pairs, {"ranking": ranking, "pairs": counts})
    pairs_sheet(pairs["train"], folder.path / "sample.png")
    if rankings is None:
        held_out.clear()
    else:
        held_out.finish(rankings, {"rankings": len(rankings)})
    finish(folder)


# 6. Reasons
def digest_of_pairs(pairs: DatasetDict) -> str:
    """Compute a digest of the pairs that reasons are written for."""
    columns = ["id", "prompt", "completion", "dimensions", "sha256"]
    return digest({name: split.select_columns(columns)[:] for name, split in pairs.items()})


def make_reasons(args: arguments.ReasonsArguments) -> None:
    """Write reasons for the label of each pair with a model."""
    pairs = result(args, "pairs")
    endpoint = _endpoint_of(args)
    names = ("model", "max_attempts", "min_words", "max_words", "seed")
    settings = {name: getattr(args, name) for name in names} | {"pairs": digest_of_pairs(pairs)}
    folder = stage(args, "reasons", settings)
    # All splits together, since a small one may not have any usable answer, and is then left out
    all_pairs = concatenate_datasets(list(pairs.values()))
    written_stage = StageFolder(folder.path / "written")
    options = (args.max_attempts, args.min_words, args.max_words, args.seed)
    pairs_with_reasons = building.write_reasons(all_pairs, endpoint, written_stage, *options)
    splits = DatasetDict()
    for name, split in pairs.items():
        ids = set(split["id"][:])
        if rows := [row for row, pair in enumerate(pairs_with_reasons["id"][:]) if pair in ids]:
            splits[name] = pairs_with_reasons.select(rows)
    folder.finish(splits, {"model": args.model, **written_stage.report})
    finish(folder)


# 7. The Hub
def publish(args: arguments.PublishArguments) -> None:
    """Upload the dataset with its card."""
    grid_prompts(args)
    pairs = result(args, "pairs")
    reasons = stage(args, "reasons")
    rankings = stage(args, "rankings")
    grids = stage(args, "grids")
    report = {
        "prompts": stage(args, "prompts").report,
        "grids": {**grids.report, **grids.settings},
        **stage(args, "pairs").report,
    }
    if reasons.is_done:
        if reasons.settings["pairs"] != digest_of_pairs(pairs):
            raise ValueError(
                f"The reasons in {reasons.path} were written for other pairs. Delete the directory, then run the "
                "stage `reasons`, or publish only the labels."
            )
        pairs = reasons.load()
        report["reasons"] = reasons.report
    url = building.publish_dataset(
        pairs,
        rankings.load() if rankings.is_done else None,
        args.hub_model_id,
        report,
        private=args.private,
        license=args.license,
        generator=grids.settings["model"],
    )
    Console().print(f"The dataset is at {escape(url)}.")
