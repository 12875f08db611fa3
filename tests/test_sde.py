# SPDX-License-Identifier: Apache-2.0
"""The stochastic step: closed forms in float64, densities, replay, noise by key."""

import itertools
import math

import numpy as np
import pytest
import torch

from paco_trl.rollout import SDE_TYPES, gaussian_log_prob, keyed_generator, sde_step


SIGMA, SIGMA_NEXT, NOISE_LEVEL = 0.83, 0.64, 0.7
SHAPE = (3, 5, 4)


@pytest.fixture
def step_inputs():
    """Velocity, sample before the step, and some sample after it, all of shape (3, 5, 4)."""
    generator = torch.Generator().manual_seed(0)
    v, x, x_next = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    return v, x, x_next


def formulas(kind, x, v, t, t_next, a, t_denominator=None):
    """Mean, noise scale and standard deviation of a step as the papers write them, in float64."""
    x, v = np.asarray(x, dtype=np.float64), np.asarray(v, dtype=np.float64)
    dt = t_next - t
    if kind == "cps":
        scale = std = t_next * np.sin(a * np.pi / 2)
        clean, noise = x - t * v, x + (1 - t) * v
        mean = (1 - t_next) * clean + np.sqrt(t_next**2 - std**2) * noise
        return mean, scale, std
    scale = a * np.sqrt(t / (1 - (t if t_denominator is None else t_denominator))) if kind == "flow_sde" else a
    mean = x * (1 + scale**2 / (2 * t) * dt) + v * (1 + scale**2 * (1 - t) / (2 * t)) * dt
    return mean, scale, scale * np.sqrt(-dt)


def log_density(value, mean, std):
    """Per-image mean of the log-density of a Gaussian, in float64."""
    value = np.asarray(value, dtype=np.float64)
    terms = -((value - mean) ** 2) / (2 * std**2) - np.log(std) - np.log(np.sqrt(2 * np.pi))
    return terms.reshape(len(value), -1).mean(axis=1)


