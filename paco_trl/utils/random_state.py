# SPDX-License-Identifier: Apache-2.0
"""State of the global random number generators."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def record_rng_state(device: torch.device) -> Callable[[], None]:
    """Record the state of the generators of Python, NumPy and torch, and return what restores it."""
    is_cuda = device.type == "cuda"
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if is_cuda else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)

    return restore


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch at the end."""
    restore = record_rng_state(device)
    try:
        yield
    finally:
        restore()
