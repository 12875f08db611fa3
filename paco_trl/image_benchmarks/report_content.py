# SPDX-License-Identifier: Apache-2.0
"""Write the content of a report as Markdown: sentences, tables and sections."""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import yaml

from ..evaluation.report import PublishedTable, published_tables, published_text
from ..utils.files import read_template
from ..utils.names import public_text
from ..utils.text import markdown_table, markdown_text, number_text


NOTES: dict[str, str] = yaml.safe_load(read_template("generation_report_notes.yaml"))
PUBLISHED_HEADING = "Published figures, not measured here"
_INTERVALS = "In brackets: 95 % bootstrap interval over prompts."
# Scorer of a metric that does not depend on the judge of consistency
_OWN_SCORER = dict.fromkeys(("alignment", "entity", "attribute", "relation"), "alignment")
_OWN_SCORER["aesthetics"] = "aesthetics"
# Kinds of rows in bold
MEANS = ("group", "average")
# A list in a sentence has this many entries, then their number
_MAX_LISTED = 20


class Section(NamedTuple):
    """A section of a report, in Markdown."""

    id: str
    title: str
    body: str


def report_sections(results: dict[str, Any]) -> list[Section]:
    """Write everything below the head of a report, except images."""
    # Before the paths are cut: two of them can have the same last part
    settings = settings_table(results)
    results = public_results(results)
    published = comparable_tables(results)
    remarks = list(dict.fromkeys(remark for table in published for remark in table.remarks))
    copied = {
        f"Published: {one.title}": _table(
            one.columns, [list(map(published_text, row)) for row in one.rows], [f"Source: {one.source}."]
        )
        for one in published
    }
    images = [*map(markdown_text, missing_lines(results)), count_table(results)]
    sections = [
        Section("results", "Results", _titled(metric_tables(results))),
        Section("breakdowns", "Breakdowns", _titled(breakdown_tables(results))),
        Section("images", "Images", "\n\n".join(images)),
        Section("leakage", "Leakage", markdown_text(leakage_line(results))),
        Section("settings", "Settings", settings),
        Section("notes", "Notes", bullet_list(results["notes"])),
        Section("versions", "Versions", bullet_list(f"{name}: {n}" for name, n in results["versions"].items())),
    ]
    if published:
        body = [markdown_text(NOTES["published"]), bullet_list(remarks), _titled(copied)]
        sections.insert(-1, Section("published", PUBLISHED_HEADING, "\n\n".join(body)))
    return [section for section in sections if section.body]


def bullet_list(lines: Iterable[str], bold: bool = False) -> str:
    """Write a list."""
    mark = "**" if bold else ""
    return "\n".join(f"- {mark}{markdown_text(line)}{mark}" for line in lines)


def _titled(tables: dict[str, str]) -> str:
    return "\n\n".join(f"### {markdown_text(title)}\n\n{table}" for title, table in tables.items())


def _table(columns: Iterable, rows: Iterable[Sequence], lines: Iterable[str] = ()) -> str:
    return "\n\n".join(filter(None, (markdown_table(columns, rows), markdown_text(" ".join(lines)))))


def _columns(results: dict[str, Any], *first: str) -> list[str]:
    paired = ["difference", "interval excludes 0"] if len(results["systems"]) > 1 else []
    return [*first, *map(system_name, results["systems"]), *paired]


def _cells(cells: Sequence[dict[str, Any]], difference: dict[str, Any] | None, row: dict[str, Any]) -> list[str]:
    paired = [cell_text(difference, signed=True), verdict(difference, row["higher_is_better"])]
    return [*map(cell_text, cells), *(paired if len(cells) > 1 else [])]


def metric_tables(results: dict[str, Any]) -> dict[str, str]:
    """Write the metrics: by its title a table for each judge (or language and subset), a row for each metric."""
    paired = " The difference is paired: the second system minus the first, over what both have a value of."
    tables = {}
    for table in results["tables"]:
        rows = []
        for row in table["rows"]:
            counts = [cell["count"] for cell in row["cells"]]
            both = row["difference"]["count"] if len(counts) > 1 else counts[0]
            text = " / ".join(map(str, counts)) + f" / {both} in both" * (len(counts) > 1)
            text = str(both) if len({*counts, both}) == 1 else text
            label = row_label(row, results)
            label = f"**{label}**" if row["kind"] in MEANS else label
            rows.append([label, *_cells(row["cells"], row["difference"], row), text])
        lines = [
            (f"Protocol: {results['protocol']}. " if results["benchmark"] else "")
            + f"{_INTERVALS}{paired * (len(results['systems']) > 1)}",
            "n: number of sets, images or edits with a value; for a mean of several metrics, of the first.",
        ]
        lower = [row["label"] for row in table["rows"] if not row["higher_is_better"]]
        lines += [f"Lower is better: {', '.join(lower)}."] if lower else []
        if "n/a" in sum(rows, []):
            lines.append("n/a: no value. The notes and the list of scorers give the reason.")
        tables[table["title"]] = _table([*_columns(results, "metric"), "n"], rows, lines)
    return tables


