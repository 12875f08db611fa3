# SPDX-License-Identifier: Apache-2.0
"""Reports of evaluations as JSON and Markdown tables, with the paper's figures in separate tables."""

import json
import platform
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..rewards.fingerprint import HARMLESS_IN_SCORERS
from ..utils.differences import changes
from ..utils.files import read_template, write_atomically
from ..utils.option_checks import PROTOCOLS
from ..utils.papers import PAPER
from ..utils.text import interval_text, markdown_table, number_text, read_json, without_nan


PACKAGES = ("paco_trl", "torch", "transformers", "datasets", "scipy", "numpy", "pillow")

_BENCHMARKS = yaml.safe_load(read_template("judge_report.yaml"))
_TIE_NOTE = _BENCHMARKS.pop("ties")


class PublishedTable(NamedTuple):
    """Published figures from the paper's table `source`."""

    benchmark: str
    title: str
    protocol: str
    columns: list[str]
    rows: list[list[Any]]
    source: str
    remarks: list[str]


def published_tables(benchmark: str) -> list[PublishedTable]:
    """
    Look up the published figures of `"ConsistencyRank"`, `"EditReward-Bench"`, `"T2IS-Bench"` or `"GEdit-Bench"`.
    """
    content = json.loads((files("paco_trl") / "evaluation" / "published.json").read_text(encoding="utf-8"))
    return [PublishedTable(**table) for table in content if table["benchmark"] == benchmark]


def report_tables(entries: list[dict[str, Any]]) -> list[tuple[str, list[str], list[list[str]]]]:
    """
    Format results of [`evaluate_rankings`] and [`evaluate_pairs`] as tables, one per benchmark and protocol,
    each with a title, column names and rows.
    """
    tables = []
    for (benchmark, protocol), group in _group_entries(entries).items():
        columns = ["scorer", "dataset", "rows", *["rows with ties"] * (benchmark != "pairs")]
        has_templates = benchmark == "vc_reward" or any("template" in entry["settings"] for entry in group)
        columns[1:1] = ["template"] * has_templates
        if "columns" in _BENCHMARKS[benchmark]:
            columns += _BENCHMARKS[benchmark]["columns"][protocol]
        else:
            names = [name.replace("_", " ") for name in _BENCHMARKS[benchmark]["dimensions"]]
            columns += [*names, *(f"{name}, ties count" for name in names)]
        rows = [_row(entry, _name(entry, group), has_templates) for entry in group]
        tables.append((f"{_BENCHMARKS[benchmark]['title']}, protocol: {protocol}", columns, rows))
    return tables


