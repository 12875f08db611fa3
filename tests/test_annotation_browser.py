# SPDX-License-Identifier: Apache-2.0
"""The annotation app in a real browser: headless Chromium, driven with keys, mouse and finger."""

import re
from pathlib import Path

import pytest


pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")

from paco_trl.dataset_building.annotate import display_order  # noqa: E402
from test_annotation_app import THEME, World, make_world, read_lines, served  # noqa: E402
from testing_utils import CHROMIUM, CHROMIUM_ARGUMENTS  # noqa: E402


pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH"), pytest.mark.slow]
# Gradio focuses the box for the name itself and aborts requests of a page that is left, and the last test stops the server
EXPECTED = ["Autofocus processing was blocked", "signal is aborted", "net::ERR_CONNECTION_REFUSED"]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("annotations")


@pytest.fixture(scope="module")
def url(world, folder):
    """One server for all tests, each of which takes names of its own."""
    with served(world, folder, annotations_per_instance=100) as url:
        yield url


class Annotator:
    """A person in front of the app."""

    def __init__(self, page, url: str, name: str):
        self.page, self.url, self.name = page, url, name
        page.goto(f"{url}/?annotator={name}")
        page.wait_for_selector("#reference, #thanks")

    @property
    def instance(self) -> str | None:
        """What the page is about, by its address."""
        return self.page.evaluate("new URLSearchParams(location.search).get('instance')")

    def shown(self) -> list[str]:
        """The images of the candidates, from the first to the last."""
        return [image.get_attribute("src") for image in self.page.locator(".candidate img").all()]

    def expect(self, order: list[int]) -> None:
        """Waits for an order: the numbers that the candidates are shown under, from 1."""
        self.page.wait_for_function(
            "want => [...document.querySelectorAll('.order .key')].map(key => key.textContent).join() === want",
            arg=",".join(map(str, order)),
        )

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def step(self, key: str) -> None:
        """Presses a key that leads to another instance, and waits for that."""
        before = self.page.url
        self.press(key)
        self.page.wait_for_function("before => location.href !== before", arg=before)

    def candidate(self, number: int):
        return self.page.locator(".candidate").nth(number - 1)

    def place(self, number: int):
        return self.page.locator(".order li").nth(number - 1)

    def says(self, text: str) -> None:
        self.page.get_by_text(text).first.wait_for()


@pytest.fixture
def sit_down(browser):
    """Opens the app for annotators. No page may ask another server for anything, or complain."""
    contexts, asked, complaints = [], [], []

    def open_page(url: str, name: str, **options) -> Annotator:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        return Annotator(page, url, name)

    yield open_page
    for context in contexts:
        context.close()
    assert asked and all(re.match(r"http://127\.0\.0\.1:\d+/|data:", address) for address in asked), asked
    assert not [text for text in complaints if not any(word in text for word in EXPECTED)]


def rankings(folder: Path, name: str) -> list[tuple[str, list[int] | None]]:
    """Instance and ranking of each line of an annotator's file."""
    path = folder / f"{name}.jsonl"
    return [(line["instance"], line.get("ranking")) for line in read_lines(path)] if path.exists() else []


def test_keys_and_clicks_rank_and_text_is_text(world, folder, url, sit_down):
    anna = sit_down(url, "anna")
    assert anna.page.text_content("#theme") == THEME and "${" in THEME
    assert anna.page.locator("#theme *").count() == 0 and anna.page.title() == "Rank images by consistency"
    assert anna.page.text_content("#dimensions").endswith("do not contradict each other")
    # The images of this instance, in the order that the indices are told apart by, and all of it in the window
    instance = anna.instance
    row = next(row for row in world.instances if row["id"] == instance)
    sha_of = dict(zip(world.panels["id"], world.panels["sha256"], strict=True))
    shown = display_order("anna", instance, 4)
    assert anna.shown() == [f"/image/{sha_of[row['candidates'][index]]}" for index in shown]
    assert anna.page.get_attribute("#reference", "src") == f"/image/{sha_of[row['reference']]}"
    anna.page.wait_for_load_state("networkidle")
    sizes = anna.page.evaluate("[...document.querySelectorAll('.frame img')].map(image => image.naturalWidth)")
    assert sizes == [28] * 5
    box = anna.page.locator("#skip").bounding_box()
    assert box["y"] + box["height"] <= 800

    anna.press("Enter")
    anna.says("4 of 4 are left")
    anna.press("3", "9", "2", "3", "1")  # there is no ninth; the third again takes it back
    anna.candidate(4).click()
    anna.expect([2, 1, 4])
    anna.press("Backspace", "3", "4")
    anna.step("Enter")  # not for the candidate that was clicked
    ranking = [shown[number - 1] for number in (2, 1, 3, 4)]
    assert rankings(folder, "anna") == [(instance, ranking)]
    anna.expect([])
    assert anna.page.text_content("#own") == "1 ranked"


