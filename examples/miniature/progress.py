# SPDX-License-Identifier: Apache-2.0
"""Show a few metrics in the progress bar instead of logging all of them."""

from typing import Any

from transformers import Trainer
from transformers.trainer_callback import ProgressCallback


class FiguresInBar(ProgressCallback):
    """Show Trainer's progress bar with the latest values of chosen metrics."""

    def __init__(self, names: dict[str, str]):
        super().__init__()
        self._names = names
        self._shown: dict[str, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs) -> None:
        self._shown |= {title: f"{logs[name]:.3f}" for name, title in self._names.items() if name in (logs or {})}
        if self.training_bar is not None and self._shown:
            self.training_bar.set_postfix(self._shown)


def show_figures(trainer: Trainer, names: dict[str, str]) -> None:
    """Replace Trainer's progress bar with [`FiguresInBar`]."""
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(FiguresInBar(names))
