# SPDX-License-Identifier: Apache-2.0
"""The toy models that come with the repository: small, safe to load, and what they are said to be."""

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL import Image

from miniature.data import make_prompts
from miniature.edit_world import EDIT_PANELS, Edit, judge_edit, sample_careless_edit, sample_edit
from miniature.models import (
    WEIGHTS,
    load_toy_kontext,
    toy_clip_path,
    toy_edit_judge_path,
    toy_flux_path,
    toy_judge_path,
)
from miniature.truth import judge_set, read_panels
from miniature.world import ALL_PANELS, PromptSpec, describe_spec, draw_panel
from paco_trl import PaCoReward, load_for_inference
from paco_trl.data import split_grid, theme_question
from paco_trl.evaluation import auroc
from paco_trl.rewards import ClipTReward, EditReward, RubricReward


@pytest.fixture(scope="module")
def pipeline():
    pipeline = load_for_inference(str(toy_flux_path()), dtype=torch.float32, device="cpu")[0]
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline, prompts, size: int = 128) -> list:
    call = {"height": size, "width": size, "max_sequence_length": pipeline.tokenizer_2.model_max_length}
    generator = torch.Generator().manual_seed(0)
    images = pipeline(prompts["prompt"][:], **call, num_inference_steps=8, generator=generator).images
    return [
        judge_set(read_panels(split_grid(image, 2, 2)), [PromptSpec(*spec) for spec in row["specs"]])
        for image, row in zip(images, prompts, strict=True)
    ]


def test_files_are_small_and_hold_no_pickle():
    files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12 * 2**20
    assert {path.suffix for path in files} == {".json", ".safetensors", ".jinja"}


@pytest.mark.parametrize(("size", "named"), [(128, True), (64, False)])
def test_flux_draws_the_world_and_is_not_always_consistent(pipeline, size, named):
    means = np.mean(draw(pipeline, make_prompts(24, seed=3, named=named), size), axis=0)
    assert means[3] < 0.1  # panels that show nothing of the world
    assert means[1] > 0.75
    # Two figures that have nothing to do with one another are the same in 1 of 18 cases
    assert 0.1 < means[0] < 0.8


def test_clip_finds_the_scene():
    panels = [ALL_PANELS[index] for index in np.random.default_rng(0).integers(len(ALL_PANELS), size=40)]
    images = [draw_panel(panel, 32) for panel in panels]
    texts = [describe_spec(PromptSpec(panel.shape, None, None, panel.ground, panel.place)) for panel in panels]
    reward = ClipTReward(toy_clip_path())
    empty = Image.new("RGB", (64, 64))

    def score(texts: list[str]) -> np.ndarray:
        columns = {"panels": [[text] for text in texts], "panel_images": [[image] for image in images]}
        return np.array(reward(prompts=[""] * 40, completions=[empty] * 40, **columns))

    right, wrong = score(texts), score(texts[1:] + texts[:1])
    different = np.array([a != b for a, b in zip(texts, texts[1:] + texts[:1], strict=True)])
    assert different.sum() > 30 and (right > wrong)[different].mean() > 0.95


def test_the_judge_compares_what_is_named_and_was_never_asked_about_consistency():
    judge = PaCoReward.from_pretrained(toy_judge_path(), batch_size=64)
    random = np.random.default_rng(0)
    pairs, same_color, same_figure = [], [], []
    for number in range(128):
        first, second = (ALL_PANELS[index] for index in random.integers(len(ALL_PANELS), size=2))
        if number % 2:
            second = second._replace(shape=first.shape, color=first.color)
        if number % 4 == 3:
            second = second._replace(accessory=first.accessory)
        pairs.append((draw_panel(first, 64), draw_panel(second, 64)))
        same_color.append(first.color == second.color)
        same_figure.append(first.identity == second.identity)
    asked = judge.score(pairs, ["Do the two images have the same colour?"] * 128)
    assert np.mean((np.array(asked) > 0.5) == same_color) > 0.95
    theme = theme_question(make_prompts(1, seed=0)[0]["theme"])
    asked = judge.score(pairs, [theme] * 128)
    assert np.mean((np.array(asked) > 0.5) == same_figure) < 0.75


@pytest.mark.parametrize("size", [64, 32])
def test_kontext_edits_sharply_and_carelessly(monkeypatch, size):
    # Loading the toy changes them
    sizes = list(pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS)
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
    pipeline, random = load_toy_kontext(), np.random.default_rng(0)
    edits = [sample_edit(random) for _ in range(48)]
    images = pipeline(
        image=[draw_panel(edit.source, size) for edit in edits],
        prompt=[edit.instruction for edit in edits],
        **{"height": size, "width": size, "max_area": size * size, "_auto_resize": False, "guidance_scale": 1.0},
        num_inference_steps=8,
        max_sequence_length=pipeline.tokenizer_2.model_max_length,
        generator=torch.Generator().manual_seed(0),
    ).images
    panels = read_panels(images, EDIT_PANELS)
    success, done, unchanged, unreadable = np.mean(list(map(judge_edit, panels, edits)), axis=0)
    assert unreadable < 0.05 and 0.25 < success < 0.75
    # Of another instruction fewer are done, of another source less is kept
    others = [Edit(edit.source, *other[1:]) for edit, other in zip(edits, [*edits[1:], edits[0]], strict=True)]
    assert np.mean([judge_edit(*pair).done for pair in zip(panels, others, strict=True)]) < done - 0.2
    sources = [edit._replace(source=other.source) for edit, other in zip(edits, [*edits[1:], edits[0]], strict=True)]
    assert np.mean([judge_edit(*pair).unchanged for pair in zip(panels, sources, strict=True)]) < unchanged - 0.4


def test_rewards_of_the_judge_of_edits_tell_those_that_succeed():
    judge = PaCoReward.from_pretrained(toy_edit_judge_path(), batch_size=64, dtype="float32")
    random = np.random.default_rng(0)
    edits = [sample_edit(random) for _ in range(96)]
    results = [sample_careless_edit(edit, random, 0.5) for edit in edits]
    columns = {
        "prompts": [edit.instruction for edit in edits],
        "completions": [draw_panel(panel, 32) for panel in results],
        "image": [draw_panel(edit.source, 64) for edit in edits],
    }
    truths = [judge_edit(*pair) for pair in zip(results, edits, strict=True)]
    rewards = np.array(EditReward(judge)(**columns))
    assert auroc(rewards, [truth.success for truth in truths]) > 0.85
    rewards = np.array(RubricReward(judge, "instruction")(**columns))
    assert auroc(rewards, [truth.done for truth in truths]) > 0.8
