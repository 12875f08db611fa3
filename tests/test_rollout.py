# SPDX-License-Identifier: Apache-2.0
"""Rollout and replay on a tiny FLUX with a LoRA that is not the identity."""

import copy
import math

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from torch import nn

from paco_trl.rollout import (
    SDE_TYPES,
    FluxFamily,
    RecordedStep,
    SDESettings,
    cast_floating_inputs,
    compute_log_prob,
    get_family,
    keyed_generator,
    predict,
)
from paco_trl.rollout.recording_pipeline import share_tensors
from test_families import build_policy


NUM_STEPS, SIZE, GUIDANCE = 4, 32, 3.5
KEYS = [(42, 3, 0, 0, 0), (42, 3, 0, 0, 1)]
TOKENS = (SIZE // 4) ** 2  # latents of 2 x 2 pixels, packed in 2 x 2 patches


@pytest.fixture(scope="module")
def loaded(tiny_flux):
    """The tiny FLUX, as loaded."""
    return FluxPipeline.from_pretrained(tiny_flux)


def fresh(loaded):
    """The pipeline with a transformer and a VAE of its own, as if it were loaded again."""
    own = {name: copy.deepcopy(loaded.components[name]) for name in ("transformer", "vae", "scheduler")}
    return FluxPipeline(**{**loaded.components, **own})


@pytest.fixture
def policy(loaded):
    return build_policy(fresh(loaded))


@pytest.fixture(scope="module")
def prompt_arguments(loaded, prompts):
    """Two different prompts, encoded: batch dimension 2, float32."""
    with torch.no_grad():
        encoded = [get_family(loaded).encode_prompt(loaded, text, "cpu") for text in prompts["prompt"][:2]]
    return {name: torch.cat([each[name].float() for each in encoded]) for name in encoded[0]}


def generate(policy, prompt_arguments, sde, keys=KEYS, guidance_scale=GUIDANCE):
    return policy.generate(prompt_arguments, SIZE, SIZE, NUM_STEPS, guidance_scale, keys, sde)


def replay(policy, record, sde):
    velocity = predict(policy.model, record.calls, policy.family, GUIDANCE, record.sample)
    return compute_log_prob(velocity, record, sde)


def pixels(images):
    return np.stack([np.asarray(image) for image in images])


class TestNoTrace:
    """Of a generation with noise; images without noise are those of the pipeline itself, see `test_families.py`."""

    def test_after_it(self, policy, prompt_arguments):
        expected = pixels(generate(policy, prompt_arguments, None)[0])
        noisy, _ = generate(policy, prompt_arguments, SDESettings((1,), 0.7))
        assert not np.array_equal(pixels(noisy), expected)
        images, records = generate(policy, prompt_arguments, None)
        assert records == []
        assert np.array_equal(pixels(images), expected)

    def test_after_one_that_failed(self, policy, prompt_arguments):
        expected = pixels(generate(policy, prompt_arguments, None)[0])

        class Interruption(Exception):
            pass

        def interrupt(module, args):
            if policy.scheduler.next_step_index == 2:
                raise Interruption

        handle = policy.model.register_forward_pre_hook(interrupt)
        with pytest.raises(Interruption):
            generate(policy, prompt_arguments, SDESettings((1, 2), 0.7))
        handle.remove()
        assert policy.scheduler.sde is None and policy.scheduler._on_step is None
        images, _ = generate(policy, prompt_arguments, None)
        assert np.array_equal(pixels(images), expected)
        assert len(generate(policy, prompt_arguments, SDESettings((1, 2), 0.7))[1]) == 2


class TestRecords:
    @pytest.mark.parametrize("steps", [(1,), (0, 2), (1, 2)])
    def test_what_is_recorded(self, policy, prompt_arguments, steps):
        _, records = generate(policy, prompt_arguments, SDESettings(steps, 0.7))
        assert [record.index for record in records] == list(steps)
        sigmas = policy.scheduler.sigmas.tolist()
        assert len(sigmas) == NUM_STEPS + 1 and sigmas[0] == 1.0
        for record in records:
            assert (record.sigma, record.sigma_next) == (sigmas[record.index], sigmas[record.index + 1])
            assert record.sigma_max == sigmas[1]
            for tensor in (record.sample, record.prev_sample):
                assert tensor.shape == (2, TOKENS, 16) and tensor.dtype == torch.float32
                assert not tensor.requires_grad
            assert record.log_prob.shape == (2,) and record.log_prob[0] != record.log_prob[1]
            (call,) = record.calls
            assert torch.equal(call["hidden_states"], record.sample)
            assert torch.equal(call["encoder_hidden_states"], prompt_arguments["prompt_embeds"])
            assert torch.equal(call["guidance"], torch.full((2,), GUIDANCE))
            assert call["timestep"].tolist() == pytest.approx([record.sigma] * 2)
        if len(records) == 2 and steps == (1, 2):
            assert torch.equal(records[1].sample, records[0].prev_sample)

    def test_the_noise_of_a_step_is_that_of_its_key(self, policy, prompt_arguments):
        sde = SDESettings((1, 2), 0.7)
        _, records = generate(policy, prompt_arguments, sde)
        for record in records:
            with torch.no_grad():
                _, mean, std = replay(policy, record, sde)
            for image, key in enumerate(KEYS):
                noise = torch.randn(TOKENS, 16, generator=keyed_generator(*key, record.index + 1))
                torch.testing.assert_close((record.prev_sample - mean)[image] / std, noise, rtol=1e-3, atol=1e-4)

    def test_a_step_that_is_not_reached_is_an_error(self, policy, prompt_arguments):
        with pytest.raises(RuntimeError, match=r"1 steps were recorded, but 2 were requested \(\(1, 4\)\)"):
            generate(policy, prompt_arguments, SDESettings((1, NUM_STEPS), 0.7))


class TestReplay:
    @pytest.mark.parametrize("kind", SDE_TYPES)
    def test_gradient_is_that_of_the_formula_written_by_hand(self, policy, prompt_arguments, kind):
        a = 0.7
        sde = SDESettings((0, 1), a, kind)
        _, records = generate(policy, prompt_arguments, sde)
        with torch.no_grad():
            for number, parameter in enumerate(policy.model.parameters()):
                if parameter.requires_grad:
                    parameter += 0.02 * torch.randn(parameter.shape, generator=keyed_generator(number))
        parameters = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        assert parameters and all("lora_" in name for name in parameters)
        assert torch.equal(records[1].sample, records[0].prev_sample)

        for record in records:
            log_prob, _, replayed_std = replay(policy, record, sde)
            assert ((log_prob - record.log_prob).abs() > 1e-5).all()  # the ratio has moved
            weights = torch.tensor([1.0, -0.4])
            gradients = torch.autograd.grad((weights * log_prob).sum(), list(parameters.values()))

            (call,) = record.calls
            v = policy.model(**call)[0]
            t, t_next, x = record.sigma, record.sigma_next, record.sample
            if kind == "cps":
                std = t_next * math.sin(a * math.pi / 2)
                mean = (1 - t_next) * (x - t * v) + math.sqrt(t_next**2 - std**2) * (x + (1 - t) * v)
            else:
                before_one = record.sigma_max if t == 1 else t  # no denominator is 0
                s = a * math.sqrt(t / (1 - before_one)) if kind == "flow_sde" else a
                std = s * math.sqrt(t - t_next)
                mean = x + (v + s**2 / (2 * t) * (x + (1 - t) * v)) * (t_next - t)
            assert replayed_std.item() == pytest.approx(std)
            squares = ((record.prev_sample - mean) ** 2).mean(dim=(1, 2))
            by_hand = -squares / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi))
            torch.testing.assert_close(log_prob, by_hand, rtol=1e-5, atol=1e-5)
            expected = torch.autograd.grad((weights * by_hand).sum(), list(parameters.values()))

            for name, gradient, other in zip(parameters, gradients, expected, strict=True):
                torch.testing.assert_close(gradient, other, rtol=2e-3, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
            assert max(gradient.abs().max() for gradient in gradients) > 1e-3


class ReorderedFamily(FluxFamily):
    """The right rule with other rounding."""

    def combine(self, outputs, guidance_scale, sample, detach_unconditional=False):
        return (outputs[0] * guidance_scale) / guidance_scale


class TestGuidanceRule:
    def test_a_rule_that_is_a_little_wrong_is_an_error(self, loaded, prompt_arguments):
        class WrongFamily(FluxFamily):
            def combine(self, outputs, *args, **kwargs):
                return 1.01 * outputs[0]

        policy = build_policy(fresh(loaded), family=WrongFamily())
        with pytest.raises(RuntimeError, match="At step 1 .* WrongFamily.combine .*1 output.*differ by up to"):
            generate(policy, prompt_arguments, SDESettings((1,), 0.7))
        # Without a stochastic step nothing is trained, and nothing is checked
        assert len(generate(policy, prompt_arguments, None)[0]) == 2

    def test_another_order_of_the_right_operations_passes(self, loaded, prompt_arguments):
        policy = build_policy(fresh(loaded), family=ReorderedFamily())
        _, (record,) = generate(policy, prompt_arguments, SDESettings((1,), 0.7))
        output = policy.model(**record.calls[0])[0]
        assert not torch.equal(policy.family.combine([output], GUIDANCE, record.sample), output)


class Changing:
    """Stands between pipeline and model: passes a dict that it changes after the call."""

    def __init__(self, model):
        self.model, self.tensor = model, torch.ones(2)

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, joint_attention_kwargs, **kwargs):
        self.given = {"nested": [self.tensor, {"inner": torch.zeros(1)}], "flag": None}
        output = self.model(joint_attention_kwargs=self.given, **kwargs)
        self.given["nested"][1].clear()
        self.given["nested"].append("changed")
        self.given.pop("flag")
        return output


