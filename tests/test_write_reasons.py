# SPDX-License-Identifier: Apache-2.0
"""Reasons from a served model that sees the images: what it is sent, what is refused, and a stage that goes on."""

import importlib
import random
from collections import Counter

import pytest
from datasets import Dataset, Features, List, Value
from PIL import Image as Pillow

from chat_server import ChatServer
from judge_server import pictures_of
from paco_trl.data import check_pair_columns, criterion_question, decision_of, theme_question, validate_pairs
from paco_trl.data.pairs import make_pair, pair_features
from paco_trl.dataset_building.prompt_writing import DIMENSIONS
from paco_trl.dataset_building.reasons import check_reasons, write_reasons
from paco_trl.utils.stage_folder import StageFolder


# The package has the function under this name
module = importlib.import_module("paco_trl.dataset_building.reasons")


COLOURS = ["red", "green", "blue", "yellow", "purple", "orange"]
LONG = (
    "Both show the same round shape in front of the same plain background, and nothing in them contradicts the other."
)


# ---- What is refused ----


@pytest.mark.parametrize(
    ("answer", "decision", "problem"),
    [
        (f"Yes. {LONG}", "Yes", None),
        (f"\n No.\n\n{LONG}\n", "No", None),
        ("Yes. The label on the bottle is red in both images, and he was given a hat in one of them, as shown there.", "Yes", None),
        ("No. Nothing is alike: one shows an apple, and the other one a pear which is twice as large and blue.", "No", None),
        (f"No. {LONG}", "Yes", module.NO_LABEL),
        (f"yes. {LONG}", "Yes", module.NO_LABEL),
        (f"Yes. No. {LONG}", "Yes", module.TWO_LABELS),
        ("Yes. The same colour.", "Yes", module.LENGTH),
        (f"Yes. {LONG * 20}", "Yes", module.LENGTH),
        # Parts of words are no words: "co-lour-ful", "infor-m", "b-air"
        ("Yes. These two lightly informative scenes unreadably interline, and nobody unfaced would ever misshape or reformat "
         "them at all.", "Yes", module.NOTHING_VISIBLE),
        (f"Yes. {LONG} This agrees with the label.", "Yes", module.GIVEN_LABEL),
        (f"Yes. {LONG} I was told so.", "Yes", module.GIVEN_LABEL),
        (f"Yes. {LONG}<|im_end|>", "Yes", module.CONTROL_TOKEN),
    ],
)  # fmt: skip
def test_checked_reasons(answer, decision, problem):
    assert check_reasons(answer, decision) == problem


def test_the_length_is_a_setting():
    reasons = "Yes. The same red hat and the same coat."  # 8 words
    found = [check_reasons(reasons, "Yes", *words) for words in ((8, 8), (9, 20), (1, 7))]
    assert found == [None, module.LENGTH, module.LENGTH]


# ---- A planted world ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of a colour each."""
    folder = tmp_path_factory.mktemp("images")
    for colour in COLOURS:
        Pillow.new("RGB", (56, 56), colour).save(folder / f"{colour}.png")
    return folder


@pytest.fixture
def pairs(folder):
    return make_pairs(folder)


def make_pairs(folder, embedded=False, count=30):
    """Two of a colour are consistent. Every image is in many pairs."""
    rows = []
    for number in range(count):
        rng = random.Random(number)
        first = rng.choice(COLOURS)
        second = first if number % 2 else rng.choice([colour for colour in COLOURS if colour != first])
        paths = [folder / f"{first}.png", folder / f"{second}.png"]
        images = [{"path": None, "bytes": path.read_bytes()} if embedded else str(path) for path in paths]
        row = make_pair(*images, theme_question(f"Colour {number}."), first == second)
        dimensions = ["style"] if number < 15 else ["identity", "logic"]
        rows.append(row | {"id": f"p/{number}", "group": "p", "dimensions": dimensions, "votes": number})
    others = {"id": Value("string"), "group": Value("string"), "dimensions": List(Value("string"))}
    return Dataset.from_list(rows, features=Features({**pair_features(), **others, "votes": Value("int64")}))


def colour_of(image):
    return next(
        colour for colour in COLOURS if image.getpixel((0, 0)) == Pillow.new("RGB", (1, 1), colour).getpixel((0, 0))
    )


def asked(body):
    """Colours, number of the pair and label that a request is about."""
    images, text = pictures_of(body)
    number = int(text.partition('theme: "Colour ')[2].partition(".")[0])
    label = text.partition("decided: ")[2].partition(" ")[0]
    return [colour_of(image) for image in images], number, label


def say(body):
    """Says what it sees."""
    (first, second), number, label = asked(body)
    same = "the same colour" if first == second else "another colour"
    return (
        f"{label}. The first image of the set number {number} is {first}, and the second one, which is {second}, has "
        f"{same} from its left edge to its right one."
    )


@pytest.fixture
def server():
    with ChatServer(say) as server:
        yield server


def plain(dataset):
    return dataset.with_format("arrow")[:].to_pylist()


