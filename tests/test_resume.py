# SPDX-License-Identifier: Apache-2.0
"""Exact resume: a run that is killed at any moment, also while saving, ends with the bits of one that was not."""

import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from kill_runs import Run, check_same_end, copy_run, different, make_run, same
from paco_trl.checkpointing.checkpoints import STAGING, incomplete_files, list_checkpoints
from paco_trl.rewards import redness_reward
from testing_utils import square_prompts


ADAPTER = "adapter_model.safetensors"


# Nearly all of them go on from one uninterrupted run with its checkpoints
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(context, tiny_flux, tmp_path_factory) -> Run:
    """A run of 8 steps with all its checkpoints. Not to be written to."""
    run = Run(context, tiny_flux, tmp_path_factory.mktemp("uninterrupted") / "out", saving={"step": 4})
    state = run.state()
    assert state["global_step"] == 8
    assert [step_of(path) for path in list_checkpoints(run.output)] == [8, 7, 6, 5, 4, 3, 2, 1]
    # What is compared below has something to say: everything moved, at a rate that changes from step to step
    assert all(value.abs().max() > 1e-3 for name, value in state["policy"].items() if "lora_B" in name)
    assert any(not torch.equal(value, state["policy"][name]) for name, value in state["ema"].items())
    rates = [entry["learning_rate"] for entry in state["history"] if "learning_rate" in entry]
    assert len(rates) == len(set(rates)) + 1 == 8  # warm-up and cosine pass the middle twice
    trained = [{name.split("/")[1] for name in entry if "ratio_deviation" in name} for entry in state["history"]]
    assert len(set.union(*trained)) > 1  # of the stochastic steps
    return run


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def remove_from(checkpoint: Path, pattern: str) -> None:
    """Takes files out of a checkpoint, which then does not know of them."""
    content = json.loads((checkpoint / "run.json").read_text())
    paths = list(checkpoint.glob(pattern))
    assert paths
    for path in paths:
        del content["files"][path.name]
        path.unlink()
    (checkpoint / "run.json").write_text(json.dumps(content))


def found_after_kill(output: Path) -> dict:
    """What a killed run has left: its latest checkpoint, and whether there is an unfinished one. None is broken."""
    checkpoints = list_checkpoints(output)
    for checkpoint in checkpoints:
        assert incomplete_files(checkpoint) == [], checkpoint
    staging = output / STAGING
    return {
        "latest": step_of(checkpoints[0]) if checkpoints else None,
        "unfinished": sorted(path.name for path in staging.iterdir()) if staging.is_dir() else [],
    }


