# SPDX-License-Identifier: Apache-2.0
"""Tests of editing prompts: format, loader, conversions, what is kept out of training, and the source images."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, List, Value
from datasets import Image as ImageFeature
from PIL import ExifTags, Image, ImageFile

from paco_trl.data import (
    SourceImages,
    check_edit_columns,
    convert_gedit_bench,
    exclude_benchmark_images,
    has_source_images,
    load_edit_prompts,
    load_image_set_prompts,
)


PAGE = Path(__file__).parent.parent / "docs" / "editing.md"


def picture(seed, size=(48, 32)):
    """A picture with detail, and unlike that of any other seed."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def write(path, image, kind="PNG", **options):
    path.write_bytes(encoded(image, kind, **options))
    return str(path)


def orientation(value):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = value
    return exif


def with_paths(paths, column="image"):
    feature = ImageFeature() if column == "image" else List(ImageFeature())
    features = Features({"prompt": Value("string"), column: feature})
    return Dataset.from_dict({"prompt": ["Edit."] * len(paths), column: paths}, features=features)


def with_bytes(*images):
    return with_paths([{"bytes": image, "path": None} for image in images])


def edits(*rows):
    return Dataset.from_list([{"prompt": prompt, "image": image} for prompt, image in rows])


class TestFormat:
    def test_both_columns_are_the_format(self):
        single = edits(("A.", picture(0)), ("B.", picture(1)))
        several = Dataset.from_list([{"prompt": "Join them.", "images": [picture(0), picture(1)]}])
        check_edit_columns(single.cast_column("image", ImageFeature(decode=False)))
        # Sizes and grids may be given for some rows
        for name, value in {"height": 64, "width": 32, "rows": 1, "cols": 2, "panels": ["left", "right"]}.items():
            single = single.add_column(name, [value, None])
        for dataset in (single, several):
            check_edit_columns(dataset)
            assert has_source_images(dataset)
        assert not has_source_images(single.remove_columns("image"))

    def test_columns_of_another_dataset_are_named(self, tmp_path):
        (tmp_path / "p.jsonl").write_text(
            '{"instruction": "Paint it.", "input_image": "a.png", "edited_image": "b.png"}'
        )
        with pytest.raises(ValueError, match=r"need `prompt` .*'edited_image'.* Rename"):
            load_edit_prompts(tmp_path / "p.jsonl")

    @pytest.mark.parametrize(
        "changes, message",
        [
            ({"prompt": None}, "need `prompt`"),
            ({"images": [["a.png"]]}, "either `image` or `images`"),
            ({"image": ["a.png"]}, 'cast_column."image"'),
            ({"image": None, "images": [["a.png"]]}, 'cast_column."images"'),
            ({"prompt": [" "]}, "`prompt` of row 0"),
            ({"height": [64]}, "64 x None"),
            ({"height": [64], "width": [0]}, "`width` of row 0"),
            ({"rows": [1], "cols": [2], "panels": [["one"]]}, "panels"),
            ({"prompt": None, "instruction": ["x"], "input_image": ["a"], "task_type": ["b"]}, "convert_gedit_bench"),
            ({"prompt": None, "instruction": ["x"], "input_image": ["a"]}, "Rename"),  # InstructPix2Pix
        ],
    )
    def test_each_fault_is_an_error(self, changes, message):
        dataset = edits(("Paint it.", picture(0)))
        check_edit_columns(dataset)  # without the fault
        for name, values in changes.items():
            dataset = dataset.remove_columns(name) if name in dataset.column_names else dataset
            dataset = dataset if values is None else dataset.add_column(name, values)
        with pytest.raises(ValueError, match=message):
            check_edit_columns(dataset)


class TestSizes:
    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
    def test_sizes_are_those_of_the_decoded_image(self, kind):
        for value in range(1, 9):
            dataset = with_bytes(encoded(picture(0, (40, 24)), kind, exif=orientation(value)))
            sources = SourceImages(dataset, "the dataset")
            assert sources.sizes(0) == [dataset[0]["image"].size] == [sources.load(0)[0].size]
            assert sources.sizes(0) == [(24, 40) if value > 4 else (40, 24)]

    def test_pixels_are_not_read(self, tmp_path, monkeypatch):
        paths = [write(tmp_path / f"{kind}.x", picture(0), kind) for kind in ("PNG", "JPEG", "TIFF", "WEBP")]
        calls, load = [], ImageFile.ImageFile.load_prepare
        monkeypatch.setattr(ImageFile.ImageFile, "load_prepare", lambda self: calls.append(self.format) or load(self))
        sources = SourceImages(with_paths(paths), "the dataset")
        assert calls == []
        sources.load(1)
        assert calls == ["JPEG"]


