# SPDX-License-Identifier: Apache-2.0
"""The aggregation of rewards: closed forms, missing values, log-taming's true effect."""

import importlib.util
import math

import pytest
import torch
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

from paco_trl.rewards import AggregationDetails, ClipTReward, aggregate_rewards
from paco_trl.rewards.aggregation import coefficient_of_variation, log_tame, normalize_in_groups, win_rates
from paco_trl.utils.deepspeed import without_zero3_init


NAN = float("nan")
METHODS = ["sum_then_normalize", "normalize_then_sum", "rank_then_sum", "log_tamed", "geometric_mean"]


def uniform(low, high, count):
    """`count` midpoints of [low, high]: their moments are those of the uniform distribution up to 1 / count^2."""
    return low + (high - low) * (torch.arange(count, dtype=torch.float64) + 0.5) / count


def every_pair(first, second):
    """All combinations of two lists of values as rows (N, 2): two exactly uncorrelated rewards."""
    return torch.cartesian_prod(first, second)


def variance_of_log(span):
    """Var[log(1 + R)] for R uniform in [0, span], from the integrals of log u and log^2 u over [1, 1 + span]."""
    u = 1 + span
    mean = (u * math.log(u) - u + 1) / span
    mean_square = (u * (math.log(u) ** 2 - 2 * math.log(u) + 2) - 2) / span
    return mean_square - mean**2


class TestCoefficientOfVariation:
    def test_is_population_std_over_mean(self):
        # Reward 0: 1, 5 -> mean 3, population std 2 (the unbiased one would be sqrt 8). Reward 1: 10, 10 -> 0.
        assert coefficient_of_variation(torch.tensor([[1.0, 10.0], [5.0, 10.0]])) == pytest.approx([2 / 3, 0.0])

    def test_leaves_missing_values_out(self):
        h = coefficient_of_variation(torch.tensor([[1.0, NAN], [NAN, NAN], [3.0, NAN]]))
        assert h == [pytest.approx(0.5), None]

    @pytest.mark.parametrize("values", [[-1.0, -3.0], [-1.0, 1.0], [0.0, 0.0], [-1e-6, 3.0]])
    def test_is_undefined_for_negative_values_and_for_zeros(self, values):
        assert coefficient_of_variation(torch.tensor(values).unsqueeze(1)) == [None]


class TestFormulas:
    def test_log_tame(self):
        rewards = torch.tensor([[0.0, 0.0], [math.e - 1, math.e - 1], [NAN, 3.0]])
        tamed = log_tame(rewards, [True, False])
        expected = torch.tensor([[0.0, 0.0], [1.0, math.e - 1], [NAN, 3.0]])
        torch.testing.assert_close(tamed, expected, equal_nan=True)

    def test_normalize_in_groups_with_missing_values(self):
        # Three groups of three: two values, one value, none.
        rewards = torch.tensor([1.0, NAN, 3.0, NAN, 7.0, NAN, NAN, NAN, NAN])
        score = 1 / (math.sqrt(2) + 1e-4)
        expected = torch.tensor([-score, NAN, score, NAN, 0.0, NAN, NAN, NAN, NAN])
        torch.testing.assert_close(normalize_in_groups(rewards, 3), expected, equal_nan=True)


