# SPDX-License-Identifier: Apache-2.0
"""The trainers, their settings, and the formulas they are made of."""

import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING

from ..utils.lazy import lazy_imports


if TYPE_CHECKING:
    from .first_token_loss import first_token_weighted_loss
    from .losses import PolicyStep

# The trainers take over private methods of these: tests/test_contract.py lists which. setup.cfg has the same ceilings.
TESTED_WITH = {"trl": "1.16", "transformers": "5.23"}

for _name, _tested in TESTED_WITH.items():
    if not f"{version(_name)}.".startswith(f"{_tested}."):
        warnings.warn(
            f"{_name} {version(_name)} is installed, but paco_trl's trainers are tested with {_name} {_tested} only, "
            f"whose private methods they take over. Install it (`pip install '{_name}=={_tested}.*'`), or run "
            "tests/test_contract.py of paco_trl's repository before you rely on a run.",
            stacklevel=2,
        )

__all__ = ["PolicyStep", "first_token_weighted_loss"]

__getattr__, __dir__ = lazy_imports(__name__, __file__)
