# SPDX-License-Identifier: Apache-2.0
"""The report of an evaluation of image models as one HTML page, in which one sees the pictures next to the numbers."""

import base64
import io
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment
from markupsafe import Markup
from markupsafe import escape as html_escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont, ImageOps

from ..evaluation.published import published_text
from ..utils.files import write_atomically
from ..utils.tables import number_text
from .report_markdown import (
    PUBLISHED_HEADING,
    PUBLISHED_NOTE,
    comparable_tables,
    markdown_report,
    new_remarks,
)
from .report_numbers import (
    benchmark_name,
    duplicate_metric,
    excludes_zero,
    find_row,
    public_results,
    system_name,
    verdict,
)
from .report_sentences import alerts, facts, leakage_line, leaks, missing_lines, summary
from .report_tables import ReportTable, breakdown_tables, count_table, metric_tables, settings_table


# A set is shown with as many pixels as a square of this side, so that a row of seven panels is not a thin strip
_SIDE = 480
# Nor wider than this
_WIDEST = 1280
_GAP = 3  # pixels between panels that are files of their own
_QUALITY = 85
# Prompts of the benchmark that were trained on are named in its section, and in the head of the page not all
_LISTED_LEAKS = 5

# matplotlib writes these colours; the page has its own for light and dark
_INK, _GRID, _BETTER, _WORSE, _OPEN = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES = {_INK: "--ink", _GRID: "--line", _BETTER: "--better", _WORSE: "--worse", _OPEN: "--muted"}


