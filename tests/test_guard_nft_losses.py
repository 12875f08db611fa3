# SPDX-License-Identifier: Apache-2.0
"""The losses of GRPO-Guard and DiffusionNFT against closed forms, in values and gradients."""

import pytest
import torch

from paco_trl.rollout import SDE_TYPES, gaussian_log_prob, sde_step
from paco_trl.trainer.losses import (
    add_flow_noise,
    clipped_surrogate,
    guard_gradient_weight,
    guarded_surrogate,
    nft_loss,
    nft_old_policy_decay,
    nft_reward_probability,
    nft_velocities,
    normalized_log_ratio,
    self_normalized_image_error,
    velocity_error,
)


SHAPE = (3, 5, 4)
ELEMENTS = 20


def normal(seed, shape=SHAPE, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Step:
    """A recorded step x' = old_mean + std * eps and a model whose mean has moved by delta, in float64."""

    def __init__(self, std=0.3, delta=None, shape=SHAPE):
        self.std = torch.as_tensor(std, dtype=torch.float64)
        self.eps = normal(0, shape)
        self.old_mean = normal(1, shape)
        self.delta = normal(2, shape, 0.05) if delta is None else delta
        self.sample = self.old_mean + self.std * self.eps
        self.mean = (self.old_mean + self.delta).requires_grad_()
        self.old_log_prob = gaussian_log_prob(self.sample, self.old_mean, self.std)

    @property
    def log_prob(self):
        return gaussian_log_prob(self.sample, self.mean, self.std)

    def normalized(self, std=None):
        std = self.std if std is None else std
        return normalized_log_ratio(self.log_prob, self.old_log_prob, self.mean, self.old_mean, std)

    def guarded(self, advantages, epsilon_low=0.2, epsilon_high=0.2, gradient_weight=1.0):
        args = (self.log_prob, self.old_log_prob, self.mean, self.old_mean, self.std)
        return guarded_surrogate(*args, advantages, epsilon_low, epsilon_high, gradient_weight)


PER_IMAGE = torch.tensor([0.2, 0.5, 1.5], dtype=torch.float64).view(3, 1, 1)


class TestNormalizedLogRatio:
    @pytest.mark.parametrize("std", [0.3, PER_IMAGE], ids=["scalar", "per_image"])
    def test_is_the_mean_of_noise_times_shift(self, std):
        step = Step(std)
        expected = (step.eps * step.delta).mean(dim=(1, 2))
        torch.testing.assert_close(step.normalized(), expected, rtol=1e-10, atol=1e-14)
        # What it normalizes is another number: scale and bias are both seen at this tolerance
        plain = (step.log_prob - step.old_log_prob).detach()
        bias = (step.delta**2 / (2 * step.std**2)).mean(dim=(1, 2))
        torch.testing.assert_close(plain, (step.eps * step.delta / step.std).mean(dim=(1, 2)) - bias)
        for other in (plain, plain + bias, plain * step.std.flatten()):
            assert ((other - expected).abs() > 1e-4).all()

    @pytest.mark.parametrize("shape", [(2,), (1, 3), (3, 5, 1)])
    def test_a_std_that_is_not_one_per_image_is_refused(self, shape):
        with pytest.raises(ValueError, match="`std` has shape"):
            Step().normalized(torch.full(shape, 0.3))

    @pytest.mark.parametrize("sde_type", SDE_TYPES)
    @pytest.mark.parametrize("sigma, sigma_next", [(0.9, 0.75), ([0.9, 0.5], [0.75, 0.45])], ids=["scalar", "tensor"])
    def test_with_the_steps_of_the_sampler(self, sde_type, sigma, sigma_next):
        """Two velocities and a drawn sample, as in training: the identity holds with the standard deviation of the step."""
        if isinstance(sigma, list):
            sigma, sigma_next = torch.tensor(sigma), torch.tensor(sigma_next)
        sample, old_velocity = normal(0, (2, 64, 8)).float(), normal(1, (2, 64, 8)).float()
        velocity = old_velocity + normal(2, (2, 64, 8), 0.05).float()
        generator = torch.Generator().manual_seed(3)
        old = sde_step(old_velocity, sample, sigma, sigma_next, 0.7, sde_type, generator=generator)
        new = sde_step(velocity, sample, sigma, sigma_next, 0.7, sde_type, prev_sample=old.prev_sample)
        std = old.std
        value = normalized_log_ratio(new.log_prob, old.log_prob, new.mean, old.mean, std)

        eps = (old.prev_sample.double() - old.mean.double()) / std
        expected = (eps * (new.mean.double() - old.mean.double())).flatten(1).mean(1)
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=5e-7)
        assert expected.abs().min() > 1e-5
        if sde_type != "cps":  # Twin: the noise scale without sqrt(-dt) is not the standard deviation
            length = torch.as_tensor(sigma) - torch.as_tensor(sigma_next)
            wrong_std = std / length.sqrt().view(-1, 1, 1)
            wrong = normalized_log_ratio(new.log_prob, old.log_prob, new.mean, old.mean, wrong_std)
            assert (wrong.double() - expected).abs().max() > 1e-5


