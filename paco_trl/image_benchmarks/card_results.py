# SPDX-License-Identifier: Apache-2.0
"""Add the results of an evaluation to the card of the evaluated model."""

import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.repocard_data import eval_results_to_model_index
from huggingface_hub.utils import yaml_dump

from ..utils.files import write_atomically
from ..utils.names import public_name
from ..utils.tables import markdown_text
from . import report_content as content
from .report import bullet_list, report_table


# The results go before the first of these sections
_NEXT_HEADING = re.compile(r"^## (?:Training|Adapter|Limits|Licence|License|Citation)\b", re.MULTILINE)
_TOP_LEVEL_KEY = re.compile(r"^(?![\s#-])", re.MULTILINE)


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

    Raises:
        FileNotFoundError: If there is no card.
        ValueError: If no system is the tuned one, or the card's `model-index` cannot be read.
    """
    card_path = check_card(card_path)
    results = content.public_results(results)
    roles = [system["role"] for system in results["systems"]]
    if "tuned" not in roles:
        raise ValueError(
            f"The results are of {', '.join(map(repr, roles))}, and a card has results of its own model, with the role 'tuned'. "
            "Score the tuned model, and give its card."
        )
    text, found, metadata, body = _read(card_path)
    line_break = "\r\n" if "\r\n" in text else "\n"
    metadata = _with_results(metadata, body, card_path, results, line_break)
    for number in range(len(results["tables"])):
        body = _with_section(body, results, number, line_break)
    before, after = (found[1], found[3]) if found else (f"---{line_break}", f"{line_break}---{line_break * 2}")
    changed = before + metadata + after + body
    ModelCard(changed)  # raises if the Hub could not read it
    write_atomically(card_path, changed.encode("utf-8"))
    return card_path


def check_card(card_path: str | Path) -> Path:
    """Find the card, and check that results can be added to it."""
    card_path = Path(card_path)
    if card_path.is_dir():
        card_path = card_path / "README.md"
    if not card_path.is_file():
        raise FileNotFoundError(
            f"There is no model card {card_path}. Give the directory of the tuned model with the README.md of its training, or "
            "save the model again."
        )
    _, _, metadata, body = _read(card_path)
    _model_index(metadata, body, card_path)
    return card_path


def _read(card_path: Path) -> tuple[str, re.Match | None, str, str]:
    """Read a card: its text, the place of its metadata, the metadata, and the text below it."""
    text = card_path.read_bytes().decode("utf-8")  # `read_text` would change the line ends
    found = REGEX_YAML_BLOCK.search(text)
    return text, found, found[2] if found else "", text[found.end() :] if found else text


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
        scorer += ", published protocol" if content.protocol_of(results) == "published" else ""
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


def _with_results(metadata: str, body: str, card_path: Path, results: dict[str, Any], line_break: str) -> str:
    """Change only the lines of `model-index` in the metadata: YAML that is dumped again loses its comments."""
    values, model, kept_under = _model_index(metadata, body, card_path)
    default_task = "image-to-image" if results["benchmark"] == "GEdit-Bench" else "text-to-image"
    ours = _eval_results(results, values.get("pipeline_tag") or default_task)
    replaced = {(one.dataset_name, one.dataset_config) for one in ours}
    entries = [entry for entry, under in zip(model["results"], kept_under, strict=True) if under not in replaced]
    entries += eval_results_to_model_index(model["name"], ours)[0]["results"]
    if not entries:
        return metadata
    lines = yaml_dump({"model-index": [{**model, "results": entries}]}, sort_keys=False).strip("\n")
    lines = lines.replace("\n", line_break)
    start = re.search(r"^model-index[ \t]*:", metadata, re.MULTILINE)
    if start is None:
        return metadata + (line_break if metadata.strip() else "") + lines
    end = _TOP_LEVEL_KEY.search(metadata, start.end())
    rest = metadata[end.start() :] if end and end.start() < len(metadata) else ""
    return metadata[: start.start()] + lines + (line_break + rest if rest else "")


def _model_index(metadata: str, body: str, card_path: Path) -> tuple[dict[str, Any], dict[str, Any], list[tuple]]:
    """Read the metadata, its only model (a new one if there is none), and dataset and configuration of each result."""
    title = re.search(r"^# +(.+?)\s*$", body, re.MULTILINE)
    new: dict[str, Any] = {"name": title[1] if title else card_path.absolute().parent.name, "results": []}
    values = yaml.safe_load(metadata) or {}
    try:
        (model,) = values.get("model-index") or [new]
        under = [(entry["dataset"].get("name"), entry["dataset"].get("config")) for entry in model["results"]]
        return values, model | {"name": model["name"]}, under
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"The `model-index` in the metadata of {card_path} does not have the Hub's form: one model with a name and results, "
            "each with its dataset. Correct it, or delete it."
        ) from error


def _with_section(body: str, results: dict[str, Any], number: int, line_break: str) -> str:
    """Replace the section of a table in the text of a card, or add it."""
    title = results["tables"][number]["title"]
    name = re.sub(r"[^\w.,:-]+", " ", f"{content.benchmark_name(results)}, {title}").replace("--", "-")
    begin, end = f"<!-- results of {name} -->", f"<!-- end of the results of {name} -->"
    section = "\n\n".join([begin, *_section(results, number), end]).replace("\n", line_break)
    present = re.search(f"{re.escape(begin)}.*?{re.escape(end)}", body, re.DOTALL)
    if present:
        return body[: present.start()] + section + body[present.end() :]
    # No headings in code blocks. Blanks of the same length keep the positions
    prose = re.sub(r"^```.*?^```", lambda found: " " * len(found[0]), body, flags=re.MULTILINE | re.DOTALL)
    heading = _NEXT_HEADING.search(prose)
    if heading:
        return body[: heading.start()] + section + line_break * 2 + body[heading.start() :]
    return body.rstrip() + line_break * 2 + section + line_break


def _section(results: dict[str, Any], number: int) -> list[str]:
    table = content.metric_tables(results)[number]
    (tuned,) = (system for system in results["systems"] if system["role"] == "tuned")
    counts = "; ".join(f"{name}: {count}" for name, count in tuned["counts"].items())
    lines, alerts = [*table.lines, *([f"Counts: {counts}."] if counts else [])], results.get("alerts") or []
    notes = [note for note in results["notes"] if note not in alerts]
    if (fraction := tuned["settings"].get("adapter_fraction")) is not None:
        notes.append(f"The adapter made the first {fraction:.0%} of the denoising steps, the base model the rest.")
    listed = bullet_list([*content.facts(results), content.leakage_line(results), *notes])
    return [
        f"## {markdown_text(f'{content.benchmark_name(results)}, {content.in_sentence(table.title)}')}",
        report_table(table),
        markdown_text(" ".join(lines)),
        "\n".join(filter(None, (bullet_list(alerts, bold=True), listed))),
    ]
