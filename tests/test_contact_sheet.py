# SPDX-License-Identifier: Apache-2.0
"""Contact sheets: planted colors are where they belong, rows before and after training, and sources of edits."""

import random

import numpy as np
import pytest
import torch
from PIL import Image

from paco_trl.plots.contact_sheet import SheetImage, _wrap, save_contact_sheet
from paco_trl.plots.scored_sheets import ScoredImages, save_scored_sheet


CAPTION = "consistency 0.731\nclip_t 0.304\nadvantage -1.204"


def color_of(prompt, generation, series=0):
    """A color of its own for each image: no gray, which the edges of letters have as well."""
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
    """(left, top, right, bottom) of the pixels of a color; the ends belong to it."""
    packed = np.asarray(sheet.convert("RGBA")).view("<u4")[..., 0]  # (height, width)
    found = packed == int.from_bytes((*color, 255), "little")
    assert found.sum() > 100, f"{color} is not on the sheet"
    (ys,), (xs,) = found.any(axis=1).nonzero(), found.any(axis=0).nonzero()
    return int(xs[0]), int(ys[0]), int(xs[-1]), int(ys[-1])


def ink(sheet, left, top, right, bottom):
    """Number of dark pixels in a box: text, which is the only black thing on these sheets."""
    return int((np.asarray(sheet)[max(top, 0) : bottom, max(left, 0) : right].max(axis=-1) < 50).sum())


def shade(sheet, left, top, right, bottom):
    """Ink of a box with its gray edges, in black pixels: small letters have little else."""
    return (255 - np.asarray(sheet)[max(top, 0) : bottom, max(left, 0) : right].max(axis=-1).astype(int)).sum() / 255


class TestWithoutSeries:
    # Sizes and places of the sheets of a round, as they are without series
    @pytest.mark.parametrize(
        ("prompts", "generations", "size", "sheet_size"),
        [(1, 1, (64, 64), (231, 310)), (4, 1, (64, 64), (231, 1075)), (8, 8, (256, 64), (1618, 974))],
    )
    def test_the_sheet_of_a_round_keeps_its_size_and_order(self, tmp_path, prompts, generations, size, sheet_size):
        images = sheet_images(prompts, generations, size=size)
        for image in images:
            image.image.paste((9 + 30 * image.prompt, 60, 10 + 30 * image.generation), (0, 0, *size))
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


class TestForACard:
    @pytest.mark.parametrize(
        ("generations", "names", "has_sources"), [(1, ("",), False), (4, ("",), False), (2, ("before", "after"), True)]
    )
    def test_letters_and_images_are_legible_at_700_pixels(self, tmp_path, generations, names, has_sources):
        images = sheet_images(4, generations, names)
        sources = {0: [Image.new("RGB", (64, 64), (250, 0, 250))]} if has_sources else None
        sheet = save_contact_sheet(images, "Round 3", tmp_path / "card.png", sources, True)
        shown = 700 / sheet.width
        assert abs(sheet.width - 5.3 * 190) <= 1
        boxes = [box_of(sheet, color_of(i.prompt, i.generation, i.series)) for i in images]
        assert max(box[2] for box in boxes) < sheet.width
        assert all((right - left) * shown > 140 for left, _, right, _ in boxes)
        # A line of a caption, of which there are three: 10 pixels apart or more
        left, _, right, bottom = boxes[0]
        rows = np.asarray(sheet)[bottom + 2 :, left:right].max(axis=-1).min(axis=1) < 100
        starts = np.flatnonzero(rows[1:] & ~rows[:-1])[:3]
        assert (np.diff(starts) * shown > 10).all() and (np.diff(starts) * shown < 16).all()
        plain = save_contact_sheet(images, "Round 3", tmp_path / "plain.png", sources)
        assert plain.width != sheet.width


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
        wide = save_contact_sheet(sheet_images(4, 4, self.NAMES, size=(256, 64)), "Evaluation", tmp_path / "wide.png")
        square = save_contact_sheet(sheet_images(4, 4, self.NAMES), "Evaluation", tmp_path / "square.png")
        assert wide.width == square.width
        widths = []
        for sheet, aspect in ((wide, 4), (square, 1)):
            left, top, right, bottom = box_of(sheet, color_of(3, 3, 1))
            assert (right - left + 1) / (bottom - top + 1) == pytest.approx(aspect, rel=0.05)
            widths.append(right - left)
        assert widths[0] == pytest.approx(widths[1], rel=0.02)
        # A set that is wide before and square after: each row has its own height
        mixed = [*sheet_images(1, 1, ("before",), size=(256, 64)), *sheet_images(1, 1, ("", "after"))[1:]]
        sheet = save_contact_sheet(mixed, "Evaluation", tmp_path / "mixed.png")
        before, after = (box_of(sheet, color_of(0, 0, series)) for series in range(2))
        assert before[2] - before[0] == pytest.approx(after[2] - after[0], abs=4)
        assert (after[3] - after[1]) / (before[3] - before[1]) == pytest.approx(4, rel=0.1)


