# SPDX-License-Identifier: Apache-2.0
"""GEdit-Bench: edits that are generated or found, a planted judge that answers by the pixels it sees, and the figures."""

import base64
import io
import json
import logging
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

import tiny_models
from chat_server import ChatServer
from judge_server import pictures_of
from paco_trl import load_for_inference
from paco_trl.generation.edits import edit_keys, generate_edits
from paco_trl.image_benchmarks import System, find_edits, gedit, gedit_protocols
from paco_trl.image_benchmarks.gedit import EditScore, gedit_results, score_edits
from paco_trl.image_benchmarks.gedit_protocols import (
    PLACEHOLDER,
    QUALITY,
    SEMANTIC,
    read_answer,
    read_published_answer,
    read_published_prompts,
)
from paco_trl.utils.chat import ChatEndpoint
from paco_trl.utils.files import file_name
from paco_trl.utils.stage_folder import StageFolder
from test_generate_grids import Calls
from testing_utils import noise


# ---- Reading answers ----


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ('{"reasoning": "The hat is red.", "score": [9, 7]}', (9.0, 7.0)),
        ('{"score": [0, 10.0], "reasoning": ""}', (0.0, 10.0)),
        ('```json\n{"score": [2.5, 3]}\n```', (2.5, 3.0)),
        ('{"reasoning": "first line\nsecond line", "score": [1, 2]}', (1.0, 2.0)),
        ('{"reasoning": "of {braces} and }", "score": [1, 2]}', (1.0, 2.0)),
        ('{"score": [9]}', None),
        ('{"score": [true, 7]}', None),
        ('{"score": [11, 7]}', None),
        ('{"score": [9, 7]} or rather {"score": [8, 7]}', None),
        ('{"score": [9, 7], "score": [1, 1]}', None),
        ('{"answer": {"score": [9, 7]}}', None),
        ('{"reasoning": "he says "yes"", "example": {"score": [9, 7]}}', None),  # a part of what is broken
        ("{" * 100_000, None),
    ],
)
def test_answers(text, scores):
    assert read_answer(text) == scores


# ---- Generation ----


def edits_of(rows: list[dict], **features) -> Dataset:
    kinds = {"id": Value("string"), "prompt": Value("string"), "image": ImageFeature(), "language": Value("string")}
    kinds |= {"task_type": Value("string"), "intersection": Value("bool"), **features}
    return Dataset.from_list(rows, features=Features({name: kinds[name] for name in rows[0]}))


EDITS = [
    {"id": "a/1", "prompt": "Add a red hat.", "language": "en", "image": noise(0, (96, 64))},
    {"id": "a/1", "prompt": "加一顶红帽子。", "language": "cn", "image": noise(0, (96, 64))},
    {"id": "b", "prompt": "Make it night.", "language": "en", "image": noise(1, (64, 96))},
]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    folder = tiny_models.build_tiny_flux_kontext(tmp_path_factory.mktemp("models") / "tiny-flux-kontext")
    return load_for_inference(str(folder), dtype=torch.float32, device="cpu")[0]


STEPS = {"num_inference_steps": 1, "guidance_scale": 2.5, "max_area": 128 * 128}


