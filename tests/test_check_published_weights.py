# SPDX-License-Identifier: Apache-2.0
"""model_cards/check_published_weights.py, with tiny weights under the published names."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save
from transformers import AutoModelForImageTextToText

import tiny_models
from hub_server import HubServer


ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "model_cards" / "check_published_weights.py"
PUBLISHED = [
    "X-GenGroup/PaCo-Reward-7B",
    "X-GenGroup/PaCo-Reward-7B-Lora",
    "X-GenGroup/PaCo-FLUX.1-dev-Lora",
    "X-GenGroup/PaCo-FLUX.1-Kontext-Lora",
    "X-GenGroup/PaCo-Qwen-Image-Edit-Lora",
]
TARGETS = ["attn.to_q", "attn.to_k"]
WEIGHTS = "adapter_model.safetensors"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edited(files: dict[str, bytes], rename, folder: Path, **config) -> dict[str, bytes]:
    """Files of an adapter with other names of its weights, and another config."""
    (folder / "edited.safetensors").write_bytes(files[WEIGHTS])
    weights = {rename(name): value for name, value in load_file(folder / "edited.safetensors").items()}
    settings = json.loads(files["adapter_config.json"]) | config
    return files | {WEIGHTS: save(weights), "adapter_config.json": json.dumps(settings).encode()}


@pytest.fixture
def run(hub, tmp_path, monkeypatch):
    """Runs the script with clients of this Hub; gives its exit code and what it printed."""
    monkeypatch.setenv("COLUMNS", "1000")  # nothing is folded

    def call(*options: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options])
        with hub.connected(tmp_path / "cache") as printed, pytest.raises(SystemExit) as exit:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        assert "Traceback" not in printed.getvalue(), printed.getvalue()[-3000:]
        return exit.value.code, printed.getvalue()

    return call


def row(output: str, repo: str) -> list[str]:
    """Cells of a repository's row in the table."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines()]
    (found,) = [cells for cells in rows if cells[0] == repo]
    return found


@pytest.fixture(scope="module")
def repositories(tiny_flux, tiny_qwen, tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """Files of the published models and of those below them, tiny, as the real ones are laid out."""
    folder = tmp_path_factory.mktemp("published")
    pipelines = {
        "black-forest-labs/FLUX.1-dev": tiny_flux,
        "black-forest-labs/FLUX.1-Kontext-dev": tiny_models.build_tiny_flux_kontext(folder / "kontext"),
        "Qwen/Qwen-Image-Edit": tiny_models.build_tiny_qwen_image_edit(folder / "qwen-image-edit"),
    }
    repositories = {}
    for base, repo in zip(pipelines, PUBLISHED[2:], strict=True):
        # Of the base models no weights are there: none may be read
        repositories[base] = {
            name: content for name, content in files_of(pipelines[base]).items() if not name.endswith(".safetensors")
        }
        pipeline = DiffusionPipeline.from_pretrained(pipelines[base])
        config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=TARGETS)
        get_peft_model(pipeline.transformer, config).save_pretrained(folder / repo, save_embedding_layers=False)
        repositories[repo] = files_of(folder / repo)

    model = AutoModelForImageTextToText.from_pretrained(tiny_qwen)
    judge = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=r"model\.language_model\..*\.(q|v)_proj")
    )
    judge.save_pretrained(folder / "judge", save_embedding_layers=False)
    layers = {name.split(".lora_A")[0].split("base_model.model.")[1] for name in load_file(folder / "judge" / WEIGHTS)}
    repositories["X-GenGroup/PaCo-Reward-7B-Lora"] = edited(
        files_of(folder / "judge"),
        lambda name: name.replace("model.language_model.", "model."),
        folder,
        base_model_name_or_path="Qwen/Qwen2.5-VL-7B-Instruct",
        target_modules=sorted({name.split(".lora_")[0].replace("model.language_model.", "model.") for name in layers}),
    )
    repositories["Qwen/Qwen2.5-VL-7B-Instruct"] = {"config.json": (tiny_qwen / "config.json").read_bytes()}
    judge.merge_and_unload().save_pretrained(folder / "merged", max_shard_size="200KB")
    assert len(list((folder / "merged").glob("*.safetensors"))) > 1
    repositories["X-GenGroup/PaCo-Reward-7B"] = files_of(folder / "merged")
    return repositories


@pytest.fixture
def hub(repositories):
    with HubServer(tokens={"hf_someToken": "someone"}) as hub:
        for repo, files in repositories.items():
            hub.add_repo(repo, files)
        yield hub


def test_all_fit(hub, run, tmp_path):
    code, output = run()
    assert code == 0, output
    for repo in PUBLISHED:
        assert row(output, repo)[4:] == ["none", "yes"], output
    assert row(output, "X-GenGroup/PaCo-Reward-7B")[1] == "whole model, qwen2_5_vl"
    assert row(output, "X-GenGroup/PaCo-Reward-7B-Lora")[1:4] == [
        "PEFT adapter, rank 4, alpha 8",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "8",
    ]
    assert row(output, "X-GenGroup/PaCo-FLUX.1-dev-Lora")[1:4] == ["PEFT adapter, rank 4, alpha 8", "none", "8"]
    assert output.count("There is no file for `pipe.load_lora_weights`") == 3
    # Headers alone: a file of weights is asked for by HTTP range, and never downloaded
    assert not list(tmp_path.rglob("*.safetensors"))
    assert any(path.endswith(WEIGHTS) for _, path in hub.requests) and hub.unknown == []


def test_what_does_not_fit(hub, run, repositories, tmp_path):
    flux, judge = "X-GenGroup/PaCo-FLUX.1-dev-Lora", "X-GenGroup/PaCo-Reward-7B-Lora"
    kontext, qwen = "X-GenGroup/PaCo-FLUX.1-Kontext-Lora", "X-GenGroup/PaCo-Qwen-Image-Edit-Lora"
    whole = "X-GenGroup/PaCo-Reward-7B"
    names = {"rename": lambda name: name.replace("blocks.0.attn.to_q.lora_A", "blocks.7.attn.to_q.lora_A")}
    hub.add_repo(flux, edited(repositories[flux], folder=tmp_path, **names) | {"optimizer.pt": b"", "a.bin": b""})
    hub.add_repo(judge, edited(repositories[judge], str, tmp_path, r=8))
    hub.add_repo(
        kontext, edited(repositories[kontext], str, tmp_path, base_model_name_or_path="black-forest-labs/FLUX.1-dev")
    )
    del hub.repos["model", qwen]
    hub.add_repo(whole, {name: c for name, c in repositories[whole].items() if name != "model.safetensors.index.json"})
    code, output = run()
    assert code == 1
    assert [row(output, repo)[5] for repo in (flux, judge, kontext)] == ["no"] * 3, output
    assert [row(output, repo)[4:] for repo in (qwen, whole)] == [["", "unknown"], ["none", "unknown"]], output
    assert row(output, flux)[4] == "a.bin, optimizer.pt"
    assert re.search(rf"{flux}: 2 weights have no place in the model \(\w*transformer_blocks.7.attn.to_q", output)
    assert f"{flux}: 2 places of the model have no weight (" in output
    assert f"{judge}: 8 weights have another shape (model.language_model.layers.0.self_attn" in output
    assert f"{kontext}: its config names 'black-forest-labs/FLUX.1-dev' as its base model, not" in output
    assert re.search(f"{qwen}: cannot be checked: RepositoryNotFoundError: 401 .*Repository Not Found for url", output)
    assert f"{whole}: cannot be checked: NotASafetensorsRepoError" in output
