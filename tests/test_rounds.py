# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a round, and who draws and trains which images."""

import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset

from paco_trl.rollout.prompt_rows import PromptRows
from paco_trl.rollout.rounds import Batch
from paco_trl.trainer.round_plan import RoundPlan
from paco_trl.trainer.round_schedule import RoundSchedule, TrainingRound
from paco_trl.utils.round_sizes import RoundSizes, round_sizes
from testing_utils import are_equal, entries_of, weights_of


SQUARE, WIDE, TALL = (512, 512), (256, 1280), (768, 256)


def layout(
    num_prompts=8, num_generations=4, batch_size=2, num_processes=1, num_trained_steps=1, num_optimizer_steps=2,
    micro_batches_per_rollout_batch=1,
):  # fmt: skip
    sizes = (num_prompts, num_generations, batch_size, num_processes, num_trained_steps, num_optimizer_steps)
    return RoundPlan(*sizes, micro_batches_per_rollout_batch)


def images_of_steps(round_plan, assignment):
    """The set of images behind each optimizer step."""
    batches = assignment.shape[1] // round_plan.num_optimizer_steps
    return [
        set(assignment[:, step * batches : (step + 1) * batches].reshape(-1).tolist())
        for step in range(round_plan.num_optimizer_steps)
    ]


