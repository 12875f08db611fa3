# SPDX-License-Identifier: Apache-2.0
"""(b) Resolution, (c) log-taming, (d) stochastic steps: what each setting does to the toy generator."""

from collections.abc import Sequence
from typing import Any

from .common import runs_with


SDE_ROUNDS = 8  # of the demo's 20: enough to tell kinds of steps apart


def resolution_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    return runs_with([{"resolution_scale": scale} for scale in (0.25, 0.5, 1.0)], seeds)


def log_tame_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    return runs_with([{"multi_objective_aggregation": name} for name in ("log_tamed", "sum_then_normalize")], seeds)


def sde_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    kinds = [{"sde_type": kind} for kind in ("flow_sde", "dance_sde", "cps")]
    steps = [{"sde_steps": steps} for steps in ([1], [1, 2, 3, 4, 5, 6])]
    noises = [{"noise_level": level} for level in (0.3, 1.0)]
    changes: list[dict[str, Any]] = [*kinds, *steps, *noises]
    return runs_with([change | {"max_steps": 2 * SDE_ROUNDS} for change in changes], seeds)
