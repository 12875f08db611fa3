# SPDX-License-Identifier: Apache-2.0
"""`paco-trl serve` without vLLM: the command that it becomes. tests/test_vllm.py has the real one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import Qwen2VLImageProcessor

from launching import ROOT
from paco_trl.commands import serve
from paco_trl.commands.main import main
from paco_trl.commands.serve import ServeArguments, serve_command
from paco_trl.utils.errors import OptionError


KEY = "sk-not-for-anyones-eyes"
LANGUAGE = "model.language_model.layers.0.self_attn.q_proj"
LIMITS = {"shortest_edge": 784, "longest_edge": 3136}
# Plays vLLM: says how it was started
STAND_IN = """#!{python} -IS
import json, os, sys, time
started = {{"arguments": sys.argv[1:], "PATH": os.environ["PATH"], "pid": os.getpid()}}
print(json.dumps(started), flush=True)
time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path) -> Path:
    """The stand-in of vLLM, in a folder of its own."""
    script = tmp_path / "environment" / "bin" / "vllm"
    script.parent.mkdir(parents=True)
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(0o755)
    return script


@pytest.fixture
def executed(monkeypatch) -> list[list[str]]:
    """Commands that take the place of the process."""
    found = []
    monkeypatch.setattr(os, "execv", lambda path, command: found.append(command))
    monkeypatch.setattr(serve, "serve_command", lambda args, executable: [executable, *args.vllm_args])
    monkeypatch.setenv("PATH", os.environ["PATH"])
    return found


