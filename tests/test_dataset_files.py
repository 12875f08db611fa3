# SPDX-License-Identifier: Apache-2.0
"""Files as people have them: names that look like patterns, tables, encodings, columns of any kind, stored images."""

import gzip
import json
import math
import shutil
from base64 import b64encode
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, LargeList, Value
from datasets import Image as HFImage
from huggingface_hub import constants
from PIL import Image

from hub_server import HubServer
from paco_trl.commands import build_arguments, evaluate_arguments, evaluate_judge, reward, script_arguments
from paco_trl.commands.config_files import read_config
from paco_trl.data import (
    SourceImages,
    check_edit_columns,
    check_image_set_columns,
    check_ranking_columns,
    convert_t2is,
    exclude_benchmark_images,
    load_edit_prompts,
    load_image_set_prompts,
    make_pair,
    rankings_to_pairs,
    swap_pairs,
    validate_pairs,
)
from paco_trl.data.dataset_files import load_split
from paco_trl.data.image_sets import complete_image_sets
from paco_trl.data.paco_dataset import load_paco_dataset
from paco_trl.data.stories import load_stories
from paco_trl.evaluation import save_report
from paco_trl.rewards.judge_rewards import read_rubric
from paco_trl.rollout.prompt_rows import PromptRows
from paco_trl.utils.stage_folder import save_with_paths
from paco_trl.utils.text import read_json, shorten
from testing_utils import noise, png, write_image


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    for name in ("HF_DATASETS_CACHE", "EXTRACTED_DATASETS_PATH", "DOWNLOADED_DATASETS_PATH"):
        monkeypatch.setattr(f"datasets.config.{name}", tmp_path / "cache" / name)


def write(path: Path, content: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def write_prompt(path: Path, prompt: str) -> None:
    """A file or directory with one prompt, in the format that its name says."""
    lines = {"txt": prompt, "csv": f"prompt,seed\n{prompt},1", "tsv": f"prompt\tseed\n{prompt}\t1"}
    lines |= {"json": json.dumps([{"prompt": prompt}]), "jsonl": json.dumps({"prompt": prompt})}
    ending, is_compressed = path.name.removesuffix(".gz").rpartition(".")[2], path.name.endswith(".gz")
    if ending in lines:
        write(path, gzip.compress(lines[ending].encode()) if is_compressed else lines[ending])
    elif ending == "parquet":
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"prompt": [prompt]}), path)
    elif path.name == "saved":
        save_with_paths(Dataset.from_dict({"prompt": [prompt]}), path)
    else:
        write_prompt(path / "data" / "train.parquet", prompt)


FORMATS = ["p.txt", "p.csv", "p.tsv", "p.json", "p.jsonl", "p.jsonl.gz", "p.parquet", "saved", "folder"]


