# SPDX-License-Identifier: Apache-2.0
"""Tests of the judge's questions, of the pair format and of the loader of PaCo-Dataset."""

import json
import logging
import multiprocessing
import os
import random
import shutil
import tarfile
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, LargeList, List
from datasets import Image as ImageFeature
from PIL import Image

from paco_trl.data import (
    archives,
    check_pair_columns,
    criterion_question,
    decision_of,
    edit_consistency_question,
    edit_following_question,
    is_label_only,
    load_paco_dataset,
    make_pair,
    plain_question,
    shows_question,
    swap_pairs,
    t2is_bench_question,
    theme_question,
    validate_pairs,
)
from paco_trl.data.pairs import common_question
from testing_utils import noise, write_image


QUESTION = "Are both foxes red?"
QUESTIONS_WITH_A_TEXT = [
    theme_question, criterion_question, edit_consistency_question, edit_following_question, t2is_bench_question,
    shows_question,
]  # fmt: skip
IMAGES = List(ImageFeature())


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test sees the zip files of another one, or of the user, or which images were decoded."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache" / "datasets"))
    monkeypatch.setattr("datasets.config.EXTRACTED_DATASETS_PATH", str(tmp_path / "cache" / "extracted"))
    return tmp_path / "cache"


def cut_in_half(path):
    """The header stays: the image opens, and only decoding it fails."""
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: len(data) // 2])
    assert Image.open(path).size == (56, 56)
    return str(path)


def pairs_of(rows):
    return Dataset.from_list(rows).cast_column("images", IMAGES)


def pair_rows(folder, count):
    """Pairs of images by path; the pixels, the question and the answer say which pair it is."""
    rows = []
    for row in range(count):
        images = [write_image(folder / f"{row}{place}.png", 2 * row + place) for place in range(2)]
        rows.append(make_pair(*images, f"Is this pair {row}?", row % 2 == 0))
    return rows


def numbers_of(dataset):
    """The numbers that the questions of pairs name."""
    return [int(prompt[0]["content"].removeprefix("Is this pair ").removesuffix("?")) for prompt in dataset["prompt"]]


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


class TestQuestions:
    # Written out once more, in one piece each: an independent statement of the words of the published code
    def test_exact_words(self):
        assert theme_question("A fox.") == (
            'Given two subfigures generated based on the theme: "A fox.", do the two images maintain consistency in terms of style, logic and identity? Answer "Yes" and "No" first, and then provide detailed reasons.'
        )
        assert criterion_question("One fox.") == (
            "Do images meet the following criteria? One fox. Please answer Yes or No first, then provide detailed reasons."
        )
        assert edit_consistency_question("Add a hat.") == (
            "Compare the edited image (second) with the original image (first). Instruction: 'Add a hat.'. Except for the parts that are intentionally changed according to the instruction, does the edited image remain consistent with the original in style, logic, and identity? Answer 'Yes' or 'No' first, then provide detailed reasons."
        )
        assert edit_following_question("Add a hat.") == (
            "Compare the edited image (second) with the original image (first). Instruction: 'Add a hat.'. Does the edited image accurately follow this instruction? Answer 'Yes' or 'No' first, then provide detailed reasons."
        )
        assert plain_question() == (
            'Do the two images maintain consistency in terms of style, logic and identity? Answer "Yes" and "No" first, and then provide detailed reasons.'
        )
        # Those of benchmarks
        assert t2is_bench_question("One fox.") == (
            "Do images meet the following criteria? One fox. Please answer Yes or No."
        )
        assert shows_question("One fox.") == 'Does this figure show "One fox."? Please answer yes or no.'

    @pytest.mark.parametrize("question", QUESTIONS_WITH_A_TEXT)
    def test_a_text_is_inserted_unchanged_and_not_empty(self, question):
        for text in ("{main_prompt} and {0}", "a { b", r"\1 %s $theme", 'say "hi"', " x\n"):
            assert question(text) == question("MARK").replace("MARK", text)
            assert question(text).count(text) == question("MARK").count("MARK") == 1
        for text in (" \n", None):  # T2IS-Bench has criteria without a text
            with pytest.raises(ValueError, match="nothing to ask"):
                question(text)


