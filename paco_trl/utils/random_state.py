# SPDX-License-Identifier: Apache-2.0
"""State of the global random number generators."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def preserve_rng_state(device: torch.device) -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