class TestClosedForms:
    @pytest.mark.parametrize("kind", SDE_TYPES)
    @pytest.mark.parametrize(("sigma", "sigma_next"), [(SIGMA, SIGMA_NEXT), (0.95, 0.9), (0.3, 0.11)])
    @pytest.mark.parametrize("noise_level", [0.3, 0.9])
    def test_mean_std_and_log_prob(self, step_inputs, kind, sigma, sigma_next, noise_level):
        v, x, x_next = step_inputs
        mean, _, std = formulas(kind, x, v, sigma, sigma_next, noise_level)
        euler = (x + v * (sigma_next - sigma)).numpy()
        assert np.abs(mean - euler).max() > 1e-3  # the step is another than Euler's

        step = sde_step(v, x, sigma, sigma_next, noise_level, kind, prev_sample=x_next)

        np.testing.assert_allclose(step.mean, mean, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(step.std, std, rtol=2e-6)
        np.testing.assert_allclose(step.log_prob, log_density(x_next, mean, std), rtol=2e-5)
        assert step.mean.dtype == step.std.dtype == step.log_prob.dtype == torch.float32

    @staticmethod
    def variance_error(kind, dt, image_variance, noise=True):
        """
        Images N(0, `image_variance`) have the marginal N(0, (1 - t)^2 * image_variance + t^2), and their exact
        velocity is linear in x. How far is the variance after a step of size `dt` from the marginal's?
        """
        t, t_next = 0.6, 0.6 - dt
        variance, variance_next = ((1 - u) ** 2 * image_variance + u**2 for u in (t, t_next))
        x = torch.ones(1, 1)
        v = (t - (1 - t) * image_variance) / variance * x  # E[noise - image | x]
        step = sde_step(v, x, t, t_next, 0.8, kind, prev_sample=x)
        added = step.std.item() ** 2 if noise else 0.0
        return step.mean.item() ** 2 * variance + added - variance_next

    @pytest.mark.parametrize("kind", ["flow_sde", "dance_sde"])
    @pytest.mark.parametrize("image_variance", [1.0, 0.0])
    def test_steps_keep_the_marginals_to_first_order(self, kind, image_variance):
        errors = [abs(self.variance_error(kind, dt, image_variance)) for dt in (0.04, 0.02)]
        without_noise = [abs(self.variance_error(kind, dt, image_variance, noise=False)) for dt in (0.04, 0.02)]
        assert without_noise[0] / without_noise[1] == pytest.approx(2, abs=0.3)  # first order: it would add up
        assert errors[0] / errors[1] == pytest.approx(4, abs=0.7)  # second order: it vanishes with the step size
        assert errors[0] < without_noise[0] / 3

    @pytest.mark.parametrize("dt", [0.02, 0.3])
    def test_cps_keeps_the_marginals_of_a_known_image_exactly(self, dt):
        assert abs(self.variance_error("cps", dt, 0.0, noise=False)) > 0.05
        assert self.variance_error("cps", dt, 0.0) == pytest.approx(0, abs=1e-6)
        assert abs(self.variance_error("flow_sde", dt, 0.0)) > 1e-5  # twin: the others do not


class TestLogProb:
    @pytest.mark.parametrize("kind", SDE_TYPES)
    def test_replay_of_a_sampled_step_has_ratio_one(self, step_inputs, kind):
        v, x, x_next = step_inputs
        sampled = sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, kind, generator=keyed_generator(1))
        replayed = sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, kind, prev_sample=sampled.prev_sample)
        assert not torch.equal(sampled.prev_sample, sampled.mean)
        assert torch.equal(replayed.prev_sample, sampled.prev_sample)
        assert torch.equal(torch.exp(replayed.log_prob - sampled.log_prob), torch.ones(3))
        # Twins: another sample, and another model, have another log-probability
        other = sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, kind, prev_sample=x_next)
        moved = sde_step(v + 0.01, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, kind, prev_sample=sampled.prev_sample)
        assert (other.log_prob != sampled.log_prob).all()
        assert (moved.log_prob != sampled.log_prob).all()

    @pytest.mark.parametrize("kind", SDE_TYPES)
    def test_sampled_noise_has_the_standard_deviation_of_the_step(self, kind):
        v = x = torch.zeros(1, 100_000)
        step = sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, kind, generator=torch.Generator().manual_seed(3))
        _, _, std = formulas(kind, x, v, SIGMA, SIGMA_NEXT, NOISE_LEVEL)
        noise = step.prev_sample - step.mean
        assert noise.std().item() == pytest.approx(std, rel=0.02)
        assert noise.mean().item() == pytest.approx(0, abs=0.02 * std)


class TestStepsWithoutNoise:
    @pytest.mark.parametrize("kind", SDE_TYPES)
    def test_noise_level_zero_is_the_euler_step(self, step_inputs, kind):
        v, x, x_next = step_inputs
        euler = x + v * (SIGMA_NEXT - SIGMA)
        noisy = sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, kind, generator=keyed_generator(0))
        assert (noisy.prev_sample - euler).abs().max() > 0.1 and noisy.log_prob is not None

        step = sde_step(v, x, SIGMA, SIGMA_NEXT, 0.0, kind, generator=keyed_generator(0))
        torch.testing.assert_close(step.prev_sample, euler, rtol=1e-5, atol=1e-6)
        assert torch.equal(step.prev_sample, step.mean)
        assert step.log_prob is None
        assert sde_step(v, x, SIGMA, SIGMA_NEXT, 0.0, kind, prev_sample=x_next).log_prob is None

    def test_cps_samples_no_noise_at_the_end(self, step_inputs):
        v, x, _ = step_inputs
        step = sde_step(v, x, 0.2, 0.0, NOISE_LEVEL, "cps", generator=keyed_generator(0))
        assert step.log_prob is None
        torch.testing.assert_close(step.prev_sample, x - 0.2 * v)
        # Twins: one step earlier it does, and so does the paper's kind at the end
        assert sde_step(v, x, 0.2, 0.01, NOISE_LEVEL, "cps").log_prob is not None
        assert sde_step(v, x, 0.2, 0.0, NOISE_LEVEL, "flow_sde").log_prob is not None