class TestGuardGradientWeight:
    def test_closed_form(self):
        assert guard_gradient_weight(0.9, 0.8) == pytest.approx(10.0)
        sigma, sigma_next = torch.tensor([0.9, 0.5]), torch.tensor([0.4, 0.25])
        torch.testing.assert_close(guard_gradient_weight(sigma, sigma_next), torch.tensor([2.0, 4.0]))

    def test_gradients_by_the_velocity_are_equal_at_all_steps_of_flow_sde(self):
        """|gradient| by the velocity is |eps| * (1 + a^2 / 2), whatever the time and the length of the step."""
        a, sample, velocity = 0.7, normal(0, (1, 2000)).float(), normal(1, (1, 2000)).float()
        weighted, unweighted, plain = [], [], []
        for sigma, sigma_next in ((0.95, 0.9), (0.8, 0.5), (0.3, 0.28)):
            generator = torch.Generator().manual_seed(0)  # the same noise in each step
            old = sde_step(velocity, sample, sigma, sigma_next, a, generator=generator)
            std = old.std
            weights = guard_gradient_weight(sigma, sigma_next), 1.0, None
            for results, weight in zip((weighted, unweighted, plain), weights, strict=True):
                v = velocity.clone().requires_grad_()
                new = sde_step(v, sample, sigma, sigma_next, a, prev_sample=old.prev_sample)
                args = (torch.ones(1), 1e-2, 1e-2)
                if weight is None:
                    loss = clipped_surrogate(new.log_prob, old.log_prob, *args).loss
                else:
                    means = (new.mean, old.mean, std)
                    loss = guarded_surrogate(new.log_prob, old.log_prob, *means, *args, weight).loss
                (gradient,) = torch.autograd.grad(loss, v)
                results.append(gradient.norm().item())
        assert max(plain) > 2 * min(plain) and max(unweighted) > 5 * min(unweighted)
        noise = torch.randn(1, 2000, generator=torch.Generator().manual_seed(0)).norm().item()
        assert weighted == pytest.approx([noise * (1 + a**2 / 2) / 2000] * 3, rel=1e-4)


