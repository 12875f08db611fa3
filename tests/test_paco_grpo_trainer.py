# SPDX-License-Identifier: Apache-2.0
"""PaCoGRPOTrainer on a tiny real FLUX pipeline: invariants of the method, what is logged, what bad input gets."""

import copy
import json
import re
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from datasets import DatasetDict
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import ModelConfig, get_peft_config

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoNFTConfig, PaCoNFTTrainer
from paco_trl.rewards import panel_similarity_reward, redness_reward
from paco_trl.rollout import (
    FAMILIES,
    Family,
    FluxFamily,
    RecordedStep,
    SDESettings,
    UnlistedFamily,
    adapters,
    sde_step,
)
from paco_trl.rollout.policy import compute_log_prob
from paco_trl.trainer.losses import (
    PolicyStep,
    clipped_surrogate,
    guarded_surrogate,
)
from paco_trl.trainer.step_statistics import RatioStatistics, predicted_deviation
from testing_utils import (
    are_equal,
    check_planted_reward,
    count_images,
    entries_of,
    gradients,
    jsonl,
    logs_with,
    weights_of,
)


def broken_reward(prompts, completions, **kwargs):
    return [None] * len(completions)


def recorded_step(index, sigma, sigma_next, sigma_max, sample, prev_sample, log_prob, mean=None) -> RecordedStep:
    times = {"index": index, "sigma": sigma, "sigma_next": sigma_next, "sigma_max": sigma_max}
    return RecordedStep(**times, sample=sample, prev_sample=prev_sample, log_prob=log_prob, mean=mean, calls=[])