def test_selected_formatted_and_undecoded_datasets(tmp_path):
    """Rows are those of the dataset that was given, not those of the table that it selects from."""
    dataset = edits(*[(f"{n}.", picture(n, (8 + n, 8))) for n in range(6)])
    dataset.save_to_disk(tmp_path / "saved")
    dataset = load_edit_prompts(tmp_path / "saved")
    assert [SourceImages(dataset, "it").sizes(row)[0][0] for row in range(6)] == [8, 9, 10, 11, 12, 13]
    chosen = dataset.select([4, 1])
    for variant in (
        chosen,
        chosen.cast_column("image", ImageFeature(decode=False)),
        chosen.with_format("numpy", columns=["prompt"]),
        chosen.with_transform(lambda batch: {"nothing": [0] * len(batch["prompt"])}),
    ):
        format_before, features_before = variant.format, variant.features.copy()
        sources = SourceImages(variant, "it")
        assert [sources.sizes(row) for row in range(2)] == [[(12, 8)], [(9, 8)]]
        assert sources.load(0)[0].tobytes() == picture(4, (12, 8)).tobytes()
        assert (variant.format, variant.features) == (format_before, features_before)
    grey = edits(("A.", Image.new("RGB", (8, 4), (255, 0, 0)))).cast_column("image", ImageFeature(mode="L"))
    assert SourceImages(grey, "it").load(0)[0].getpixel((0, 0)) == (76, 76, 76)


