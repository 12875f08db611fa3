# SPDX-License-Identifier: Apache-2.0
"""Tests of the image-set prompts and of the grids."""

import gzip
import json
import re
from functools import partial

import pytest
from datasets import Dataset
from PIL import Image

from paco_trl.data import (
    ImageSetPrompt,
    check_image_set_columns,
    check_image_set_rows,
    convert_t2is,
    convert_t2is_row,
    criteria_dict,
    demo_prompts_path,
    find_truncated_panels,
    join_grid,
    load_image_set_prompts,
    panel_size,
    parse_image_set_prompt,
    split_grid,
)
from paco_trl.data.grid_prompts import default_grid
from paco_trl.data.image_sets import complete_image_sets
from testing_utils import noise


# Written out, not computed: an independent statement of the row-major order
MARKERS = {
    "1x2": ["[LEFT]", "[RIGHT]"],
    "1x3": ["[LEFT]", "[MIDDLE]", "[RIGHT]"],
    "1x5": ["PANEL-1", "PANEL-2", "PANEL-3", "PANEL-4", "PANEL-5"],
    "1x7": ["PANEL-1", "PANEL-2", "PANEL-3", "PANEL-4", "PANEL-5", "PANEL-6", "PANEL-7"],
    "2x2": ["[TOP]-[LEFT]", "[TOP]-[RIGHT]", "[BOTTOM]-[LEFT]", "[BOTTOM]-[RIGHT]"],
    "2x3": [
        *("[TOP]-[LEFT]", "[TOP]-[MIDDLE]", "[TOP]-[RIGHT]"),
        *("[BOTTOM]-[LEFT]", "[BOTTOM]-[MIDDLE]", "[BOTTOM]-[RIGHT]"),
    ],
    "2x4": [
        *("[TOP]-[LEFT]", "[TOP]-[MIDDLE-LEFT]", "[TOP]-[MIDDLE-RIGHT]", "[TOP]-[RIGHT]"),
        *("[BOTTOM]-[LEFT]", "[BOTTOM]-[MIDDLE-LEFT]", "[BOTTOM]-[MIDDLE-RIGHT]", "[BOTTOM]-[RIGHT]"),
    ],
}
OTHER_MARKERS = {
    "1x1": ["PANEL-1"],
    "2x1": ["[TOP]", "[BOTTOM]"],
    "1x4": ["[LEFT]", "[MIDDLE-LEFT]", "[MIDDLE-RIGHT]", "[RIGHT]"],
    "2x2": ["PANEL-1", "PANEL-2", "PANEL-3", "PANEL-4"],
    "3x3": [
        *("[TOP]-[LEFT]", "[TOP]-[MIDDLE]", "[TOP]-[RIGHT]"),
        *("[MIDDLE]-[LEFT]", "[MIDDLE]-[MIDDLE]", "[MIDDLE]-[RIGHT]"),
        *("[BOTTOM]-[LEFT]", "[BOTTOM]-[MIDDLE]", "[BOTTOM]-[RIGHT]"),
    ],
}

# The criteria of two rows, with one dimension in common and no name
CRITERIA_1 = {"Style": {"Ink": "All in ink."}, "Logic": {"Tricks": "No trick twice."}}
CRITERIA_2 = {"Style": {"Fur": "Red fur."}, "Place": {"Tent": "One tent."}}


def write_prompt(layout, markers, texts=None):
    """One prompt in the T2IS format, with its theme and its panel texts."""
    texts = texts or [f"A fox does trick number {number}." for number in range(1, len(markers) + 1)]
    theme = f"MANY-PANEL Images with a {layout} grid layout of a circus fox.All images are in ink."
    panels = [f"{marker}:{text}" for marker, text in zip(markers, texts, strict=True)]
    return " ".join([theme, *panels]), theme, texts


def t2is_row(**changes):
    prompt, _, _ = write_prompt("2x2", MARKERS["2x2"])
    row = {
        "idx": "0042",
        "prompt": prompt,
        "height": 1024,
        "width": 512,
        "layout": "2x2",
        "theme": "A circus fox shows four tricks.",
        "category": "Character",
        "task_name": "Tricks",
        "original_idx": "7",
        "criteria": {"Style": {"Ink": "All panels are in ink."}, "Logic": {"Tricks": "No trick is shown twice."}},
        "editing_prompts": ["A fox."],
    }
    return {**row, **changes}


