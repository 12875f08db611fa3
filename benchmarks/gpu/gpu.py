# SPDX-License-Identifier: Apache-2.0
"""
Run every measurement that needs a GPU, one after the other: what `make gpu` does.

    python benchmarks/gpu/gpu.py                                  # on a machine with one NVIDIA GPU
    python benchmarks/gpu/gpu.py --steps tests flux-512           # some of the steps
    python benchmarks/gpu/gpu.py --rehearse                       # small models on the CPU, to see that all of it runs

Each step is a process with its own time limit, and writes `gpu_<step>.json` to the output directory as its results come.
A step that fails, takes too long or does not fit in memory does not stop the others; the exit code is then 1. Nothing is
downloaded: the models have the real configs and random weights.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table


HERE = Path(__file__).resolve().parent
BENCHMARKS, ROOT = HERE.parents[:2]


# Minutes of each step, 30 together, and its command line. A step may also use what those before it left of theirs
STEPS = {
    # tests/test_gpu.py: the ratio in bf16 for each family, attention backends, compiled blocks, quantized weights,
    # offloading, a reward on the GPU, evaluation, resuming
    "tests": (3.5, "gpu_tests.py"),
    # rounds of FLUX.1-dev by per_device_train_batch_size and per_device_rollout_batch_size: times, fraction of the
    # card's peak, memory of each phase, deviation of the ratio in two rounds
    "flux-512": (2.5, "gpu_rounds.py --sweep flux-512"),
    # the same by attention_backend and with compile_repeated_blocks
    "flux-512-kernels": (3.5, "gpu_rounds.py --sweep flux-512-kernels"),
    # the same without gradient checkpointing, with text encoders of the real depth (elsewhere one layer), and with
    # quantized weights
    "flux-512-memory": (3.5, "gpu_rounds.py --sweep flux-512-memory"),
    # ten rounds at 256 pixels and full model size for redder images, and ten for the opposite
    "training": (2.5, "gpu_rounds.py --sweep training"),
    # rounds with tail_steps
    "flux-512-tail": (1, "gpu_rounds.py --sweep flux-512-tail"),
    # rounds with and without a 7B judge in the process, and with CLIP-T, also beside cuDNN's attention
    "flux-512-rewards": (3.5, "gpu_rounds.py --sweep flux-512-rewards"),
    # rounds at 1024 pixels by batch size, and without gradient checkpointing
    "flux-1024": (2, "gpu_rounds.py --sweep flux-1024"),
    # rounds of FLUX.1-Kontext at 384 x 384, by batch size
    "kontext-384": (1, "gpu_rounds.py --sweep kontext-384"),
    # the same of Qwen-Image-Edit, one image at a time, with and without gradient checkpointing
    "qwen-image-edit-384": (2, "gpu_rounds.py --sweep qwen-image-edit-384"),
    # a judge of the size of Qwen2.5-VL-7B: pairs per second, compared with the published usage
    "judge-scoring": (1.5, "gpu_judge.py --part scoring"),
    # its LoRA step, compared with the logits of every position, with a differentiated vision tower, without cuDNN's
    # attention, and with flash-attn
    "judge-training": (2, "gpu_judge.py --part training"),
    # its scoring of sets of new and of known sizes, by attention: PyTorch's choice, without cuDNN's, flash-attn
    "judge-attention": (1, "gpu_judge.py --part attention"),
}


def command_of(name: str, args: argparse.Namespace, folder: str) -> list[str]:
    """What follows `python` on the command line of a step."""
    script, *words = STEPS[name][1].split()
    words += ["--device", args.device] + ([] if args.rehearse else ["--real"])
    words += ["--output", str(result_of(name, args)), "--folder", folder]
    if args.num_generations is not None and script == "gpu_rounds.py":
        words += ["--num_generations", str(args.num_generations)]
    return [str(HERE / script), *words]


def result_of(name: str, args: argparse.Namespace) -> Path:
    return args.output / f"gpu_{name}.json"


def environment() -> dict[str, str]:
    """Variables of a step: offline, on one GPU, and with this checkout's modules."""
    folders = [ROOT, HERE, BENCHMARKS / "speed", BENCHMARKS / "memory", ROOT / "tests"]
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {"CUDA_VISIBLE_DEVICES": "0", **os.environ, **own}


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