class TestTraining:
    def test_trained_weights_change_and_frozen_ones_do_not(self, make_small):
        trainer = make_small(max_steps=2)
        names = ("transformer", "vae", "text_encoder", "text_encoder_2")
        parameters = {
            f"{name}.{key}": parameter
            for name in names for key, parameter in getattr(trainer.pipeline, name).named_parameters()
        }  # fmt: skip
        before = copy.deepcopy(parameters)
        trainer.train()
        trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
        changed = [name for name, parameter in parameters.items() if not torch.equal(parameter, before[name])]
        assert changed == trained and all("lora_" in name for name in trained)
        # q, k, v, out and their context twins, two feed-forwards of two layers; q, k, v of the single-stream block
        assert len(trained) == 2 * (4 + 4 + 4 + 3)

    @pytest.mark.slow
    def test_planted_reward_rises_and_falls_with_its_sign_flipped(self, make_trainer):
        settings = {
            "max_steps": 20, "learning_rate": 2e-2, "num_generations": 8, "per_device_train_batch_size": 16,
            "gradient_checkpointing": False, "epsilon": 1e-3,
        }  # fmt: skip
        check_planted_reward(make_trainer, **settings)

    def test_a_pipeline_without_a_name(self, make_small, tiny_flux, tmp_path):
        loaded = DiffusionPipeline.from_pretrained(tiny_flux)
        pipeline = type(loaded)(**{name: part for name, part in loaded.components.items() if part is not None})
        assert pipeline.name_or_path is None
        make_small(model=pipeline, max_steps=1, save_strategy="steps", save_steps=1).train()
        assert (tmp_path / "out" / "checkpoint-1" / "README.md").exists()

    def test_the_pipeline_can_be_saved_afterwards(self, make_small, tiny_flux, tmp_path):
        pipeline, base = (DiffusionPipeline.from_pretrained(tiny_flux) for _ in range(2))
        index = dict(pipeline.config) | {"_name_or_path": str(tiny_flux)}  # which was a `Path`, unfit for JSON
        trainer = make_small(model=pipeline, max_steps=1)
        trainer.train()
        assert dict(pipeline.config) == index
        pipeline.transformer = trainer.model.merge_and_unload()
        pipeline.save_pretrained(tmp_path / "saved")
        again = DiffusionPipeline.from_pretrained(tmp_path / "saved")
        assert type(again.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"
        merged, plain = (each.transformer.transformer_blocks[0].attn.to_q.weight for each in (again, base))
        assert not torch.equal(merged, plain)


class TestLoss:
    @pytest.mark.parametrize("beta", [0.0, 3.0])
    def test_loss_and_gradient_equal_a_direct_computation(self, make_small, monkeypatch, beta):
        trainer = make_small(beta=beta, epsilon=0.01)
        trainer.state.max_steps = 2
        trainer._ensure_round()
        inputs = trainer._prepare_inputs(None)
        trainer.state.global_step = 1
        trainer._initial_global_step = 0  # as `train()` sets it
        model, generator = trainer.model, torch.Generator().manual_seed(11)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.no_grad():  # away from the reference, where all terms differ from 0
            for parameter in parameters:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        loss = trainer.compute_loss(model, inputs)
        own = gradients(trainer, loss)

        step, advantages = inputs["step"], inputs["advantages"]
        (call,) = step.calls
        v = model(**call)[0]
        with torch.no_grad(), model.disable_adapter():
            v_ref = model(**call)[0]
        t, dt = step.sigma, step.sigma_next - step.sigma
        noise = 0.7 * (t / (1 - t)) ** 0.5
        std = noise * (-dt) ** 0.5

        def mean(v):
            return step.sample + (v + noise**2 / (2 * t) * (step.sample + (1 - t) * v)) * dt

        def average(values):
            return values.flatten(1).mean(dim=1)  # over the latent

        new, old = (-average((step.prev_sample - mu) ** 2) / (2 * std**2) for mu in (mean(v), mean(v_ref)))
        ratio = torch.exp(new - old)  # a new adapter is the identity: it generated as the reference
        policy = -torch.min(ratio * advantages, ratio.clamp(0.99, 1.01) * advantages)
        kl = average((mean(v) - mean(v_ref)) ** 2) / (2 * std**2)
        # A micro-batch of 4 images is an optimizer step
        terms = [policy.mean(), beta * kl.mean()]
        torch.testing.assert_close(loss, sum(terms), rtol=1e-4, atol=1e-7)
        expected = torch.autograd.grad(sum(terms), parameters, retain_graph=True)
        torch.testing.assert_close([*own.values()], [*expected], rtol=1e-3, atol=1e-6)
        for term, weight in zip(terms, (1, beta), strict=True):
            if weight:  # each is a part of the sum that counts
                part = max(value.abs().max() for value in torch.autograd.grad(term, parameters, retain_graph=True))
                assert part > 1e-3
        # Two processes have the gradients of half of the images each, and average them
        monkeypatch.setattr(Accelerator, "num_processes", 2)
        torch.testing.assert_close(trainer.compute_loss(model, inputs), 2 * loss)


class TestPolicyLoss:
    """A loss of the user's own is one method."""

    class Reinforce(PaCoGRPOTrainer):
        sign = 1.0

        def policy_loss(self, step, advantages):
            self.steps = getattr(self, "steps", [])
            self.steps.append(step)
            ratio = torch.exp(step.log_prob - step.old_log_prob)
            return -self.sign * ratio * advantages, {
                "distance": (step.mean - step.old_mean).detach().flatten(1).norm(dim=1)
            }

    def test_is_what_is_trained(self, make_trainer):
        classes = (PaCoGRPOTrainer, self.Reinforce, type("Opposite", (self.Reinforce,), {"sign": -1.0}))
        built_in, *trainers = (make_trainer(each, epsilon=10.0, max_steps=4) for each in classes)
        for trainer in (built_in, *trainers):
            trainer.train()
        # A clip range of 10 clips nothing; twin: the opposite loss
        assert are_equal(weights_of(built_in), weights_of(trainers[0]))
        assert not are_equal(weights_of(built_in), weights_of(trainers[1]))
        distances = logs_with(trainers[0], "distance")
        assert distances[0] == 0 < distances[1]  # on policy, and after an update
        first, *_, last = trainers[0].steps
        assert torch.equal(first.log_prob, first.old_log_prob) and not torch.equal(last.log_prob, last.old_log_prob)
        assert [first.sigma, first.sigma_next] == built_in.policy.scheduler.times[1:3] and first.std > 0

    def test_the_example_of_the_page(self, make_trainer):
        """The numbers of verl-omni's `FlowDPPOLoss` on six images: for each sign, far towards it, against it, and near."""
        page = (Path(__file__).parent.parent / "docs" / "method.md").read_text()
        (code,) = re.findall(r"```python\n(import torch\n.*?class FlowDPPOTrainer.*?)```", page, re.DOTALL)
        names: dict = {}
        exec(code, names)
        trainer = make_trainer(names["FlowDPPOTrainer"])
        trainer.threshold = 1e-3
        sides = torch.tensor([[0.08], [-0.08], [0.002], [0.08], [-0.08], [-0.002]], dtype=torch.float64)
        advantages = torch.tensor([1.5, 1.0, 2.0, -0.5, -1.0, -2.0], dtype=torch.float64)
        rows = "1 -.5 .25 2, -1 .5 1.5 -.25, .5 .5 -1 1, 2 -1 0 .5, -.5 1 .5 -1.5, 1 1 -1 .25"
        noise = torch.tensor([[*map(float, row.split())] for row in rows.split(",")], dtype=torch.float64)
        old_mean, std = torch.tensor([0.1, -0.2, 0.3, 0.4], dtype=torch.float64).repeat(6, 1), 0.3
        mean = (old_mean + std * sides * noise).requires_grad_()
        sample = old_mean + std * noise
        log_prob, old_log_prob = (-((sample - each) ** 2).mean(dim=1) / (2 * std**2) for each in (mean, old_mean))
        step = PolicyStep(log_prob, old_log_prob, mean, old_mean, std, 0.9, 0.8)
        loss, metrics = trainer.policy_loss(step, advantages)
        published = [0.0, -0.9285788313151068, -2.0024990600258556, 0.5530277042795644, 0.0, 1.9969367857184386]
        assert loss.tolist() == pytest.approx(published, rel=1e-7)  # its constants are float32
        assert metrics["masked"].tolist() == [1, 0, 0, 0, 1, 0]
        divergence = [0.00425, 0.00285, 1.25e-06, 0.0042, 0.003, 1.53125e-06]
        assert metrics["divergence"].tolist() == pytest.approx(divergence, rel=1e-12)
        assert not any(values.requires_grad for values in metrics.values())
        (gradient,) = torch.autograd.grad(loss.sum(), mean)
        assert gradient.any(dim=1).tolist() == [False, True, True, True, False, True]
        # Twins: PPO's clip keeps images 1 and 5 in the loss, and a threshold that is not reached all of them
        clipped = PaCoGRPOTrainer.policy_loss(trainer, step, advantages)[0]
        assert (clipped[[0, 4]] != 0).all()
        trainer.threshold = divergence[0] + 1e-9
        loss, metrics = trainer.policy_loss(step, advantages)
        assert not metrics["masked"].any()
        torch.testing.assert_close(loss, -torch.exp(log_prob - old_log_prob) * advantages)
        trainer.threshold = 1e-9
        trainer.train()
        divergence, masked = logs_with(trainer, "divergence"), logs_with(trainer, "masked")
        assert divergence[0] == masked[0] == 0 < min(divergence[1], masked[1])  # before and after the first update

    def test_settings_of_the_clip_range_and_of_advantages(self, make_trainer):
        trainer = make_trainer(epsilon=0.1, epsilon_high=0.3, advantage_clip=0.5, max_steps=1)
        log_ratio, zeros = torch.log(torch.tensor([0.8, 1.2, 1.4])), torch.zeros(3)
        step = PolicyStep(log_ratio, zeros, zeros, zeros, 1.0, 0.9, 0.8)
        loss, *_ = trainer.policy_loss(step, torch.tensor([-1.0, 1.0, 1.0]))
        torch.testing.assert_close(loss, torch.tensor([0.9, -1.2, -1.3]))
        trainer.train()
        assert max(entry["advantages"].abs().max().item() for entry in entries_of(trainer.round)) == 0.5


class TestFamily:
    """A family of the user's own is an argument."""

    def test_is_used(self, make_trainer):
        class Negated(FluxFamily):
            def combine(self, *args):
                return -super().combine(*args)

        with pytest.raises(RuntimeError, match="opposite sign"):
            make_trainer(family=Negated()).train()

    def test_a_pipeline_that_is_not_listed_needs_no_entry(self, make_trainer, monkeypatch):
        monkeypatch.delitem(FAMILIES, "FluxPipeline")
        assert isinstance(make_trainer(per_device_train_batch_size=1).family, UnlistedFamily)
        family = FluxFamily()
        assert make_trainer(family=family).family is family


def test_the_adapter_of_trls_model_config(make_small, caplog):
    """Its task type and dropout are defaults that cannot be left out."""
    given = get_peft_config(ModelConfig(use_peft=True, lora_r=4, lora_alpha=8, lora_target_modules=["to_q", "to_k"]))
    assert (given.task_type, given.lora_dropout) == ("CAUSAL_LM", 0.05)
    before = given.to_dict()
    trainer = make_small(peft_config=given)
    assert given.to_dict() == before
    (said,) = [message for message in caplog.messages if "`task_type`" in message]
    assert "`lora_dropout` 0.05" in said
    used = trainer.model.peft_config["default"]
    assert (used.r, used.lora_alpha, used.task_type, used.lora_dropout) == (4, 8, None, 0.0)
    trainer.train()
    assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0]
    assert all(value.abs().max() > 0 for name, value in weights_of(trainer).items() if "lora_B" in name)