def image_set_row(**changes):
    prompt, theme, texts = write_prompt("1x2", MARKERS["1x2"])
    return {"prompt": prompt, "theme": theme, "rows": 1, "cols": 2, "panels": texts, **changes}


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_jsonl(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class TestParseImageSetPrompt:
    @pytest.mark.parametrize("layout, markers", [*MARKERS.items(), *OTHER_MARKERS.items()])
    def test_layouts(self, layout, markers):
        prompt, theme, texts = write_prompt(layout, markers)
        rows, cols = map(int, layout.split("x"))
        assert len(texts) == rows * cols
        assert parse_image_set_prompt(prompt) == ImageSetPrompt(theme, rows, cols, texts)

    @pytest.mark.parametrize(
        "text",
        [
            "A sign says [RIGHT]: and the fox obeys.",
            "The fox reads PANEL-2: in its script.",
            "Over it hangs [BOTTOM]. [RIGHT] is painted below.",  # no colon
            "The fox sees a 3x3 grid layout of mirrors.",
        ],
    )
    def test_mention_inside_a_sentence_is_not_a_marker(self, text):
        texts = ["Trick 0.", text, "Trick 2."]
        prompt, theme, _ = write_prompt("1x3", MARKERS["1x3"], texts)
        prompt = prompt.replace(theme, f"{theme} {text}")
        assert parse_image_set_prompt(prompt)[0] == f"{theme} {text}" and parse_image_set_prompt(prompt)[3] == texts

    def test_layouts_and_sentence_ends(self):
        texts = ["The fox bows!", 'It says "Hi."', "It waits…", "它走。"]
        for layout in ("2X2", "2×2", "2 x 2", "2x2-"):
            assert parse_image_set_prompt(write_prompt(layout, MARKERS["2x2"], texts)[0])[1:] == (2, 2, texts)

    def test_no_sentence_end_is_not_a_marker(self):
        # The twin of the test above: the same marker text counts or not by what stands in front of it
        with pytest.raises(ValueError, match="has 1 panel markers.*1 more"):
            parse_image_set_prompt(write_prompt("1x2", MARKERS["1x2"], ["The fox bows", "It leaves."])[0])

    def test_no_layout(self):
        prompt, _, _ = write_prompt("2x2", MARKERS["2x2"])
        prompt = prompt.replace("2x2 grid layout", "square layout")
        for text in (prompt, prompt.replace("trick number 4", "a 2x2 grid layout"), write_prompt("0x2", [])[0]):
            with pytest.raises(ValueError, match="names no `RxC grid layout`"):
                parse_image_set_prompt(text)

    @pytest.mark.parametrize(
        ("layout", "markers"),
        [
            ("2x3", MARKERS["2x2"]),
            ("900000x900000", MARKERS["2x2"]),
            ("2x2", ["[TOP]-[LEFT]", "[BOTTOM]-[LEFT]", "[TOP]-[RIGHT]", "[BOTTOM]-[RIGHT]"]),  # column by column
            ("2x2", ["[TOP]-[LEFT]", "[TOP]-[RIGHT]", "PANEL-3", "PANEL-4"]),  # two ways in one prompt
        ],
    )
    def test_markers_that_do_not_fit(self, layout, markers):
        with pytest.raises(ValueError, match=rf"{layout} grid. Write `\[TOP\]-\[LEFT\]"):
            parse_image_set_prompt(write_prompt(layout, markers)[0])

    def test_empty_panel(self):
        with pytest.raises(ValueError, match=r"panel \[MIDDLE\]: .* is empty"):
            parse_image_set_prompt(write_prompt("1x3", MARKERS["1x3"], ["One.", " ", "Three."])[0])


class TestConvertT2IS:
    def test_row(self):
        row = t2is_row()
        prompt, _, texts = write_prompt("2x2", MARKERS["2x2"])
        criteria = [
            {"dimension": "Style", "name": "Ink", "text": "All panels are in ink."},
            {"dimension": "Logic", "name": "Tricks", "text": "No trick is shown twice."},
        ]
        kept = {name: row[name] for name in ("theme", "height", "width", "category")} | {
            "id": "0042",
            "prompt": prompt,
        }
        assert convert_t2is_row(row) == {
            **kept, "rows": 2, "cols": 2, "panels": texts, "criteria": criteria, "subcategory": "Tricks", "case_id": "7",
        }  # fmt: skip
        assert row == t2is_row()  # the input is left alone

    @pytest.mark.parametrize(
        ("changes", "message"),
        [({"layout": "4x1"}, "layout"), ({"width": 513}, "1024x513"), ({"prompt": "A fox."}, "names no")],
    )
    def test_wrong_rows(self, changes, message):
        with pytest.raises(ValueError, match=f"idx '0042': .*{message}"):
            convert_t2is_row(t2is_row(**changes))


class TestCriteria:
    def test_dataset_gives_back_only_the_own_criteria(self):
        raw = Dataset.from_list([t2is_row(criteria=CRITERIA_1), t2is_row(criteria=CRITERIA_2)])
        # The problem exists: Arrow gives the first row the names of the second one
        assert "Place" in raw[0]["criteria"] and "Fur" in raw[0]["criteria"]["Style"]

        with pytest.raises(ValueError, match="no column `layout`"):
            convert_t2is(raw.remove_columns("layout"))
        converted = convert_t2is(raw)
        assert criteria_dict(converted[0]["criteria"]) == CRITERIA_1
        assert criteria_dict(converted[1]["criteria"]) == CRITERIA_2

    def test_none_is_left_out(self):
        criteria = {"Style": {"Ink": None}, "Logic": None, "Place": {"Tent": "One.", "Sky": None}}
        assert criteria_dict(criteria) == {"Place": {"Tent": "One."}}
        assert criteria_dict(None) == criteria_dict([]) == criteria_dict({}) == {}

    def test_criteria_as_people_write_them(self, tmp_path):
        expected = {"Identity": {"1": "Same fox.", "2": "Same hat."}, "Style": {"1": "Alike."}}
        written = {"Identity": ["Same fox.", "Same hat."], "Style": "Alike."}
        assert criteria_dict(written) == expected
        assert criteria_dict(["A.", "B."]) == criteria_dict({"": ["A.", "B."]}) == {"": {"1": "A.", "2": "B."}}
        assert criteria_dict(json.dumps(written)) == expected and criteria_dict(" A.") == {"": {"1": " A."}}
        with pytest.raises(ValueError, match="which is not JSON"):
            criteria_dict(str(written))
        file = tmp_path / "prompts.csv"
        Dataset.from_list([{"prompt": "A fox.", "criteria": json.dumps(written)}]).to_csv(file)
        assert criteria_dict(load_image_set_prompts(file)[0]["criteria"]) == expected
        file = tmp_path / "prompts.jsonl"
        file.write_text(json.dumps({"prompt": "A fox.", "criteria": written}) + "\n")
        assert criteria_dict(load_image_set_prompts(file)[0]["criteria"]) == expected
        for wrong in ({"Identity": 3}, {"Identity": {"a": 3}}, 3, [[1]]):
            with pytest.raises(ValueError, match="must have texts by dimension"):
                criteria_dict(wrong)
        file.write_text(json.dumps({"prompt": "A fox.", "criteria": {"Identity": 3}}) + "\n")
        with pytest.raises(ValueError, match="Row 0: `criteria` is {'Identity': 3}"):
            load_image_set_prompts(file)


class TestCheckImageSetColumns:
    def both(self, rows):
        """The checks of the rows as they are, and as a dataset."""
        dataset = Dataset.from_dict({name: [row[name] for row in rows] for name in rows[0]})
        return [partial(check_image_set_rows, rows), partial(check_image_set_columns, dataset)]

    def test_accepts(self):
        above = image_set_row(prompt="Two foxes, one above the other.", rows=2, cols=1)
        for check in self.both([image_set_row(), above]):
            assert check() is None
        check_image_set_rows([image_set_row(panels=("One.", "Two."))])

    def test_missing_column(self):
        row = image_set_row()
        del row["cols"]
        for check in [*self.both([row]), partial(check_image_set_rows, [image_set_row(), row])]:
            with pytest.raises(ValueError, match="The prompts have no `cols`. A set in a grid has"):
                check()
        with pytest.raises(ValueError, match="Row 0 has rows='two' and cols=2; both must be whole numbers from 1 on"):
            check_image_set_rows([image_set_row(rows="two")])
        others = {
            "image": r"The rows have source images \(`image`\). To edit them add `--edits`",
            "layout": "The prompts have no `cols`. Convert raw T2IS rows with `convert_t2is`",
        }
        for column, message in others.items():
            with pytest.raises(ValueError, match=message):
                check_image_set_columns(Dataset.from_list([row | {column: "x"}]))
        for check, data in ((check_image_set_rows, []), (check_image_set_columns, Dataset.from_list([]))):
            with pytest.raises(ValueError, match="no rows"):
                check(data)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"prompt": " \n"}, "`prompt` of row 1"),
            ({"rows": 0}, "Row 1 has rows=0"),
            ({"cols": None}, "cols=None"),
            *(({"panels": texts}, "`panels` of row 1 .* 1x2 grid") for texts in (["One."], ["One."] * 3)),
            ({"panels": ["One.", " "]}, "`panels` of row 1"),
            ({"rows": 2, "cols": 1}, "Row 1 has rows=2 and cols=1, but .* 1x2 grid"),
            ({"prompt": "A 1x2 grid of foxes.", "rows": 2, "cols": 1}, "Row 1 .* 1x2 grid"),
            ({"prompt": "A 1x2 grid layout.", "cols": 1, "panels": ["One."]}, "Row 1 .* 1x2 grid"),
        ],
    )
    def test_wrong_value(self, changes, message):
        for check in self.both([image_set_row(), image_set_row(**changes), image_set_row()]):
            with pytest.raises(ValueError, match=message):
                check()


