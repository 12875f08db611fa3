# SPDX-License-Identifier: Apache-2.0
"""
The rewards of a run or of its evaluation: call them, gather their values, check these, aggregate them, and log them.

Failures never become numbers: what a reward returns as `None` is NaN here and excluded, and an exception stops the run with
the reward's name.
"""

import asyncio
import inspect
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset
from datasets import Image as ImageFeature
from PIL import Image
from torch import nn
from transformers import TrainerState
from trl.trainer.utils import get_callable_name, is_async_callable, start_event_loop_in_daemon

from ..data import split_grid
from ..data.image_sets import SEPARATE
from ..rollout.sampler import on_device
from ..utils.fingerprint import describe_code
from ..utils.stopping import CallExecutor, Stopped, agree, leave_calls
from ..utils.text import shorten
from .aggregation import AggregationDetails, aggregate_rewards


logger = get_logger(__name__)

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
_PATIENCE = 10.0

# What a reward gets besides the columns of the dataset, see `RewardRunner`
_FROM_TRAINER = {
    "prompts", "completions", "completion_ids", "num_generations", "panel_images", "trainer_state", "log_extra",
    "log_metric",
}  # fmt: skip
_ALWAYS_GIVEN = _FROM_TRAINER | {"rows", "cols"}


class RewardError(RuntimeError):
    """A reward raised, did not return a list of numbers, or has a judge that is down. It stops a run."""


@dataclass
class Scores:
    """Scores of all images of a round or an evaluation, in the order of their numbers, the same on every process."""

    rewards: torch.Tensor  # (images, rewards), on the CPU, NaN where one could not be computed
    extra: dict[str, list]  # columns that rewards logged (`log_extra`)
    logged: list[tuple[set[int], int, dict[str, list[float]]]]  # images of a call, their number, and its `log_metric`
    waited: float  # seconds this process waited for rewards after its last image was generated
    hidden: float  # seconds in which rewards were computed during generation

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that rewards logged, averaged over the calls of all processes."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for images, count, entries in self.logged:
            share = len(images) / count  # of a call whose other images were replaced
            for name, value in ((name, value) for name, values in entries.items() for value in values):
                sums[name] = [sums[name][0] + share * value, sums[name][1] + share]
        return {name: total / weight for name, (total, weight) in sorted(sums.items()) if weight}


