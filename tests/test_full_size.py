# SPDX-License-Identifier: Apache-2.0
"""benchmarks/full_size: models of the real configs, built shard by shard, and the phases of a training's memory."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2Tokenizer

from paco_trl.planning import plan_memory
from paco_trl.tiny.qwen2_5_vl import SPECIAL_TOKENS, train_tokenizer
from testing_utils import are_equal


BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
KLEIN = "black-forest-labs/FLUX.2-klein-base-4B"
# A model of two blocks, with the published tokenizers' places
SMALL = {
    "transformer": {
        "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8,
        "joint_attention_dim": 96, "axes_dims_rope": [2, 2, 2, 2],
    },
    "text_encoder": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 28, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 1024,
    },
    "vae": {"block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1},
}  # fmt: skip


@pytest.fixture
def full_size(monkeypatch):
    """The modules of the benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "full_size"))
    import build_model
    import phases

    yield build_model, phases
    for name in ("build_model", "phases", "full_size", "full_size_judge"):
        sys.modules.pop(name, None)


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        assert not found.keys() & load_file(file).keys()
        found |= load_file(file)
    return found


class TestBuild:
    def test_configs_have_the_ids_of_the_published_tokenizer(self, full_size, tmp_path):
        """Also where the tokenizer comes after the model in the index, as in Qwen-Image-Edit."""
        build_model, _ = full_size
        special = ["<|another|>", *SPECIAL_TOKENS[1:]]
        tokenizer = train_tokenizer(Qwen2Tokenizer, ["A red hat."] * 9, special, 400)
        tokenizer.save_pretrained(tmp_path / "tokenizers" / "qwen2.5-vl")
        ids = {}
        for name, tokenizers in (("tiny", None), ("published", tmp_path / "tokenizers")):
            build_model.write_parts("Qwen/Qwen-Image-Edit", tmp_path / name, tokenizers, {})
            config = json.loads((tmp_path / name / "text_encoder" / "config.json").read_text())
            ids[name] = config["image_token_id"]
            loaded = AutoTokenizer.from_pretrained(tmp_path / name / "tokenizer")
            assert ids[name] == loaded.convert_tokens_to_ids("<|image_pad|>")
        assert ids["published"] == ids["tiny"] + 1

    def test_it_loads_as_published_and_a_build_that_was_interrupted_continues(self, full_size, monkeypatch, tmp_path):
        build_model, _ = full_size
        monkeypatch.setattr(build_model, "SHARD", 10_000)
        folder = build_model.build_model(KLEIN, tmp_path / "whole", configs=SMALL)
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
            build_model.build_model(KLEIN, tmp_path / "again", configs=SMALL)
        monkeypatch.setattr(
            build_model,
            "save_file",
            lambda tensors, *args, **kwargs: written.append(set(tensors)) or write(tensors, *args, **kwargs),
        )
        build_model.build_model(KLEIN, tmp_path / "again", configs=SMALL)
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

    def test_a_published_tokenizer_takes_the_place_of_the_tiny_one(self, full_size, tmp_path):
        build_model, _ = full_size
        source, target = tmp_path / "published", tmp_path / "tiny"
        for folder, files in ((source, ["vocab.json"]), (target, ["tokenizer.json", "processor_config.json"])):
            folder.mkdir()
            for name in files:
                (folder / name).write_text(folder.name)
        build_model.copy_tokenizer(source, target)
        assert {path.name: path.read_text() for path in target.iterdir()} == {
            "vocab.json": "published",
            "processor_config.json": "tiny",
        }

    def test_a_disk_that_is_too_small_is_said_first(self, full_size, monkeypatch, tmp_path):
        build_model, _ = full_size
        usage = build_model.shutil.disk_usage(tmp_path)
        monkeypatch.setattr(build_model.shutil, "disk_usage", lambda folder: usage._replace(free=1000))
        with pytest.raises(OSError, match="GB of disk"):
            build_model.build_model(KLEIN, tmp_path / "model", configs=SMALL)
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


def test_the_operations_of_a_forward_are_those_of_the_arithmetic(full_size, make_trainer, prompts, tmp_path):
    build_model, _ = full_size
    import full_size as module

    wide = {"num_attention_heads": 8, "attention_head_dim": 128, "axes_dims_rope": [32] * 4}
    build_model.write_parts(KLEIN, tmp_path / "klein", None, SMALL | {"transformer": SMALL["transformer"] | wide})
    args = make_trainer(height=64, width=64, resolution_scale=0.5, guidance_scale=4.0).args
    found = {}
    for rank in (1, 64):
        run = plan_memory(str(tmp_path / "klein"), args, prompts, LoraConfig(r=rank)).run
        found[rank] = module.count_operations(run)
    assert found[1]["image tokens, text tokens"] == [4, 512] and found[1]["forwards of a step"] == 2
    assert found[1]["TFLOP, by arithmetic"] > 0.02
    assert found[1]["TFLOP, counted"] == pytest.approx(found[1]["TFLOP, by arithmetic"], rel=0.05)
    assert found[64] == found[1]  # without the adapter


def test_what_is_measured_is_divided_by_the_plan_of_device_and_host(full_size):
    _, module = full_size
    host = {"libraries": 10, "transformer": 1000}
    planned = {
        "load": {"device": {}, "host": host},
        "train": {"device": {"frozen weights": 1000, "optimizer": 30}, "host": host | {"transformer": 0}},
    }
    measured = {"start": {"peak": 5}, "load": {"peak": 20}, "train": {"peak": 20}}
    assert module.ratios(measured, planned) == {"load": 2.0, "train": 0.5}
    # Weights that are quantized are no file's
    assert module.ratios(measured, planned, is_mapped=False) == {"load": 0.02, "train": 0.02}
