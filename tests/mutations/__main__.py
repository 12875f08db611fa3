# SPDX-License-Identifier: Apache-2.0
"""
Plant errors in the lines that decide numbers or safety, one at a time, and see whether the tests notice.

    python tests/mutations [--jobs 2] [--only TEXT] [--list core|edges|sampled]

Each error is planted in a copy of the repository; the heavy libraries are imported once, and a test run is a fork.
"""

import argparse
import gc
import importlib
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path


ROOT = Path(__file__).parents[2]
LISTS = ("core", "edges", "sampled")
REQUIRED = 0.98  # fraction of errors that the tests must notice
SECONDS = 120  # limit of a test run
LEFT_OUT = (".git", ".venv*", ".*_cache", "__pycache__", "build", "demo-output", "gpu-output", "site")
HEAVY = {
    "torch": (), "torchvision": (), "scipy.stats": (), "datasets": ("Dataset",), "accelerate": (), "peft": ("LoraConfig",),
    "trl": ("GRPOTrainer", "GRPOConfig"), "transformers": ("Trainer", "AutoTokenizer", "AutoProcessor", "AutoModel"),
    "diffusers": ("DiffusionPipeline", "FluxPipeline", "AutoencoderKL"), "matplotlib.pyplot": (), "pytest": (),
}  # fmt: skip

copy = Path()  # of the repository, for this process
baselines: dict[str, str] = {}  # by tests: how they end without a planted error


def prepare() -> None:
    """Copy the repository for a process that runs tests."""
    global copy
    copy = Path(tempfile.mkdtemp(prefix="mutants-")) / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))


def run(tests: str, is_planted: bool) -> str:
    """Run tests in a fork, and return how they end: "passed", "failed" or "TIMEOUT"."""
    output = copy.parent / "output.txt"
    output.unlink(missing_ok=True)
    if (child := os.fork()) == 0:
        code = 99
        try:
            os.setsid()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            with output.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            # A planted error may have the size of what it replaces: its bytecode must not be found again
            sys.dont_write_bytecode = is_planted
            sys.path[0], os.environ["PYTHONPATH"] = str(copy), str(copy)
            os.chdir(copy)
            spec = importlib.util.find_spec("paco_trl")
            assert spec is not None and Path(spec.origin).is_relative_to(copy), spec  # not an installed one
            base = copy.parent / "tests"
            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "", f"--basetemp={base}"]
            code = importlib.import_module("pytest").main([*options, *shlex.split(tests)])
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    try:
        os.killpg(child, signal.SIGKILL)  # what the tests have started
    except ProcessLookupError:
        pass
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return "TIMEOUT"
    return "passed" if status == 0 else "failed"


def judge(mutant: tuple) -> tuple[str, float]:
    """Plant an error, and return the verdict and the seconds of its tests."""
    path, old, new, tests = mutant[:4]
    file = copy / path
    source = file.read_text(encoding="utf-8")
    if source.count(old) != 1 or old == new:
        return "ABSENT", 0.0  # or more than once
    if tests not in baselines:
        baselines[tests] = run(tests, is_planted=False)
    if baselines[tests] != "passed":
        return "BROKEN", 0.0
    times, started = file.stat(), time.perf_counter()
    file.write_text(source.replace(old, new), encoding="utf-8")
    try:
        ending = run(tests, is_planted=True)
    finally:
        file.write_text(source, encoding="utf-8")
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return {"passed": "SURVIVED", "failed": "killed"}.get(ending, ending), time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/mutations")
    parser.add_argument("--jobs", type=int, default=2, help="test runs at a time")
    parser.add_argument("--only", default="", help="plant only errors whose file, code or tests contain this")
    parser.add_argument("--list", choices=LISTS, help="plant only the errors of one list")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO,STRICT", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    mutants = []
    for name in [args.list] if args.list else LISTS:
        mutants += importlib.import_module(name).MUTANTS
    mutants = [mutant for mutant in mutants if any(args.only in text for text in mutant)]
    for name, members in HEAVY.items():
        module = importlib.import_module(name)
        for member in members:  # they are imported at their first use
            getattr(module, member)
    gc.collect()
    gc.freeze()

    verdicts, survivors = Counter(), []
    with ProcessPoolExecutor(args.jobs, get_context("fork"), prepare) as executor:
        for mutant, (verdict, seconds) in zip(mutants, executor.map(judge, mutants), strict=True):
            path, old, new, tests, *reason = mutant
            verdicts[verdict] += 1
            planted = f"{path}: {' '.join(old.split())}  ->  {' '.join(new.split())}"
            print(f"{verdict:8} {seconds:5.1f} s  {planted}", flush=True)
            if verdict == "BROKEN":
                print(f"    fails without an error, too: {tests}", flush=True)
            elif verdict == "SURVIVED":
                survivors.append(f"{planted}\n    {reason[0] if reason else 'no reason is known'}")
    gc.unfreeze()  # or nanobind reports what is left at the end
    killed = verdicts["killed"] + verdicts["TIMEOUT"]
    print(f"\n{dict(verdicts)}: {killed} of {len(mutants)} errors were noticed, {killed / max(len(mutants), 1):.1%}")
    print("\n".join(survivors))
    return int(killed < REQUIRED * len(mutants) or bool(verdicts["ABSENT"] + verdicts["BROKEN"]))


if __name__ == "__main__":
    sys.exit(main())
