# SPDX-License-Identifier: Apache-2.0
"""The categories of image sets in the PaCo-RL paper (https://huggingface.co/papers/2512.04784)."""

from typing import NamedTuple


class Category(NamedTuple):
    """Kind of image set: its name and group, and the dimensions (keys of `DIMENSIONS`) that its images share."""

    name: str
    group: str
    dimensions: tuple[str, ...]


# Dimension -> its meaning, as LLMs and VLMs are told
DIMENSIONS = {
    "identity": (
        "the same person, animal or object is recognizable in every image: face, hair, build, clothing, shape, "
        "proportions and marks stay the same"
    ),
    "style": (
        "every image is made in the same way: medium, line, palette, texture, lighting and level of detail stay the same"
    ),
    "logic": (
        "the images fit together: order of events, cause and effect, place, time and the state of things do not "
        "contradict each other"
    ),
}

CATEGORIES = (
    Category("home decoration", "design style generation", ("style",)),
    Category("IP product", "design style generation", ("identity", "style")),
    Category("font design", "design style generation", ("style",)),
    Category("poster design", "design style generation", ("style", "logic")),
    Category("creative style", "design style generation", ("style",)),
    Category("children book", "story generation", ("identity", "style", "logic")),
    Category("historical narrative", "story generation", ("identity", "logic")),
    Category("movie shot", "story generation", ("identity", "style", "logic")),
    Category("comic story", "story generation", ("identity", "style", "logic")),
    Category("news illustration", "story generation", ("style", "logic")),
    Category("evolution illustration", "progression generation", ("logic",)),
    Category("draw progression", "progression generation", ("style", "logic")),
    Category("growth progression", "progression generation", ("logic",)),
    Category("architecture building", "progression generation", ("logic",)),
    Category("cooking progression", "progression generation", ("logic",)),
    Category("physical law", "progression generation", ("logic",)),
    Category("historical panel", "instruction generation", ("style", "logic")),
    Category("activity arrange", "instruction generation", ("logic",)),
    Category("education illustration", "instruction generation", ("style", "logic")),
    Category("travel guide", "instruction generation", ("identity", "style", "logic")),
    Category("product instruction", "instruction generation", ("style", "logic")),
    Category("multi-view", "character generation", ("identity", "style")),
    Category("multi-pose", "character generation", ("identity",)),
    Category("portrait design", "character generation", ("identity", "style")),
    Category("multi-expression", "character generation", ("identity",)),
    Category("multi-scenario", "character generation", ("identity", "logic")),
)
