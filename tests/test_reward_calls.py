# SPDX-License-Identifier: Apache-2.0
"""Rewards as they are called: failures are errors with the reward's name."""

import asyncio
import functools
import math
import threading
import traceback
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from PIL import Image
from torch import nn
from transformers import TrainerState

import paco_trl.rewards
from paco_trl.rewards import (
    ClipTReward,
    DuplicateReward,
    LayoutReward,
    PickScoreReward,
    redness_reward,
)
from paco_trl.rewards.checks import check_columns
from paco_trl.rewards.errors import RewardError
from paco_trl.rewards.named_rewards import NAMED_REWARDS
from paco_trl.rewards.scoring import RewardScorer
from paco_trl.rewards.weighting import Rewards
from paco_trl.rollout.rounds import Round
from paco_trl.utils.option_checks import check_required


PROMPTS = ["a", "b", "c"]
IMAGES = [Image.new("RGB", (4, 4), color) for color in ("red", "blue", "black")]


def call(function, **columns):
    """Calls a reward as the trainer does, sync or async."""
    rewards = Rewards(function)
    result = rewards.call(0, prompts=PROMPTS, completions=IMAGES, **columns)
    return asyncio.run(result) if rewards.is_async[0] else result


def returning(values, is_async):
    """A reward named `tasty` that returns these values, or raises them."""

    def tasty(prompts, completions, **columns):
        if isinstance(values, BaseException):
            raise values
        return values

    async def tasty_async(prompts, completions, **columns):
        await asyncio.sleep(0)
        return tasty(prompts, completions)

    tasty_async.__name__ = "tasty"
    return tasty_async if is_async else tasty


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request):
    return request.param


class TestReturnedValues:
    def test_an_error_while_values_are_read_has_the_rewards_name(self, is_async):
        """Of a generator, or of a tensor whose computation has failed."""
        lazy = (1 / (number - 1) for number in range(3))
        with pytest.raises(RewardError, match=r"'tasty' raised ZeroDivisionError: .*test_reward_calls\.py:\d+"):
            call(returning(lazy, is_async))

    def test_arrays_and_tensors_pass(self, is_async):
        for values in (np.array([0.5, 1.0, 2.0]), torch.tensor([0.5, 1.0, 2.0]), [0.5, 1, 2]):
            assert call(returning(values, is_async)) == [0.5, 1.0, 2.0]
        assert call(returning((None, 1.0, None), is_async)) == [None, 1.0, None]

    @pytest.mark.parametrize("values", [[], [1.0, 2.0], [1.0] * 4])
    def test_wrong_count(self, is_async, values):
        with pytest.raises(RewardError, match=f"'tasty' returned {len(values)} value\\(s\\) for 3 image\\(s\\)"):
            call(returning(values, is_async))

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan"), torch.tensor(math.inf)])
    def test_not_a_number_is_an_error_with_name_and_place(self, is_async, value):
        with pytest.raises(RewardError, match="'tasty' returned .* for image 1.*Return None"):
            call(returning([1.0, value, 2.0], is_async))

    @pytest.mark.parametrize(
        "values",
        [
            dict.fromkeys([0.1, 0.2, 0.3], 1.0), {"scores": [1.0] * 3}, {0.1, 0.2, 0.3}, "123", b"123",
            torch.ones(()), np.ones(()), torch.ones(3, 2), np.ones((3, 2)), [10**400] * 3, [1e300] * 3, ["1"] * 3,
        ],
        ids=lambda values: type(values).__name__,
    )  # fmt: skip
    def test_what_is_no_list_of_numbers(self, is_async, values):
        with pytest.raises(RewardError, match="'tasty' returned .*list|'tasty' returned .* for image 0.*number"):
            call(returning(values, is_async))

    def test_one_that_exits_does_not_stop_the_thread_of_the_others(self, is_async):
        with pytest.raises(RewardError, match="'tasty' raised SystemExit: no key"):
            call(returning(SystemExit("no key"), is_async))

    def test_an_exception_is_an_error_with_the_name(self, is_async):
        cause = KeyError("no judge")
        with pytest.raises(RuntimeError, match="The reward 'tasty' raised KeyError: 'no judge'") as error:
            call(returning(cause, is_async))
        assert error.value.__cause__ is cause


