# SPDX-License-Identifier: Apache-2.0
"""Results of evaluations of image models with planted numbers and small real images, to make reports of."""

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from paco_trl.data import join_grid


JUDGES = ("Qwen2.5-VL-7B-Instruct", "gemma-3-4b-it")
PROMPT = 'A fox & a "hare" | in <b>four</b> seasons <script>document.title = "hacked"</script>, 2x2 grid.'
# By set: the consistency of base and tuned, and the duplicate rate of tuned. The best is 3, the worst 0, most gained
# 3, most lost 7, the most copies 5
BASE = [0.30, 0.35, 0.40, 0.25, 0.45, 0.50, 0.55, 0.80, 0.42, 0.38]
TUNED = [0.10, 0.60, 0.62, 0.95, 0.50, 0.90, 0.70, 0.40, 0.44, 0.48]
COPIES = [0.0, 0.0, 0.0, 0.17, 0.0, 1.0, 0.33, 0.0, 0.0, 0.0]
COLORS = ("#7aa6c2", "#c28f7a", "#8fb878", "#b07ac2", "#c2b37a")
# Metric, label, kind, values of base and tuned, and whether they depend on the judge
ROWS = [
    ("identity", "Identity", "dimension", 0.301, 0.512, True),
    ("style", "Style", "dimension", 0.402, 0.523, True),
    ("logic", "Logic", "dimension", 0.403, 0.404, True),
    ("consistency", "Consistency", "group", 0.369, 0.480, True),
    ("entity", "Entity", "dimension", 0.791, 0.721, False),
    ("alignment", "Alignment", "group", 0.789, 0.760, False),
    ("average", "Weighted average", "average", None, None, False),
    ("duplicates", "Duplicate rate", "other", 0.0, 0.15, False),
]


