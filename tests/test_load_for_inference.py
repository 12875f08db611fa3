# SPDX-License-Identifier: Apache-2.0
"""`load_for_inference`: what was trained, as it was trained, and LoRAs of any other origin."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig, get_peft_model_state_dict

from hub_server import HubServer
from paco_trl import load_for_inference
from paco_trl.commands import evaluate_arguments as evaluate
from paco_trl.commands.grpo import ImageCommandParser
from paco_trl.commands.script_arguments import ScriptArguments
from paco_trl.generation.inference import read_loading_spec
from paco_trl.hub.card_data import LoRA, load_card_data, save_card_data
from paco_trl.rollout.loading import pipeline_quantization
from test_evaluate_generation import make_adapter
from testing_utils import draw, files_in, give_effect


SIZE = {"height": 32, "width": 48}


@pytest.fixture
def run(make_trainer, tmp_path) -> Path:
    """An output directory of a run on 8-bit weights, whose adapter changes images."""
    settings = {"vae_tiling": True, "num_inference_steps_eval": 3, "guidance_scale": 2.5, "resolution_scale": 1.0}
    trainer = make_trainer(quantization="int8", output_dir=str(tmp_path / "run"), **settings, **SIZE)
    give_effect(trainer.model, std=0.3)
    trainer.save_model()
    return tmp_path / "run"


def test_as_it_was_trained(run, tmp_path):
    pipe, call = load_for_inference(run)
    assert call == {**SIZE, "guidance_scale": 2.5, "num_inference_steps": 3, "max_sequence_length": 32}
    assert pipe.vae.use_tiling and pipe.text_encoder_2.dtype == torch.float32
    assert {"transformer", "text_encoder_2"} <= {*pipeline_quantization(pipe).split("(")[1].strip(")").split(", ")}
    assert pipe("A red fox.", **call).images[0].size == (48, 32)
    # Of each setting another one is another image, or another dtype
    image = draw(pipe)
    for asked in ({"quantization": None}, {"dtype": "bfloat16"}):
        assert not np.array_equal(draw(load_for_inference(run, **asked)[0]), image), asked
    assert pipeline_quantization(load_for_inference(run, quantization=None)[0]) is None
    with pytest.raises(TypeError, match="`offload` is 'no'"):
        load_for_inference(run, offload="no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`adapter_or_model` is None; pass a Hub id"):
        load_for_inference(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"/vae' is a component of the model '{pipe.name_or_path}'. Pass that"):
        load_for_inference(f"{pipe.name_or_path}/vae")
    # Its newest model, where a later checkpoint is newer; the adapter is part of it
    base, _ = load_for_inference(pipe.name_or_path, dtype="float32", quantization="int8")
    assert not np.array_equal(draw(base), image)


def test_training_goes_on_with_the_base_of_the_adapter(run, tmp_path):
    parser = ImageCommandParser(ScriptArguments, "PaCoGRPOConfig", prog="paco-trl grpo")
    words = (
        f"--dataset_name demo --rewards redness --output_dir {tmp_path}/more --use_cpu --bf16 False --adapter {run}"
    )
    script_args, _ = parser.parse_args_and_config(words.split())
    assert (
        script_args.model_name_or_path
        == json.loads((run / "adapter_config.json").read_text())["base_model_name_or_path"]
    )
    (tmp_path / "other").symlink_to(script_args.model_name_or_path)
    words += f" --model_name_or_path {tmp_path}/other"
    assert (
        parser.parse_args_and_config(words.split())[0].model_name_or_path == f"{tmp_path}/other"
    )  # what is typed wins


def test_a_transformer_that_was_trained_itself(make_trainer, tiny_flux, tmp_path):
    trainer = make_trainer(peft_config=None, output_dir=str(tmp_path / "full"))
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.mul_(1.1)
    trainer.save_model()
    with pytest.raises(ValueError, match="not on this machine: 'tiny-flux'"):
        load_for_inference(tmp_path / "full")
    (tmp_path / "tiny-flux").symlink_to(tiny_flux)  # beside it, as where it was trained
    pipe, _ = load_for_inference(tmp_path / "full")
    expected = DiffusionPipeline.from_pretrained(tiny_flux, transformer=trainer.model.eval())
    assert np.array_equal(draw(pipe), draw(expected))
    # In commands it is an adapter
    words = (
        f"prompts --adapter {tmp_path}/full --model_name_or_path {tiny_flux} --rewards redness --height 32 --width 32"
    )
    (tmp_path / "prompts.txt").write_text("A red fox in snow.\n")
    evaluate.main([*words.split(), "--dataset_name", f"{tmp_path}/prompts.txt", "--output_dir", f"{tmp_path}/out"])
    results = json.loads((tmp_path / "out" / "full" / "results.json").read_text())
    assert np.subtract(*results["sets"][0]["scores"][0].values(), *results["sets"][0]["scores"][1].values()) != 0


def test_by_a_name_on_the_hub(run, tiny_flux, tmp_path):
    """The base model is found by the adapter's config, by `paco_trl.json` or by the card, and its commit too."""
    plain = make_adapter(tmp_path / "plain", str(tiny_flux), 0)
    (tmp_path / "base").symlink_to(tiny_flux)
    with HubServer({}) as hub, hub.connected(tmp_path / "cache"):
        first = hub.add_repo("makers/base", files_in(tiny_flux)).sha_of("main")
        config = json.loads((plain / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "makers/base"
        (plain / "adapter_config.json").write_text(json.dumps(config))
        hub.add_repo("user/plain", files_in(plain))
        hub.add_repo("user/steps", {f"checkpoint-200/{file}": data for file, data in files_in(plain).items()})
        own = json.loads((run / "adapter_config.json").read_text())
        (run / "adapter_config.json").write_text(json.dumps(own | {"base_model_name_or_path": "/elsewhere/base"}))
        card = load_card_data(run)
        card.base_model, card.base_revision = "makers/base", first
        save_card_data(card, run)
        branches = hub.add_repo("user/run", files_in(run)).branches
        branches["next"] = branches.pop("main")
        (tmp_path / "lora").mkdir()
        shutil.copy(run / "pytorch_lora_weights.safetensors", tmp_path / "lora")
        (tmp_path / "lora" / "README.md").write_text("---\nbase_model:\n- makers/base\n---\n# A style\n")
        hub.add_repo("user/lora", files_in(tmp_path / "lora"))
        for name, revision, quantization, of_base in (
            ("user/plain", None, None, None),
            ("user/steps/checkpoint-200/adapter_model.safetensors", "main", None, None),
            ("user/run", "next", "int8", first),
            ("user/lora", None, None, None),
        ):
            spec = read_loading_spec(name, revision=revision)
            found = (spec.model, spec.revision, spec.quantization)
            assert found == ("makers/base", of_base, quantization), name
            assert bool(spec.call) is (name == "user/run")
        with pytest.raises((OSError, ValueError), match="user/run"):
            read_loading_spec("user/run")
        pipe, _ = load_for_inference("user/run", revision="next")
        assert np.array_equal(draw(pipe), draw(load_for_inference(run, str(tmp_path / "base"))[0]))
        assert load_for_inference("makers/base", dtype="float32")[1] == {}


@pytest.mark.parametrize("name", ["", "adapter_model.safetensors", "checkpoint-2/adapter_model.safetensors"])
def test_a_base_that_the_run_named_by_a_relative_path(name, tiny_flux, tmp_path):
    """Found from where the run was started, although it could be a Hub id."""
    run, base = tmp_path / "project" / "runs" / "a", tmp_path / "project" / "models" / "flux"
    plain = make_adapter(run / Path(name).parent, str(tiny_flux), 0)
    config = json.loads((plain / "adapter_config.json").read_text()) | {"base_model_name_or_path": "models/flux"}
    (plain / "adapter_config.json").write_text(json.dumps(config))
    (run.parent / "models" / "flux").mkdir(parents=True)  # no pipeline
    base.parent.mkdir()
    base.symlink_to(tiny_flux)
    spec = read_loading_spec(run / name)
    assert (spec.model, bool(spec.adapter)) == (str(base), True)


def test_a_lora_of_another_kind_of_pipeline(tiny_flux, tmp_path):
    """What diffusers alone reads: here one of a UNet."""
    flux = DiffusionPipeline.from_pretrained(tiny_flux)
    torch.manual_seed(0)
    width, channels = flux.text_encoder.config.hidden_size, flux.vae.config.latent_channels
    sizes = {"block_out_channels": (8,), "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": width}
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    unet = UNet2DConditionModel(in_channels=channels, out_channels=channels, attention_head_dim=2, **sizes, **blocks)
    parts = {"vae": flux.vae, "text_encoder": flux.text_encoder, "tokenizer": flux.tokenizer, "unet": unet}
    pipeline = StableDiffusionPipeline(
        **parts, scheduler=DDIMScheduler(), safety_checker=None, feature_extractor=None, requires_safety_checker=False
    )
    pipeline.save_pretrained(tmp_path / "base")
    untouched = draw(pipeline, max_sequence_length=None)
    unet.add_adapter(LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    StableDiffusionPipeline.save_lora_weights(
        tmp_path / "lora", get_peft_model_state_dict(unet, adapter_name="default")
    )
    pipe, call = load_for_inference(tmp_path / "lora", str(tmp_path / "base"), dtype="float32")
    image = draw(pipe, max_sequence_length=None)
    assert call == {} and not np.array_equal(image, untouched)
    assert np.array_equal(image, draw(pipeline, max_sequence_length=None))
    shutil.copy(
        make_adapter(tmp_path / "flux", str(tiny_flux), 0) / "adapter_model.safetensors", tmp_path / "x.safetensors"
    )
    with pytest.raises(ValueError, match="not a LoRA that diffusers can load"):
        load_for_inference(tmp_path / "x.safetensors", str(tmp_path / "base"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lora", {}, "does not say which"),
        ("lora", {"model": "makers/other", "quantization": "nf5"}, "'nf5'"),
        ("plain", {"dtype": "float64"}, "float64"),
        ("plain", {"model": "makers/other"}, "was made for"),
        ("plain", {"revision": "next"}, "is on this machine"),
        ("base", {"model": "makers/other"}, "is a pipeline"),
        ("nowhere", {}, "no adapter 'nowhere'"),
    ],
)
def test_what_is_refused(name, options, message, tiny_flux, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = make_adapter(tmp_path / "plain", str(tiny_flux), 0)
    (tmp_path / "lora").mkdir()
    shutil.copy(plain / "adapter_model.safetensors", tmp_path / "lora" / "style.safetensors")
    (tmp_path / "base").symlink_to(tiny_flux)
    with pytest.raises((ValueError, OSError), match=message):
        read_loading_spec(name, **options)


def test_a_quantization_without_a_name_is_said(run, caplog):
    card = load_card_data(run)
    card.loading, card.lora = {}, LoRA(4, 8.0, quantization="fp4 by bitsandbytes (transformer)")
    save_card_data(card, run)
    assert read_loading_spec(run).quantization is None and "fp4 by bitsandbytes" in caplog.text