class TestGeneration:
    def test_they_are_those_of_the_pipeline_in_the_shape_of_the_source(self, pipeline, tmp_path):
        edits = generate_edits(pipeline, edits_of(EDITS), StageFolder(tmp_path), seed=3, **STEPS)
        assert [image.size for image in edits["image"]] == [(160, 96), (160, 96), (96, 160)]
        for row, (height, width) in ((0, (96, 160)), (2, (160, 96))):
            call = {name: EDITS[row][name] for name in ("image", "prompt")} | STEPS
            call |= {"height": height, "width": width, "max_area": height * width}
            by_hand = pipeline(**call, generator=torch.Generator().manual_seed(3)).images[0]
            assert by_hand.tobytes() == edits[row]["image"].tobytes()

    @pytest.mark.slow
    def test_qwen_image_edit(self, tmp_path):  # it has no `max_area`, and enlarges its source to a megapixel
        folder = tiny_models.build_tiny_qwen_image_edit(tmp_path / "model")
        qwen = load_for_inference(str(folder), dtype=torch.float32, device="cpu")[0]
        call = {"num_inference_steps": 2, "true_cfg_scale": 1.0}
        row = {**EDITS[0], "height": 64, "width": 128}
        prompts = edits_of([row], height=Value("int64"), width=Value("int64"))
        edits = generate_edits(qwen, prompts, StageFolder(tmp_path / "edits"), **call)
        call |= {"image": row["image"], "prompt": row["prompt"], "height": 64, "width": 128}
        by_hand = qwen(**call, generator=torch.Generator().manual_seed(0)).images[0]
        assert by_hand.size == (128, 64) and np.ptp(by_hand) > 0
        assert by_hand.tobytes() == edits[0]["image"].tobytes()

    def test_what_is_refused_before_anything_is_generated(self, pipeline, tiny_flux, tmp_path):
        def refused(message, prompts, pipeline=pipeline):
            with Calls(pipeline.transformer) as calls, pytest.raises(ValueError, match=message):
                generate_edits(pipeline, prompts, StageFolder(tmp_path), **STEPS)
            assert calls.count == 0 and not list(tmp_path.rglob("*.png"))

        edits = edits_of(EDITS)
        refused(
            "FluxPipeline has no `image`, so",
            edits,
            load_for_inference(str(tiny_flux), dtype=torch.float32, device="cpu")[0],
        )
        refused("unique `id`", edits.remove_columns("id"))
        refused(r"Rows 0 and 1 .* both 'a/1'", edits.remove_columns("language"))
        pair = [{"id": "x", "prompt": "Join.", "images": [EDITS[0]["image"], EDITS[2]["image"]]}]
        refused("'x' has 2 source images, but .* at most 1", edits_of(pair, images=List(ImageFeature())))


# ---- Finding ----

TASKS = ("ps_human", "text_change")


@pytest.fixture(scope="module")
def prompts() -> Dataset:
    """Ids k0 to k5 in both languages. The second half is of another task type, the last one outside the subset."""
    return edits_of(
        [
            {
                "id": f"k{number}",
                "prompt": f"{language} instruction {number}.",
                "image": Image.new("RGB", (60 + 20 * number, 60), (number, 7, 9)),
                "task_type": TASKS[number >= 3],
                "language": language,
                "intersection": number != 5,
            }
            for language in ("en", "cn")
            for number in range(6)
        ]
    )


def color_of(number: int, language: str = "en") -> tuple[int, int, int]:
    """By which the planted judge knows an edit. Scores are tenths of it: 9.0, 8.9, ... and so on."""
    first = 90 - number - 20 * (language == "cn")
    return first, 100 - 15 * number, 40 + 10 * number - 5 * (language == "cn")


def plant(folder: Path, change=lambda color: color, places="{language}/{id}.png", leave_out=()) -> Path:
    for language in ("en", "cn"):
        for number in range(6):
            if f"{language}/k{number}" not in leave_out:
                name = places.format(language=language, id=f"k{number}", task_type=TASKS[number >= 3])
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                color = change(color_of(number, language))
                Image.new("RGB", (60 + 20 * number, 60), color).save(folder / name)
    return folder


class TestFinding:
    @pytest.mark.parametrize("name", ["zh/CN", "../outside", "{}/outside", ".."])
    def test_languages_and_tasks_stay_in_the_directory(self, tmp_path, name):
        name = name.format(tmp_path)
        rows = [{**edit, "language": name, "task_type": name} for edit in EDITS[1:]]
        outside, inside = (tmp_path / "folder" / "images" / place for place in (name, file_name(name)))
        for path in (outside / "b.png", inside / "a%2F1.png"):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (60, 60)).save(path)
        found = find_edits(tmp_path / "folder", edits_of(rows))
        assert [one.files[0] for one in found.sets.values()] == [inside / "a%2F1.png", None]

    def test_missing_and_unknown_are_named(self, prompts, tmp_path, caplog):
        plant(tmp_path, leave_out=("en/k1", "cn/k3"))
        for name in ("k1_0.png", "k10.png", "K2 copy.png"):  # begin alike
            shutil.copy(tmp_path / "en/k0.png", tmp_path / "en" / name)
        shutil.copy(tmp_path / "en/k0.png", tmp_path / "en/k0_SRCIMG.png")  # as the benchmark's own example writes
        (tmp_path / "en" / "notes.txt").write_text("no image")
        with caplog.at_level(logging.WARNING):
            found = find_edits(tmp_path, prompts)
        assert list(found.missing) == ["en/k1", "cn/k3"] and len(found.sets) == 12
        assert "2 of 12 prompts have no edit: en/k1, cn/k3." in caplog.text
        assert "3 images belong to no prompt: en/K2 copy.png, en/k10.png, en/k1_0.png." in caplog.text
        with pytest.raises(ValueError, match="2 of 12 sets lack images: en/k1, cn/k3"):
            found.check_complete()

    def test_an_edit_of_another_task_type_is_no_edit(self, prompts, tmp_path, caplog):
        plant(tmp_path, places="fullset/{task_type}/{language}/{id}.png")
        os.replace(tmp_path / "fullset/ps_human/en/k0.png", tmp_path / "fullset/text_change/en/k0.png")
        found = find_edits(tmp_path, prompts)
        assert list(found.missing) == ["en/k0"] and "no prompt: fullset/text_change/en/k0.png" in caplog.text


