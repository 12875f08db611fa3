# SPDX-License-Identifier: Apache-2.0
"""Rewards are computed on a thread of their own, while the next images are drawn."""

import asyncio
import atexit
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image
from transformers import TrainerState
from trl.trainer.utils import is_async_callable, shutdown_event_loop_in_daemon, start_event_loop_in_daemon

from ..data import split_grid


# Enough for a reward model that works in batches, and few enough that most of a round's rewards are computed while its
# other images are drawn: at the paper's settings a process draws 96 images, so that 5 of 6 calls are hidden
IMAGES_PER_CALL = 16


@dataclass
class Scores:
    """
    Scores of the images of a round or an evaluation, in the order of their numbers, the same on every process.

    Attributes:
        rewards (`torch.Tensor` of shape `(images, rewards)`):
            Rewards on the CPU, NaN where one could not be computed.
        extra (`dict[str, list]`):
            Columns that rewards logged themselves (`log_extra`).
        metrics (`dict[str, float]`):
            Metrics that rewards logged themselves (`log_metric`), averaged over the calls of all processes.
        waited (`float`):
            Seconds for which this process waited for rewards after its last image was drawn.
        hidden (`float`):
            Seconds of reward computation that passed while images were drawn.
    """

    rewards: torch.Tensor
    extra: dict[str, list]
    metrics: dict[str, float]
    waited: float
    hidden: float