class TestFirstStep:
    @pytest.mark.parametrize("sigma", [1.0, torch.tensor(1.0), torch.tensor([1.0, 0.9, 0.8])])
    def test_flow_sde_at_sigma_one_needs_sigma_max(self, step_inputs, sigma):
        v, x, _ = step_inputs
        with pytest.raises(ValueError, match="`sigma` is 1.*`sigma_max`"):
            sde_step(v, x, sigma, 0.7, NOISE_LEVEL)

    def test_sigma_max_is_the_denominator_at_one(self, step_inputs):
        v, x, x_next = step_inputs
        step = sde_step(v, x, 1.0, 0.7, NOISE_LEVEL, sigma_max=0.85, prev_sample=x_next)
        mean, scale, std = formulas("flow_sde", x, v, 1.0, 0.7, NOISE_LEVEL, t_denominator=0.85)
        assert scale == pytest.approx(NOISE_LEVEL * math.sqrt(1 / 0.15))
        np.testing.assert_allclose(step.std, std, rtol=2e-6)
        np.testing.assert_allclose(step.mean, mean, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(step.log_prob, log_density(x_next, mean, std), rtol=2e-5)

    def test_sigma_max_changes_nothing_below_one(self, step_inputs):
        v, x, x_next = step_inputs
        with_it = sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, sigma_max=0.85, prev_sample=x_next)
        without = sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, prev_sample=x_next)
        assert torch.equal(with_it.mean, without.mean) and torch.equal(with_it.log_prob, without.log_prob)


class TestRefusals:
    def test_what_cannot_be_a_step(self, step_inputs):
        v, x, _ = step_inputs
        with pytest.raises(ValueError, match="Unknown `sde_type` 'sde'"):
            sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, "sde")
        with pytest.raises(ValueError, match=r"`noise_level` is -0\.1"):
            sde_step(v, x, SIGMA, SIGMA_NEXT, -0.1)
        for count in (1, 4):
            with pytest.raises(ValueError, match=f"{count} generators for a batch of 3 images"):
                sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, generator=[keyed_generator(0)] * count)


class TestBatches:
    @pytest.mark.parametrize("kind", SDE_TYPES)
    def test_sigma_for_each_image_equals_images_alone(self, step_inputs, kind):
        v, x, x_next = step_inputs
        sigmas, sigmas_next = [0.9, 0.7, 0.5], [0.8, 0.4, 0.1]
        together = sde_step(
            v, x, torch.tensor(sigmas), torch.tensor(sigmas_next), NOISE_LEVEL, kind, prev_sample=x_next
        )
        std = together.std
        for i in range(3):
            rows = slice(i, i + 1)
            alone = sde_step(v[rows], x[rows], sigmas[i], sigmas_next[i], NOISE_LEVEL, kind, prev_sample=x_next[rows])
            torch.testing.assert_close(together.mean[rows], alone.mean, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(together.log_prob[rows], alone.log_prob, rtol=1e-6, atol=1e-6)
            alone_std = alone.std
            torch.testing.assert_close(std[rows].flatten(), alone_std.flatten(), rtol=1e-6, atol=1e-6)
        assert together.log_prob.unique().numel() == 3

    def test_noise_of_an_image_does_not_depend_on_its_batch(self, step_inputs):
        v, x, _ = step_inputs

        def noise(images):
            generators = [keyed_generator(7, image) for image in images]
            return sde_step(v[images], x[images], SIGMA, SIGMA_NEXT, NOISE_LEVEL, generator=generators).prev_sample

        together, reordered, alone = noise([0, 1, 2]), noise([2, 0]), noise([1])
        assert not torch.equal(together[0] - x[0], together[1] - x[1])
        assert torch.equal(together[[2, 0]], reordered)
        assert torch.equal(together[[1]], alone)
        # Twin: with one generator for the batch it does
        single = sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, generator=keyed_generator(7))
        single_reordered = sde_step(v[[2, 0]], x[[2, 0]], SIGMA, SIGMA_NEXT, NOISE_LEVEL, generator=keyed_generator(7))
        assert not torch.equal(single.prev_sample[[2, 0]], single_reordered.prev_sample)


