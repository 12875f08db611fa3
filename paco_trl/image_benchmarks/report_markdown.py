# SPDX-License-Identifier: Apache-2.0
"""Write a report as Markdown, or as tables for the terminal."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..utils.tables import markdown_table, markdown_text
from . import report_content as content


def markdown_report(results: dict[str, Any]) -> str:
    """Write the report as Markdown."""
    shown = content.public_results(results)
    parts = [f"# {markdown_text(content.report_title(shown))}", markdown_text(" ".join(content.summary(shown)))]
    parts += [bullet_list(content.alerts(shown), bold=True), bullet_list(content.facts(shown))]
    for section in content.report_sections(results):
        parts += [f"## {section.title}", *map(markdown_text, section.text), bullet_list(section.bullets)]
        for table in section.tables:
            # The only table of a section needs no title
            parts += [f"### {markdown_text(table.title)}"] if table.title != section.title else []
            parts += [report_table(table), markdown_text(" ".join(table.lines))]
    return "\n\n".join(part for part in parts if part) + "\n"


def report_table(table: content.ReportTable) -> str:
    """Write a table as Markdown."""
    rows = [
        (f"**{row[0]}**", *row[1:]) if kind in ("group", "average") else row
        for row, kind in zip(table.rows, table.kinds, strict=True)
    ]
    return markdown_table(table.columns, rows)


def bullet_list(lines: Iterable[str], bold: bool = False) -> str:
    """Write a list in Markdown."""
    mark = "**" if bold else ""
    return "\n".join(f"- {mark}{markdown_text(line)}{mark}" for line in lines)


def print_report(results: dict[str, Any], console: Console) -> None:
    """
    Print the summary of an evaluation, its alerts, the tables of metrics and counts, and whether training prompts occur
    in the benchmark.

    Args:
        results (`dict`):
            Results of [`t2is_results`] or [`gedit_results`].
        console (`rich.console.Console`):
            Console to print to.
    """
    results = content.public_results(results)
    console.print(escape(" ".join(content.summary(results))))
    for line in content.alerts(results):
        console.print(escape(line), style="bold")
    for table in (*content.metric_tables(results), content.count_table(results)):
        shown = Table(title=escape(table.title), caption=escape(" ".join(table.lines)), caption_justify="left")
        for number, name in enumerate(table.columns):
            shown.add_column(escape(name), overflow="fold", min_width=None if number else 12)
        for row, kind in zip(table.rows, table.kinds, strict=True):
            # Intervals on lines of their own: the table fits a terminal
            cells = [escape(cell.replace(" [", "\n[")) for cell in row]
            shown.add_row(*cells, style="bold" if kind in ("group", "average") else None)
        console.print(shown)
    for line in (*content.missing_lines(results), content.leakage_line(results)):
        console.print(escape(line))