def breakdown_tables(results: dict[str, Any]) -> dict[str, str]:
    """Write the breakdowns: by its title a table for each metric, a row for each category."""
    tables: dict[str, str] = {}
    for breakdown in results["breakdowns"]:
        (of_judge,) = [one for one in results["tables"] if one["title"] == breakdown["table"]] or [{"rows": []}]
        for metric in breakdown["columns"]:
            row = find_row(of_judge, metric) or {"label": metric, "higher_is_better": True}
            scorer = scored_by(metric, breakdown["table"], results)
            title = f"{breakdown['title']}: {row['label'].lower()}" + f" ({scorer})" * bool(scorer)
            rows = []
            for part in breakdown["rows"]:
                cells = _cells(part["cells"][metric], part["difference"].get(metric), row)
                rows.append([part["name"], str(part["num_prompts"]), *cells])
            count = sum(cells[-1] in ("no", "yes: better", "yes: worse") for cells in rows)
            by_chance = [f"Of {count} intervals about {count / 20:.0f} would exclude 0 by chance."] * (count >= 20)
            tables.setdefault(title, _table(_columns(results, "", "prompts"), rows, [_INTERVALS, *by_chance]))
    return tables


def scored_by(metric: str, title: str, results: dict[str, Any]) -> str:
    """Name the scorer of a metric, such as `judge gemma-3-4b-it`; that of the duplicate rate is empty."""
    if metric == duplicate_metric(results) or results["benchmark"] is None:
        return ""
    own = results["scorers"].get(_OWN_SCORER.get(metric, ""))
    return f"scorer {own}" if own else in_sentence(title)


def count_table(results: dict[str, Any]) -> str:
    """Write how many images there are, and how many are missing or near-duplicates."""
    all_counts = [system["counts"] for system in results["systems"]]
    names = dict.fromkeys(name for counts in all_counts for name in counts)
    rows = [[name, *(counts.get(name, "n/a") for counts in all_counts)] for name in names]
    return _table(["", *map(system_name, results["systems"])], rows)


def settings_table(results: dict[str, Any]) -> str:
    """Write the settings of the systems side by side and mark those that differ."""
    systems, rows = results["systems"], []
    for name in dict.fromkeys(name for system in systems for name in system["settings"]):
        values = [system["settings"].get(name, "not given") for system in systems]
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        shown = ["none" if value is None else public_text(text) for value, text in zip(values, texts, strict=True)]
        mark = "differs" if any(value != values[0] for value in values) else ""
        rows.append([name, *shown, *[mark] * (len(systems) > 1)])
    return _table(["setting", *map(system_name, public_results(systems)), *[""] * (len(systems) > 1)], rows)


def comparable_tables(results: dict[str, Any]) -> list[PublishedTable]:
    """Select the published figures that compare with results: same protocol, and of each table the same scorers."""

    def same(name: str) -> str:
        return name.rsplit("/", 1)[-1].lower()

    given = [scorer if isinstance(scorer, list) else [scorer] for scorer in results["scorers"].values() if scorer]
    used = {same(name) for names in given for name in names}
    found = []
    for table in published_tables(results["benchmark"]) if results["benchmark"] else ():
        keep = [place for place, name in enumerate(table.columns) if same(table.scorers.get(name, "")) in used]
        if keep and table.protocol == results["protocol"]:
            columns, *rows = (tuple(row[place] for place in (0, *keep)) for row in (table.columns, *table.rows))
            found.append(replace(table, columns=cast(Any, columns), rows=tuple(rows)))
    return found


def report_title(results: dict[str, Any]) -> str:
    """Write the title of a report: the benchmark and the systems."""
    return f"{benchmark_name(results)}: {' and '.join(map(system_name, results['systems']))}"


