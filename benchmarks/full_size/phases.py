# SPDX-License-Identifier: Apache-2.0
"""Memory and seconds of a training by phase, in the process that trains: its own memory, not the files that it maps."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline

from paco_trl.rewards.weighting import Rewards
from paco_trl.rollout.encoder import PromptEncoder
from paco_trl.rollout.recording_pipeline import RecordingPipeline
from paco_trl.trainer import round_trainer
from paco_trl.trainer.round_trainer import RoundTrainer


GIB = 2**30


def run_part(script: str | Path, *words: str | Path, killed_at: Path | None = None) -> float:
    """Run a part of a script in a new process, and return its seconds; kill it when a file appears."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, str(script), *map(str, words)], start_new_session=True)
    while process.poll() is None:
        time.sleep(0.2)
        if killed_at is not None and killed_at.exists():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return time.monotonic() - started
    if process.returncode != 0:
        raise SystemExit(f"The part {words[0]!r} ended with code {process.returncode}.")
    if killed_at is not None:
        raise SystemExit(f"The part {words[0]!r} has ended without {killed_at}.")
    return time.monotonic() - started


def in_gib(phases: dict[str, dict]) -> dict[str, dict]:
    """Round phases for a report."""
    return {
        name: {
            "peak, GiB": round(phase["peak"] / GIB, 2),
            "seconds": round(phase["seconds"], 1),
            "count": phase["count"],
        }
        for name, phase in phases.items()
    }


def ratios(
    measured: dict[str, dict], planned: dict[str, dict[str, dict[str, int]]], is_mapped: bool = True
) -> dict[str, float]:
    """Divide the measured own memory of each phase by what is planned for device and host, without weights that are mapped."""
    mapped = {"frozen weights", "text encoders", "VAE", "transformer", "weights"} if is_mapped else set()
    libraries = planned["load"]["host"]["libraries"]
    found = {}
    for name, phase in measured.items():
        if name in planned:
            parts = [part for place in ("device", "host") for part in planned[name][place].items()]
            own = sum(size for part, size in parts if part not in {*mapped, "libraries"})
            found[name] = round(phase["peak"] / (libraries + own), 2)
    return found


def own_memory() -> int:
    """Return the bytes of this process that no file has: weights that are mapped from safetensors are not counted."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


class Phases:
    """
    Peak memory, seconds and number of times of each phase. A phase within another one is not part of it.

    Attributes:
        found (`dict[str, dict]`):
            Name -> `peak` in bytes, `seconds`, `count`.
    """

    def __init__(self, interval: float = 0.05):
        self.found: dict[str, dict[str, Any]] = {}
        self._stack, self._interval, self._since = ["start"], interval, time.monotonic()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Sample the memory until the process ends."""

        def sample() -> None:
            while True:
                self._note()
                time.sleep(self._interval)

        threading.Thread(target=sample, daemon=True).start()

    def _note(self) -> None:
        with self._lock:
            now = time.monotonic()
            phase = self.found.setdefault(self._stack[-1], {"peak": 0, "seconds": 0.0, "count": 0})
            phase["peak"] = max(phase["peak"], own_memory())
            phase["seconds"] += now - self._since
            self._since = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute what happens within the context to a phase."""
        self._note()
        self._stack.append(name)
        self._note()
        self.found[name]["count"] += 1
        try:
            yield
        finally:
            self._note()
            self._stack.pop()

    def of(self, name: str, function: Callable) -> Callable:
        """Return a function whose calls are a phase."""

        @functools.wraps(function)
        def measured(*args, **kwargs):
            with self.phase(name):
                return function(*args, **kwargs)

        return measured

    def install(self) -> None:
        """Measure the phases of the package's trainings in this process."""

        def load(*args, **kwargs) -> DiffusionPipeline:
            with self.phase("load"):
                pipeline = load_pipeline(*args, **kwargs)
            pipeline.vae.decode = self.of("decode", pipeline.vae.decode)
            return pipeline

        load_pipeline = round_trainer.load_pipeline
        vars(round_trainer)["load_pipeline"] = load
        for owner, name, phase in (
            (PromptEncoder, "encode", "encode"), (RecordingPipeline, "generate", "generate"), (Rewards, "call", "score"),
            (RoundTrainer, "training_step", "train"), (RoundTrainer, "_save_checkpoint", "save"),
            (RoundTrainer, "save_model", "save"), (RoundTrainer, "evaluate", "evaluate"),
        ):  # fmt: skip
            setattr(owner, name, self.of(phase, getattr(owner, name)))
        self.watch()
