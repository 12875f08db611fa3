# SPDX-License-Identifier: Apache-2.0
"""A shorter tail (`tail_steps`): fewer steps of DPM-Solver++(2M) after the last stochastic one."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler

from kill_runs import Run, copy_run, different, relative_difference
from launching import fork_context
from paco_trl.rewards import redness_reward
from paco_trl.rollout import FlowMatchSDEScheduler, SDESettings
from paco_trl.rollout.sde import second_order_velocity
from test_families import NUM_STEPS, pixels
from test_rollout_batch import SDE, flux, rows_of_calls, setup, setup_of  # noqa: F401
from test_scheduler import start


SHORT = replace(SDE, steps=(1,), tail_steps=1)


def exact_velocity(sample, sigma, mean=0.3, variance=0.25):
    """The velocity of flow matching from noise to a Gaussian of images."""
    total = (1 - sigma) ** 2 * variance + sigma**2
    x0 = mean + (1 - sigma) * variance / total * (sample - (1 - sigma) * mean)
    return (sample - x0) / sigma


def scheduler_with(steps, tail_steps, num_inference_steps=10, **config):
    scheduler = FlowMatchSDEScheduler.from_scheduler(FlowMatchEulerDiscreteScheduler(**config))
    with scheduler.sampling(SDESettings(steps, 0.0, tail_steps=tail_steps)):
        scheduler.set_timesteps(sigmas=np.linspace(1, 1 / num_inference_steps, num_inference_steps))
    return scheduler


def solve(scheduler, sample, velocity=exact_velocity, first=0):
    """The samples from a step of the schedule on."""
    scheduler.set_begin_index(first)
    samples = [sample]
    for timestep, sigma in list(zip(scheduler.timesteps, scheduler.sigmas.tolist()[:-1], strict=True))[first:]:
        samples.append(scheduler.step(velocity(samples[-1], sigma), timestep, samples[-1], return_dict=False)[0])
    return samples


class TestSolver:
    def test_is_the_formula(self):
        generator = torch.Generator().manual_seed(0)
        x, v, previous = (torch.randn(2, 5, generator=generator, dtype=torch.float64) for _ in range(3))
        s1, s0, t = 0.8, 0.55, 0.35
        x0 = x - s0 * v
        lam = [math.log((1 - sigma) / sigma) for sigma in (s1, s0, t)]
        h, h_previous = lam[2] - lam[1], lam[1] - lam[0]
        d1 = (x0 - previous) / (h_previous / h)
        expected = (t / s0) * x - (1 - t) * (math.exp(-h) - 1) * (x0 + d1 / 2)
        euler = x + (t - s0) * second_order_velocity(v, x0, previous, (s1, s0, t))
        torch.testing.assert_close(euler, expected)
        assert not torch.allclose(x + (t - s0) * v, expected, atol=1e-2)

    @pytest.mark.parametrize("tail_steps", [1, 2, 3, 8])
    def test_numbers_are_those_of_diffusers(self, tail_steps):
        ours = scheduler_with((1,), tail_steps, shift=3.0)
        theirs = DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, final_sigmas_type="zero"
        )
        theirs.set_timesteps(tail_steps)
        theirs.sigmas = ours.sigmas[2:].clone()
        theirs.set_begin_index(0)
        assert len(theirs.sigmas) == tail_steps + 1
        velocity = lambda sample, sigma: torch.sin(3 * sample) + sigma  # noqa: E731
        noise = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
        samples = solve(ours, noise, velocity, first=2)
        expected = [noise]
        for timestep, sigma in zip(theirs.timesteps, theirs.sigmas[:-1].tolist(), strict=True):
            output = theirs.step(velocity(expected[-1], sigma), timestep, expected[-1], return_dict=False)
            expected.append(output[0])
        torch.testing.assert_close(samples, expected, rtol=1e-5, atol=1e-5)
        if tail_steps > 2:  # the first and the last step are Euler steps
            sigmas, euler = ours.sigmas[2:].tolist(), noise
            for sigma, sigma_next in zip(sigmas, sigmas[1:], strict=False):
                euler = euler + (sigma_next - sigma) * velocity(euler, sigma)
            assert (euler - expected[-1]).abs().max() > 1e-3


class TestSchedule:
    @pytest.mark.parametrize(("steps", "tail_steps"), [((1,), 4), ((1, 3), 3), ((0,), 9), ((5,), 1)])
    def test_is_spaced_evenly_before_the_shift(self, steps, tail_steps):
        scheduler = scheduler_with(steps, tail_steps, shift=3.0)
        full = scheduler_with(steps, None, shift=3.0)
        last = steps[-1]
        assert len(scheduler.timesteps) == last + 1 + tail_steps
        assert torch.equal(scheduler.sigmas[: last + 2], full.sigmas[: last + 2])
        assert torch.equal(scheduler.timesteps[: last + 1], full.timesteps[: last + 1])
        even = torch.linspace(1 - (last + 1) / 10, 0, tail_steps + 1)
        torch.testing.assert_close(scheduler.sigmas[last + 1 :], 3 * even / (1 + 2 * even))
        torch.testing.assert_close(scheduler.timesteps, 1000 * scheduler.sigmas[:-1])

    def test_of_fluxs_dynamic_shift_and_of_a_stretched_schedule(self):
        for config in ({"shift_terminal": 0.02}, {}):
            scheduler = FlowMatchSDEScheduler(use_dynamic_shifting=True, **config)
            full = start(scheduler, 10)
            sigmas = scheduler.sigmas.clone()
            with scheduler.sampling(SDESettings((1,), 0.7, tail_steps=4)):
                assert torch.equal(start(scheduler, 10), full[[0, 1, 2, 4, 6, 8]])
            assert torch.equal(scheduler.sigmas, sigmas[[0, 1, 2, 4, 6, 8, 10]])
            assert torch.equal(start(scheduler, 10), full)


class TestEveryFamily:
    def test_has_fewer_steps_and_the_same_trained_step(self, setup):  # noqa: F811
        seen, stop = rows_of_calls(setup.policy)
        short_images, (short, short_last) = setup.generate(SHORT)
        stop()
        assert [step for step, _ in seen] == [step for step in range(3) for _ in range(setup.case.calls)]
        full_images, (full, full_last) = setup.generate(replace(SHORT, tail_steps=None))
        assert (short_last.index, full_last.index) == (2, NUM_STEPS - 1) and short_last.sigma_next == 0
        for name in ("index", "sigma", "sigma_next", "sigma_max"):
            assert getattr(short, name) == getattr(full, name)
        assert torch.equal(short.sample, full.sample) and torch.equal(short.prev_sample, full.prev_sample)
        assert torch.equal(short.log_prob, full.log_prob)
        assert torch.equal(setup.replay(short, SHORT)[0], short.log_prob)
        assert (short_last.prev_sample - full_last.prev_sample).abs().max() > 1e-3
        assert not np.array_equal(pixels(short_images), pixels(full_images))
        # Nothing of it is left for the next images
        assert torch.equal(setup.generate(SHORT)[1][1].prev_sample, short_last.prev_sample)


def test_each_generation_starts_again(flux):  # noqa: F811
    plain, sde = flux.generate(None)[1][0].prev_sample, replace(SHORT, steps=(0,), tail_steps=3)
    last = flux.generate(sde)[1][1]
    assert last.index == 3 and last.sigma_next == 0  # of a tail of several steps
    assert torch.equal(flux.generate(sde)[1][1].prev_sample, last.prev_sample)
    assert torch.equal(flux.generate(None)[1][0].prev_sample, plain)


class TestTrainer:
    def test_evaluation_has_the_full_schedule(self, make_trainer, prompts):
        trainer = make_trainer(tail_steps=1, eval_dataset=prompts.select(range(1)), num_inference_steps_eval=5)
        seen, _ = rows_of_calls(trainer.policy)
        trainer.evaluate()
        assert [step for step, _ in seen] == list(range(5))


@pytest.mark.slow
class RunsOfOptions:
    """Runs with some options in processes of their own, each of two rounds of two optimizer steps."""

    SETTINGS: dict
    COMPARED: tuple[str, ...] = ()  # logged values whose first is the same on two processes

    @pytest.fixture(scope="class")
    def alone(self, tiny_flux, tmp_path_factory) -> Run:
        run = Run(fork_context(), tiny_flux, tmp_path_factory.mktemp("alone") / "out", **self.SETTINGS)
        assert run.state()["global_step"] == 4
        return run

    def test_resuming_in_the_middle_of_a_round_is_exact(self, alone, tiny_flux, tmp_path):
        assert (alone.output / "checkpoint-3" / "rollout_0.pt").exists()
        output = copy_run(alone.output, tmp_path / "out", [3])
        resumed = Run(fork_context(), tiny_flux, output, resume=True, **self.SETTINGS)
        assert not different(alone.state(), resumed.state())
        assert "again" not in resumed.output_text()

    @pytest.mark.parametrize("zero3", [False, True])
    def test_two_processes_equal_one(self, alone, tiny_flux, tmp_path, zero3):
        run = Run(fork_context(), tiny_flux, tmp_path / "out", processes=2, zero3=zero3, **self.SETTINGS)
        one, two = alone.state(), run.state()
        for name in self.COMPARED:
            values = [[entry[name] for entry in state["history"] if name in entry] for state in (one, two)]
            assert values[0][0] == pytest.approx(values[1][0], rel=1e-5) and len(values[0]) == len(values[1])
        assert relative_difference(one["adapter"], two["adapter"]) < 0.05


class TestRuns(RunsOfOptions):
    SETTINGS = {
        "per_device_train_batch_size": 2, "per_device_rollout_batch_size": 4, "tail_steps": 2,
        "num_inference_steps": 6, "max_steps": 4,
        "reward_funcs": redness_reward, "eval_strategy": "no",
        "scale_rewards": "none", "multi_objective_aggregation": "sum_then_normalize",
    }  # fmt: skip