@pytest.mark.parametrize(
    ("questions", "common"),
    [
        ([QUESTION] * 2, QUESTION),
        ([QUESTION, "Same style?"], None),
        ([theme_question("A fox.")] * 2, None),  # other sets have other themes
    ],
)
def test_the_question_of_all_pairs(questions, common):
    assert (
        common_question(Dataset.from_list([make_pair("a.png", "b.png", each, "Yes") for each in questions])) == common
    )


class TestMakePair:
    def test_row(self):
        pair = make_pair("a.png", "b.png", QUESTION, "Yes", "Both are red.")
        assert pair == {
            "images": ["a.png", "b.png"],
            "prompt": [{"role": "user", "content": QUESTION}],
            "completion": [{"role": "assistant", "content": "Yes. Both are red."}],
        }
        assert make_pair("a.png", "b.png", QUESTION, "No")["completion"][0]["content"] == "No"
        with pytest.raises(ValueError, match="two images, but one is None"):
            make_pair("a.png", None, QUESTION, "No")
        for flag, word in ((True, "Yes"), (False, "No")):
            assert make_pair("a", "b", QUESTION, flag) == make_pair("a", "b", QUESTION, word)


class TestDecision:
    @pytest.mark.parametrize(
        ("text", "decision", "label_only"),
        [
            ("Yes", "Yes", True),
            ("No.\n", "No", True),
            ("Yes. Both are red.", "Yes", False),
            ("No, they differ.", "No", False),
            ("No. No.", "No", False),
        ],
    )
    def test_decisions(self, text, decision, label_only):
        parts = [{"type": "text", "text": text[:2]}, {"type": "text", "text": text[2:]}]
        for completion in (text, [assistant(text)], [assistant(parts)]):
            assert decision_of(completion) == decision
            assert is_label_only(completion) is label_only

    @pytest.mark.parametrize("text", ["Yesterday", "yes", " Yes", ""])
    def test_no_decision(self, text):
        for function in (decision_of, is_label_only):
            with pytest.raises(ValueError, match="does not begin with"):
                function([assistant(text)])

    def test_an_image_in_the_answer(self):
        with pytest.raises(ValueError, match="assistant turn with a text"):  # TRL would count three for two
            decision_of([assistant([{"type": "text", "text": "Yes"}, {"type": "image", "text": None}])])


class TestCheckPairColumns:
    def test_accepts(self, tmp_path):
        dataset = pairs_of(pair_rows(tmp_path, 3))
        assert check_pair_columns(dataset) is None
        check_pair_columns(dataset.with_format("numpy"))
        for feature in (List(ImageFeature(), length=2), LargeList(ImageFeature())):
            check_pair_columns(dataset.cast_column("images", feature))
        row = make_pair(noise(0), noise(1), QUESTION, "Yes")
        text, image = {"type": "text", "text": "Q?"}, {"type": "image", "text": None}
        for prompt in ([{"role": "system", "content": "S"}, user("Q?")], [user([image, image, text])]):
            check_pair_columns(Dataset.from_list([{**row, "prompt": prompt}]))
        for parts in ([image, text], [text], [image, image, image, text]):
            with pytest.raises(ValueError, match=f"Row 0 .* {len(parts) - 1} image parts"):
                check_pair_columns(Dataset.from_list([{**row, "prompt": [user(parts)]}]))

    def test_columns(self, tmp_path):
        dataset = pairs_of(pair_rows(tmp_path, 1))
        check_pair_columns(dataset.add_column("note", ["x"]))
        with pytest.raises(ValueError, match="`eval_dataset` needs .*'completion'"):
            check_pair_columns(dataset.remove_columns("completion"), "eval_dataset")
        with pytest.raises(ValueError, match=r"remove_columns\(\['image'\]"):  # TRL takes it instead
            check_pair_columns(dataset.add_column("image", ["x"]))
        with pytest.raises(ValueError, match="`images` .*cast_column"):
            check_pair_columns(dataset.cast_column("images", List(ImageFeature(decode=False))))
        transformed = dataset.with_transform(lambda batch: batch)
        with pytest.raises(ValueError, match="transform"):
            validate_pairs(transformed)
        validate_pairs(transformed.with_format(None))
        with pytest.raises(ValueError, match="no rows"):
            check_pair_columns(dataset.select([]))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prompt": [user("Q?"), user("Q?")]}, "prompt"),
            ({"prompt": [user(" ")]}, "prompt"),
            ({"prompt": None}, "prompt"),
            ({"completion": [assistant("Maybe")]}, "Maybe"),
            ({"images": ["a.png"] * 3}, "3 images"),
            ({"images": None}, "0 images"),
        ],
    )
    def test_rows(self, tmp_path, changes, message):
        rows = pair_rows(tmp_path, 4)
        rows[2].update(changes)
        dataset = pairs_of(rows)
        with pytest.raises(ValueError, match=f"Row 2 of `eval_dataset`: .*{message}"):
            check_pair_columns(dataset, "eval_dataset")
        with pytest.raises(ValueError, match=f"Row 1 of `train_dataset`: .*{message}"):
            check_pair_columns(dataset.select([3, 2, 0]))  # of the rows that are there
        check_pair_columns(dataset.select([3, 1, 0]))