class TestRecordedArguments:
    """Z-Image calls its transformer with positional arguments and lists, see `test_families.py`."""

    def test_nested_containers_that_the_caller_changes(self, policy, prompt_arguments):
        sde = SDESettings((1,), 0.7)
        _, (expected,) = generate(policy, prompt_arguments, sde)
        policy.pipeline.transformer = changing = Changing(policy.model)
        _, (record,) = generate(policy, prompt_arguments, sde)
        assert "flag" not in changing.given and changing.given["nested"][1] == {}  # the caller did change it
        recorded = record.calls[0]["joint_attention_kwargs"]
        assert set(recorded) == {"nested", "flag"}
        tensor, inner = recorded["nested"]
        assert tensor is changing.tensor and torch.equal(inner["inner"], torch.zeros(1))  # containers alone are fresh
        log_prob, _, _ = replay(policy, record, sde)
        assert torch.equal(log_prob, record.log_prob) and torch.equal(log_prob, expected.log_prob)

    def test_the_replay_leaves_the_record_as_it_is(self, policy, prompt_arguments):
        """A transformer may take items out of a dict that it was given; a record is replayed once per iteration."""
        sde = SDESettings((1,), 0.7)
        _, (record,) = generate(policy, prompt_arguments, sde)
        record.calls[0]["joint_attention_kwargs"] = {"once": torch.ones(1)}
        taken = []

        def take(module, args, kwargs):
            taken.append(kwargs["joint_attention_kwargs"].pop("once"))

        policy.model.register_forward_pre_hook(take, with_kwargs=True)
        for _ in range(2):
            replay(policy, record, sde)
        assert len(taken) == 2


