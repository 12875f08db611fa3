# SPDX-License-Identifier: Apache-2.0
"""Other prompts in the place of those that teach nothing (`max_resample_times`)."""

import copy
import functools

import pytest
import torch
from transformers import TrainerCallback

from kill_runs import Run, relative_difference
from launching import fork_context
from paco_trl.rewards import redness_reward
from paco_trl.rewards.errors import RewardError
from testing_utils import are_equal, entries_of, sheets_of, weights_of


def dull_reward(prompts, completions, num_generations, log_extra, log_metric, **kwargs):
    """Redness; half of the prompts have a reward that does not differ."""
    rewards = [0.5] * len(prompts) if is_dull(prompts[0]) else redness_reward(prompts, completions)
    log_extra("redness", rewards)
    log_metric("dullness", is_dull(prompts[0]))
    if is_dull(prompts[0]):
        log_extra("dull", ["yes"] * len(prompts))
    return rewards


def is_dull(prompt: str) -> bool:
    return len(prompt) % 2 == 0


def constant_reward(prompts, **kwargs):
    return [0.5] * len(prompts)


SETTINGS = {"reward_funcs": dull_reward, "min_reward_std": 0.0, "max_resample_times": 3}


def rounds_of(trainer):
    trainer.state.max_steps = 2
    return trainer._generate_and_score_completions(0)


def sheet_of(trainer):
    """The rows and the scored images of a round, which becomes the trainer's."""
    sheets = sheets_of(trainer)
    trainer.round = rounds_of(trainer)
    return sheets[0]


def test_the_round_is_that_of_the_prompts_that_remain(make_trainer):
    trainer = make_trainer(**SETTINGS, per_device_train_batch_size=2)
    prompts, first = trainer.train_dataset["prompt"], trainer.schedule.row_indices(0)
    dull = [place for place, row in enumerate(first) if is_dull(prompts[row])]
    assert 0 < len(dull) < 4
    final, shown = sheet_of(trainer)
    buffer = trainer.round
    assert buffer.metrics["prompts_resampled"] >= len(dull) and buffer.metrics["frac_groups_uninformative"] == 0
    assert all((final[place] != first[place]) == (place in dull) for place in range(4))
    assert len(set(final)) == 4 and not any(is_dull(prompts[row]) for row in final)

    # Images, scores, records and advantages are those of a round that has these prompts from the start
    twin = make_trainer(reward_funcs=dull_reward, per_device_train_batch_size=2)
    twin.schedule.row_indices = lambda round_index: final
    other = rounds_of(twin)
    assert other.metrics["reward"] == buffer.metrics["reward"]
    assert other.metrics["dullness"] == buffer.metrics["dullness"] == 0
    for entry, expected in zip(entries_of(buffer), entries_of(other), strict=True):
        assert torch.equal(entry["advantages"], expected["advantages"]) and expected["advantages"].any()
        assert torch.equal(entry["step"].sample, expected["step"].sample)
        assert torch.equal(entry["step"].log_prob, expected["step"].log_prob)
    assert shown.extra["redness"] == pytest.approx(shown.rewards[:, 0].tolist())
    assert shown.extra["dull"] == [None] * 16
    pictures = [shown.pictures[number] for number in sorted(shown.pictures)]
    assert redness_reward(None, pictures) == pytest.approx(shown.rewards[sorted(shown.pictures), 0].tolist(), abs=0.02)
    # Twin: without resampling they are left out
    metrics = rounds_of(make_trainer(**SETTINGS | {"max_resample_times": 0})).metrics
    assert metrics["frac_groups_uninformative"] == metrics["dullness"] > 0


@pytest.mark.parametrize(("times", "resampled"), [(1, 4), (5, 8)])
def test_it_ends_after_its_times_and_without_other_prompts(make_trainer, times, resampled):
    trainer = make_trainer(**SETTINGS | {"reward_funcs": constant_reward, "max_resample_times": times})
    buffer = rounds_of(trainer)  # 4 of 12 prompts
    assert buffer.metrics["prompts_resampled"] == resampled and buffer.metrics["frac_groups_uninformative"] == 1
    assert not any(entry["weights"].any() for entry in entries_of(buffer))


def test_others_have_the_size_of_those_that_they_replace(make_trainer, prompts):
    wide = prompts.map(lambda row, index: {"height": 64, "width": (64, 128)[index % 2]}, with_indices=True)
    trainer = make_trainer(**SETTINGS | {"reward_funcs": constant_reward}, train_dataset=wide)
    sizes = trainer.train_rows.training_sizes
    before, (after, _) = trainer.schedule.row_indices(0), sheet_of(trainer)
    assert not set(before) & set(after)
    assert [sizes[row] for row in before] == [sizes[row] for row in after] and len(set(map(tuple, sizes))) == 2