def test_the_traceback_of_a_reward_is_its_own(make_trainer):
    def helper():
        return 1 / 0

    def breaks(prompts, completions, **kwargs):
        return [helper()]

    async def breaks_async(prompts, completions, **kwargs):
        return [helper()]

    for reward in (breaks, breaks_async):
        with pytest.raises(
            RewardError, match=rf"'{reward.__name__}' raised ZeroDivisionError.*test_reward_calls.py"
        ) as end:
            make_trainer(reward_funcs=reward, num_prompts_per_generation=1).train()
        cause = end.value.__cause__
        assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == [reward.__name__, "helper"]
        assert cause.__cause__ is None and "".join(traceback.format_exception(end.value)).count("Traceback") == 2


class TestFunctions:
    def test_names_are_those_of_the_command_line(self):
        rewards = Rewards(["layout", redness_reward, "no_duplicates"])
        assert [type(function).__name__ for function in rewards.functions] == [
            "LayoutReward", "function", "DuplicateReward",
        ]  # fmt: skip
        assert rewards.names == [*Rewards([LayoutReward(), redness_reward, DuplicateReward()]).names]
        assert Rewards("redness").functions == [redness_reward]
        with pytest.raises(ValueError, match="no reward 'clip-reward', only consistency, edit, .* or pass a callable"):
            Rewards("clip-reward")

    def test_each_name_is_a_reward(self):
        found = {name: getattr(paco_trl.rewards, reward.attribute) for name, reward in NAMED_REWARDS.items()}
        assert found["clip_t"] is ClipTReward and all(map(callable, found.values()))

    @pytest.mark.parametrize("wrong", [nn.Linear(2, 1), dict], ids=["a module", "a class"])
    def test_other_callables_are_refused(self, wrong):
        with pytest.raises(TypeError, match="A reward must be a callable"):
            Rewards([redness_reward, wrong])

    def test_a_reward_that_does_not_take_every_column(self):
        def narrow(prompts, completions, rows):
            return [0.0] * len(completions)

        class Narrow:
            def __call__(self, prompts, completions):
                return [0.0] * len(completions)

        for wrong, name in ((narrow, "narrow"), (Narrow(), "Narrow"), (functools.partial(narrow, rows=1), "narrow")):
            with pytest.raises(ValueError, match=rf"The reward '{name}' .* `\*\*kwargs`"):
                Rewards([redness_reward, wrong])

    def test_a_callable_object_has_the_name_it_gives_itself(self):
        class Judge:
            def __init__(self, name=None):
                if name is not None:
                    self.__name__ = name

            def __call__(self, prompts, completions, **columns):
                return [1.0, 2.0, math.nan]

        judge = Judge("judge_a")
        rewards = Rewards([judge, Judge("judge_b"), Judge()])
        assert rewards.names == ["judge_a", "judge_b", "Judge"]
        with pytest.raises(ValueError, match="'Judge'.*`__name__`"):
            Rewards([judge, Judge(), Judge()])
        with pytest.raises(RewardError, match="'judge_a' returned nan for image 2"):
            rewards.call(0, prompts=PROMPTS, completions=IMAGES)


class OneImageRows:
    """Rows as a round reads them, of one image."""

    is_anchored = shares_noise = False

    def __init__(self, rows: list[dict]):
        self.row, self.images_per_row, self.prompt_indices = (
            rows.__getitem__,
            [1] * len(rows),
            [[n] for n in range(len(rows))],
        )