class TestPaths:
    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize(
        "mine, other", [("exp [v1]", "exp v"), ("q?", "qa"), ("a*", "ab"), ("{x} 50% Übung 一", "x")]
    )
    def test_a_path_is_no_pattern(self, tmp_path, name, mine, other):
        places = ["{}/" + name] + ["{}." + name.partition(".")[2]] * ("." in name)
        for stem, prompt in ((mine, "Mine."), (other, "Other.")):
            for place in places:
                write_prompt(tmp_path / place.format(stem), prompt)
        for place in places:
            assert load_image_set_prompts(str(tmp_path / place.format(mine)))["prompt"][:] == ["Mine."]

    def test_home_and_links(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        write_prompt(tmp_path / "real [1]" / "p.txt", "Mine.")
        (tmp_path / "link?.txt").symlink_to(tmp_path / "real [1]" / "p.txt")
        for path in ("~/real [1]/p.txt", "~/link?.txt", "~/real [1]"):
            assert load_image_set_prompts(path)["prompt"][:] == ["Mine."]

    def test_a_missing_file_is_no_repository(self, tmp_path):
        for name in ("no.csv", "no.jsonl.gz", "no.parquet"):
            with pytest.raises(FileNotFoundError, match=name):
                load_split(name, "train")


class TestTables:
    @pytest.mark.parametrize(
        "name, content, expected",
        [
            ("p.csv", 'prompt\n"A red fox, in snow"\nA hen', ["A red fox, in snow", "A hen"]),
            ("p.csv", 'id, prompt\n1, "A red fox, in snow"\n2, A hen\n', ["A red fox, in snow", "A hen"]),
            ("p.csv", "\ufeffid;prompt\r\n1;A red fox, in snow\r\n\r\n2;A hen\r\n", ["A red fox, in snow", "A hen"]),
            ("p.csv", "id\tprompt\n1\tA red fox, in snow\n", ["A red fox, in snow"]),
            ("p.tsv", "prompt\nA red fox, in snow; a hen\n", ["A red fox, in snow; a hen"]),
            ("p.csv", 'prompt\n"A red fox\nin snow"\n', ["A red fox\nin snow"]),
            ("p.csv", 'prompt\nA 12" vinyl record\n', ['A 12" vinyl record']),
            ("p.csv", ",prompt\n0,A red fox\n1,A hen\n", ["A red fox", "A hen"]),  # as pandas writes it
            ("p.csv", "prompt,__index_level_0__\nA red fox,3\n", ["A red fox"]),
        ],
    )
    @pytest.mark.parametrize("in_folder", [False, True])
    def test_what_is_plainly_meant(self, tmp_path, name, content, expected, in_folder):
        write(tmp_path / "data" / name, content)
        path = tmp_path / "data" if in_folder else tmp_path / "data" / name
        assert load_image_set_prompts(path)["prompt"][:] == expected

    @pytest.mark.parametrize(
        "content, named",
        [
            ("prompt\nA red fox, in snow\nA glass of water, on a table\n", "line 2"),
            ("id,prompt\n1,A hen\n2,A red fox, in snow\n", "line 3"),
            ("prompt,seed\nA hen,1\nA red fox\n", "line 3"),
            ('prompt,seed\n"A hen\nand eggs",1\nA red fox\n', "line 4"),
            ('prompt\n"A hen\nA red fox\n', "line 3"),
            ('prompt\n"A hen" and eggs\n', "line 2"),
            ("prompt,prompt\nA hen,A red fox\n", "header"),
            ("prompt,\nA hen,A red fox\n", "header"),
            ("prompt,seed\n", "no rows"),
            ("", "no rows"),
        ],
    )
    @pytest.mark.parametrize("name", ["p.csv", "p.tsv"])
    def test_what_cannot_be_read_names_file_and_line(self, tmp_path, content, named, name):
        if name == "p.tsv":
            content = content.replace(",", "\t")
        for path in (write(tmp_path / "data" / name, content), str(tmp_path / "data")):
            with pytest.raises(ValueError, match=named) as error:
                load_image_set_prompts(path)
            assert "/data" in str(error.value)

    def test_an_image_in_base64_is_read_to_its_end(self, tmp_path):
        path = write(tmp_path / "p.tsv", f"prompt\timage\nA fox\t{'x' * 200_000}\n")
        assert len(load_split(path, "train")["image"][0]) == 200_000

    @pytest.mark.parametrize("indent", [None, 2])
    @pytest.mark.parametrize("separator", ["\n", "\r\n", "\r", "\n\n \n"])
    def test_objects_on_a_line_or_several(self, tmp_path, indent, separator):
        texts = [json.dumps({"prompt": name, "sizes": [1, 2]}, indent=indent) for name in "abc"]
        for name, count in (("p.json", 1), ("p.jsonl", 3)):
            path = write(tmp_path / name, separator.join(texts[:count]) + separator)
            assert load_image_set_prompts(path)["prompt"][:] == [*"abc"][:count]

    def test_the_line_of_a_broken_row_is_named(self, tmp_path):
        rows = '{"prompt": "a"}\n\n{"prompt": "b"\n'
        path = write(tmp_path / "p.jsonl", rows)
        with pytest.raises(ValueError, match="what begins on line 3 is not valid JSON"):
            load_image_set_prompts(path)
        assert len(load_image_set_prompts(write(tmp_path / "q.jsonl", rows.rstrip() + "}"))) == 2

    def test_types_are_those_that_give_the_text_back(self, tmp_path):
        columns = {"height": "512", "strength": "0.50", "id": "007", "hash": "12345678901234567890", "flag": "True"}
        columns["commit"] = "0x1f"
        header, values = ",".join(columns), ",".join(columns.values())
        path = write(tmp_path / "p.csv", f"prompt,{header}\nA fox,{values}\nA hen,,,8,1,,\n")
        row, second = load_image_set_prompts(path)
        assert [row[name] for name in columns] == [512, 0.5, "007", "12345678901234567890", True, "0x1f"]
        assert (second["height"], second["strength"], second["id"], second["flag"]) == (None, None, "8", None)


class TestEncodings:
    TEXTS = {
        "gbk": "一只红狐狸,雪".encode("gbk"),
        "cp932": "赤い狐".encode("cp932"),
        "cp1252": "A fox’s café".encode("cp1252"),
        "utf-16": "A red fox".encode("utf-16"),
        "utf-16-le without a mark": "A red fox".encode("utf-16-le"),
    }

    @pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
    @pytest.mark.parametrize("name", ["p.txt", "p.csv", "p.tsv", "p.jsonl", "p.json", "folder/p.txt"])
    def test_not_utf_8(self, tmp_path, text, name):
        write(tmp_path / name, text)
        path = tmp_path / name if "/" not in name else tmp_path / "folder"
        with pytest.raises(ValueError, match="UTF-8") as error:
            load_image_set_prompts(path)
        assert Path(name).name in str(error.value) and len(str(error.value)) < 300

    def test_marks_and_line_ends(self, tmp_path):
        path = write(tmp_path / "p.txt", "\ufeffEin Füchschen\r\n\r\n  \nA hen\u2028 and eggs\rA cow")
        assert load_image_set_prompts(path)["prompt"][:] == ["Ein Füchschen", "A hen\u2028 and eggs", "A cow"]

    @pytest.mark.parametrize("name", ["p.txt", "p.csv", "p.jsonl", "p.json"])
    def test_empty(self, tmp_path, name):
        for content in ("", "\n\n"):
            with pytest.raises(ValueError, match=f"{name}' has no rows"):
                load_image_set_prompts(write(tmp_path / name, content))

    def test_a_folder_of_other_files(self, tmp_path):
        write(tmp_path / "README.md", "no data")
        with pytest.raises(FileNotFoundError, match="has no data files .*jsonl.* Name a file"):
            load_image_set_prompts(tmp_path)
        write(tmp_path / "tokenizer.json", json.dumps({f"setting_{number}": number for number in range(40)}))
        with pytest.raises(
            ValueError, match="There is no column `prompt` among setting_0, .*, setting_9, .... Rename"
        ):
            load_image_set_prompts(tmp_path)

    def test_images_without_a_text_beside_any(self, tmp_path):
        Image.new("RGB", (8, 8)).save(tmp_path / "001.png")
        with pytest.raises(ValueError, match="no column `prompt` among image. Put .* `001.txt` beside it"):
            load_image_set_prompts(tmp_path)
        write(tmp_path / "001.txt", "A fox")
        assert load_image_set_prompts(tmp_path)["prompt"][:] == ["A fox"]

    def test_what_is_cut_off(self, tmp_path):
        whole = gzip.compress(b"A fox\n" * 100)
        for name, content in (("p.txt.gz", whole[:-9]), ("q.txt.gz", b"A fox"), ("p.parquet", b"PAR1 A fox")):
            with pytest.raises(ValueError, match=f"{name}' cannot be read"):
                load_image_set_prompts(write(tmp_path / name, content))

    @pytest.mark.parametrize(
        "name, read",
        [
            ("rubric.txt", read_rubric),
            ("recipe.yaml", lambda path: read_config(["--config", str(path)])),
            ("01/story.json", lambda path: load_stories(path.parents[1])),
            ("prompt_alignment.json", read_json),
            ("results.json", lambda path: save_report({}, path.parent)),
        ],
    )
    def test_other_files_of_users(self, tmp_path, name, read):
        for text, named in (('{"a": "é"}'.encode("cp1252"), "UTF-8"), (b"{", "JSON")):
            if named == "UTF-8" or name.endswith(".json"):
                with pytest.raises(ValueError, match=f"{Path(name).name}.*{named}"):
                    read(Path(write(tmp_path / name, text)))


GENEVAL = [
    {"tag": "position", "include": [{"class": "cow", "count": 1, "position": ["right of", 0]}], "prompt": "A cow."},
    {"tag": "counting", "include": [{"class": "hen", "count": 2}], "exclude": [], "prompt": "Two hens."},
]


class TestColumnsOfAnyKind:
    @pytest.mark.parametrize(
        "values",
        [
            [row["include"] for row in GENEVAL],
            [1, "2", None, [3], {"four": 4}],
            ["12", 12],
            [{"a": 1}, {"b": "x"}, {}],
            [[[1, "a"]], [[0.7, 1 / 3, -0.1]]],
            [{"boxes": {"fox": [0.7, 0.3]}}, {"boxes": {"hen": [1, 2]}}],
            [10**30, 1],
            [True, 1],
            ["true", "null"],
        ],
    )
    @pytest.mark.parametrize("name", ["p.jsonl", "p.json", "folder"])
    def test_values_are_those_of_the_file(self, tmp_path, values, name):
        rows = [{"prompt": f"Prompt {number}.", "extra": value} for number, value in enumerate(values)]
        content = json.dumps(rows) if name == "p.json" else "\n".join(map(json.dumps, rows))
        write(tmp_path / (name if "." in name else f"{name}/p.jsonl"), content)
        write_image(tmp_path / "a.png")
        rows = [{**row, "images": ["a.png"]} for row in rows]
        edits = write(tmp_path / "edits" / "p.jsonl", "\n".join(map(json.dumps, rows)))
        dataset = load_image_set_prompts(tmp_path / name)
        found = [row["extra"] for row in dataset]
        assert found == values and list(map(type, found)) == list(map(type, values))
        assert load_edit_prompts(edits, image_folder=tmp_path)["extra"][:] == values
        assert dataset.with_format(None)["extra"][:] == values and dataset.select([1])[0]["extra"] == values[1]

    def test_rewards_get_them(self, tmp_path):
        path = write(tmp_path / "geneval.jsonl", "\n".join(map(json.dumps, GENEVAL)))
        rows = PromptRows(load_image_set_prompts(path), row_settings(), "it")
        assert [rows.row(number)["include"] for number in (0, 1)] == [row["include"] for row in GENEVAL]
        assert [rows.row(number)["exclude"] for number in (0, 1)] == [None, []]

    @pytest.mark.parametrize(
        "rows, named",
        [
            ([{"prompt": "A fox."}, {"prompt": 5}], "row 1"),
            ([{"prompt": "A fox."}, {"prompt": "\ud83d fox"}], "row 1"),
            ([{"prompt": "A fox."}, ["A hen."]], "Row 1"),
            ([{"prompt": "A fox.", "references": ["a.png"]}, {"prompt": "A hen.", "references": "a.png"}], "row 1"),
        ],
    )
    def test_what_cannot_work_names_the_row(self, tmp_path, rows, named):
        with pytest.raises(ValueError, match=named):
            load_image_set_prompts(write(tmp_path / "p.jsonl", "\n".join(map(json.dumps, rows))))

    def test_not_a_number(self, tmp_path):
        path = write(tmp_path / "p.jsonl", '{"prompt": "A fox.", "weight": NaN}\n{"prompt": "A hen.", "weight": 1.5}')
        weights = load_image_set_prompts(path)["weight"][:]
        assert math.isnan(weights[0]) and weights[1] == 1.5


BYTES = png(noise(3))
BINARY, TEXT = ("bytes", pa.binary()), ("path", pa.string())
STORED = {
    "struct": (pa.struct([BINARY, TEXT]), {"bytes": BYTES, "path": None}),
    "large": (pa.struct([("bytes", pa.large_binary()), ("path", pa.large_string())]), {"bytes": BYTES, "path": None}),
    "other order": (pa.struct([TEXT, BINARY]), {"path": "x.png", "bytes": BYTES}),
    "bytes alone": (pa.struct([BINARY]), {"bytes": BYTES}),
    "no struct": (pa.binary(), BYTES),
    "large binary": (pa.large_binary(), BYTES),
    "path": (pa.struct([BINARY, TEXT]), {"bytes": None, "path": "a.png"}),
    "large string": (pa.large_string(), "a.png"),
}
TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
PAIR = {
    "prompt": pa.array([[{"role": "user", "content": "Are both red?"}]], TURNS),
    "completion": pa.array([[{"role": "assistant", "content": "Yes"}]], TURNS),
}


def load_pairs(path, **options):
    arguments = reward.JudgeScriptArguments(dataset_name=str(path), **options)
    return reward.load_pairs(arguments, SimpleNamespace(dataset_num_proc=1), arguments.dataset_split, None)


class TestStoredImages:
    @pytest.mark.parametrize("kind, value", STORED.values(), ids=STORED)
    @pytest.mark.parametrize("as_list", [None, pa.list_, pa.large_list])
    def test_parquet_of_other_programs(self, tmp_path, kind, value, as_list):
        write_image(tmp_path / "a.png", 3)
        column = "image" if as_list is None else "images"
        images = pa.array([value if as_list is None else [value] * 2], kind if as_list is None else as_list(kind))
        pq.write_table(pa.table({"prompt": ["Add a hat."], column: images}), tmp_path / "p.parquet")
        dataset = load_edit_prompts(tmp_path / "p.parquet")
        assert SourceImages(dataset, "it").load(0)[-1].tobytes() == noise(3).tobytes()

    @pytest.mark.parametrize("kind, is_refused", [(HFImage(), False), (Value("string"), True)])
    def test_large_lists_of_python(self, kind, is_refused):
        features = Features({"prompt": Value("string"), "images": LargeList(kind)})
        dataset = Dataset.from_dict({"prompt": ["Add a hat."], "images": [["a.png", "b.png"]]}, features=features)
        with pytest.raises(ValueError, match="must be a list of images") if is_refused else nullcontext():
            check_edit_columns(dataset)

    def test_in_the_other_commands(self, tmp_path):
        kind, value = STORED["large"]
        images = pa.array([[value, value]], pa.large_list(kind))
        pq.write_table(pa.table({"images": images, **PAIR}), tmp_path / "pairs.parquet")
        assert load_pairs(tmp_path / "pairs.parquet")[0]["images"][1].tobytes() == noise(3).tobytes()
        pq.write_table(pa.table({"prompt": ["A fox."], "references": images}), tmp_path / "sets.parquet")
        assert SourceImages(load_image_set_prompts(tmp_path / "sets.parquet"), "it", "references").max_count == 2

    @pytest.mark.parametrize("data_url, side", [("", 300), ("", 25), ("data:image/png;base64,", 2)])
    def test_base64_is_named_in_short(self, tmp_path, data_url, side):
        text = data_url + b64encode(noise(1, (side, side)).tobytes()).decode()
        path = write(tmp_path / "edits.jsonl", json.dumps({"prompt": "Add a hat.", "image": text}))
        pair = {"images": [text, text], "prompt": "Are both red?", "completion": "Yes"}
        for load in (
            lambda: load_edit_prompts(path),
            lambda: load_pairs(write(tmp_path / "p.jsonl", json.dumps(pair))),
        ):
            with pytest.raises(ValueError, match="base64") as error:
                load()
            assert len(str(error.value)) < 500

    def test_shown_values_are_cut(self):
        assert len(shorten("x" * 1000)) == 100 and shorten("x" * 1000).startswith("'xxx")

    def test_the_directory_of_images_is_guessed(self, tmp_path):
        """`images/` is where Flow-Factory keeps them; another one is named in the error."""
        path = write(tmp_path / "train.jsonl", json.dumps({"prompt": "Add a hat.", "image": "a.png"}))
        write_image(tmp_path / "pictures" / "a.png", 3)
        with pytest.raises(ValueError, match="--image_folder"):
            load_edit_prompts(path)
        with pytest.raises(FileNotFoundError, match="no directory '.*nowhere'. Check `image_folder`"):
            load_edit_prompts(path, image_folder=tmp_path / "nowhere")
        assert load_edit_prompts(path, image_folder=tmp_path / "pictures")[0]["image"].tobytes() == noise(3).tobytes()
        write_image(tmp_path / "images" / "a.png", 4)
        for name in (path, tmp_path):
            assert load_edit_prompts(name)[0]["image"].tobytes() == noise(4).tobytes()
        write_image(tmp_path / "a.png", 5)  # beside the file, and so first
        assert load_edit_prompts(path)[0]["image"].tobytes() == noise(5).tobytes()


class TestCaptionFolders:
    """Images with a text beside each, as ai-toolkit, kohya's scripts and musubi-tuner read them."""

    def make(self, folder, names, text="A {}."):
        for number, name in enumerate(names):
            write_image(folder / f"{name}.png", number)
            write(folder / f"{name}.txt", text.format(name) + "\n")

    @pytest.mark.parametrize("inside", ["", "10_fox"])
    def test_texts_are_prompts_and_images_targets(self, tmp_path, inside):
        self.make(tmp_path / inside, ["b", "a"])
        rows = load_image_set_prompts(tmp_path)
        assert (rows["prompt"][:], rows["rows"][:]) == (["A a.", "A b."], [1, 1])
        assert [image.tobytes() for image in rows["target"]] == [noise(1).tobytes(), noise(0).tobytes()]
        assert load_image_set_prompts(tmp_path, "train[1:]")["prompt"][:] == ["A b."]
        with pytest.raises(ValueError, match="need `prompt` and either `image` or `images`.* in `input1/`"):
            load_edit_prompts(tmp_path)

    def test_edits(self, tmp_path):
        self.make(tmp_path / "target", ["001", "002"], "Make {} red.")
        for number, name in enumerate(("input1/001.jpg", "input2/001.png", "input1/002.png", "input1/003.png")):
            write_image(tmp_path / name, 10 + number)
        rows = load_edit_prompts(tmp_path)
        assert (
            rows["prompt"][:] == ["Make 001 red.", "Make 002 red."]
            and rows[0]["target"].tobytes() == noise(0).tobytes()
        )
        assert [len(images) for images in rows["images"]] == [2, 1]
        assert (
            rows[0]["images"][1].tobytes() == noise(11).tobytes()
            and rows[1]["images"][0].tobytes() == noise(12).tobytes()
        )
        with pytest.raises(ValueError, match="add `--edits`"):
            load_image_set_prompts(tmp_path)
        write_image(tmp_path / "input1" / "001.png", 20)
        with pytest.raises(ValueError, match=r"input1' has two images of one name: 001.jpg, 001.png. Move one away"):
            load_edit_prompts(tmp_path)
        (tmp_path / "input1" / "001.png").unlink()
        (tmp_path / "input1" / "002.png").unlink()
        with pytest.raises(ValueError, match="no source of the same name in input1, input2: target/002.png"):
            load_edit_prompts(tmp_path)

    def test_the_tenth_source_is_the_last(self, tmp_path):
        self.make(tmp_path / "target", ["001"])
        for number in (2, 10, 1):
            write_image(tmp_path / f"input{number}" / "001.png", 10 + number)
        images = load_edit_prompts(tmp_path)[0]["images"]
        assert [image.tobytes() for image in images] == [noise(10 + number).tobytes() for number in (1, 2, 10)]

    def test_sources_in_a_directory_of_another_name(self, tmp_path):
        self.make(tmp_path / "target", ["001"])
        write_image(tmp_path / "control" / "001.png", 10)
        with pytest.raises(ValueError, match="control/001.png. Name directories of sources input1, input2."):
            load_edit_prompts(tmp_path)

    def test_an_image_without_a_text(self, tmp_path):
        self.make(tmp_path, ["a", "b"])
        (tmp_path / "b.txt").unlink()
        with pytest.raises(ValueError, match=r"1 of the 2 images of .* have no text beside them: b\.png"):
            load_image_set_prompts(tmp_path)
        write(tmp_path / "b.txt", " \n")
        with pytest.raises(ValueError, match=r"texts without a prompt: b\.txt"):
            load_image_set_prompts(tmp_path)

    def test_a_data_file_comes_first(self, tmp_path):
        self.make(tmp_path / "images", ["a"])
        write(tmp_path / "train.jsonl", json.dumps({"prompt": "Of the file."}))
        assert load_image_set_prompts(tmp_path)["prompt"][:] == ["Of the file."]

    def test_texts_without_images_are_prompts_line_by_line(self, tmp_path):
        write(tmp_path / "train.txt", "A fox.\nA cat.\n")
        assert load_image_set_prompts(tmp_path)["prompt"][:] == ["A fox.", "A cat."]


TURNS_OF = {
    "texts": {"prompt": "Are both red?", "completion": "Yes. Both are."},
    "TRL": {
        "prompt": [{"role": "user", "content": "Are both red?"}],
        "completion": [{"role": "assistant", "content": "Yes. Both are."}],
    },
    "LLaMA-Factory": {
        "messages": [
            {"role": "user", "content": "<image><image>Are both red?"},
            {"role": "assistant", "content": "Yes. Both are."},
        ]
    },
    "ShareGPT": {
        "conversations": [
            {"from": "human", "value": "<image>\n<image>\nAre both red?"},
            {"from": "gpt", "value": "Yes. Both are."},
        ]
    },
    "parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Are both red?"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "Yes. Both are."}]},
        ]
    },
    "ms-swift": {"query": "<image><image>Are both red?", "response": "Yes. Both are."},
}


