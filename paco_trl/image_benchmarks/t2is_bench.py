# SPDX-License-Identifier: Apache-2.0
"""Load the prompts and criteria of T2IS-Bench (https://huggingface.co/papers/2506.23275), and repeat its arithmetic."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..data.image_sets import criteria_dict, find_t2is_bench, load_image_set_prompts, read_t2is_bench
from ..evaluation.runs import check_protocol
from ..utils.text import shorten, some_of


if TYPE_CHECKING:
    from datasets import Dataset


# Dimensions of visual consistency, asked about pairs of panels, by the names of the benchmark's files
CONSISTENCY = {"identity": "Identity", "style": "Style", "logic": "Logic"}
# Dimensions of prompt alignment, asked about single panels
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

            - the folder of the benchmark's own files, `T2IS-Bench.json` and `prompt_consistency.json`, or
              `"ChengyouJia/T2IS-Bench"`. The case id is the `id`. The prompt of a case is its text that describes a
              grid. A case with only an instruction has no `panels`: images of it can be scored, but not generated;
            - raw T2IS rows or image-set prompts with `id` and `criteria`, as
              [`~paco_trl.data.load_image_set_prompts`] takes them.
        split (`str`, *optional*, defaults to `"train"`):
            Split to load.
        alignment_file (`str` or `Path`, *optional*):
            `prompt_alignment.json` of the benchmark: case id -> panel -> `Entity`, `Attribute`, `Relation` -> texts.
            Panels are taken in the order of the file, as in the benchmark's script. If `None`, prompt alignment cannot
            be scored, unless the rows have a column `alignment`.

    Returns:
        [`~datasets.Dataset`]: image-set prompts with `id`, `criteria`, where known `category`, `subcategory` and
        `case_id`, and with an alignment file `alignment` (a list of `panel`, `dimension` and `text`).

    Raises:
        FileNotFoundError: If one of the benchmark's own files is missing.
        ValueError: If a file is broken, ids are missing or not unique, a prompt has fewer than two panels or no criterion of any
            dimension, or the alignment file lacks a case, or has another number of panels than the prompt.
    """
    folder = find_t2is_bench(name_or_path)
    dataset = load_image_set_prompts(name_or_path, split) if folder is None else read_t2is_bench(folder)
    for column in ("id", "criteria"):
        if column not in dataset.column_names:
            raise ValueError(
                f"{name_or_path} has no column `{column}`, only {dataset.column_names}. T2IS-Bench needs ids and the "
                "criteria of each prompt: give a copy that has them."
            )
    seen: dict[str, int] = {}
    for row, (name, rows, cols, criteria) in enumerate(
        zip(*(dataset[column] for column in ("id", "rows", "cols", "criteria")), strict=True)
    ):
        if not isinstance(name, str) or not name or name in seen:
            raise ValueError(
                f"The `id` of row {row} is {name!r}"
                + (f", which row {seen[name]} has too" if name in seen else "")
                + ". Images and scores are found by ids: give each row its own."
            )
        seen[name] = row
        if rows * cols < 2:
            raise ValueError(f"The prompt {name!r} asks for one panel, which has none to be consistent with.")
        if not consistency_criteria({"criteria": criteria}):
            raise ValueError(
                f"The prompt {name!r} has no criterion of {', '.join(CONSISTENCY.values())}. Add criteria, or leave it "
                "out."
            )
    if alignment_file is not None:
        dataset = _with_alignment(dataset, Path(alignment_file))
    return dataset


def consistency_criteria(row: Mapping[str, Any]) -> dict[str, list[str]]:
    """Give the criteria of a prompt for pairs of panels."""
    criteria = criteria_dict(row.get("criteria"))
    found = {name: list(criteria.get(title, {}).values()) for name, title in CONSISTENCY.items()}
    return {name: texts for name, texts in found.items() if texts}


def alignment_texts(row: Mapping[str, Any]) -> list[dict[str, list[str]]]:
    """Give the texts that each panel of a prompt should show, by dimension."""
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
    scores: Sequence[Sequence[float | None]], num_pairs: int | None = None, protocol: str = "default"
) -> float | None:
    """
    Compute the consistency of a set in one dimension: the mean over its criteria of the mean over all pairs.

    Of `num_pairs`, those that are missing count 0. The set has no score if a question has no answer: the mean of the others
    would be of other pairs. The published protocol takes the pairs that exist, and drops a score of 0.
    """
    check_protocol(protocol)
    if protocol == "published":
        answered = [[score for score in pairs if score is not None] for pairs in scores]
        criteria = [fmean(pairs) for pairs in answered if pairs]
        return (fmean(criteria) or None) if criteria else None
    if not scores or any(score is None for pairs in scores for score in pairs):
        return None
    if num_pairs is None and not all(scores):
        return None
    return fmean(sum(pairs) / (num_pairs or len(pairs)) for pairs in scores)


