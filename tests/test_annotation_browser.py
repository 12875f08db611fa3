# SPDX-License-Identifier: Apache-2.0
"""The annotation page in a real browser: headless Chromium, driven with keys, mouse and finger."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest


pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
playwright = pytest.importorskip("playwright.sync_api")

from paco_trl.dataset_building import build_pairs  # noqa: E402
from paco_trl.dataset_building.annotation_page import make_app  # noqa: E402
from paco_trl.dataset_building.annotation_page.assignment import shown_order  # noqa: E402
from paco_trl.dataset_building.annotations import read_annotations  # noqa: E402
from planted_world import PlantedWorld  # noqa: E402
from test_annotation_page import THEME, World, get_task, make_world, read_lines, served  # noqa: E402


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on the PATH")
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS.split())
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "annotations"


class Annotator:
    """A person in front of the page. `expected` is what the browser may complain of."""

    def __init__(self, page, url: str, name: str, expected: list[str]):
        self.page, self.url, self.name, self.expected = page, url, name, expected

    def open(self) -> None:
        """Opens the page under the annotator's name."""
        self.page.goto(f"{self.url}/?annotator={self.name}")
        self.page.wait_for_selector("#work:not([hidden]), #thanks:not([hidden])")

    @property
    def instance(self) -> str | None:
        """What the page is about, by its address."""
        return self.page.evaluate("new URLSearchParams(location.search).get('instance')")

    def shown(self) -> list[str]:
        """The pictures of the candidates, from the first to the last."""
        images = self.page.locator(".candidate img").all()
        return [image.get_attribute("src") for image in images]

    def order(self) -> list[int]:
        """The order as it is: the numbers that the candidates are shown under, from 1."""
        return [int(text) for text in self.page.locator("#order .slot:enabled .key").all_text_contents()]

    def badges(self) -> list[str]:
        """The ranks that are shown on the candidates."""
        return self.page.locator(".candidate .rank").all_text_contents()

    def message(self) -> str:
        return self.page.locator("#message").text_content()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def go_on(self, step: str | Callable[[], None]) -> None:
        """Presses a key, or does something else, that leads to another instance, and waits for that."""
        before = self.page.url
        self.press(step) if isinstance(step, str) else step()
        self.page.wait_for_function("before => location.href !== before", arg=before)

    def keys_of(self, ranking: list[int]) -> list[str]:
        """The number keys for a ranking of the original indices."""
        order = shown_order(self.name, self.instance, len(ranking))
        return [str(order.index(index) + 1) for index in ranking]

    def drag(self, source, target) -> None:
        """Drags the middle of one element onto that of another."""
        box, goal = source.bounding_box(), target.bounding_box()
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + box["width"] / 2 + 20, box["y"] + box["height"] / 2, steps=3)
        self.page.mouse.move(goal["x"] + goal["width"] / 2, goal["y"] + goal["height"] / 2, steps=3)
        self.page.mouse.up()

    def candidate(self, number: int):
        return self.page.locator(".candidate").nth(number - 1)

    def slot(self, place: int):
        return self.page.locator("#order .slot").nth(place - 1)


@pytest.fixture
def serve(folder):
    """Serves the page of a world until the end of the test; gives its address."""
    with ExitStack() as servers:
        yield lambda world, **options: servers.enter_context(served(make_app(*world, folder, **options)))


