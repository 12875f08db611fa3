# SPDX-License-Identifier: Apache-2.0
"""What a training prints: a short line for each logged step. `curves.csv` and the trackers have all metrics."""

import re
import shutil
import sys
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import IntervalStrategy


_RATIO, _LOSS = "|ratio-1|", "loss"
_SECONDS = "s/step"
_MEMORY = "mem GiB"
_LEFT = "left"
# What a narrow terminal leaves out, the least important first
_DROPPED_FIRST = (_MEMORY, _SECONDS, _RATIO)
_WIDTHS = {_RATIO: 9, _SECONDS: 6, _MEMORY: 7, _LEFT: 8}
_MIN_WIDTH, _MAX_WIDTH = 8, 16  # width of a reward
_ROWS_PER_HEADER = 25
_GAP = "  "


class ConsoleCallback(ProgressCallback, PrinterCallback):
    """
    Prints a line for each logged step: rewards, ratio, seconds a step, peak memory of this process, and time left. The
    bar below them is shown in terminals and notebooks. Takes the place of both classes that it is made of: what
    removes one of them from a trainer removes it.
    """

    training_bar: Any
    prediction_bar: Any

    def __init__(self):
        super().__init__()
        self._stack = ExitStack()
        self._labels: dict[str, None] = {}  # column labels so far
        self._num_rows = 0
        self._last = self._first = (0, time.monotonic())  # step and time

    def on_train_begin(self, args, state, control, **kwargs):
        self.current_step = step = state.global_step
        self._labels = {}
        self._num_rows = 0
        self._first = (step, time.monotonic())
        self._last = self._first
        if state.is_world_process_zero:
            self.training_bar = _bar(args, total=state.max_steps, initial=step)
            if not self.training_bar.disable:
                self._stack.enter_context(logging_redirect_tqdm())  # warnings stand above the bar, not behind it

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        # The last step too: `logging_steps` may be more than the run has
        if state.global_step >= state.max_steps and args.logging_strategy == IntervalStrategy.STEPS:
            control.should_log = True

    def on_train_end(self, args, state, control, **kwargs):
        super().on_train_end(args, state, control, **kwargs)
        self._stack.close()

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        if self.prediction_bar is None and state.is_world_process_zero:
            self.prediction_bar = _bar(args, total=len(eval_dataloader), leave=False)
        super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        if "train_runtime" in logs:
            seconds = tqdm.format_interval(time.monotonic() - self._first[1])
            text = f"Done: step {state.global_step} of {state.max_steps} after {seconds}."
            text = text if state.global_step > self._first[0] else "Done: nothing was left to train."
        else:
            text = self._row(args, state, logs) if _LOSS in logs else _values_text(state.global_step, logs)
        tqdm.write(text)
        sys.stdout.flush()  # it may be a file that somebody watches

    def _row(self, args, state, logs) -> str:
        """Format the line of a step, below a header where the columns are new."""
        now = time.monotonic()
        step = state.global_step
        rewards = {
            match[1]: value for name, value in logs.items() if (match := re.fullmatch(r"rewards/(.+)/mean", name))
        }
        values = {_label(name, rewards): f"{value:.4g}" for name, value in rewards.items()}
        if ratios := [value for name, value in logs.items() if name.startswith("ratio_deviation")]:
            values[_RATIO] = f"{max(ratios):.1e}"
        elif _RATIO not in self._labels:  # a step that trains no image has no ratio
            values[_LOSS] = f"{logs[_LOSS]:.4g}"
        if "decision_accuracy" in logs:
            values["accuracy"] = f"{logs['decision_accuracy']:.4g}"
        per_step, per_run = [(now - began) / max(step - start, 1) for start, began in (self._last, self._first)]
        self._last = (step, now)
        values |= {
            _SECONDS: f"{per_step:.2f}"[:6],
            _MEMORY: f"{_peak_memory(args.device) / 2**30:.1f}",
            _LEFT: tqdm.format_interval(per_run * (state.max_steps - step)),
        }
        is_new = not values.keys() <= self._labels.keys()
        self._labels |= dict.fromkeys(values)
        head = f"{step}/{state.max_steps}".rjust(max(2 * len(str(state.max_steps)) + 1, len("step")))
        widths = _fit(self._labels, shutil.get_terminal_size((120, 24)).columns - len(head))
        line = _GAP.join([head, *(values.get(label, "-").rjust(width) for label, width in widths.items())])
        if is_new or self._num_rows % _ROWS_PER_HEADER == 0:
            labels = [_shortened(label, width).rjust(width) for label, width in widths.items()]
            line = _GAP.join(["step".rjust(len(head)), *labels]) + "\n" + line
        self._num_rows += 1
        return line


def use_console(trainer: Trainer) -> None:
    """Replace the progress bar or printer that Trainer has added by the console."""
    for index, callback in reversed(list(enumerate(trainer.callback_handler.callbacks))):
        if type(callback) in (DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            trainer.callback_handler.callbacks[index] = ConsoleCallback()
            return


def _bar(args: TrainingArguments, **kwargs: Any) -> Any:
    # `None` hides it where there is no terminal
    return tqdm(dynamic_ncols=True, disable=args.disable_tqdm or None, **kwargs)


def _peak_memory(device: torch.device) -> int:
    """Return the bytes that this process has taken at most, on the accelerator or without one of the machine."""
    if device.type == "cpu":
        import resource  # Windows lacks it

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return torch.accelerator.max_memory_reserved(device)


def _fit(labels: Iterable[str], columns: int) -> dict[str, int]:
    """Choose the widths of the columns of a line, and leave out columns where there are too many."""
    rewards = [label for label in labels if label not in _WIDTHS]
    metrics = _WIDTHS.keys() & {*labels}
    for spared in (None, *_DROPPED_FIRST):
        metrics -= {spared}
        room = columns - sum(len(_GAP) + _WIDTHS[label] for label in metrics)
        width = room // max(len(rewards), 1) - len(_GAP)
        if width >= _MIN_WIDTH:
            break
    widths = dict.fromkeys(rewards, min(max(width, _MIN_WIDTH), _MAX_WIDTH)) | _WIDTHS
    return {label: width for label, width in widths.items() if label in rewards or label in metrics}


def _label(name: str, names: Collection[str]) -> str:
    """Leave out the end of a reward's name, unless another one has that name."""
    return name if (short := name.removesuffix("_reward")) in names else short


def _shortened(label: str, width: int) -> str:
    """Cut a long label in its middle: names often differ at their ends."""
    return label if len(label) <= width else f"{label[: width // 2]}…{label[width // 2 + 1 - width :]}"


def _values_text(step: int, logs: dict[str, Any]) -> str:
    """Describe an evaluation by its rewards, next to the untrained model's; other logs by all their values."""
    means = [name for name in logs if re.search(r"rewards/.+/mean$", name)]
    losses = [
        name
        for name in logs
        if re.search(r"(?<!decision)(?<!reasoning)_loss$|_decision_accuracy$|_auroc$|_ece$", name)
    ]
    parts = []
    for name in means or losses or [name for name in logs if name != "epoch"]:
        before = logs.get(f"{name.removesuffix('mean')}baseline") if means else None
        label = name.replace("_decision_", "_")
        if means:
            labels = [other.replace("rewards/", "").removesuffix("/mean") for other in means]
            label = _label(label.replace("rewards/", "").removesuffix("/mean"), labels)
        value = f"{logs[name]:.4g}" if isinstance(logs[name], float) else logs[name]
        parts.append(f"{label} {value}" + ("" if before is None else f" (untrained {before:.4g})"))
    return f"Step {step}: {', '.join(parts)}"