class TestSavedAdapter:
    """What a saved config has of its adapter's training does not stop another training."""

    @pytest.fixture
    def saved(self, make_small, tmp_path):
        """An adapter of language models' defaults, PEFT's way of saving it, and another program's settings."""
        trainer = make_small(max_steps=1)
        trainer.train()
        trainer.save_model(str(folder := tmp_path / "saved"))
        config = json.loads((folder / "adapter_config.json").read_text())
        config |= {"lora_dropout": 0.05, "task_type": "CAUSAL_LM", "init_lora_weights": "eva", "fan_in_fan_out": True}
        (folder / "adapter_config.json").write_text(json.dumps(config | {"inference_mode": True}))
        return folder

    @pytest.mark.parametrize("trainer_class", [PaCoGRPOTrainer, PaCoNFTTrainer])
    def test_is_continued(self, make_small, saved, tiny_flux, caplog, trainer_class):
        before = load_file(saved / "adapter_model.safetensors")
        paths = {"peft_config": saved, "model": tiny_flux}  # which the hints call strings
        trainer = make_small(trainer_class, max_steps=1, **paths)
        (said,) = [message for message in caplog.messages if "`task_type`" in message]
        assert "`lora_dropout` 0.05" in said
        used = trainer.model.peft_config["default"]
        assert (used.task_type, used.lora_dropout, used.inference_mode) == (None, 0.0, False)
        start = {name.replace(".default.", "."): value for name, value in weights_of(trainer).items()}
        assert all(torch.equal(start[name], value) for name, value in before.items())
        trainer.train()
        if trainer_class is PaCoGRPOTrainer:
            assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0]
        assert not any(
            torch.equal(value, before[name.replace(".default.", ".")]) for name, value in weights_of(trainer).items()
        )

    def test_is_read_once(self, make_small, saved, monkeypatch):
        """Its files may be gigabytes."""
        names, read = [], adapters.load_peft_weights
        monkeypatch.setattr(
            adapters, "load_peft_weights", lambda *args, **kwargs: names.append(args) or read(*args, **kwargs)
        )
        make_small(peft_config=str(saved))
        assert names == [(str(saved),)]

    def test_its_settings_for_a_new_one(self, make_small, saved):
        """peft#2840: the config says `inference_mode`."""
        config = LoraConfig.from_pretrained(saved)
        config.init_lora_weights, config.eva_config = "gaussian", None
        assert config.inference_mode and config.lora_dropout
        trainer = make_small(max_steps=1, peft_config=config)
        before = weights_of(trainer)
        trainer.train()
        assert config.inference_mode
        assert not any(
            torch.equal(value, before[name]) for name, value in weights_of(trainer).items() if "lora_B" in name
        )

    def test_weights_that_need_another_base(self, make_trainer, saved):
        config = json.loads((saved / "adapter_config.json").read_text()) | {"init_lora_weights": "pissa"}
        (saved / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="pissa"):
            make_trainer(model="/nowhere/at/all", peft_config=str(saved))