class TestValidatePairs:
    def test_broken_images_and_texts(self, tmp_path):
        rows = pair_rows(tmp_path, 5)
        path = write_image(tmp_path / "cut.jpg")
        rows[1]["images"] = [None, path]
        dataset = pairs_of(rows[:3])
        cut_in_half(path)
        check_pair_columns(dataset)  # the cheap check does not see it
        with pytest.raises(ValueError, match=rf"Row 1: The first image is missing.* The second image \({path}\)"):
            validate_pairs(dataset, num_proc=2)
        rows[3]["completion"] = [assistant("Maybe")]
        rows[4]["images"] = rows[4]["images"][:1]
        dataset = pairs_of(rows)
        with pytest.raises(ValueError, match=r"Row 1: .*3 of 5 rows"):
            validate_pairs(dataset)
        kept = validate_pairs(dataset, skip_broken=True)
        assert numbers_of(kept) == [0, 2] and kept.features == dataset.features

    def test_one_warning(self, tmp_path, caplog):
        rows = pair_rows(tmp_path, 2)
        broken = cut_in_half(write_image(tmp_path / "cut.png"))
        rows[1:1] = [make_pair(rows[0]["images"][0], broken, QUESTION, "Yes") for _ in range(23)]
        order = random.Random(0).sample(range(25), 25)
        kept = validate_pairs(pairs_of(rows).select(order), skip_broken=True)  # with an indices mapping
        assert sorted(numbers_of(kept)) == [0, 1]
        first, *lines, last = caplog.messages[0].split("\n")
        assert "23 of 25" in first and "3 more" in last
        expected = [position for position, row in enumerate(order) if 1 <= row <= 23][:20]
        assert [int(line.split(":")[0].removeprefix("Row ")) for line in lines] == expected

    @pytest.mark.parametrize("embedded", [False, True])
    def test_contradictions(self, tmp_path, caplog, embedded):
        names = [write_image(tmp_path / f"{number}.bmp", number) for number in range(3)]  # files of one size
        a, b, c = [{"bytes": Path(name).read_bytes(), "path": None} if embedded else name for name in names]
        edit = edit_consistency_question("Add a hat.")
        pairs = [(a, a), (a, b), (a, c), (a, b, "No"), (b, a, "No"), (a, b, "No", "Other?"), (a, b), (c, b, "No"),
                 (a, b, "Yes", edit), (b, a, "No", edit), (b, a, "Yes", edit)]  # fmt: skip
        rows = [make_pair(a, b, question, decision) for a, b, decision, question in
                (pair + ("Yes", QUESTION)[len(pair) - 2 :] for pair in pairs)]  # fmt: skip
        rows[0]["images"][1] = None
        validate_pairs(pairs_of(rows), skip_broken=True)
        assert "3 of 10 pairs" in caplog.messages[1] and "rows 1 and 3, 1 and 4, 9 and 10. " in caplog.messages[1]
        caplog.clear()
        validate_pairs(pairs_of(rows[1:3] + rows[5:10]))
        assert not caplog.messages

    def test_sides_that_no_judge_takes(self, tmp_path):
        """The training would stop at that batch."""
        rows = pair_rows(tmp_path, 5)
        for number, size in enumerate([(10, 2500), (8000, 40), (1, 1), (31, 639)]):
            Image.new("RGB", size).save(path := tmp_path / f"{number}.png")
            rows[number]["images"][number % 2] = str(path)
        Image.fromarray(np.array([[0.5, 70000.0]], np.float32)).save(path := tmp_path / "float.tif")
        rows[4]["images"][0] = str(path)
        with pytest.raises(ValueError, match="Row 0: The first image .*aspect ratio.*3 of 5"):
            validate_pairs(pairs_of(rows))
        assert numbers_of(validate_pairs(pairs_of(rows), skip_broken=True)) == [2, 3]

    @pytest.fixture
    def decoded(self, monkeypatch):
        """Grows by the path of each image that is decoded."""
        decode, paths = ImageFeature.decode_example, []

        def counting(self, value, *args, **kwargs):
            paths.append(value["path"])
            return decode(self, value, *args, **kwargs)

        monkeypatch.setattr(ImageFeature, "decode_example", counting)
        return paths

    def test_result_is_cached_until_a_file_changes(self, tmp_path, decoded):
        rows = pair_rows(tmp_path, 3)

        def validate(**kwargs):
            return validate_pairs(pairs_of(rows), **kwargs)  # as a new process would, with the same fingerprint

        cut_in_half(rows[1]["images"][0])
        for _ in range(2):
            with pytest.raises(ValueError, match="Row 1: The first image"):
                validate()
        assert len(validate(skip_broken=True)) == 2
        assert sorted(decoded) == sorted(path for row in rows for path in row["images"])
        # Other rows are another dataset
        validate_pairs(pairs_of(rows).select([0, 2]))
        assert len(decoded) == 6 + 4
        # The file is replaced: in order now, and then broken at the same length
        whole = Path(write_image(tmp_path / "whole.png", 7)).read_bytes()
        for content, number in ((whole, 3), (bytes(len(whole)), 2)):
            decoded.clear()
            Path(rows[1]["images"][0]).write_bytes(content)
            assert len(validate(skip_broken=True)) == number
            assert len(decoded) == 6
        Path(rows[1]["images"][0]).unlink()
        with pytest.raises(ValueError, match="Row 1: .*FileNotFoundError"):
            validate()

    def test_a_cache_that_cannot_be_written(self, tmp_path, monkeypatch):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", write_image(tmp_path / "file.png"))
        assert len(validate_pairs(pairs_of(pair_rows(tmp_path, 2)))) == 2


