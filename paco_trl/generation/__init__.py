# SPDX-License-Identifier: Apache-2.0
"""Image generation with unmodified pipelines, for datasets and benchmarks. Interrupted runs resume."""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


if TYPE_CHECKING:
    from .edits import generate_edits
    from .grids import generate_grids
    from .inference import load_for_inference

__all__ = ["generate_edits", "generate_grids", "load_for_inference"]

# Lazy, so that the metrics of benchmarks do not import torch
__getattr__, __dir__ = lazy_imports(__name__, __file__)
