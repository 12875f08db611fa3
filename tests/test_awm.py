# SPDX-License-Identifier: Apache-2.0
"""AWM in PaCoNFTTrainer: its log-probability, loss and old policy, resuming, memory plan and card."""

import pytest
import torch

from kill_runs import Run, relative_difference
from launching import fork_context
from paco_trl import PaCoNFTConfig
from paco_trl.planning import plan_memory
from paco_trl.rewards import redness_reward
from paco_trl.rollout import predict
from paco_trl.trainer.losses import matching_log_prob, velocity_error
from testing_utils import (
    LORA,
    check_planted_reward,
    count_images,
    entries_of,
    gradients,
    logs_with,
    recorded,
    velocity_with,
)


def waves():
    n = torch.arange(60.0, dtype=torch.float64)
    return n.sin().view(3, 5, 4), (0.7 * n).cos().view(3, 5, 4)


TIMES = torch.tensor([0.25, 0.6, 1.0], dtype=torch.float64)


class TestLogProb:
    # By `compute_log_prob_awm` of scxue/advantage_weighted_matching at be51372. `compute_weighted_log_prob` of
    # X-GenGroup/Flow-Factory gives the same in float32
    @pytest.mark.parametrize(
        ("weighting", "far", "near"),
        [
            (
                "t",
                [-0.2401977233792721, -0.5720484629481022, 0.0],
                [-1.1829571962492824e-09, -3.1254863281453363e-09, -5.3778656236850905e-09],
            ),
            (
                "ghuber",
                [-0.9868879307787398, -2.3639569811944963, 0.0],
                [-0.005175069474111449, -0.01289701462621976, -0.02176312078757818],
            ),
        ],
    )
    def test_numbers_of_the_published_code(self, weighting, far, near):
        velocity, target = waves()
        velocity[2] = target[2]
        for prediction, expected in ((velocity, far), (target + 1e-4 * velocity, near)):
            log_prob = matching_log_prob(prediction, target, TIMES, weighting)
            torch.testing.assert_close(log_prob, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)

    @pytest.mark.parametrize(("weighting", "power"), [("t", 1.0), ("ghuber", 0.25)])
    def test_gradient_is_the_closed_form(self, weighting, power):
        velocity, target = waves()
        velocity.requires_grad_()
        (gradient,) = torch.autograd.grad(matching_log_prob(velocity, target, TIMES, weighting).sum(), velocity)
        error = velocity_error(velocity, target).detach()
        scale = (TIMES * (error + 1e-10 * (power < 1)) ** (power - 1)).view(3, 1, 1)
        torch.testing.assert_close(gradient, -scale * 2 * (velocity.detach() - target) / 20)
        assert gradient.abs().max() > 1e-3

    def test_small_differences_of_bf16_velocities_are_kept(self):
        velocity, target = (each.to(torch.bfloat16) for each in waves())
        moved = velocity.clone()
        moved[0, 0, 0] += 2**-7
        moved[1, 0, 0] -= 2**-7
        change = matching_log_prob(moved, target, TIMES, "t") - matching_log_prob(velocity, target, TIMES, "t")
        assert change.dtype == torch.float64 and change[2] == 0
        assert (change[:2] != 0).all() and change.abs().max() < 1e-2


class TestLoss:
    @pytest.mark.parametrize(
        "settings",
        [
            {"awm_weighting": "t", "old_policy_beta": 0.0, "epsilon": 1e-3},
            {"old_policy_beta": 0.5, "beta": 0.3, "advantage_clip": 1.0},
        ],
        ids=str,
    )
    def test_loss_and_gradient_equal_a_direct_computation(self, make_nft, settings):
        trainer = make_nft(loss_type="awm", max_steps=3, **settings)
        trainer.train()
        entry = entries_of(trainer.round)[2]  # of the round's second optimizer step
        step, advantages = entry["step"], entry["advantages"]
        assert advantages.min() < 0 < advantages.max()
        own = gradients(trainer, trainer.compute_loss(trainer.model, entry))
        v = predict(trainer.model, step.calls, trainer.family, trainer.args.guidance_scale, step.sample)
        t, log_probs = step.times.double(), []
        for each in (v, step.rollout_velocity):
            error = ((each.double() - step.target.double()) ** 2).flatten(1).mean(1)
            log_probs.append(-t * error if "awm_weighting" in settings else -4 * t * (error**0.25))
        ratio = (log_probs[0] - log_probs[1]).exp()
        assert 1e-5 < (ratio - 1).abs().max() < 0.1
        epsilon, a = trainer.args.epsilon, advantages / trainer.args.advantage_clip
        loss = -torch.minimum(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a)
        if trainer.args.old_policy_beta > 0:
            old = velocity_with(trainer, step, trainer.old_policy.average)
            assert torch.equal(old, step.old_policy_velocity) and not torch.equal(old, step.rollout_velocity)
            loss = loss + 0.5 * ((v - old) ** 2).flatten(1).mean(1)
            with trainer.model.disable_adapter():
                loss = loss + 0.3 * ((v - velocity_with(trainer, step)) ** 2).flatten(1).mean(1)
        # 4 images and 2 times behind an optimizer step
        torch.testing.assert_close(gradients(trainer, loss.sum() / 8), own, rtol=1e-3, atol=1e-7)
        assert max(value.abs().max().item() for value in own.values()) > 5e-5

    def test_a_later_round_with_other_numbers_stops_the_run(self, make_nft):
        trainer = make_nft(loss_type="awm", max_steps=4)
        trainer.model.get_base_model().proj_out.register_forward_hook(
            lambda module, args, output: (
                output * 1.2 if torch.is_grad_enabled() and trainer.state.global_step >= 2 else output
            )
        )
        with pytest.raises(RuntimeError, match=r"update of a round .* differ by 20\.0%"):
            trainer.train()
        assert trainer.state.global_step == 2

    def test_the_ratio_is_1_before_the_first_update_and_clipped_after(self, make_nft):
        clipped = {}
        for epsilon in (1.0, 1e-6):
            trainer = make_nft(loss_type="awm", epsilon=epsilon, max_steps=4)
            trainer.train()
            approx_kl, clipped[epsilon] = logs_with(trainer, "approx_kl"), logs_with(trainer, "clip_ratio/region_mean")
            assert approx_kl[0] == approx_kl[2] == 0.0 and min(approx_kl[1], approx_kl[3]) > 1e-9
            low, high = logs_with(trainer, "clip_ratio/low_mean"), logs_with(trainer, "clip_ratio/high_mean")
            assert [a + b for a, b in zip(low, high, strict=True)] == pytest.approx(clipped[epsilon])
        assert clipped[1.0] == [0.0] * 4
        assert clipped[1e-6][0] == clipped[1e-6][2] == 0.0 and 0 < clipped[1e-6][1] < 1

    @pytest.mark.slow
    def test_planted_reward_rises_and_falls_with_its_sign_flipped(self, make_nft):
        settings = {
            "loss_type": "awm", "max_steps": 18, "learning_rate": 1.5e-2, "num_generations": 8, "advantage_clip": 1.0,
            "num_prompts_per_generation": 4, "per_device_train_batch_size": 16, "old_policy_beta": 0.1,
        }  # fmt: skip
        check_planted_reward(make_nft, **settings)


