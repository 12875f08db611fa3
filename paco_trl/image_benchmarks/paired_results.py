# SPDX-License-Identifier: Apache-2.0
"""Results of one system, or of two and their paired difference, with confidence intervals over prompts."""

import math
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, NotRequired, TypedDict, TypeVar

import numpy as np
import yaml

from ..evaluation.scoring import check_protocol
from ..utils.differences import differences
from ..utils.files import read_template
from ..utils.statistics import bootstrap_sums, mean_of_strata
from ..utils.text import join_first
from .score_store import Scores
from .system_images import SystemImages


# Key of a value: a tuple that begins with the prompt id, such as (prompt id, seed) or (prompt id, seed, panel)
SampleKey = tuple[Hashable, ...]
Values = Mapping[SampleKey, float]
NOTES: dict[str, str] = yaml.safe_load(read_template("generation_report_notes.yaml"))
# Settings that two systems must share to be comparable
CONDITIONS = (
    "seeds", "num_inference_steps", "guidance_scale", "true_cfg_scale", "negative_prompt", "height", "width", "dtype",
)  # fmt: skip


class SystemEntry(TypedDict):
    """A system as results have it."""

    role: str
    name: str
    settings: dict[str, Any]
    counts: dict[str, int]


Images = TypeVar("Images")


@dataclass
class ImageSystem(Generic[Images]):
    """A model that generated images, or a directory of images."""

    role: str  # `"base"` or `"tuned"`, or any role for a single system
    name: str  # name in reports
    images: Images
    folder: Path  # directory of its scores
    settings: dict[str, Any] = field(default_factory=dict)  # settings of the generation, as far as known

    def entry_with(self, counts: dict[str, int]) -> SystemEntry:
        """Return the system as results have it."""
        return {"role": self.role, "name": self.name, "settings": self.settings, "counts": counts}


@dataclass
class System(ImageSystem[SystemImages]):
    """A model that generated images of a benchmark, or a directory of such images."""

    def entry(self, unanswered: Mapping[str, Sequence[str]]) -> SystemEntry:
        """Return the system as results have it, with counts of its images, missing panels and unanswered sets."""
        counts = {"sets": len(self.images.sets), "missing panels": sum(map(len, self.images.missing.values()))}
        counts |= {f"sets without an answer ({scorer})": len(keys) for scorer, keys in unanswered.items()}
        return self.entry_with(counts)


class Mean(TypedDict):
    """Mean of values, or of paired differences, with its interval over prompts; `None` where undefined."""

    mean: float | None
    interval: list[float | None]
    count: int  # number of values


class ResultRow(TypedDict):
    """Row of a table: a metric of each system, and its difference if there are two."""

    metric: str
    label: str
    kind: str  # see `MetricRow`
    scorer: str
    higher_is_better: bool
    cells: list[Mean]
    difference: Mean | None


class ResultTable(TypedDict):
    """Table of metrics."""

    title: str
    rows: list[ResultRow]


class ShownSet(TypedDict):
    """Images of a prompt by each system, as the page shows them."""

    key: str
    prompt: str
    category: NotRequired[str | None]
    subcategory: NotRequired[str | None]
    source: str | None  # path of the source image
    pictures: list[list[str | None]]  # paths of each system's images
    panels: list[int]  # rows and columns
    is_separate: NotRequired[bool]  # whether a file has separate images side by side
    scores: list[dict[str, float | None]]  # of each system, by metric


class GenerationResults(TypedDict):
    """Results of one system, or of two, as JSON values."""

    benchmark: str | None  # `None` for your own prompts
    dataset: str | None
    num_prompts: int
    systems: list[SystemEntry]
    scorers: dict[str, list[str]]
    tables: list[ResultTable]
    breakdowns: list[ResultTable]
    alerts: list[str]
    notes: list[str]
    sets: list[ShownSet]
    headline: str  # metric by which the page chooses its sets


class BenchmarkResults(GenerationResults):
    """Results of a benchmark."""

    protocol: str
    dataset_fingerprint: str
    seeds: list[int]
    leakage: dict[str, Any] | None


class MetricRow(NamedTuple):
    """Row of a table: a metric that is the weighted mean of the means of its parts."""

    metric: str
    label: str
    kind: str  # `dimension`; `group` or `average` of several; `other`, which no card shows
    scorer: str
    parts: Sequence[str]
    weights: Sequence[float] | None = None


def mean_over_prompts(
    parts: Sequence[Values], weights: Sequence[float] | None = None, strata: Mapping[SampleKey, Hashable] | None = None
) -> Mean:
    """Compute the weighted sum of the parts' means over units, and its 95 % bootstrap interval over prompts."""
    # Values of a prompt are not independent, so prompts are resampled with all their units, and jointly for all parts
    weights = [1 / len(parts)] * len(parts) if weights is None else list(weights)
    prompts = list(dict.fromkeys(unit[0] for values in parts for unit in values))
    labels = [""] if strata is None else list(dict.fromkeys(strata[unit] for values in parts for unit in values))
    index_of = {prompt: index for index, prompt in enumerate(prompts)}
    stratum_of = {label: index for index, label in enumerate(labels)}
    shape = (len(parts), len(labels), len(prompts))
    sums = np.zeros(shape)
    counts = np.zeros(shape)
    for part, values in enumerate(parts):
        for unit, value in values.items():
            if not math.isnan(value):
                index = part, 0 if strata is None else stratum_of[strata[unit]], index_of[unit[0]]
                sums[index] += value
                counts[index] += 1
    count = int(counts[0].sum()) if parts else 0
    if not parts or not counts.any(axis=(1, 2)).all():
        return {"mean": None, "interval": [None, None], "count": count}

    def statistic(totals: np.ndarray) -> np.ndarray:
        return np.tensordot(weights, mean_of_strata(totals, len(parts)), axes=1)

    # The sums of all parts and strata, followed by their counts
    sums_and_counts = np.concatenate([sums, counts]).reshape(-1, len(prompts))
    mean = float(statistic(sums_and_counts.sum(axis=-1)))
    interval: list[float | None] = [None, None]
    # One prompt does not tell how prompts differ
    if (counts.sum(axis=1) > 0).sum(axis=1).min() > 1:
        interval = list(bootstrap_sums(sums_and_counts, statistic))
    return {"mean": mean, "interval": interval, "count": count}


