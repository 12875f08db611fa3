# SPDX-License-Identifier: Apache-2.0
"""How long a run has trained, over all its parts."""

import time

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import TrainerControl


KEY = "train_seconds"


class TrainingClock(TrainerCallback):
    """
    Adds the seconds of training so far, with drawing, scoring, evaluations and checkpoints, to what is logged of
    training steps.

    They are in `state.log_history`, which checkpoints hold, so that a resumed run goes on counting where its checkpoint
    is. What was trained after that checkpoint is lost, and its time with it.
    """

    def __init__(self):
        self._started: float | None = None
        self._before = 0.0  # seconds of the parts that this one continues

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self._started, self._before = time.monotonic(), training_seconds(state) or 0.0

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        entry = state.log_history[-1]
        if self._started is not None and {"loss", "train_loss"} & entry.keys():
            entry[KEY] = round(self._before + time.monotonic() - self._started, 2)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self._started = None


def training_seconds(state: TrainerState, step: int | None = None) -> float | None:
    """Give the seconds of training that a run has logged up to a step, or to the last one; `None` if nothing was trained."""
    return next(
        (
            entry[KEY]
            for entry in reversed(state.log_history)
            if KEY in entry and (step is None or entry["step"] <= step)
        ),
        None,
    )
