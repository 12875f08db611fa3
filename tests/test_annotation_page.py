# SPDX-License-Identifier: Apache-2.0
"""The annotation page: what is asked of whom, what is written, and what is refused. A real server, over HTTP."""

import hashlib
import json
import logging
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import requests
from PIL import Image, ImageDraw


pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

from datasets import Dataset  # noqa: E402
from datasets import Image as ImageFeature  # noqa: E402

from paco_trl.dataset_building.annotation_page import make_app, serve_annotation  # noqa: E402
from paco_trl.dataset_building.annotation_page.assignment import (  # noqa: E402
    is_gold_turn,
    keyed_order,
    next_instance,
    shown_order,
)
from paco_trl.dataset_building.annotations import read_annotations  # noqa: E402


COLOURS = ["#cc3311", "#ee7733", "#ddcc33", "#33aa55", "#3377bb", "#332288", "#aa3377", "#bbbbbb"]
THEME = "A fox <b>in</b> a scarf <script>document.title = 'owned'</script> & friends"


class World(NamedTuple):
    """Grids of one colour each: the truth is the distance between the colours of seeds."""

    instances: Dataset
    panels: Dataset
    prompts: Dataset

    def truth(self, instance: str) -> list[int]:
        """The right ranking."""
        seed = int(instance.split("/")[1])
        count = len(self.instances[0]["candidates"])
        return sorted(range(count), key=lambda other: (abs(other - seed), other))


def make_world(folder: Path, num_prompts: int = 2, num_seeds: int = 4, size: int = 24) -> World:
    """Two panels a grid: a circle, and a square."""
    folder.mkdir(parents=True, exist_ok=True)
    panels, instances = [], []
    for prompt in range(num_prompts):
        for seed in range(num_seeds):
            for position, shape in enumerate(("ellipse", "rectangle")):
                image = Image.new("RGB", (size, size), "white")
                box = [size // 4, size // 4, 3 * size // 4, 3 * size // 4]
                getattr(ImageDraw.Draw(image), shape)(box, fill=COLOURS[seed % 8])
                image.putpixel((0, 0), (prompt, seed, position))
                path = folder / f"{prompt}-{seed}-{position}.png"
                image.save(path)
                sha256 = hashlib.sha256(image.tobytes()).hexdigest()
                panels.append({"id": f"p {prompt}/{seed}/{position}", "sha256": sha256, "image": str(path)})
        for seed in range(num_seeds):
            for position, other in ((0, 1), (1, 0)):
                instances.append(
                    {
                        "id": f"p {prompt}/{seed}/{position}/{other}",
                        "prompt_id": f"p {prompt}",
                        "reference": f"p {prompt}/{seed}/{position}",
                        "candidates": [f"p {prompt}/{number}/{other}" for number in range(num_seeds)],
                    }
                )
    prompts = [
        {"id": f"p {prompt}", "prompt": f"{THEME} {prompt}", "theme": THEME, "dimensions": ["style", "logic"]}
        for prompt in range(num_prompts)
    ]
    dataset = Dataset.from_list(panels).cast_column("image", ImageFeature())
    return World(Dataset.from_list(instances), dataset, Dataset.from_list(prompts))


@contextmanager
def served(app):
    """Serves an app on a free port of 127.0.0.1; gives its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


def get_task(url: str, annotator: str, instance: str | None = None) -> dict:
    """What the page asks for."""
    parameters = {"annotator": annotator} | ({"instance": instance} if instance else {})
    answer = requests.get(f"{url}/task", params=parameters, timeout=10)
    assert answer.status_code == 200, answer.text
    return answer.json()


def post(url: str, body, **headers) -> requests.Response:
    """What the page sends."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Origin": url} | headers
    return requests.post(f"{url}/annotation", data=data, headers=headers, timeout=10)


