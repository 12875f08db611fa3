# SPDX-License-Identifier: Apache-2.0
"""Negative prompts of rows: generated and trained with as the untouched pipeline is called with them."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from diffusers import DiffusionPipeline
from PIL import Image

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.commands import evaluate_arguments
from paco_trl.generation import generate_edits, generate_grids
from paco_trl.planning import plan_memory
from paco_trl.rewards import redness_reward
from paco_trl.rollout import keyed_generator
from paco_trl.utils.stage_folder import StageFolder
from testing_utils import LORA, SMALL_RUN, are_equal, fetch, logs_with, weights_of


PROMPTS, NEGATIVES = ["A red fox.", "A glass of water."], ["blurry, dark", None]
GUIDED = {"guidance_scale": 4.0, "negative_prompt": "a lighthouse"}
SETTINGS = SMALL_RUN | GUIDED | {
    "num_generations": 2, "num_prompts_per_generation": 2, "per_device_train_batch_size": 2, "num_inference_steps": 3,
    "height": 32, "width": 32, "resolution_scale": 1.0, "num_inference_steps_eval": 2, "gradient_checkpointing": False,
    "eval_baseline": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def pipeline(folder_of) -> DiffusionPipeline:
    found = DiffusionPipeline.from_pretrained(folder_of("qwen_image"))
    found.set_progress_bar_config(disable=True)
    return found


def rows(negatives=None, **columns) -> Dataset:
    negative = {} if negatives is None else {"negative_prompt": negatives}
    return Dataset.from_dict({"prompt": PROMPTS, **negative, **columns})


def make(model, dataset, folder: Path, reward=redness_reward, peft_config=LORA, **settings) -> PaCoGRPOTrainer:
    args = PaCoGRPOConfig(str(folder), **SETTINGS | settings)
    return PaCoGRPOTrainer(model, reward, args, dataset, eval_dataset=dataset, peft_config=peft_config)


def generate_plainly(pipeline, negatives, noise=lambda row: keyed_generator(42, 4, 0, row, 0, 0)) -> list[np.ndarray]:
    """As the pipeline itself generates the prompts with these negative prompts."""
    call = {"height": 32, "width": 32, "num_inference_steps": 2, "true_cfg_scale": 4.0}
    return [
        np.asarray(pipeline(prompt, negative_prompt=negative, generator=noise(row), **call).images[0])
        for row, (prompt, negative) in enumerate(zip(PROMPTS, negatives, strict=True))
    ]


def same(first: list[np.ndarray], second: list[np.ndarray]) -> list[bool]:
    return [np.array_equal(a, b) for a, b in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def expected(pipeline) -> list[np.ndarray]:
    images = generate_plainly(pipeline, ["blurry, dark", "a lighthouse"])
    assert same(images, generate_plainly(pipeline, ["a lighthouse"] * 2)) == [False, True]  # it has an effect
    return images


@pytest.mark.parametrize(("negatives", "found"), [(NEGATIVES, [True, True]), (None, [False, True])])
def test_evaluation_is_the_pipelines_own_call(pipeline, expected, tmp_path, negatives, found):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions, strict=True))
        return redness_reward(prompts, completions)

    make(copy.deepcopy(pipeline), rows(negatives), tmp_path, reward).evaluate()
    images = [np.asarray(dict(seen)[prompt]) for prompt in PROMPTS]
    assert same(images, expected) == found


def test_training_is_that_with_the_setting(pipeline, tmp_path):
    """Rows that all have the setting's train the same; the ratio of others is 1, and they train something else."""
    results = []
    for number, (negatives, setting) in enumerate([(["blurry"] * 2, None), (None, "blurry"), (NEGATIVES, "blurry")]):
        trainer = make(copy.deepcopy(pipeline), rows(negatives), tmp_path / str(number), negative_prompt=setting)
        trainer.train()
        assert logs_with(trainer, "ratio_deviation_on_policy/step_1")[0] == 0.0
        results.append(weights_of(trainer))
    assert are_equal(*results[:2]) and not are_equal(*results[1:])


def test_a_row_without_one_needs_the_setting(pipeline, tmp_path):
    with pytest.raises(ValueError, match="negative_prompt"):
        make(copy.deepcopy(pipeline), rows(NEGATIVES), tmp_path, negative_prompt=None)
    trainer = make(copy.deepcopy(pipeline), rows(["blurry"] * 2), tmp_path, negative_prompt=None)
    with pytest.raises(ValueError, match="negative_prompt"):
        trainer.evaluate(rows())