def test_dollars_in_a_prompt_are_not_mathematics(tmp_path):
    images = sheet_images(1, 2, caption="")
    for sources in (None, {0: [Image.new("RGB", (64, 64), SOURCE)]}):
        for prompt in (r"A tag that says $\frac$ in red", "x"):
            for image in images:
                image.prompt_text = prompt
            sheet = save_contact_sheet(images, "Round 3", tmp_path / "sheet.png", sources)
            top = box_of(sheet, color_of(0, 0))[1]
            assert (shade(sheet, 0, top - 18, sheet.width, top - 2) > 100) == (prompt != "x")


@pytest.mark.filterwarnings("error")  # of Matplotlib, for a letter that no font has
@pytest.mark.parametrize("sources", [None, {0: [Image.new("RGB", (64, 64), "white")]}])
def test_letters_without_a_font_are_left_out_quietly(tmp_path, sources):
    titles = []
    for prompt in ("\U0001f98a\u200d\U0001f98a A fox. \ue000\ue001", "… A fox. …", "\u96ea" * 200):
        images = sheet_images(1, 2)
        for image in images:
            image.prompt_text = prompt
        titles.append(save_contact_sheet(images, "Round 3", tmp_path / "sheet.png", sources).tobytes())
    assert titles[0] == titles[1] != titles[2]


def test_long_words_are_cut():
    assert _wrap("one two three", 8, 1) == "one …" and _wrap("one two", 8, 1) == "one two"
    assert _wrap("x" * 30, 8, 2) == "xxxxxxxx\nxxxxxx …"
    assert _wrap("\u96ea" * 30, 8, 1) == "\u96ea\u96ea …"  # twice as wide


SOURCE, SECOND_SOURCE = (240, 10, 200), (10, 220, 240)


def scored(prompts, generations, series, size=(64, 64)):
    """Flat images of all prompts in the colors of a series, with three scores each."""
    images = sheet_images(prompts, generations, ("", ""), size)
    pictures = [image.image for image in images if image.series == series]
    rewards = torch.arange(3.0 * len(pictures)).view(-1, 3) / 64 + series
    return ScoredImages(dict(enumerate(pictures)), generations, ["consistency", "clip_t", "edit"], rewards, {})