def test_prompts_without_rewards_stay_and_stop_the_run(make_trainer):
    def failing(prompts, completions, num_generations, **kwargs):
        return [None] * len(prompts) if is_dull(prompts[0]) else redness_reward(prompts, completions)

    with pytest.raises(RewardError, match="max_reward_failures"):
        rounds_of(make_trainer(**SETTINGS | {"reward_funcs": failing}))


def test_only_other_prompts_are_encoded_in_a_round(make_trainer):
    trainer = make_trainer(**SETTINGS, num_prompts_per_generation=2, max_steps=4)
    encode, encoded = trainer.policy.encoder._encode_prompts, []
    trainer.policy.encoder._encode_prompts = lambda rows, new: encoded.append(len(new)) or encode(rows, new)
    trainer.train()
    resampled = [log["prompts_resampled"] for log in trainer.state.log_history if "loss" in log]
    assert resampled[0] == resampled[1] > 0 and len(encoded) > 1
    # Of two rounds, before anything is generated; then each of those that take the place of another, or fewer
    assert encoded[0] == 4 and 0 < sum(encoded[1:]) <= resampled[0] + resampled[2]


def test_a_batch_of_parts_of_prompts_is_refused(make_trainer):
    with pytest.raises(ValueError, match="num_generations"):
        make_trainer(**SETTINGS, per_device_train_batch_size=8)


@pytest.mark.slow
def test_two_processes_equal_one(tiny_flux, tmp_path):
    """The processes have other numbers of prompts to draw again."""
    settings = {**SETTINGS, "scale_rewards": "none", "eval_strategy": "no", "max_steps": 4}
    one, two = (
        Run(fork_context(), tiny_flux, tmp_path / str(n), processes=n, zero3=n == 2, **settings).state()
        for n in (1, 2)
    )
    resampled = [[log["prompts_resampled"] for log in run["history"] if "loss" in log] for run in (one, two)]
    assert resampled[0] == resampled[1] and any(count % 2 for count in resampled[0])
    assert relative_difference(one["adapter"], two["adapter"]) < 0.05


def constant_in_round_1(prompts, completions, trainer_state, **kwargs):
    return [0.5] * len(prompts) if trainer_state.global_step // 2 == 1 else redness_reward(prompts, completions)


class TestRoundsThatTrainNothing:
    """All prompts of a round are left out: with gradients of 0, momentum and weight decay would move the weights."""

    @pytest.fixture(params=["grpo", "nft", "awm"])
    def make(self, request, make_small, make_nft):
        settings = {"learning_rate": 0.01, "weight_decay": 0.5, "min_reward_std": 0.0}
        makers = {"grpo": make_small, "nft": make_nft, "awm": functools.partial(make_nft, loss_type="awm")}
        return functools.partial(makers[request.param], **settings, ema_decay=0.5)

    @pytest.mark.parametrize("constant", [True, False])
    def test_move_nothing_and_say_so(self, make, caplog, constant):
        reward = constant_in_round_1 if constant else redness_reward
        trainer = make(reward_funcs=reward, max_steps=6)
        states = []

        class Keep(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                moments = trainer.optimizer.state_dict()["state"].items()
                state = {f"{key}/{name}": value for key, of in moments for name, value in of.items()}
                for file, average in trainer.averages.items():
                    state |= {f"{file}/{name}": value for name, value in average.average.items()}
                states.append(copy.deepcopy(state | weights_of(trainer)))

        trainer.add_callback(Keep())
        trainer.train()
        said = [message for message in caplog.messages if "`min_reward_std`" in message and "round 1" in message]
        same = [are_equal(before, after) for before, after in zip(states, states[1:], strict=False)]
        assert same == [False, constant, constant, False, False] and len(said) == constant

    @pytest.mark.slow
    @pytest.mark.parametrize("zero3", [False, True])
    def test_on_two_processes(self, tiny_flux, tmp_path, zero3):
        settings = {
            "reward_funcs": constant_in_round_1, "min_reward_std": 0.0, "lr_scheduler_type": "constant", "warmup_steps": 0,
            "ema_decay": None, "eval_strategy": "no", "save_strategy": "no", "weight_decay": 0.5, "processes": 2, "zero3": zero3,
        }  # fmt: skip
        runs = [Run(fork_context(), tiny_flux, tmp_path / str(n), max_steps=n, **settings).state() for n in (2, 4, 6)]
        adapters = [run["adapter"] for run in runs]
        assert are_equal(*adapters[:2]) and not are_equal(*adapters[1:])
