# SPDX-License-Identifier: Apache-2.0
"""Write what a run logged as a table, and plot rewards, clipping and time over the optimizer steps."""

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from numbers import Real
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..utils.files import write_atomically
from .figures import new_figure, png_bytes


# Not accelerate's logger, which raises where no accelerate state exists: a warning must never stop a run
logger = logging.getLogger(__name__)

_MAX_LABEL = 30  # letters that fit next to the panels
_COLORS = ("#1f77b4", "#e8710a", "#2a9d3a", "#8e5fc4", "#c2185b", "#6d4c41", "#00838f", "#9e9d24")
_EVAL_COLORS = ("0.1", "#d62728", "#7b1fa2", "#00695c", "#ad6800")
_PHASES = ("rollout", "reward", "train")  # the first round encodes all prompts, which would flatten the rest
_CLIPPED = {"region": "both", "low": "below the range", "high": "above the range"}
_DEVIATIONS = {"": "after an update", "_on_policy": "on policy"}


def history_table(log_history: list[dict]) -> pd.DataFrame:
    """Merge the logs of each step into a row: the last value counts, `None` becomes NaN, texts are left out."""
    rows: dict[int, dict] = {}
    for entry in log_history:
        numbers = {name: value for name, value in entry.items() if value is None or isinstance(value, Real)}
        rows.setdefault(entry["step"], {}).update(numbers)
    table = pd.DataFrame([rows[step] for step in sorted(rows)]).astype(float).astype({"step": int})
    return table[[*(name for name in ("step", "epoch") if name in table), *sorted(set(table) - {"step", "epoch"})]]


def plot_curves(table: pd.DataFrame, path: str | Path) -> bool:
    """Plot the metrics of a run in panels, one below the other. Without any, return `False` and write nothing."""
    panels = list(_panels(table))
    if not panels:
        return False
    # On a model card, about 700 pixels wide, letters of a wider figure are too small
    figure = new_figure(7.3, 0.5 + 1.7 * len(panels), dpi=140, layout="constrained")
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, plot) in zip(all_axes, panels, strict=True):
        axes.set_title(title, fontsize=8.5, loc="left", pad=4)
        plot(axes)
        axes.legend(loc="upper left", bbox_to_anchor=(1.005, 1.03), fontsize=7.5, frameon=False, labelspacing=0.35)
        axes.tick_params(labelsize=7.5)
        axes.grid(axis="y", color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    all_axes[-1].set_xlabel("optimizer step", fontsize=8.5)
    write_atomically(path, png_bytes(figure))
    return True


class CurvesCallback(TrainerCallback):
    """
    Write `curves.csv` and `curves.png` (`plot`) at checkpoints and at the end.

    Checkpoints hold `state.log_history`, so that a resumed run plots the same curves as an uninterrupted one.
    """

    def __init__(self, plot: bool = True):
        self._plot = plot

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        # Before the first step, the curves of an earlier run would be overwritten
        if not state.is_world_process_zero or not any(entry["step"] for entry in state.log_history):
            return
        table = history_table(state.log_history)
        folder = Path(args.output_dir)
        text = table.to_csv(index=False, lineterminator="\n")
        _unless_full(lambda: write_atomically(folder / "curves.csv", text, durable=False))
        if self._plot:
            _unless_full(lambda: plot_curves(table, folder / "curves.png"))

    on_train_end = on_save


def _unless_full(write: Callable[[], object]) -> None:
    # A full disk must not stop a run of weeks for its curves
    try:
        write()
    except OSError as error:
        logger.warning(f"The curves could not be written: {error}. Training continues. Free some space.")


def _panels(table: pd.DataFrame) -> Iterator[tuple[str, Callable[[Axes], None]]]:
    """Yield the title of each panel, and the function that plots it."""
    means = [match for name in table if (match := re.fullmatch(r"(?:(eval(?:_.+?)?)_)?rewards/(.+)/mean", name))]
    prefixes = sorted({match[1] for match in means if match[1]})
    colors = dict(zip(sorted({match[2] for match in means}), cycle(_COLORS), strict=False))
    for reward, color in colors.items():  # a panel each, because their ranges differ, some by a factor of a hundred
        yield f"{_label(reward).strip()}: mean", partial(_plot_reward, table, reward, color, prefixes)
    deviations = [match for name in table if (match := re.fullmatch(r"ratio_deviation(_on_policy|)/step_(\d+)", name))]
    groups = {
        "Spread of each reward over a round: standard deviation / mean": {
            f"rewards/{name}/h": _label(name) for name in colors
        },
        "Clip fraction": {f"clip_ratio/{part}_mean": text for part, text in _CLIPPED.items()},
        "|ratio - 1| by denoising step, before the first update of a round (on policy) and after": {
            match[0]: f"step {match[2]}, {_DEVIATIONS[match[1]]}" for match in deviations
        },
        "Seconds to generate and score a round, and to train an optimizer step": {
            f"time/{phase}": phase for phase in _PHASES
        },
    }
    for title, labels in groups.items():
        if labels.keys() & set(table):
            lines = {
                name: (label, color) for (name, label), color in zip(labels.items(), cycle(_COLORS), strict=False)
            }
            yield title, partial(_plot_lines, table, lines)


def _plot_lines(table: pd.DataFrame, lines: dict[str, tuple[str, str]], axes: Axes) -> None:
    # Lines may coincide: both are seen where the second is dashed
    for style, (name, (label, color)) in zip(cycle(("-", "--", ":")), lines.items(), strict=False):
        if name in table and (known := table[name].notna()).any():
            size = 4 if len(table) <= 50 else 2
            axes.plot(
                table["step"][known], table[name][known], marker=".", markersize=size, color=color, label=label,
                linewidth=1.3,
                linestyle=style,
            )  # fmt: skip


def _plot_reward(table: pd.DataFrame, reward: str, color: str, prefixes: list[str], axes: Axes) -> None:
    _plot_lines(table, {f"rewards/{reward}/mean": ("training", color)}, axes)
    for prefix, eval_color in zip(prefixes, cycle(_EVAL_COLORS), strict=False):
        columns = [f"{prefix}_rewards/{reward}/{metric}" for metric in ("mean", "ci_low", "ci_high", "baseline")]
        evaluations = table.reindex(columns=["step", *columns]).dropna(subset=columns[:1])
        if evaluations.empty:
            continue
        name = "" if prefix == "eval" else f" {prefix.removeprefix('eval_')}"
        steps, mean, low, high, baseline = (evaluations[column] for column in evaluations)
        axes.plot(steps, mean, "o", color=eval_color, markersize=4, zorder=4, label=_label(f"evaluation{name}"))
        axes.vlines(steps, low, high, color=eval_color, linewidth=1.1, zorder=3)
        for last in baseline.dropna()[-1:]:
            label = _label(f"baseline{name}")
            axes.axhline(last, color=eval_color, linestyle="--", linewidth=0.9, zorder=2, label=label)


def _label(name: str) -> str:
    """Escape a name for matplotlib, and cut a long one in the middle."""
    if len(name) > _MAX_LABEL:
        name = f"{name[: _MAX_LABEL // 2]}…{name[1 - _MAX_LABEL // 2 :]}"
    name = name.replace("$", r"\$")  # two dollar signs would enclose a formula
    return f" {name}" if name.startswith("_") else name  # matplotlib 3.9 leaves such labels out
