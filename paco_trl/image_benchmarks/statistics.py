# SPDX-License-Identifier: Apache-2.0
"""Compute the figures of one system, or of two and their paired difference, with intervals over prompts."""

import math
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from ..evaluation.runs import check_protocol
from ..utils.files import read_template
from ..utils.statistics import bootstrap_sums, mean_of_strata
from ..utils.text import differences, some_of
from .image_sets import FoundImages
from .score_store import Scores


# What has a value: a tuple that begins with the id of the prompt, such as (prompt id, seed) or (prompt id, seed, panel)
Unit = tuple[Hashable, ...]
Values = Mapping[Unit, float]
NOTES: dict[str, str] = yaml.safe_load(read_template("generation_report_notes.yaml"))
# Settings that two systems must share to be comparable
CONDITIONS = ("seeds", "num_inference_steps", "guidance_scale", "true_cfg_scale", "negative_prompt", "height", "width", "dtype")  # fmt: skip


@dataclass
class System:
    """Describe a model that generated images, or a directory of images."""

    role: str  # `"base"` or `"tuned"`; any word for a system alone
    name: str  # for reports
    images: FoundImages
    folder: Path  # with its scores
    settings: dict[str, Any] = field(default_factory=dict)  # how the images were generated, as far as known

    def describe(self, gaps: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """Describe the system in results, with counts of its images and of the gaps that each scorer left."""
        counts = {"sets": len(self.images.sets), "missing panels": sum(map(len, self.images.missing.values()))}
        counts |= {f"sets without an answer ({scorer})": len(keys) for scorer, keys in gaps.items()}
        return {"role": self.role, "name": self.name, "settings": self.settings, "counts": counts}


class Line(NamedTuple):
    """A metric of a table: the (weighted) mean of the means of its parts."""

    metric: str
    label: str
    kind: str  # `dimension`; `group` or `average` of several; `other`, which no card shows
    scorer: str
    parts: Sequence[str]
    weights: Sequence[float] | None = None


def cell(
    parts: Sequence[Values], weights: Sequence[float] | None = None, strata: Mapping[Unit, Hashable] | None = None
) -> dict[str, Any]:
    """Compute the weighted sum of the means of parts over their units, and its 95 % bootstrap interval over prompts."""
    # Prompts are resampled with all their units, the same ones for all parts: the values of a prompt are not independent
    weights = [1 / len(parts)] * len(parts) if weights is None else list(weights)
    prompts = list(dict.fromkeys(unit[0] for values in parts for unit in values))
    labels = [""] if strata is None else list(dict.fromkeys(strata[unit] for values in parts for unit in values))
    index_of = {prompt: index for index, prompt in enumerate(prompts)}
    stratum_of = {label: index for index, label in enumerate(labels)}
    shape = (len(parts), len(labels), len(prompts))
    sums, counts = np.zeros(shape), np.zeros(shape)
    for part, values in enumerate(parts):
        for unit, value in values.items():
            if not math.isnan(value):
                cell = part, 0 if strata is None else stratum_of[strata[unit]], index_of[unit[0]]
                sums[cell] += value
                counts[cell] += 1
    count = int(counts[0].sum()) if parts else 0
    if not parts or not counts.any(axis=(1, 2)).all():
        return {"mean": None, "interval": [None, None], "count": count}

    def statistic(totals: np.ndarray) -> np.ndarray:
        return np.tensordot(weights, mean_of_strata(totals, len(parts)), axes=1)

    # The sums of all parts and strata, then their counts
    flat = np.concatenate([sums, counts]).reshape(-1, len(prompts))
    mean = float(statistic(flat.sum(axis=-1)))
    interval: list[float | None] = [None, None]
    # How prompts differ cannot be told from one
    if (counts.sum(axis=1) > 0).sum(axis=1).min() > 1:
        interval = list(bootstrap_sums(flat, statistic))
    return {"mean": mean, "interval": interval, "count": count}


def difference(
    first: Sequence[Values],
    second: Sequence[Values],
    weights: Sequence[float] | None = None,
    strata: Mapping[Unit, Hashable] | None = None,
) -> dict[str, Any]:
    """Compute the paired difference of two systems, second minus first, over the units of which both have values."""
    differences = [
        {unit: after[unit] - value for unit, value in before.items() if unit in after}
        for before, after in zip(first, second, strict=True)
    ]
    return cell(differences, weights, strata)


def table(
    title: str,
    lines: Sequence[Line],
    systems: Sequence[Mapping[str, Values]],
    prompts: Container[Hashable] | None = None,
    strata: Mapping[Unit, Hashable] | None = None,
) -> dict[str, Any]:
    """Compute a table from each system's values by metric; a line lacks if a part of it was not scored."""
    rows = []
    for line in lines:
        if any(part not in values for values in systems for part in line.parts):
            continue
        values = [
            [{unit: v for unit, v in of_system[part].items() if prompts is None or unit[0] in prompts} for part in line.parts]
            for of_system in systems
        ]  # fmt: skip
        rows.append({
            "metric": line.metric, "label": line.label, "kind": line.kind, "scorer": line.scorer,
            "higher_is_better": line.metric != "duplicates",
            "cells": [cell(parts, line.weights, strata) for parts in values],
            "difference": difference(values[0], values[1], line.weights, strata) if len(values) == 2 else None,
        })  # fmt: skip
    return {"title": title, "rows": rows}


def breakdowns(
    title: str, lines: Sequence[Line], systems: Sequence[Mapping[str, Values]], group_of: Mapping[Any, str]
) -> list[dict[str, Any]]:
    """Compute a table for each metric, with a row for each group of prompts."""
    tables = []
    members = {name: [key for key, part in group_of.items() if part == name] for name in sorted({*group_of.values()})}
    for line in lines:
        named = f"{title}: {line.label.lower()} ({line.scorer})"
        parts = [table(named, [line._replace(label=name)], systems, prompts) for name, prompts in members.items()]
        tables += [{"title": named, "rows": rows}] if (rows := [row for part in parts for row in part["rows"]]) else []
    return tables


def check_systems(systems: Sequence[System], scores: Sequence[Sequence[Scores]], missing: str, protocol: str) -> None:
    """Refuse systems that lack images, unless missing ones count 0, and two that do not compare."""
    check_protocol(protocol)
    for system in systems if missing == "error" else ():
        system.images.check_complete()
    if len(systems) == 1:
        return
    first, second = systems
    if Path(first.folder).resolve() == Path(second.folder).resolve():
        raise ValueError(f"Both systems are {first.folder}: a model is not compared with itself.")
    if only := first.images.sets.keys() ^ second.images.sets.keys():
        raise ValueError(f"The two systems have other prompts or seeds: only one has {some_of(sorted(only))}.")
    before, after = ({run.settings["scores"]: run.settings for run in runs} for runs in scores)
    for name in sorted(before | after):
        if different := differences({name: before.get(name, {})}, {name: after.get(name, {})}):
            raise ValueError(
                f"The scores {name!r} of the two systems differ: {'; '.join(different)}. Score both alike."
            )


def system_alerts(
    systems: Sequence[System], gaps: Sequence[Mapping[str, Sequence[str]]], protocol: str, published_gaps: str
) -> list[str]:
    """List what readers must know next to the headline: other conditions, missing images, and unanswered questions."""
    alerts = []
    unknown = " and ".join(repr(system.name) for system in systems if not system.settings)
    if len(systems) > 1 and unknown:
        alerts.append(f"How {unknown} generated is not known: the difference may come from other settings.")
    elif len(systems) > 1:
        pairs = {name: tuple(system.settings.get(name) for system in systems) for name in CONDITIONS}
        changed = [f"{name} {before!r} and {after!r}" for name, (before, after) in pairs.items() if before != after]
        if changed:
            alerts.append(f"The two systems generated under different conditions: {'; '.join(changed)}.")
    is_published = protocol == "published"
    for system, of_system in zip(systems, gaps, strict=True):
        if missing := system.images.missing:
            how = "left out, as by the benchmark's own script" if is_published else "count 0, as do pairs with one"
            lacking = f"{sum(map(len, missing.values()))} panels of {system.name!r} are missing"
            alerts.append(f"{lacking} and {how}: {some_of(list(missing))}.")
        for scorer, keys in of_system.items():
            if keys:
                then = published_gaps if is_published else "are left out of its figures"
                text = f"{len(keys)} sets of {system.name!r} have an unanswered question ({scorer}) and {then}"
                alerts.append(f"{text}: {some_of(keys)}.")
    return alerts
