# SPDX-License-Identifier: Apache-2.0
"""Score the completions of a round while its images are generated, and gather the rewards on every process."""

import asyncio
import functools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
from ..utils.stopping import agree, raise_stop
from .checks import is_async_reward
from .errors import RewardError
from .weighting import Rewards


# Large enough for batched reward models, and small enough to hide most calls behind generation. At the paper's
# settings a process generates 96 images, and 5 of 6 calls are hidden.
COMPLETIONS_PER_CALL = 16
# Concurrent calls of async rewards
_MAX_ASYNC_CALLS = 16
# Batches between agreements of the processes to continue. No process may stop alone, but each exchange waits for all.
_BATCHES_PER_AGREEMENT = 4
# Seconds between such agreements while processes wait for rewards
_SECONDS_PER_AGREEMENT = 1.0
# Seconds that an interrupted process waits for running calls
_STOP_TIMEOUT = 10.0


class LoggedMetrics(NamedTuple):
    """What a call of rewards logged by `log_metric`."""

    # Completions that it scored and that have not been replaced since
    completion_indices: set[int]
    num_scored: int
    entries: dict[str, list[float]]


@dataclass
class Scores:
    """Scores of a round, indexed by completion, the same on every process."""

    rewards: torch.Tensor  # (completions, rewards), on the CPU, NaN where a reward is missing
    extra: dict[str, list]  # columns that rewards logged (`log_extra`)
    logged_metrics: list[LoggedMetrics]  # one for each call
    wait_seconds: float  # time that this process waited for rewards after its last image
    hidden_seconds: float  # time in which rewards were computed during generation

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics that rewards logged, averaged over the calls of all processes."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for logged in self.logged_metrics:
            # A call counts less if some of its completions have been replaced
            share = len(logged.completion_indices) / logged.num_scored
            for name, value in ((name, value) for name, values in logged.entries.items() for value in values):
                sums[name] = [sums[name][0] + share * value, sums[name][1] + share]
        return {name: total / weight for name, (total, weight) in sorted(sums.items()) if weight}

    def replace(self, completion_indices: list[int], new: "Scores") -> None:
        """Replace the scores of some completions."""
        self.rewards[completion_indices] = new.rewards[completion_indices]
        replaced = set(completion_indices)
        self.logged_metrics = [
            logged._replace(completion_indices=logged.completion_indices - replaced) for logged in self.logged_metrics
        ] + new.logged_metrics
        for column in self.extra | new.extra:
            cells = self.extra.setdefault(column, [None] * len(self.rewards))
            for completion_index in completion_indices:
                cells[completion_index] = new.extra[column][completion_index] if column in new.extra else None


@dataclass
class _CallRecord:
    """What is written down while a call runs: its time, and what its rewards log."""

    started: float = math.inf
    ended: float = math.inf
    extra: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class _Call(NamedTuple):
    """A call of one or more rewards on a batch of completions."""

    reward_indices: list[int]
    completion_indices: list[int]
    record: _CallRecord
    values: Future  # result: one list of values per reward


def reward_arguments(
    rows: Sequence[dict[str, Any]],
    num_generations: int,
    state: TrainerState,
    log_extra: Callable[[str, list], None],
    log_metric: Callable[[str, float], None],
) -> dict[str, Any]:
    """Return the arguments of a reward's call for rows of the dataset with their images, `completions`."""
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    return columns | {
        "prompts": [row["prompt"] for row in rows],
        "completion_ids": None,  # as in TRL
        "panel_images": [split_grid(row["completions"], row["rows"], row["cols"]) for row in rows],
        "num_generations": num_generations,
        "trainer_state": state,
        "log_extra": log_extra,
        "log_metric": log_metric,
    }


