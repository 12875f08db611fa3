# SPDX-License-Identifier: Apache-2.0
"""
The Hugging Face Hub: what is saved beside a model (`paco_trl.json`), the card made of it, and pushes.

[`ImageModelCard`] and [`JudgeCard`] are filled in by a trainer, from a file or by hand.
"""

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
