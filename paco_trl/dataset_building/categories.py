# SPDX-License-Identifier: Apache-2.0
"""The categories of image sets in the PaCo-RL paper (https://huggingface.co/papers/2512.04784)."""

import json
from typing import NamedTuple

from jinja2 import Environment, PackageLoader

from ..utils.files import read_template


class Category(NamedTuple):
    """Kind of image set: its name and group, and the dimensions (keys of `DIMENSIONS`) that its images share."""

    name: str
    group: str
    dimensions: tuple[str, ...]


# Also of the texts that ask for prompts and reasons
TEMPLATES = Environment(loader=PackageLoader("paco_trl"))
_DATA = json.loads(read_template("categories.json"))
# Dimension -> its meaning, as LLMs and VLMs are told
DIMENSIONS: dict[str, str] = _DATA["dimensions"]
CATEGORIES = tuple(Category(name, group, tuple(dimensions)) for name, group, dimensions in _DATA["categories"])
