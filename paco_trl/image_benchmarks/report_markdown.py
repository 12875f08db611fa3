# SPDX-License-Identifier: Apache-2.0
"""A report as Markdown, and as tables for the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..evaluation.published import PublishedTable, published_tables, published_text
from ..utils.tables import markdown_table, markdown_text
from .report_numbers import benchmark_name, protocol_of, public_results, system_name
from .report_sentences import alerts, facts, leakage_line, missing_lines, summary
from .report_tables import ReportTable, breakdown_tables, count_table, metric_tables, settings_table


PUBLISHED_HEADING = "Published figures, not measured here"

PUBLISHED_NOTE = (
    "These figures are copied from the paper. They were measured by others, under the protocol of the tables above, but "
    "with other images and in part with other scorers: they are here to be looked up, not to be compared digit by digit."
)


def markdown_report(results: dict[str, Any]) -> str:
    """Writes the report as Markdown."""
    settings = settings_table(results)  # of two paths, the last parts may be the same
    results = public_results(results)
    systems = " and ".join(system_name(system) for system in results["systems"])
    parts = [
        f"# {markdown_text(benchmark_name(results))}: {markdown_text(systems)}",
        markdown_text(" ".join(summary(results))),
        _bullets(alerts(results), bold=True),
        _bullets(facts(results)),
    ]
    parts.append("## Results")
    for table in metric_tables(results):
        parts += _section(table)
    if results["breakdowns"]:
        parts.append("## Breakdowns")
        for table in breakdown_tables(results):
            parts += _section(table)
    parts += ["## Images", report_table(count_table(results)), _bullets(missing_lines(results))]
    parts += ["## Leakage", markdown_text(leakage_line(results))]
    parts += ["## Settings", report_table(settings)]
    if results["notes"]:
        parts += ["## Notes", _bullets(results["notes"])]
    published = comparable_tables(results)
    if published:
        parts += [f"## {PUBLISHED_HEADING}", PUBLISHED_NOTE]
    for table, remarks in zip(published, new_remarks(published), strict=True):
        rows = tuple(tuple(map(published_text, row)) for row in table.rows)
        plain = ReportTable(f"Published: {table.title}", table.columns, rows, ("other",) * len(rows))
        parts += [
            f"### {markdown_text(plain.title)}",
            report_table(plain),
            f"Source: {markdown_text(table.source)}.",
        ]
        parts.append(_bullets(remarks))
    parts += ["## Versions", _bullets(f"{name}: {number}" for name, number in results["versions"].items())]
    return "\n\n".join(part for part in parts if part) + "\n"


def comparable_tables(results: dict[str, Any]) -> tuple[PublishedTable, ...]:
    """Give the published figures that may stand beside results: those of the benchmark, measured by the same protocol."""
    protocol = protocol_of(results)
    return tuple(table for table in published_tables(results["benchmark"]) if table.protocol == protocol)


def new_remarks(tables: Iterable[PublishedTable]) -> list[list[str]]:
    """The remarks of each table that no table before it has."""
    seen: set[str] = set()
    remarks = []
    for table in tables:
        remarks.append([remark for remark in table.remarks if remark not in seen])
        seen.update(table.remarks)
    return remarks


def print_report(results: dict[str, Any], console: Console) -> None:
    """
    Prints what came out: the summary, what to know beside it, the tables of the metrics and of the counts, and whether
    training prompts occur in the benchmark.

    Args:
        results (`dict`):
            Results of [`t2is_results`] or [`gedit_results`].
        console (`rich.console.Console`):
            Where to.
    """
    shown = public_results(results)
    console.print(escape(" ".join(summary(shown))))
    for line in alerts(shown):
        console.print(escape(line), style="bold")
    console.print(*terminal_tables(results))
    for line in (*missing_lines(shown), leakage_line(shown)):
        console.print(escape(line))


def terminal_tables(results: dict[str, Any]) -> list[Table]:
    """Lays the metrics and the counts out for the terminal."""
    results = public_results(results)
    tables = []
    for table in (*metric_tables(results), count_table(results)):
        shown = Table(title=escape(table.title), caption=escape(" ".join(table.lines)), caption_justify="left")
        for number, name in enumerate(table.columns):
            shown.add_column(escape(name), overflow="fold", min_width=None if number else 12)
        for row, kind in zip(table.rows, table.kinds, strict=True):
            # Intervals on lines of their own, so that a table is not wider than a terminal
            cells = [escape(cell.replace(" [", "\n[")) for cell in row]
            shown.add_row(*cells, style="bold" if kind in ("group", "average") else None)
        tables.append(shown)
    return tables


def report_table(table: ReportTable) -> str:
    """Writes a table as Markdown."""
    rows = [
        (f"**{row[0]}**", *row[1:]) if kind in ("group", "average") else row
        for row, kind in zip(table.rows, table.kinds, strict=True)
    ]
    return markdown_table(table.columns, rows)


def _section(table: ReportTable) -> list[str]:
    return [f"### {markdown_text(table.title)}", report_table(table), markdown_text(" ".join(table.lines))]


def _bullets(lines: Iterable[str], bold: bool = False) -> str:
    mark = "**" if bold else ""
    return "\n".join(f"- {mark}{markdown_text(line)}{mark}" for line in lines)