class TestRatio:
    @pytest.mark.parametrize("bf16", [False, True])
    @pytest.mark.parametrize("sde_type", ["flow_sde", "dance_sde", "cps"])
    def test_ratio_is_one_before_the_first_update(self, make_small, bf16, sde_type):
        trainer = make_small(max_steps=2, bf16=bf16, sde_type=sde_type)
        trainer.train()
        (on_policy,) = logs_with(trainer, "ratio_deviation_on_policy/step_1")
        (off_policy,) = logs_with(trainer, "ratio_deviation/step_1")
        assert off_policy > 1e-5  # after an update the ratio has moved
        assert on_policy <= (trainer.args.epsilon / 10 if bf16 else 0.0)

    def test_a_replay_with_other_numbers_stops_the_run(self, make_small):
        trainer = make_small(num_inference_steps=5, sde_steps=[1, 2])

        def add_noise_in_training(module, args, output):
            return output * 1.2 if torch.is_grad_enabled() else output

        trainer.model.get_base_model().proj_out.register_forward_hook(add_noise_in_training)
        before = weights_of(trainer)
        with pytest.raises(RuntimeError, match="ratio") as error:
            trainer.train()
        table = [line.split() for line in str(error.value).splitlines() if line.strip()[:1].isdigit()]
        assert [int(line[0]) for line in table] == [1, 2]
        assert all(float(line[-2]) > trainer.statistics.tolerance for line in table)
        assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())

    def test_a_rollout_without_the_adapter_stops_the_run_after_its_first_round(self, make_small, monkeypatch):
        """In the first round a new adapter is zero, so that leaving it out changes nothing."""
        trainer = make_small(max_steps=4)
        generate = trainer.policy.recording_pipeline.generate

        def without_adapter(*args, **kwargs):
            with trainer.model.disable_adapter():
                return generate(*args, **kwargs)

        monkeypatch.setattr(trainer.policy.recording_pipeline, "generate", without_adapter)
        with pytest.raises(RuntimeError, match="ratio"):
            trainer.train()
        assert trainer.state.global_step == 2  # the steps of a round
        assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0]

    def test_in_a_later_round_it_is_a_warning(self, make_small, caplog):
        trainer = make_small(max_steps=6)

        def differ_later(module, args, output):
            return output * 1.2 if torch.is_grad_enabled() and trainer.state.global_step >= 4 else output

        trainer.model.get_base_model().proj_out.register_forward_hook(differ_later)
        trainer.train()
        (said,) = [message for message in caplog.messages if "ratio_tolerance" in message]
        assert "step 4" in said

    def test_the_worst_image_counts(self):
        latents = torch.zeros(4, 1)
        record = recorded_step(1, 0.9, 0.8, 1.0, latents, latents, torch.zeros(4))
        args = PaCoGRPOConfig("x", use_cpu=True, bf16=False, epsilon=1e-3, ratio_tolerance=1e-4)
        statistics = RatioStatistics(Accelerator(cpu=True), args)
        for worst in (0.9e-4, 3e-4, -3e-4):  # the mean is below the tolerance
            ratio = torch.tensor([1.0, 1.0, 1.0 + worst, 1.0])
            statistics.add_ratio(record, ratio, {}, torch.ones(4))
            with nullcontext() if worst == 0.9e-4 else pytest.raises(RuntimeError, match="ratio_tolerance"):
                statistics.check_ratio(1)
            with nullcontext() if worst == 0.9e-4 else pytest.raises(RuntimeError, match="ratio_tolerance"):
                statistics.finish(0, is_on_policy=True, is_early=True)
        statistics.add_ratio(record, torch.tensor([1.0, torch.nan, 1.0, 1.0]), {}, torch.ones(4))
        with pytest.raises(RuntimeError, match="not finite at optimizer step 5"):
            statistics.finish(5, is_on_policy=False)

    @pytest.mark.parametrize("sde_type", ["flow_sde", "dance_sde", "cps"])
    def test_the_deviation_of_rounded_velocities_is_predicted(self, sde_type):
        """A velocity of the replay that differs from the recorded one by N(0, d^2), in 800 images of 512 elements."""
        sde, times, generator = SDESettings((3,), 0.7, sde_type), (0.8, 0.7), torch.Generator().manual_seed(0)
        sample, velocity, noise = (torch.randn(800, 512, generator=generator) for _ in range(3))
        step = sde_step(velocity, sample, *times, 0.7, sde_type, generator=generator)
        record = recorded_step(3, *times, 0.95, sample, step.prev_sample, step.log_prob, step.mean)
        deviations = []
        for difference in (0.01, 0.03):
            log_prob, mean, std = compute_log_prob(velocity + difference * noise, record, sde)
            rest = torch.ones(800), 1e-4, 1e-4
            plain = clipped_surrogate(log_prob, record.log_prob, *rest).ratio
            guarded = guarded_surrogate(log_prob, record.log_prob, mean, step.mean, std, *rest, 1.0).ratio
            for ratio, is_normalized in ((plain, False), (guarded, True)):
                predicted = predicted_deviation(*times, 0.95, 512, 0.7, sde_type, is_normalized, difference)
                assert ratio.std().item() == pytest.approx(predicted, rel=0.1)
                deviations.append(predicted)
        assert deviations[0] == pytest.approx(deviations[2] / 3) and 0 < deviations[1] < deviations[0]
        if sde_type == "dance_sde":  # k = (1 + a^2 (1 - t) / (2 t)) * sqrt(-dt) / a
            k = (1 + 0.49 * 0.2 / 1.6) * 0.1**0.5 / 0.7
            assert deviations[0] == pytest.approx(k * 0.01 / 512**0.5, rel=1e-4)

    def test_rounding_is_a_warning_and_a_wrong_replay_an_error(self, caplog):
        """In 64 images of FLUX at 512 pixels. A replay that is wrong in a layer, or without guidance, is off by 0.3 and more."""
        times, generator = (0.9, 0.8), torch.Generator().manual_seed(0)
        sample, velocity, noise = (torch.randn(64, 1024 * 64, generator=generator) for _ in range(3))
        sde = SDESettings((1,), 0.7, "flow_sde")
        step = sde_step(velocity, sample, *times, 0.7, "flow_sde", generator=generator)
        record = recorded_step(1, *times, 0.9, sample, step.prev_sample, step.log_prob, step.mean)
        for difference in (0.0, 0.01, 0.3):
            caplog.clear()
            statistics = RatioStatistics(Accelerator(cpu=True), PaCoGRPOConfig("x", use_cpu=True, bf16=True))
            log_prob = compute_log_prob(velocity + difference * noise, record, sde)[0]
            statistics.add_ratio(record, torch.exp(log_prob - record.log_prob), {}, torch.ones(64))
            with pytest.raises(RuntimeError, match="ratio_tolerance") if difference == 0.3 else nullcontext():
                statistics.check_ratio(1)
            statistics.finish(0, is_on_policy=True)
            assert ("`epsilon` 0.0001" in caplog.text) == (difference > 0)

    def test_images_without_a_reward_are_not_in_the_means(self):
        latents = torch.zeros(4, 1)
        record = recorded_step(1, 0.9, 0.8, 1.0, latents, latents, torch.zeros(4))
        ratio, clipped = torch.exp(torch.tensor([0.1, -0.1, 0.1, 5.0])), torch.tensor([1.0, 0.0, 0.0, 1.0])
        metrics = {"clip_ratio/low_mean": clipped, "kl": torch.tensor([1.0, 2.0, 3.0, 100.0])}
        statistics = RatioStatistics(Accelerator(cpu=True), PaCoGRPOConfig("x", use_cpu=True, bf16=False))
        for weights in (torch.tensor([0.5, 0.25, 0.25, 0.0]), torch.zeros(4)):
            statistics.add_ratio(record, ratio, metrics, weights)
        found = statistics.finish(0, is_on_policy=False)
        assert found["approx_kl"] == pytest.approx(0.1**2 / 2)
        assert found["kl"] == 2.0 and found["clip_ratio/low_mean"] == pytest.approx(1 / 3)


