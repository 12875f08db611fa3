# SPDX-License-Identifier: Apache-2.0
"""
A world whose truth is known: in each grid one figure, with a colour and a shape of its own, is in all panels, on another
ground in each. Two panels of a prompt are consistent if the figure is the same.
"""

from pathlib import Path

import numpy as np
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image, ImageDraw

from paco_trl.dataset_building import StageFolder, cut_panels, make_instances


COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 230), "yellow": (230, 210, 30)}
SHAPES = ("circle", "square", "triangle")
PANEL = 28  # pixels of a side: one token of the tiny judge


def world_prompts(count: int, rows: int, cols: int) -> Dataset:
    """Image-set prompts with the ids `p000`, `p001` and so on."""
    numbers = [f"figure number {index}" for index in range(count)]
    columns = {
        "id": [f"p{index:03}" for index in range(count)],
        "prompt": [f"A {rows}x{cols} grid layout of {name}. It travels." for name in numbers],
        "theme": [f"A journey of {name}." for name in numbers],
        "rows": [rows] * count,
        "cols": [cols] * count,
        "panels": [[f"Place {place}" for place in range(rows * cols)] for _ in numbers],
    }
    columns["category"] = [("multi-pose", "movie shot")[index % 2] for index in range(count)]
    columns["dimensions"] = [(["identity"], ["logic", "identity", "style"])[index % 2] for index in range(count)]
    return Dataset.from_dict(columns)


def draw_panel(rng: np.random.Generator, colour: str, shape: str) -> Image.Image:
    """The figure on a grey of its own, at a place of its own."""
    grey = int(rng.integers(90, 170))
    panel = Image.new("RGB", (PANEL, PANEL), (grey,) * 3)
    side = int(PANEL * rng.uniform(0.6, 0.9))
    left, top = (int(rng.integers(0, PANEL - side)) for _ in range(2))
    right, bottom = left + side, top + side
    draw = ImageDraw.Draw(panel)
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), COLOURS[colour])
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), COLOURS[colour])
    else:
        draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], COLOURS[colour])
    return panel


def write_grids(folder: Path, prompts: Dataset) -> tuple[Dataset, dict]:
    """Draws the grids of prompts, each seed another colour. Gives them, and (colour, shape) by grid."""
    rows, truth = [], {}
    for number, prompt in enumerate(prompts):
        rng = np.random.default_rng(number)
        for seed, colour in enumerate(map(str, rng.permutation(list(COLOURS)))):
            shape = str(rng.choice(SHAPES))
            grid = Image.new("RGB", (PANEL * prompt["cols"], PANEL * prompt["rows"]))
            for position in range(prompt["rows"] * prompt["cols"]):
                row, col = divmod(position, prompt["cols"])
                grid.paste(draw_panel(rng, colour, shape), (col * PANEL, row * PANEL))
            path = folder / f"{prompt['id']}-{seed}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            grid.save(path)
            name = f"{prompt['id']}/{seed}"
            layout = {"rows": prompt["rows"], "cols": prompt["cols"]}
            rows.append({"id": name, "prompt_id": prompt["id"], "seed": seed, **layout, "image": str(path)})
            truth[name] = (colour, shape)
    kinds = {"id": Value("string"), "prompt_id": Value("string"), "image": ImageFeature()}
    kinds |= {name: Value("int64") for name in ("seed", "rows", "cols")}
    return Dataset.from_list(rows, features=Features(kinds)), truth


class PlantedWorld:
    """Prompts, grids, panels and instances, with the truth."""

    def __init__(self, folder: Path, num_prompts: int = 6, rows: int = 2, cols: int = 2):
        self.prompts = world_prompts(num_prompts, rows, cols)
        self.grids, self.truth = write_grids(folder / "drawn", self.prompts)
        self.panels = cut_panels(self.grids, StageFolder(folder / "panels"))
        self.instances = make_instances(self.panels)
        self.data = (self.instances, self.panels, self.prompts)  # what the later stages take

    def is_consistent(self, first: str, second: str) -> bool:
        """Whether two panels, by their ids, have the same figure."""
        return self.truth[first.rpartition("/")[0]] == self.truth[second.rpartition("/")[0]]
