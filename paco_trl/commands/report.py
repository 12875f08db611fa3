# SPDX-License-Identifier: Apache-2.0
"""Findings of `paco-trl doctor`, and their table."""

from dataclasses import dataclass

from rich.console import Group
from rich.markup import escape
from rich.table import Table


OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
COLORS = {OK: "green", WARNING: "yellow", FAILED: "red", SKIPPED: "dim"}


@dataclass
class Row:
    """Finding of a check, and what to do about it."""

    verdict: str
    finding: str
    advice: str = ""
    check: str = ""
    table: Table | None = None


def colored(verdict: str) -> str:
    """Format a verdict in its color, as rich's markup."""
    return f"[{COLORS[verdict]}]{verdict}[/]"


def report(rows: list[Row]) -> Table:
    """Build the table of the findings."""
    table = Table(title="paco-trl doctor", show_lines=True)
    table.add_column("check", max_width=16, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("finding, and what to do", overflow="fold")
    for row in rows:
        text = escape(row.finding) + (f"\n[bold]->[/] {escape(row.advice)}" if row.advice else "")
        shown = text if row.table is None else Group(text, row.table)
        table.add_row(escape(row.check), colored(row.verdict), shown)
    return table