class TestPairs:
    @pytest.mark.parametrize("texts", TURNS_OF.values(), ids=TURNS_OF)
    @pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json", "pairs.parquet"])
    def test_by_paths(self, tmp_path, texts, name):
        images = [write_image(tmp_path / "images" / f"{seed}.png", seed) and f"images/{seed}.png" for seed in (1, 2)]
        rows = [{"images": images, "source": "own", **texts}] * 2
        if name == "pairs.parquet":
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        else:
            write(tmp_path / name, json.dumps(rows) if name == "pairs.json" else "\n".join(map(json.dumps, rows)))
        for options in ({}, {"dataset_split": "train"}, {"dataset_split": "train[:50%]"}):
            dataset = load_pairs(tmp_path / name, **options)
            assert len(dataset) == (1 if "50%" in str(options) else 2)
        assert dataset[0]["prompt"] == TURNS_OF["TRL"]["prompt"]
        assert dataset[0]["completion"] == TURNS_OF["TRL"]["completion"]
        assert dataset[0]["images"][1].tobytes() == noise(2).tobytes()

    @pytest.mark.parametrize("texts", [TURNS_OF["TRL"], TURNS_OF["LLaMA-Factory"]], ids=["TRL", "LLaMA-Factory"])
    def test_a_directory_of_images(self, tmp_path, texts):
        names = [write_image(tmp_path / "data" / f"{seed}.png", seed) and f"{seed}.png" for seed in (1, 2)]
        rows = [{"images_file_names": names, **texts}, {"images_file_names": names[::-1], **texts}]
        write(tmp_path / "data" / "metadata.jsonl", "\n".join(map(json.dumps, rows)))
        dataset = load_pairs(tmp_path / "data", dataset_split="train")
        assert [row["images"][0].tobytes() for row in dataset] == [noise(1).tobytes(), noise(2).tobytes()]

    def test_broken_ones_are_left_out(self, tmp_path):
        names = [write_image(tmp_path / f"{seed}.png", seed) and f"{seed}.png" for seed in (1, 2)]
        rows = [
            {"images": names, **texts} for texts in (TURNS_OF["texts"], {"prompt": "Both?", "completion": "Maybe"})
        ]
        path = write(tmp_path / "pairs.jsonl", "\n".join(map(json.dumps, rows)))
        with pytest.raises(ValueError, match="Row 1"):
            load_pairs(path)
        assert len(load_pairs(path, skip_broken=True)) == 1

    def test_rankings_by_paths(self, tmp_path, monkeypatch):
        names = [write_image(tmp_path / f"{seed}.png", seed) and f"{seed}.png" for seed in range(3)]
        row = {"reference": names[0], "candidates": names[1:], "ranking": [1, 0], "prompt": "A fox."}
        path = write(tmp_path / "rankings.jsonl", json.dumps(row))
        assert [pair["completion"][0]["content"] for pair in load_pairs(path)] == ["Yes", "No"]
        judge = SimpleNamespace(name="judge", score=lambda images, prompts: [0.5] * len(images))
        monkeypatch.setattr(evaluate_judge, "load_scorer", lambda args: judge)
        monkeypatch.chdir(tmp_path)
        evaluate_judge.evaluate(evaluate_judge.JudgeArguments(dataset_name="rankings.jsonl"))
        (results,) = read_json(tmp_path / "results" / "results.json")
        assert results["num_instances"] == 1


