# SPDX-License-Identifier: Apache-2.0
"""Reports of evaluations of image models: tables, page and model cards, from planted results."""

import base64
import copy
import html
import io
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from PIL import Image

from paco_trl.data import join_grid
from paco_trl.image_benchmarks.report import (
    add_results_to_card,
    cell_text,
    check_card,
    choose_sets,
    metric_table,
    save_generation_report,
    verdict,
)


# ---- Planted results: numbers by hand, and small real images ----


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


def panel(number: int) -> Image.Image:
    """An image that differs by set."""
    return Image.new("RGB", (96, 96), COLORS[number % len(COLORS)])


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
    panels = [panel(number + (role == "tuned"))] * 4
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


# ---- Pages ----


def sections_of(path: Path) -> dict[str, str]:
    """HTML of the sections of a page."""
    return dict(re.findall(r'<section id="(\w+)">(.*?)</section>', path.read_text(encoding="utf-8"), re.DOTALL))


def titles_of(section: str) -> list[str]:
    return re.findall(r"<h3>(\S+)", section)


def text_of(section: str) -> str:
    return html.unescape(" ".join(re.sub("<[^>]*>", " ", section).split()))


def pictures_of(section: str) -> list[Image.Image]:
    sources = re.findall(r'<img src="data:image/jpeg;base64,([^"]+)"', section)
    assert len(sources) == section.count("<img")
    return [Image.open(io.BytesIO(base64.b64decode(source))) for source in sources]


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[Path, dict]:
    world = tmp_path_factory.mktemp("world")
    return world, plant_t2is(world)


@pytest.fixture
def results(planted) -> dict:
    """Results of two systems, to be changed."""
    return copy.deepcopy(planted[1])


