# SPDX-License-Identifier: Apache-2.0
"""Rewards beside the drawing, ceilings on what may be missing, and the settings that save memory."""

import asyncio
import functools
import random
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline
from torch import nn

from paco_trl.rewards import ConsistencyReward, EditReward, redness_reward
from paco_trl.rewards.errors import RewardError
from paco_trl.rewards.limits import check_failures
from paco_trl.rewards.scoring import RoundScoring, move_models_to_cpu
from paco_trl.rewards.weighting import Rewards
from paco_trl.rollout.policy import as_float32
from testing_utils import are_equal, entries_of, jsonl, logs_with, wait_until, weights_of


# 8 prompts x 4 images in micro-batches of 4: two calls of 16, the first of them after half of the drawing
TWO_CALLS = {"num_prompts_per_generation": 8, "max_steps": 1, "gradient_checkpointing": False}


@pytest.fixture
def make_trainer(make_trainer):
    """The shortest rollouts that there are: what is scored does not matter here."""
    return functools.partial(make_trainer, num_inference_steps=2, sde_steps=[0])


def pixels(images) -> list[np.ndarray]:
    return [np.asarray(image) for image in images]


def watch_drawing(trainer, wait_before=lambda number: None, events=None) -> list[list]:
    """A list that gets the images of each micro-batch; `wait_before` is told its number, `events` gets a "D"."""
    drawn, draw, events = [], trainer.policy.recording_pipeline.generate, [] if events is None else events

    def watched(*args, **kwargs):
        wait_before(len(drawn))
        images, records = draw(*args, **kwargs)
        drawn.append(images)
        events.append("D")
        return images, records

    trainer.policy.recording_pipeline.generate = watched
    return drawn


class Watched:
    """`redness_reward` that keeps its images; `events` has "(" and ")" for a call, which waits in between."""

    def __init__(self, wait=lambda number: None):
        self.__name__, self.wait, self.calls, self.events, self.threads = "watched", wait, [], [], set()

    def __call__(self, prompts, completions, **kwargs):
        self.calls.append(list(completions))
        self.threads.add(threading.current_thread())
        self.events.append("(")
        self.wait(len(self.calls))
        self.events.append(")")
        return redness_reward(prompts, completions)


class WithModel:
    """`redness_reward` with a model; `events` has "M" when that is moved, and "S" when images are scored."""

    def __init__(self):
        self.__name__, self.events = "with_model", []
        self.model = nn.Linear(1, 1).requires_grad_(False)
        move = self.model.to
        self.model.to = lambda device: (self.events.append("M"), move(device))[1]

    def __call__(self, prompts, completions, **kwargs):
        self.events.append("S")
        rewards = torch.tensor(redness_reward(prompts, completions))  # (B,)
        return (rewards * torch.ones_like(self.model.weight).item()).tolist()