class TestPrecision:
    @pytest.mark.parametrize("kind", SDE_TYPES)
    def test_bf16_inputs_are_computed_in_float32(self, step_inputs, kind):
        v, x, x_next = (tensor.to(torch.bfloat16) for tensor in step_inputs)
        step = sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, kind, prev_sample=x_next)
        exact = sde_step(v.float(), x.float(), SIGMA, SIGMA_NEXT, NOISE_LEVEL, kind, prev_sample=x_next.float())
        assert step.mean.dtype == step.prev_sample.dtype == step.log_prob.dtype == torch.float32
        assert torch.equal(step.mean, exact.mean) and torch.equal(step.log_prob, exact.log_prob)

        # Twin: the same formula in bf16 arithmetic is off by far more than a clip range of 1e-4
        dt = SIGMA_NEXT - SIGMA
        _, scale, std = formulas(kind, x.float(), v.float(), SIGMA, SIGMA_NEXT, NOISE_LEVEL)
        if kind == "cps":
            naive = (1 - SIGMA_NEXT) * (x - SIGMA * v) + math.sqrt(SIGMA_NEXT**2 - std**2) * (x + (1 - SIGMA) * v)
        else:
            naive = x * (1 + scale**2 / (2 * SIGMA) * dt) + v * (1 + scale**2 * (1 - SIGMA) / (2 * SIGMA)) * dt
        assert naive.dtype == torch.bfloat16
        naive_log_prob = gaussian_log_prob(x_next, naive, torch.tensor(float(std), dtype=torch.bfloat16))
        assert (naive_log_prob.float() - step.log_prob).abs().max() > 1e-4
        assert (naive.float() - step.mean).abs().max() > 1e-4

    def test_gradient_reaches_the_model_output_alone(self, step_inputs):
        v, x, x_next = step_inputs
        v = v.clone().requires_grad_()
        step = sde_step(v, x, SIGMA, SIGMA_NEXT, NOISE_LEVEL, prev_sample=x_next)
        (gradient,) = torch.autograd.grad(step.log_prob.sum(), v)
        # d log p / d v = (x' - mean) / std^2 * d mean / d v, averaged over the 20 elements of an image
        mean, scale, std = formulas("flow_sde", x, v.detach(), SIGMA, SIGMA_NEXT, NOISE_LEVEL)
        factor = (1 + scale**2 * (1 - SIGMA) / (2 * SIGMA)) * (SIGMA_NEXT - SIGMA)
        expected = (x_next.double().numpy() - mean) / std**2 * factor / 20
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)


class TestKeyedGenerator:
    KEY = (42, 3, 0, 17, 5)

    @staticmethod
    def noise_of(*key):
        return torch.randn(64, generator=keyed_generator(*key))

    @pytest.mark.parametrize("place", range(5))
    def test_each_place_of_the_key_matters(self, place):
        changed = list(self.KEY)
        changed[place] += 1
        assert not torch.equal(self.noise_of(*self.KEY), self.noise_of(*changed))

    def test_many_keys_give_many_streams(self):
        keys = itertools.product(range(6), repeat=3)
        first_numbers = {float(torch.randn((), generator=keyed_generator(0, *key))) for key in keys}
        assert len(first_numbers) > 210  # of 216; float32 values may coincide

    def test_is_independent_of_the_global_state(self):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            state = torch.get_rng_state()
            numpy_state = np.random.get_state()[1].copy()
            first = self.noise_of(*self.KEY)
            assert torch.equal(torch.get_rng_state(), state)
            assert np.array_equal(np.random.get_state()[1], numpy_state)
            torch.manual_seed(1)
            torch.randn(10)
            assert not torch.equal(torch.get_rng_state(), state)
            assert torch.equal(self.noise_of(*self.KEY), first)
