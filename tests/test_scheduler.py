# SPDX-License-Identifier: Apache-2.0
"""The scheduler: its parent bit for bit without noise, `sde_step` at the chosen steps."""

import inspect

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

from paco_trl.rollout import SDE_TYPES, FlowMatchSDEScheduler, SDESettings, keyed_generator, sde_step


STEPS = 6
SHAPE = (2, 16, 8)
FLUX = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
NO_SDE = [None, SDESettings((1, 2), 0.0), SDESettings((), 0.7)]


def start(scheduler, num_inference_steps=STEPS):
    """Sets the schedule as FluxPipeline does for 1,024 latents."""
    sigmas = [1 - i / num_inference_steps for i in range(num_inference_steps)]
    mu = calculate_shift(1024, 256, 4096, 0.5, 1.15)
    timesteps, _ = retrieve_timesteps(scheduler, num_inference_steps, "cpu", sigmas=sigmas, mu=mu)
    scheduler.set_begin_index(0)
    return timesteps


def velocity(sample, timestep):
    """Some non-linear velocity, in the dtype of the sample."""
    return torch.sin(3 * sample) + timestep.to(sample.dtype) / 1000


def trajectory(scheduler, sample, model_dtype=None, return_dict=False):
    """The samples of a whole schedule, the initial one included."""
    samples = [sample]
    for timestep in start(scheduler):
        model_output = velocity(samples[-1], timestep)
        if model_dtype is not None:
            model_output = model_output.to(model_dtype)
        output = scheduler.step(model_output, timestep, samples[-1], return_dict=return_dict)
        samples.append(output.prev_sample if return_dict else output[0])
    return samples


@pytest.fixture
def parent():
    return FlowMatchEulerDiscreteScheduler(**FLUX)


@pytest.fixture
def scheduler(parent):
    return FlowMatchSDEScheduler.from_scheduler(parent)


@pytest.fixture
def noise():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


class TestWithoutNoise:
    @pytest.mark.parametrize("sde", NO_SDE, ids=["none", "level 0", "no steps"])
    @pytest.mark.parametrize("return_dict", [False, True])
    def test_is_its_parent_bit_for_bit(self, parent, scheduler, noise, sde, return_dict):
        expected = trajectory(parent, noise)
        assert len(expected) == STEPS + 1 and not torch.equal(expected[-1], noise)
        with scheduler.sampling(sde):
            samples = trajectory(scheduler, noise, return_dict=return_dict)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(samples, expected, strict=True))
        assert torch.equal(scheduler.timesteps, parent.timesteps) and torch.equal(scheduler.sigmas, parent.sigmas)

    def test_without_begin_index_the_timestep_is_looked_up(self, parent, scheduler, noise):
        results = []
        for each in (parent, scheduler):
            timestep = start(each)[2]
            each._begin_index = None  # pipelines that do not set it
            results.append(each.step(velocity(noise, timestep), timestep, noise).prev_sample)
            assert each.step_index == 3
        assert torch.equal(*results)


class TestFromScheduler:
    def test_keeps_the_config(self):
        settings = {
            "shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.4, "max_shift": 1.3, "shift_terminal": 0.02,
            "num_train_timesteps": 500, "time_shift_type": "linear",
        }  # fmt: skip
        parent = FlowMatchEulerDiscreteScheduler(**settings)
        scheduler = FlowMatchSDEScheduler.from_scheduler(parent)
        default = FlowMatchSDEScheduler()
        for name, value in settings.items():
            assert scheduler.config[name] == value != default.config[name]
        public = {name: value for name, value in parent.config.items() if not name.startswith("_")}
        assert {name: scheduler.config[name] for name in public} == public
        start(parent), start(scheduler)
        assert torch.equal(parent.sigmas, scheduler.sigmas)

    def test_keeps_a_shift_set_after_construction(self):
        parent = FlowMatchEulerDiscreteScheduler(shift=1.0)
        parent.set_shift(5.0)
        scheduler = FlowMatchSDEScheduler.from_scheduler(parent)
        parent.set_timesteps(4)
        scheduler.set_timesteps(4)
        torch.testing.assert_close(scheduler.sigmas[1:], parent.sigmas[1:])

    @pytest.mark.parametrize("kind", [DDIMScheduler, FlowMatchHeunDiscreteScheduler])
    def test_refuses_another_sampler(self, kind):
        with pytest.raises(ValueError, match=f"is a {kind.__name__}, which is not flow matching.*FlowMatchEuler"):
            FlowMatchSDEScheduler.from_scheduler(kind())

    @pytest.mark.parametrize("option", ["stochastic_sampling", "invert_sigmas"])
    def test_refuses_options_that_change_the_step(self, option):
        FlowMatchSDEScheduler.from_scheduler(FlowMatchEulerDiscreteScheduler(**{option: False}))
        with pytest.raises(ValueError, match=f"`{option}=True`.*Load it with `{option}=False`"):
            FlowMatchSDEScheduler.from_scheduler(FlowMatchEulerDiscreteScheduler(**{option: True}))

    def test_refuses_a_subclass_with_a_step_of_its_own(self):
        class Other(FlowMatchEulerDiscreteScheduler):
            def step(self, *args, **kwargs):
                return super().step(*args, **kwargs)

        with pytest.raises(ValueError, match="scheduler Other replaces the Euler step"):
            FlowMatchSDEScheduler.from_scheduler(Other(**FLUX))

    def test_set_timesteps_keeps_the_signature_that_pipelines_look_for(self, scheduler, parent):
        assert "sigmas" in inspect.signature(scheduler.set_timesteps).parameters
        assert inspect.signature(scheduler.set_timesteps) == inspect.signature(parent.set_timesteps)


