# SPDX-License-Identifier: Apache-2.0
"""`paco-trl merge`: what the merged weights draw and say is what the model with its adapter does."""

import contextlib
import functools
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from hub_server import HubServer
from paco_trl import PaCoReward
from paco_trl.commands.main import main
from paco_trl.commands.merge import MergeArguments, merge
from paco_trl.data import theme_question
from paco_trl.hub.card_data import ImageModelCardData, load_card_data, save_card_data
from paco_trl.utils.vision_language import limit_pixels
from testing_utils import draw, files_in, give_effect, noise


# Of the merged model against the one with its adapter: other orders of float32 additions
TOLERANCE = 1e-5
FLUX_LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp", "proj_out"]
JUDGE_LAYERS = r"model\.language_model\..*\.\w+_proj"
QUESTION = theme_question("A fox through the four seasons")


def run(*arguments: str) -> SimpleNamespace:
    """Exit code of the command, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["merge", *arguments])
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


def options(adapter: Path | str, output_dir: Path | str, **further) -> list[str]:
    named = {"adapter": adapter, "output_dir": output_dir, **further}
    return [word for name, value in named.items() for word in (f"--{name}", str(value))]


def save_adapter(model, config: LoraConfig, folder: Path, base: Path | str | None, std: float = 0.05) -> Path:
    """An adapter with an effect, in PEFT's format."""
    model = get_peft_model(model, config)
    give_effect(model, std)
    config.base_model_name_or_path = str(base) if base is not None else None
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


def edit_config(folder: Path, **changes) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


# What a pipeline draws, before it is decoded and rounded to pixels
latent = functools.partial(draw, output_type="latent")


def distance(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).max() / np.abs(second).max())


def with_transformer(base: Path, merged: Path) -> FluxPipeline:
    transformer = FluxTransformer2DModel.from_pretrained(merged, subfolder="transformer")
    return FluxPipeline.from_pretrained(base, transformer=transformer)


def paths_in(folder: Path, root: Path) -> list[str]:
    """Files that hold a path of this machine, below the folder of all that the tests write."""
    return [name for name, content in files_in(folder).items() if str(root).encode() in content]


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.glob(f".{folder.name}*")}


@pytest.fixture(scope="module")
def flux_adapter(tiny_flux, tmp_path_factory) -> Path:
    transformer = FluxTransformer2DModel.from_pretrained(tiny_flux, subfolder="transformer")
    config = LoraConfig(r=4, lora_alpha=32, target_modules=FLUX_LAYERS)
    return save_adapter(transformer, config, tmp_path_factory.mktemp("flux") / "adapter", tiny_flux, std=0.1)


@pytest.fixture(scope="module")
def judge_adapter(tiny_qwen, tmp_path_factory) -> Path:
    network = AutoModelForImageTextToText.from_pretrained(tiny_qwen)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=JUDGE_LAYERS, task_type="CAUSAL_LM")
    return save_adapter(network, config, tmp_path_factory.mktemp("judge") / "adapter", tiny_qwen)


@pytest.fixture(scope="module")
def flux_with_adapter(tiny_flux, flux_adapter) -> np.ndarray:
    pipeline = FluxPipeline.from_pretrained(tiny_flux)
    base = latent(pipeline)
    pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, flux_adapter)
    adapted = latent(pipeline)
    assert distance(base, adapted) > 1000 * TOLERANCE
    return adapted


def scores_of(model: Path | str, **kwargs) -> np.ndarray:
    images = [noise(seed, (84, 56)) for seed in range(4)]
    pairs = [(first, second) for first in images for second in images if first is not second]
    return np.array(PaCoReward.from_pretrained(model, device="cpu", **kwargs).score(pairs, QUESTION))


@pytest.fixture(scope="module")
def judge_with_adapter(tiny_qwen, judge_adapter) -> np.ndarray:
    scores = scores_of(judge_adapter)
    assert np.abs(scores - scores_of(tiny_qwen)).max() > 100 * TOLERANCE
    return scores


