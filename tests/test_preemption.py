# SPDX-License-Identifier: Apache-2.0
"""Runs that a scheduler stops by a signal: a complete checkpoint, a sentence, a code, and exactly the rest afterwards."""

import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer, TrainerCallback

from kill_runs import Run, check_same_end, different
from launching import ROOT, check_run, run
from paco_trl.checkpointing.checkpoints import STAGING, incomplete_files, list_checkpoints
from paco_trl.commands import main
from paco_trl.commands.training import train_and_save
from paco_trl.rewards import redness_reward
from paco_trl.trainer.resuming import ExactResumeMixin
from paco_trl.utils.background import abandon_at_exit
from paco_trl.utils.stopping import EXIT_CODE, StopRequested, agree, defer_stop_signals, stop_signals
from testing_utils import files_in


# A round is two steps of four batches: what the second batch is in, and in which step it is
GENERATION = {"step": 4, "call": "scoring.add"}
# In the first round of an epoch, when random numbers were drawn for the epoch and by rewards
REWARDS = {"step": 6, "call": "scoring.finish", "count": 2}  # after that of the evaluation
STEP = {"step": 4, "call": "compute_loss"}
EVALUATION = {"step": 6, "call": "scoring.add"}
WAITING = {"step": 6, "call": "scoring.finish", "count": 1, "rank": 0}
HANGING = ("sleeps", "computes", "awaits")
# Nothing but the signal makes a checkpoint before the end, after steps 3 and 6 there is an evaluation
SETTINGS = {"save_steps": 100}


@pytest.fixture(scope="module")
def uninterrupted(context, tiny_flux, tmp_path_factory) -> dict:
    """The end of a run of 8 steps, whose rewards draw from the global generators."""
    state = Run(context, tiny_flux, tmp_path_factory.mktemp("uninterrupted") / "out", **SETTINGS).state()
    assert state["global_step"] == 8
    assert all(value.abs().max() > 1e-3 for name, value in state["policy"].items() if "lora_B" in name)
    assert sum("eval_reward" in entry for entry in state["history"]) == 3
    return state


def stop(context, model, output, step: int | None, codes=(EXIT_CODE,), **kwargs) -> Run:
    """Run until the signal; check that all is there that it should leave."""
    run = Run(context, model, output, **{**SETTINGS, **kwargs})
    assert run.codes == list(codes), run.output_text()[-3000:]
    assert [path.name for path in list_checkpoints(output)] == ([] if step is None else [f"checkpoint-{step}"])
    assert step is None or not incomplete_files(output / f"checkpoint-{step}")
    assert not (output / STAGING).exists()
    return run


class Hanging:
    """A reward that after step 2 gets the signal and never ends."""

    __name__ = "hanging"

    def __init__(self, kind):
        self.kind, self.is_async = kind, kind not in ("sleeps", "computes")

    def __call__(self, prompts, completions, trainer_state, **kwargs):
        if trainer_state.global_step < 2:
            return self.later(completions) if self.is_async else redness_reward(None, completions)
        os.kill(os.getpid(), signal.SIGTERM)
        if self.kind == "awaits":
            return asyncio.sleep(1e6)
        if self.kind == "awaits a thread":
            return asyncio.to_thread(time.sleep, 1e6)
        while self.kind == "computes":
            torch.rand(200, 200) @ torch.rand(200, 200)
        time.sleep(1e6)

    async def later(self, completions):
        return redness_reward(None, completions)


