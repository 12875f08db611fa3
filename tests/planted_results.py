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


def row(metric: str, label: str, kind: str, values: list[float | None], half: float = 0.02, **more) -> dict[str, Any]:
    """A row of a table, with the difference of its two values."""
    difference = None
    if len(values) > 1:
        difference = cell(None, count=0) if None in values else cell(values[1] - values[0], half)
    cells = [cell(value, count=0 if value is None else 10) for value in values]
    return {
        "metric": metric,
        "label": label,
        "kind": kind,
        "higher_is_better": True,
        "cells": cells,
        "difference": difference,
        **more,
    }


def t2is_table(judge: str, number: int, num_systems: int) -> dict[str, Any]:
    """The table of a judge, the same but for an offset for each. Consistency rises, and prompt alignment falls."""
    shift = 0.3 * number

    def values(base: float | None, tuned: float | None, by_judge: bool = False) -> list[float | None]:
        both = [value if value is None else value + shift * by_judge for value in (base, tuned)]
        return both[2 - num_systems :]

    rows = [
        row("identity", "Identity", "dimension", values(0.301, 0.512, True)),
        row("style", "Style", "dimension", values(0.402, 0.523, True)),
        row("logic", "Logic", "dimension", values(0.403, 0.404, True)),
        row("consistency", "Consistency", "group", values(0.369, 0.480, True)),
        row("entity", "Entity", "dimension", values(0.791, 0.721)),
        row("attribute", "Attribute", "dimension", values(0.790, 0.782)),
        row("relation", "Relation", "dimension", values(0.786, 0.777)),
        row("alignment", "Alignment", "group", values(0.789, 0.760)),
        row("aesthetics", "Aesthetics", "group", values(None, None)),
        row("average", "Weighted average", "average", values(None, None)),
        row("duplicate_rate", "Duplicate rate", "other", values(0.0, 0.15), 0.01, higher_is_better=False),
    ]
    return {"title": f"Judge: {judge}", "rows": rows}


def plant_t2is(folder: Path, num_systems: int = 2, per_panel: bool = False) -> dict[str, Any]:
    """
    Results on T2IS-Bench of ten sets of 2 x 2 panels, as grids or as one file for each panel. The tuned picture of set 8
    is missing, and with files of their own a panel of set 0.
    """
    roles = ["base", "tuned"][2 - num_systems :]
    sets = []
    for number in range(10):
        pictures = []
        for role in roles:
            images = folder / "images" / role
            images.mkdir(parents=True, exist_ok=True)
            # Panels of copies are the same, and those of a system of another place
            moved = 0 if role == "tuned" and COPIES[number] == 1 else 1
            panels = [panel(number + (role == "tuned"), place * moved) for place in range(4)]
            if role == "tuned" and number == 8:
                pictures.append([])
            elif per_panel:
                paths = [images / f"{number:04d}_{place}.png" for place in range(4)]
                for place, (one, path) in enumerate(zip(panels, paths, strict=True)):
                    if (number, place) != (0, 2):
                        (panel(number, place, (96, 64)) if place == 1 else one).save(path)
                pictures.append([str(path) for path in paths])
            else:
                path = images / f"{number:04d}.png"
                join_grid(panels, 2, 2).save(path)
                pictures.append([str(path)])
        tuned = None if number == 8 else TUNED[number]
        scores = [
            {"consistency": BASE[number], "identity": BASE[number] - 0.01, "alignment": 0.8, "duplicate_rate": 0.0},
            {
                "consistency": tuned,
                "identity": float("nan") if tuned is None else tuned - 0.01,
                "alignment": 0.7,
                "duplicate_rate": COPIES[number],
            },
        ]
        sets.append(
            {
                "key": f"{number:04d}/0",
                "prompt_id": f"{number:04d}",
                "prompt": f"{PROMPT} Number {number}.",
                "category": "Story Generation" if number % 2 else "Character Generation",
                "subcategory": "Comic | Story",
                "source": None,
                "pictures": pictures,
                "panels": [2, 2],
                "scores": scores[2 - num_systems :],
            }
        )
    systems = [
        {
            "role": role,
            "name": "FLUX.1-dev" if role == "base" else "fox-lora",
            "settings": {
                "model": "black-forest-labs/FLUX.1-dev",
                "adapter": None if role == "base" else str(folder / "runs" / "fox-lora"),
                "num_inference_steps": 20,
                "guidance_scale": 3.5,
            },
            "counts": {"images": 10 if role == "base" else 9, "missing": int(role == "tuned"), "skipped": 0},
        }
        for role in roles
    ]
    breakdown_rows = [
        {
            "name": name,
            "num_prompts": 5,
            "cells": {
                "consistency": [cell(0.4), cell(0.51)][2 - num_systems :],
                "alignment": [cell(0.8), cell(0.7)][2 - num_systems :],
                "duplicate_rate": [cell(0.0), cell(0.1)][2 - num_systems :],
            },
            "difference": {
                "consistency": cell(0.11, 0.2),
                "alignment": cell(-0.1),
                "duplicate_rate": cell(0.1),
            }
            if num_systems == 2
            else {},
        }
        for name in ("Character Generation", "Story Generation")
    ]
    return {
        "benchmark": "T2IS-Bench",
        "protocol": "default",
        "dataset": "ChengyouJia/T2IS-Bench",
        "dataset_fingerprint": "0123456789abcdef",
        "num_prompts": 10,
        "seeds": [0],
        "systems": systems,
        "scorers": {"consistency": list(JUDGES), "alignment": "clip-flant5-xxl", "aesthetics": None},
        "weights": {"aesthetics": 0.2, "alignment": 0.3, "consistency": 0.5},
        "tables": [t2is_table(judge, number, num_systems) for number, judge in enumerate(JUDGES)],
        "breakdowns": [
            {
                "title": "By category",
                "table": f"Judge: {judge}",
                "columns": ["consistency", "alignment", "duplicate_rate"],
                "rows": breakdown_rows,
            }
            for judge in JUDGES
        ],
        "leakage": None,
        "alerts": ["Missing pictures count 0 (1 of tuned)."],
        "notes": [
            f"The pictures are in {folder / 'images'}.",
            "Which scorer of aesthetics the published figures are of is not known.",
            "Missing pictures count 0 (1 of tuned).",
        ],
        "sets": sets,
        "headline": "consistency",
        "versions": {"paco_trl": "0.1.0", "torch": "2.15.0"},
    }


