# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, in the format of the real ones: for tests, the demo and trying things on a laptop.

Each builder saves a folder that `from_pretrained` loads, so that everything runs through the code real models take.
"""

from importlib import import_module
from typing import TYPE_CHECKING


_MODULE_OF = {"build_tiny_clip": ".clip", "build_tiny_flux": ".flux", "build_tiny_qwen2_5_vl": ".qwen2_5_vl"}

__all__ = ["build_tiny_clip", "build_tiny_flux", "build_tiny_qwen2_5_vl"]

if TYPE_CHECKING:
    from .clip import build_tiny_clip
    from .flux import build_tiny_flux
    from .qwen2_5_vl import build_tiny_qwen2_5_vl


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paco_trl.tiny' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)
