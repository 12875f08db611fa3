# SPDX-License-Identifier: Apache-2.0
"""
Calls in the background that the end of the process does not wait for.

Python waits at its end for each thread of a `ThreadPoolExecutor`, and kills daemon threads, at worst within native
code, which aborts the process. No public hook comes before: `atexit` runs its functions after the wait.
"""

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

_exit_code = 1  # of a process that ends while a call is running
_calls: WeakSet[Future] = WeakSet()
_loops: "WeakSet[AbstractEventLoop]" = WeakSet()


class CallExecutor(ThreadPoolExecutor):
    """Threads whose calls the end of the process does not wait for."""

    def submit(self, function: Callable, /, *args: Any, **kwargs: Any) -> Future:
        """Start a call as soon as a thread is free."""
        _calls.add(future := super().submit(function, *args, **kwargs))
        return future


def set_exit_code(code: int) -> None:
    """Set the exit code of a process that ends while a call is running."""
    global _exit_code
    _exit_code = code


def abandon_at_exit(loop: "AbstractEventLoop") -> None:
    """Let the process end without waiting for an event loop, or for its calls in other threads."""
    loop.set_default_executor(CallExecutor(None, "calls"))
    _loops.add(loop)


def _exit_past_running_calls() -> None:
    if any(map(Future.running, _calls)) or not all(map(_answers, _loops)):
        atexit._run_exitfuncs()  # functions of trackers, for example
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(_exit_code)


def _answers(loop: "AbstractEventLoop") -> bool:
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return answered.wait(1.0)


def _forget_calls() -> None:
    _calls.clear()
    _loops.clear()


# A process that is forked, such as the worker of a dataloader, has none of these threads
if hasattr(os, "register_at_fork"):  # Windows lacks it: a command says there that it does not run
    os.register_at_fork(after_in_child=_forget_calls)
# The hook of `concurrent.futures` itself (private in Python 3.11 to 3.14). Its functions run in reverse order: this one
# before its own, which waits
threading._register_atexit(_exit_past_running_calls)  # type: ignore[attr-defined]