class TestGuardedSurrogate:
    WEIGHT = 8.0

    def test_on_policy(self):
        """The ratio is exactly 1, and the gradient has its closed form."""
        advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        step = Step(PER_IMAGE, torch.zeros(SHAPE, dtype=torch.float64))
        result = step.guarded(advantages, 1e-6, 1e-6, self.WEIGHT)
        assert torch.equal(result.ratio, torch.ones(3, dtype=torch.float64)) and not result.ratio.requires_grad
        assert not (result.is_low_clipped | result.is_high_clipped).any()
        assert torch.equal(result.loss.detach(), -self.WEIGHT * advantages)
        (gradient,) = torch.autograd.grad(result.loss.sum(), step.mean)
        torch.testing.assert_close(gradient, -self.WEIGHT * advantages.view(3, 1, 1) * step.eps / ELEMENTS)

    def test_closed_form_off_policy(self):
        """Value and gradient with every image inside the clip range: -w * r * A, and -w * r * A * eps / elements."""
        advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        step = Step(PER_IMAGE)
        result = step.guarded(advantages, gradient_weight=self.WEIGHT)
        ratio = torch.exp((step.eps * step.delta).mean(dim=(1, 2)))
        assert ((ratio - 1).abs() > 1e-4).all() and ((ratio - 1).abs() < 0.2).all()
        torch.testing.assert_close(result.ratio, ratio)
        torch.testing.assert_close(result.loss.detach(), -self.WEIGHT * ratio * advantages)
        (gradient,) = torch.autograd.grad(result.loss.sum(), step.mean)
        expected = -self.WEIGHT * (ratio * advantages).view(3, 1, 1) * step.eps / ELEMENTS
        torch.testing.assert_close(gradient, expected)

    @pytest.mark.parametrize(
        "advantage, side, is_low, is_high",
        [(1.0, 1, False, True), (1.0, -1, False, False), (-1.0, -1, True, False), (-1.0, 1, False, False)],
    )
    def test_clips_the_side_that_the_advantage_favours(self, advantage, side, is_low, is_high):
        # eps * Delta = side * eps^2 / 2: the ratio moves by about half, one way for every image
        step = Step(0.3, side * 0.5 * normal(0))
        advantages = torch.full((3,), advantage, dtype=torch.float64)
        result = step.guarded(advantages, 0.1, 0.2, self.WEIGHT)
        assert ((result.ratio - 1) * side > 0.2).all()
        assert result.is_low_clipped.tolist() == [is_low] * 3 and result.is_high_clipped.tolist() == [is_high] * 3
        (gradient,) = torch.autograd.grad(result.loss.sum(), step.mean)
        assert (gradient == 0).all() if is_low or is_high else (gradient != 0).all()
        expected = {(True, False): 0.9, (False, True): 1.2}.get((is_low, is_high), result.ratio)
        torch.testing.assert_close(result.loss.detach(), -self.WEIGHT * expected * advantages)

    def test_weights_of_images(self):
        weights = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
        step, advantages = Step(), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        unweighted = step.guarded(advantages).loss
        for form in (weights, weights.view(3, 1, 1)):
            result = step.guarded(advantages, gradient_weight=form)
            assert result.loss.shape == (3,)
            torch.testing.assert_close(result.loss, unweighted * weights)
        with pytest.raises(ValueError, match="`gradient_weight` has shape"):
            step.guarded(advantages, gradient_weight=torch.ones(2))


class TestAddFlowNoise:
    def test_closed_form(self):
        image, noise = normal(0), normal(1)
        for sigma in (0.25, torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.1, 0.5, 0.9]).view(3, 1, 1)):
            t = torch.as_tensor(sigma).double().reshape(-1, 1, 1)
            sample, target = add_flow_noise(image, noise, sigma)
            torch.testing.assert_close(sample, (1 - t) * image + t * noise)
            torch.testing.assert_close(target, noise - image)

    def test_the_time_is_not_rounded_to_the_images_dtype(self):
        image, noise = normal(0).bfloat16(), normal(1).bfloat16()
        sample = add_flow_noise(image, noise, 0.9441)[0]
        torch.testing.assert_close(sample, (1 - 0.9441) * image.float() + 0.9441 * noise.float())


class TestNFTRewardProbability:
    def test_closed_form(self):
        advantages = torch.tensor([-9.0, -5.0, -2.5, 0.0, 1.0, 5.0, 9.0])
        expected = torch.tensor([0.0, 0.0, 0.25, 0.5, 0.6, 1.0, 1.0])
        torch.testing.assert_close(nft_reward_probability(advantages, 5.0), expected)
        torch.testing.assert_close(nft_reward_probability(torch.tensor([1.0]), 2.0), torch.tensor([0.75]))


class TestNFTVelocities:
    def test_no_gradient_reaches_the_old_velocity(self):
        velocity, old = normal(0).requires_grad_(), normal(1).requires_grad_()
        positive, negative = nft_velocities(velocity, old, 0.5)
        for value, sign in ((positive, 0.5), (negative, -0.5)):
            by_velocity, by_old = torch.autograd.grad(value.sum(), (velocity, old), allow_unused=True)
            assert by_old is None and torch.equal(by_velocity, torch.full(SHAPE, sign, dtype=torch.float64))

    def test_bf16_does_not_round_the_update_away(self):
        old = torch.full(SHAPE, 1.0, dtype=torch.bfloat16)
        velocity = torch.full(SHAPE, 1 + 2**-7, dtype=torch.bfloat16)  # the next number
        assert torch.equal((1 - 0.1) * old + 0.1 * velocity, old)  # the effect exists
        positive, negative = nft_velocities(velocity, old, 0.1)
        torch.testing.assert_close(positive, torch.full(SHAPE, 1 + 0.1 * 2**-7), rtol=1e-6, atol=0)
        torch.testing.assert_close(negative, torch.full(SHAPE, 1 - 0.1 * 2**-7), rtol=1e-6, atol=0)