class RewardScorer:
    """
    Calls rewards while images are generated.

    Async rewards get each batch immediately. Sync rewards run on one thread, in order, with `COMPLETIONS_PER_CALL`
    completions at a time. Timing does not decide which completions share a call: a reward may round differently in
    another batch, and a resumed run would get other values. Rewards with a parameter `num_generations` compare the
    completions of a group: they get all of them in one call, after generation. With `models` (`offload_rewards`), sync
    rewards are also called after generation, while their models are on the accelerator.
    """

    def __init__(self, rewards: Rewards, accelerator: Accelerator, models: Sequence[nn.Module] = ()):
        self.rewards = rewards
        self.accelerator = accelerator
        self.models = list(models)
        self.executor = CallExecutor(1, "rewards")
        # Rewards have a stream of their own: a reward that syncs on the default stream would also wait for generation
        self.stream: torch.cuda.Stream | None = None
        self.loop: Any = None
        if any(rewards.is_async):
            _, self.loop, is_ready = start_event_loop_in_daemon(name="PaCoGRPOTrainer-AsyncLoop")
            is_ready.wait()
            abandon_at_exit(self.loop)
            # The gradient mode belongs to a thread, and calls interleave on it: set it once
            self.loop.call_soon_threadsafe(torch.set_grad_enabled, False)
            # A new thread starts on the first device, not on this process's
            if accelerator.device.type == "cuda":
                self.loop.call_soon_threadsafe(torch.cuda.set_device, accelerator.device)

    def submit(self, call: Callable[[], Any]) -> Future:
        """Run a call of sync rewards on their thread, after the calls that were submitted before."""
        # A new thread starts on the first device, not on this process's
        device = torch.cuda.current_device() if self.accelerator.device.type == "cuda" else None
        return self.executor.submit(self._run, call, device)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Future:
        """Start a coroutine of async rewards on the event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    @torch.no_grad()
    def _run(self, call: Callable[[], Any], device: int | None) -> Any:
        """Run a call on the thread of sync rewards, on a GPU on their stream."""
        if device is None:
            return call()
        torch.cuda.set_device(device)
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        # The weights of rewards are moved on the default stream
        self.stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(self.stream):
            return call()

    @contextmanager
    def scoring(self, scored_round: Round, state: TrainerState) -> Iterator["RoundScoring"]:
        """
        Score the completions added within the context; on exit, wait for the rewards and gather them.

        Collective: call on all ranks. An error or a signal cancels the calls.
        """
        scoring = RoundScoring(self, scored_round, state)
        try:
            yield scoring
            scoring.finish()
        finally:
            scoring.drop()


class RoundScoring:
    """Rewards of a round in progress."""

    def __init__(self, scorer: RewardScorer, scored_round: Round, state: TrainerState):
        self.scorer = scorer
        self.round = scored_round
        self.state = state
        self.rewards, self.accelerator = scorer.rewards, scorer.accelerator
        indices = range(len(self.rewards.functions))
        compares_group = self.rewards.compares_group
        self._group_rewards = [k for k in indices if compares_group[k]]
        self._async_rewards = [k for k in indices if self.rewards.is_async[k] and not compares_group[k]]
        self._sync_rewards = [k for k in indices if not self.rewards.is_async[k] and not compares_group[k]]
        # Completion indices and arguments, for the next sync call and for rewards that compare a group
        self._waiting_rows: list[tuple[int, dict]] = []
        self._group_rows: list[tuple[int, dict]] = []
        self._calls: list[_Call] = []
        self._num_batches = 0
        self._slots = asyncio.Semaphore(_MAX_ASYNC_CALLS)
        self._scores: Scores | None = None

    @property
    def scores(self) -> Scores:
        """Scores of the round, after [`~RewardScorer.scoring`] has ended."""
        if self._scores is None:
            raise RuntimeError("A round has no scores before `RewardScorer.scoring` has ended.")
        return self._scores

    def add(self, completions: list[Completion]) -> None:
        """Add completions and submit full calls. Collective: call equally often on all ranks."""
        rows = [
            (completion.index, {**self.round.reward_row(completion.row_index), "completions": completion.image})
            for completion in completions
        ]
        if self._async_rewards and rows:
            self._submit(self._async_rewards, rows)
        if self._sync_rewards:
            self._waiting_rows.extend(rows)
            if not self.scorer.models:
                self._submit_waiting(COMPLETIONS_PER_CALL)
        if self._group_rewards:
            self._group_rows.extend(rows)
        self._num_batches += 1
        if self.accelerator.num_processes == 1 or self._num_batches % _BATCHES_PER_AGREEMENT == 0:
            self._raise_together()

    def finish(self) -> None:
        """Wait for the rewards and gather them on every process."""
        start_time = time.perf_counter()
        groups = self._exchange_groups() if self._group_rewards else []
        models = self.scorer.models
        with placed_on(models, self.accelerator.device) if models else nullcontext():
            self._submit_waiting(1)
            for group in groups:
                for index in self._group_rewards:
                    self._submit([index], group)
            is_pending = True
            while is_pending:  # exchange often, so that all processes stop together
                calls = [call.values for call in self._calls]
                is_pending = self._raise_together(wait(calls, _SECONDS_PER_AGREEMENT, FIRST_EXCEPTION).not_done)
        wait_seconds = time.perf_counter() - start_time
        values, extra, logged = self._gather()
        hidden = _union_seconds(((call.record.started, call.record.ended) for call in self._calls), start_time)
        self._scores = Scores(values, extra, logged, wait_seconds, hidden)

    def drop(self) -> None:
        """Cancel calls that have not started, and wait for running ones. After a finished round there are none."""
        for call in self._calls:
            call.values.cancel()
        # While a call runs, its model must stay on the accelerator, and random states must not be saved
        is_async = self.rewards.is_async
        wait([call.values for call in self._calls if not is_async[call.reward_indices[0]]], _STOP_TIMEOUT)

    def _submit_waiting(self, min_rows: int) -> None:
        while len(self._waiting_rows) >= min_rows:
            self._submit(self._sync_rewards, self._waiting_rows[:COMPLETIONS_PER_CALL])
            del self._waiting_rows[:COMPLETIONS_PER_CALL]

    def _submit(self, indices: list[int], batch: list[tuple[int, dict]]) -> None:
        """Start a call of some rewards, on the event loop if they are async, otherwise on the thread."""
        record = _CallRecord()
        arguments = reward_arguments(
            [row for _, row in batch], self.round.num_generations, self.state,
            log_extra=lambda column, values: record.extra[column].extend(values),
            log_metric=lambda name, value: record.metrics[name].append(float(value)),
        )  # fmt: skip
        if self.rewards.is_async[indices[0]]:
            values = self.scorer.start(self._call_async(indices, arguments, record))
        else:
            values = self.scorer.submit(functools.partial(self._call_sync, indices, arguments, record))
        self._calls.append(_Call(indices, [completion_index for completion_index, _ in batch], record, values))

    def _call_sync(self, indices: list[int], arguments: dict, record: _CallRecord) -> list[list]:
        """Call sync rewards; runs on their thread."""
        # The run is about to stop if a call has failed: do not compute an expensive reward for nothing
        ended = [call.values for call in self._calls if call.values.done() and not call.values.cancelled()]
        if any(values.exception() for values in ended):
            return []
        record.started = time.perf_counter()
        values = [self.rewards.call(index, **arguments) for index in indices]
        record.ended = time.perf_counter()
        return values

    async def _call_async(self, indices: list[int], arguments: dict, record: _CallRecord) -> list[list]:
        """Call async rewards; runs on the event loop."""
        async with self._slots:
            record.started = time.perf_counter()
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self.rewards.call(index, **arguments)) for index in indices]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from errors.exceptions[0].__cause__
            record.ended = time.perf_counter()
        return [task.result() for task in tasks]

    def _exchange_groups(self) -> list[list[tuple[int, dict]]]:
        """Collect the groups that this process scores, each complete and in order. Collective: call on all ranks."""
        by_group: dict[int, list[tuple[int, dict]]] = defaultdict(list)
        for completion_index, arguments in self._group_rows:
            by_group[self.round.completions[completion_index].group].append((completion_index, arguments))
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        groups_here = sorted(set(gather_object(list(by_group))))
        groups = []
        # Exchange one group per process at a time, to bound the memory
        for first in range(0, len(groups_here), processes):
            block = groups_here[first : first + processes]
            rows = dict(gather_object([row for group in block for row in by_group[group]]))
            if rank < len(block):
                indices = sorted(n for n in rows if self.round.completions[n].group == block[rank])
                groups.append([(n, rows[n]) for n in indices])
        return groups

    def _gather(self) -> tuple[torch.Tensor, dict[str, list], list[LoggedMetrics]]:
        """Gather the values, logged columns and metrics of all calls. Collective: call on all ranks."""
        error = None
        for call in self._calls:
            extra, num_scored = call.record.extra, len(call.completion_indices)
            if wrong := [column for column, cells in extra.items() if len(cells) != num_scored]:
                error = RewardError(
                    f"Rewards logged {len(extra[wrong[0]])} value(s) in the column '{wrong[0]}' (`log_extra`) "
                    f"for {num_scored} images. Log one value per image, and a different column for each reward."
                )
        self._raise_together(error=error)
        results = gather_object(
            [
                (
                    call.completion_indices,
                    call.reward_indices,
                    call.values.result(),
                    dict(call.record.extra),
                    dict(call.record.metrics),
                )
                for call in self._calls
            ]
        )
        values = torch.full((len(self.round.completions), len(self.rewards.functions)), torch.nan)
        loggers = {(column, tuple(indices)) for _, indices, _, logged, _ in results for column in logged}
        columns = [column for column, _ in loggers]
        if duplicates := {column for column in columns if columns.count(column) > 1}:
            raise RewardError(
                f"Several rewards log the column(s) {', '.join(sorted(duplicates))}. Give each reward its own."
            )
        extra = {column: [None] * len(values) for column in sorted(columns)}
        for scored, indices, call_values, logged, _ in results:
            for index, column in zip(indices, call_values, strict=True):
                values[scored, index] = torch.tensor([math.nan if value is None else value for value in column])
            for name, cells in logged.items():
                for completion_index, cell in zip(scored, cells, strict=True):
                    extra[name][completion_index] = cell
        return values, extra, [LoggedMetrics(set(scored), len(scored), metrics) for scored, *_, metrics in results]

    def _raise_together(self, pending: Iterable = (), error: BaseException | None = None) -> bool:
        """Raise on all processes if any has a failed call or must stop; return whether any has pending calls."""
        exceptions = (call.values.exception() for call in self._calls if call.values.done())
        error = next((exception for exception in exceptions if exception is not None), error)
        stop, is_bad, is_pending = agree(self.accelerator, error is not None, bool(pending))
        if not stop and not is_bad:
            return bool(is_pending)
        if stop:
            raise_stop(stop, by_all=True)
        texts = [] if error is None else [f"process {self.accelerator.process_index}: {error}"]
        if self.accelerator.num_processes > 1:
            # All processes wait for the exchange: cancel calls first
            self.drop()
            texts = gather_object(texts)
        if isinstance(error, RewardError):
            raise error
        raise RewardError(f"A reward failed on {'; '.join(texts)}.") from error


def move_models_to_cpu(rewards: Iterable[Callable], device: torch.device) -> list[nn.Module]:
    """Move the models of sync rewards and their judges to the CPU and return them; leave models on other devices."""
    owners = [getattr(reward, "judge", reward) for reward in rewards if not is_async_reward(reward)]
    models = [model for owner in owners if isinstance(model := getattr(owner, "model", None), nn.Module)]
    # `cuda` may name one of several devices; a tensor on it has the index
    movable = {torch.device("cpu"), torch.empty(0, device=device).device}
    models = [model for model in models if {weight.device for weight in model.parameters()} <= movable]
    return [model.to("cpu") for model in dict.fromkeys(models)]  # rewards may share a judge


def _union_seconds(spans: Iterable[tuple[float, float]], until: float) -> float:
    """Return the seconds before `until` covered by at least one span."""
    total = 0.0
    end = -torch.inf
    for begin, stop in sorted(spans):
        begin = max(begin, end)
        stop = min(stop, until)
        total += max(stop - begin, 0.0)
        end = max(end, stop)
    return total
