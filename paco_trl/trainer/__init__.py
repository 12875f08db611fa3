# SPDX-License-Identifier: Apache-2.0
"""The trainers, their settings, and the formulas they are made of."""

import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


if TYPE_CHECKING:
    from .first_token_loss import first_token_weighted_loss
    from .losses import PolicyStep

# The trainers override private methods of these: tests/test_contract.py lists which
TESTED_WITH = {"trl": "1.16", "transformers": "5.23"}

for _name, _tested in TESTED_WITH.items():
    if not f"{version(_name)}.".startswith(f"{_tested}."):
        warnings.warn(
            f"paco_trl was tested with {_name} {_tested}, and {_name} {version(_name)} is installed.",
            stacklevel=2,
        )

__all__ = ["PolicyStep", "first_token_weighted_loss"]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
