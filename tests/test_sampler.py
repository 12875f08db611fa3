# SPDX-License-Identifier: Apache-2.0
"""The sampler that training, evaluation and the doctor share, and the settings that a checkpoint remembers."""

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch

from paco_trl import PaCoGRPOConfig, PaCoNFTConfig
from paco_trl.rewards import redness_reward
from paco_trl.rewards.reward_set import RewardSet
from paco_trl.trainer.run_settings import adjustable_settings


@pytest.mark.parametrize("is_held", [False, True])
def test_what_was_fetched_is_freed_with_its_last_reference(make_trainer, is_held):
    """Its embeddings are on the accelerator: they must not wait for the garbage collector."""
    sampler, rows = make_trainer().sampler, make_trainer().train_rows
    rows.measure(sampler.policy.pipeline, sampler.policy.family)
    sampler.encode(rows, [0])
    gc.disable()
    try:
        fetched = sampler.fetch(rows, [0])
        with sampler.ready(), torch.no_grad():
            images, _ = sampler.generate(fetched, [0], [(0, 3, 0, 0, 0)], rows.training_sizes[0], 2)
        assert len(images) == 1 and fetched.read(0)["rows"] == 2 and fetched.source_images(0) == []
        if is_held:
            fetched.cycle = fetched
        reference = weakref.ref(fetched)
        del fetched
        assert (reference() is not None) == is_held
    finally:
        gc.enable()


def test_a_checkpoint_remembers_the_settings_of_its_trainer_only(tmp_path):
    @dataclass
    class Mine(PaCoGRPOConfig):
        where: type = dict  # nothing that JSON can hold

    settings = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    rewards = RewardSet(redness_reward)
    mine = adjustable_settings(Mine(**settings), rewards, PaCoGRPOConfig)
    assert "where" not in mine and mine == adjustable_settings(PaCoGRPOConfig(**settings), rewards, PaCoGRPOConfig)
    of_nft = adjustable_settings(PaCoNFTConfig(**settings), rewards, PaCoNFTConfig)
    assert of_nft.keys() - mine.keys() == {
        "awm_weighting", "nft_beta", "num_noise_levels", "old_policy_beta", "old_policy_decay_rate",
        "old_policy_max_decay",
    }  # fmt: skip


def test_a_checkpoint_from_before_an_option_has_the_settings_of_a_run_without_it(tmp_path):
    def settings(**changes):
        args = PaCoGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **changes)
        return adjustable_settings(args, RewardSet(redness_reward), PaCoGRPOConfig)

    new = {
        *("images_per_prefix", "tail_steps", "per_device_rollout_batch_size"),
        *("attention_backend", "compile_repeated_blocks"),
    }
    before = {name: value for name, value in settings().items() if name not in new}
    assert all(before.get(name) == value for name, value in settings().items())
    changed = settings(
        images_per_prefix=2, per_device_train_batch_size=2, tail_steps=3, per_device_rollout_batch_size=4,
        attention_backend="native", compile_repeated_blocks=True,
    )  # fmt: skip
    assert {name for name in new if before.get(name) != changed[name]} == new