def save_adapter(folder: Path, layers: dict[str, int], **config) -> Path:
    """Files of a LoRA adapter: layers with their ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "some/base", **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for name, rank in layers.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = torch.zeros(rank, 3)
        weights[f"base_model.model.{name}.lora_B.weight"] = torch.zeros(3, rank)
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def command_for(model: Path | str, **options) -> list[str]:
    return serve_command(ServeArguments(model_name_or_path=str(model), **options), "/vllm/bin/vllm")


def value_of(command: list[str], option: str) -> str:
    assert command.count(option) == 1
    return command[command.index(option) + 1]


class TestCommandLine:
    def test_full_model(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        assert command_for(tmp_path) == [
            *["/vllm/bin/vllm", "serve", str(tmp_path), "--served-model-name", "paco-reward"],
            *["--host", "127.0.0.1", "--port", "8000", "--dtype", "auto", "--max-model-len", "8192"],
            *["--limit-mm-per-prompt", '{"image": 2, "video": 0}'],
            *["--mm-processor-cache-gb", "4", "--enable-prefix-caching"],
            *["--generation-config", "vllm", "--load-format", "safetensors", "--disable-uvicorn-access-log"],
        ]

    def test_options(self, tmp_path):
        options = {"host": "::1", "port": 8001, "dtype": "float32", "max_model_len": 2048}
        command = command_for(tmp_path, **options, gpu_memory_utilization=0.5, vllm_args=["--max-num-seqs", 2])
        expected = options | {"gpu_memory_utilization": 0.5}
        assert {n: value_of(command, f"--{n.replace('_', '-')}") for n in expected} == {
            name: str(value) for name, value in expected.items()
        }
        assert command[-2:] == ["--max-num-seqs", "2"]  # last, so that they win

    def test_adapter(self, tmp_path):
        # A comma, at which vLLM's short form `name=path` fails
        folder = save_adapter(tmp_path / "lr=1e-4,r=4", {LANGUAGE: 4})
        command = command_for(folder)
        assert command[2] == "some/base" and "--enable-lora" in command
        assert value_of(command, "--served-model-name") == "paco-reward-base"
        assert json.loads(value_of(command, "--lora-modules")) == {"name": "paco-reward", "path": str(folder)}
        for option in ("--enable-tower-connector-lora", "--revision", "--mm-processor-kwargs"):
            assert option not in command

    @pytest.mark.parametrize("rank, allowed", [(8, 8), (9, 16), (512, 512)])
    def test_rank(self, tmp_path, rank, allowed):
        """The largest of its layers counts, whatever `r` is."""
        folder = save_adapter(tmp_path, {LANGUAGE: rank, LANGUAGE.replace("q_proj", "v_proj"): 1}, revision="v2")
        assert value_of(command_for(folder), "--max-lora-rank") == str(allowed)
        assert value_of(command_for(folder), "--revision") == "v2"

    @pytest.mark.parametrize(
        "layer",
        [
            "model.visual.blocks.0.attn.qkv",
            "visual.blocks.0.attn.qkv",  # before transformers 4.52
            "model.multi_modal_projector.linear_1",
        ],
    )
    def test_adapter_of_vision_layers(self, tmp_path, layer):
        assert "--enable-tower-connector-lora" in command_for(save_adapter(tmp_path, {LANGUAGE: 4, layer: 4}))

    def test_adapter_with_a_size_of_images(self, tmp_path):
        folder = save_adapter(tmp_path, {LANGUAGE: 4})
        Qwen2VLImageProcessor(size=LIMITS).save_pretrained(folder)
        file = folder / "preprocessor_config.json"
        config = json.loads(file.read_text())
        older = {name: value for name, value in config.items() if name != "size"}
        for content in (config, older | {"min_pixels": 784, "max_pixels": 3136}):
            file.write_text(json.dumps(content))
            assert json.loads(value_of(command_for(folder), "--mm-processor-kwargs")) == {"size": LIMITS}

    def test_adapters_that_cannot_be_served(self, tmp_path):
        for rank in (0, 513):
            with pytest.raises(ValueError, match=f"rank {rank}"):
                command_for(save_adapter(tmp_path / f"rank-{rank}", {LANGUAGE: rank}))


@pytest.mark.parametrize("is_adapter", [False, True])
def test_an_image_model_is_no_judge(tiny_flux, tmp_path, is_adapter):
    model = tiny_flux
    if is_adapter:
        model = tmp_path / "adapter"
        model.mkdir()
        config = {"peft_type": "LORA", "base_model_name_or_path": str(tiny_flux), "r": 4}
        (model / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match="image pipeline.*, no vision-language model, as a judge must be"):
        command_for(model)


@pytest.mark.parametrize(("name", "value"), [("port", 99999), ("gpu_memory_utilization", 3.0)])
def test_values_that_vllm_would_refuse_later(name, value):
    (error,) = ServeArguments(**{name: value}).errors()
    assert f"`--{name}` is {value:g}; it must be" in str(error) and not [*ServeArguments().errors()]


class TestMain:
    @pytest.mark.slow
    def test_becomes_vllm(self, stand_in):
        """In a process of its own: signals and exit code are those of vLLM."""
        command = [sys.executable, "-m", "paco_trl.commands.main", "serve", "--vllm", str(stand_in)]
        environment = {**os.environ, "VLLM_API_KEY": KEY}
        options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "text": True}
        command += ["--model_name_or_path", "user/judge", "--", "--max-num-seqs", "2"]
        with subprocess.Popen(command, **options) as process:
            started = json.loads(process.stdout.readline())
            words = started["arguments"]
            assert started["pid"] == process.pid
            assert words[:2] == ["serve", "user/judge"] and words[-2:] == ["--max-num-seqs", "2"]
            assert started["PATH"].split(os.pathsep)[0] == str(stand_in.parent)
            assert KEY not in str(words)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == -signal.SIGTERM

    def test_settings_in_a_file(self, executed, stand_in, tmp_path):
        (tmp_path / "judge.yaml").write_text(yaml.safe_dump({"vllm": str(stand_in), "vllm_args": ["--seed", 64]}))
        main(["serve", "--config", str(tmp_path / "judge.yaml"), "--", "--seed", "32"])
        assert executed == [[str(stand_in), "--seed", "64", "--seed", "32"]]

    def test_without_vllm(self, executed, capsys, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        assert main(["serve"]) == 1 and executed == []
        assert "pip install vllm" in capsys.readouterr().err

    @pytest.mark.parametrize(("key", "message"), [("", "Set one in VLLM_API_KEY"), (KEY, "protects the addresses")])
    def test_warns_of_the_network(self, executed, stand_in, capsys, monkeypatch, key, message):
        monkeypatch.setenv("VLLM_API_KEY", key)
        for host, is_warned in (("127.0.0.1", False), ("0.0.0.0", True)):
            main(["serve", "--vllm", str(stand_in), "--host", host])
            said = capsys.readouterr().err
            assert (message in said) == ("Warning" in said) == is_warned and KEY not in said
        assert len(executed) == 2
