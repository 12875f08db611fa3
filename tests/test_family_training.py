# SPDX-License-Identifier: Apache-2.0
"""
PaCoGRPOTrainer on a tiny pipeline of each family: the ratio before the first update, a planted reward, the export, two
processes, and layers that no prediction depends on.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from diffusers import DiffusionPipeline
from peft import LoraConfig, PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

import launching
import tiny_models
from launching import CONFIGS
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.rewards import redness_reward
from paco_trl.rollout import FAMILIES, QwenImageFamily
from testing_utils import SMALL_RUN, anti_redness_reward, fetch


@dataclass
class Case:
    """A family: its tiny pipeline, the source images of a prompt, settings, and the rounds of its training."""

    build: str
    num_images: int = 0
    settings: dict = field(default_factory=dict)
    rounds: int = 4

    @property
    def sizes(self) -> dict:
        """Source images are read at 1024 x 1024 pixels, and at 1/16 of it per side in training, as images are generated."""
        side, scale = (1024, 1 / 16) if self.num_images else (64, 1 / 2)
        return {"height": side, "width": side, "resolution_scale": scale}


# Where the text alone is 512 tokens
FEW_IMAGES = {"num_generations": 4, "per_device_train_batch_size": 4}
TRUE_GUIDANCE = {"guidance_scale": 4.0, "negative_prompt": " "}
CASES = {
    "kontext": Case("build_tiny_flux_kontext", 1, {"guidance_scale": 2.5, "num_generations": 16}, rounds=7),
    "qwen-image": Case("build_tiny_qwen_image", 0, TRUE_GUIDANCE, rounds=8),
    "qwen-image-edit": Case("build_tiny_qwen_image_edit", 1, TRUE_GUIDANCE, rounds=7),
    "qwen-image-edit-plus": Case("build_tiny_qwen_image_edit_plus", 2, TRUE_GUIDANCE, rounds=10),
    "qwen-image-2.1": Case("build_tiny_qwen_image_21", 1, TRUE_GUIDANCE | {"learning_rate": 5e-3}, rounds=7),
    "longcat-image": Case("build_tiny_longcat_image", 0, {"guidance_scale": 4.0, **FEW_IMAGES}),
    "longcat-image-edit": Case("build_tiny_longcat_image_edit", 1, {"guidance_scale": 4.0, **FEW_IMAGES}),
    "ovis-image": Case("build_tiny_ovis_image", 0, {"guidance_scale": 5.0}, rounds=6),
    "stable-diffusion-3": Case("build_tiny_stable_diffusion_3", 0, {"guidance_scale": 4.5}),
    "flux2": Case("build_tiny_flux2", 0, {"guidance_scale": 4.0, **FEW_IMAGES}),
    "flux2-klein": Case(
        "build_tiny_flux2_klein", 1, {"guidance_scale": 4.0, "detach_unconditional": True, **FEW_IMAGES}, rounds=5
    ),
    "krea-2": Case("build_tiny_krea2", 0, {"guidance_scale": 3.5}),
    "z-image": Case("build_tiny_z_image", 0, {"guidance_scale": 5.0}),
}


def image(width: int, height: int, seed: int) -> Image.Image:
    """Return an image of four colors."""
    colors = np.random.default_rng(seed).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(colors).resize((width, height))


def make_dataset(num_images: int) -> Dataset:
    rows = []
    for number in range(2):
        row = {"prompt": f"Paint number {number} in red."}
        images = [image(*[(64, 64), (96, 64), (64, 80)][number + i], number + i) for i in range(num_images)]
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
def test_family(name, make_small, tmp_path):
    case = CASES[name]
    folder = getattr(tiny_models, case.build)(tmp_path / "tiny")

    def train(reward, name):
        settings = {"num_generations": 8, "per_device_train_batch_size": 8, "learning_rate": 2e-2, **case.settings}
        trainer = make_small(
            model=str(folder), reward_funcs=reward, train_dataset=make_dataset(case.num_images),
            peft_config=LoraConfig(r=8, lora_alpha=16, init_lora_weights="gaussian"), output_dir=str(tmp_path / name),
            sde_steps=[1, 2], optimizer_steps_per_generation=1, max_steps=case.rounds, **case.sizes, **settings,
        )  # fmt: skip
        trainer.train()
        rounds = [entry for entry in trainer.state.log_history if "reward" in entry]
        assert len(rounds) == case.rounds
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
    images = generate_in_both_ways(trainer, folder, tmp_path / "adapter")
    assert images["base"].std() > 1 and np.abs(images["base"] - images["peft"]).mean() > 1
    assert np.array_equal(images["peft"], images["diffusers"])


def generate_in_both_ways(trainer, folder, adapter) -> dict[str, np.ndarray]:
    """The same image without the adapter, and with it as PEFT and as diffusers load it."""
    found = {}
    for way in ("base", "peft", "diffusers"):
        pipeline = DiffusionPipeline.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        if way == "peft":
            pipeline.transformer = PeftModel.from_pretrained(pipeline.transformer, adapter)
        elif way == "diffusers":
            if hasattr(pipeline, "load_lora_weights"):
                pipeline.load_lora_weights(adapter)
            else:
                pipeline.transformer.load_lora_adapter(adapter, weight_name="pytorch_lora_weights.safetensors")
        rows, family, args = trainer.train_rows, trainer.family, trainer.args
        fetched = fetch(trainer.policy.encoder, rows, [0], args.resolution_scale)
        encoded, images = fetched.embeddings[0], fetched.source_images(0)
        with family.generation_context(pipeline, images):
            image = pipeline(
                **family.batch_arguments(encoded.arguments_on("cpu")),
                **family.call_arguments(*rows.training_sizes[0], args.guidance_scale, images),
                num_inference_steps=2,
                generator=[torch.Generator().manual_seed(0)],
            ).images[0]
        found[way] = np.asarray(image, dtype=np.float32)
    return found


# ---- Two processes ----


class Gradients(TrainerCallback):
    """Keeps the gradients of the first optimizer step."""

    def __init__(self):
        self.kept = {}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if state.global_step == 0:
            parameters = model.named_parameters()
            self.kept = {name.removeprefix("module."): p.grad.clone() for name, p in parameters if p.grad is not None}


def short_run(case: Case, folder: Path, output: Path, **kwargs) -> tuple[PaCoGRPOTrainer, Gradients]:
    """A trainer for two optimizer steps of four micro-batches, on one process."""
    gradients, allowed = Gradients(), ("guidance_scale", "negative_prompt", "detach_unconditional")
    settings = SMALL_RUN | case.sizes | {name: case.settings[name] for name in allowed if name in case.settings}
    settings |= {
        "num_generations": 2, "num_prompts_per_generation": 2, "per_device_train_batch_size": 1, "sde_steps": [0],
        "num_inference_steps": 2, "optimizer_steps_per_generation": 1, "max_grad_norm": 0.0,  # gradients as they are
        "ddp_backend": "gloo" if "RANK" in os.environ else None, "gradient_checkpointing": False,
    }  # fmt: skip
    peft_config = kwargs.pop("peft_config", LoraConfig(r=2))
    trainer = PaCoGRPOTrainer(
        str(folder), redness_reward, PaCoGRPOConfig(str(output), **settings, **kwargs), make_dataset(case.num_images),
        callbacks=[gradients], peft_config=peft_config,
    )  # fmt: skip
    return trainer, gradients


def two_process_runs() -> dict[str, tuple[Case, dict]]:
    """Of every family; the targets of the published config; all weights; an unlisted pipeline, which goes last."""
    flux = Case("build_tiny_flux", 0, {"guidance_scale": 3.5})
    published = yaml.safe_load((CONFIGS.parent / "recipes" / "paco-qwen-image-edit.yaml").read_text())
    targets = LoraConfig(r=2, target_modules=published["lora_target_modules"])
    runs = {name: (case, {}) for name, case in {"flux": flux, **CASES}.items()}
    runs["qwen-image-edit"] = (CASES["qwen-image-edit"], {"peft_config": targets})
    runs["all weights"] = (CASES["qwen-image"], {"peft_config": None})
    runs["unlisted"] = (flux, {})
    return runs


def train_all(folder: Path, output: Path) -> None:
    """Trains and saves the gradients of all runs; with an adapter on unused layers, what the error says."""
    for name, (case, settings) in two_process_runs().items():
        families = {key: FAMILIES[key] for key in FAMILIES if name != "unlisted" or key != "FluxPipeline"}
        with pytest.MonkeyPatch.context() as patch:
            for key in FAMILIES.keys() - families.keys():
                patch.delitem(FAMILIES, key)
            trainer, gradients = short_run(case, folder / case.build, output / name, **settings)
            trainer.train()
            assert trainer.state.global_step == 2
            if trainer.accelerator.is_main_process:
                save_file(gradients.kept, output / f"{name}.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QwenImageFamily, "unused_layers", lambda self, transformer: [])
        trainer, _ = short_run(CASES["qwen-image"], folder / "build_tiny_qwen_image", output / "error")
        try:
            trainer.train()
        except ValueError as error:
            (output / f"error-{os.environ.get('RANK', '0')}.txt").write_text(f"{trainer.state.global_step} {error}")


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path):
    runs = two_process_runs()
    for build in {case.build for case, _ in runs.values()}:
        getattr(tiny_models, build)(tmp_path / build)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nimport test_family_training\n"
        "test_family_training.train_all(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    for number in "12":
        (tmp_path / number).mkdir()
    train_all(tmp_path, tmp_path / "1")
    launching.check_run([script, tmp_path, tmp_path / "2"], config=launching.CPU_DDP)
    for name in runs:
        one, two = (load_file(tmp_path / number / f"{name}.safetensors") for number in "12")
        assert one.keys() == two.keys() and len(one) > 10
        size = max(gradient.abs().max() for gradient in one.values())
        assert size > 1e-6
        for key, gradient in one.items():
            assert (two[key] - gradient).abs().max() < 1e-5 * size, (name, key)
    for file in ("1/error-0.txt", "2/error-0.txt", "2/error-1.txt"):
        text = (tmp_path / file).read_text()
        assert text.startswith("0 6 of 48 trained weights have no gradient after the first backward")
        for layer in ("attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"):
            assert f"'transformer_blocks.1.{layer}'" in text


@pytest.mark.parametrize("finds_unused", [True, False])
def test_where_all_weights_are_trained_they_may_have_no_gradient(finds_unused, tmp_path):
    settings = {"peft_config": None} | ({} if finds_unused else {"ddp_find_unused_parameters": False})
    folder = tiny_models.build_tiny_qwen_image(tmp_path / "tiny-qwen-image")
    trainer, gradients = short_run(CASES["qwen-image"], folder, tmp_path / "out", **settings)
    assert trainer.args.ddp_find_unused_parameters is finds_unused
    unused = trainer.family.unused_layers(trainer.model)
    if not finds_unused:
        with pytest.raises(ValueError, match="6 of .* weights have no gradient.*Leave `ddp_find_unused") as error:
            trainer.train()
        assert sum(repr(layer) in str(error.value) for layer in unused) == 3
        return
    trainer.train()
    trained = dict(trainer.model.named_parameters())
    without = {name.rpartition(".")[0] for name in trained.keys() - gradients.kept.keys()}
    assert 0 < len(without) < len(trained) and without < set(unused)
