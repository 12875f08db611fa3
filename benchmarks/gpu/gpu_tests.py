# SPDX-License-Identifier: Apache-2.0
"""Run the tests that need a GPU, and write how each ended: a step of `gpu.py`."""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

import pytest

from gpu_rounds import machine, write_json


# A few of all families, and none that other tests have on the CPU
REHEARSED = (
    "not (qwen or diffusion or flux2 or z-image or longcat or ovis or compiled or offloading or turns or resumed)"
)


class Results:
    """Pytest plugin that writes how the tests ended, after each one."""

    def __init__(self, output: Path, device: str):
        self.output, self.machine = output, machine(device)
        self.outcomes: dict[str, str] = {}
        self.left_out: list[dict] = []

    def pytest_runtest_logreport(self, report) -> None:
        name = report.nodeid.split("::", 1)[1]
        if report.skipped:
            self.left_out.append({"setting": name, "reason": report.longrepr[2].removeprefix("Skipped: ")})
        if report.when == "call" or not report.passed:
            self.outcomes[name] = report.outcome

    def pytest_runtest_logfinish(self) -> None:
        ratios = {"tests": dict(Counter(self.outcomes.values()))}
        report = {"machine": self.machine, "ratios": ratios, "left out": self.left_out, "tests": self.outcomes}
        write_json(self.output, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="every test")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--folder", help="unused")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    os.environ["PACO_TRL_TEST_DEVICE"] = args.device
    results = Results(args.output, args.device)
    tests = Path(__file__).resolve().parents[2] / "tests" / "test_gpu.py"
    words = [str(tests), "-m", "gpu", "-q", "-p", "no:cacheprovider", *([] if args.real else ["-k", REHEARSED])]
    code = pytest.main(words, plugins=[results])
    failed = [name for name, outcome in results.outcomes.items() if outcome == "failed"]
    if code:
        sys.exit(f"failed: {', '.join(failed)}" if failed else f"pytest ended with {int(code)}")


if __name__ == "__main__":
    main()
