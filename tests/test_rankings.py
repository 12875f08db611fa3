# SPDX-License-Identifier: Apache-2.0
"""Tests of the rankings format, of its loader and of the pairs that are made of rankings."""

import io
import json
import zipfile
from pathlib import Path

import pytest
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature
from PIL import Image

from hub_server import HubServer
from paco_trl.data import (
    check_pair_columns,
    check_ranking_columns,
    criteria_dict,
    load_consistency_rank,
    rankings_to_pairs,
    theme_question,
    validate_pairs,
)
from paco_trl.data.rankings import is_permutation


FEATURES = Features(
    dict.fromkeys(["id", "prompt"], Value("string"))
    | {"reference": ImageFeature(), "candidates": List(ImageFeature()), "ranking": List(Value("int64"))}
)
SET_PROMPT = "THREE-PANEL Images with a 1x3 grid layout of a blue kettle. [LEFT]:It is cold. [MIDDLE]:It warms. [RIGHT]:It boils."
CRITERIA = {"Style": {"Ink": "All in ink."}, "Logic": {"Heat": "It warms up.", "None": None}}


def color(value):
    return Image.new("RGB", (4, 4), (value, 0, 0))


def values_of(images):
    return [image.getpixel((0, 0))[0] for image in images]


def write_color(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    color(value).save(path)
    return str(path)


def ranking_row(folder=None, number=0, ranking=(2, 0, 1), **changes):
    """One ranking; the colour of an image says which one it is."""
    count = len(ranking)
    images = [color(10 * number + place) for place in range(count + 1)]
    if folder is not None:
        images = [write_color(folder / f"{number}_{place}.png", 10 * number + place) for place in range(count + 1)]
    row = {"id": f"r{number}", "reference": images[0], "candidates": images[1:], "prompt": f"A fox {number}."}
    return {**row, "ranking": list(ranking), **changes}


def rankings_of(*rows):
    return Dataset.from_list(list(rows), features=FEATURES)


def test_an_order_is_of_integers():
    assert is_permutation([1, 0], 2) and is_permutation((0, 2, 1), 3)
    assert not any(is_permutation(order, 2) for order in ([True, False], [1.0, 0.0], [1, 1], [1], "10", None))


class TestCheckRankingColumns:
    def test_accepts(self, tmp_path):
        dataset = rankings_of(ranking_row(), ranking_row(tmp_path, 1, (3, 1, 0, 2)), ranking_row(None, 2, (1, 0)))
        assert check_ranking_columns(dataset) is None
        check_ranking_columns(dataset.with_format("numpy").shuffle(seed=0))

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"ranking": [0, 1, 1]}, "`ranking` of row 1 of `bench`"),
            ({"ranking": None}, "`ranking`"),
            ({"ranking": [0], "candidates": [color(1)]}, "Row 1 of `bench` has 1 candidates"),
            ({"candidates": None}, "has 0 candidates"),
            ({"prompt": " "}, "`prompt` of row 1 of `bench`"),
        ],
    )
    def test_rows(self, changes, message):
        dataset = rankings_of(ranking_row(), {**ranking_row(), **changes}, ranking_row())
        with pytest.raises(ValueError, match=message):
            check_ranking_columns(dataset, "bench")
        check_ranking_columns(dataset.select([2, 0]))
        with pytest.raises(ValueError, match="(R|r)ow 0 of"):
            check_ranking_columns(dataset.select([1, 0]))


def rank_record(**changes):
    record = {
        "folder": "0001",
        "ref_image": "0_0.png",
        "comp_images": ["0_1.png", "1_1.png", "2_1.png"],
        "rank_images": ["2_1.png", "0_1.png", "1_1.png"],
    }
    return {name: value for name, value in {**record, **changes}.items() if value is not ...}