class TestSignature:
    def test_an_image_of_another_size_is_an_error(self, loaded, prompt_arguments):
        class SmallFamily(FluxFamily):
            def call_arguments(self, height, width, *args):
                return super().call_arguments(height // 2, width, *args)

        with pytest.raises(RuntimeError, match="called for images of 32 x 32 pixels and generated 32 x 16"):
            generate(build_policy(fresh(loaded), family=SmallFamily()), prompt_arguments, None)


def test_only_tensors_with_the_same_values_are_shared():
    prompt = torch.rand(2, 3)
    calls = [{"repeated": prompt.clone(), "other": prompt + 1, "view": prompt[:]}]
    (record,) = share_tensors(
        [
            RecordedStep(
                index=0,
                sigma=1.0,
                sigma_next=0.5,
                sigma_max=0.5,
                sample=prompt,
                prev_sample=prompt,
                log_prob=None,
                calls=calls,
            )
        ],
        {"a": prompt},
        {"a": prompt},
    )
    (call,) = record.calls
    assert call["repeated"] is prompt and call["view"] is prompt
    assert call["other"] is calls[0]["other"]


class TestCastFloatingInputs:
    class Recorder(nn.Module):
        def forward(self, *args, **kwargs):
            return args, kwargs

    def test_casts_floats_and_leaves_the_rest(self):
        module = self.Recorder()
        inputs = (torch.ones(2, 1), torch.arange(2), torch.tensor([True, False]))
        times = torch.tensor([857.69, 602.15])  # bf16 has 856 and 604
        keywords = {
            "nested": {"deep": [torch.ones(3, 1, dtype=torch.float64), torch.arange(3)]},
            "times": times,
            "text": "a",
            "none": None,
        }
        (plain, _, _), _ = module(*inputs, **keywords)
        assert plain.dtype == torch.float32

        cast_floating_inputs(module, torch.bfloat16)
        (floats, integers, booleans), received = module(*inputs, **keywords)
        assert floats.dtype == torch.bfloat16 and torch.equal(floats.float(), inputs[0])
        assert integers.dtype == torch.int64 and booleans.dtype == torch.bool
        deep = received["nested"]["deep"]
        assert deep[0].dtype == torch.bfloat16 and deep[1].dtype == torch.int64
        assert received["text"] == "a" and received["none"] is None
        assert received["times"] is times
        assert keywords["nested"]["deep"][0].dtype == torch.float64  # the caller's own are left alone


def test_predictions_are_float32_before_the_model_is_prepared_for_training(policy, prompt_arguments):
    """accelerate makes them float32 afterwards: guidance would be rounded otherwise in a baseline."""
    received = []
    step = policy.scheduler.step

    def record(model_output, *args, **kwargs):
        received.append(model_output.dtype)
        return step(model_output, *args, **kwargs)

    policy.scheduler.step = record
    with torch.autocast("cpu", torch.bfloat16):
        outputs = []
        policy.model.get_base_model().register_forward_hook(lambda *call: outputs.append(call[2][0].dtype))
        generate(policy, prompt_arguments, None)
    assert set(outputs) == {torch.bfloat16} and set(received) == {torch.float32}
