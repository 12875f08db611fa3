# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a round, and who draws and trains which images."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from paco_trl.trainer.rounds import RoundLayout, prompts_multiple


SQUARE, WIDE, TALL = (512, 512), (256, 1280), (768, 256)


def layout(
    num_prompts=8, num_generations=4, batch_size=2, num_processes=1, num_trained_steps=1, num_optimizer_steps=2,
    num_merged=1,
):  # fmt: skip
    sizes = (num_prompts, num_generations, batch_size, num_processes, num_trained_steps, num_optimizer_steps)
    return RoundLayout(*sizes, num_merged)


def images_of_steps(round_layout, assignment):
    """The set of images behind each optimizer step."""
    batches = assignment.shape[1] // round_layout.num_optimizer_steps
    return [
        set(assignment[:, step * batches : (step + 1) * batches].reshape(-1).tolist())
        for step in range(round_layout.num_optimizer_steps)
    ]


class TestArithmetic:
    @pytest.mark.parametrize("num_processes", [1, 2, 4, 7, 8])
    def test_the_papers_round(self, num_processes):
        """42 prompts x 16 images, batch 1, 2 optimizer steps; on 8 processes 672 / 16 is whole too."""
        round_layout = RoundLayout(42, 16, 1, num_processes, 1, 2)
        assert round_layout.num_images == 672
        assert round_layout.images_per_parallel_step == 2 * num_processes
        assert round_layout.micro_batches_per_process == 672 // num_processes
        assert round_layout.steps_per_generation == 672 // num_processes
        assert round_layout.gradient_accumulation_steps == 336 // num_processes

    def test_a_process_more_does_not_divide(self):
        """Twin of the above: 5 processes do not."""
        with pytest.raises(ValueError, match="does not divide"):
            RoundLayout(42, 16, 1, 5, 1, 2)

    def test_trained_steps_multiply_the_micro_steps_and_not_the_images(self):
        one, four = layout(num_trained_steps=1), layout(num_trained_steps=4)
        assert (one.num_images, one.micro_batches_per_process) == (four.num_images, four.micro_batches_per_process)
        assert one.num_images == 32 and one.micro_batches_per_process == 16
        assert (one.steps_per_generation, four.steps_per_generation) == (16, 64)
        assert (one.gradient_accumulation_steps, four.gradient_accumulation_steps) == (8, 32)

    @pytest.mark.parametrize(
        "changes",
        [{}, {"batch_size": 4}, {"num_processes": 4}, {"num_trained_steps": 3}, {"num_optimizer_steps": 4}],
    )
    def test_an_optimizer_step_sees_its_share_of_the_round(self, changes):
        a = layout(**changes)
        rows = a.gradient_accumulation_steps * a.batch_size * a.num_processes
        assert rows * a.num_optimizer_steps == a.num_images * a.num_trained_steps

    def test_describe_has_the_numbers(self):
        text = RoundLayout(42, 16, 1, 7, 4, 2).describe()
        for words in (
            "42 prompts x 16 generations = 672 images",
            "7 process(es) 96 micro-batches of 1",
            "4 trained step(s)",
            "2 optimizer step(s)",
            "192 accumulation steps",
            "effective batch 336 images",
        ):
            assert words in text


class TestDoesNotDivide:
    def test_message_has_the_arithmetic(self):
        with pytest.raises(ValueError) as error:
            RoundLayout(5, 3, 2, 4, 1, 2)
        message = str(error.value)
        assert "5 prompts x 3 generations = 15 images" in message
        assert "4 processes x 2 images in a micro-batch x 2 optimizer steps = 16" in message
        assert "15 / 16 is not an integer" in message
        assert "work: 16 (`generation_batch_size` = 48)" in message  # nothing below 5 works

    @pytest.mark.parametrize(
        "arguments",
        [(5, 3, 2, 1, 1, 2), (43, 16, 1, 7, 1, 3), (50, 16, 1, 8, 1, 3), (21, 5, 4, 2, 2, 2), (3, 7, 2, 1, 1, 2)],
    )
    def test_the_nearest_values_work_and_are_the_nearest(self, arguments):
        num_prompts, num_generations = arguments[:2]
        with pytest.raises(ValueError) as error:
            RoundLayout(*arguments)
        numbers, images = re.search(r"that work: (.*) \(`generation_batch_size` = (.*)\)", str(error.value)).groups()
        numbers = [int(number) for number in numbers.split(" or ")]
        assert [int(number) for number in images.split(" or ")] == [number * num_generations for number in numbers]

        def works(number):
            try:
                RoundLayout(number, *arguments[1:])
            except ValueError:
                return False
            return True

        below = [number for number in range(1, num_prompts) if works(number)][-1:]
        above = next(number for number in range(num_prompts, 10_000) if works(number))
        assert numbers == [*below, above]