def assign(round_plan, sizes, seed):
    """The images of each process and batch, numbered by prompt."""
    numbers = range(len(sizes) * round_plan.num_generations)
    samples = [SimpleNamespace(number=n, size=sizes[n // round_plan.num_generations]) for n in numbers]
    dealt = round_plan.shard(samples, seed)
    return np.array([[[sample.number for sample in batch.samples] for batch in mine] for mine in dealt])


class TestArithmetic:
    @pytest.mark.parametrize("num_processes", [1, 2, 4, 7, 8])
    def test_the_papers_round(self, num_processes):
        """42 prompts x 16 images, batch 1, 2 optimizer steps; on 8 processes 672 / 16 is whole too."""
        round_plan = RoundPlan(42, 16, 1, num_processes, 1, 2)
        assert round_plan.num_images == 672
        assert round_plan.micro_batches_per_process == 672 // num_processes
        assert round_plan.steps_per_generation == 672 // num_processes
        assert round_plan.gradient_accumulation_steps == 336 // num_processes

    def test_trained_steps_multiply_the_micro_steps_and_not_the_images(self):
        one, four = layout(num_trained_steps=1), layout(num_trained_steps=4)
        assert (one.num_images, one.micro_batches_per_process) == (four.num_images, four.micro_batches_per_process)
        assert one.num_images == 32 and one.micro_batches_per_process == 16
        assert (one.steps_per_generation, four.steps_per_generation) == (16, 64)
        assert (one.gradient_accumulation_steps, four.gradient_accumulation_steps) == (8, 32)


def plan(
    num_processes=1, num_generations=4, batch_size=2, num_trained_steps=1, micro_batches_per_rollout_batch=1, **sizes
):
    names = {"num_prompts": "num_prompts_per_generation", "num_optimizer_steps": "optimizer_steps_per_generation"}
    requested = RoundSizes(**{names.get(name, name): size for name, size in sizes.items()})
    given = {
        "num_processes": num_processes, "num_generations": num_generations, "batch_size": batch_size,
        "num_trained_steps": num_trained_steps, "micro_batches_per_rollout_batch": micro_batches_per_rollout_batch,
    }  # fmt: skip
    num_prompts, num_optimizer_steps = round_sizes(requested, **given)
    return RoundPlan(num_prompts=num_prompts, num_optimizer_steps=num_optimizer_steps, **given)


class TestPlan:
    @pytest.mark.parametrize("micro_batches_per_rollout_batch", [1, 2])
    def test_prompts_are_rounded_up_to_the_next_number_that_divides(self, micro_batches_per_rollout_batch):
        found = set()
        for G, B, processes, steps in product((3, 4, 6), (1, 2, 4), (1, 2, 5), (1, 2, 3)):
            for prompts in (1, 5, 42):
                batch = processes * B * micro_batches_per_rollout_batch * steps
                smallest = next(n for n in range(prompts, 1000) if n * G % batch == 0)
                sizes = {"num_prompts": prompts, "num_optimizer_steps": steps}
                planned = plan(
                    processes, G, B, micro_batches_per_rollout_batch=micro_batches_per_rollout_batch, **sizes
                )
                assert (planned.num_prompts, planned.num_optimizer_steps) == (smallest, steps)
                found.add(smallest - prompts)
        assert len(found) > 10

    @pytest.mark.parametrize(
        "sizes",
        [
            {"generation_batch_size": 18},  # no full groups
            {"generation_batch_size": 6, "batch_size": 1},
            {"generation_batch_size": 12, "num_processes": 2},  # no full batches
            {"generation_batch_size": 32, "micro_batches_per_rollout_batch": 3},
            {"steps_per_generation": 5},
            {"steps_per_generation": 33, "num_trained_steps": 2},
            {"generation_batch_size": 64, "gradient_accumulation_steps": 7},
            {"gradient_accumulation_steps": 7, "num_trained_steps": 3},  # an image's steps are in one optimizer step
            {"generation_batch_size": 32, "steps_per_generation": 32},
            {"num_prompts": 4, "generation_batch_size": 32},
            {"num_prompts": 8, "gradient_accumulation_steps": 7},
            {"num_optimizer_steps": 4, "num_prompts": 8, "gradient_accumulation_steps": 8},
        ],
        ids=str,
    )
    def test_sizes_that_do_not_fit_are_refused_with_prompts_that_do(self, sizes):
        with pytest.raises(ValueError, match="do not fit together") as error:
            plan(**sizes)
        for value in sizes.values():
            assert str(value) in str(error.value)
        (numbers,) = re.findall(r"`num_prompts_per_generation` to ([\d or]+),", str(error.value))
        names = {"num_processes", "batch_size", "micro_batches_per_rollout_batch", "num_trained_steps"} & sizes.keys()
        rest = {name: sizes[name] for name in names}
        for number in map(int, numbers.split(" or ")):
            assert plan(num_prompts=number, **rest).num_prompts == number


def test_a_small_dataset_is_a_smaller_round(make_trainer, prompts, tmp_path, caplog):
    """Only of the default size: 42 prompts of a user's own are 42."""
    rows = prompts.select(range(3))
    trainer = make_trainer(
        train_dataset=rows, num_prompts_per_generation=None, max_steps=3, save_strategy="steps", save_steps=1
    )
    (said,) = [message for message in caplog.messages if "fewer than the 42" in message]
    assert said.startswith("The dataset has ")  # no `[RANK 0]` of accelerate's
    # 3 x 4 images are no two steps of batches of 4
    assert "2 prompts x 4 generations = 8 images" in said and trainer.schedule.plan.num_prompts == 2
    assert trainer.args.gradient_accumulation_steps == 1
    trainer.train()
    resumed = make_trainer(train_dataset=rows, num_prompts_per_generation=None, max_steps=3)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert are_equal(weights_of(resumed), weights_of(trainer))
    with pytest.raises(ValueError, match="The dataset has 3"):
        make_trainer(train_dataset=rows, num_prompts_per_generation=42)
    with pytest.raises(ValueError, match="The dataset has 1"):
        make_trainer(train_dataset=prompts.select(range(1)), num_prompts_per_generation=None)


def test_rows_that_no_round_uses_are_counted(make_small, prompts, capsys):
    settings = {"train_dataset": prompts.select(range(3)), "disable_tqdm": False}
    schedule = make_small(**settings, max_steps=2).schedule
    assert "images. The run's 1 round(s) do not use 1 of the 3 rows.\n" in capsys.readouterr().out
    assert "do not use" not in make_small(**settings, max_steps=-1, num_train_epochs=10).schedule.describe_unused()
    schedule.args.max_steps, schedule.args.shuffle_dataset = 20, False
    assert schedule.describe_unused().endswith(
        "The run's 10 round(s) do not use 1 of the 3 rows, the same in each epoch (`shuffle_dataset`)."
    )


class TestWeigh:
    @pytest.fixture
    def round(self):
        """Two processes with two micro-batches of two images, in two optimizer steps, each image at two trained steps."""
        args = SimpleNamespace(
            round_plan=RoundPlan(2, 4, 2, 2, 2, 2), num_iterations=1, shuffle_dataset=False, seed=0, num_sde_steps=None,
            sde_steps=[1, 2], noise_level=0.7, sde_type="flow_sde", tail_steps=None, panel_generation="independent",
            set_layout=None, height=32, width=32,
        )  # fmt: skip
        rows = PromptRows(Dataset.from_dict({"prompt": ["a", "b"]}), args, "it")
        rows.training_sizes = [(32, 32)] * 2

        def make(process):
            round = TrainingRound(RoundSchedule(args, [1, 1]), rows, 0, process)
            numbers = [[[4, 1], [0, 3]], [[7, 6], [2, 5]]]
            round.batches = [[Batch([round.samples[n] for n in batch]) for batch in mine] for mine in numbers]
            round.local_batches = round.batches[process]
            for batch, steps in zip(round.local_batches, (["first", "second"], ["third", "fourth"]), strict=True):
                batch.steps = steps
            return round, numbers[process]

        return make

    def test_weights_make_a_mean_over_the_valid_images_of_all_processes(self, round):
        is_valid, advantages = torch.ones(8, dtype=torch.bool), torch.arange(8.0)
        is_valid[[1, 2, 5]] = False
        expected = {0: [[1 / 6, 0], [1 / 4, 1 / 4]], 1: [[1 / 6, 1 / 6], [0, 0]]}
        for process, weights in expected.items():
            trained, numbers = round(process)
            trained.assign_advantages(advantages, is_valid, None)
            assert [entry["step"] for entry in entries_of(trained)] == ["first", "second", "third", "fourth"]
            for position, entry in enumerate(entries_of(trained)):
                assert entry["weights"].tolist() == pytest.approx(weights[position // 2])
                assert entry["advantages"].tolist() == numbers[position // 2]
                assert entry["trained_completions"] == (3, 2)[position // 2]

    def test_a_step_is_idle_if_no_process_trains_an_image_in_it(self, round):
        trained, numbers = round(0)
        of_the_second = {*numbers[1], *round(1)[1][1]}
        is_valid = torch.tensor([number not in of_the_second for number in range(8)])
        trained.assign_advantages(torch.arange(8.0), is_valid, None)
        assert [trained.is_idle_step(step) for step in range(4)] == [False, True] * 2
        assert not trained.is_idle
        trained.assign_advantages(torch.arange(8.0), torch.zeros(8, dtype=torch.bool), None)
        assert trained.is_idle and trained.is_idle_step(0)


class TestAssign:
    SEED = (42, 1, 0)

    @pytest.mark.parametrize("num_processes", [1, 2, 4])
    @pytest.mark.parametrize("batch_size", [1, 2, 4])
    @pytest.mark.parametrize("sizes", [[SQUARE] * 8, [SQUARE, WIDE] * 4, [SQUARE, WIDE, TALL, SQUARE] * 2])
    def test_every_image_exactly_once(self, num_processes, batch_size, sizes):
        a = layout(batch_size=batch_size, num_processes=num_processes)
        assignment = assign(a, sizes, self.SEED)
        assert assignment.shape == (num_processes, a.micro_batches_per_process, batch_size)
        assert sorted(assignment.reshape(-1).tolist()) == list(range(a.num_images))

    @pytest.mark.parametrize("sizes", [[SQUARE] * 8, [SQUARE, WIDE] * 4, [SQUARE, WIDE, TALL, SQUARE] * 2])
    @pytest.mark.parametrize("num_optimizer_steps", [1, 2, 4])
    def test_an_optimizer_step_learns_from_the_same_images_on_any_number_of_processes(
        self, sizes, num_optimizer_steps
    ):
        a = layout(num_optimizer_steps=num_optimizer_steps)
        one, two, four = (
            images_of_steps(b, assign(b, sizes, self.SEED))
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
        for micro_batch in assign(a, sizes, self.SEED).reshape(-1, 4).tolist():
            assert len({sizes[image // 4] for image in micro_batch}) == 1
            assert len({image // 4 for image in micro_batch}) == 1  # batch 4 = 4 generations of one prompt

    def test_within_an_optimizer_step_sizes_are_sorted(self):
        sizes = [SQUARE, WIDE, TALL, SQUARE, WIDE, SQUARE, TALL, WIDE]
        a = layout(num_processes=2)
        assignment = assign(a, sizes, self.SEED)
        batches = a.micro_batches_per_process // a.num_optimizer_steps
        for step in range(a.num_optimizer_steps):
            # In the order in which micro-batches are dealt: process 0, process 1, process 0 ...
            dealt = assignment[:, step * batches : (step + 1) * batches].swapaxes(0, 1).reshape(-1, a.batch_size)
            found = [sizes[micro_batch[0] // 4] for micro_batch in dealt]
            assert len(set(found)) == 3 and found == sorted(found)

    def test_the_order_depends_on_the_key_and_on_nothing_else(self):
        a, sizes = layout(), [SQUARE] * 8
        first = assign(a, sizes, self.SEED)
        state = np.random.get_state()[1].copy()
        np.random.seed(0)
        assert np.array_equal(assign(a, sizes, self.SEED), first)
        assert not np.array_equal(np.random.get_state()[1], state)
        for place in range(3):
            other = list(self.SEED)
            other[place] += 1
            assert not np.array_equal(assign(a, sizes, tuple(other)), first)

    def test_batches_of_generation_are_neighbors_on_any_number_of_processes(self):
        sizes, plain, merged = [SQUARE, WIDE] * 4, layout(), layout(micro_batches_per_rollout_batch=2)
        assert (merged.rollout_batch_size, merged.steps_per_generation) == (4, plain.steps_per_generation)
        found = []
        for number in (1, 2, 4):
            a = replace(merged, num_processes=number)
            assignment = assign(a, sizes, self.SEED)
            assert assignment.shape == (number, 8 // number, 4)
            assert sorted(assignment.reshape(-1).tolist()) == list(range(32))
            assert all(len({image // 4 for image in batch}) == 1 for batch in assignment.reshape(-1, 4).tolist())
            found.append(images_of_steps(a, assignment))
        assert found[0] == found[1] == found[2]
        batches = assign(plain, sizes, self.SEED).reshape(-1, 4).tolist()  # where a group comes apart
        assert any(len({image // 4 for image in batch}) > 1 for batch in batches)

    def test_mixed_sizes_are_an_error_with_what_to_do(self):
        sizes = [SQUARE] * 7 + [WIDE]
        a = layout(batch_size=8, num_optimizer_steps=1)
        assert assign(a, [SQUARE] * 8, self.SEED).shape == (1, 4, 8)
        # Two prompts share a batch: those of one size are put together
        assert assign(a, [SQUARE, WIDE] * 4, self.SEED).shape == (1, 4, 8)
        with pytest.raises(ValueError) as error:
            assign(a, sizes, self.SEED)
        message = str(error.value)
        assert "A batch of 8" in message and "[(256, 1280), (512, 512)]" in message
        assert "`per_device_train_batch_size` must divide `num_generations` (4)" in message
        # What it says works
        for batch_size in (1, 2, 4):
            assign(layout(batch_size=batch_size, num_optimizer_steps=1), sizes, self.SEED)