@pytest.mark.parametrize("is_blocked", [True, False])
def test_a_blocked_loop_ends_the_process_with_its_exit_code(is_blocked):
    """Python would kill the loop's thread, at worst within native code."""
    code = f"""
import asyncio, threading, time
from paco_trl.utils.background import abandon_at_exit, set_exit_code
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
abandon_at_exit(loop)
set_exit_code(75)
entered = threading.Event()
loop.call_soon_threadsafe(lambda: (entered.set(), time.sleep(1e6 if {is_blocked} else 0)))
entered.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == (75 if is_blocked else 0)


def draw() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(1).item()]


def test_an_evaluation_in_training_leaves_the_random_numbers(monkeypatch):
    monkeypatch.setattr(Trainer, "_evaluate", lambda self: draw())
    trainer = object.__new__(ExactResumeMixin)
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"))
    drawn = trainer._evaluate()
    assert all(first == second for first, second in zip(draw(), drawn, strict=True))
    assert all(first != second for first, second in zip(draw(), drawn, strict=True))


@pytest.mark.parametrize(
    ("changes", "is_due"),
    [
        ({}, True),
        ({"log_history": [{"step": 4, "loss": 1.0}, {"step": 2, "eval_reward": 1.0}]}, True),
        ({"log_history": [{"step": 4, "loss": 1.0}, {"step": 4, "eval_reward": 1.0}]}, False),
        ({"global_step": 3}, False),
        ({"global_step": 5, "max_steps": 5}, True),  # the last step is evaluated
        ({"eval_strategy": "no"}, False),
        ({"eval_delay": 5}, False),
        ({"eval_strategy": "epoch"}, False),
        ({"eval_strategy": "epoch", "epoch": 2.0}, True),
    ],
    ids=str,
)
def test_which_evaluation_a_resumed_run_makes(changes, is_due):
    settings = {
        "eval_strategy": "steps", "eval_delay": 0, "global_step": 4, "max_steps": 8, "eval_steps": 2, "epoch": 1.5,
        "log_history": [],
    }  # fmt: skip
    trainer = object.__new__(ExactResumeMixin)
    trainer.args = trainer.state = SimpleNamespace(**settings | changes)
    assert trainer._is_evaluation_due() is is_due


class TestInOneProcess:
    @pytest.mark.parametrize(
        ("at", "number", "step", "is_round_pending", "is_evaluated"),
        [
            pytest.param(REWARDS, signal.SIGTERM, 6, False, True, id="rewards"),
            pytest.param(STEP, signal.SIGUSR1, 5, True, False, marks=pytest.mark.slow, id="step"),
            pytest.param(EVALUATION, signal.SIGTERM, 6, False, False, marks=pytest.mark.slow, id="evaluation"),
            # After it an evaluation is due, which must not take the time that is left
            pytest.param({**STEP, "step": 5}, signal.SIGTERM, 6, False, False, marks=pytest.mark.slow, id="due"),
            pytest.param({**STEP, "step": 7}, signal.SIGTERM, 8, False, False, marks=pytest.mark.slow, id="last"),
        ],
    )
    def test_resumes_to_the_bit(
        self, context, tiny_flux, uninterrupted, tmp_path, at, number, step, is_round_pending, is_evaluated
    ):
        output = tmp_path / "out"
        run = stop(context, tiny_flux, output, step, signal={**at, "number": number})
        (line,) = [line for line in run.output_text().splitlines() if line.startswith("Stopped by")]
        assert f"Stopped by {number.name} at step {step}," in line and f"{output}/checkpoint-{step}" in line
        assert (output / f"checkpoint-{step}" / "rollout_0.pt").exists() == is_round_pending
        state = json.loads((output / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert is_evaluated == any("eval_reward" in entry for entry in state["log_history"] if entry["step"] == step)
        resumed = Run(context, tiny_flux, output, resume="auto", **SETTINGS)
        assert not different(uninterrupted, resumed.state())
        assert "again" not in resumed.output_text()

    @pytest.mark.parametrize(
        "kind",
        [
            "blocks the event loop",
            "awaits a thread",
            *(pytest.param(kind, marks=pytest.mark.slow) for kind in HANGING),
        ],
    )
    def test_the_end_does_not_wait_for_a_reward(self, context, tiny_flux, tmp_path, kind):
        """Or the scheduler would kill the process, and see that in place of the code to try again."""
        output = tmp_path / "out"
        run = stop(context, tiny_flux, output, 2, reward_funcs=Hanging(kind), eval_strategy="no")
        assert "Stopped by SIGTERM at step 2," in run.output_text()

    def test_auto_begins_where_there_is_nothing(self, context, tiny_flux, uninterrupted, tmp_path):
        output = tmp_path / "out"
        run = stop(context, tiny_flux, output, None, resume="auto", signal={**GENERATION, "step": 0})
        assert "before the first optimizer step" in run.output_text()
        assert not different(uninterrupted, Run(context, tiny_flux, output, resume="auto", **SETTINGS).state())

    @pytest.mark.slow
    def test_a_stopped_run_is_stopped_again(self, context, tiny_flux, uninterrupted, tmp_path):
        """In a generation, and in that of the round it resumes with: the checkpoint is not written again."""
        output = tmp_path / "out"
        run = stop(context, tiny_flux, output, 4, signal=GENERATION)
        (line,) = [line for line in run.output_text().splitlines() if line.startswith("Stopped by")]
        assert "Stopped by SIGTERM at step 4," in line and f"{output}/checkpoint-4" in line
        assert not (output / "checkpoint-4" / "rollout_0.pt").exists()
        written = (output / "checkpoint-4" / "run.json").stat().st_mtime_ns
        stop(context, tiny_flux, output, 4, resume="auto", signal=GENERATION)
        assert (output / "checkpoint-4" / "run.json").stat().st_mtime_ns == written
        resumed = Run(context, tiny_flux, output, resume="auto", **SETTINGS)
        assert not different(uninterrupted, resumed.state()) and "again" not in resumed.output_text()

    @pytest.mark.slow
    @pytest.mark.parametrize(("wait", "step", "code"), [(1.2, None, -signal.SIGTERM), (0.01, 4, EXIT_CODE)])
    def test_a_second_signal_ends_at_once(self, context, tiny_flux, tmp_path, wait, step, code):
        """But not the same one, which a launcher passes on to processes that have it."""
        stop(context, tiny_flux, tmp_path / "out", step, [code], signal={**GENERATION, "waits": [wait]})

    @pytest.mark.parametrize(
        ("number", "settings", "code"),
        [
            (signal.SIGTERM, {}, EXIT_CODE),
            (signal.SIGTERM, {"enable_jit_checkpoint": False}, None),
            (signal.SIGUSR2, {"jit_checkpoint_signals": ["SIGUSR2"]}, EXIT_CODE),
        ],
    )
    def test_in_a_command(self, make_trainer, number, settings, code):
        """Which handles signals itself, outside of `train`."""

        class Signal(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 1:
                    os.kill(os.getpid(), number)

        trainer = make_trainer(max_steps=4, callbacks=[Signal()], **settings)
        with pytest.raises(SystemExit) as end, stop_signals():
            trainer.train()
        # Without the option a signal ends the command at once
        assert isinstance(end.value, StopRequested) == (code is None) and end.value.code == EXIT_CODE
        saved = [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")]
        assert saved == ([] if code is None else ["checkpoint-2"])

    @pytest.mark.parametrize("is_repeated", [False, True])
    def test_ctrl_c_in_a_command_saves_what_was_trained(self, make_trainer, capfd, is_repeated):
        """Once it ends the run with a checkpoint, and says so at once; twice it ends it as it is."""

        class Interrupt(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                    assert "Stopping with a checkpoint" in capfd.readouterr().err
                    if is_repeated:
                        time.sleep(1.1)  # a launcher passes it on within a second
                        os.kill(os.getpid(), signal.SIGINT)

        trainer = make_trainer(max_steps=4, callbacks=[Interrupt()])
        assert main.run_command("grpo", lambda: train_and_save(trainer, None, None)) == 130
        said = capfd.readouterr().err
        saved = [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")]
        if is_repeated:
            assert saved == [] and said.endswith("paco-trl grpo: stopped. Nothing is saved.\n")
        else:
            assert saved == ["checkpoint-2"] and "Stopped by Ctrl-C at step 2, which is saved in" in said
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    @pytest.mark.parametrize("is_enabled", [True, False])
    def test_ctrl_c_in_python(self, make_trainer, is_enabled):
        """It raises what it does in every trainer; the caller may go on, and save what was trained."""

        class Interrupt(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 1:
                    os.kill(os.getpid(), signal.SIGINT)

        trainer = make_trainer(max_steps=4, enable_jit_checkpoint=is_enabled, callbacks=[Interrupt()])
        with pytest.raises(KeyboardInterrupt, match="step 2, which is saved" if is_enabled else ""):
            trainer.train()
        saved = [path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*")]
        assert saved == (["checkpoint-2"] if is_enabled else [])
        trainer.save_model()
        assert (Path(trainer.args.output_dir) / "adapter_model.safetensors").is_file()

    def test_ctrl_c_that_a_shell_lets_its_background_ignore(self):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with stop_signals(["SIGINT", "SIGTERM"]):
                assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
                assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        finally:
            signal.signal(signal.SIGINT, before)

    def test_workers_that_are_left_do_not_hold_up_the_exit(self):
        code = "from torch.utils.data import DataLoader\nfrom paco_trl.utils.stopping import ignore_stop_in_workers\n"
        code += "ignore_stop_in_workers(loader := DataLoader(range(99), num_workers=1), ['SIGTERM'])\n"
        code += "batches = iter(loader)\nprint(next(batches))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert (done.returncode, done.stdout) == (0, "tensor([0])\n"), done.stderr

    def test_after_the_last_exchange_the_command_ends(self):
        with pytest.raises(StopRequested) as end, stop_signals():
            defer_stop_signals()
            os.kill(os.getpid(), signal.SIGTERM)
            assert agree(Accelerator(cpu=True), 1) == [signal.SIGTERM, 1]
        assert end.value.code == os.EX_TEMPFAIL  # as the documentation says
        with stop_signals():
            assert agree(Accelerator(cpu=True), 1) == [0, 1]


@pytest.mark.slow
class TestInTwoProcesses:
    SETTINGS = {"processes": 2, "per_device_train_batch_size": 2}

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, context, tiny_flux, tmp_path_factory) -> Run:
        return Run(context, tiny_flux, tmp_path_factory.mktemp("two") / "out", **SETTINGS, **cls.SETTINGS)

    # One process alone gets it, or both
    @pytest.mark.parametrize(("at", "step"), [({**GENERATION, "rank": 1}, 4), (STEP, 5), (WAITING, 6)])
    def test_they_agree_on_the_step(self, context, tiny_flux, whole, tmp_path, at, step):
        output = tmp_path / "out"
        at = {**at, "number": signal.SIGUSR1}
        run = stop(context, tiny_flux, output, step, [EXIT_CODE] * 2, signal=at, **self.SETTINGS)
        assert run.output_text().count("Stopped by SIGUSR1") == 1
        check_same_end(Run(context, tiny_flux, output, resume="auto", **SETTINGS, **self.SETTINGS), whole)

    def test_with_zero3(self, context, tiny_flux, tmp_path):
        settings = {**self.SETTINGS, "zero3": True, "eval_strategy": "no", "max_steps": 4}
        whole = Run(context, tiny_flux, tmp_path / "whole", **SETTINGS, **settings)
        at = {**GENERATION, "step": 2, "rank": 1}
        stop(context, tiny_flux, tmp_path / "out", 2, [EXIT_CODE] * 2, signal=at, **settings)
        check_same_end(Run(context, tiny_flux, tmp_path / "out", resume="auto", **SETTINGS, **settings), whole)


# A command whose process gets a signal when there are so many files
SIGNALED = """
import os, sys, threading, time
from pathlib import Path
from paco_trl.commands.main import main
folder, pattern, count, number, *words = sys.argv[1:]
def send():
    while len(list(Path(folder).rglob(pattern))) < int(count):
        time.sleep(0.005)
    os.kill(os.getpid(), int(number))
