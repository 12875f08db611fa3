# SPDX-License-Identifier: Apache-2.0
"""A progress bar with a few figures in it, in place of a line with all that is logged."""

from typing import Any

from transformers import Trainer
from transformers.trainer_callback import ProgressCallback


class FiguresInBar(ProgressCallback):
    """Trainer's progress bar, with the latest values of chosen metrics at its end."""

    def __init__(self, names: dict[str, str]):
        super().__init__()
        self._names = names
        self._shown: dict[str, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs) -> None:
        """Shows the chosen metrics."""
        self._shown |= {title: f"{logs[name]:.3f}" for name, title in self._names.items() if name in (logs or {})}
        if self.training_bar is not None and self._shown:
            self.training_bar.set_postfix(self._shown)


def show_figures(trainer: Trainer, names: dict[str, str]) -> None:
    """Puts [`FiguresInBar`] in the place of Trainer's own bar."""
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(FiguresInBar(names))