def panel(number: int, place: int, size: tuple[int, int] = (96, 96)) -> Image.Image:
    """An image that differs by set and place."""
    width, height = size
    image = Image.new("RGB", size, COLORS[number % len(COLORS)])
    draw = ImageDraw.Draw(image)
    left = 6 + 11 * place % max(width - 40, 1)
    draw.ellipse((left, height // 3, left + width // 3, height // 3 + width // 3), fill="#40342c")
    draw.rectangle((0, height * 3 // 4, width, height), fill="#3d5a3d")
    return image


def cell(mean: float | None, half: float | None = 0.02, count: int = 10) -> dict[str, Any]:
    """A cell with an interval of `half` to both sides."""
    interval = [None, None] if half is None or mean is None else [mean - half, mean + half]
    return {"mean": mean, "interval": interval, "count": count}


def row(metric: str, label: str, kind: str, scorer: str, values: list[float | None], half: float = 0.02) -> dict:
    """A row of a table, with the difference of its two values."""
    difference = cell(None, count=0) if None in values else cell(values[1] - values[0], half)
    cells = [cell(value, count=0 if value is None else 10) for value in values]
    described = {"metric": metric, "label": label, "kind": kind, "scorer": scorer}
    return described | {"higher_is_better": metric != "duplicates", "cells": cells, "difference": difference}


def t2is_table(judge: str, number: int) -> dict[str, Any]:
    """The table of a judge, the same but for an offset for each. Consistency rises, and prompt alignment falls."""
    rows = []
    for metric, label, kind, *both, by_judge in ROWS:
        values = [value if value is None else value + 0.3 * number * by_judge for value in both]
        scorer = f"judge {judge}" if by_judge else "scorer clip-flant5-xxl"
        rows.append(row(metric, label, kind, scorer, values, 0.01 if metric == "duplicates" else 0.02))
    return {"title": f"Judge: {judge}", "rows": rows}


def save_set(folder: Path, role: str, number: int, per_panel: bool) -> list[str | None]:
    """A set of a system, as a grid or one file for each panel; the tuned image of set 8 and a panel of set 0 are missing."""
    if role == "tuned" and number == 8:
        return [None]
    images = folder / "images" / role
    images.mkdir(parents=True, exist_ok=True)
    # Panels of copies are the same, and those of a system of another place
    moved = 0 if role == "tuned" and COPIES[number] == 1 else 1
    panels = [panel(number + (role == "tuned"), place * moved) for place in range(4)]
    if not per_panel:
        join_grid(panels, 2, 2).save(images / f"{number:04d}.png")
        return [str(images / f"{number:04d}.png")]
    paths = [images / f"{number:04d}_{place}.png" for place in range(4)]
    for one, path in zip(panels, paths, strict=True):
        one.save(path)
    return [None if (number, place) == (0, 2) else str(path) for place, path in enumerate(paths)]


def plant_t2is(folder: Path, per_panel: bool = False) -> dict[str, Any]:
    """Results on T2IS-Bench of ten sets of 2 x 2 panels."""
    roles, sets = ["base", "tuned"], []
    for number in range(10):
        tuned = None if number == 8 else TUNED[number]
        identity = float("nan") if tuned is None else tuned - 0.01
        scores = [
            {"consistency": BASE[number], "identity": BASE[number] - 0.01, "alignment": 0.8, "duplicates": 0.0},
            {"consistency": tuned, "identity": identity, "alignment": 0.7, "duplicates": COPIES[number]},
        ]
        sets.append(
            {
                "key": f"{number:04d}/0", "prompt": f"{PROMPT} Number {number}.",
                "category": "Story Generation" if number % 2 else "Character Generation",
                "subcategory": "Comic | Story", "source": None, "panels": [2, 2], "scores": scores,
                "pictures": [save_set(folder, role, number, per_panel) for role in roles],
            }
        )  # fmt: skip
    settings = {"model": "black-forest-labs/FLUX.1-dev", "num_inference_steps": 20, "guidance_scale": 3.5}
    systems = [
        {
            "role": role,
            "name": "FLUX.1-dev" if role == "base" else "fox-lora",
            "settings": {**settings, "adapter": None if role == "base" else str(folder / "runs" / "fox-lora")},
            "counts": {"images": 10 if role == "base" else 9, "missing": int(role == "tuned")},
        }
        for role in roles
    ]
    rows = [
        row("consistency", name, "group", f"judge {JUDGES[0]}", [0.4, 0.51], 0.2)
        for name in ("Character Generation", "Story Generation")
    ]
    return {
        "benchmark": "T2IS-Bench", "protocol": "default", "dataset": "ChengyouJia/T2IS-Bench",
        "dataset_fingerprint": "0123456789abcdef", "num_prompts": 10, "seeds": [0], "systems": systems,
        "scorers": {"consistency": list(JUDGES), "alignment": ["clip-flant5-xxl"], "aesthetics": []},
        "tables": [t2is_table(judge, number) for number, judge in enumerate(JUDGES)],
        "breakdowns": [{"title": "By category: consistency", "rows": rows}],
        "leakage": None, "alerts": ["Missing pictures count 0 (1 of tuned)."],
        "notes": [f"The pictures are in {folder / 'images'}.", "Leakage: not checked."],
        "sets": sets, "headline": "consistency",
    }  # fmt: skip


def plant_gedit(folder: Path) -> dict[str, Any]:
    """Results on GEdit-Bench of four edits with their sources."""
    sets = []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        files = {name: folder / f"{name}_{number}.png" for name in ("source", "base", "tuned")}
        for place, file in zip((0, 2, 3), files.values(), strict=True):
            panel(number, place, (120, 80)).save(file)
        source, *edited = map(str, files.values())
        sets.append(
            {
                "key": f"en-{number}/0", "prompt": "Move the stone to the right.",
                "category": "motion_change", "subcategory": None, "source": source, "panels": [1, 1],
                "pictures": [[file] for file in edited],
                "scores": [{"overall": 5.0 + number}, {"overall": 5.5 + 0.5 * number}],
            }
        )  # fmt: skip
    rows = [row("overall", "Overall", "average", "English: all, judge Qwen2.5-VL-72B-Instruct", [5.956, 6.469])]
    systems = [("base", "FLUX.1-Kontext-dev", 28), ("tuned", "kontext-lora", 8)]
    return {
        "benchmark": "GEdit-Bench", "protocol": "default", "dataset": "stepfun-ai/GEdit-Bench",
        "dataset_fingerprint": "fedcba9876543210", "num_prompts": 4, "seeds": [0],
        "systems": [
            {"role": role, "name": name, "settings": {"steps": steps}, "counts": {"images": 4}}
            for role, name, steps in systems
        ],
        "scorers": {"consistency": ["Qwen2.5-VL-72B-Instruct"]},
        "tables": [{"title": "English: all instructions", "rows": rows}], "breakdowns": [],
        "leakage": None, "alerts": [], "notes": [], "sets": sets, "headline": "overall",
    }  # fmt: skip
