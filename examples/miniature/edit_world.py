# SPDX-License-Identifier: Apache-2.0
"""
Sample edits of the planted world: a scene, an instruction that changes one property of it, and what careless editors do.

An edit succeeds if that property is as the instruction says and the others, which it does not repeat, are the source's.
"""

from itertools import product, starmap
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .world import PLACES, SHAPES, Panel, draw_panel


if TYPE_CHECKING:
    from datasets import Dataset


EDIT_SIZE = 64  # pixels per side at full resolution
# Fewer values than sets have, so that a small editor is sharp, and figures without an accessory
_VALUES = {
    "shape": SHAPES,
    "color": ("red", "yellow", "green", "blue"),
    "accessory": ("none", "hat", "flag"),
    "ground": ("meadow", "desert", "snow", "night"),
    "place": PLACES,
}
EDITED = ("color", "accessory", "ground", "place")
EDIT_PANELS = tuple(starmap(Panel, product(*_VALUES.values())))


class Edit(NamedTuple):
    """A source, the name of the property that is to change, and its new value."""

    source: Panel
    name: str
    value: str

    @property
    def target(self) -> Panel:
        """Return what is asked for."""
        return self.source._replace(**{self.name: self.value})

    @property
    def instruction(self) -> str:
        """Write the instruction."""
        if self.name == "accessory":
            return f"Remove the {self.source.accessory}." if self.value == "none" else f"Add a {self.value}."
        return {
            "color": f"Make the figure {self.value}.",
            "ground": f"Change the ground to {self.value}.",
            "place": f"Move the figure to the {self.value}.",
        }[self.name]


class EditTruth(NamedTuple):
    """What an edited image shows; an unreadable one is neither done nor unchanged."""

    success: bool  # done, and all else unchanged
    done: bool  # the property is as the instruction says
    unchanged: bool  # the others are those of the source
    unreadable: bool  # it shows nothing of the world


def judge_edit(panel: Panel | None, edit: Edit) -> EditTruth:
    """Measure whether an edit was done, and whether all else was left alone."""
    if panel is None:
        return EditTruth(False, False, False, True)
    done = getattr(panel, edit.name) == edit.value
    return EditTruth(panel == edit.target, done, panel._replace(**{edit.name: edit.value}) == edit.target, False)


def sample_edit(random: np.random.Generator) -> Edit:
    """Sample any scene, and a change of one property."""
    source = EDIT_PANELS[random.integers(len(EDIT_PANELS))]
    name = EDITED[random.integers(len(EDITED))]
    if name == "accessory" and source.accessory != "none":
        return Edit(source, name, "none")
    return Edit(source, name, _other(random, name, getattr(source, name)))


def sample_careless_edit(edit: Edit, random: np.random.Generator, care: float) -> Panel:
    """Sample a result: right with probability `care`, or not done, done wrong, or with another property changed."""
    if random.random() < care:
        return edit.target
    kind = random.random()
    if kind < 0.3:
        return edit.source
    if kind < 0.45:
        return edit.source._replace(**{edit.name: _other(random, edit.name, edit.value)})
    names = [name for name in EDITED if name != edit.name]
    name = names[random.integers(len(names))]
    start = edit.target if kind < 0.85 else edit.source
    return start._replace(**{name: _other(random, name, getattr(start, name))})


def _other(random: np.random.Generator, name: str, value: str) -> str:
    values = [other for other in _VALUES[name] if other != value]
    return values[random.integers(len(values))]


def make_edits(count: int, seed: int) -> "Dataset":
    """Sample distinct editing prompts of the planted world."""
    from datasets import Dataset
    from datasets import Image as ImageFeature

    random = np.random.default_rng(seed)
    edits: dict[Edit, None] = {}
    while len(edits) < count:
        edits[sample_edit(random)] = None
    rows = [
        {
            "id": f"edit-{number:03d}",
            "prompt": edit.instruction,
            "image": draw_panel(edit.source, EDIT_SIZE),
            "height": EDIT_SIZE,
            "width": EDIT_SIZE,
            "edit": [*edit.source, edit.name, edit.value],
        }
        for number, edit in enumerate(edits)
    ]
    return Dataset.from_list(rows).cast_column("image", ImageFeature())


def read_edit(values: list[str]) -> Edit:
    """Read an edit from the column `edit`."""
    return Edit(Panel(*values[:-2]), *values[-2:])
