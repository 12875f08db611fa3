# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of weights, to tell apart models of the same name."""

import hashlib
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from torch import nn

# Number of values per weight. Training changes nearly all of them
_SAMPLE = 1024


def weights_fingerprint(*modules: "nn.Module") -> str:
    """Compute a digest of a sample of each weight, with its name, shape and dtype: the same on every device."""
    digest = hashlib.sha256()
    for module in modules:
        for name, weight in sorted(module.named_parameters()):
            is_torchao = hasattr(weight, "__tensor_flatten__")  # which cannot be flattened
            flat = (weight.dequantize() if is_torchao else weight).detach().flatten()
            sample = flat[:: max(1, flat.numel() // _SAMPLE)].float().cpu().numpy()
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode() + sample.tobytes())
    return digest.hexdigest()[:16]