class TestPromptsMultiple:
    def test_is_the_smallest_of_which_every_multiple_divides(self):
        cases = list(product(range(2, 9), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3)))
        found = set()
        for num_generations, batch_size, num_processes, num_optimizer_steps in cases:
            images = batch_size * num_processes * num_optimizer_steps
            brute_force = next(prompts for prompts in range(1, images + 1) if prompts * num_generations % images == 0)
            multiple = prompts_multiple(num_generations, batch_size, num_processes, num_optimizer_steps)
            assert multiple == brute_force, (num_generations, batch_size, num_processes, num_optimizer_steps)
            assert all(prompts * num_generations % images == 0 for prompts in range(multiple, 5 * multiple, multiple))
            found.add(multiple)
        assert len(found) > 10

    def test_the_papers_round_needs_no_rounding(self):
        for num_processes in (1, 2, 4, 7, 8):
            assert 42 % prompts_multiple(16, 1, num_processes, 2) == 0
        assert 42 % prompts_multiple(16, 1, 5, 2) != 0


class TestAssign:
    SEED = (42, 1, 0)

    @pytest.mark.parametrize("num_processes", [1, 2, 4])
    @pytest.mark.parametrize("batch_size", [1, 2, 4])
    @pytest.mark.parametrize("sizes", [[SQUARE] * 8, [SQUARE, WIDE] * 4, [SQUARE, WIDE, TALL, SQUARE] * 2])
    def test_every_image_exactly_once(self, num_processes, batch_size, sizes):
        a = layout(batch_size=batch_size, num_processes=num_processes)
        assignment = a.assign(sizes, self.SEED)
        assert assignment.shape == (num_processes, a.micro_batches_per_process, batch_size)
        assert sorted(assignment.reshape(-1).tolist()) == list(range(a.num_images))

    @pytest.mark.parametrize("sizes", [[SQUARE] * 8, [SQUARE, WIDE] * 4, [SQUARE, WIDE, TALL, SQUARE] * 2])
    @pytest.mark.parametrize("num_optimizer_steps", [1, 2, 4])
    def test_an_optimizer_step_learns_from_the_same_images_on_any_number_of_processes(
        self, sizes, num_optimizer_steps
    ):
        a = layout(num_optimizer_steps=num_optimizer_steps)
        one, two, four = (
            images_of_steps(b, b.assign(sizes, self.SEED))
            for b in (replace(a, num_processes=number) for number in (1, 2, 4))
        )
        assert one == two == four
        assert [len(step) for step in one] == [a.num_images // num_optimizer_steps] * num_optimizer_steps
        if num_optimizer_steps > 1:
            assert max(one[0]) > min(one[1])  # the steps are shuffled, not slices in order

    @pytest.mark.parametrize("num_processes", [1, 2, 4])
    def test_a_micro_batch_holds_one_size_and_one_set_of_neighbours(self, num_processes):
        sizes = [SQUARE, WIDE, TALL, SQUARE, WIDE, SQUARE, TALL, WIDE]
        a = layout(num_processes=num_processes, batch_size=4)
        for micro_batch in a.assign(sizes, self.SEED).reshape(-1, 4).tolist():
            assert len({sizes[image // 4] for image in micro_batch}) == 1
            assert len({image // 4 for image in micro_batch}) == 1  # batch 4 = 4 generations of one prompt

    def test_one_size_fills_a_micro_batch_larger_than_a_group(self):
        """Prompts of one size are brought together: two of each here, not neighbours in the round."""
        sizes = [SQUARE, WIDE] * 4
        a = layout(batch_size=8, num_optimizer_steps=1)
        for micro_batch in a.assign(sizes, self.SEED).reshape(-1, 8).tolist():
            prompts = {image // 4 for image in micro_batch}
            assert len(prompts) == 2 and len({sizes[prompt] for prompt in prompts}) == 1

    def test_within_an_optimizer_step_sizes_are_sorted(self):
        sizes = [SQUARE, WIDE, TALL, SQUARE, WIDE, SQUARE, TALL, WIDE]
        a = layout(num_processes=2)
        assignment = a.assign(sizes, self.SEED)
        batches = a.micro_batches_per_process // a.num_optimizer_steps
        for step in range(a.num_optimizer_steps):
            # In the order in which micro-batches are dealt: process 0, process 1, process 0 ...
            dealt = assignment[:, step * batches : (step + 1) * batches].swapaxes(0, 1).reshape(-1, a.batch_size)
            found = [sizes[micro_batch[0] // 4] for micro_batch in dealt]
            assert len(set(found)) == 3 and found == sorted(found)

    def test_the_processes_work_on_equal_sizes_at_a_time(self):
        """With as many micro-batches of each size in a step as there are processes, all the time."""
        a = layout(num_processes=2, num_optimizer_steps=1, batch_size=4)
        sizes = [SQUARE, WIDE] * 4
        assignment = a.assign(sizes, self.SEED)
        for position in range(a.micro_batches_per_process):
            assert len({sizes[image // 4] for image in assignment[:, position].reshape(-1)}) == 1

    def test_the_order_depends_on_the_key_and_on_nothing_else(self):
        a, sizes = layout(), [SQUARE] * 8
        first = a.assign(sizes, self.SEED)
        state = np.random.get_state()[1].copy()
        np.random.seed(0)
        assert np.array_equal(a.assign(sizes, self.SEED), first)
        assert not np.array_equal(np.random.get_state()[1], state)
        for place in range(3):
            other = list(self.SEED)
            other[place] += 1
            assert not np.array_equal(a.assign(sizes, tuple(other)), first)

    def test_batches_of_generation_are_neighbors_on_any_number_of_processes(self):
        sizes, plain, merged = [SQUARE, WIDE] * 4, layout(), layout(num_merged=2)
        assert (merged.rollout_batch_size, merged.steps_per_generation) == (4, plain.steps_per_generation)
        found = []
        for number in (1, 2, 4):
            a = replace(merged, num_processes=number)
            assignment = a.assign(sizes, self.SEED)
            assert assignment.shape == (number, 8 // number, 4)
            assert sorted(assignment.reshape(-1).tolist()) == list(range(32))
            assert all(len({image // 4 for image in batch}) == 1 for batch in assignment.reshape(-1, 4).tolist())
            found.append(images_of_steps(a, assignment))
        assert found[0] == found[1] == found[2]
        batches = plain.assign(sizes, self.SEED).reshape(-1, 4).tolist()  # where a group comes apart
        assert any(len({image // 4 for image in batch}) > 1 for batch in batches)

    def test_a_round_holds_full_batches_of_generation(self):
        assert "12 micro-batches of 2, generated 4 at a time, 1 trained" in layout(6, num_merged=2).describe()
        layout(num_prompts=6, num_processes=3)
        with pytest.raises(ValueError, match="3 processes x 8 images in a rollout batch x 2 .* = 48.*that work: 12"):
            layout(num_prompts=6, num_processes=3, num_merged=4)

    def test_mixed_sizes_are_an_error_with_what_to_do(self):
        sizes = [SQUARE] * 7 + [WIDE]
        a = layout(batch_size=8, num_optimizer_steps=1)
        assert a.assign([SQUARE] * 8, self.SEED).shape == (1, 4, 8)
        with pytest.raises(ValueError) as error:
            a.assign(sizes, self.SEED)
        message = str(error.value)
        assert "A batch of 8" in message and "[(256, 1280), (512, 512)]" in message
        assert "`per_device_train_batch_size` must divide `num_generations` (4)" in message
        # What it says works
        for batch_size in (1, 2, 4):
            layout(batch_size=batch_size, num_optimizer_steps=1).assign(sizes, self.SEED)