class TestKillsInOneProcess:
    # Inside of saving; the rest of the kills are at times
    # The checkpoint is renamed after its settings and its card
    RENAMED = {"function": "posix.replace", "count": 3}
    PLACES = [
        {"step": 1, "kill": {"function": "serialize_file"}},  # before the first checkpoint
        {"step": 3, "kill": RENAMED},  # all is written, and not yet visible
        {"step": 3, "kill": {**RENAMED, "event": "c_return"}},  # just visible, in a round
        {"step": 4, "kill": {"call": 0.3}},
        {"step": 6, "kill": {"call": 0.7}},
        {"step": 7, "kill": {"function": "posix.fsync", "count": 3}},  # the one before ends an epoch
    ]

    def kill_and_resume(self, context, model, num_calls: int, output: Path, case) -> dict:
        if isinstance(case, dict):
            kill = case["kill"]
            if "call" in kill:
                kill = {"call": int(kill["call"] * num_calls)}
            run = Run(context, model, output, saving={"step": case["step"], "kill": kill})
            assert run.was_killed == [True], run.output_text()[-3000:]
        else:
            step, delay = case
            run = Run(context, model, output)
            if step > 0:
                run.wait_for_checkpoint(step)
            run.processes[0].join(delay)
            run.kill()
        outcome = found_after_kill(output)
        resumed = Run(context, model, output, resume=None if outcome["latest"] is None else True)
        state = resumed.state()
        warning = "An earlier run was stopped while saving"
        assert (warning in resumed.output_text()) == bool(outcome["unfinished"])
        assert not found_after_kill(output)["unfinished"]
        return outcome | {"case": case, "killed": run.was_killed == [True], "state": state}

    def test_ten_kills(self, context, tiny_flux, uninterrupted, tmp_path):
        reference = uninterrupted.state()
        num_calls = len(reference["calls"])
        assert num_calls > 10_000
        generator = random.Random(0)
        # At a random moment after a checkpoint has appeared, with at least five steps to go
        moments = [(step, 0.3 * generator.random()) for step in (0, 1, 2, 3)]
        cases = [*self.PLACES, *moments]
        assert len(cases) == 10
        folders = [tmp_path / f"{number}" for number in range(10)]
        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(partial(self.kill_and_resume, context, tiny_flux, num_calls), folders, cases))
        latest = [outcome["latest"] for outcome in outcomes]
        unfinished = [outcome["unfinished"] for outcome in outcomes]
        assert sum(outcome["killed"] for outcome in outcomes) == 10
        # Where the kills at places must have hit
        assert latest[:6] == [None, 2, 3, 3, 5, 6]
        assert unfinished[:6] == [["checkpoint-1"], ["checkpoint-3"], [], *([f"checkpoint-{n}"] for n in (4, 6, 7))]
        for outcome in outcomes:
            wrong = different(reference, outcome["state"])
            assert not wrong, (outcome["case"], outcome["latest"], outcome["unfinished"], wrong)

    @pytest.mark.parametrize(
        ("part", "changed"),
        [
            ("ema.safetensors", {"ema", "adapter", "adapter file", "diffusers adapter"}),
            ("optimizer.pt", {"policy", "optimizer"}),
            ("scheduler.pt", {"policy", "scheduler"}),
            ("rng_state.pth", {"policy", "python", "numpy", "torch"}),
            ("rollout_0.pt", {"policy", "history"}),
            ("nothing", set()),
        ],
    )
    def test_each_part_of_a_checkpoint_decides_the_result(
        self, context, tiny_flux, uninterrupted, tmp_path, part, changed
    ):
        output = copy_run(uninterrupted.output, tmp_path / "out", [5])
        if part != "nothing":
            remove_from(output / "checkpoint-5", part)
        run = Run(context, tiny_flux, output, resume=True)
        wrong = set(different(uninterrupted.state(), run.state()))
        assert changed <= wrong
        if not changed:
            assert not wrong
        assert ("are not in the checkpoint" in run.output_text()) == (part == "rollout_0.pt")

    def test_the_disk_has_everything_before_a_checkpoint_is_visible(self, uninterrupted):
        calls = uninterrupted.state()["calls"]
        assert calls.count("posix.replace") == self.RENAMED["count"]
        before = calls[: len(calls) - calls[::-1].index("posix.replace") - 1]
        paths = list((uninterrupted.output / "checkpoint-4").rglob("*"))
        assert len(paths) > 8
        # Every file, and the folder
        assert before.count("posix.fsync") == len(paths) + 1
        last_write = max(index for index, name in enumerate(before) if name in ("write_record", "serialize_file"))
        assert last_write < before.index("posix.fsync")

    @pytest.mark.parametrize("function", ["posix.replace", "posix.unlink"])
    def test_kill_while_a_checkpoint_of_the_same_step_is_replaced(
        self, context, tiny_flux, uninterrupted, tmp_path, function
    ):
        # Continued from an earlier one: what comes after is written anew
        output = copy_run(uninterrupted.output, tmp_path / "out", [5, 6])
        count = self.RENAMED["count"] if function == "posix.replace" else 1
        kill = {"function": function, "event": "c_return", "count": count}
        run = Run(context, tiny_flux, output, resume=str(output / "checkpoint-5"), saving={"step": 6, "kill": kill})
        assert run.was_killed == [True]
        # Between the two renamings there is none of step 6, until somebody looks, and after them the new one
        assert (output / "checkpoint-6").exists() == (function == "posix.unlink")
        assert found_after_kill(output)["latest"] == 6
        resumed = Run(context, tiny_flux, output, resume=True)
        assert not different(uninterrupted.state(), resumed.state())

    def test_kill_while_an_old_checkpoint_is_deleted(self, context, tiny_flux, uninterrupted, tmp_path):
        output = copy_run(uninterrupted.output, tmp_path / "out", [5])
        settings = {"save_total_limit": 1}
        kill = {"function": "posix.unlink", "count": 3}
        run = Run(context, tiny_flux, output, resume=True, saving={"step": 6, "kill": kill}, **settings)
        assert run.was_killed == [True]
        broken = [path.name for path in list_checkpoints(output) if incomplete_files(path)]
        assert broken in ([], ["checkpoint-5"])  # half of it is there, or it was put aside first
        assert not incomplete_files(output / "checkpoint-6")
        resumed = Run(context, tiny_flux, output, resume=True, **settings)
        assert not different(uninterrupted.state(), resumed.state())
        assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-8"]


