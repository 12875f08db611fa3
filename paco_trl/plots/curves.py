# SPDX-License-Identifier: Apache-2.0
"""Write what a run logged as a table, and plot rewards, clipping and time over the optimizer steps."""

import csv
import io
import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from numbers import Real
from pathlib import Path
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..utils.files import write_atomically
from .figures import new_figure, png_bytes


# Not accelerate's logger, which raises where no accelerate state exists: a warning must never stop a run
logger = logging.getLogger(__name__)

PLOT_PAUSE = 60  # seconds between curves at logs
MANY_POINTS = 200  # a line of more is noise: means over as many spans are plotted
MAX_LABEL = 30  # letters that fit next to the panels
_COLORS = ("#1f77b4", "#e8710a", "#2a9d3a", "#8e5fc4", "#c2185b", "#6d4c41", "#00838f", "#9e9d24")
_EVAL_STYLES = (("0.1", "o"), ("#d62728", "s"), ("#7b1fa2", "D"), ("#00695c", "^"), ("#ad6800", "v"))
_PHASES = {"encode": "#b0bec5", "rollout": "#1f77b4", "reward": "#e8710a", "train": "#2a9d3a"}
_CLIPPED = (("region", "both", "0.25"), ("low", "below the range", "#1f77b4"), ("high", "above the range", "#e8710a"))
_DEVIATIONS: dict = {"ratio_deviation": ("-", "after an update"), "ratio_deviation_on_policy": (":", "on policy")}
# Inches. On a model card, about 700 pixels wide, letters of a wider figure are too small
_PANEL_HEIGHT, _LEGEND_LINE, _GAP, _WIDTH = 1.35, 0.155, 0.42, 7.3


def history_rows(log_history: list[dict]) -> list[dict[str, float]]:
    """Merge the logs of each step into a row: the last value counts, `None` becomes NaN, texts are left out."""
    rows: dict[int, dict] = {}
    for entry in log_history:
        row = rows.setdefault(entry["step"], {"step": entry["step"]})
        values = {name: math.nan if value is None else value for name, value in entry.items()}
        row.update({name: value for name, value in values.items() if isinstance(value, Real)})
    return [rows[step] for step in sorted(rows)]


def write_curves_csv(rows: list[dict[str, float]], path: str | Path) -> None:
    """Write rows as a table: `step`, `epoch`, then metrics by name; a missing value is an empty cell."""
    table = io.StringIO()
    names = sorted(set().union(*rows) - {"step", "epoch"})
    writer = csv.DictWriter(table, ["step", "epoch", *names], lineterminator="\n")
    writer.writeheader()
    # A NaN is the only value that differs from itself
    writer.writerows({name: value for name, value in row.items() if value == value} for row in rows)
    write_atomically(path, table.getvalue(), durable=False)


