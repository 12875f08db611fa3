# SPDX-License-Identifier: Apache-2.0
"""Results of an evaluation of image models as tables of texts, the same in every format."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..utils.tables import number_text
from .report_numbers import (
    cell_text,
    duplicate_metric,
    excludes_zero,
    find_row,
    in_sentence,
    protocol_of,
    public_results,
    public_text,
    row_label,
    system_name,
    verdict,
)


# What scored a metric, where it does not depend on the judge of consistency
_OWN_SCORER = {
    "aesthetics": "aesthetics",
    "alignment": "alignment",
    "entity": "alignment",
    "attribute": "alignment",
    "relation": "alignment",
}

_INTERVALS = "In brackets: 95 % bootstrap interval over prompts."


@dataclass(frozen=True)
class ReportTable:
    """A table of a report, the same in every format."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...]
    lines: tuple[str, ...] = ()


def metric_tables(results: dict[str, Any]) -> list[ReportTable]:
    """Lays the metrics out: a table for each judge (for each language and subset), a row for each metric."""
    systems = [system_name(system) for system in results["systems"]]
    is_paired = len(systems) > 1
    tables = []
    for table in results["tables"]:
        published = [published_texts(row) for row in table["rows"]]
        has_published = any(text for texts in published for text in texts)
        columns = ["metric", *systems, *(["difference", "interval excludes 0"] if is_paired else []), "n"]
        columns += [f"published: {system['role']}" for system in results["systems"]] if has_published else []
        rows = []
        for row, texts in zip(table["rows"], published, strict=True):
            difference = row.get("difference")
            cells = [row_label(row, results), *(cell_text(cell) for cell in row["cells"])]
            if is_paired:
                cells += [cell_text(difference, signed=True), verdict(difference, row["higher_is_better"])]
            cells.append(_counts_text(row["cells"], difference if is_paired else None))
            if has_published:
                cells += texts
            rows.append(tuple(cells))
        lines = [
            f"Protocol: {protocol_of(results)}. {_INTERVALS}"
            + (
                " The difference is paired: the second system minus the first, over what both have a value of."
                if is_paired
                else ""
            ),
            "n: sets, images or edits that have a value; for a mean of several metrics, those of the first.",
        ]
        if has_published:
            lines.append("Published: the value under the published protocol; empty where it is the same, or has none.")
        lower = [row["label"] for row in table["rows"] if not row["higher_is_better"]]
        lines += [f"Lower is better: {', '.join(lower)}."] if lower else []
        if any("n/a" in cells for cells in rows):
            lines.append("n/a: there is no value. The notes and the list of scorers say why.")
        kinds = tuple(row["kind"] for row in table["rows"])
        tables.append(ReportTable(table["title"], tuple(columns), tuple(rows), kinds, tuple(lines)))
    return tables


def published_texts(row: dict[str, Any]) -> list[str]:
    """The values under the published protocol."""
    means = [cell["mean"] for cell in row["cells"]]
    return [
        ""
        if value is None or math.isnan(value) or (mean is not None and math.isclose(value, mean, abs_tol=1e-9))
        else number_text(value)
        for value, mean in zip(row.get("published") or [None] * len(means), means, strict=True)
    ]


def _counts_text(cells: Sequence[dict[str, Any]], difference: dict[str, Any] | None) -> str:
    counts = [cell["count"] for cell in cells]
    both = difference["count"] if difference is not None else counts[0]
    if len({*counts, both}) == 1:
        return str(both)
    return " / ".join(map(str, counts)) + (f" / {both} in both" if difference is not None else "")


def breakdown_tables(results: dict[str, Any]) -> list[ReportTable]:
    """Lays the breakdowns out: a table for each metric, a row for each category or subcategory."""
    tables: dict[str, ReportTable] = {}
    for breakdown in results["breakdowns"]:
        of_judge = next((table for table in results["tables"] if table["title"] == breakdown["table"]), {"rows": []})
        for metric in breakdown["columns"]:
            row = find_row(of_judge, metric)
            scorer = scored_by(metric, breakdown["table"], results)
            title = f"{breakdown['title']}: {row['label'].lower() if row else metric}" + f" ({scorer})" * bool(scorer)
            if title not in tables:
                higher_is_better = row is None or row["higher_is_better"]
                tables[title] = _breakdown_table(title, metric, breakdown["rows"], results, higher_is_better)
    return list(tables.values())


def _breakdown_table(
    title: str, metric: str, parts: list[dict[str, Any]], results: dict[str, Any], higher_is_better: bool
) -> ReportTable:
    is_paired = len(results["systems"]) > 1
    columns = ["", "prompts", *map(system_name, results["systems"])]
    columns += ["difference", "interval excludes 0"] if is_paired else []
    rows, num_intervals = [], 0
    for part in parts:
        cells = [part["name"], str(part["num_prompts"]), *map(cell_text, part["cells"][metric])]
        if is_paired:
            difference = part["difference"][metric]
            cells += [cell_text(difference, signed=True), verdict(difference, higher_is_better)]
            num_intervals += excludes_zero(difference) is not None
        rows.append(tuple(cells))
    lines = [_INTERVALS]
    if num_intervals >= 20:
        lines.append(
            f"Of {num_intervals} intervals about {num_intervals / 20:.0f} would exclude 0 by chance if nothing differed."
        )
    return ReportTable(title, tuple(columns), tuple(rows), ("other",) * len(rows), tuple(lines))


def scored_by(metric: str, title: str, results: dict[str, Any]) -> str:
    """By what a metric was scored, such as `judge gemma-3-4b-it`; empty for the duplicate rate."""
    if metric == duplicate_metric(results):
        return ""
    own = results["scorers"].get(_OWN_SCORER.get(metric, ""))
    return f"scorer {own}" if own else in_sentence(title)


def count_table(results: dict[str, Any]) -> ReportTable:
    """Lays out how many images there are, and how many are missing, skipped or copies."""
    systems = results["systems"]
    names = list(dict.fromkeys(name for system in systems for name in system["counts"]))
    rows = [(name, *(_count_text(system["counts"].get(name)) for system in systems)) for name in names]
    return ReportTable("Images", ("", *map(system_name, systems)), tuple(rows), ("other",) * len(rows))


def _count_text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def settings_table(results: dict[str, Any]) -> ReportTable:
    """Lays the settings of the systems out side by side, with those marked that differ."""
    systems = results["systems"]
    names = list(dict.fromkeys(name for system in systems for name in system["settings"]))
    missing = object()
    rows, kinds = [], []
    for name in names:
        values = [system["settings"].get(name, missing) for system in systems]
        texts = ["not given" if value is missing else _setting_text(value) for value in values]
        differs = any(value != values[0] for value in values)
        rows.append((name, *texts, *(["differs" if differs else ""] if len(systems) > 1 else [])))
        kinds.append("differs" if differs else "other")
    columns = ("setting", *map(system_name, public_results(systems)), *([""] if len(systems) > 1 else []))
    return ReportTable("Settings", columns, tuple(rows), tuple(kinds))


def _setting_text(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return public_text(text)
