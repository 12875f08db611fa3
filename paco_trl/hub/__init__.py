# SPDX-License-Identifier: Apache-2.0
"""
Hugging Face Hub integration: the settings saved with a model (`paco_trl.json`), its card, and pushes.

A trainer fills in an [`ImageModelCard`] or a [`JudgeCard`]; they can also be loaded from a file or written by hand.
"""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


if TYPE_CHECKING:
    from .cards import metadata, render_card, save_card
    from .settings import (
        EvaluationRow,
        ImageModelCard,
        JudgeCard,
        LoRA,
        RewardRow,
        load_settings,
        save_settings,
    )

__all__ = [
    "EvaluationRow", "ImageModelCard", "JudgeCard", "LoRA", "RewardRow", "load_settings", "metadata",
    "render_card", "save_card", "save_settings",
]  # fmt: skip

# Lazy, so that importing the file names does not import `datasets`
__getattr__, __dir__ = lazy_imports(__name__, __file__)
