# SPDX-License-Identifier: Apache-2.0
"""How often the host waits for a simulated GPU: the counts of `benchmarks/speed/waits.py` (`make test-cuda` runs it)."""

import os

import pytest
import torch

from launching import ROOT
from paco_trl.trainer import paco_grpo_trainer
from paco_trl.trainer.losses import clipped_surrogate


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif("SIMULATED_CUDA_OPERATORS" not in os.environ, reason="there is no simulated GPU"),
]


@pytest.fixture
def waits(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "speed"))
    import waits

    return waits


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directory of the tiny models of all counts."""
    return tmp_path_factory.mktemp("waits")


def test_what_is_a_wait(waits):
    device, pinned = torch.zeros(4, device="cuda"), torch.zeros(4).pin_memory()
    mask = device > 0

    def counted(function) -> float:
        with waits.waits_counted() as found, found.phase("call"):
            function()
        return found.per_call("call")

    for function in (
        lambda: device[0].item(),
        lambda: device.cpu(),
        lambda: pinned.to("cuda"),
        lambda: torch.zeros(4).to("cuda", non_blocking=True),
        lambda: device[mask],
        lambda: mask.nonzero(),
        lambda: device[torch.tensor([0, 1])],
        lambda: torch.equal(device, device),
        lambda: torch.cuda.synchronize(),
        lambda: bool(mask.any()),
    ):
        assert counted(function) == 1
    for function in (
        lambda: device * 2 + device.sum(),
        lambda: pinned.to("cuda", non_blocking=True),
        lambda: device.masked_fill(mask, 1.0),
        lambda: device.__setitem__(mask, 1.0),
        lambda: torch.full((4,), 2.0, device="cuda"),
        lambda: device.clone().to(torch.bfloat16),
    ):
        assert counted(function) == 0


# The largest number of waits in a call of each phase. Of those of a batch, 4 are in lines of diffusers
ROLLOUT = {"plain step": 0, "stochastic step": 0, "last step": 0, "batch": 5}
LARGEST = {
    "grpo": {**ROLLOUT, "micro-step": 0, "optimizer step": 1},
    "beta": {"micro-step": 0},
    "grpo_guard": {"micro-step": 0},
    "short tail": {**ROLLOUT, "micro-step": 0},
    "gradient_checkpointing": {"micro-step": 0},
    "offload_embeddings": {**ROLLOUT, "micro-step": 0},
    "nft": {"plain step": 0, "micro-step": 0, "batch": 5},
    "awm": {"plain step": 0, "micro-step": 0, "batch": 5},
    # All but one, the scores, are in lines of transformers and TRL
    "judge-training": {"micro-step": 9},
    "judge-scoring": {"call of 6 pairs": 6},
    "clip-t": {"batch of 16 panels": 1},
}


@pytest.mark.parametrize("name", LARGEST)
def test_waits(name, waits, models):
    found = waits.count(name, models)
    for phase, largest in LARGEST[name].items():
        lines = "\n".join(found.table(phase))
        assert found.calls[phase] > 0 and found.per_call(phase) <= largest, f"{phase}:\n{lines}"
    if name == "judge-training":
        assert found.per_call("micro-step", is_own=True) == 0


def test_a_planted_wait_is_counted(waits, models, monkeypatch):
    def reading(*args):
        surrogate = clipped_surrogate(*args)
        surrogate.loss.mean().item()
        return surrogate

    monkeypatch.setattr(paco_grpo_trainer, "clipped_surrogate", reading)
    found = waits.count("grpo", models)
    assert found.per_call("micro-step") == 1
    assert "paco_grpo_trainer.py" in found.table("micro-step")[0]  # the innermost line of the package
