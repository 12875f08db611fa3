# SPDX-License-Identifier: Apache-2.0
"""Reports of evaluations of image models: tables, page, published figures and model cards, from planted results."""

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

from paco_trl.image_benchmarks.card_results import add_results_to_card, check_card
from paco_trl.image_benchmarks.report import (
    choose_sets,
    difference_chart,
    markdown_report,
    save_generation_report,
)
from paco_trl.image_benchmarks.report_content import (
    PUBLISHED_HEADING,
    cell_text,
    comparable_tables,
    leakage_line,
    metric_tables,
    verdict,
)
from paco_trl.utils.text import number_text
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
def world(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def planted(world) -> dict:
    return plant_t2is(world)


@pytest.fixture
def results(planted) -> dict:
    """Results of two systems, to be changed."""
    return copy.deepcopy(planted)


def section_of(markdown: str, heading: str) -> str:
    """What stands under a heading, until the next of its level."""
    found = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", markdown, re.MULTILINE | re.DOTALL)
    assert found, f"no heading {heading!r}"
    return found[1]


def cells_of(markdown: str) -> list[list[str]]:
    """Cells of the table rows."""
    return [
        [part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in markdown.split("\n")
        if line[:1] == "|"
    ]


def rows_of(markdown: str, first: str) -> list[list[str]]:
    """Cells of the table rows whose first cell is a text."""
    return [row for row in cells_of(markdown) if row[0].strip("*") == first]


################
# Published figures
################


################
# Tables
################


def test_verdict_says_whether_the_interval_excludes_zero():
    assert verdict(cell(0.1, 0.05)) == "yes: better"
    assert verdict(cell(0.1, 0.05), higher_is_better=False) == "yes: worse"
    assert verdict(cell(-0.1, 0.05)) == "yes: worse"
    assert verdict(cell(-0.1, 0.05), higher_is_better=False) == "yes: better"
    assert verdict(cell(0.1, 0.2)) == verdict(cell(-0.1, 0.1)) == "no"
    assert verdict(cell(0.1, None)) == verdict(None) == "n/a"


def test_numbers_as_texts():
    assert cell_text(cell(0.5)) == "0.500 [0.480, 0.520]"
    assert cell_text(cell(0.5), signed=True) == "+0.500 [+0.480, +0.520]"
    assert cell_text(cell(0.5, None)) == "0.500 (no interval)"
    assert cell_text(cell(None)) == cell_text(None) == cell_text(cell(math.nan)) == "n/a"
    assert [number_text(value, signed=True) for value in (0.0004, 0.0, -0.0, -0.0012)] == [
        "0.000",
        "0.000",
        "0.000",
        "-0.001",
    ]
    # An interval that excludes 0 does not look as if it touched it
    assert cell_text(cell(0.00051, 0.0005), signed=True) == "+0.00051 [+0.00001, +0.00101]"
    assert cell_text(cell(-0.0004, 0.0005), signed=True) == "-0.0004 [-0.0009, +0.0001]"
    assert cell_text(cell(0.0, 0.0), signed=True) == "0.000 [0.000, 0.000]"
    assert cell_text(cell(0.01, 0.01 + 1e-17), signed=True) == "+0.010 [0.000, +0.020]"
    assert cell_text(cell(0.0004, 1e-12), signed=True) == "+0.0004 [+0.0004, +0.0004]"


def rows_by_name(table: str) -> dict[str, list[str]]:
    return {row[0].strip("*"): row[1:] for row in cells_of(table)}


def test_metric_tables_have_a_row_for_each_metric_of_each_judge(planted):
    tables = metric_tables(planted)
    assert list(tables) == [f"Judge: {judge}" for judge in JUDGES]
    first, second = tables.values()
    head = ["metric", "FLUX.1-dev (base)", "fox-lora (tuned)", "difference", "interval excludes 0", "n"]
    assert cells_of(first)[0] == head and len(cells_of(first)) == 2 + 11
    rows = rows_by_name(first)
    assert rows["Identity"] == [
        "0.301 [0.281, 0.321]", "0.512 [0.492, 0.532]", "+0.211 [+0.191, +0.231]", "yes: better", "10"
    ]  # fmt: skip
    assert rows["Logic"][3] == "no" and rows["Entity"][3] == "yes: worse"
    # Lower is better
    assert rows["Duplicate rate"][2:4] == ["+0.150 [+0.140, +0.160]", "yes: worse"]
    assert "Lower is better: Duplicate rate." in first
    # The weights are written out
    assert rows["Weighted average (0.2 aesthetics + 0.3 alignment + 0.5 consistency)"][0] == "n/a"
    assert rows_by_name(second)["Identity"][0] == "0.601 [0.581, 0.621]"


def test_leakage(results):
    assert leakage_line(results) == "Leakage: not checked: the training prompts were not given."
    leakage = results["leakage"] = {"dataset": "user/prompts", "num_training_prompts": 100, "exact": [], "near": []}
    assert leakage_line(results).startswith("Leakage: none found among the 100 training prompts of user/prompts")
    leakage["exact"] = [{"id": "0001", "training_row": row, "text": "A fox"} for row in (3, 4)]
    leakage["near"] = [{"id": name, "training_row": 5, "text": "A", "similarity": 0.914} for name in ("0001", "0007")]
    line = leakage_line(results)
    assert "2 of the 10 prompts of the benchmark found among the 100 training prompts of user/prompts" in line
    assert "The same text: 0001." in line
    assert "0001 (similarity 0.91), 0007 (similarity 0.91)" in line
    del leakage["dataset"]
    assert "among the 100 training prompts. The same text" in leakage_line(results)


################
# Markdown and terminal
################


def test_published_figures_are_those_of_the_same_scorers(results, tmp_path):
    def columns(**scorers) -> list[tuple[str, ...]]:
        scored = {**results, "protocol": "published", "scorers": {**results["scorers"], **scorers}}
        return [table.columns[1:] for table in comparable_tables(scored)]

    consistency, alignment = ("identity", "style", "logic"), ("entity", "attribute", "relation")
    ablation = ("prompt following", "visual consistency")
    # The scorer of aesthetics is not known, so neither that column nor the average is there
    assert columns() == [alignment + consistency, alignment + consistency, ablation]
    assert columns(alignment="Qwen2.5-VL-7B-Instruct") == [consistency, consistency, ablation[1:]]
    judge = ["google/gemma-3-4b-it"]
    assert columns(consistency=judge, alignment=None) == [consistency]
    assert columns(consistency=["PaCo-Reward-7B"], alignment=None) == []
    # By whom the published edits were judged is not known
    edits = {**plant_gedit(tmp_path), "protocol": "published"}
    assert comparable_tables(edits) == [] and PUBLISHED_HEADING not in markdown_report(edits)


def test_published_figures_only_with_the_published_protocol(results, tmp_path):
    for protocol in ("default", "published"):
        paths = save_generation_report({**results, "protocol": protocol}, tmp_path / protocol)
        is_published = protocol == "published"
        assert json.loads(paths["json"].read_text())["protocol"] == protocol
        markdown, page = paths["markdown"].read_text(), Page(paths["html"])
        assert (PUBLISHED_HEADING in markdown) == ("published" in page.texts) == is_published
        assert not is_published or markdown.index(PUBLISHED_HEADING) > markdown.index("## Notes")
        assert ("Seedream 4.0" in markdown) == ("Seedream 4.0" in paths["html"].read_text()) == is_published
        assert markdown.startswith(f"# T2IS-Bench{', published protocol' * is_published}: ")
        assert f"- protocol: {protocol}\n" in markdown and f"Protocol: {protocol}. In brackets" in page.text("results")


def test_markdown_of_hostile_texts(results):
    evil = "fox | <script>alert(1)</script> [x](javascript:alert(1))\n# heading"
    results["systems"][1]["name"] = evil
    results["breakdowns"][0]["rows"][0]["name"] = evil
    results["notes"] = [evil]
    markdown = markdown_report(results)
    assert "alert(1)" in markdown
    assert "<script" not in markdown and "](javascript" not in markdown and "\n# heading" not in markdown
    rows = [line for line in section_of(markdown, "Breakdowns").split("\n") if line[:1] == "|"]
    assert len(rows) == 16 and len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


################
# Page
################


def test_chosen_sets_are_the_planted_ones(results):
    chosen = choose_sets(results, 2)
    assert chosen == {"best": [3, 5], "worst": [0, 7], "gained": [3, 5], "lost": [7, 0], "copies": [5, 6]}
    # No set is among the best and the worst, and one without a value among neither
    chosen = choose_sets(results, 100)
    assert sorted(chosen["best"] + chosen["worst"]) == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert len(chosen["best"]) == 5
    # Those that did not change are not among those that did
    for one in results["sets"]:
        one["scores"][0] = dict(one["scores"][1])
    chosen = choose_sets(results, 2)
    assert chosen["gained"] == chosen["lost"] == [] and chosen["best"] == [3, 5]


@pytest.mark.parametrize("per_panel", [False, True])
def test_page_shows_the_planted_sets(tmp_path, per_panel):
    results = plant_t2is(tmp_path, per_panel=per_panel)
    page = Page(save_generation_report(results, tmp_path / "report", num_shown=2)["html"])
    assert page.sets["best"] == ["0003/0", "0005/0"] and page.sets["worst"] == ["0000/0", "0007/0"]
    assert page.sets["gained"] == ["0003/0", "0005/0"] and page.sets["lost"] == ["0007/0", "0000/0"]
    assert page.sets["copies"] == ["0005/0", "0006/0"]
    files = 4 if per_panel else 1
    base, tuned = page.pictures("best")[: 2 * files : files]
    for number, shown in ((3, base), (4, tuned)):
        # At (20, 8) of the first of the panels, of which a grid has two in a row
        left, top = (round(place * shown.width / (96 if per_panel else 192)) for place in (20, 8))
        expected = panel(number, 0).getpixel((20, 8))
        assert max(abs(a - b) for a, b in zip(shown.getpixel((left, top)), expected, strict=True)) < 12
    assert "Consistency 0.250 0.950 +0.700" in page.text("best")
    assert "Number 3." in page.text("best") and "published" not in page.texts
    # With files of their own, one panel of set 0 is not there
    frames = [where for tag, where, attrs in page.tags if tag == "div" and attrs.get("class") == "empty"]
    assert frames.count("worst") == 2 * per_panel and ("panels are missing" in page.text("worst")) == per_panel


def test_page_of_edits_shows_the_sources(tmp_path):
    results = plant_gedit(tmp_path / "edits")
    page = Page(save_generation_report(results, tmp_path / "report", num_shown=1)["html"])
    assert page.sets["best"] == ["en-3/0"] and page.sets["gained"] == ["en-0/0"] and page.sets["lost"] == ["en-3/0"]
    assert len(page.pictures("best")) == 3
    assert re.search(r"source.*base.*tuned", page.text("best"))
    assert "6.469 [6.449, 6.489]" in page.text("results")
    assert "copies" not in page.texts
    # What is no part of the benchmark is not said to lack a scorer
    assert "scorers: consistency: Qwen2.5-VL-72B-Instruct" in page.texts[""] and "no scorer" not in page.texts[""]
    results["sets"][3]["source"] = None
    page = Page(save_generation_report(results, tmp_path / "report", num_shown=1)["html"])
    assert len(page.pictures("best")) == 2


def test_hostile_prompts_are_text(results, tmp_path):
    results["systems"][1]["name"] = results["sets"][3]["category"] = "<img src=x onerror=alert(1)>"
    results["leakage"] = {
        "dataset": "user/x",
        "num_training_prompts": 1,
        "exact": [{"id": "0001", "training_row": 0, "text": "<script>alert(2)</script> /etc/motd/x"}],
        "near": [],
    }
    path = save_generation_report(results, tmp_path)["html"]
    page = Page(path)
    assert not any(tag == "script" for tag, *_ in page.tags)
    assert all(attrs.get("src", "data:").startswith("data:") for _, _, attrs in page.tags)
    # A path in a prompt is no path of this machine
    assert page.text("leakage").endswith("</script> /etc/motd/x")
    assert '<script>document.title = "hacked"</script>' in page.texts["best"]
    assert "<img src=x onerror=alert(1)>" in page.texts["best"]
    assert "<script>alert(2)</script>" in page.texts["leakage"]


def test_chart_places_differences_and_intervals(results, tmp_path):
    table = results["tables"][0]
    chart = difference_chart(table)
    low, high = -0.09, 0.231  # the lowest and the highest end of an interval
    assert chart["zero"] == pytest.approx(100 * -low / (high - low), abs=0.01)
    marks = {mark["label"]: mark for mark in chart["marks"]}
    assert {name: marks[name]["kind"] for name in ("Identity", "Entity", "Logic", "Duplicate rate")} == {
        "Identity": "better", "Entity": "worse", "Logic": "open", "Duplicate rate": "worse"
    }  # fmt: skip
    identity = [100 * (value - low) / (high - low) for value in (0.191, 0.211, 0.231)]
    assert [marks["Identity"]["ends"][0], marks["Identity"]["mean"], marks["Identity"]["ends"][1]] == pytest.approx(
        identity, abs=0.01
    )
    assert "Aesthetics" not in marks and chart["ticks"] == [(0.0, "-0.090"), (100.0, "+0.231")]
    page = save_generation_report(results, tmp_path, num_shown=1)["html"].read_text()
    outside = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?([^"')\s>]+)""", page)
    assert outside and all(url.startswith(("data:", "#")) for url in outside)
    assert "Identity +0.211; Style +0.121" in page and page.count("<circle") == 2 * len(marks)
    for row in table["rows"]:
        row["difference"] = cell(0.01, 0.5)
    assert {mark["kind"] for mark in difference_chart(table)["marks"]} == {"open"}


################
# results.json
################


def test_results_json_has_no_paths_of_the_machine(results, world, tmp_path):
    results["sets"][0]["pictures"][0] = [str(tmp_path / "elsewhere" / "0000.png")]
    output = world / "report"
    paths = save_generation_report(results, output)
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    assert str(world) in json.dumps({**results, "sets": [results["sets"][1]]})
    for text in texts.values():
        assert str(world) not in text and str(tmp_path) not in text
    saved = json.loads(texts["json"])
    assert saved["sets"][0]["pictures"] == [["0000.png"], ["../images/tuned/0000.png"]]
    assert saved["sets"][8]["pictures"][1] == []
    assert saved["systems"][1]["settings"]["adapter"] == "fox-lora"
    assert saved["notes"][0] == "The pictures are in images."
    # Prompts are not touched
    assert [one["prompt"] for one in saved["sets"]] == [one["prompt"] for one in results["sets"]]
    assert math.isnan(results["sets"][8]["scores"][1]["identity"])
    assert saved["sets"][8]["scores"][1]["identity"] is None
    assert "NaN" not in texts["json"]


def test_results_json_gives_the_same_report_again(results, world):
    output = world / "again" / "report"
    for one in results["sets"]:
        for paths in one["pictures"]:
            for place, path in enumerate(paths):
                copied = world / "again" / Path(path).relative_to(world)
                copied.parent.mkdir(parents=True, exist_ok=True)
                copied.write_bytes(Path(path).read_bytes())
                paths[place] = copied
    first = {name: path.read_bytes() for name, path in save_generation_report(results, output).items()}
    saved = json.loads(first["json"])
    second = {name: path.read_bytes() for name, path in save_generation_report(saved, output).items()}
    assert first == second
    assert b"data:image/jpeg" in second["html"]
    assert {path.name for path in output.iterdir()} == {"results.json", "results.md", "report.html"}


################
# Model cards
################


@pytest.fixture
def card(tmp_path) -> Path:
    """A card with results on another dataset, a comment in its metadata, and a heading in a block of code."""
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
    found = {
        (one.dataset_name, one.dataset_config, one.metric_type): one for one in ModelCard.load(card).data.eval_results
    }
    published = found["T2IS-Bench", None, "average"]
    assert published.metric_value == 0.576 and published.source_name == "Published figures"
    # Of the tuned system, by the judge that is named
    ours = found["T2IS-Bench", f"judge {JUDGES[0]}", "identity"]
    assert ours.metric_value == 0.512 and ours.metric_name == f"Identity, judge {JUDGES[0]}"
    assert ours.source_name is None and ours.dataset_type == "ChengyouJia/T2IS-Bench"
    assert found["T2IS-Bench", f"judge {JUDGES[1]}", "identity"].metric_value == 0.812
    # What does not depend on the judge is there once, with its own scorer; what has no value is not there
    assert found["T2IS-Bench", "scorer clip-flant5-xxl", "entity"].metric_value == 0.721
    assert not {("aesthetics"), ("duplicate_rate")} & {metric for _, _, metric in found}
    assert len(found) == 1 + 2 * 4 + 4
    section = after[after.index("## T2IS-Bench, judge Qwen") :]
    assert rows_of(section, "Identity")[0] == [
        "Identity",
        "0.301 [0.281, 0.321]",
        "0.512 [0.492, 0.532]",
        "+0.211 [+0.191, +0.231]",
        "yes: better",
        "10",
    ]
    assert "Leakage: not checked" in section and "missing: 1" in section
    bullets = re.findall(r"^- (.+)$", section[: section.index("<!-- end")], re.MULTILINE)
    assert bullets[0] == "**Missing pictures count 0 (1 of tuned).**" and "The pictures are in images." in bullets
    assert "Seedream" not in after and "Gemini" not in after


def test_cards_that_results_cannot_go_into(results, card, tmp_path):
    assert check_card(card) == check_card(card.parent) == card
    for path in (tmp_path, tmp_path / "README.md"):
        with pytest.raises(FileNotFoundError, match=r"no model card .*README\.md") as early:
            check_card(path)
        with pytest.raises(FileNotFoundError) as late:
            add_results_to_card(path, results)
        assert str(early.value) == str(late.value)
    before = card.read_bytes()
    base = copy.deepcopy(results)
    base["systems"] = base["systems"][:1]
    with pytest.raises(ValueError, match="'tuned'"):
        add_results_to_card(card, base)
    assert card.read_bytes() == before
    card.write_bytes(before.replace(b"    dataset:", b"    data:"))
    for attempt in (lambda: add_results_to_card(card, results), lambda: check_card(card)):
        with pytest.raises(ValueError, match="`model-index` in the metadata"):
            attempt()