class TestBadImages:
    def test_each_fault_names_its_row_before_the_run(self, tmp_path):
        good, jpeg = write(tmp_path / "good.png", picture(0)), encoded(picture(0), "JPEG")
        (tmp_path / "cut.png").write_bytes(encoded(picture(0))[:20])
        faults = {
            "is None": None,
            "FileNotFoundError": str(tmp_path / "missing.png"),
            "cut.png.*OSError": str(tmp_path / "cut.png"),
            "embedded.*OSError": {"bytes": jpeg[:10], "path": None},
        }
        for message, bad in faults.items():
            with pytest.raises(ValueError, match=f"Row 1 of the dataset: its source image.*{message}"):
                SourceImages(with_paths([good, bad, good]), "the dataset")
        table = Dataset.from_dict({"images": [[good], [good, None]]}).cast_column("images", List(ImageFeature()))
        with pytest.raises(ValueError, match="Row 1 of the evaluation: its source image 1 "):
            SourceImages(table, "the evaluation")

    def test_pixels_that_are_cut_short(self):
        whole = encoded(Image.effect_noise((64, 64), 50).convert("RGB"))
        sources = SourceImages(with_bytes(whole, whole[: len(whole) // 2]), "the dataset")
        assert sources.sizes(1) == [(64, 64)] and len(sources.load(0)) == 1
        with pytest.raises(ValueError, match="Row 1 of the dataset: .*cannot be read"):
            sources.load(1)

    def test_a_file_that_changes_during_the_run(self, tmp_path):
        path = write(tmp_path / "a.png", picture(0, (8, 8)))
        sources = SourceImages(with_paths([path]), "the dataset")
        write(tmp_path / "a.png", picture(0, (16, 8)))
        with pytest.raises(ValueError, match="Row 0 of the dataset: .* 16 x 8 .* 8 x 8"):
            sources.load(0)
        (tmp_path / "a.png").unlink()
        with pytest.raises(ValueError, match="Row 0 of the dataset: .*FileNotFoundError"):
            sources.digests(0)


def test_digests_are_those_of_the_bytes_and_computed_once(tmp_path):
    paths = [write(tmp_path / f"{n}.png", picture(n)) for n in range(2)]
    embedded = [{"bytes": Path(path).read_bytes(), "path": "x.png"} for path in paths]
    sources = SourceImages(with_paths([paths, embedded[::-1]], "images"), "the dataset")
    digests = sources.digests(0)
    assert digests == sources.digests(1)[::-1] != sources.digests(1)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    (tmp_path / "0.png").unlink()
    assert sources.digests(0) == digests


class TestLoader:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "images").mkdir()
        for number in range(3):
            write(tmp_path / "images" / f"{number}.png", picture(number))
        return tmp_path

    @staticmethod
    def write_rows(path, rows):
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        return path

    def test_paths_of_a_file_are_relative_to_it(self, folder, monkeypatch):
        rows = [{"prompt": "A.", "image": "images/0.png"}, {"prompt": "B.", "image": "images/1.png", "id": "b"}]
        path = self.write_rows(folder / "edits.jsonl", rows)
        monkeypatch.chdir(folder.parent)
        dataset = load_edit_prompts(path)
        assert isinstance(dataset.features["image"], ImageFeature)
        assert dataset["id"][:] == [None, "b"]
        assert dataset[1]["image"].tobytes() == picture(1).tobytes()
        # A relative path to the file itself too
        monkeypatch.chdir(folder)
        dataset = load_edit_prompts("edits.jsonl")
        monkeypatch.chdir(folder.parent)
        assert SourceImages(dataset, "it").sizes(1) == [(48, 32)]

    @pytest.mark.parametrize("load", [load_edit_prompts, load_image_set_prompts])
    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ({"references": ["../images/0.png"]}, "`references`: the path .*leaves"),
            ({}, "`references` of row 1"),
            ({"references": ["images/0.png"], "reference_roles": []}, "row 1 of .*List 1"),
            ({"references": ["images/0.png"], "reference_roles": ["pose"]}, "row 1 of .*identity, style, logic"),
        ],
    )
    def test_references(self, folder, load, bad, message):
        source = {"image": "images/0.png"} if load is load_edit_prompts else {}
        references = {"references": ["images/1.png", "images/2.png"], "reference_roles": ["style", None]}
        good = {"prompt": "A.", **references, **source}
        dataset = load(self.write_rows(folder / "prompts.jsonl", [good, {**good, "reference_roles": None}]))
        assert [image.tobytes() for image in dataset[1]["references"]] == [picture(n).tobytes() for n in (1, 2)]
        dataset.save_to_disk(folder / "saved")
        assert load(folder / "saved")["reference_roles"][:] == [["style", None], None]
        path = self.write_rows(folder / "prompts.jsonl", [good, {"prompt": "B.", **source, **bad}])
        with pytest.raises(ValueError, match=message):
            load(path)

    def test_prompts_of_sets_open_references_alone(self, folder):
        layout = {"rows": 1, "cols": 1, "panels": ["A."]}
        row = {"prompt": "A.", **layout, "image": "../0.png", "references": ["images/0.png"]}
        features = load_image_set_prompts(self.write_rows(folder / "sets.jsonl", [row])).features
        assert features["references"] == List(ImageFeature()) and features["image"] == Value("string")

    def test_saved_datasets_and_their_splits(self, folder):
        DatasetDict(train=edits(("A.", picture(0))), test=edits(("B.", picture(1)))).save_to_disk(folder / "saved")
        assert load_edit_prompts(folder / "saved")["prompt"][:] == ["A."]
        assert load_edit_prompts(str(folder / "saved"), split="test")["prompt"][:] == ["B."]
        with pytest.raises(ValueError, match="no split 'dev'"):
            load_edit_prompts(folder / "saved", split="dev")
        with pytest.raises(ValueError, match="`image_folder`"):  # the images are embedded
            load_edit_prompts(folder / "saved", image_folder=folder)

    def test_tables(self, folder, monkeypatch):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(folder / "cache"))
        (folder / "a.csv").write_text("prompt,image\nMake it red.,images/1.png\n")
        dataset = load_edit_prompts(folder / "a.csv")
        dataset.to_parquet(folder / "a.parquet")
        for each in (dataset, load_edit_prompts(folder / "a.parquet")):
            assert each["prompt"][:] == ["Make it red."]
            assert each[0]["image"].tobytes() == picture(1).tobytes()


def gedit_rows():
    rows = [("k1", "Add a hat.", "en", 0), ("k2", "加一顶帽子。", "cn", 0), ("k3", "Change the sign.", "en", 1)]
    names = ["key", "instruction", "instruction_language", "input_image", "input_image_raw", "Intersection_exist"]
    values = [(*texts, picture(seed, (24, 16)), picture(seed), texts[0] != "k2") for *texts, seed in rows]
    return Dataset.from_list([dict(zip(names, row, strict=True), task_type="ps_human") for row in values])


