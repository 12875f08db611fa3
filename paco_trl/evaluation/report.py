# SPDX-License-Identifier: Apache-2.0
"""Results of evaluations as a file for machines and as a table like the paper's."""

import json
import math
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


PACKAGES = ("paco_trl", "torch", "transformers", "datasets", "scipy", "numpy", "pillow")

# ConsistencyRank, PaCo-RL (https://huggingface.co/papers/2512.04784): accuracy, tau, rho, T1-B1
PAPER_RANKINGS = {
    "CLIP-I": (0.394, 0.178, 0.206, 0.475),
    "DreamSim": (0.403, 0.184, 0.214, 0.493),
    "InternVL3.5-8B": (0.359, 0.149, 0.176, 0.420),
    "Qwen2.5-VL-7B": (0.344, 0.118, 0.138, 0.401),
    "PaCo-Reward-7B-Fast": (0.441, 0.240, 0.278, 0.544),
    "PaCo-Reward-7B": (0.449, 0.250, 0.288, 0.557),
}
# EditReward-Bench, same paper: prompt following, consistency, overall
PAPER_EDIT_REWARD = {
    "GPT-4.1": (0.673, 0.602, 0.705),
    "GPT-5": (0.777, 0.669, 0.755),
    "EditScore-72B": (0.635, 0.586, 0.703),
    "PaCo-Reward-7B-Fast": (0.748, 0.697, 0.728),
    "PaCo-Reward-7B": (0.777, 0.709, 0.751),
}

RANKING_COLUMNS = ("accuracy", "Kendall tau", "Spearman rho", "T1-B1")
LIST_ORDER_COLUMNS = ("list-order tau", "list-order rho")
DIMENSIONS = ("prompt_following", "consistency", "overall")


def report_tables(entries: list[dict[str, Any]]) -> list[tuple[str, list[str], list[list[str]]]]:
    """
    Lay results out as tables: one for the rankings, one for EditReward-Bench, if there are such results.

    Args:
        entries (`list[dict[str, Any]]`):
            Results of [`evaluate_rankings`] and [`evaluate_edit_reward`].

    Returns:
        `list[tuple[str, list[str], list[list[str]]]]`: title, names of the columns and rows of each table.
    """
    tables = []
    rankings = [entry for entry in entries if entry["settings"]["benchmark"] == "rankings"]
    if rankings:
        columns = ["scorer", "template", "dataset", "rows", *RANKING_COLUMNS, *LIST_ORDER_COLUMNS]
        tables.append(("Human rankings", columns, [_ranking_row(entry) for entry in rankings]))
    edits = [entry for entry in entries if entry["settings"]["benchmark"] == "edit_reward"]
    if edits:
        columns = ["scorer", "dataset", "rows", *(name.replace("_", " ") for name in DIMENSIONS)]
        columns += [f"{name.replace('_', ' ')}, ties count" for name in DIMENSIONS]
        tables.append(("EditReward-Bench", columns, [_edit_row(entry) for entry in edits]))
    return tables


