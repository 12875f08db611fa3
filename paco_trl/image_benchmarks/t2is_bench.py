# SPDX-License-Identifier: Apache-2.0
"""Load the prompts and criteria of T2IS-Bench (https://huggingface.co/papers/2506.23275), and compute its means."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from ..data.columns import criteria_dict
from ..data.image_sets import load_image_set_prompts
from ..data.t2is import find_t2is_bench, read_t2is_bench
from ..utils.text import some_of


if TYPE_CHECKING:
    from datasets import Dataset


# Dimensions of visual consistency, of pairs of panels, and their names in the benchmark's files
CONSISTENCY = {"identity": "Identity", "style": "Style", "logic": "Logic"}
# Dimensions of prompt alignment, of single panels
ALIGNMENT = {"entity": "Entity", "attribute": "Attribute", "relation": "Relation"}
# The weighted average of the three groups. Not in the benchmark's code: found from the paper's Table 3, whose ten rows
# with the Qwen judge it reproduces to 0.0004
WEIGHTS = {"aesthetics": 0.2, "alignment": 0.3, "consistency": 0.5}
# The same for the seven dimensions: a group is the mean of its three
DIMENSION_WEIGHTS = {
    "aesthetics": WEIGHTS["aesthetics"],
    **dict.fromkeys(ALIGNMENT, WEIGHTS["alignment"] / 3),
    **dict.fromkeys(CONSISTENCY, WEIGHTS["consistency"] / 3),
}
# Side to which both images of a pair are resized
SIDE = 512


def load_t2is_bench(
    name_or_path: str | Path, split: str = "train", alignment_file: str | Path | None = None
) -> "Dataset":
    """
    Load the prompts of T2IS-Bench with their criteria: the benchmark's own files, or a copy such as the one published
    with the PaCo-RL code.

    Args:
        name_or_path (`str` or `Path`):
            One of:

            - the directory of the benchmark's own files, `T2IS-Bench.json` and `prompt_consistency.json`, or
              `"ChengyouJia/T2IS-Bench"`. The case id is the `id`. The prompt of a case is its text that describes a
              grid. A case with only an instruction has no `panels`: images of it can be scored, but not generated;
            - raw T2IS rows or image-set prompts with `id` and `criteria`, as
              [`~paco_trl.data.load_image_set_prompts`] takes them.
        split (`str`, *optional*, defaults to `"train"`):
            Split to load.
        alignment_file (`str` or `Path`, *optional*):
            `prompt_alignment.json` of the benchmark: case id -> panel (in order) -> `Entity`, `Attribute`, `Relation` ->
            texts. If `None`, prompt alignment cannot be scored, unless the rows have a column `alignment`.

    Returns:
        [`~datasets.Dataset`]: image-set prompts with `id`, `criteria`, where known `category`, `subcategory` and
        `case_id`, and with an alignment file `alignment` (a list of `panel`, `dimension` and `text`).
    """
    folder = find_t2is_bench(name_or_path)
    dataset = load_image_set_prompts(name_or_path, split) if folder is None else read_t2is_bench(folder)
    seen: dict[str, int] = {}
    columns = (dataset[column] for column in ("id", "rows", "cols", "criteria"))
    for row, (name, rows, cols, criteria) in enumerate(zip(*columns, strict=True)):
        if not isinstance(name, str) or not name or name in seen:
            also = f", which row {seen[name]} has too" if name in seen else ""
            raise ValueError(f"The `id` of row {row} is {name!r}{also}. Images are found by it: give each its own.")
        seen[name] = row
        if rows * cols < 2:
            raise ValueError(f"The prompt {name!r} asks for one panel, which has none to be consistent with.")
        if not consistency_criteria({"criteria": criteria}):
            dimensions = ", ".join(CONSISTENCY.values())
            raise ValueError(f"The prompt {name!r} has no criterion of {dimensions}. Add criteria, or leave it out.")
    if alignment_file is not None:
        dataset = _with_alignment(dataset, Path(alignment_file))
    return dataset


def consistency_criteria(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the criteria of a prompt for pairs of panels, by dimension."""
    criteria = criteria_dict(row.get("criteria"))
    found = {name: list(criteria.get(title, {}).values()) for name, title in CONSISTENCY.items()}
    return {name: texts for name, texts in found.items() if texts}


def alignment_texts(row: Mapping[str, Any]) -> list[dict[str, list[str]]]:
    """Return the texts that each panel of a prompt should show, by dimension."""
    entries = row.get("alignment")
    if not entries:
        return []
    names = {title: name for name, title in ALIGNMENT.items()}
    panels: list[dict[str, list[str]]] = [{} for _ in range(row["rows"] * row["cols"])]
    for entry in entries:
        panels[entry["panel"]].setdefault(names[entry["dimension"]], []).append(entry["text"])
    return panels


def weighted_average(dimensions: Mapping[str, float]) -> float:
    """Compute 0.2 aesthetics + 0.3 mean(entity, attribute, relation) + 0.5 mean(identity, style, logic)."""
    return sum(weight * dimensions[name] for name, weight in DIMENSION_WEIGHTS.items())


def dimension_score(
    scores: Sequence[Sequence[float | None]], num_pairs: int, protocol: str = "default"
) -> float | None:
    """Average a dimension of a set over its criteria and all `num_pairs` pairs, of which those that do not exist count 0."""
    # Without an answer to each question the mean would be of other pairs. The published protocol takes the pairs that
    # exist, and drops a score of 0
    if protocol == "published":
        answered = [[score for score in pairs if score is not None] for pairs in scores]
        criteria = [fmean(pairs) for pairs in answered if pairs]
        return (fmean(criteria) or None) if criteria else None
    if not scores or any(None in pairs for pairs in scores):
        return None
    return fmean(sum(cast(Any, pairs)) / num_pairs for pairs in scores)


def _with_alignment(dataset: "Dataset", path: Path) -> "Dataset":
    cases = json.loads(path.read_text(encoding="utf-8"))
    known = dataset["case_id"][:] if "case_id" in dataset.column_names else [None] * len(dataset)
    column, lacking = list[list](), []
    for name, case_id, rows, cols in zip(dataset["id"], known, dataset["rows"], dataset["cols"], strict=True):
        case, shown = cases.get(case_id) or cases.get(name), case_id or name
        if case is None:
            lacking.append(shown)
            continue
        if len(case) != rows * cols:
            raise ValueError(
                f"{path} has {len(case)} panels of the case {shown!r}, but its {rows}x{cols} grid has {rows * cols}."
            )
        column.append([
            {"panel": panel, "dimension": title, "text": text}
            for panel, dimensions in enumerate(case.values())
            for title in ALIGNMENT.values()
            for text in dimensions.get(title, [])
        ])  # fmt: skip
    if lacking:
        raise ValueError(f"{path} lacks {len(lacking)} of the {len(dataset)} cases: {some_of(lacking)}.")
    present = {entry["dimension"] for entries in column for entry in entries}
    if absent := [title for title in ALIGNMENT.values() if title not in present]:
        raise ValueError(f"{path} has no text of {' and '.join(absent)} in any of the {len(dataset)} cases.")
    return dataset.add_column("alignment", column)
