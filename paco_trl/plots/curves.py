# SPDX-License-Identifier: Apache-2.0
"""Curves of a run: what was logged as a table, and rewards, clipping and time over the optimizer steps as a picture."""

import csv
import io
import logging
import math
import re
import time
from collections.abc import Callable
from functools import partial
from numbers import Real
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..utils.files import write_atomically
from .figures import new_figure, png_bytes


# Not accelerate's logger, which raises where no accelerate state exists: a warning must never be what stops a run
logger = logging.getLogger(__name__)

# A drawing waits until this many times the duration of the last one has passed: less than 5% of a run's time
DRAWING_PAUSE = 20

# Seconds from the beginning of a training to the first drawing
FIRST_DRAWING = 60

# With more points than this a line is noise: its running mean is drawn over it
MANY_POINTS = 200

# Longer labels would leave the room beside the panels; the middle is cut, because names differ at their ends
MAX_LABEL = 30

_COLORS = ("#1f77b4", "#e8710a", "#2a9d3a", "#8e5fc4", "#c2185b", "#6d4c41", "#00838f", "#9e9d24")
_EVAL_COLORS = ("0.1", "#d62728", "#7b1fa2", "#00695c", "#ad6800")
_EVAL_MARKERS = ("o", "s", "D", "^", "v")
_PHASES = {"encode": "#b0bec5", "rollout": "#1f77b4", "reward": "#e8710a", "train": "#2a9d3a"}

# Label and color of each part of the clip fraction, and line style and label of each kind of ratio deviation
_CLIPPED = {
    "region": ("both", "0.25"), "low": ("below the range", "#1f77b4"), "high": ("above the range", "#e8710a")
}  # fmt: skip
_DEVIATIONS = {"ratio_deviation": ("-", "after an update"), "ratio_deviation_on_policy": (":", "on policy")}

# Inches
_PANEL_HEIGHT, _LEGEND_LINE, _GAP, _WIDTH = 1.35, 0.155, 0.42, 10.0


def history_rows(log_history: list[dict]) -> list[dict[str, float]]:
    """Put what was logged at a step into one row: a later value counts, `None` becomes NaN, texts are left out."""
    rows = {}
    for entry in log_history:
        row = rows.setdefault(entry["step"], {"step": entry["step"]})
        for name, value in entry.items():
            if value is None:
                row[name] = math.nan
            elif isinstance(value, Real):
                row[name] = value
    return [rows[step] for step in sorted(rows)]


def write_curves_csv(rows: list[dict[str, float]], path: str | Path) -> None:
    """Write rows as a table: `step`, `epoch`, then metrics by name; a metric without a value is an empty cell."""
    columns = ["step", "epoch", *sorted(set().union(*rows) - {"step", "epoch"})]
    table = io.StringIO()
    writer = csv.DictWriter(table, columns, lineterminator="\n")
    writer.writeheader()
    # A NaN is the only value that differs from itself
    writer.writerows({name: value for name, value in row.items() if value == value} for row in rows)
    write_atomically(path, table.getvalue(), durable=False)


