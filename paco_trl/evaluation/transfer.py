# SPDX-License-Identifier: Apache-2.0
"""Measure whether scores carry over: from the training to the inference resolution, from a short tail to the full one."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from scipy.stats import pearsonr, rankdata

from ..utils.statistics import bootstrap_sums, without_nan
from ..utils.text import interval_text, markdown_table, number_text


# Training at half the inference resolution works with correlations of .725 (consistency), .753 (CLIP-T) and .848
# (PickScore); at a quarter of it training fails, and the consistency reward has .669 (PaCo-RL,
# https://huggingface.co/papers/2512.04784, resolution-decoupled training). The limit lies between .669 and .725.
LOW_CORRELATION = 0.7

# Fewer pairs than this lie on a line, whatever they are
MIN_IMAGES = 3


class Sides(NamedTuple):
    """Names of what is compared, and advice where the scores disagree."""

    training: str
    inference: str
    preposition: str
    correlation: str
    advice: str
    is_within_prompts: bool = False  # whether ranks of a prompt's images are correlated, in place of scores


RESOLUTIONS = Sides(
    "training resolution",
    "inference resolution",
    "at",
    "correlation over images",
    f"Low is below {LOW_CORRELATION}: the paper trains with correlations of 0.725 to 0.848 at half the resolution, and "
    "training fails at a quarter of it, where the consistency reward has 0.669. Raise `resolution_scale`, or compare more "
    "prompts to narrow the intervals.",
)
TAILS = Sides(
    "short tail",
    "full tail",
    "with",
    "rank correlation within prompts",
    f"Low is below {LOW_CORRELATION} (our choice). Raise `tail_steps`, or compare more prompts to narrow the intervals.",
    is_within_prompts=True,
)


@dataclass
class ScorePairs:
    """Scores of the same (prompt, generation) images on two sides, by reward: one per image, NaN for a missing one."""

    prompts: Sequence[Hashable]
    training: dict[str, Sequence[float | None]]
    inference: dict[str, Sequence[float | None]]
    sides: Sides = RESOLUTIONS

    def scored(self, reward: str) -> tuple[np.ndarray, np.ndarray, list[Hashable]]:
        """Select the pairs in which both images have a score of a reward."""
        training = np.asarray(self.training[reward], dtype=float)  # (N,)
        inference = np.asarray(self.inference[reward], dtype=float)  # (N,)
        rows = np.flatnonzero(~np.isnan(training) & ~np.isnan(inference))
        return training[rows], inference[rows], [self.prompts[row] for row in rows.tolist()]


@dataclass
class ResolutionTransfer:
    """Correlation of the scores of one reward at the training and at the inference resolution."""

    reward: str
    correlation: float
    low: float
    high: float
    num_images: int
    num_prompts: int
    training_mean: float
    inference_mean: float
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Copy the result with `None` for NaN, which JSON does not have."""
        return without_nan(asdict(self))

    def interval_text(self) -> str:
        """Format the correlation and its interval, as far as they exist."""
        return interval_text(self.correlation, self.low, self.high, missing="-")


def resolution_transfer(
    pairs: ScorePairs, confidence_level: float = 0.95, n_resamples: int = 2000, seed: int = 0
) -> list[ResolutionTransfer]:
    """
    Correlate the scores at the training resolution with those at the inference resolution, for each reward; for `TAILS`,
    the ranks of each prompt's images with a short tail ("training") with those with the full one ("inference").

    The interval is a percentile bootstrap over prompts, because images of one prompt are not independent. With few prompts
    it is somewhat narrow: of normal scores with a correlation of 0.7, the 95% intervals of 8 to 40 prompts hold it 90 to
    92 times in 100.

    Args:
        pairs ([`ScorePairs`]):
            Scores of the same images at both resolutions, and their prompts. An image that lacks one of the two scores
            of a reward is left out for this reward.
        confidence_level (`float`, *optional*, defaults to `0.95`), n_resamples (`int`, *optional*, defaults to `2000`), seed (`int`, *optional*, defaults to `0`):
            Confidence level of the intervals, number and seed of the resamples.

    Returns:
        `list[ResolutionTransfer]`: one result per reward, in the order of `pairs.training`. Its `note` says why a reward
        has no correlation (fewer than 3 pairs, or the same score for all) or no interval (a single prompt).
    """
    results = []
    for reward in pairs.training:
        training, inference, prompts = pairs.scored(reward)
        correlation = low = high = math.nan
        x, y = training, inference
        if pairs.sides.is_within_prompts:
            x, y = _ranks_within(training, prompts), _ranks_within(inference, prompts)
        note = _undefined(x, y, pairs.sides)
        if not note:
            correlation = float(pearsonr(x, y).statistic)
            if len(set(prompts)) == 1:
                note = "no interval: how prompts differ cannot be told from one"
            else:
                low, high = _interval(x, y, prompts, confidence_level, n_resamples, seed)
        first, second = (float(scores.mean()) if len(scores) else math.nan for scores in (training, inference))
        counts = (len(training), len(set(prompts)))
        results.append(ResolutionTransfer(reward, correlation, low, high, *counts, first, second, note))
    return results


def transfer_table(results: list[ResolutionTransfer], sides: Sides = RESOLUTIONS) -> str:
    """Lay out the results as a Markdown table."""
    means = [f"mean, {side.removesuffix(' resolution')}" for side in sides[:2]]
    rows = []
    for result in results:
        row = [result.reward, result.interval_text(), result.num_images, result.num_prompts]
        row += [number_text(mean, missing="-") for mean in (result.training_mean, result.inference_mean)]
        rows.append([*row, result.note or "-"])
    return markdown_table(("reward", "correlation", "images", "prompts", *means, "note"), rows)


