# SPDX-License-Identifier: Apache-2.0
"""Rewards are computed during generation, on their own thread or an event loop, or after it with their models placed."""

import asyncio
import atexit
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from torch import nn
from transformers import TrainerState
from trl.trainer.utils import is_async_callable, shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from ..data import split_grid
from ..rollout.prompt_encoder import placed
from ..utils.stopping import Stopped, agree, stop_request
from .reward_calls import RewardError


# Large enough for reward models that work in batches, and small enough to hide most calls behind generation: 5 of 6 at
# the paper's settings, where a process generates 96 images
IMAGES_PER_CALL = 16
# Calls of async rewards that may wait at the same time
_MAX_ASYNC_CALLS = 16
# Processes agree at this interval on whether to go on generating: none may stop alone, and each exchange waits for all
_BATCHES_PER_AGREEMENT = 4
# Seconds after which processes that wait for rewards agree again on whether to go on: none may stop alone
_SECONDS_PER_AGREEMENT = 1.0
# Seconds that a stopped process waits for a call that is running
_PATIENCE = 10.0


@dataclass
class Scores:
    """Scores of all images of a round or an evaluation, in the order of their numbers, the same on every process."""

    rewards: torch.Tensor  # (images, rewards), on the CPU, NaN where one could not be computed
    extra: dict[str, list]  # columns that rewards logged (`log_extra`)
    metrics: dict[str, float]  # metrics that rewards logged (`log_metric`), averaged over the calls of all processes
    waited: float  # seconds this process waited for rewards after its last image was generated
    hidden: float  # seconds in which rewards were computed during generation


