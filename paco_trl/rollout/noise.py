# SPDX-License-Identifier: Apache-2.0
"""Noise as a pure function of its key.

The same image of the same round gets the same noise, whatever the number of processes, the order of the images or the
step at which a run resumed.
"""

import numpy as np
import torch


# Second word of a key: a number for each purpose, so that no two share a random stream
STREAMS = {"prompts": 0, "batches": 1, "sde steps": 2, "training": 3, "evaluation": 4}


def keyed_generator(*key: int) -> torch.Generator:
    """
    Return a CPU generator whose state depends only on the key: its stream is the same for every accelerator.

    The key has integers from 0 to 2**32 - 1, here `(seed, stream, round, row, generation, step)`: step 0 is the initial
    latent, step i + 1 the noise of denoising step i. Keys of one length that differ
    anywhere give independent streams. Keys of different lengths may not: [`numpy.random.SeedSequence`] pads short keys
    with zeros. The CPU generator uses 32 bits of a seed: of 100,000 keys about one pair shares its stream.
    """
    state = np.random.SeedSequence(key).generate_state(2, dtype=np.uint32)
    # 63 bits, which `manual_seed` always accepts; the generator uses the lower 32
    return torch.Generator().manual_seed((int(state[0]) << 31) | (int(state[1]) >> 1))