def rank_all(url: str, world: World, annotator: str, skip: str | None = None, limit: int = 1000) -> list[str]:
    """Rank, as the truth is, until nothing is left; gives the instances."""
    seen = []
    task = get_task(url, annotator)
    while task["instance"] is not None and len(seen) < limit:
        instance = task["instance"]
        seen.append(instance)
        result = {"skipped": True} if instance == skip else {"ranking": world.truth(instance)}
        answer = post(url, {"annotator": annotator, "instance": instance, "seconds": 1.5, **result})
        assert answer.status_code == 200, answer.text
        task = answer.json()
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
    orders = [shown_order("anna", f"p/{number}", 4) for number in range(400)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    for place in range(4):
        counts = Counter(order[place] for order in orders)
        assert all(70 <= counts[index] <= 130 for index in range(4)), counts  # 100 each, 3.5 deviations
    assert orders[0] == shown_order("anna", "p/0", 4)
    assert orders != [shown_order("bob", f"p/{number}", 4) for number in range(400)]


def test_instances_come_in_an_order_of_the_annotator():
    names = [f"p/{number}" for number in range(50)]
    order = keyed_order("anna", names)
    assert sorted(order) == sorted(names) and order != names
    assert keyed_order("anna", reversed(names)) == order
    assert keyed_order("bob", names) != order
    # Names do not run together
    assert keyed_order("a", [f"b{name}" for name in names]) != [f"b{name}" for name in keyed_order("ab", names)]


def test_fewest_rankings_first_then_the_own_order():
    order = ["c", "a", "b"]
    assert next_instance("anna", order, [], {}, {}, 3) == "c"
    assert next_instance("anna", order, [], {}, {"c": 1}, 3) == "a"
    assert next_instance("anna", order, [], {}, {"c": 1, "a": 2, "b": 1}, 3) == "c"
    assert next_instance("anna", order, [], {"c"}, {"c": 1, "a": 2, "b": 1}, 3) == "b"
    # Enough rankings: not asked for, whoever did not do it
    assert next_instance("anna", order, [], {"c"}, {"a": 3, "b": 3}, 3) is None
    assert next_instance("anna", order, [], {"c"}, {"a": 3, "b": 3}, 4) == "a"
    assert next_instance("anna", order, [], {"a", "b", "c"}, {}, 3) is None


def test_one_in_ten_is_a_gold_question():
    turns = [
        [number for number in range(10 * block, 10 * block + 10) if is_gold_turn("anna", number)]
        for block in range(30)
    ]
    assert all(len(block) == 1 for block in turns)
    assert len({block[0] % 10 for block in turns}) > 5  # nobody can count
    assert turns != [
        [number for number in range(10 * block, 10 * block + 10) if is_gold_turn("bob", number)] for block in range(30)
    ]

    turn = turns[0][0]
    done = [f"d{number}" for number in range(turn)]
    order = ["a", "b"]
    assert next_instance("anna", order, ["g", "h"], done, {}, 1) == "g"
    assert next_instance("anna", order, ["g", "h"], [*done, "x"], {}, 1) == "a"
    assert next_instance("anna", order, [], done, {}, 1) == "a"
    # None is left, and none is asked for its own sake
    done_gold = ["g", "h", *done][: len(done)] if turn >= 2 else None
    if done_gold:
        assert next_instance("anna", order, ["g", "h"], done_gold, {}, 1) == "a"
    assert next_instance("anna", order, ["g", "h"], done, {"a": 1, "b": 1}, 1) is None


# ------------------------------------------------------------------------------------------------ ranking


def test_everything_is_ranked_by_as_many_as_are_needed(world, folder):
    with served(make_app(*world, folder, annotations_per_instance=2)) as url:
        start = get_task(url, "anna")
        assert start["progress"] == {"ranked": 0, "skipped": 0, "rankings": 0, "needed": 32}
        seen = {name: rank_all(url, world, name) for name in ("anna", "bob", "carl")}
        last = get_task(url, "anna")
        assert last["instance"] is None
        assert last["progress"] == {"ranked": 16, "skipped": 0, "rankings": 32, "needed": 32}
        assert last["previous"] == seen["anna"][-1]
    assert [len(set(names)) for names in seen.values()] == [16, 16, 0]  # nothing is left for a third
    assert seen["anna"] != seen["bob"]
    annotations = read_annotations(sorted(folder.iterdir()), world.instances)
    assert Counter(annotation.instance for annotation in annotations) == dict.fromkeys(world.instances["id"], 2)
    for annotation in annotations:
        best_first = sorted(range(4), key=lambda index: annotation.ranks[index])
        assert best_first == world.truth(annotation.instance)


def test_what_is_shown_and_written(world, folder):
    with served(make_app(*world, folder)) as url:
        task = get_task(url, "anna")
        instance = task["instance"]
        row = next(row for row in world.instances if row["id"] == instance)
        sha_of = dict(zip(world.panels["id"], world.panels["sha256"], strict=True))
        assert task["theme"] == THEME and task["dimensions"] == ["style", "logic"]
        assert task["reference"] == f"/image/{sha_of[row['reference']]}"
        assert [candidate["index"] for candidate in task["candidates"]] == shown_order("anna", instance, 4)
        for candidate in task["candidates"]:
            assert candidate["image"] == f"/image/{sha_of[row['candidates'][candidate['index']]]}"
        assert task["order"] == [] and task["previous"] is None and not task["skipped"]
        assert get_task(url, "anna")["instance"] == instance

        before = datetime.now(UTC) - timedelta(seconds=1)
        post(url, {"annotator": "anna", "instance": instance, "ranking": [3, 1, 0, 2], "seconds": 2.25, "gold": 1})
        (line,) = read_lines(folder / "anna.jsonl")
        assert before <= datetime.fromisoformat(line.pop("time")) <= datetime.now(UTC)
        assert line == {"annotator": "anna", "instance": instance, "ranking": [3, 1, 0, 2], "seconds": 2.2}


def test_back_change_and_skip(world, folder):
    with served(make_app(*world, folder, annotations_per_instance=1)) as url:
        first, second, third = rank_all(url, world, "anna", limit=3)
        assert get_task(url, "anna")["previous"] == third
        assert get_task(url, "anna", third)["previous"] == second
        shown = get_task(url, "anna", first)
        assert shown["previous"] is None and shown["order"] == world.truth(first)
        # Changed, not added: the later line counts, and its place in the way back stays
        post(url, {"annotator": "anna", "instance": first, "ranking": [1, 2, 3, 0], "seconds": 0})
        post(url, {"annotator": "anna", "instance": second, "skipped": True, "seconds": 0})
        task = get_task(url, "anna")
        assert task["previous"] == third
        assert task["progress"] == {"ranked": 2, "skipped": 1, "rankings": 2, "needed": 16}
        assert get_task(url, "anna", first)["order"] == [1, 2, 3, 0]
        skipped = get_task(url, "anna", second)
        assert skipped["skipped"] and skipped["order"] == []
        # What one has skipped, another ranks
        assert second not in rank_all(url, world, "anna")
        assert rank_all(url, world, "bob") == [second]
    lines = read_lines(folder / "anna.jsonl")
    assert len(lines) == 18 and lines[4]["skipped"] is True and "ranking" not in lines[4]
    ranks = {
        annotation.instance: annotation.ranks
        for annotation in read_annotations([folder / "anna.jsonl"], world.instances)
    }
    assert ranks[first] == (4, 1, 2, 3) and ranks[second] is None and len(ranks) == 16


def test_several_annotators_at_once_and_a_restart(world, folder):
    names = [f"annotator-{number}" for number in range(5)]
    with served(make_app(*world, folder, annotations_per_instance=3)) as url, ThreadPoolExecutor(10) as pool:
        # Everyone in two tabs
        seen = list(pool.map(lambda name: rank_all(url, world, name), names * 2))
        state = [get_task(url, name) for name in names]
    lines = [line for path in folder.iterdir() for line in read_lines(path)]
    assert len(lines) == sum(map(len, seen))
    counts = Counter(annotation.instance for annotation in read_annotations(sorted(folder.iterdir()), world.instances))
    assert set(counts) == set(world.instances["id"]) and min(counts.values()) >= 3
    for name in names:
        assert {line["annotator"] for line in read_lines(folder / f"{name}.jsonl")} == {name}
    with served(make_app(*world, folder, annotations_per_instance=3)) as url:
        assert [get_task(url, name) for name in names] == state
    # Those who come later are needed where more rankings are wanted
    with served(make_app(*world, folder, annotations_per_instance=6)) as url:
        assert get_task(url, "late")["instance"] is not None


SERVE = """
import sys
from pathlib import Path
from datasets import load_from_disk
from paco_trl.dataset_building.annotation_page import serve_annotation
root = Path(sys.argv[1])
data = [load_from_disk(str(root / name)) for name in ("instances", "panels", "prompts")]
serve_annotation(*data, root / "annotations", port=0)
"""


@contextmanager
def own_process(root: Path):
    """Serves from a process of its own; gives it, and its address."""
    command = [sys.executable, "-c", SERVE, str(root)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while "Application startup complete" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        assert "password" not in said  # a warning for those who let others in
        yield process, re.search(r"http://127.0.0.1:\d+", said)[0]
    finally:
        process.kill()
        process.communicate()


def test_kill_and_restart(world, tmp_path, capsys):
    for name, dataset in world._asdict().items():
        dataset.save_to_disk(str(tmp_path / name))
    with own_process(tmp_path) as (process, url):
        done = rank_all(url, world, "anna", limit=3)
        following = get_task(url, "anna")
        process.kill()
        process.wait()
        with pytest.raises(requests.ConnectionError):
            get_task(url, "anna")
    folder = tmp_path / "annotations"
    assert [line["instance"] for line in read_lines(folder / "anna.jsonl")] == done
    # As if it had been killed in the middle of a line
    with open(folder / "anna.jsonl", "a") as opened:
        opened.write('{"annotator": "anna", "inst')

    # A name of this machine that others may reach, and the port of before. The server has the main thread, as in use
    host, port = socket.gethostname(), int(url.rpartition(":")[2])
    results = []

    def annotate():
        url = f"http://{host}:{port}"
        for _ in range(2000):
            try:
                results.append(get_task(url, "anna"))
                break
            except requests.ConnectionError:
                time.sleep(0.05)
        results.append(rank_all(url, world, "anna", limit=1))
        signal.raise_signal(signal.SIGINT)  # Ctrl+C

    thread = threading.Thread(target=annotate, daemon=True)
    thread.start()
    serve_annotation(*world, folder, host=host, port=port)
    thread.join()
    said = capsys.readouterr().err
    assert f"http://{host}:{port}" in said and "no password" in said
    assert results == [following, [following["instance"]]]
    assert [line["instance"] for line in read_lines(folder / "anna.jsonl")] == [*done, following["instance"]]


def test_port_in_use_and_hosts(world, folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of '127.0.0.1'.*give another `port`"):
            serve_annotation(*world, folder, port=port)
    with pytest.raises(OSError, match="`host` must be an address of this machine"):
        serve_annotation(*world, folder, host="203.0.113.7", port=0)
    with pytest.raises(ValueError, match="'0.0.0.0', which stands for all addresses"):
        serve_annotation(*world, folder, host="0.0.0.0")


# ------------------------------------------------------------------------------------------------ refusing

GOOD = {"annotator": "anna", "instance": "p 0/0/0/1", "ranking": [0, 1, 2, 3], "seconds": 1}


def changed(**values) -> dict:
    """A good ranking with something changed; `None` takes it out."""
    return {key: value for key, value in (GOOD | values).items() if value is not None}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (changed(instance="p 0/0/0/9"), "There is no instance 'p 0/0/0/9'"),
        (changed(instance=["p 0/0/0/1"]), "There is no instance"),
        (changed(instance=None), "There is no instance None"),
        (changed(ranking=[0, 1, 2]), "not complete: it has 3 of 4"),
        (changed(ranking=[0, 1, 2, 3, 4]), "5 of 4"),
        (changed(ranking=[]), "0 of 4"),
        (changed(ranking=[0, 1, 2, 2]), "exactly once"),
        (changed(ranking=[1, 2, 3, 4]), "exactly once"),
        (changed(ranking=[False, True, 2, 3]), "exactly once"),
        (changed(ranking=["0", "1", "2", "3"]), "exactly once"),
        (changed(ranking="0123"), "must be a list"),
        (changed(ranking=None), "must have one of `ranking` and `skipped`"),
        (changed(skipped=True), "must have one of `ranking` and `skipped`"),
        (changed(ranking=None, skipped=False), "`skipped` is False"),
        (changed(annotator="../anna"), "The annotator's name is '../anna'"),
        (changed(annotator="anna\n"), "The annotator's name"),
        (changed(annotator=".anna"), "not begin with a full stop"),
        (changed(annotator=""), "1 to 40 letters"),
        (changed(annotator="a" * 41), "1 to 40 letters"),
        (changed(annotator=None), "The annotator's name is None"),
        (changed(annotator="judge"), "'judge' is that of an automatic ranking"),
        (changed(seconds=-1), "`seconds` is -1"),
        (changed(seconds=None), "`seconds` is None"),
        (changed(seconds=float("nan")), "`seconds` is nan"),
        (changed(seconds=10**400), "must be a number from 0 to 1e+09"),
        (changed(seconds=True), "`seconds` is True"),
        ([GOOD], "no ranking"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 60_000, "not valid JSON"),
    ],
)
def test_bad_rankings_are_refused(refusing, body, reason):
    url, folder = refusing
    answer = post(url, body)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"] and reason in answer.json()["error"]
    assert not folder.exists()


@pytest.fixture(scope="module")
def refusing(world, tmp_path_factory):
    """Nothing is ever written to its folder."""
    folder = tmp_path_factory.mktemp("refusing") / "annotations"
    with served(make_app(*world, folder, not_people=["judge"])) as url:
        yield url, folder


def test_requests_of_others_are_refused(refusing, world, tmp_path):
    url, folder = refusing
    host = url.partition("://")[2]
    for headers, status, reason in [
        ({"Origin": "http://evil.example"}, 403, "only the page itself"),
        ({"Origin": "null"}, 403, "only the page itself"),
        ({"Origin": None}, 403, "only the page itself"),
        ({"Origin": url.replace("127.0.0.1", "localhost")}, 403, "only the page itself"),
        ({"Content-Type": "text/plain"}, 415, "must be 'application/json'"),
        ({"Content-Type": None}, 415, "must be 'application/json'"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "must be 'application/json'"),
    ]:
        answer = post(url, GOOD, **headers)
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
        assert reason in answer.json()["error"]
    assert post(url, json.dumps(GOOD).encode() + b" " * 70_000).status_code == 413
    # A name that was made to point here (DNS rebinding), also with the origin that belongs to it
    for method, path in [("get", "/"), ("get", "/task?annotator=anna"), ("post", "/annotation")]:
        headers = {"Host": "evil.example", "Origin": "http://evil.example", "Content-Type": "application/json"}
        answer = requests.request(method, url + path, data=json.dumps(GOOD), headers=headers, timeout=10)
        assert answer.status_code == 400 and "host" in answer.text
    assert requests.get(f"{url}/annotation", params=GOOD, timeout=10).status_code == 405
    assert not folder.exists()
    # Its twins: this very request is taken where it comes from the page, under each of its names
    with served(make_app(*world, tmp_path / "taken")) as url:
        local = url.replace("127.0.0.1", "localhost")
        assert post(url, GOOD).status_code == 200
        assert post(url, GOOD, Origin=local, Host=local.partition("://")[2]).status_code == 200
        assert post(url, GOOD, **{"Content-Type": "application/json; charset=utf-8"}).status_code == 200
    assert len(read_lines(tmp_path / "taken" / "anna.jsonl")) == 3
    assert host  # the first server is another one


def test_disk_full_is_told_and_not_counted(world, folder):
    # A folder that cannot be made, as nothing else fails alike for every user
    folder.write_text("")
    with served(make_app(*world, folder)) as url:
        answer = post(url, GOOD)
        assert answer.status_code == 500 and "failed on the server" in answer.json()["error"]
        assert get_task(url, "anna")["progress"]["ranked"] == 0
        folder.unlink()
        assert post(url, GOOD).json()["progress"]["ranked"] == 1


def test_page_and_headers(refusing):
    url, _ = refusing
    paths = ["/", "/?annotator=anna", "/page.js", "/page.css", "/task?annotator=anna", "/image/none", "/nothing"]
    for path in paths:
        answer = requests.get(url + path, timeout=10)
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] if answer.ok else answer.status_code == 404
        # Nothing is fetched from anywhere else, and no script is in the page
        assert not re.search(r"https?://|//cdn|@import", answer.text)
        if answer.headers["Content-Type"].startswith("text/html"):
            assert not re.search(r"<script(?! src)|\son\w+=|\sstyle=", answer.text)
        else:
            assert answer.headers["Content-Type"].partition(";")[0] in (
                "text/javascript",
                "text/css",
                "application/json",
            )
    assert "page.js" in requests.get(f"{url}/?annotator=anna", timeout=10).text

    name = "<script>alert(1)</script>\"'"
    answer = requests.get(url, params={"annotator": name}, timeout=10)
    assert answer.status_code == 400 and "page.js" not in answer.text
    assert "&lt;script&gt;" in answer.text and "<script" not in answer.text
    assert requests.get(url, params={"annotator": "judge"}, timeout=10).status_code == 400
    assert requests.get(f"{url}/task", params={"annotator": name}, timeout=10).status_code == 400
    answer = requests.get(f"{url}/task", params={"annotator": "anna", "instance": "x"}, timeout=10)
    assert answer.status_code == 400 and "no instance 'x'" in answer.json()["error"]