@dataclass
class _Call:
    """A call of some rewards, given by their numbers."""

    functions: list[int]
    values: Future = field(init=False)
    span: list[float] = field(default_factory=list)  # when it started and ended
    extra: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class RewardScorer:
    """Calls rewards on images while others are generated: async ones with each micro-batch, others on one thread."""

    # Others are called with `IMAGES_PER_CALL` images at a time, in order. Which images share a call does not depend on
    # timing, so that a reward whose rounding depends on its batch gives the same values in a resumed run. With `models`
    # these calls come after generation, while the models are on the accelerator.

    def __init__(self, reward_funcs: list[Callable], accelerator: Accelerator, models: Sequence[nn.Module] = ()):
        self.reward_funcs = reward_funcs
        self.accelerator = accelerator
        self.models = list(models)
        self._sync = [index for index, function in enumerate(reward_funcs) if not is_async_callable(function)]
        self._async = [index for index in range(len(reward_funcs)) if index not in self._sync]
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")
        # On the default stream each of a reward's many waits would be for all that generation has queued
        self._stream: torch.cuda.Stream | None = None
        self._loop: Any = None
        if self._async:
            thread, self._loop, is_ready = start_event_loop_in_daemon(name="PaCoGRPOTrainer-AsyncLoop")
            is_ready.wait()
            # The gradient mode belongs to the thread, where calls interleave: set it once
            self._loop.call_soon_threadsafe(torch.set_grad_enabled, False)
            # A new thread starts on the first device, not on that of this process
            if accelerator.device.type == "cuda":
                self._loop.call_soon_threadsafe(torch.cuda.set_device, accelerator.device)
            atexit.register(shutdown_event_loop_in_daemon, thread, self._loop)
        self._calls: list[_Call] = []
        self.start()

    def start(self) -> None:
        """Start a new set of images; drop what is left of an interrupted one."""
        for call in self._calls:
            call.values.cancel()
        # One may be running: its model must not leave the accelerator, nor random states be saved, meanwhile
        running = [call.values for call in self._calls if call.functions is self._sync]
        wait(running, None if self.models else _PATIENCE)
        self._waiting: list[dict] = []  # arguments of single images for the next call
        self._calls = []
        self._count = self._num_added = 0
        self._slots = asyncio.Semaphore(_MAX_ASYNC_CALLS)

    def add(self, rows: list[dict], images: list[Image.Image], state: TrainerState) -> None:
        """Add images with their dataset rows, and submit full calls. Every process calls it equally often."""
        arguments = [
            # Panels are cut once for all rewards
            {**row, "completions": image, "panel_images": split_grid(image, row["rows"], row["cols"])}
            for row, image in zip(rows, images, strict=True)
        ]
        self._count += len(images)
        if self._async:
            self._submit(self._async, arguments, state)
        if self._sync:
            self._waiting.extend(arguments)
            if not self.models:
                self._submit_waiting(IMAGES_PER_CALL, state)
        self._num_added += 1
        if self.accelerator.num_processes == 1 or self._num_added % _BATCHES_PER_AGREEMENT == 0:
            self._raise_together(self._problem())

    def finish(self, order: np.ndarray, state: TrainerState) -> Scores:
        """Wait for the rewards and gather them on every process; of duplicates in the image numbers the first counts."""
        started = time.perf_counter()
        with placed(self.models, self.accelerator.device) if self.models else nullcontext():
            self._submit_waiting(1, state)
        self._wait()
        waited = time.perf_counter() - started
        problem = self._problem()
        # After a failure other calls may still be logging
        extra = {} if problem else _merged(call.extra for call in self._calls)
        for column, values in extra.items():
            if len(values) != self._count:
                problem = RewardError(
                    f"Rewards logged {len(values)} values in the column '{column}' (`log_extra`) for {self._count} "
                    "images. Log one per image, and use different columns for different rewards."
                )
        self._raise_together(problem)

        rewards = torch.full((self._count, len(self.reward_funcs)), torch.nan)  # (images of this process, rewards)
        for functions in (self._sync, self._async):
            calls = [call for call in self._calls if call.functions is functions]
            if calls:
                rewards[:, functions] = torch.cat([call.values.result() for call in calls])
        _, first = np.unique(order, return_index=True)  # where image 0, 1, 2 ... is
        gathered = torch.tensor(gather_object(rewards.tolist()))  # processes may have different numbers of images
        columns = {}
        for column in sorted(set(gather_object(list(extra)))):
            values = gather_object(extra.get(column, [None] * self._count))
            columns[column] = [values[index] for index in first]
        metrics, logged = {}, _merged(call.metrics for call in self._calls)
        for name in sorted(set(gather_object(list(logged)))):
            values = logged.get(name, [])
            local = torch.tensor([sum(values), len(values)], dtype=torch.float32, device=self.accelerator.device)
            total, count = self.accelerator.gather(local).view(-1, 2).sum(dim=0).tolist()
            metrics[name] = total / count
        hidden = _covered([call.span for call in self._calls], started)
        scores = Scores(gathered[torch.from_numpy(first)], columns, metrics, waited, hidden)
        self.start()
        return scores

    def _wait(self) -> None:
        """Wait for the calls of all processes; none is long in an exchange."""
        is_pending = True
        while is_pending:
            calls = [call.values for call in self._calls]
            pending = wait(calls, _SECONDS_PER_AGREEMENT, return_when=FIRST_EXCEPTION).not_done
            is_pending = self._raise_together(self._problem(), bool(pending))

    def _problem(self) -> BaseException | None:
        """Return the exception of the first call that is known to have failed."""
        done = (call.values for call in self._calls if call.values.done())
        return next((values.exception() for values in done if values.exception() is not None), None)

    def _raise_together(self, problem: BaseException | None, is_pending: bool = False) -> bool:
        """Raise on all processes if one has a problem or must stop; return whether one has pending calls."""
        stop, is_bad, is_pending = agree(self.accelerator, stop_request(), problem is not None, is_pending)
        if not stop and not is_bad:
            return bool(is_pending)
        self.start()
        if stop:
            raise Stopped(stop, by_all=True)
        texts = [] if problem is None else [f"process {self.accelerator.process_index}: {problem}"]
        if self.accelerator.num_processes > 1:
            texts = gather_object(texts)
        raise problem or RewardError(f"A reward failed on {'; '.join(texts)}")

    def _submit_waiting(self, least: int, state: TrainerState) -> None:
        """Submit calls of `IMAGES_PER_CALL` waiting images while there are at least so many."""
        while len(self._waiting) >= least and self._problem() is None:
            batch, self._waiting = self._waiting[:IMAGES_PER_CALL], self._waiting[IMAGES_PER_CALL:]
            self._submit(self._sync, batch, state)
            if self.models:
                wait([self._calls[-1].values])  # none may run when they leave the accelerator

    def _submit(self, functions: list[int], batch: list[dict], state: TrainerState) -> None:
        call = _Call(functions)
        arguments: dict[str, Any] = {name: [row[name] for row in batch] for name in batch[0] if name != "prompt"}
        arguments |= {
            "prompts": [row["prompt"] for row in batch],
            "completion_ids": None,  # as in TRL
            "trainer_state": state,
            "log_extra": lambda column, values: call.extra[column].extend(values),
            "log_metric": lambda name, value: call.metrics[name].append(value),
        }
        if functions is self._async:
            call.values = asyncio.run_coroutine_threadsafe(self._wait_for(call, arguments, self._slots), self._loop)
        else:
            # A new thread starts on the first device, not on that of this process
            device = torch.cuda.current_device() if self.accelerator.device.type == "cuda" else None
            call.values = self._executor.submit(self._compute, call, arguments, device)
        self._calls.append(call)

    @torch.no_grad()
    def _compute(self, call: _Call, arguments: dict, device: int | None) -> torch.Tensor:
        """Call the rewards that compute; runs on the scorer's thread."""
        call.span = [time.perf_counter(), torch.inf]
        stream: AbstractContextManager = nullcontext()
        if device is not None:
            torch.cuda.set_device(device)
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.default_stream())  # which moved the weights
            stream = torch.cuda.stream(self._stream)
        with stream:
            values = [self.reward_funcs[index](**arguments) for index in call.functions]
        call.span[1] = time.perf_counter()
        return _as_tensor(values)

    async def _wait_for(self, call: _Call, arguments: dict, slots: asyncio.Semaphore) -> torch.Tensor:
        """Call the async rewards; runs on the event loop."""
        async with slots:
            call.span = [time.perf_counter(), torch.inf]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self.reward_funcs[index](**arguments)) for index in call.functions]
            except BaseExceptionGroup as problems:
                raise problems.exceptions[0] from None
            call.span[1] = time.perf_counter()
        return _as_tensor([task.result() for task in tasks])


def _as_tensor(values: list[list[float | None]]) -> torch.Tensor:
    rewards = [[torch.nan if reward is None else reward for reward in column] for column in values]
    return torch.tensor(rewards, dtype=torch.float32).T  # (images, rewards)


def _merged(logs: Iterable[dict[str, list]]) -> dict[str, list]:
    merged: dict[str, list] = defaultdict(list)
    for log in logs:
        for name, values in log.items():
            merged[name].extend(values)
    return merged


def _covered(spans: list[list[float]], until: float) -> float:
    """Return the seconds before `until` in which at least one of the spans was running."""
    total, end = 0.0, -torch.inf
    for begin, stop in sorted(spans):
        begin, stop = max(begin, end), min(stop, until)
        total += max(stop - begin, 0.0)
        end = max(end, stop)
    return total
