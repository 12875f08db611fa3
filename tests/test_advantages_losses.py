# SPDX-License-Identifier: Apache-2.0
"""Advantages and losses against closed forms in NumPy and torch.distributions."""

import numpy as np
import pytest
import torch

from paco_trl.trainer.losses import (
    clipped_surrogate,
    gaussian_kl,
    group_advantages,
    informative_groups,
)


NAN = float("nan")
REWARDS = torch.tensor([0.1, 0.5, 0.9, 0.3, 2.0, 1.0, 4.0, 3.0, 7.0, 7.5, 6.0, 8.0])
GROUPS = REWARDS.double().numpy().reshape(3, 4)


class TestGroupAdvantages:
    def test_group_scale_closed_form(self):
        expected = (GROUPS - GROUPS.mean(1, keepdims=True)) / (GROUPS.std(1, ddof=1, keepdims=True) + 1e-4)
        values, is_valid, has_spread = group_advantages(REWARDS, 4)
        np.testing.assert_allclose(values, expected.flatten(), rtol=1e-5)
        assert is_valid.all() and has_spread.tolist() == [True] * 3
        assert values.shape == is_valid.shape == (12,) and has_spread.shape == (3,)
        # Twins: the degrees of freedom and the constant are seen at this tolerance
        for ddof, constant in ((0, 1e-4), (1, 0.0), (1, 1e-3)):
            other = (GROUPS - GROUPS.mean(1, keepdims=True)) / (GROUPS.std(1, ddof=ddof, keepdims=True) + constant)
            assert not np.allclose(values, other.flatten(), rtol=1e-5)

    @pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
    def test_missing_rewards_are_out_of_every_statistic(self, scale_rewards):
        rewards = REWARDS.clone()
        rewards[[1, 6]] = NAN
        values, is_valid, has_spread = group_advantages(rewards, 4, scale_rewards)
        assert is_valid.tolist() == [i not in (1, 6) for i in range(12)] and has_spread.all()
        assert values[1] == values[6] == 0 and not values.isnan().any()

        with_gaps = rewards.double().numpy().reshape(3, 4)
        mean = np.nanmean(with_gaps, axis=1, keepdims=True)
        std = {
            "group": np.nanstd(with_gaps, axis=1, ddof=1, keepdims=True) + 1e-4,
            "batch": np.nanstd(with_gaps, ddof=1) + 1e-4,
            "none": 1.0,
        }[scale_rewards]
        expected = np.nan_to_num((with_gaps - mean) / std)
        np.testing.assert_allclose(values, expected.flatten(), rtol=1e-5, atol=1e-6)

        # Twin: a missing reward that counts as 0 changes the others
        as_zero = group_advantages(torch.nan_to_num(rewards), 4, scale_rewards)
        assert as_zero.is_valid.all()
        assert (as_zero.values[[0, 2, 3]] - values[[0, 2, 3]]).abs().max() > 0.02

    @pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
    def test_a_single_scored_image_is_left_out(self, scale_rewards):
        rewards = REWARDS.clone()
        rewards[[0, 1, 3]] = NAN
        values, is_valid, has_spread = group_advantages(rewards, 4, scale_rewards)
        assert not is_valid[:4].any() and is_valid[4:].all()
        assert torch.equal(values[:4], torch.zeros(4)) and has_spread.tolist() == [False, True, True]
        # It is out of the batch's statistics too
        without = group_advantages(REWARDS[4:], 4, scale_rewards).values
        torch.testing.assert_close(values[4:], without)
        # Twin: two scored images are compared
        rewards[0] = 0.1
        assert group_advantages(rewards, 4, scale_rewards).is_valid[:4].tolist() == [True, False, True, False]

    @pytest.mark.parametrize("reward", [0.2, 0.7, 21.37, 100.1])
    @pytest.mark.parametrize("num_generations", [12, 13, 16])
    def test_equal_rewards_teach_nothing_whatever_their_value(self, reward, num_generations):
        values, _, has_spread = group_advantages(torch.full((num_generations,), reward), num_generations)
        assert not has_spread.any() and torch.equal(values, torch.zeros(num_generations))
        # Twin: a small difference is one
        assert group_advantages(torch.tensor([0.5, 0.50001]), 2).has_spread.all()

    def test_clip(self):
        rewards = torch.tensor([0.0] * 99 + [1.0])
        free = group_advantages(rewards, 100).values
        assert free.max() > 9
        clipped = group_advantages(rewards, 100, advantage_clip=5.0).values
        assert clipped.max() == 5.0
        assert torch.equal(clipped[:99], free[:99])
        assert group_advantages(-rewards, 100, advantage_clip=5.0).values.min() == -5.0


