# SPDX-License-Identifier: Apache-2.0
"""Rewards by their names on the command line, and the judges of training and evaluation."""

import dataclasses

import pytest

from judge_server import JudgeServer
from paco_trl import PaCoReward
from paco_trl.commands import script_arguments
from paco_trl.commands.script_arguments import ScriptArguments, load_eval_rewards, load_reward, load_rewards
from paco_trl.rewards import (
    ClipIReward,
    ClipTReward,
    ConsistencyReward,
    DuplicateReward,
    JudgeUnavailableError,
    LayoutReward,
    redness_reward,
)
from paco_trl.tiny.clip import build_tiny_clip


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return str(build_tiny_clip(tmp_path_factory.mktemp("models") / "clip"))


@pytest.fixture
def server():
    with JudgeServer(lambda first, second, question: 0.0, models=["judge", "other"]) as server:
        yield server


def test_every_name_is_documented():
    (field,) = (field for field in dataclasses.fields(ScriptArguments) if field.name == "rewards")
    for name in script_arguments._REWARDS:
        assert f"`{name}`" in field.metadata["help"]
    assert set(field.default_factory()) <= set(script_arguments._REWARDS)


def test_rewards_without_a_judge(clip):
    arguments = ScriptArguments(rewards=["clip_t", "clip_i", "no_duplicates", "layout", "redness"], clip_model=clip)
    loaded = load_rewards(arguments)
    assert [type(reward) for reward in loaded[:4]] == [ClipTReward, ClipIReward, DuplicateReward, LayoutReward]
    assert loaded[4] is redness_reward
    assert load_eval_rewards(arguments, loaded) is None
    evaluation = load_eval_rewards(dataclasses.replace(arguments, eval_rewards=["layout", "clip_t"]), loaded)
    assert evaluation[1] is loaded[0] and evaluation[0] is loaded[3]  # loaded once
    with pytest.raises(ValueError, match="Unknown reward 'clip': `--rewards` takes consistency, edit, clip_t"):
        load_reward("clip", arguments)


def test_a_judge_in_the_process(tiny_qwen):
    arguments = ScriptArguments(rewards=["consistency"], judge_model=str(tiny_qwen), judge_question="criteria")
    (reward,) = load_rewards(arguments)
    assert isinstance(reward, ConsistencyReward) and isinstance(reward.judge, PaCoReward)
    assert reward.question == "criteria"


def test_served_judges_of_training_and_evaluation(server):
    with JudgeServer(lambda first, second, question: 1.0, models=["gemma"]) as second:
        arguments = ScriptArguments(
            rewards=["consistency", "redness"], judge_url=server.url, judge_model="judge", judge_max_pairs=2
        )
        loaded = load_rewards(arguments)
        assert loaded[0].judge.base_url == server.url and loaded[0].max_pairs == 2
        assert load_eval_rewards(arguments, loaded) is None

        def evaluation(**options):
            return load_eval_rewards(dataclasses.replace(arguments, **options), loaded)

        rewards = evaluation(eval_judge_url=second.url, eval_judge_model="gemma")
        assert [reward.__name__ for reward in rewards] == ["consistency", "redness_reward"]
        assert (rewards[0].judge.base_url, rewards[0].judge.model) == (second.url, "gemma")
        assert rewards[1] is loaded[1]
        # Another name at another address is looked for there, and a name alone is that of a judge in the process
        with pytest.raises(JudgeUnavailableError, match="has no model 'judge'. It has: gemma"):
            evaluation(eval_judge_url=second.url)
        with pytest.raises(ValueError, match="are for `consistency`"):
            evaluation(eval_judge_url=second.url, eval_rewards=["redness"])
