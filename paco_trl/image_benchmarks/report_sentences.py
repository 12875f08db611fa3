# SPDX-License-Identifier: Apache-2.0
"""What a report says in words: its lead, alerts, leakage, and how everything was made."""

from collections.abc import Sequence
from typing import Any

from ..utils.tables import number_text
from .report_numbers import (
    cell_text,
    duplicate_metric,
    find_row,
    in_sentence,
    protocol_of,
    system_name,
    verdict,
)
from .report_tables import published_texts, scored_by


# A list in a sentence has this many entries, then how many more there are
_MOST_LISTED = 20


def scorer_lines(results: dict[str, Any]) -> list[str]:
    """Says by what each thing was scored."""
    lines = []
    for name, scorer in results["scorers"].items():
        if not scorer and results["weights"]:  # without weights it is no part of the benchmark
            lines.append(f"{name}: no scorer was given, so that it is not computed")
        elif scorer:
            names = [scorer] if isinstance(scorer, str) else scorer
            lines.append(f"{name}: {' and '.join(map(str, names))}")
    return lines


def leakage_line(results: dict[str, Any], most: int = _MOST_LISTED) -> str:
    """Says whether training prompts occur in the benchmark."""
    leakage = results["leakage"]
    if leakage is None:
        return "Leakage: not checked: the training prompts were not given."
    exact = list(dict.fromkeys(found["id"] for found in leakage["exact"]))
    near: dict[str, float] = {}
    for found in leakage["near"]:
        near[found["id"]] = max(found["similarity"], near.get(found["id"], 0.0))
    training = f"the {leakage['num_training_prompts']} training prompts" + (
        f" of {leakage['dataset']}" if leakage.get("dataset") else ""
    )
    number = len({*exact, *near})
    if not number:
        return f"Leakage: none found among {training}, neither prompts of the benchmark nor near-duplicates of them."
    same = f" The same text: {_listed(exact, most)}." if exact else ""
    similar = [f"{name} (similarity {near[name]:.2f})" for name in sorted(near, key=near.get, reverse=True)]
    similar = f" Near-duplicates: {_listed(similar, most)}." if similar else ""
    return (
        f"Leakage: {number} of the {results['num_prompts']} prompts of the benchmark found among {training}."
        f"{same}{similar} The numbers include them, and say less of prompts that were not trained on."
    )


def leaks(results: dict[str, Any]) -> tuple[list[dict[str, str]], int]:
    """The training prompts that occur in the benchmark, most similar first, and the number of those not shown."""
    leakage = results["leakage"] or {"exact": [], "near": []}
    found = [(one, "the same text") for one in leakage["exact"]]
    found += [
        (one, f"similarity {one['similarity']:.2f}")
        for one in sorted(leakage["near"], key=lambda one: one["similarity"], reverse=True)
    ]
    rows = [
        {"what": f"{one['id']}: training row {one['training_row']}, {how}", "text": one["text"]}
        for one, how in found[:_MOST_LISTED]
    ]
    return rows, len(found) - len(rows)


def _listed(names: Sequence[str], most: int = _MOST_LISTED) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def missing_lines(results: dict[str, Any]) -> list[str]:
    """Names the sets of which pictures are missing."""
    return [
        f"{system_name(system)}: pictures are missing of {len(keys)}: {_listed(keys)}."
        for keys, system in zip(_missing(results), results["systems"], strict=True)
        if keys
    ]


def _missing(results: dict[str, Any]) -> list[list[str]]:
    """Keys of the sets of which pictures are missing, of each system."""
    return [
        [one["key"] for one in results["sets"] if not one["pictures"][number] or None in one["pictures"][number]]
        for number in range(len(results["systems"]))
    ]


def summary(results: dict[str, Any]) -> list[str]:
    """Say in a few sentences what came out: the headline by each judge, alignment and average, copies."""
    others = [_metric_sentence(results, name) for name in ("alignment", "average")]
    sentences = [*_headline_sentences(results), *others, *_copies_sentences(results)]
    return [sentence for sentence in sentences if sentence]


