# SPDX-License-Identifier: Apache-2.0
"""Build tiny models with random weights, in the format of the real ones: for tests, the demo and a laptop.

All builders save to the directory `folder`, which `from_pretrained` loads, and return its path. Pipelines have the
real classes and format. `seed` is that of the weights; torch's random state is kept. Tokenizers are trained in place.
"""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


__all__ = [
    "build_tiny_flux", "build_tiny_flux2_klein", "build_tiny_flux_kontext", "build_tiny_qwen2_5_vl",
    "build_tiny_stable_diffusion_3",
]  # fmt: skip

if TYPE_CHECKING:
    from .flux import build_tiny_flux, build_tiny_flux_kontext
    from .flux2 import build_tiny_flux2_klein
    from .qwen2_5_vl import build_tiny_qwen2_5_vl
    from .stable_diffusion_3 import build_tiny_stable_diffusion_3

__getattr__, __dir__ = lazy_imports(__name__, __file__)