threading.Thread(target=send, daemon=True).start()
sys.exit(main(words))
"""
PANELS = [f"a red fox in the {name}" for name in ("snow", "grass", "rain", "sun")]
PROMPTS = [
    {"id": f"{n}", "prompt": f"A grid of four photos of {n} red foxes.", "rows": 2, "cols": 2, "panels": PANELS}
    for n in range(6)
]


class TestCommands:
    def test_build(self, tiny_flux, tmp_path):
        whole, stopped, prompts = tmp_path / "whole", tmp_path / "stopped", tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
        command = ["-m", "paco_trl.commands.main", "build"]
        grids = f"grids --model_name_or_path {tiny_flux} --dtype float32 --num_inference_steps 2 --seeds 0 1".split()
        grids += ["--height", "32", "--width", "32"]
        for folder in (whole, stopped):
            folder.mkdir()
            check_run([*command, "prompts", "--dataset_name", prompts], cwd=folder)
        check_run([*command, *grids], cwd=whole)
        done = run(["-c", SIGNALED, stopped, "*.png", 3, int(signal.SIGTERM), "build", *grids], cwd=stopped)
        assert done.returncode == EXIT_CODE, done.stderr[-3000:]
        assert "stopped by SIGTERM: the same command resumes." in done.stderr
        left = {path.name for path in (stopped / "build/grids").iterdir()}
        assert "images" in left and not left & {"dataset", "dataset.saving", "report.json"}
        assert not list(stopped.rglob("*.part"))
        check_run([*command, *grids], cwd=stopped)
        images = [
            {path: content for path, content in files_in(each).items() if path.endswith(".png")}
            for each in (whole, stopped)
        ]
        assert images[0] == images[1] and len(images[0]) == 13  # with a sheet of them

    @pytest.mark.slow
    def test_a_launcher_passes_it_on(self, tiny_flux, tmp_path):
        """`paco-trl grpo` as users start it, with a text file and a reward of their own, on two processes."""
        (tmp_path / "prompts.txt").write_text("".join(f"A fox on hill {number}.\n" for number in range(4)))
        reward = "def size(prompts, completions, **kwargs):\n    return [image.width for image in completions]\n"
        (tmp_path / "my_rewards.py").write_text(reward)
        words = f"""
        --num_processes 2 --use_cpu --model_name_or_path {tiny_flux} --dataset_name prompts.txt
        --rewards redness my_rewards.py --bf16 False --ddp_backend gloo --height 64 --width 64 --num_generations 4
        --num_prompts_per_generation 4 --per_device_train_batch_size 2 --max_steps 10000 --save_steps 1
        --save_total_limit 2 --output_dir out --report_to none --log_completions False --plot_curves False
        --resume_from_checkpoint auto
        """
        command = [sys.executable, "-m", "paco_trl.commands.main", "grpo", *words.split()]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        with open(tmp_path / "log", "w") as log:
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 300
            while not list_checkpoints(tmp_path / "out") and process.poll() is None and time.monotonic() < end:
                time.sleep(0.1)
            process.send_signal(signal.SIGUSR1)
            assert process.wait(300) not in (0, -signal.SIGUSR1)
        finally:
            process.kill()
        (latest, *_), printed = list_checkpoints(tmp_path / "out"), (tmp_path / "log").read_text()
        assert printed.count(f"Stopped by SIGUSR1 at step {latest.name.split('-')[1]},") == 1, printed[-3000:]
        assert "on 2 process(es)" in printed and re.search(r"^ *step +redness +size ", printed, re.MULTILINE)
        assert not incomplete_files(latest) and "Traceback" not in printed


class TestSlurm:
    """examples/slurm.sh with programs in place of SLURM's: two tasks, and a list of what was asked of `scontrol`."""

    SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] && shift || exit 99
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done
wait -n; code=$?; wait; exit $code"""
    SCONTROL = """#!/bin/bash
