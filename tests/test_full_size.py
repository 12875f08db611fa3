# SPDX-License-Identifier: Apache-2.0
"""benchmarks/full_size: models of the real configs, built shard by shard, and the phases of a training's memory."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from testing_utils import are_equal


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
KLEIN = "FLUX.2-klein-base-4B"


@pytest.fixture
def full_size(monkeypatch):
    """The modules of the benchmark."""
    for folder in ("memory", "full_size"):
        monkeypatch.syspath_prepend(str(BENCHMARKS / folder))
    import build_model
    import phases

    yield build_model, phases
    for name in ("build_model", "phases", "memory_plan"):
        sys.modules.pop(name, None)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        assert not found.keys() & load_file(file).keys()
        found |= load_file(file)
    return found


class TestBuild:
    def test_it_loads_as_published_and_a_build_that_was_interrupted_continues(self, full_size, monkeypatch, tmp_path):
        build_model, _ = full_size
        monkeypatch.setattr(build_model, "SHARD", 50_000)
        folder = build_model.build_model(KLEIN, tmp_path / "whole", configs={})
        index = json.loads((folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 2
        pipeline = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.bfloat16)
        weights = weights_in(folder / "transformer")
        assert are_equal(dict(pipeline.transformer.named_parameters()), weights)
        assert all(weight.dtype == torch.bfloat16 for weight in weights.values())

        write, written = build_model.save_file, []

        def interrupted(tensors, file, **kwargs):
            if len(written) == 2:
                write({}, file)  # half a shard
                raise KeyboardInterrupt
            written.append(set(tensors))
            write(tensors, file, **kwargs)

        monkeypatch.setattr(build_model, "save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build_model.build_model(KLEIN, tmp_path / "again", configs={})
        monkeypatch.setattr(
            build_model,
            "save_file",
            lambda tensors, *args, **kwargs: written.append(set(tensors)) or write(tensors, *args, **kwargs),
        )
        build_model.build_model(KLEIN, tmp_path / "again", configs={})
        assert written.count(written[0]) == 1
        for part in ("transformer", "text_encoder", "vae"):
            assert are_equal(weights_in(tmp_path / "again" / part), weights_in(folder / part))

    def test_weights_keep_the_size_of_what_passes_through_them(self, full_size):
        build_model, _ = full_size
        weight = build_model.random_weight("proj.weight", torch.Size((64, 256)), torch.float32)
        assert weight.std().item() == pytest.approx(1 / 16, rel=0.05)
        assert torch.equal(weight, build_model.random_weight("proj.weight", torch.Size((64, 256)), torch.float32))
        assert not torch.equal(weight, build_model.random_weight("other.weight", torch.Size((64, 256)), torch.float32))
        norm, bias = (
            build_model.random_weight(name, torch.Size((8,)), torch.float32) for name in ("n.weight", "n.bias")
        )
        assert norm.tolist() == [1.0] * 8 and bias.tolist() == [0.0] * 8

    def test_tokenizers_as_published_keep_the_chat_template(self, full_size, tmp_path):
        build_model, _ = full_size
        source, target = tmp_path / "published", tmp_path / "trained"
        for folder, files in (
            (source, {"vocab.json": "new"}),
            (target, {"vocab.json": "old", "chat_template.jinja": "a"}),
        ):
            folder.mkdir()
            for name, text in files.items():
                (folder / name).write_text(text)
        build_model.copy_tokenizer(source, target)
        assert (target / "vocab.json").read_text() == "new" and (target / "chat_template.jinja").read_text() == "a"

    def test_a_disk_that_is_too_small_is_said_first(self, full_size, monkeypatch, tmp_path):
        build_model, _ = full_size
        usage = build_model.shutil.disk_usage(tmp_path)
        monkeypatch.setattr(build_model.shutil, "disk_usage", lambda folder: usage._replace(free=1000))
        with pytest.raises(OSError, match="GB of disk"):
            build_model.build_model(KLEIN, tmp_path / "model", configs={})
        assert not list(tmp_path.rglob("*.safetensors"))


def test_a_phase_has_its_own_peak_and_the_time_that_is_not_of_one_within(full_size):
    _, module = full_size
    phases = module.Phases()
    started = time.monotonic()
    with phases.phase("outer"):
        block = torch.ones(2**26)  # 256 MiB
        with phases.phase("inner"):
            del block
            time.sleep(0.2)
    with phases.phase("later"):
        pass
    outer, inner, later = (phases.found[name] for name in ("outer", "inner", "later"))
    assert outer["peak"] > later["peak"] + 2**27
    assert inner["seconds"] >= 0.2 and outer["seconds"] + inner["seconds"] <= time.monotonic() - started
    assert [outer["count"], inner["count"]] == [1, 1]