def _group_entries(entries: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups: dict = {(benchmark, protocol): [] for benchmark in _BENCHMARKS for protocol in PROTOCOLS}
    for entry in entries:
        groups[entry["settings"]["benchmark"], entry["settings"]["protocol"]].append(entry)
    return {key: group for key, group in groups.items() if group}


def _row(entry: dict[str, Any], name: str, has_templates: bool) -> list[str]:
    settings = entry["settings"]
    rows = str(entry["num_instances"])
    num_ties = entry.get("num_ties")  # pairs have none
    if "metrics" in entry:
        cells = [*entry["metrics"].values()]
        undefined = entry.get("num_undefined_correlations")
        rows += f" ({undefined} without tau and rho)" * bool(undefined)
    else:
        dimensions = entry["dimensions"]
        names = _BENCHMARKS[settings["benchmark"]]["dimensions"]
        num_ties = sum(dimension["num_ties"] for dimension in dimensions.values())
        cells = [dimensions.get(name, {}).get(variant) for variant in ("strict", "geq") for name in names]
    unanswered = entry["num_unanswered"]
    ties = f"{num_ties}" + f" ({unanswered} questions without an answer)" * bool(unanswered)
    none = (None, None)
    texts = [cell and interval_text(cell["mean"], *cell.get("interval", none), missing="undefined") for cell in cells]
    dataset = str(settings.get("dataset") or settings["dataset_fingerprint"])
    template = [settings.get("template", "each edit alone")] * has_templates
    return [name, *template, dataset, rows, *[ties] * (num_ties is not None), *(text or "" for text in texts)]


def save_report(results: dict[str, Any], folder: str | Path) -> list[dict[str, Any]]:
    """
    Write results to `results.json` and, as tables, to `results.md`.

    Results with the same settings are replaced, and other results in the directory are kept. To compare several
    scorers, or one scorer with other weights, dtypes or quantizations, write their results to the same directory.
    `results.json` has the results, their settings and package versions, with `null` for NaN.

    Args:
        results (`dict[str, Any]`):
            Results of [`evaluate_rankings`] or [`evaluate_pairs`]. You may add to their `settings`, for example
            the dtype; `settings["dataset"]`, a name, is shown in the table.
        folder (`str` or `Path`):
            Directory to write to.

    Returns:
        `list[dict[str, Any]]`: all results in the directory, for [`report_tables`].
    """
    folder = Path(folder)
    entries = read_entries(folder)
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    entry = without_nan({**results, "versions": versions})
    matches = [index for index, existing in enumerate(entries) if _identity(existing) == _identity(entry)]
    index = matches[0] if matches else len(entries)
    entries[index : index + 1] = [entry]
    text = json.dumps(entries, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / "results.json", text + "\n")
    write_atomically(folder / "results.md", _markdown(entries))
    return entries


def read_entries(folder: Path) -> list[dict[str, Any]]:
    """Read the results in a directory; reject files of the same names that are not of the package."""
    path, tables = folder / "results.json", folder / "results.md"
    entries = read_json(path) if path.exists() else []
    if tables.exists() and not path.exists():
        raise ValueError(f"'{tables}' was not written by paco_trl. Move it away, or choose another directory.")
    if not isinstance(entries, list) or not all("settings" in existing for existing in entries):
        raise ValueError(f"'{path}' exists, but is not a report of judges. Move it away, or choose another directory.")
    return entries


def _identity(entry: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of results as JSON values, without the dataset's name and where they were computed."""
    ignored = ("dataset", *HARMLESS_IN_SCORERS)
    return json.loads(json.dumps({name: value for name, value in entry["settings"].items() if name not in ignored}))


def _name(entry: dict[str, Any], entries: list[dict[str, Any]]) -> str:
    """Return the scorer's name, with the settings that differ from earlier entries of the same name."""
    settings = _identity(entry)
    changed_settings = dict[str, Any]()
    for previous in entries[: entries.index(entry)]:
        previous_settings = _identity(previous)
        if all(
            previous_settings.get(name) == settings.get(name) for name in ("scorer", "template", "dataset_fingerprint")
        ):
            changed_settings |= {
                name.rpartition("/")[2]: value for name, _, value in changes(previous_settings, settings)
            }
    texts = ", ".join(f"{name}: {value}" for name, value in changed_settings.items())
    return settings["scorer"] + (f" ({texts})" if changed_settings else "")


def _markdown(entries: list[dict[str, Any]]) -> str:
    sections = []
    for (benchmark, protocol), (title, columns, rows) in zip(
        _group_entries(entries), report_tables(entries), strict=True
    ):
        notes = [
            _BENCHMARKS[benchmark]["all"],
            _BENCHMARKS[benchmark][protocol],
            *[_TIE_NOTE] * (benchmark != "pairs"),
        ]
        sections += [f"# {title}", markdown_table(columns, rows), *notes]
        if protocol == "published":
            sections.append("## Published figures, not measured here")
            for table in published_tables(_BENCHMARKS[benchmark]["published_as"]):
                if table.protocol == protocol:
                    cells = [[name, *(number_text(value, missing="-") for value in row)] for name, *row in table.rows]
                    source = f"{PAPER['title']} (arXiv {PAPER['id']}), {table.source}"
                    sections += [markdown_table(table.columns, cells), f"Source: {source}. {' '.join(table.remarks)}"]
    return "\n\n".join(sections) + "\n"
