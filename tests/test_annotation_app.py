# SPDX-License-Identifier: Apache-2.0
"""Annotation by people: what is asked of whom, what is written, and what is refused."""

import json
import logging
import socket
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import requests
from datasets import Dataset
from datasets import Image as ImageFeature

from launching import free_port
from paco_trl.dataset_building import read_annotations
from paco_trl.dataset_building.annotate import (
    AnnotationWork,
    display_order,
    next_instance,
    serve_annotation,
)
from planted_world import PlantedWorld


THEME = "A fox <b>in</b> a scarf ${document.title = 'owned'} {{this}} & `friends`"


class World(NamedTuple):
    """Ranking instances of a planted world, in whose themes is what a page could run."""

    instances: Dataset
    panels: Dataset
    prompts: Dataset

    def truth(self, instance: str) -> list[int]:
        """A ranking that depends on the instance."""
        return sorted(range(4), key=lambda other: (abs(other - int(instance.split("/")[1])), other))


def make_world(folder: Path) -> World:
    """Two prompts with four grids of two panels each."""
    world = PlantedWorld(folder, num_prompts=2, rows=1, cols=2)
    others = world.prompts.remove_columns(["theme", "dimensions"])
    themed = others.add_column("theme", [THEME] * 2).add_column("dimensions", [["style", "logic"]] * 2)
    return World(world.instances, world.panels, themed)


@contextmanager
def served(world: World, folder: Path, port: int | None = None, **options):
    """Serves the app on 127.0.0.1; gives its address."""
    port = port or free_port()
    work = AnnotationWork(*world, folder, **options)
    app = serve_annotation(work, port=port, prevent_thread_lock=True)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        app.close(verbose=False)
        work.file_lock.release()


def order_of(annotator: str, instance: str, ranking: list[int]) -> list[int]:
    """The places of the shown images for a ranking of the original indices."""
    shown = display_order(annotator, instance, len(ranking))
    return [shown.index(index) for index in ranking]


def rank_all(work: AnnotationWork, world: World, annotator: str, limit: int = 1000) -> list[str]:
    """Rank, as the truth is, until nothing is left; gives the instances."""
    seen = []
    while (instance := work.task(annotator)["instance"]) is not None and len(seen) < limit:
        seen.append(instance)
        work.save(annotator, instance, order_of(annotator, instance, world.truth(instance)))
    return seen


