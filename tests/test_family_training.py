# SPDX-License-Identifier: Apache-2.0
"""PaCoGRPOTrainer on a tiny pipeline of each family: the ratio before the first update, a planted reward, the export."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftModel
from PIL import Image

from paco_trl import tiny
from paco_trl.rewards import redness_reward


@dataclass
class Case:
    """
    A family: its tiny pipeline, its settings, and the source images of a prompt.

    Source images are read at 1024 x 1024 pixels, and in training at 1/16 of it per side, as the edited image is drawn.
    """

    build: str
    num_images: int = 0
    settings: dict = field(default_factory=dict)


CASES = {
    "kontext": Case("build_tiny_flux_kontext", 1, {"guidance_scale": 2.5}),
    "qwen-image": Case("build_tiny_qwen_image", 0, {"guidance_scale": 4.0, "negative_prompt": " "}),
    "qwen-image-edit": Case("build_tiny_qwen_image_edit", 1, {"guidance_scale": 4.0, "negative_prompt": " "}),
    "qwen-image-edit-plus": Case(
        "build_tiny_qwen_image_edit_plus", 2, {"guidance_scale": 4.0, "negative_prompt": " "}
    ),
    "stable-diffusion-3": Case("build_tiny_stable_diffusion_3", 0, {"guidance_scale": 4.5}),
    "flux2": Case("build_tiny_flux2", 0, {"guidance_scale": 4.0}),
    "flux2-klein": Case(
        "build_tiny_flux2_klein",
        1,
        # Its text alone is 512 tokens
        {"guidance_scale": 4.0, "detach_unconditional": True, "num_generations": 4, "per_device_train_batch_size": 4},
    ),
    "z-image": Case("build_tiny_z_image", 0, {"guidance_scale": 5.0}),
}


def anti_redness_reward(completions, **kwargs):
    return [-value for value in redness_reward(completions=completions, **kwargs)]


def picture(width: int, height: int, seed: int) -> Image.Image:
    """A picture of four colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height))


def make_dataset(num_images: int) -> Dataset:
    rows = []
    for number in range(2):
        row = {"prompt": f"Paint number {number} in red."}
        images = [picture(*[(64, 64), (96, 64), (64, 80)][number + i], number + i) for i in range(num_images)]
        if num_images == 0:
            row |= {"rows": 1, "cols": 1, "panels": [row["prompt"]]}
        elif num_images == 1:
            row["image"] = images[0]
        else:
            row["images"] = images
        rows.append(row)
    return Dataset.from_list(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_family(name, make_trainer, tmp_path):
    case = CASES[name]
    folder = getattr(tiny, case.build)(tmp_path / "tiny")
    side, scale = (1024, 1 / 16) if case.num_images else (64, 1 / 2)

    def train(reward, name):
        trainer = make_trainer(
            model=str(folder),
            reward_funcs=reward,
            train_dataset=make_dataset(case.num_images),
            peft_config=LoraConfig(r=8, lora_alpha=16, init_lora_weights="gaussian"),
            output_dir=str(tmp_path / name),
            height=side,
            width=side,
            resolution_scale=scale,
            num_prompts_per_generation=2,
            gradient_checkpointing=False,
            sde_steps=[1, 2],
            optimizer_steps_per_generation=1,
            max_steps=16,
            learning_rate=2e-2,
            **{"num_generations": 8, "per_device_train_batch_size": 8, **case.settings},
        )
        trainer.train()
        rounds = [entry for entry in trainer.state.log_history if "reward" in entry]
        assert len(rounds) == 16
        # Before the first update the ratio is 1 to the last bit
        assert [rounds[0][f"ratio_deviation_on_policy/step_{step}"] for step in (1, 2)] == [0.0, 0.0]
        return trainer, rounds

    trainer, up = train(redness_reward, "up")
    _, down = train(anti_redness_reward, "down")
    up_redness = [entry["rewards/redness_reward/mean"] for entry in up]
    down_redness = [-entry["rewards/anti_redness_reward/mean"] for entry in down]
    assert up_redness[0] == down_redness[0]  # the same first images
    spread = up[0]["rewards/redness_reward/std"]
    # The noise of a round is the same in both runs
    assert np.mean(up_redness[-4:]) - np.mean(down_redness[-4:]) > spread / 4 > 0

    trainer.save_model(str(tmp_path / "adapter"))
    images = draw_in_both_ways(trainer, folder, tmp_path / "adapter")
    assert images["base"].std() > 1 and np.abs(images["base"] - images["peft"]).mean() > 1
    assert np.array_equal(images["peft"], images["diffusers"])


def draw_in_both_ways(trainer, folder, adapter) -> dict[str, np.ndarray]:
    """The same image without the adapter, and with it as PEFT and as diffusers load it."""
    found = {}
    for way in ("base", "peft", "diffusers"):
        pipeline = DiffusionPipeline.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        if way == "peft":
            pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, adapter)
        elif way == "diffusers":
            pipeline.load_lora_weights(adapter)
        rows, family, args = trainer.train_rows, trainer.family, trainer.args
        encoded = trainer.prompt_encoder.fetch(rows, [0], args.resolution_scale)[0]
        images = trainer._prepare_images(rows.images(0), args.resolution_scale)
        with family.drawing(pipeline, images):
            image = pipeline(
                **family.batch_arguments(encoded.place("cpu")),
                **family.call_arguments(*rows.training_sizes[0], args.guidance_scale, images),
                num_inference_steps=2,
                generator=[torch.Generator().manual_seed(0)],
            ).images[0]
        found[way] = np.asarray(image, dtype=np.float32)
    return found
