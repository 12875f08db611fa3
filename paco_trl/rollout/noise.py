# SPDX-License-Identifier: Apache-2.0
"""Noise as a pure function of what it is for.

Whatever the number of processes, the order of the images or the moment a run was resumed: the same image of the same
round gets the same noise.
"""

import numpy as np
import torch


# What a random stream is for: the second word of its key, so that no two purposes share numbers
STREAMS = {"prompts": 0, "batches": 1, "sde steps": 2, "training": 3, "evaluation": 4}


def keyed_generator(*key: int) -> torch.Generator:
    """
    A CPU generator whose state depends on nothing but the key.

    Args:
        key (`int`):
            Integers from 0 to 2**32 - 1, here `(seed, round, prompt, image, step)`. Keys of one length that differ in any
            place give independent streams. (Of different lengths they may not: [`numpy.random.SeedSequence`] pads
            short keys with zeros.)

    Returns:
        `torch.Generator` on the CPU: its stream is the same on every accelerator. It is one of 2**32, because the CPU
        generator takes no more of a seed: of 100,000 keys about one pair shares its stream.
    """
    state = np.random.SeedSequence(key).generate_state(2, dtype=np.uint32)
    # 63 bits, which `manual_seed` always accepts; the generator uses the lower 32
    return torch.Generator().manual_seed((int(state[0]) << 31) | (int(state[1]) >> 1))
