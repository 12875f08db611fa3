# SPDX-License-Identifier: Apache-2.0
"""
Commands in processes of their own, forked from one in which everything is imported: an import takes ten seconds.

A few tests start real processes instead, by `sys.executable`, to show that the entries work; one of them starts the real
launcher of accelerate (`test_preemption.py::TestCommands::test_a_launcher_passes_it_on`).
"""

import atexit
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path


TESTS = Path(__file__).parent
ROOT = TESTS.parent
CONFIGS = ROOT / "paco_trl" / "accelerate_configs"
CPU_DDP, CPU_ZERO3, CPU_FSDP2 = (CONFIGS / f"cpu_{name}.yaml" for name in ("ddp", "zero3", "fsdp2"))
# What the tests' commands import, and what they import in functions
PRELOADED = [
    "launching", "kill_runs", "datasets", "matplotlib.pyplot", "PIL.Image", "peft", "trl", "rich.console",
    "diffusers.pipelines.flux.pipeline_flux", "diffusers.pipelines.flux.pipeline_flux_kontext",
    "transformers.models.clip.modeling_clip", "transformers.models.t5.modeling_t5",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "paco_trl.commands.main", "paco_trl.commands.doctor", "paco_trl.trainer.paco_grpo_trainer",
    "paco_trl.trainer.paco_reward_trainer",
    "diffusers.pipelines.onnx_utils", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_config",
]  # fmt: skip


@functools.cache
def fork_context():
    """Multiprocessing context whose processes are forked from one that has imported `PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    environment = {
        # What is preloaded is looked for there; `sys.path` is not passed on before a process is started
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "agg",
    }
    before = {name: os.environ.get(name) for name in environment}
    os.environ |= environment
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    atexit.register(multiprocessing.forkserver._forkserver._stop)
    return context


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _accelerate_environments(config: Path) -> list[dict[str, str]]:
    """Variables that `accelerate launch` and torchrun give each of their processes."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    port = str(free_port())
    words = ["--config_file", str(config), "--main_process_port", port, "script.py"]
    arguments, defaults, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, common = prepare_deepspeed_cmd_env(arguments)
    else:
        common = prepare_multi_gpu_env(arguments)
    common = {name: value for name, value in common.items() if os.environ.get(name) != value}
    size = str(arguments.num_processes)
    common |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(int(size))]


def run(command: list, *, config: Path | None = None, cwd=None, env=None, timeout=400) -> subprocess.CompletedProcess:
    """
    Run what follows `python` on a command line (`["script.py", ...]`, `["-m", module, ...]`, `["-c", code, ...]`), on
    as many processes as a config of `accelerate launch` says.
    """
    command = [str(word) for word in command]
    environment = dict(os.environ if env is None else env)
    environments = [environment]
    if config is not None:
        environments = [environment | variables for variables in _accelerate_environments(config)]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            {"command": command, "cwd": str(cwd or Path.cwd()), "environment": variables, "log": f"{folder}/{rank}"}
            for rank, variables in enumerate(environments)
        ]
        for job in jobs:
            for name in ("out", "err"):
                Path(f"{job['log']}.{name}").touch()
        processes = [fork_context().Process(target=_run_forked, args=(job,)) for job in jobs]
        for process in processes:
            process.start()
        is_in_time = _wait(processes, timeout)
        out, err = ("".join(Path(f"{job['log']}.{name}").read_text() for job in jobs) for name in ("out", "err"))
    codes = [process.exitcode for process in processes]
    if not is_in_time:
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    return subprocess.CompletedProcess(command, next(filter(None, codes), 0), out, err)


def check_run(command: list, **kwargs) -> str:
    """Run, and give what it printed."""
    done = run(command, **kwargs)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def _wait(processes: list, timeout: float) -> bool:
    """Wait until all have ended; one that fails takes the others with it, as torchrun does."""
    end = time.monotonic() + timeout
    while running := [process for process in processes if process.is_alive()]:
        multiprocessing.connection.wait([process.sentinel for process in running], max(end - time.monotonic(), 0))
        is_late = time.monotonic() >= end
        if is_late or any(process.exitcode for process in processes if not process.is_alive()):
            for process in processes:
                process.kill()
        if is_late:
            return False
    return True


def _run_forked(job: dict) -> None:
    gc.freeze()  # see conftest.py
    multiprocessing.set_start_method(None, force=True)  # what it starts is started as in any process
    for descriptor, name in ((1, "out"), (2, "err")):
        with open(f"{job['log']}.{name}", "w", encoding="utf-8") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    _read_hub_variables()
    sys.path[:0] = filter(None, job["environment"].get("PYTHONPATH", "").split(os.pathsep))
    code, (first, *words) = 0, job["command"]
    try:
        if first == "-m":
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.argv = ["-c", *words[1:]]
            sys.path.insert(0, "")
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = [first, *words]
            sys.path.insert(0, str(Path(first).parent))
            runpy.run_path(first, run_name="__main__")
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # As Python ends, without what C++ libraries do
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _read_hub_variables() -> None:
    """Read again what `huggingface_hub` and `datasets` read in the environment when they are imported."""
    import datasets.config
    import huggingface_hub.constants

    changed = {}
    for module in (huggingface_hub.constants, datasets.config):
        before = {name: value for name, value in vars(module).items() if isinstance(value, str | bool | Path)}
        importlib.reload(module)
        changed |= {name: (old, vars(module)[name]) for name, old in before.items() if old != vars(module)[name]}
    for module in list(sys.modules.values()):
        for name in changed.keys() & vars(module).keys():
            old, new = changed[name]
            if vars(module)[name] == old:
                setattr(module, name, new)
    huggingface_hub.hf_api.api.endpoint = huggingface_hub.constants.ENDPOINT