@pytest.fixture(scope="module")
def merged_flux(flux_adapter, tmp_path_factory) -> tuple[Path, SimpleNamespace]:
    folder = tmp_path_factory.mktemp("merged") / "new" / "folder"
    outcome = run(*options(flux_adapter, folder))
    assert outcome.code == 0, outcome.err
    return folder, outcome


class TestPipeline:
    def test_image(self, merged_flux, tiny_flux, flux_with_adapter):
        assert distance(latent(with_transformer(tiny_flux, merged_flux[0])), flux_with_adapter) < TOLERANCE

    def test_files(self, merged_flux, tiny_flux, flux_adapter, tmp_path_factory):
        folder, outcome = merged_flux
        name = "transformer/diffusion_pytorch_model.safetensors"
        assert set(files_in(folder)) == {"README.md", "paco_trl.json", "transformer/config.json", name}
        root = tmp_path_factory.getbasetemp()
        assert paths_in(folder, root) == [] and paths_in(flux_adapter, root) == ["adapter_config.json"]
        saved, base = load_file(folder / name), load_file(tiny_flux / name)
        assert {key: (value.shape, value.dtype) for key, value in saved.items()} == {
            key: (value.shape, value.dtype) for key, value in base.items()
        }
        changed = {key for key in base if not torch.equal(saved[key], base[key])}
        assert changed == {key for key in base if any(key.endswith(f"{layer}.weight") for layer in FLUX_LAYERS)}
        assert folder.stat().st_mode == folder.parent.stat().st_mode and leftovers(folder) == set()
        assert f"Merging '{flux_adapter}' into '{tiny_flux}'." in outcome.err and str(folder) in outcome.out

    def test_latest_checkpoint_of_a_run(self, merged_flux, flux_adapter, tmp_path):
        for step in (1, 2):
            shutil.copytree(flux_adapter, tmp_path / "out" / f"checkpoint-{step}")
            (tmp_path / "out" / f"checkpoint-{step}" / "run.json").write_text('{"run": {}, "files": {}}')
        outcome = run(*options(tmp_path / "out", tmp_path / "merged"))
        assert f"Merging '{tmp_path / 'out' / 'checkpoint-2'}'" in outcome.err
        weights = "transformer/diffusion_pytorch_model.safetensors"
        assert (tmp_path / "merged" / weights).read_bytes() == (merged_flux[0] / weights).read_bytes()


def test_settings_of_the_evaluation_are_kept(flux_adapter, tiny_flux, tmp_path):
    adapter = shutil.copytree(flux_adapter, tmp_path / "adapter")
    call = {"height": 64, "width": 32, "num_inference_steps": 2, "guidance_scale": 1.0}
    kept = {"inference_size": [64, 32], "guidance_scale": 1.0, "set_layout": "grid"}
    card = ImageModelCardData("a", "a", str(tiny_flux), call=call, settings=kept | {"learning_rate": 1e-3})
    save_card_data(card, adapter)
    assert run(*options(adapter, tmp_path / "merged")).code == 0
    merged = load_card_data(tmp_path / "merged")
    assert merged.settings == kept and merged.call == call


@pytest.fixture(scope="module")
def bf16_flux(tiny_flux, tmp_path_factory) -> Path:
    """The pipeline with its transformer in bf16, as published ones are."""
    folder = shutil.copytree(tiny_flux, tmp_path_factory.mktemp("bf16") / tiny_flux.name)
    transformer = FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer", dtype=torch.bfloat16)
    transformer.save_pretrained(folder / "transformer")
    return folder