@pytest.mark.parametrize("build", ["flux", "flux2_klein"])
def test_it_is_refused_before_the_model_is_loaded_where_it_would_be_ignored(folder_of, tmp_path, build):
    shutil.copytree(folder_of(build), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    index = json.loads((tmp_path / "model" / "model_index.json").read_text())
    (tmp_path / "model" / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    unguided = {"guidance_scale": 1.0, "negative_prompt": None}
    with pytest.raises(ValueError, match="Row 0 .*`negative_prompt`"):
        make(str(tmp_path / "model"), rows(NEGATIVES), tmp_path / "out", peft_config=LORA, **unguided)
    words = ["--model_name_or_path", tmp_path / "model", "--output_dir", tmp_path / "pages", "--rewards", "redness"]
    rows(NEGATIVES).to_json(tmp_path / "prompts.jsonl")
    words += ["--dataset_name", tmp_path / "prompts.jsonl", "--guidance_scale", "1.0"]
    with pytest.raises(ValueError, match="Row 0 .*`negative_prompt`"):
        evaluate_arguments.main(["prompts", *map(str, words)])


def test_a_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Row 1 .*`negative_prompt` is 3"):
        make("nowhere/model", rows([None, 3]), tmp_path)


def test_evaluate_prompts(folder_of, expected, tmp_path):
    rows(NEGATIVES).to_json(tmp_path / "prompts.jsonl")
    words = ["--model_name_or_path", folder_of("qwen_image"), "--dataset_name", tmp_path / "prompts.jsonl"]
    words += ["--output_dir", tmp_path / "out", "--rewards", "redness", "--num_inference_steps", 2, "--bf16", "False"]
    words += ["--height", 32, "--width", 32, "--guidance_scale", 4.0, "--negative_prompt", "a lighthouse"]
    evaluate_arguments.main(["prompts", *map(str, words)])
    images = [np.asarray(Image.open(tmp_path / "out" / "base" / "images" / f"{row}" / "0.png")) for row in range(2)]
    assert same(images, expected) == [True, True]


def test_generated_grids(pipeline, folder_of, tmp_path):
    def noise(row: int) -> torch.Generator:
        return torch.Generator().manual_seed(3)

    columns = {"id": ["a", "b"], "rows": [1, 1], "cols": [1, 1], "panels": [["one"]] * 2, "theme": [""] * 2}
    columns |= {"height": [32] * 2, "width": [32] * 2}
    call = {"num_inference_steps": 2, "true_cfg_scale": 4.0, "negative_prompt": "a lighthouse"}
    grids = generate_grids(pipeline, rows(NEGATIVES, **columns), StageFolder(tmp_path / "grids"), [3], 2, **call)
    plain = generate_plainly(pipeline, ["blurry, dark", "a lighthouse"], noise)
    assert same([np.asarray(image) for image in grids["image"]], plain) == [True, True]
    with pytest.raises(ValueError, match="Row 0 .*true_cfg_scale"):
        generate_grids(
            pipeline, rows(NEGATIVES, **columns), StageFolder(tmp_path / "x"), [3], **call | {"true_cfg_scale": 1.0}
        )


@pytest.fixture(scope="module")
def source() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))


def test_training_on_edits(folder_of, source, tmp_path):
    """The text encoder sees the source with each of them."""
    settings = {"negative_prompt": " ", "resolution_scale": 1 / 16, "height": 1024, "width": 1024, "max_steps": 2}
    trainer = make(folder_of("qwen_image_edit"), rows(NEGATIVES, image=[source] * 2), tmp_path, **settings)
    trainer.train()
    assert logs_with(trainer, "ratio_deviation_on_policy/step_1")[0] == 0.0
    encoded = fetch(trainer.policy.encoder, trainer.train_rows, [0, 1], 1 / 16).embeddings
    for row, negative in enumerate(["blurry, dark", " "]):
        with torch.no_grad():
            expected = trainer.family.encode_prompt(trainer.pipeline, negative, "cpu", [source], 1 / 16)
        assert torch.equal(encoded[row].negative_prompt["prompt_embeds"], expected["prompt_embeds"])


@pytest.mark.slow
def test_edits_of_the_untouched_pipeline(folder_of, source, tmp_path):
    edits = rows(NEGATIVES, image=[source] * 2, id=["a", "b"])
    pipeline = DiffusionPipeline.from_pretrained(folder_of("qwen_image_edit"))
    pipeline.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 2, "true_cfg_scale": 4.0, "height": 32, "width": 32}
    found = generate_edits(pipeline, edits, StageFolder(tmp_path), **call, negative_prompt=" ")
    plain = [
        np.asarray(
            pipeline(
                image=source, prompt=prompt, negative_prompt=negative or " ",
                generator=torch.Generator().manual_seed(0), **call,
            ).images[0]
        )
        for prompt, negative in zip(PROMPTS, NEGATIVES, strict=True)
    ]  # fmt: skip
    assert same([np.asarray(image) for image in found["image"]], plain) == [True, True]


def test_the_plan_counts_the_prediction_that_it_adds(folder_of, tmp_path):
    args = PaCoGRPOConfig(str(tmp_path), **SETTINGS | {"negative_prompt": None})
    plan = plan_memory(str(folder_of("qwen_image")), args, rows(["blurry"] * 2), LORA)
    assert len(plan.run.planned.transformer_calls(1, plan.run.image)) == 2


def test_sets_of_separate_images_have_that_of_their_row(pipeline, tmp_path):
    panels = [["It sits.", "It runs."], ["It eats.", "It sleeps."]]
    sets = rows(NEGATIVES, layout=["separate"] * 2, theme=["A cat.", "A dog."], panels=panels)
    trainer = make(copy.deepcopy(pipeline), sets, tmp_path, num_prompts_per_generation=4)
    trainer.policy.encoder.prefetch(trainer.train_rows, [0, 1])
    encoded = fetch(trainer.policy.encoder, trainer.train_rows, [0, 1]).embeddings
    assert encoded[0].negative_prompt is encoded[1].negative_prompt
    assert encoded[2].negative_prompt is encoded[3].negative_prompt is not encoded[0].negative_prompt