def test_images_are_sent_as_they_are(world, folder, tmp_path, caplog):
    path = Path(world.panels.cast_column("image", ImageFeature(decode=False))[0]["image"]["path"])
    jpeg = tmp_path / "picture.png"  # by its name; what it is counts
    Image.open(path).save(jpeg, "JPEG")
    gone = tmp_path / "gone.png"
    gone.write_bytes(path.read_bytes())
    images = [str(path), str(jpeg), {"path": None, "bytes": path.read_bytes()}, str(gone)]
    feature = ImageFeature()
    panels = Dataset.from_dict(
        {
            "id": ["a", "b", "c", "d"],
            "sha256": ["aa", "bb", "cc", "dd"],
            "image": [feature.encode_example(image) for image in images],
        }
    ).cast_column("image", feature)
    rows = [{"id": "x", "prompt_id": "p", "reference": "a", "candidates": ["b", "c", "d"]}]
    gone.unlink()
    with served(make_app(Dataset.from_list(rows), panels, None, folder)) as url:
        task = get_task(url, "anna")
        assert task["theme"] == "" and task["dimensions"] == ["identity", "style", "logic"]
        for address, data, media_type in [
            ("aa", path.read_bytes(), "image/png"),
            ("bb", jpeg.read_bytes(), "image/jpeg"),
            ("cc", path.read_bytes(), "image/png"),
        ]:
            answer = requests.get(f"{url}/image/{address}", timeout=10)
            assert answer.content == data and answer.headers["Content-Type"] == media_type
            assert "immutable" in answer.headers["Cache-Control"]
        with caplog.at_level(logging.ERROR):
            answer = requests.get(f"{url}/image/dd", timeout=10)
        assert answer.status_code == 404 and str(tmp_path) not in answer.text
        assert str(gone) in caplog.text
        # A path is no address
        for address in ["ee", "a", "..%2F..%2Fgone.png", "%2Fetc%2Fpasswd", str(path)[1:].replace("/", "%2F")]:
            assert requests.get(f"{url}/image/{address}", timeout=10).status_code == 404


