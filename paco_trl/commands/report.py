# SPDX-License-Identifier: Apache-2.0
"""What the checks of `paco-trl doctor` find, and the table of it."""

from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table


OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
COLOURS = {OK: "green", WARNING: "yellow", FAILED: "red", SKIPPED: "dim"}


@dataclass
class Row:
    """
    What a check found.

    Attributes:
        check (`str`):
            Name of the check.
        verdict (`str`):
            `"ok"`, `"warning"`, `"failed"` or `"skipped"`.
        finding (`str`):
            What was found, with its numbers.
        advice (`str`):
            What to do about it; empty if nothing is to be done.
    """

    check: str
    verdict: str
    finding: str
    advice: str = ""


def coloured(verdict: str) -> str:
    """
    A verdict in its colour, as rich's markup.

    Args:
        verdict (`str`):
            Verdict.

    Returns:
        `str`.
    """
    return f"[{COLOURS[verdict]}]{verdict}[/]"


def report(rows: list[Row]) -> Table:
    """
    The table of what was found.

    Args:
        rows (`list[Row]`):
            What the checks found.

    Returns:
        [`~rich.table.Table`].
    """
    table = Table(title="paco-trl doctor", show_lines=True)
    table.add_column("check", max_width=16, overflow="fold")
    table.add_column("verdict", no_wrap=True)
    table.add_column("finding, and what to do", overflow="fold")
    for row in rows:
        text = escape(row.finding) + (f"\n[bold]->[/] {escape(row.advice)}" if row.advice else "")
        table.add_row(escape(row.check), coloured(row.verdict), text)
    return table
