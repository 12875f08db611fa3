# SPDX-License-Identifier: Apache-2.0
"""Contact sheets: planted colors are where they belong, rows before and after training, and sources of edits."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image

from paco_trl.data import join_grid
from paco_trl.plots import contact_sheet
from paco_trl.plots.contact_sheet import ScoredImages, render_sheet, save_scored_sheet
from paco_trl.rollout.rounds import Completion


SOURCE, SECOND_SOURCE = (240, 10, 200), (10, 220, 240)


def color_of(prompt, generation, series=0):
    """A color of its own for each image: no gray, which the edges of letters have as well."""
    return 70 + 20 * prompt, 60 + 40 * generation, 15 + 120 * series


def scored(prompts, generations, series=0, size=(64, 64)):
    """Flat images of all prompts in the colors of a series, with three scores each."""
    numbers = [(prompt, generation) for prompt in range(prompts) for generation in range(generations)]
    pictures = {place: Image.new("RGB", size, color_of(*number, series)) for place, number in enumerate(numbers)}
    rewards = torch.arange(3.0 * len(pictures)).view(-1, 3) / 64 + series
    return ScoredImages(pictures, generations, ["consistency", "clip_t", "edit"], rewards, {})


@pytest.fixture
def save(tmp_path):
    """Saves a sheet; gives its picture."""

    def save(sources=None, prompts=1, generations=1, before=True, name="sheet", size=(64, 64)):
        texts = [f"Edit number {prompt}" for prompt in range(prompts)]
        shown, first = (scored(prompts, generations, series, size) for series in (1, 0))
        sheet = save_scored_sheet(tmp_path, name, "Evaluation", texts, shown, first if before else None, sources)
        with Image.open(tmp_path / f"{name}.png") as saved:
            assert np.array_equal(np.asarray(saved), np.asarray(sheet))
        return sheet

    return save


def box_of(sheet, color):
    """(left, top, right, bottom) of the pixels of a color; the ends belong to it."""
    found = (np.asarray(sheet) == color).all(axis=-1)
    assert found.sum() > 100, f"{color} is not on the sheet"
    (ys,), (xs,) = found.any(axis=1).nonzero(), found.any(axis=0).nonzero()
    return int(xs[0]), int(ys[0]), int(xs[-1]), int(ys[-1])


def ink(sheet, left, top, right, bottom):
    """Number of dark pixels in a box: text, which is the only black thing on these sheets."""
    return int((np.asarray(sheet)[max(top, 0) : bottom, max(left, 0) : right].max(axis=-1) < 120).sum())


@pytest.mark.parametrize(("prompts", "generations", "size"), [(1, 1, (64, 64)), (4, 1, (64, 64)), (3, 4, (256, 64))])
def test_a_round_in_rows_and_columns(save, prompts, generations, size):
    sheet = save(prompts=prompts, generations=generations, before=False, size=size)
    boxes = {(i, j): box_of(sheet, color_of(i, j, 1)) for i in range(prompts) for j in range(generations)}
    for (prompt, generation), (left, top, right, bottom) in boxes.items():
        assert (right - left + 1) / (bottom - top + 1) == pytest.approx(size[0] / size[1], rel=0.05)
        if prompt:
            assert top > boxes[prompt - 1, generation][3]
        if generation:
            assert left > boxes[prompt, generation - 1][2] + 4 and top == boxes[prompt, 0][1]
        # Its scores are below it, and above the next row
        assert ink(sheet, left, bottom + 1, right, bottom + 60) > 100
    left, top, right, _ = boxes[0, 0]
    assert ink(sheet, 0, top - 20, right, top) > 50  # the prompt
    assert ink(sheet, 0, 0, right, top - 20) > 20  # the title of the sheet


def test_rows_before_and_after(save):
    sheet = save(prompts=3, generations=2)
    bottom_before = 0
    for prompt in range(3):
        for series in range(2):
            boxes = [box_of(sheet, color_of(prompt, generation, series)) for generation in range(2)]
            assert boxes[0][1] == boxes[1][1] > bottom_before and boxes[0][2] < boxes[1][0]
            left, top, right, bottom_before = boxes[0]
            assert ink(sheet, 0, top - 19, right, top) > 20  # its label, and the prompt above the first alone
        before, after = (box_of(sheet, color_of(prompt, 1, series)) for series in range(2))
        assert before[0] == after[0] and before[2] == after[2]


def test_small_images_stay_sharp_and_letters_of_any_language_are_drawn():
    image = Image.new("RGB", (8, 8), SOURCE)
    image.paste(SECOND_SOURCE, (0, 0, 4, 8))
    sheet = render_sheet([("", [[(image, "")]])])
    assert {color for _, color in sheet.getcolors()} == {SOURCE, SECOND_SOURCE, (255, 255, 255)}
    for text in ("Лиса в снегу. " * 30, "\U0010fffd"):
        sheet = render_sheet([(text, [[(image, text[:9])]])])
        assert ink(sheet, 0, 0, sheet.width, sheet.height) > 20 and sheet.width < 220


def test_the_separate_images_of_a_set_have_a_gap():
    image = join_grid([Image.new("RGB", (64, 64), color) for color in (SOURCE, SECOND_SOURCE)], 1, 2)
    done = [Completion(number, 0, number, None, [None] * count, image=image) for number, count in enumerate((1, 2))]
    scores = {"reward_names": [], "rewards": torch.zeros(2, 0), "extra": {}}
    shown = ScoredImages.collect(Accelerator(cpu=True), done, 2, **scores)
    assert shown.pictures[0].size == (128, 64) and shown.pictures[1].size == (130, 64)
    assert [shown.pictures[1].getpixel((x, 9)) for x in (63, 64, 65, 66)] == [SOURCE, *[(255,) * 3] * 2, SECOND_SOURCE]


class TestSources:
    def test_source_before_and_after_side_by_side(self, save, tmp_path):
        plain = save(None, prompts=2, name="plain")
        sheet = save({1: [Image.new("RGB", (64, 64), SOURCE)]}, prompts=2)
        source, before, after = (box_of(sheet, color) for color in (SOURCE, color_of(1, 0, 0), color_of(1, 0, 1)))
        assert source[2] < before[0] and before[2] < after[0] and source[1] == before[1] == after[1]
        assert ink(sheet, source[0], source[3] + 1, source[2], source[3] + 18) > 10  # "source"
        # Images are as large as without it, and a prompt that has none leaves its place empty
        for prompt in range(2):
            shown, without = (box_of(image, color_of(prompt, 0, 1)) for image in (sheet, plain))
            assert shown[2] - shown[0] == without[2] - without[0]
        left, top, _, bottom = box_of(sheet, color_of(0, 0, 0))
        assert ink(sheet, 0, top, left, bottom) == 0 and left == before[0]
        assert (tmp_path / "sheet.jsonl").read_bytes() == (tmp_path / "plain.jsonl").read_bytes()
        for sources in ({}, {0: []}):
            save(sources, prompts=2, name="same")
            assert (tmp_path / "same.png").read_bytes() == (tmp_path / "plain.png").read_bytes()

    def test_several_sources_of_other_shapes_and_modes(self, save):
        half = Image.new("RGBA", (150, 600), (*SECOND_SOURCE, 255))
        half.paste((0, 0, 0, 0), (0, 0, 150, 300))  # the upper half is transparent black
        sheet = save({0: [Image.new("RGB", (300, 150), SOURCE), half]}, generations=3)
        first, second = box_of(sheet, SOURCE), box_of(sheet, SECOND_SOURCE)
        before, after = (box_of(sheet, color_of(0, 0, series)) for series in range(2))
        assert first[2] < second[0] < second[2] < before[0] and before[3] < after[1]
        assert second[3] < after[1]
        for box, aspect in ((first, 2), (second, 0.5)):
            assert (box[2] - box[0] + 1) / (box[3] - box[1] + 1) == pytest.approx(aspect, rel=0.05)
        assert sheet.getpixel((second[0] + 5, second[1] - 20)) == (255, 255, 255)


def test_lines_of_capitals_fit():
    text = "WIDE CAPITALS WWWWW, MMMMM, " + "and then many thin letters: little, still, till, illicit " * 3
    lines = contact_sheet._wrap(text, 13, 352)
    font = contact_sheet._font(text, 13)
    assert len(lines) == 3 and max(map(font.getlength, lines)) <= 352
