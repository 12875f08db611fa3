# SPDX-License-Identifier: Apache-2.0
"""A checkpoint loads with PEFT and with diffusers, and both give the image of the trained model."""

import json

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from peft import LoraConfig, PeftModel
from safetensors import safe_open

from paco_trl.checkpointing.weights import swapped
from paco_trl.hub.files import PIPELINE_ADAPTER


def draw(pipeline) -> np.ndarray:
    options = {"height": 32, "width": 32, "num_inference_steps": 4, "max_sequence_length": 32}
    image = pipeline("a red fox", generator=torch.Generator().manual_seed(5), **options).images[0]
    return np.asarray(image, dtype=np.int16)


@pytest.fixture(scope="module")
def trained(tiny_flux, prompts, tmp_path_factory):
    """A trainer after a few steps with a strong adapter whose alpha is not its rank, and its checkpoint."""
    from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
    from paco_trl.rewards import redness_reward

    folder = tmp_path_factory.mktemp("export")
    trainer = PaCoGRPOTrainer(
        model=str(tiny_flux),
        reward_funcs=redness_reward,
        args=PaCoGRPOConfig(
            output_dir=str(folder), use_cpu=True, bf16=False, height=64, width=64, num_generations=4,
            num_prompts_per_generation=4, per_device_train_batch_size=4, num_inference_steps=4, max_steps=4,
            learning_rate=0.1, epsilon=0.1, report_to="none", save_strategy="steps", save_steps=2,
            hub_token="hf_this_must_not_be_seen", disable_tqdm=True,
        ),
        train_dataset=prompts,
        peft_config=LoraConfig(r=4, lora_alpha=32, init_lora_weights="gaussian"),
    )  # fmt: skip
    trainer.train()
    return trainer, folder / "checkpoint-4"


def test_both_formats_give_the_same_image(trained, tiny_flux):
    trainer, folder = trained
    torch.manual_seed(123)  # another seed than in training
    base = draw(FluxPipeline.from_pretrained(tiny_flux))

    by_diffusers = FluxPipeline.from_pretrained(tiny_flux)
    by_diffusers.load_lora_weights(folder)
    by_peft = FluxPipeline.from_pretrained(tiny_flux)
    by_peft.transformer = PeftModel.from_pretrained(by_peft.transformer, folder)

    tuned = draw(by_diffusers)
    assert np.abs(tuned - base).mean() > 2  # the adapter does something
    assert np.array_equal(tuned, draw(by_peft))
    earlier = FluxPipeline.from_pretrained(tiny_flux)
    earlier.load_lora_weights(folder.parent / "checkpoint-2")
    assert not np.array_equal(tuned, draw(earlier))
    # What is saved is the average of the weights, not the last ones
    assert not np.array_equal(tuned, draw(trainer.pipeline))
    with swapped(trainer.model, trainer.ema.average, 0):
        assert np.array_equal(tuned, draw(trainer.pipeline))


def test_files(trained, tiny_flux):
    _, folder = trained
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_flux)
    assert config["lora_alpha"] == 32
    with safe_open(folder / "pytorch_lora_weights.safetensors", framework="pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
        keys = list(file.keys())
    # The scale is in the matrices: tests/test_adapter_files.py
    assert metadata["transformer.lora_alpha"] == metadata["transformer.r"] == 4
    assert str(tiny_flux) not in json.dumps(metadata)
    assert all(key.startswith("transformer.") and "lora_" in key for key in keys)
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        assert len(list(file.keys())) == len(keys) == 30


def test_pictures_of_an_earlier_state_go(trained, tmp_path):
    trainer, _ = trained
    (tmp_path / "images").mkdir()
    for name in ("evaluation.png", "mine.png", "images/9.png", "images/mine.png"):
        (tmp_path / name).write_text("pixels")
    trainer.save_model(tmp_path, use_ema=False)
    assert (tmp_path / "curves.png").exists() and (tmp_path / "mine.png").exists()
    assert not (tmp_path / "evaluation.png").exists()  # the card does not tell of it
    assert {path.name for path in (tmp_path / "images").iterdir()} == {*(f"{n}.png" for n in range(4)), "mine.png"}


def test_published_files_hold_no_token_and_no_pickle(trained):
    _, folder = trained
    published = [path for pattern in PIPELINE_ADAPTER for path in folder.glob(pattern)]
    assert {path.suffix for path in published} == {".json", ".safetensors", ".md", ".png"}
    assert {path.name for path in published if path.suffix == ".png"} == {
        "contact_sheet.png", "curves.png", *(f"{n}.png" for n in range(4))
    }  # fmt: skip
    assert len(published) == 11
    for path in published:
        assert b"hf_this_must_not_be_seen" not in path.read_bytes()
