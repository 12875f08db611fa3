# SPDX-License-Identifier: Apache-2.0
"""Training time of a run, over all its resumed parts."""

import time

from transformers import TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_callback import TrainerControl


KEY = "train_seconds"


class TrainingTimeCallback(TrainerCallback):
    """Log the seconds of training so far; a resumed run continues from its checkpoint's."""

    def __init__(self):
        self._started: float | None = None
        self._before = 0.0  # seconds before resuming

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self._started, self._before = time.monotonic(), training_seconds(state) or 0.0

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        entry = state.log_history[-1]
        if self._started is not None and {"loss", "train_loss"} & entry.keys():
            entry[KEY] = round(self._before + time.monotonic() - self._started, 2)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs):
        self._started = None


def training_seconds(state: TrainerState, step: int | None = None) -> float | None:
    """Return the seconds of training logged up to a step, or to the last one; `None` without training."""
    logged = (entry for entry in reversed(state.log_history) if KEY in entry)
    return next((entry[KEY] for entry in logged if step is None or entry["step"] <= step), None)