class TestLoadImageSetPrompts:
    def test_jsonl(self, tmp_path):
        rows = [image_set_row(id="a"), image_set_row(id="b", prompt="A line\u2028separator.")]
        path = tmp_path / "own.jsonl"
        # As is, not escaped: U+2028 may stand inside a JSON string and ends no line of the file
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
        assert load_image_set_prompts(str(path)).to_list() == rows

    def test_raw_rows_are_converted(self, tmp_path):
        rows = [t2is_row(criteria=CRITERIA_1), t2is_row(criteria=CRITERIA_2)]
        dataset = load_image_set_prompts(write_jsonl(tmp_path / "raw.jsonl", rows))
        assert dataset.to_list() == [convert_t2is_row(row) for row in rows]

        Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
        assert load_image_set_prompts(tmp_path / "saved").to_list() == dataset.to_list()
        with pytest.raises(ValueError, match="no split 'test'"):  # would be all rows
            load_image_set_prompts(tmp_path / "saved", split="test")
        with pytest.raises(
            ValueError, match=re.escape("'train[:1' is not a slice of rows. Write one as `train[:18]`")
        ):
            load_image_set_prompts(tmp_path / "saved", split="train[:1")
        assert len(load_image_set_prompts(tmp_path / "saved", split="train[:1]")) == 1

    def test_criteria_as_dictionaries(self, tmp_path):
        rows = [image_set_row(criteria=CRITERIA_1), image_set_row(criteria=CRITERIA_2)]
        dataset = load_image_set_prompts(write_jsonl(tmp_path / "own.jsonl", rows))
        assert all(isinstance(criteria, list) for criteria in dataset["criteria"])
        assert [criteria_dict(criteria) for criteria in dataset["criteria"]] == [CRITERIA_1, CRITERIA_2]

    def test_directory_of_json_lines(self, tmp_path, own_cache):
        names = ["train-00000-of-00002", "train-00001-of-00002", "test"]
        rows = [t2is_row(idx=name) for name in names]
        for name, row in zip(names, rows, strict=True):
            write_jsonl(tmp_path / "data" / f"{name}.jsonl", [row])
        assert load_image_set_prompts(tmp_path / "data").to_list() == [convert_t2is_row(row) for row in rows[:2]]
        assert load_image_set_prompts(tmp_path / "data", split="test")["id"][:] == ["test"]

    FOX = "A fox, in snow."
    SINGLE = {"prompt": FOX, "theme": FOX, "rows": 1, "cols": 1, "panels": [FOX]}

    def test_bare_prompts(self, tmp_path, own_cache, caplog):
        """In each kind of file, and in a dataset of the Hub, a prompt without a layout is an image set or a single image."""
        prompt, theme, texts = write_prompt("1x2", MARKERS["1x2"])
        expected = [self.SINGLE, {"prompt": prompt, "theme": theme, "rows": 1, "cols": 2, "panels": texts}]
        (tmp_path / "texts").mkdir()
        for name in ("a.txt", "texts/a.txt"):
            (tmp_path / name).write_text(f"A fox, in snow.\r\n\n{prompt}\n", encoding="utf-8-sig")
        (tmp_path / "b.csv").write_text(f'prompt\n"A fox, in snow."\n"{prompt}"\n')
        (tmp_path / "b.tsv").write_text(f"prompt\nA fox, in snow.\n{prompt}\n")
        bare = [{"prompt": row["prompt"]} for row in expected]
        lines = write_jsonl(tmp_path / "c.jsonl", bare).read_bytes()
        (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(lines))
        (tmp_path / "list.json").write_text(json.dumps(bare, indent=2))
        Dataset.from_list(bare).to_parquet(tmp_path / "d.parquet")
        Dataset.from_list(bare).save_to_disk(tmp_path / "saved")
        for name in ("a.txt", "texts", "b.csv", "b.tsv", "c.jsonl", "c.jsonl.gz", "list.json", "d.parquet", "saved"):
            rows = load_image_set_prompts(tmp_path / name).to_list()
            assert rows == expected and rows[0].keys() == self.SINGLE.keys(), name
        assert not caplog.messages
        write_jsonl(tmp_path / "e.jsonl", [{"text": row["prompt"]} for row in expected])
        assert load_image_set_prompts(tmp_path / "e.jsonl").to_list() == expected
        (said,) = caplog.messages  # which column was guessed
        assert "e.jsonl' has no column `prompt`" in said and "`text`" in said

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("a.csv", "caption\nA fox.\n", "Rename .* to `prompt`"),
            ("a.jsonl", '{"prompt": "A fox.", "rows": 1}\n', "cols"),
            ("a.jsonl", '{"prompt": "Make it red.", "image": "a.png"}\n', "--edits"),
            ("a.jsonl", '{"prompt": [{"role": "user", "content": "A fox."}]}\n', "`prompt` of row 0 .*content"),
            ("a.jsonl", '{"prompt": "A fox."}\n{"prompt": \n', "a.jsonl: what begins on line 2 is not valid JSON"),
            ("a.jsonl", '{"prompt": "A fox."}\n"A fox."\n', "Row 1 of .*a.jsonl"),
            ("a.txt", "A 1x2 grid layout of foxes. [LEFT]:One.\n", "1 panel markers"),
            ("a.xml", "A fox.", r"a.xml.*\.jsonl.*\.parquet"),
        ],
    )
    def test_wrong_files(self, tmp_path, own_cache, name, text, message):
        for missing in (tmp_path / name, str(tmp_path / name), "nowhere.jsonl"):  # no id on the Hub
            with pytest.raises(FileNotFoundError, match="Check the path"):
                load_image_set_prompts(missing)
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            load_image_set_prompts(tmp_path / name)