# ---- The planted judge ----


def say(body: dict) -> str:
    """Numbers that are a function of the pixels: tenths of the colors of the edit, less what the source differs by."""
    images, text = pictures_of(body)
    red, green, blue = images[-1].getpixel((5, 5))
    if len(images) == 2:
        number, is_source = images[0].getpixel((5, 5))[0], images[0].getpixel((5, 5))[1:] == (7, 9)
        fits = is_source and f" instruction {number}." in text and images[0].size == images[1].size
        return json.dumps({"reasoning": "Seen.", "score": [red / 10, green / 10] if fits else [0, 0]})
    return json.dumps({"reasoning": "Seen.", "score": [blue / 10, 10]})


def by_hand(number: int, language: str = "en", change=lambda color: color) -> EditScore:
    red, green, blue = (value / 10 for value in change(color_of(number, language)))
    return EditScore(min(red, green), min(blue, 10.0), math.sqrt(min(red, green) * min(blue, 10.0)))


SENT_AREA = gedit_protocols._AREA


@pytest.fixture(scope="module", autouse=True)
def small_images():
    """Images are flat: what is sent of them may be small, but where its size is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gedit_protocols, "_AREA", 64 * 64)
        yield


@pytest.fixture
def server():
    with ChatServer(say) as server:
        yield server


def asked(body: dict) -> tuple[str, float]:
    """Kind of a question, and the red of its edit."""
    images, _ = pictures_of(body)
    return {2: "semantic", 1: "quality"}[len(images)], images[-1].getpixel((5, 5))[0]


class TestScoring:
    def test_each_edit_has_the_scores_of_its_pixels(self, server, prompts, tmp_path):
        found = find_edits(plant(tmp_path), prompts)
        scores = score_edits(server.endpoint(), prompts, found, tmp_path)
        assert list(scores) == list(found.sets)
        for key, score in scores.items():
            language, _, name = key.partition("/")
            assert score == pytest.approx(by_hand(int(name[1:]), language)), key
        assert len(set(scores.values())) == 12
        assert len(server.requests) == 24 and len(set(map(asked, server.requests))) == 24
        assert {body["temperature"] for body in server.requests} == {0.0}

    def test_what_the_judge_is_sent(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr(gedit_protocols, "_AREA", SENT_AREA)
        source, edited = Image.new("RGB", (900, 300), (0, 7, 9)), Image.new("RGB", (50, 100), (90, 80, 70))
        prompts = edits_of([{"id": "k", "prompt": "en instruction 0.", "image": source}])
        edited.save(tmp_path / "k.png")
        score_edits(server.endpoint(), prompts, find_edits(tmp_path, prompts), tmp_path)
        semantic, quality = sorted(server.requests, key=lambda body: -len(body["messages"][0]["content"]))
        (first, second), text = pictures_of(semantic)
        assert first.getpixel((0, 0)) == (0, 7, 9) and second.getpixel((0, 0)) == (90, 80, 70)
        assert first.size == (886, 295) and second.size == (362, 724)  # of the area of 512 x 512
        assert text == SEMANTIC.replace(PLACEHOLDER, "en instruction 0.")
        (only,), text = pictures_of(quality)
        assert only.tobytes() == second.tobytes() and text == QUALITY

    def test_an_edit_that_was_changed_after_scoring_is_scored_again(self, server, prompts, tmp_path):
        found = find_edits(plant(tmp_path), prompts)
        before = score_edits(server.endpoint(), prompts, found, tmp_path)
        gedit_results(prompts, [System("base", "model", found, tmp_path)])
        Image.new("RGB", (100, 60), (1, 2, 3)).save(found.sets["cn/k2"].files[0])
        # So is one whose instruction is another one
        texts = [*prompts["prompt"]]
        texts[1] = "Another instruction."
        other, changed = prompts.remove_columns("prompt").add_column("prompt", texts), find_edits(tmp_path, prompts)
        for those, name in ((prompts, "semantic/cn/k2, quality/cn/k2"), (other, "semantic/en/k1")):
            with pytest.raises(ValueError, match=name):
                gedit_results(those, [System("base", "model", changed, tmp_path)])
        num_requests = len(server.requests)
        after = score_edits(server.endpoint(), prompts, changed, tmp_path)
        assert len(server.requests) - num_requests == 2 and after["cn/k2"] != before["cn/k2"]
        assert after == {**before, "cn/k2": after["cn/k2"]}
        score_edits(server.endpoint(), other, changed, tmp_path)
        assert len(server.requests) - num_requests == 4

    def test_each_run_asks_with_seeds_of_its_own(self, server, prompts, tmp_path, caplog):
        found = find_edits(plant(tmp_path), prompts)
        silent = "quality", color_of(3)[0]
        server.say = lambda body: "No." if asked(body) == silent else say(body)
        with caplog.at_level(logging.WARNING):
            for max_attempts in (2, 3, 1):
                assert score_edits(server.endpoint(), prompts, found, tmp_path, max_attempts)["en/k3"] is None
        assert "1 of 12 edits in 2 attempt(s)" in caplog.text
        assert "Rerun to query it about these again." in caplog.text
        bodies = [body for body in server.requests if asked(body) == silent]
        assert [body["temperature"] for body in bodies] == [0.0] + 5 * [0.7]
        assert len({body["seed"] for body in bodies}) == 6 and len(server.requests) == 23 + 6
        # So it is when another process has asked since, whose file is another one
        (part,) = (tmp_path / "scores").glob("*.0.jsonl")
        lines = part.read_text().splitlines(keepends=True)
        assert [json.loads(line)["attempts"] for line in lines if '"quality/en/k3"' in line] == [2, 5, 6]
        part.with_name(part.name.replace(".0.", ".1.")).write_text("".join(lines[:1] + lines[-1:]))
        part.write_text("".join(lines[:-1]))
        server.say = say
        assert None not in score_edits(server.endpoint(), prompts, found, tmp_path).values()
        assert len(server.requests) == 23 + 7
        assert server.requests[-1]["seed"] not in {body["seed"] for body in bodies}

    def test_only_nonsense_ends_with_an_example(self, server, prompts, tmp_path):
        found = find_edits(plant(tmp_path), prompts)
        server.say = lambda body: "I am a teapot."
        with pytest.raises(ValueError, match="None of 24 answers of writer at http.* is 'I am a teapot.'"):
            score_edits(server.endpoint(), prompts, found, tmp_path)
        assert len(server.requests) <= 24 + 8
        server.say = say  # nothing of it stays
        assert None not in score_edits(server.endpoint(), prompts, found, tmp_path).values()


# ---- The figures ----


def better(color):
    """An edit that is carried out further, with less damage."""
    red, green, blue = color
    return red + 10, min(green + 10, 100), blue


@pytest.fixture(scope="module")
def systems(prompts, tmp_path_factory):
    """Base, and a tuned one without en/k1; about cn/k4 of the base the judge says nothing."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("base", "tuned")}
    found = {
        "base": find_edits(plant(folders["base"]), prompts),
        "tuned": find_edits(plant(folders["tuned"], better, leave_out=("en/k1",)), prompts),
    }
    silent = color_of(4, "cn")

    def mostly(body):
        images, _ = pictures_of(body)
        return "Hm." if images[-1].getpixel((5, 5)) == silent else say(body)

    with ChatServer(mostly) as server:
        for name, edits in found.items():
            score_edits(server.endpoint(), prompts, edits, folders[name], max_attempts=1)
    settings = {"model": "tiny", "num_inference_steps": 8, "seed": 0}
    return [System(name, f"the {name} one", found[name], folders[name], settings) for name in found]