class TestCost:
    """Forwards, encodes and fetches that the method does not need are defects."""

    @pytest.mark.parametrize(
        ("settings", "forwards"),
        [({"num_inference_steps": 5, "sde_steps": [1, 2]}, 5 + 2), ({"max_steps": 4, "num_iterations": 2}, 4 + 2)],
    )
    def test_one_forward_for_each_denoising_step_and_trained_step(self, make_small, settings, forwards):
        trainer = make_small(**settings)
        calls, encoded = count_images(trainer.model), count_images(trainer.pipeline.text_encoder_2)
        trainer.train()
        assert sum(calls) == 8 * forwards  # one round of 8 images
        assert len(encoded) == 2  # the prompts of the run alone
        assert len(set(logs_with(trainer, "reward"))) == 1

    def test_the_reference_costs_a_forward_and_training_again_draws_anew(self, make_small):
        # One round a run: the second must not learn from the images of the first, which other weights drew
        trainer = make_small(beta=0.01)
        calls = count_images(trainer.model)
        for number in (1, 2):
            trainer.train()
            assert sum(calls) == number * (8 * 4 + 8 * 2)
            kl = logs_with(trainer, "kl")
            assert (kl[0] == 0 < kl[1]) == (number == 1)  # a new adapter is the identity
            assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0]

    @pytest.mark.slow
    def test_each_prompt_is_encoded_once_and_each_row_fetched_once_a_round(self, make_trainer, prompts):
        trainer = make_trainer(max_steps=8)
        encoded = count_images(trainer.pipeline.text_encoder_2)
        encoders = trainer.pipeline.text_encoder, trainer.pipeline.text_encoder_2
        fetched, row = [], trainer.train_rows.row
        trainer.train_rows.row = lambda number: fetched.append(number) or row(number)
        trainer.train()
        # 4 rounds of 4 prompts: three make an epoch of 12 prompts, the fourth sees known ones again
        assert len(encoded) == len(prompts)
        assert len(fetched) == 4 * 4 and all(len({*fetched[start : start + 4]}) == 4 for start in range(0, 16, 4))
        assert (trainer.pipeline.text_encoder, trainer.pipeline.text_encoder_2) == encoders


class TestSteps:
    def test_a_random_subset_of_steps_is_common_to_a_round(self, make_small):
        settings = {"num_inference_steps": 6, "sde_steps": [0, 1, 2, 3], "num_sde_steps": 2}
        trainer = make_small(max_steps=4, **settings)
        trainer.train()
        logged = [
            {int(key[-1]) for key in entry if key.startswith("ratio_deviation_on_policy/")}
            for entry in trainer.state.log_history
        ]
        chosen = [trainer.schedule.sde(index).steps for index in range(6)]
        assert [steps for steps in logged if steps] == [{*steps} for steps in chosen[:2]]
        assert all(len(steps) == 2 for steps in chosen) and len({*chosen}) > 1

    def test_order_of_prompts_depends_on_the_seed_only(self, make_trainer):
        trainers = make_trainer(), make_trainer(), make_trainer(seed=7)
        orders = [[trainer.schedule.row_indices(index) for index in range(6)] for trainer in trainers]
        assert orders[0] == orders[1] != orders[2]
        for epoch in (orders[0][:3], orders[0][3:]):
            assert sorted(sum(epoch, [])) == list(range(12))  # each prompt once an epoch
        assert orders[0][:3] != orders[0][3:]

    def test_each_round_has_its_noise(self, make_small):
        trainer, keys = make_small(max_steps=4), []
        generate = trainer.policy.recording_pipeline.generate
        trainer.policy.recording_pipeline.generate = lambda *args, **kwargs: (
            keys.extend(args[5]),
            generate(*args, **kwargs),
        )[1]
        trainer.train()
        assert len(set(keys)) == len(keys) == 16 and {key[:3] for key in keys} == {(42, 3, 0), (42, 3, 1)}

    def test_the_time_of_training_is_without_the_generation_of_a_round(self, make_small):
        trainer = make_small(max_steps=2)
        generate = trainer.policy.recording_pipeline.generate
        trainer.policy.recording_pipeline.generate = lambda *args, **kwargs: (
            time.sleep(2),
            generate(*args, **kwargs),
        )[1]
        trainer.train()
        first, second = trainer.state.log_history[:2]
        assert first["time/rollout"] >= 2 > first["time/train"] > 0 < second["time/train"] < 2


class TestCallbacks:
    def test_a_callback_sees_each_round(self, make_small):
        """Images, rewards and advantages, before the first step on them; what it adds to the metrics is logged."""

        class Watch(TrainerCallback):
            seen = []

            def on_round_end(self, args, state, control, round, scores, advantages, **kwargs):
                images = [completion.image for completion in round.completions]
                assert redness_reward(None, images) == pytest.approx(scores.rewards[:, 0].tolist())
                assert [sample.advantage for c in round.completions for sample in c.samples] == advantages.tolist()
                self.seen.append((round.index, state.global_step, [c.row_index for c in round.completions]))
                round.metrics["watched"] = float(len(images))

        page = (Path(__file__).parent.parent / "docs" / "paco_grpo_trainer.md").read_text(encoding="utf-8")
        documented: dict = {}
        exec(re.search(r"```python\n(from transformers import TrainerCallback.*?)```", page, re.DOTALL)[1], documented)
        trainer = make_small(max_steps=4, callbacks=[Watch(), documented["KeepBest"]()])
        trainer.train()
        assert (Path(trainer.args.output_dir) / "best_of_round_1.png").exists()
        assert set(logs_with(trainer, "best_row")) <= {
            *trainer.schedule.row_indices(0),
            *trainer.schedule.row_indices(1),
        }
        rows = [[row for row in trainer.schedule.row_indices(index) for _ in range(4)] for index in (0, 1)]
        assert Watch.seen == [(0, 0, rows[0]), (1, 2, rows[1])]
        assert logs_with(trainer, "watched") == [8.0] * 4
        assert trainer.round.completions[0].image is None  # nothing keeps the images of a round


