# SPDX-License-Identifier: Apache-2.0
"""`make gpu`, rehearsed on the CPU with small models: the same steps, whose processes are forked (see `launching.py`)."""

import json
import subprocess

import pytest
import torch

import launching
from launching import ROOT


pytestmark = pytest.mark.slow


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
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


def rehearse(gpu, capsys, folder, *arguments) -> tuple[int, dict, str]:
    code = gpu.main(["--rehearse", "--output", str(folder), *arguments])
    return code, json.loads((folder / "gpu_summary.json").read_text())["steps"], capsys.readouterr().out


def test_every_step_writes_its_results(gpu, forked, capsys, tmp_path):
    code, steps, printed = rehearse(gpu, capsys, tmp_path, "--minutes", "180")  # on a loaded machine too
    logs = [(tmp_path / f"{name}.log").read_text()[-3000:] for name in steps if steps[name]["result"] == "failed"]
    assert code == 0 and list(steps) == list(gpu.STEPS), "\n".join(logs)
    reports = {name: json.loads((tmp_path / f"gpu_{name}.json").read_text()) for name in steps}
    for name, report in reports.items():
        assert report["machine"] and "ratios" in report, name
        assert f"gpu_{name}.json" in printed.split("Files to commit")[1]
    for name in ("flux-512", "flux-512-kernels", "flux-512-memory", "flux-1024", "kontext-384", "training"):
        for run in reports[name]["runs"]:
            assert run["seconds of a forward, an image"] > 0 and run["TFLOP of a forward, an image"] > 0
            assert run["largest mean |ratio - 1| on policy"] >= 0
            assert run["setting"] in printed
    assert reports["tests"]["ratios"]["tests"]["passed"] >= 6
    # Every setting ran, or is left out with its reason
    sweeps = {
        entry["setting"] for entry in reports["flux-512-memory"]["runs"] + reports["flux-512-memory"]["left out"]
    }
    assert {"batch 2", "batch 2, checkpointing False", "batch 2, quantization nf4"} < sweeps
    assert reports["training"]["runs"][0]["mean reward of each round"][0] != 0
    assert (tmp_path / "gpu_training.png").read_bytes().startswith(b"\x89PNG")
    assert reports["judge-scoring"]["layouts"]["2x3"]["pairs per second"].keys() == {"ours", "published"}
    assert len(reports["judge-training"]["seconds of a step"]) == 3


def test_a_step_that_fails_does_not_stop_the_others(gpu, forked, capsys, tmp_path):
    # One image is not a group: the config refuses it in each setting of the first step
    code, steps, printed = rehearse(
        gpu, capsys, tmp_path, "--num_generations", "1", "--steps", "flux-1024", "judge-scoring"
    )
    assert code == 1
    assert steps["flux-1024"]["result"] == "failed" and "`num_generations`" in steps["flux-1024"]["reason"]
    assert steps["judge-scoring"]["result"] == "done"
    left_out = json.loads((tmp_path / "gpu_flux-1024.json").read_text())["left out"]
    assert [entry["setting"] for entry in left_out] == ["batch 2", "batch 1", "batch 1, checkpointing False"]
    assert "left out: batch 1: ValueError" in printed.replace("\n", " ")


def test_time_limits(gpu, capsys, tmp_path):
    """With processes as on a GPU: the first step is stopped while it starts, and no time is left for the second."""
    code, steps, printed = rehearse(gpu, capsys, tmp_path, "--minutes", "0.01", "--steps", "tests", "flux-512")
    assert code == 1
    assert [step["result"] for step in steps.values()] == ["stopped", "left out"]
    assert "took more than 1 s" in printed and "minutes are over" in printed


def test_operations_of_a_forward(gpu):
    """Of FLUX.1-dev's transformer at 512 pixels, counted without its memory."""
    from diffusers import FluxTransformer2DModel

    import gpu_rounds

    with torch.device("meta"):
        config = FluxTransformer2DModel(guidance_embeds=True).to_json_string()
    shapes = {
        "hidden_states": (2, 1024, 64), "encoder_hidden_states": (2, 512, 4096), "pooled_projections": (2, 768),
        "timestep": (2,), "guidance": (2,), "img_ids": (1024, 3), "txt_ids": (512, 3),
    }  # fmt: skip
    inputs = tuple((name, shape, torch.bfloat16) for name, shape in shapes.items())
    flops = gpu_rounds.forward_flops(FluxTransformer2DModel, config, inputs)
    assert flops / 2 == pytest.approx(21.5e12, rel=0.003)
