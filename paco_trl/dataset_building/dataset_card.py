# SPDX-License-Identifier: Apache-2.0
"""Cards of datasets: contents, method and use, from the data."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from typing import Any

from datasets import Dataset
from huggingface_hub import DatasetCard, DatasetCardData

from ..data.columns import list_lengths
from ..data.pairs import decision_of, is_label_only
from ..hub.licenses import License
from ..utils.names import public_name, public_text
from ..utils.papers import PAPER
from ..utils.text import markdown_table, markdown_text


TAGS = ["consistency", "paco-rl", "paco-trl", "reward-model", "synthetic"]


def count_pairs(pairs: Dataset, num_images: int) -> dict[str, Any]:
    """Count the contents of a split of pairs."""
    columns = pairs.with_format(None)
    completions = columns["completion"][:]
    yes = sum(decision_of(completion) == "Yes" for completion in completions)
    counts = {"consistent": yes, "inconsistent": len(pairs) - yes}
    categories = columns["category"][:] if "category" in pairs.column_names else []
    return {
        **_count(pairs, num_images),
        **{name: f"{count} ({_percent(count / len(pairs))})" for name, count in counts.items()},
        "with_reasons": sum(not is_label_only(completion) for completion in completions) or None,
        "categories": Counter(name for name in categories if name),
    }


def count_rankings(rankings: Dataset, num_images: int) -> dict[str, Any]:
    """Count the contents of rankings."""
    counts = list_lengths(rankings, "candidates")
    return _count(rankings, num_images) | {"fewest": int(counts.min()), "most": int(counts.max())}


def _count(dataset: Dataset, num_images: int) -> dict[str, Any]:
    prompts = len(set(dataset.with_format(None)["group"][:])) if "group" in dataset.column_names else None
    return {"rows": len(dataset), "columns": dataset.column_names, "images": num_images, "prompts": prompts}


def dataset_card(
    splits: Mapping[str, Mapping[str, Any]],
    rankings: Mapping[str, Any] | None,
    repo_id: str,
    report: Mapping[str, Mapping[str, Any]],
    license: License,
    generator: str | None = None,
    is_generators_license: bool = False,
) -> DatasetCard:
    """Render the card, without the metadata that `push_to_hub` writes. Sections without content are left out."""
    report = {stage: dict(values) for stage, values in report.items() if values}
    ranking = report.get("ranking", {})
    prompts = report.get("prompts", {})
    title = repo_id.split("/")[-1]
    generator_text = public_name(generator) if generator else None
    if generator and generator_text == generator:  # a model on the Hub
        generator_text = f"[{generator}](https://huggingface.co/{generator})"
    card_data = DatasetCardData(
        license=license.identifier,
        license_name=license.name,
        license_link=license.link,
        pretty_name=title,
        tags=TAGS,
        task_categories=["image-text-to-text"],
    )
    with as_file(files("paco_trl") / "templates" / "paco_dataset_card.md.jinja") as template:
        card = DatasetCard.from_template(
            card_data,
            template_path=str(template),
            title=markdown_text(title),
            repo_id=repo_id,
            splits=splits,
            rankings=rankings,
            report=report,
            ranking=ranking,
            table=_table,
            facts=_facts,
            category_table=_category_table(splits),
            has_reasons=any(split["with_reasons"] for split in splits.values()),
            split_by_prompt=len(splits) > 1 and all(split["prompts"] for split in splits.values()),
            generator=generator_text,
            license=license,
            is_generators_license=is_generators_license,
            models={stage: public_name(values["model"]) for stage, values in report.items() if values.get("model")},
            prompt_source=public_name(prompts["source"]) if prompts.get("source") else None,
            judge=", ".join(map(public_name, ranking.get("judges") or [])),
            agreement=_percent(ranking.get("pairwise_agreement")),
            paper=PAPER,
        )
    card.text = re.sub(r"\n{3,}", "\n\n", card.text)
    return card


def _table(columns: Mapping[str, Sequence[Any]]) -> str:
    """Format a table of the columns that have values."""
    nonempty = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    rows = zip(*nonempty.values(), strict=True)
    return markdown_table(nonempty, [["-" if cell is None else cell for cell in row] for row in rows])


def _percent(fraction: float | None) -> str | None:
    return None if fraction is None else f"{100 * fraction:.1f} %"


def _category_table(splits: Mapping[str, Mapping[str, Any]]) -> str:
    """Format a table of categories, the most frequent first, if there are any."""
    names = [name for name, _ in sum((split["categories"] for split in splits.values()), Counter()).most_common()]
    counts = {
        f"pairs ({split_name})": [split["categories"][name] for name in names] for split_name, split in splits.items()
    }
    return _table({"category": names, **counts}) if names else ""


def _format_value(value: Any) -> str:
    """Format a value of a report; empty if there is nothing to report."""
    if value is None or isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value):  # a digest of inputs
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, text in _format_values(value).items())
    if isinstance(value, (list, tuple)):
        return ", ".join(filter(None, map(_format_value, value))) if len(value) <= 16 else f"{len(value)} values"
    return markdown_text(public_text(str(value)))


def _format_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Format the nonempty values of a report."""
    texts = {
        markdown_text(public_text(str(name))).replace("_", " "): _format_value(value) for name, value in values.items()
    }
    return {name: text for name, text in texts.items() if text}


def _facts(values: Mapping[str, Any], *excluded: str) -> str:
    """List the values of a stage, except values that the card shows elsewhere."""
    other_values = {name: value for name, value in values.items() if name not in excluded}
    return "".join(f"- {name}: {text}\n" for name, text in _format_values(other_values).items()) + "\n"