class TestFullDisk:
    # The largest file that can be written, in bytes: what fails is the adapter's config, and the buffer by torch
    @pytest.mark.parametrize("limit", [1_000, 100_000])
    def test_full_disk(self, context, tiny_flux, uninterrupted, tmp_path, limit):
        sizes = [path.stat().st_size for path in (uninterrupted.output / "checkpoint-5").iterdir()]
        assert max(sizes) > limit
        output = copy_run(uninterrupted.output, tmp_path / "out", [3, 4])
        run = Run(context, tiny_flux, output, resume=True, saving={"step": 5, "file_limit": limit})
        error = run.result()["error"]
        assert error.startswith("CheckpointError: The checkpoint of step 5 could not be written")
        assert f"'{output}'" in error
        assert "resume_from_checkpoint=True" in error
        assert not (output / STAGING).exists()
        assert found_after_kill(output)["latest"] == 4
        assert len(list_checkpoints(output)) == 2
        assert not different(uninterrupted.state(), Run(context, tiny_flux, output, resume=True).state())


class TestHalfWritten:
    def test_skipped_and_named(self, context, tiny_flux, uninterrupted, tmp_path):
        output = copy_run(uninterrupted.output, tmp_path / "out", [6, 7])
        file = output / "checkpoint-7" / "optimizer.pt"
        os.truncate(file, file.stat().st_size // 2)
        run = Run(context, tiny_flux, output, resume=True, resume_from_checkpoint="True")
        assert not different(uninterrupted.state(), run.state())
        assert f"'{output / 'checkpoint-7'}' is skipped: optimizer.pt is" in run.output_text()
        assert not incomplete_files(output / "checkpoint-7")  # written anew

    def test_there_is_nothing(self, tmp_path):
        with pytest.raises(ValueError, match=f"'{tmp_path / 'out'}' has no complete checkpoint"):
            make_run("/nowhere/at/all", tmp_path / "out", resume_from_checkpoint=True)
        with pytest.raises(ValueError, match="no checkpoint .*checkpoint-3'"):
            make_run("/nowhere/at/all", tmp_path / "out", resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


@pytest.fixture
def nowhere(tiny_flux, tmp_path) -> Path:
    """A folder with the base model's name and nothing in it: who gets as far as loading the model, fails."""
    folder = tmp_path / "nowhere" / tiny_flux.name
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def earlier(uninterrupted, tmp_path) -> Path:
    """The output folder of a run that has made 6 steps."""
    return copy_run(uninterrupted.output, tmp_path / "earlier", [5, 6])


# What differs, and how it is said. The learning rate is restored with the optimizer: another one would have no effect
OTHERS = {
    "learning_rate": ({"learning_rate": 2e-2}, "learning_rate: 0.01, now 0.02"),
    "r": ({"peft_config": LoraConfig(r=2, lora_alpha=8, init_lora_weights="gaussian")}, "adapter/r: 4, now 2"),
    "prompts": (
        {"train_dataset": square_prompts().select([*range(11), 0])},
        "dataset/prompt: its contents have changed",
    ),
}


def another_noisy_redness(prompts, completions, **kwargs):
    """Another reward of the same name."""
    return redness_reward(prompts, completions)


another_noisy_redness.__name__ = "noisy_redness"


class TestIdentity:
    def test_the_same_run_goes_on_to_load_its_model(self, nowhere, earlier):
        for resume in (None, "True"):
            with pytest.raises(OSError, match="model_index.json"):
                make_run(nowhere, earlier, resume_from_checkpoint=resume)

    @pytest.mark.parametrize("other", OTHERS)
    def test_another_run_before_its_model_loads(self, nowhere, earlier, other):
        settings, said = OTHERS[other]
        for resume in ("True", str(earlier / "checkpoint-5"), None):  # or started anew in its folder
            with pytest.raises(ValueError, match=said) as error:
                make_run(nowhere, earlier, resume_from_checkpoint=resume, **settings)
            assert ("cannot be resumed" if resume else "checkpoint-6' of another run") in str(error.value)

    def test_a_checkpoint_of_another_trainer(self, tiny_flux, earlier):
        (earlier / "checkpoint-6" / "run.json").unlink()
        with pytest.raises(ValueError, match="checkpoint-6' was not written by paco_trl"):
            make_run(tiny_flux, earlier, save_total_limit=1).train()
        assert (earlier / "checkpoint-6").is_dir()

    def test_another_run_is_deleted_if_the_user_says_so(self, tiny_flux, earlier):
        trainer = make_run(tiny_flux, earlier, overwrite_output_dir=True, max_steps=1, **OTHERS["r"][0])
        assert (earlier / "checkpoint-6").is_dir()  # until training starts
        trainer.train()
        assert [path.name for path in earlier.glob("checkpoint-*")] == ["checkpoint-1"]
        # Twin: the run itself resumes
        resumed = make_run(tiny_flux, earlier, overwrite_output_dir=True, max_steps=2, **OTHERS["r"][0])
        resumed.train(resume_from_checkpoint="auto")
        assert sorted(path.name for path in earlier.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]

    def test_by_the_argument_of_train(self, tiny_flux, earlier, tmp_path):
        settings, said = OTHERS["prompts"]
        trainer = make_run(tiny_flux, tmp_path / "fresh", **settings)
        with pytest.raises(ValueError, match=said):
            trainer.train(resume_from_checkpoint=str(earlier / "checkpoint-6"))
        assert trainer.state.global_step == 0

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("noise_level", 0.5, "noise_level: 0.7, now 0.5"),
            ("reward_funcs", another_noisy_redness, "rewards/noisy_redness/code: 'kill_runs.noisy_redness', now "),
        ],
    )
    def test_another_setting(self, nowhere, earlier, caplog, name, value, said):
        with pytest.raises(OSError, match="model_index.json"):
            make_run(nowhere, earlier, resume_from_checkpoint="True", **{name: value})
        assert "is resumed with other settings" in caplog.text
        assert said in caplog.text
        # Only what differs is named: of a function its source, too
        assert caplog.text.count(", now ") == 1
        assert caplog.text.count("its contents have changed") == (name == "reward_funcs")


