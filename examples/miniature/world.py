# SPDX-License-Identifier: Apache-2.0
"""
Render a planted world: sets of one figure in four scenes, whose truth can be read from the pixels.

A figure has a shape, a color and an accessory; a scene has a ground and a place. A prompt in the T2IS format names the
shape and the four scenes, and asks for the same figure in all of them; it names the color and the accessory, or leaves
them open. A set is consistent if its figures are the same, and follows its prompt if it shows what the prompt names.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw


SHAPES = ("round", "square", "pointed")
COLORS = {
    "red": (214, 40, 40),
    "orange": (244, 140, 6),
    "yellow": (250, 220, 60),
    "green": (46, 160, 67),
    "blue": (40, 98, 214),
    "purple": (142, 60, 190),
}
ACCESSORIES = ("hat", "flag", "belt")
GROUNDS = ("meadow", "beach", "desert", "snow", "night", "forest")
PLACES = ("left", "middle", "right")

# Sky, ground
_BACKDROPS = {
    "meadow": ((168, 218, 255), (140, 200, 96)),
    "beach": ((120, 200, 220), (240, 222, 170)),
    "desert": ((255, 214, 170), (214, 150, 90)),
    "snow": ((200, 212, 226), (250, 250, 252)),
    "night": ((58, 66, 128), (92, 96, 140)),
    "forest": ((150, 186, 160), (58, 92, 60)),
}
_MARKERS = ("[TOP]-[LEFT]:", "[TOP]-[RIGHT]:", "[BOTTOM]-[LEFT]:", "[BOTTOM]-[RIGHT]:")
_INK = (30, 26, 34)
_PAPER = (248, 246, 240)


class Panel(NamedTuple):
    """What one panel shows."""

    shape: str
    color: str
    accessory: str
    ground: str
    place: str

    @property
    def identity(self) -> tuple[str, str, str]:
        """Return shape, color and accessory, which all panels of a set must share."""
        return self[:3]


ALL_PANELS = tuple(itertools.starmap(Panel, itertools.product(SHAPES, COLORS, ACCESSORIES, GROUNDS, PLACES)))
_DRAWN_AT = 256  # pixels; rendered large and downscaled, so that edges are smooth at every size


@lru_cache(maxsize=8)
def draw_all_panels(size: int, panels: Sequence[Panel] = ALL_PANELS) -> np.ndarray:
    """Render every possible panel."""
    pixels = np.stack([np.asarray(draw_panel(panel, size)) for panel in panels])  # (N, size, size, 3)
    pixels.setflags(write=False)
    return pixels


def draw_panel(panel: Panel, size: int) -> Image.Image:
    """Render one panel."""
    return _draw(panel).resize((size, size), Image.Resampling.BOX)


def _draw(panel: Panel) -> Image.Image:
    sky, ground = _BACKDROPS[panel.ground]
    image = Image.new("RGB", (_DRAWN_AT, _DRAWN_AT), sky)
    pen = ImageDraw.Draw(image)
    _draw_scene(pen, panel.ground)
    pen.rectangle((0, 176, 256, 256), fill=ground)
    _draw_figure(pen, panel, x={"left": 68, "middle": 128, "right": 188}[panel.place])
    return image


def _draw_scene(pen: ImageDraw.ImageDraw, ground: str) -> None:
    if ground == "meadow":
        pen.ellipse((-60, 130, 150, 260), fill=(120, 186, 90))
        pen.ellipse((110, 140, 320, 270), fill=(120, 186, 90))
    elif ground == "beach":
        pen.rectangle((0, 128, 256, 176), fill=(30, 120, 170))
    elif ground == "desert":
        pen.polygon([(0, 176), (70, 80), (140, 176)], fill=(236, 180, 120))
        pen.polygon([(110, 176), (190, 100), (270, 176)], fill=(236, 180, 120))
    elif ground == "snow":
        pen.polygon([(-40, 176), (60, 50), (160, 176)], fill=(160, 176, 200))
        pen.polygon([(90, 176), (190, 70), (290, 176)], fill=(160, 176, 200))
    elif ground == "night":
        pen.ellipse((196, 10, 240, 54), fill=(246, 240, 200))
        for x, y in ((20, 24), (64, 14), (122, 30), (168, 72), (238, 104), (26, 96)):
            pen.ellipse((x - 6, y - 6, x + 6, y + 6), fill=(246, 240, 200))
    elif ground == "forest":
        for x in (16, 72, 128, 184, 240):
            pen.polygon([(x - 38, 180), (x, 30), (x + 38, 180)], fill=(30, 74, 48))


def _draw_figure(pen: ImageDraw.ImageDraw, panel: Panel, x: int) -> None:
    color, line = COLORS[panel.color], 8
    left, top, right, bottom = x - 46, 112, x + 46, 212
    if panel.accessory == "flag":  # behind the figure
        pen.line((x + 52, 216, x + 52, 40), fill=_INK, width=9)
        pen.rectangle((x + 4, 40, x + 52, 80), fill=_PAPER, outline=_INK, width=6)
    if panel.shape == "round":
        pen.ellipse((left, top, right, bottom), fill=color, outline=_INK, width=line)
    elif panel.shape == "square":
        pen.rectangle((left, top, right, bottom), fill=color, outline=_INK, width=line)
    else:
        corners = [(x, top - 16), (right + 14, bottom), (left - 14, bottom)]
        pen.polygon(corners, fill=color, outline=_INK, width=line)
    if panel.accessory == "belt":
        half = 50 if panel.shape == "pointed" else 47
        pen.rectangle((x - half, 172, x + half, 194), fill=_PAPER, outline=_INK, width=5)
    elif panel.accessory == "hat":
        pen.rectangle((x - 46, top - 12, x + 46, top + 6), fill=_INK)
        pen.rectangle((x - 28, top - 58, x + 28, top - 8), fill=_INK)
        pen.rectangle((x - 28, top - 30, x + 28, top - 14), fill=_PAPER)
    for eye in (x - 16, x + 16):
        pen.ellipse((eye - 12, 138, eye + 12, 162), fill=_PAPER)
        pen.ellipse((eye - 5, 145, eye + 5, 157), fill=_INK)


class PromptSpec(NamedTuple):
    """What a prompt asks of one panel; `None` is left open."""

    shape: str
    color: str | None
    accessory: str | None
    ground: str
    place: str


def write_prompt(specs: Sequence[PromptSpec]) -> str:
    """Write the prompt of a 2x2 set."""
    shape = specs[0].shape
    theme = f"FOUR-PANEL Images with a 2x2 grid layout of one {shape} figure. Every image shows the same figure."
    panels = [f"{marker} {describe_spec(spec)}" for marker, spec in zip(_MARKERS, specs, strict=True)]
    return " ".join([theme, *panels])


def describe_spec(spec: PromptSpec) -> str:
    """Write the part of a prompt about one panel."""
    scene = f"{spec.ground.capitalize()}, {'in' if spec.place == 'middle' else 'on'} the {spec.place}"
    named = ", ".join(name for name in (spec.color, spec.accessory) if name is not None)
    return f"{scene}: {named}." if named else f"{scene}."


def sample_specs(random: np.random.Generator, named: bool) -> list[PromptSpec]:
    """Sample the specs of a set: any figure, four different grounds, any places."""
    shape, color, accessory = (names[random.integers(len(names))] for names in (SHAPES, tuple(COLORS), ACCESSORIES))
    if not named:
        color = accessory = None
    grounds = random.permutation(len(GROUNDS))[:4]
    return [
        PromptSpec(shape, color, accessory, GROUNDS[ground], PLACES[random.integers(len(PLACES))])
        for ground in grounds
    ]


def sample_careless_set(specs: Sequence[PromptSpec], random: np.random.Generator, care: float) -> list[Panel]:
    """Sample the panels of a set in which color and accessory are each right with probability `care`, or by chance."""
    chosen = []
    for named, values in ((specs[0].color, tuple(COLORS)), (specs[0].accessory, ACCESSORIES)):
        right = values[random.integers(len(values))] if named is None else named
        chosen.append([right if random.random() < care else values[random.integers(len(values))] for _ in specs])
    return [
        Panel(spec.shape, color, accessory, spec.ground, spec.place)
        for color, accessory, spec in zip(*chosen, specs, strict=True)
    ]
