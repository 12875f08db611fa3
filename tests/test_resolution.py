# SPDX-License-Identifier: Apache-2.0
"""Sizes: what is refused, and what an image is trained at."""

import re

import pytest

from paco_trl.rollout.resolution import check_inference_size, training_size


# The T2IS layouts: height, width, rows, cols; and half of the size
T2IS = [
    (1024, 1024, 2, 2, (512, 512)),
    (512, 2560, 1, 5, (256, 1280)),
    (512, 1536, 1, 3, (256, 768)),
    (1024, 1536, 2, 3, (512, 768)),
    (512, 3584, 1, 7, (256, 1792)),
    (512, 1024, 1, 2, (256, 512)),
    (1024, 2048, 2, 4, (512, 1024)),
]


def nearest_values(error):
    return [int(number) for number in re.search(r"that work: (\d+) or (\d+)", str(error.value)).groups()]


class TestCheckInferenceSize:
    @pytest.mark.parametrize(("height", "width", "rows", "cols", "_"), T2IS)
    def test_the_t2is_layouts_are_accepted(self, height, width, rows, cols, _):
        check_inference_size(height, width, rows, cols, 16, "row 0")

    @pytest.mark.parametrize(
        ("height", "width", "rows", "cols", "name", "size", "step"),
        [
            (1000, 1024, 2, 2, "height", 1000, 16),  # not a multiple of the pipeline's 16
            (1024, 1000, 2, 2, "width", 1000, 16),
            (1024, 1024, 2, 3, "width", 1024, 48),  # a multiple of 16, but three columns do not divide it
            (512, 2560, 3, 5, "height", 512, 48),
            (8, 1024, 1, 1, "height", 8, 16),  # smaller than a step
            (1024, 0, 1, 1, "width", 0, 16),
            (-32, 1024, 1, 1, "height", -32, 16),
        ],
    )
    def test_refuses_with_the_nearest_values(self, height, width, rows, cols, name, size, step):
        with pytest.raises(ValueError) as error:
            check_inference_size(height, width, rows, cols, 16, "row 7 of the dataset")
        message = str(error.value)
        assert f"The {name} of row 7 of the dataset is {size}" in message
        assert (f"so of {step}. " if step > 16 else "a multiple of 16 (required by the pipeline). ") in message

        below, above = nearest_values(error)
        assert 0 < below and above == below + step and (below < size < above or below == step)
        for value in (below, above):
            sizes = {"height": height, "width": width, name: value}
            check_inference_size(sizes["height"], sizes["width"], rows, cols, 16, "row 7")

    @pytest.mark.parametrize("multiple", [4, 8, 16, 32])
    @pytest.mark.parametrize(
        ("height", "width", "rows", "cols"), [(32, 32, 3, 2), (1000, 1000, 3, 7), (512, 500, 1, 3)]
    )
    def test_what_is_proposed_without_a_pipeline_works_with_it(self, height, width, rows, cols, multiple):
        sides = {"height": height, "width": width}
        for take in (0, 1):
            size = dict(sides)
            for _ in range(2):  # one side at a time
                try:
                    check_inference_size(*size.values(), rows, cols, None, "row 0")
                except ValueError as error:
                    side = re.match(r"The (\w+)", str(error))[1]
                    numbers = re.search(r"that work: (\d+) or (\d+)", str(error)).groups()
                    size[side] = int(numbers[take])
            assert size != sides
            for side, count in (("height", rows), ("width", cols)):
                if size[side] != sides[side]:
                    check_inference_size(*[size[side]] * 2, count, count, multiple, "row 0")
        check_inference_size(36, 36, 3, 3, None, "row 0")  # not proposed, but some pipelines take it


class TestTrainingSize:
    @pytest.mark.parametrize(("height", "width", "rows", "cols", "expected"), T2IS)
    def test_half_of_the_t2is_layouts(self, height, width, rows, cols, expected):
        size = training_size(height, width, rows, cols, 0.5, 16)
        assert size == expected == (height // 2, width // 2)
        assert size[0] % rows == size[1] % cols == 0
        assert size[0] % 16 == size[1] % 16 == 0

    @pytest.mark.parametrize(
        ("size", "count", "scale", "expected"),
        [(1040, 1, 0.5, 512), (1072, 1, 0.5, 544), (1008, 3, 0.5, 480), (1056, 3, 0.5, 528), (1088, 2, 0.3, 320)],
    )
    def test_rounds_to_the_nearest_multiple(self, size, count, scale, expected):
        assert size * scale != expected or count == 3
        assert training_size(size, size, count, count, scale, 16) == (expected, expected)

    def test_the_sides_are_rounded_each_with_its_own_layout(self):
        assert training_size(528, 528, 1, 3, 0.5, 16) == (256, 288)
        assert training_size(528, 528, 3, 1, 0.5, 16) == (288, 256)

    def test_never_below_one_panel_of_the_pipelines_multiple(self):
        assert training_size(64, 80, 1, 5, 0.01, 16) == (16, 80)