@pytest.mark.slow
class TestBesideTheDrawing:
    def test_a_call_runs_while_the_next_images_are_generated(self, make_trainer, monkeypatch):
        def wait(number):
            assert wait_until(lambda: events.count("D") >= 6 if number == 1 else "F" in events)

        reward = Watched(wait)
        events = reward.events
        trainer = make_trainer(reward_funcs=reward, **TWO_CALLS)
        # The fifth micro-batch waits until the reward is at work on the first four, and the reward for the sixth
        watch_drawing(trainer, lambda number: number != 4 or wait_until(lambda: "(" in events), events)
        finish = RoundScoring.finish
        monkeypatch.setattr(RoundScoring, "finish", lambda self: (events.append("F"), finish(self))[1])
        trainer.train()
        order = "".join(events)
        assert order.startswith("DDDD(DD") and order.count("D") == 8  # as soon as 16 images are there
        assert order.rindex("(") > max(order.index(")"), order.rindex("D"))  # one call after the other
        assert threading.main_thread() not in reward.threads
        # Time for which training waited, and time that passed while it drew
        assert all(logs_with(trainer, f"time/reward{suffix}")[0] > 0 for suffix in ("", "_hidden"))

    def test_calls_have_sixteen_images_in_the_order_of_generation(self, make_trainer):
        reward = Watched()
        trainer = make_trainer(reward_funcs=reward, num_prompts_per_generation=10, max_steps=1)
        drawn = watch_drawing(trainer)
        trainer.train()
        in_order = [image for images in drawn for image in images]
        assert len(in_order) == 40 and [len(call) for call in reward.calls] == [16, 16, 8]
        assert [image for images in reward.calls for image in images] == in_order  # these very images

    def test_rewards_are_those_of_their_images(self, make_trainer, tmp_path):
        # Calls are in the order of drawing, the round's images in that of the prompts
        seen = {}

        def watch(prompts, completions, **kwargs):
            rewards = redness_reward(prompts, completions)
            for prompt, reward in zip(prompts, rewards, strict=True):
                seen.setdefault(prompt, []).append(reward)
            return rewards

        trainer = make_trainer(reward_funcs=watch, log_completions=True, **TWO_CALLS)
        trainer.train()
        entries = jsonl(tmp_path / "out" / "contact_sheets" / "round_00000.jsonl")
        assert len({entry["prompt"] for entry in entries}) == len(seen) == 8
        assert list(seen) != list(dict.fromkeys(entry["prompt"] for entry in entries))
        for prompt, rewards in seen.items():
            of_prompt = [entry["watch"] for entry in entries if entry["prompt"] == prompt]
            assert of_prompt == pytest.approx(rewards, abs=1e-6)

    def test_a_reward_that_raises_stops_generation(self, make_trainer):
        broken = [True]

        def breaks(prompts, completions, **kwargs):
            if broken:
                raise OSError("the judge is gone")
            return redness_reward(prompts, completions)

        trainer = make_trainer(reward_funcs=breaks, **{**TWO_CALLS, "num_prompts_per_generation": 12})
        submit, calls = trainer.scorer.executor.submit, []
        trainer.scorer.executor.submit = lambda *args: calls.append(submit(*args)) or calls[-1]

        def wait_before(number):
            if broken and number >= 5:  # the call with the first four is known to have failed
                assert wait_until(lambda: calls[0].done())

        drawn = watch_drawing(trainer, wait_before)
        with pytest.raises(RuntimeError, match="The reward 'breaks' raised OSError: the judge is gone"):
            trainer.train()
        assert 4 <= len(drawn) < 12
        # The next set of images has nothing of the one that was broken off
        broken.clear()
        drawn.clear()
        trainer.train()
        assert len(drawn) == 12
        assert trainer.state.global_step == 1

    def test_the_random_numbers_of_a_reward_do_not_reach_the_images(self, make_trainer):
        results = {}
        for is_noisy in (False, True):
            images = []

            def reward(prompts, completions, is_noisy=is_noisy, images=images, **kwargs):
                for _ in range(10 if is_noisy else 0):  # while the next images are drawn
                    torch.manual_seed(random.randrange(1000))
                    torch.randn(100), np.random.seed(3), np.random.rand(10), random.random()
                    time.sleep(0.005)
                images.extend(pixels(completions))
                return redness_reward(prompts, completions)

            trainer = make_trainer(reward_funcs=reward, **{**TWO_CALLS, "max_steps": 4})
            before = random.getstate()
            trainer.train()
            assert (random.getstate() == before) != is_noisy
            results[is_noisy] = images, weights_of(trainer)
        assert len(results[True][0]) == 64
        assert all(np.array_equal(a, b) for a, b in zip(results[False][0], results[True][0], strict=True))
        assert are_equal(results[False][1], results[True][1])

    def test_asynchronous_rewards_run_at_the_same_time(self, make_trainer):
        calls, second_has_begun = [], {}

        async def first(prompts, completions, **kwargs):
            event = second_has_begun.setdefault(completions[0].tobytes(), asyncio.Event())
            # Waits for the other: it would wait in vain if they were called one after the other
            await asyncio.wait_for(event.wait(), timeout=20)
            return redness_reward(prompts, completions)

        async def second(prompts, completions, **kwargs):
            calls.append(completions)
            second_has_begun.setdefault(completions[0].tobytes(), asyncio.Event()).set()
            return redness_reward(prompts, completions)

        make_trainer(reward_funcs=[first, second], **TWO_CALLS).train()
        assert [len(images) for images in calls] == [4] * 8  # with each micro-batch

    def test_two_rewards_that_log_one_column(self, make_trainer):
        def reward(completions, log_extra, **kwargs):
            log_extra("redness", [0.0] * len(completions))
            return redness_reward(None, completions)

        async def later(completions, log_extra, **kwargs):
            return reward(completions=completions, log_extra=log_extra)

        with pytest.raises(RewardError, match="redness"):
            make_trainer(reward_funcs=[reward, later], max_steps=1).train()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_of_a_reward_that_asks_for_num_generations_has_all_images_of_a_prompt(make_trainer, is_async):
    calls = []

    def rank(prompts, completions, num_generations, log_extra, panel_images, **kwargs):
        calls.append((prompts, completions))
        values = redness_reward(prompts, completions)
        log_extra("redness", values)
        return [sum(value > other for other in values) / (num_generations - 1) for value in values]

    async def rank_later(prompts, completions, num_generations, **kwargs):
        return rank(prompts, completions, num_generations, **kwargs)

    reward = rank_later if is_async else rank
    # Micro-batches of 2: no call is a batch of generation
    trainer = make_trainer(reward_funcs=[reward, redness_reward], per_device_train_batch_size=2, max_steps=1)
    roll_out, seen = trainer._roll_out, []
    trainer._roll_out = lambda *args: seen.append(roll_out(*args)) or seen[-1]
    trainer.train()
    assert len(calls) == 4 and all(len(set(prompts)) == 1 and len(prompts) == 4 for prompts, _ in calls)
    assert len({prompts[0] for prompts, _ in calls}) == 4
    ((scores, _),) = seen
    ranks, redness = scores.rewards.view(4, 4, 2).unbind(-1)
    assert scores.extra["redness"] == pytest.approx(redness.flatten().tolist())
    expected = (redness.unsqueeze(2) > redness.unsqueeze(1)).sum(dim=2) / 3
    assert torch.equal(ranks, expected.float()) and expected.std() > 0


