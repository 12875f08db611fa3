# SPDX-License-Identifier: Apache-2.0
"""How a report writes values, differences and names; nothing that tells of the machine leaves it."""

import math
import re
from typing import Any

from ..evaluation.runs import PROTOCOLS
from ..utils.names import public_name
from ..utils.tables import number_text


# A path of a machine inside a text. An address has its slashes behind a colon
_PATH_IN_TEXT = re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/'\"`,;]+/)+([^\s/'\"`,;]+)/?")


def public_results(results: Any) -> Any:
    """A copy of results as others may see them: no paths of this machine, no numbers that JSON cannot hold."""
    if isinstance(results, dict):
        # Of a set, and of a training prompt that was found
        kept = (
            ("prompt", "source", "pictures")
            if "pictures" in results
            else ("text",)
            if "training_row" in results
            else ()
        )
        return {key: part if key in kept else public_results(part) for key, part in results.items()}
    if isinstance(results, (list, tuple)):
        return [public_results(part) for part in results]
    if isinstance(results, str):
        return public_text(results)
    return None if isinstance(results, float) and not math.isfinite(results) else results


def public_text(text: str) -> str:
    """Gives a text without paths of this machine: the last part of each remains."""
    if not re.search(r"\s", text) and text.startswith(("/", "~")):
        return public_name(text)
    return _PATH_IN_TEXT.sub(r"\1", text)


def protocol_of(results: dict[str, Any]) -> str:
    """Give the protocol that results were made with; an error for results of before they named it."""
    protocol = results.get("protocol")
    if protocol not in PROTOCOLS:
        raise ValueError(
            f"`protocol` of the results is {protocol!r}, but must be one of {', '.join(PROTOCOLS)}. Results that an earlier "
            "version wrote do not have it: run `report` again, which asks no judge."
        )
    return protocol


def benchmark_name(results: dict[str, Any]) -> str:
    """Name the benchmark, with the protocol where it is not the default."""
    return results["benchmark"] + (", published protocol" if protocol_of(results) == "published" else "")


def cell_text(cell: dict[str, Any] | None, signed: bool = False) -> str:
    """The mean of a cell, and its interval in brackets where there is one."""
    if cell is None or number_text(cell["mean"]) == "n/a":
        return "n/a"
    numbers = [cell["mean"], *cell["interval"]]
    # More decimals for a difference so small that an interval that excludes 0 would look as if it touched it
    small = [abs(number) for number in numbers if number is not None and 1e-7 < abs(number) < 0.0005]
    decimals = math.ceil(-math.log10(2 * min(small))) if small else 3
    mean, low, high = (number_text(number, decimals if signed else 3, signed) for number in numbers)
    return mean + (" (no interval)" if "n/a" in (low, high) else f" [{low}, {high}]")


def excludes_zero(cell: dict[str, Any] | None) -> bool | None:
    """Whether the interval of a difference excludes 0; `None` without an interval."""
    low, high = (None, None) if cell is None else cell["interval"]
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return None
    return low > 0 or high < 0


def verdict(cell: dict[str, Any] | None, higher_is_better: bool = True) -> str:
    """Say of a difference `"yes: better"` or `"yes: worse"`, `"no"` if its interval has 0, `"n/a"` without one."""
    excluded = excludes_zero(cell)
    if excluded is None:
        return "n/a"
    if not excluded:
        return "no"
    return "yes: better" if (cell["interval"][0] > 0) == higher_is_better else "yes: worse"


def system_name(system: dict[str, Any]) -> str:
    """Name of a system with its role."""
    return system["name"] if system["name"] == system["role"] else f"{system['name']} ({system['role']})"


def row_label(row: dict[str, Any], results: dict[str, Any]) -> str:
    """Label of a row; that of the weighted average with the weights."""
    if row["kind"] != "average" or not results.get("weights"):
        return row["label"]
    return f"{row['label']} ({' + '.join(f'{weight:g} {name}' for name, weight in results['weights'].items())})"


def find_row(table: dict[str, Any], metric: str | None) -> dict[str, Any] | None:
    """The row of a metric in one of the results' tables, if it has one."""
    return next((row for row in table["rows"] if row["metric"] == metric), None)


def duplicate_metric(results: dict[str, Any]) -> str | None:
    """Name of the metric that says how many panels are copies of others, if there is one."""
    names = (row["metric"] for table in results["tables"] for row in table["rows"])
    return next((name for name in names if "duplicate" in name), None)


def in_sentence(title: str) -> str:
    """Write a title so that it can stand inside a sentence."""
    return re.sub(r"^Judge: ", "judge ", title)
