# SPDX-License-Identifier: Apache-2.0
"""Reports of an evaluation as JSON, Markdown and a self-contained HTML page, in a terminal, and in a card."""

import json
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from huggingface_hub import EvalResult, ModelCard
from jinja2 import Environment
from markdown_it import MarkdownIt
from markupsafe import Markup
from rich.console import Console
from rich.markdown import Markdown

from ..data.grids import with_gaps
from ..hub.card_data import load_card_data
from ..hub.cards import RESULTS
from ..utils.files import read_record, read_template, write_atomically
from ..utils.images import data_url
from ..utils.names import public_name, public_text
from ..utils.text import markdown_table, markdown_text, number_text, without_nan
from .paired_results import BenchmarkResults, GenerationResults, Mean, ResultTable, ShownSet, SystemEntry
from .system_images import load_image_file


logger = logging.getLogger(__name__)

# Sets are scaled to the area of a square of this side, so that a row of seven panels is not a thin strip
_SIDE = 480
# Largest width of a set
_MAX_WIDTH = 1280
# Kinds of rows that are bold
MEANS = ("group", "average")
PACKAGES = ("paco_trl", "torch", "transformers", "diffusers", "peft")


def save_generation_report(results: GenerationResults, output_dir: str | Path, num_shown: int = 12) -> dict[str, Path]:
    """
    Write the report of an evaluation: `results.json`, `results.md` and the self-contained page `report.html`.

    `results.json` has `null` for NaN. Paths of images in the parent of `output_dir` are relative to
    `output_dir`; of other paths only the name is kept.

    Args:
        results (`dict`):
            Results of [`t2is_results`] or [`gedit_results`].
        output_dir (`str` or `Path`):
            Directory to write to.
        num_shown (`int`, *optional*, defaults to `12`):
            Number of sets on the page, with the largest gains and losses, or for one system the highest and lowest
            scores.

    Returns:
        `dict[str, Path]`: the files `json`, `markdown` and `html`.
    """
    results = public_results(results)
    folder = Path(os.path.abspath(output_dir))
    page = _report_page(results, num_shown)

    def relative(path: str | None) -> str | None:
        is_near = path is not None and Path(os.path.abspath(path)).is_relative_to(folder.parent)
        return path and (Path(os.path.relpath(path, folder)).as_posix() if is_near else Path(path).name)

    for shown in results["sets"]:
        shown["source"] = relative(shown["source"])
        shown["pictures"] = [list(map(relative, paths)) for paths in shown["pictures"]]
    # Render all files before writing any, since they belong together
    texts = {
        "results.json": json.dumps(results, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "results.md": str(_render_report(results)),
        "report.html": page,
    }
    if lost := read_metrics(folder) - _metrics(results):
        logger.warning(
            f"The report in '{folder}' is replaced by one without {', '.join(sorted(lost))}. To have all, evaluate them "
            "together: scores are kept and not computed again."
        )
    for name, text in texts.items():
        write_atomically(folder / name, text)
    return dict(zip(("json", "markdown", "html"), (Path(output_dir) / name for name in texts), strict=True))


def read_metrics(folder: Path) -> set[str]:
    """Return the metrics of a directory's report, if it has one; reject files of its names that are not of the package."""
    existing = [name for name in ("results.json", "results.md", "report.html") if (folder / name).exists()]
    try:
        return _metrics(read_record(folder / "results.json")) if existing else set()
    except (KeyError, TypeError):
        raise ValueError(
            f"'{folder}' has {', '.join(existing)}, but no results.json of an evaluation. Move this away, or choose "
            "another directory."
        ) from None


def _metrics(results: Any) -> set[str]:
    """Return the labels of all metrics in a report."""
    return {row["label"] for table in results["tables"] for row in table["rows"]}


def print_report(results: GenerationResults, console: Console) -> None:
    """
    Print the alerts of an evaluation, the tables of metrics and counts, and the notes.

    Args:
        results (`dict`):
            Results of [`t2is_results`] or [`gedit_results`].
        console (`rich.console.Console`):
            Console to print to.
    """
    report = _render_report(results)
    sections = [report.sections[title] for title in ("Results", "Images", "Notes")]
    console.print(Markdown("\n".join([report.alerts, *sections])))


def _render_report(results: GenerationResults) -> Any:
    """Render a report as a Markdown module: its text, with the attributes `alerts`, `facts`, `sections` and `card`."""
    systems = results["systems"]
    names = list(map(system_name, systems))
    is_paired = len(systems) > 1
    count_names, setting_names = (
        {name: None for system in systems for name in system[field]} for field in ("counts", "settings")
    )
    settings = [["setting", *names, *[""] * is_paired]]
    for name in setting_names:
        values = [system["settings"].get(name, "not given") for system in systems]
        texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
        settings.append([name, *texts, *["differs" if values[0] != values[-1] else ""] * is_paired])
    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    table = partial(metric_table, names=names)
    environment.filters |= {
        "line": markdown_text, "table": table, "grid": lambda rows: markdown_table(rows[0], rows[1:]),
    }  # fmt: skip
    template = environment.from_string(read_template("generation_report.md.jinja"))
    return template.make_module({
        "results": results, "settings": settings, "title": report_title(results),
        "images": [
            ["", *names],
            *([name, *(system["counts"].get(name, "n/a") for system in systems)] for name in count_names),
        ],
        "versions": ", ".join(f"{name} {version(name)}" for name in PACKAGES),
    })  # fmt: skip


def metric_table(table: ResultTable, names: Sequence[str]) -> str:
    """Format a table of metrics with its title, for systems of these `names`."""
    rows = []
    is_paired = len(names) > 1
    for row in table["rows"]:
        cells = row["cells"]
        change = cast(Mean, row["difference"])  # only read if there are two systems
        counts = [str(cell["count"]) for cell in [*cells, *[change] * is_paired]]
        label = f"**{row['label']}**" if row["kind"] in MEANS else row["label"]
        label += " (lower is better)" * (not row["higher_is_better"])
        difference_cells = (
            [cell_text(change, signed=True), verdict(change, row["higher_is_better"])] if is_paired else []
        )
        rows.append(
            [
                label,
                *map(cell_text, cells),
                *difference_cells,
                " / ".join(counts if len({*counts}) > 1 else counts[:1]),
            ]
        )
    columns = ["", *names, *["difference", "interval excludes 0"] * is_paired, "n"]
    return f"### {markdown_text(table['title'])}\n\n{markdown_table(columns, rows)}"


def report_title(results: GenerationResults) -> str:
    """Return the title of a report: the benchmark and the systems."""
    return f"{benchmark_name(results)}: {' and '.join(map(system_name, results['systems']))}"


def benchmark_name(results: GenerationResults) -> str:
    """Return the name of the benchmark, or the dataset of own prompts, with the protocol unless it is the default."""
    is_published = results.get("protocol") == "published"
    return str(results["benchmark"] or results["dataset"]) + ", published protocol" * is_published


def cell_text(cell: Mean, signed: bool = False) -> str:
    """Format a mean and, in brackets, its interval."""
    mean, low, high = (number_text(number, signed=signed) for number in (cell["mean"], *cell["interval"]))
    return mean if mean == "n/a" else mean + (" (no interval)" if "n/a" in (low, high) else f" [{low}, {high}]")


def verdict(cell: Mean, higher_is_better: bool = True) -> str:
    """Describe a difference: `"yes: better"` or `"yes: worse"` if its interval excludes 0, else `"no"` or `"n/a"`."""
    low, high = cell["interval"]
    if low is None or high is None or math.isnan(low):
        return "n/a"
    if low <= 0 <= high:
        return "no"
    return "yes: better" if (low > 0) == higher_is_better else "yes: worse"


def system_name(system: SystemEntry) -> str:
    """Return the name of a system and its role."""
    return system["name"] if system["name"] == system["role"] else f"{system['name']} ({system['role']})"


def public_results(results: GenerationResults) -> GenerationResults:
    """Copy results without NaN, which JSON lacks, and without local paths, except in the sets."""

    def public(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: item if name == "sets" else public(item) for name, item in value.items()}
        if isinstance(value, list):
            return list(map(public, value))
        return public_text(value) if isinstance(value, str) else value

    return public(without_nan(results))


def _report_page(results: GenerationResults, num_shown: int) -> str:
    labels = {row["metric"]: row["label"] for table in results["tables"][:1] for row in table["rows"]}
    load = cache(_load_image)  # a set can be in several galleries
    galleries = {
        name: [_gallery_set(results, results["sets"][number], labels, load) for number in numbers]
        for name, numbers in choose_sets(results, num_shown).items()
    }
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    report = _render_report(results)
    environment.filters |= {"html": _html, "number": number_text}
    return environment.from_string(read_template("generation_report.html.jinja")).render(
        title=report_title(results),
        systems=results["systems"],
        parts=report,
        alerts=results["alerts"],
        headline=results["headline"],
        labels=labels,
        galleries=galleries,
    )


def _html(markdown: str) -> Markup:
    """Convert Markdown to HTML with scrolling tables and highlighted cells."""
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    html = re.sub(r"<tr>\n<td>(.*?)</td>", r'<tr>\n<th scope="row">\1</th>', html)
    html = re.sub(r"<td>((?:yes: )?(better|worse|differs))</td>", r'<td class="\2">\1</td>', html)
    html = html.replace("<table>", '<div class="scroll" tabindex="0" role="region" aria-label="Table">\n<table>')
    return Markup(html.replace("</table>", "</table>\n</div>"))


def choose_sets(results: GenerationResults, num_shown: int) -> dict[str, list[int]]:
    """Select the sets of each gallery: the extremes by gain, or by score for one system, and sets with copies."""

    def values(system: int, metric: str) -> dict[int, float]:
        values_of_sets = {number: set_["scores"][system].get(metric) for number, set_ in enumerate(results["sets"])}
        return {number: value for number, value in values_of_sets.items() if value is not None}

    scores = values(-1, results["headline"])
    if len(results["systems"]) > 1:
        first = values(0, results["headline"])
        scores = {number: score - first[number] for number, score in scores.items() if number in first}
    order = sorted(scores, key=scores.__getitem__, reverse=True)
    if len(results["sets"]) <= num_shown:
        set_numbers = order + [number for number in range(len(results["sets"])) if number not in scores]
    else:
        set_numbers = order[: -(-num_shown // 2)]
        set_numbers += [number for number in order[len(order) - num_shown // 2 :] if number not in set_numbers]
    copies = {number: rate for number, rate in values(-1, "duplicates").items() if rate > 0}
    most_copied = sorted(copies, key=copies.__getitem__, reverse=True)[: -(-num_shown // 2)]
    return {"sets": set_numbers} | ({"copies": most_copied} if most_copied else {})


def _gallery_set(results: GenerationResults, set_: ShownSet, labels: dict[str, str], load: Callable) -> dict[str, Any]:
    """Add images to a set, and the names of its metrics: first the metrics of the table, then others."""
    metric_names = {name for scores in set_["scores"] for name in scores}
    images = {"source": _gallery_images([set_["source"]], (1, 1), load)} if set_["source"] else {}
    count = set_["panels"][1] if set_.get("is_separate") else 1  # side by side in one file
    for system, paths in zip(results["systems"], set_["pictures"], strict=True):
        images[system["role"]] = _gallery_images(paths, set_["panels"], load, count)
    metrics = [name for name in labels if name in metric_names] + sorted(metric_names - labels.keys())
    return set_ | {"metrics": metrics, "images": images, "is_row": any(s["aspect"] > 2.5 for s in images.values())}


def _gallery_images(
    paths: Sequence[str | None], shape: Sequence[int], load: Callable, count: int = 1
) -> dict[str, Any]:
    """Lay out the files of a set, one in total or one per panel. Missing files become empty frames."""
    rows, cols = shape if len(paths) > 1 else (1, 1)
    panels = [(None, None) if path is None else load(path, rows, cols, count) for path in paths]
    size = next((size for _, size in panels if size), (1, 1) if len(paths) > 1 else tuple(shape[::-1]))
    frames = [{"uri": uri, "size": panel_size or size} for uri, panel_size in panels]
    return {"cols": cols, "panels": frames, "aspect": size[0] * cols / (size[1] * rows)}


def _load_image(path: str, rows: int, cols: int, count: int) -> tuple[str, tuple[int, int]]:
    """Load an image, one of `rows` x `cols` panels or `count` panels side by side, and scale it for the page."""
    image = with_gaps(load_image_file(Path(path)), count)
    area = math.sqrt(image.width * cols * image.height * rows)
    scale = min(1.0, _SIDE / area, _MAX_WIDTH / max(image.width * cols, image.height * rows))
    image.thumbnail((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    return data_url(image, "jpeg", quality=85), image.size


def add_results_to_card(card_path: str | Path, results: GenerationResults) -> Path:
    """
    Add the results of the tuned system to its model card: to the metadata, and as a section with the compared system
    and the settings of the evaluation.

    Replaces earlier results of the same benchmark and protocol in the text, and of the same scorers in the metadata.
    Everything else is unchanged.

    Args:
        card_path (`str` or `Path`):
            `README.md` of the tuned model, or its directory.
        results (`dict`):
            Results of [`t2is_results`] or [`gedit_results`], in which one system has the role `"tuned"`.

    Returns:
        `Path`: the card.
    """
    card_path = check_card(card_path)
    if results["benchmark"] is None:
        raise ValueError("The results are of your own prompts, but a model card needs results of a benchmark.")
    results = cast(BenchmarkResults, public_results(results))
    roles = [system["role"] for system in results["systems"]]
    if "tuned" not in roles:
        raise ValueError(f"The results are of {', '.join(roles)}, but a card needs results of a 'tuned' system.")
    card = ModelCard.load(card_path)
    name = benchmark_name(results)
    default_task = "image-to-image" if results["benchmark"] == "GEdit-Bench" else "text-to-image"
    new = _eval_results(results, roles.index("tuned"), card.data.pipeline_tag or default_task)
    replaced = {(result.dataset_name, result.dataset_config) for result in new}
    other_results = [
        old for old in card.data.eval_results or [] if (old.dataset_name, old.dataset_config) not in replaced
    ]
    card.data.eval_results = other_results + new
    if card.data.model_name is None:
        saved_card = load_card_data(card_path.parent)
        card.data.model_name = saved_card.title if saved_card else card_path.absolute().parent.name
    begin = f"<!-- results of {name} -->"
    end = f"<!-- end of the results of {name} -->"
    section = f"{begin}\n\n## {name}\n\n{_render_report(results).card()}{end}"
    text_before, has_start, remaining_text = card.text.partition(begin)
    _, has_end, text_after = remaining_text.partition(end)
    if has_end:
        card.text = text_before + section + text_after
    else:  # at the place for results in our cards, or at the end
        if has_start:  # without their end, results cannot be told from text below them
            logger.warning(f"{card_path} has earlier results of {name}, which stay: their mark '{end}' is gone.")
        text_before, mark, remaining_text = (text_before + remaining_text).partition(RESULTS)
        card.text = (
            f"{text_before}{section}\n\n{mark}{remaining_text}" if mark else f"{text_before.rstrip()}\n\n{section}\n"
        )
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


def _eval_results(results: BenchmarkResults, column: int, task_type: str) -> list[EvalResult]:
    dataset = public_name(str(results["dataset"] or results["benchmark"]))
    entries: dict[tuple[str, str], EvalResult] = {}
    for row in (row for table in results["tables"] for row in table["rows"]):
        mean = row["cells"][column]["mean"]
        if row["kind"] not in ("dimension", *MEANS) or mean is None:
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
