# SPDX-License-Identifier: Apache-2.0
"""Curves of a run: what was logged as a table, and rewards, clipping and time over the optimizer steps as a picture."""

import contextlib
import csv
import logging
import math
import os
import re
import time
from collections.abc import Callable
from numbers import Real
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


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

_COLOURS = ("#1f77b4", "#e8710a", "#2a9d3a", "#8e5fc4", "#c2185b", "#6d4c41", "#00838f", "#9e9d24")
_EVAL_COLOURS = ("0.1", "#d62728", "#7b1fa2", "#00695c", "#ad6800")
_EVAL_MARKERS = ("o", "s", "D", "^", "v")

_PHASES = {"encode": "#b0bec5", "rollout": "#1f77b4", "reward": "#e8710a", "train": "#2a9d3a"}

# Inches
_PANEL_HEIGHT, _LEGEND_LINE, _GAP, _WIDTH = 1.35, 0.155, 0.42, 10.0


def history_rows(log_history: list[dict]) -> list[dict[str, float]]:
    """
    Puts what was logged at the same optimizer step into one row.

    Args:
        log_history (`list[dict]`):
            Entries of [`~transformers.TrainerState`]. Where a step has a metric twice, the later value counts.

    Returns:
        `list[dict[str, float]]`: rows with `step` and every numeric metric of the step, by step. `None` becomes NaN:
        the metric was asked for and has no value. A metric that was not logged at a step is not in its row.
    """
    rows = {}
    for entry in log_history:
        row = rows.setdefault(entry["step"], {"step": entry["step"]})
        for name, value in entry.items():
            if name == "step":
                continue
            if value is None:
                row[name] = math.nan
            elif isinstance(value, Real):
                row[name] = value
    return [rows[step] for step in sorted(rows)]


