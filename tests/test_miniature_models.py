# SPDX-License-Identifier: Apache-2.0
"""The toy models that come with the repository: small, safe to load, and what they are said to be."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from miniature.data import make_prompts
from miniature.models import WEIGHTS, toy_clip_path, toy_flux_path, toy_judge_path
from miniature.truth import judge_set, read_panels
from miniature.world import ALL_PANELS, Panel, PromptSpec, describe_spec, draw_all_panels, draw_panel
from paco_trl import PaCoReward
from paco_trl.data import split_grid, theme_question
from paco_trl.dataset_building import load_pipeline
from paco_trl.evaluation import ClipIScorer
from paco_trl.rewards import ClipTReward


@pytest.fixture(scope="module")
def pipeline():
    pipeline = load_pipeline(str(toy_flux_path()), torch.float32, device="cpu")
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(pipeline, prompts, size: int = 128) -> list:
    images = pipeline(
        prompts["prompt"][:],
        height=size,
        width=size,
        num_inference_steps=8,
        max_sequence_length=pipeline.tokenizer_2.model_max_length,
        generator=torch.Generator().manual_seed(0),
    ).images
    return [
        judge_set(read_panels(split_grid(image, 2, 2)), [PromptSpec(*spec) for spec in row["specs"]])
        for image, row in zip(images, prompts, strict=True)
    ]


class TestFiles:
    def test_they_are_small_and_hold_no_pickle(self):
        files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) <= 8 * 2**20
        assert {path.suffix for path in files} == {".json", ".safetensors", ".jinja"}


class TestFlux:
    @pytest.mark.parametrize(("size", "named"), [(128, True), (64, False)])
    def test_it_draws_the_world_and_is_not_always_consistent(self, pipeline, size, named):
        means = np.mean(draw(pipeline, make_prompts(24, seed=3, named=named), size), axis=0)
        assert means[3] < 0.1  # panels that show nothing of the world
        assert means[1] > 0.75
        # Two figures that have nothing to do with one another are the same in 1 of 18 cases
        assert 0.1 < means[0] < 0.8

    @pytest.mark.slow
    def test_it_reads_its_prompt(self, pipeline):
        prompts = make_prompts(24, seed=3)
        specs = [prompts[(row + 1) % 24]["specs"] for row in range(24)]
        swapped = prompts.remove_columns("specs").add_column("specs", specs)
        assert np.mean(draw(pipeline, swapped), axis=0)[1] < np.mean(draw(pipeline, prompts), axis=0)[1] - 0.2

    def test_the_vae_restores_what_it_sees(self, pipeline):
        chosen = np.random.default_rng(0).integers(len(ALL_PANELS), size=32)
        pictures = torch.from_numpy(draw_all_panels(64)[chosen]).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            restored = pipeline.vae.decode(pipeline.vae.encode(pictures).latent_dist.mode()).sample
        images = pipeline.image_processor.postprocess(restored)
        assert read_panels(images) == [ALL_PANELS[index] for index in chosen]


class TestClip:
    def test_it_finds_the_scene(self):
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


class TestJudge:
    def test_it_compares_what_is_named_and_was_never_asked_about_consistency(self):
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

    def test_it_describes_what_it_sees(self):
        model = AutoModelForImageTextToText.from_pretrained(toy_judge_path())
        processor = AutoProcessor.from_pretrained(toy_judge_path())
        panel = Panel("square", "blue", "hat", "snow", "right")
        content = [{"type": "image", "image": draw_panel(panel, 64)}, {"type": "text", "text": "Describe the image."}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        text = processor.decode(tokens, skip_special_tokens=True)
        assert text == "A blue square figure with a hat. Snow, on the right."

    def test_clip_i_is_a_scorer_of_pairs(self):
        panel = Panel("square", "blue", "hat", "snow", "right")
        others = [panel, panel._replace(color="red")]
        scorer = ClipIScorer(toy_clip_path())
        scores = scorer.score([(draw_panel(panel, 64), draw_panel(other, 64)) for other in others], [""] * 2)
        assert scores[0] == pytest.approx(1, abs=1e-5) and scores[1] < 0.99