def _headline_sentences(results: dict[str, Any]) -> list[str]:
    first, *others = results["tables"]
    row = find_row(first, results["headline"])
    systems = [system_name(system) for system in results["systems"]]
    where = f"On {results['num_prompts']} prompts of {results['benchmark']}"
    if row is None:
        return [f"{where}, there is no value of {results['headline']}."]
    what = f"{where}, {row['label'].lower()} ({in_sentence(first['title'])}) is"
    rest = {
        in_sentence(table["title"]): other for table in others if (other := find_row(table, row["metric"])) is not None
    }
    if len(systems) == 1:
        head = f"{what} {cell_text(row['cells'][0])} for {systems[0]}."
        texts = [f"{cell_text(other['cells'][0])} ({title})" for title, other in rest.items()]
        return [head, f"It is {'; '.join(texts)}." if texts else ""]
    head = (
        f"{what} {cell_text(row['cells'][1])} for {systems[1]} and {cell_text(row['cells'][0])} for {systems[0]}; "
        f"the paired difference is {_difference_text(row)}."
    )
    texts = [f"{_difference_text(other)} ({title})" for title, other in rest.items()]
    return [head, f"The difference in {row['label'].lower()} is {'; '.join(texts)}." if texts else ""]


def _metric_sentence(results: dict[str, Any], metric: str) -> str:
    """What came out in a metric by each scorer; empty without a value."""
    rows = {}
    for table in results["tables"]:
        row = find_row(table, metric)
        if row is not None and any(number_text(cell["mean"]) != "n/a" for cell in row["cells"]):
            rows.setdefault(scored_by(metric, table["title"], results), row)
    if not rows:
        return ""
    label = next(iter(rows.values()))["label"].lower()
    if len(results["systems"]) == 1:
        texts = [f"{cell_text(row['cells'][0])} ({scorer})" for scorer, row in rows.items()]
        return f"The {label} is {'; '.join(texts)}."
    texts = [f"{_difference_text(row)} ({scorer})" for scorer, row in rows.items()]
    return f"The difference in {label} is {'; '.join(texts)}."


def _difference_text(row: dict[str, Any]) -> str:
    text = cell_text(row.get("difference"), signed=True)
    found = verdict(row.get("difference"), row["higher_is_better"])
    if found == "n/a":
        return text
    return f"{text}, whose interval " + (
        "includes 0" if found == "no" else f"excludes 0: {found.removeprefix('yes: ')}"
    )


def _copies_sentences(results: dict[str, Any]) -> list[str]:
    metric = duplicate_metric(results)
    rows = [row for table in results["tables"] if (row := find_row(table, metric)) is not None]
    if not rows:
        texts = [
            f"{len(keys)} of {system_name(system)}"
            for keys, system in zip(_missing(results), results["systems"], strict=True)
        ]
        missing = f"Of {len(results['sets'])} results, pictures are missing: {', '.join(texts)}."
        # An edit is one picture, and has no copies
        return ["There is no duplicate rate.", missing] if results["weights"] else [missing]
    label, cells = rows[0]["label"], [cell_text(cell) for cell in rows[0]["cells"]]
    if len(cells) == 1:
        return [f"The {label.lower()} is {cells[0]}."]
    return [f"The {label.lower()} is {cells[1]} against {cells[0]}: a difference of {_difference_text(rows[0])}."]


def alerts(results: dict[str, Any]) -> list[str]:
    """Gives what a reader has to know beside the headline, such as missing pictures that count 0."""
    return results.get("alerts") or []


def published_lines(table: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Says which values are others under the published protocol."""
    lines = []
    for row in table["rows"]:
        values = [
            f"{text} for {system_name(system)}"
            for text, system in zip(published_texts(row), results["systems"], strict=True)
            if text
        ]
        if values:
            lines.append(f"{row['label']} under the published protocol: {', '.join(values)}.")
    return lines


def facts(results: dict[str, Any]) -> list[str]:
    """Says what was measured, and by what."""
    seeds = ", ".join(map(str, results["seeds"]))
    return [
        f"dataset: {results['dataset'] or 'without a name'}, fingerprint {results['dataset_fingerprint']}",
        f"protocol: {protocol_of(results)}",
        f"prompts: {results['num_prompts']}; seeds: {seeds or 'none'}",
        f"scorers: {'; '.join(scorer_lines(results))}",
    ]