def plot_curves(rows: list[dict[str, float]], path: str | Path, steps_per_round: int = 1) -> bool:
    """Plot the metrics of a run in panels, one below the other. Without any, return `False` and write nothing."""
    is_long, rows = len(rows) > MANY_POINTS, _thin_out(rows)
    panels = list(_panels(rows, steps_per_round))
    if not panels:
        return False
    figure = new_figure(_WIDTH, 1, dpi=140)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    heights = []
    for axes, (title, plot) in zip(all_axes, panels, strict=True):
        axes.set_title(title, fontsize=8.5, loc="left", pad=4)
        handles = plot(axes, rows) or axes.get_legend_handles_labels()[0]
        style = {"fontsize": 7.5, "frameon": False, "borderaxespad": 0, "labelspacing": 0.35}
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.005, 1.03), **style)
        axes.tick_params(labelsize=7.5)
        axes.grid(axis="y", color="0.92", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        # At least as high as the legend, so that legends do not overlap
        heights.append(max(_PANEL_HEIGHT, _LEGEND_LINE * len(handles)))
    steps = [row["step"] for row in rows]
    margin = max(0.5, 0.01 * (steps[-1] - steps[0]))
    all_axes[-1].set_xlim(steps[0] - margin, steps[-1] + margin)
    all_axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    means = f" (each point is the mean of a {MANY_POINTS}th of the run)" * is_long
    all_axes[-1].set_xlabel(f"optimizer step{means}", fontsize=8.5)
    height = 0.3 + sum(heights) + _GAP * (len(heights) - 1) + 0.45  # with room for the title and the ticks
    figure.set_size_inches(_WIDTH, height)
    all_axes[0].get_gridspec().set_height_ratios(heights)
    figure.subplots_adjust(0.09, 0.45 / height, 0.7, 1 - 0.3 / height, hspace=_GAP / float(np.mean(heights)))
    write_atomically(path, png_bytes(figure))
    return True


class CurvesCallback(TrainerCallback):
    """Write `curves.csv` and `curves.png` (`plot`) at checkpoints, at the end, and now and then."""

    # From `state.log_history`, which checkpoints hold: after a resume they equal those of an uninterrupted run

    def __init__(self, plot: bool = True, submit: Callable[[Callable[[], object]], object] = lambda make: make()):
        self._plot, self._submit = plot, submit  # `submit` may plot on another thread
        self._not_before = -math.inf  # time of the next plot
        self._failed: set[Path] = set()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        # A short run is plotted once, at its end
        self._not_before = time.monotonic() + PLOT_PAUSE

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        if time.monotonic() >= self._not_before:
            self.on_save(args, state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        rows = history_rows(state.log_history) if state.is_world_process_zero else []
        if not rows or rows[-1]["step"] == 0:  # before the first step they would replace those of an earlier run
            return
        folder = Path(args.output_dir)
        self._write(folder / "curves.csv", lambda path: write_curves_csv(rows, path))
        if self._plot:
            # Only `PaCoGRPOConfig` has rounds
            per_round = getattr(args, "optimizer_steps_per_generation", 1) * getattr(args, "num_iterations", 1)
            self._submit(lambda: self._write(folder / "curves.png", lambda path: plot_curves(rows, path, per_round)))
        self._not_before = time.monotonic() + PLOT_PAUSE

    on_train_end = on_save

    def _write(self, path: Path, write: Callable[[Path], object]) -> None:
        # A full disk must not stop a run of weeks for its curves
        try:
            write(path)
        except OSError as error:
            if path not in self._failed:
                self._failed.add(path)
                logger.warning(
                    f"The curves of the run could not be written to {path}: {error}. Training continues, and the next "
                    "logs try again without a warning. Free some space, or make the directory writable."
                )


_Panel = tuple[str, Callable[[Axes, list[dict]], list | None]]


def _panels(rows: list[dict], steps_per_round: int) -> Iterator[_Panel]:
    """Yield the title of each panel, and the function that plots it and returns special handles of the legend."""
    names = set().union(*rows)
    trained = {match[1] for name in names if (match := re.fullmatch(r"rewards/(.+)/mean", name))}
    evaluated = [match for name in names if (match := re.fullmatch(r"(eval(?:_.+?)?)_rewards/(.+)/mean", name))]
    prefixes = sorted({match[1] for match in evaluated})
    colors = dict(zip(sorted(trained | {match[2] for match in evaluated}), cycle(_COLORS), strict=False))
    spread, shares = (
        {reward: color for reward, color in colors.items() if f"rewards/{reward}/{metric}" in names}
        for metric in ("h", "share")
    )
    for reward, color in colors.items():  # a panel each, because their ranges differ, some by a factor of a hundred
        plot = partial(_plot_reward, reward=reward, color=color, prefixes=prefixes)
        yield f"{_label(reward).strip()}: mean", plot
    if spread:
        yield "Spread of each reward over a round: std / mean (h)", partial(_plot_spread, colors=spread)
    if len(shares) > 1:
        title = "Share of each reward in the differences within a group (1: it decides alone)"
        yield title, partial(_plot_shares, colors=shares)
    if names & {f"clip_ratio/{part}_mean" for part, _, _ in _CLIPPED}:
        yield "Clip fraction", _plot_clipping
    found = (re.fullmatch(r"(ratio_deviation(?:_on_policy)?)/step_(\d+)", name) for name in names)
    if deviations := sorted((match[1], int(match[2])) for match in found if match):
        title = "|ratio - 1| by denoising step, before the first update of a round (on policy) and after"
        yield title, partial(_plot_deviations, deviations=deviations)
    if phases := [phase for phase in _PHASES if f"time/{phase}" in names]:
        share = " (with its share of a round's encoding, generation and scoring)" if steps_per_round > 1 else ""
        plot = partial(_plot_time, phases=phases, steps_per_round=steps_per_round)
        yield f"Seconds per optimizer step{share}", plot


def _plot_reward(axes: Axes, rows: list[dict], reward: str, color: str, prefixes: list[str]) -> None:
    _line(axes, *_series(rows, f"rewards/{reward}/mean", "rewards/"), color, "training")
    for prefix, (color, marker) in zip(prefixes, cycle(_EVAL_STYLES), strict=False):
        (steps, means), (_, low), (_, high), (_, baselines) = (
            _series(rows, f"{prefix}_rewards/{reward}/{metric}", f"{prefix}_rewards/")
            for metric in ("mean", "ci_low", "ci_high", "baseline")
        )
        if np.isfinite(means).any():
            name = "" if prefix == "eval" else f" {prefix.removeprefix('eval_')}"
            label = _label(f"evaluation{name}")
            axes.plot(steps, means, marker, color=color, markersize=4, zorder=4, label=label)
            axes.vlines(steps, low, high, color=color, linewidth=1.1, zorder=3)
            for baseline in baselines[np.isfinite(baselines)][-1:]:
                style: dict = {"color": color, "linestyle": "--", "linewidth": 0.9, "zorder": 2}
                axes.axhline(baseline, label=_label(f"baseline{name}"), **style)


def _plot_spread(axes: Axes, rows: list[dict], colors: dict[str, str]) -> None:
    for reward, color in colors.items():
        steps, spread = _series(rows, f"rewards/{reward}/h", "rewards/")
        _line(axes, steps, spread, color, _label(reward))
        _, tamed = _series(rows, f"rewards/{reward}/tamed", "rewards/")
        if (tamed > 0).any():
            label = _label(f"{reward}, tamed")
            axes.plot(steps[tamed > 0], spread[tamed > 0], "v", color=color, markersize=4, label=label)
    axes.set_ylim(bottom=0)


def _plot_shares(axes: Axes, rows: list[dict], colors: dict[str, str]) -> list:
    series = [_series(rows, f"rewards/{reward}/share", "rewards/") for reward in colors]
    areas = {_label(reward): color for reward, color in colors.items()}
    handles, _ = _stack(axes, series[0][0], [shares for _, shares in series], areas)
    axes.set_ylim(0, 1)
    return handles


def _plot_clipping(axes: Axes, rows: list[dict]) -> None:
    for part, label, color in _CLIPPED:
        _line(axes, *_series(rows, f"clip_ratio/{part}_mean", "clip_ratio/"), color, label)
    axes.set_ylim(bottom=0)


def _plot_deviations(axes: Axes, rows: list[dict], deviations: list[tuple[str, int]]) -> list:
    colors = dict(zip(sorted({step for _, step in deviations}), cycle(_COLORS), strict=False))
    small = math.inf
    for name, step in deviations:
        # Only the optimizer steps that have it: both kinds alternate, and each has its own line
        steps, values = _series(rows, f"{name}/step_{step}", f"{name}/step_{step}")
        if (values > 0).any():
            small = min(small, np.quantile(values[values > 0], 0.01))  # not an outlier
        _line(axes, steps, values, colors[step], "", linestyle=_DEVIATIONS[name][0])
    if small < math.inf:
        # On policy, float32 on one device gives 0, which a logarithmic axis does not have
        axes.set_yscale("symlog", linthresh=10 ** math.floor(math.log10(small)), linscale=0.5)
    axes.set_ylim(bottom=0)
    kinds = [_DEVIATIONS[name] for name in sorted({name for name, _ in deviations})]
    return [Line2D([], [], color=color, label=f"step {step}") for step, color in colors.items()] + [
        Line2D([], [], color="0.3", linestyle=linestyle, label=label) for linestyle, label in kinds
    ]


def _plot_time(axes: Axes, rows: list[dict], phases: list[str], steps_per_round: int) -> list:
    values = []
    for phase in phases:
        steps, seconds = _series(rows, f"time/{phase}", "time/")
        values.append(seconds if phase == "train" else seconds / steps_per_round)
    handles, totals = _stack(axes, steps, values, {phase: _PHASES[phase] for phase in phases})
    highest, typical = np.nanmax(totals, initial=0.0), np.nanmedian(totals)
    # The first round encodes all prompts of a run, which would flatten the rest
    if highest > 4 * typical > 0:
        axes.set_ylim(0, 2.5 * typical)
        axes.set_title(f"(cut off: up to {highest:.3g} s)", fontsize=7.5, loc="right", pad=4)
    return handles


def _series(rows: list[dict], name: str, group: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps at which any metric that begins with `group` was logged, and `name` there, NaN if missing."""
    chosen = [row for row in rows if any(key.startswith(group) for key in row)]
    values = np.array([row.get(name, math.nan) for row in chosen], dtype=float)
    return np.array([row["step"] for row in chosen]), np.where(np.isfinite(values), values, np.nan)


def _thin_out(rows: list[dict]) -> list[dict]:
    """Average a long run over spans of steps, of which there are `MANY_POINTS`: more points would be noise."""
    if len(rows) <= MANY_POINTS:
        return rows
    spans = []
    for place in range(MANY_POINTS):
        span = rows[place * len(rows) // MANY_POINTS : (place + 1) * len(rows) // MANY_POINTS]
        names = set().union(*span)
        values = {name: [row[name] for row in span if math.isfinite(row.get(name, math.nan))] for name in names}
        spans.append({name: fmean(numbers) if numbers else math.nan for name, numbers in values.items()})
    return spans


def _line(axes: Axes, steps: np.ndarray, values: np.ndarray, color: str, label: str, linestyle: str = "-") -> None:
    if np.isfinite(values).any():
        style: dict = {"color": color, "linewidth": 1.3, "linestyle": linestyle, "label": label, "clip_on": False}
        axes.plot(steps, values, marker=".", markersize=4 if len(steps) <= 50 else 2, **style)


def _stack(
    axes: Axes, steps: np.ndarray, values: list[np.ndarray], areas: dict[str, str]
) -> tuple[list[Patch], np.ndarray]:
    """Stack areas (label and color); return their handles from the top, and the upper edge of the last one."""
    stacked = np.cumsum(values, axis=0)  # (areas, steps)
    stacked[:, np.isnan(stacked[-1])] = np.nan  # a step that lacks one of them is a gap, not a lower stack
    below = np.zeros_like(stacked[0])
    for color, above in zip(areas.values(), stacked, strict=True):
        axes.stairs(above, _edges(steps), baseline=below, fill=True, color=color, linewidth=0)
        below = np.nan_to_num(above)
    return [Patch(color=color, label=label) for label, color in reversed(areas.items())], stacked[-1]


def _edges(steps: np.ndarray) -> np.ndarray:
    """Return the borders between steps; the first and the last step are in the middle of theirs."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middles = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[2 * steps[0] - middles[0]], middles, [2 * steps[-1] - middles[-1]]])


def _label(name: str) -> str:
    """Escape a name for matplotlib, and cut a long one in the middle."""
    if len(name) > MAX_LABEL:
        name = f"{name[: MAX_LABEL // 2]}…{name[1 - MAX_LABEL // 2 :]}"
    name = name.replace("$", r"\$")  # two would enclose a formula
    return f" {name}" if name.startswith("_") else name  # matplotlib 3.9 leaves such labels out
