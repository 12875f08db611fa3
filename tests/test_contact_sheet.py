# SPDX-License-Identifier: Apache-2.0
"""Contact sheets: planted colours are where they belong, and rows before and after training are told apart."""

import random

import numpy as np
import pytest
from PIL import Image

from paco_trl.trainer.contact_sheet import SheetImage, save_contact_sheet


CAPTION = "consistency 0.731\nclip_t 0.304\nadvantage -1.204"


def color_of(prompt, generation, series=0):
    """A colour of its own for each image: no grey, which the edges of letters have as well."""
    return 70 + 20 * prompt, 60 + 40 * generation, 15 + 120 * series


def sheet_images(prompts, generations, names=("",), size=(64, 64), caption=CAPTION):
    """Flat images of all prompts; one series per name."""
    return [
        SheetImage(
            prompt,
            generation,
            Image.new("RGB", size, color_of(prompt, generation, series)),
            f"Prompt number {prompt}",
            caption,
            series=series,
            series_name=name,
        )
        for prompt in range(prompts)
        for series, name in enumerate(names)
        for generation in range(generations)
    ]


def box_of(sheet, color):
    """(left, top, right, bottom) of the pixels of a colour; the ends belong to it."""
    found = np.argwhere((np.asarray(sheet) == color).all(axis=-1))  # (n, 2)
    assert len(found) > 100, f"{color} is not on the sheet"
    top, left = found.min(axis=0)
    bottom, right = found.max(axis=0)
    return int(left), int(top), int(right), int(bottom)


def ink(sheet, left, top, right, bottom):
    """Number of dark pixels in a box: text, which is the only black thing on these sheets."""
    return int((np.asarray(sheet)[max(top, 0) : bottom, max(left, 0) : right].max(axis=-1) < 50).sum())


class TestWithoutSeries:
    # Sizes and places of the sheets of a round, as they are without series
    @pytest.mark.parametrize(
        ("prompts", "generations", "size", "sheet_size"),
        [(1, 1, (64, 64), (231, 310)), (4, 1, (64, 64), (231, 1075)), (8, 8, (256, 64), (1618, 974))],
    )
    def test_the_sheet_of_a_round_keeps_its_size_and_order(self, tmp_path, prompts, generations, size, sheet_size):
        images = sheet_images(prompts, generations, size=size)
        for image in images:
            image.image.putdata([(9 + 30 * image.prompt, 60, 10 + 30 * image.generation)] * (size[0] * size[1]))
        sheet = save_contact_sheet(images, "Round 3", tmp_path / "sheet.png")
        assert sheet.size == sheet_size
        boxes = {
            (i, j): box_of(sheet, (9 + 30 * i, 60, 10 + 30 * j)) for i in range(prompts) for j in range(generations)
        }
        for (prompt, generation), (left, top, right, bottom) in boxes.items():
            assert abs((right - left) / (bottom - top) - size[0] / size[1]) < 0.06 * size[0] / size[1]
            if prompt:
                assert top > boxes[prompt - 1, generation][3]
            if generation:
                assert left > boxes[prompt, generation - 1][2]
        assert boxes[0, 0][0] <= 0.02 * sheet.width + 1  # no margin

    def test_rows_of_nameless_images_are_those_of_series_zero(self, tmp_path):
        plain = [SheetImage(i.prompt, i.generation, i.image, i.prompt_text, i.caption) for i in sheet_images(3, 2)]
        sheet = save_contact_sheet(plain, "Round 3", tmp_path / "plain.png")
        explicit = save_contact_sheet(sheet_images(3, 2, names=("",)), "Round 3", tmp_path / "explicit.png")
        assert np.array_equal(np.asarray(sheet), np.asarray(explicit))
        # A name is all that makes it another sheet
        named = save_contact_sheet(sheet_images(3, 2, names=("before",)), "Round 3", tmp_path / "named.png")
        assert named.width > sheet.width