# Rewards that draw nothing: the generators of other processes are others
WITHOUT_CHANCE = {"reward_funcs": redness_reward, "eval_strategy": "no", "max_steps": 6}


@pytest.fixture(scope="module")
def alone(context, tiny_flux, tmp_path_factory) -> Run:
    run = Run(context, tiny_flux, tmp_path_factory.mktemp("alone") / "out", **WITHOUT_CHANCE)
    assert run.state()["global_step"] == 6
    return run


class TestOtherNumberOfProcesses:
    @staticmethod
    def distance(run: Run, reference: Run) -> float:
        a, b = run.state()["adapter"], load_file(reference.output / ADAPTER)
        assert a.keys() == b.keys()
        return max((a[name] - b[name]).abs().max().item() for name in b)

    def test_at_the_end_of_a_round(self, context, tiny_flux, alone, tmp_path):
        before = load_file(alone.output / "checkpoint-4" / ADAPTER)
        after = load_file(alone.output / ADAPTER)
        assert max((after[name] - before[name]).abs().max().item() for name in before) > 1e-4
        output = copy_run(alone.output, tmp_path / "out", [4])
        run = Run(context, tiny_flux, output, resume=True, processes=2, **WITHOUT_CHANCE)
        assert self.distance(run, alone) < 1e-6
        images = [
            {name: value for name, value in entry.items() if name.startswith("images/")}
            for each in (run, alone)
            for entry in each.state()["history"]
            if entry["step"] == 6 and "images/diversity" in entry
        ]
        assert len(images) == 2 and images[0] == pytest.approx(images[1], abs=1e-4)
        assert "saved by 1 processes, now there are 2: the images are the same" in run.output_text()
        assert not re.search("(drawn|generated) again", run.output_text())

    def test_in_the_middle_of_a_round(self, context, tiny_flux, alone, tmp_path):
        output = copy_run(alone.output, tmp_path / "out", [5])
        run = Run(context, tiny_flux, output, resume=True, processes=2, **WITHOUT_CHANCE)
        assert run.state()["global_step"] == 6
        assert "saved by 1 processes, now there are 2. It is in the middle of a round" in run.output_text()
        assert self.distance(run, alone) > 0