def expected(metric, language, numbers=range(6), change=lambda color: color, zero=(), left_out=()):
    """The mean of task types' means, by hand."""
    means = []
    for task in (range(3), range(3, 6)):
        values = [
            0.0 if number in zero else getattr(by_hand(number, language, change), metric)
            for number in task
            if number in numbers and number not in left_out
        ]
        means += [sum(values) / len(values)] if values else []
    return pytest.approx(sum(means) / len(means))


@pytest.fixture(scope="module")
def results(prompts, systems, tmp_path_factory):
    return gedit_results(prompts, systems, missing="zero", source_folder=tmp_path_factory.mktemp("sources"))


class TestResults:
    def test_tables_by_hand(self, results):
        titles = ["English: all instructions", "English: intersection subset"]
        titles += [title.replace("English", "Chinese") for title in titles]
        assert [table["title"] for table in results["tables"]] == titles
        rows = zip(*(table["rows"] for table in results["tables"]), strict=True)
        for metric, row in zip(gedit.METRICS, rows, strict=True):
            complete, subset, chinese, chinese_subset = row
            assert [line["metric"] for line in row] == [metric] * 4
            base, tuned = complete["cells"]
            assert base["mean"] == expected(metric, "en") and base["count"] == 6
            assert tuned["mean"] == expected(metric, "en", change=better, zero=[1])
            assert subset["cells"][0]["mean"] == expected(metric, "en", range(5)) and subset["cells"][0]["count"] == 5
            base, tuned = chinese["cells"]
            assert base["mean"] == expected(metric, "cn", left_out=[4]) and base["count"] == 5
            assert tuned["mean"] == expected(metric, "cn", change=better) and tuned["count"] == 6
            assert chinese_subset["cells"][0]["count"] == 4
            low, high = base["interval"]
            assert low < base["mean"] < high
        assert [line["kind"] for line in results["tables"][0]["rows"]] == ["dimension", "dimension", "average"]
        json.dumps(results, allow_nan=False)

    def test_differences_are_paired(self, results):
        chinese = results["tables"][2]["rows"]
        for line in chinese:
            metric, change = line["metric"], line["difference"]
            by_type = [
                [getattr(by_hand(n, "cn", better), metric) - getattr(by_hand(n, "cn"), metric) for n in of_type]
                for of_type in ((0, 1, 2), (3, 5))  # without 4, about which nothing is known of the base
            ]
            assert change["count"] == 5
            assert change["mean"] == pytest.approx(sum(sum(part) / len(part) for part in by_type) / 2)
        assert chinese[0]["difference"]["mean"] > 0.1 and chinese[1]["difference"]["mean"] == 0
        assert results["tables"][0]["rows"][0]["difference"]["count"] == 6  # the missing one counts 0

    def test_breakdown_by_task_type(self, results):
        tables = {one["title"]: one["rows"] for one in results["breakdowns"]}
        assert len(tables) == 2 * 3
        assert [row["label"] for row in tables["By task type, English: overall (judge writer)"]] == list(TASKS)
        first, second = tables["By task type, Chinese: overall (judge writer)"]
        assert first["cells"][0]["mean"] == expected("overall", "cn", range(3))
        assert second["cells"][0]["count"] == second["difference"]["count"] == 2

    def test_missing_edits(self, prompts, systems, results):
        with pytest.raises(ValueError, match="1 of 12 sets lack images: en/k1"):
            gedit_results(prompts, systems)
        alone = gedit_results(prompts, systems[:1])  # nothing is missing
        assert alone["tables"][0]["rows"][0]["difference"] is None
        assert not any("count 0" in alert for alert in alone["alerts"])
        left_out, zero = results["alerts"]
        assert "1 sets of 'the base one' have an unanswered question" in left_out and "left out of its" in left_out
        assert "of 'the tuned one' are missing and count 0" in zero and "cn/k4" in left_out and "en/k1" in zero
        base, tuned = (system["counts"] for system in results["systems"])
        assert base["sets without an answer (writer)"] == tuned["missing panels"] == 1

    def test_sets_show_source_and_edits(self, prompts, systems, results):
        sets = {one["key"]: one for one in results["sets"]}
        assert list(sets) == edit_keys(prompts)
        one = sets["cn/k5"]
        assert one["category"] == "text_change" and one["prompt"] == "cn instruction 5." and one["panels"] == [1, 1]
        for number, path in enumerate([one["source"], *(of_system[0] for of_system in one["pictures"])]):
            with Image.open(path) as image:
                colors = [(5, 7, 9), color_of(5, "cn"), better(color_of(5, "cn"))]
                assert image.getpixel((0, 0)) == colors[number]
        assert one["scores"][1] == pytest.approx(by_hand(5, "cn", better)._asdict())
        assert sets["en/k1"]["pictures"][1] == [None] and sets["en/k1"]["scores"][1] == dict.fromkeys(gedit.METRICS)
        assert sets["cn/k4"]["scores"][0] == dict.fromkeys(gedit.METRICS)
        assert sets["en/k5"]["source"] == one["source"]  # the same image
        assert all(one["source"] is None for one in gedit_results(prompts, systems[:1])["sets"])

    def test_systems_that_cannot_be_compared(self, prompts, systems, server, tmp_path):
        first, second = systems
        with pytest.raises(ValueError, match="task_type"):
            gedit_results(prompts.remove_columns("task_type"), [first])
        unscored = System("tuned", "unscored", find_edits(plant(tmp_path / "a"), prompts), tmp_path / "a")
        with pytest.raises(ValueError, match="No judge has scored the edits of 'unscored'"):
            gedit_results(prompts, [unscored])
        server.models = ["writer", "other"]
        other = ChatEndpoint(server.url, "other", max_retries=0)
        score_edits(other, prompts, unscored.images, tmp_path / "a")
        with pytest.raises(ValueError, match="'GEdit-Bench default other' of the two systems differ"):
            gedit_results(prompts, [first, unscored])
        score_edits(server.endpoint(), prompts, unscored.images, tmp_path / "a")
        two_judges = gedit_results(prompts, [unscored])
        assert sorted(two_judges["scorers"]["consistency"]) == ["other", "writer"]
        assert len(two_judges["tables"]) == 8 and len({table["title"] for table in two_judges["tables"]}) == 8