def save_report(results: dict[str, Any], folder: str | Path) -> list[dict[str, Any]]:
    """
    Write results to `results.json` and, as tables, to `results.md`.

    Results that are already in the folder stay, except those of the same scorer, template and dataset, which are
    replaced: run several scorers into one folder to compare them. `results.json` has the numbers, the settings and the
    versions of the packages that made them; NaN is `null` there.

    Args:
        results (`dict[str, Any]`):
            What [`evaluate_rankings`] or [`evaluate_edit_reward`] gave. More may be added to its `settings`, such as
            the dtype; `settings["dataset"]`, a name, is shown in the table.
        folder (`str` or `Path`):
            Folder to write to.

    Returns:
        `list[dict[str, Any]]`: all results that are now in the folder, for [`report_tables`].

    Raises:
        ValueError: If `results.json` in the folder is not one that this function wrote.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    entries = _read(path) if path.exists() else []
    entry = _without_nan({**results, "versions": {"python": platform.python_version(), **_versions()}})
    places = [number for number, other in enumerate(entries) if _identity(other) == _identity(entry)]
    if places:
        entries[places[0]] = entry
    else:
        entries.append(entry)
    _replace(path, json.dumps(entries, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    _replace(folder / "results.md", _markdown(entries))
    return entries


def _identity(entry: dict[str, Any]) -> tuple:
    settings = entry["settings"]
    return tuple(settings.get(name) for name in ("benchmark", "scorer", "template", "dataset_fingerprint"))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        for entry in entries:
            entry["settings"]["benchmark"]  # noqa: B018
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} exists and is no report of an evaluation. Give another folder, or move the file away."
        ) from error
    return entries


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    half = path.with_name(path.name + ".part")
    half.write_text(text, encoding="utf-8")
    os.replace(half, path)


def _versions() -> dict[str, str | None]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _number(value: float | None) -> str:
    return "undefined" if value is None or math.isnan(value) else f"{value:.3f}"


def _cell(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return ""
    low, high = summary["interval"]
    if low is None or math.isnan(low):
        return _number(summary["mean"])
    return f"{_number(summary['mean'])} [{_number(low)}, {_number(high)}]"


def _dataset(entry: dict[str, Any]) -> str:
    return str(entry["settings"].get("dataset") or entry["settings"]["dataset_fingerprint"])


def _ranking_row(entry: dict[str, Any]) -> list[str]:
    settings, metrics, list_order = entry["settings"], entry["metrics"], entry["list_order"]
    undefined = entry["num_undefined_correlations"]
    return [
        settings["scorer"],
        settings["template"],
        _dataset(entry),
        str(entry["num_instances"]) + (f" ({undefined} without tau and rho)" if undefined else ""),
        *(_cell(metrics[name]) for name in ("accuracy", "kendall_tau", "spearman_rho", "top1_bottom1")),
        *(_cell(list_order[name]) for name in ("kendall_tau", "spearman_rho")),
    ]


def _edit_row(entry: dict[str, Any]) -> list[str]:
    dimensions = entry["dimensions"]
    cells = [
        _cell(dimensions[name][variant]) if name in dimensions else ""
        for variant in ("strict", "geq")
        for name in DIMENSIONS
    ]
    return [entry["settings"]["scorer"], _dataset(entry), str(entry["num_instances"]), *cells]


def _markdown_table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


def _markdown(entries: list[dict[str, Any]]) -> str:
    parts = []
    for title, columns, rows in report_tables(entries):
        parts += [f"# {title}", _markdown_table(columns, rows)]
        if title == "Human rankings":
            parts += [
                "In brackets: 95 % bootstrap interval of the mean, over groups of rows that belong together. tau, rho "
                "and accuracy compare the ranks of the items. A row in which all scores are equal has no tau and no "
                "rho and is not part of their means.",
                "The list-order columns are the published evaluation's variant. They correlate the order lists "
                "instead of the ranks, which is another number for about half of all pairs of orders and has the "
                "other sign for about a quarter. Compare them with the paper's numbers, and with nothing else.",
                "## The paper's numbers, for comparison only",
                "ConsistencyRank, as printed in the paper (arXiv 2512.04784). Its tau and rho are **list-order** tau "
                "and rho: do not compare them with the columns `Kendall tau` and `Spearman rho` above. The default "
                "question of the published script is that of the template `plain`.",
                _markdown_table(
                    ["scorer", "accuracy", *LIST_ORDER_COLUMNS, "T1-B1"],
                    [[name, *(f"{value:.3f}" for value in values)] for name, values in PAPER_RANKINGS.items()],
                ),
            ]
        else:
            parts += [
                "Accuracy: the share of rows whose preferred image scores higher, averaged over the task types; in "
                "the last columns a tie counts as well. In brackets: 95 % bootstrap interval, over groups of rows "
                "that share an image.",
                "## The paper's numbers, for comparison only",
                "EditReward-Bench, as printed in the paper (arXiv 2512.04784). The published script asks the judge "
                "shorter questions than those used here, which are the ones it was trained on.",
                _markdown_table(
                    ["scorer", *(name.replace("_", " ") for name in DIMENSIONS)],
                    [[name, *(f"{value:.3f}" for value in values)] for name, values in PAPER_EDIT_REWARD.items()],
                ),
            ]
    return "\n\n".join(parts) + "\n"