class TestOldPolicy:
    def test_restrains_and_does_not_generate(self, make_nft):
        trainer, record = recorded(make_nft, loss_type="awm", max_steps=4, old_policy_decay_rate=0.25)
        first, second = record.rounds[0][0]["step"], record.rounds[1][0]["step"]
        assert torch.equal(first.old_policy_velocity, first.rollout_velocity)  # both are the model's at the beginning
        assert torch.equal(velocity_with(trainer, second, record.weights[2]), second.rollout_velocity)
        assert torch.equal(
            velocity_with(trainer, second, record.averages["old_policy"][2]), second.old_policy_velocity
        )
        assert not torch.equal(second.rollout_velocity, second.old_policy_velocity)
        for name, value in record.averages["old_policy"][4].items():
            expected = 0.5 * record.averages["old_policy"][2][name] + 0.5 * record.weights[4][name]
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
        deviation = logs_with(trainer, "old_policy_deviation")
        assert deviation[0] == 0.0 < deviation[2]  # behind by a round
        assert logs_with(trainer, "old_policy_decay") == [0.0, 0.0, 0.5, 0.5]

    def test_is_kept_and_predicted_only_with_a_weight(self, make_nft):
        for beta, forwards in ((0.0, 4 + 2 * 2), (1.0, 4 + 2 * 3)):
            trainer = make_nft(loss_type="awm", old_policy_beta=beta)
            calls = count_images(trainer.model)
            trainer.train()
            assert sum(calls) == 8 * forwards  # 8 images, 4 steps, 2 times
            assert ("old_policy.safetensors" in trainer.averages) == (beta > 0)
            for key in ("old_policy_deviation", "old_policy_decay"):
                assert bool(logs_with(trainer, key)) == (beta > 0)

    def test_the_memory_plan_counts_it(self, make_config, prompts, tiny_flux):
        def train(**settings):
            args = make_config(PaCoNFTConfig, height=64, width=64, num_inference_steps=4, **settings)
            phases = plan_memory(str(tiny_flux), args, prompts, LORA).phases
            return {phase.name: phase.device for phase in phases}["train"]

        nft, awm, without = train(), train(loss_type="awm"), train(loss_type="awm", old_policy_beta=0.0)
        velocity = awm["latents and embeddings"] - nft["latents and embeddings"]
        assert velocity > 0 and without["latents and embeddings"] == nft["latents and embeddings"]
        differences = {name for name in awm if awm[name] != without[name]}
        assert len(differences) == 2 and "latents and embeddings" in differences  # and the average
        assert all(awm[name] == nft[name] for name in awm if name != "latents and embeddings")


@pytest.mark.slow
def test_two_processes_with_zero3_equal_one(tiny_flux, tmp_path):
    settings = {
        "loss_type": "awm", "sde_steps": [1], "num_sde_steps": None, "num_noise_levels": 2, "max_steps": 4,
        "reward_funcs": redness_reward, "eval_strategy": "no", "multi_objective_aggregation": "sum_then_normalize",
        "old_policy_decay_rate": 0.1, "num_prompts_per_generation": 2, "per_device_train_batch_size": 2,
    }  # fmt: skip
    one, zero3 = (
        Run(fork_context(), tiny_flux, tmp_path / str(n), processes=n, zero3=n == 2, **settings).state()
        for n in (1, 2)
    )
    for run in (one, zero3):
        trained = [entry for entry in run["history"] if "loss" in entry]
        assert trained[0]["approx_kl"] < 1e-9 and trained[2]["old_policy_deviation"] > 0
    assert relative_difference(one["adapter"], zero3["adapter"]) < 0.05
