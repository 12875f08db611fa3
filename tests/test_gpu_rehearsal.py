# SPDX-License-Identifier: Apache-2.0
"""`make gpu`, rehearsed on the CPU with small models: the same steps, whose processes are forked (see `launching.py`)."""

import json
import os
import re
import subprocess
import sys

import pytest

import launching
from launching import ROOT


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu"))
    import gpu

    return gpu


@pytest.fixture
def forked(gpu, monkeypatch):
    """Starts the steps without importing everything each time."""

    def execute(command, log, seconds):
        try:
            done = launching.run(command, env=gpu.environment(), cwd=ROOT, timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
        return done.returncode

    monkeypatch.setattr(gpu, "execute", execute)


@pytest.fixture
def rehearse(gpu, capsys, tmp_path):
    """Runs the command in the same directory each time; returns its exit code, how the steps ended, and the output."""

    def run(*arguments) -> tuple[int, dict, str]:
        code = gpu.main(["--rehearse", "--output", str(tmp_path), "--minutes", "180", *arguments])
        return code, json.loads((tmp_path / "gpu_summary.json").read_text())["steps"], capsys.readouterr().out

    return run


def settings_of(entries: list[dict]) -> list[str]:
    return [entry["setting"] for entry in entries]


@pytest.mark.slow
def test_steps_write_their_results(gpu, forked, rehearse, tmp_path):
    """One of each kind; all of them run on a simulated GPU (`test_simulated_gpu.py`)."""
    chosen = ["tests", "training", "flux-512-tail", "judge-scoring", "judge-training"]
    code, steps, printed = rehearse("--steps", *chosen)
    logs = [(tmp_path / f"{name}.log").read_text()[-3000:] for name in steps if steps[name]["result"] == "failed"]
    assert code == 0 and list(steps) == chosen, "\n".join(logs)
    reports = {name: json.loads((tmp_path / f"gpu_{name}.json").read_text()) for name in steps}
    text = (tmp_path / "gpu.md").read_text()
    for name, report in reports.items():
        assert report["machine"]["device"] == "CPU"
        assert f"gpu_{name}.json" in printed.split("Files to commit")[1]
        assert f"[`gpu_{name}.json`](gpu_{name}.json), CPU:" in text
        ratios = [number for of in report["ratios"].values() for number in (of.values() if type(of) is dict else [of])]
        assert ratios and all(str(number) in text for number in ratios), name
    sweeps = {name: report for name, report in reports.items() if "sweep" in report}
    assert len(sweeps) == 2
    for report in sweeps.values():
        for run in report["runs"]:
            assert run["seconds of a forward, an image"] > 0 and run["TFLOP of a forward, an image"] > 0
            assert 0 < run["seconds of the training, an image"] < run["seconds of a round, an image"]
            assert len(run["largest mean |ratio - 1| on policy, by round"]) == 2
            assert run["setting"] in printed
    assert reports["tests"]["ratios"]["tests"]["passed"] >= 6
    forwards = [run["forwards of the rollout, an image"] for run in sweeps["flux-512-tail"]["runs"]]
    # Of 4 steps, the second of which is stochastic: all, and with one step after it
    assert forwards == [4, 3]
    assert reports["training"]["runs"][0]["mean reward of each round"][0] != 0
    assert (tmp_path / "gpu_training.png").read_bytes().startswith(b"\x89PNG")
    assert reports["judge-scoring"]["layouts"]["2x3"]["pairs per second"].keys() == {"ours", "published"}
    assert len(reports["judge-training"]["seconds of a step"]) == 4
    assert settings_of(reports["judge-training"]["left out"]) == ["flash-attn"]


@pytest.mark.slow
def test_a_step_that_fails_does_not_stop_the_others(forked, rehearse, tmp_path):
    # One image is not a group: the config refuses it in each setting of the first step
    code, steps, printed = rehearse("--num_generations", "1", "--steps", "flux-1024", "judge-scoring")
    assert code == 1
    assert steps["flux-1024"]["result"] == "failed" and "`num_generations`" in steps["flux-1024"]["reason"]
    assert steps["judge-scoring"]["result"] == "done"
    report = json.loads((tmp_path / "gpu_flux-1024.json").read_text())
    assert settings_of(report["failed"]) == ["batch 2", "batch 1", "batch 1, checkpointing False"]
    assert report["runs"] == report["left out"] == []
    assert "failed: batch 1: OptionError" in printed.replace("\n", " ")

    # Again: nothing is left of the first time
    code, steps, printed = rehearse("--steps", "flux-1024")
    assert code == 0 and steps["flux-1024"]["result"] == "done" and list(steps) == ["flux-1024"]
    report = json.loads((tmp_path / "gpu_flux-1024.json").read_text())
    assert report["failed"] == [] and len(report["runs"]) == 3
    assert "judge-scoring" not in printed and "failed" not in printed


def test_without_a_gpu_it_refuses_in_a_sentence(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}", f"OUT={tmp_path / 'out'}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    sentence, *rest = done.stderr.splitlines()
    assert "NVIDIA GPU" in sentence and sentence.endswith(".") and len(rest) == 1
    assert re.match(r"make(\[\d+\])?: \*\*\*", rest[0])  # of a make within make
    assert not (tmp_path / "out").exists()
