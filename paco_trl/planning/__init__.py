# SPDX-License-Identifier: Apache-2.0
"""Planning of a run before it starts: its memory by phase."""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


__all__ = ["MemoryPlan", "Phase", "plan_memory"]

if TYPE_CHECKING:
    from .memory import plan_memory
    from .plan import MemoryPlan, Phase

__getattr__, __dir__ = lazy_imports(__name__, __file__)