def save_generation_report(results: dict[str, Any], output_dir: str | Path, num_shown: int = 6) -> dict[str, Path]:
    """
    Writes the report of an evaluation: `results.json`, `results.md` and `report.html`, one page with everything in it.

    In `results.json`, NaN is `null`, and no path is one of this machine: pictures below the parent of `output_dir` are
    relative to it, of others only the name remains.

    Args:
        results (`dict`):
            Results of [`t2is_results`] or [`gedit_results`], or what `results.json` holds.
        output_dir (`str` or `Path`):
            Folder to write to. Relative paths of pictures are relative to it, or else to the working directory.
        num_shown (`int`, *optional*, defaults to `6`):
            Number of sets that are shown as the best, as the worst and so on. At least 1.

    Returns:
        `dict[str, Path]`: the files, by the names `json`, `markdown` and `html`.

    Raises:
        ValueError: If `num_shown` is below 1, or the results name no protocol, as those of an earlier version.

    Example:

    ```python
    >>> save_generation_report(results, "evaluation/report")["html"]
    PosixPath('evaluation/report/report.html')
    ```
    """
    if num_shown < 1:
        raise ValueError(
            f"`num_shown` is {num_shown}, but the page shows the best and the worst sets, and so one of each at least. Set "
            "it to 1 or more."
        )
    output_dir = Path(output_dir)
    paths = {
        "json": output_dir / "results.json",
        "markdown": output_dir / "results.md",
        "html": output_dir / "report.html",
    }
    # All are made before the first is written, so that they belong together
    texts = {
        "json": json.dumps(_portable(results, output_dir), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "markdown": markdown_report(results),
        "html": report_page(results, output_dir, num_shown),
    }
    for name, path in paths.items():
        write_atomically(path, texts[name])
    return paths


def report_page(results: dict[str, Any], folder: str | Path, num_shown: int = 6) -> str:
    """Renders the page."""
    settings = settings_table(results)
    results = public_results(results)
    chosen = choose_sets(results, num_shown)
    picture = _Pictures(results, Path(folder))
    label = _label_of(results, results["headline"])
    first, last = (results["systems"][place]["role"] for place in (0, -1))
    texts = {
        "best": (f"Best by {label}", f"Those of {last} with the highest {label}."),
        "worst": (f"Worst by {label}", f"Those of {last} with the lowest {label}."),
        "gained": (f"Largest gain in {label}", f"Those whose {label} rose most from {first} to {last}."),
        "lost": (f"Largest loss in {label}", f"Those whose {label} fell most from {first} to {last}."),
        "copies": (
            "Near-duplicates",
            f"The sets of {last} with the highest {_label_of(results, duplicate_metric(results))}. Panels that are "
            "copies of one another are consistent without being what was asked for.",
        ),
    }
    galleries = [
        {
            "id": name,
            "title": texts[name][0],
            "about": texts[name][1],
            "sets": [_shown_set(results, number, picture) for number in numbers],
        }
        for name, numbers in chosen.items()
    ]
    published = comparable_tables(results)
    shown_leaks, num_more_leaks = leaks(results)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["interval"] = _with_interval
    template = environment.from_string(
        (files("paco_trl") / "templates" / "generation_report.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        results=results,
        benchmark=benchmark_name(results),
        systems=[system_name(system) for system in results["systems"]],
        summary=summary(results),
        alerts=alerts(results),
        facts=facts(results),
        tables=[
            {"table": shown, "chart": difference_chart(table)}
            for shown, table in zip(metric_tables(results), results["tables"], strict=True)
        ],
        breakdowns=breakdown_tables(results),
        galleries=galleries,
        counts=count_table(results),
        missing=missing_lines(results),
        leakage=leakage_line(results, _LISTED_LEAKS),
        leaks=shown_leaks,
        num_more_leaks=num_more_leaks,
        settings=settings,
        published_heading=PUBLISHED_HEADING,
        published_note=PUBLISHED_NOTE,
        published=[
            {"table": _plain(table), "source": table.source, "remarks": remarks}
            for table, remarks in zip(published, new_remarks(published), strict=True)
        ],
    )


def choose_sets(results: dict[str, Any], num_shown: int) -> dict[str, list[int]]:
    """Chooses the sets that the page shows, by the headline metric of the last system."""
    last = {number: one["scores"][-1].get(results["headline"]) for number, one in enumerate(results["sets"])}
    last = {number: value for number, value in last.items() if value is not None}
    by_value = sorted(last, key=last.get, reverse=True)
    num_best = min(num_shown, math.ceil(len(by_value) / 2))
    num_worst = min(num_shown, len(by_value) - num_best)
    chosen = {"best": by_value[:num_best], "worst": by_value[::-1][:num_worst]}
    if len(results["systems"]) > 1:
        first = {number: results["sets"][number]["scores"][0].get(results["headline"]) for number in last}
        change = {number: last[number] - value for number, value in first.items() if value is not None}
        by_change = sorted(change, key=change.get, reverse=True)
        chosen["gained"] = [number for number in by_change if change[number] > 0][:num_shown]
        chosen["lost"] = [number for number in by_change[::-1] if change[number] < 0][:num_shown]
    metric = duplicate_metric(results)
    if metric is not None:
        copies = {number: one["scores"][-1].get(metric) or 0 for number, one in enumerate(results["sets"])}
        by_copies = sorted(copies, key=copies.get, reverse=True)
        chosen["copies"] = [number for number in by_copies if copies[number] > 0][:num_shown]
    return chosen


def difference_chart(table: dict[str, Any]) -> Markup | None:
    """Draws the differences of a table with their intervals."""
    rows = [row for row in table["rows"] if row.get("difference") and row["difference"]["mean"] is not None]
    if not rows:
        return None
    # Paths and not letters, which would be as wide as the reader's font; the salt makes the same file of the same data
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "paco_trl", "font.size": 9}):
        # Between a telephone and what it may have on a desk, so that its letters can be read on both
        figure = Figure(figsize=(4.6, 0.5 + 0.25 * len(rows)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        axes.axvline(0, color=_INK, linewidth=0.8)
        axes.grid(axis="x", color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for place, row in enumerate(rows):
            mean, interval = row["difference"]["mean"], row["difference"]["interval"]
            colour = _OPEN
            if excludes_zero(row["difference"]):
                is_better = verdict(row["difference"], row["higher_is_better"]) == "yes: better"
                colour = _BETTER if is_better else _WORSE
            if None not in interval:
                axes.plot(interval, [place, place], color=colour, linewidth=2, solid_capstyle="round")
            # Empty where the interval includes 0: not by colour alone
            axes.plot(mean, place, "o", color=colour, markersize=5, fillstyle="none" if colour == _OPEN else "full")
        axes.set_yticks(range(len(rows)), [row["label"] for row in rows], parse_math=False)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.tick_params(colors=_INK, length=0)
        axes.locator_params(axis="x", nbins=5)
        for spine in axes.spines.values():
            spine.set_visible(False)
        written = io.BytesIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue().decode("utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    description = f"Differences with their intervals. {_chart_text(rows)}"
    return Markup('<svg role="img" aria-label="{}" ').format(description) + Markup(svg.removeprefix("<svg "))


def _chart_text(rows: list[dict[str, Any]]) -> str:
    return "; ".join(f"{row['label']} {number_text(row['difference']['mean'], signed=True)}" for row in rows)


def _label_of(results: dict[str, Any], metric: str | None) -> str:
    row = find_row(results["tables"][0], metric) if results["tables"] else None
    return (row["label"] if row else metric or "").lower()


def _plain(table: Any) -> ReportTable:
    rows = tuple(tuple(map(published_text, row)) for row in table.rows)
    return ReportTable(table.title, table.columns, rows, ("other",) * len(rows))


def _with_interval(text: str) -> Markup:
    """A cell whose interval (whose weights) the page may put on a line of its own."""
    found = re.fullmatch(r"(.+?) (\[[^\[]*\]|\((?:no interval|[\d.]+ .*)\))", text)
    if not found:
        return html_escape(text)
    return Markup('{} <span class="interval">{}</span>').format(*found.groups())


def _shown_set(results: dict[str, Any], number: int, picture: "_Pictures") -> dict[str, Any]:
    """What the page says of a set."""
    one = results["sets"][number]
    labels = {row["metric"]: row["label"] for row in results["tables"][0]["rows"]}
    names = list(dict.fromkeys(name for scores in one["scores"] for name in scores))
    order = list(labels)
    names.sort(key=lambda name: order.index(name) if name in labels else len(order))
    rows = []
    for name in names:
        values = [scores.get(name) for scores in one["scores"]]
        cells = [labels.get(name, name), *map(number_text, values)]
        if len(values) > 1:
            cells.append("n/a" if None in values else number_text(values[1] - values[0], signed=True))
        rows.append({"cells": cells, "is_headline": name == results["headline"]})
    rows_, cols = one["panels"]
    pictures = [("source", picture([one["source"]], 1, 1))] if one.get("source") else []
    for system, paths in zip(results["systems"], one["pictures"], strict=True):
        pictures.append((system["role"], picture(paths, rows_, cols)))
    kinds = [text for text in (one.get("category"), one.get("subcategory")) if text]
    return {
        "key": one["key"],
        "kinds": ", ".join(kinds),
        "prompt": one["prompt"],
        "rows": rows,
        "pictures": [{"name": name, **shown} for name, shown in pictures],
        "is_wide": any(shown["width"] > 1.6 * shown["height"] for _, shown in pictures),
    }


class _Pictures:
    """Gives sets as pictures inside the page. Each is made once, though a set may be shown several times."""

    def __init__(self, results: dict[str, Any], folder: Path):
        self._folder = folder
        self._made: Callable[..., dict[str, Any]] = cache(self._make)

    def __call__(self, paths: Sequence[str | Path | None], rows: int, cols: int) -> dict[str, Any]:
        return self._made(tuple(paths), rows, cols)

    def _make(self, paths: tuple[str | Path | None, ...], rows: int, cols: int) -> dict[str, Any]:
        loaded = [self._load(path) for path in paths]
        images = [image for image, _ in loaded]
        problem = next((problem for _, problem in loaded if problem), "missing")
        if not any(images):
            return {"uri": None, "width": cols, "height": rows, "problem": problem}
        if len(paths) == 1:
            (image,) = images
        else:
            problems = [problem or "" for _, problem in loaded]
            missing = max(rows * cols - len(images), 0)
            image = _joined(images + [None] * missing, problems + ["missing"] * missing, cols)
        image.thumbnail(_shown_size(*image.size))
        written = io.BytesIO()
        image.save(written, "JPEG", quality=_QUALITY)
        data = base64.b64encode(written.getvalue()).decode("ascii")
        has_all = all(images) and len(images) in (1, rows * cols)
        return {
            "uri": f"data:image/jpeg;base64,{data}",
            "width": image.width,
            "height": image.height,
            "problem": None if has_all else "panels are missing",
        }

    def _load(self, path: str | Path | None) -> tuple[Image.Image | None, str | None]:
        """A picture, or what is wrong with it."""
        if path is None:
            return None, "missing"
        found = next((one for one in (self._folder / path, Path(path)) if one.is_file()), None)
        if found is None:
            return None, "missing"
        try:
            with Image.open(found) as image:
                return _on_white(ImageOps.exif_transpose(image)), None
        # The first is also what Pillow raises for a file that is no picture or was cut off
        except (OSError, SyntaxError, Image.DecompressionBombError):
            return None, "not readable"


def _on_white(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _shown_size(width: int, height: int) -> tuple[int, int]:
    scale = min(1.0, _SIDE / math.sqrt(width * height), _WIDEST / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _joined(images: Sequence[Image.Image | None], problems: Sequence[str], cols: int) -> Image.Image:
    """A set of panels that are files of their own, in its layout. Panels may have any sizes, or be missing."""
    first = next(image for image in images if image is not None)
    rows = math.ceil(len(images) / cols)
    width, height = _shown_size(first.width * cols, first.height * rows)
    width, height = max(1, width // cols), max(1, height // rows)
    joined = Image.new("RGB", (cols * (width + _GAP) - _GAP, rows * (height + _GAP) - _GAP), "#808080")
    for place, (image, problem) in enumerate(zip(images, problems, strict=True)):
        row, col = divmod(place, cols)
        left, top = col * (width + _GAP), row * (height + _GAP)
        if image is None:
            panel = _empty_frame(width, height, problem or "missing")
        else:
            panel = ImageOps.contain(image, (width, height))
        joined.paste(panel, (left + (width - panel.width) // 2, top + (height - panel.height) // 2))
    return joined


def _empty_frame(width: int, height: int, text: str) -> Image.Image:
    """What stands in the place of a panel that is not there: crossed out, with what is wrong."""
    frame = Image.new("RGB", (width, height), "#e4e4e4")
    draw = ImageDraw.Draw(frame)
    draw.line((0, 0, width, height), fill="#b8b8b8")
    draw.line((0, height, width, 0), fill="#b8b8b8")
    draw.rectangle((0, 0, width - 1, height - 1), outline="#b00020", width=2)
    font = ImageFont.load_default(size=max(8, min(width // 7, 20)))
    draw.text((width / 2, height / 2), text, fill="#b00020", anchor="mm", font=font)
    return frame


def _portable(results: dict[str, Any], output_dir: Path) -> dict[str, Any]:
    """Results for `results.json`: readable elsewhere, and again here."""
    shown = public_results(results)
    folder = Path(os.path.abspath(output_dir))
    # Below the root everything is
    root = folder.parent if folder.parent != Path(folder.anchor) else folder

    def portable(path: str | Path | None) -> str | None:
        if path is None:
            return None
        found = next((one for one in (folder / path, Path(os.path.abspath(path))) if one.exists()), folder / path)
        found = Path(os.path.normpath(found))
        return Path(os.path.relpath(found, folder)).as_posix() if found.is_relative_to(root) else found.name

    for one in shown["sets"]:
        one["source"] = portable(one.get("source"))
        one["pictures"] = [[portable(path) for path in paths] for paths in one["pictures"]]
    return shown
