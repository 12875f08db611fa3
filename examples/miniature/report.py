# SPDX-License-Identifier: Apache-2.0
"""Step 5: write the report, and the summary that the command prints at the end."""

import base64
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from paco_trl.hub.card_data import load_card_data
from paco_trl.hub.cards import render_card, save_card
from paco_trl.hub.files import PIPELINE_ADAPTER
from paco_trl.hub.pushing import select_files
from paco_trl.utils.files import write_atomically
from paco_trl.utils.names import relative_name

from .models import toy_flux_path
from .settings import ADAPTER, MiniatureSettings


JUDGES = {"trained": "PaCo-Reward", "untrained": "the same model, untrained", "clip_i": "CLIP-I"}


def write_report(
    folder: Path, steps: dict[str, Path], results: dict[str, dict[str, Any]], settings: MiniatureSettings
) -> Path:
    """Write the self-contained `report.html`, and copies of its figures and of the adapter next to it."""
    generator = steps["generator"] / ADAPTER
    sheets = sorted((generator / "contact_sheets" / "card").glob("round_*.png"))
    pictures = {
        "sets": steps["dataset"] / "grids" / "sample.png",
        "calibration": max((steps["judge"] / "evaluation").glob("*-calibration-*.png")),
        "curves": generator / "curves.png",
        "first_round": sheets[0],
        "last_round": sheets[-1],
        "before_and_after": steps["evaluation"] / "before_and_after.png",
        "before_and_after_narrow": steps["evaluation"] / "before_and_after_narrow.png",
    }
    for name in ("before_and_after", "curves", "calibration"):
        shutil.copyfile(pictures[name], folder / f"{name}.png")
    copy_adapter(generator, folder / ADAPTER)
    values = {"results": results, "settings": settings, "judges": JUDGES, "code": "\n".join(adapter_code(folder))}
    return render_report(folder, "report.html.jinja", pictures, **values)


def copy_adapter(trained: Path, adapter: Path) -> None:
    """Copy what is published of an adapter, with a card that names its new directory."""
    for name, path in select_files(trained, PIPELINE_ADAPTER).items():
        (adapter / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, adapter / name)
    save_card(replace(load_card_data(adapter), repo_id=relative_name(str(adapter))), adapter)


def render_report(folder: Path, template: str, pictures: dict[str, Path], **values: Any) -> Path:
    """Write a self-contained `report.html`."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"percent": "{:.1%}".format, "interval": interval}
    encoded = {name: base64.b64encode(path.read_bytes()).decode() for name, path in pictures.items()}
    pages = {name: f"data:image/png;base64,{text}" for name, text in encoded.items()}
    path = folder / "report.html"
    write_atomically(path, environment.get_template(template).render(pictures=pages, **values))
    return path


def adapter_code(folder: Path) -> tuple[str, str]:
    """Return the code of the adapter's card that loads it and that generates, with paths from the working directory."""
    card = load_card_data(folder / ADAPTER)
    text = str(render_card(replace(card, repo_id=os.path.relpath(folder / ADAPTER))))
    text = text.replace(f'"{card.base_model}"', f'"{os.path.relpath(toy_flux_path())}"')
    load, _, generate = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[:3]
    return load, generate


def loading_lines(folder: Path) -> list[str]:
    """Return lines that load the adapter, indented, with a heading."""
    load = adapter_code(folder)[0].splitlines()
    return [
        "",
        "These lines load the adapter; its card has those that generate:",
        "",
        *(f"    {line}" for line in load),
    ]


def summary(folder: Path, results: dict[str, dict[str, Any]]) -> list[str]:
    """Summarize the results in five lines."""
    dataset, judge, truth = results["dataset"], results["judge"], results["evaluation"]
    accuracy = {name: judge[name]["metrics"]["accuracy"]["mean"] for name in JUDGES}
    consistency, following = truth["consistency"], truth["prompt_following"]
    return [
        f"Dataset: {dataset['pairs']['train']} pairs from {dataset['sets']} sets, labeled by how they were generated: "
        f"{dataset['true_share']['Yes']:.0%} of the Yes and {1 - dataset['true_share']['No']:.0%} of the No are true.",
        f"Judge: ranks {accuracy['trained']:.1%} of the candidates of held-out prompts correctly; untrained "
        f"{accuracy['untrained']:.1%}, CLIP-I {accuracy['clip_i']:.1%}.",
        f"True consistency at full resolution: {consistency['before']['mean']:.2f} before, "
        f"{consistency['after']['mean']:.2f} after ({interval(consistency['difference'])}).",
        f"True prompt following: {following['before']['mean']:.2f} before, {following['after']['mean']:.2f} after "
        f"({interval(following['difference'])}).",
        f"See {folder / 'report.html'}; the adapter and its card are in {folder / ADAPTER}.",
    ]


def interval(cell: dict[str, Any]) -> str:
    """Format a difference with its interval."""
    low, high = cell["interval"]
    text = f"{cell['mean']:+.3f}"
    return text if low is None else f"{text}, 95% interval {low:+.3f} to {high:+.3f}"
