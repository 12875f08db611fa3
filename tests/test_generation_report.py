# SPDX-License-Identifier: Apache-2.0
"""Reports of evaluations of image models: tables, page and model cards, from planted results."""

import base64
import copy
import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from PIL import Image

from paco_trl.image_benchmarks.report import (
    add_results_to_card,
    cell_text,
    check_card,
    choose_sets,
    markdown_report,
    metric_table,
    save_generation_report,
    verdict,
)
from planted_results import JUDGES, cell, panel, plant_gedit, plant_t2is


class Page(HTMLParser):
    """The parts of a report that tests ask for: tags with their attributes, texts by section, sets by gallery."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags, self.texts, self.sets = [], {}, {}
        self.section, self._in_title = "", False
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, self.section, attrs))
        if tag == "section":
            self.section = attrs["id"]
        if tag == "article":
            self.sets.setdefault(self.section, []).append("")
        self._in_title = tag == "h3"
        if tag in ("td", "th", "p", "li", "figcaption"):
            self.handle_data(" ")

    def handle_data(self, data):
        self.texts[self.section] = self.texts.get(self.section, "") + data
        if self._in_title and self.sets.get(self.section) and not self.sets[self.section][-1]:
            self.sets[self.section][-1] = data.strip()

    def text(self, section: str) -> str:
        return " ".join(self.texts[section].split())

    def pictures(self, section: str) -> list[Image.Image]:
        uris = [attrs["src"] for tag, where, attrs in self.tags if tag == "img" and where == section]
        assert all(uri.startswith("data:image/jpeg;base64,") for uri in uris)
        return [Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))) for uri in uris]


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


def test_markdown_of_hostile_texts(results):
    evil = "fox | <script>alert(1)</script> [x](javascript:alert(1))\n# heading"
    results["systems"][1]["name"] = evil
    results["breakdowns"][0]["rows"][0]["label"] = evil
    results["notes"] = [evil]
    markdown = markdown_report(results)
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
    page = Page(save_generation_report(results, tmp_path / "report", num_shown=4)["html"])
    assert page.sets["sets"] == ["0003/0", "0005/0", "0000/0", "0007/0"]
    assert page.sets["copies"] == ["0005/0", "0006/0"]
    files = 4 if per_panel else 1
    base, tuned = page.pictures("sets")[: 2 * files : files]
    for number, shown in ((3, base), (4, tuned)):
        # At (20, 8) of the first of the panels, of which a grid has two in a row
        left, top = (round(place * shown.width / (96 if per_panel else 192)) for place in (20, 8))
        expected = panel(number, 0).getpixel((20, 8))
        assert max(abs(a - b) for a, b in zip(shown.getpixel((left, top)), expected, strict=True)) < 12
    assert "Consistency 0.250 0.950 +0.700" in page.text("sets") and "Number 3." in page.text("sets")
    # With files of their own, one panel of set 0 is not there
    frames = [where for tag, where, attrs in page.tags if tag == "div" and attrs.get("class") == "empty"]
    assert frames.count("sets") == 2 * per_panel


def test_page_of_edits_shows_the_sources(tmp_path):
    results = plant_gedit(tmp_path / "edits")
    page = Page(save_generation_report(results, tmp_path / "report", num_shown=2)["html"])
    assert page.sets["sets"] == ["en-0/0", "en-3/0"] and len(page.pictures("sets")) == 6
    assert re.search(r"source.*base.*tuned", page.text("sets"))
    assert "6.469 [6.449, 6.489]" in page.text("results") and "copies" not in page.texts
    assert "scorers: consistency: Qwen2.5-VL-72B-Instruct" in page.texts[""]
    assert "so few prompts (4)" in page.text("results")
    results["sets"][3]["source"], results["num_prompts"] = None, 10
    page = Page(save_generation_report(results, tmp_path / "report", num_shown=2)["html"])
    assert len(page.pictures("sets")) == 5 and "so few prompts" not in page.text("results")


def test_hostile_prompts_are_text(results, tmp_path):
    results["systems"][1]["name"] = results["sets"][3]["category"] = "<img src=x onerror=alert(1)>"
    path = save_generation_report(results, tmp_path)["html"]
    page = Page(path)
    assert not any(tag == "script" for tag, *_ in page.tags)
    assert all(attrs.get("src", "data:").startswith("data:") for _, _, attrs in page.tags)
    assert '<script>document.title = "hacked"</script>' in page.texts["sets"]
    assert "<img src=x onerror=alert(1)>" in page.texts["sets"]
    outside = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", path.read_text())
    assert len(outside) > 10 and all(url.startswith(("data:", "#")) for url in outside if url != "x")


def test_results_json_has_no_paths_of_the_machine(results, planted, tmp_path):
    world, _ = planted
    elsewhere = tmp_path / "elsewhere" / "0000.png"
    elsewhere.parent.mkdir()
    panel(0, 0).save(elsewhere)
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
    text = """---
base_model: black-forest-labs/FLUX.1-dev
license: other
pipeline_tag: text-to-image
model-index:
- name: fox-lora
  results:
  - task:
      type: text-to-image
    dataset:
      name: T2IS-Bench
      type: ChengyouJia/T2IS-Bench
    metrics:
    - type: average
      value: 0.576
    source:
      name: Published figures
      url: https://huggingface.co/papers/2512.04784
tags: [lora]
---

# fox-lora

<!-- results -->

## Training

Long ago.
"""
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


def test_cards_that_results_cannot_go_into(results, card, tmp_path):
    assert check_card(card) == check_card(card.parent) == card
    with pytest.raises(FileNotFoundError, match=r"no model card .*README\.md"):
        check_card(tmp_path)
    before = card.read_bytes()
    results["systems"] = results["systems"][:1]
    with pytest.raises(ValueError, match="'tuned'"):
        add_results_to_card(card, results)
    assert card.read_bytes() == before