def consistency_means(
    cases: Sequence[Mapping[str, Sequence[Sequence[float | None]]]], protocol: str = "default"
) -> dict[str, float]:
    """
    Compute the consistency of a corpus in each dimension.

    Args:
        cases (`Sequence[Mapping]`):
            For each case (an image set): dimension -> P(Yes) of each pair, for each criterion.
        protocol (`str`, *optional*, defaults to `"default"`):
            `"default"`: the mean over the cases that have the dimension; a case with a question that has no answer
            (`None`) is left out, and one whose score is 0 counts. `"published"`: the arithmetic of the benchmark's own
            script. A case without the dimension has 0 there, the mean is over the cases above 0, and a case is scored
            on the pairs that exist. So it silently leaves out missing images, sets of one image, and sets whose score is
            exactly 0. (The script has no unanswered questions: they are left out.)

    Returns:
        `dict[str, float]`: dimension -> mean; where no case has it NaN, and 0 with `"published"`.
    """
    scores = {name: [dimension_score(case.get(name, []), protocol=protocol) for case in cases] for name in CONSISTENCY}
    defined = {name: [score for score in of_cases if score is not None] for name, of_cases in scores.items()}
    without = 0.0 if protocol == "published" else math.nan
    return {name: fmean(values) if values else without for name, values in defined.items()}


def alignment_means(images: Sequence[Mapping[str, float | None]], protocol: str = "default") -> dict[str, float]:
    """
    Compute the alignment of a corpus in each dimension: the mean over its images, not over its cases.

    Args:
        images (`Sequence[Mapping[str, float | None]]`):
            For each image (a panel) dimension -> mean over its texts, without an entry where it has none; `None` if it
            could not be scored. An image that is missing is an empty mapping.
        protocol (`str`, *optional*, defaults to `"default"`):
            `"default"`: an image that is missing counts 0, one without a text in the dimension does not count.
            `"published"`: the arithmetic of the benchmark's own script, which leaves out the images that are missing.
            (What it prints when it was resumed is the mean over the last run alone; this is over all. An image without
            a text in the dimension ends it with a division by zero; here it does not count.)

    Returns:
        `dict[str, float]`: dimension -> mean; NaN where no image has it.
    """
    check_protocol(protocol)
    means = {}
    for name in ALIGNMENT:
        values = [image[name] for image in images if image.get(name) is not None]
        if protocol == "default":
            values += [0.0] * sum(not image for image in images)
        means[name] = fmean(values) if values else math.nan
    return means


def _with_alignment(dataset: "Dataset", path: Path) -> "Dataset":
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        cases = None
    if not isinstance(cases, dict):
        raise ValueError(f"{path} is not a JSON object of cases. Give the benchmark's prompt_alignment.json.")
    known = dataset["case_id"][:] if "case_id" in dataset.column_names else [None] * len(dataset)
    column, lacking = [], []
    dimensions: set[str] = set()
    for name, case_id, rows, cols in zip(dataset["id"], known, dataset["rows"], dataset["cols"], strict=True):
        case = cases.get(case_id) or cases.get(name)
        if case is None:
            lacking.append(case_id or name)
            column.append([])
            continue
        if len(case) != rows * cols:
            raise ValueError(
                f"{path} has {len(case)} panels of the case {case_id or name!r}, but its {rows}x{cols} grid has "
                f"{rows * cols}. It is the file of another version of the benchmark."
            )
        column.append(_alignment_of(case, f"The case {case_id or name!r} of {path}"))
        dimensions |= {entry["dimension"] for entry in column[-1]}
    if lacking:
        raise ValueError(
            f"{path} lacks {len(lacking)} of the {len(dataset)} cases: {some_of(lacking)}"
            ". Their alignment could not be scored: give the file of this version of the "
            "benchmark, or prompts that it has."
        )
    absent = [title for title in ALIGNMENT.values() if title not in dimensions]
    if absent:
        raise ValueError(
            f"{path} has no text of {' and '.join(absent)} in any of the {len(dataset)} cases, so that neither alignment nor "
            "the weighted average could be computed. It must have the texts of all three dimensions."
        )
    return dataset.add_column("alignment", column)


def _alignment_of(case: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    entries = []
    for panel, dimensions in enumerate(case.values()):
        for title in ALIGNMENT.values():
            texts = dimensions.get(title, []) if isinstance(dimensions, dict) else None
            if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError(f"{where}: `{title}` of panel {panel} is {shorten(texts)}, not a list of texts.")
            entries += [{"panel": panel, "dimension": title, "text": text} for text in texts]
    return entries
