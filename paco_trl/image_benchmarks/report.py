# SPDX-License-Identifier: Apache-2.0
"""Write the report of an evaluation as JSON, Markdown, a self-contained HTML page with the images, and to a terminal."""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markdown_it import MarkdownIt
from markupsafe import Markup
from PIL import Image, ImageOps
from rich.console import Console
from rich.markdown import Markdown

from ..utils.files import read_template, write_atomically
from ..utils.images import data_url, to_rgb
from ..utils.text import markdown_text, number_text
from . import report_content as content


# A set is shown with the area of a square of this side, so that a row of seven panels is not a thin strip ...
_SIDE = 480
# ... and not wider than this
_MAX_WIDTH = 1280
# Training prompts that the head of the page names; its section names more
_LISTED_LEAKS = 5


def save_generation_report(results: dict[str, Any], output_dir: str | Path, num_shown: int = 6) -> dict[str, Path]:
    """
    Write the report of an evaluation: `results.json`, `results.md` and the self-contained page `report.html`.

    In `results.json`, NaN is `null`, and images below the parent of `output_dir` are relative to it; of other paths only
    the name remains.

    Args:
        results (`dict`):
            Results of [`t2is_results`] or [`gedit_results`], or the content of `results.json`.
        output_dir (`str` or `Path`):
            Directory to write to. Relative paths of images are relative to it, or else to the working directory.
        num_shown (`int`, *optional*, defaults to `6`):
            Number of sets in each gallery: the best, the worst, and so on. At least 1.

    Returns:
        `dict[str, Path]`: the files, by the names `json`, `markdown` and `html`.
    """
    if num_shown < 1:
        raise ValueError(f"`num_shown` is {num_shown}, but each gallery has at least one set. Set it to 1 or more.")
    output_dir = Path(output_dir)
    # All are made before the first is written: they belong together
    texts = {
        "results.json": json.dumps(_portable(results, output_dir), indent=2, ensure_ascii=False, allow_nan=False)
        + "\n",
        "results.md": markdown_report(results),
        "report.html": _report_page(results, output_dir, num_shown),
    }
    for name, text in texts.items():
        write_atomically(output_dir / name, text)
    return dict(zip(("json", "markdown", "html"), (output_dir / name for name in texts), strict=True))


def print_report(results: dict[str, Any], console: Console) -> None:
    """
    Print the summary of an evaluation, its alerts, the tables of metrics and counts, and whether training prompts occur
    in the benchmark.

    Args:
        results (`dict`):
            Results of [`t2is_results`] or [`gedit_results`].
        console (`rich.console.Console`):
            Console to print to.
    """
    shown = content.public_results(results)
    tables = [f"### {markdown_text(title)}\n\n{table}" for title, table in content.metric_tables(shown).items()]
    below = [*map(markdown_text, (*content.missing_lines(shown), content.leakage_line(shown)))]
    console.print(Markdown("\n\n".join([*_head(shown), *tables, content.count_table(shown), *below])))


def markdown_report(results: dict[str, Any]) -> str:
    """Write the report as Markdown."""
    shown = content.public_results(results)
    parts = [
        f"# {markdown_text(content.report_title(shown))}",
        *_head(shown),
        content.bullet_list(content.facts(shown)),
    ]
    parts += [f"## {section.title}\n\n{section.body}" for section in content.report_sections(results)]
    return "\n\n".join(parts) + "\n"


def _head(shown: dict[str, Any]) -> list[str]:
    alerts = content.bullet_list(shown.get("alerts") or (), bold=True)
    return [*filter(None, (markdown_text(" ".join(content.summary(shown))), alerts))]