class TestSwapPairs:
    def pixels(self, dataset):
        return [[image.tobytes() for image in row["images"]] for row in dataset]

    @pytest.mark.parametrize("embedded", [False, True])
    def test_other_order(self, tmp_path, embedded):
        rows = pair_rows(tmp_path, 3)
        for row in rows if embedded else ():
            row["images"] = [{"bytes": Path(path).read_bytes(), "path": None} for path in row["images"]]
        dataset = pairs_of(rows)
        swapped = swap_pairs(dataset)
        pixels = self.pixels(dataset)
        assert self.pixels(swapped) == pixels + [pair[::-1] for pair in pixels]
        for column in ("prompt", "completion"):
            assert swapped[column][:] == dataset[column][:] * 2
        assert swapped.features == dataset.features
        # As they are stored: paths stay paths, and bytes the same bytes
        stored = [row for batch in swapped.with_format("arrow").iter(10) for row in batch["images"].to_pylist()]
        assert all((image["bytes"] is not None) is embedded for images in stored for image in images)
        assert stored[3:] == [images[::-1] for images in stored[:3]]

    def test_indices_format_and_other_columns(self, tmp_path):
        dataset = pairs_of(pair_rows(tmp_path, 4)).add_column("source", list("abcd"))
        for feature in (List(ImageFeature(mode="L")), List(ImageFeature(), length=2), LargeList(ImageFeature())):
            given = dataset.cast_column("images", feature).with_format("numpy")
            swapped = swap_pairs(given.select([3, 1]))
            assert swapped.format["type"] == "numpy" and swapped.features == given.features
            assert swapped.with_format(None)["source"][:] == ["d", "b", "d", "b"]
            pixels = self.pixels(swapped.with_format(None))
            assert pixels[2:] == [pair[::-1] for pair in pixels[:2]]

    @pytest.mark.parametrize(
        ("question", "answer", "depends"),
        [
            (edit_consistency_question("Add a hat."), "Yes", True),
            ("Is the fox on the left red?", "Yes", True),
            ("Does Image A resemble Image B?", "Yes", True),
            (plain_question(), "No. The RIGHT fox is blue.", True),
            (plain_question(), "Yes. Subfigure 2 goes on with the story.", True),
            (plain_question(), "No. Image (1) is in ink.", True),
            (plain_question(), "No. The latter is in ink.", True),
            (plain_question(), "No. The original image has no hat.", True),
            (plain_question(), "No. First, the style differs.", True),
            (plain_question(), "Yes", False),
            (theme_question("Two images of a fox."), "No", False),
            (criterion_question("The foxes are red."), "No. One image is dark; in each image 12 leaves fall.", False),
        ],
    )
    def test_texts_that_depend_on_the_order(self, tmp_path, caplog, question, answer, depends):
        caplog.set_level(logging.INFO)
        rows = pair_rows(tmp_path, 2)
        rows[0].update(prompt=[user(question)], completion=[assistant(answer)])
        dataset = pairs_of(rows)
        swapped = swap_pairs(dataset)
        assert swapped["prompt"][:] == dataset["prompt"][:] + dataset["prompt"][depends:]
        assert f"Swapped {2 - depends} of 2" in caplog.text
        assert len(swap_pairs(dataset.select([0]))) == (1 if depends else 2)

    def test_content_in_parts_and_system_turn(self):
        image = {"type": "image", "text": None}
        for text, count in (("Is the second one red?", 1), ("Are both red?", 2)):
            row = make_pair(noise(0), noise(1), "Q?", "Yes")
            row["prompt"] = [user([image, image, {"type": "text", "text": text}])]
            assert len(swap_pairs(Dataset.from_list([row]))) == count
            row["prompt"] = [{"role": "system", "content": text}, user("Q?")]
            assert len(swap_pairs(Dataset.from_list([row]))) == count


