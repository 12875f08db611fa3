# SPDX-License-Identifier: Apache-2.0
"""The report of an evaluation in a real browser, from the disk and without a network."""

import re
from functools import cache
from pathlib import Path

import pytest


playwright = pytest.importorskip("playwright.sync_api")

from paco_trl.data import join_grid  # noqa: E402
from paco_trl.image_benchmarks.report import save_generation_report  # noqa: E402
from paco_trl.image_benchmarks.report_content import metric_tables, summary  # noqa: E402
from planted_results import panel, plant_t2is  # noqa: E402
from testing_utils import CHROMIUM, CHROMIUM_ARGUMENTS  # noqa: E402


pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH"),
    pytest.mark.slow,
]
LEFT_OF_PAGE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
UNDECODED = "() => [...document.images].filter(image => !(image.complete && image.naturalWidth > 0)).length"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def open_page(browser):
    """Opens a file once for each width and scheme. It may not complain, nor ask for anything else."""
    complaints: list[str] = []

    @cache
    def open_file(path: Path, width: int = 1280, scheme: str = "light"):
        asked: list[str] = []
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.resolve().as_uri())
        assert [url for url in asked if not url.startswith("data:")] == [path.resolve().as_uri()]
        return page

    yield open_file
    assert complaints == []


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("world")


@pytest.fixture(scope="module")
def results(world) -> dict:
    results = plant_t2is(world / "sets", per_panel=True)
    wide = world / "sets" / "wide.png"
    join_grid([panel(5, place) for place in range(7)], 1, 7).save(wide)
    results["sets"][5].update(pictures=[[str(wide)], [str(wide)]], panels=[1, 7])
    results["sets"][3]["pictures"][0] = []
    return results


@pytest.fixture(scope="module")
def report(results, world) -> Path:
    return save_generation_report(results, world / "report")["html"]


def text_of(page, selector: str) -> str:
    return " ".join(page.locator(selector).inner_text().split())


def test_every_number_of_the_tables_is_on_the_page(open_page, report, results):
    page = open_page(report)
    text = text_of(page, "#results")
    numbers = re.findall(r"[+-]?\d\.\d{3}\b", "".join(metric_tables(results).values()))
    assert len(numbers) > 100 and [number for number in numbers if number not in text] == []
    assert " ".join(summary(results)) in text_of(page, "header")
    assert page.locator("#results svg").count() == 2
    assert page.title() == "T2IS-Bench: FLUX.1-dev (base) and fox-lora (tuned)"


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone_and_a_desktop(open_page, report, width):
    page = open_page(report, width)
    assert page.evaluate(LEFT_OF_PAGE) == 0
    assert page.evaluate("() => document.images.length") > 30
    assert page.evaluate(UNDECODED) == 0
    # Wide sets stand above one another, others side by side; both pictures of a set are as large
    for name, is_wide in (("0005/0", True), ("0006/0", False)):
        pictures = page.locator(f".set:has(h3:has-text('{name}'))").first.locator(".panels")
        first, second = (pictures.nth(place).bounding_box() for place in range(2))
        assert (first["y"] == second["y"]) != is_wide
        assert first["width"] == pytest.approx(second["width"], abs=1) and first["width"] > 100
    # What is not there has a frame in its place
    frame = page.locator("#best .set").first.locator(".empty")
    assert frame.count() == 1 and frame.inner_text() == "missing" and frame.bounding_box()["height"] > 60


def test_the_table_scrolls_in_its_own_frame_on_a_phone(open_page, report):
    page = open_page(report, 390)
    frame = page.locator("#results .scroll").first
    assert frame.evaluate("box => box.scrollWidth > box.clientWidth")
    frame.evaluate("box => box.scrollTo(1000, 0)")
    # The names of the rows stay
    assert frame.locator("tbody th").first.bounding_box()["x"] == pytest.approx(frame.bounding_box()["x"], abs=1)


def test_prompts_are_shown_as_they_are(open_page, report):
    page = open_page(report)
    prompt = page.locator("#best .set").first.locator("details p")
    assert not prompt.is_visible()
    page.locator("#best .set").first.locator("summary").click()
    assert prompt.is_visible()
    assert prompt.inner_text().startswith('A fox & a "hare" | in <b>four</b> seasons <script>document.title =')
    assert "hacked" not in page.title()
