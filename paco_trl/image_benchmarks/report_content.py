# SPDX-License-Identifier: Apache-2.0
"""Lay out what a report says, once for all its formats: sentences, tables and sections of text."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..evaluation.published import PublishedTable, published_tables, published_text
from ..utils.tables import number_text
from .report_numbers import (
    benchmark_name,
    cell_text,
    duplicate_metric,
    find_row,
    in_sentence,
    protocol_of,
    public_results,
    public_text,
    row_label,
    system_name,
    verdict,
)


PUBLISHED_HEADING = "Published figures, not measured here"
_PUBLISHED_NOTE = (
    "Copied from the paper: only the columns whose scorer is one of those above, under the same protocol, but of other "
    "images. Use them for orientation; do not compare them digit by digit."
)
_INTERVALS = "In brackets: 95 % bootstrap interval over prompts."
# Scorer of a metric that does not depend on the judge of consistency
_OWN_SCORER = {"aesthetics": "aesthetics"} | dict.fromkeys(
    ("alignment", "entity", "attribute", "relation"), "alignment"
)
# A list in a sentence has this many entries, then their number
_MAX_LISTED = 20


@dataclass(frozen=True)
class ReportTable:
    """A table of texts."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...]
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A section of a report: text, a list, and tables."""

    id: str
    title: str
    text: Sequence[str] = ()
    bullets: Sequence[str] = ()
    tables: Sequence[ReportTable] = ()


def report_sections(results: dict[str, Any]) -> list[Section]:
    """Lay out everything below the head of a report, except images."""
    # Before the paths are cut: two of them can have the same last part
    settings = settings_table(results)
    results = public_results(results)
    published = comparable_tables(results)
    remarks = list(dict.fromkeys(remark for table in published for remark in table.remarks))
    versions = [f"{name}: {number}" for name, number in results["versions"].items()]
    sections = [
        Section("results", "Results", tables=metric_tables(results)),
        Section("breakdowns", "Breakdowns", tables=breakdown_tables(results)),
        Section("images", "Images", missing_lines(results), tables=[count_table(results)]),
        Section("leakage", "Leakage", [leakage_line(results)]),
        Section("settings", "Settings", tables=[settings]),
        Section("notes", "Notes", bullets=results["notes"]),
        Section(
            "published",
            PUBLISHED_HEADING,
            text=[_PUBLISHED_NOTE] if published else [],
            bullets=remarks,
            tables=[_published_table(table) for table in published],
        ),
        Section("versions", "Versions", bullets=versions),
    ]
    return [section for section in sections if section.text or section.bullets or section.tables]


################
# Tables
################
def metric_tables(results: dict[str, Any]) -> list[ReportTable]:
    """Lay out the metrics: a table for each judge (or language and subset), a row for each metric."""
    is_paired = len(results["systems"]) > 1
    columns = ("metric", *map(system_name, results["systems"]), *_difference_columns(results), "n")
    tables = []
    for table in results["tables"]:
        rows = []
        for row in table["rows"]:
            cells = [row_label(row, results), *map(cell_text, row["cells"])]
            if is_paired:
                cells += _difference_cells(row["difference"], row["higher_is_better"])
            rows.append((*cells, _counts_text(row["cells"], row["difference"] if is_paired else None)))
        paired = " The difference is paired: the second system minus the first, over what both have a value of."
        lines = [f"Protocol: {protocol_of(results)}. {_INTERVALS}{paired * is_paired}"]
        lines.append("n: number of sets, images or edits with a value; for a mean of several metrics, of the first.")
        lower = [row["label"] for row in table["rows"] if not row["higher_is_better"]]
        lines += [f"Lower is better: {', '.join(lower)}."] if lower else []
        lines += ["n/a: no value. The notes and the list of scorers say why."] if "n/a" in sum(rows, ()) else []
        kinds = tuple(row["kind"] for row in table["rows"])
        tables.append(ReportTable(table["title"], columns, tuple(rows), kinds, tuple(lines)))
    return tables


def _difference_columns(results: dict[str, Any]) -> list[str]:
    return ["difference", "interval excludes 0"] if len(results["systems"]) > 1 else []


def _difference_cells(difference: dict[str, Any] | None, higher_is_better: bool) -> list[str]:
    return [cell_text(difference, signed=True), verdict(difference, higher_is_better)]


def _counts_text(cells: Sequence[dict[str, Any]], difference: dict[str, Any] | None) -> str:
    counts = [cell["count"] for cell in cells]
    both = difference["count"] if difference is not None else counts[0]
    if len({*counts, both}) == 1:
        return str(both)
    return " / ".join(map(str, counts)) + (f" / {both} in both" if difference is not None else "")


def breakdown_tables(results: dict[str, Any]) -> list[ReportTable]:
    """Lay out the breakdowns: a table for each metric, a row for each category."""
    columns = ("", "prompts", *map(system_name, results["systems"]), *_difference_columns(results))
    tables: dict[str, ReportTable] = {}
    for breakdown in results["breakdowns"]:
        of_judge = next((table for table in results["tables"] if table["title"] == breakdown["table"]), {"rows": []})
        for metric in breakdown["columns"]:
            row = find_row(of_judge, metric) or {"label": metric, "higher_is_better": True}
            scorer = scored_by(metric, breakdown["table"], results)
            title = f"{breakdown['title']}: {row['label'].lower()}" + f" ({scorer})" * bool(scorer)
            rows = []
            for part in breakdown["rows"]:
                cells = [part["name"], str(part["num_prompts"]), *map(cell_text, part["cells"][metric])]
                if len(results["systems"]) > 1:
                    cells += _difference_cells(part["difference"][metric], row["higher_is_better"])
                rows.append(tuple(cells))
            num_intervals = sum(cells[-1] in ("no", "yes: better", "yes: worse") for cells in rows)
            by_chance = f"Of {num_intervals} intervals about {num_intervals / 20:.0f} would exclude 0 by chance."
            lines = (_INTERVALS, by_chance) if num_intervals >= 20 else (_INTERVALS,)
            tables.setdefault(title, ReportTable(title, columns, tuple(rows), ("other",) * len(rows), lines))
    return list(tables.values())


def scored_by(metric: str, title: str, results: dict[str, Any]) -> str:
    """Name the scorer of a metric, such as `judge gemma-3-4b-it`; the duplicate rate has none."""
    if metric == duplicate_metric(results):
        return ""
    own = results["scorers"].get(_OWN_SCORER.get(metric, ""))
    return f"scorer {own}" if own else in_sentence(title)


def count_table(results: dict[str, Any]) -> ReportTable:
    """Lay out how many images there are, and how many are missing or near-duplicates."""

    def text(value: float | None) -> str:
        return "n/a" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    return _table_by_system("Images", "", results["systems"], "counts", lambda values: [*map(text, values)])


def settings_table(results: dict[str, Any]) -> ReportTable:
    """Lay out the settings of the systems side by side and mark those that differ."""
    systems = results["systems"]

    def texts(values: list[Any]) -> list[str]:
        shown = ["not given" if value is _NOT_GIVEN else _setting_text(value) for value in values]
        differs = any(value != values[0] for value in values)
        return shown + ["differs" * differs] * (len(systems) > 1)

    table = _table_by_system("Settings", "setting", systems, "settings", texts)
    columns = ("setting", *map(system_name, public_results(systems)), *[""] * (len(systems) > 1))
    kinds = tuple("differs" if row[-1] == "differs" else "other" for row in table.rows)
    return replace(table, columns=columns, kinds=kinds)


_NOT_GIVEN = object()


def _table_by_system(
    title: str, head: str, systems: list[dict[str, Any]], part: str, texts: Callable[[list[Any]], list[str]]
) -> ReportTable:
    """Lay out a dictionary that each system has, with a row for each of its names."""
    default = _NOT_GIVEN if part == "settings" else None
    names = dict.fromkeys(name for system in systems for name in system[part])
    rows = tuple((name, *texts([system[part].get(name, default) for system in systems])) for name in names)
    return ReportTable(title, (head, *map(system_name, systems)), rows, ("other",) * len(rows))


def _setting_text(value: Any) -> str:
    if value is None:
        return "none"
    return public_text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def comparable_tables(results: dict[str, Any]) -> list[PublishedTable]:
    """Select the published figures that compare with results: same protocol, and of each table the same scorers."""

    def same(name: str) -> str:
        return name.rsplit("/", 1)[-1].lower()

    given = [scorer if isinstance(scorer, list) else [scorer] for scorer in results["scorers"].values() if scorer]
    used = {same(name) for names in given for name in names}
    found = []
    for table in published_tables(results["benchmark"]):
        keep = [place for place, name in enumerate(table.columns) if same(table.scorers.get(name, "")) in used]
        if keep and table.protocol == protocol_of(results):
            columns, *rows = (tuple(row[place] for place in (0, *keep)) for row in (table.columns, *table.rows))
            found.append(replace(table, columns=columns, rows=tuple(rows)))
    return found


def _published_table(table: PublishedTable) -> ReportTable:
    rows = tuple(tuple(map(published_text, row)) for row in table.rows)
    lines = (f"Source: {table.source}.",)
    return ReportTable(f"Published: {table.title}", table.columns, rows, ("other",) * len(rows), lines)


################
# Sentences
################
def report_title(results: dict[str, Any]) -> str:
    """Write the title of a report: the benchmark and the systems."""
    return f"{benchmark_name(results)}: {' and '.join(map(system_name, results['systems']))}"


def summary(results: dict[str, Any]) -> list[str]:
    """Summarize the results, a sentence for each scorer of headline, alignment, average and duplicates."""
    copies, systems = duplicate_metric(results), [system_name(system) for system in results["systems"]]
    lines = []
    for metric in dict.fromkeys((results["headline"], "alignment", "average", copies)):
        rows: dict[str, dict[str, Any]] = {}
        for table in results["tables"]:
            row = find_row(table, metric)
            if row is not None and any(number_text(cell["mean"]) != "n/a" for cell in row["cells"]):
                rows.setdefault(scored_by(metric, table["title"], results), row)
        for scorer, row in rows.items():
            values = [f"{cell_text(cell)} for {name}" for cell, name in zip(row["cells"], systems, strict=True)]
            text = f"{row['label']}{f' ({scorer})' if scorer else ''}: {', '.join(values[::-1])}"
            lines.append(f"{text}{_difference_text(row) if len(systems) > 1 else ''}.")
    if copies is None and results["weights"]:  # an edit is a single image and has no duplicates
        lines.append("There is no duplicate rate.")
    return lines


def _difference_text(row: dict[str, Any]) -> str:
    change, found = _difference_cells(row["difference"], row["higher_is_better"])
    meaning = {"n/a": "", "no": ", whose interval includes 0"}
    return f"; the paired difference is {change}" + meaning.get(
        found, f", whose interval excludes 0: {found.removeprefix('yes: ')}"
    )


def alerts(results: dict[str, Any]) -> list[str]:
    """Give what readers must know next to the headline, such as missing images that count 0."""
    return results.get("alerts") or []


def facts(results: dict[str, Any]) -> list[str]:
    """Say what was measured, and by what."""
    scorers = []
    for name, scorer in results["scorers"].items():
        if scorer:
            scorers.append(f"{name}: {' and '.join([scorer] if isinstance(scorer, str) else scorer)}")
        elif results["weights"]:  # without weights it is not part of the benchmark
            scorers.append(f"{name}: no scorer was given, so it is not computed")
    seeds = ", ".join(map(str, results["seeds"]))
    return [
        f"dataset: {results['dataset'] or 'without a name'}, fingerprint {results['dataset_fingerprint']}",
        f"protocol: {protocol_of(results)}",
        f"prompts: {results['num_prompts']}; seeds: {seeds or 'none'}",
        f"scorers: {'; '.join(scorers)}",
    ]


def missing_lines(results: dict[str, Any]) -> list[str]:
    """Name the sets that lack images."""
    lines = []
    for number, system in enumerate(results["systems"]):
        keys = [one["key"] for one in results["sets"] if None in (one["pictures"][number] or [None])]
        lines += [f"{system_name(system)}: {len(keys)} sets lack images: {_listed(keys)}."] if keys else []
    return lines


def leakage_line(results: dict[str, Any], most: int = _MAX_LISTED) -> str:
    """Say whether training prompts occur in the benchmark."""
    leakage = results["leakage"]
    if leakage is None:
        return "Leakage: not checked: the training prompts were not given."
    training = f"the {leakage['num_training_prompts']} training prompts"
    training += f" of {leakage['dataset']}" if leakage.get("dataset") else ""
    exact = list(dict.fromkeys(found["id"] for found in leakage["exact"]))
    near: dict[str, float] = {}
    for found in leakage["near"]:
        near[found["id"]] = max(found["similarity"], near.get(found["id"], 0.0))
    if not (exact or near):
        return f"Leakage: none found among {training}, neither prompts of the benchmark nor near-duplicates of them."
    similar = [f"{name} (similarity {near[name]:.2f})" for name in sorted(near, key=near.get, reverse=True)]
    return (
        f"Leakage: {len({*exact, *near})} of the {results['num_prompts']} prompts of the benchmark found among {training}."
        + (f" The same text: {_listed(exact, most)}." if exact else "")
        + (f" Near-duplicates: {_listed(similar, most)}." if similar else "")
        + " The numbers include them, and say less about prompts that were not trained on."
    )


def leaks(results: dict[str, Any]) -> tuple[list[tuple[str, str]], int]:
    """List training prompts that occur in the benchmark, most similar first, and count those beyond the list."""
    leakage = results["leakage"] or {"exact": [], "near": []}
    found = [(one, "the same text") for one in leakage["exact"]]
    near = sorted(leakage["near"], key=lambda one: one["similarity"], reverse=True)
    found += [(one, f"similarity {one['similarity']:.2f}") for one in near]
    shown = [(f"{one['id']}: training row {one['training_row']}, {how}", one["text"]) for one, how in found]
    return shown[:_MAX_LISTED], max(len(shown) - _MAX_LISTED, 0)


def _listed(names: Iterable[str], most: int = _MAX_LISTED) -> str:
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
