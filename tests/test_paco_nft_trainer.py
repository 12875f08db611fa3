# SPDX-License-Identifier: Apache-2.0
"""PaCoNFTTrainer on a tiny real FLUX pipeline: the method, its old policy, resuming, settings, documentation."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import DiffusionPipeline
from peft import PeftModel
from safetensors.torch import load_file

from paco_trl import PaCoNFTConfig, PaCoNFTTrainer
from paco_trl.checkpointing.weights import use_weights
from paco_trl.rewards import redness_reward
from paco_trl.rollout import FluxFamily, keyed_generator
from paco_trl.rollout.families import Family
from paco_trl.rollout.policy import RecordingOptions
from paco_trl.trainer.paco_nft_trainer import OLD_POLICY_WEIGHTS
from paco_trl.trainer.step_statistics import VelocityStatistics
from test_rollout_batch import rows_of_calls
from testing_utils import (
    are_equal,
    check_planted_reward,
    count_images,
    gradients,
    logs_with,
    recorded,
    velocity_with,
    weights_of,
)


FIELDS = {field.name: field for field in dataclasses.fields(PaCoNFTConfig)}


def test_a_loss_on_the_ratio_is_refused():
    with pytest.raises(TypeError, match="OwnLoss has a `policy_loss`.*`compute_loss`"):

        class OwnLoss(PaCoNFTTrainer):
            def policy_loss(self, step, advantages):
                return -step.log_prob * advantages, {}

    class OwnVelocityLoss(PaCoNFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs)


def images_of(step) -> torch.Tensor:
    """The latents that were noised: x_t = x_0 + t * (noise - x_0)."""
    return step.sample - step.times.view(-1, 1, 1) * step.target


class TestTraining:
    @pytest.mark.slow
    def test_planted_reward_rises_and_falls_with_its_sign_flipped(self, make_nft):
        settings = {
            "max_steps": 18, "learning_rate": 1.5e-2, "nft_beta": 0.2, "num_generations": 8, "advantage_clip": 2.0,
            "num_prompts_per_generation": 4, "per_device_train_batch_size": 16,
        }  # fmt: skip
        check_planted_reward(make_nft, **settings)

    def test_all_times_of_the_schedule_but_the_last_at_the_default(self, make_nft):
        trainer, record = recorded(make_nft, num_noise_levels=None)
        assert trainer.args.num_trained_steps == 3
        buffer = record.rounds[0]
        assert len(buffer) == 2 * 3
        last = trainer.policy.scheduler.times[3]  # of the last step
        for batch in range(2):
            times = torch.stack([entry["step"].times for entry in buffer[3 * batch : 3 * batch + 3]], dim=1)
            assert all(len(set(row.tolist())) == 3 for row in times)  # an image has each of them once
            assert len({tuple(sorted(row.tolist())) for row in times}) == 1
            assert times.max() == 1.0 and times.min() > last > 0
        # In an order of its own for each image
        assert len({tuple(entry["step"].times.tolist()) for entry in buffer}) > 3

    def test_bf16(self, make_nft):
        trainer = make_nft(bf16=True)
        trainer.train()
        first, second = logs_with(trainer, "velocity_deviation")
        assert first < 1e-3 * second

    def test_a_forward_with_other_numbers_stops_the_run(self, make_nft):
        trainer = make_nft()
        before = weights_of(trainer)
        trainer.model.get_base_model().proj_out.register_forward_hook(
            lambda module, args, output: output * 1.2 if torch.is_grad_enabled() else output
        )
        with pytest.raises(RuntimeError, match=r"Before the first update .* differ by 20\.0%"):
            trainer.train()
        assert are_equal(before, weights_of(trainer))


class TestLoss:
    @pytest.mark.parametrize("beta", [0.0, 0.3])
    def test_loss_and_gradient_equal_a_direct_computation(self, make_nft, beta):
        trainer, record = recorded(make_nft, nft_beta=0.4, beta=beta)
        entry = record.rounds[0][0]
        step, advantages = entry["step"], entry["advantages"]
        assert advantages.abs().min() > 0 and advantages.min() < 0 < advantages.max()
        own_loss = trainer.compute_loss(trainer.model, entry)
        own = gradients(trainer, own_loss)

        x_t, t = step.sample, step.times.view(-1, 1, 1)
        x0 = x_t - t * step.target
        (call,) = step.calls
        inputs = {**call, "hidden_states": x_t, "timestep": step.times * 1000 / 1000}
        v = trainer.model(**inputs)[0]
        v_old = step.rollout_velocity
        r = 0.5 + 0.5 * (advantages / 5.0).clamp(-1, 1)
        losses = []
        for sign, share in ((1, r), (-1, 1 - r)):
            image = x_t - t * (v_old + sign * 0.4 * (v - v_old))
            error = (image - x0).flatten(1)
            losses.append(share * (error**2).mean(1) / error.abs().mean(1).detach())
        loss = losses[0] + losses[1]
        if beta:
            with torch.no_grad(), trainer.model.disable_adapter():
                reference = trainer.model(**inputs)[0]
            loss = loss + beta * ((v - reference) ** 2).flatten(1).mean(1)
        # 4 images and 2 times behind an optimizer step
        torch.testing.assert_close(gradients(trainer, loss.sum() / 8), own, rtol=1e-3, atol=1e-7)
        assert max(value.abs().max().item() for value in own.values()) > 5e-5
        torch.testing.assert_close(own_loss, loss.sum() / 8, rtol=1e-4, atol=1e-7)

    def test_what_is_trained_follows_from_keys_alone(self, make_nft):
        """Latents, noise and times of one image, by hand from the key of the image."""
        trainer, record = recorded(make_nft)
        for position, batch in enumerate(trainer.round.micro_batches):
            steps = [entry["step"] for entry in record.rounds[0][2 * position : 2 * position + 2]]
            for place, sample in enumerate(batch.samples):
                generator = keyed_generator(trainer.args.seed, 3, 0, sample.row_index, sample.generation, 1)
                order = torch.randperm(3, generator=generator)[:2].tolist()
                for level, step in enumerate(steps):
                    schedule = sorted({t for entry in record.rounds[0] for t in entry["step"].times.tolist()})[::-1]
                    assert step.times[place].item() == schedule[order[level]]
                    noise = torch.randn(step.target.shape[1:], generator=generator)
                    torch.testing.assert_close(step.target[place], noise - images_of(step)[place])

    def test_the_latents_are_those_of_the_images(self, make_nft):
        seen = []

        def keep(prompts, completions, **kwargs):
            seen.extend(np.asarray(image) for image in completions)
            return redness_reward(prompts, completions)

        trainer, record = recorded(make_nft, reward_funcs=keep)
        pipeline = trainer.pipeline
        latents = torch.cat([images_of(entry["step"]) for entry in record.rounds[0][::2]])
        assert latents.dtype == torch.float32
        unpacked = pipeline._unpack_latents(latents, 32, 32, pipeline.vae_scale_factor)
        unpacked = unpacked / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor
        with torch.no_grad():
            decoded = torch.cat([pipeline.vae.decode(batch, return_dict=False)[0] for batch in unpacked.split(4)])
        again = pipeline.image_processor.postprocess(decoded, output_type="np")
        assert np.abs(again * 255 - np.stack(seen)).max() < 1.01  # rounded to whole numbers
        assert np.abs(np.stack(seen).astype(float)[0] - np.stack(seen)[1]).max() > 3

    def test_images_without_a_reward_are_not_in_the_means(self, make_config):
        statistics, velocity = VelocityStatistics(Accelerator(cpu=True), make_config(PaCoNFTConfig)), torch.ones(4, 3)
        for weights in (torch.tensor([0.5, 0.25, 0.25, 0.0]), torch.zeros(4)):
            statistics.add_velocity(2 * velocity, velocity, {"kl": torch.tensor([1.0, 2.0, 3.0, 100.0])}, weights)
        assert statistics.finish(1, False) == {"velocity_deviation": 1.0, "kl": 2.0}
        statistics.add_velocity(
            velocity * torch.tensor([[1.0], [torch.nan], [1.0], [1.0]]), velocity, {}, torch.ones(4)
        )
        with pytest.raises(RuntimeError, match="not finite at optimizer step 5"):
            statistics.finish(5, False)


class TestOldPolicy:
    def test_follows_at_the_end_of_a_round_by_the_closed_form(self, make_nft):
        trainer, record = recorded(make_nft, max_steps=6, old_policy_decay_rate=0.1, old_policy_max_decay=0.5)
        old = record.averages["old_policy"]
        assert are_equal(old[0], record.weights[0])
        for step in (1, 3, 5):  # in the middle of a round it stands still
            assert are_equal(old[step], old[step - 1])
            assert not are_equal(record.weights[step], record.weights[step - 1])
        for step, decay in ((2, 0.2), (4, 0.4), (6, 0.5)):
            for name, value in old[step].items():
                expected = decay * old[step - 1][name] + (1 - decay) * record.weights[step][name]
                torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
            assert not are_equal(old[step], record.weights[step])
        assert logs_with(trainer, "old_policy_decay") == [0.0, 0.0, 0.2, 0.2, 0.4, 0.4]

    def test_draws_the_images_and_gives_the_old_velocity(self, make_nft):
        trainer, record = recorded(make_nft, max_steps=3, old_policy_decay_rate=0.25)
        step = record.rounds[1][0]["step"]

        assert torch.equal(velocity_with(trainer, step, record.averages["old_policy"][2]), step.rollout_velocity)
        for others in (record.weights[2], record.weights[3], record.averages["old_policy"][0]):
            assert not torch.equal(velocity_with(trainer, step, others), step.rollout_velocity)
        # The images themselves, made again
        batch, images = trainer.round.micro_batches[0], images_of(step)
        encoded = trainer.policy.encoder.encode(trainer.round, trainer.round.row_indices_of([batch]))
        for weights, is_it in ((record.averages["old_policy"][2], True), (record.weights[2], False)):
            with use_weights(trainer.model, weights, 0), trainer.policy.on_device():
                trainer.policy.generate(
                    batch, encoded, trainer.args.num_inference_steps, RecordingOptions(last_step=True)
                )
            assert torch.allclose(batch.steps[-1].prev_sample, images, atol=1e-5) is is_it


class TestResume:
    @pytest.mark.parametrize("save_steps", [2, 3], ids=["end of a round", "middle of a round"])
    @pytest.mark.parametrize("loss_type", ["nft", "awm"])
    def test_resumed_run_equals_an_uninterrupted_one(self, make_nft, tmp_path, loss_type, save_steps):
        settings = {"max_steps": 2 * save_steps, "save_strategy": "steps", "save_steps": save_steps}
        make = functools.partial(make_nft, loss_type=loss_type, old_policy_decay_rate=0.1, **settings)
        whole = make(output_dir=str(tmp_path / "a"))
        whole.train()
        checkpoint = tmp_path / "a" / f"checkpoint-{save_steps}"
        saved = load_file(checkpoint / "old_policy.safetensors")
        assert not are_equal(saved, load_file(checkpoint / "policy.safetensors"))
        assert not are_equal(saved, load_file(checkpoint / "ema.safetensors"))
        resumed = make(output_dir=str(tmp_path / "b"))
        calls = count_images(resumed.model)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        if loss_type == "nft":  # the end: one round is left; the middle: half of one and a whole one
            assert sum(calls) == 8 * (4 + 4) + (0 if save_steps == 2 else 4 * 2)
        assert are_equal(weights_of(resumed), weights_of(whole))
        assert are_equal(resumed.old_policy.average, whole.old_policy.average)
        assert are_equal(resumed.ema.average, whole.ema.average)

    def test_a_checkpoint_of_another_trainer_is_refused(self, make_trainer, make_nft, tmp_path):
        settings = {"max_steps": 1, "num_prompts_per_generation": 2, "save_strategy": "steps", "save_steps": 1}
        make_trainer(output_dir=str(tmp_path / "a"), **settings).train()
        with pytest.raises(ValueError, match="has no old_policy.safetensors"):
            make_nft(output_dir=str(tmp_path / "b")).train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))


class TestInherited:
    def test_evaluation_and_saving_use_the_average(self, make_nft, prompts, tiny_flux, tmp_path):
        trainer = make_nft(eval_dataset=prompts.select(range(2)), num_inference_steps_eval=2, max_steps=4)
        trainer.train()
        metrics = trainer.evaluate()
        assert metrics["eval_reward"] != metrics["eval_reward_baseline"]
        with use_weights(trainer.model, trainer.old_policy.average, 0):
            callbacks = trainer._average_callbacks
            trainer._average_callbacks = {OLD_POLICY_WEIGHTS: callbacks[OLD_POLICY_WEIGHTS]}
            of_old = trainer.evaluate()
        assert of_old["eval_reward"] != metrics["eval_reward"]
        trainer._average_callbacks = callbacks
        trainer.save_model()
        loaded = PeftModel.from_pretrained(DiffusionPipeline.from_pretrained(tiny_flux).transformer, tmp_path / "out")
        saved = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
        assert are_equal(saved, trainer.ema.average)
        assert not are_equal(saved, trainer.old_policy.average)

    def test_the_card_is_that_of_the_method(self, make_nft, make_trainer, tmp_path):
        cards = {}
        for name, make in (
            ("nft", make_nft),
            ("awm", functools.partial(make_nft, loss_type="awm")),
            ("", make_trainer),
        ):
            make(max_steps=1).create_model_card()
            cards[name] = (tmp_path / "out" / "README.md").read_text()
        own = {
            "nft": ("paco_trl: DiffusionNFT", "2509.16117", "| `nft_beta` |"),
            "awm": ("paco_trl: AWM", "2509.25050", "| `awm_weighting` | ghuber |"),
            "": ("paco_trl: PaCo-GRPO", "| `sde_steps` |", "| `loss_type` | grpo |"),
        }
        for name, texts in own.items():
            assert all((text in cards[other]) == (name == other) for text in texts for other in cards)
        assert all("2512.04784" in card for card in cards.values())  # whose rounds and rewards these are

    def test_offloading_changes_nothing(self, make_nft):
        plain, offloaded = make_nft(), make_nft(offload_embeddings=True, ema_offload=True)
        plain.train()
        offloaded.train()
        assert offloaded.old_policy.offload
        assert are_equal(weights_of(plain), weights_of(offloaded))

    def test_a_page_without_calls_at_other_times_is_refused(self, make_nft, monkeypatch):
        make_nft()
        monkeypatch.setattr(FluxFamily, "call_at", Family.call_at)
        with pytest.raises(ValueError, match="FluxFamily has no `call_at`"):
            make_nft()


class WrongTimeFamily(FluxFamily):
    def call_at(self, call, sample, sigma):
        return super().call_at(call, sample, 1 - sigma)


class WrongSampleFamily(FluxFamily):
    def call_at(self, call, sample, sigma):
        return super().call_at(call, -sample, sigma)


class TestFamilyPage:
    @pytest.mark.parametrize(
        ("family", "differs"), [(WrongTimeFamily, "timestep"), (WrongSampleFamily, "hidden_states")]
    )
    def test_a_wrong_page_stops_the_run(self, make_nft, family, differs):
        with pytest.raises(RuntimeError, match=f"{family.__name__}.call_at .*: {differs} differ.*correct the family"):
            make_nft(family=family()).train()


class TestConfig:
    @pytest.fixture
    def make(self, make_config):
        return functools.partial(make_config, PaCoNFTConfig)

    def test_defaults(self, make):
        config = make()
        assert (config.nft_beta, config.num_noise_levels, config.num_trained_steps) == (1.0, None, 9)
        assert (config.old_policy_decay_rate, config.old_policy_max_decay) == (0.001, 0.5)
        assert config.round_plan.num_images == 672 and config.steps_per_generation == 672 * 9

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("sde_steps", [2]),
            ("epsilon", 1e-3),
            ("sde_type", "cps"),
            ("noise_level", 0.5),
            ("tail_steps", 4),
        ],
    )
    def test_what_means_nothing_is_refused(self, make, make_config, name, value):
        # Where there are stochastic steps it does
        assert getattr(make_config(per_device_train_batch_size=2, **{name: value}), name) == value
        with pytest.raises(ValueError, match=f"`{name}`"):
            make(**{name: value})
        field = FIELDS[name]
        make(**{name: field.default_factory() if name == "sde_steps" else field.default})

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"nft_beta": float("nan")}, "`nft_beta` is nan"),
            ({"num_noise_levels": 10}, "`num_noise_levels` is 10; it must be from 1 to 9"),
            ({"old_policy_decay_rate": -0.1}, "`old_policy_decay_rate` is -0.1"),
            ({"old_policy_max_decay": 1.0}, "`old_policy_max_decay` is 1.0"),
            ({"advantage_clip": None}, "`advantage_clip` is None"),
            ({"loss_type": "grpo"}, "`loss_type` is 'grpo'; it must be .*'nft'.*'awm'.*`PaCoGRPOTrainer`"),
            ({"loss_type": "awm", "awm_weighting": "huber"}, "`awm_weighting` is 'huber'.*'ghuber'.*'t'"),
            ({"noise_level": 0.5}, "`noise_level` is set to 0.5, which is for GRPO. Leave it out"),
            ({"epsilon": 0.1}, "`epsilon` is set to 0.1, which is for GRPO or the loss 'awm', not for 'nft'"),
            ({"loss_type": "awm", "nft_beta": 0.1}, "`nft_beta` is set to 0.1, which is for the loss 'nft'"),
            ({"old_policy_beta": 0.1}, "`old_policy_beta` is set to 0.1"),
            (
                {"loss_type": "awm", "old_policy_beta": 0.0, "old_policy_max_decay": 0.3},
                "`old_policy_max_decay` is set to 0.3, which needs `old_policy_beta` above 0",
            ),
        ],
    )
    def test_bad_values(self, make, settings, message):
        with pytest.raises(ValueError, match=message):
            make(**settings)

    @pytest.mark.parametrize(
        "settings",
        [
            {"num_noise_levels": 9, "old_policy_max_decay": 0.0, "old_policy_decay_rate": 0.0},
            {"loss_type": "awm", "epsilon": 1e-3, "epsilon_high": 2e-3, "awm_weighting": "t"},
        ],
        ids=str,
    )
    def test_a_config_made_from_a_config_is_the_same(self, make, settings):
        config = make(**settings)
        again = dataclasses.replace(config)
        assert all(getattr(again, name) == value for name, value in settings.items())
        assert again.round_plan == config.round_plan and again.sde_steps == config.sde_steps


def test_images_are_generated_in_larger_batches(make_nft):
    trainer = make_nft(per_device_train_batch_size=2, per_device_rollout_batch_size=4)
    seen, _ = rows_of_calls(trainer.policy)
    trainer.train()
    trained = [rows for _, rows in seen].index(2)
    assert {rows for _, rows in seen[:trained]} == {4} and {rows for _, rows in seen[trained:]} == {2}
    logs = [entry["velocity_deviation"] for entry in trainer.state.log_history if "loss" in entry]
    assert logs[0] < 1e-9 < logs[1]