class TestAggregateRewards:
    def test_sum_then_normalize(self):
        aggregate, details = aggregate_rewards(torch.tensor([[1.0, 10.0], [3.0, 30.0]]), [2.0, 0.5], METHODS[0])
        torch.testing.assert_close(aggregate, torch.tensor([7.0, 21.0]))
        assert details.coefficient_of_variation == pytest.approx([0.5, 0.5])
        assert details.tamed == [False, False]  # h_k exceeds the threshold, but the method does not tame
        assert details.threshold == 0.2

    def test_normalize_then_sum(self):
        # Column 0: (1, 3) and (5, 5); column 1: (30, 10) and (0, 4).
        rewards = torch.tensor([[1.0, 30.0], [3.0, 10.0], [5.0, 0.0], [5.0, 4.0]])
        aggregate, _ = aggregate_rewards(rewards, [1.0, 2.0], "normalize_then_sum", num_generations=2)
        first, second, third = (gap / (gap * math.sqrt(2) + 1e-4) for gap in (1, 10, 2))
        expected = torch.tensor([-first + 2 * second, first - 2 * second, -2 * third, 2 * third])
        torch.testing.assert_close(aggregate, expected)

    def test_rank_then_sum(self):
        # Column 0 has ties and an outlier, column 1 another order and scale in the second group
        rewards = torch.tensor(
            [[1.0, 0.1], [3.0, 0.2], [3.0, 0.3], [99.0, 0.4], [0.0, 7.0], [0.0, 5.0], [0.0, 1.0], [0.0, 3.0]]
        )
        aggregate, details = aggregate_rewards(rewards, [1.0, 2.0], "rank_then_sum", num_generations=4)
        first = torch.tensor([0, 0.5, 0.5, 1, 0.5, 0.5, 0.5, 0.5])
        second = torch.tensor([0, 1, 2, 3, 3, 2, 0, 1]) / 3
        torch.testing.assert_close(aggregate, first + 2 * second)
        assert details.tamed == [False, False] and details.coefficient_of_variation[0] > 1  # of the scores
        # Only the order counts; twin: the sum follows the outlier
        other = torch.stack([rewards[:, 0] ** 3, torch.exp(rewards[:, 1])], dim=1)
        assert torch.equal(aggregate_rewards(other, [1.0, 2.0], "rank_then_sum", num_generations=4)[0], aggregate)
        assert not torch.equal(*(aggregate_rewards(each, [1.0, 2.0], METHODS[0])[0] for each in (rewards, other)))

    def test_missing_rewards_are_not_compared(self):
        rates = win_rates(torch.tensor([[2.0], [NAN], [1.0], [3.0], [NAN], [NAN], [5.0], [NAN]]), 4).flatten()
        torch.testing.assert_close(rates[:4], torch.tensor([0.5, NAN, 0, 1]), equal_nan=True)
        assert rates[4:].isnan().tolist() == [True, True, False, True] and rates[6] == 0  # it is left out later
        # Twin: as a score of 0 it would be beaten by all
        assert win_rates(torch.tensor([[2.0], [0.0], [1.0], [3.0]]), 4).flatten().tolist() != rates[:4].tolist()

    def test_log_tamed(self):
        # h = 1 for (0, 3), mean 1.5; h = 0.0667 for (0.7, 0.8).
        rewards = torch.tensor([[0.0, 0.7], [3.0, 0.8]])
        aggregate, details = aggregate_rewards(rewards, [2.0, 1.0], "log_tamed")
        torch.testing.assert_close(aggregate, torch.tensor([0.7, 2 * math.log(4) + 0.8]))
        assert details.coefficient_of_variation == pytest.approx([1.0, 0.05 / 0.75], rel=1e-5)
        assert details.tamed == [True, False]

    def test_geometric_mean(self):
        aggregate, _ = aggregate_rewards(torch.tensor([[2.0, 32.0], [0.0, 1.0]]), [3.0, 1.0], "geometric_mean")
        torch.testing.assert_close(aggregate, torch.tensor([4.0, 0.0]))

    @pytest.mark.parametrize("method", METHODS)
    def test_a_missing_reward_makes_its_row_missing_unless_its_weight_is_zero(self, method):
        rewards = torch.tensor([[0.1, 0.5], [0.9, NAN], [0.2, 0.6], [0.3, 0.9]])
        aggregate, _ = aggregate_rewards(rewards, [1.0, 1.0], method, num_generations=2)
        assert aggregate.isnan().tolist() == [False, True, False, False]
        rewards[2:, 1] = torch.tensor([0.0, 900.0])
        aggregate, details = aggregate_rewards(rewards, [1.0, 0.0], method, "mean", num_generations=2)
        alone, alone_details = aggregate_rewards(rewards[:, :1], [1.0], method, "mean", num_generations=2)
        torch.testing.assert_close(aggregate, alone)
        assert details.threshold == alone_details.threshold  # its h_k does not shift the others' threshold
        assert details.coefficient_of_variation[1] > 1 and details.tamed[1] is False  # but is reported
        rewards[2, 1] = -6.0  # out of the range of some methods
        torch.testing.assert_close(aggregate_rewards(rewards, [1.0, 0.0], method, "mean", 2)[0], alone)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_does_not_change_its_input_and_computes_in_float32_or_better(self, method, dtype):
        rewards = torch.tensor([[1.0, 4.0], [9.0, 2.0]]).to(dtype)
        before, weights = rewards.clone(), torch.tensor([1.0, 2.0])
        aggregate, _ = aggregate_rewards(rewards, weights, method, num_generations=2)
        assert torch.equal(rewards, before) and weights.tolist() == [1, 2]
        assert aggregate.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)

    def test_taming_is_over_all_samples_and_normalisation_over_a_group(self):
        # Within each group the reward is constant, so its h_k is 0 there; over all samples it is 0.5.
        rewards = torch.tensor([[1.0], [1.0], [3.0], [3.0]])
        assert coefficient_of_variation(rewards[:2]) == coefficient_of_variation(rewards[2:]) == [0.0]
        aggregate, details = aggregate_rewards(rewards, [1.0], "log_tamed", num_generations=2)
        assert details.coefficient_of_variation == pytest.approx([0.5])
        torch.testing.assert_close(aggregate, torch.log1p(rewards[:, 0]))
        # Twin: one group alone is not tamed, which is why the samples of all processes are gathered first.
        assert aggregate_rewards(rewards[:2], [1.0], "log_tamed", num_generations=2)[1].tamed == [False]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"method": "mean"}, "geometric_mean"),
            ({"weights": [1.0]}, "weight"),
            ({"rewards": torch.tensor([[1.0, 1.0], [1.0, math.inf]])}, r"rewards\[1, 1\]"),
            ({"threshold": "median"}, "'median'"),
            ({"method": "rank_then_sum"}, "`num_generations`"),
            ({"num_generations": 3}, "`num_generations` is 3, but 2 rows"),
            ({"num_generations": 2, "required": [False]}, r"`required` is \[False\]"),
            ({"method": "geometric_mean", "weights": [1.0, -1.0]}, ">= 0"),
            ({"method": "geometric_mean", "rewards": torch.tensor([[1.0, 1.0], [-0.1, 1.0]])}, r"rewards\[1, 0\]"),
        ],
    )
    def test_errors(self, changes, message):
        arguments = {"rewards": torch.rand(2, 2), "weights": [1.0, 1.0], "method": "log_tamed", "threshold": 0.2}
        aggregate_rewards(**arguments)  # fine without the change
        with pytest.raises(ValueError, match=message):
            aggregate_rewards(**(arguments | changes))


