# SPDX-License-Identifier: Apache-2.0
"""
Hugging Face Hub integration: the card data saved with a model (`paco_trl.json`), its card, and pushes.

A trainer fills in an [`ImageModelCardData`] or a [`JudgeCardData`]. Card data can also be loaded from a file or written
by hand.
"""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


if TYPE_CHECKING:
    from .card_data import (
        EvaluationRow,
        ImageModelCardData,
        JudgeCardData,
        LoRA,
        RewardRow,
        load_card_data,
        save_card_data,
    )
    from .cards import metadata, render_card, save_card

__all__ = [
    "EvaluationRow", "ImageModelCardData", "JudgeCardData", "LoRA", "RewardRow", "load_card_data", "metadata",
    "render_card", "save_card", "save_card_data",
]  # fmt: skip

# Lazy, so that importing the file names does not import `datasets`
__getattr__, __dir__ = lazy_imports(__name__, __file__)