class TestBeforeAndAfter:
    NAMES = ("base model", "step 120")

    def test_after_stands_below_before_in_the_column_of_its_generation(self, tmp_path):
        images = sheet_images(3, 2, self.NAMES)
        random.Random(0).shuffle(images)
        sheet = save_contact_sheet(images, "Evaluation", tmp_path / "folder" / "sheet.png")
        with Image.open(tmp_path / "folder" / "sheet.png") as saved:
            assert np.array_equal(np.asarray(saved.convert("RGB")), np.asarray(sheet))
        bottom_before = 0
        for prompt in range(3):
            for series in range(2):
                boxes = [box_of(sheet, color_of(prompt, generation, series)) for generation in range(2)]
                assert boxes[0][1] == boxes[1][1] and boxes[0][3] == boxes[1][3]  # side by side
                assert boxes[0][2] < boxes[1][0]
                assert boxes[0][1] > bottom_before  # below all before it
                bottom_before = boxes[0][3]
            before, after = (box_of(sheet, color_of(prompt, 1, series)) for series in range(2))
            assert before[0] == after[0] and before[2] == after[2]  # one above the other

    def test_the_order_of_rows_is_that_of_series_whatever_their_names(self, tmp_path):
        sheets = [
            save_contact_sheet(sheet_images(1, 1, names), "Evaluation", tmp_path / "sheet.png")
            for names in (("aaa", "bbb"), ("bbb", "aaa"))
        ]
        for sheet in sheets:
            assert box_of(sheet, color_of(0, 0, 0))[3] < box_of(sheet, color_of(0, 0, 1))[1]
        assert not np.array_equal(*map(np.asarray, sheets))  # the labels moved

    def test_each_row_has_its_label_at_the_left_of_its_middle(self, tmp_path):
        sheet = save_contact_sheet(sheet_images(2, 2, self.NAMES), "Evaluation", tmp_path / "named.png")
        nameless = save_contact_sheet(sheet_images(2, 2, ("", "")), "Evaluation", tmp_path / "nameless.png")
        for prompt in range(2):
            for series in range(2):
                left, top, right, bottom = box_of(sheet, color_of(prompt, 0, series))
                middle = (top + bottom) // 2
                assert left > 70  # as wide as the labels
                assert ink(sheet, 0, middle - 6, left, middle + 7) > 50
                assert ink(sheet, 0, top, left, middle - 12) == ink(sheet, 0, middle + 12, left, bottom) == 0
                assert ink(sheet, left - 3, top, left, bottom) == 0  # it ends before the image
                assert ink(sheet, 0, top, 2, bottom) == 0  # and begins on the sheet
                left, top, right, bottom = box_of(nameless, color_of(prompt, 0, series))
                assert left < 12
                assert ink(nameless, 0, top, left, bottom) == 0
        assert sheet.height == nameless.height

    def test_long_labels_are_broken_and_keep_off_the_images(self, tmp_path):
        for name in ("after 120 steps at half resolution", "MMMMMMMMMMMM"):
            sheet = save_contact_sheet(sheet_images(1, 1, ("base", name)), "Evaluation", tmp_path / "sheet.png")
            left, top, right, bottom = box_of(sheet, color_of(0, 0, 1))
            assert ink(sheet, 0, top, left, bottom) > 100
            assert ink(sheet, left - 2, top, left, bottom) == 0
            assert ink(sheet, left, top, right + 1, bottom) == 0
            assert left < 150

    def test_a_prompt_has_one_title(self, tmp_path):
        sheet = save_contact_sheet(sheet_images(2, 2, self.NAMES, caption=""), "Evaluation", tmp_path / "sheet.png")
        for prompt in range(2):
            title, none = (box_of(sheet, color_of(prompt, 0, series)) for series in range(2))
            assert ink(sheet, title[0], title[1] - 18, title[2], title[1] - 1) > 20
            assert ink(sheet, none[0], none[1] - 18, none[2], none[1] - 1) == 0

    def test_a_prompt_whose_first_row_lacks_its_first_image_has_its_title_on_the_next(self, tmp_path):
        images = sheet_images(1, 2, self.NAMES, caption="")
        assert images[0].series == images[0].generation == 0
        sheet = save_contact_sheet(images[1:], "Evaluation", tmp_path / "sheet.png")
        left, top, right, _ = box_of(sheet, color_of(0, 0, 1))
        assert ink(sheet, left, top - 18, right, top - 1) > 20

    @pytest.mark.parametrize("generations", [1, 4])
    @pytest.mark.parametrize("lines", [1, 3, 7])
    def test_captions_are_whole(self, tmp_path, generations, lines):
        images = sheet_images(2, generations, self.NAMES, caption="\n".join(["clip_t 0.304"] * lines))
        sheet = save_contact_sheet(images, "Evaluation", tmp_path / "sheet.png")
        boxes = [box_of(sheet, color_of(prompt, 0, series)) for prompt in range(2) for series in range(2)]
        assert boxes == sorted(boxes, key=lambda box: box[1])
        shades = []
        for number, (left, _, right, bottom) in enumerate(boxes):
            # Up to the next image, or, above a title, up to the title; up to the end of the sheet for the last
            end = boxes[number + 1][1] - 18 * (number % 2) if number < 3 else sheet.height
            paper = 255 - np.asarray(sheet)[bottom + 1 : end, left:right].max(axis=-1).astype(int)
            shades.append(paper.sum())
            assert paper[-2:].sum() == 0  # the caption ends before that
        # A line is as dark wherever it stands, so below each row are all of them
        assert shades[0] / lines > 8000
        assert max(shades) < 1.1 * min(shades)

    def test_rows_are_as_high_as_their_images(self, tmp_path):
        wide = save_contact_sheet(sheet_images(8, 4, self.NAMES, size=(256, 64)), "Evaluation", tmp_path / "wide.png")
        square = save_contact_sheet(sheet_images(8, 4, self.NAMES), "Evaluation", tmp_path / "square.png")
        assert wide.width == square.width
        widths = []
        for sheet, aspect in ((wide, 4), (square, 1)):
            left, top, right, bottom = box_of(sheet, color_of(7, 3, 1))
            assert (right - left + 1) / (bottom - top + 1) == pytest.approx(aspect, rel=0.05)
            widths.append(right - left)
        assert widths[0] == pytest.approx(widths[1], rel=0.02)
        # A set that is wide before and square after: each row has its own height
        mixed = [*sheet_images(1, 1, ("before",), size=(256, 64)), *sheet_images(1, 1, ("", "after"))[1:]]
        sheet = save_contact_sheet(mixed, "Evaluation", tmp_path / "mixed.png")
        before, after = (box_of(sheet, color_of(0, 0, series)) for series in range(2))
        assert before[2] - before[0] == pytest.approx(after[2] - after[0], abs=4)
        assert (after[3] - after[1]) / (before[3] - before[1]) == pytest.approx(4, rel=0.1)
