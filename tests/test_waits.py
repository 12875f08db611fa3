# SPDX-License-Identifier: Apache-2.0
"""How often the host waits for a simulated GPU: the counts of `benchmarks/waits.py` (`make test-cuda` runs it)."""

import os

import pytest
import torch

from launching import ROOT


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif("SIMULATED_CUDA_OPERATORS" not in os.environ, reason="there is no simulated GPU"),
]


@pytest.fixture
def waits(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
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
        lambda: device.item() if device.dim() == 0 else device[0].item(),
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