class TestRewards:
    @pytest.mark.parametrize("ceiling", [0.5, 1.0])  # whatever is allowed, nothing is left to learn from
    def test_a_round_without_any_reward_stops_the_run(self, make_small, ceiling):
        ceilings = {"max_reward_failures": 1.0, "max_excluded_images": ceiling, "max_excluded_groups": ceiling}
        with pytest.raises(RuntimeError, match=r"round 0 8 of 8 images \(100%\) are excluded.*broken_reward 8"):
            make_small(reward_funcs=[redness_reward, broken_reward], **ceilings).train()

    def test_a_single_reward_is_not_tamed(self, make_small):
        values = {}

        def spread(prompts, completions, **kwargs):
            return [7.0 * index for index in range(len(completions))]

        rewards = {"reward_funcs": [spread, panel_similarity_reward], "reward_weights": [2.0, 0.0]}
        for aggregation in ("log_tamed", "sum_then_normalize"):
            trainer = make_small(**rewards, multi_objective_aggregation=aggregation, max_steps=1)
            trainer.train()
            log = trainer.state.log_history[0]
            assert log["rewards/spread/h"] > 0.2 and log["rewards/spread/tamed"] == 0.0
            assert log["rewards/spread/share"] == 1.0
            values[aggregation] = log["reward"], [entry["advantages"].tolist() for entry in entries_of(trainer.round)]
        assert values["log_tamed"] == values["sum_then_normalize"]

    def test_a_reward_with_negative_values_is_left_as_it_is(self, make_small, caplog):
        def error(prompts, completions, **kwargs):
            return [-0.5, *range(20, 19 + len(completions))]  # its mean is positive

        def spread(prompts, completions, **kwargs):
            return [float(index) for index in range(len(completions))]

        trainer = make_small(reward_funcs=[error, spread], max_steps=4)  # two rounds
        trainer.train()
        assert not logs_with(trainer, "rewards/error/h") and min(logs_with(trainer, "rewards/spread/h")) > 0.2
        assert logs_with(trainer, "rewards/error/tamed") == [0.0] * 4
        assert logs_with(trainer, "rewards/spread/tamed") == [1.0] * 4  # the others are
        assert len([message for message in caplog.messages if "'error'" in message and "-0.5" in message]) == 1
        assert not [message for message in caplog.messages if "'spread'" in message]
        # Whole groups are micro-batches here, in the order in which images were scored
        scores = torch.tensor([[-0.5, 0.0], [20.0, 1.0], [21.0, 2.0], [22.0, 3.0]])
        total = scores[:, 0] + torch.log1p(scores[:, 1])
        found = [entry["advantages"] for entry in entries_of(trainer.round)]
        expected = (total - total.mean()) / (total.std() + 1e-4)
        assert any(torch.allclose(values, expected, atol=1e-4) for values in found)


class TestLogs:
    @pytest.mark.slow
    def test_contact_sheets_and_tensorboard(self, make_trainer, tmp_path, monkeypatch):
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tensorboard"))
        trainer = make_trainer(max_steps=4, log_completions=True, report_to="tensorboard")
        trainer.train()
        folder = tmp_path / "out" / "contact_sheets"
        names = [f"round_0000{number}.{kind}" for number in "01" for kind in ("jsonl", "png")]
        assert sorted(path.name for path in folder.glob("*.*")) == names
        scores = jsonl(folder / "round_00000.jsonl")
        assert len(scores) == 16
        mean = sum(score["redness_reward"] for score in scores) / 16
        assert mean == pytest.approx(logs_with(trainer, "rewards/redness_reward/mean")[0], abs=1e-5)

        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        assert [event.step for event in events.Images("contact_sheet")] == [0, 2]
        assert "train/reward" in events.Tags()["scalars"]

    def test_what_rewards_log(self, make_small, tmp_path):
        def reasons(prompts, completions, log_extra, log_metric, **kwargs):
            rewards = redness_reward(prompts, completions)
            log_extra("reason", [f"{reward:.6f}" for reward in rewards])
            log_metric("my_metric", 3.0)
            log_metric("my_metric", 5.0)
            return rewards

        trainer = make_small(reward_funcs=reasons, log_completions=True, max_steps=1)
        trainer.train()
        assert logs_with(trainer, "my_metric") == [4.0]  # the mean of all calls
        entries = jsonl(tmp_path / "out" / "contact_sheets" / "round_00000.jsonl")
        assert len({entry["reason"] for entry in entries}) > 4
        assert all(float(entry["reason"]) == pytest.approx(entry["reasons"], abs=1e-6) for entry in entries)