def as_plain(value):
    """A dataset as its rows, images as their bytes."""
    if isinstance(value, Dataset):
        return as_plain(list(value.with_format(None)))
    if isinstance(value, list | tuple):
        return [as_plain(part) for part in value]
    if isinstance(value, dict):
        return {name: as_plain(part) for name, part in value.items()}
    return value.tobytes() if isinstance(value, Image.Image) else value


def row_settings():
    return SimpleNamespace(height=64, width=64, set_layout=None, panel_template="{panel}", panel_generation="")


def content(dataset):
    rows = PromptRows(dataset, row_settings(), "it")
    return [rows.row(number) for number in range(len(rows))]


SET = {"prompt": "A 1x2 grid layout of foxes. [LEFT]:Red. [RIGHT]:Blue.", "height": 64, "width": 128, "weight": 0.5}
SET |= {"rows": 1, "cols": 2, "panels": ["Red.", "Blue."], "theme": "Foxes."}
T2IS = {"idx": 1, "prompt": SET["prompt"], "layout": "1x2", "height": 64, "width": 128, "criteria": None}
EDIT = {"prompt": "Add a hat.", "image": noise(1), "height": 64, "width": 64}
RANKING = {"reference": noise(1), "candidates": [noise(2), noise(3)], "ranking": [1, 0], "prompt": "A fox."}
FUNCTIONS = {
    "rows of sets": (content, SET),
    "rows of edits": (content, EDIT),
    "check_image_set_columns": (check_image_set_columns, SET),
    "complete_image_sets": (complete_image_sets, SET),
    "convert_t2is": (convert_t2is, T2IS),
    "check_edit_columns": (check_edit_columns, EDIT),
    "exclude_benchmark_images": (
        lambda dataset: exclude_benchmark_images(dataset, Dataset.from_list([{**EDIT, "image": noise(9)}])),
        EDIT,
    ),
    "validate_pairs": (validate_pairs, make_pair(noise(1), noise(2), "Are both red?", "Yes")),
    "swap_pairs": (swap_pairs, make_pair(noise(1), noise(2), "Are both red?", "Yes")),
    "check_ranking_columns": (check_ranking_columns, RANKING),
    "rankings_to_pairs": (rankings_to_pairs, RANKING),
}


