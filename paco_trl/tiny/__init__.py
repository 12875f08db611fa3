# SPDX-License-Identifier: Apache-2.0
"""Build tiny models with random weights, in the format of the real ones: for tests, the demo and a laptop.

All builders keep torch's random state and return the path of a directory that `from_pretrained` loads. Except for CLIP,
a seed determines the weights, and tokenizers are trained in place.
"""

from importlib import import_module
from typing import TYPE_CHECKING


_MODULE_OF = {
    "build_tiny_clip": ".clip",
    "build_tiny_flux": ".flux",
    "build_tiny_flux2": ".flux2",
    "build_tiny_flux2_klein": ".flux2",
    "build_tiny_flux_kontext": ".flux",
    "build_tiny_qwen2_5_vl": ".qwen2_5_vl",
    "build_tiny_qwen_image": ".qwen_image",
    "build_tiny_qwen_image_edit": ".qwen_image",
    "build_tiny_qwen_image_edit_plus": ".qwen_image",
    "build_tiny_stable_diffusion_3": ".stable_diffusion_3",
    "build_tiny_z_image": ".z_image",
}

__all__ = [
    "build_tiny_clip",
    "build_tiny_flux",
    "build_tiny_flux2",
    "build_tiny_flux2_klein",
    "build_tiny_flux_kontext",
    "build_tiny_qwen2_5_vl",
    "build_tiny_qwen_image",
    "build_tiny_qwen_image_edit",
    "build_tiny_qwen_image_edit_plus",
    "build_tiny_stable_diffusion_3",
    "build_tiny_z_image",
]

if TYPE_CHECKING:
    from .clip import build_tiny_clip
    from .flux import build_tiny_flux, build_tiny_flux_kontext
    from .flux2 import build_tiny_flux2, build_tiny_flux2_klein
    from .qwen2_5_vl import build_tiny_qwen2_5_vl
    from .qwen_image import build_tiny_qwen_image, build_tiny_qwen_image_edit, build_tiny_qwen_image_edit_plus
    from .stable_diffusion_3 import build_tiny_stable_diffusion_3
    from .z_image import build_tiny_z_image


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paco_trl.tiny' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)