@dataclass
class _Call:
    """A call of some rewards with some images."""

    reward_indices: list[int]
    image_numbers: list[int]
    values: Future = field(init=False)  # of a list of values for each reward
    span: list[float] = field(default_factory=list)  # when it started and ended
    extra: dict[str, list] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class RewardRunner:
    """
    Rewards with their weights, called while images are generated.

    Async rewards get each batch at once. The others run on one thread, with `IMAGES_PER_CALL` images at a time, in order:
    which images share a call does not depend on timing, so that a reward whose rounding depends on its batch gives the
    same values in a resumed run. A reward with a parameter `num_generations` compares the images of a prompt: it gets all
    of them in one call, after generation. With `models` (`offload_rewards`) sync rewards are called after generation too,
    while their models are on the accelerator.
    """

    def __init__(
        self,
        reward_funcs: Callable | list[Callable],
        weights: list[float] | None = None,
        required: list | None = None,
        method: str = "sum_then_normalize",
        threshold: float | str = "mean",
    ):
        self.functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        self.names = check_reward_functions(self.functions)
        self.weights = check_reward_weights(weights, self.names, method)
        self.required = check_required(required, self.names, self.weights)
        if method == "log_tamed" and int((self.weights != 0).sum()) == 1:
            method = "sum_then_normalize"  # one reward has nothing to be balanced with
        self.method, self.threshold = method, threshold
        # An image that lacks one of these is not scored
        self.is_needed = torch.tensor(self.required) & (self.weights != 0)  # (K,)
        self._is_first_round = True
        self._warned_of: set[str] = set()
        indices = range(len(self.functions))
        # A call of a reward with a judge on a server returns a coroutine, which its type does not tell
        self.is_async = [getattr(each, "is_async", False) or is_async_callable(each) for each in self.functions]
        self.compares_group = [any(p.name == "num_generations" for p in _parameters(each)) for each in self.functions]
        self._grouped = [k for k in indices if self.compares_group[k]]
        self._async = [k for k in indices if self.is_async[k] and not self.compares_group[k]]
        self._sync = [k for k in indices if not self.is_async[k] and not self.compares_group[k]]
        self._calls: list[_Call] = []
        self._loop: Any = None

    @cached_property
    def descriptions(self) -> dict[str, dict[str, Any]]:
        """What the values of each reward depend on, by its name."""
        settings = zip(self.names, self.functions, self.weights.tolist(), self.required, strict=True)
        return {
            name: {**describe_code(function), "weight": weight, "required": required}
            for name, function, weight, required in settings
        }

    # ---- Calls ----

    def prepare(self, accelerator: Accelerator, models: Sequence[nn.Module] = ()) -> "RewardRunner":
        """Start the threads of calls; `models` are on the accelerator during calls only."""
        self.accelerator, self.models = accelerator, list(models)
        self._executor = CallExecutor(1, "rewards")
        # On the default stream each of a reward's many waits would be for all that generation has queued
        self._stream: torch.cuda.Stream | None = None
        if any(self.is_async):
            _, self._loop, is_ready = start_event_loop_in_daemon(name="PaCoGRPOTrainer-AsyncLoop")
            is_ready.wait()
            leave_calls(self._loop)
            # The gradient mode belongs to the thread, where calls interleave: set it once
            self._loop.call_soon_threadsafe(torch.set_grad_enabled, False)
            # A new thread starts on the first device, not on that of this process
            if accelerator.device.type == "cuda":
                self._loop.call_soon_threadsafe(torch.cuda.set_device, accelerator.device)
        return self

    def start(self, num_generations: int) -> None:
        """Start a new set of images, `num_generations` for each prompt; drop what is left of an interrupted one."""
        for call in self._calls:
            call.values.cancel()
        # One may be running: its model should not leave the accelerator, nor random states be saved, meanwhile
        wait([call.values for call in self._calls if not self.is_async[call.reward_indices[0]]], _PATIENCE)
        self.num_generations = num_generations
        # Numbers and arguments of single images: for the next sync call, and for rewards that compare a group
        self._waiting: list[tuple[int, dict]] = []
        self._images: list[tuple[int, dict]] = []
        self._calls = []
        self._num_added = 0
        self._slots = asyncio.Semaphore(_MAX_ASYNC_CALLS)

    def add(self, numbers: list[int], rows: list[dict], images: list[Image.Image], state: TrainerState) -> None:
        """
        Add images with their numbers and dataset rows, and submit full calls. Collective: call on all ranks equally often.

        Numbers count the images of a round or an evaluation, prompt by prompt.
        """
        arguments = [
            (number, {**row, "completions": image}) for number, row, image in zip(numbers, rows, images, strict=True)
        ]
        if self._async and arguments:
            self._submit(self._async, arguments, state)
        if self._sync:
            self._waiting.extend(arguments)
            while len(self._waiting) >= IMAGES_PER_CALL and not self.models:
                self._submit(self._sync, self._waiting[:IMAGES_PER_CALL], state)
                del self._waiting[:IMAGES_PER_CALL]
        if self._grouped:
            self._images.extend(arguments)
        self._num_added += 1
        if self.accelerator.num_processes == 1 or self._num_added % _BATCHES_PER_AGREEMENT == 0:
            self._raise_together()

    def finish(self, state: TrainerState) -> Scores:
        """Wait for the rewards and gather them on every process; an image that was added twice counts once."""
        started = time.perf_counter()
        groups = self._exchange_groups() if self._grouped else []
        with on_device(self.models, self.accelerator.device) if self.models else nullcontext():
            while self._waiting:
                self._submit(self._sync, self._waiting[:IMAGES_PER_CALL], state)
                del self._waiting[:IMAGES_PER_CALL]
            for group in groups:
                for index in self._grouped:
                    self._submit([index], group, state)
            is_pending = True
            while is_pending:  # no process is long in an exchange, none stops alone
                calls = [call.values for call in self._calls]
                is_pending = self._raise_together(wait(calls, _SECONDS_PER_AGREEMENT, FIRST_EXCEPTION).not_done)
        waited = time.perf_counter() - started
        rewards, extra, logged = self._gather()
        hidden = _union_seconds([call.span for call in self._calls], started)
        self.start(self.num_generations)
        return Scores(rewards, extra, logged, waited, hidden)

    def _gather(self) -> tuple[torch.Tensor, dict[str, list], list]:
        """Return values, logged columns and metrics of all calls of all processes. Collective: call on all ranks."""
        problem = None
        for call in self._calls:
            if wrong := [column for column, values in call.extra.items() if len(values) != len(call.image_numbers)]:
                problem = RewardError(
                    f"Rewards logged {len(call.extra[wrong[0]])} values in the column '{wrong[0]}' (`log_extra`) for "
                    f"{len(call.image_numbers)} images. Log one per image, and use different columns for different rewards."
                )
        self._raise_together(problem=problem)
        results = gather_object(
            [
                (call.image_numbers, call.reward_indices, call.values.result(), dict(call.extra), dict(call.metrics))
                for call in self._calls
            ]
        )
        numbers = [number for images, *_ in results for number in images]
        rewards = torch.full((max(numbers) + 1, len(self.functions)), torch.nan)
        loggers = {(column, tuple(indices)) for _, indices, _, logged, _ in results for column in logged}
        columns = [column for column, _ in loggers]
        if shared := {column for column in columns if columns.count(column) > 1}:
            raise RewardError(f"Several rewards log the column(s) {', '.join(sorted(shared))}. Give each its own.")
        extra: dict[str, list] = {column: [None] * len(rewards) for column in sorted(columns)}
        for images, indices, values, logged, _ in reversed(results):  # the first of two results counts
            for index, column in zip(indices, values, strict=True):
                rewards[images, index] = torch.tensor([math.nan if value is None else value for value in column])
            for name, cells in logged.items():
                for image, cell in zip(images, cells, strict=True):
                    extra[name][image] = cell
        return rewards, extra, [(set(images), len(images), metrics) for images, *_, metrics in reversed(results)]

    def call(self, index: int, **arguments) -> Any:
        """Call a reward: values, or a coroutine of them. Raises `RewardError` with its name."""
        name, count = self.names[index], len(arguments["completions"])
        if self.is_async[index]:
            return self._call_async(index, arguments)
        try:
            values = self.functions[index](**_copied(arguments, {}))
        except (Exception, SystemExit) as error:
            raise _named_error(name, error) from error
        return _check_rewards(values, name, count)

    async def _call_async(self, index: int, arguments: dict) -> list[float | None]:
        name = self.names[index]
        try:
            values = self.functions[index](**_copied(arguments, {}))
            if inspect.isawaitable(values):  # a subclass may have a call of its own
                values = await values
        except (Exception, SystemExit) as error:  # which would end the event loop's thread alone
            raise _named_error(name, error) from error
        return _check_rewards(values, name, len(arguments["completions"]))

    def _submit(self, rewards: list[int], batch: list[tuple[int, dict]], state: TrainerState) -> None:
        """Start a call of some rewards on the thread or, of async ones, on the event loop."""
        call, rows = _Call(rewards, [number for number, _ in batch]), [row for _, row in batch]
        arguments: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        arguments |= {
            "prompts": [row["prompt"] for row in rows],
            "completion_ids": None,  # as in TRL
            "panel_images": [split_grid(row["completions"], row["rows"], row["cols"]) for row in rows],
            "num_generations": self.num_generations,
            "trainer_state": state,
            "log_extra": lambda column, values: call.extra[column].extend(values),
            "log_metric": lambda name, value: call.metrics[name].append(float(value)),
        }
        if self.is_async[rewards[0]]:
            call.values = asyncio.run_coroutine_threadsafe(self._wait_for(call, arguments, self._slots), self._loop)
        else:
            # A new thread starts on the first device, not on that of this process
            device = torch.cuda.current_device() if self.accelerator.device.type == "cuda" else None
            call.values = self._executor.submit(self._compute, call, arguments, device)
        self._calls.append(call)

    @torch.no_grad()
    def _compute(self, call: _Call, arguments: dict, device: int | None) -> list[list]:
        """Call the rewards that compute; runs on the rewards' thread."""
        if any(earlier.values.done() and earlier.values.exception() for earlier in self._calls if earlier is not call):
            return []  # the run stops: an expensive reward is not computed for nothing
        call.span = [time.perf_counter(), torch.inf]
        stream: AbstractContextManager = nullcontext()
        if device is not None:
            torch.cuda.set_device(device)
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.default_stream())  # which moved the weights
            stream = torch.cuda.stream(self._stream)
        with stream:
            values = [self.call(index, **arguments) for index in call.reward_indices]
        call.span[1] = time.perf_counter()
        return values

    async def _wait_for(self, call: _Call, arguments: dict, slots: asyncio.Semaphore) -> list[list]:
        """Call the async rewards; runs on the event loop."""
        async with slots:
            call.span = [time.perf_counter(), torch.inf]
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self.call(index, **arguments)) for index in call.reward_indices]
            except BaseExceptionGroup as problems:
                raise problems.exceptions[0] from problems.exceptions[0].__cause__
            call.span[1] = time.perf_counter()
        return [task.result() for task in tasks]

    def _exchange_groups(self) -> list[list[tuple[int, dict]]]:
        """Return the groups that this process scores whole, each in the order of its images. Collective: call on all ranks."""
        by_prompt: dict[int, list[tuple[int, dict]]] = defaultdict(list)
        for number, image in self._images:
            by_prompt[number // self.num_generations].append((number, image))
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        prompts, groups = sorted(set(gather_object(list(by_prompt)))), []
        for first in range(0, len(prompts), processes):  # a group for each process at a time, which bounds the memory
            block = prompts[first : first + processes]
            images = dict(gather_object([image for prompt in block for image in by_prompt[prompt]]))
            if rank < len(block):
                numbers = sorted(number for number in images if number // self.num_generations == block[rank])
                groups.append([(number, images[number]) for number in numbers])
        return groups

    def _raise_together(self, pending: Iterable = (), problem: BaseException | None = None) -> bool:
        """Raise on all processes if a call of one has failed or one must stop; return whether one has pending calls."""
        done = (call.values.exception() for call in self._calls if call.values.done())
        problem = next((error for error in done if error is not None), problem)
        stop, is_bad, is_pending = agree(self.accelerator, problem is not None, bool(pending))
        if not stop and not is_bad:
            return bool(is_pending)
        self.start(self.num_generations)
        if stop:
            raise Stopped(stop, by_all=True)
        texts = [] if problem is None else [f"process {self.accelerator.process_index}: {problem}"]
        if self.accelerator.num_processes > 1:
            texts = gather_object(texts)
        raise problem or RewardError(f"A reward failed on {'; '.join(texts)}")

    # ---- Aggregation ----

    def aggregate(self, rewards: torch.Tensor, num_generations: int) -> tuple[torch.Tensor, AggregationDetails]:
        """Aggregate `(images, K)` rewards to `(images,)`, NaN where an image is not scored; see [`aggregate_rewards`]."""
        lowest = rewards.nan_to_num(torch.inf).amin(dim=0).tolist()
        for name, value, weight in zip(self.names, lowest, self.weights.tolist(), strict=True):
            if self.method == "log_tamed" and weight and value < 0 and name not in self._warned_of:
                self._warned_of.add(name)
                logger.warning(
                    f"The reward '{name}' is down to {value:g}: log-taming is for rewards from 0 up and leaves it as it is "
                    f"in such rounds, where it may outweigh the others (see `rewards/{name}/share`). Rescale it, to [0, 1] "
                    "for example, or use another `multi_objective_aggregation`."
                )
        return aggregate_rewards(rewards, self.weights, self.method, self.threshold, num_generations, self.required)

    def total(self, rewards: torch.Tensor, num_generations: int | None = None) -> torch.Tensor:
        """Compute the weighted sum whatever the aggregation, as TRL's `reward`: taming would make it jump."""
        # Without groups an optional reward cannot be replaced, and an image that lacks it has no sum
        required = None if num_generations is None else self.required
        return aggregate_rewards(
            rewards, self.weights, "sum_then_normalize", num_generations=num_generations, required=required
        )[0]

    # ---- Limits of failures ----

    def check_round(self, rewards: torch.Tensor, is_valid: torch.Tensor, args: Any, round_index: int) -> None:
        """Stop a run in which a required reward fails too often, or too many images or groups could not be scored."""
        where = f"round {round_index}"
        counts = torch.isnan(rewards).sum(dim=0).tolist()
        for name, count, is_needed in zip(self.names, counts, self.is_needed.tolist(), strict=True):
            # Rounded up: in a small round one image may fail
            if is_needed and count > math.ceil(args.max_reward_failures * len(rewards)):
                raise RewardError(
                    f"In {where} the required reward '{name}' gave no value (None) for {count} of {len(rewards)} images, above "
                    f"`max_reward_failures` = {args.max_reward_failures:g}{self._reasons([name])}. Find out why, raise the "
                    "limit, or make it optional (`reward_required`)."
                )
        groups = is_valid.view(-1, args.num_generations).any(dim=1)
        images_lost, groups_lost = 1 - is_valid.float().mean().item(), 1 - groups.float().mean().item()
        if not is_valid.any() or images_lost > args.max_excluded_images or groups_lost > args.max_excluded_groups:
            raise RewardError(
                f"In {where} {(~is_valid).sum().item()} of {len(is_valid)} images ({images_lost:.0%}) are excluded and "
                f"{(~groups).sum().item()} of {len(groups)} prompts ({groups_lost:.0%}) have fewer than two scored images; "
                f"`max_excluded_images` = {args.max_excluded_images:g} and `max_excluded_groups` = "
                f"{args.max_excluded_groups:g}. {self._describe_missing(rewards)} Find out why, or raise the limits."
            )
        is_first, self._is_first_round = self._is_first_round, False
        if not is_first:
            return
        for name, values, weight in zip(self.names, rewards.T, self.weights.tolist(), strict=True):
            scored = [group[~group.isnan()] for group in values.view(-1, args.num_generations)]
            scored = [group for group in scored if len(group) > 1]
            if weight and scored and all((group == group[0]).all() for group in scored):
                logger.warning(
                    f"In {where} the reward '{name}' gave the same value to all images of each prompt (for the first, "
                    f"{scored[0][0]:g}): where nothing differs, nothing is learned."
                )

    def check_scored(self, rewards: torch.Tensor, ceiling: float) -> None:
        """Stop if too many images of an evaluation could not be scored: the mean of the rest would mislead."""
        missing = torch.isnan(rewards[:, self.is_needed]).any(dim=1)
        if missing.all() or missing.float().mean().item() > ceiling:
            raise RewardError(
                f"{missing.sum().item()} of {len(missing)} evaluation images could not be scored, more than "
                f"`max_excluded_images` = {ceiling:g} allows. {self._describe_missing(rewards)} Find out why, or raise it."
            )

    def _describe_missing(self, rewards: torch.Tensor) -> str:
        counts = dict(zip(self.names, torch.isnan(rewards).sum(dim=0).tolist(), strict=True))
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        return f"Images without a value (None), by reward: {listed}{self._reasons([n for n in counts if counts[n]])}."

    def _reasons(self, names: Iterable[str]) -> str:
        """Say why rewards gave no value, as far as they know it: the last reason, of this process."""
        functions = dict(zip(self.names, self.functions, strict=True))
        found = [(name, getattr(functions[name], "problem", None)) for name in names]
        return "".join(f"; {name}: {problem}" for name, problem in found if problem)

    # ---- Metrics ----

    def metrics(self, rewards: torch.Tensor, total: torch.Tensor, details: AggregationDetails) -> dict[str, float]:
        """Describe rewards and their sums (`total`) that could be computed; leave out what is undefined."""
        metrics: dict[str, float] = {}
        described = zip(details.coefficient_of_variation, details.tamed, details.share, strict=True)
        for name, values, (h, tamed, share) in zip(self.names, rewards.T, described, strict=True):
            scored = values[~torch.isnan(values)]
            mean, first = scored.mean().item() if len(scored) else None, metrics.get(f"rewards/{self.names[0]}/mean")
            own = {
                "mean": mean,
                "std": scored.std().item() if len(scored) > 1 else None,
                "failure_rate": torch.isnan(values).float().mean().item(),
                "ratio": mean / first if first and mean is not None else None,
                "h": h,  # undefined for a reward with a negative value
                "tamed": float(tamed),
                "share": share,  # undefined where no reward differs within a group
            }
            metrics |= {f"rewards/{name}/{key}": value for key, value in own.items() if value is not None}
        summed = total[~torch.isnan(total)]
        if len(summed):
            metrics["reward"] = summed.mean().item()
        if len(summed) > 1:
            metrics["reward_std"] = summed.std().item()
        return metrics


def offloadable_models(rewards: Iterable[Callable], device: torch.device) -> list[nn.Module]:
    """Move models to the CPU, except from devices other than `device`: `model` of a sync reward or its `judge`."""
    owners = [getattr(reward, "judge", reward) for reward in rewards if not is_async_callable(reward)]
    loaded = [model for owner in owners if isinstance(model := getattr(owner, "model", None), nn.Module)]
    movable = {torch.device("cpu"), device}
    models = [model for model in loaded if {weight.device for weight in model.parameters()} <= movable]
    return [model.to("cpu") for model in dict.fromkeys(models)]  # rewards may share a judge


def check_reward_functions(reward_funcs: list[Callable]) -> list[str]:
    """Check the reward functions, and return their names."""
    if not reward_funcs:
        raise ValueError("`reward_funcs` is empty. Pass at least one reward.")
    for function in reward_funcs:
        if not callable(function) or isinstance(function, nn.Module | type):
            raise TypeError(
                f"A reward must be a callable `(prompts, completions, **columns) -> list[float | None]`, got {function!r}. "
                "TRL's reward models score text; see `paco_trl.rewards` for images."
            )
    names = [get_callable_name(function) for function in reward_funcs]
    for name, function in zip(names, reward_funcs, strict=True):
        if not any(each.kind is each.VAR_KEYWORD for each in _parameters(function)):
            raise ValueError(
                f"The reward '{name}' gets every column of the dataset: add `**kwargs` to its parameters."
            )
        if names.count(name) > 1:
            raise ValueError(f"Several rewards are named '{name}'. Give each its own `__name__`, which metrics have.")
    return names


def check_reward_weights(weights: list[float] | None, names: list[str], aggregation: str) -> torch.Tensor:
    """Check the weights of the rewards (`None`: all 1) before generation, and return them as `(K,)`."""
    weights = _one_each(weights, 1.0, "reward_weights", names)
    if not all(math.isfinite(weight) for weight in weights) or not any(weights):
        raise ValueError(f"`reward_weights` is {weights}; weights must be finite, and at least one of them not 0.")
    if aggregation == "geometric_mean" and min(weights) < 0:
        raise ValueError(
            f"`reward_weights` is {weights}, but a geometric mean has no negative weights: negate the reward."
        )
    return torch.tensor(weights, dtype=torch.float32)


def check_columns(reward_funcs: Callable | list[Callable], dataset: Dataset, where: str) -> None:
    """Check that a dataset has the columns (parameters, `needed_columns`) and panels (`min_panels`, `scores_grids`) of rewards."""
    if taken := sorted(_FROM_TRAINER & set(dataset.column_names)):
        raise ValueError(f"Rewards get {', '.join(taken)} from the trainer, not from {where}: rename these columns.")
    for function in reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]:
        name, least = get_callable_name(function), getattr(function, "min_panels", 1)
        # Rows without a layout, such as editing prompts, have one panel
        layouts = [
            [count or 1 for count in dataset[side]] if side in dataset.column_names else [1] * len(dataset)
            for side in ("rows", "cols")
        ]
        for row, (rows, cols) in enumerate(zip(*layouts, strict=True)):
            if rows * cols < least:
                raise ValueError(
                    f"The reward '{name}' compares at least {least} panels, but row {row} of {where} has {rows} x {cols}. "
                    "Remove the row, or use another reward."
                )
        kinds = dataset["layout"] if "layout" in dataset.column_names else ()
        if getattr(function, "scores_grids", False) and SEPARATE in kinds:
            raise ValueError(
                f"The reward '{name}' scores the lines of a grid, but row {kinds.index(SEPARATE)} of {where} is a set of "
                "separate images. Leave the reward out."
            )
        given = _ALWAYS_GIVEN | set(dataset.column_names)
        for each in _parameters(function):
            if each.default is each.empty and each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
                if each.name not in given - {"prompt"}:
                    has = ", ".join(sorted(given))
                    raise ValueError(
                        f"The reward '{name}' has the parameter `{each.name}`, but {where} gives it {has}."
                    )
        for column in getattr(function, "needed_columns", ()):
            if column == "image" and "images" in dataset.column_names:
                continue  # several source images
            if column not in dataset.column_names:
                has = ", ".join(dataset.column_names)
                raise ValueError(f"The reward '{name}' requires the column `{column}`, but {where} has {has}. Add it.")
            feature = dataset.features[column]
            if isinstance(getattr(feature, "feature", feature), ImageFeature):
                continue  # it would be decoded; the reward checks it
            for row, value in enumerate(dataset[column]):
                if not (value.strip() if isinstance(value, str) else value):
                    problem = f"which is {value!r} in row {row} of {where}. Fill it, or remove the row."
                    raise ValueError(f"The reward '{name}' requires the column `{column}`, {problem}")


def check_required(required: list | None, names: list[str], weights: torch.Tensor) -> list[bool]:
    """Check which rewards are required (`None`: all); one of nonzero weight must be."""
    required = _one_each(required, True, "reward_required", names)
    if not any(is_required and weight != 0 for is_required, weight in zip(required, weights.tolist(), strict=True)):
        raise ValueError(f"`reward_required` is {required}: no reward of nonzero weight is required. Require one.")
    return required


def _one_each(values: list | None, default, option: str, names: list[str]) -> list:
    values = [default] * len(names) if values is None else values
    if len(values) != len(names):
        raise ValueError(
            f"`{option}` is {values}; pass one value for each of {len(names)} rewards: {', '.join(names)}."
        )
    return values


def _parameters(function: Callable) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of what is not written in Python
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _copied(value: Any, images: dict[int, Image.Image]) -> Any:
    """Copy images, each once, and the lists and dicts that hold them: other rewards and the sheet have the same."""
    if isinstance(value, Image.Image):
        return images[id(value)] if id(value) in images else images.setdefault(id(value), value.copy())
    if isinstance(value, list):
        return [_copied(entry, images) for entry in value]
    if isinstance(value, dict):
        return {key: _copied(entry, images) for key, entry in value.items()}
    return value


def _named_error(name: str, error: BaseException) -> RewardError:
    # The lines in the reward, after those of this file
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename == __file__:
        step = step.tb_next
    error.__traceback__ = step
    where = "" if step is None else f" ({step.tb_frame.f_code.co_filename}:{step.tb_lineno})"
    message = str(error).rstrip(".")
    return RewardError(f"The reward '{name}' raised {type(error).__name__}: {message}{where}.")


def _check_rewards(rewards, name: str, count: int) -> list[float | None]:
    # A set has no order, and a dict would give its keys
    is_list = isinstance(rewards, Iterable) and not isinstance(rewards, str | bytes | Mapping | Set)
    if not is_list or getattr(rewards, "ndim", 1) == 0:
        raise RewardError(f"The reward '{name}' returned {rewards!r}, but must return a list of one value per image.")
    rewards = list(rewards)
    if len(rewards) != count:
        raise RewardError(f"The reward '{name}' returned {len(rewards)} values for {count} images, not one for each.")
    for index, reward in enumerate(rewards):
        with suppress(TypeError, ValueError, OverflowError):  # of what is no number of float32
            if reward is None or math.isfinite(reward) and abs(reward) <= torch.finfo(torch.float32).max:
                continue
        raise RewardError(
            f"The reward '{name}' returned {shorten(reward)} for image {index}, which is no finite number. Return None for an "
            "image that could not be scored: the image is then excluded and counted."
        )
    return [None if reward is None else float(reward) for reward in rewards]


def _union_seconds(spans: list[list[float]], until: float) -> float:
    """Return the seconds before `until` in which at least one of the spans was running."""
    total, end = 0.0, -torch.inf
    for begin, stop in sorted(spans):
        begin, stop = max(begin, end), min(stop, until)
        total += max(stop - begin, 0.0)
        end = max(end, stop)
    return total