def compute_difference(
    first: Sequence[Values],
    second: Sequence[Values],
    weights: Sequence[float] | None = None,
    strata: Mapping[SampleKey, Hashable] | None = None,
) -> Mean:
    """Compute the paired difference of two systems, second minus first, over the units that both have."""
    differences = [
        {unit: second_part[unit] - value for unit, value in first_part.items() if unit in second_part}
        for first_part, second_part in zip(first, second, strict=True)
    ]
    return mean_over_prompts(differences, weights, strata)


def compute_table(
    title: str,
    metric_rows: Sequence[MetricRow],
    systems: Sequence[Mapping[str, Values]],
    prompts: Container[Hashable] | None = None,
    strata: Mapping[SampleKey, Hashable] | None = None,
) -> ResultTable:
    """Compute a table from the values of each system by metric, without rows that have unscored parts."""
    table_rows: list[ResultRow] = []
    for row in metric_rows:
        if any(part not in values for values in systems for part in row.parts):
            continue
        values = [
            [
                {unit: v for unit, v in system_values[part].items() if prompts is None or unit[0] in prompts}
                for part in row.parts
            ]
            for system_values in systems
        ]  # fmt: skip
        table_rows.append({
            "metric": row.metric, "label": row.label, "kind": row.kind, "scorer": row.scorer,
            "higher_is_better": row.metric != "duplicates",
            "cells": [mean_over_prompts(parts, row.weights, strata) for parts in values],
            "difference": compute_difference(values[0], values[1], row.weights, strata) if len(values) == 2 else None,
        })  # fmt: skip
    return {"title": title, "rows": table_rows}


def compute_breakdowns(
    title: str, metric_rows: Sequence[MetricRow], systems: Sequence[Mapping[str, Values]], group_of: Mapping[Any, str]
) -> list[ResultTable]:
    """Compute a table per metric, with a row per group of prompts."""
    tables: list[ResultTable] = []
    members = {
        name: [key for key, group in group_of.items() if group == name] for name in sorted({*group_of.values()})
    }
    for metric_row in metric_rows:
        table_title = f"{title}: {metric_row.label.lower()} ({metric_row.scorer})"
        group_tables = [
            compute_table(table_title, [metric_row._replace(label=name)], systems, prompts)
            for name, prompts in members.items()
        ]
        if rows := [row for group_table in group_tables for row in group_table["rows"]]:
            tables.append({"title": table_title, "rows": rows})
    return tables


def check_systems(systems: Sequence[System], scores: Sequence[Sequence[Scores]], missing: str, protocol: str) -> None:
    """Reject systems with missing images, unless such images count 0, and systems that are not comparable."""
    check_protocol(protocol)
    for system in systems if missing == "error" else ():
        system.images.check_complete()
    if len(systems) == 1:
        return
    first, second = systems
    if Path(first.folder).resolve() == Path(second.folder).resolve():
        raise ValueError(f"Both systems are {first.folder}. Choose two different ones to compare.")
    if unshared_keys := first.images.sets.keys() ^ second.images.sets.keys():
        raise ValueError(
            f"The two systems have different prompts or seeds: only one has {join_first(sorted(unshared_keys))}."
        )
    base, tuned = ({run.settings["scores"]: run.settings for run in runs} for runs in scores)
    for name in sorted(base | tuned):
        if changes := differences({name: base.get(name, {})}, {name: tuned.get(name, {})}):
            raise ValueError(
                f"The scores {name!r} of the two systems differ: {'; '.join(changes)}. Score both with the same "
                "settings."
            )


def system_alerts(
    systems: Sequence[System],
    unanswered: Sequence[Mapping[str, Sequence[str]]],
    protocol: str,
    published_treatment: str,
) -> list[str]:
    """List alerts for the reader: different conditions, missing images, and unanswered questions."""
    alerts = []
    unknown = " and ".join(repr(system.name) for system in systems if not system.settings)
    if len(systems) > 1 and unknown:
        alerts.append(f"It is not known how {unknown} generated, so the difference may come from other settings.")
    elif len(systems) > 1:
        pairs = {name: tuple(system.settings.get(name) for system in systems) for name in CONDITIONS}
        changed_conditions = [
            f"{name} {before!r} and {after!r}" for name, (before, after) in pairs.items() if before != after
        ]
        if changed_conditions:
            alerts.append(f"The two systems generated under different conditions: {'; '.join(changed_conditions)}.")
    is_published = protocol == "published"
    for system, unanswered_by_scorer in zip(systems, unanswered, strict=True):
        if missing := system.images.missing:
            treatment = (
                "left out, as by the benchmark's own script" if is_published else "count 0, as do pairs with one"
            )
            missing_text = f"{sum(map(len, missing.values()))} panels of {system.name!r} are missing"
            alerts.append(f"{missing_text} and {treatment}: {join_first(list(missing))}.")
        for scorer, keys in unanswered_by_scorer.items():
            if keys:
                consequence = published_treatment if is_published else "are left out of its results"
                text = f"{len(keys)} sets of {system.name!r} have an unanswered question ({scorer}) and {consequence}"
                alerts.append(f"{text}: {join_first(keys)}.")
    return alerts