@pytest.fixture
def sit_down(browser, serve):
    """
    Opens the page for annotators. No page may ask another server for anything, or complain. Pages are closed before
    their server is: they may still be fetching images.
    """
    contexts, asked, complaints, expected = [], [], [], []

    def open_page(url: str, name: str, **options) -> Annotator:
        context = browser.new_context(viewport={"width": 1280, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        annotator = Annotator(page, url, name, expected)
        annotator.open()
        return annotator

    yield open_page
    for context in contexts:
        context.close()
    assert asked and all(re.match(r"http://127\.0\.0\.1:\d+/", address) for address in asked), asked
    assert not [text for text in complaints if not any(word in text for word in expected)]


def rankings(folder: Path, name: str) -> list[tuple[str, list[int] | None]]:
    """Instance and ranking of each line of an annotator's file."""
    path = folder / f"{name}.jsonl"
    return [(line["instance"], line.get("ranking")) for line in read_lines(path)] if path.exists() else []


@pytest.mark.slow
def test_keys_rank_everything(world, folder, serve, sit_down):
    url = serve(world, annotations_per_instance=1)
    anna = sit_down(url, "anna")
    done, places = [], set()
    sha_of = dict(zip(world.panels["id"], world.panels["sha256"], strict=True))
    while anna.page.locator("#work").is_visible():
        instance = anna.instance
        row = next(row for row in world.instances if row["id"] == instance)
        # What is on the screen are the pictures of this instance, in the order that the indices are told apart by
        order = shown_order("anna", instance, 4)
        assert anna.shown() == [f"/image/{sha_of[row['candidates'][index]]}" for index in order]
        assert anna.page.get_attribute("#reference", "src") == f"/image/{sha_of[row['reference']]}"
        keys = anna.keys_of(world.truth(instance))
        places.add(tuple(keys))
        anna.press(*keys)
        assert anna.order() == [int(key) for key in keys]
        anna.go_on("Enter")
        done.append(instance)
    assert "Thank you, anna!" in anna.page.inner_text("#thanks")
    assert "You ranked 16 and skipped 0. Together you have made 16 of the 16" in anna.page.inner_text("#thanks")
    assert anna.page.inner_text("#percent") == "100 %"
    assert rankings(folder, "anna") == [(instance, world.truth(instance)) for instance in done]
    assert sorted(done) == sorted(world.instances["id"])
    assert len(places) > 8  # the right keys were others each time
    annotations = read_annotations([folder / "anna.jsonl"], world.instances)
    assert len(annotations) == 16
    assert all(
        0 <= line["seconds"] < 600 and line["time"].endswith("+00:00") for line in read_lines(folder / "anna.jsonl")
    )


@pytest.mark.slow
def test_what_a_person_ranks_is_in_the_dataset(tmp_path, folder, serve, sit_down):
    """By what is seen: the candidates with the reference's colour come first."""
    built = PlantedWorld(tmp_path / "world", 2, 1, 2)
    url = serve((built.instances, built.panels, built.prompts), annotations_per_instance=1)
    anna = sit_down(url, "anna")
    rows = {row["id"]: row for row in built.instances}
    while anna.page.locator("#work").is_visible():
        row = rows[anna.instance]
        is_other = [not built.is_consistent(row["reference"], name) for name in row["candidates"]]
        anna.press(*anna.keys_of(sorted(range(4), key=is_other.__getitem__)))
        anna.go_on("Enter")
    annotations = read_annotations([folder / "anna.jsonl"], built.instances)
    pairs, held_out, report = build_pairs(built.instances, built.panels, built.prompts, annotations, test_size=0.5)
    assert report["votes"]["ordered"] == len(rows) == 16
    assert len(held_out) == 8
    decisions = [
        (row["completion"][0]["content"] == "Yes", built.is_consistent(*row["panels"]))
        for split in pairs.values()
        for row in split.remove_columns("images")
    ]
    assert {said for said, _ in decisions} == {True, False}
    assert all(said == is_true for said, is_true in decisions)


def test_images_are_seen_and_text_is_text(world, folder, serve, sit_down):
    url = serve(world)
    anna = sit_down(url, "anna")
    anna.page.wait_for_load_state("networkidle")
    sizes = anna.page.evaluate("[...document.querySelectorAll('.picture img')].map(image => image.naturalWidth)")
    assert sizes == [24] * 5
    assert anna.page.text_content("#theme") == THEME and "<script>" in THEME
    assert anna.page.locator("#theme *").count() == 0
    assert anna.page.title() == "Rank images by consistency"
    assert anna.page.locator("#dimensions li").all_text_contents()[1] == "logic: what is shown fits together"
    # It is all in the window at once; on a phone nothing goes out of it sideways
    box = anna.page.locator("#skip").bounding_box()
    assert box["y"] + box["height"] <= 800
    anna.page.set_viewport_size({"width": 360, "height": 740})
    assert anna.page.evaluate("document.documentElement.scrollWidth") == 360
    box = anna.page.locator("#skip").bounding_box()
    assert box["y"] + box["height"] <= 740


@pytest.mark.slow
def test_half_made_orders(world, folder, serve, sit_down):
    url = serve(world)
    anna = sit_down(url, "anna")
    instance = anna.instance
    anna.press("3", "1", "3", "9")  # neither twice nor what is not there
    assert anna.order() == [3, 1] and anna.badges() == ["2", "", "1", ""]
    anna.press("Backspace")
    assert anna.order() == [3] and anna.badges() == ["", "", "1", ""]
    anna.press("Backspace", "Backspace")
    assert anna.order() == []
    anna.press("4", "2", "Enter")
    assert "2 candidates are left" in anna.message()
    # A reload keeps what was done, and the instance, also where another would come next by now
    others = sit_down(url, "bob")
    others.page.goto(f"{url}/?annotator=bob&instance={instance}")
    others.page.wait_for_selector(".candidate")
    others.press("1", "2", "3", "4")
    others.go_on("Enter")
    assert get_task(url, "anna")["instance"] != instance
    anna.page.reload()
    anna.page.wait_for_selector("#work:not([hidden])")
    assert anna.instance == instance and anna.order() == [4, 2]
    # It is this annotator's, and of this instance
    others.page.goto(f"{url}/?annotator=carl&instance={instance}")
    others.page.wait_for_selector("#work:not([hidden])")
    assert others.order() == []
    assert rankings(folder, "anna") == []
    anna.press("1", "3")
    anna.go_on("Enter")
    assert anna.order() == []
    shown = shown_order("anna", instance, 4)
    assert rankings(folder, "anna") == [(instance, [shown[3], shown[1], shown[0], shown[2]])]


@pytest.mark.slow
def test_click_and_drag(world, folder, serve, sit_down):
    url = serve(world)
    anna = sit_down(url, "anna")
    instance = anna.instance
    for number in (2, 4):
        anna.candidate(number).click()
    assert anna.order() == [2, 4]
    anna.candidate(2).click()  # and back
    assert anna.order() == [4]
    anna.slot(1).click()
    assert anna.order() == []
    # Enter is not for the candidate that was clicked at last
    for number in (2, 4):
        anna.candidate(number).click()
    anna.press("Enter")
    assert anna.order() == [2, 4] and "2 candidates are left" in anna.message()

    anna.drag(anna.candidate(1), anna.slot(1))
    assert anna.order() == [1, 2, 4]
    anna.drag(anna.candidate(3), anna.slot(2))
    assert anna.order() == [1, 3, 2, 4]
    anna.drag(anna.slot(4), anna.slot(1))
    assert anna.order() == [4, 1, 3, 2]
    anna.drag(anna.slot(1), anna.slot(3))
    assert anna.order() == [1, 3, 4, 2]
    # Out of the order; and to nowhere, which changes nothing
    anna.drag(anna.slot(1), anna.candidate(2))
    assert anna.order() == [3, 4, 2]
    anna.drag(anna.candidate(1), anna.page.locator("#theme"))
    assert anna.order() == [3, 4, 2] and anna.page.locator(".ghost").count() == 0
    # To a place behind the last: it is the last
    anna.press("Backspace")
    anna.press("Backspace")
    anna.drag(anna.candidate(1), anna.slot(4))
    assert anna.order() == [3, 1]
    anna.press("2", "4")
    anna.go_on(anna.page.locator("#save").click)
    # The keys are for the page again
    anna.press("1", "2", "3", "4")
    anna.go_on("Enter")
    shown = shown_order("anna", instance, 4)
    assert rankings(folder, "anna")[0] == (instance, [shown[number - 1] for number in (3, 1, 2, 4)])
    assert len(rankings(folder, "anna")) == 2


def test_with_the_keyboard_alone(world, folder, serve, sit_down):
    url = serve(world)
    anna = sit_down(url, "anna")
    for number in (3, 1):
        anna.candidate(number).focus()
        anna.press("Enter")
    assert anna.order() == [3, 1]
    assert anna.candidate(3).get_attribute("aria-label") == "Candidate 3, at place 1 of 4"
    assert anna.candidate(3).get_attribute("aria-pressed") == "true"
    assert anna.candidate(2).get_attribute("aria-pressed") == "false"
    anna.slot(2).focus()
    anna.press("ArrowUp")
    assert anna.order() == [1, 3]
    anna.press("ArrowDown")
    assert anna.order() == [3, 1]
    # Large, as long as Space is held: what the keyboard is at; or the reference
    large = anna.page.locator("#large")
    anna.candidate(4).focus()
    assert not large.is_visible()
    anna.page.keyboard.down("Space")
    assert large.is_visible()
    assert anna.page.get_attribute("#large-image", "src") == url + anna.shown()[3]
    anna.press("2")  # not meanwhile
    anna.page.keyboard.up("Space")
    assert not large.is_visible() and anna.order() == [3, 1]
    anna.page.evaluate("document.activeElement.blur()")
    anna.page.keyboard.down("Space")
    assert anna.page.get_attribute("#large-image", "src") == url + anna.page.get_attribute("#reference", "src")
    anna.page.keyboard.up("Space")
    # With the magnifier it stays until it is closed
    anna.page.get_by_label("Show candidate 2 large").click()
    assert anna.page.get_attribute("#large-image", "src") == url + anna.shown()[1]
    anna.press("Escape")
    assert not large.is_visible() and anna.order() == [3, 1]
    anna.page.get_by_label("Show the reference large").click()
    anna.page.mouse.click(640, 400)
    assert not large.is_visible() and anna.order() == [3, 1]
    # A button that the keyboard has gone to has its own Enter
    anna.press("2", "4")
    anna.page.locator("#skip").focus()
    anna.go_on("Enter")
    assert [ranking for _, ranking in rankings(folder, "anna")] == [None]


def test_skip_and_back_and_change(world, folder, serve, sit_down):
    url = serve(world)
    anna = sit_down(url, "anna")
    first = anna.instance
    anna.press("z")
    assert anna.instance == first and "first one" in anna.message()
    assert anna.page.locator("#back").is_disabled()
    anna.press("1", "2", "3", "4")
    anna.go_on("Enter")
    second = anna.instance
    anna.go_on("s")
    third = anna.instance
    assert anna.page.inner_text("#own") == "1 ranked, 1 skipped"
    anna.press("2")
    anna.go_on("z")
    assert anna.instance == second and "You skipped this one" in anna.message() and anna.order() == []
    anna.page.locator("#back").click()
    anna.page.wait_for_function("() => document.querySelectorAll('#order .slot:enabled').length === 4")
    assert anna.instance == first and anna.order() == [1, 2, 3, 4]
    anna.press("Backspace", "Backspace", "4", "3")
    anna.go_on("Enter")
    # It goes on where it was, with what was begun there
    assert anna.instance == third and anna.order() == [2]
    anna.page.locator("#skip").click()
    anna.page.wait_for_function("() => document.querySelector('#own').textContent === '1 ranked, 2 skipped'")
    shown = shown_order("anna", first, 4)
    assert rankings(folder, "anna") == [
        (first, shown),
        (second, None),
        (first, [shown[0], shown[1], shown[3], shown[2]]),
        (third, None),
    ]
    ranks = {
        annotation.instance: annotation.ranks
        for annotation in read_annotations([folder / "anna.jsonl"], world.instances)
    }
    assert ranks[first][shown[3]] == 3 and ranks[second] is None


@pytest.mark.slow
def test_two_annotators_and_two_tabs(tmp_path, folder, serve, sit_down):
    world = make_world(tmp_path / "world", num_prompts=1)
    url = serve(world, annotations_per_instance=2)
    people = anna, bob = [sit_down(url, "anna"), sit_down(url, "bob")]
    tab = sit_down(url, "anna")
    assert anna.instance == tab.instance != bob.instance
    same = anna.instance
    anna.press("1", "2", "3", "4")
    tab.press("4", "3", "2", "1")
    anna.go_on("Enter")
    tab.go_on("Enter")
    while any(person.page.locator("#work").is_visible() for person in people):
        for person in people:
            if person.page.locator("#work").is_visible():
                person.press(*person.keys_of([3, 1, 0, 2]))
                person.go_on("Enter")
    annotations = read_annotations(sorted(folder.iterdir()), world.instances)
    assert len(annotations) == 16
    ranks = {(annotation.annotator, annotation.instance): annotation.ranks for annotation in annotations}
    shown = shown_order("anna", same, 4)
    assert rankings(folder, "anna")[:2] == [(same, shown), (same, shown[::-1])]
    assert [ranks["anna", same][index] for index in shown] == [4, 3, 2, 1]
    assert all(value == (3, 2, 4, 1) for key, value in ranks.items() if key != ("anna", same))


def test_nothing_is_lost_while_the_server_is_away(world, folder, sit_down):
    with served(make_app(*world, folder)) as url:
        anna = sit_down(url, "anna")
        instance = anna.instance
        anna.press("2", "1", "3", "4")
        anna.page.wait_for_load_state("networkidle")
    anna.expected += ["ERR_CONNECTION_REFUSED", "400"]  # 400: the instance that is no more
    anna.press("Enter")
    anna.page.wait_for_function("() => document.querySelector('#message').textContent.startsWith('Not saved')")
    assert "The server does not answer" in anna.message() and anna.order() == [2, 1, 3, 4]
    assert rankings(folder, "anna") == []
    with served(make_app(*world, folder)) as again:
        # Another port: the address of the page is not that of before, so its half-made order is another page's
        anna.page.goto(f"{again}/?annotator=anna&instance=no-more")
        anna.page.wait_for_selector("#work:not([hidden])")
        assert anna.instance == instance
        anna.press("2", "1", "3", "4")
        anna.go_on("Enter")
    shown = shown_order("anna", instance, 4)
    assert rankings(folder, "anna") == [(instance, [shown[1], shown[0], shown[2], shown[3]])]


def test_names(world, folder, serve, sit_down):
    url = serve(world)
    anna = sit_down(url, "anna")
    anna.expected.append("400")
    anna.page.goto(url)
    anna.page.get_by_label("Your name").fill("<img src=x onerror=alert(1)>")
    anna.press("Enter")
    anna.page.wait_for_selector("[role=alert]")
    assert "<img src=x" in anna.page.inner_text("[role=alert]") and anna.page.locator("img").count() == 0
    anna.page.get_by_label("Your name").fill("dora")
    anna.page.get_by_text("Start").click()
    anna.page.wait_for_selector("#work:not([hidden])")
    assert "annotator=dora" in anna.page.url and anna.page.inner_text("header strong") == "dora"
    anna.press("1", "2", "3", "4")
    anna.go_on("Enter")
    assert [path.name for path in folder.iterdir()] == ["dora.jsonl"]


def test_many_candidates_by_touch_in_the_dark(tmp_path, folder, serve, sit_down):
    world = make_world(tmp_path / "world", num_prompts=1, num_seeds=12)
    url = serve(world)
    anna = sit_down(url, "anna", has_touch=True, is_mobile=True, color_scheme="dark")
    anna.page.set_viewport_size({"width": 390, "height": 844})
    dark = anna.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(json.loads(f"[{dark[4:-1]}]")) < 64
    instance = anna.instance
    for number in range(12, 0, -1):
        anna.candidate(number).tap()
    assert anna.badges() == [str(rank) for rank in range(12, 0, -1)]
    anna.page.locator("#save").tap()
    anna.page.wait_for_function("() => document.querySelector('#own').textContent === '1 ranked'")
    assert rankings(folder, "anna") == [(instance, shown_order("anna", instance, 12)[::-1])]
