# SPDX-License-Identifier: Apache-2.0
"""Compute means over prompts with their intervals, for one system and for the difference of two, and lay them out."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ..utils.statistics import bootstrap_sums, mean_of_strata


# What has a value: a tuple that begins with the id of the prompt, such as (prompt id, seed) or (prompt id, seed, panel)
Unit = tuple[Hashable, ...]
Values = Mapping[Unit, float]


def cell(
    parts: Sequence[Values], weights: Sequence[float] | None = None, strata: Mapping[Unit, Hashable] | None = None
) -> dict[str, Any]:
    """Compute the weighted sum of the means of parts over their units, and its 95 % bootstrap interval over prompts."""
    # Prompts are resampled with all their units, the same ones for all parts: the values of a prompt are not independent
    weights = [1 / len(parts)] * len(parts) if weights is None else list(weights)
    prompts = list(dict.fromkeys(unit[0] for values in parts for unit in values))
    labels = [""] if strata is None else list(dict.fromkeys(strata[unit] for values in parts for unit in values))
    place_of = {prompt: place for place, prompt in enumerate(prompts)}
    number_of = {label: number for number, label in enumerate(labels)}
    shape = (len(parts), len(labels), len(prompts))
    sums, counts = np.zeros(shape), np.zeros(shape)
    for part, values in enumerate(parts):
        for unit, value in values.items():
            if not math.isnan(value):
                where = part, 0 if strata is None else number_of[strata[unit]], place_of[unit[0]]
                sums[where] += value
                counts[where] += 1
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


def paired_cells(
    values: Sequence[Sequence[Values]],
    weights: Sequence[float] | None = None,
    strata: Mapping[Unit, Hashable] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Compute the cell of each system, and that of the difference of two."""
    cells = [cell(parts, weights, strata) for parts in values]
    return cells, difference(values[0], values[1], weights, strata) if len(values) == 2 else None


def metric_row(metric: str, label: str, kind: str, cells: list[dict], change: dict | None) -> dict[str, Any]:
    """Make a row of a table of results."""
    row = {"metric": metric, "label": label, "kind": kind, "higher_is_better": metric != "duplicates"}
    return row | {"cells": cells, "difference": change}


def breakdown(
    title: str, table: str, columns: list[str], members: Mapping[str, Any], cells: Callable[[str, Any], tuple]
) -> dict[str, Any]:
    """Compute metrics for each group of prompts."""
    rows = []
    for name, group in sorted(members.items()):
        found = {metric: cells(metric, group) for metric in columns}
        own = {metric: pair[0] for metric, pair in found.items()}
        change = {metric: pair[1] for metric, pair in found.items() if pair[1] is not None}
        rows.append({"name": name, "num_prompts": len(group), "cells": own, "difference": change})
    return {"title": title, "table": table, "columns": columns, "rows": rows}