def plant_gedit(folder: Path) -> dict[str, Any]:
    """Results on GEdit-Bench of four edits with their sources."""
    sets = []
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        source = folder / f"source_{number}.png"
        panel(number, 0, (120, 80)).save(source)
        pictures = []
        for place, role in enumerate(("base", "tuned")):
            path = folder / f"{role}_{number}.png"
            panel(number, 2 + place, (120, 80)).save(path)
            pictures.append([str(path)])
        sets.append(
            {
                "key": f"en-{number}/0",
                "prompt_id": f"en-{number}",
                "prompt": "Move the stone to the right.",
                "category": "motion_change",
                "subcategory": None,
                "source": str(source),
                "pictures": pictures,
                "panels": [1, 1],
                "scores": [{"overall": 5.0 + number}, {"overall": 5.5 + 0.5 * number}],
            }
        )
    rows = [
        row("semantic_consistency", "Semantic consistency", "dimension", [6.012, 6.934], 0.3),
        row("perceptual_quality", "Perceptual quality", "dimension", [7.123, 7.045], 0.2),
        row("overall", "Overall", "average", [5.956, 6.469], 0.4),
    ]
    return {
        "benchmark": "GEdit-Bench",
        "protocol": "default",
        "dataset": "stepfun-ai/GEdit-Bench",
        "dataset_fingerprint": "fedcba9876543210",
        "num_prompts": 4,
        "seeds": [0],
        "systems": [
            {"role": "base", "name": "FLUX.1-Kontext-dev", "settings": {"steps": 28}, "counts": {"images": 4}},
            {"role": "tuned", "name": "kontext-lora", "settings": {"steps": 8}, "counts": {"images": 4}},
        ],
        "scorers": {"consistency": ["Qwen2.5-VL-72B-Instruct"], "alignment": None, "aesthetics": None},
        "weights": None,
        "tables": [{"title": "English: all instructions", "rows": rows}],
        "breakdowns": [],
        "leakage": {"dataset": "user/edits", "num_training_prompts": 100, "exact": [], "near": []},
        "notes": [],
        "sets": sets,
        "headline": "overall",
        "versions": {"paco_trl": "0.1.0"},
    }
