# SPDX-License-Identifier: Apache-2.0
"""
Run every measurement that needs a GPU, one after the other: what `make gpu` does.

    python benchmarks/gpu.py                                  # on a machine with one NVIDIA GPU
    python benchmarks/gpu.py --steps tests flux-512           # some of the steps
    python benchmarks/gpu.py --rehearse                       # small models on the CPU, to see that all of it runs

Each step is a process with its own time limit, and writes `gpu_<step>.json` to the output directory as its results come.
A step that fails, takes too long or does not fit in memory does not stop the others. Nothing is downloaded: the models
have the real configs and random weights.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table


BENCHMARKS = Path(__file__).resolve().parent
ROOT = BENCHMARKS.parent


# The time limit of each step in minutes, and its command line. In the order of their importance: what comes last is left
# out when the time is over
STEPS = {
    "tests": (4, "gpu_tests.py"),
    "flux-512": (4, "gpu_rounds.py --sweep flux-512"),
    "flux-512-kernels": (6, "gpu_rounds.py --sweep flux-512-kernels"),
    "flux-512-memory": (5, "gpu_rounds.py --sweep flux-512-memory"),
    "training": (4, "gpu_rounds.py --sweep training"),
    "flux-1024": (4, "gpu_rounds.py --sweep flux-1024"),
    "kontext-384": (3, "gpu_rounds.py --sweep kontext-384"),
    "judge-scoring": (3, "gpu_judge.py --part scoring"),
    "judge-training": (3, "gpu_judge.py --part training"),
}


def command_of(name: str, args: argparse.Namespace, folder: str) -> list[str]:
    """What follows `python` on the command line of a step."""
    script, *words = STEPS[name][1].split()
    words += ["--device", "cpu"] if args.rehearse else ["--real", "--device", "cuda"]
    words += ["--output", str(result_of(name, args)), "--folder", folder]
    if args.num_generations is not None and script == "gpu_rounds.py":
        words += ["--num_generations", str(args.num_generations)]
    return [str(BENCHMARKS / script), *words]


def result_of(name: str, args: argparse.Namespace) -> Path:
    return args.output / f"gpu_{name}.json"


def environment() -> dict[str, str]:
    """Variables of a step: offline, and with this checkout's modules."""
    paths = [str(ROOT), str(BENCHMARKS), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}


def execute(command: list[str], log: Path, seconds: float) -> int | None:
    """Run Python on a command line into a log, and return the exit code; `None` if it was stopped after `seconds`."""
    # In a session of its own, so that what it starts is stopped with it
    options = {"stderr": subprocess.STDOUT, "env": environment(), "cwd": ROOT, "start_new_session": True}
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen([sys.executable, *command], stdout=file, **options) as process,
    ):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def run_step(name: str, args: argparse.Namespace, seconds_left: float) -> dict:
    """Run a step, and return how it ended."""
    if seconds_left <= 0:
        return {"result": "left out", "reason": f"the {args.minutes:g} minutes are over", "seconds": 0}
    # A rehearsal says nothing of a step's time
    limit, started = min(math.inf if args.rehearse else 60 * STEPS[name][0], seconds_left), time.monotonic()
    result_of(name, args).unlink(missing_ok=True)
    log = args.output / f"{name}.log"
    with tempfile.TemporaryDirectory() as folder:  # models of tens of GB
        code = execute(command_of(name, args, folder), log, limit)
    done = {"result": "done", "reason": "", "seconds": round(time.monotonic() - started, 1)}
    if code is None:
        return done | {"result": "stopped", "reason": f"it took more than {limit:.0f} s; what it wrote before is kept"}
    if code != 0:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"it ended with {code}"
        return done | {"result": "failed", "reason": reason[:300]}
    return done


def flatten(values: dict, prefix: str = "") -> list[str]:
    """One line for each number of nested results."""
    lines = []
    for name, value in values.items():
        lines += flatten(value, f"{prefix}{name}: ") if isinstance(value, dict) else [f"{prefix}{name}: {value}"]
    return lines


def result_lines(report: dict) -> list[str]:
    """The lines of a step in the table, from its JSON."""
    lines = [f"{run['setting']}: {run['summary']}" for run in report.get("runs", [])]
    lines += flatten(report.get("ratios", {}))
    return lines + [f"left out: {entry['setting']}: {entry['reason']}" for entry in report.get("left out", [])]


def print_table(console: Console, steps: dict[str, dict], args: argparse.Namespace) -> None:
    table = Table(title="GPU run" + (", rehearsed on the CPU with small models" if args.rehearse else ""))
    for column in ("step", "result", "seconds", "figures"):
        table.add_column(column, overflow="fold")
    for name, step in steps.items():
        path = result_of(name, args)
        lines = result_lines(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []
        lines = [step["reason"], *lines] if step["reason"] else lines
        table.add_row(name, step["result"], f"{step['seconds']:g}", "\n".join(lines), end_section=True)
    console.print(table, markup=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-output"), help="directory of the results")
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--minutes", type=float, default=25, help="of all steps together")
    parser.add_argument("--num_generations", type=int, help="images of a prompt in the rounds of FLUX and Kontext")
    parser.add_argument("--rehearse", action="store_true", help="small models on the CPU")
    args = parser.parse_args(arguments)
    if not args.rehearse:
        import torch

        if not torch.cuda.is_available():
            parser.error("there is no CUDA device; --rehearse runs small models on the CPU")
    args.output = args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    console = Console(width=160 if not sys.stdout.isatty() else None)
    end, steps = time.monotonic() + 60 * args.minutes, {}
    for name in args.steps:
        steps[name] = run_step(name, args, end - time.monotonic())
        summary = json.dumps({"rehearsed": args.rehearse, "steps": steps}, indent=2)
        (args.output / "gpu_summary.json").write_text(summary + "\n", encoding="utf-8")
        outcome = ", ".join(filter(None, [steps[name]["result"], steps[name]["reason"]]))
        console.print(f"{name}: {outcome} ({steps[name]['seconds']:g} s)", markup=False)
    print_table(console, steps, args)
    files = [result_of(name, args) for name in args.steps] + [args.output / "gpu_training.png"]
    files = [file for file in files if file.exists()]
    console.print("Files to commit to benchmarks/" + (", had it not been a rehearsal:" if args.rehearse else ":"))
    for file in files:
        console.print(f"  {file}", markup=False, soft_wrap=True)
    return 0 if all(step["result"] == "done" for step in steps.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