class TestStochasticSteps:
    @staticmethod
    def generators(index):
        return [keyed_generator(image, index) for image in range(SHAPE[0])]

    @pytest.mark.parametrize("kind", SDE_TYPES)
    @pytest.mark.parametrize("steps", [(1,), (0, 3), (2, 4)])
    def test_samples_the_step_of_sde_step_there_and_only_there(self, parent, scheduler, noise, kind, steps):
        reported = []
        on_step = lambda *args: reported.append(args) if args[3].log_prob is not None else None  # noqa: E731
        with scheduler.sampling(SDESettings(steps, 0.7, kind), self.generators, on_step):
            samples = trajectory(scheduler, noise)

        timesteps, sigmas = start(parent), parent.sigmas.tolist()
        for index, timestep in enumerate(timesteps):
            sample, model_output = samples[index], velocity(samples[index], timestep)
            euler = parent.step(model_output, timestep, sample)[0]
            if index not in steps:
                assert torch.equal(samples[index + 1], euler)
                continue
            sampled = sde_step(
                model_output,
                sample,
                sigmas[index],
                sigmas[index + 1],
                0.7,
                kind,
                sigma_max=sigmas[1],
                generator=self.generators(index),
            )
            assert (sampled.prev_sample - euler).abs().max() > 0.1
            assert torch.equal(samples[index + 1], sampled.prev_sample)
            got_index, got_output, got_sample, got_step = reported.pop(0)
            assert got_index == index
            assert torch.equal(got_output, model_output) and torch.equal(got_sample, sample)
            assert torch.equal(got_step.prev_sample, sampled.prev_sample)
            assert torch.equal(got_step.log_prob, sampled.log_prob)
        assert reported == []

    def test_the_generator_of_the_pipeline_is_used_without_step_generators(self, scheduler, noise):
        sampled = []
        for generator in (torch.Generator().manual_seed(seed) for seed in (1, 1, 2)):
            with scheduler.sampling(SDESettings((0,), 0.7)):
                sampled.append(scheduler.step(noise, start(scheduler)[0], noise, generator=generator).prev_sample)
        assert torch.equal(sampled[0], sampled[1]) and not torch.equal(sampled[0], sampled[2])


class TestDtypes:
    @pytest.mark.parametrize("sde", [None, SDESettings((1,), 0.7)])
    @pytest.mark.parametrize("return_dict", [False, True])
    def test_float32_latents_stay_float32_with_a_bf16_model(self, parent, scheduler, noise, sde, return_dict):
        # Twin: the parent rounds them to the model's dtype
        assert trajectory(parent, noise, torch.bfloat16)[1].dtype == torch.bfloat16

        with scheduler.sampling(sde, TestStochasticSteps.generators):
            samples = trajectory(scheduler, noise, torch.bfloat16, return_dict)
        assert {sample.dtype for sample in samples} == {torch.float32}
        assert not torch.equal(samples[1], samples[1].to(torch.bfloat16).float())

    @pytest.mark.parametrize("return_dict", [False, True])
    def test_bf16_latents_stay_bf16(self, scheduler, noise, return_dict):
        with scheduler.sampling(SDESettings((1,), 0.7), TestStochasticSteps.generators):
            samples = trajectory(scheduler, noise.to(torch.bfloat16), torch.float32, return_dict)
        assert {sample.dtype for sample in samples} == {torch.bfloat16}

    def test_the_density_is_that_of_the_stored_sample(self, scheduler, noise):
        reported = []
        on_step = lambda *args: reported.append(args) if args[3].log_prob is not None else None  # noqa: E731
        with scheduler.sampling(SDESettings((1,), 0.7), TestStochasticSteps.generators, on_step):
            samples = trajectory(scheduler, noise.to(torch.bfloat16))
        ((index, model_output, sample, step),) = reported
        assert torch.equal(step.prev_sample, samples[2].float())
        sigma, sigma_next = scheduler.times[index : index + 2]
        scored = sde_step(model_output, sample, sigma, sigma_next, 0.7, prev_sample=samples[2])
        assert torch.equal(step.log_prob, scored.log_prob)
        # Twin: that of the sample before rounding is another
        sampled = sde_step(
            model_output, sample, sigma, sigma_next, 0.7, generator=TestStochasticSteps.generators(index)
        )
        assert (sampled.log_prob - step.log_prob).abs().max() > 1e-6


class TestNextStepIndex:
    @pytest.mark.parametrize("sde", [None, SDESettings((0, 2), 0.7)])
    def test_is_the_step_that_the_transformer_is_called_for(self, scheduler, noise, sde):
        assert scheduler.next_step_index == 0
        sample, indices = noise, []
        with scheduler.sampling(sde):
            for timestep in start(scheduler):
                indices.append(scheduler.next_step_index)
                sample = scheduler.step(velocity(sample, timestep), timestep, sample).prev_sample
        assert indices == list(range(STEPS))
        assert scheduler.step_index == STEPS
        start(scheduler)
        assert scheduler.next_step_index == 0

    def test_is_the_begin_index_before_the_first_step(self, scheduler, noise):
        timesteps = start(scheduler)
        scheduler.set_begin_index(3)
        assert scheduler.step_index is None and scheduler.next_step_index == 3
        scheduler.step(velocity(noise, timesteps[3]), timesteps[3], noise)
        assert scheduler.next_step_index == 4
