# SPDX-License-Identifier: Apache-2.0
"""
Plot sets before and after training, above each other, from the same noise.

As a script, for the front page: `python -m miniature.before_and_after --demo demo-output --output before_and_after.png`,
with the means of the three trainings of `benchmarks/miniature/miniature.json`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from paco_trl.data import split_grid
from paco_trl.image_benchmarks.paired_results import SampleKey

from .edit_world import EditTruth
from .truth import SetTruth, judge_set, read_panels
from .world import PromptSpec


Truth = SetTruth | EditTruth
SHOWN = 6
_TEXT_WIDTH = 1.12  # of the width of a set
MEANS = Path(__file__).parents[2] / "benchmarks" / "miniature" / "miniature.json"
RED, GREEN = "#d0201b", "#1a7f37"


def choose_sets(
    before: Mapping[SampleKey, Truth], after: Mapping[SampleKey, Truth], count: int = SHOWN
) -> list[SampleKey]:
    """Return sets at even ranks of those of the first noise whose first truth changed, largest gain first."""
    first = sorted(unit for unit in before if unit[1] == 0)
    gains = {unit: after[unit][0] - before[unit][0] for unit in first}
    changed = sorted((unit for unit in first if gains[unit]), key=lambda unit: -gains[unit]) or first
    count = min(count, len(changed))
    return [changed[(2 * place + 1) * len(changed) // (2 * count)] for place in range(count)]


def plot_before_and_after(
    folder: Path,
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    truths: Sequence[Mapping[SampleKey, SetTruth]],
    means: Any = None,
    columns: int = SHOWN,
) -> None:
    """Plot chosen sets with red frames on wrong figures, next to the means, or in `columns` for a narrow screen."""
    chosen, column_by_id = choose_sets(*truths), {row["id"]: row for row in rows}
    columns, first = min(columns, len(chosen)), int(means is not None)
    lines = -(-len(chosen) // columns)
    figure = Figure(figsize=(1.826 * (columns + first * _TEXT_WIDTH), 5.1 * lines), layout="constrained")
    widths = [_TEXT_WIDTH] * first + [1] * columns
    axes = figure.subplots(2 * lines, len(widths), squeeze=False, width_ratios=widths)
    for axis in axes[:, first:].flat:
        remove_frame(axis)
    for side, (name, truth) in enumerate(zip(("before", "after"), truths, strict=True)):
        if means is not None:
            shown = {key: means[key][name]["mean"] for key in ("consistency", "prompt_following")}
            _show_means(axes[side, 0], name, shown)
        for number, unit in enumerate(chosen):
            line, column = divmod(number, columns)
            axis, row = axes[2 * line + side, first + column], column_by_id[unit[0]]
            _show_set(axis, Image.open(folder / name / "images" / unit[0] / f"{unit[1]}.png").convert("RGB"), row)
            pairs = row["rows"] * row["cols"] * (row["rows"] * row["cols"] - 1) // 2
            same = round(truth[unit].consistency * pairs)
            color = GREEN if same == pairs else "black"
            axis.set_xlabel(f"{same} of {pairs} pairs alike", fontsize=12, color=color, labelpad=5)
            if side == 0:
                spec = PromptSpec(*row["specs"][0])
                axis.set_title(f"{spec.color} {spec.shape}\nwith a {spec.accessory}", fontsize=12, pad=7)
            if column == first == 0:
                axis.set_ylabel(name, fontsize=12)
    figure.savefig(path, dpi=120 if first else 200)


def remove_frame(axis: Any) -> None:
    """Remove ticks and spines."""
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


def _show_means(axis: Any, name: str, means: Mapping[str, float]) -> None:
    axis.axis("off")
    axis.set_box_aspect(1 / _TEXT_WIDTH)
    color = "black" if name == "before" else GREEN
    lines = [
        (0.99, f"{name} training", 13, "normal", "black"),
        (0.80, f"{means['consistency']:.0%}", 34, "bold", color),
        (0.53, "of the pairs of panels\nshow the same figure", 10.5, "normal", "black"),
        (0.29, f"{means['prompt_following']:.0%}", 20, "bold", color),
        (0.11, "of what prompts name\nis shown", 10.5, "normal", "black"),
    ]
    for height, text, size, weight, shade in lines:
        axis.text(0, height, text, fontsize=size, fontweight=weight, color=shade, va="top", transform=axis.transAxes)


def _show_set(axis: Any, image: Image.Image, row: Mapping[str, Any]) -> None:
    axis.imshow(image, interpolation="nearest")
    specs = [PromptSpec(*spec) for spec in row["specs"]]
    side = image.width // row["cols"]
    for place, panel in enumerate(read_panels(split_grid(image, row["rows"], row["cols"]))):
        if panel is None or panel.identity != specs[place][:3]:
            corner = (place % row["cols"] * side + 1.5, place // row["cols"] * side + 1.5)
            axis.add_patch(Rectangle(corner, side - 4, side - 4, fill=False, edgecolor=RED, linewidth=3.5))


def _read_truths(folder: Path, rows: Sequence[Mapping[str, Any]]) -> dict[SampleKey, SetTruth]:
    truths = {}
    for row in rows:
        for path in sorted((folder / row["id"]).glob("*.png")):
            panels = read_panels(split_grid(Image.open(path).convert("RGB"), row["rows"], row["cols"]))
            truths[row["id"], int(path.stem)] = judge_set(panels, [PromptSpec(*spec) for spec in row["specs"]])
    return truths


def main() -> None:
    """Plot the finished demo of a directory."""
    from .run import Miniature, read_settings

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--demo", type=Path, required=True, help="Output directory of a finished demo.")
    parser.add_argument("--output", type=Path, required=True, help="PNG file.")
    arguments = parser.parse_args()
    demo = Miniature(arguments.demo, read_settings(arguments.demo))
    rows, folder = list(demo.prompts("test").with_format(None)), demo.step_folder("evaluation")
    truths = [_read_truths(folder / name / "images", rows) for name in ("before", "after")]
    means = json.loads(MEANS.read_text(encoding="utf-8"))["results"]["resolution"]["0.5x"]
    plot_before_and_after(folder, arguments.output, rows, truths, means)


if __name__ == "__main__":
    main()
