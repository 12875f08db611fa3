# SPDX-License-Identifier: Apache-2.0
"""Results of T2IS-Bench from the scores of one or two systems."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, cast

from datasets import Dataset

from ..evaluation.scoring import dataset_fingerprint
from . import t2is_bench as bench
from .leakage import leakage_text
from .paired_results import (
    NOTES,
    BenchmarkResults,
    MetricRow,
    ResultTable,
    SampleKey,
    System,
    check_systems,
    compute_breakdowns,
    compute_table,
    system_alerts,
)
from .score_store import Scores, read_scores
from .system_images import ImageSet


# Metric -> unit -> value, NaN where undefined
_Metrics = dict[str, dict[SampleKey, float]]


def t2is_results(
    benchmark: Dataset,
    systems: Sequence[System],
    missing: str = "error",
    dataset_name: str | None = None,
    leakage: dict[str, Any] | None = None,
    protocol: str = "default",
) -> BenchmarkResults:
    """
    Compute the results of T2IS-Bench: seven dimensions, three groups, their weighted average and the duplicate rate,
    with intervals, by category, and as a paired difference of two systems.

    Nothing is silently dropped or set to 0: a dimension that a prompt lacks is undefined for it, sets with unanswered
    questions are left out and counted, and missing images are an error or count 0.

    Args:
        benchmark ([`~datasets.Dataset`]):
            From [`load_t2is_bench`].
        systems (`Sequence[System]`):
            One system, or two to compare the second with the first.
        missing (`str`, *optional*, defaults to `"error"`):
            `"error"`, or `"zero"` to score missing images, and pairs with a missing image, as 0. With `"zero"`, the
            published protocol leaves them out.
        dataset_name (`str`, *optional*):
            Name of the benchmark's data, for the report.
        leakage (`dict[str, Any]`, *optional*):
            From [`find_leaks`]. If `None`, the report states that leakage was not checked.
        protocol (`str`, *optional*, defaults to `"default"`):
            `"published"` for the arithmetic of the benchmark's script on the same scores: means only include existing
            pairs and images, and sets with a score above 0, so that missing images, sets of one image and sets with a
            score of exactly 0 are left out.

    Returns:
        `dict[str, Any]`: all results as JSON values, for [`save_generation_report`].
    """
    benchmark = benchmark.with_format(None)
    rows = {row["id"]: row for row in benchmark}
    scores = [_read(system, benchmark) for system in systems]
    check_systems(systems, scores, missing, protocol)
    names: dict[str, list[str]] = {}
    for run in scores[0]:
        names.setdefault(run.settings["kind"], []).append(run.settings["scorer"])
    tables: list[ResultTable] = []
    breakdown_by_title: dict[str, ResultTable] = {}  # so that breakdowns that do not depend on the judge occur once
    set_scores: list[dict] = []
    for judge in names["consistency"]:
        judge_runs = [
            [run for run in runs if run.settings["scorer"] == judge or run.settings["kind"] != "consistency"]
            for runs in scores
        ]
        values = [
            _values(runs, system.images.sets, rows, protocol) for runs, system in zip(judge_runs, systems, strict=True)
        ]
        metric_rows = _metric_rows(judge, names)
        tables.append(compute_table(f"Judge: {judge}", metric_rows, values))
        main_rows = [row for row in metric_rows if len(row.parts) > 1 or row.metric in ("aesthetics", "duplicates")]
        for column in ("category", "subcategory"):
            if any(row.get(column) for row in rows.values()):
                group_of = {name: row.get(column) or "without one" for name, row in rows.items()}
                for breakdown in compute_breakdowns(f"By {column}", main_rows, values, group_of):
                    breakdown_by_title[breakdown["title"]] = breakdown
        set_scores = set_scores or [
            _set_scores(*arguments, rows) for arguments in zip(systems, values, judge_runs, strict=True)
        ]

    unanswered = [{run.settings["scores"]: run.unanswered for run in runs} for runs in scores]
    columns = ("id", "prompt", "rows", "cols", "criteria", "alignment")
    columns = [name for name in columns if name in benchmark.column_names]
    alerts = system_alerts(systems, unanswered, protocol, "count by their other answers")
    image_sets = systems[0].images.sets
    return {
        "benchmark": "T2IS-Bench",
        "protocol": protocol,
        "dataset": dataset_name,
        "dataset_fingerprint": dataset_fingerprint(benchmark, columns),
        "num_prompts": len(rows),
        "seeds": sorted({set_.seed for set_ in image_sets.values()}),
        "systems": [system.entry(keys) for system, keys in zip(systems, unanswered, strict=True)],
        "scorers": {kind: names.get(kind, []) for kind in ("consistency", "alignment", "aesthetics")},
        "tables": tables,
        "breakdowns": list(breakdown_by_title.values()),
        "leakage": leakage,
        "alerts": alerts,
        "notes": [*_notes(names), leakage_text(leakage)],
        "sets": [
            {
                "key": key,
                "prompt": rows[set_.prompt_id]["prompt"],
                "category": rows[set_.prompt_id].get("category"),
                "subcategory": rows[set_.prompt_id].get("subcategory"),
                "source": None,
                "pictures": [system.images.sets[key].paths for system in systems],
                "panels": [set_.rows, set_.cols],
                "scores": [system_scores[key] for system_scores in set_scores],
            }
            for key, set_ in image_sets.items()
        ],
        "headline": "consistency",
    }


def _read(system: System, benchmark: Dataset) -> list[Scores]:
    scores = read_scores(system.folder, system.images.digests)
    kinds = [run.settings["kind"] for run in scores]
    for run in scores:
        kind = run.settings["kind"]
        columns = bench.COLUMNS[run.settings["kind"]]
        has_all = set(columns) <= set(benchmark.column_names)
        if not has_all or run.settings["benchmark"] != dataset_fingerprint(benchmark, columns):
            raise ValueError(
                f"{kind} of {system.name!r} was scored with another {columns[-1]}, or other prompts "
                f"({system.folder}). Use the same data, or score into another directory."
            )
        if kind != "consistency" and kinds.count(kind) > 1:
            raise ValueError(f"{system.folder} has {kind} scores of several scorers. Keep those of one.")
    if "consistency" not in kinds:
        raise ValueError(f"No judge has scored the consistency of {system.name!r} ({system.folder}). Score it first.")
    return scores


def _values(
    scores: Sequence[Scores], sets: Mapping[str, ImageSet], rows: Mapping[str, dict], protocol: str
) -> _Metrics:
    """Compute the values of metrics. Missing panels, and pairs with a missing panel, count 0 or are left out."""
    missing_value = math.nan if protocol == "published" else 0.0
    groups: dict[str, Any] = {"consistency": bench.CONSISTENCY, "alignment": bench.ALIGNMENT}
    values: _Metrics = {}
    for kind, key, record in ((run.settings["kind"], *item) for run in scores for item in run.records.items()):
        metrics = {name: values.setdefault(name, {}) for name in groups.get(kind, [kind])}
        image_set = sets[key]
        raw_scores = record["scores"]
        unit = (image_set.prompt_id, image_set.seed)
        panels = image_set.rows * image_set.cols
        if kind == "consistency":
            for name, set_values in metrics.items():
                score = bench.dimension_score(raw_scores.get(name, []), panels * (panels - 1) // 2, protocol)
                set_values[unit] = math.nan if score is None else score
        elif kind == "duplicates":
            for pair, similarity in zip(record["pairs"], raw_scores, strict=True):
                metrics[kind][*unit, *pair] = float(similarity >= bench.DUPLICATE)
        elif kind == "aesthetics":
            for panel, score in enumerate(raw_scores):
                value = missing_value if panel in image_set.missing else score
                metrics[kind][*unit, panel] = math.nan if value is None else value
        else:
            texts = bench.alignment_texts(rows[image_set.prompt_id])
            for panel, (expected, answers) in enumerate(zip(texts, raw_scores, strict=True)):
                for name, panel_values in metrics.items():
                    answer_values: Any = (
                        [None] if name not in expected else [missing_value] if answers is None else answers[name]
                    )
                    panel_values[*unit, panel] = math.nan if None in answer_values else fmean(answer_values)
    return values


def _metric_rows(judge: str, names: Mapping[str, Sequence[str]]) -> list[MetricRow]:
    scorers = {kind: f"scorer {first}" for kind, (first, *_) in names.items()} | {"consistency": f"judge {judge}"}
    metric_rows = [MetricRow("aesthetics", "Aesthetics", "dimension", scorers.get("aesthetics", ""), ["aesthetics"])]
    for group, title, dimensions in (
        ("alignment", "Prompt alignment", bench.ALIGNMENT),
        ("consistency", "Visual consistency", bench.CONSISTENCY),
    ):
        scorer = scorers.get(group, "")
        metric_rows += [MetricRow(name, label, "dimension", scorer, [name]) for name, label in dimensions.items()]
        metric_rows.append(MetricRow(group, title, "group", scorer, list(dimensions)))
    weights = " + ".join(f"{weight:g} {name}" for name, weight in bench.WEIGHTS.items())
    parts = list(bench.DIMENSION_WEIGHTS)
    part_weights = list(bench.DIMENSION_WEIGHTS.values())
    metric_rows.append(
        MetricRow("average", f"Weighted average ({weights})", "average", f"judge {judge}", parts, part_weights)
    )
    return [
        *metric_rows,
        MetricRow("duplicates", "Duplicate rate", "other", scorers.get("duplicates", ""), ["duplicates"]),
    ]


def _set_scores(
    system: System, metrics: _Metrics, judge_runs: Sequence[Scores], rows: Mapping[str, dict]
) -> dict[str, dict[str, float | None]]:
    """Average each metric over the panels or pairs of each set, `None` if undefined or incomplete."""
    values: dict[SampleKey, dict[str, list[float]]] = {}
    for name, unit_values in metrics.items():
        for unit, value in unit_values.items():
            metric_values = values.setdefault(unit[:2], {}).setdefault(name, [])
            metric_values += [] if math.isnan(value) else [value]
    scores_by_set = {}
    unanswered = {run.settings["kind"]: run.unanswered for run in judge_runs}
    for key, image_set in system.images.sets.items():
        values_by_metric = values.get((image_set.prompt_id, image_set.seed), {})
        scores: dict[str, float | None] = {
            name: fmean(set_values) if set_values else None for name, set_values in values_by_metric.items()
        }
        if key in unanswered.get("aesthetics", ()):
            scores["aesthetics"] = None
        if key in unanswered.get("alignment", ()):
            scores |= dict.fromkeys(bench.ALIGNMENT)
        # A mean over fewer dimensions of the prompt would not compare with the other system's
        dimensions = () if key in unanswered["consistency"] else bench.consistency_criteria(rows[image_set.prompt_id])
        scores["consistency"] = _mean_or_none([scores.get(name) for name in dimensions])
        scores["alignment"] = _mean_or_none([scores[name] for name in bench.ALIGNMENT if scores.get(name) is not None])
        has_all = all(scores.get(name) is not None for name in bench.DIMENSION_WEIGHTS)
        scores["average"] = bench.weighted_average(cast(Any, scores)) if has_all else None
        scores_by_set[key] = scores
    return scores_by_set


def _mean_or_none(values: list) -> float | None:
    return fmean(values) if values and None not in values else None


def _notes(names: Mapping[str, Sequence[str]]) -> list[str]:
    notes = [
        f"{metric} was not scored, so the weighted average is not computed."
        for kind, metric in (("alignment", "Prompt alignment"), ("aesthetics", "Aesthetics"))
        if kind not in names
    ]
    notes += [NOTES[kind].format(name=names[kind][0]) for kind in ("alignment", "aesthetics") if kind in names]
    notes.append(NOTES["duplicates" if "duplicates" in names else "no_duplicates"].format(threshold=bench.DUPLICATE))
    return notes + [NOTES["one_judge"]] * (len(names["consistency"]) == 1)
