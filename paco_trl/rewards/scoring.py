# SPDX-License-Identifier: Apache-2.0
"""Score the completions of a round while its images are generated, and gather their rewards on every process."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import TrainerState
from trl.trainer.utils import start_event_loop_in_daemon

from ..data import split_grid
from ..rollout.rounds import Completion, Round
from ..utils.background import CallExecutor, abandon_at_exit
from ..utils.placement import placed_on
from ..utils.stopping import Stopped, agree
from .checks import is_async_reward
from .weighting import RewardError, Rewards


# Large enough for reward models that work in batches, and small enough to hide most calls behind generation: 5 of 6 at
# the paper's settings, where a process generates 96 images
IMAGES_PER_CALL = 16
# Calls of async rewards that may wait at the same time
_MAX_ASYNC_CALLS = 16
# Processes agree at this interval on whether to go on generating: none may stop alone, and each exchange waits for all
_BATCHES_PER_AGREEMENT = 4
# Seconds after which processes that wait for rewards agree again on whether to go on
_SECONDS_PER_AGREEMENT = 1.0
# Seconds that a stopped process waits for a call that is running
_STOP_TIMEOUT = 10.0


@dataclass
class Scores:
    """Scores of all completions of a round by their numbers, the same on every process."""

    rewards: torch.Tensor  # (completions, rewards), on the CPU, NaN where one could not be computed
    extra: dict[str, list]  # columns that rewards logged (`log_extra`)
    logged: list[tuple[set[int], int, dict[str, list[float]]]]  # completions of a call, their number, its `log_metric`
    waited: float  # seconds this process waited for rewards after its last image was generated
    hidden: float  # seconds in which rewards were computed during generation

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that rewards logged, averaged over the calls of all processes."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for completion_numbers, count, entries in self.logged:
            share = len(completion_numbers) / count  # the other completions of a call may have been replaced
            for name, value in ((name, value) for name, values in entries.items() for value in values):
                sums[name] = [sums[name][0] + share * value, sums[name][1] + share]
        return {name: total / weight for name, (total, weight) in sorted(sums.items()) if weight}

    def replace(self, completion_numbers: list[int], new: "Scores") -> None:
        """Put new scores of some completions in the place of theirs."""
        self.rewards[completion_numbers] = new.rewards[completion_numbers]
        kept = [(of_call - {*completion_numbers}, count, values) for of_call, count, values in self.logged]
        self.logged = kept + new.logged
        for column in self.extra | new.extra:
            cells = self.extra.setdefault(column, [None] * len(self.rewards))
            for completion_number in completion_numbers:
                cells[completion_number] = new.extra[column][completion_number] if column in new.extra else None


@dataclass
class _Call:
    """A call of some rewards with some completions."""

    reward_indices: list[int]
    numbers: list[int]  # numbers of its completions
    values: Future = field(init=False)  # result: a list of values for each reward
    span: list[float] = field(default_factory=list)  # when it started and ended
    extra: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class RewardScorer:
    """
    Calls rewards while images are generated.

    Async rewards get each batch at once. The others run on one thread, with `IMAGES_PER_CALL` images at a time, in order:
    which images share a call does not depend on timing, so that a reward whose rounding depends on its batch gives the
    same values in a resumed run. A reward with a parameter `num_generations` compares the images of a prompt: it gets all
    of them in one call, after generation. With `models` (`offload_rewards`) sync rewards are called after generation too,
    while their models are on the accelerator.
    """

    def __init__(self, rewards: Rewards, accelerator: Accelerator, models: Sequence[nn.Module] = ()):
        self.rewards, self.accelerator, self.models = rewards, accelerator, list(models)
        self.executor = CallExecutor(1, "rewards")
        # On the default stream, each sync of a reward would wait for generation too
        self.stream: torch.cuda.Stream | None = None
        self.loop: Any = None
        if any(rewards.is_async):
            _, self.loop, is_ready = start_event_loop_in_daemon(name="PaCoGRPOTrainer-AsyncLoop")
            is_ready.wait()
            abandon_at_exit(self.loop)
            # The gradient mode belongs to the thread, where calls interleave: set it once
            self.loop.call_soon_threadsafe(torch.set_grad_enabled, False)
            # A new thread starts on the first device, not on that of this process
            if accelerator.device.type == "cuda":
                self.loop.call_soon_threadsafe(torch.cuda.set_device, accelerator.device)

    @contextmanager
    def scoring(self, round: Round, state: TrainerState) -> Iterator["RoundScoring"]:
        """
        Score the completions that are added within the context, whose end waits for the rewards and gathers them.

        Collective: call on all ranks. An error, or a signal, drops the calls.
        """
        scoring = RoundScoring(self, round, state)
        try:
            yield scoring
            scoring.finish()
        finally:
            scoring.drop()


class RoundScoring:
    """The rewards of a round while it is generated; `scores` has them in the end."""

    scores: Scores

    def __init__(self, scorer: RewardScorer, round: Round, state: TrainerState):
        self.scorer, self.round, self.state = scorer, round, state
        self.rewards, self.accelerator = scorer.rewards, scorer.accelerator
        indices, compares = range(len(self.rewards.functions)), self.rewards.compares_group
        self._grouped = [k for k in indices if compares[k]]
        self._async = [k for k in indices if self.rewards.is_async[k] and not compares[k]]
        self._sync = [k for k in indices if not self.rewards.is_async[k] and not compares[k]]
        # Completions with their arguments: for the next sync call, and for rewards that compare a group
        self._waiting: list[tuple[int, dict]] = []
        self._of_groups: list[tuple[int, dict]] = []
        self._calls: list[_Call] = []
        self._num_added = 0
        self._slots = asyncio.Semaphore(_MAX_ASYNC_CALLS)

    def add(self, completions: list[Completion]) -> None:
        """Add completions, and submit full calls. Collective: call on all ranks equally often."""
        added = [(done.number, {**self.round.row(done.row_number), "completions": done.image}) for done in completions]
        if self._async and added:
            self._submit(self._async, added)
        if self._sync:
            self._waiting.extend(added)
            if not self.scorer.models:
                self._submit_waiting(IMAGES_PER_CALL)
        if self._grouped:
            self._of_groups.extend(added)
        self._num_added += 1
        if self.accelerator.num_processes == 1 or self._num_added % _BATCHES_PER_AGREEMENT == 0:
            self._raise_together()

    def finish(self) -> None:
        """Wait for the rewards and gather them on every process."""
        started = time.perf_counter()
        groups = self._exchange_groups() if self._grouped else []
        models = self.scorer.models
        with placed_on(models, self.accelerator.device) if models else nullcontext():
            self._submit_waiting(1)
            for group in groups:
                for index in self._grouped:
                    self._submit([index], group)
            is_pending = True
            while is_pending:  # no process is long in an exchange, none stops alone
                calls = [call.values for call in self._calls]
                is_pending = self._raise_together(wait(calls, _SECONDS_PER_AGREEMENT, FIRST_EXCEPTION).not_done)
        waited = time.perf_counter() - started
        rewards, extra, logged = self._gather()
        hidden = _union_seconds([call.span for call in self._calls], started)
        self.scores = Scores(rewards, extra, logged, waited, hidden)

    def drop(self) -> None:
        """Cancel what is left of an interrupted round."""
        for call in self._calls:
            call.values.cancel()
        # One may be running: its model should not leave the accelerator, nor random states be saved, meanwhile
        is_async = self.rewards.is_async
        wait([call.values for call in self._calls if not is_async[call.reward_indices[0]]], _STOP_TIMEOUT)

    def _submit_waiting(self, least: int) -> None:
        while len(self._waiting) >= least:
            self._submit(self._sync, self._waiting[:IMAGES_PER_CALL])
            del self._waiting[:IMAGES_PER_CALL]

    def _submit(self, indices: list[int], batch: list[tuple[int, dict]]) -> None:
        """Start a call of some rewards: on the thread, or on the event loop if they are async."""
        call, rows = _Call(indices, [completion_number for completion_number, _ in batch]), [row for _, row in batch]
        arguments: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        arguments |= {
            "prompts": [row["prompt"] for row in rows],
            "completion_ids": None,  # as in TRL
            "panel_images": [split_grid(row["completions"], row["rows"], row["cols"]) for row in rows],
            "num_generations": self.round.num_generations,
            "trainer_state": self.state,
            "log_extra": lambda column, values: call.extra[column].extend(values),
            "log_metric": lambda name, value: call.metrics[name].append(float(value)),
        }
        if self.rewards.is_async[indices[0]]:
            call.values = asyncio.run_coroutine_threadsafe(self._wait_for(call, arguments), self.scorer.loop)
        else:
            # A new thread starts on the first device, not on that of this process
            device = torch.cuda.current_device() if self.accelerator.device.type == "cuda" else None
            call.values = self.scorer.executor.submit(self._compute, call, arguments, device)
        self._calls.append(call)

    @torch.no_grad()
    def _compute(self, call: _Call, arguments: dict, device: int | None) -> list[list]:
        """Call the rewards that compute; runs on the rewards' thread."""
        if any(earlier.values.done() and earlier.values.exception() for earlier in self._calls if earlier is not call):
            return []  # the run stops: an expensive reward is not computed for nothing
        call.span = [time.perf_counter(), torch.inf]
        scorer, stream = self.scorer, nullcontext()
        if device is not None:
            torch.cuda.set_device(device)
            if scorer.stream is None:
                scorer.stream = torch.cuda.Stream()
            scorer.stream.wait_stream(torch.cuda.default_stream())  # it moved the weights
            stream = torch.cuda.stream(scorer.stream)
        with stream:
            values = [self.rewards.call(index, **arguments) for index in call.reward_indices]
        call.span[1] = time.perf_counter()
        return values

    async def _wait_for(self, call: _Call, arguments: dict) -> list[list]:
        """Call the async rewards; runs on the event loop."""
        async with self._slots:
            call.span = [time.perf_counter(), torch.inf]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self.rewards.call(index, **arguments)) for index in call.reward_indices]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from errors.exceptions[0].__cause__
            call.span[1] = time.perf_counter()
        return [task.result() for task in tasks]

    def _exchange_groups(self) -> list[list[tuple[int, dict]]]:
        """Return the groups that this process scores whole, each in order. Collective: call on all ranks."""
        by_group: dict[int, list[tuple[int, dict]]] = defaultdict(list)
        for completion_number, arguments in self._of_groups:
            by_group[self.round.completions[completion_number].group].append((completion_number, arguments))
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        group_numbers, groups = sorted(set(gather_object(list(by_group)))), []
        # A group for each process at a time: this bounds the memory
        for first in range(0, len(group_numbers), processes):
            block = group_numbers[first : first + processes]
            added = dict(gather_object([completion for group in block for completion in by_group[group]]))
            if rank < len(block):
                mine = sorted(n for n in added if self.round.completions[n].group == block[rank])
                groups.append([(n, added[n]) for n in mine])
        return groups

    def _gather(self) -> tuple[torch.Tensor, dict[str, list], list]:
        """Return values, logged columns and metrics of all calls of all processes. Collective: call on all ranks."""
        error = None
        for call in self._calls:
            if wrong := [column for column, values in call.extra.items() if len(values) != len(call.numbers)]:
                error = RewardError(
                    f"Rewards logged {len(call.extra[wrong[0]])} values in the column '{wrong[0]}' (`log_extra`) for "
                    f"{len(call.numbers)} images. Log one per image, and use different columns for different rewards."
                )
        self._raise_together(error=error)
        results = gather_object(
            [
                (call.numbers, call.reward_indices, call.values.result(), dict(call.extra), dict(call.metrics))
                for call in self._calls
            ]
        )
        rewards = torch.full((len(self.round.completions), len(self.rewards.functions)), torch.nan)
        loggers = {(column, tuple(indices)) for _, indices, _, logged, _ in results for column in logged}
        columns = [column for column, _ in loggers]
        if shared := {column for column in columns if columns.count(column) > 1}:
            raise RewardError(f"Several rewards log the column(s) {', '.join(sorted(shared))}. Give each its own.")
        extra: dict[str, list] = {column: [None] * len(rewards) for column in sorted(columns)}
        for numbers, indices, values, logged, _ in results:
            for index, column in zip(indices, values, strict=True):
                rewards[numbers, index] = torch.tensor([math.nan if value is None else value for value in column])
            for name, cells in logged.items():
                for number, cell in zip(numbers, cells, strict=True):
                    extra[name][number] = cell
        return rewards, extra, [(set(numbers), len(numbers), metrics) for numbers, *_, metrics in results]

    def _raise_together(self, pending: Iterable = (), error: BaseException | None = None) -> bool:
        """Raise on all processes if a call of one has failed or one must stop; return whether one has pending calls."""
        done = (call.values.exception() for call in self._calls if call.values.done())
        error = next((exception for exception in done if exception is not None), error)
        stop, is_bad, is_pending = agree(self.accelerator, error is not None, bool(pending))
        if not stop and not is_bad:
            return bool(is_pending)
        if stop:
            raise Stopped(stop, by_all=True)
        texts = [] if error is None else [f"process {self.accelerator.process_index}: {error}"]
        if self.accelerator.num_processes > 1:
            self.drop()  # no process waits for another's call meanwhile
            texts = gather_object(texts)
        if isinstance(error, RewardError):
            raise error
        raise RewardError(f"A reward failed on {'; '.join(texts)}.") from error


def offloadable_models(rewards: Iterable[Callable], device: torch.device) -> list[nn.Module]:
    """Move models to the CPU, except from devices other than `device`: `model` of a sync reward or its `judge`."""
    owners = [getattr(reward, "judge", reward) for reward in rewards if not is_async_reward(reward)]
    loaded = [model for owner in owners if isinstance(model := getattr(owner, "model", None), nn.Module)]
    movable = {torch.device("cpu"), torch.empty(0, device=device).device}  # `cuda` is one of several
    models = [model for model in loaded if {weight.device for weight in model.parameters()} <= movable]
    return [model.to("cpu") for model in dict.fromkeys(models)]  # rewards may share a judge


def _union_seconds(spans: list[list[float]], until: float) -> float:
    """Return the seconds before `until` in which at least one of the spans was running."""
    total, end = 0.0, -torch.inf
    for begin, stop in sorted(spans):
        begin, stop = max(begin, end), min(stop, until)
        total += max(stop - begin, 0.0)
        end = max(end, stop)
    return total
