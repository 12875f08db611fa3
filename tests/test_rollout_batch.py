# SPDX-License-Identifier: Apache-2.0
"""Batches of generation that are larger than those of training (`per_device_rollout_batch_size`)."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

import test_families
from paco_trl.rollout import FAMILIES, RecordingPipeline, SDESettings, compute_log_prob, keyed_generator, predict
from paco_trl.rollout.recording_pipeline import split_step
from test_families import NUM_STEPS, build_policy, encode
from testing_utils import entries_of


TOLERANCE = 1e-5  # a tenth of the default `epsilon`
CASES = {
    name: test_families.CASES[name]
    for name in (
        "flux", "kontext", "sd3", "sd3, unguided", "flux2, editing", "klein", "z-image", "z-image, turbo", "qwen",
        "qwen-edit", "qwen-edit-plus", "qwen-2.1", "qwen-2.1, editing", "longcat", "longcat-edit", "ovis",
    )
}  # fmt: skip
FOUR_KEYS = [(42, 3, 0, 0, image) for image in range(4)]
SDE = SDESettings((1, 2), 0.7)


@dataclass
class Setup:
    """A policy, and the prompt and images of a case encoded for four images."""

    case: test_families.Case
    policy: RecordingPipeline
    arguments: dict[str, torch.Tensor]
    sources: list

    def generate(self, sde, keys=FOUR_KEYS, arguments=None, size=None):
        size = size or self.case.size
        return self.policy.generate(
            arguments or self.arguments, size, size, NUM_STEPS, self.case.guidance_scale, keys, sde,
            record_last_step=True, sources=self.sources,
        )  # fmt: skip

    def replay(self, record, sde=SDE):
        policy, guidance_scale = self.policy, self.case.guidance_scale
        velocity = predict(policy.model, record.calls, policy.family, guidance_scale, record.sample)
        return compute_log_prob(velocity, record, sde)

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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("flux", "sd3") else pytest.mark.slow) for name in CASES]
)
def test_the_parts_are_what_micro_batches_record(setup_of, name):
    setup = setup_of(name)
    _, records = setup.generate(SDE)
    few = {name: tensor[:2] for name, tensor in setup.arguments.items()}
    for part, keys in enumerate((FOUR_KEYS[:2], FOUR_KEYS[2:])):
        _, own_records = setup.generate(SDE, keys, few)
        for record, own in zip(records, own_records, strict=True):
            split = split_step(record, 2, setup.policy.family)[part]
            torch.testing.assert_close(vars(split), vars(own), rtol=1e-4, atol=1e-4)
            if own.log_prob is not None:
                log_prob, _, _ = setup.replay(split)
                assert ((log_prob - split.log_prob).exp() - 1).abs().max() < TOLERANCE
                assert (log_prob.flip(0) - split.log_prob).abs().max() > 1e-3  # that of the other image
            if name == "flux":  # not copied
                prompts = split.calls[0]["encoder_hidden_states"]
                assert prompts.data_ptr() == setup.arguments["prompt_embeds"].data_ptr()


@pytest.mark.parametrize(
    "settings",
    [
        {"sde_steps": [1, 2], "loss_type": "grpo_guard", "epsilon": 1e-2, "offload_embeddings": True},
        {"per_device_train_batch_size": 2},
        {"per_device_rollout_batch_size": 8, "optimizer_steps_per_generation": 1, "beta": 0.1},
    ],
    ids=str,
)
def test_trains(make_trainer, settings):
    usual = {"per_device_train_batch_size": 1, "per_device_rollout_batch_size": 4, "gradient_checkpointing": False}
    trainer = make_trainer(**usual | settings)
    args, seen = trainer.args, rows_of_calls(trainer.policy)[0]
    trainer.train()
    batch = args.per_device_rollout_batch_size
    generated = [batch] * (4 * 16 // batch)
    assert [rows for _, rows in seen[: len(generated)]] == generated
    assert {rows for _, rows in seen[len(generated) :][:4]} == {args.per_device_train_batch_size}
    log, *_ = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log["ratio_deviation_on_policy/step_1"] < TOLERANCE and log["grad_norm"] > 0


def test_images_and_weights_are_those_of_the_training_batch(make_trainer):
    found = []
    for batch in (2, None, 8):
        settings = {"optimizer_steps_per_generation": 1, "max_steps": 1, "learning_rate": 1e-3}
        trainer = make_trainer(per_device_train_batch_size=2, per_device_rollout_batch_size=batch, **settings)
        trainer.train()
        samples = [sample for batch in trainer.round.micro_batches for sample in batch.samples]
        places = torch.tensor([sample.completion.index for sample in samples]).argsort()
        entries = entries_of(trainer.round)
        assert not any(batch.steps for batch in trainer.round.local_batches)  # of copies only the parts are kept
        columns = [[getattr(entry["step"], name) for entry in entries] for name in ("prev_sample", "log_prob")]
        columns.append([entry["advantages"] for entry in entries])
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters() if p.requires_grad])
        found.append([*(torch.cat(column)[places] for column in columns), weights])
    assert all(map(torch.equal, found[0], found[1]))
    for other in found[2:]:
        torch.testing.assert_close(other[:2], found[0][:2], rtol=1e-3, atol=1e-4)
        # A pixel may round to the next of its 256 values, and a tiny gradient to the other sign
        torch.testing.assert_close(other[2], found[0][2], rtol=0, atol=1e-2)
        assert (other[3] - found[0][3]).abs().mean() < 1e-5  # a weight moves by 1e-3
    assert (found[0][0][0] - found[0][0][1]).std() > 0.1  # in the order of images, not of batches


def test_what_a_pipeline_or_data_cannot_do(make_trainer, prompts, monkeypatch):
    settings = {"per_device_train_batch_size": 1, "optimizer_steps_per_generation": 1}
    make_trainer(per_device_rollout_batch_size=8, **settings)
    settings["train_dataset"] = prompts.add_column("height", [32, 64] * 6).add_column("width", [32, 64] * 6)
    make_trainer(per_device_rollout_batch_size=4, **settings)
    message = r"2 training sizes.*: `per_device_rollout_batch_size` \(8\) must divide `num_generations` \(4\)"
    with pytest.raises(ValueError, match=message):
        make_trainer(per_device_rollout_batch_size=8, **settings)
    monkeypatch.delitem(FAMILIES, "FluxPipeline")
    message = "`per_device_rollout_batch_size` is 2, but UnlistedFamily generates at most 1 with FluxPipeline"
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=message):
        make_trainer(per_device_rollout_batch_size=2, **settings)


def test_the_gradient_is_the_sum_of_advantages_times_noise(flux):
    """Unclipped and on policy: the gradient of mean(A * ratio) is that of mu along sum(A_i eps_i)."""
    _, (record, *_) = flux.generate(SDESettings((1,), 0.7))
    advantages = torch.tensor([1.0, -0.4, 0.3, 0.8])
    gradients = flux.gradients(record, advantages / 4)  # the ratio is 1, so its gradient is that of log p

    noise = torch.stack([torch.randn(record.sample.shape[1:], generator=keyed_generator(*k, 2)) for k in FOUR_KEYS])
    t, dt = record.sigma, record.sigma_next - record.sigma
    s = 0.7 * (t / (1 - t)) ** 0.5
    std, slope = s * (-dt) ** 0.5, (1 + s**2 * (1 - t) / (2 * t)) * dt  # slope = d mu / d v
    credit = torch.einsum("i,i...->i...", advantages, noise) * slope / (std * noise[0].numel()) / 4
    parameters = [p for p in flux.policy.model.parameters() if p.requires_grad]
    velocity = predict(flux.policy.model, record.calls, flux.policy.family, 3.5, record.sample)
    expected = torch.autograd.grad(velocity, parameters, credit, allow_unused=True)
    assert_close(gradients, expected)


def test_images_that_are_not_finite_are_named(flux):
    arguments = dict(flux.arguments) | {"prompt_embeds": flux.arguments["prompt_embeds"].clone()}
    flux.generate(SDE, arguments=arguments)
    arguments["prompt_embeds"][2:] = torch.nan
    with pytest.raises(RuntimeError, match=r"image\(s\) \[2, 3\].*not finite after the last"):
        flux.generate(SDE, arguments=arguments)