# ---- The published protocol ----

# Of the layout of the benchmark's file, with texts of this test
PROMPTS_FILE = '''# generated
raise RuntimeError("this file is never run")

_context_no_delimit = """You are a {judge}.
Answer in JSON."""

_context = """Another text."""

_prompts_0shot_two_image_edit_rule = """Two images: before, after.
"""

_prompts_0shot_tie_rule_SC = """
Rate the edit. Editing instruction: <instruction>
"""

_prompts_0shot_rule_PQ = """Rate the image."""
'''
PUBLISHED_SEMANTIC = (
    "You are a {judge}.\nAnswer in JSON.\nTwo images: before, after.\n\n\nRate the edit. Editing instruction: "
)
PUBLISHED_QUALITY = "You are a {judge}.\nAnswer in JSON.\nRate the image."


@pytest.fixture(scope="module")
def gedit_repo(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    (folder / "GEdit-Bench" / "viescore").mkdir(parents=True)
    (folder / "GEdit-Bench" / "viescore" / "vie_prompts.py").write_text(PROMPTS_FILE)
    return folder


def jpeg_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class TestPublishedProtocol:
    def test_prompts_are_read_and_not_run(self, gedit_repo, tmp_path):
        prompts = read_published_prompts(gedit_repo)
        assert prompts == {"semantic": f"{PUBLISHED_SEMANTIC}<instruction>\n", "quality": PUBLISHED_QUALITY}
        with pytest.raises(FileNotFoundError, match="viescore/vie_prompts.py"):
            read_published_prompts(tmp_path)

    def test_what_the_judge_is_sent(self, server, gedit_repo, tmp_path):
        source, edited = noise(0, (90, 30)), Image.linear_gradient("L").resize((50, 100)).convert("RGBA")
        edited.putalpha(100)
        edited.save(tmp_path / "k.png")
        prompts = edits_of([{"id": "k", "prompt": "Do {it}.", "image": source}])
        found = find_edits(tmp_path, prompts)
        score = score_edits(server.endpoint(), prompts, found, tmp_path, protocol="published", gedit_repo=gedit_repo)
        # In the size of the source, and what is transparent as it is stored
        shown = jpeg_url(edited.convert("RGB").resize((90, 30)))
        semantic, quality = sorted(server.requests, key=lambda body: -len(body["messages"][0]["content"]))
        for body, text, urls in (
            (semantic, f"{PUBLISHED_SEMANTIC}Do {{it}}.\n", [jpeg_url(source), shown]),
            (quality, PUBLISHED_QUALITY, [shown]),
        ):
            pictures = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            content = [{"type": "text", "text": text}, *pictures]
            messages = [{"role": "user", "content": content}]
            assert body == {"model": "writer", "messages": messages, "max_tokens": 1400}
        assert len(score) == 1
        score_edits(server.endpoint(), prompts, found, tmp_path)  # ours: the images first, PNG, another size
        parts = server.requests[-1]["messages"][0]["content"]
        assert parts[-1]["type"] == "text" and parts[0]["image_url"]["url"].startswith("data:image/png")

    @pytest.mark.parametrize(
        ("text", "first", "again"),
        [
            ('{"score" : [9, 7], "reasoning" : "it"}', [9, 7], [9, 7]),
            ('```json\n{\n"score": [2.5, 3]\n}\n```', [2.5, 3], [2.5, 3]),
            ('||V^=^V||\n{"score": [4, 5, 6]}\n||V^=^V||', [4, 5, 6], [4, 5, 6]),
            ('{"reasoning": "two\nlines", "score": 8}', [8], [8]),
            ("{score: 8, reasoning: no quotes}", [8], [8]),
            ("I say [6, 0].", [6, 0], None),
            ("7", [7], None),
            ("[6, 0, 1]", None, None),
            ("I would give it 9 and 7.", None, None),
            ('{"score": [9, 7], "reasoning": "he says "yes""}', None, None),
            ('{"score": [11, 7]}', None, None),
            ('{"score": []}', None, None),
            ('{"scores": [9, 7]}', None, None),
        ],
    )
    def test_answers(self, text, first, again):
        assert read_published_answer(text, False) == first and read_published_answer(text, True) == again

    def test_from_asking_to_the_figures(self, server, prompts, gedit_repo, tmp_path, caplog):
        found = find_edits(plant(tmp_path, leave_out=("en/k1",)), prompts)
        published = {"protocol": "published", "gedit_repo": gedit_repo}

        def odd(body):
            # JPEG changes a color a little: an edit is known by its width
            images, text = pictures_of(body)
            number, kind = (images[-1].width - 60) // 20, len(images)
            if number == 4 and "cn" in text:
                return "I cannot say."
            return json.dumps({"score": [number + kind, 9], "reasoning": "Seen."})

        server.say = odd
        with caplog.at_level(logging.WARNING):
            scores = score_edits(server.endpoint(), prompts, found, tmp_path, **published)
        assert [key for key, score in scores.items() if score is None] == ["cn/k4"]
        assert "about 1 of 11 edits in 2 attempt(s)" in caplog.text
        assert len(server.requests) == 22 + 1 and not any({"seed", "temperature"} & set(b) for b in server.requests)
        assert scores["en/k3"] == EditScore(5.0, 4.0, math.sqrt(20))
        system = System("base", "model", found, tmp_path)
        results = gedit_results(prompts, [system], missing="zero", protocol="published")
        assert results["protocol"] == "published"
        values = {number: math.sqrt((number + 2) * (number + 1)) for number in range(6)}
        english, _, chinese, _ = (table["rows"][2]["cells"][0] for table in results["tables"])
        # The mean of the task types' means, over what is there
        assert english["mean"] == pytest.approx(
            ((values[0] + values[2]) / 2 + (values[3] + values[4] + values[5]) / 3) / 2
        )
        assert chinese["mean"] == pytest.approx(
            (sum(map(values.get, (0, 1, 2))) / 3 + (values[3] + values[5]) / 2) / 2
        )
        missing, unanswered = sorted(results["alerts"], key=lambda text: "unanswered" in text)
        assert "missing and left out, as by the benchmark's own script: en/k1" in missing
        assert "cn/k4" in unanswered and "script gives a random score" in unanswered
        assert "under the published protocol, with the benchmark's own prompts" in results["notes"][0]
        # Scores of the one protocol are none of the other
        with pytest.raises(ValueError, match="with the protocol 'default'"):
            gedit_results(prompts, [system], missing="zero")
