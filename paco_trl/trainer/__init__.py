# SPDX-License-Identifier: Apache-2.0
"""The trainers, their settings, and the formulas they are made of."""

from importlib import import_module
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .first_token_loss import first_token_weighted_loss

_MODULE_OF = {"first_token_weighted_loss": ".first_token_loss"}

__all__ = ["first_token_weighted_loss"]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'paco_trl.trainer' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