def draw_curves(rows: list[dict[str, float]], path: str | Path, steps_per_round: int = 1) -> bool:
    """
    Draw the curves of a run, one panel below the other, and say whether there was anything to draw.

    What was not logged has no panel. Each optimizer step of a round repeats the round's times for encoding, drawing and
    scoring, of which it gets its share.
    """
    panels = _panels(rows, steps_per_round)
    if not panels:
        return False
    figure = new_figure(_WIDTH, 1, dpi=100)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    heights = []
    for axes, (title, draw) in zip(all_axes, panels, strict=True):
        axes.set_title(title, fontsize=8.5, loc="left", pad=4)
        handles = draw(axes, rows)
        axes.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.03), fontsize=7.5, frameon=False,
            borderaxespad=0, labelspacing=0.35,
        )  # fmt: skip
        axes.tick_params(labelsize=7.5)
        axes.grid(axis="y", color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        # A panel is as high as its legend, so that legends never run into one another
        heights.append(max(_PANEL_HEIGHT, _LEGEND_LINE * len(handles)))
    steps = [row["step"] for row in rows]
    margin = max(0.5, 0.01 * (steps[-1] - steps[0]))
    all_axes[-1].set_xlim(steps[0] - margin, steps[-1] + margin)
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    means = " (thick lines: running means over a sixtieth of the run)" if len(rows) > MANY_POINTS else ""
    all_axes[-1].set_xlabel(f"optimizer step{means}", fontsize=8.5)

    top, bottom = 0.3, 0.45
    height = sum(heights) + _GAP * (len(heights) - 1) + top + bottom
    figure.set_size_inches(_WIDTH, height)
    upper = height - top
    for axes, panel_height in zip(all_axes, heights, strict=True):
        axes.set_position((0.07, (upper - panel_height) / height, 0.68, panel_height / height))
        upper -= panel_height + _GAP
    write_atomically(path, png_bytes(figure))
    return True


class CurvesCallback(TrainerCallback):
    """
    Keeps the curves of a run in its output folder: `curves.csv`, written at each log, and `curves.png` (`plot`).

    Both follow from `state.log_history`, which checkpoints hold: after a resume they are those of an uninterrupted
    run. The picture is drawn when a checkpoint is saved, when training ends, and at a log if `DRAWING_PAUSE` times the
    duration of the last drawing has passed (`FIRST_DRAWING` seconds before the first one). Nothing is written before
    the first optimizer step is logged, so that a mere evaluation does not replace the curves of the run in the folder.

    A file that cannot be written is warned of once, and tried again at the next log; training goes on.
    """

    def __init__(self, plot: bool = True):
        self._plot = plot
        self._not_before = -math.inf  # of the next drawing
        self._failed = set()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        # A short run is drawn once, at its end
        self._not_before = time.monotonic() + FIRST_DRAWING

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        rows = self._rows(state)
        if not rows:
            return
        path = Path(args.output_dir) / "curves.csv"
        self._write(path, lambda: write_curves_csv(rows, path))
        if time.monotonic() >= self._not_before:
            self._draw(args, rows)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self._draw(args, self._rows(state))

    on_train_end = on_save

    def _rows(self, state: TrainerState) -> list[dict[str, float]]:
        """Give the rows to write: none on other processes, and none before the first optimizer step."""
        rows = history_rows(state.log_history) if state.is_world_process_zero else []
        return rows if rows and rows[-1]["step"] > 0 else []

    def _draw(self, args: TrainingArguments, rows: list[dict[str, float]]) -> None:
        if not rows or not self._plot:
            return
        # Round and step are notions of `PaCoGRPOConfig`; another trainer's arguments have no rounds
        steps_per_round = getattr(args, "optimizer_steps_per_generation", 1) * getattr(args, "num_iterations", 1)
        path = Path(args.output_dir) / "curves.png"
        started = time.monotonic()
        self._write(path, lambda: draw_curves(rows, path, steps_per_round))
        ended = time.monotonic()
        self._not_before = ended + DRAWING_PAUSE * (ended - started)

    def _write(self, path: Path, write: Callable[[], object]) -> None:
        # Curves are not worth a run of weeks: a full disk is said, and does not stop it
        try:
            write()
        except OSError as error:
            if path not in self._failed:
                self._failed.add(path)
                logger.warning(
                    f"The curves of the run could not be written to {path}: {error}. Training goes on, and each further "
                    "log tries again without another warning. Make room, or make the folder writable."
                )


# ---- Panels: each has a title, and draws into its axes and gives the handles of its legend ----


def _panels(rows: list[dict[str, float]], steps_per_round: int) -> list[tuple[str, Callable[[Axes, list], list]]]:
    names = set().union(*rows)
    trained = [match[1] for name in sorted(names) if (match := re.fullmatch(r"rewards/(.+)/mean", name))]
    evaluated = [match for name in names if (match := re.fullmatch(r"(eval(?:_.+?)?)_rewards/(.+)/mean", name))]
    rewards = sorted({*trained, *(match[2] for match in evaluated)})
    prefixes = sorted({match[1] for match in evaluated})
    colors = {reward: _COLORS[index % len(_COLORS)] for index, reward in enumerate(rewards)}

    def colors_of(metric: str) -> dict[str, str]:
        return {reward: color for reward, color in colors.items() if f"rewards/{reward}/{metric}" in names}

    panels = []
    for reward, color in colors.items():
        # A panel for each, because the ranges of rewards differ, some by a factor of a hundred
        draw = partial(_draw_reward, reward=reward, color=color, prefixes=prefixes)
        panels.append((f"{_label(reward).strip()}: mean", draw))
    if varied := colors_of("h"):
        panels.append(("Spread of each reward over a round: std / mean (h)", partial(_draw_variation, colors=varied)))
    if len(shared := colors_of("share")) > 1:  # a single reward is all there is
        title = "Share of each reward in what sets the images of a group apart (1: it alone decides)"
        panels.append((title, partial(_draw_shares, colors=shared)))
    if compared := colors_of("ratio"):
        # The run's first reward is the one that has no ratio to itself
        others = [reward for reward in trained if reward not in compared]
        first = _label(others[0]).strip() if len(others) == 1 else "the first reward"
        panels.append((f"Ratio of mean rewards, to {first}", partial(_draw_rewards, metric="ratio", colors=compared)))
    if names & {f"clip_ratio/{part}_mean" for part in _CLIPPED}:
        panels.append(("Clip fraction", _draw_clipping))
    found = (re.fullmatch(r"(ratio_deviation(?:_on_policy)?)/step_(\d+)", name) for name in names)
    if deviations := sorted((match[1], int(match[2])) for match in found if match):
        title = "|ratio - 1| by denoising step, before the first update of a round (on policy) and after"
        panels.append((title, partial(_draw_deviations, deviations=deviations)))
    if phases := [phase for phase in _PHASES if f"time/{phase}" in names]:
        share = " (its share of a round's encoding, drawing and scoring)" if steps_per_round > 1 else ""
        draw = partial(_draw_time, phases=phases, steps_per_round=steps_per_round)
        panels.append((f"Seconds of an optimizer step{share}", draw))
    return panels


def _draw_reward(axes: Axes, rows: list[dict], reward: str, color: str, prefixes: list[str]) -> list:
    handles = _line(axes, *_series(rows, f"rewards/{reward}/mean", "rewards/"), color, "training")
    for index, prefix in enumerate(prefixes):
        group = f"{prefix}_rewards/"
        (steps, means), (_, low), (_, high), (_, baselines) = (
            _series(rows, f"{group}{reward}/{metric}", group) for metric in ("mean", "ci_low", "ci_high", "baseline")
        )
        if not np.isfinite(means).any():
            continue
        of = "" if prefix == "eval" else f" {prefix.removeprefix('eval_')}"
        color, marker = _EVAL_COLORS[index % len(_EVAL_COLORS)], _EVAL_MARKERS[index % len(_EVAL_MARKERS)]
        label = _label(f"evaluation{of}")
        handles += axes.plot(steps, means, marker, color=color, markersize=4, zorder=4, label=label)
        axes.vlines(steps, low, high, color=color, linewidth=1.1, zorder=3)
        baselines = baselines[np.isfinite(baselines)]
        if len(baselines):
            style = {"color": color, "linestyle": "--", "linewidth": 0.9, "zorder": 2}
            handles.append(axes.axhline(baselines[-1], label=_label(f"baseline{of}"), **style))
    return handles


def _draw_rewards(axes: Axes, rows: list[dict], metric: str, colors: dict[str, str]) -> list:
    handles = []
    for reward, color in colors.items():
        handles += _line(axes, *_series(rows, f"rewards/{reward}/{metric}", "rewards/"), color, _label(reward))
    return handles


def _draw_variation(axes: Axes, rows: list[dict], colors: dict[str, str]) -> list:
    handles = _draw_rewards(axes, rows, "h", colors)
    highest = axes.dataLim.y1  # before the strips, which have other coordinates
    # One strip for each reward above the curves: markers on the lines would hide them in a long run
    height = min(0.08, 0.5 / len(colors))
    strips = 0
    for reward, color in colors.items():
        steps, tamed = _series(rows, f"rewards/{reward}/tamed", "rewards/")
        tamed = np.nan_to_num(tamed) > 0
        if tamed.any():
            top = 1 - strips * height
            axes.stairs(
                np.where(tamed, top, np.nan), _edges(steps), baseline=top - 0.7 * height, fill=True, color=color,
                transform=axes.get_xaxis_transform(), linewidth=0,
            )  # fmt: skip
            strips += 1
    if strips:
        handles.append(Patch(color="0.6", label="tamed (bar above)"))
    axes.set_ylim(0, highest / (0.95 - strips * height) if highest > 0 else 1)
    return handles


def _draw_shares(axes: Axes, rows: list[dict], colors: dict[str, str]) -> list:
    series = [_series(rows, f"rewards/{reward}/share", "rewards/") for reward in colors]
    areas = [(_label(reward), color) for reward, color in colors.items()]
    handles, _ = _stack(axes, series[0][0], [shares for _, shares in series], areas)
    axes.set_ylim(0, 1)
    return handles


def _draw_clipping(axes: Axes, rows: list[dict]) -> list:
    handles = []
    for part, (label, color) in _CLIPPED.items():
        steps, values = _series(rows, f"clip_ratio/{part}_mean", "clip_ratio/")
        # Nothing is clipped before the first update of a round: single values of a long run would fill the panel
        handles += _line(axes, steps, values, color, label, single_values=False)
    axes.set_ylim(bottom=0)
    return handles


def _draw_deviations(axes: Axes, rows: list[dict], deviations: list[tuple[str, int]]) -> list:
    steps_drawn = sorted({step for _, step in deviations})
    colors = {step: _COLORS[index % len(_COLORS)] for index, step in enumerate(steps_drawn)}
    small = math.inf
    for name, step in deviations:
        # Only the steps that have it: the two kinds alternate, and each is a line of its own
        steps, values = _series(rows, f"{name}/step_{step}", f"{name}/step_{step}")
        if (values > 0).any():
            small = min(small, np.quantile(values[values > 0], 0.01))  # not one outlier
        _line(axes, steps, values, colors[step], "", linestyle=_DEVIATIONS[name][0])
    if small < math.inf:
        # Zero, which float32 on one device gives on policy, has a place on this axis and none on a logarithmic one
        axes.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(small)), linscale=0.5)
    axes.set_ylim(bottom=0)
    handles = [Line2D([], [], color=colors[step], label=f"step {step}") for step in steps_drawn]
    kinds = [_DEVIATIONS[name] for name in sorted({name for name, _ in deviations})]
    return handles + [Line2D([], [], color="0.3", linestyle=linestyle, label=label) for linestyle, label in kinds]