class TestOptionalRewards:
    """Two groups of three; the second reward is missing for one image of the first group."""

    REWARDS = torch.tensor([[0.2, 0.9], [0.25, NAN], [0.3, 0.3], [0.5, 0.2], [0.6, 0.4], [0.4, 0.6]])

    @staticmethod
    def order(aggregate):
        return aggregate.argsort().tolist()

    @pytest.mark.parametrize("method", METHODS)
    def test_its_group_is_compared_without_it(self, method):
        aggregate, _ = aggregate_rewards(self.REWARDS, [1.0, 2.0], method, num_generations=3, required=[True, False])
        assert aggregate.isfinite().all()
        # By the first reward alone, although the second is at its best for the first image
        assert self.order(aggregate[:3]) == [0, 1, 2]
        with_it, _ = aggregate_rewards(self.REWARDS, [1.0, 2.0], method, num_generations=3)
        assert self.order(with_it[[0, 2]]) == [1, 0]  # the effect: where it counts, the order is another
        # The group that has it is as it was
        torch.testing.assert_close(aggregate[3:], with_it[3:])

    @pytest.mark.parametrize("method", METHODS)
    def test_a_reward_that_no_image_has_changes_nothing(self, method):
        rewards = self.REWARDS.clone()
        rewards[:, 1] = NAN
        aggregate, details = aggregate_rewards(rewards, [1.0, 1.0], method, num_generations=3, required=[True, False])
        alone, _ = aggregate_rewards(rewards[:, :1], [1.0], method, num_generations=3)
        assert self.order(aggregate) == self.order(alone) and details.share == [1.0, 0.0]

    def test_another_required_reward_still_excludes(self):
        rewards = self.REWARDS.clone()
        rewards[4, 0] = NAN
        aggregate, _ = aggregate_rewards(rewards, [1.0, 1.0], METHODS[0], num_generations=3, required=[True, False])
        assert aggregate.isnan().nonzero().flatten().tolist() == [4]

    def test_groups_are_needed(self):
        with pytest.raises(ValueError, match="optional rewards require groups"):
            aggregate_rewards(self.REWARDS, [1.0, 1.0], "log_tamed", required=[True, False])


