# SPDX-License-Identifier: Apache-2.0
"""Training runs in processes that can be killed, for test_resume.py. They are forked from one that has imported all."""

import ctypes
import functools
import gc
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from accelerate.utils import is_deepspeed_available
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from launching import CPU_DDP, CPU_FSDP2, CPU_ZERO3, _accelerate_environments
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoNFTConfig, PaCoNFTTrainer
from paco_trl.checkpointing.weights import trained_parameters
from paco_trl.hub.cards import _TEMPLATES
from paco_trl.rewards import redness_reward
from paco_trl.rewards.scoring import RoundScoring
from paco_trl.utils.fsdp import gather_state, local_shard
from testing_utils import LORA, SMALL_RUN, square_prompts


if is_deepspeed_available():
    import deepspeed.ops  # Trainer does it, and it takes seconds: here once for all runs

    # Its operator for shared memory would be compiled first, by all cores for half a minute; without it gloo is used
    deepspeed.ops.__compatible_ops__ = {}

# What every run begins with: transformers compiles thousands of patterns for its first model, and jinja the card
get_checkpoint_conversion_mapping("t5")
_TEMPLATES.get_template("paco_grpo_model_card.md.jinja")
square_prompts()

# 8 optimizer steps, two a round. An epoch of the twelve prompts is three rounds, so checkpoint-6 ends one
SETTINGS = SMALL_RUN | {
    "sde_steps": [0, 1, 2], "num_sde_steps": 1, "max_steps": 8, "lr_scheduler_type": "cosine", "warmup_steps": 2,
    "ema_decay": 0.9, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 3,
    "num_inference_steps_eval": 2, "gradient_checkpointing": False,
}  # fmt: skip

# Of a log entry: what a clock has measured, and the means that Trainer takes over the steps since it was started
MEASURED = ("time/", "step_time", "images_per_second", "rollout_images_per_second", "train_", "total_flos")

CLONE_NEWNET = 0x40000000  # of <sched.h>; `os.setns` came with Python 3.12


def noisy_redness(prompts, completions, **kwargs):
    """A reward that draws from every global generator, as a judge that samples does."""
    noise = [random.random() + np.random.rand() + torch.rand(()).item() for _ in completions]
    return [value + 0.01 * n for value, n in zip(redness_reward(prompts, completions), noise, strict=True)]


def rank_in_group(prompts, completions, num_generations, **kwargs):
    """The fraction of the other images of the prompt that are less red."""
    assert len(completions) == num_generations and len(set(prompts)) == 1
    values = redness_reward(prompts, completions)
    return [sum(value > other for other in values) / (num_generations - 1) for value in values]


def make_run(model: str | Path, output: str | Path, **changes) -> PaCoGRPOTrainer:
    """A trainer; keyword arguments are those of `PaCoGRPOConfig`, and those of the trainer itself."""
    dataset = square_prompts()
    arguments = {
        "reward_funcs": noisy_redness,
        "train_dataset": dataset,
        "eval_dataset": dataset.select(range(2)),
        "peft_config": LORA,
    }
    arguments |= {name: changes.pop(name) for name in (*arguments, "callbacks") if name in changes}
    trainer_class, config_class = PaCoGRPOTrainer, PaCoGRPOConfig
    if changes.get("loss_type") == "awm":
        trainer_class, config_class = PaCoNFTTrainer, PaCoNFTConfig
    args = config_class(output_dir=str(output), **{**SETTINGS, **changes})
    return trainer_class(model=str(model), args=args, **arguments)


# ---- In the process that trains ----


class _AtSaving:
    """
    Kills its process, or fills its disk, while it saves the checkpoint of a step; or lists what it calls there.

    `kill` names a place among the calls of C functions that saving consists of: `{"call": 812}` is the 812th of them,
    `{"function": "posix.replace", "count": 1, "event": "c_call"}` the moment before the first `os.replace`, `c_return`
    that after it. Nothing of the package is replaced by something else.
    """

    def __init__(self, trainer, step, kill=None, file_limit=None, rank=0):
        self.trainer, self.step, self.kill, self.file_limit = trainer, step, kill, file_limit
        self.calls = []
        self.save = trainer._save_checkpoint
        trainer._save_checkpoint = self

    def __call__(self, model, trial):
        if self.trainer.state.global_step != self.step:
            return self.save(model, trial)
        if self.file_limit is not None:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.file_limit, hard))
        sys.setprofile(self._hook)
        try:
            return self.save(model, trial)
        finally:
            sys.setprofile(None)
            if self.file_limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def _hook(self, frame, event, function):
        if event not in ("c_call", "c_return"):
            return
        # `str.replace` is not what is meant
        name = f"posix.{function.__name__}" if function.__module__ == "posix" else function.__name__
        if event == "c_call":
            self.calls.append(name)
        if self.kill is None:
            return
        if "call" in self.kill:
            is_reached = len(self.calls) >= self.kill["call"]
        else:
            is_reached = (
                name == self.kill["function"]
                and event == self.kill.get("event", "c_call")
                and self.calls.count(name) >= self.kill.get("count", 1)
            )
        if is_reached:
            os.kill(os.getpid(), signal.SIGKILL)


