# SPDX-License-Identifier: Apache-2.0
"""ViStoryBench: its stories as sets of separate images, and sets as its own evaluator reads them."""

import json

import pytest
from PIL import Image

from paco_trl.data import load_stories
from paco_trl.image_benchmarks.image_sets import find_image_sets, write_panel_files


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


def plant_story(folder, name, shots, images=True):
    characters = {
        key: {"name_en": key, "name_ch": f"ch {key}", "prompt_en": f"{size} and gray", "prompt_ch": f"ch {size}"}
        for key, size in (("Big Hare", "tall"), ("Fox", "small"))
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


def test_another_language(stories):
    panel = load_stories(stories, "ch")[0]["panels"][1]
    assert panel == "ch wide; ch they dark; ch a dark hill; ch Fox is ch small; ch a dark valley"


def test_a_story_without_images_leaves_references_out(stories):
    plant_story(stories / "ViStory", "03", [_shot(1, ["Fox"], "blue")], images=False)
    assert "references" not in load_stories(stories).column_names


def test_what_is_missing_is_named(stories, tmp_path):
    with pytest.raises(ValueError, match=r"01.*name_fr"):
        load_stories(stories, "fr")
    with pytest.raises(FileNotFoundError, match="story"):
        load_stories(stories / "ViStory" / "01" / "image")


def test_panels_are_written_as_the_evaluator_reads_them(stories, tmp_path):
    data = load_stories(stories)
    counts = [len(panels) for panels in data["panels"]]
    data = data.add_column("rows", [1, 1]).add_column("cols", counts)
    for story, count in zip(("01", "02"), counts, strict=True):
        for panel in range(count):
            Image.new("RGB", (8, 8), (panel, 0, 0)).save(tmp_path / f"{story}_{panel}.png")
    written = write_panel_files(find_image_sets(tmp_path, data), data, tmp_path / "out")
    (run,) = (tmp_path / "out").glob("*/base/en/*")
    names = [str(path.relative_to(run)) for path in written]
    assert names == [
        "01/shots/shot_01.png", "01/shots/shot_02.png",
        "02/shots/shot_01.png", "02/shots/shot_02.png", "02/shots/shot_04.png",
    ]  # fmt: skip
    assert Image.open(written[-1]).getpixel((0, 0)) == (2, 0, 0)
