# SPDX-License-Identifier: Apache-2.0
"""The trainers, their settings, and the formulas they are made of."""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


if TYPE_CHECKING:
    from .first_token_loss import first_token_weighted_loss
    from .losses import PolicyLoss, PolicyStep

__all__ = ["PolicyLoss", "PolicyStep", "first_token_weighted_loss"]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