class TestFormats:
    @pytest.mark.parametrize("function, row", FUNCTIONS.values(), ids=FUNCTIONS)
    def test_each_is_read_as_plain_values(self, function, row):
        dataset = Dataset.from_list([row, row])
        expected = as_plain(function(dataset))
        for kind in ("torch", "numpy", "pandas", "arrow"):
            assert as_plain(function(dataset.with_format(kind))) == expected

    def test_a_transform_is_refused(self):
        with pytest.raises(ValueError, match="transform"):
            check_edit_columns(Dataset.from_list([EDIT]).with_transform(lambda rows: rows))


class TestSplitsAndConfigurations:
    @pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.parquet", "train.jsonl.gz"])
    def test_a_copy_beside_a_file_is_not_read(self, tmp_path, name):
        file = tmp_path / "data" / name
        for prompt in ("before", "now"):
            write_prompt(file, prompt)
            shutil.copy(file, f"{file}.bak") if prompt == "before" else None
        assert load_split(file.parent, "train")["prompt"][:] == ["now"]

    def test_files_that_are_not_read_are_named(self, tmp_path, caplog):
        for name in ("train.jsonl", "test.jsonl", "README.md", ".hidden.jsonl"):
            write(tmp_path / "data" / name, '{"prompt": "a"}')
        (tmp_path / "link").symlink_to(tmp_path / "data")
        for folder in ("data", "link"):
            load_split(tmp_path / folder, "train")
        assert "are read" not in caplog.text
        write(tmp_path / "data" / "more.csv", "prompt\nb\n")
        assert load_split(tmp_path / "data", "train")["prompt"][:] == ["a"]
        assert "not more.csv" in caplog.text

    def two(self, folder: Path, name: str) -> Path:
        rows = [f"Prompt {number}." for number in range(4)]
        if name == "saved":
            DatasetDict({"train": Dataset.from_dict({"prompt": rows})}).save_to_disk(folder / name)
        elif name == "folder":
            write(folder / name / "train.csv", "prompt\n" + "\n".join(rows))
        elif name == "p.parquet":
            pq.write_table(pa.table({"prompt": rows}), folder / name)
        else:
            write(folder / name, "\n".join(rows))
        return folder / name

    @pytest.mark.parametrize("name", ["p.txt", "p.parquet", "saved", "folder"])
    def test_slices(self, tmp_path, name):
        path = self.two(tmp_path, name)
        for split, count in (
            ("train", 4),
            ("train[:50%]", 2),
            ("train[1:]", 3),
            ("train[:1]+train[-1:]", 2),
            ("train[:1]+train[9:]", 1),
        ):
            assert len(load_image_set_prompts(path, split)) == count
        for split in ("test", "train[", "train[:0]", "train[4:]", "train[500:600]"):
            with pytest.raises(ValueError, match=name):
                load_image_set_prompts(path, split)

    def test_other_splits_are_not_read(self, tmp_path):
        self.two(tmp_path, "folder")
        write(tmp_path / "folder" / "test.csv", "prompt\nA red fox, in snow\n")
        assert len(load_image_set_prompts(tmp_path / "folder")) == 4
        with pytest.raises(ValueError, match="test.csv"):
            load_image_set_prompts(tmp_path / "folder", "test")

    def test_configurations(self, tmp_path):
        for name in ("a", "b"):
            write(tmp_path / "data [1]" / name / "train.txt", f"Prompt {name}.")
        configs = [{"config_name": name, "data_files": f"{name}/train.txt"} for name in ("a", "b")]
        write(tmp_path / "data [1]" / "README.md", f"---\nconfigs: {json.dumps(configs)}\n---\n")
        assert load_image_set_prompts(tmp_path / "data [1]", config="b")["prompt"][:] == ["Prompt b."]
        with pytest.raises(ValueError, match="a, b.*dataset_config"):
            load_image_set_prompts(tmp_path / "data [1]")
        with pytest.raises(ValueError, match="'c'"):
            load_image_set_prompts(tmp_path / "data [1]", config="c")
        with pytest.raises(ValueError, match="dataset_config"):
            load_image_set_prompts(write(tmp_path / "p.txt", "A fox."), config="a")

    def test_of_the_hub(self, tmp_path):
        files = {"a/train.csv": b"prompt\nA hen\nA cow", "b/train.csv": b"prompt\nA red fox, in snow\nA glass, full"}
        configs = [{"config_name": path[0], "data_files": path} for path in files]
        files["README.md"] = f"---\nconfigs: {json.dumps(configs)}\n---\n".encode()
        with HubServer({"hf_a": "tester"}) as hub, hub.connected(tmp_path / "hub", "hf_a"):
            hub.add_repo("tester/prompts", files, "dataset")
            assert load_image_set_prompts("tester/prompts", "train[1:]", "a")["prompt"][:] == ["A cow"]
            hub.add_repo("tester/geneval", {"train.jsonl": "\n".join(map(json.dumps, GENEVAL)).encode()}, "dataset")
            assert load_image_set_prompts("tester/geneval")[0]["include"] == GENEVAL[0]["include"]
            for options, named in (
                ({"config": "b"}, "fields"),
                ({}, "a, b.*dataset_config"),
                ({"split": "no", "config": "a"}, "no"),
            ):
                with pytest.raises(ValueError, match=named):
                    load_image_set_prompts("tester/prompts", **options)

    def test_one_that_would_do_nothing(self, tmp_path):
        path = write(tmp_path / "pairs.jsonl", "{}")
        for options in (["--dataset_config", "a"], ["--dataset_name", path, "--eval_files", "a"]):
            with pytest.raises(ValueError, match=options[-2]):
                reward.main(["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", *options])

    def test_each_command_takes_one(self):
        modules = (build_arguments, evaluate_arguments, evaluate_judge, reward, script_arguments)
        classes = [value for module in modules for value in vars(module).values() if is_dataclass(value)]
        with_dataset = [{field.name for field in fields(each)} for each in classes]
        assert sum("dataset_name" in names for names in with_dataset) > 5
        assert all("dataset_config" in names for names in with_dataset if "dataset_name" in names)


def test_a_dataset_that_is_neither_here_nor_on_the_hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConnectionError, match="The Hub cannot be reached for the dataset user/missing, which is not in"
    ):
        load_paco_dataset("user/missing")
