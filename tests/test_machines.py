# SPDX-License-Identifier: Apache-2.0
"""Several processes and machines: what they wait for, what they share, and what the others say when one ends."""

import os
import random
import re
import socket
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback

from kill_runs import Run, check_same_end, rank_in_group, relative_difference
from launching import CPU_DDP, TESTS, run
from paco_trl import PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.checkpointing.checkpoints import STAGING, find_checkpoint, list_checkpoints
from test_reward_command import SETTINGS as JUDGE_SETTINGS
from test_reward_command import pairs


WITHOUT_EVALUATION = {"eval_strategy": "no"}


@pytest.fixture(scope="module")
def uninterrupted(context, tiny_flux, tmp_path_factory) -> Run:
    """Two processes that nothing happens to."""
    run = Run(context, tiny_flux, tmp_path_factory.mktemp("two") / "out", processes=2, **WITHOUT_EVALUATION)
    moved = run.state()["adapter"]
    assert all(value.abs().max() > 1e-3 for name, value in moved.items() if "lora_B" in name)
    assert not list(run.output.glob(".lock-*"))
    return run


@pytest.mark.slow
def test_a_group_is_compared_as_by_one_process(context, tiny_flux, tmp_path):
    """Its images are generated on both."""
    settings = {"reward_funcs": rank_in_group, "max_steps": 2, **WITHOUT_EVALUATION}
    runs = [Run(context, tiny_flux, tmp_path / str(count), processes=count, **settings) for count in (1, 2)]
    one, two = (run.state() for run in runs)
    for name in ("rewards/rank_in_group/mean", "reward_std"):
        values = [[entry[name] for entry in state["history"] if name in entry] for state in (one, two)]
        assert len(values[0]) == 2 and values[0] == pytest.approx(values[1], abs=1e-6)
    assert relative_difference(one["adapter"], two["adapter"]) < 1e-3


def last_line(run: Run, rank: int) -> str:
    return Path(f"{run.log}.{rank}").read_text().strip().splitlines()[-1]


# ---- Waiting ----

# Both load for longer than a collective waits, one after the other. `ddp_timeout` has no effect on the CPU
SLOW_PAIRS = """
import datetime, functools, sys, time
import torch.distributed as dist
from paco_trl.commands import reward
from paco_trl.utils import locks

load_pairs = reward.load_pairs
def slow(*arguments):
    time.sleep(5)
    return load_pairs(*arguments)
reward.load_pairs = slow
dist.init_process_group = functools.partial(dist.init_process_group, timeout=datetime.timedelta(seconds=4))
if sys.argv[1] == "collective":
    locks.wait_for_all = lambda: None
reward.main(sys.argv[2:])
"""


class TestWaiting:
    @pytest.mark.slow
    @pytest.mark.parametrize("how", ["patient", "collective"])
    def test_pairs_that_load_for_longer_than_a_collective_waits(self, tiny_qwen, tmp_path, how):
        (tmp_path / "data").mkdir()
        pairs(12, 0).to_parquet(tmp_path / "data" / "train.parquet")
        options = {"model_name_or_path": tiny_qwen, "dataset_name": tmp_path / "data", "output_dir": tmp_path / "out"}
        options |= JUDGE_SETTINGS | {"eval_strategy": "no", "max_steps": 1, "gradient_accumulation_steps": 3}
        del options["eval_split"]
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        words += ["--ddp_backend", "gloo"]
        done = run(["-c", SLOW_PAIRS, how, *words], config=CPU_DDP, cwd=tmp_path)
        if how == "patient":
            assert done.returncode == 0, done.stderr[-3000:]
            assert (tmp_path / "out" / "adapter_model.safetensors").exists()
        else:
            assert done.returncode != 0
            assert "Timed out" in done.stderr

    @pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
    def test_a_process_that_has_ended_is_not_waited_for(self, tmp_path, rank):
        code = """
import os, sys
from accelerate import PartialState
from paco_trl.utils.processes import wait_for_all
state = PartialState(cpu=True)
for _ in range(3):
    wait_for_all()
if state.process_index == int(sys.argv[1]):
    sys.exit()  # as after an error
try:
    wait_for_all()
except RuntimeError as error:
    sys.exit(f"said: {type(error).__name__}: {error}")
"""
        done = run(["-c", code, rank], config=CPU_DDP, cwd=tmp_path)
        # The first one has the store: the other may not find it any more
        said = ("said: DistNetworkError", "said: DistError: Another process")
        assert done.stderr.strip().splitlines()[-1].startswith(said[rank:]), done.stderr


# ---- A directory that all see ----

ELSEWHERE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
folder = Path(sys.argv[2] if os.environ["RANK"] == "0" or sys.argv[3] == "shared" else sys.argv[2] + "-b")
folder.mkdir(exist_ok=True)
os.chdir(folder)
from kill_runs import make_run
try:
    make_run("/nowhere/tiny-flux", "out", ddp_backend="gloo")
