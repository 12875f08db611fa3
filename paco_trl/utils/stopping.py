# SPDX-License-Identifier: Apache-2.0
"""Stop when a scheduler asks for it, by SIGTERM or SIGUSR1, or at Ctrl-C: at once, or when all processes agree."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, NoReturn

from .background import set_exit_code


if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

# "Try again" in sysexits.h: neither an error (1) nor a process that was killed (128 + signal), which has saved nothing
EXIT_CODE = 75  # `os.EX_TEMPFAIL`; Windows lacks the name
_INTERRUPTED = 130  # of Ctrl-C, as shells have it
SIGNALS = ("SIGTERM", "SIGUSR1")
NOT_ON_WINDOWS = "paco_trl runs on Linux only. On Windows, use it in WSL 2."
# Launchers pass on a signal that the scheduler may have sent to all processes: seconds in which two are one signal
_REPEATED_SIGNAL_SECONDS = 1.0

_received, _since = 0, 0.0
_is_deferred = False


class StopRequested(SystemExit):
    """A signal ends the process; `by_all` if all processes have agreed to stop."""

    code: int

    def __init__(self, number: int, by_all: bool = False):
        self.is_interrupt = number == signal.SIGINT
        code = _INTERRUPTED if self.is_interrupt else EXIT_CODE
        super().__init__(code)
        self.signal = "Ctrl-C" if self.is_interrupt else signal.Signals(number).name
        self.by_all = by_all


def raise_stop(number: int, by_all: bool = False) -> NoReturn:
    """Raise `StopRequested`; the process then ends with its exit code even while a call is running."""
    set_exit_code(StopRequested(number).code)
    raise StopRequested(
        number, by_all
    )  # not from a variable, with which its own traceback would keep all frames alive


def _handle(number: int, frame) -> None:
    global _received, _since
    if not _received:
        _received = number
        _since = time.monotonic()
        if not _is_deferred:
            raise_stop(number)
        if number == signal.SIGINT and os.environ.get("RANK", "0") == "0":
            # At once, since a step may take minutes
            os.write(
                2, b"\nStopping with a checkpoint when this step allows. Ctrl-C again stops at once, without one.\n"
            )
    elif time.monotonic() - _since > _REPEATED_SIGNAL_SECONDS:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


@contextmanager
def stop_signals(names: Sequence[str] = SIGNALS) -> Iterator[None]:
    """
    Raise `StopRequested` at a signal, or after `defer_stop_signals` when the processes agree.

    A second signal ends the process.
    """
    global _received, _is_deferred
    if threading.current_thread() is not threading.main_thread():  # Python handles signals there
        yield
        return
    numbers = [signal.Signals[name] for name in dict.fromkeys(names)]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        numbers = [number for number in numbers if number != signal.SIGINT]
    before = {number: signal.signal(number, _handle) for number in numbers}
    try:
        yield
        if _received:  # after the last exchange
            raise_stop(_received)
    finally:
        _received, _is_deferred = 0, False
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def defer_stop_signals() -> None:
    """Only remember a signal, for `agree`, until `stop_signals` ends."""
    global _is_deferred
    _is_deferred = True


def ignore_stop_in_workers(dataloader: "DataLoader", names: Sequence[str]) -> None:
    """Let the worker processes of a dataloader ignore the signals: this process stops them."""
    dataloader.worker_init_fn = partial(_ignore_stop, names, dataloader.worker_init_fn)
    # At exit multiprocessing ends the remaining workers by SIGTERM, and would wait forever for workers that ignore it
    Finalize(None, _end_workers, exitpriority=0)


def _end_workers() -> None:
    for worker in active_children():
        if worker.daemon:
            worker.terminate()
            worker.join(1)
            worker.kill()


def _ignore_stop(names: Sequence[str], initialize: Callable[[int], None] | None, worker: int) -> None:
    for name in names:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    if initialize is not None:
        initialize(worker)


def agree(accelerator: "Accelerator", *flags: int) -> list[int]:
    """Return a signal to stop at, or 0, and each flag's maximum over the processes. Collective: call on all ranks."""
    local = [_received if _is_deferred else 0, *flags]
    if accelerator.num_processes == 1:
        return local
    import torch

    return accelerator.gather(torch.tensor([local], device=accelerator.device)).amax(dim=0).tolist()