class TestInformativeGroups:
    def test_by_deviation_and_mean(self):
        stds, means = GROUPS.std(1, ddof=1), GROUPS.mean(1)  # 0.34, 1.29, 0.85 and 0.45, 2.5, 7.125
        between = float(np.sort(stds)[:2].mean())
        assert informative_groups(REWARDS, 4, None, None).all()
        assert (
            informative_groups(REWARDS, 4, between, None).tolist() == (stds > between).tolist() == [False, True, True]
        )
        assert informative_groups(REWARDS, 4, None, 5.0).tolist() == (means < 5).tolist() == [True, True, False]
        assert informative_groups(REWARDS, 4, between, 5.0).tolist() == [False, True, False]

    def test_equal_and_solved(self):
        rewards = torch.tensor([0.7] * 4 + [0.7, 0.7, 0.7, 0.7001] + [1.0] * 4)
        assert informative_groups(rewards, 4, 0.0, None).tolist() == [False, True, False]
        assert informative_groups(rewards, 4, None, 1.0).tolist() == [True, True, False]

    def test_missing_rewards_are_no_values(self):
        rewards = torch.tensor([NAN, 0.4, 0.6, NAN, NAN, 1.0, NAN, NAN])
        # 0.14 of the two that were scored; with zeros in place of NaN it would be 0.3
        assert informative_groups(rewards, 4, 0.13, None).tolist() == [True, False]
        assert informative_groups(rewards, 4, 0.15, None).tolist() == [False, False]
        assert informative_groups(rewards, 4, None, 0.45).tolist() == [False, False]


class TestClippedSurrogate:
    LOW, HIGH = 0.1, 0.2
    RATIOS = (0.8, 0.95, 1.0, 1.1, 1.3)

    @pytest.fixture
    def inputs(self):
        """Every ratio with advantages of both signs and 0: log-probabilities (15,), float64."""
        ratio, advantages = torch.cartesian_prod(
            torch.tensor(self.RATIOS, dtype=torch.float64), torch.tensor([2.0, -3.0, 0.0], dtype=torch.float64)
        ).T
        old = torch.linspace(-2, 1, 15, dtype=torch.float64)
        return (old + torch.log(ratio)).requires_grad_(), old, advantages, ratio

    def test_closed_form(self, inputs):
        log_prob, old, advantages, ratio = inputs
        result = clipped_surrogate(log_prob, old, advantages, self.LOW, self.HIGH)
        r, a = ratio.numpy(), advantages.numpy()
        expected = -np.minimum(r * a, np.clip(r, 1 - self.LOW, 1 + self.HIGH) * a)
        assert not np.allclose(expected, -r * a)  # the clip has an effect
        np.testing.assert_allclose(result.loss.detach(), expected)
        np.testing.assert_allclose(result.ratio, r)
        assert not result.ratio.requires_grad and result.loss.shape == (15,)

    def test_gradient_is_zero_exactly_where_it_is_clipped(self, inputs):
        log_prob, old, advantages, ratio = inputs
        result = clipped_surrogate(log_prob, old, advantages, self.LOW, self.HIGH)
        (gradient,) = torch.autograd.grad(result.loss.sum(), log_prob)
        is_clipped = ((ratio < 1 - self.LOW) & (advantages < 0)) | ((ratio > 1 + self.HIGH) & (advantages > 0))
        assert is_clipped.sum() == 2
        torch.testing.assert_close(gradient, torch.where(is_clipped, 0.0, -ratio * advantages))
        assert torch.equal(gradient == 0, is_clipped | (advantages == 0))
        assert torch.equal(result.is_low_clipped | result.is_high_clipped, is_clipped)
        assert result.is_low_clipped.nonzero().tolist() == [[1]]  # ratio 0.8, advantage -3
        assert result.is_high_clipped.nonzero().tolist() == [[12]]  # ratio 1.3, advantage 2

    def test_low_and_high_are_not_exchanged(self):
        old = torch.zeros(2)
        log_prob = torch.log(torch.tensor([0.85, 1.15]))
        advantages = torch.tensor([-1.0, 1.0])
        narrow_low = clipped_surrogate(log_prob, old, advantages, 0.1, 0.2)
        narrow_high = clipped_surrogate(log_prob, old, advantages, 0.2, 0.1)
        torch.testing.assert_close(narrow_low.loss, torch.tensor([0.9, -1.15]))
        torch.testing.assert_close(narrow_high.loss, torch.tensor([0.85, -1.1]))
        assert narrow_low.is_low_clipped.tolist() == [True, False] and not narrow_low.is_high_clipped.any()
        assert narrow_high.is_high_clipped.tolist() == [False, True] and not narrow_high.is_low_clipped.any()


class TestGaussianKL:
    @pytest.mark.parametrize("shape", [(3, 7), (3, 5, 4)])
    def test_is_that_of_torch_distributions(self, shape):
        generator = torch.Generator().manual_seed(0)
        mean, reference = (torch.randn(shape, generator=generator) for _ in range(2))
        for std in (torch.tensor(0.3), torch.tensor([0.2, 0.5, 1.5]).view(3, *[1] * (len(shape) - 1))):
            full = std.expand(shape)
            expected = torch.distributions.kl_divergence(
                torch.distributions.Normal(mean, full), torch.distributions.Normal(reference, full)
            )
            kl = gaussian_kl(mean, reference, std)
            assert kl.shape == (3,) and kl.min() > 0.1
            torch.testing.assert_close(kl, expected.flatten(1).mean(1))
