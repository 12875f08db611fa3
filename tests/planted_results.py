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
    ("attribute", "Attribute", "dimension", 0.790, 0.782, False),
    ("relation", "Relation", "dimension", 0.786, 0.777, False),
    ("alignment", "Alignment", "group", 0.789, 0.760, False),
    ("aesthetics", "Aesthetics", "group", None, None, False),
    ("average", "Weighted average", "average", None, None, False),
    ("duplicate_rate", "Duplicate rate", "other", 0.0, 0.15, False),
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


def row(metric: str, label: str, kind: str, values: list[float | None], half: float = 0.02) -> dict[str, Any]:
    """A row of a table, with the difference of its two values."""
    difference = None
    if len(values) > 1:
        difference = cell(None, count=0) if None in values else cell(values[1] - values[0], half)
    cells = [cell(value, count=0 if value is None else 10) for value in values]
    described = {"metric": metric, "label": label, "kind": kind, "higher_is_better": metric != "duplicate_rate"}
    return described | {"cells": cells, "difference": difference}


def t2is_table(judge: str, number: int, num_systems: int) -> dict[str, Any]:
    """The table of a judge, the same but for an offset for each. Consistency rises, and prompt alignment falls."""
    rows = []
    for metric, label, kind, *both, by_judge in ROWS:
        values = [value if value is None else value + 0.3 * number * by_judge for value in both]
        rows.append(row(metric, label, kind, values[2 - num_systems :], 0.01 if metric == "duplicate_rate" else 0.02))
    return {"title": f"Judge: {judge}", "rows": rows}


def save_set(folder: Path, role: str, number: int, per_panel: bool) -> list[str]:
    """A set of a system, as a grid or one file for each panel; the tuned image of set 8 and a panel of set 0 are missing."""
    if role == "tuned" and number == 8:
        return []
    images = folder / "images" / role
    images.mkdir(parents=True, exist_ok=True)
    # Panels of copies are the same, and those of a system of another place
    moved = 0 if role == "tuned" and COPIES[number] == 1 else 1
    panels = [panel(number + (role == "tuned"), place * moved) for place in range(4)]
    if not per_panel:
        join_grid(panels, 2, 2).save(images / f"{number:04d}.png")
        return [str(images / f"{number:04d}.png")]
    paths = [images / f"{number:04d}_{place}.png" for place in range(4)]
    for place, (one, path) in enumerate(zip(panels, paths, strict=True)):
        if (number, place) != (0, 2):
            (panel(number, place, (96, 64)) if place == 1 else one).save(path)
    return list(map(str, paths))


def plant_t2is(folder: Path, num_systems: int = 2, per_panel: bool = False) -> dict[str, Any]:
    """Results on T2IS-Bench of ten sets of 2 x 2 panels."""
    chosen = slice(2 - num_systems, None)
    roles = ["base", "tuned"][chosen]
    sets = []
    for number in range(10):
        tuned = None if number == 8 else TUNED[number]
        identity = float("nan") if tuned is None else tuned - 0.01
        scores = [
            {"consistency": BASE[number], "identity": BASE[number] - 0.01, "alignment": 0.8, "duplicate_rate": 0.0},
            {"consistency": tuned, "identity": identity, "alignment": 0.7, "duplicate_rate": COPIES[number]},
        ]
        sets.append(
            {
                "key": f"{number:04d}/0", "prompt_id": f"{number:04d}", "prompt": f"{PROMPT} Number {number}.",
                "category": "Story Generation" if number % 2 else "Character Generation",
                "subcategory": "Comic | Story", "source": None, "panels": [2, 2], "scores": scores[chosen],
                "pictures": [save_set(folder, role, number, per_panel) for role in roles],
            }
        )  # fmt: skip
    settings = {"model": "black-forest-labs/FLUX.1-dev", "num_inference_steps": 20, "guidance_scale": 3.5}
    systems = [
        {
            "role": role,
            "name": "FLUX.1-dev" if role == "base" else "fox-lora",
            "settings": {**settings, "adapter": None if role == "base" else str(folder / "runs" / "fox-lora")},
            "counts": {"images": 10 if role == "base" else 9, "missing": int(role == "tuned"), "skipped": 0},
        }
        for role in roles
    ]
    changes = {"consistency": cell(0.11, 0.2), "alignment": cell(-0.1), "duplicate_rate": cell(0.1)}
    both = {"consistency": (0.4, 0.51), "alignment": (0.8, 0.7), "duplicate_rate": (0.0, 0.1)}
    breakdown_rows = [
        {
            "name": name, "num_prompts": 5, "difference": changes if num_systems == 2 else {},
            "cells": {metric: [cell(value) for value in values][chosen] for metric, values in both.items()},
        }
        for name in ("Character Generation", "Story Generation")
    ]  # fmt: skip
    return {
        "benchmark": "T2IS-Bench", "protocol": "default", "dataset": "ChengyouJia/T2IS-Bench",
        "dataset_fingerprint": "0123456789abcdef", "num_prompts": 10, "seeds": [0], "systems": systems,
        "scorers": {"consistency": list(JUDGES), "alignment": "clip-flant5-xxl", "aesthetics": None},
        "weights": {"aesthetics": 0.2, "alignment": 0.3, "consistency": 0.5},
        "tables": [t2is_table(judge, number, num_systems) for number, judge in enumerate(JUDGES)],
        "breakdowns": [
            {"title": "By category", "table": f"Judge: {judge}", "columns": list(both), "rows": breakdown_rows}
            for judge in JUDGES
        ],
        "leakage": None, "alerts": ["Missing pictures count 0 (1 of tuned)."],
        "notes": [
            f"The pictures are in {folder / 'images'}.",
            "Which scorer of aesthetics the published figures are of is not known.",
            "Missing pictures count 0 (1 of tuned).",
        ],
        "sets": sets, "headline": "consistency", "versions": {"paco_trl": "0.1.0", "torch": "2.15.0"},
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
                "key": f"en-{number}/0", "prompt_id": f"en-{number}", "prompt": "Move the stone to the right.",
                "category": "motion_change", "subcategory": None, "source": source, "panels": [1, 1],
                "pictures": [[file] for file in edited],
                "scores": [{"overall": 5.0 + number}, {"overall": 5.5 + 0.5 * number}],
            }
        )  # fmt: skip
    rows = [
        row("semantic_consistency", "Semantic consistency", "dimension", [6.012, 6.934], 0.3),
        row("perceptual_quality", "Perceptual quality", "dimension", [7.123, 7.045], 0.2),
        row("overall", "Overall", "average", [5.956, 6.469], 0.4),
    ]
    systems = [("base", "FLUX.1-Kontext-dev", 28), ("tuned", "kontext-lora", 8)]
    return {
        "benchmark": "GEdit-Bench", "protocol": "default", "dataset": "stepfun-ai/GEdit-Bench",
        "dataset_fingerprint": "fedcba9876543210", "num_prompts": 4, "seeds": [0],
        "systems": [
            {"role": role, "name": name, "settings": {"steps": steps}, "counts": {"images": 4}}
            for role, name, steps in systems
        ],
        "scorers": {"consistency": ["Qwen2.5-VL-72B-Instruct"], "alignment": None, "aesthetics": None},
        "weights": None, "tables": [{"title": "English: all instructions", "rows": rows}], "breakdowns": [],
        "leakage": {"dataset": "user/edits", "num_training_prompts": 100, "exact": [], "near": []},
        "notes": [], "sets": sets, "headline": "overall", "versions": {"paco_trl": "0.1.0"},
    }  # fmt: skip
