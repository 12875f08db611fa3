# SPDX-License-Identifier: Apache-2.0
"""Results of the base model and an adapter on your own prompts."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ..data.image_sets import SEPARATE
from ..rollout.prompt_rows import PromptRows
from .paired_results import GenerationResults, MetricRow, SampleKey, ShownSet, compute_table
from .prompt_systems import PromptSystem


def prompt_results(
    dataset: str, rows: PromptRows, names: list[str], systems: Sequence[PromptSystem], sources: Path | None
) -> GenerationResults:
    """Compute the means of the rewards and of their sum, with intervals over prompts, and the paired gains."""
    labels = {name: name for name in names}
    columns = [dict(system.scores) for system in systems]
    if len(names) > 1:
        labels["sum"] = "sum of the rewards"
        columns = [values | {"sum": system.sum_scores()} for system, values in zip(systems, columns, strict=True)]
    lines = [
        MetricRow(name, label, "dimension" if name in names else "average", "", [name])
        for name, label in labels.items()
    ]
    alerts = [
        f"{name} gave no score for {count} of {len(system.images)} images of {system.name}, which are left out of its "
        "results."
        for system in systems
        for name in names
        if (count := system.count_failures(name))
    ]
    alerts += [system.leak for system in systems if system.leak]
    leakage = (
        "An adapter that was trained on these prompts may only be better on them. Of its training prompts only the "
        "first was looked for."
    )
    noise = (
        "Image k of a prompt starts from the same noise for all models, as in `evaluate()` of training with this seed."
    )
    return {
        "benchmark": None,
        "dataset": dataset,
        "num_prompts": len(rows),
        "systems": [system.entry() for system in systems],
        "scorers": {},
        "tables": [compute_table("Rewards", lines, columns)],
        "breakdowns": [],
        "alerts": alerts,
        "notes": [noise, leakage],
        "sets": _sets(rows, systems, columns, labels, sources),
        "headline": list(labels)[-1],
    }


def _sets(
    rows: PromptRows,
    systems: Sequence[PromptSystem],
    columns: Sequence[dict[str, dict[SampleKey, float]]],
    metrics: Iterable[str],
    sources: Path | None,
) -> list[ShownSet]:
    """Return each image of the systems side by side, with its scores, as the page shows them."""
    dataset = rows.dataset
    prompt_ids = dataset["id"] if "id" in dataset.column_names else [f"prompt {row + 1}" for row in range(len(rows))]
    layouts = dataset["layout"] if "layout" in dataset.column_names else [None] * len(rows)
    has_several = len(systems[0].images) > len(rows)
    return [
        {
            "key": f"{prompt_ids[row]}" + f", image {image + 1}" * has_several,
            "prompt": rows.prompts[row],
            "source": None if sources is None else str(sources / f"{row}.png"),
            "pictures": [[str(system.images[row, image])] for system in systems],
            "panels": list(rows.layouts[row]),
            "is_separate": layouts[row] == SEPARATE,
            "scores": [{name: values[name][row, image] for name in metrics} for values in columns],
        }
        for row, image in systems[0].images
    ]