def write_curves_csv(rows: list[dict[str, float]], path: str | Path) -> None:
    """
    Writes rows as a table: `step`, `epoch`, then all metrics by name. A metric without a value is an empty cell.

    The file is replaced as a whole, so that a reader never sees half of it.

    Args:
        rows (`list[dict[str, float]]`):
            Rows of [`history_rows`].
        path (`str` or `Path`):
            CSV file.
    """
    metrics = sorted(set().union(*rows) - {"step", "epoch"})
    columns = ["step", "epoch", *metrics]
    with _replacing(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            # A NaN is the only value that differs from itself
            values = [row.get(column) for column in columns]
            writer.writerow(["" if value is None or value != value else value for value in values])


def draw_curves(rows: list[dict[str, float]], path: str | Path, steps_per_round: int = 1) -> bool:
    """
    Draws the curves of a run, one panel below the other; what was not logged has no panel.

    The panels are: the mean of each reward with its evaluations, their intervals and the baseline; the coefficient of
    variation of each reward and where it was tamed; with several rewards, the share of each in what sets the images of
    a group apart, and the ratio of each mean to that of the run's first reward; the clip fraction; the deviation of the
    probability ratio from 1; and the time of an optimizer step by phase.

    Args:
        rows (`list[dict[str, float]]`):
            Rows of [`history_rows`].
        path (`str` or `Path`):
            PNG file, replaced as a whole.
        steps_per_round (`int`, *optional*, defaults to `1`):
            Optimizer steps made with the images of a round. Each of them repeats the round's times for encoding,
            drawing and scoring, of which it gets its share.

    Returns:
        `bool`: whether there was anything to draw.
    """
    panels = _panels(rows, steps_per_round)
    if not panels:
        return False
    # A canvas of its own, without pyplot: no global state, and no figure is left open in a run of weeks
    figure = Figure(figsize=(_WIDTH, 1), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    heights = []
    for axes, draw in zip(all_axes, panels, strict=True):
        handles = draw(axes)
        axes.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.03), fontsize=7.5, frameon=False,
            borderaxespad=0, labelspacing=0.35,
        )  # fmt: skip
        axes.tick_params(labelsize=7.5)
        axes.grid(axis="y", color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
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
    with _replacing(path) as temporary:
        figure.savefig(temporary, format="png")
    return True


class CurvesCallback(TrainerCallback):
    """
    Keeps the curves of a run in its output folder: `curves.csv`, written anew at each log, and `curves.png`.

    Both follow from `state.log_history`, which checkpoints hold: after a resume they are those of an uninterrupted
    run. The picture is drawn anew when a checkpoint is saved, when training ends, and at a log if `DRAWING_PAUSE`
    times the duration of the last drawing has passed (`FIRST_DRAWING` seconds before the first one). Nothing is
    written before the first optimizer step is logged, so that a mere evaluation does not replace the curves of the
    run in the folder.

    A file that cannot be written is warned of once, and tried again at the next log; training goes on.

    Args:
        plot (`bool`, *optional*, defaults to `True`):
            Whether to plot `curves.png`; the table is always written.
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

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self._draw(args, self._rows(state))

    def _rows(self, state: TrainerState) -> list[dict[str, float]]:
        """Rows to write: none on other processes, and none before the first optimizer step."""
        if not state.is_world_process_zero:
            return []
        rows = history_rows(state.log_history)
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
                    "The curves of the run could not be written to %s: %s. Training goes on, and each further log "
                    "tries again without another warning. Make room, or make the folder writable.",
                    path,
                    error,
                )


@contextlib.contextmanager
def _replacing(path: str | Path):
    """Gives a temporary file beside `path`, which takes its place when all went well and is removed otherwise."""
    path = Path(path)
    temporary = path.with_name(path.name + ".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the folder itself may be what is wrong
            temporary.unlink()
        raise


# ---- Panels: each draws into its axes and gives the handles of its legend ----


def _panels(rows: list[dict[str, float]], steps_per_round: int) -> list[Callable[[Axes], list]]:
    names = set().union(*rows) if rows else set()
    rewards, evaluations = [], []
    for name in sorted(names):
        if match := re.fullmatch(r"rewards/(.+)/mean", name):
            rewards.append(match[1])
        elif match := re.fullmatch(r"(eval(?:_.+?)?)_rewards/(.+)/mean", name):
            evaluations.append((match[1], match[2]))
    all_rewards = sorted({*rewards, *(reward for _, reward in evaluations)})
    colours = {reward: _COLOURS[index % len(_COLOURS)] for index, reward in enumerate(all_rewards)}
    prefixes = sorted({prefix for prefix, _ in evaluations})

    panels = []
    for reward in all_rewards:
        # A panel for each, because the ranges of rewards differ, some by a factor of a hundred
        panels.append(lambda axes, reward=reward: _draw_reward(axes, rows, reward, colours[reward], prefixes))
    varied = [reward for reward in all_rewards if f"rewards/{reward}/h" in names]
    if varied:
        panels.append(lambda axes: _draw_variation(axes, rows, varied, colours))
    shared = [reward for reward in all_rewards if f"rewards/{reward}/share" in names]
    if len(shared) > 1:  # a single reward is all there is
        panels.append(lambda axes: _draw_shares(axes, rows, shared, colours))
    compared = [reward for reward in rewards if f"rewards/{reward}/ratio" in names]
    if compared:
        others = [reward for reward in rewards if reward not in compared]
        panels.append(lambda axes: _draw_ratios(axes, rows, compared, others, colours))
    if names & {f"clip_ratio/{part}_mean" for part in ("low", "high", "region")}:
        panels.append(lambda axes: _draw_clipping(axes, rows))
    deviations = []
    for name in names:
        if match := re.fullmatch(r"(ratio_deviation(?:_on_policy)?)/step_(\d+)", name):
            deviations.append((match[1], int(match[2])))
    if deviations:
        panels.append(lambda axes: _draw_deviations(axes, rows, sorted(deviations)))
    phases = [phase for phase in _PHASES if f"time/{phase}" in names]
    if phases:
        panels.append(lambda axes: _draw_time(axes, rows, phases, steps_per_round))
    return panels


def _draw_reward(axes: Axes, rows: list[dict], reward: str, colour: str, prefixes: list[str]) -> list:
    _title(axes, f"{_label(reward).strip()}: mean")
    handles = _line(axes, *_series(rows, f"rewards/{reward}/mean", "rewards/"), colour, "training")
    for index, prefix in enumerate(prefixes):
        steps, means = _series(rows, f"{prefix}_rewards/{reward}/mean", f"{prefix}_rewards/")
        if not np.isfinite(means).any():
            continue
        colour = _EVAL_COLOURS[index % len(_EVAL_COLOURS)]
        marker = _EVAL_MARKERS[index % len(_EVAL_MARKERS)]
        (points,) = axes.plot(steps, means, marker, color=colour, markersize=4, zorder=4)
        _, low = _series(rows, f"{prefix}_rewards/{reward}/ci_low", f"{prefix}_rewards/")
        _, high = _series(rows, f"{prefix}_rewards/{reward}/ci_high", f"{prefix}_rewards/")
        axes.vlines(steps, low, high, color=colour, linewidth=1.1, zorder=3)
        of = "" if prefix == "eval" else f" {prefix.removeprefix('eval_')}"
        points.set_label(_label(f"evaluation{of}"))
        handles.append(points)
        _, baselines = _series(rows, f"{prefix}_rewards/{reward}/baseline", f"{prefix}_rewards/")
        baselines = baselines[np.isfinite(baselines)]
        if len(baselines):
            line = axes.axhline(baselines[-1], color=colour, linestyle="--", linewidth=0.9, zorder=2)
            line.set_label(_label(f"baseline{of}"))
            handles.append(line)
    return handles


def _draw_variation(axes: Axes, rows: list[dict], rewards: list[str], colours: dict[str, str]) -> list:
    _title(axes, "Spread of each reward over a round: std / mean (h)")
    handles = []
    for reward in rewards:
        handles += _line(axes, *_series(rows, f"rewards/{reward}/h", "rewards/"), colours[reward], _label(reward))
    highest = axes.dataLim.y1  # before the strips, which have other coordinates
    # One strip for each reward above the curves: markers on the lines would hide them in a long run
    height = min(0.08, 0.5 / len(rewards))
    strips = 0
    for reward in rewards:
        steps, tamed = _series(rows, f"rewards/{reward}/tamed", "rewards/")
        tamed = np.nan_to_num(tamed) > 0
        if tamed.any():
            top = 1 - strips * height
            axes.stairs(
                np.where(tamed, top, np.nan), _edges(steps), baseline=top - 0.7 * height, fill=True,
                color=colours[reward], transform=axes.get_xaxis_transform(), linewidth=0,
            )  # fmt: skip
            strips += 1
    if strips:
        handles.append(Patch(color="0.6", label="tamed (bar above)"))
    axes.set_ylim(0, highest / (0.95 - strips * height) if highest > 0 else 1)
    return handles


def _draw_shares(axes: Axes, rows: list[dict], rewards: list[str], colours: dict[str, str]) -> list:
    _title(axes, "Share of each reward in what sets the images of a group apart (1: it alone decides)")
    series = [_series(rows, f"rewards/{reward}/share", "rewards/") for reward in rewards]
    areas = [(_label(reward), colours[reward]) for reward in rewards]
    handles, _ = _stack(axes, series[0][0], [shares for _, shares in series], areas)
    axes.set_ylim(0, 1)
    return handles


def _draw_ratios(axes: Axes, rows: list[dict], rewards: list[str], others: list[str], colours: dict[str, str]) -> list:
    # The run's first reward is the one that has no ratio to itself
    first = _label(others[0]).strip() if len(others) == 1 else "the first reward"
    _title(axes, f"Ratio of mean rewards, to {first}")
    handles = []
    for reward in rewards:
        handles += _line(axes, *_series(rows, f"rewards/{reward}/ratio", "rewards/"), colours[reward], _label(reward))
    return handles


def _draw_clipping(axes: Axes, rows: list[dict]) -> list:
    _title(axes, "Clip fraction")
    handles = []
    labels = {
        "region": ("both", "0.25"),
        "low": ("below the range", "#1f77b4"),
        "high": ("above the range", "#e8710a"),
    }
    for part, (label, colour) in labels.items():
        steps, values = _series(rows, f"clip_ratio/{part}_mean", "clip_ratio/")
        # Nothing is clipped before the first update of a round: single values of a long run would fill the panel
        handles += _line(axes, steps, values, colour, label, single_values=False)
    axes.set_ylim(bottom=0)
    return handles


def _draw_deviations(axes: Axes, rows: list[dict], deviations: list[tuple[str, int]]) -> list:
    _title(axes, "|ratio - 1| by denoising step, before the first update of a round (on policy) and after")
    steps_drawn = sorted({step for _, step in deviations})
    colours = {step: _COLOURS[index % len(_COLOURS)] for index, step in enumerate(steps_drawn)}
    small = math.inf
    for name, step in deviations:
        # Only the steps that have it: the two kinds alternate, and each is a line of its own
        steps, values = _series(rows, f"{name}/step_{step}", f"{name}/step_{step}")
        if (values > 0).any():
            small = min(small, np.quantile(values[values > 0], 0.01))  # not one outlier
        on_policy = name.endswith("on_policy")
        _line(axes, steps, values, colours[step], "", linestyle=":" if on_policy else "-")
    if small < math.inf:
        # Zero, which float32 on one device gives on policy, has a place on this axis and none on a logarithmic one
        axes.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(small)), linscale=0.5)
    axes.set_ylim(bottom=0)
    handles = [Line2D([], [], color=colours[step], label=f"step {step}") for step in steps_drawn]
    kinds = {"ratio_deviation": ("-", "after an update"), "ratio_deviation_on_policy": (":", "on policy")}
    for name in sorted({name for name, _ in deviations}):
        linestyle, label = kinds[name]
        handles.append(Line2D([], [], color="0.3", linestyle=linestyle, label=label))
    return handles


def _draw_time(axes: Axes, rows: list[dict], phases: list[str], steps_per_round: int) -> list:
    share = " (its share of a round's encoding, drawing and scoring)" if steps_per_round > 1 else ""
    _title(axes, f"Seconds of an optimizer step{share}")
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
            axes.text(
                0.99, 0.94, f"cut off: up to {highest:.3g} s", transform=axes.transAxes, fontsize=7.5, ha="right",
                va="top", color="0.3",
            )  # fmt: skip
    return handles


# ---- What panels share ----


def _series(rows: list[dict], name: str, group: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps at which any metric that begins with `group` was logged, and `name` there: NaN where it has no value."""
    chosen = [row for row in rows if name in row or any(key.startswith(group) for key in row)]
    steps = np.array([row["step"] for row in chosen])
    values = np.array([row.get(name, math.nan) for row in chosen], dtype=float)
    return steps, np.where(np.isfinite(values), values, np.nan)


def _line(
    axes: Axes,
    steps: np.ndarray,
    values: np.ndarray,
    colour: str,
    label: str,
    linestyle: str = "-",
    single_values: bool = True,
) -> list[Line2D]:
    """A line, with points while there are few values, and as a running mean over them when there are many."""
    if not np.isfinite(values).any():
        return []
    style = {"color": colour, "linewidth": 1.3, "linestyle": linestyle, "label": label, "clip_on": False}
    if len(steps) <= MANY_POINTS:
        return axes.plot(steps, values, marker=".", markersize=4 if len(steps) <= 50 else 2, **style)
    if single_values:
        axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.25)
    return axes.plot(steps, running_mean(values, len(steps) // 60), **style)


def _stack(
    axes: Axes, steps: np.ndarray, values: list[np.ndarray], areas: list[tuple[str, str]]
) -> tuple[list[Patch], np.ndarray]:
    """Areas on top of one another, each with its label and colour; their handles, and the upper edge of the last one."""
    stacked = np.cumsum(values, axis=0)  # (areas, steps)
    stacked[:, np.isnan(stacked[-1])] = np.nan  # a step that lacks one of them is a gap, not a lower stack
    edges = _edges(steps)
    if len(steps) > MANY_POINTS:
        stacked, edges = _binned(stacked, edges)
    below = np.zeros_like(stacked[0])
    handles: list[Patch] = []
    for (label, colour), above in zip(areas, stacked, strict=True):
        axes.stairs(above, edges, baseline=below, fill=True, color=colour, linewidth=0)
        handles.insert(0, Patch(color=colour, label=label))  # in the order of the stack
        below = np.where(np.isnan(above), 0, above)
    return handles, stacked[-1]


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """
    Mean of the values around each one; NaN where there is no value.

    Args:
        values (`np.ndarray` of shape `(N,)`):
            Values; NaN counts as missing.
        window (`int`):
            Number of values of a mean, fewer at the ends.

    Returns:
        `np.ndarray` of shape `(N,)`.
    """
    known = np.isfinite(values)
    # Sums from the left: the mean of a window is a difference of two, whatever its size
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    starts = np.arange(len(values)) - window // 2
    left, right = np.maximum(starts, 0), np.minimum(starts + window, len(values))
    totals, numbers = sums[right] - sums[left], counts[right] - counts[left]
    return np.where(known, totals / np.maximum(numbers, 1), np.nan)


def _edges(steps: np.ndarray) -> np.ndarray:
    """Borders between steps, of which the first and the last step are the middle of theirs."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[2 * steps[0] - middles[0]], middles, [2 * steps[-1] - middles[-1]]])


def _binned(stacked: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means over at most `MANY_POINTS` spans of equally many steps."""
    size = -(-stacked.shape[1] // MANY_POINTS)
    starts = np.arange(0, stacked.shape[1], size)
    known = np.isfinite(stacked[-1])
    numbers = np.add.reduceat(known.astype(float), starts)
    sums = np.add.reduceat(np.where(known, stacked, 0.0), starts, axis=1)
    means = np.where(numbers > 0, sums / np.maximum(numbers, 1), np.nan)
    return means, np.append(edges[starts], edges[-1])


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=8.5, loc="left", pad=4)


def _label(name: str) -> str:
    """A name as matplotlib shows it as it is, and cut in the middle when it is long."""
    if len(name) > MAX_LABEL:
        name = f"{name[: MAX_LABEL // 2]}…{name[1 - MAX_LABEL // 2 :]}"
    name = name.replace("$", r"\$")  # what is between two would be read as a formula
    return f" {name}" if name.startswith("_") else name  # matplotlib 3.9 leaves such labels out