class TestDtype:
    @staticmethod
    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")

    def test_that_of_the_files_or_another(self, bf16_flux, flux_adapter, tmp_path):
        file = flux_adapter / "adapter_model.safetensors"
        merge(MergeArguments(str(file), str(tmp_path / "float32"), str(bf16_flux), "float32"))
        exact = self.weights(tmp_path / "float32")
        assert {value.dtype for value in exact.values()} == {torch.float32}

        assert main(["merge", *options(flux_adapter, tmp_path / "bfloat16", model_name_or_path=bf16_flux)]) == 0
        rounded = self.weights(tmp_path / "bfloat16")
        assert {value.dtype for value in rounded.values()} == {torch.bfloat16}
        # One rounding of the sum in float32
        assert all(torch.equal(rounded[name], exact[name].to(torch.bfloat16)) for name in exact)

    def test_overflow(self, tiny_flux, flux_adapter, tmp_path, capsys):
        adapter = shutil.copytree(flux_adapter, tmp_path / "adapter")
        weights = load_file(adapter / "adapter_model.safetensors")
        save_file({name: 1e3 * value for name, value in weights.items()}, adapter / "adapter_model.safetensors")
        assert main(["merge", *options(adapter, tmp_path / "merged", dtype="float16")]) == 1
        assert "is not finite after merging" in capsys.readouterr().err
        assert not (tmp_path / "merged").exists() and leftovers(tmp_path / "merged") == set()
        assert main(["merge", *options(adapter, tmp_path / "merged", dtype="float32")]) == 0


@pytest.fixture(scope="module")
def merged_judge(judge_adapter, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("merged") / "judge"
    outcome = run(*options(judge_adapter, folder))
    assert outcome.code == 0, outcome.err
    return folder


class TestJudge:
    def test_scores(self, merged_judge, judge_with_adapter):
        found = np.abs(scores_of(merged_judge) - judge_with_adapter).max()
        assert found < TOLERANCE

    def test_files(self, merged_judge, tiny_qwen, tmp_path_factory):
        assert paths_in(merged_judge, tmp_path_factory.getbasetemp()) == []
        assert not list(merged_judge.glob("adapter*"))
        with (
            safe_open(merged_judge / "model.safetensors", "pt") as saved,
            safe_open(tiny_qwen / "model.safetensors", "pt") as base,
        ):
            # The layout that vLLM and older versions of transformers read too
            assert set(saved.keys()) == set(base.keys())
        assert {path.name for path in tiny_qwen.iterdir()} <= {path.name for path in merged_judge.iterdir()}
        assert type(AutoProcessor.from_pretrained(merged_judge)) is type(AutoProcessor.from_pretrained(tiny_qwen))

    def test_the_size_of_images_is_that_of_the_adapter(self, judge_adapter, tiny_qwen, tmp_path):
        adapter = shutil.copytree(judge_adapter, tmp_path / "adapter")
        limited = AutoProcessor.from_pretrained(tiny_qwen)
        limit_pixels(limited, 56 * 56)
        limited.save_pretrained(adapter)
        merge(MergeArguments(str(adapter / "adapter_model.safetensors"), str(tmp_path / "merged")))
        assert AutoProcessor.from_pretrained(tmp_path / "merged").image_processor.size["longest_edge"] == 56 * 56
        assert np.abs(scores_of(tmp_path / "merged") - scores_of(adapter)).max() < TOLERANCE


class TestHub:
    def test_a_base_by_a_relative_path(self, tiny_flux, flux_adapter, tmp_path):
        """It is one from where the run was started, although it reads like a Hub id."""
        adapter = edit_config(
            shutil.copytree(flux_adapter, tmp_path / "runs" / "a"), base_model_name_or_path="models/tiny-flux"
        )
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "tiny-flux").symlink_to(tiny_flux)
        result = run(*options(adapter, tmp_path / "merged"))
        assert result.code == 0 and f"into '{tmp_path}/models/tiny-flux'" in result.err + result.out

    def test_adapter_and_base_by_their_ids(self, tiny_flux, flux_adapter, flux_with_adapter, tmp_path):
        with HubServer(tokens={}) as hub:
            adapter = edit_config(
                shutil.copytree(flux_adapter, tmp_path / "adapter"), base_model_name_or_path="painters/tiny-flux"
            )
            hub.add_repo("painters/tiny-flux", {**files_in(tiny_flux), "README.md": b"---\nlicense: mit\n---\n"})
            hub.add_repo("someone/adapter", files_in(adapter))
            with hub.connected(tmp_path / "cache"):
                outcome = run(*options("someone/adapter", tmp_path / "merged"))
                missing = run(*options("someone/another", tmp_path / "other"))
        assert outcome.code == 0, outcome.err
        assert "'someone/adapter' into 'painters/tiny-flux'" in outcome.err
        assert distance(latent(with_transformer(tiny_flux, tmp_path / "merged")), flux_with_adapter) < TOLERANCE
        read = {path for method, path in hub.requests if method == "GET" and "/resolve/" in path}
        assert any("transformer/diffusion_pytorch_model" in path for path in read)
        assert not any(part in path for path in read for part in ("text_encoder", "vae", "pytorch_lora_weights"))
        assert hub.unknown == []
        card = ModelCard.load(tmp_path / "merged" / "README.md")
        assert card.data.base_model == "painters/tiny-flux" and card.data.base_model_relation == "finetune"
        assert card.data.license == "mit"
        assert "someone/adapter merged into it" in card.text and card.data.library_name == "diffusers"
        call = r'FluxTransformer2DModel\.from_pretrained\(\s*"merged", subfolder="transformer", dtype=torch.float32'
        assert re.search(call, card.text)
        assert missing.code == 1 and "someone/another" in missing.err and "Traceback" not in missing.err
        assert not (tmp_path / "other").exists()


