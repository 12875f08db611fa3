# SPDX-License-Identifier: Apache-2.0
"""
Cards of models: what they say as dataclasses, filled in from a trainer, from a YAML file or by hand, and one template
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
)
from .model_card import latest_pictures, render_model_card, saved_step
from .reference import load_reference_card
from .rendering import metadata, renamed, render_card
from .reward_model_card import render_reward_model_card


__all__ = [
    "Evaluation",
    "ImageModelCard",
    "ImageSettings",
    "JudgeCard",
    "JudgeSettings",
    "LoRA",
    "Published",
    "Result",
    "Reward",
    "Table",
    "latest_pictures",
    "load_reference_card",
    "metadata",
    "renamed",
    "render_card",
    "render_model_card",
    "render_reward_model_card",
    "saved_step",
]