class RewardScorer:
    """
    Calls a set of rewards on images as they are drawn.

    The rewards are called with `IMAGES_PER_CALL` images at a time (the last call of a round with the rest), in the
    order in which the images were added, one call after the other, on one thread beside the one that draws. Which images share a call does not depend on time,
    so that a reward whose rounding depends on its batch gives the same values in a resumed run.

    Args:
        reward_funcs (`list[Callable]`):
            Rewards, from [`~paco_trl.trainer.reward_calls.check_reward_functions`].
        names (`list[str]`):
            Their names.
        accelerator ([`~accelerate.Accelerator`]):
            Accelerator of the run.
    """

    def __init__(self, reward_funcs: list[Callable], names: list[str], accelerator: Accelerator):
        self.reward_funcs = reward_funcs
        self.names = names
        self.accelerator = accelerator
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rewards")
        self._loop = None
        if any(is_async_callable(function) for function in reward_funcs):
            thread, self._loop, is_ready = start_event_loop_in_daemon(name="PaCoGRPOTrainer-AsyncLoop")
            is_ready.wait()
            atexit.register(shutdown_event_loop_in_daemon, thread, self._loop)
        self._clear()

    def _clear(self) -> None:
        # New objects: a call of a set that was broken off may still be running, and writes into the old ones
        self._waiting: list[tuple[dict, Image.Image]] = []
        self._calls: list[Future] = []
        self._extra: dict[str, list] = defaultdict(list)
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._count = 0
        self._seconds: list[float] = []

    def start(self) -> None:
        """Begins a new set of images; what an earlier one left behind, because it was broken off, is dropped."""
        for call in self._calls:
            call.cancel()
        self._clear()

    def add(self, rows: list[dict], images: list[Image.Image], state: TrainerState) -> None:
        """
        Adds images; once there are enough of them, the next call begins.

        Args:
            rows (`list[dict]`):
                The row of the dataset that each image was drawn for.
            images (`list[PIL.Image.Image]`):
                Images.
            state ([`~transformers.TrainerState`]):
                State of the run, for rewards that take `trainer_state`.

        Raises:
            RuntimeError: a reward of an earlier call raised.
        """
        self._waiting.extend(zip(rows, images, strict=True))
        while len(self._waiting) >= IMAGES_PER_CALL:
            self._submit(IMAGES_PER_CALL, state)
        for call in self._calls:
            if call.done() and call.exception() is not None:  # a failed reward stops the drawing
                self.start()  # what waits in line is not computed
                raise call.exception()

    def finish(self, order: np.ndarray, state: TrainerState) -> Scores:
        """
        Waits for the rewards and gathers them. Every process calls it.

        Args:
            order (`np.ndarray` of shape `(images of all processes,)`):
                Process by process, the number of each image; what appears twice counts once.
            state ([`~transformers.TrainerState`]):
                State of the run.

        Returns:
            [`Scores`].

        Raises:
            RuntimeError: a reward raised.
            ValueError: a reward logged a column that does not fit the images.
        """
        if self._waiting:
            self._submit(len(self._waiting), state)
        started = time.perf_counter()
        problem = next((call.exception() for call in self._calls if call.exception() is not None), None)
        waited = time.perf_counter() - started
        problems = [] if problem is None else [f"process {self.accelerator.process_index}: {problem}"]
        if self.accelerator.num_processes > 1:
            problems = gather_object(problems)  # all stop with the reason, or none does
        if problem is not None:
            self.start()  # what waits in line is not computed
            raise problem
        if problems:
            raise RuntimeError(f"A reward failed on {'; '.join(problems)}")
        rewards = torch.cat([call.result() for call in self._calls])  # (images of this process, rewards)
        for column, values in self._extra.items():
            if len(values) != self._count:
                raise ValueError(
                    f"Rewards logged {len(values)} values in the column '{column}' (`log_extra`) for {self._count} "
                    "images: give one for each image, and each reward columns of its own."
                )

        _, first = np.unique(order, return_index=True)  # where image 0, 1, 2 ... is
        gathered = self.accelerator.gather(rewards.to(self.accelerator.device)).cpu()
        extra = {}
        for column in sorted(set(gather_object(list(self._extra)))):
            values = gather_object(self._extra.get(column, [None] * self._count))
            extra[column] = [values[index] for index in first]
        metrics = {}
        for name in sorted(set(gather_object(list(self._metrics)))):
            values = self._metrics.get(name, [])
            local = torch.tensor([sum(values), len(values)], dtype=torch.float32, device=self.accelerator.device)
            total, count = self.accelerator.gather(local).view(-1, 2).sum(dim=0).tolist()
            metrics[name] = total / count
        scores = Scores(
            gathered[torch.from_numpy(first)], extra, metrics, waited, max(sum(self._seconds) - waited, 0.0)
        )
        self._clear()
        return scores

    def _submit(self, count: int, state: TrainerState) -> None:
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        self._count += count
        rows, images = [row for row, _ in batch], [image for _, image in batch]
        # The device of a new thread is the first one, not that of this process
        device = torch.cuda.current_device() if self.accelerator.device.type == "cuda" else None
        logs = (self._extra, self._metrics, self._seconds)
        self._calls.append(self._executor.submit(self._call, rows, images, state, device, *logs))

    @torch.no_grad()
    def _call(
        self,
        rows: list[dict],
        images: list[Image.Image],
        state: TrainerState,
        device: int | None,
        extra: dict[str, list],
        metrics: dict[str, list[float]],
        seconds: list[float],
    ) -> torch.Tensor:
        """Calls all rewards on some images; runs on the scorer's thread."""
        started = time.perf_counter()
        if device is not None:
            torch.cuda.set_device(device)
        arguments = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
        arguments |= {
            "prompts": [row["prompt"] for row in rows],
            "completions": images,
            "completion_ids": None,  # as in TRL
            # Panels are cut once for all rewards
            "panel_images": [
                split_grid(image, row["rows"], row["cols"]) for row, image in zip(rows, images, strict=True)
            ],
            "trainer_state": state,
            "log_extra": lambda column, values: extra[column].extend(values),
            "log_metric": lambda name, value: metrics[name].append(value),
        }
        values: list[list[float | None]] = [None] * len(self.reward_funcs)
        is_async = [is_async_callable(function) for function in self.reward_funcs]
        for index, function in enumerate(self.reward_funcs):
            if not is_async[index]:
                values[index] = function(**arguments)
        if any(is_async):

            async def call_all() -> list[list[float | None]]:
                with torch.no_grad():  # it is a matter of the thread, and the loop has one of its own
                    return await asyncio.gather(
                        *(function(**arguments) for index, function in enumerate(self.reward_funcs) if is_async[index])
                    )

            results = iter(asyncio.run_coroutine_threadsafe(call_all(), self._loop).result())
            values = [next(results) if is_async[index] else value for index, value in enumerate(values)]
        seconds.append(time.perf_counter() - started)
        rewards = [[torch.nan if reward is None else reward for reward in column] for column in values]
        return torch.tensor(rewards, dtype=torch.float32).T  # (images, rewards)