class TestErrors:
    def refused(self, capsys, output_dir: Path, *arguments) -> str:
        before = {str(path): path.stat().st_mtime for path in output_dir.parent.rglob("*")}
        assert main(["merge", *map(str, arguments)]) == 1
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        # Nothing is left
        assert {str(path): path.stat().st_mtime for path in output_dir.parent.rglob("*")} == before
        return captured.err

    @pytest.mark.parametrize(
        ("arguments", "token"),
        [
            ({"adapter": "full"}, "all weights"),
            ({"adapter": "vera"}, "VERA"),
            ({"adapter": "broken"}, "The adapter 'broken' cannot be read"),
            ({"adapter": "lists"}, "The adapter 'lists' does not fit"),
            ({"adapter": "nameless"}, "--model_name_or_path"),
            ({"model_name_or_path": "gone"}, "gone"),
            ({"output_dir": "adapter"}, "Nothing is overwritten"),
            ({"dtype": "int8"}, "int8"),
        ],
    )
    def test_what_cannot_be_merged(self, capsys, flux_adapter, tiny_flux, tmp_path, monkeypatch, arguments, token):
        monkeypatch.chdir(tmp_path)
        shutil.copytree(tiny_flux / "transformer", tmp_path / "full")
        adapter = shutil.copytree(flux_adapter, tmp_path / "adapter")
        edit_config(shutil.copytree(adapter, tmp_path / "nameless"), base_model_name_or_path=None)
        edit_config(shutil.copytree(adapter, tmp_path / "vera"), peft_type="VERA")
        edit_config(shutil.copytree(adapter, tmp_path / "broken"), base_model_name_or_path=3)
        edit_config(shutil.copytree(adapter, tmp_path / "lists"), rank_pattern=[3])
        words = options(**{"adapter": "adapter", "output_dir": "merged", **arguments})
        assert token in self.refused(capsys, tmp_path / "merged", *words)

    def test_another_base(self, capsys, flux_adapter, tiny_flux, tmp_path):
        other = shutil.copytree(tiny_flux, tmp_path / "another-flux")
        arguments = options(flux_adapter, tmp_path / "merged", model_name_or_path=other)
        message = self.refused(capsys, tmp_path / "merged", *arguments)
        assert f"'{tiny_flux}'" in message and f"'{other}'" in message
