# SPDX-License-Identifier: Apache-2.0
"""The scripts in examples/ on two processes and tiny models, with DDP or ZeRO-3."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from multiprocessing.connection import Client, Listener
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from datasets import Dataset
from diffusers import DiffusionPipeline

import launching
import tiny_models
from hub_server import TOKEN, HubServer
from launching import CONFIGS, CPU_DDP, CPU_ZERO3, ROOT
from paco_trl import PaCoReward
from test_recipes import PAPER
from testing_utils import plain


COMMON = {
    "per_device_train_batch_size": 2, "max_steps": 1, "learning_rate": 1e-2, "logging_steps": 1, "report_to": "none",
    "use_cpu": True, "bf16": False, "ddp_backend": "gloo", "disable_tqdm": True, "lora_r": 4, "lora_alpha": 8,
}  # fmt: skip
IMAGES = {"num_generations": 4, "num_prompts_per_generation": 2, "num_inference_steps": 3, "sde_steps": [1]}
# Whose recipe has what the paper says of a model, which the defaults of a script are
RECIPES = {
    "train_flux": "paco-flux.1-dev",
    "train_flux_kontext": "paco-flux.1-kontext-dev",
    "train_qwen_image_edit": "paco-qwen-image-edit",
    "train_reward": "paco-reward-7b-lora",
}
# Their None is filled in by the configs, or from the rank
FILLED_IN = {"bf16", "lora_alpha", "num_prompts_per_generation", "optimizer_steps_per_generation"}


@pytest.mark.parametrize("script", RECIPES)
def test_the_papers_settings_are_the_defaults(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    monkeypatch.setenv("COLUMNS", "10000")  # no line is wrapped
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
    shown = printed.getvalue().split("\n  --")[1:]
    defaults = {re.match(r"\w+", each)[0]: each.rpartition("(default: ")[2].rstrip(")\n") for each in shown}
    options = PAPER[RECIPES[script]]
    filled_in = {name for name in FILLED_IN if defaults.get(name) == "None"}
    paper = {name: str(value) for name, value in options.items() if name in {*defaults} - filled_in}
    assert len(paper) > 12 and {name: defaults[name] for name in paper} == paper


def launch(folder: Path, script: str, config=CPU_ZERO3, **settings) -> Path:
    """Train by the script, with the settings in a file; return the directory of the adapter."""
    (folder / "settings.yaml").write_text(yaml.safe_dump(COMMON | {"dataset_name": str(folder / "data")} | settings))
    command = [f"examples/{script}.py", "--config", folder / "settings.yaml", "--output_dir", folder / "out"]
    launching.check_run(command, config=config, cwd=ROOT, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    return folder / "out"


def check_adapter(model: Path, output: Path) -> None:
    """The adapter loads into the pipeline, and has learned."""
    pipeline = DiffusionPipeline.from_pretrained(model)
    pipeline.load_lora_weights(output)
    trained = [value for name, value in pipeline.transformer.state_dict().items() if "lora_B" in name]
    assert max(value.abs().max() for value in trained) > 1e-3  # B begins at 0


@pytest.mark.slow
def test_image_sets(tiny_flux, tiny_qwen, tiny_clip, prompts, tmp_path):
    (tmp_path / "data").mkdir()
    prompts.to_parquet(tmp_path / "data" / "train.parquet")
    models = {"model_name_or_path": str(tiny_flux), "judge_model": str(tiny_qwen), "clip_model": str(tiny_clip)}
    check_adapter(tiny_flux, launch(tmp_path, "train_flux", **models, **IMAGES, height=64, width=64))


EDITING = {
    "train_flux_kontext": tiny_models.build_tiny_flux_kontext,
    "train_qwen_image_edit": tiny_models.build_tiny_qwen_image_edit,
}


@pytest.mark.slow
@pytest.mark.parametrize("script", EDITING)
def test_edits(script, tiny_qwen, tmp_path):
    (tmp_path / "data").mkdir()
    edits = {"prompt": ["Paint the house red.", "Add a tree."], "image": [plain(value, (64, 64)) for value in (0, 99)]}
    Dataset.from_dict(edits).to_parquet(tmp_path / "data" / "train.parquet")
    model = EDITING[script](tmp_path / "model")
    models = {"model_name_or_path": str(model), "judge_model": str(tiny_qwen)}
    # The pipelines read sources at about a megapixel times this scale squared
    size = {"height": 1024, "width": 1024, "resolution_scale": 1 / 16}
    check_adapter(model, launch(tmp_path, script, **models, **IMAGES, **size))


@pytest.mark.slow
def test_judge(tiny_qwen, tmp_path):
    (tmp_path / "data").mkdir()
    for name, count in (("consistency_reward_cot_train", 8), ("sharegpt_editing_cot", 4), ("held_out", 3)):
        records = []
        for index in range(count):
            images = [f"{name}-{index}-{place}.png" for place in range(2)]
            for place, path in enumerate(images):
                plain(20 * index + place, (56, 56)).save(tmp_path / "data" / path)
            turns = {"human": "<image><image>Same color?", "gpt": "No, they differ." if index % 2 else "Yes."}
            turns = [{"from": who, "value": text} for who, text in turns.items()]
            records.append({"conversations": turns, "images": images})
        (tmp_path / "data" / f"{name}.json").write_text(json.dumps(records))
    evaluation = {"eval_file": "held_out", "eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}
    settings = {"model_name_or_path": str(tiny_qwen), "dtype": "float32", **evaluation}
    output = launch(tmp_path, "train_reward", config=CPU_DDP, **settings)
    pair = [(plain(0, (56, 56)), plain(200, (56, 56)))]
    base, judge = (PaCoReward.from_pretrained(each, device="cpu") for each in (tiny_qwen, output))
    assert judge.score(pair, ["Same color?"]) != pytest.approx(base.score(pair, ["Same color?"]), abs=1e-3)
    card = (output / "README.md").read_text()
    assert "| `pairs` | 12 |" in card and "| pairs | 3 |" in card  # trained on, and evaluated on


# A command that the test runs in a process of its own, see `launching`
FORKED = """#!{python} -S
import os, sys
from multiprocessing.connection import Client
with Client({address!r}) as test:
    test.send((sys.argv, os.getcwd(), dict(os.environ)))
    code, out, err = test.recv()
    sys.stdout.write(out)
    sys.stderr.write(err)
    sys.exit(code)
