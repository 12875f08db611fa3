# SPDX-License-Identifier: Apache-2.0
"""
Cards of models: what they say as dataclasses, filled in by a trainer, from a YAML file or by hand, and one template
for image models and one for judges.
"""

from .content import (
    Evaluation,
    ImageModelCard,
    ImageSettings,
    JudgeCard,
    JudgeSettings,
    LoRA,
    Published,
    Result,
    Reward,
    Table,
    load_reference_card,
)
from .rendering import metadata, renamed, render_card, save_card


__all__ = [
    "Evaluation", "ImageModelCard", "ImageSettings", "JudgeCard", "JudgeSettings", "LoRA", "Published", "Result",
    "Reward", "Table", "load_reference_card", "metadata", "renamed", "render_card", "save_card",
]  # fmt: skip