def test_velocity_error_is_a_mean_over_the_elements():
    velocity = torch.zeros(SHAPE)
    velocity[0], velocity[1, 0] = 3.0, 2.0
    part = velocity[1, 0].numel() / velocity[1].numel()
    assert velocity_error(velocity, torch.ones(SHAPE)).tolist() == pytest.approx([4.0, 1.0, 1.0])
    assert velocity_error(velocity, torch.zeros(SHAPE)).tolist() == pytest.approx([9.0, 4.0 * part, 0.0])


class TestSelfNormalizedImageError:
    SIGMA = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)

    def test_is_that_of_the_predicted_image(self):
        """Computed the long way, through x = x_t - t * v."""
        image, noise, velocity = normal(0), normal(1), normal(2)
        sample, target = add_flow_noise(image, noise, self.SIGMA)
        error = sample - self.SIGMA.view(3, 1, 1) * velocity - image
        expected = (error**2).mean(dim=(1, 2)) / error.abs().mean(dim=(1, 2))
        torch.testing.assert_close(self_normalized_image_error(velocity, target, self.SIGMA), expected)
        for other in (velocity_error(velocity, target), (error**2).mean(dim=(1, 2))):
            assert ((expected - other).abs() > 1e-2).all()

    def test_no_gradient_through_the_normalizer(self):
        target, velocity = normal(0), normal(1).requires_grad_()
        value = self_normalized_image_error(velocity, target, self.SIGMA)
        (gradient,) = torch.autograd.grad(value.sum(), velocity)
        error = (velocity - target).detach()
        t, scale = self.SIGMA.view(3, 1, 1), error.abs().mean(dim=(1, 2), keepdim=True)
        torch.testing.assert_close(gradient, 2 * t * error / scale / ELEMENTS)


class TestNFTLoss:
    R = torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
    SIGMA = torch.tensor([0.2, 0.5, 0.9])

    def test_closed_form(self):
        velocity, old, target, found = normal(0), normal(1), normal(2), {}
        for name, each in (("positive", 0.7 * old + 0.3 * velocity), ("negative", 1.3 * old - 0.3 * velocity)):
            found[name] = self_normalized_image_error(each, target, self.SIGMA)
        loss = nft_loss(velocity, old, target, self.R, 0.3, self.SIGMA)
        assert loss.shape == (3,)
        torch.testing.assert_close(loss, self.R * found["positive"] + (1 - self.R) * found["negative"])

    @pytest.mark.parametrize("beta", [0.1, 1.0])
    def test_on_policy_value_and_gradient(self, beta):
        """v = v_old: the error of its image whatever r, and beta * (2 r - 1) times its gradient."""
        old, target = normal(1), normal(2)
        velocity = old.clone().requires_grad_()
        loss = nft_loss(velocity, old, target, self.R, beta, self.SIGMA)
        error = self_normalized_image_error(velocity, target, self.SIGMA)
        torch.testing.assert_close(loss, error)
        (gradient,) = torch.autograd.grad(loss.sum(), velocity)
        (matching,) = torch.autograd.grad(error.sum(), velocity)
        torch.testing.assert_close(gradient, beta * (2 * self.R - 1).view(3, 1, 1) * matching, rtol=1e-7, atol=1e-15)
        # r = 1/2 teaches nothing; above it a step goes towards the image, below it away
        assert gradient[1].abs().max() < 1e-15
        towards = -(gradient * (target - old)).sum(dim=(1, 2))
        assert towards[0] < 0 < towards[2]


class TestNFTOldPolicyDecay:
    def test_the_papers(self):
        assert nft_old_policy_decay(0) == 0
        assert nft_old_policy_decay(100) == pytest.approx(0.1)
        assert nft_old_policy_decay(500) == nft_old_policy_decay(10_000) == 0.5
        assert [nft_old_policy_decay(step, 0.0075, 0.999) for step in (100, 225)] == pytest.approx([0.75, 0.999])
