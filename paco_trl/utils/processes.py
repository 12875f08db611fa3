# SPDX-License-Identifier: Apache-2.0
"""Waiting for the other processes of a script, and its end."""

import atexit
import contextlib
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from accelerate import Accelerator

# Seconds for a download on one machine alone; a collective has `ddp_timeout`, half an hour
_DOWNLOAD_TIMEOUT = 24 * 3600.0
# Gloo's threads need milliseconds, and longer on a loaded machine
_GLOO_SECONDS = 1.0


def wait_for_all() -> None:
    """Wait for all processes, however long one of them loads or saves, before the next collective."""
    if (store := _store()) is None:
        return
    from accelerate import PartialState  # takes a second to import

    dist = sys.modules["torch.distributed"]
    size = dist.get_world_size()
    # No process can be counted twice: each waits here until all have arrived.
    everyone = -(-store.add("paco_trl/arrived", 1) // size) * size
    end = time.monotonic() + _DOWNLOAD_TIMEOUT
    while store.add("paco_trl/arrived", 0) < everyone:
        if store.add("paco_trl/left", 0) or time.monotonic() > end:
            raise dist.DistError("Another process of this run has ended; its last lines say why.")
        time.sleep(0.1)
    PartialState().wait_for_everyone()  # the first process has the store: it stays until all have read it


@atexit.register
def _leave() -> None:
    """Keep processes from waiting for one that has ended."""
    if (store := _store()) is not None:
        # The first process has the store, and may be gone: torch would print a C++ stack as the last lines
        with contextlib.suppress(OSError, KeyError, RuntimeError):
            address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            socket.create_connection(address, timeout=1).close()
            store.add("paco_trl/left", 1)


def _store() -> Any:
    """Return the key-value store that processes share without collectives; `None` for a single process."""
    dist = sys.modules.get("torch.distributed")  # imported where there are several
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()  # there is no public function for it (torch 2.15)


def end_training(accelerator: "Accelerator") -> None:
    """End a script: the processes wait for one another, trackers finish, the process group is closed."""
    # On the CPU it waits a second: a thread of Gloo that frees tensors while Python shuts down ends the process with
    # "terminate called without an active exception" (1 to 2 of 100 exits on a loaded machine, torch 2.15)
    # A process that leaves early can take the others down
    wait_for_all()
    accelerator.end_training()
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        time.sleep(_GLOO_SECONDS)