def rows_by_name(table: str) -> dict[str, list[str]]:
    """Cells of the table rows by the first."""
    lines = [line for line in table.split("\n") if line[:1] == "|"]
    rows = [[part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {first.strip("*"): rest for first, *rest in rows}


def test_verdict_says_whether_the_interval_excludes_zero():
    assert verdict(cell(0.1, 0.05)) == verdict(cell(-0.1, 0.05), higher_is_better=False) == "yes: better"
    assert verdict(cell(-0.1, 0.05)) == verdict(cell(0.1, 0.05), higher_is_better=False) == "yes: worse"
    assert verdict(cell(0.1, 0.2)) == verdict(cell(-0.1, 0.1)) == "no"
    assert verdict(cell(0.1, None)) == "n/a"


def test_numbers_as_texts():
    assert cell_text(cell(0.5)) == "0.500 [0.480, 0.520]"
    assert cell_text(cell(0.5), signed=True) == "+0.500 [+0.480, +0.520]"
    assert cell_text(cell(0.5, None)) == "0.500 (no interval)"
    assert cell_text(cell(None)) == cell_text(cell(math.nan)) == "n/a"
    assert cell_text(cell(-0.0, 0.0012), signed=True) == "0.000 [-0.001, +0.001]"
    assert cell_text(cell(-2e-5, 1e-6), signed=True) == "-2.0e-05 [-2.1e-05, -1.9e-05]"


def test_metric_tables_have_a_row_for_each_metric(results):
    names = ["FLUX.1-dev (base)", "fox-lora (tuned)"]
    results["tables"][0]["rows"][1]["cells"][0]["count"] = 11
    first, second = (metric_table(table, names) for table in results["tables"])
    assert first.startswith(f"### Judge: {JUDGES[0]}\n")
    rows = rows_by_name(first)
    assert rows[""] == [*names, "difference", "interval excludes 0", "n"] and len(rows) == 2 + 8
    assert rows["Identity"] == [
        "0.301 [0.281, 0.321]", "0.512 [0.492, 0.532]", "+0.211 [+0.191, +0.231]", "yes: better", "10"
    ]  # fmt: skip
    assert rows["Style"][-1] == "11 / 10 / 10" and rows["Logic"][3] == "no" and rows["Entity"][3] == "yes: worse"
    assert rows["Duplicate rate (lower is better)"][2:4] == ["+0.150 [+0.140, +0.160]", "yes: worse"]
    assert rows["Weighted average"][0] == "n/a"
    assert rows_by_name(second)["Identity"][0] == "0.601 [0.581, 0.621]"


def test_markdown_of_hostile_texts(results, tmp_path):
    evil = "fox | <script>alert(1)</script> [x](javascript:alert(1))\n# heading"
    results["systems"][1]["name"] = evil
    results["breakdowns"][0]["rows"][0]["label"] = evil
    results["notes"] = [evil]
    markdown = save_generation_report(results, tmp_path / "report")["markdown"].read_text(encoding="utf-8")
    assert "alert(1)" in markdown
    assert "<script" not in markdown and "](javascript" not in markdown and "\n# heading" not in markdown
    table = markdown.partition("## Breakdowns")[2].partition("\n## ")[0]
    rows = [line for line in table.split("\n") if line[:1] == "|"]
    assert len(rows) == 4 and len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_chosen_sets_are_the_planted_ones(results):
    assert choose_sets(results, 4) == {"sets": [3, 5, 0, 7], "copies": [5, 6]}
    # All, that without a value at the end
    chosen = choose_sets(results, 10)["sets"]
    assert sorted(chosen) == [*range(10)] and chosen[:2] == [3, 5] and chosen[-3:] == [0, 7, 8]
    # One system: by its score
    for one in results["sets"]:
        one["scores"] = one["scores"][1:]
    results["systems"] = results["systems"][1:]
    assert choose_sets(results, 3)["sets"] == [3, 5, 0] and choose_sets(results, 1)["sets"] == [3]


@pytest.mark.parametrize("per_panel", [False, True])
def test_page_shows_the_planted_sets(tmp_path, per_panel):
    results = plant_t2is(tmp_path, per_panel=per_panel)
    sections = sections_of(save_generation_report(results, tmp_path / "report", num_shown=4)["html"])
    assert titles_of(sections["sets"]) == ["0003/0", "0005/0", "0000/0", "0007/0"]
    assert titles_of(sections["copies"]) == ["0005/0", "0006/0"]
    files = 4 if per_panel else 1
    base, tuned = pictures_of(sections["sets"])[: 2 * files : files]
    for number, shown in ((3, base), (4, tuned)):
        # At (20, 8) of the first of the panels, of which a grid has two in a row
        left, top = (round(place * shown.width / (96 if per_panel else 192)) for place in (20, 8))
        expected = panel(number).getpixel((20, 8))
        assert max(abs(a - b) for a, b in zip(shown.getpixel((left, top)), expected, strict=True)) < 12
    text = text_of(sections["sets"])
    assert "Consistency 0.250 0.950 +0.700" in text and "Number 3." in text
    # With files of their own, one panel of set 0 is not there
    assert sections["sets"].count('class="empty"') == 2 * per_panel


def test_page_of_edits_shows_the_sources(results, tmp_path):
    panel(0).save(source := tmp_path / "source.png")
    results["num_prompts"] = 4
    results["sets"] = [one | {"source": str(source), "panels": [1, 1]} for one in results["sets"][:4]]
    for one in results["sets"]:
        for scores in one["scores"]:
            del scores["duplicates"]
    sections = sections_of(save_generation_report(results, tmp_path / "report", num_shown=2)["html"])
    assert titles_of(sections["sets"]) == ["0003/0", "0000/0"] and len(pictures_of(sections["sets"])) == 6
    assert re.search(r"source.*base.*tuned", text_of(sections["sets"])) and "copies" not in sections
    assert "so few prompts (4)" in text_of(sections["results"])
    results["sets"][3]["source"], results["num_prompts"] = None, 10
    sections = sections_of(save_generation_report(results, tmp_path / "report", num_shown=2)["html"])
    assert len(pictures_of(sections["sets"])) == 5 and "so few prompts" not in text_of(sections["results"])


def test_hostile_prompts_are_text(results, tmp_path):
    results["systems"][1]["name"] = results["sets"][3]["category"] = "<img src=x onerror=alert(1)>"
    path = save_generation_report(results, tmp_path)["html"]
    page, shown = path.read_text(), text_of(sections_of(path)["sets"])
    assert not re.search(r"<script|<img src=x", page, re.IGNORECASE)
    assert '<script>document.title = "hacked"</script>' in shown and "<img src=x onerror=alert(1)>" in shown
    outside = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert len(outside) > 10 and all(url.startswith(("data:", "#")) for url in outside if url != "x")


def test_results_json_has_no_paths_of_the_machine(results, planted, tmp_path):
    world, _ = planted
    elsewhere = tmp_path / "elsewhere" / "0000.png"
    elsewhere.parent.mkdir()
    panel(0).save(elsewhere)
    results["sets"][0]["pictures"][0] = [str(elsewhere)]
    paths = save_generation_report(results, world / "report")
    assert {path.name for path in (world / "report").iterdir()} == {"results.json", "results.md", "report.html"}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    assert str(world) in json.dumps({**results, "sets": [results["sets"][1]]})
    for text in texts.values():
        assert str(world) not in text and str(tmp_path) not in text
    saved = json.loads(texts["json"])
    assert saved["sets"][0]["pictures"] == [["0000.png"], ["../images/tuned/0000.png"]]
    assert saved["sets"][8]["pictures"][1] == [None]
    assert saved["systems"][1]["settings"]["adapter"] == "fox-lora"
    assert saved["notes"][0] == "The pictures are in images."
    # Prompts are not touched
    assert [one["prompt"] for one in saved["sets"]] == [one["prompt"] for one in results["sets"]]
    assert math.isnan(results["sets"][8]["scores"][1]["identity"])
    assert saved["sets"][8]["scores"][1]["identity"] is None


@pytest.fixture
def card(tmp_path) -> Path:
    """A card with results on another dataset, and a place for results."""
    published = EvalResult(
        task_type="text-to-image", dataset_type="ChengyouJia/T2IS-Bench", dataset_name="T2IS-Bench", metric_type="average",
        metric_value=0.576, source_name="Published figures", source_url="https://huggingface.co/papers/2512.04784",
    )  # fmt: skip
    data = ModelCardData(tags=["lora"], model_name="fox-lora", eval_results=[published])
    text = f"---\n{data.to_yaml()}\n---\n\n# fox-lora\n\n<!-- results -->\n"
    path = tmp_path / "fox-lora" / "README.md"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    return path


def test_results_are_added_to_a_card(results, card):
    before = card.read_text(encoding="utf-8")
    assert add_results_to_card(card.parent, results) == card
    after = card.read_text(encoding="utf-8")
    # The rest of the text is the same to the letter
    assert after.endswith(before[before.index("<!-- results -->") :])
    assert "\n---\n\n# fox-lora\n\n<!-- results of" in after
    assert ModelCard.load(card).data.tags == ["lora"]
    found = {(one.dataset_config, one.metric_type): one for one in ModelCard.load(card).data.eval_results}
    published = found[None, "average"]
    assert published.metric_value == 0.576 and published.source_name == "Published figures"
    # Of the tuned system, by the judge that is named
    ours = found[f"judge {JUDGES[0]}", "identity"]
    assert ours.metric_value == 0.512 and ours.metric_name == f"Identity, judge {JUDGES[0]}"
    assert ours.source_name is None and ours.dataset_type == "ChengyouJia/T2IS-Bench"
    assert found[f"judge {JUDGES[1]}", "identity"].metric_value == 0.812
    # What does not depend on the judge is there once, with its own scorer; what has no value is not there
    assert found["scorer clip-flant5-xxl", "entity"].metric_value == 0.721
    assert "duplicates" not in {metric for _, metric in found} and len(found) == 1 + 2 * 4 + 2
    section = after[after.index("## T2IS-Bench\n") : after.index("<!-- end")]
    shown = rows_by_name(section.partition("gemma")[0])["Identity"]
    assert shown[:2] == ["0.301 [0.281, 0.321]", "0.512 [0.492, 0.532]"]
    assert "Leakage: not checked" in section and "missing: 1" in section and "Judge: gemma" in section
    bullets = re.findall(r"^- (.+)$", section, re.MULTILINE)
    assert bullets[0] == "**Missing pictures count 0 (1 of tuned).**" and "The pictures are in images." in bullets
    # Again: in place of the first
    add_results_to_card(card, results)
    assert card.read_text(encoding="utf-8") == after


@pytest.mark.parametrize("name", ["results.json", "results.md", "report.html"])
def test_a_report_of_the_users_is_not_replaced(results, tmp_path, name):
    (tmp_path / name).write_text("mine")
    for content in ("mine", '{"systems": 1, "tables": 2}'):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=name):
            save_generation_report(copy.deepcopy(results), tmp_path)
        assert [path.read_text() for path in tmp_path.iterdir()] == [content]
    for _ in range(2):
        save_generation_report(copy.deepcopy(results), tmp_path / "new")


def test_a_report_that_loses_metrics_is_said(results, tmp_path, caplog):
    for _ in range(2):
        save_generation_report(copy.deepcopy(results), tmp_path)
    assert "is replaced" not in caplog.text
    fewer = copy.deepcopy(results)
    for table in fewer["tables"]:
        table["rows"] = [row for row in table["rows"] if row["label"] != "Style"]
    save_generation_report(fewer, tmp_path)
    assert "is replaced by one without Style. " in caplog.text
    caplog.clear()
    save_generation_report(copy.deepcopy(results), tmp_path)  # none is lost
    assert "is replaced" not in caplog.text


@pytest.mark.parametrize("has_place", [True, False])
def test_text_below_results_whose_end_is_not_marked(results, card, caplog, has_place):
    add_results_to_card(card, results)
    text = re.sub(r"<!-- end of the results.*-->\n", "", card.read_text(encoding="utf-8"))
    text = (
        text if has_place else text.replace("<!-- results -->", "")
    ) + "\nMy words.\n\n- mine\n\n## License\n\nMIT\n"
    card.write_text(text, encoding="utf-8")
    for _ in range(2):
        add_results_to_card(card, results)
        after = card.read_text(encoding="utf-8")
        assert not Counter(text.split("\n")) - Counter(after.split("\n"))
        assert after.count("## T2IS-Bench\n") == 2 and after.count("<!-- results of") == 1
        assert "\nMy words.\n\n- mine\n\n## License\n\nMIT\n" in after
    assert "README.md" in caplog.text


def test_cards_that_results_cannot_go_into(results, card, tmp_path):
    assert check_card(card) == check_card(card.parent) == card
    with pytest.raises(FileNotFoundError, match=r"no model card .*README\.md"):
        check_card(tmp_path)
    before = card.read_bytes()
    results["systems"] = results["systems"][:1]
    with pytest.raises(ValueError, match="'tuned'"):
        add_results_to_card(card, results)
    with pytest.raises(ValueError, match="of your own prompts.* of a benchmark"):
        add_results_to_card(card, results | {"benchmark": None})
    assert card.read_bytes() == before