class TestImagesOfARewardAreItsOwn:
    """A reward that draws on images or shrinks them: the others, the sheet and the card have those that were generated."""

    SOURCE, REFERENCES = Image.new("RGB", (6, 6), "gray"), [Image.new("RGB", (5, 5), "navy")]

    @staticmethod
    def spoil(prompts, completions, panel_images, image, references, criteria, **columns):
        for each in [*completions, *sum(panel_images, []), *image, *sum(references, [])]:
            each.paste("white", (0, 0, 2, 2))
            each.thumbnail((1, 1))
        assert len({id(each) for each in image}) == 1  # one source is one image, which a judge encodes once
        for entries in (*panel_images, *criteria, completions, references):
            entries.clear()
        return [0.0] * len(prompts)

    @staticmethod
    async def spoil_async(prompts, **columns):
        return TestImagesOfARewardAreItsOwn.spoil(prompts, **columns)

    @staticmethod
    def spoil_group(prompts, num_generations, **columns):
        return TestImagesOfARewardAreItsOwn.spoil(prompts, **columns)

    @staticmethod
    async def look(prompts, completions, panel_images, image, references, criteria, log_extra, **columns):
        seen = zip(completions, panel_images, image, references, criteria, strict=True)
        log_extra("seen", [[of.tobytes() for of in (a, *b, c, *d)] + [e] for a, b, c, d, e in seen])
        return [1.0] * len(prompts)

    @pytest.mark.parametrize("spoil", [spoil, spoil_async, spoil_group], ids=lambda each: each.__func__.__name__)
    def test_whatever_the_order(self, spoil):
        images = [Image.effect_noise((4, 8), 90).convert("RGB") for _ in range(4)]
        columns = {"rows": 1, "cols": 1, "prompt": "a", "image": self.SOURCE, "references": self.REFERENCES}
        rows = [{**columns, "criteria": {"style": ["ink"]}} for _ in images]
        before = [image.tobytes() for image in (*images, self.SOURCE, *self.REFERENCES)]

        def look_sync(**columns):
            return asyncio.run(self.look(**columns))

        for others in ([spoil.__func__, self.look], [spoil.__func__, look_sync], [look_sync, spoil.__func__]):
            round = Round(OneImageRows(rows[:2]), [0, 1], 2, (0, 3, 0), [(8, 4)] * 4)
            for completion, image in zip(round.completions, images, strict=True):
                completion.image = image
            with RewardScorer(Rewards(others), Accelerator(cpu=True)).scoring(round, TrainerState()) as scoring:
                scoring.add(round.completions)
            seen = scoring.scores.extra["seen"]
            assert [image.tobytes() for image in (*images, self.SOURCE, *self.REFERENCES)] == before
            expected = [[image, image, *before[4:], {"style": ["ink"]}] for image in before[:4]]
            assert seen == expected
            assert [image.size for image in images] == [(4, 8)] * 4 and rows[0]["criteria"] == {"style": ["ink"]}


def test_a_geometric_mean_of_a_negative_reward_names_it():
    rewards = Rewards([redness_reward, returning([], False)], [1.0, 0.5], method="geometric_mean")
    values = torch.tensor([[1.0, 0.5], [2.0, 0.0]])
    assert rewards.aggregate(values, 2)[0].isfinite().all()
    values[1, 1] = -0.25
    with pytest.raises(RewardError, match="'tasty' is down to -0.25"):
        rewards.aggregate(values, 2)


def test_missing_values_are_not_in_the_means():
    rewards = torch.tensor([[1.0, math.nan], [3.0, 4.0], [2.0, 8.0], [math.nan, math.nan]])
    other = returning([], False)
    runner = Rewards([redness_reward, other], [1.0, 0.5], method="log_tamed", threshold=0.3)
    _, details = runner.aggregate(rewards, 2)
    metrics = runner.metrics(rewards, runner.total(rewards, 2), details)
    means = [metrics[f"rewards/{name}/mean"] for name in ("redness_reward", "tasty")]
    assert means == [2.0, 6.0] and metrics["rewards/tasty/ratio"] == 3.0
    assert metrics["rewards/redness_reward/std"] == 1.0 and metrics["rewards/tasty/failure_rate"] == 0.5
    assert metrics["reward"] == 5.5 and metrics["reward_std"] == pytest.approx(0.5**0.5)  # of 5 and 6
    assert [metrics[f"rewards/{name}/tamed"] for name in ("redness_reward", "tasty")] == [1.0, 1.0]


def test_the_sum_of_an_image_without_an_optional_reward():
    """Within groups it is compared without that; without them it has no sum, which an evaluation counts."""
    rewards = torch.tensor([[1.0, math.nan], [3.0, 4.0], [2.0, 8.0], [5.0, 2.0]])
    runner = Rewards([redness_reward, returning([], False)], [1.0, 0.5], required=[True, False])
    mean = 14 / 3  # of the optional one
    assert runner.total(rewards, 2).tolist() == pytest.approx([1 + mean / 2, 3 + mean / 2, 6.0, 6.0])
    assert runner.total(rewards).tolist() == pytest.approx([math.nan, 5.0, 6.0, 6.0], nan_ok=True)
    # Twin: a required one
    runner = Rewards([redness_reward, returning([], False)], [1.0, 0.5])
    assert runner.total(rewards, 2).tolist() == pytest.approx([math.nan, 5.0, 6.0, 6.0], nan_ok=True)


