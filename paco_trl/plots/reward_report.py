# SPDX-License-Identifier: Apache-2.0
"""Plot the calibration of a judge, and the pairs with its largest errors."""

import textwrap

import numpy as np
from PIL import Image
from torch.utils.data import Dataset
from transformers import ProcessorMixin

from ..data.pairs import content_text
from ..evaluation import calibration_bins
from ..utils.images import load_image, patch_size_of
from .contact_sheet import thumbnail
from .figures import new_figure, open_png, png_bytes


MAX_PAIRS = 8  # on a sheet, in two columns
_CONSISTENT, _INCONSISTENT = "#1f77b4", "#d65f5f"


def plot_calibration(p_yes: np.ndarray, is_yes: np.ndarray, title: str, ece: float) -> Image.Image:
    """Plot the fraction of consistent pairs over P(Yes), and a histogram of the scores."""
    bins = calibration_bins(p_yes.tolist(), is_yes.tolist())
    figure = new_figure(4.6, 5.4)
    reliability, histogram = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1], "hspace": 0.08})
    figure.subplots_adjust(left=0.14, right=0.97, bottom=0.09, top=0.94)
    reliability.plot([0, 1], [0, 1], color="0.7", linestyle="--", linewidth=1, label="calibrated")
    filled = [index for index, count in enumerate(bins["count"]) if count > 0]
    points = ([bins[name][index] for index in filled] for name in ("mean_score", "share_consistent"))
    reliability.plot(*points, "o-", color="0.15", markersize=4, label=f"judge, ECE {ece:.3f}")
    reliability.set_ylabel("fraction of consistent pairs")
    reliability.set_ylim(-0.03, 1.03)
    reliability.legend(loc="upper left", fontsize=8, frameon=False)
    reliability.set_title(title, fontsize=9, loc="left")
    edges = np.linspace(0, 1, 21)
    histogram.hist(p_yes[is_yes == 1], bins=edges, color=_CONSISTENT, alpha=0.6, label="consistent")
    histogram.hist(p_yes[is_yes == 0], bins=edges, color=_INCONSISTENT, alpha=0.6, label="inconsistent")
    histogram.margins(y=0.4)  # room for the legend
    histogram.set_xlabel("P(Yes)")
    histogram.set_ylabel("pairs")
    histogram.set_xlim(-0.02, 1.02)
    histogram.legend(loc="upper center", fontsize=7, frameon=False, ncols=2)
    return open_png(png_bytes(figure))


def plot_wrong_pairs(
    rows: np.ndarray, p_yes: np.ndarray, is_yes: np.ndarray, dataset: Dataset, processor: ProcessorMixin, title: str
) -> Image.Image:
    """Show the pairs of a dataset with the largest errors; `rows`, `p_yes` and `is_yes` are of shape `(N,)`."""
    errors = np.abs(p_yes - is_yes)
    worst = np.argsort(-errors, kind="stable")[:MAX_PAIRS]
    num_wrong = int(((p_yes > 0.5) != (is_yes == 1)).sum())
    lines = -(-len(worst) // 2)
    figure = new_figure(6.2, 2.35 * lines + 0.4, dpi=160)  # legible on a model card
    height = figure.get_figheight()
    heading = f"{title}: pairs with the largest errors; {num_wrong} of {len(rows)} are decided wrongly"
    figure.suptitle(heading, fontsize=9, x=0.01, ha="left", y=1 - 0.08 / height, va="top")
    edges = {"left": 0.01, "right": 0.99, "bottom": 0.01, "top": 1 - 0.4 / height}
    grid = figure.add_gridspec(lines, 2, wspace=0.06, hspace=0.02, **edges)
    for place, index in enumerate(worst):
        row = dataset[int(rows[index])]
        cell = grid[place // 2, place % 2].subgridspec(2, 2, height_ratios=[2.0, 0.8], wspace=0.03, hspace=0.02)
        for side, image in enumerate(row["images"]):
            axes = figure.add_subplot(cell[0, side])
            opened = load_image(image, patch_size_of(processor), f"Image {side + 1} of row {rows[index]}")
            opened = thumbnail(opened)
            axes.imshow(opened, interpolation="nearest" if opened.width < 128 else "antialiased")
            axes.set_axis_off()
        says, label = ("Yes" if p_yes[index] > 0.5 else "No"), ("Yes" if is_yes[index] == 1 else "No")
        caption = figure.add_subplot(cell[1, :])
        caption.set_axis_off()
        caption.text(
            0.0, 1.0, f"row {rows[index]}: says {says}, P(Yes) = {p_yes[index]:.3f}; labeled {label}", fontsize=7.5,
            color="black" if says == label else _INCONSISTENT, weight="bold", va="top",
        )  # fmt: skip
        question = textwrap.shorten(content_text(row["prompt"][-1]["content"]) or "", 230, placeholder=" …")
        question = textwrap.fill(question, 64).replace("$", r"\$")  # two would enclose a formula
        caption.text(0.0, 0.74, question, fontsize=6.5, color="0.3", va="top")
    return open_png(png_bytes(figure))