def falling_reward(prompts, completions, trainer_state, **kwargs):
    """Best in the first evaluation."""
    return [10 + value - trainer_state.global_step for value in redness_reward(prompts, completions)]


def test_the_best_weights_at_the_end_after_a_resume(context, tiny_flux, tmp_path):
    settings = {
        "max_steps": 5, "eval_steps": 1, "save_total_limit": 2, "metric_for_best_model": "reward",
        "greater_is_better": True, "reward_funcs": falling_reward, "load_best_model_at_end": True,
    }  # fmt: skip
    whole = Run(context, tiny_flux, tmp_path / "a", **settings)
    state = whole.state()
    assert {step_of(path) for path in list_checkpoints(whole.output)} == {1, 5}
    # The folder is that of the checkpoint and not the one that it was written in
    paths = [state["best"]]
    paths += [
        json.loads((path / "trainer_state.json").read_text())["best_model_checkpoint"]
        for path in list_checkpoints(whole.output)
    ]
    assert paths == [str(whole.output / "checkpoint-1")] * 3
    best, last = (load_file(whole.output / f"checkpoint-{step}" / ADAPTER) for step in (1, 5))
    assert same(load_file(whole.output / ADAPTER), best) and not same(last, best)
    kill = {"function": "posix.fsync"}
    killed = Run(context, tiny_flux, tmp_path / "b", saving={"step": 4, "kill": kill}, **settings)
    assert killed.was_killed == [True]
    assert found_after_kill(killed.output) == {"latest": 3, "unfinished": ["checkpoint-4"]}
    resumed = Run(context, tiny_flux, tmp_path / "b", resume=True, **settings)
    assert not different(state, resumed.state())
    assert resumed.state()["best"] == str(tmp_path / "b" / "checkpoint-1")


@pytest.fixture(scope="module")
def reference(context, tiny_flux, tmp_path_factory) -> Run:
    """A run in two processes that was not interrupted."""
    run = Run(context, tiny_flux, tmp_path_factory.mktemp("two") / "out", processes=2)
    assert run.state()["global_step"] == run.state(1)["global_step"] == 8
    # Each process has generators of its own, and its own part of the round in the middle of one
    assert {path.name for path in (run.output / "checkpoint-3").glob("r*_*")} >= {
        "rng_state_0.pth", "rng_state_1.pth", "rollout_0.pt", "rollout_1.pt",
    }  # fmt: skip
    assert not list((run.output / "checkpoint-4").glob("rollout_*"))
    return run


