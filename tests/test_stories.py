# SPDX-License-Identifier: Apache-2.0
"""ViStoryBench: its stories as sets of separate images, and sets as its own evaluator reads them."""

import json
import os

import pytest
from PIL import Image

from paco_trl.commands import evaluate_arguments
from paco_trl.data import load_stories, split_grid


def _shot(index, characters, word):
    texts = {
        "Setting Description": f"a {word} valley",
        "Plot Correspondence": f"they {word}",
        "Static Shot Description": f"a {word} hill",
        "Shot Perspective Design": "wide",
    }
    both = {name: {"en": text, "ch": f"ch {text}"} for name, text in texts.items()}
    named = {"en": characters, "ch": [f"ch {name}" for name in characters]}
    return {"index": index, "Characters Appearing": named, **both}


def plant_story(folder, name, shots, images=True, keys=("Big Hare", "Fox")):
    characters = {
        key: {"name_en": key, "name_ch": f"ch {key}", "prompt_en": f"{size} and gray", "prompt_ch": f"ch {size}"}
        for key, size in zip(keys, ("tall", "small"), strict=True)
    }
    story = {"Story_type": {"en": "Picture book", "ch": "ch book"}, "Characters": characters, "Shots": shots}
    (folder / name).mkdir(parents=True)
    # With a byte order mark, as published
    (folder / name / "story.json").write_text(json.dumps(story), encoding="utf-8-sig")
    for number, key in enumerate(characters if images else ()):
        place = folder / name / "image" / key
        place.mkdir(parents=True)
        for image in range(2):
            Image.new("RGB", (8, 8), (50 * number, 100 * image, 0)).save(place / f"0{image}.jpg")


@pytest.fixture
def stories(tmp_path):
    plant_story(tmp_path / "ViStory", "01", [_shot(1, ["Big Hare", "Fox "], "green"), _shot(2, ["Fox"], "dark")])
    plant_story(tmp_path / "ViStory", "02", [_shot(number, ["Big Hare"], "red") for number in (1, 2, 4)])
    return tmp_path


@pytest.mark.parametrize("folder", ["", "ViStory"])
def test_shots_characters_and_references(stories, folder):
    first, second = load_stories(stories / folder)
    assert (first["id"], first["layout"], len(first["panels"]), second["shots"]) == ("01", "separate", 2, [1, 2, 4])
    assert first["theme"] == "Picture book; Big Hare is tall and gray; Fox is small and gray"
    assert first["panels"] == [
        "wide; they green; a green hill; Big Hare is tall and gray; Fox is small and gray; a green valley",
        "wide; they dark; a dark hill; Fox is small and gray; a dark valley",
    ]
    # The first image of each character
    assert [image.getpixel((0, 0))[1] < 50 for image in first["references"]] == [True, True]
    panel = load_stories(stories, "ch")[0]["panels"][1]
    assert panel == "ch wide; ch they dark; ch a dark hill; ch Fox is ch small; ch a dark valley"
    plant_story(stories / "ViStory", "03", [_shot(1, ["Fox"], "blue")], images=False)
    assert "references" not in load_stories(stories).column_names


def test_what_is_missing_is_named(stories, tmp_path):
    with pytest.raises(ValueError, match=r"01.*name_fr"):
        load_stories(stories, "fr")
    with pytest.raises(FileNotFoundError, match="story"):
        load_stories(stories / "ViStory" / "01" / "image")


@pytest.mark.parametrize("way", ["absolute", "parents", "link of a character", "link of an image"])
def test_no_image_outside_of_the_dataset(stories, tmp_path_factory, way):
    outside = tmp_path_factory.mktemp("outside") / "Fox"
    outside.mkdir()
    Image.new("RGB", (8, 8), "red").save(outside / "00.jpg")
    story = stories / "ViStory" / "03"
    key = {"absolute": str(outside), "parents": os.path.relpath(outside, story / "image")}.get(way, "Bear")
    plant_story(story.parent, "03", [_shot(1, [key], "blue")], images=False, keys=("Fox", key))
    (story / "image").mkdir()
    if way == "link of a character":
        (story / "image" / key).symlink_to(outside)
    elif way == "link of an image":
        (story / "image" / key).mkdir()
        (story / "image" / key / "00.jpg").symlink_to(outside / "00.jpg")
    with pytest.raises(ValueError, match=r"03.*leaves"):
        load_stories(stories)


def test_stories_are_generated_and_written_as_the_evaluator_reads_them(stories, tiny_flux, tmp_path):
    words = ["generate", "--benchmark", "stories", "--dataset_name", str(stories), "--panel_files", "True"]
    words += ["--model_name_or_path", str(tiny_flux), "--dtype", "float32", "--num_inference_steps", "1"]
    words += ["--height", "32", "--width", "48", "--output_dir", str(tmp_path / "out")]
    evaluate_arguments.main(words)
    (run,) = (tmp_path / "out" / "panels").glob("*/base/en/*")
    written = sorted(run.rglob("*.png"))
    assert [str(path.relative_to(run)) for path in written] == [
        "01/shots/shot_01.png", "01/shots/shot_02.png",
        "02/shots/shot_01.png", "02/shots/shot_02.png", "02/shots/shot_04.png",
    ]  # fmt: skip
    grid = Image.open(tmp_path / "out/images/02/0.png")
    panels = [Image.open(path) for path in written[2:]]
    assert grid.size == (144, 32) and [image.tobytes() for image in split_grid(grid, 1, 3)] == [
        image.tobytes() for image in panels
    ]
    Image.new("RGB", (8, 8), "white").save(stories / "ViStory/01/image/Fox/00.jpg")
    with pytest.raises(ValueError, match="other settings: prompts"):
        evaluate_arguments.main(words)


def test_other_steps_refuse_stories(stories):
    with pytest.raises(ValueError, match="evaluator"):
        evaluate_arguments.main(["score", "--benchmark", "stories", "--dataset_name", str(stories)])