class TestCompleteImageSets:
    def test_a_prompt_alone(self):
        prompt, theme, texts = write_prompt("1x2", MARKERS["1x2"])
        given = Dataset.from_list([{"prompt": "A fox.", "height": 64.0}, {"prompt": prompt, "height": None}])
        expected = [
            {"prompt": "A fox.", "theme": "A fox.", "rows": 1, "cols": 1, "panels": ["A fox."], "height": 64},
            {"prompt": prompt, "theme": theme, "rows": 1, "cols": 2, "panels": texts, "height": None},
        ]
        assert complete_image_sets(given).to_list() == expected
        assert complete_image_sets(given.select([1, 0])).to_list() == expected[::-1]
        assert given.column_names == ["prompt", "height"] and given["height"][:] == [64.0, None]

    def test_the_theme_of_a_row_without_one(self, tmp_path):
        rows = [{name: value for name, value in image_set_row().items() if name != "theme"}]
        themes = [write_prompt("1x2", MARKERS["1x2"])[1]]
        assert complete_image_sets(Dataset.from_list(rows))["theme"][:] == themes
        assert load_image_set_prompts(write_jsonl(tmp_path / "a.jsonl", rows))["theme"][:] == themes
        own = Dataset.from_list([image_set_row(theme="Foxes.")])
        assert complete_image_sets(own)[:] == own[:]
        # Where the text does not have one, a reward says that it is missing
        unknown = Dataset.from_list([{**rows[0], "prompt": "Two foxes, left and right."}])
        assert "theme" not in complete_image_sets(unknown).column_names