class TestTwoProcesses:
    def test_all_are_killed(self, context, tiny_flux, reference, tmp_path):
        output = tmp_path / "out"
        run = Run(context, tiny_flux, output, processes=2)
        run.wait_for_checkpoint(3)
        run.processes[0].join(random.Random(1).uniform(0, 0.5))
        run.kill()
        assert run.was_killed == [True, True]
        outcome = found_after_kill(output)
        assert outcome["latest"] >= 3
        check_same_end(Run(context, tiny_flux, output, resume=True, processes=2), reference)

    def test_one_is_killed_while_it_saves(self, context, tiny_flux, reference, tmp_path):
        output = tmp_path / "out"
        kill = {"function": "write_record", "count": 1}
        run = Run(context, tiny_flux, output, processes=2, saving={"rank": 1, "step": 5, "kill": kill})
        run.processes[1].join(120)
        run.processes[0].join(3)
        if run.is_running():  # it waits for the other
            run.kill()
        assert run.was_killed[1]
        assert found_after_kill(output)["latest"] == 4
        check_same_end(Run(context, tiny_flux, output, resume=True, processes=2), reference)

    def test_one_has_a_full_disk(self, context, tiny_flux, reference, tmp_path):
        output = copy_run(reference.output, tmp_path / "out", [4])
        # Its generators' state fits, its part of the round does not
        saving = {"rank": 1, "step": 5, "file_limit": 20_000}
        run = Run(context, tiny_flux, output, processes=2, resume=True, saving=saving)
        for rank in range(2):
            error = run.result(rank)["error"]
            assert "The checkpoint of step 5 could not be written" in error
            assert "process 1: " in error
            assert "process 0: " not in error
        assert not (output / STAGING).exists()
        assert found_after_kill(output)["latest"] == 4
        check_same_end(Run(context, tiny_flux, output, resume=True, processes=2), reference)


@pytest.fixture(scope="module")
def zero3(context, tiny_flux, tmp_path_factory) -> Run:
    """A run with ZeRO-3 that was not interrupted."""
    run = Run(context, tiny_flux, tmp_path_factory.mktemp("zero3") / "out", **TestZero3.SETTINGS)
    assert run.state()["global_step"] == 6
    moved = load_file(run.output / ADAPTER)
    assert all(value.abs().max() > 1e-3 for name, value in moved.items() if "lora_B" in name)
    assert list((run.output / "checkpoint-3").rglob("*zero_pp_rank_1*optim_states.pt"))
    return run


class TestZero3:
    SETTINGS = {"max_steps": 6, "processes": 2, "zero3": True}

    def test_killed(self, context, tiny_flux, zero3, tmp_path):
        output = tmp_path / "out"
        kill = {"function": "write_record", "count": 1}
        run = Run(context, tiny_flux, output, saving={"rank": 1, "step": 4, "kill": kill}, **self.SETTINGS)
        run.processes[1].join(200)
        run.processes[0].join(3)
        run.kill()
        assert run.was_killed[1]
        assert found_after_kill(output)["latest"] == 3  # in the middle of a round
        check_same_end(Run(context, tiny_flux, output, resume=True, **self.SETTINGS), zero3)

    def test_full_disk(self, context, tiny_flux, zero3, tmp_path):
        output = copy_run(zero3.output, tmp_path / "out", [4])
        # What process 0 writes alone fails first: the other must not wait for it in DeepSpeed's part
        saving = {"rank": 0, "step": 5, "file_limit": 20_000}
        run = Run(context, tiny_flux, output, resume=True, saving=saving, **self.SETTINGS)
        run.wait(60)
        for rank in range(2):
            assert "The checkpoint of step 5 could not be written" in run.result(rank)["error"]
        assert found_after_kill(output) == {"latest": 4, "unfinished": []}
