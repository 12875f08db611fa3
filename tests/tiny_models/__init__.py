# SPDX-License-Identifier: Apache-2.0
"""Builders of tiny models: those of `paco_trl.tiny`, and more like them, which only tests and benchmarks need."""

from typing import TYPE_CHECKING

from paco_trl.utils.lazy import lazy_imports


__all__ = [
    "build_tiny_clip", "build_tiny_flux", "build_tiny_flux2", "build_tiny_flux2_klein", "build_tiny_flux_kontext",
    "build_tiny_krea2", "build_tiny_longcat_image", "build_tiny_longcat_image_edit", "build_tiny_ovis_image",
    "build_tiny_qwen2_5_vl", "build_tiny_qwen_image", "build_tiny_qwen_image_21", "build_tiny_qwen_image_edit",
    "build_tiny_qwen_image_edit_plus", "build_tiny_stable_diffusion_3", "build_tiny_z_image",
]  # fmt: skip

if TYPE_CHECKING:
    from paco_trl.tiny import (
        build_tiny_flux,
        build_tiny_flux2_klein,
        build_tiny_flux_kontext,
        build_tiny_qwen2_5_vl,
        build_tiny_stable_diffusion_3,
    )

    from .clip import build_tiny_clip
    from .flux2 import build_tiny_flux2
    from .krea2 import build_tiny_krea2
    from .longcat_image import build_tiny_longcat_image, build_tiny_longcat_image_edit, build_tiny_ovis_image
    from .qwen_image import (
        build_tiny_qwen_image,
        build_tiny_qwen_image_21,
        build_tiny_qwen_image_edit,
        build_tiny_qwen_image_edit_plus,
    )
    from .z_image import build_tiny_z_image

__getattr__, __dir__ = lazy_imports(__name__, __file__)