class _AtSignal:
    """Sends its own process a signal: at a call of a method of the trainer, or of the scoring of a round, after some steps."""

    def __init__(self, trainer, step, call, count=2, number=signal.SIGTERM, waits=(), rank=None):
        self.trainer, self.step, self.number, self.waits, self.left = trainer, step, number, waits, count
        *owner, name = call.split(".")
        owner = RoundScoring if owner == ["scoring"] else functools.reduce(getattr, owner, trainer)
        self.call = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: self(*args, **kwargs))

    def __call__(self, *args, **kwargs):
        self.left -= self.trainer.state.global_step == self.step
        if self.left == 0:
            self.left = -1
            os.kill(os.getpid(), self.number)
            for seconds in self.waits:
                time.sleep(seconds)
                os.kill(os.getpid(), self.number)
        return self.call(*args, **kwargs)


def _train(job: dict, rank: int) -> None:
    gc.freeze()  # see conftest.py
    with open(job["log"] + f".{rank}", "w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if job["machines"]:
        with open(f"/run/netns/{job['machines'][rank]}", encoding="utf-8") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
        os.environ["GLOO_SOCKET_IFNAME"] = "cable"  # the name of the host leads to an address outside
    os.environ |= job["environments"][rank]
    result = {"rank": rank}
    try:
        trainer = make_run(job["model"], job["output"], **job["settings"])
        at_saving = None
        if job["saving"] is not None and job["saving"].get("rank", 0) == rank:
            at_saving = _AtSaving(trainer, **job["saving"])
        if job["signal"] is not None and job["signal"].get("rank", rank) == rank:
            _AtSignal(trainer, **job["signal"])
        trainer.train(resume_from_checkpoint=job["resume"])
        trainer.save_model()
        result |= _state_of(trainer, job)
        result["calls"] = at_saving.calls if at_saving is not None else []
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    sys.stdout.flush()
    sys.stderr.flush()
    torch.save(result, job["log"] + f".result-{rank}")
    os._exit(1 if "error" in result else 0)  # without gloo's and DeepSpeed's ends


def _state_of(trainer: PaCoGRPOTrainer, job: dict) -> dict:
    """All that a resumed run must have in common with one that was not interrupted."""
    is_zero = trainer.is_deepspeed_enabled
    history = [
        {name: value for name, value in entry.items() if not name.startswith(MEASURED)}
        for entry in trainer.state.log_history
    ]
    output = Path(job["output"])
    state = {
        "global_step": trainer.state.global_step,
        "history": history,
        "scheduler": trainer.lr_scheduler.state_dict() if not is_zero else trainer.lr_scheduler.get_last_lr(),
        "python": random.getstate(),
        "numpy": list(np.random.get_state(legacy=True)),
        "torch": torch.get_rng_state(),
        "best": trainer.state.best_model_checkpoint,
        "ema": dict(trainer.ema.average) if trainer.ema is not None else None,
    }
    if not is_zero:
        state["policy"] = {n: local_shard(p.detach()).clone() for n, p in trained_parameters(trainer.model).items()}
        state["optimizer"] = gather_state(trainer.optimizer, keep=True)["state"]
    if trainer.accelerator.is_main_process and (output / "transformer").exists():
        (file,) = (output / "transformer").glob("*.safetensors")
        state["transformer"] = load_file(file)
    elif trainer.accelerator.is_main_process:
        state["adapter"] = load_file(output / "adapter_model.safetensors")
        state["adapter file"] = (output / "adapter_model.safetensors").read_bytes()
        state["diffusers adapter"] = load_file(output / "pytorch_lora_weights.safetensors")
        # Not the bytes: safetensors writes several metadata entries in random order
        with safe_open(output / "pytorch_lora_weights.safetensors", "pt") as file:
            state["diffusers metadata"] = file.metadata()
    return state


# ---- In the process of the tests ----


class Run:
    """
    A run in one process or two of its own.

    `saving` and `signal` are arguments of `_AtSaving` and `_AtSignal`, with the `rank` of the process (a signal
    without it is for all); `zero3` and `fsdp2` divide the model over the processes; `machines` are their network namespaces, and
    `address` is that of the first. The others are settings.
    """

    def __init__(
        self, context, model, output, resume=None, saving=None, processes=1, zero3=False, fsdp2=False, signal=None,
        machines=(), address="127.0.0.1", **settings,
    ):  # fmt: skip
        self.output = Path(output)
        self.log = f"{self.output}.log-{time.monotonic_ns()}"
        self.output.parent.mkdir(parents=True, exist_ok=True)
        environments = [{}]
        if processes > 1:
            settings.setdefault("ddp_backend", "gloo")
            environments = _accelerate_environments(CPU_ZERO3 if zero3 else CPU_FSDP2 if fsdp2 else CPU_DDP)
            environments = [variables | {"MASTER_ADDR": address} for variables in environments]
        job = {
            "model": str(model), "output": str(output), "resume": resume, "saving": saving, "signal": signal,
            "settings": settings, "log": self.log, "machines": machines, "environments": environments,
        }  # fmt: skip
        self.processes = [context.Process(target=_train, args=(job, rank)) for rank in range(processes)]
        for process in self.processes:
            process.start()

    def is_running(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def wait_for_checkpoint(self, step: int) -> None:
        """Waits until a checkpoint is there, and the run not at its end."""
        while not (self.output / f"checkpoint-{step}").exists():
            assert self.is_running(), self.output_text()[-3000:]
            self.processes[0].join(0.01)

    def kill(self) -> None:
        """SIGKILL to all processes."""
        for process in self.processes:
            process.kill()
        self.wait()

    def wait(self, timeout: float = 240) -> None:
        """Waits until all processes have ended."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0))
        if self.is_running():
            self.kill()
            raise TimeoutError(f"The run has not ended.\n{self.output_text()}")

    @property
    def codes(self) -> list[int]:
        self.wait()
        return [process.exitcode for process in self.processes]

    @property
    def was_killed(self) -> list[bool]:
        return [code == -signal.SIGKILL for code in self.codes]

    def output_text(self) -> str:
        return "\n".join(Path(f"{self.log}.{rank}").read_text() for rank in range(len(self.processes)))

    def result(self, rank: int = 0) -> dict:
        """What a process that was not killed has left: its state, or its error."""
        self.wait()
        path = Path(f"{self.log}.result-{rank}")
        assert path.exists(), self.output_text()[-6000:]
        return torch.load(path, weights_only=False)

    def state(self, rank: int = 0) -> dict:
        result = self.result(rank)
        assert "error" not in result, self.output_text()[-6000:]
        return result


def same(a, b) -> bool:
    """Whether two nested structures are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


def different(a: dict, b: dict, ignore: tuple[str, ...] = ("calls", "best", "rank")) -> list[str]:
    """Names of what is not equal in the final states of two runs."""
    assert a.keys() - set(ignore) == b.keys() - set(ignore)
    return [name for name in a if name not in ignore and not same(a[name], b[name])]


def check_same_end(run: Run, reference: Run) -> None:
    """Each process has ended in the state of that of the other run."""
    for rank in range(len(reference.processes)):
        assert not different(reference.state(rank), run.state(rank)), rank


def relative_difference(one: dict, two: dict) -> float:
    """The distance of two trained LoRAs as a fraction of what training changed, of which `lora_B` is all that it has."""
    changed = [name for name in one if "lora_B" in name]
    distance = sum((one[name] - two[name]).double().square().sum() for name in one)
    return float((distance / sum(one[name].double().square().sum() for name in changed)).sqrt())


def copy_run(source: Path, target: Path, steps: list[int]) -> Path:
    """A copy of some checkpoints of a run, with its baseline."""
    if (source / "evaluation").exists():
        shutil.copytree(source / "evaluation", target / "evaluation", dirs_exist_ok=True)
    for step in steps:
        shutil.copytree(source / f"checkpoint-{step}", target / f"checkpoint-{step}")
    return target
