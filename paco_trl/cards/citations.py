# SPDX-License-Identifier: Apache-2.0
"""Cite TRL and the base model."""

import yaml

from ..utils.files import read_template
from ..utils.names import public_name


_CITATIONS = yaml.safe_load(read_template("citations.yaml"))
TRL: str = _CITATIONS["trl"]


def base_citation(base: str) -> str | None:
    """Return the BibTeX entry of a base model (Hub id or directory), `None` for an unknown one."""
    name = public_name(base).lower()
    return next((citation for part, citation in _CITATIONS["bases"].items() if part.lower() in name), None)
