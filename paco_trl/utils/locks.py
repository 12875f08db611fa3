# SPDX-License-Identifier: Apache-2.0
"""Let a single run write a directory, on one machine or several."""

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from .files import why_unwritable
from .processes import wait_for_all


# Seconds until a file of another machine must be seen
_SHARED_FILE_TIMEOUT = 10


class LockedError(ValueError):
    """A directory that a run cannot have for itself: another run writes there, or it is not writable."""


@contextlib.contextmanager
def sole_writer(folder: str | Path, what: str, is_inside: bool = False) -> Iterator[Path | None]:
    """
    Lock a directory against other runs; `what` is written there. Call it in all processes of a run: they check that they
    see the same directory. Yields a file for error messages, which is deleted unless an error ends the
    run.
    """
    from accelerate import PartialState
    from accelerate.utils import gather_object

    # The lock is beside the directory, so that an empty directory stays empty. The system releases it when the process
    # ends
    folder = Path(folder).expanduser().absolute()
    path = folder / ".lock" if is_inside else folder.parent / f".{folder.name}.lock"
    state = PartialState()
    lock = FileLock(path)
    host = socket.gethostname()
    refusal, mark = None, None
    wait_for_all()
    if state.is_main_process:
        try:
            take_lock(lock, what, folder)
            mark = _leave_mark(path) if state.num_processes > 1 else None
        except LockedError as error:
            refusal = str(error)
    refusal, name, first_host = gather_object([(refusal, mark and mark.name, host)])[0]
    mark = name and path.with_name(name)  # in this process's own view of the directory
    try:
        if mark is not None:
            strangers = gather_object([] if _is_seen(mark) else [host])
            if strangers:
                refusal = (
                    f"{folder} on {', '.join(sorted(set(strangers)))} is not the directory that the first process "
                    f"sees on {first_host}. All processes write {what} there: give a directory that the machines "
                    "share."
                )
        if refusal is None:
            yield mark
        if state.is_main_process and mark is not None:
            mark.unlink(missing_ok=True)
        if refusal is not None:
            raise ValueError(refusal)
    finally:
        if state.is_main_process:
            lock.release()


def _leave_mark(path: Path) -> Path | None:
    """Write a new empty file next to the lock of a run, and remove the files that failed runs left."""
    with contextlib.suppress(OSError):
        for earlier in path.parent.glob(f"{path.name}-*"):
            earlier.unlink(missing_ok=True)
        # A new name: network file systems remember that a file was not there
        mark = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
        mark.touch()
        return mark
    return None


def _is_seen(mark: Path) -> bool:
    """Return whether this process sees a file that the first one has written."""
    end = time.monotonic() + _SHARED_FILE_TIMEOUT
    while not mark.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def take_lock(lock: FileLock, what: str, folder: str | Path, timeout: float = 0) -> None:
    """Acquire a lock within `timeout` seconds (-1: as soon as it is free), or raise a `LockedError`."""
    parent = Path(lock.lock_file).parent
    if (reason := why_unwritable(parent)) is not None:
        raise LockedError(f"The {what} belong in {folder}, but {reason} Give another directory.")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout)
    except Timeout:
        remedy = "Wait for it, stop it, or give another directory."
        raise LockedError(f"Another run is writing {what} in {folder}. {remedy}") from None
    except (OSError, NotImplementedError):  # a file system without locks
        pass
