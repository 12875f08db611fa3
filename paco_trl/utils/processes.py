# SPDX-License-Identifier: Apache-2.0
"""End of a script with several processes."""

import time

from accelerate import Accelerator


# Gloo's threads need milliseconds, and longer on a loaded machine
_GLOO_SECONDS = 1.0


def end_training(accelerator: Accelerator) -> None:
    """End a script: the processes wait for one another, trackers finish, the process group is closed."""
    # On the CPU it waits a second: a thread of Gloo that frees tensors while Python shuts down ends the process with
    # "terminate called without an active exception" (1 to 2 of 100 exits on a loaded machine, torch 2.15)
    # A process that leaves early can take the others down
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        time.sleep(_GLOO_SECONDS)