def read_lines(path: Path) -> list[dict]:
    """The lines of a file of annotations, which are all whole."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "annotations"


# ------------------------------------------------------------------------------------------------ assignment


def test_candidates_are_shown_in_all_places():
    orders = [display_order("anna", f"p/{number}", 4) for number in range(400)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    for place in range(4):
        counts = Counter(order[place] for order in orders)
        assert all(70 <= counts[index] <= 130 for index in range(4)), counts  # 100 each, 3.5 deviations
    assert orders[0] == display_order("anna", "p/0", 4)
    assert orders != [display_order("bob", f"p/{number}", 4) for number in range(400)]


def test_fewest_rankings_first_then_an_order_of_the_annotator():
    names = [f"p/{number}" for number in range(50)]
    first = {name: next_instance(name, names, {}, {}, 3) for name in ("anna", "bob", "carl", "dora", "eve")}
    assert len(set(first.values())) > 2
    assert next_instance("anna", names[::-1], {}, {}, 3) == first["anna"]
    counts = dict.fromkeys(names, 1) | {"p/7": 0}
    assert next_instance("anna", names, {}, counts, 3) == "p/7"
    assert next_instance("anna", names, {"p/7"}, counts, 3) != "p/7"
    # Enough rankings: not asked for, whoever did not do it
    assert next_instance("anna", ["a", "b"], {}, {"a": 3, "b": 3}, 3) is None
    assert next_instance("anna", ["a", "b"], {"b"}, {"a": 3, "b": 3}, 4) == "a"


# ------------------------------------------------------------------------------------------------ ranking


def test_everything_is_ranked_by_as_many_as_are_needed(world, folder):
    work = AnnotationWork(*world, folder, annotations_per_instance=2)
    assert work.task("anna")["percent"] == 0
    seen = {name: rank_all(work, world, name) for name in ("anna", "bob", "carl")}
    last = work.task("anna")
    assert (last["instance"], last["ranked"], last["percent"]) == (None, 16, 100)
    assert last["previous"] == seen["anna"][-1]
    assert [len(set(names)) for names in seen.values()] == [16, 16, 0]  # nothing is left for a third
    assert seen["anna"] != seen["bob"]
    annotations = read_annotations(sorted(folder.iterdir()), world.instances)
    assert Counter(annotation.instance for annotation in annotations) == dict.fromkeys(world.instances["id"], 2)
    for annotation in annotations:
        best_first = sorted(range(4), key=lambda index: annotation.ranks[index])
        assert best_first == world.truth(annotation.instance)


def test_what_is_shown_and_written(world, folder):
    work = AnnotationWork(*world, folder)
    task = work.task("anna")
    instance = task["instance"]
    row = next(row for row in world.instances if row["id"] == instance)
    sha_of = dict(zip(world.panels["id"], world.panels["sha256"], strict=True))
    assert task["theme"] == THEME and task["dimensions"] == ["style", "logic"]
    assert task["reference"] == f"/image/{sha_of[row['reference']]}"
    shown = display_order("anna", instance, 4)
    assert task["images"] == [f"/image/{sha_of[row['candidates'][index]]}" for index in shown]
    assert task["order"] == [] and task["previous"] is None and not task["was_skipped"]
    work.save("anna", instance, [3, 1, 0, 2])
    (line,) = read_lines(folder / "anna.jsonl")
    ranking = [shown[place] for place in (3, 1, 0, 2)]
    assert line == {"annotator": "anna", "instance": instance, "ranking": ranking, "digest": row["digest"]}


def test_back_change_and_skip(world, folder):
    work = AnnotationWork(*world, folder, annotations_per_instance=1)
    first, second, third = rank_all(work, world, "anna", limit=3)
    assert [work.task("anna", name)["previous"] for name in (None, third, first)] == [third, second, None]
    assert work.task("anna", first)["order"] == order_of("anna", first, world.truth(first))
    # Changed, not added: the later line counts, and its place in the way back stays
    work.save("anna", first, [1, 2, 3, 0])
    work.save("anna", second, None)
    task = work.task("anna")
    assert (task["previous"], task["ranked"], task["skipped"], task["percent"]) == (third, 2, 1, 12)
    assert work.task("anna", first)["order"] == [1, 2, 3, 0]
    assert work.task("anna", second)["was_skipped"] and work.task("anna", second)["order"] == []
    # What one has skipped, another ranks
    assert second not in rank_all(work, world, "anna")
    assert rank_all(work, world, "bob") == [second]
    assert work.task("anna", "no such instance")["instance"] is None
    lines = read_lines(folder / "anna.jsonl")
    assert len(lines) == 18 and lines[4]["skipped"] is True and "ranking" not in lines[4]


def test_earlier_annotations_and_a_killed_server(world, folder):
    """What the web page of earlier versions wrote, the last line cut off in the middle."""
    folder.mkdir()
    names = world.instances["id"][:3]
    lines = [
        {"annotator": "anna", "instance": names[2], "ranking": [3, 1, 0, 2], "seconds": 4.5},
        {"annotator": "anna", "instance": names[0], "skipped": True, "seconds": 1},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "anna.jsonl").write_text(text + '{"annotator": "anna", "inst')
    work = AnnotationWork(*world, folder)
    task = work.task("anna")
    assert (task["ranked"], task["skipped"], task["previous"]) == (1, 1, names[0])
    assert work.task("anna", names[2])["order"] == order_of("anna", names[2], [3, 1, 0, 2])
    rank_all(work, world, "anna", limit=1)
    assert read_lines(folder / "anna.jsonl")[:2] == lines
    assert AnnotationWork(*world, folder).task("anna") == work.task("anna")


def test_rankings_of_images_that_have_changed_are_ranked_again(world, folder, caplog):
    digests = dict(zip(world.instances["id"], world.instances["digest"], strict=True))
    names = world.instances["id"][:2]
    lines = [
        {"annotator": "anna", "instance": name, "ranking": [0, 1, 2, 3], "digest": digest}
        for name, digest in ((names[0], digests[names[0]]), (names[1], "of earlier images"))
    ]
    folder.mkdir(exist_ok=True)
    (folder / "anna.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="line 2: the images of the instance .* have changed"):
        read_annotations([folder / "anna.jsonl"], world.instances)
    work = AnnotationWork(*world, folder)
    assert "1 rankings are of images that have changed" in caplog.text
    assert work.task("anna")["ranked"] == 1
    rank_all(work, world, "anna")  # the instance among them, whose newer ranking counts
    assert len(read_annotations([folder / "anna.jsonl"], world.instances)) == len(world.instances)


def test_several_annotators_at_once(world, folder):
    names = [f"annotator-{number}" for number in range(5)]
    work = AnnotationWork(*world, folder, annotations_per_instance=3)
    with ThreadPoolExecutor(10) as pool:
        seen = list(pool.map(lambda name: rank_all(work, world, name), names * 2))  # everyone in two tabs
    assert sum(len(read_lines(path)) for path in folder.iterdir()) == sum(map(len, seen))
    counts = Counter(annotation.instance for annotation in read_annotations(sorted(folder.iterdir()), world.instances))
    assert set(counts) == set(world.instances["id"]) and min(counts.values()) >= 3
    # Those who come later are needed where more rankings are wanted
    assert AnnotationWork(*world, folder, annotations_per_instance=6).task("late")["instance"] is not None


GOOD = {"annotator": "anna", "instance": "p000/0/0/1", "order": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("changes", "token"),
    [
        ({"instance": "p000/0/0/9"}, "p000/0/0/9"),
        ({"order": [0, 1]}, "2 of 4 are left"),
        ({"order": [0, 1, 2, 2]}, "exactly once"),
        ({"order": [0, 1, 2, 3, 4]}, "of 4 are left"),
        ({"annotator": "../anna"}, "../anna"),
        ({"annotator": None}, "None"),
        ({"annotator": "automatic"}, "automatic ranking"),
    ],
)
def test_bad_rankings_are_refused(world, folder, changes, token):
    work = AnnotationWork(*world, folder)
    with pytest.raises(ValueError, match=token):
        work.save(**(GOOD | changes))
    assert not folder.exists()
    folder.write_text("")  # a directory that cannot be made
    with pytest.raises(OSError):
        work.save(**GOOD)
    assert work.task("anna")["ranked"] == 0
    folder.unlink()
    work.save(**GOOD)


# ------------------------------------------------------------------------------------------------ judges


def test_a_judge_does_not_take_the_place_of_people(world, folder):
    folder.mkdir()
    path = folder / "judge.jsonl"
    lines = [{"annotator": "judge", "instance": name, "ranking": world.truth(name)} for name in world.instances["id"]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert AnnotationWork(*world, folder, annotations_per_instance=1).task("anna")["instance"] is None
    path.write_text(path.read_text().replace("}", ', "scores": []}'))
    work = AnnotationWork(*world, folder, annotations_per_instance=1)
    assert work.task("anna")["percent"] == 0
    with pytest.raises(ValueError, match="automatic ranking"):
        work.task("judge")
    assert len(rank_all(work, world, "anna")) == 16


# ------------------------------------------------------------------------------------------------ server


def test_what_the_server_serves_and_refuses(world, folder, monkeypatch):
    pytest.importorskip("gradio")
    asked, lookup = set(), socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **more: asked.add(host) or lookup(host, *args, **more)
    )
    panel = world.panels.cast_column("image", ImageFeature(decode=False))[0]
    path = Path(panel["image"]["path"])
    with served(world, folder) as url:
        answer = requests.get(url, timeout=10)
        policy = answer.headers["Content-Security-Policy"]
        assert answer.ok and policy.startswith("default-src 'self' data: blob:;") and "http" not in policy
        answer = requests.get(f"{url}/image/{panel['sha256']}", timeout=10)
        assert answer.content == path.read_bytes() and answer.headers["Content-Type"] == "image/png"
        assert "immutable" in answer.headers["Cache-Control"]
        # A path is not an address
        for address in ["image/none", "image/..%2F..%2Fetc%2Fpasswd", f"gradio_api/file={path}", f"file={path}"]:
            assert requests.get(f"{url}/{address}", timeout=10).status_code in (403, 404), address
        # A name that was made to point here, and a page of another site
        assert requests.get(url, headers={"Host": "evil.example"}, timeout=10).status_code == 400
        for origin, status in [("http://evil.example", 403), ("null", 403), (url, 413)]:
            options = {"files": {"files": b"too large"}, "headers": {"Origin": origin}, "timeout": 10}
            answer = requests.post(f"{url}/gradio_api/upload", **options)
            assert answer.status_code == status, (origin, answer.text)
    assert not folder.exists()
    # Nothing is sent anywhere
    assert {str(host) for host in asked} == {"127.0.0.1"}


def test_one_app_alone_serves_a_directory(world, folder):
    """The rankings of another one would not be in its memory: it would ask for them again, and save over them."""
    pytest.importorskip("gradio")
    with served(world, folder), pytest.raises(ValueError, match="Another run"), served(world, folder):
        pass
    with served(world, folder) as url:
        assert requests.get(url, timeout=10).ok


def test_hosts_and_ports(world, folder, caplog, monkeypatch):
    pytest.importorskip("gradio")
    work = AnnotationWork(*world, folder)
    with pytest.raises(ValueError, match="'0.0.0.0'"):
        serve_annotation(work, "0.0.0.0")
    with socket.create_server(("127.0.0.1", 0)) as other, caplog.at_level(logging.WARNING):
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"{port}"):
            serve_annotation(work, port=port)
        assert "no password" not in caplog.text
        with pytest.raises(OSError, match=f"{port}"):
            serve_annotation(work, socket.gethostname(), port)
        assert "no password" in caplog.text
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ImportError, match=r"paco_trl\[apps\]"):
        serve_annotation(work)
