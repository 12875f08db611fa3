# SPDX-License-Identifier: Apache-2.0
"""Look up the figures of the paper. They never enter one table, one mean or one model-index with figures measured here."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..utils.paper import PAPER
from ..utils.tables import number_text


@dataclass(frozen=True)
class PublishedTable:
    """A table of published figures; `scorers` has the scorer of each column for which it is known."""

    benchmark: str
    title: str
    protocol: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]
    source: str
    remarks: tuple[str, ...]
    scorers: Mapping[str, str]


def published_tables(benchmark: str) -> tuple[PublishedTable, ...]:
    """
    Look up the published figures of a benchmark.

    Args:
        benchmark (`str`):
            `"ConsistencyRank"`, `"EditReward-Bench"`, `"T2IS-Bench"` or `"GEdit-Bench"`.

    Returns:
        `tuple[PublishedTable, ...]`.

    Raises:
        ValueError: If the paper has no figures of it.
    """
    tables = tuple(table for table in _tables() if table.benchmark == benchmark)
    if not tables:
        names = ", ".join(dict.fromkeys(table.benchmark for table in _tables()))
        raise ValueError(f"There are no published figures of {benchmark!r}. There are of: {names}.")
    return tables


def published_text(value: str | float | None) -> str:
    """Write a cell of a published table, numbers with three decimals."""
    return value if isinstance(value, str) else number_text(value, missing="-")


@cache
def _tables() -> tuple[PublishedTable, ...]:
    content = json.loads((files("paco_trl") / "evaluation" / "published.json").read_text(encoding="utf-8"))
    paper = f"{PAPER['title']} (arXiv {PAPER['id']}), Table"
    tables = []
    for table in content:
        source, rows = f"{paper} {table.pop('number')}", tuple(map(tuple, table.pop("rows")))
        lists: dict[str, Any] = {name: tuple(table.pop(name)) for name in ("columns", "remarks")}
        tables.append(PublishedTable(**{"scorers": {}, **table}, **lists, rows=rows, source=source))
    return tuple(tables)