class TestCeilings:
    """16 images of 4 prompts, of which some have no reward."""

    def run(self, make_trainer, missing: dict[int, int], **settings):
        """Trains; of the prompt that comes k-th, the first `missing[k]` images have no reward."""

        def judge(prompts, completions, **kwargs):
            rewards, found = redness_reward(prompts, completions), {}
            for index, prompt in enumerate(prompts):
                found.setdefault(prompt, []).append(index)
            assert len(found) == 4
            for position, indices in enumerate(found.values()):
                for index in indices[: missing.get(position, 0)]:
                    rewards[index] = None
            return rewards

        trainer = make_trainer(reward_funcs=[redness_reward, judge], **settings)
        trainer.train()
        return trainer

    def test_images_below_and_above(self, make_trainer):
        settings = {"max_reward_failures": 1.0, "max_excluded_images": 0.25, "max_excluded_groups": 1.0}
        trainer = self.run(make_trainer, {0: 1, 1: 1, 2: 1, 3: 1}, **settings)  # 4 of 16 are a quarter
        assert logs_with(trainer, "images_excluded") == [4, 4]
        assert logs_with(trainer, "groups_excluded") == [0, 0]
        assert logs_with(trainer, "rewards/judge/failure_rate") == [0.25, 0.25]
        message = (
            r"In round 0 5 of 16 images \(31%\) are excluded and 0 of 4 prompts \(0%\).*by reward: .* 0, judge 5\."
        )
        with pytest.raises(RuntimeError, match=message):
            self.run(make_trainer, {0: 2, 1: 1, 2: 1, 3: 1}, **settings)

    def test_groups_below_and_above(self, make_trainer):
        settings = {"max_reward_failures": 1.0, "max_excluded_images": 1.0, "max_excluded_groups": 0.25}
        # A single scored image has nothing to be compared with: its group is lost, and with it the image
        trainer = self.run(make_trainer, {0: 3}, **settings)
        assert logs_with(trainer, "images_excluded") == [4, 4]
        assert logs_with(trainer, "groups_excluded") == [1, 1]
        with pytest.raises(RuntimeError, match=r"8 of 16 images \(50%\) are excluded and 2 of 4 prompts \(50%\)"):
            self.run(make_trainer, {0: 3, 2: 4}, **settings)

    @pytest.mark.parametrize(
        ("settings", "taught"), [({}, 4), ({"min_reward_std": 0.1}, 3), ({"max_reward_mean": 0.8}, 3)]
    )
    def test_prompts_that_teach_nothing_are_left_out(self, make_trainer, settings, taught):
        def reward(prompts, num_generations, **kwargs):
            return [0.81, 0.82, 0.83, 0.84] if prompts[0] == alike else [0.1, 0.9, 0.2, 0.8]

        trainer = make_trainer(reward_funcs=reward, **settings)
        alike = trainer.train_dataset["prompt"][trainer.schedule.row_indices(0)[0]]
        trainer.state.max_steps = 2
        buffer = trainer._generate_and_score_completions(0)
        assert buffer.metrics["frac_groups_uninformative"] == 1 - taught / 4
        assert buffer.metrics["images_excluded"] == buffer.metrics["frac_reward_zero_std"] == 0
        # The loss of an optimizer step is the mean over its images that are trained
        weights = torch.stack([entry["weights"] for entry in entries_of(buffer)]).view(2, -1)
        assert (weights > 0).sum() == 4 * taught
        torch.testing.assert_close(weights.sum(dim=1), torch.ones(2))

    @pytest.mark.parametrize(
        ("images", "limit", "allowed"),
        [(8, 0.01, 1), (100, 0.01, 1), (672, 0.01, 7), (16, 1 / 16, 1), (16, 0.5, 8), (8, 0, 0)],
    )
    def test_how_often_a_required_reward_may_fail(self, images, limit, allowed):
        """A fraction of a round, rounded up to whole images: one may fail in a small round."""
        rewards, is_valid = Rewards([redness_reward]), torch.ones(images, dtype=torch.bool)
        args = SimpleNamespace(
            max_reward_failures=limit,
            max_excluded_images=1.0,
            max_excluded_groups=1.0,
            num_generations=4,
        )
        for missing in (allowed, allowed + 1):
            values = torch.rand(images, 1)
            values[:missing] = torch.nan
            with pytest.raises(RewardError, match=f"{missing} of {images}") if missing > allowed else nullcontext():
                check_failures(rewards, values, is_valid, args, "round 0")

    def test_one_image_without_a_value_is_left_out(self, make_trainer):
        trainer = self.run(make_trainer, {1: 1})  # 1 of 16, above 1 %
        assert logs_with(trainer, "images_excluded") == [1, 1]

    def test_an_optional_reward_may_fail(self, make_trainer):
        trainer = self.run(make_trainer, {0: 4, 1: 4, 2: 1}, reward_required=[True, False])
        assert logs_with(trainer, "rewards/judge/failure_rate") == [9 / 16] * 2
        assert logs_with(trainer, "images_excluded") == [0, 0]