def test_which_rewards_are_required():
    names = ["consistency", "ocr"]
    with pytest.raises(ValueError, match="`reward_required` is .*2 rewards"):
        check_required([True], names, torch.ones(2))
    for required, weights in (([False, False], [1.0, 1.0]), ([True, False], [0.0, 1.0])):
        with pytest.raises(ValueError, match="no reward of nonzero weight is required"):
            check_required(required, names, torch.tensor(weights))


class TestNeededColumns:
    def reward(self, **attributes):
        def needy(prompts, completions, **kwargs):
            return redness_reward(prompts, completions)

        vars(needy).update(attributes)
        return needy

    def dataset(self, **columns) -> Dataset:
        return Dataset.from_dict({"rows": [2, 1], "cols": [2, 3], **columns})

    def test_what_is_there(self):
        dataset = self.dataset(theme=["a", "b"], criteria=[["x"], ["y"]])
        check_columns([self.reward(needed_columns=("theme", "criteria"), min_panels=3)], dataset, "the dataset")
        check_columns(redness_reward, self.dataset(), "the dataset")  # one that needs nothing

    def test_parameters(self):
        def named(prompts, completions, panel_images, theme, log_metric, style="flat", *, trainer_state, **kwargs):
            return [0.0] * len(completions)

        def misspelled(prompts, completions, panel_image, **kwargs):
            return [0.0] * len(completions)

        check_columns(named, self.dataset(theme=["a", "b"]), "the dataset")
        for reward, column in ((named, "theme"), (misspelled, "panel_image"), (lambda prompt, **kwargs: [], "prompt")):
            with pytest.raises(ValueError, match=f"the parameter `{column}`"):
                check_columns([redness_reward, reward], self.dataset(), "the dataset")

    def test_what_is_not(self):
        reward = self.reward(needed_columns=("theme",))
        with pytest.raises(ValueError, match="'needy' requires the column `theme`.* has rows, cols"):
            check_columns(reward, self.dataset(), "the dataset")
        for empty in ("", "  ", None):
            with pytest.raises(ValueError, match="requires the column `theme`, which is .* in row 1 of the dataset"):
                check_columns(reward, self.dataset(theme=["a", empty]), "the dataset")
        with pytest.raises(ValueError, match="at least 4 panels, but row 1 .*1 x 3"):
            check_columns([self.reward(min_panels=4)], self.dataset(), "the dataset")

    def test_of_the_packaged_rewards(self, tiny_clip):
        rewards = [DuplicateReward(), ClipTReward(tiny_clip)]
        check_columns(rewards, self.dataset(panels=[["a"] * 4, ["b"] * 3]), "the dataset")
        with pytest.raises(ValueError, match="'clip_t' requires the column `panels`"):
            check_columns(rewards, self.dataset(), "the dataset")  # as of edits
        check_columns(PickScoreReward(tiny_clip, tiny_clip), self.dataset(), "the dataset")  # takes the whole image
        with pytest.raises(ValueError, match="'no_duplicates' compares at least 2 panels, but row 1 .*1 x 1"):
            check_columns(rewards, Dataset.from_dict({"rows": [2, 1], "cols": [1, 1]}), "the dataset")


def test_async_rewards_run_on_the_device_of_their_process(monkeypatch):
    """A new thread starts on the first device, and so would what an async reward puts on `"cuda"`."""
    selected = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: selected.append((threading.current_thread(), device)))

    async def reward(prompts, **columns):
        return [1.0] * len(prompts)

    for name in ("cpu", "cuda:1"):
        scorer = RewardScorer(Rewards([reward]), SimpleNamespace(device=torch.device(name)))
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), scorer.loop).result(5)  # after what the loop has to do
    ((thread, device),) = selected
    assert device == torch.device("cuda:1") and thread is not threading.main_thread()
