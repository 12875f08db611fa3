# SPDX-License-Identifier: Apache-2.0
"""Batches of generation that are larger than those of training (`per_device_rollout_batch_size`)."""

import pytest
import torch

from paco_trl.rollout import FAMILIES
from paco_trl.rollout.policy import split_record
from test_branched_groups import BRANCHES, CASES, FOUR_KEYS, FULL, rows_of_calls, setup_of  # noqa: F401


TOLERANCE = 1e-5  # a tenth of the default `epsilon`


@pytest.mark.parametrize(
    ("name", "sde"),
    [pytest.param("flux", FULL, id="flux-"), pytest.param("sd3", FULL, id="sd3-")]
    # Whose steps after the first stochastic one are as without branches
    + [pytest.param(name, BRANCHES, id=name, marks=pytest.mark.slow) for name in CASES],
)
def test_the_parts_are_what_micro_batches_record(setup_of, name, sde):  # noqa: F811
    setup = setup_of(name)
    _, records = setup.generate(sde)
    few = {name: tensor[:2] for name, tensor in setup.arguments.items()}
    for part, keys in enumerate((FOUR_KEYS[:2], FOUR_KEYS[2:])):
        _, own_records = setup.generate(sde, keys, few)
        for record, own in zip(records, own_records, strict=True):
            split = split_record(record, 2, setup.policy.family)[part]
            assert split.branch_size == own.branch_size
            torch.testing.assert_close(vars(split), vars(own), rtol=1e-4, atol=1e-4)
            if own.log_prob is not None:
                log_prob, _, _ = setup.replay(split, sde)
                assert ((log_prob - split.log_prob).exp() - 1).abs().max() < TOLERANCE
                assert (log_prob.flip(0) - split.log_prob).abs().max() > 1e-3  # that of the other image
            if name == "flux":  # not copied
                prompts = split.calls[0]["encoder_hidden_states"]
                assert prompts.data_ptr() == setup.arguments["prompt_embeds"].data_ptr()


@pytest.mark.parametrize(
    "settings",
    [
        {"sde_steps": [1, 2], "loss_type": "grpo_guard", "epsilon": 1e-2, "offload_embeddings": True},
        {"per_device_train_batch_size": 2, "branch_size": 2},
        {"per_device_rollout_batch_size": 8, "optimizer_steps_per_generation": 1, "beta": 0.1},
    ],
    ids=str,
)
def test_trains(make_trainer, settings):
    usual = {"per_device_train_batch_size": 1, "per_device_rollout_batch_size": 4, "gradient_checkpointing": False}
    trainer = make_trainer(**usual | settings)
    args, seen = trainer.args, rows_of_calls(trainer.policy)[0]
    trainer.train()
    batch, prefix = args.per_device_rollout_batch_size, args.branch_size
    generated = [batch // prefix, batch // prefix, batch, batch] * (16 // batch)
    assert [rows for _, rows in seen[: len(generated)]] == generated
    assert {rows for _, rows in seen[len(generated) :][:4]} == {args.per_device_train_batch_size // prefix}
    log, *_ = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log["ratio_deviation_on_policy/step_1"] < TOLERANCE and log["grad_norm"] > 0


def test_images_and_weights_are_those_of_the_training_batch(make_trainer):
    found = []
    for batch in (2, None, 8):
        settings = {"optimizer_steps_per_generation": 1, "max_steps": 1, "learning_rate": 1e-3}
        trainer = make_trainer(per_device_train_batch_size=2, per_device_rollout_batch_size=batch, **settings)
        trainer.train()
        places = torch.from_numpy(
            trainer.round_plan.assign([(32, 32)] * 4, (trainer.args.seed, 1, 0)).reshape(-1)
        ).argsort()
        entries = trainer.buffer.entries
        columns = [[getattr(entry["record"], name) for entry in entries] for name in ("prev_sample", "log_prob")]
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