except Exception as error:
    print(f"{os.environ['RANK']}: {type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "apart"])
def test_a_directory_that_is_not_shared(tmp_path, kind):
    done = run(["-c", ELSEWHERE, TESTS, tmp_path / "disk", kind], config=CPU_DDP, cwd=tmp_path)
    said = sorted(done.stdout.splitlines())
    assert [line[:3] for line in said] == ["0: ", "1: "], done.stdout + done.stderr
    for line in said:
        if kind == "shared":  # gets as far as the model
            assert "FileNotFoundError" in line
        else:
            assert "ValueError" in line
            assert re.search(rf"on {socket.gethostname()} is not the directory", line)
    assert not list(tmp_path.rglob(STAGING))
    assert not list(tmp_path.rglob(".lock-*"))


# ---- An error of one process ----


class _FailOnOne(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and args.process_index == 1:
            raise ValueError(f"planted on {args.process_index}")


@pytest.mark.slow
class TestLastLines:
    def test_an_error(self, context, tiny_flux, uninterrupted, tmp_path):
        run = Run(context, tiny_flux, tmp_path / "out", processes=2, callbacks=[_FailOnOne()], **WITHOUT_EVALUATION)
        assert run.result(1)["error"] == "ValueError: planted on 1"
        line = last_line(run, 0)
        assert f"Process 1 on {socket.gethostname()} ended the run: ValueError: planted on 1" in line
        assert f"resume_from_checkpoint auto` to resume from '{run.output / 'checkpoint-2'}'" in line
        assert len(list(run.output.glob(".lock-*"))) == 1
        # What it has left disturbs nobody
        resumed = Run(context, tiny_flux, run.output, resume=True, processes=2, **WITHOUT_EVALUATION)
        check_same_end(resumed, uninterrupted)
        assert not list(run.output.glob(".lock-*"))


# ---- Restarts ----

# The agent of torchrun, whose processes are forked instead of started
RESTARTED = """
import os, shutil, signal, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import TrainerCallback
from kill_runs import make_run

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and args.process_index == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

def train(model, output):
    if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        shutil.rmtree(f"{output}/checkpoint-1")
    trainer = make_run(model, output, ddp_backend="gloo", eval_strategy="no", callbacks=[Kill()])
    trainer.train()
    trainer.save_model()

config = LaunchConfig(1, 1, 2, run_id="r", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=1, start_method="fork")
elastic_launch(config, train)(*sys.argv[1:])
"""


class TestRestarts:
    def test_when_it_resumes(self, monkeypatch, tmp_path):
        for count, resume, is_error in (("0", None, False), ("1", None, False), ("1", True, True)):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
            if is_error:
                with pytest.raises(ValueError, match="no complete checkpoint"):
                    find_checkpoint(tmp_path, resume)
            else:
                assert find_checkpoint(tmp_path, resume) is None
        checkpoint = tmp_path / "checkpoint-3"
        checkpoint.mkdir()
        (checkpoint / "run.json").write_text('{"run": {}, "files": {}}')
        assert find_checkpoint(tmp_path, None) == checkpoint
        assert find_checkpoint(tmp_path, False) is None
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        assert find_checkpoint(tmp_path, None) is None

    @pytest.mark.parametrize("count", [0, 1])
    def test_of_a_judge(self, monkeypatch, tiny_qwen, tmp_path, count):
        settings = {"use_cpu": True, "bf16": False, "report_to": "none", "per_device_train_batch_size": 2}
        settings |= {"gradient_accumulation_steps": 1, "save_steps": 1, "first_token_weight": 0.3}
        steps = []
        for max_steps in (2, 3):
            args = PaCoRewardConfig(str(tmp_path / "out"), max_steps=max_steps, **settings)
            trainer = PaCoRewardTrainer(str(tiny_qwen), args, pairs(12, 0), peft_config=LoraConfig(r=4))
            step = trainer.training_step
            trainer.training_step = lambda *args, step=step: steps.append(1) or step(*args)
            # One that the launcher has not started again would write over what is there
            with pytest.raises(ValueError, match="earlier run") if steps and not count else nullcontext():
                trainer.train()
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        assert len(steps) == (3 if count else 2)

    @pytest.mark.slow
    def test_torchrun(self, tiny_flux, uninterrupted, tmp_path):
        output = tmp_path / "out"
        environment = {"ACCELERATE_USE_CPU": "true", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        done = run(["-c", RESTARTED, tiny_flux, output], env={**os.environ, **environment})
        assert done.returncode == 0, done.stderr[-6000:]
        # The first is gone: the agent has started both again
        assert sorted(path.name for path in output.glob("checkpoint-*")) == [f"checkpoint-{n}" for n in range(2, 9)]
        expected = load_file(uninterrupted.output / "adapter_model.safetensors")
        adapter = load_file(output / "adapter_model.safetensors")
        assert all(torch.equal(value, adapter[name]) for name, value in expected.items())


# ---- Machines ----


@pytest.fixture
def two_machines(monkeypatch):
    """Two network namespaces on a cable, and the address of the first."""
    names = [f"paco{os.getpid()}{letter}" for letter in "ab"]

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=30)

    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"-n {names[0]} link add cable type veth peer name cable netns {names[1]}")
        for number, name in enumerate(names, start=1):
            ip(f"-n {name} addr add 10.77.0.{number}/24 dev cable")
            ip(f"-n {name} link set cable up")
            ip(f"-n {name} link set lo up")
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode().strip() or error
        pytest.skip(f"network namespaces cannot be made here: {reason}")
    else:
        yield {"machines": names, "address": "10.77.0.1", "processes": 2}
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30)


@pytest.mark.slow
def test_a_machine_that_is_killed(context, tiny_flux, uninterrupted, two_machines, tmp_path):
    run = Run(context, tiny_flux, tmp_path / "out", **two_machines, **WITHOUT_EVALUATION)
    first = random.randint(1, 4)
    run.wait_for_checkpoint(first)
    run.processes[1].join(random.uniform(0, 0.2))
    run.processes[1].kill()
    assert run.was_killed == [False, True]
    assert "was killed" in last_line(run, 0)
    assert first <= len(list_checkpoints(run.output)) < 8
    resumed = Run(context, tiny_flux, run.output, resume=True, **two_machines, **WITHOUT_EVALUATION)
    check_same_end(resumed, uninterrupted)