def _draw_time(axes: Axes, rows: list[dict], phases: list[str], steps_per_round: int) -> list:
    values = []
    for phase in phases:
        steps, seconds = _series(rows, f"time/{phase}", "time/")
        values.append(seconds if phase == "train" else seconds / steps_per_round)
    handles, top = _stack(axes, steps, values, [(phase, _PHASES[phase]) for phase in phases])
    total = top[np.isfinite(top)]
    if len(total):
        highest, typical = total.max(), float(np.median(total))
        # The first round encodes all prompts of a run, which would flatten everything after it
        if highest > 4 * typical > 0:
            axes.set_ylim(0, 2.5 * typical)
            style = {"transform": axes.transAxes, "fontsize": 7.5, "ha": "right", "va": "top", "color": "0.3"}
            axes.text(0.99, 0.94, f"cut off: up to {highest:.3g} s", **style)
    return handles


# ---- What panels share ----


def _series(rows: list[dict], name: str, group: str) -> tuple[np.ndarray, np.ndarray]:
    """Give the steps at which any metric that begins with `group` was logged, and `name` there, NaN without a value."""
    chosen = [row for row in rows if name in row or any(key.startswith(group) for key in row)]
    steps = np.array([row["step"] for row in chosen])
    values = np.array([row.get(name, math.nan) for row in chosen], dtype=float)
    return steps, np.where(np.isfinite(values), values, np.nan)


