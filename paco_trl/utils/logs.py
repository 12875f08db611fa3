# SPDX-License-Identifier: Apache-2.0
"""Loggers of the first process."""

from typing import Any

from accelerate.logging import MultiProcessAdapter
from accelerate.logging import get_logger as get_accelerate_logger


class _Logger(MultiProcessAdapter):
    def log(self, level: int, msg: Any, *args: Any, **kwargs: Any) -> None:
        try:
            super().log(level, msg, *args, **kwargs)
        except RuntimeError:  # accelerate refuses to log before a script has an accelerator
            self.logger.log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        # accelerate puts `[RANK 0]` before each message, which says nothing where only that process logs
        return msg, {"stacklevel": 2, **kwargs}


def get_logger(name: str) -> MultiProcessAdapter:
    """Return a logger that logs on the first process only."""
    return _Logger(get_accelerate_logger(name).logger, {})
