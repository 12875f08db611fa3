# SPDX-License-Identifier: Apache-2.0
"""
A planted world: sets of pictures of one figure in changing scenes, drawn so that the truth can be read from the pixels.

A figure has a shape, a colour and an accessory; a scene has a ground and a place where the figure stands. A prompt in
the T2IS format names the shape and the four scenes, and asks for the same figure in all of them. It may name its colour
and accessory too, or leave them to whoever draws, who has to choose them once and keep them. A set is consistent if its
four figures are the same, and follows its prompt if it shows what was asked for: two things that can be had apart.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw


SHAPES = ("round", "square", "pointed")
COLOURS = {
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

# Sky and ground of each scene
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
    """
    What one panel shows.

    Attributes:
        shape (`str`):
            Shape of the figure, one of `SHAPES`.
        colour (`str`):
            Its colour, one of `COLOURS`.
        accessory (`str`):
            What it wears or carries, one of `ACCESSORIES`.
        ground (`str`):
            The scene, one of `GROUNDS`.
        place (`str`):
            Where the figure stands, one of `PLACES`.
    """

    shape: str
    colour: str
    accessory: str
    ground: str
    place: str

    @property
    def identity(self) -> tuple[str, str, str]:
        """Shape, colour and accessory: what all panels of a set must share."""
        return self[:3]


ALL_PANELS = tuple(itertools.starmap(Panel, itertools.product(SHAPES, COLOURS, ACCESSORIES, GROUNDS, PLACES)))
_DRAWN_AT = 256  # pixels: drawn large and made smaller, so that edges are smooth at every size


@lru_cache(maxsize=8)
def draw_all_panels(size: int) -> np.ndarray:
    """Draws everything that a panel can show."""
    pictures = [np.asarray(_draw(panel).resize((size, size), Image.Resampling.BOX)) for panel in ALL_PANELS]
    panels = np.stack(pictures)  # (972, size, size, 3)
    panels.setflags(write=False)
    return panels


def draw_panel(panel: Panel, size: int) -> Image.Image:
    """Draws one panel."""
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
    # What stands on the horizon, which the figure may hide in part
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
    colour, line = COLOURS[panel.colour], 8
    left, top, right, bottom = x - 46, 112, x + 46, 212
    if panel.accessory == "flag":  # behind the figure
        pen.line((x + 52, 216, x + 52, 40), fill=_INK, width=9)
        pen.rectangle((x + 4, 40, x + 52, 80), fill=_PAPER, outline=_INK, width=6)
    if panel.shape == "round":
        pen.ellipse((left, top, right, bottom), fill=colour, outline=_INK, width=line)
    elif panel.shape == "square":
        pen.rectangle((left, top, right, bottom), fill=colour, outline=_INK, width=line)
    else:
        corners = [(x, top - 16), (right + 14, bottom), (left - 14, bottom)]
        pen.polygon(corners, fill=colour, outline=_INK, width=line)
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


class Wish(NamedTuple):
    """
    What a prompt asks of one panel.

    Attributes:
        shape (`str`):
            Shape of the figure, one of `SHAPES`.
        colour (`str`, *optional*):
            Its colour, one of `COLOURS`; `None` if that is left open.
        accessory (`str`, *optional*):
            What it wears or carries, one of `ACCESSORIES`; `None` if that is left open.
        ground (`str`):
            The scene, one of `GROUNDS`.
        place (`str`):
            Where the figure stands, one of `PLACES`.
    """

    shape: str
    colour: str | None
    accessory: str | None
    ground: str
    place: str


def write_prompt(wishes: Sequence[Wish]) -> str:
    """Writes the prompt of a 2x2 set."""
    shape = wishes[0].shape
    theme = f"FOUR-PANEL Images with a 2x2 grid layout of one {shape} figure. Every image shows the same figure."
    panels = [f"{marker} {write_wish(wish)}" for marker, wish in zip(_MARKERS, wishes, strict=True)]
    return " ".join([theme, *panels])


def write_wish(wish: Wish) -> str:
    """What a prompt says of one panel."""
    scene = f"{wish.ground.capitalize()}, {'in' if wish.place == 'middle' else 'on'} the {wish.place}"
    named = ", ".join(name for name in (wish.colour, wish.accessory) if name is not None)
    return f"{scene}: {named}." if named else f"{scene}."


def draw_wishes(random: np.random.Generator, named: bool) -> list[Wish]:
    """Chooses what a set is to show: any figure, four different grounds, any places."""
    shape, colour, accessory = (names[random.integers(len(names))] for names in (SHAPES, tuple(COLOURS), ACCESSORIES))
    if not named:
        colour = accessory = None
    grounds = random.permutation(len(GROUNDS))[:4]
    return [
        Wish(shape, colour, accessory, GROUNDS[ground], PLACES[random.integers(len(PLACES))]) for ground in grounds
    ]


def draw_careless_set(wishes: Sequence[Wish], random: np.random.Generator, care: float) -> list[Panel]:
    """
    Fills a prompt as somebody careless would: in some panels the figure has another colour or accessory than it
    should.
    """
    chosen = []
    for asked, values in ((wishes[0].colour, tuple(COLOURS)), (wishes[0].accessory, ACCESSORIES)):
        right = values[random.integers(len(values))] if asked is None else asked
        chosen.append([right if random.random() < care else values[random.integers(len(values))] for _ in wishes])
    return [
        Panel(wish.shape, colour, accessory, wish.ground, wish.place)
        for colour, accessory, wish in zip(*chosen, wishes, strict=True)
    ]