def record(*images, question="<image><image>\nAre both foxes red?", answer="Yes. Both are red.", **changes):
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns, "images": list(images), **changes}


def write_json(folder, name, records):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(records), encoding="utf-8")
    return folder


def write_zip(path, images):
    """Write a zip file of images: name in the zip file -> seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, seed in images.items():
            source = path.with_suffix(".png")
            archive.write(write_image(source, seed), name)
            source.unlink()


def seeds_of(dataset):
    known = {noise(seed).tobytes(): seed for seed in range(10)}
    return [[known[image.tobytes()] for image in row["images"]] for row in dataset]


class TestLoadPacoDataset:
    def folder(self, tmp_path, *records, name="own"):
        write_image(tmp_path / "data" / "a.png", 1)
        write_image(tmp_path / "data" / "sub" / "b.png", 2)
        return write_json(tmp_path / "data", name, list(records))

    def test_images_next_to_the_file(self, tmp_path, own_cache):
        folder = self.folder(tmp_path, record("a.png", "sub/b.png"), record("./sub/../sub/b.png", "a.png"))
        dataset = load_paco_dataset(folder, files=["own"])
        assert seeds_of(dataset) == [[1, 2], [2, 1]]
        row = dataset.cast_column("images", List(ImageFeature(decode=False)))[0]
        assert row == {
            "images": [{"bytes": None, "path": str(folder / name)} for name in ("a.png", "sub/b.png")],
            "prompt": [{"role": "user", "content": "Are both foxes red?"}],
            "completion": [{"role": "assistant", "content": "Yes. Both are red."}],
            "source": "own",
        }
        check_pair_columns(dataset)
        assert load_paco_dataset(str(folder), files=["own.json"]).to_list() == dataset.to_list()
        assert not own_cache.exists()

    def test_training_files_by_default(self, tmp_path):
        folder = self.folder(tmp_path, record("a.png", "a.png"), name="consistency_reward_cot_train")
        write_json(folder, "consistency_reward_cot_test", [record("a.png", "a.png")])
        with pytest.raises(FileNotFoundError, match="sharegpt_editing_cot.json"):
            load_paco_dataset(folder)
        write_json(folder, "sharegpt_editing_cot", [record("sub/b.png", "a.png")])
        dataset = load_paco_dataset(folder)
        assert dataset["source"][:] == ["consistency_reward_cot_train", "sharegpt_editing_cot"]
        assert seeds_of(dataset) == [[1, 1], [2, 1]]

    def test_dataset_info(self, tmp_path):
        folder = self.folder(tmp_path, record("a.png", "sub/b.png"))
        (folder / "own.json").rename(folder / "sub" / "pairs_v2.json")
        write_json(folder, "plain", [record("a.png", "a.png")])
        entry = {"file_name": "sub/pairs_v2.json", "formatting": "sharegpt"}
        write_json(folder, "dataset_info", {"own": entry, "other": {"file_name": "gone.json"}})
        dataset = load_paco_dataset(folder, files=["own", "plain"])  # a file that it does not name is found too
        assert seeds_of(dataset) == [[1, 2], [1, 1]] and dataset["source"][:] == ["own", "plain"]
        with pytest.raises(FileNotFoundError, match=r"gone\.json"):
            load_paco_dataset(folder, files=["other"])
        write_json(folder, "dataset_info", {"own": {"file_name": "../own.json"}})
        with pytest.raises(ValueError, match="leaves"):
            load_paco_dataset(folder, files=["own"], skip_broken=True)

    def test_archives_that_are_not_looked_into(self, tmp_path):
        """Of a cache or a version control, and parts of one that is split."""
        folder = self.folder(tmp_path, record("b.png", "b.png"))
        (folder / ".cache").mkdir()
        write_zip(folder / ".cache" / "x.zip", {"b.png": 3})
        write_zip(folder / "split.zip", {"b.png": 3})
        (folder / "split.z01").touch()
        with pytest.raises(ValueError, match=r"neither in .* nor in \[\]\."):
            load_paco_dataset(folder, files=["own"])
        write_zip(folder / "x.zip", {"b.png": 5})
        assert seeds_of(load_paco_dataset(folder, files=["own"])) == [[5, 5]]

    def test_shapes_of_records(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": " No\n"}]
        system = {"from": "system", "value": "Be strict."}
        folder = self.folder(
            tmp_path,
            {"messages": messages, "images": ["a.png", "a.png"]},
            record("a.png", "a.png", conversations=[system, *record()["conversations"]]),
            record("a.png", "a.png", system="Be kind."),
            record("a.png", "a.png", system="", question=f" <image>\n<image>\n{QUESTION}\n"),
            record("a.png", "a.png", question=QUESTION),
        )
        dataset = load_paco_dataset(folder.name, files=["own"])
        monkeypatch.chdir("/")
        assert seeds_of(dataset) == [[1, 1]] * 5
        assert dataset[0]["completion"] == [assistant("No")]
        systems = [[], ["Be strict."], ["Be kind."], [], []]
        assert dataset["prompt"][:] == [
            [*({"role": "system", "content": text} for text in of_one), user(QUESTION)] for of_one in systems
        ]

    @pytest.mark.parametrize(
        "broken, message",
        [
            (record("a.png"), "images"),
            (record("a.png", "a.png", "a.png"), "exactly 2"),
            (record("a.png", "gone.png"), "'gone.png' is neither in"),
            (record("a.png", "a.png", question="Do <image> and <image> match?"), "before a text"),
            (record("a.png", "a.png", answer=None), "does not begin with"),
            (record("a.png", "a.png", conversations=record()["conversations"] * 2), "user turn"),
            (record("a.png", "a.png", conversations=["Q?", "Yes"]), "attribute"),
            (record("a.png", "a.png", system=["S"]), r"a turn has the content \['S'\], but must have a text"),
        ],
    )
    def test_broken_record(self, tmp_path, caplog, broken, message):
        good = record("a.png", "sub/b.png")
        folder = self.folder(tmp_path, good, broken, good)
        with pytest.raises(ValueError, match=rf"^own.json, record 1: .*{message}"):
            load_paco_dataset(folder, files=["own"])
        assert seeds_of(load_paco_dataset(folder, files=["own"], skip_broken=True)) == [[1, 2], [1, 2]]
        (warning,) = caplog.messages
        assert warning.startswith("Left out 1 of 3 records that are broken:\nown.json, record 1: ")

    @pytest.mark.parametrize("text", ["version https://git-lfs", '["a"]'])
    def test_broken_file(self, tmp_path, text):
        (self.folder(tmp_path) / "own.json").write_text(text)
        with pytest.raises(ValueError, match="own.json"):
            load_paco_dataset(tmp_path / "data", files=["own"], skip_broken=True)


class TestZipFiles:
    def load(self, folder, *images, **kwargs):
        write_json(folder, "own", [record(*images)])
        return load_paco_dataset(folder, files=["own"], **kwargs)

    @pytest.mark.parametrize(
        "archive, member, path",
        [
            ("x.zip", "1/a.png", "1/a.png"),
            ("images.zip", "1/a.png", "images/1/a.png"),  # unpacked into a folder of its name
            ("images.zip", "images/1/a.png", "1/a.png"),  # with a top folder of its name
            ("images/x.zip", "1/a.png", "images/1/a.png"),  # unpacked where it lies
            ("images/x.zip", "1/a.png", "images/x/1/a.png"),
        ],
    )
    def test_places(self, tmp_path, own_cache, archive, member, path):
        write_zip(tmp_path / "data" / archive, {member: 3, "other.png": 4})
        before = {*(tmp_path / "data").rglob("*")}
        dataset = self.load(tmp_path / "data", path, path)
        assert seeds_of(dataset) == [[3, 3]]
        # Not in the user's folder
        assert {*(tmp_path / "data").rglob("*")} - before == {tmp_path / "data" / "own.json"}
        stored = dataset.cast_column("images", List(ImageFeature(decode=False)))[0]["images"][0]
        assert stored["bytes"] is None and own_cache in Path(stored["path"]).parents
        with pytest.raises(ValueError, match="'a/1.png' is neither in"):
            self.load(tmp_path / "data", "a/1.png", path)

    def test_extracted_once_for_each_archive(self, tmp_path, own_cache):
        folder = tmp_path / "data"
        write_zip(folder / "x.zip", {"a.png": 3})
        write_zip(folder / "y.zip", {"b.png": 5})
        write_image(folder / "here.png", 6)
        assert seeds_of(self.load(folder, "here.png", "here.png")) == [[6, 6]]
        assert not own_cache.exists()  # not extracted, as nothing in it was needed
        dataset = self.load(folder, "a.png", "b.png")
        assert seeds_of(dataset) == [[3, 5]]
        path = Path(dataset.data.column("images")[0][0]["path"].as_py())
        os.utime(path, (1, 1))
        self.load(folder, "a.png", "b.png")
        assert path.stat().st_mtime == 1
        with zipfile.ZipFile(folder / "x.zip", "w") as archive:  # another one at the same place
            archive.write(write_image(tmp_path / "a.png", 4), "a.png")
            archive.write(tmp_path / "a.png", "c.png")
        assert seeds_of(self.load(folder, "a.png", "b.png")) == [[4, 5]]

    def test_same_name_in_two(self, tmp_path):
        folder = tmp_path / "data"
        write_zip(folder / "x.zip", {"a.png": 3})
        write_zip(folder / "y.zip", {"a.png": 3})
        assert seeds_of(self.load(folder, "a.png", "a.png")) == [[3, 3]]
        write_zip(folder / "z.zip", {"a.png": 4})
        with pytest.raises(ValueError, match=r"differs between .*\['x.zip', 'y.zip', 'z.zip'\]"):
            self.load(folder, "a.png", "a.png")

    def test_extraction_that_was_stopped(self, tmp_path, own_cache, monkeypatch):
        folder = tmp_path / "data"
        write_zip(folder / "x.zip", {"a.png": 3, "b.png": 4})

        def stop(archive, output):
            write_image(Path(output) / "a.png", 5)
            raise OSError("No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(zipfile.ZipFile, "extractall", stop)
            with pytest.raises(OSError, match="No space left"):
                self.load(folder, "a.png", "b.png")
        assert not list(own_cache.rglob("*.png"))
        dataset = self.load(folder, "a.png", "b.png")
        assert seeds_of(dataset) == [[3, 4]]
        # As a process leaves it that is killed in the middle
        (extracted,) = (path for path in (own_cache / "extracted").iterdir() if path.is_dir())
        extracted.rename(f"{extracted}.partial")
        cut_in_half(Path(f"{extracted}.partial") / "a.png")
        assert seeds_of(self.load(folder, "a.png", "b.png")) == [[3, 4]]

    def test_damaged_zip_file(self, tmp_path):
        folder = tmp_path / "data"
        write_zip(folder / "x.zip", {"a.png": 3})
        write_image(folder / "b.png", 4)
        data = (folder / "x.zip").read_bytes()
        git_lfs = b"version https://git-lfs.github.com/spec/v1"
        for damaged in (data[: len(data) // 2], git_lfs, data[:5000] + b"?" * 9 + data[5009:]):
            (folder / "x.zip").write_bytes(damaged)
            # An error also with `skip_broken`: not a single record is at fault
            with pytest.raises(shutil.ReadError, match="x.zip .*Git LFS"):
                self.load(folder, "a.png", "b.png", skip_broken=True)
        (folder / "x.zip").write_bytes(data)
        assert seeds_of(self.load(folder, "a.png", "b.png")) == [[3, 4]]

    def test_member_that_leaves_the_directory(self, tmp_path, own_cache):
        folder = tmp_path / "data"
        write_zip(folder / "x.zip", {"../evil.png": 3, "/evil.png": 3, "a.png": 4})
        assert seeds_of(self.load(folder, "a.png", "a.png")) == [[4, 4]]
        (extracted,) = (path for path in (own_cache / "extracted").iterdir() if path.is_dir())
        assert all(extracted in path.parents for path in tmp_path.rglob("evil.png")) and not Path("/evil.png").exists()
        with tarfile.open(folder / "y.tar", "w") as archive:
            archive.add(folder / "own.json", "../evil.png")
        with pytest.raises(shutil.ReadError, match="y.tar"):
            self.load(folder, "b.png", "b.png", skip_broken=True)

    @pytest.mark.parametrize("kind", ["zip", "gztar"])
    def test_an_archive_that_would_fill_the_disk(self, tmp_path, own_cache, monkeypatch, kind):
        write_image(tmp_path / "source" / "a.png", 3)
        (tmp_path / "source" / "zeros").write_bytes(bytes(10**7))
        shutil.make_archive(tmp_path / "data" / "x", kind, tmp_path / "source")
        monkeypatch.setattr(archives, "_MIN_LIMIT", 0)
        with pytest.raises(shutil.ReadError, match=r"over \d+ bytes"):
            self.load(tmp_path / "data", "a.png", "a.png", skip_broken=True)
        assert not list(own_cache.rglob("zeros"))
        monkeypatch.setattr(archives, "_MIN_LIMIT", 10**7)
        assert seeds_of(self.load(tmp_path / "data", "a.png", "a.png")) == [[3, 3]]

    def test_links(self, tmp_path):
        folder = tmp_path / "data"
        write_image(tmp_path / "secret.png", 3)
        write_image(folder / "sub" / "c.png", 4)
        (folder / "a.png").symlink_to(folder / "sub" / "c.png")
        assert seeds_of(self.load(folder, "a.png", "a.png")) == [[4, 4]]
        (folder / "out.png").symlink_to(tmp_path / "secret.png")
        with tarfile.open(folder / "x.tar", "w") as archive:
            archive.add(folder / "out.png", "b.png")
        with pytest.raises(shutil.ReadError, match="x.tar"):
            self.load(folder, "b.png", "b.png")

    @pytest.mark.parametrize("name", ["images.tgz", "sub/images.tar.xz"])
    def test_tar_files(self, tmp_path, name):
        archive, source = tmp_path / "data" / name, tmp_path / "source"
        archive.parent.mkdir(parents=True)
        write_image(source / "images/1/a.png", 3)
        with tarfile.open(archive, f"w:{name.replace('tgz', 'tar.gz').partition('.tar')[2].strip('.')}") as file:
            file.add(source / "images", "images")
        for path in ("images/1/a.png", "1/a.png"):
            assert seeds_of(self.load(tmp_path / "data", path, path)) == [[3, 3]]
        archive.write_bytes(archive.read_bytes()[:-300] if name == "images.tgz" else b"version https://git-lfs")
        with pytest.raises(shutil.ReadError, match="Git LFS"):
            self.load(tmp_path / "data", "1/a.png", "1/a.png", skip_broken=True)

    @pytest.mark.slow
    def test_callers_at_the_same_time(self, tmp_path, monkeypatch):
        # As the ranks of a training run do, on a cache that is empty
        folder = tmp_path / "data"
        write_zip(folder / "x.zip", {"a.png": 3})
        write_json(folder, "own", [record("a.png", "a.png")])
        extractions = tmp_path / "extractions"
        extract = zipfile.ZipFile.extractall

        def count(*args):
            with extractions.open("a") as file:
                file.write("x")
            time.sleep(0.5)  # the others arrive meanwhile
            extract(*args)

        monkeypatch.setattr(zipfile.ZipFile, "extractall", count)
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(3, context) as executor:
            assert [*executor.map(load_paco_dataset, [folder] * 3, [["own"]] * 3)]
        # Once: nobody takes away the files that another one reads
        assert extractions.read_text() == "x"