# ------------------------------------------------------------------------------------------------ gold, datasets


def write_true_rankings(path: Path, world: World, instances: list[str], annotator: str = "expert") -> Path:
    lines = [{"annotator": annotator, "instance": name, "ranking": world.truth(name)} for name in instances]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_gold_questions(tmp_path, folder):
    world = make_world(tmp_path / "world", num_prompts=8)
    names = world.instances["id"][:]
    gold = names[::16]
    assert len(gold) == 4 and len(names) == 64
    write_true_rankings(tmp_path / "gold.jsonl", world, gold)
    # Looked at by the expert, and not ranked: no gold question
    with open(tmp_path / "gold.jsonl", "a") as file:
        file.write(json.dumps({"annotator": "expert", "instance": names[1], "skipped": True}) + "\n")
    with served(make_app(*world, folder, annotations_per_instance=1, gold=tmp_path / "gold.jsonl")) as url:
        keys = set()
        seen = {"anna": [], "bob": []}
        for name, limit in (("anna", 30), ("bob", 1000)):
            seen[name] = rank_all(url, world, name, limit=limit)
            for instance in seen[name][:20]:
                task = get_task(url, name, instance)
                keys.add((instance in gold, tuple(sorted(task)), tuple(sorted(task["progress"]))))
        progress = get_task(url, "bob")["progress"]
    asked = 0
    for done in seen.values():
        places = [place for place, instance in enumerate(done) if instance in gold]
        assert len(places) >= 3 and [place // 10 for place in places] == list(range(len(places)))
        assert len(set(done)) == len(done)
        asked += len(places)
    # 60 that are no gold questions, one ranking each; gold questions are asked of both
    regular = Counter(instance for done in seen.values() for instance in done if instance not in gold)
    assert regular == dict.fromkeys([name for name in names if name not in gold], 1)
    assert progress["rankings"] == progress["needed"] == 60 + asked
    # They look like others
    assert {key[0] for key in keys} == {False, True} and len({key[1:] for key in keys}) == 1
    # Without gold questions all count alike
    with served(make_app(*world, folder, annotations_per_instance=1)) as url:
        left = set(names) - {instance for done in seen.values() for instance in done}
        assert len(left) == 64 - 60 - len(
            {instance for done in seen.values() for instance in done if instance in gold}
        )
        assert set(rank_all(url, world, "carl")) == left


def test_wrong_gold(world, folder, tmp_path):
    with pytest.raises(FileNotFoundError, match="gold"):
        make_app(*world, folder, gold=tmp_path / "none.jsonl")
    folder.mkdir()
    inside = write_true_rankings(folder / "gold.jsonl", world, world.instances["id"][:2])
    with pytest.raises(ValueError, match="would count as those of an annotator"):
        make_app(*world, folder, gold=inside)
    inside.unlink()
    everything = write_true_rankings(tmp_path / "gold.jsonl", world, world.instances["id"][:])
    with pytest.raises(ValueError, match="All 16 instances are gold questions"):
        make_app(*world, folder, gold=everything)
    everything.write_text('{"annotator": "expert", "instance": "unknown", "ranking": [0, 1, 2, 3]}\n')
    with pytest.raises(ValueError, match="gold.jsonl, line 1: there is no instance 'unknown'"):
        make_app(*world, folder, gold=everything)
    make_app(*world, folder, gold=write_true_rankings(everything, world, world.instances["id"][:2]))


def test_a_judge_does_not_take_the_place_of_people(world, folder):
    folder.mkdir()
    write_true_rankings(folder / "judge.jsonl", world, world.instances["id"][:], "judge")
    with served(make_app(*world, folder, annotations_per_instance=1)) as url:
        assert get_task(url, "anna")["instance"] is None
    with served(make_app(*world, folder, annotations_per_instance=1, not_people=["judge"])) as url:
        assert get_task(url, "anna")["progress"]["rankings"] == 0
        assert len(rank_all(url, world, "anna")) == 16


def test_datasets_that_do_not_fit(world, folder):
    def instances(**changes) -> Dataset:
        return Dataset.from_list([row | changes if number == 3 else row for number, row in enumerate(world.instances)])

    name = world.instances["id"][3]
    panels, prompts = world.panels, world.prompts
    make_app(instances(), panels, prompts, folder)
    for wrong, reason in [
        (
            lambda: make_app(instances(reference="p 9/0/0"), panels, prompts, folder),
            f"'{name}' has the panel 'p 9/0/0'",
        ),
        (
            lambda: make_app(instances(candidates=["p 0/0/0", "no"]), panels, prompts, folder),
            f"'{name}' has the panel 'no'",
        ),
        (lambda: make_app(instances(candidates=["p 0/0/0"]), panels, prompts, folder), f"'{name}' has 1 candidates"),
        (lambda: make_app(instances(candidates=["p 0/0/0"] * 13), panels, prompts, folder), "has 13 candidates"),
        (lambda: make_app(instances(id=world.instances["id"][0]), panels, prompts, folder), "more than once"),
        (lambda: make_app(instances(prompt_id="p 9"), panels, prompts, folder), "of the prompt 'p 9'"),
        (
            lambda: make_app(instances(), panels.remove_columns("sha256"), prompts, folder),
            "`panels` needs the columns",
        ),
        (lambda: make_app(instances(), panels, prompts.remove_columns("id"), folder), "`prompts` needs the columns"),
        (
            lambda: make_app(instances(), panels, prompts, folder, annotations_per_instance=0),
            "is 0. It must be an int",
        ),
    ]:
        with pytest.raises(ValueError, match=re.escape(reason)):
            wrong()
    make_app(instances(prompt_id="p 9"), panels, None, folder)
    folder.mkdir()
    (folder / "anna.jsonl").write_text('{"annotator": "anna", "instance": "p 0/0/0/1", "ranking": [0, 1]}\n')
    with pytest.raises(ValueError, match="anna.jsonl, line 1: it ranks 2 candidates, but the instance has 4"):
        make_app(*world, folder)


def test_theme_of_a_prompt_without_one(world, folder):
    prompt = (
        "THEME: two cats. This image consists of 2 panels in a 1x2 grid layout. "
        "[LEFT]: a cat sleeps. [RIGHT]: a cat eats."
    )
    for text, theme in [(prompt, prompt.partition(" [LEFT]")[0]), ("just two cats", "just two cats")]:
        prompts = Dataset.from_list([{"id": f"p {number}", "prompt": text} for number in range(2)])
        with served(make_app(world.instances, world.panels, prompts, folder)) as url:
            task = get_task(url, "anna")
        assert task["theme"] == theme and task["dimensions"] == ["identity", "style", "logic"]


def test_without_its_packages(world, folder, monkeypatch):
    for name in ("starlette.applications", "uvicorn"):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, name, None)
            with pytest.raises(ImportError, match=r"paco_trl\[annotate\]"):
                serve_annotation(*world, folder, port=0)