class TestEvaluation:
    def test_a_reward_without_weight_or_value_spoils_nothing(self, make_trainer, prompts, tmp_path):
        rewards = {"reward_funcs": [redness_reward, broken_reward], "reward_weights": [1.0, 0.0]}
        trainer = make_trainer(**rewards, eval_dataset=prompts.select(range(1)), num_inference_steps_eval=2)
        metrics = trainer.evaluate()
        found = trainer.predict(trainer.eval_dataset).metrics  # of Trainer's users
        assert found == {name.replace("eval_", "test_", 1): value for name, value in metrics.items()}
        assert metrics["eval_reward"] == pytest.approx(metrics["eval_rewards/redness_reward/mean"])
        assert metrics["eval_rewards/broken_reward/failure_rate"] == 1
        # Of a single image there is no deviation, of no value no mean
        assert not {"eval_reward_std", "eval_rewards/broken_reward/mean"} & set(metrics)
        assert not (tmp_path / "out" / "contact_sheets").exists()

    def test_one_on_start_is_not_repeated_by_a_resumed_run(self, make_small, tmp_path, prompts):
        settings = {"eval_dataset": prompts.select(range(2)), "eval_on_start": True, "num_inference_steps_eval": 2}
        settings |= {"save_strategy": "steps", "save_steps": 1}
        first = make_small(**settings)
        first.train()
        assert len(logs_with(first, "eval_reward")) == 1
        resumed = make_small(**settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
        assert len(logs_with(resumed, "eval_reward")) == 1 and resumed.args.eval_on_start  # of the history


class TestBestCheckpoint:
    @pytest.mark.slow
    def test_the_card_is_of_the_loaded_step(self, make_trainer, tmp_path, prompts):
        def falling(prompts, completions, **kwargs):
            is_evaluation = completions[0].size == (64, 64)
            return [1.0] * len(completions) if is_evaluation else redness_reward(prompts, completions)

        trainer = make_trainer(
            reward_funcs=falling, eval_dataset=prompts.select(range(2)), eval_strategy="steps", eval_steps=1,
            save_strategy="steps", save_steps=1, load_best_model_at_end=True, num_inference_steps_eval=2,
        )  # fmt: skip
        trainer.train()
        trainer.save_model()
        # All evaluations are equal, so the first one is the best
        assert (trainer.state.best_global_step, trainer.state.global_step) == (1, 2)
        assert "| `optimizer_steps` | 1 |" in (tmp_path / "out" / "README.md").read_text()
        assert "| `optimizer_steps` | 2 |" in (tmp_path / "out" / "checkpoint-2" / "README.md").read_text()

    def test_an_evaluation_that_could_not_be_scored(self, make_trainer, prompts):
        rewards = [redness_reward, broken_reward]
        trainer = make_trainer(reward_funcs=rewards, eval_dataset=prompts.select([0, 1]), num_inference_steps_eval=2)
        with pytest.raises(RuntimeError, match="2 of 2 evaluation images.*redness_reward 0, broken_reward 2"):
            trainer.evaluate()
        assert trainer.model.training

    def test_a_baseline_that_could_not_be_scored_is_not_kept(self, make_trainer, prompts, tmp_path):
        is_down = True

        def judge(prompts, completions, **kwargs):
            return [None] * len(completions) if is_down else redness_reward(prompts, completions)

        trainer = make_trainer(reward_funcs=judge, eval_dataset=prompts.select(range(2)), num_inference_steps_eval=2)
        for name, value in weights_of(trainer).items():  # not the base model: the baseline is drawn apart
            if "lora_B" in name:
                torch.nn.init.normal_(value, std=0.1)
        trainer.model.load_state_dict(weights_of(trainer), strict=False)
        with pytest.raises(RuntimeError, match="judge 2"):
            trainer.evaluate()
        file = tmp_path / "out" / "evaluation" / "eval_baseline.pt"
        assert not file.exists()
        is_down = False
        assert "eval_rewards/judge/baseline" in trainer.evaluate()
        assert file.exists()


def test_a_reward_that_differs_nowhere(make_small, caplog):
    """Said once, of the rewards that are used, in the first of two rounds."""

    def constant_reward(prompts, completions, **kwargs):
        return [0.5] * len(completions)

    make_small(max_steps=4, reward_funcs=[redness_reward, constant_reward], reward_weights=[1.0, 0.0]).train()
    assert "gave the same value" not in caplog.text
    make_small(max_steps=4, reward_funcs=[redness_reward, constant_reward]).train()
    (said,) = [message for message in caplog.messages if "gave the same value" in message]
    assert "In round 0 the reward 'constant_reward' gave the same value to all images of each prompt" in said
    assert "(for the first, 0.5)" in said


class Incomplete(FluxFamily):
    call_at = Family.call_at


def test_every_round_is_generated_in_training_mode(make_small):
    """In another mode compiled blocks would be other graphs, and a resumed run would not be the uninterrupted one."""
    modes = []

    class Modes(TrainerCallback):
        def on_round_end(self, args, state, control, model, **kwargs):
            modes.append({module.training for module in model.get_base_model().transformer_blocks.modules()})

    trainer = make_small(max_steps=2, optimizer_steps_per_generation=1, callbacks=[Modes()])
    trainer.model.eval()
    trainer.train()
    assert modes == [{True}, {True}]


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_the_class_of_the_optimizer(make_small, momentum):
    """As Trainer takes it: without it, AdamW."""
    given = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5, "momentum": momentum})} if momentum else {}
    trainer = make_small(max_steps=1, **given)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, torch.optim.SGD if momentum else torch.optim.AdamW)
    assert optimizer.defaults.get("momentum") == momentum


