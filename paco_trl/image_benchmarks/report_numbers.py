# SPDX-License-Identifier: Apache-2.0
"""Write values, differences and names as text, without anything that identifies the machine."""

import math
import re
from typing import Any

from ..evaluation.runs import PROTOCOLS
from ..utils.names import public_name
from ..utils.tables import number_text


# A path inside a text. In a URL the slashes follow a colon
_PATH_IN_TEXT = re.compile(r"(?<![\w.:/~-])~?/(?:[^\s/'\"`,;]+/)+([^\s/'\"`,;]+)/?")


def public_results(results: Any) -> Any:
    """Copy results without paths of this machine and without numbers that JSON cannot hold."""
    if isinstance(results, dict):
        # Prompts and images of a set, the text of a training prompt
        kept = {"prompt", "source", "pictures"} if "pictures" in results else {"text"} & results.keys()
        return {key: part if key in kept else public_results(part) for key, part in results.items()}
    if isinstance(results, (list, tuple)):
        return [public_results(part) for part in results]
    if isinstance(results, str):
        return public_text(results)
    return None if isinstance(results, float) and not math.isfinite(results) else results


def public_text(text: str) -> str:
    """Reduce each path of this machine in a text to its last part."""
    if not re.search(r"\s", text) and text.startswith(("/", "~")):
        return public_name(text)
    return _PATH_IN_TEXT.sub(r"\1", text)


def protocol_of(results: dict[str, Any]) -> str:
    """Give the protocol of results; results of early versions do not name it and are refused."""
    protocol = results.get("protocol")
    if protocol not in PROTOCOLS:
        raise ValueError(
            f"`protocol` of the results is {protocol!r}, but must be one of {', '.join(PROTOCOLS)}. An earlier version "
            "did not write it: run `report` again, which asks no judge."
        )
    return protocol


def benchmark_name(results: dict[str, Any]) -> str:
    """Name the benchmark, and its protocol unless it is the default."""
    return results["benchmark"] + (", published protocol" if protocol_of(results) == "published" else "")


def cell_text(cell: dict[str, Any] | None, signed: bool = False) -> str:
    """Write a mean and, in brackets, its interval."""
    if cell is None or number_text(cell["mean"]) == "n/a":
        return "n/a"
    numbers = [cell["mean"], *cell["interval"]]
    # A small difference needs more decimals, so that an interval that excludes 0 does not appear to touch it
    small = [abs(number) for number in numbers if number is not None and 1e-7 < abs(number) < 0.0005]
    decimals = math.ceil(-math.log10(2 * min(small))) if small and signed else 3
    mean, low, high = (number_text(number, decimals, signed) for number in numbers)
    return mean + (" (no interval)" if "n/a" in (low, high) else f" [{low}, {high}]")


def verdict(cell: dict[str, Any] | None, higher_is_better: bool = True) -> str:
    """Judge a difference: `"yes: better"` or `"yes: worse"` if its interval excludes 0, else `"no"` or `"n/a"`."""
    low, high = (None, None) if cell is None else cell["interval"]
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return "n/a"
    if low <= 0 <= high:
        return "no"
    return "yes: better" if (low > 0) == higher_is_better else "yes: worse"


def system_name(system: dict[str, Any]) -> str:
    """Name a system and its role."""
    return system["name"] if system["name"] == system["role"] else f"{system['name']} ({system['role']})"


def row_label(row: dict[str, Any], results: dict[str, Any]) -> str:
    """Label a row; the weighted average shows its weights."""
    if row["kind"] != "average" or not results.get("weights"):
        return row["label"]
    return f"{row['label']} ({' + '.join(f'{weight:g} {name}' for name, weight in results['weights'].items())})"


def find_row(table: dict[str, Any], metric: str | None) -> dict[str, Any] | None:
    """Find the row of a metric in one of the tables of the results."""
    return next((row for row in table["rows"] if row["metric"] == metric), None)


def duplicate_metric(results: dict[str, Any]) -> str | None:
    """Name the metric that counts near-identical panels, if there is one."""
    names = (row["metric"] for table in results["tables"] for row in table["rows"])
    return next((name for name in names if "duplicate" in name), None)


def in_sentence(title: str) -> str:
    """Write a table's title as it stands inside a sentence."""
    return re.sub(r"^Judge: ", "judge ", title)