@pytest.mark.slow
def test_back_skip_and_half_made_orders(folder, url, sit_down):
    carl = sit_down(url, "carl")
    first = carl.instance
    assert carl.page.locator("#back").is_disabled()
    carl.press("1", "2", "3", "4")
    carl.step("Enter")
    second = carl.instance
    carl.step("s")
    third = carl.instance
    assert carl.page.text_content("#own") == "1 ranked, 1 skipped"
    carl.press("2")
    carl.step("z")
    assert carl.instance == second
    carl.says("(You skipped this one.)")
    carl.expect([])
    carl.page.locator("#back").click()
    carl.expect([1, 2, 3, 4])
    assert carl.instance == first
    carl.press("Backspace", "Backspace", "4", "3")
    carl.step("Enter")
    # It resumes where it was, with what was begun there; a reload keeps that
    assert carl.instance == third
    carl.expect([2])
    carl.press("4")
    carl.page.reload()
    carl.expect([2, 4])
    assert carl.instance == third
    # It is this annotator's, and of this instance
    carl.page.goto(f"{url}/?annotator=dora&instance={third}")
    carl.page.wait_for_selector("#reference")
    carl.expect([])
    shown = display_order("carl", first, 4)
    assert rankings(folder, "carl") == [
        (first, shown),
        (second, None),
        (first, [shown[0], shown[1], shown[3], shown[2]]),
    ]


@pytest.mark.slow
def test_drag_keyboard_and_large_images(folder, url, sit_down):
    eve = sit_down(url, "eve")
    for number in (2, 4):
        eve.candidate(number).click()
    eve.candidate(1).drag_to(eve.place(1))
    eve.expect([1, 2, 4])
    eve.place(3).locator("button").drag_to(eve.place(1))
    eve.expect([4, 1, 2])
    eve.candidate(3).drag_to(eve.place(4))
    eve.expect([4, 1, 2, 3])
    eve.candidate(1).drag_to(eve.page.locator("#theme"))  # to nowhere
    eve.expect([4, 1, 2, 3])
    eve.place(1).locator("button").click()
    eve.expect([1, 2, 3])
    # With the keyboard alone
    eve.candidate(4).focus()
    eve.press("Enter")
    eve.expect([1, 2, 3, 4])
    assert eve.candidate(4).get_attribute("aria-label") == "Candidate 4, ranked 4"
    assert eve.candidate(4).get_attribute("aria-pressed") == "true"
    # Large, as long as Space is held: what the keyboard is at, or the reference
    large = eve.page.locator("dialog")
    for image in (eve.candidate(4).locator("img"), eve.page.locator("#reference")):
        eve.page.keyboard.down("Space")
        assert large.is_visible()
        assert large.locator("img").evaluate("image => image.src") == image.evaluate("image => image.src")
        eve.press("2")  # not meanwhile
        eve.page.keyboard.up("Space")
        assert not large.is_visible()
        eve.page.mouse.move(1, 1)
        eve.page.evaluate("document.activeElement.blur()")
    eve.page.get_by_label("Enlarge candidate 2").click()
    assert large.locator("img").get_attribute("src").endswith(eve.shown()[1])
    eve.page.mouse.click(640, 400)
    assert not large.is_visible()
    eve.expect([1, 2, 3, 4])
    # A button that the keyboard is at has its own Enter
    eve.page.locator("#skip").focus()
    eve.step("Enter")
    assert [ranking for _, ranking in rankings(folder, "eve")] == [None]


@pytest.mark.slow
def test_names_and_a_full_disk(folder, url, sit_down):
    fred = sit_down(url, "fred")
    fred.page.goto(url)
    name = fred.page.get_by_label("Your name")
    name.fill("<img src=x onerror=alert(1)>")
    fred.press("Enter")
    fred.says("<img src=x onerror=alert(1)>")
    assert fred.page.locator("img").count() == 0
    name.fill("gina")
    fred.page.get_by_role("button", name="Start").click()
    fred.page.wait_for_selector("#reference")
    instance = fred.instance
    assert "annotator=gina" in fred.page.url and instance
    # A directory in place of the file: nothing else fails alike for every user
    (folder / "gina.jsonl").mkdir()
    fred.press("2", "1", "3", "4", "Enter")
    fred.says("The ranking was not saved: Is a directory.")
    fred.expect([2, 1, 3, 4])
    (folder / "gina.jsonl").rmdir()
    fred.step("Enter")
    assert [name for name, _ in rankings(folder, "gina")] == [instance]
    assert not (folder / "fred.jsonl").exists()


@pytest.mark.slow
def test_nothing_is_lost_while_the_server_is_away(world, tmp_path, sit_down):
    with served(world, tmp_path) as url:
        ida = sit_down(url, "ida")
        instance = ida.instance
        ida.press("2", "1", "3", "4")
        ida.expect([2, 1, 3, 4])
    ida.press("Enter")
    ida.says("Connection to the server was lost")
    ida.expect([2, 1, 3, 4])
    assert rankings(tmp_path, "ida") == []
    with served(world, tmp_path, port=int(url.rpartition(":")[2])):
        ida.page.reload()
        ida.expect([2, 1, 3, 4])
        ida.step("Enter")
    shown = display_order("ida", instance, 4)
    assert rankings(tmp_path, "ida") == [(instance, [shown[1], shown[0], shown[2], shown[3]])]