def _line(
    axes: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    color: str,
    label: str,
    linestyle: str = "-",
    single_values: bool = True,
) -> list[Line2D]:
    """Draw a line, with points while there are few values, and as a running mean over them when there are many."""
    if not np.isfinite(values).any():
        return []
    style = {"color": color, "linewidth": 1.3, "linestyle": linestyle, "label": label, "clip_on": False}
    if len(steps) <= MANY_POINTS:
        return axes.plot(steps, values, marker=".", markersize=4 if len(steps) <= 50 else 2, **style)
    if single_values:
        axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.25)
    return axes.plot(steps, running_mean(values, len(steps) // 60), **style)


def _stack(
    axes: Axes, steps: np.ndarray, values: list[np.ndarray], areas: list[tuple[str, str]]
) -> tuple[list[Patch], np.ndarray]:
    """Stack areas, each with its label and color, and give their handles and the upper edge of the last one."""
    stacked = np.cumsum(values, axis=0)  # (areas, steps)
    stacked[:, np.isnan(stacked[-1])] = np.nan  # a step that lacks one of them is a gap, not a lower stack
    edges = _edges(steps)
    if len(steps) > MANY_POINTS:
        stacked, edges = _binned(stacked, edges)
    below = np.zeros_like(stacked[0])
    handles: list[Patch] = []
    for (label, color), above in zip(areas, stacked, strict=True):
        axes.stairs(above, edges, baseline=below, fill=True, color=color, linewidth=0)
        handles.insert(0, Patch(color=color, label=label))  # in the order of the stack
        below = np.where(np.isnan(above), 0, above)
    return handles, stacked[-1]


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Average the values, (N,), around each one, fewer at the ends; NaN counts as missing and remains NaN."""
    known = np.isfinite(values)
    # Sums from the left: the mean of a window is a difference of two, whatever its size
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    starts = np.arange(len(values)) - window // 2
    left, right = np.maximum(starts, 0), np.minimum(starts + window, len(values))
    totals, numbers = sums[right] - sums[left], counts[right] - counts[left]
    return np.where(known, totals / np.maximum(numbers, 1), np.nan)


def _edges(steps: np.ndarray) -> np.ndarray:
    """Give the borders between steps, of which the first and the last step are the middle of theirs."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[2 * steps[0] - middles[0]], middles, [2 * steps[-1] - middles[-1]]])


def _binned(stacked: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average over at most `MANY_POINTS` spans of equally many steps."""
    size = -(-stacked.shape[1] // MANY_POINTS)
    starts = np.arange(0, stacked.shape[1], size)
    known = np.isfinite(stacked[-1])
    numbers = np.add.reduceat(known.astype(float), starts)
    sums = np.add.reduceat(np.where(known, stacked, 0.0), starts, axis=1)
    means = np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)
    return means, np.append(edges[starts], edges[-1])


def _label(name: str) -> str:
    """Write a name so that matplotlib shows it as it is, cut in the middle when it is long."""
    if len(name) > MAX_LABEL:
        name = f"{name[: MAX_LABEL // 2]}…{name[1 - MAX_LABEL // 2 :]}"
    name = name.replace("$", r"\$")  # what is between two would be read as a formula
    return f" {name}" if name.startswith("_") else name  # matplotlib 3.9 leaves such labels out