def text_of(row):
    return row["completion"][0]["content"]


def test_reasons_of_what_is_seen(server, pairs, tmp_path):
    dataset = write_reasons(pairs, server.endpoint(), StageFolder(tmp_path))
    assert dataset.column_names == pairs.column_names and dataset.features == pairs.features
    check_pair_columns(dataset)
    validate_pairs(dataset)
    assert len(dataset) == len(server.requests) == len({body["seed"] for body in server.requests}) == 30
    for body in server.requests:
        _, number, label = asked(body)
        text = pictures_of(body)[1]
        assert label == decision_of(pairs[number]["completion"]) and pairs[number]["prompt"][0]["content"] in text
        for name, meaning in DIMENSIONS.items():
            assert (meaning in text) == (name in pairs[number]["dimensions"])
        for part in body["messages"][0]["content"][:2]:  # lossless
            assert part["image_url"]["url"].startswith("data:image/png;base64,")
    labels = Counter()
    for row, before in zip(dataset, pairs, strict=True):
        label = decision_of(before["completion"])
        labels[label] += 1
        colours = [colour_of(image) for image in row["images"]]
        assert (colours[0] == colours[1]) == (label == "Yes")
        text = text_of(row)
        assert text.startswith(f"{label}. The first image of the set number {row['votes']} is {colours[0]}, ")
        assert f"which is {colours[1]}, " in text  # the images of this pair, in their order
        assert check_reasons(text, label) is None
        for name in ("id", "group", "dimensions", "votes", "prompt"):
            assert row[name] == before[name]
    assert min(labels.values()) >= 10
    report = StageFolder(tmp_path).report
    assert report == {"pairs": 30, "with reasons": 30, "requests": 30, "rejected": {}, "left out": {}}
    assert plain(write_reasons(pairs, server.endpoint(), StageFolder(tmp_path))) == plain(dataset)  # done is done
    assert len(server.requests) == 30


def test_other_pairs(server, folder, tmp_path):
    """Without dimensions, in another order, with reasons that are there already, with embedded images."""
    embedded = (
        make_pairs(folder, embedded=True).remove_columns("dimensions").select([7, 3, 20, 4]).with_format("numpy")
    )
    dataset = write_reasons(embedded, server.endpoint(), StageFolder(tmp_path / "a"))
    assert dataset["id"][:] == ["p/7", "p/3", "p/20", "p/4"] and len(server.requests) == 4
    assert all(meaning in pictures_of(body)[1] for body in server.requests for meaning in DIMENSIONS.values())
    for row in dataset:
        assert f"number {row['votes']} is" in text_of(row) and row["images"][0].size == (56, 56)
    again = write_reasons(dataset, server.endpoint(), StageFolder(tmp_path / "b"))
    assert [text_of(row).count(f"number {row['votes']} is") for row in again] == [1] * 4


def test_images_stay_paths_and_are_encoded_once(server, pairs, tmp_path, monkeypatch):
    opened, open_image = [], Pillow.open
    monkeypatch.setattr(Pillow, "open", lambda file, *args: (opened.append(file), open_image(file, *args))[1])
    server.say = lambda body: "No idea." if random.Random(body["seed"]).random() < 0.7 else say(body)
    dataset = write_reasons(pairs, server.endpoint(), StageFolder(tmp_path), max_attempts=50)
    own = [file for file in opened if isinstance(file, str)]  # those of the test's server are not files
    assert len(server.requests) > 60 and sorted(own) == sorted({path for row in paths_of(pairs) for path in row})
    assert paths_of(dataset) == paths_of(pairs)
    assert all(image["bytes"] is None for row in plain(dataset) for image in row["images"])


def paths_of(dataset):
    return [[image["path"] for image in row["images"]] for row in plain(dataset)]


def test_pairs_that_cannot_be_used(server, pairs, tmp_path):
    endpoint = server.endpoint()

    def refused(bad, said, **kwargs):
        with pytest.raises(ValueError, match=said):
            write_reasons(bad, endpoint, StageFolder(tmp_path / said.replace(" ", "")), **kwargs)

    refused(pairs.select([0, 1, 0]), "'p/0' .* twice")
    refused(pairs.map(lambda row: {"dimensions": ["taste"]}), "taste")
    refused(pairs, "30 to 20", min_words=30, max_words=20)
    assert not server.requests
    gone = [*plain(pairs.select(range(3)))]
    gone[1]["images"][1]["path"] += ".gone"
    refused(Dataset.from_list(gone, features=pairs.features), "cannot be read.*gone")
    criterion = make_pair(*paths_of(pairs)[0], criterion_question("The light is the same."), "Yes") | {"id": "c"}
    server.say = lambda body: f"Yes. {LONG}"
    one = Dataset.from_list([criterion], features=Features({**pair_features(), "id": Value("string")}))
    assert text_of(write_reasons(one, endpoint, StageFolder(tmp_path / "c"))[0]) == f"Yes. {LONG}"