"""
MODULES = {"paco-trl": "paco_trl.commands.main", "hf": "huggingface_hub.cli.hf"}


@contextlib.contextmanager
def commands_of(folder: Path):
    """A directory with the commands of `MODULES`, and a list of the words that they are called with."""
    called: list[list[str]] = []
    listener = Listener(str(folder / "socket"))

    def serve():
        while True:
            with listener.accept() as client:
                if (asked := client.recv()) is None:
                    return
                (path, *words), cwd, environment = asked
                called.append([Path(path).name, *words])
                done = launching.run(["-m", MODULES[called[-1][0]], *words], cwd=cwd, env=environment)
                client.send((done.returncode, done.stdout, done.stderr))

    thread = threading.Thread(target=serve)
    thread.start()
    for name in MODULES:
        (folder / name).write_text(FORKED.format(python=sys.executable, address=str(folder / "socket")))
        (folder / name).chmod(0o755)
    try:
        yield called
    finally:
        with Client(str(folder / "socket")) as end:
            end.send(None)
        thread.join()


@pytest.mark.slow
def test_the_speedrun(tiny_qwen, tiny_clip, folder_of, tmp_path):
    """The script as it is, from a folder without a clone: from names on the Hub to an adapter and a Space there."""

    def files_of(folder: Path) -> dict[str, bytes]:
        paths = filter(Path.is_file, folder.rglob("*"))
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    models = {
        "black-forest-labs/FLUX.2-klein-base-4B": Path(folder_of("flux2_klein")),
        "X-GenGroup/PaCo-Reward-7B": tiny_qwen,
        "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": tiny_clip,
        "yuvalkirstain/PickScore_v1": tiny_clip,
    }
    short = "--use_cpu --bf16 False --judge_quantization None --resolution_scale 0.0625 --num_inference_steps 3 "
    short += "--tail_steps 1 --num_generations 2 --per_device_train_batch_size 2 --num_prompts_per_generation 2 --max_steps 2"
    evaluation = (
        "--set_layout separate --height 32 --width 32 --num_inference_steps 1 --num_generations 1 --bf16 False"
    )
    with HubServer({TOKEN: "tester"}) as hub, commands_of(tmp_path) as called:
        for name, folder in models.items():
            hub.add_repo(name, files_of(folder))
        environment = os.environ | {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN,
            "PATH": f"{tmp_path}:{os.environ['PATH']}", "EVALUATION": evaluation, "NO_PROXY": "127.0.0.1",
        }  # fmt: skip
        command = ["bash", ROOT / "examples/speedrun.sh", "tester/my-klein", *short.split()]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        assert "--push_to_hub" in called[0]  # so that a token that may not write is refused first
        assert [words[:2] for words in called] == [
            ["paco-trl", "grpo"], ["paco-trl", "evaluate"], ["paco-trl", "push"], ["paco-trl", "space"], ["hf", "upload"],
        ]  # fmt: skip
        assert {"adapter_model.safetensors", "README.md"} <= {*hub.files("tester/my-klein", "model")}
        app = hub.files("tester/my-klein-space", "space")["app.py"].decode()
        assert '"tester/my-klein"' in app and "black-forest-labs/FLUX.2-klein-base-4B" in app
    assert "Before and after: my-klein-evaluation/my-klein/report.html" in done.stdout
    assert (tmp_path / "my-klein-evaluation/my-klein/report.html").is_file()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_configs_load(path):
    config = load_config_from_file(str(path))
    assert config.num_processes >= 1
    if "zero" in path.stem:
        assert config.deepspeed_config["zero_stage"] == (2 if path.stem == "zero2" else 3)
        # PaCoGRPOConfig lays it out and fills it in
        assert "gradient_accumulation_steps" not in config.deepspeed_config
