# SPDX-License-Identifier: Apache-2.0
"""The global random number generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_random_state(device: torch.device) -> Iterator[None]:
    """Afterwards the generators of Python, NumPy and torch are where they were before."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
