# SPDX-License-Identifier: Apache-2.0
"""Plot the calibration of a judge, and the pairs with its largest errors."""

import io

import numpy as np
from PIL import Image
from torch.utils.data import Dataset
from transformers import ProcessorMixin

from ..data.pairs import content_text
from ..evaluation import calibration_bins
from ..utils.vision_language import load_image, patch_size_of
from .contact_sheet import CARD_LETTER, CARD_WIDTH, render_sheet, thumbnail
from .figures import new_figure, png_bytes


MAX_PAIRS = 8  # pairs on a sheet
_CONSISTENT, _INCONSISTENT = "#1f77b4", "#d65f5f"


def plot_calibration(p_yes: np.ndarray, is_yes: np.ndarray, title: str, ece: float) -> Image.Image:
    """Plot the fraction of consistent pairs over P(Yes), and a histogram of the scores."""
    bins = calibration_bins(p_yes.tolist(), is_yes.tolist())
    figure = new_figure(4.6, 5.4, layout="constrained")
    reliability, histogram = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    reliability.plot([0, 1], [0, 1], color="0.7", linestyle="--", linewidth=1, label="calibrated")
    filled = [index for index, count in enumerate(bins["count"]) if count > 0]
    points = ([bins[name][index] for index in filled] for name in ("mean_score", "share_consistent"))
    reliability.plot(*points, "o-", color="0.15", markersize=4, label=f"judge, ECE {ece:.3f}")
    reliability.set_ylabel("fraction of consistent pairs")
    reliability.set_ylim(-0.03, 1.03)
    reliability.legend(loc="best", fontsize=8, frameon=False)
    reliability.set_title(title, fontsize=9, loc="left")
    edges = np.linspace(0, 1, 21)
    histogram.hist(p_yes[is_yes == 1], bins=edges, color=_CONSISTENT, alpha=0.6, label="consistent")
    histogram.hist(p_yes[is_yes == 0], bins=edges, color=_INCONSISTENT, alpha=0.6, label="inconsistent")
    histogram.margins(y=0.4)  # room for the legend
    histogram.set_xlabel("P(Yes)")
    histogram.set_ylabel("pairs")
    histogram.set_xlim(-0.02, 1.02)
    histogram.legend(loc="upper center", fontsize=7, frameon=False, ncols=2)
    with Image.open(io.BytesIO(png_bytes(figure))) as image:
        return image.convert("RGB")


def plot_wrong_pairs(
    rows: np.ndarray, p_yes: np.ndarray, is_yes: np.ndarray, dataset: Dataset, processor: ProcessorMixin, title: str
) -> Image.Image:
    """Show the pairs of a dataset with the largest errors; `rows`, `p_yes` and `is_yes` are of shape `(N,)`."""
    num_wrong = int(((p_yes > 0.5) != (is_yes == 1)).sum())
    shown = []
    for index in np.argsort(-np.abs(p_yes - is_yes), kind="stable")[:MAX_PAIRS]:
        row = dataset[int(rows[index])]
        where = f"row {rows[index]}"
        images = [load_image(image, patch_size_of(processor), f"An image of {where}") for image in row["images"]]
        says = "Yes" if p_yes[index] > 0.5 else "No"
        label = "Yes" if is_yes[index] == 1 else "No"
        verdict = f"{where}: says {says}, P(Yes) = {p_yes[index]:.3f}; labeled {label}"
        question = content_text(row["prompt"][-1]["content"]) or ""
        shown.append((f"{verdict}\n{question}", [[(thumbnail(image), "") for image in images]]))
    heading = f"{title}: pairs with the largest errors; {num_wrong} of {len(rows)} are decided wrongly"
    return render_sheet(shown, heading, letter=CARD_LETTER, width=CARD_WIDTH // 2)
