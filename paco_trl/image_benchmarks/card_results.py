# SPDX-License-Identifier: Apache-2.0
"""Add the results of an evaluation to the card of the evaluated model."""

from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from ..hub.cards import RESULTS
from ..hub.settings import load_settings
from ..utils.files import write_atomically
from ..utils.names import public_name
from . import report


def add_results_to_card(card_path: str | Path, results: dict[str, Any]) -> Path:
    """
    Add the results of the tuned system to its model card: to the metadata, and as a section with the system it is compared
    with and with what the numbers depend on.

    Earlier results of the same benchmark and protocol are replaced in the text, and in the metadata those of the same
    scorers. Everything else stays unchanged.

    Args:
        card_path (`str` or `Path`):
            `README.md` of the tuned model, or its directory.
        results (`dict`):
            Results of [`t2is_results`] or [`gedit_results`], in which one system has the role `"tuned"`.

    Returns:
        `Path`: the card.
    """
    card_path, results = check_card(card_path), report.public_results(results)
    roles = [system["role"] for system in results["systems"]]
    if "tuned" not in roles:
        raise ValueError(
            f"The results are of {', '.join(map(repr, roles))}, but a card has those of a 'tuned' system."
        )
    card, name = ModelCard.load(card_path), report.benchmark_name(results)
    default_task = "image-to-image" if results["benchmark"] == "GEdit-Bench" else "text-to-image"
    new = _eval_results(results, roles.index("tuned"), card.data.pipeline_tag or default_task)
    replaced = {(one.dataset_name, one.dataset_config) for one in new}
    kept = [one for one in card.data.eval_results or [] if (one.dataset_name, one.dataset_config) not in replaced]
    card.data.eval_results = kept + new
    if card.data.model_name is None:
        trained = load_settings(card_path.parent)
        card.data.model_name = trained.title if trained else card_path.absolute().parent.name
    begin, end = f"<!-- results of {name} -->", f"<!-- end of the results of {name} -->"
    section = "\n\n".join([begin, f"## {name}", *_section(results), end])
    before, was_there, rest = card.text.partition(begin)
    if was_there:
        card.text = before + section + rest.partition(end)[2]
    else:  # where our cards have them, or at the end
        before, mark, rest = card.text.partition(RESULTS)
        card.text = f"{before}{section}\n\n{mark}{rest}" if mark else f"{before.rstrip()}\n\n{section}\n"
    write_atomically(card_path, str(card))
    return card_path


def check_card(card_path: str | Path) -> Path:
    """Find the card, and check that results can be added to it."""
    card_path = Path(card_path)
    if card_path.is_dir():
        card_path = card_path / "README.md"
    if not card_path.is_file():
        raise FileNotFoundError(f"There is no model card {card_path}. Give the directory of the tuned model.")
    ModelCard.load(card_path)
    return card_path


def _eval_results(results: dict[str, Any], place: int, task_type: str) -> list[EvalResult]:
    dataset = public_name(results["dataset"] or results["benchmark"])
    entries: dict[tuple[str, str], EvalResult] = {}
    for row in (row for table in results["tables"] for row in table["rows"]):
        mean = row["cells"][place]["mean"]
        if row["kind"] not in ("dimension", *report.MEANS) or mean is None:
            continue
        scorer = row["scorer"] + ", published protocol" * (results["protocol"] == "published")
        entries[row["metric"], scorer] = EvalResult(
            task_type=task_type,
            dataset_type=dataset if "/" in dataset else results["benchmark"],
            dataset_name=results["benchmark"],
            dataset_config=scorer,
            dataset_args={"num_prompts": results["num_prompts"], "seeds": results["seeds"]},
            metric_type=row["metric"],
            metric_value=round(mean, 4),
            metric_name=f"{row['label']}, {scorer}",
        )
    return list(entries.values())


def _section(results: dict[str, Any]) -> list[str]:
    (tuned,) = (system for system in results["systems"] if system["role"] == "tuned")
    lines = [*report.facts(results), "; ".join(f"{name}: {count}" for name, count in tuned["counts"].items())]
    if (fraction := tuned["settings"].get("adapter_fraction")) is not None:
        lines.append(f"The adapter made the first {fraction:.0%} of the denoising steps, the base model the rest.")
    names = list(map(report.system_name, results["systems"]))
    tables = [report.metric_table(table, names) for table in results["tables"]]
    alerts = report.bullet_list(results["alerts"], bold=True)
    lists = "\n".join(filter(None, (alerts, report.bullet_list([*lines, *results["notes"]]))))
    return [*tables, report.LEGEND, lists]