def seconds_of(args: argparse.Namespace) -> dict[str, float]:
    """The time after which each step is stopped, in seconds from the start: `args.minutes` divided as in `STEPS`."""
    whole = 60 * args.minutes
    if args.rehearse:  # says nothing of a step's time
        return dict.fromkeys(args.steps, whole)
    minutes = [STEPS[name][0] for name in args.steps]
    ends = [whole * sum(minutes[: index + 1]) / sum(minutes) for index in range(len(minutes))]
    return dict(zip(args.steps, ends, strict=True))


def run_step(name: str, args: argparse.Namespace, limit: float) -> dict:
    """Run a step for at most `limit` seconds, and return how it ended."""
    if limit <= 0:
        return {"result": "left out", "reason": f"the {args.minutes:g} minutes are over", "seconds": 0}
    started, log = time.monotonic(), args.output / f"{name}.log"
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
    kinds = ("failed", "left out")
    return lines + [f"{kind}: {each['setting']}: {each['reason']}" for kind in kinds for each in report.get(kind, [])]


def markdown(reports: dict[Path, dict]) -> str:
    """Every ratio of the results as text for `benchmarks/gpu/README.md`, where a test looks for them."""
    lines = []
    for path, report in reports.items():
        lines += [f"[`{path.name}`]({path.name}), {report['machine']['device']}:", ""]
        for name, value in report["ratios"].items():
            values = value if isinstance(value, dict) else {"": value}
            lines.append(f"- {name}: {', '.join(f'{each} {number}'.strip() for each, number in values.items())}")
        lines.append("")
    return "\n".join(lines)


def print_table(console: Console, steps: dict[str, dict], reports: dict[Path, dict], args: argparse.Namespace) -> None:
    table = Table(title="GPU run" + (", rehearsed with small models" if args.rehearse else ""))
    for column in ("step", "result", "seconds", "figures"):
        table.add_column(column, overflow="fold")
    for name, step in steps.items():
        lines = result_lines(reports.get(result_of(name, args), {}))
        lines = [step["reason"], *lines] if step["reason"] else lines
        table.add_row(name, step["result"], f"{step['seconds']:g}", "\n".join(lines), end_section=True)
    console.print(table, markup=False)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-output"), help="directory of the results")
    parser.add_argument("--steps", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--minutes", type=float, default=30, help="of all steps together")
    parser.add_argument("--num_generations", type=int, help="images of a prompt in the rounds of FLUX and Kontext")
    parser.add_argument("--rehearse", action="store_true", help="small models, on the CPU by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="of a rehearsal: `cuda` is for a simulated GPU")
    args = parser.parse_args(arguments)
    args.device = args.device or ("cpu" if args.rehearse else "cuda")
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("PyTorch finds no NVIDIA GPU here; --rehearse runs all steps with small models on the CPU.")
    args.output = args.output.resolve()
    args.output.mkdir(parents=True, exist_ok=True)
    figure, text = args.output / "gpu_training.png", args.output / "gpu.md"
    for path in [*(result_of(name, args) for name in args.steps), figure, text]:
        path.unlink(missing_ok=True)  # of an earlier run
    console = Console(width=160 if not sys.stdout.isatty() else None)
    started, ends, steps = time.monotonic(), seconds_of(args), {}
    for name in args.steps:
        steps[name] = run_step(name, args, ends[name] - (time.monotonic() - started))
        summary = json.dumps({"rehearsed": args.rehearse, "steps": steps}, indent=2)
        (args.output / "gpu_summary.json").write_text(summary + "\n", encoding="utf-8")
        outcome = ", ".join(filter(None, [steps[name]["result"], steps[name]["reason"]]))
        console.print(f"{name}: {outcome} ({steps[name]['seconds']:g} s)", markup=False)
    paths = [path for name in args.steps if (path := result_of(name, args)).exists()]
    reports = {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    print_table(console, steps, reports, args)
    text.write_text(markdown(reports), encoding="utf-8")
    console.print("Files to commit to benchmarks/gpu/" + (", had it not been a rehearsal:" if args.rehearse else ":"))
    for path in [*reports, *([figure] if figure.exists() else [])]:
        console.print(f"  {path}", markup=False, soft_wrap=True)
    console.print(f"Their figures, for benchmarks/gpu/README.md: {text}", markup=False, soft_wrap=True)
    return 0 if all(step["result"] == "done" for step in steps.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
