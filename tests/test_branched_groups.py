# SPDX-License-Identifier: Apache-2.0
"""Branched groups (`branch_size`): images that share the steps up to their first stochastic one."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import test_families
from paco_trl.rollout import FAMILIES, FluxFamily, PipelinePolicy, SDESettings, keyed_generator, predict, replay
from paco_trl.rollout import policy as policy_module
from test_families import NUM_STEPS, build_policy, encode, moved_adapter, pixels


CASES = {
    name: test_families.CASES[name]
    for name in (
        "flux", "kontext", "sd3", "sd3, unguided", "flux2, editing", "klein", "z-image", "z-image, turbo", "qwen",
        "qwen-edit", "qwen-edit-plus", "qwen-2.1", "qwen-2.1, editing", "longcat", "longcat-edit", "ovis",
    )
}  # fmt: skip
FOUR_KEYS = [(42, 3, 0, 0, image) for image in range(4)]
BRANCHES, FULL = SDESettings((1, 2), 0.7, branch_size=2), SDESettings((1, 2), 0.7)


@dataclass
class Setup:
    """A policy, and the prompt and images of a case encoded for four images."""

    case: test_families.Case
    policy: PipelinePolicy
    arguments: dict[str, torch.Tensor]
    sources: list

    def generate(self, sde, keys=FOUR_KEYS, arguments=None, size=None):
        size = size or self.case.size
        return self.policy.generate(
            arguments or self.arguments, size, size, NUM_STEPS, self.case.guidance_scale, keys, sde,
            record_last_step=True, sources=self.sources,
        )  # fmt: skip

    def replay(self, record, sde=BRANCHES):
        return replay(self.policy.model, record, self.policy.family, self.case.guidance_scale, sde)

    def gradients(self, record, weights):
        parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        log_prob, _, _ = self.replay(record)
        return torch.autograd.grad((weights * log_prob).sum(), parameters, allow_unused=True)


@pytest.fixture(scope="module")
def setup_of(folder_of) -> Callable[[str], Setup]:
    setups = {}

    def of(name: str) -> Setup:
        if name not in setups:
            case = CASES[name]
            policy = build_policy(folder_of(case.builder, **case.options))
            arguments, sources = encode(policy, case)
            arguments = {name: tensor[:1].expand(4, *tensor.shape[1:]) for name, tensor in arguments.items()}
            setups[name] = Setup(case, policy, arguments, sources)
        return setups[name]

    return of


@pytest.fixture(params=CASES)
def setup(request, setup_of) -> Setup:
    return setup_of(request.param)


@pytest.fixture
def flux(setup_of) -> Setup:
    return setup_of("flux")


@pytest.fixture
def same_latents(monkeypatch) -> None:
    """The initial noise of the second and fourth image is that of the first and third, without branches."""

    def generator(*key):
        *rest, image, step = key
        return keyed_generator(*rest, image if step else image // 2 * 2, step)

    monkeypatch.setattr(policy_module, "keyed_generator", generator)


def rows_of_calls(policy) -> tuple[list[tuple[int, int]], Callable]:
    """Step and rows of each forward, as the transformer sees them."""
    seen = []

    def count(module, args, kwargs):
        rows = args[0] if args else kwargs.get("hidden_states", kwargs.get("x"))
        seen.append((policy.scheduler.next_step_index, len(rows)))

    return seen, policy.model.register_forward_pre_hook(count, with_kwargs=True).remove


def assert_close(values, expected) -> None:
    """Close, relative to the largest value of all."""
    size = max(each.abs().max() for each in expected if each is not None)
    assert size > 0
    for value, other in zip(values, expected, strict=True):
        assert (value is None) == (other is None)
        assert value is None or (value - other).abs().max() < 1e-4 * size


class TestEveryFamily:
    def test_the_prefix_is_made_once(self, setup):
        seen, stop = rows_of_calls(setup.policy)
        _, records = setup.generate(BRANCHES)
        stop()
        predictions = 2 if setup.case.is_guided and setup.case.calls == 1 else 1  # in a call
        rows = [2, 2, 4, 4]
        expected = [(step, rows[step] * predictions) for step in range(NUM_STEPS) for _ in range(setup.case.calls)]
        assert seen == expected
        assert [len(record.sample) for record in records] == [2, 4, 4]
        assert [len(record.prev_sample) for record in records] == [4, 4, 4]
        assert [record.branch_size for record in records] == [2, 1, 1]

        # A replay makes the calls of the prefix
        seen, stop = rows_of_calls(setup.policy)
        setup.replay(records[0])
        stop()
        assert [row for _, row in seen] == [2 * predictions] * setup.case.calls

    def test_the_ratio_is_exactly_one(self, setup):
        _, records = setup.generate(BRANCHES)
        for record in records[:2]:
            log_prob, _, _ = setup.replay(record)
            assert log_prob.requires_grad and len(log_prob.unique()) == 4
            assert torch.equal(log_prob, record.log_prob)
        with moved_adapter(setup.policy):
            for record in records[:2]:
                assert (setup.replay(record)[0] - record.log_prob).abs().max() > 1e-5

    def test_images_are_those_of_the_unbranched_pipeline(self, setup, same_latents):
        images, records = setup.generate(BRANCHES)
        expected, full = setup.generate(FULL)
        for record, other in zip(records, full, strict=True):
            # A forward of other rows rounds in another way
            torch.testing.assert_close(record.prev_sample, other.prev_sample, rtol=1e-4, atol=1e-4)
        assert np.abs(pixels(images).astype(int) - pixels(expected)).max() <= 1
        # Images of a branch begin alike and end differently
        torch.testing.assert_close(full[0].sample[0], full[0].sample[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(records[0].sample, full[0].sample[::2], rtol=1e-5, atol=1e-5)
        assert ((records[-1].prev_sample[::2] - records[-1].prev_sample[1::2]).flatten(1).std(dim=1) > 0.1).all()

    def test_the_gradient_is_that_of_the_unbranched_replay(self, setup, same_latents):
        _, (branched, *_) = setup.generate(BRANCHES)
        _, (full, *_) = setup.generate(FULL)
        full = replace(full, prev_sample=branched.prev_sample)  # the same images
        weights = torch.tensor([1.0, -0.4, 0.3, 0.8])
        expected = setup.gradients(full, weights)
        assert_close(setup.gradients(branched, weights), expected)
        # Each image has its own part
        with pytest.raises(AssertionError):
            assert_close(setup.gradients(branched, weights.flip(0)), expected)


class TestFlux:
    def test_the_gradient_is_the_sum_of_advantages_times_noise(self, flux):
        """Unclipped and on policy: the gradient of mean(A * ratio) is that of mu along sum(A_i eps_i)."""
        _, (record, *_) = flux.generate(SDESettings((1,), 0.7, branch_size=4))
        assert len(record.sample) == 1
        advantages = torch.tensor([1.0, -0.4, 0.3, 0.8])
        gradients = flux.gradients(record, advantages / 4)  # the ratio is 1, so its gradient is that of log p

        noise = torch.stack(
            [torch.randn(record.sample.shape[1:], generator=keyed_generator(*k, 2)) for k in FOUR_KEYS]
        )
        t, dt = record.sigma, record.sigma_next - record.sigma
        s = 0.7 * (t / (1 - t)) ** 0.5
        std, slope = s * (-dt) ** 0.5, (1 + s**2 * (1 - t) / (2 * t)) * dt  # slope = d mu / d v
        credit = torch.einsum("i,i...->...", advantages, noise) * slope / (std * noise[0].numel()) / 4
        parameters = [p for p in flux.policy.model.parameters() if p.requires_grad]
        velocity = predict(flux.policy.model, record.calls, flux.policy.family, 3.5, record.sample)
        expected = torch.autograd.grad(velocity, parameters, credit[None], allow_unused=True)
        assert_close(gradients, expected)

    def test_branches_have_their_own_latents(self, flux):
        _, (record, *_) = flux.generate(BRANCHES)
        _, (first, *_) = flux.generate(SDESettings((0,), 0.7, branch_size=2))
        assert (first.sample[0] - first.sample[1]).std() > 0.5
        assert (record.sample[0] - record.sample[1]).std() > 0.1
        _, (own, *_) = flux.generate(SDESettings((0,), 0.7))
        assert torch.equal(first.sample, own.sample[::2]) and not torch.equal(own.sample[0], own.sample[1])

    def test_nothing_of_the_other_rows_is_kept(self, flux):
        """A view would keep them in memory, and in a checkpoint."""
        _, (record, *_) = flux.generate(SDESettings((1,), 0.7, branch_size=4))
        (call,) = record.calls
        for tensor in (record.sample, call["hidden_states"], call["timestep"]):
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        # The prompt is the one that was passed
        for argument, name in (
            ("prompt_embeds", "encoder_hidden_states"),
            ("pooled_prompt_embeds", "pooled_projections"),
        ):
            assert call[name].data_ptr() == flux.arguments[argument].data_ptr()

    def test_position_ids_are_not_narrowed(self, flux, monkeypatch):
        """At 8 x 8 pixels there are four tokens, as many as images."""
        _, records = flux.generate(BRANCHES, size=8)
        assert [len(record.calls[0]["img_ids"]) for record in records[:2]] == [4, 4]
        monkeypatch.setattr(FluxFamily, "unbatched_arguments", ())
        with pytest.raises(RuntimeError, match="argument `img_ids`.*add it to `unbatched_arguments` of FluxFamily"):
            flux.generate(BRANCHES, size=8)

    def test_what_is_not_shared_is_refused(self, flux):
        arguments = dict(flux.arguments)
        arguments["prompt_embeds"] = arguments["prompt_embeds"].clone()
        arguments["prompt_embeds"][3] += 1
        flux.generate(FULL, arguments=arguments)
        message = "`branch_size` is 2, but.*argument `encoder_hidden_states`.*FluxPipeline makes"
        with pytest.raises(RuntimeError, match=message):
            flux.generate(BRANCHES, arguments=arguments)
        arguments["prompt_embeds"][2:] = torch.nan  # which differs from itself
        with pytest.raises(RuntimeError, match=r"image\(s\) \[2, 3\].*not finite after the last"):
            flux.generate(BRANCHES, arguments=arguments)

    @pytest.mark.parametrize(("sde", "keys"), [(BRANCHES, FOUR_KEYS[:3]), (replace(BRANCHES, steps=()), FOUR_KEYS)])
    def test_batches_without_full_branches_are_refused(self, flux, sde, keys):
        arguments = {name: tensor[: len(keys)] for name, tensor in flux.arguments.items()}
        with pytest.raises(ValueError, match=f"`branch_size` is 2.*batch of {len(keys)} images.*stochastic step"):
            flux.generate(sde, keys, arguments)
        flux.generate(replace(sde, branch_size=1), keys, arguments)


class TestTrainer:
    @pytest.mark.parametrize(
        "settings",
        [
            {"loss_type": "grpo_guard", "epsilon": 1e-2},
            {"beta": 0.1, "norm_penalty": 0.1},
            {"offload_embeddings": True, "sde_steps": [1, 2]},
            {"branch_size": 4},
        ],
        ids=str,
    )
    def test_trains(self, make_trainer, settings):
        trainer = make_trainer(**{"branch_size": 2, "gradient_checkpointing": False, **settings})
        branch = trainer.args.branch_size
        seen, _ = rows_of_calls(trainer.policy)
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert [logs[0][f"ratio_deviation_on_policy/step_{step}"] for step in trainer.args.sde_steps] == [0.0] * (
            len(trainer.args.sde_steps)
        )
        assert logs[1]["ratio_deviation/step_1"] > 0 and logs[0]["grad_norm"] > 0
        # A round of four micro-batches of four images, generated in four steps
        prefix, first = 4 // branch, len(trainer.args.sde_steps) - 1
        generated = [rows for _, rows in seen[:16]]
        assert generated == [prefix, prefix, 4, 4] * 4
        trained = [rows for _, rows in seen[16:]]
        each = ([prefix] + [4] * first) * 4
        assert trained == (each if not trainer.args.beta else [rows for rows in each for _ in range(2)])

    @pytest.mark.parametrize(
        ("aggregation", "expected"),
        [
            ("sum_then_normalize", {1: [-0.375, -0.275, 0.225, 0.425], 2: [-0.1, -0.05, 0.05, 0.1]}),
            ("rank_then_sum", {1: [-0.5, -0.1667, 0.1667, 0.5], 2: [-0.5, 0.5]}),
        ],
        ids=["scores", "ranks"],
    )
    def test_images_are_compared_within_their_branch(self, make_trainer, aggregation, expected):
        """What differs between branches is their initial noise, which has no gradient."""

        def by_place(prompts, completions, **kwargs):
            return [(0.1, 0.2, 0.7, 0.9)[place % 4] for place in range(len(completions))]

        for branch, values in expected.items():
            settings = {"branch_size": branch, "scale_rewards": "none", "multi_objective_aggregation": aggregation}
            trainer = make_trainer(reward_funcs=by_place, **settings)
            trainer.state.max_steps = 2
            buffer = trainer._generate_and_score_completions(0)
            found = {round(value, 4) for entry in buffer.entries for value in entry["advantages"].tolist()}
            assert sorted(found) == values
            assert buffer.metrics["rewards/by_place/mean"] == pytest.approx(0.475)  # of the scores

    def test_an_unlisted_pipeline_is_refused(self, make_trainer, monkeypatch):
        monkeypatch.delitem(FAMILIES, "FluxPipeline")
        with pytest.warns(UserWarning), pytest.raises(ValueError, match="at most 1 with.*and `branch_size=1`"):
            make_trainer(branch_size=2)