def write_bench(folder, records, prompts=None, images=("0_0", "0_1", "1_1", "2_1")):
    """The published layout; the colour of image <i>_<j> is 10 i + j."""
    for name in images:
        first, second = map(int, name.split("_"))
        write_color(folder / "images" / "0001" / f"{name}.png", 10 * first + second)
    prompts = prompts or [{"idx": "0001", "prompt": SET_PROMPT, "criteria": CRITERIA}]
    for name, rows in (("consistency_full_rank", records), ("prompt_data", prompts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


class TestLoadConsistencyRank:
    def test_published_layout(self, tmp_path):
        dataset = load_consistency_rank(write_bench(tmp_path, [rank_record()]))
        check_ranking_columns(dataset)
        row = dataset[0]
        assert values_of([row.pop("reference")]) == [0] and values_of(row.pop("candidates")) == [1, 11, 21]
        assert criteria_dict(row.pop("criteria")) == CRITERIA | {"Logic": {"Heat": "It warms up."}}
        assert row == {"id": "0001/0_0.png/0", "group": "0001", "prompt": SET_PROMPT, "ranking": [2, 0, 1]}
        stored = dataset.with_format("arrow")[:].to_pylist()[0]
        folder = tmp_path / "images" / "0001"
        assert stored["reference"] == {"bytes": None, "path": str(folder / "0_0.png")}
        assert stored["candidates"][1] == {"bytes": None, "path": str(folder / "1_1.png")}

    @pytest.mark.parametrize("top", ["images/", ""])
    def test_as_it_is_downloaded(self, tmp_path, monkeypatch, top):
        monkeypatch.setattr("datasets.config.EXTRACTED_DATASETS_PATH", str(tmp_path / "cache"))
        unpacked = load_consistency_rank(write_bench(tmp_path / "bench", [rank_record()]))
        images = tmp_path / "bench" / "images"
        with zipfile.ZipFile(tmp_path / "bench" / "images.zip", "w") as archive:
            for path in images.rglob("*.png"):
                archive.write(path, f"{top}{path.relative_to(images)}")
        assert not (tmp_path / "cache").exists()
        images.rename(tmp_path / "away")
        metadata = tmp_path / "bench" / ".cache" / "huggingface" / "download" / "images.zip.metadata"
        metadata.parent.mkdir(parents=True)
        metadata.touch()  # of `hf download --local-dir`, and no part of an archive
        dataset = load_consistency_rank(tmp_path / "bench")
        assert values_of(dataset[0]["candidates"]) == [1, 11, 21]
        assert dataset["id"][:] == unpacked["id"][:] and dataset[0]["ranking"] == [2, 0, 1]

    def test_from_the_hub(self, tmp_path):
        folder = write_bench(tmp_path / "bench", [rank_record()])
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for path in (folder / "images").rglob("*.png"):
                archive.write(path, path.relative_to(folder))
        files = {path.name: path.read_bytes() for path in folder.glob("*.jsonl")}
        with HubServer(tokens={}) as hub:
            files |= {"images.zip": buffer.getvalue(), "README.md": b"", "unneeded.bin": b"x"}
            hub.add_repo("X-GenGroup/ConsistencyRank-Bench", files, "dataset")
            with hub.connected(tmp_path / "home"):
                (row,) = load_consistency_rank("X-GenGroup/ConsistencyRank-Bench")
                assert row["reference"].size == (4, 4)
        assert list((tmp_path / "home").rglob("images.zip"))
        assert not list((tmp_path / "home").rglob("unneeded.bin"))

    def test_ids(self, tmp_path):
        records = [rank_record(), rank_record(), rank_record(ref_image="1_1.png")]
        ids = ["0001/0_0.png/0", "0001/0_0.png/1", "0001/1_1.png/0"]
        assert load_consistency_rank(write_bench(tmp_path, records))["id"][:] == ids

    @pytest.mark.parametrize(
        "broken, message",
        [
            (rank_record(folder="0002"), "`folder` '0002'"),
            (rank_record(ref_image=...), "'images/0001/None' is neither in"),
            (rank_record(comp_images=["0_1.png"] * 2, rank_images=["0_1.png"] * 2), "`comp_images`"),
            (rank_record(rank_images=["0_1.png", "1_1.png", "1_1.png"]), "`rank_images`"),
        ],
    )
    def test_broken_record(self, tmp_path, broken, message):
        folder = write_bench(tmp_path / "bench", [rank_record(), broken, rank_record()])
        with pytest.raises(ValueError, match=f"^consistency_full_rank.jsonl, record 1: .*{message}"):
            load_consistency_rank(folder)


class TestRankingsToPairs:
    def summary(self, pairs):
        return [(*values_of(pair["images"]), pair["completion"][0]["content"]) for pair in pairs]

    @pytest.mark.parametrize("by_path", [True, False])
    def test_best_and_worst(self, tmp_path, by_path):
        folder = tmp_path if by_path else None
        # The colour of candidate k is k + 1, and 10 more in the second row
        dataset = rankings_of(ranking_row(folder, 0, (2, 0, 1)), ranking_row(folder, 1, (3, 1, 0, 2)))
        pairs = rankings_to_pairs(dataset)
        assert self.summary(pairs) == [(0, 3, "Yes"), (0, 2, "No"), (10, 14, "Yes"), (10, 13, "No")]
        check_pair_columns(pairs)
        assert pairs.column_names == ["images", "prompt", "completion"]
        validate_pairs(pairs)
        # As they are stored: paths stay paths, bytes the same bytes
        stored = dataset.with_format("arrow")[:].to_pylist()
        images = pairs.with_format("arrow")[:]["images"].to_pylist()
        assert images[2] == [stored[1]["reference"], stored[1]["candidates"][3]]
        assert all((image["bytes"] is None) is by_path for pair in images for image in pair)

    def test_how_many(self):
        dataset = rankings_of(ranking_row(None, 0, (3, 1, 0, 4, 2)))
        assert self.summary(rankings_to_pairs(dataset, num_positives=2, num_negatives=3)) == [
            *((0, 4, "Yes"), (0, 2, "Yes")),
            *((0, 1, "No"), (0, 5, "No"), (0, 3, "No")),
        ]
        dataset = rankings_of(ranking_row(None, 0, (3, 1, 0, 2)), ranking_row())
        assert len(rankings_to_pairs(dataset, num_positives=2)) == 6
        with pytest.raises(ValueError, match="Row 1 has 3 candidates"):
            rankings_to_pairs(dataset, num_positives=3)

    def test_default_question(self):
        dataset = rankings_of(ranking_row(), ranking_row(prompt=SET_PROMPT))
        questions = [prompt[0]["content"] for prompt in rankings_to_pairs(dataset)["prompt"]]
        theme = "THREE-PANEL Images with a 1x3 grid layout of a blue kettle."
        assert questions == [theme_question("A fox 0.")] * 2 + [theme_question(theme)] * 2

    def test_own_question(self):
        seen = []

        def question(row):
            seen.append(row)
            return f"{row['id']}?"

        dataset = rankings_of(ranking_row(), ranking_row(None, 1))
        pairs = rankings_to_pairs(dataset.select([1, 0]), question=question)
        assert [prompt[0]["content"] for prompt in pairs["prompt"]] == ["r1?", "r1?", "r0?", "r0?"]
        assert [sorted(row) for row in seen] == [["id", "prompt", "ranking"]] * 2
        with pytest.raises(ValueError, match="`question` is None"):
            rankings_to_pairs(dataset, question=lambda row: None)

    def test_group_is_kept(self, tmp_path):
        pairs = rankings_to_pairs(load_consistency_rank(write_bench(tmp_path, [rank_record()])))
        assert pairs["group"][:] == ["0001", "0001"]
        assert self.summary(pairs) == [(0, 21, "Yes"), (0, 11, "No")]

    def test_nothing_is_decoded(self, tmp_path, monkeypatch):
        embedded = {"bytes": b"broken", "path": "a.png"}
        dataset = rankings_of(ranking_row(reference=embedded, candidates=[embedded] * 3))
        with pytest.raises(Exception, match="cannot identify image"):
            dataset[0]
        # A file of the same name lies in the folder of the run: `datasets` takes it when it encodes an image again
        monkeypatch.chdir(tmp_path)
        Path("a.png").write_bytes(b"another")
        assert ImageFeature().encode_example(embedded) == {"bytes": None, "path": "a.png"}
        assert rankings_to_pairs(dataset).with_format("arrow")[:]["images"].to_pylist() == [[embedded] * 2] * 2