def _report_page(results: dict[str, Any], directory: Path, num_shown: int) -> str:
    sections = content.report_sections(results)
    results = content.public_results(results)
    labels = {row["metric"]: row["label"] for row in (results["tables"] or [{"rows": ()}])[0]["rows"]}
    # A set can be in several galleries
    load = cache(partial(_load_image, directory))
    galleries = {
        name: [_shown_set(results, results["sets"][number], labels, load) for number in numbers]
        for name, numbers in choose_sets(results, num_shown).items()
    }
    names = (results["headline"], content.duplicate_metric(results) or "")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"html": _html, "number": number_text, "system": content.system_name}
    return environment.from_string(read_template("generation_report.html.jinja")).render(
        title=content.report_title(results),
        systems=results["systems"],
        summary="\n\n".join(map(markdown_text, content.summary(results))),
        alerts=content.bullet_list(results.get("alerts") or ()),
        facts=content.bullet_list([*content.facts(results), content.leakage_line(results, _LISTED_LEAKS)]),
        sections=sections,
        charts=[*filter(None, map(difference_chart, results["tables"]))],
        headline=results["headline"],
        measured=[labels.get(name, name).lower() for name in names],
        labels=labels,
        galleries=galleries,
        leaks=content.leaks(results),
    )


def _html(markdown: str) -> Markup:
    """Convert Markdown to HTML, with tables that scroll and cells that stand out."""
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    html = re.sub(r"<tr>\n<td>(.*?)</td>", r'<tr>\n<th scope="row">\1</th>', html)
    html = re.sub(r"<td>((?:yes: )?(better|worse|differs))</td>", r'<td class="\2">\1</td>', html)
    # The interval of a cell, which the page can put on a line of its own
    html = re.sub(r" (\[[^\[\]<]*\]|\(no interval\))(?=</t)", r' <span class="interval">\1</span>', html)
    html = html.replace("<table>", '<div class="scroll" tabindex="0" role="region" aria-label="Table">\n<table>')
    return Markup(html.replace("</table>", "</table>\n</div>"))


def choose_sets(results: dict[str, Any], num_shown: int) -> dict[str, list[int]]:
    """Choose the sets of each gallery, by the headline metric of the last system; own prompts have one, by gain."""

    def values(system: int, metric: str) -> dict[int, float]:
        found = {number: one["scores"][system].get(metric) for number, one in enumerate(results["sets"])}
        return {number: value for number, value in found.items() if value is not None}

    def ranked(values: dict[int, float]) -> list[int]:
        return sorted(values, key=values.__getitem__, reverse=True)

    last, metric = values(-1, results["headline"]), content.duplicate_metric(results)
    num_best = min(num_shown, math.ceil(len(last) / 2))  # no set is among the best and the worst
    chosen = {"best": ranked(last)[:num_best], "worst": ranked(last)[num_best:][::-1][:num_shown]}
    if len(results["systems"]) > 1:
        first = values(0, results["headline"])
        change = {number: last[number] - first[number] for number in last if number in first}
    if results["benchmark"] is None:
        found = ranked(change if len(results["systems"]) > 1 else last)
        found += [number for number in range(len(results["sets"])) if number not in found]  # without a score
        start, end = math.ceil(num_shown / 2), len(found) - num_shown // 2
        return {"all": found if len(found) <= num_shown else found[:start] + found[end:]}
    if len(results["systems"]) > 1:
        chosen["gained"] = [number for number in ranked(change) if change[number] > 0][:num_shown]
        chosen["lost"] = [number for number in ranked(change)[::-1] if change[number] < 0][:num_shown]
    if metric is not None:
        copies = values(-1, metric)
        chosen["copies"] = [number for number in ranked(copies) if copies[number] > 0][:num_shown]
    return chosen