class TestSources:
    @pytest.fixture
    def save(self, tmp_path):
        """Saves a sheet; gives its picture."""

        def save(sources, prompts=1, generations=1, before=True, size=(64, 64), texts=None, name="sheet"):
            texts = texts or [f"Edit number {prompt}" for prompt in range(prompts)]
            first = scored(prompts, generations, 0, size) if before else None
            shown = scored(prompts, generations, 1, size)
            save_scored_sheet(tmp_path, name, "Evaluation", texts, shown, first, sources)
            with Image.open(tmp_path / f"{name}.png") as sheet:
                return sheet.convert("RGB")

        return save

    def flat(self, size=(64, 64), color=SOURCE):
        return Image.new("RGB", size, color)

    def test_of_one_image_a_prompt_the_order_is_source_before_after(self, save, tmp_path):
        plain = save(None, prompts=2, name="plain")
        sheet = save({1: [self.flat()]}, prompts=2)
        source, before, after = (box_of(sheet, color) for color in (SOURCE, color_of(1, 0, 0), color_of(1, 0, 1)))
        assert source[2] < before[0] and before[2] < after[0]
        assert np.abs(np.subtract(source, before))[[1, 3]].max() <= 1  # side by side, and as high
        assert source[2] - source[0] == pytest.approx(before[2] - before[0], abs=2)
        # Beside images as large as they are without it, all the same if their prompt has no source
        for prompt in range(2):
            with_sources, without = (box_of(image, color_of(prompt, 0, 1)) for image in (sheet, plain))
            assert with_sources[2] - with_sources[0] == pytest.approx(without[2] - without[0], abs=1)
            assert with_sources[3] - with_sources[1] == pytest.approx(without[3] - without[1], abs=1)
            # The title begins at the left of the column of sources, which is blank below where there are none
            top, bottom = with_sources[1], with_sources[3]
            assert shade(sheet, 0, top - 18, source[2], top - 1) > 20
            assert ink(sheet, 0, top, source[2], bottom) == 0
        # A caption below the source, of one line; the images' have four
        captions = [shade(sheet, left, bottom + 1, right, bottom + 17) for left, _, right, bottom in (source, before)]
        assert min(captions) > 20
        assert shade(sheet, source[0], source[3] + 17, source[2], source[3] + 50) == 0
        assert shade(sheet, before[0], before[3] + 17, before[2], before[3] + 50) > 60
        assert (tmp_path / "sheet.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()

    def test_without_sources_the_sheet_is_the_same_file(self, save, tmp_path):
        save(None, name="plain")
        plain = (tmp_path / "plain.png").read_bytes()
        for sources in ({}, {0: []}, {7: [self.flat()]}):  # the sheet has no prompt 7
            save(sources, name="same")
            assert (tmp_path / "same.png").read_bytes() == plain
        save({0: [self.flat()]}, name="other")
        assert (tmp_path / "other.png").read_bytes() != plain

    def test_beside_rows_before_and_after_it_stands_between_them_left_of_their_labels(self, save):
        colors = [SOURCE, SECOND_SOURCE]
        sheet = save({prompt: [self.flat(color=color)] for prompt, color in enumerate(colors)}, 2, 3)
        for prompt, color in enumerate(colors):
            source = box_of(sheet, color)
            before, after = (box_of(sheet, color_of(prompt, 0, series)) for series in range(2))
            assert before[3] < after[1]
            assert (source[1] + source[3]) / 2 == pytest.approx((before[1] + after[3]) / 2, abs=2)
            for left, top, _, bottom in (before, after):
                assert source[2] < left
                assert shade(sheet, source[2] + 1, top, left, bottom) > 50  # its label

    @pytest.mark.parametrize(
        ("size", "result", "before"),
        [
            ((600, 150), (64, 64), False),
            ((150, 600), (64, 64), True),
            ((150, 600), (256, 64), False),
            ((300, 300), (256, 64), True),
            ((300, 300), (64, 128), False),
        ],
    )
    def test_sources_of_other_sizes_keep_their_shape_and_shrink_no_image(self, save, size, result, before):
        plain = save(None, 2, 2, before, result)
        sheet = save({0: [self.flat(size)]}, 2, 2, before, result)
        for prompt in range(2):
            boxes = [box_of(image, color_of(prompt, 1, 1)) for image in (plain, sheet)]
            widths, heights = ([box[end + 2] - box[end] + 1 for box in boxes] for end in range(2))
            # Without series, an image of such a sheet can be some pixels wider than with them
            assert widths[1] == pytest.approx(widths[0], rel=0.03)
            assert widths[1] / heights[1] == pytest.approx(result[0] / result[1], rel=0.05)
        left, top, right, bottom = box_of(sheet, SOURCE)
        assert (right - left + 1) / (bottom - top + 1) == pytest.approx(size[0] / size[1], rel=0.05)
        # It is as wide as an image, or as high as one or the square of one; and off the titles
        assert right - left + 1 >= 0.97 * widths[1] or bottom - top + 1 >= 0.97 * max(heights[1], widths[1])
        first, next_title = box_of(sheet, color_of(0, 0, 0 if before else 1)), box_of(sheet, color_of(1, 0, 1))[1] - 18
        assert right < first[0] and bottom < next_title
        assert shade(sheet, 0, min(top, first[1]) - 18, sheet.width, min(top, first[1]) - 1) > 20

    @pytest.mark.parametrize("generations", [1, 2])
    def test_two_sources_are_one_picture_and_said_to_be_two(self, save, generations):
        one = save({0: [self.flat()]}, generations=generations)
        sheet = save({0: [self.flat((512, 512)), self.flat(color=SECOND_SOURCE)]}, generations=generations)
        first, second = box_of(sheet, SOURCE), box_of(sheet, SECOND_SOURCE)
        assert 0 < second[1] - first[3] < 15  # the second below the first, close to it
        assert first[0] == pytest.approx(second[0], abs=1) and first[2] == pytest.approx(second[2], abs=1)
        image = box_of(sheet, color_of(0, 0, 0))
        assert 0.65 * (image[2] - image[0]) < first[2] - first[0]
        assert first[2] < image[0]
        # "2 sources" is more ink than "source"
        said = [shade(sheet, 0, second[3] + 1, image[0], second[3] + 17)]
        left, _, right, bottom = box_of(one, SOURCE)
        said.append(shade(one, 0, bottom + 1, right, bottom + 17))
        assert said[0] > 1.2 * said[1] > 50

    def test_high_sources_are_beside_one_another(self, save):
        sheet = save({0: [self.flat((100, 300)), self.flat((100, 300), SECOND_SOURCE)]})
        first, second = box_of(sheet, SOURCE), box_of(sheet, SECOND_SOURCE)
        assert 0 < second[0] - first[2] < 15 and first[1] == second[1] and first[3] == second[3]
        for left, top, right, bottom in (first, second):
            assert (bottom - top + 1) / (right - left + 1) == pytest.approx(3, rel=0.05)

    def test_an_instruction_has_three_lines_at_most(self, save):
        def title(words):
            sheet = save({0: [self.flat()]}, prompts=2, texts=["word " * words, "Short"])
            top = box_of(sheet, SOURCE)[1]
            lines = [
                shade(sheet, 0, top - 4 - 14 * line, sheet.width, top - 4 - 14 * (line - 1)) for line in (1, 2, 3)
            ]
            assert shade(sheet, 0, top - 60, sheet.width, top - 46) == 0  # clear of the sheet's title
            # And of the caption above
            bottom, top = (box_of(sheet, color_of(prompt, 0, 1))[end] for prompt, end in ((0, 3), (1, 1)))
            assert shade(sheet, 0, top - 18, sheet.width, top - 1) > 20
            return lines, top - bottom

        (short, few), (long, many) = title(3), title(45)
        assert short[0] > 50 and short[1] == short[2] == 0
        assert min(long) > 50
        assert many - few == pytest.approx(2 * 14, abs=3)  # rows make room for it
        assert title(300)[1] == many

    def test_sources_of_every_mode_have_their_colors(self, save):
        gray = Image.new("L", (64, 64), 137)
        sheet = save({0: [gray]})
        _, top, _, bottom = box_of(sheet, color_of(0, 0))
        assert sheet.getpixel((60, (top + bottom) // 2)) == (137, 137, 137)
        half = Image.new("RGBA", (64, 64), (*SOURCE, 255))
        half.paste((0, 0, 0, 0), (0, 0, 64, 32))  # the upper half is transparent black
        sheet = save({0: [half]})
        left, top, right, bottom = box_of(sheet, SOURCE)
        assert (right - left) / (bottom - top) == pytest.approx(2, rel=0.05)
        assert shade(sheet, left, top - 80, right, top - 2) == 0