class TestMemory:
    def test_offloaded_embeddings_train_the_same(self, make_trainer):
        trainers = [make_trainer(offload_embeddings=offload) for offload in (False, True)]
        before = weights_of(trainers[0])
        for trainer in trainers:
            trainer.train()
        assert not are_equal(before, weights_of(trainers[0])) and are_equal(*map(weights_of, trainers))

    def test_offloaded_rewards_and_generation_take_turns(self, make_trainer, prompts):
        settings = {**TWO_CALLS, "eval_dataset": prompts.select(range(2)), "num_inference_steps_eval": 2}
        results = []
        for offload in (False, True):
            reward = WithModel()
            trainer = make_trainer(reward_funcs=reward, offload_rewards=offload, **settings)

            def draw(*args, generate=trainer.policy.recording_pipeline.generate, events=reward.events, **kwargs):
                events.append("G")
                return generate(*args, **kwargs)

            before, trainer.policy.recording_pipeline.generate = weights_of(trainer), draw
            trainer.train()
            metrics = trainer.evaluate()
            assert not are_equal(weights_of(trainer), before)
            assert metrics["eval_reward"] != metrics["eval_reward_baseline"]
            events = "".join(reward.events)
            if offload:
                # Moved away for training and evaluation; a round; the base model and the trained one evaluated
                assert events == "MM" + "GGGGGGGG" + "MSSM" + "GGMSM" + "GGMSM"
                assert logs_with(trainer, "time/reward_hidden") == [0] and logs_with(trainer, "time/reward")[0] > 0
            else:
                assert "M" not in events and sorted(events) == sorted("GGGGGGGGSS" + "GGS" + "GGS")
            results.append(
                (weights_of(trainer), metrics["eval_reward"], logs_with(trainer, "rewards/with_model/mean"))
            )
        assert are_equal(results[0][0], results[1][0]) and results[0][1:] == results[1][1:]

    def test_only_models_of_this_process_and_device_are_offloaded(self, make_trainer, caplog):
        judge, elsewhere, cpu = WithModel(), WithModel(), torch.device("cpu")
        judge.name, judge.score = "judge", lambda images, prompts: [0.5] * len(images)
        elsewhere.model.to("meta")
        judged = [ConsistencyReward(judge), EditReward(judge)]
        own = WithModel()
        assert move_models_to_cpu([*judged, redness_reward], cpu) == [judge.model]  # once
        assert move_models_to_cpu([own], torch.device("meta")) == [own.model]

        async def waits(prompts, completions, **kwargs):
            return [0.0] * len(completions)

        waits.model = own.model  # scores while others are generated
        served = WithModel()
        served.is_async = True
        assert move_models_to_cpu([elsewhere, waits, served, redness_reward], cpu) == []
        assert {weight.device.type for weight in elsewhere.model.parameters()} == {"meta"}
        make_trainer(reward_funcs=[own, redness_reward], offload_rewards=True)
        assert "offload_rewards" not in caplog.text
        make_trainer(reward_funcs=[waits, redness_reward], offload_rewards=True)
        assert "`offload_rewards` has nothing to offload" in caplog.text

    @pytest.mark.parametrize(("offload", "bf16"), [(False, False), (True, False), (False, True), (True, True)])
    def test_the_buffer_holds_one_kept_copy_of_each_prompt(self, make_trainer, offload, bf16):
        # Micro-batches of 2: two of them for each prompt
        trainer = make_trainer(offload_embeddings=offload, bf16=bf16, per_device_train_batch_size=2)
        inputs_of, held = trainer.policy.inputs, []

        def on_another_device(encoded, calls):
            # As on an accelerator: what the pipeline is called with is another copy than the one that is kept
            inputs = inputs_of(encoded, calls)
            if offload:
                inputs = replace(inputs, arguments={name: tensor.clone() for name, tensor in inputs.arguments.items()})
            held.append(inputs.arguments)  # so that no address is used again
            return inputs

        trainer.policy.inputs = on_another_device
        trainer.state.max_steps = 2
        buffer = entries_of(trainer._generate_and_score_completions(0))
        assert len(buffer) == len(held) == 8
        for name in ("encoder_hidden_states", "pooled_projections"):
            storages = {entry["step"].calls[0][name].untyped_storage().data_ptr() for entry in buffer}
            # One for each prompt, not for each micro-batch, as it was encoded
            assert len(storages) == 4, name
            assert {entry["step"].calls[0][name].dtype for entry in buffer} == {trainer.compute_dtype}
        for embeds in (arguments["prompt_embeds"] for arguments in held):
            assert embeds.dtype == torch.float32 and len(embeds) == 2
            # Both images of a batch share it, also as float32
            assert embeds.untyped_storage().nbytes() == embeds.nbytes // (1 if offload else 2)
        replayed = as_float32(buffer[0]["step"].calls[0]["encoder_hidden_states"])
        assert replayed.dtype == torch.float32 and replayed.untyped_storage().nbytes() == replayed.nbytes // 2

    @pytest.mark.parametrize(
        ("settings", "is_told"),
        [
            ({"vae_tiling": True, "resolution_scale": 1.0}, True),
            ({"vae_tiling": True, "resolution_scale": 0.5}, False),  # images of a tile are decoded in one
            ({"model": "with tiling", "resolution_scale": 1.0}, True),
        ],
        ids=str,
    )
    def test_seams_that_rewards_see_are_told(self, make_trainer, monkeypatch, caplog, tiny_flux, settings, is_told):
        if "model" in settings:
            pipeline = FluxPipeline.from_pretrained(tiny_flux)
            pipeline.vae.enable_tiling()
            settings = settings | {"model": pipeline}
        decoded, decode = [], AutoencoderKL.tiled_decode
        monkeypatch.setattr(
            AutoencoderKL, "tiled_decode", lambda self, *a, **k: (decoded.append(1), decode(self, *a, **k))[1]
        )
        trainer = make_trainer(max_steps=1, **settings)
        assert trainer.pipeline.vae.tile_sample_min_size == 32
        warnings = [message for message in caplog.messages if "vae_tiling" in message]
        assert len(warnings) == is_told
        assert all("images of 64 x 64 pixels" in message and "tiles of 32 x 32" in message for message in warnings)
        trainer.train()
        assert bool(decoded) == is_told  # the warning is right