[ "$1" = show ] && printf 'node-a\\nnode-b\\n' || echo "$@" >> asked"""
    TASK = """#!/bin/bash
echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*" > task-$RANK
[ -z "$SIGNAL" ] || kill -$SIGNAL $(cat shell)
exit $CODE"""

    @pytest.mark.parametrize(
        ("code", "to_shell", "is_requeued"), [(1, "", False), (75, "", True), (75, "TERM", False)]
    )
    def test_requeues_what_a_signal_has_stopped(self, tmp_path, code, to_shell, is_requeued):
        for name, text in {"srun": self.SRUN, "scontrol": self.SCONTROL, "paco-trl": self.TASK}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code), "SIGNAL": to_shell}
        environment |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "node-[a-b]"}
        script = f"echo $$ > shell; exec {ROOT}/examples/slurm.sh --output_dir 'a b'"
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, timeout=60)
        assert done.returncode == code
        for rank in range(2):
            words = f"{rank} {rank} 2 node-a 20007 grpo --resume_from_checkpoint auto --output_dir a b"
            assert (tmp_path / f"task-{rank}").read_text().split() == words.split()
        assert (tmp_path / "asked").exists() == is_requeued
        assert not is_requeued or (tmp_path / "asked").read_text() == "requeue 7\n"


def test_a_worker_that_is_forked_ends_as_any():
    """The thread of an event loop, on which the end of a process waits, is not in it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    abandon_at_exit(loop)
    try:
        worker = multiprocessing.get_context("fork").Process(target=int)
        worker.start()
        worker.join(30)
        assert worker.exitcode == 0
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