class TestDemoPrompts:
    def test_round_trip(self):
        dataset = load_image_set_prompts(demo_prompts_path())
        assert dataset.column_names == ["id", "prompt", "theme", "rows", "cols", "panels", "height", "width"]
        for row in dataset:
            parsed = parse_image_set_prompt(row["prompt"])
            assert (parsed.rows, parsed.cols, parsed.panels) == (row["rows"], row["cols"], row["panels"])
            # 512 pixels for each panel
            assert panel_size(row["height"], row["width"], row["rows"], row["cols"]) == (512, 512)
            assert 60 <= len(row["prompt"].split()) <= 150

    def test_they_have_a_name(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        ids = load_image_set_prompts("demo")["id"][:]
        assert len(ids) == 24 and load_image_set_prompts("demo", "train[18:]")["id"][:] == ids[18:]
        write_jsonl(tmp_path / "demo", [])
        with pytest.raises(ValueError, match="demo"):  # what is there has the name
            load_image_set_prompts("demo")


class TestGrids:
    @pytest.mark.parametrize("rows, cols", [(2, 3), (3, 1), (1, 1)])
    def test_split_inverts_join(self, rows, cols):
        panels = [noise(index, (6, 4)) for index in range(rows * cols)]
        grid = join_grid(panels, rows, cols)
        assert grid.size == (6 * cols, 4 * rows)
        assert [panel.tobytes() for panel in split_grid(grid, rows, cols)] == [panel.tobytes() for panel in panels]

    def test_row_major_order(self):
        # The image is painted here, not by `join_grid`: the two could be wrong in the same way
        grid, names = Image.new("RGB", (30, 20)), ["red", "green", "blue", "yellow", "black", "white"]
        for index, color in enumerate(names):
            row, col = divmod(index, 3)
            grid.paste(color, (10 * col, 10 * row, 10 * col + 10, 10 * row + 10))
        expected = [Image.new("RGB", (10, 10), color) for color in names]
        assert [panel.tobytes() for panel in split_grid(grid, 2, 3)] == [panel.tobytes() for panel in expected]
        assert join_grid(expected, 2, 3).tobytes() == grid.tobytes()
        # The same image with another layout gives other panels
        assert [panel.size for panel in split_grid(grid, 1, 3)] == [(10, 20)] * 3
        assert panel_size(1024, 1536, 2, 3) == (512, 512) and panel_size(20, 30, 1, 3) == (20, 10)

    @pytest.mark.parametrize("count", [0, 5, 7])
    def test_another_number_of_panels(self, count):
        with pytest.raises(ValueError, match=f"has 6 panels, got {count}"):
            join_grid([Image.new("RGB", (4, 4))] * count, 2, 3)

    @pytest.mark.parametrize(
        ("count", "layout"),
        [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (5, (1, 5)), (6, (2, 3)), (8, (2, 4))],
    )
    def test_default_grids(self, count, layout):
        assert default_grid(count) == layout

    @pytest.mark.parametrize("height, width, rows, cols", [(1024, 1000, 2, 3), (101, 90, 2, 3), (64, 64, 0, 2)])
    def test_size_that_does_not_divide(self, height, width, rows, cols):
        with pytest.raises(ValueError, match="grid"):
            split_grid(Image.new("RGB", (width, height)), rows, cols)


def test_panels_that_a_model_does_not_read_to_the_end():
    prompt, _, texts = write_prompt("2x2", MARKERS["2x2"])
    starts = [prompt.index(text) for text in texts]

    def lost(length: int) -> list[int]:
        return find_truncated_panels(prompt, lambda text: len(text) > length)

    assert lost(len(prompt)) == [] and lost(len(prompt) - 1) == [4]
    assert lost(starts[3]) == [4] and lost(starts[2] + 3) == [3, 4] and lost(10) == [1, 2, 3, 4]
    assert lost(starts[2] + len(texts[2])) == [4]  # the third is read to its last character
    assert find_truncated_panels("A hat.", lambda text: True) == []