class TestShares:
    def test_of_the_spread_within_groups(self):
        # Spreads within groups of 2: 1 and 3; between the groups the first reward differs by far more
        rewards = torch.tensor([[0.0, 0.0], [2.0, 6.0], [100.0, 6.0], [102.0, 0.0]])

        def share(weights, **kwargs):
            return aggregate_rewards(rewards, weights, "sum_then_normalize", **kwargs)[1].share

        assert share([1.0, 1.0], num_generations=2) == pytest.approx([0.25, 0.75])
        assert share([3.0, 1.0], num_generations=2) == pytest.approx([0.5, 0.5])
        assert share([1.0, 1.0])[0] > 0.9  # without groups the difference between them counts

    def test_undefined_without_spread(self):
        _, details = aggregate_rewards(torch.ones(4, 2), [1.0, 1.0], "log_tamed", num_generations=2)
        assert details.share == [None, None]


class TestLogTaming:
    """What log-taming does to rewards of planted ranges: its true effect, by closed forms."""

    # Beside a narrow reward in [0.7, 0.8], taming cuts the variance of one in [0, 20] 65 times, and it still makes 99.8 %
    # of the aggregate's: log(1 + R) shrinks a spread, it does not equalise spreads. Beside [3, 5]: from 99 % to 61 %.
    @pytest.mark.parametrize(
        ("low", "high", "before", "after"), [(0.7, 0.8, 0.99998, 0.9984), (3.0, 5.0, 0.9901, 0.606)]
    )
    def test_the_share_of_a_dominating_reward_falls_by_the_computed_factor(self, low, high, before, after):
        rewards = every_pair(uniform(0, 20, 400), uniform(low, high, 40))
        h = [1 / math.sqrt(3), (high - low) / math.sqrt(12) / ((low + high) / 2)]  # uniform: std = range / sqrt(12)
        plain, _ = aggregate_rewards(rewards, [1.0, 1.0], "sum_then_normalize")
        tamed, details = aggregate_rewards(rewards, [1.0, 1.0], "log_tamed")
        assert details.coefficient_of_variation == pytest.approx(h, rel=1e-3)
        assert details.tamed == [True, False]
        assert 20**2 / 12 / variance_of_log(20) == pytest.approx(65, abs=0.5)
        for aggregate, column, variance, rounded in (
            (plain, rewards[:, 0], 20**2 / 12, before),
            (tamed, torch.log1p(rewards[:, 0]), variance_of_log(20), after),
        ):
            # Of the aggregate's variance; the other reward is uncorrelated
            share = torch.corrcoef(torch.stack([aggregate, column]))[0, 1].item() ** 2
            assert share == pytest.approx(variance / (variance + (high - low) ** 2 / 12), rel=1e-3)
            assert share == pytest.approx(rounded, abs=1e-3)

    def test_on_unit_range_it_cuts_spread_by_less_than_two(self):
        rewards = every_pair(uniform(0, 1, 400), uniform(0.7, 0.8, 40))
        aggregate, details = aggregate_rewards(rewards, [1.0, 1.0], "log_tamed")
        assert details.tamed == [True, False]
        factor = (rewards[:, 0].std() / (aggregate - rewards[:, 1]).std()).item()
        assert factor == pytest.approx(math.sqrt(1 / 12 / variance_of_log(1)), rel=1e-3)
        assert factor == pytest.approx(1.46, abs=0.01)

    def test_threshold_as_a_number(self):
        rewards = torch.tensor([[1.0], [3.0]])  # h = 0.5
        # Above the threshold; twins: below it, and at it
        for threshold, is_tamed in ((0.49, True), (0.51, False), (0.5, False)):
            aggregate, details = aggregate_rewards(rewards, [1.0], "log_tamed", threshold=threshold)
            assert details == AggregationDetails([0.5], [is_tamed], threshold, [1.0])
            torch.testing.assert_close(aggregate, torch.log1p(rewards[:, 0]) if is_tamed else rewards[:, 0])

    def test_threshold_as_the_mean(self):
        # h = 0.1, 0.2, 0.9 (values m - s, m + s), and an undefined one: mean 0.4.
        rewards = torch.tensor([[0.9, 0.8, 0.1, -0.5], [1.1, 1.2, 1.9, -0.5]])
        weights = [1.0, 1.0, 1.0, 1.0]
        _, details = aggregate_rewards(rewards, weights, "log_tamed", "mean")
        assert details.coefficient_of_variation == [*(pytest.approx(h) for h in (0.1, 0.2, 0.9)), None]
        assert details.threshold == pytest.approx(0.4)
        assert details.tamed == [False, False, True, False]

    def test_of_a_reward_around_zero_rounding_decides_nothing(self):
        """One that compares the images of a prompt: the mean of each group is 0, up to rounding."""
        beside = torch.rand(64, generator=torch.Generator().manual_seed(0))
        means = []
        for seed in range(8):
            values = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)) * 0.3
            centered = (values - values.mean(dim=1, keepdim=True)).flatten()
            means.append(centered.mean().item())
            rewards = torch.stack([centered, beside], dim=1)
            for threshold in (0.2, "mean"):
                aggregate, details = aggregate_rewards(rewards, [1.0, 0.0], "log_tamed", threshold)
                torch.testing.assert_close(aggregate, centered)
                assert details.coefficient_of_variation[0] is None and details.tamed == [False, False]
        assert max(means) > 0 > min(means)  # the effect: what a rule by the mean would go by

    @pytest.mark.parametrize("value", [-1e-6, -0.9, -1.0, -7.0])
    def test_a_negative_value_leaves_the_reward_as_it_is(self, value):
        rewards = torch.tensor([[0.5, 9.0], [5.0, value]])
        aggregate, details = aggregate_rewards(rewards, [1.0, 1.0], "log_tamed")
        torch.testing.assert_close(aggregate, torch.log1p(rewards[:, 0]) + rewards[:, 1])
        assert details.tamed == [True, False]
        # Twin: from 0 up it is tamed, whatever is missing
        rewards = torch.tensor([[0.5, 9.0], [5.0, 0.0], [1.0, NAN]])
        assert aggregate_rewards(rewards, [1.0, 1.0], "log_tamed")[1].tamed == [True, True]


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")
def test_a_live_zero3_config_is_out_of_sight_and_comes_back(tiny_clip):
    from transformers.integrations import deepspeed as hf_deepspeed

    config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    try:
        assert is_deepspeed_zero3_enabled()  # the effect exists: from_pretrained would partition
        with without_zero3_init():
            assert not is_deepspeed_zero3_enabled()
            with without_zero3_init():  # nested: nothing to hide, nothing to restore
                assert not is_deepspeed_zero3_enabled()
            assert not is_deepspeed_zero3_enabled()
        assert hf_deepspeed._hf_deepspeed_config_weak_ref() is config

        with pytest.raises(RuntimeError, match="inside"), without_zero3_init():
            raise RuntimeError("inside")
        assert hf_deepspeed._hf_deepspeed_config_weak_ref() is config

        reward = ClipTReward(tiny_clip, device="cpu")
        assert is_deepspeed_zero3_enabled()
        assert all(parameter.numel() > 0 for parameter in reward.model.parameters())
        assert not any(hasattr(parameter, "ds_id") for parameter in reward.model.parameters())
    finally:
        hf_deepspeed.unset_hf_deepspeed_config()
