# SPDX-License-Identifier: Apache-2.0
"""Compute the figures of T2IS-Bench from the scores of one system or two."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..evaluation.runs import dataset_fingerprint
from ..utils.text import some_of
from . import t2is_bench as bench
from .image_sets import ImageSet
from .report_content import NOTES
from .score_store import Scores, read_scores
from .scoring import COLUMNS, DUPLICATE
from .statistics import Unit, breakdown, metric_row, paired_cells
from .systems import System, check_results_arguments, condition_notes, package_versions


if TYPE_CHECKING:
    from datasets import Dataset


# Metric -> unit -> value, NaN where undefined
_Metrics = dict[str, dict[Unit, float]]


class _Scored(NamedTuple):
    """A system with its scores as values, for each judge of consistency."""

    system: System
    protocol: str
    scorers: dict[str, list[Scores]]  # by kind
    by_judge: dict[str, _Metrics]  # with the metrics that all judges share
    gaps: dict[str, list[str]]  # sets with a question that has no answer, by judge and by `alignment` and `aesthetics`

    def names(self, kind: str) -> list[str]:
        """List the scorers of a kind."""
        return [one.settings["scorer"] for one in self.scorers.get(kind, [])]


def t2is_results(
    benchmark: "Dataset",
    systems: Sequence[System],
    missing: str = "error",
    dataset_name: str | None = None,
    leakage: dict[str, Any] | None = None,
    protocol: str = "default",
) -> dict[str, Any]:
    """
    Compute the figures of T2IS-Bench: seven dimensions, three groups, their weighted average and the duplicate rate, with
    intervals, by category, and as a paired difference of two systems.

    Nothing is dropped or set to 0 silently: a dimension that a prompt does not have is undefined for it, a set with an
    unanswered question is left out and counted, and missing images are an error or count 0.

    Args:
        benchmark ([`~datasets.Dataset`]):
            From [`load_t2is_bench`].
        systems (`Sequence[System]`):
            One system, or two, of which the second is compared with the first.
        missing (`str`, *optional*, defaults to `"error"`):
            `"error"`, or `"zero"`: a score of 0 for each missing image, and for each pair with one. With `"zero"`, the
            published protocol leaves them out.
        dataset_name (`str`, *optional*):
            Name of the benchmark's data, for the report.
        leakage (`dict[str, Any]`, *optional*):
            From [`find_leaks`]. If `None`, the report says that it was not checked.
        protocol (`str`, *optional*, defaults to `"default"`):
            `"published"` for the arithmetic of the benchmark's own script, see [`consistency_means`] and
            [`alignment_means`]. The scores are the same.

    Returns:
        `dict[str, Any]`: all figures, as JSON has them; [`save_generation_report`] writes it.
    """
    check_results_arguments(systems, missing, protocol)
    benchmark = benchmark.with_format(None)
    rows = {row["id"]: row for row in benchmark}
    columns = ("id", "prompt", "rows", "cols", "criteria", "alignment")
    columns = [name for name in columns if name in benchmark.column_names]
    scored = [_scored(system, rows, benchmark, protocol) for system in systems]
    if len(scored) > 1:
        _check_comparable(*scored)
    alerts = _alerts(scored, missing)

    judges = scored[0].names("consistency")
    tables = {judge: _table(judge, scored) for judge in judges}
    return {
        "benchmark": "T2IS-Bench",
        "protocol": protocol,
        "dataset": dataset_name,
        "dataset_fingerprint": dataset_fingerprint(benchmark, columns, ()),
        "num_prompts": len(rows),
        "seeds": sorted({one.seed for one in systems[0].found.sets.values()}),
        "systems": [one.system.describe(_counts(one)) for one in scored],
        "scorers": {
            "consistency": judges,
            **{kind: next(iter(scored[0].names(kind)), None) for kind in ("alignment", "aesthetics")},
        },
        "weights": bench.WEIGHTS,
        "tables": list(tables.values()),
        "breakdowns": [
            _breakdown(f"By {column}", column, judge, table, scored, rows)
            for judge, table in tables.items()
            for column in ("category", "subcategory")
            if any(row.get(column) for row in rows.values())
        ],
        "leakage": leakage,
        "alerts": alerts,
        "notes": [*_notes(scored[0]), *alerts],
        "sets": _sets(scored, judges[0], rows),
        "headline": "consistency",
        "versions": package_versions(),
    }


def _scored(system: System, rows: dict[str, dict], benchmark: "Dataset", protocol: str) -> _Scored:
    by_kind: dict[str, list[Scores]] = {}
    for scores in read_scores(system.folder, system.found.digests):
        kind, columns = scores.settings["kind"], COLUMNS[scores.settings["kind"]]
        has_all = set(columns) <= set(benchmark.column_names)
        if not has_all or scores.settings["benchmark"] != dataset_fingerprint(benchmark, columns, ()):
            raise ValueError(
                f"{kind} of {system.name!r} was scored with another {columns[-1]}, or other prompts, than the benchmark has now "
                f"({system.folder}). Give the same data, or score into another directory."
            )
        by_kind.setdefault(kind, []).append(scores)
    if "consistency" not in by_kind:
        raise ValueError(f"No judge has scored the consistency of {system.name!r} ({system.folder}).")
    for kind, found in by_kind.items():
        if kind != "consistency" and len(found) > 1:
            raise ValueError(f"{system.folder} has {kind} by several scorers. Keep the scores of one.")
    sets = system.found.sets
    asked: dict[str, Scores] = {kind: by_kind[kind][0] for kind in ("alignment", "aesthetics") if kind in by_kind}
    asked |= {scores.settings["scorer"]: scores for scores in by_kind["consistency"]}
    gaps = {name: [key for key, one in scores.records.items() if one["incomplete"]] for name, scores in asked.items()}
    shared = _shared_values(by_kind, sets, rows, protocol)
    by_judge = {
        scores.settings["scorer"]: shared | _judge_values(scores, sets, protocol) for scores in by_kind["consistency"]
    }
    return _Scored(system, protocol, by_kind, by_judge, gaps)


def _shared_values(
    by_kind: dict[str, list[Scores]], sets: dict[str, ImageSet], rows: dict[str, dict], protocol: str
) -> _Metrics:
    """Compute the values that do not depend on the judge of consistency; missing panels count 0, or are left out."""
    of_missing = math.nan if protocol == "published" else 0.0
    names = {"alignment": tuple(bench.ALIGNMENT), "aesthetics": ("aesthetics",), "duplicates": ("duplicates",)}
    shared: _Metrics = {name: {} for kind, of_kind in names.items() if kind in by_kind for name in of_kind}
    for kind in by_kind.keys() & names.keys():
        for key, record in by_kind[kind][0].records.items():
            unit = (sets[key].prompt_id, sets[key].seed)
            if kind == "duplicates":
                for pair, similarity in zip(record["pairs"], record["scores"], strict=True):
                    shared[kind][*unit, *pair] = float(similarity >= DUPLICATE)
            elif kind == "aesthetics":
                for panel, score in enumerate(record["scores"]):
                    value = of_missing if panel in sets[key].missing else score
                    shared[kind][*unit, panel] = math.nan if value is None else value
            else:
                texts = bench.alignment_texts(rows[sets[key].prompt_id])
                for panel, (expected, answers) in enumerate(zip(texts, record["scores"], strict=True)):
                    for name in bench.ALIGNMENT:
                        own: Any = (
                            [None] if name not in expected else [of_missing] if answers is None else answers[name]
                        )
                        shared[name][*unit, panel] = math.nan if None in own else fmean(own)
    return shared


def _judge_values(scores: Scores, sets: dict[str, ImageSet], protocol: str) -> _Metrics:
    """Compute the score of each set in each dimension, or NaN. By default, pairs with a missing panel count 0."""
    values: _Metrics = {name: {} for name in bench.CONSISTENCY}
    for key, record in scores.records.items():
        panels = sets[key].num_panels
        for name, of_sets in values.items():
            score = bench.dimension_score(record["scores"].get(name, []), panels * (panels - 1) // 2, protocol)
            of_sets[sets[key].prompt_id, sets[key].seed] = math.nan if score is None else score
    return values


def _counts(one: _Scored) -> dict[str, int]:
    found = one.system.found
    missing = {key: len(one.missing) for key, one in found.sets.items()}
    whole = sum(missing[key] == found.sets[key].num_panels for key in missing)
    counts = {
        "sets": len(missing) - whole,
        "missing sets": whole,
        "missing panels": sum(missing.values()),
        "sets whose panels have different sizes": len(found.mixed_sizes),
        "images of no prompt, left out": len(found.unknown),
    }
    for scores in one.scorers.get("duplicates", ()):
        similarities = [similarity for record in scores.records.values() for similarity in record["scores"]]
        counts["near-duplicate pairs of panels"] = sum(similarity >= DUPLICATE for similarity in similarities)
    return counts | {f"sets without an answer ({name})": len(keys) for name, keys in one.gaps.items()}


def _check_comparable(first: _Scored, second: _Scored) -> None:
    names = [repr(one.system.name) for one in (first, second)]
    only = first.system.found.sets.keys() ^ second.system.found.sets.keys()
    if only:
        raise ValueError(f"{' and '.join(names)} have other prompts or seeds: only one has {some_of(sorted(only))}.")
    before, after = (
        {f"{kind} by {s.settings['scorer']}": s.settings for kind, found in one.scorers.items() for s in found}
        for one in (first, second)
    )
    if before.keys() != after.keys():
        missing = ", ".join(sorted(before.keys() ^ after.keys()))
        raise ValueError(f"Only one of {' and '.join(names)} has scores of {missing}. Score both.")
    for name, settings in before.items():
        pairs = {key: (settings.get(key), after[name].get(key)) for key in {**settings, **after[name]}}
        other = [f"`{key}` is {one!r} and {two!r}" for key, (one, two) in pairs.items() if one != two]
        if other:
            raise ValueError(f"{name} was scored in two ways: {'; '.join(other)}. Score both alike.")


def _cells(judge: str, scored: list[_Scored], name: str, prompts: set[str] | None = None) -> tuple | None:
    """Compute the cells of a metric and of its difference; `None` if a part of it was not scored."""
    groups: dict[str, Any] = {"alignment": bench.ALIGNMENT, "consistency": bench.CONSISTENCY}
    groups["average"] = bench.DIMENSION_WEIGHTS
    parts, metrics = groups.get(name, [name]), [one.by_judge[judge] for one in scored]
    if any(part not in of_system for of_system in metrics for part in parts):
        return None
    values = [
        [{unit: v for unit, v in of_system[part].items() if prompts is None or unit[0] in prompts} for part in parts]
        for of_system in metrics
    ]
    return paired_cells(values, list(bench.DIMENSION_WEIGHTS.values()) if name == "average" else None)


def _table(judge: str, scored: list[_Scored]) -> dict[str, Any]:
    labels = {
        "aesthetics": ("Aesthetics", "dimension"),
        **{name: (title, "dimension") for name, title in bench.ALIGNMENT.items()},
        "alignment": ("Prompt alignment", "group"),
        **{name: (title, "dimension") for name, title in bench.CONSISTENCY.items()},
        "consistency": ("Visual consistency", "group"),
        "average": ("Weighted average", "average"),
        "duplicates": ("Duplicate rate", "other"),
    }
    found = {name: _cells(judge, scored, name) for name in labels}
    rows = [metric_row(name, *labels[name], *cells) for name, cells in found.items() if cells is not None]
    return {"title": f"Judge: {judge}", "rows": rows}


def _breakdown(title: str, column: str, judge: str, table: dict, scored: list[_Scored], rows: dict) -> dict[str, Any]:
    members: dict[str, set[str]] = {}
    for name, row in rows.items():
        members.setdefault(row.get(column) or "without one", set()).add(name)
    measured = {row["metric"] for row in table["rows"]}
    metrics = ("consistency", "alignment", "aesthetics", "average", "duplicates")
    columns = [name for name in metrics if name in measured]

    def cells(metric: str, prompts: set[str]) -> Any:
        return _cells(judge, scored, metric, prompts)

    return breakdown(title, table["title"], columns, members, cells)


def _sets(scored: list[_Scored], judge: str, rows: dict[str, dict]) -> list[dict[str, Any]]:
    scores = [_scores_of_sets(one, judge, rows) for one in scored]
    return [
        {
            "key": key,
            "prompt_id": one.prompt_id,
            "prompt": rows[one.prompt_id]["prompt"],
            "category": rows[one.prompt_id].get("category"),
            "subcategory": rows[one.prompt_id].get("subcategory"),
            "source": None,
            "pictures": [[file and str(file) for file in each.system.found.sets[key].files] for each in scored],
            "panels": [one.rows, one.cols],
            "scores": [of_system[key] for of_system in scores],
        }
        for key, one in scored[0].system.found.sets.items()
    ]


def _scores_of_sets(one: _Scored, judge: str, rows: dict[str, dict]) -> dict[str, dict[str, float | None]]:
    """Average each metric over the panels or pairs of each set; `None` where undefined or incomplete."""
    values: dict[Unit, dict[str, list[float]]] = {}
    for name, of_units in one.by_judge[judge].items():
        for unit, value in of_units.items():
            own = values.setdefault(unit[:2], {}).setdefault(name, [])
            own += [] if math.isnan(value) else [value]
    found = {}
    for key, of_set in one.system.found.sets.items():
        by_name = values.get((of_set.prompt_id, of_set.seed), {})
        scores: dict[str, float | None] = {name: fmean(own) if own else None for name, own in by_name.items()}
        if key in one.gaps.get("aesthetics", ()):
            scores["aesthetics"] = None
        if key in one.gaps.get("alignment", ()):
            scores |= dict.fromkeys(bench.ALIGNMENT)
        # Of all dimensions of this prompt: over fewer it would not compare with the other system's
        asked = () if key in one.gaps[judge] else bench.consistency_criteria(rows[of_set.prompt_id])
        scores["consistency"] = _mean_of([scores.get(name) for name in asked])
        scores["alignment"] = _mean_of([scores[name] for name in bench.ALIGNMENT if scores.get(name) is not None])
        has_all = all(scores.get(name) is not None for name in bench.DIMENSION_WEIGHTS)
        scores["average"] = bench.weighted_average(cast(Any, scores)) if has_all else None
        found[key] = scores
    return found


def _mean_of(values: list) -> float | None:
    return fmean(values) if values and None not in values else None


def _alerts(scored: list[_Scored], missing: str) -> list[str]:
    """List what readers must know next to the headline."""
    alerts = condition_notes([one.system for one in scored])
    for one in scored:
        name, found, is_published = repr(one.system.name), one.system.found, one.protocol == "published"
        if missing == "zero" and found.missing:
            how = "count 0, and so does each pair that has one"
            how = "left out, as by the benchmark's own script" if is_published else how
            lacking = f"{sum(map(len, found.missing.values()))} panels of {name} are missing and"
            alerts.append(f"{lacking} {how}: {some_of(list(found.missing))}.")
        if found.mixed_sizes:
            alerts.append(
                f"The panels of {len(found.mixed_sizes)} sets of {name} have different sizes, like images of different "
                f"prompts: {some_of(found.mixed_sizes)}."
            )
        for scorer, keys in one.gaps.items():
            takes_rest = is_published and scorer in one.by_judge
            then = "their other answers count" if takes_rest else "they are left out of what it is about"
            text = f"{len(keys)} sets of {name} have an unanswered question ({scorer}), and {then}: {some_of(keys)}."
            alerts += [text] if keys else []
    return alerts


def _notes(first: _Scored) -> list[str]:
    notes = [
        f"{what} was not scored, and so the weighted average is not computed."
        for kind, what in (("alignment", "Prompt alignment"), ("aesthetics", "Aesthetics"))
        if kind not in first.scorers
    ]
    for kind in ("alignment", "aesthetics"):
        notes += [NOTES[kind].format(name=name) for name in first.names(kind)]
    notes.append(NOTES["duplicates" if "duplicates" in first.scorers else "no_duplicates"].format(threshold=DUPLICATE))
    if len(first.names("consistency")) == 1:
        notes.append(NOTES["one_judge"])
    return notes
