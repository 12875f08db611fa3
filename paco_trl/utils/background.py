# SPDX-License-Identifier: Apache-2.0
"""Calls in the background that the end of the process does not wait for."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from weakref import WeakSet


if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

exit_code = 1  # of a process that ends while a call is running
_calls: WeakSet[Future] = WeakSet()
_loops: "WeakSet[AbstractEventLoop]" = WeakSet()


class CallExecutor(ThreadPoolExecutor):
    """Threads whose calls the end of the process does not wait for."""

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Start a call as soon as a thread is free."""
        _calls.add(future := super().submit(function, *args, **kwargs))
        return future


def leave_calls(loop: "AbstractEventLoop") -> None:
    """Let the end of the process not wait for what an event loop runs, in its own thread or in others."""
    loop.set_default_executor(CallExecutor(None, "calls"))
    _loops.add(loop)


def _leave_calls() -> None:
    if any(map(Future.running, _calls)) or not all(map(_answers, _loops)):
        # Python would wait for ever, and kills daemons within native code, which aborts: a scheduler would see that
        atexit._run_exitfuncs()  # those of trackers, for example
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(exit_code)


def _answers(loop: "AbstractEventLoop") -> bool:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered.wait(1.0)


def _forget_calls() -> None:
    _calls.clear()
    _loops.clear()


# A process that is forked, such as the worker of a dataloader, has none of these threads
os.register_at_fork(after_in_child=_forget_calls)
# Before Python waits for threads, which it does before the functions of `atexit`
threading._register_atexit(_leave_calls)  # type: ignore[attr-defined]
