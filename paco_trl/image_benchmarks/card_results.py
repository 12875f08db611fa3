# SPDX-License-Identifier: Apache-2.0
"""Add the results of an evaluation to the card of the evaluated model."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from ..hub.cards import RESULTS
from ..hub.settings import load_settings
from ..utils.files import write_atomically
from ..utils.names import public_name
from ..utils.text import markdown_text
from . import report_content as content


def add_results_to_card(card_path: str | Path, results: dict[str, Any]) -> Path:
    """
    Add the results of the tuned system to its model card: to the metadata, and as a section for each table, with the
    system it is compared with and with what the numbers depend on.

    Earlier results of the same benchmark and judge are replaced. Everything else stays unchanged.

    Args:
        card_path (`str` or `Path`):
            `README.md` of the tuned model, or its directory.
        results (`dict`):
            Results of [`t2is_results`] or [`gedit_results`], in which one system has the role `"tuned"`.

    Returns:
        `Path`: the card.
    """
    card_path = check_card(card_path)
    results = content.public_results(results)
    roles = [system["role"] for system in results["systems"]]
    if "tuned" not in roles:
        raise ValueError(
            f"The results are of {', '.join(map(repr, roles))}, but a card has those of a 'tuned' system."
        )
    card = _read(card_path)
    default_task = "image-to-image" if results["benchmark"] == "GEdit-Bench" else "text-to-image"
    new = _eval_results(results, card.data.pipeline_tag or default_task)
    replaced = {(one.dataset_name, one.dataset_config) for one in new}
    kept = [one for one in card.data.eval_results or [] if (one.dataset_name, one.dataset_config) not in replaced]
    card.data.eval_results = kept + new
    if card.data.model_name is None:
        trained = load_settings(card_path.parent)
        card.data.model_name = trained.title if trained else card_path.absolute().parent.name
    for number in range(len(results["tables"])):
        card.text = _with_section(card.text, results, number)
    write_atomically(card_path, str(card))
    return card_path


def check_card(card_path: str | Path) -> Path:
    """Find the card, and check that results can be added to it."""
    card_path = Path(card_path)
    if card_path.is_dir():
        card_path = card_path / "README.md"
    if not card_path.is_file():
        raise FileNotFoundError(f"There is no model card {card_path}. Give the directory of the tuned model.")
    _read(card_path)
    return card_path


def _read(card_path: Path) -> ModelCard:
    try:
        return ModelCard.load(card_path)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"The `model-index` in the metadata of {card_path} does not have the Hub's form ({error}). Correct or delete it."
        ) from error


def _eval_results(results: dict[str, Any], task_type: str) -> list[EvalResult]:
    place = [system["role"] for system in results["systems"]].index("tuned")
    dataset = public_name(results["dataset"] or results["benchmark"])
    entries: dict[tuple[str, str], EvalResult] = {}
    rows = [(table["title"], row) for table in results["tables"] for row in table["rows"]]
    for title, row in rows:
        mean = row["cells"][place]["mean"]
        if row["kind"] not in ("dimension", *content.MEANS) or mean is None:
            continue
        scorer = content.scored_by(row["metric"], title, results)
        if not (scorer.startswith(("judge ", "scorer ")) or "judge: " in scorer):
            # The title of a language does not name the only judge
            scorer = f"{scorer}, judge {' and '.join(results['scorers']['consistency'])}"
        scorer += ", published protocol" if results["protocol"] == "published" else ""
        entries[row["metric"], scorer] = EvalResult(
            task_type=task_type,
            dataset_type=dataset if "/" in dataset else results["benchmark"],
            dataset_name=results["benchmark"],
            dataset_config=scorer,
            dataset_args={"num_prompts": results["num_prompts"], "seeds": results["seeds"]},
            metric_type=row["metric"],
            metric_value=round(mean, 4),
            metric_name=f"{content.row_label(row, results)}, {scorer}",
        )
    return list(entries.values())


def _with_section(body: str, results: dict[str, Any], number: int) -> str:
    """Replace the section of a table between its marks in the text of a card, or add it."""
    title = results["tables"][number]["title"]
    name = re.sub(r"[^\w.,:-]+", " ", f"{content.benchmark_name(results)}, {title}").replace("--", "-")
    begin, end = f"<!-- results of {name} -->", f"<!-- end of the results of {name} -->"
    section = "\n\n".join([begin, *_section(results, number), end])
    before, was_there, rest = body.partition(begin)
    if was_there:
        return before + section + rest.partition(end)[2]
    before, mark, rest = body.partition(RESULTS)  # where our cards have them; else at the end
    return f"{before}{section}\n\n{mark}{rest}" if mark else f"{body.rstrip()}\n\n{section}\n"


def _section(results: dict[str, Any], number: int) -> list[str]:
    title, table = [*content.metric_tables(results).items()][number]
    (tuned,) = (system for system in results["systems"] if system["role"] == "tuned")
    counts = "; ".join(f"{name}: {count}" for name, count in tuned["counts"].items())
    alerts = results.get("alerts") or []
    notes = [note for note in results["notes"] if note not in alerts]
    if (fraction := tuned["settings"].get("adapter_fraction")) is not None:
        notes.append(f"The adapter made the first {fraction:.0%} of the denoising steps, the base model the rest.")
    lines = [
        *content.facts(results),
        content.leakage_line(results),
        *([f"Counts: {counts}."] if counts else []),
        *notes,
    ]
    return [
        f"## {markdown_text(f'{content.benchmark_name(results)}, {content.in_sentence(title)}')}",
        table,
        "\n".join(filter(None, (content.bullet_list(alerts, bold=True), content.bullet_list(lines)))),
    ]