def difference_chart(table: dict[str, Any]) -> dict[str, Any] | None:
    """Place the differences of a table and their intervals on an axis from 0 to 100."""
    found = [(row, row["difference"]) for row in table["rows"] if row["difference"]]
    found = [(row, change) for row, change in found if change["mean"] is not None]
    if not found:
        return None
    spans = [[change["mean"] if end is None else end for end in change["interval"]] for _, change in found]
    low, high = (function(0.0, *(end for span in spans for end in span)) for function in (min, max))

    def place(value: float) -> float:
        return round(100 * (value - low) / ((high - low) or 1), 2)

    marks = [
        {
            "label": row["label"],
            "text": number_text(change["mean"], signed=True),
            "mean": place(change["mean"]),
            "ends": list(map(place, span)),
            "kind": content.verdict(change, row["higher_is_better"])[5:] or "open",
        }
        for (row, change), span in zip(found, spans, strict=True)
    ]
    ticks = [(place(value), number_text(value, signed=True)) for value in (low, high) if value]
    return {"title": table["title"], "zero": place(0.0), "ticks": ticks, "marks": marks}


def _shown_set(results: dict[str, Any], one: dict[str, Any], labels: dict[str, str], load: Callable) -> dict[str, Any]:
    """Add to a set its images, and the names of its scores in the order of the table, then those of other metrics."""
    scored = {name for scores in one["scores"] for name in scores}
    images = {"source": _shown_images([one["source"]], (1, 1), load)} if one.get("source") else {}
    for system, paths in zip(results["systems"], one["pictures"], strict=True):
        images[system["role"]] = _shown_images(paths, one["panels"], load)
    metrics = [name for name in labels if name in scored] + sorted(scored - labels.keys())
    is_wide = any(shown["aspect"] > 1.6 for shown in images.values())
    return one | {"metrics": metrics, "images": images, "is_wide": is_wide}


def _shown_images(paths: Sequence[str | None], shape: Sequence[int], load: Callable) -> dict[str, Any]:
    """Lay out the files of a set: one with all its panels, or one for each panel."""
    is_grid = len(paths) < 2
    layout = (1, 1) if is_grid else tuple(shape)
    panels = [load(path, *layout) for path in [*paths, *[None] * (math.prod(layout) - len(paths))]]
    size = next((panel["size"] for panel in panels if panel["size"]), tuple(shape[::-1]) if is_grid else (1, 1))
    return {
        "cols": layout[1],
        "panels": [panel if panel["size"] else {**panel, "size": size} for panel in panels],
        "problem": "" if is_grid or all(panel["size"] for panel in panels) else "panels are missing",
        "aspect": (size[0] * layout[1]) / (size[1] * layout[0]),
    }


def _load_image(directory: Path, path: str | Path | None, rows: int, cols: int) -> dict[str, Any]:
    """Load an image that is one of `rows` x `cols` panels, scaled for the page, or describe what is wrong with it."""
    problem = {"uri": None, "size": None, "problem": "missing"}
    found = next((one for one in (directory / (path or ""), Path(path or "")) if one.is_file()), None)
    if found is None:
        return problem
    try:
        with Image.open(found) as image:
            image = to_rgb(ImageOps.exif_transpose(image), "The image")
    # What Pillow raises for files that are not images, and for truncated ones
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return {**problem, "problem": "not readable"}
    area = math.sqrt(image.width * cols * image.height * rows)
    scale = min(1.0, _SIDE / area, _MAX_WIDTH / max(image.width * cols, image.height * rows))
    image.thumbnail((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    return {"uri": data_url(image, "jpeg", quality=85), "size": image.size, "problem": None}


def _portable(results: dict[str, Any], output_dir: Path) -> dict[str, Any]:
    """Copy results for `results.json`: readable on other machines, and again on this one."""
    shown = content.public_results(results)
    directory = Path(os.path.abspath(output_dir))
    # Everything is below the root directory
    parent = directory.parent if directory.parent != Path(directory.anchor) else directory

    def portable(path: str | Path | None) -> str | None:
        if path is None:
            return None
        candidates = (directory / path, Path(os.path.abspath(path)))
        found = Path(os.path.normpath(next((one for one in candidates if one.exists()), candidates[0])))
        return Path(os.path.relpath(found, directory)).as_posix() if found.is_relative_to(parent) else found.name

    for one in shown["sets"]:
        one["source"] = portable(one.get("source"))
        one["pictures"] = [list(map(portable, paths)) for paths in one["pictures"]]
    return shown