def summary(results: dict[str, Any]) -> list[str]:
    """Summarize the results, a sentence for each scorer of headline, alignment, average and duplicates."""
    copies, systems = duplicate_metric(results), [system_name(system) for system in results["systems"]]
    lines = []
    for metric in dict.fromkeys((results["headline"], "alignment", "average", copies)):
        rows: dict[str, dict[str, Any]] = {}
        for table in results["tables"]:
            row = find_row(table, metric)
            if row is not None and any(cell_text(cell) != "n/a" for cell in row["cells"]):
                rows.setdefault(scored_by(metric, table["title"], results), row)
        for scorer, row in rows.items():
            values = [f"{cell_text(cell)} for {name}" for cell, name in zip(row["cells"], systems, strict=True)]
            text = f"{row['label']}{f' ({scorer})' * bool(scorer)}: {', '.join(values[::-1])}"
            if len(systems) > 1:
                change, found = _cells(row["cells"], row["difference"], row)[-2:]
                meaning = f", whose interval excludes 0: {found.removeprefix('yes: ')}"
                text += f"; the paired difference is {change}"
                text += {"n/a": "", "no": ", whose interval includes 0"}.get(found, meaning)
            lines.append(f"{text}.")
    if copies is None and results["weights"]:  # an edit is a single image and has no duplicates
        lines.append("There is no duplicate rate.")
    return lines


def facts(results: dict[str, Any]) -> list[str]:
    """List what was measured, and by what."""
    if results["benchmark"] is None:
        return [f"prompts: {results['num_prompts']}; images of each system: {len(results['sets'])}"]
    scorers = []
    for name, scorer in results["scorers"].items():
        if scorer:
            scorers.append(f"{name}: {' and '.join([scorer] if isinstance(scorer, str) else scorer)}")
        elif results["weights"]:  # without weights it is not part of the benchmark
            scorers.append(f"{name}: no scorer was given, so it is not computed")
    return [
        f"dataset: {results['dataset'] or 'without a name'}, fingerprint {results['dataset_fingerprint']}",
        f"protocol: {results['protocol']}",
        f"prompts: {results['num_prompts']}; seeds: {', '.join(map(str, results['seeds'])) or 'none'}",
        f"scorers: {'; '.join(scorers)}",
    ]


def missing_lines(results: dict[str, Any]) -> list[str]:
    """Name the sets that lack images."""
    lines = []
    for number, system in enumerate(results["systems"]):
        keys = [one["key"] for one in results["sets"] if None in (one["pictures"][number] or [None])]
        lines += [f"{system_name(system)}: {len(keys)} sets lack images: {_listed(keys)}."] if keys else []
    return lines


def leakage_line(results: dict[str, Any], most: int = _MAX_LISTED) -> str:
    """Report whether training prompts occur in the benchmark."""
    leakage = results["leakage"]
    if results["benchmark"] is None:
        return "An adapter that was trained on these prompts can be better on them alone: this was not checked."
    if leakage is None:
        return "Leakage: not checked: the training prompts were not given."
    training = f"the {leakage['num_training_prompts']} training prompts"
    training += f" of {leakage['dataset']}" if leakage.get("dataset") else ""
    exact = list(dict.fromkeys(found["id"] for found in leakage["exact"]))
    near = {one["id"]: one["similarity"] for one in sorted(leakage["near"], key=lambda one: one["similarity"])}
    if not (exact or near):
        return f"Leakage: none found among {training}, neither prompts of the benchmark nor near-duplicates of them."
    similar = [f"{name} (similarity {near[name]:.2f})" for name in sorted(near, key=near.__getitem__, reverse=True)]
    return (
        f"Leakage: {len({*exact, *near})} of the {results['num_prompts']} prompts of the benchmark found among {training}."
        + (f" The same text: {_listed(exact, most)}." if exact else "")
        + (f" Near-duplicates: {_listed(similar, most)}." if similar else "")
        + " The numbers include them, and say less about prompts that were not trained on."
    )


def leaks(results: dict[str, Any]) -> tuple[list[tuple[str, str]], int]:
    """List training prompts that occur in the benchmark, most similar first, and count those beyond the list."""
    leakage = results["leakage"] or {"exact": [], "near": []}
    near = sorted(leakage["near"], key=lambda one: one["similarity"], reverse=True)
    found = [(one, "the same text") for one in leakage["exact"]]
    found += [(one, f"similarity {one['similarity']:.2f}") for one in near]
    shown = [(f"{one['id']}: training row {one['training_row']}, {how}", one["text"]) for one, how in found]
    return shown[:_MAX_LISTED], max(len(shown) - _MAX_LISTED, 0)


def _listed(names: Sequence[str], most: int = _MAX_LISTED) -> str:
    return ", ".join(names[:most]) + f" and {len(names) - most} more" * (len(names) > most)


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


def benchmark_name(results: dict[str, Any]) -> str:
    """Name the benchmark, and its protocol unless it is the default; own prompts have the name of the dataset."""
    if results["benchmark"] is None:
        return results["dataset"]
    return results["benchmark"] + ", published protocol" * (results["protocol"] == "published")


def cell_text(cell: dict[str, Any] | None, signed: bool = False) -> str:
    """Format a mean and, in brackets, its interval."""
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
    """Format a table's title for the middle of a sentence."""
    return re.sub(r"^Judge: ", "judge ", title)
