# SPDX-License-Identifier: Apache-2.0
"""
The Hugging Face Hub: what is saved beside a model (`paco_trl.json`), the card made of it, and pushes.

[`ImageModelCard`] and [`JudgeCard`] are filled in by a trainer, from a file or by hand.
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

# Lazy, so that names of files come without `datasets`
__getattr__, __dir__ = lazy_imports(__name__, __file__)
