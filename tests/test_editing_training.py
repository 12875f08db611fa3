# SPDX-License-Identifier: Apache-2.0
"""PaCoGRPOTrainer on editing prompts: sizes, what is encoded and how often, rewards, sheets, resuming, and errors."""

import copy
import dataclasses
import functools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer, PaCoReward
from paco_trl.data.questions import reference_question
from paco_trl.rewards import EditReward, ReferenceReward, redness_reward
from test_judged_rewards import FormulaJudge
from testing_utils import LORA, SMALL_RUN, are_equal, fetch, logs_with, noise, weights_of


COLOURS = ["#fa1e96", "#1efa96", "#961efa", "#fa961e", "#1e96fa", "#96fa1e", "#2d2dff"]

# Two prompts a round; sources of at least 64 pixels a side stay as they are
SETTINGS = SMALL_RUN | {
    "height": 32, "width": 32, "resolution_scale": 1.0, "guidance_scale": 4.0, "num_generations": 2,
    "num_prompts_per_generation": 2, "per_device_train_batch_size": 2, "num_inference_steps": 3,
    "num_inference_steps_eval": 2, "gradient_checkpointing": False,
}  # fmt: skip


def picture(width: int, height: int, number: int) -> Image.Image:
    """A box on a ground of one colour each, which are in no other picture."""
    image = Image.new("RGB", (width, height), COLOURS[number])
    ImageDraw.Draw(image).rectangle((width // 3, height // 3, width // 2, height // 2), fill=COLOURS[number - 1])
    return image


def edits(*rows: tuple[str, Image.Image], **columns) -> Dataset:
    """Editing prompts of pairs of an instruction and its source."""
    prompts, images = zip(*rows, strict=True)
    return Dataset.from_dict({"prompt": prompts, "image": images, **columns}).cast_column("image", ImageFeature())


def fixture_of(build: str):
    return pytest.fixture(scope="module")(lambda folder_of: folder_of(build))


klein = fixture_of("flux2_klein")  # with true CFG, also from text alone
qwen_edit = fixture_of("qwen_image_edit")  # its text encoder sees the source, and it needs one
kontext = fixture_of("flux_kontext")  # guidance is distilled into it


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """Four edits of three sizes; the first and the last have the same picture, the first two the same instruction."""
    return edits(
        ("Paint the house red.", picture(64, 64, 0)),
        ("Paint the house red.", picture(96, 64, 1)),
        ("Add a tree.", picture(64, 80, 2)),
        ("Remove the car.", picture(64, 64, 0)),
    )


@functools.cache
def loaded(folder: str) -> DiffusionPipeline:
    return DiffusionPipeline.from_pretrained(folder)


def make(model: str, dataset: Dataset, folder: Path, reward_funcs=redness_reward, **kwargs) -> PaCoGRPOTrainer:
    """A trainer; further arguments are settings, or `eval_dataset` and `eval_reward_funcs` of the trainer."""
    if Path(model).exists():
        model = copy.deepcopy(loaded(model))  # takes less time than to load it
    others = {name: kwargs.pop(name) for name in ("eval_dataset", "eval_reward_funcs") if name in kwargs}
    return PaCoGRPOTrainer(
        model=model,
        reward_funcs=reward_funcs,
        args=PaCoGRPOConfig(str(folder), **{**SETTINGS, **kwargs}),
        train_dataset=dataset,
        peft_config=dataclasses.replace(LORA, target_modules=["to_q", "to_k", "to_v"]),
        **others,
    )


def watch(trainer) -> list[str]:
    """What its models do from now on: "text", "image" and "step", for the encoders and the transformer, in order."""
    events = []
    for module, event in (
        (trainer.pipeline.text_encoder, "text"),
        (trainer.pipeline.vae.encoder, "image"),
        (trainer.model, "step"),
    ):
        module.register_forward_hook(lambda *_, event=event: events.append(event))
    return events


class SpyReward:
    """Redness, which keeps what it was called with."""

    __name__ = "spy"

    def __init__(self):
        self.calls: list[dict] = []

    def __call__(self, prompts, completions, **columns):
        for number, (prompt, image) in enumerate(zip(prompts, completions, strict=True)):
            values = {name: value[number] for name, value in columns.items() if isinstance(value, list)}
            self.calls.append({"prompt": prompt, "completion": image, **values})
        return redness_reward(prompts, completions)


class TestSizes:
    @pytest.mark.slow
    def test_sizes_sources_panels_and_columns(self, klein, tmp_path):
        """Sizes of its own, of the source, and a set of panels from a reference image."""
        shapes = [(64, 64), (96, 64), (64, 96), (128, 64), (128, 64), (64, 64)]
        dataset = edits(
            *((f"Edit {number}.", picture(*shape, number)) for number, shape in enumerate(shapes)),
            height=[None, None, None, 40, None, 64], width=[None, None, None, 48, None, 32],
            rows=[1, 1, 1, 1, 1, 2], cols=[1, 1, 1, 1, 3, 1],
            panels=[["whole"]] * 4 + [["left", "front", "right"], ["left", "right"]], kind=list("abcdef"),
        )  # fmt: skip
        spy = SpyReward()
        settings = {"height": 64, "width": 64, "resolution_scale": 0.5, "max_steps": 6}
        trainer = make(klein, dataset, tmp_path, spy, **settings)
        # About 64 x 64 pixels with the aspect ratio of the source, in multiples of 4 and of what the panels need
        inference = [(64, 64), (52, 80), (80, 52), (40, 48), (44, 96), (64, 32)]
        training = [(32, 32), (24, 40), (40, 24), (20, 24), (24, 48), (32, 16)]
        assert trainer.train_rows.inference_sizes == inference and trainer.train_rows.training_sizes == training
        trainer.train()
        assert Counter(call["prompt"] for call in spy.calls) == dict.fromkeys(dataset["prompt"], 2)
        for call in spy.calls:
            row = list(dataset["prompt"]).index(call["prompt"])
            height, width = training[row]
            assert call["completion"].size == (width, height)
            # The source as the user gave it, not as the pipeline reads it
            assert call["image"].mode == "RGB"
            assert np.array_equal(np.asarray(call["image"]), np.asarray(dataset[row]["image"]))
            assert call["kind"] == "abcdef"[row] and call["panels"] == dataset[row]["panels"]
            assert len(call["panel_images"]) == len(call["panels"]) == call["rows"] * call["cols"]
            panel = (width // call["cols"], height // call["rows"])
            assert {image.size for image in call["panel_images"]} == {panel}

    def test_several_sources(self, folder_of, tmp_path):
        rows = [
            {"prompt": "Put them together.", "images": [picture(64, 64, 0), picture(96, 64, 1)]},
            {"prompt": "Paint it red.", "images": [picture(64, 96, 2)]},
        ]
        spy = SpyReward()
        trainer = make(folder_of("flux2"), Dataset.from_list(rows), tmp_path / "out", spy)
        trainer.train()
        # The size follows from the first source
        assert trainer.train_rows.training_sizes == [(32, 32), (40, 28)]
        assert len(spy.calls) == 4
        for call in spy.calls:
            expected = next(row["images"] for row in rows if row["prompt"] == call["prompt"])
            assert [image.tobytes() for image in call["images"]] == [image.tobytes() for image in expected]
            assert "image" not in call
        assert logs_with(trainer, "ratio_deviation_on_policy/step_1") == [0.0]


class TestReferences:
    """A family that takes several images gets references as sources, where there are no others."""

    ROWS = [
        {"prompt": "FOUR-PANEL with a 1x2 grid layout. [LEFT]: It sits. [RIGHT]: It runs.", "reference_roles": None},
        {"prompt": "It sleeps.", "reference_roles": ["identity", "style"]},
    ]

    def rows(self, **columns) -> Dataset:
        references = [[picture(96, 64, 0)], [picture(64, 80, 1), picture(64, 64, 2)]]
        rows = [row | {"references": images} for row, images in zip(self.ROWS, references, strict=True)]
        return Dataset.from_list(
            [row | {name: column[n] for name, column in columns.items()} for n, row in enumerate(rows)]
        )

    @pytest.mark.parametrize(("model", "images"), [("klein", 3), ("kontext", 0)])
    def test_training_on_sets_and_single_images(self, request, tmp_path, model, images):
        judge = FormulaJudge()
        folder = request.getfixturevalue(model)
        trainer = make(folder, self.rows(), tmp_path, ReferenceReward(judge), num_generations=4)
        events, before = watch(trainer), weights_of(trainer)
        trainer.train()
        assert events.count("image") == images  # each reference once
        # The size is that of the settings, not of a reference
        assert trainer.train_rows.training_sizes == [(32, 32)] * 2
        card = trainer._model_card()
        assert card.trained_on == "sets" and card.call["height"] == 32 and "image" not in card.call
        asked = {(first.size, second.size) for (first, second), _ in judge.asked}
        assert asked == {((96, 64), (16, 32)), ((64, 80), (32, 32)), ((64, 64), (32, 32))}
        assert {question for _, question in judge.asked} == {*map(reference_question, ("identity", "style"))}
        assert logs_with(trainer, "rewards/reference/std")[0] > 0 and not are_equal(before, weights_of(trainer))

    def test_all_images_of_a_separate_set_have_those_of_its_row(self, klein, tmp_path):
        panels = [["It sits.", "It runs."], ["It eats.", "It sleeps.", "It digs."]]
        rows = self.rows(layout=["separate"] * 2, theme=["A cat.", "A dog."], panels=panels)
        judge = FormulaJudge()
        settings = {"num_prompts_per_generation": 5, "optimizer_steps_per_generation": 1}
        trainer = make(klein, rows, tmp_path, ReferenceReward(judge), **settings)
        events, sources_of, generate = watch(trainer), {}, trainer.policy.recording_pipeline.generate

        def watched(arguments, height, width, steps, scale, noise_keys, sources, **kwargs):
            sources_of[noise_keys[0][3]] = [source.image.size for source in sources]
            return generate(arguments, height, width, steps, scale, noise_keys, sources=sources, **kwargs)

        trainer.policy.recording_pipeline.generate = watched
        trainer.train()
        assert events.count("image") == 3  # each reference once, not for each image
        assert sources_of == {**dict.fromkeys((0, 1), [(96, 64)]), **dict.fromkeys((2, 3, 4), [(64, 80), (64, 64)])}
        asked = {(first.size, second.size) for (first, second), _ in judge.asked}
        assert asked == {(size, (32, 32)) for size in ((96, 64), (64, 80), (64, 64))}

    def test_edits_keep_their_sources(self, klein, tmp_path):
        judge = FormulaJudge()
        sources = [picture(64, 96, 3), picture(64, 64, 4)]
        trainer = make(klein, self.rows(image=sources), tmp_path, ReferenceReward(judge))
        events = watch(trainer)
        trainer.train()
        assert events.count("image") == 2 and trainer.train_rows.training_sizes[0] == (40, 28)
        assert trainer._model_card().trained_on == "edits"
        assert {first.getpixel((0, 0)) for (first, _), _ in judge.asked} == {
            picture(8, 8, number).getpixel((0, 0)) for number in range(3)
        }


class TestEncoding:
    def test_each_prompt_and_source_once_and_before_anything_is_drawn(self, klein, dataset, tmp_path):
        evaluation = edits(("Remove the car.", picture(64, 64, 0)), ("Add a dog.", picture(96, 64, 3)))
        settings = {"height": 64, "width": 64, "resolution_scale": 0.5, "max_steps": 4}
        trainer = make(klein, dataset, tmp_path, eval_dataset=evaluation, **settings)
        events = watch(trainer)
        for run, images, texts, steps in (
            # Three instructions, the negative prompt; 2 rounds x 2 micro-batches x (3 steps drawn + 1 trained) x 2 calls
            (trainer.train, 3, 3 + 1, 2 * 2 * 4 * 2),
            (trainer.evaluate, 2, 1, None),  # sources at full size
            (trainer.evaluate, 0, 0, 2 * 2 * 2),
        ):
            events.clear()
            run()
            counts = Counter(events)
            assert (counts["image"], counts["text"]) == (images, texts) and counts["step"] == (steps or counts["step"])
            assert set(events[events.index("step") :]) == {"step"}

    def test_each_prompt_once_with_each_source_that_the_text_encoder_sees(self, qwen_edit, tmp_path):
        pictures = picture(96, 64, 0), picture(64, 96, 1)
        red, tree = "Paint the house red.", "Add a tree."
        seen = edits((red, pictures[0]), (red, pictures[1]), (tree, pictures[0]), (tree, pictures[0]))
        settings = {"height": 1024, "width": 1024, "resolution_scale": 1 / 16, "negative_prompt": " ", "max_steps": 4}
        trainer = make(qwen_edit, seen, tmp_path, **settings)
        events = watch(trainer)
        trainer.train()
        assert Counter(events)["image"] == 2
        assert Counter(events)["text"] == 3 + 2  # the negative prompt with each source
        assert Counter(events)["step"] == 2 * 2 * 4 * 2
        assert set(events[events.index("step") :]) == {"step"}
        assert trainer.train_rows.training_sizes == [(48, 80), (80, 48), (48, 80), (48, 80)]
        # The text encoder has seen the row's own source
        encoded = fetch(trainer.policy.encoder, trainer.train_rows, [0, 1], 1 / 16).embeddings
        for number in (0, 1):
            for source in (0, 1):
                with torch.no_grad():
                    inputs = (seen["prompt"][number], "cpu", [pictures[source]], 1 / 16)
                    expected = trainer.family.encode_prompt(trainer.pipeline, *inputs)["prompt_embeds"]
                found = encoded[number].prompt["prompt_embeds"]
                assert (found.shape == expected.shape and torch.equal(found, expected)) == (source == number)

    # Kontext reads them at about a megapixel
    @pytest.mark.parametrize(("build", "tile"), [("klein", 32), ("kontext", 256)])
    def test_sources_are_encoded_without_tiles(self, request, tmp_path, build, tile):
        """As the pipeline encodes them, also if images are decoded in tiles (`vae_tiling`)."""
        edit, latents = edits(*[("Paint it red.", picture(64, 96, 0))] * 2), []
        for tiling in (False, True):
            folder = request.getfixturevalue(build)
            trainer = make(folder, edit, tmp_path / str(tiling), vae_tiling=tiling, guidance_scale=1.0)
            vae, rows, encoder = trainer.pipeline.vae, trainer.train_rows, trainer.policy.encoder
            vae.tile_sample_min_size, vae.tile_latent_min_size = tile, tile // trainer.pipeline.vae_scale_factor
            encoder.prefetch(rows, [0])
            latents += fetch(encoder, rows, [0]).embeddings[0].image_latents
            pixels = trainer.family.image_pixels(trainer.pipeline, fetch(encoder, rows, [0]).source_images(0)[0])
            with torch.no_grad():  # the twin: with tiles they would differ
                plain = vae.encode(pixels.to(vae.dtype)).latent_dist.mode()
            assert torch.equal(plain, latents[0]) is not tiling and vae.use_tiling is tiling
        assert torch.equal(*latents)


class TestTraining:
    @pytest.mark.slow
    def test_the_gradient_of_the_unconditional_prediction(self, klein, dataset, tmp_path):
        trainers = [make(klein, dataset, tmp_path, max_steps=4, detach_unconditional=each) for each in (True, False)]
        for trainer in trainers:
            trainer.train()
        first, other = (logs_with(trainer, "reward")[0] for trainer in trainers)
        assert first == other and not are_equal(*map(weights_of, trainers))

    def test_the_edit_reward(self, klein, dataset, tiny_qwen, tmp_path):
        trainer = make(klein, dataset, tmp_path, EditReward(PaCoReward.from_pretrained(tiny_qwen)), max_steps=1)
        trainer.train()
        assert logs_with(trainer, "rewards/edit/failure_rate") == [0.0]
        assert 0 < logs_with(trainer, "rewards/edit/mean")[0] < 1
        assert logs_with(trainer, "rewards/edit/std")[0] > 0
        assert any(value.abs().max() > 0 for name, value in weights_of(trainer).items() if "lora_B" in name)


class TestDataErrors:
    """The model's path does not exist: what is wrong with the data is found before."""

    def of_files(self, *paths: str | None) -> Dataset:
        return edits(*((f"Paint number {number}.", path) for number, path in enumerate(paths)))

    def refuse(self, dataset: Dataset, folder: Path, *parts: str, **kwargs) -> None:
        with pytest.raises(ValueError) as error:
            make("/nowhere/model", dataset, folder, **kwargs)
        for part in parts:
            assert part in str(error.value)

    def test_files(self, tmp_path):
        good, missing, folder = str(tmp_path / "good.png"), str(tmp_path / "missing.png"), tmp_path / "out"
        noise(0, (64, 64)).save(good)
        self.refuse(self.of_files(good, None), folder, "Row 1 of the dataset: its source image is None")
        evaluation = {"eval_dataset": self.of_files(good, missing)}
        message = ("Row 1 of the dataset 'evaluation'", missing, "FileNotFoundError")
        self.refuse(self.of_files(good, good), folder, *message, **evaluation)

    def test_rewards_without_their_column(self, tiny_qwen, tmp_path):
        reward = EditReward(PaCoReward.from_pretrained(tiny_qwen))
        sets = Dataset.from_list([{"prompt": f"Set {n}.", "rows": 1, "cols": 1, "panels": ["a"]} for n in range(2)])
        self.refuse(sets, tmp_path, "The reward 'edit' requires the column `image`", reward_funcs=reward)


class TestModelErrors:
    """What needs the model is found when the trainer is made."""

    def test_a_pipeline_that_draws_from_text(self, tiny_flux, dataset, tmp_path):
        with pytest.raises(ValueError, match="Row 0 of the dataset has 1 source image.* FluxPipeline takes none"):
            make(str(tiny_flux), dataset, tmp_path)

    def test_a_pipeline_that_edits(self, qwen_edit, prompts, tmp_path):
        with pytest.raises(
            ValueError, match="QwenImageEditPipeline edits images, but the dataset has no source images"
        ):
            make(qwen_edit, prompts, tmp_path, height=64, width=64, negative_prompt=" ")

    @pytest.mark.parametrize(("width", "height"), [(63, 100), (64, 513)])
    def test_a_source_that_the_pipeline_refuses(self, klein, tmp_path, width, height):
        good = ("Paint it red.", picture(64, 512, 0))
        make(klein, edits(good, good), tmp_path)
        with pytest.raises(
            ValueError, match=f"Row 1 of the dataset: a source image has {width} x {height} pixels, but .* Replace it"
        ):
            make(klein, edits(good, ("Paint it red.", picture(width, height, 1))), tmp_path)

    def test_more_sources_than_the_pipeline_takes(self, klein, tmp_path):
        def with_sources(*counts: int) -> Dataset:
            images = [[picture(64, 64, k) for k in range(count)] for count in counts]
            return Dataset.from_list([{"prompt": f"Edit {n}.", "images": each} for n, each in enumerate(images)])

        with pytest.raises(ValueError, match="Row 1 of the dataset has 5 source image.* takes at most 4"):
            make(klein, with_sources(1, 5), tmp_path)
        with pytest.raises(ValueError, match="Row 2 of the dataset 'evaluation' has 5 source image"):
            make(klein, with_sources(1, 4), tmp_path, eval_dataset=with_sources(1, 2, 5))

    def test_micro_batches_that_cross_prompts(self, klein, tmp_path):
        same_size = edits(*((f"Edit {number}.", picture(64, 64, number)) for number in range(4)))
        make(klein, same_size, tmp_path, per_device_train_batch_size=1)
        with pytest.raises(ValueError, match="its own source images.*`per_device_train_batch_size`"):
            make(klein, same_size, tmp_path, num_prompts_per_generation=4, per_device_train_batch_size=4)