def transfer_warning(results: list[ResolutionTransfer], sides: Sides = RESOLUTIONS) -> str | None:
    """Describe the rewards whose scores on one side predict little about the other, if there are any."""
    lines = []
    for result in results:
        includes_zero = result.low <= 0 <= result.high  # False for NaN
        if not (result.correlation < LOW_CORRELATION or includes_zero):  # NaN is not below
            continue
        line = f"- {result.reward}: {result.interval_text()}"
        line += ", cannot be told from none: the interval includes 0" * includes_zero
        line += f", and even the interval's upper end is below {LOW_CORRELATION}" * (result.high < LOW_CORRELATION)
        lines.append(line)
    if not lines:
        return None
    scores = f"The scores of these rewards {sides.preposition} the {sides.training}"
    head = f"{scores} say little about the {sides.inference} ({sides.correlation}, with its interval over prompts):"
    return "\n".join([head, *lines, sides.advice])


def save_resolution_transfer(results: list[ResolutionTransfer], pairs: ScorePairs, path: str | Path) -> None:
    """Plot the scores of one side against those of the other, one panel per reward."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(results), 2)  # legible on a model card
    rows = math.ceil(len(results) / columns)
    figure = Figure(figsize=(3.4 * columns, 3.5 * rows), dpi=110, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    colors = cast(Any, colormaps["tab20"]).colors
    prompt_colors = {
        prompt: colors[number % len(colors)] for number, prompt in enumerate(dict.fromkeys(pairs.prompts))
    }
    what = "rank" if pairs.sides.is_within_prompts else "score"
    for index, result in enumerate(results):
        axes = figure.add_subplot(rows, columns, index + 1)
        training, inference, prompts = pairs.scored(result.reward)
        if pairs.sides.is_within_prompts:
            training, inference = _ranks_within(training, prompts), _ranks_within(inference, prompts)
        if len(training):
            ends = [min(training.min(), inference.min()), max(training.max(), inference.max())]
            axes.plot(ends, ends, linestyle="--", linewidth=0.8, color="gray", zorder=1)
            axes.scatter(training, inference, s=12, c=[prompt_colors[prompt] for prompt in prompts], zorder=2)
        title = "no correlation" if math.isnan(result.correlation) else f"r {result.interval_text()}"
        axes.set_title(f"{result.reward}\n{title}", fontsize=9)
        axes.set_xlabel(f"{what} {pairs.sides.preposition} the {pairs.sides.training}", fontsize=8)
        axes.set_ylabel(f"{what} {pairs.sides.preposition} the {pairs.sides.inference}", fontsize=8)
        axes.tick_params(labelsize=7)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _group_numbers(prompts: Sequence[Hashable]) -> np.ndarray:
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    return np.array([numbers[prompt] for prompt in prompts], dtype=int)


def _ranks_within(scores: np.ndarray, prompts: Sequence[Hashable]) -> np.ndarray:
    """Rank the scores of each prompt from -1 to 1; equal ones share their mean rank."""
    ranks, groups = np.zeros(len(scores)), _group_numbers(prompts)
    for group in np.unique(groups):
        rows = groups == group
        ranks[rows] = (2 * rankdata(scores[rows]) - 1 - rows.sum()) / max(rows.sum() - 1, 1)
    return ranks


def _undefined(training: np.ndarray, inference: np.ndarray, sides: Sides) -> str:
    """Explain why there is no correlation; empty where there is one."""
    if len(training) < MIN_IMAGES:
        return f"no correlation: {len(training)} images have both scores, and it needs {MIN_IMAGES}"
    for side, scores in ((sides.training, training), (sides.inference, inference)):
        if np.ptp(scores) <= 1e-12 * np.abs(scores).max():  # the rounding of their arithmetic
            what = "ranks within prompts" if sides.is_within_prompts else "scores"
            return f"no correlation: all {what} {sides.preposition} the {side} are {scores[0]:.6g}"
    return ""


def _interval(
    training: np.ndarray, inference: np.ndarray, prompts: Sequence[Hashable], *bootstrap: Any
) -> tuple[float, float]:
    """Compute the percentile bootstrap interval of the correlation over prompts."""
    groups = _group_numbers(prompts)  # (n,)
    # Centered and scaled, which changes no correlation, so that the sums below do not cancel
    x = (training - training.mean()) / training.std()  # (n,)
    y = (inference - inference.mean()) / inference.std()  # (n,)
    # Per prompt, all that the correlation of a resample needs
    terms = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y])  # (6, n)
    sums = np.stack([np.bincount(groups, weights=term) for term in terms])  # (6, groups)

    def correlation(totals: np.ndarray) -> np.ndarray:
        n, sx, sy, sxx, syy, sxy = totals  # (resamples,) each
        var_x, var_y = sxx / n - (sx / n) ** 2, syy / n - (sy / n) ** 2
        # A resample can hold a single score many times: its variance is 0 but for rounding
        spread = (var_x > 1e-12 * sxx / n) & (var_y > 1e-12 * syy / n)
        with np.errstate(invalid="ignore", divide="ignore"):
            values = (sxy / n - sx * sy / n**2) / np.sqrt(var_x * var_y)
        return np.where(spread, np.clip(values, -1, 1), np.nan)

    return bootstrap_sums(sums, correlation, *bootstrap)