class TestGEditBench:
    def test_conversion(self):
        dataset = convert_gedit_bench(gedit_rows())
        assert sorted(dataset.column_names) == ["id", "image", "intersection", "language", "prompt", "task_type"]
        assert dataset["language"][:] == ["en", "cn", "en"]
        assert dataset[2]["image"].size == (48, 32)
        assert dataset[2]["prompt"] == "Change the sign."
        assert dataset["intersection"][:] == [True, False, True]

    def test_other_columns_and_one_language(self):
        raw = gedit_rows()
        assert convert_gedit_bench(raw, language="cn")["id"][:] == ["k2"]
        assert convert_gedit_bench(raw.remove_columns("input_image_raw"))[0]["image"].size == (24, 16)
        others = raw.remove_columns("Intersection_exist")
        assert "intersection" not in convert_gedit_bench(others).column_names
        numbers = convert_gedit_bench(others.add_column("Intersection_exist", [1, 0, 0]))
        assert numbers["intersection"][:] == [True, False, False]
        with pytest.raises(ValueError, match="no rows"):
            convert_gedit_bench(raw, language="fr")
        with pytest.raises(ValueError, match="key"):
            convert_gedit_bench(raw.remove_columns("key"))

    def test_the_loader_converts(self, tmp_path):
        gedit_rows().save_to_disk(tmp_path / "gedit")
        shown = load_edit_prompts(tmp_path / "gedit", source_column="input_image")
        assert shown[0]["image"].size == (24, 16)
        dataset = load_edit_prompts(tmp_path / "gedit")
        assert dataset["id"][:] == ["k1", "k2", "k3"]
        dataset.save_to_disk(tmp_path / "converted")  # with the other source
        with pytest.raises(ValueError, match="`source_column`"):
            load_edit_prompts(tmp_path / "converted", source_column="input_image")


def test_raw_rows_of_sharegpt_4o_image(tmp_path, caplog):
    (tmp_path / "image").mkdir()
    for number in range(3):
        write(tmp_path / "image" / f"{number}.png", picture(number))
    texts = [{"input_prompt": f"Edit {number}.", "output_image": f"{number}_out.png"} for number in range(3)]
    rows = [text | {"input_image": [f"image/{number}.png"]} for number, text in enumerate(texts)]
    rows[1]["input_image"].append("image/0.png")
    (tmp_path / "text_and_image_to_image.json").write_text(json.dumps(rows))
    dataset = load_edit_prompts(tmp_path / "text_and_image_to_image.json")
    assert dataset.to_dict().keys() == {"id", "prompt", "images"} and dataset["id"][0] == "0_out.png"
    assert [len(row["images"]) for row in dataset] == [1, 2, 1]
    assert dataset[2]["images"][0].tobytes() == picture(2).tobytes()
    few = load_edit_prompts(tmp_path / "text_and_image_to_image.json", max_images=1)
    assert few["prompt"][:] == ["Edit 0.", "Edit 2."] and "Left out 1 of 3 rows that have more than 1" in caplog.text
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved" / "rows")
    again = load_edit_prompts(tmp_path / "saved" / "rows", image_folder=tmp_path)
    assert again["prompt"][:] == dataset["prompt"][:] and again.features == dataset.features


class TestDisjoint:
    @pytest.fixture
    def benchmark(self):
        return edits(("Add a red hat.", picture(0)), ("Make it night.", picture(1)))

    def kept(self, benchmark, *images):
        dataset = Dataset.from_list([{"prompt": "Other.", "image": image, "n": n} for n, image in enumerate(images)])
        return exclude_benchmark_images(dataset, benchmark)["n"][:]

    def test_a_source_image_of_the_benchmark_is_left_out(self, benchmark):
        other_file = Image.open(io.BytesIO(encoded(picture(1), "BMP")))
        assert other_file.tobytes() == picture(1).tobytes()  # `datasets` stores it as BMP, not as PNG
        images = [picture(0), other_file, picture(2), picture(0, (32, 48))]
        assert self.kept(benchmark, *images) == [2, 3]
        with pytest.raises(ValueError, match="All 2 rows"):
            self.kept(benchmark, *images[:2])

    def test_several_sources(self, benchmark):
        rows = [[picture(5), picture(1)], [picture(5), picture(6)]]
        dataset = Dataset.from_list([{"prompt": "Join.", "images": images} for images in rows])
        assert exclude_benchmark_images(dataset, benchmark)[0]["images"][1].tobytes() == picture(6).tobytes()
        of_lists = Dataset.from_list([{"prompt": "x", "images": [picture(8), picture(5)]}])
        assert self.kept(of_lists, picture(5), picture(1)) == [1]


def test_the_blocks_of_the_page_run(tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
    blocks = [code for code in blocks if "Trainer" not in code]
    # The block of the image folder needs the images that the text describes
    folder = next(number for number, code in enumerate(blocks) if "imagefolder" in code)
    assert len(blocks) == 4
    for number, code in enumerate(blocks):
        (tmp_path / str(number)).mkdir()
        if number == folder:
            images = tmp_path / str(number) / "images"
            images.mkdir()
            write(images / "car.png", picture(0))
            (images / "metadata.jsonl").write_text('{"file_name": "car.png", "prompt": "Paint the car green."}\n')
        monkeypatch.chdir(tmp_path / str(number))
        exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == "(64, 48)\n2 rows are left\n"