class TestBadInput:
    """Errors come before the model is loaded where that is possible: the model named here does not exist."""

    NOWHERE = "/nowhere/at/all"

    @pytest.mark.parametrize(
        ("token", "settings"),
        [
            ("a round takes 14: .* Set `num_prompts_per_generation` to 12, or", {"num_prompts_per_generation": 14}),
            (
                "No number of prompts up to 12 fills one. Lower `per_device_train_batch_size`",
                {"per_device_train_batch_size": 101},
            ),
            ("is 63", {"height": 63}),
            ("`save_steps` is -5", {"save_steps": -5}),
            ("`save_total_limit` is 0", {"save_total_limit": 0}),
            ("`eval_dataset`", {"eval_strategy": "steps", "eval_steps": 1}),
            ("`reward_weights`", {"reward_weights": [1.0, 2.0]}),
            ("`reward_weights` is 1.0; pass one value for each of 1", {"reward_weights": 1.0}),
            ("`reward_weights`", {"reward_weights": [float("nan")]}),
            ("pissa", {"peft_config": LoraConfig(r=4, init_lora_weights="pissa")}),
            ("`lora_dropout`", {"peft_config": LoraConfig(r=4, lora_dropout=0.05)}),
            ("`lora_alpha`", {"peft_config": LoraConfig(r=4, lora_alpha=0)}),
            ("`task_type`", {"peft_config": LoraConfig(r=4, task_type="SEQ_CLS")}),
            ("Pass a class and its arguments", {"optimizer_cls_and_kwargs": torch.optim.SGD}),
            ("keyword argument 'lrr'.*Pass a class", {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lrr": 0.1})}),
        ],
    )
    def test_settings(self, make_trainer, token, settings):
        with pytest.raises((TypeError, ValueError), match=token):
            make_trainer(model=self.NOWHERE, **settings)

    def test_rows(self, make_trainer, prompts):
        empty = prompts.map(lambda row, index: {"prompt": "" if index == 3 else row["prompt"]}, with_indices=True)
        uneven = prompts.map(lambda row: {"height": 63, "width": 64})
        for token, datasets in (
            ("panels", {"train_dataset": prompts.remove_columns("panels")}),
            ("3", {"train_dataset": empty}),
            ("row 0 of the dataset 'evaluation' is 63", {"eval_dataset": uneven}),
        ):
            with pytest.raises(ValueError, match=token):
                make_trainer(model=self.NOWHERE, **datasets)

    def test_a_pipeline_before_its_weights_are_read(self, make_trainer, tmp_path):
        for index in ({"_class_name": "SanaPipeline"}, {"scheduler": ["diffusers", "DDIMScheduler"]}):
            index = {"_class_name": "FluxPipeline", "_diffusers_version": "0.42.0", **index}
            (tmp_path / "model_index.json").write_text(json.dumps(index))
            with pytest.raises(ValueError, match="SanaPipeline|DDIMScheduler"):
                make_trainer(model=str(tmp_path))

    @pytest.mark.parametrize(
        ("message", "settings"),
        [
            ("row 0 of the dataset, which has no size of its own, is 62.*60 or 64", {"height": 62}),
            ("`detach_unconditional`.* FluxPipeline has none .* = 3.5", {"detach_unconditional": True}),
            ("`negative_prompt`", {"negative_prompt": "blurry"}),
            # PEFT would train the other layer
            ("'attn.to_kk'.* Did you mean attn.to_k", {
                "peft_config": LoraConfig(r=4, target_modules=["attn.to_q", "attn.to_kk"])
            }),
            ("call_at", {"trainer_class": PaCoNFTTrainer, "family": Incomplete()}),
            ("`stochastic_sampling=True`", {"scheduler/scheduler_config.json": {"stochastic_sampling": True}}),
            (r"quantized \(bitsandbytes\)", {
                "transformer/config.json": {"quantization_config": {"quant_method": "bitsandbytes"}}, "peft_config": None,
            }),
        ],
    )  # fmt: skip
    def test_what_the_pipeline_does_not_take(self, make_trainer, tiny_flux, tmp_path, message, settings):
        """Without weights, so that it is found before they are read."""
        model = shutil.copytree(tiny_flux, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
        for file in [name for name in settings if name.endswith(".json")]:
            changed = json.loads((model / file).read_text()) | settings[file]
            (model / file).write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            make_trainer(model=str(model), **{name: value for name, value in settings.items() if "/" not in name})

    def test_layers_by_a_pattern(self, make_trainer):
        trainer = make_trainer(peft_config=LoraConfig(r=4, target_modules=r".*\.attn\.to_[qk]k?"))  # as PEFT takes it
        assert len(trainer.model.base_model.targeted_module_names) == 4

    @pytest.mark.parametrize("config", [PaCoNFTConfig, dict])
    def test_settings_of_another_trainer(self, tmp_path, prompts, config):
        args = {} if config is dict else config(str(tmp_path), use_cpu=True, bf16=False)
        with pytest.raises(TypeError, match="`model` is a NoneType; it must be"):
            PaCoGRPOTrainer(model=None, reward_funcs=redness_reward)
        with pytest.raises(TypeError, match=f"`args` is a {config.__name__}; it must be a `PaCoGRPOConfig`"):
            PaCoGRPOTrainer(self.NOWHERE, redness_reward, args, prompts)

    @pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
    def test_what_is_no_dataset(self, make_trainer, prompts, name):
        stream = prompts.to_iterable_dataset()
        with pytest.raises(TypeError, match=f"`{name}` is .*streaming=True"):
            make_trainer(model=self.NOWHERE, **{name: stream})
        splits = DatasetDict({"train": prompts, "test": prompts})
        with pytest.raises(TypeError, match="`train_dataset` is a `DatasetDict`"):
            make_trainer(model=self.NOWHERE, train_dataset=splits)
        with pytest.raises(TypeError, match=r"`eval_dataset\['held out'\]` is missing"):
            make_trainer(model=self.NOWHERE, eval_dataset={"seen": prompts, "held out": None})
        trainer = make_trainer(eval_dataset=splits)  # each split is evaluated
        with pytest.raises(TypeError, match="`eval_dataset` is"):
            trainer.evaluate(stream)


def test_a_pipeline_that_was_compiled_as_a_whole(make_small, tiny_flux, tmp_path, caplog):
    """peft#2957."""
    pipeline = DiffusionPipeline.from_pretrained(tiny_flux)
    for name in ("transformer", "vae", "text_encoder"):
        setattr(pipeline, name, torch.compile(getattr(pipeline, name), backend="eager"))
    trainer = make_small(model=pipeline, max_steps=2, save_strategy="steps", save_steps=2)
    said = [message for message in caplog.messages if "`compile_repeated_blocks`" in message]
    assert len(said) == 3 and any("`transformer`" in message for message in said)
    trainer.train()
    plain = make_small(max_steps=2, output_dir=str(tmp_path / "plain"))
    plain.train()
    assert are_equal(weights_of(trainer), weights_of(plain))


def test_arguments_that_a_transformer_collects(make_small, tiny_flux):
    """`forward(hidden_states, ..., **kwargs)`, as remote code may have."""

    class Collecting(FluxTransformer2DModel):
        def forward(self, hidden_states, encoder_hidden_states, **kwargs):
            return super().forward(hidden_states, encoder_hidden_states, **kwargs)

    pipeline = DiffusionPipeline.from_pretrained(tiny_flux)
    pipeline.transformer.__class__ = Collecting
    trainer = make_small(model=pipeline, max_steps=1)
    trainer.train()
    plain = make_small(max_steps=1)
    plain.train()
    assert are_equal(weights_of(trainer), weights_of(plain))


def test_a_round_with_objects_that_are_no_data(make_small, tmp_path, caplog):
    """An unlisted pipeline may pass some, which no checkpoint gives back."""

    class Planted(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            entries_of(first.round)[0]["step"].calls[0]["joint_attention_kwargs"] = {"mask": redness_reward}

    first = make_small(max_steps=1, save_strategy="steps", save_steps=1, callbacks=[Planted()])
    first.train()
    trainer = make_small(max_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert trainer.state.global_step == 2
    assert len([message for message in caplog.messages if "generated again, since" in message]) == 1


def test_dropout_of_the_model(make_trainer, tiny_flux):
    pipeline = DiffusionPipeline.from_pretrained(tiny_flux)
    dropout = next(module for module in pipeline.transformer.modules() if isinstance(module, torch.nn.Dropout))
    dropout.p = 0.5
    with pytest.raises(ValueError, match="dropout layer"):
        make_trainer(model=pipeline)


def test_a_metric_that_no_dataset_has(make_trainer, prompts):
    settings = {
        "eval_dataset": {"a": prompts.select(range(1))}, "eval_strategy": "steps", "eval_steps": 1,
        "save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match="`metric_for_best_model`"):
        make_trainer(model="/nowhere/at/all", **settings)


def test_long_prompts_are_reported_once(make_small, caplog):
    make_small(max_steps=1).train()
    (clip,) = [message for message in caplog.messages if "truncated" in message]
    assert "For 2 of 2 prompts" in clip
    (named,) = [message for message in caplog.messages if "longer than FluxPipeline reads" in message]
    assert "12 of 12 prompts of the dataset" in named  # also of rows that this run does not reach, or another process
