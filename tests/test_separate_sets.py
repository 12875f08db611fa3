# SPDX-License-Identifier: Apache-2.0
"""Image sets whose panels are images of their own (`layout: "separate"`, `set_layout`)."""

import json
import re
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from diffusers import DiffusionPipeline
from PIL import Image

from paco_trl import PaCoGRPOTrainer, PaCoNFTTrainer
from paco_trl.data import load_image_set_prompts, parse_image_set_prompt, split_grid
from paco_trl.data.edit_prompts import check_edit_columns
from paco_trl.data.image_sets import arrange_sets, complete_image_sets
from paco_trl.hub.card_data import ImageModelCardData
from paco_trl.hub.cards import render_card
from paco_trl.rewards import LayoutReward, redness_reward
from paco_trl.rollout import keyed_generator
from paco_trl.rollout.prompt_rows import PromptRows
from paco_trl.rollout.rounds import Batch, Round
from paco_trl.rollout.sde import STREAMS
from paco_trl.trainer.round_schedule import RoundSchedule
from paco_trl.utils.differences import differences
from test_short_tail import RunsOfOptions
from testing_utils import are_equal, entries_of, jsonl, logs_with, sheets_of, weights_of


def row_of(number: int, length: int, **columns) -> dict:
    panels = [f"{'abcdef'[panel]} {number}." for panel in range(length)]
    return {"layout": "separate", "theme": f"Theme {number}.", "panels": panels, **columns}


def sets(*lengths: int) -> Dataset:
    return Dataset.from_list([row_of(number, length) for number, length in enumerate(lengths)])


def panel_redness(prompts, panel_images, **kwargs):
    """Mean redness of the panels, weighted so that their order counts."""
    values = [redness_reward(None, panels) for panels in panel_images]
    return [sum(value * (place + 1) for place, value in enumerate(row)) / len(row) for row in values]


# Sets of two and of three images in each round of five prompts
SETTINGS = {
    "reward_funcs": panel_redness, "train_dataset": sets(2, 3, 2, 3, 2, 3), "num_prompts_per_generation": 5,
    "optimizer_steps_per_generation": 1, "sde_steps": [0],
}  # fmt: skip


def settings_of(trainer_class=PaCoGRPOTrainer, **changes) -> dict:
    """Settings with changes, without stochastic steps where there are none."""
    settings = {**SETTINGS, **changes, "trainer_class": trainer_class}
    return settings if trainer_class is PaCoGRPOTrainer else {k: v for k, v in settings.items() if k != "sde_steps"}


def check_training(trainer) -> None:
    """The ratio is 1 before the first update, if there is one, and weights move."""
    before = weights_of(trainer)
    trainer.train()
    deviations = logs_with(trainer, "ratio_deviation_on_policy/step_0")
    assert len(deviations) == (0 if isinstance(trainer, PaCoNFTTrainer) else 2) and max(deviations, default=0) < 1e-6
    assert not are_equal(before, weights_of(trainer))


def round_of(trainer):
    trainer.state.max_steps = 2
    trainer.round = trainer._generate_and_score_completions(0)
    return trainer.round


def images_of(buffer) -> list[tuple]:
    """(advantage, weight, sample, noise of the step) of each image of a round."""
    images = []
    for entry in entries_of(buffer):
        record = entry["step"]
        noise = record.prev_sample - record.mean
        columns = (entry["advantages"].tolist(), entry["weights"].tolist(), record.sample, noise)
        images += zip(*columns, strict=True)
    return images


def by_set(buffer) -> dict[float, list[tuple]]:
    """The images of each set, which no other shares its advantage with."""
    found = defaultdict(list)
    for image in images_of(buffer):
        found[image[0]].append(image)
    return found


class TestData:
    def test_a_file_of_both_kinds(self, tmp_path, prompts):
        grid = prompts[0] | {"theme": "A theme."}
        of_grid = {name: grid[name] for name in ("prompt", "rows", "cols", "panels")}
        lines = [row_of(0, 3), of_grid, {"prompt": "A cat."}]
        (tmp_path / "sets.jsonl").write_text("\n".join(map(json.dumps, lines)))
        dataset = load_image_set_prompts(tmp_path / "sets.jsonl")
        assert (dataset["rows"][:], dataset["cols"][:]) == ([1, 2, 1], [3, 2, 1])
        assert complete_image_sets(dataset).to_list() == dataset.to_list()
        rows = PromptRows(dataset, settings(panel_template="{panel} In {theme}"), "it")
        assert rows.images_per_row == [3, 1, 1] and rows.image_layouts == [(1, 1), (2, 2), (1, 1)]
        assert [call.prompt for call in rows.image_prompts] == [
            "a 0. In Theme 0.", "b 0. In Theme 0.", "c 0. In Theme 0.", grid["prompt"], "A cat.",
        ]  # fmt: skip

    def test_one_option_makes_separate_sets_of_grids_and_back(self, prompts):
        sized = prompts.map(lambda row: {"height": 64, "width": 32})
        separate = arrange_sets(sized, "separate")
        first, grid = separate[0], prompts[0]
        shared = parse_image_set_prompt(grid["prompt"]).theme
        assert "2x2" in shared and "grid" not in first["theme"] and shared.endswith(first["theme"])
        assert (first["layout"], first["rows"], first["cols"]) == ("separate", 1, 4)
        assert first["prompt"] == " ".join([first["theme"], *first["panels"]])  # which rewards read
        assert first["height"] is first["width"] is None  # those of the grid
        assert complete_image_sets(separate).to_list() == separate.to_list()
        back = arrange_sets(separate, "grid")
        assert (back["rows"][:], back["cols"][:]) == ([2] * 12, [2] * 12) and set(back["layout"]) == {None}
        for row, expected in zip(back, prompts, strict=True):
            assert row["panels"] == expected["panels"] == parse_image_set_prompt(row["prompt"]).panels
        assert arrange_sets(sized, "grid").to_list() == sized.to_list()
        assert arrange_sets(sized, None) is sized

    @pytest.mark.parametrize(
        ("row", "word"),
        [
            (row_of(0, 2) | {"theme": None}, "theme"),
            (row_of(0, 2) | {"panels": ["One.", ""]}, "panels"),
            (row_of(0, 2) | {"layout": "seperate"}, "`layout` of row 0 is 'seperate'; it must be 'separate'"),
            ({"layout": "separate", "theme": "A fox."}, "`panels` of row 0 is None"),
            (row_of(0, 2) | {"panels": "One."}, "`panels` of row 0 is 'One.'. It must be a list"),
            (row_of(0, 4) | {"rows": 2, "cols": 2}, "rows=2"),
        ],
    )
    def test_refused_rows(self, tmp_path, row, word):
        (tmp_path / "sets.jsonl").write_text(json.dumps(row))
        with pytest.raises(ValueError, match=word):
            load_image_set_prompts(tmp_path / "sets.jsonl")

    def test_an_edit_is_no_set(self):
        edit = {"prompt": "Paint it red.", "image": Image.new("RGB", (64, 64)), "layout": "separate"}
        with pytest.raises(ValueError, match="layout"):
            check_edit_columns(Dataset.from_list([edit]))

    def test_a_set_without_a_shared_text_stays_a_grid(self):
        row = {"prompt": "Photos of a red cat.", "rows": 1, "cols": 2, "panels": ["It sleeps.", "It eats."]}
        grids = Dataset.from_list([row])
        assert arrange_sets(grids, "grid").to_list() == grids.to_list()
        with pytest.raises(ValueError, match="theme"):
            arrange_sets(grids, "separate")


def settings(**changes) -> SimpleNamespace:
    given = {"height": 64, "width": 64, "resolution_scale": 0.5, "panel_template": "{theme} {panel}"}
    return SimpleNamespace(**{**given, "set_layout": None, "panel_generation": "independent", **changes})


class TestRounds:
    @pytest.mark.parametrize("seed", range(3))
    def test_rounds_of_other_lengths_are_about_equal(self, seed):
        lengths = np.random.default_rng(seed).integers(2, 9, 50).tolist()
        plan = SimpleNamespace(num_prompts=24, num_optimizer_steps=1, steps_per_generation=1, describe=lambda: "")
        args = SimpleNamespace(round_plan=plan, num_iterations=1, seed=seed, shuffle_dataset=True)
        schedule, epochs = RoundSchedule(args, lengths), []
        for epoch in range(2):
            first = epoch * schedule.rounds_per_epoch
            rounds = [schedule.row_indices(first + index) for index in range(schedule.rounds_per_epoch)]
            counts = [sum(lengths[row] for row in rows) for rows in rounds]
            assert len({row for rows in rounds for row in rows}) == sum(map(len, rounds))
            assert max(counts) <= 24 and max(counts) - min(counts) <= 6
            epochs.append(rounds)
        assert epochs[0] != epochs[1]
        # Rows of one length are slices of the permutation, as they were before there were sets
        ones, twos = (RoundSchedule(args, [length] * 50) for length in (1, 2))
        assert (ones.rows_per_round, twos.rows_per_round) == (24, 12)
        taken = [row for index in range(2) for row in ones.row_indices(index)]
        assert taken == [row for index in range(4) for row in twos.row_indices(index)]

    def test_images_and_completions(self):
        rows = PromptRows(sets(2, 3, 2), settings(), "it")
        round = Round(rows, [1, 0], 2, (0, 3, 0), [(32, 32)] * 3, 6)
        assert [sample.prompt_index for sample in round.samples[::2]] == [2, 3, 4, 0, 1, 2]
        owners = [None if sample.is_padding else sample.completion.index for sample in round.samples]
        assert owners == [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, None, None]
        finished = {}
        for number in [11, 3, 0, 8, 6, 5, 2, 1, 4, 7, 9, 10]:
            image = Image.new("RGB", (4, 4), (number, 0, 0))
            finished |= {done.index: done.image for done in round.add_images(Batch([round.samples[number]]), [image])}
        assert list(finished) == [2, 1, 0, 3]
        assert (finished[1].size, finished[2].size) == ((12, 4), (8, 4))
        assert [panel.getpixel((0, 0))[0] for panel in split_grid(finished[1], 1, 3)] == [1, 3, 5]

    def test_a_set_that_lacks_an_image_is_an_error(self):
        """It would be a set without rewards, and nobody would know why."""
        accelerator = Accelerator(cpu=True)
        rows = PromptRows(sets(2, 2), settings(), "it")
        for missing in (False, True):
            round = Round(rows, [0, 1], 1, (0, 3, 0), [(32, 32)] * 2)
            samples = round.samples[: 3 if missing else 4]
            finished = round.add_images(Batch(samples), [Image.new("RGB", (4, 4))] * len(samples))
            assert len(finished) == 2 - missing
            with pytest.raises(RuntimeError, match="Set 1 .* 1 of its 2") if missing else nullcontext():
                assert round.exchange(accelerator) == []


def test_sets_of_other_lengths_weigh_the_same(make_trainer):
    seen = []

    def reward(prompts, completions, panel_images, rows, cols, panels, **kwargs):
        seen.extend(zip(rows, cols, panel_images, panels, strict=True))
        return panel_redness(prompts, panel_images)

    buffer = round_of(make_trainer(**SETTINGS | {"reward_funcs": reward}))
    assert len(seen) == 8 and sorted(cols for _, cols, *_ in seen) == [2] * 4 + [3] * 4
    for rows, cols, images, panels in seen:
        assert rows == 1 and len(images) == len(panels) == cols and {image.size for image in images} == {(32, 32)}
        assert len({image.tobytes() for image in images}) == cols
    groups = by_set(buffer)
    assert sorted(map(len, groups.values())) == [2] * 4 + [3] * 4
    for images in groups.values():
        assert sum(weight for _, weight, *_ in images) == pytest.approx(1 / 8)
    # Twin: images of equal weight would let a set of three count more
    assert len({weight for _, weight, *_ in images_of(buffer)}) == 2


def test_none_for_a_panel_leaves_out_the_set(make_trainer):
    def reward(prompts, panel_images, cols, **kwargs):
        values: list = panel_redness(prompts, panel_images)
        values[cols.index(3)] = None
        return values

    buffer = round_of(make_trainer(**SETTINGS | {"reward_funcs": reward, "max_reward_failures": 1.0}))
    assert buffer.metrics["images_excluded"] == 1
    groups = by_set(buffer)
    assert [weight for _, weight, *_ in groups.pop(0.0)] == [0.0] * 3
    assert sorted(map(len, groups.values())) == [2] * 4 + [3] * 3
    for images in groups.values():
        assert sum(weight for _, weight, *_ in images) == pytest.approx(1 / 7)


@pytest.mark.parametrize("way", ["independent", "shared_noise"])
def test_initial_noise(make_trainer, way):
    groups = by_set(round_of(make_trainer(**SETTINGS, panel_generation=way)))
    assert len(groups) == 8
    for _, _, samples, noises in (zip(*images, strict=True) for images in groups.values()):
        is_same = [torch.equal(samples[0], sample) for sample in samples[1:]]
        assert all(is_same) if way == "shared_noise" else not any(is_same)
        assert not any(torch.allclose(noises[0], noise, atol=1e-3) for noise in noises[1:])
    # Other sets begin elsewhere
    assert len({images[0][2].sum().item() for images in groups.values()}) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"panel_generation": "shared_noise", "per_device_train_batch_size": 2, "tail_steps": 1},
        {"per_device_train_batch_size": 2, "per_device_rollout_batch_size": 4, "num_prompts_per_generation": 6},
        {"trainer_class": PaCoNFTTrainer},
        {"trainer_class": PaCoNFTTrainer, "loss_type": "awm"},
    ],
    ids=["shared noise and tail", "merged and padded", "nft", "awm"],
)
def test_training(make_trainer, tmp_path, changes):
    evaluation = {"eval_dataset": sets(3, 2), "eval_strategy": "steps", "eval_steps": 2, "num_inference_steps_eval": 2}
    trainer = make_trainer(**settings_of(**evaluation, log_completions=True, **changes))
    check_training(trainer)
    for name, count in (("round_00000", 8), ("eval_step_000002", 2)):
        assert len(jsonl(tmp_path / "out" / "contact_sheets" / f"{name}.jsonl")) == count
    pictures = next(iter(trainer.evaluator._baselines.values())).pictures
    assert [pictures[number].size for number in (0, 1)] == [(192 + 2 * 2, 64), (128 + 2, 64)]  # with gaps


def test_other_sets_take_the_place_of_dull_ones(make_trainer):
    first = make_trainer(**SETTINGS).schedule.row_indices(0)
    dull = [f"Theme {row}." for row in first]

    def reward(prompts, panel_images, theme, **kwargs):
        values = zip(theme, panel_redness(prompts, panel_images), strict=True)
        return [0.5 if text in dull else value for text, value in values]

    changes = {"reward_funcs": reward, "min_reward_std": 0.0, "max_resample_times": 1}
    trainer = make_trainer(**SETTINGS | changes)
    sheets, lengths = sheets_of(trainer), trainer.train_rows.images_per_row
    buffer = round_of(trainer)
    ((final, shown),) = sheets
    pictures = shown.pictures
    assert not set(first) & set(final) and [lengths[row] for row in first] == [lengths[row] for row in final]
    assert {number: picture.width for number, picture in pictures.items()} == {
        number: 32 * count + 2 * (count - 1)  # with gaps
        for number, count in enumerate(lengths[final[group]] for group in (0, 1) for _ in range(4))
    }
    twin = make_trainer(**SETTINGS | {"reward_funcs": reward})
    twin.schedule.row_indices = lambda round_index: final
    assert buffer.metrics["prompts_resampled"] == 2
    for entry, expected in zip(entries_of(buffer), entries_of(round_of(twin)), strict=True):
        assert torch.equal(entry["advantages"], expected["advantages"]) and expected["advantages"].any()
        assert torch.equal(entry["weights"], expected["weights"])
        assert torch.equal(entry["step"].prev_sample, expected["step"].prev_sample)


ANCHORED = {
    "panel_generation": "anchored", "per_device_train_batch_size": 1, "num_generations": 2, "resolution_scale": 1.0,
    "num_inference_steps_eval": 2,
}  # fmt: skip


class TestAnchored:
    @pytest.fixture
    def make(self, make_trainer, folder_of):
        def make(model="flux_kontext", **changes):
            return make_trainer(**settings_of(**ANCHORED | {"model": folder_of(model)} | changes))

        return make

    @pytest.mark.parametrize("model", ["flux_kontext", "flux2_klein"])
    def test_generates_the_images_of_a_users_calls(self, make, folder_of, model):
        # Beside its image, Kontext would generate from one of a megapixel at another size than its own
        own = {"max_area": 64 * 64, "max_sequence_length": 32} if model == "flux_kontext" else {}
        resizes = {"_auto_resize": False} if own else {}
        found = {}
        for way in ("anchored", "independent"):

            def reward(prompts, theme, panel_images, way=way, **kwargs):
                found[way] = dict(zip(theme, panel_images, strict=True))
                return [0.0] * len(prompts)

            trainer = make(model, panel_generation=way, reward_funcs=reward, eval_dataset=sets(2, 3))
            trainer.evaluate()
        plain = DiffusionPipeline.from_pretrained(folder_of(model))
        rows = trainer.evaluator.rows_of(trainer.eval_dataset)
        for row, theme in enumerate(("Theme 0.", "Theme 1.")):
            images = []
            for call in rows.prompt_indices[row]:
                source = {"image": images[0], **resizes} if images else {}
                noise = keyed_generator(trainer.args.seed, STREAMS["evaluation"], 0, call, 0, 0)
                images += plain(
                    prompt=rows.image_prompts[call].prompt, height=64, width=64, num_inference_steps=2, guidance_scale=3.5,
                    generator=noise, **own, **source,
                ).images  # fmt: skip
            same = [a.tobytes() == b.tobytes() for a, b in zip(images, found["anchored"][theme], strict=True)]
            assert all(same)
            # Twin: the first is that of its text
            same = [a.tobytes() == b.tobytes() for a, b in zip(images, found["independent"][theme], strict=True)]
            assert same == [True] + [False] * (len(images) - 1)

    def test_anchor_of_each_image(self):
        rows = PromptRows(sets(2, 3, 2), settings(panel_generation="anchored"), "it")
        round = Round(rows, [1, 0], 2, (0, 3, 0), [(32, 32)] * 3, 7)  # the last two calls are the first two again
        found = [sample.completion.index if sample.is_anchored else None for sample in round.samples]
        assert found == [None, None, 0, 1, 0, 1, None, None, 2, 3, None, None, 0, 1]

    def test_each_image_of_a_set_has_its_own_first_panel_as_source(self, make):
        tokens = defaultdict(list)
        for entry in entries_of(round_of(make())):
            record = entry["step"]
            source = record.calls[0]["hidden_states"][:, record.sample.shape[1] :]
            tokens[entry["advantages"].item()].append(source)
        assert sorted(map(len, tokens.values())) == [2] * 2 + [3] * 2
        sources = []
        for of_set in tokens.values():
            others = [each for each in of_set if each.shape[1]]  # all but one
            assert others[0].shape == record.sample.shape and len(others) == len(of_set) - 1
            assert all(torch.equal(others[0], other) for other in others)
            sources.append(others[0])
        assert len({source.sum().item() for source in sources}) == 4

    def test_images_of_a_batch_have_their_own_sources(self, make):
        found = {1: [], 2: []}
        for size, made in found.items():

            def reward(prompts, panel_images, made=made, **kwargs):
                made += [np.stack([np.asarray(panel).astype(int) for panel in panels]) for panels in panel_images]
                return [0.0] * len(prompts)

            round_of(make(per_device_train_batch_size=size, reward_funcs=reward))
        assert len(found[1]) == 4
        for one in found[1]:
            distances = [np.abs(one - other).max() for other in found[2] if other.shape == one.shape]
            assert sorted(distance <= 1 for distance in distances) == [False, True]  # the same, and another noise's

    @pytest.fixture
    def with_another(self, monkeypatch):
        """As on a process with a batch less than another, of each kind."""
        monkeypatch.setattr(
            "paco_trl.rollout.policy.gather_object",
            lambda values: [*values, values[0] + 1] if values and isinstance(values[0], int) else values,
        )

    def test_merged_batches_train_the_same_if_some_make_up_the_numbers(self, make, request):
        settings = {"per_device_train_batch_size": 1, "per_device_rollout_batch_size": 2}
        plain = round_of(make(**settings))
        request.getfixturevalue("with_another")
        for entry, other in zip(entries_of(round_of(make(**settings))), entries_of(plain), strict=True):
            assert torch.equal(entry["step"].sample, other["step"].sample)
            assert torch.equal(entry["advantages"], other["advantages"])

    def test_what_makes_up_the_numbers_finishes_nothing(self, make, with_another):
        trainer = make(train_dataset=sets(1, 2, 3, 2, 3, 2))
        rows = trainer.train_rows
        trainer.policy.encoder.prefetch(rows, [0, 1], 1.0)
        round = Round(rows, [0, 1], 1, (0, 3, 0), rows.training_sizes)
        with trainer.policy.on_device():
            found = list(trainer.policy.rollout(round, [Batch([sample]) for sample in round.samples], 2))
        assert [[done.index for done in finished] for finished in found] == [[0], [], [], [1], []]

    @pytest.mark.parametrize(
        "changes",
        [
            {"tail_steps": 1, "num_sde_steps": 1, "sde_steps": [0, 1], "per_device_train_batch_size": 2},
            {"model": "flux2_klein", "trainer_class": PaCoNFTTrainer},
            {"trainer_class": PaCoNFTTrainer, "loss_type": "awm", "resolution_scale": 0.5},
        ],
        ids=["tail", "nft of klein", "awm at half size"],
    )
    def test_training(self, make, changes):
        check_training(make(**changes))

    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({"model": "flux2_klein", "per_device_train_batch_size": 2}, "`per_device_train_batch_size` is 2"),
            ({"per_device_train_batch_size": 4}, "divide `num_generations`"),
            ({"model": "flux2_klein", "per_device_eval_batch_size": 2}, "per_device_eval_batch_size"),
            ({"model": "flux"}, "FluxPipeline takes no source"),
            ({"model": "qwen_image_edit", "guidance_scale": 1.0}, "QwenImageEditPipeline generates none"),
            ({"model": "qwen_image_21", "guidance_scale": 1.0}, "QwenImage21Pipeline reads"),
        ],
    )
    def test_refused(self, make, changes, word):
        with pytest.raises(ValueError, match=word):
            make(**changes)

    def test_references_are_sources_too(self, make):
        def of(count: int) -> Dataset:
            images = [Image.new("RGB", (64, 64), "red")] * count
            return Dataset.from_list([row_of(number, 2 + number % 2, references=images) for number in range(6)])

        model = {"model": "flux2_klein", "train_dataset": of(3)}
        records = [entry["step"] for entry in entries_of(round_of(make(**model)))]
        lengths = [record.calls[0]["hidden_states"].shape[1] / record.sample.shape[1] for record in records]
        assert sorted(lengths) == [4] * 4 + [5] * 6
        with pytest.raises(ValueError, match="first panel"):
            make(**model | {"train_dataset": of(4)})
        # A single image has none, and so one reference more
        images = [Image.new("RGB", (64, 64), "red")] * 4
        mixed = [row_of(number, 2, references=images[:3]) for number in range(5)] + [row_of(5, 1, references=images)]
        make(**model | {"train_dataset": Dataset.from_list(mixed)})


def test_grids_are_trained_as_separate_sets(make_trainer):
    settings = {"set_layout": "separate", "num_prompts_per_generation": 8, "reward_funcs": panel_redness}
    trainer = make_trainer(**settings)
    assert trainer.schedule.rows_per_round == 2 and trainer.train_rows.images_per_row == [4] * 12
    trainer.train()
    assert differences(trainer._identity, make_trainer()._identity)
    other = make_trainer(**settings, panel_template="{panel}")
    assert differences(trainer._settings, other._settings) == ["panel_template: '{theme} {panel}', now '{panel}'"]


def test_what_is_generated_in_vain_is_told(make_trainer, caplog):
    make_trainer(**SETTINGS)
    assert "not trained" not in caplog.text
    make_trainer(**SETTINGS | {"train_dataset": sets(3, 3)})
    assert "about 2 are generated and not trained" in caplog.text


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"reward_funcs": LayoutReward()}, "'layout'"),
        ({"num_prompts_per_generation": 2}, "num_prompts_per_generation"),
        ({"num_prompts_per_generation": 16}, "num_prompts_per_generation"),
        ({"set_layout": "grid", "width": 192, "panel_generation": "shared_noise"}, "panel_generation"),
        ({"panel_template": "{panel} {theme} {other}"}, "panel_template"),
        ({"set_layout": "grid", "width": 192, "panel_template": "{panel}"}, "panel_template"),
    ],
)
def test_refused(make_trainer, changes, word):
    with pytest.raises(ValueError, match=word):
        make_trainer(**SETTINGS | changes)


def test_the_sets_of_an_evaluation_may_be_the_only_ones(make_trainer):
    trainer = make_trainer(eval_dataset=sets(2, 3), panel_template="{panel} {theme}")
    assert trainer.evaluator.rows_of(trainer.eval_dataset).image_prompts[0].prompt == "a 0. Theme 0."


class TestCard:
    @pytest.mark.parametrize("wrong", [{"panel_template": "{panel.upper}"}, {"panel_generation": "shared"}])
    def test_what_a_stranger_wrote_is_checked(self, wrong):
        right = {"set_layout": "separate", "panel_template": "{panel}", "panel_generation": "anchored"}
        ImageModelCardData("a", "u/a", "u/base", settings=right)
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ImageModelCardData("a", "u/a", "u/base", settings=wrong)

    def test_names_how_the_sets_are_generated(self, make_trainer):
        ways = {"panel_template": "{panel} {theme}", "panel_generation": "shared_noise"}
        card = make_trainer(**SETTINGS, **ways)._model_card()
        run = card.settings
        assert (run["set_layout"], run["panel_generation"]) == ("separate", "shared_noise")
        assert card.prompt == ["a 0. Theme 0.", "b 0. Theme 0."] and card.layout == [1, 1]
        assert "| `panel_template` | {panel} {theme} |" in render_card(card).text
        grid = {"layout": None, "prompt": "Two.", "rows": 1, "cols": 2, "panels": ["One.", "Two."]}
        mixed = [grid, *(row_of(number, 2, **{"prompt": None, "rows": 1, "cols": 2}) for number in range(2))]
        mixed = [{"theme": None, **row} for row in mixed]
        run = make_trainer(**SETTINGS | {"train_dataset": Dataset.from_list(mixed)})._model_card().settings
        assert (run.get("set_layout"), run["panel_template"]) == (None, "{theme} {panel}")  # what their rows say

    @pytest.mark.parametrize("way", ["independent", "shared_noise", "anchored"])
    def test_its_code_generates_a_set(self, make_trainer, folder_of, tmp_path, monkeypatch, way):
        model = "flux_kontext" if way == "anchored" else "flux"
        changes = {"model": folder_of(model), "panel_generation": way, "train_dataset": sets(3, 2, 3)}
        trainer = make_trainer(**settings_of(**ANCHORED | changes))
        trainer.save_model()
        monkeypatch.chdir(Path(folder_of(model)).parent)
        text = (Path(trainer.args.output_dir) / "README.md").read_text(encoding="utf-8")
        load, _, code = re.findall(r"```python\n(.*?)```", text, flags=re.S)
        load, names = load.replace(f'"{Path(trainer.args.output_dir).name}"', f'"{trainer.args.output_dir}"'), {}
        exec(load, names)
        calls, pipe = [], names["pipe"]
        names["pipe"] = lambda **arguments: calls.append(arguments) or pipe(**arguments)
        exec(code, names)
        assert names["prompts"] == [f"Theme 0. {panel} 0." for panel in "abc"] == [call["prompt"] for call in calls]
        assert [image.size for image in names["images"]] == [(64, 64)] * 3
        first = {"anchored": [None, *names["images"][:1] * 2]}.get(way, [None] * 3)
        assert [call.get("image") for call in calls] == first
        assert [call.get("_auto_resize") for call in calls] == [False if way == "anchored" else None] * 3
        seeds = [call["generator"].initial_seed() for call in calls if "generator" in call]
        assert seeds == [0] * 3 * (way == "shared_noise")

    def test_no_strip_is_in_the_widget_with_a_prompt(self, make_trainer):
        trainer = make_trainer(**SETTINGS, log_completions=True, max_steps=1)
        trainer.train()
        assert list(Path(trainer.args.output_dir).glob("contact_sheets/card/0_round_*.png"))
        card = trainer._model_card()
        assert "contact_sheet.png" in card.pictures and card.gallery == {}
        assert not [name for name in card.pictures if name.startswith("images/")]


class TestRuns(RunsOfOptions):
    COMPARED = ("rewards/panel_redness/mean", "eval_reward_baseline")
    # Six prompts, of which two sets have five: an image of each process is of no set
    SETTINGS = {
        "reward_funcs": panel_redness, "train_dataset": SETTINGS["train_dataset"], "eval_dataset": sets(3, 2),
        "num_prompts_per_generation": 6, "optimizer_steps_per_generation": 2, "max_steps": 4, "eval_steps": 2,
        "per_device_train_batch_size": 2, "panel_generation": "shared_noise",
    }  # fmt: skip


class TestAnchoredRuns(TestRuns):
    # Two sets have five of seven images: those of no set are a first panel and another
    SETTINGS = TestRuns.SETTINGS | {
        "panel_generation": "anchored", "per_device_train_batch_size": 1, "num_prompts_per_generation": 7,
        "num_generations": 4, "resolution_scale": 1.0, "ds3_gather_for_generation": False,
    }  # fmt: skip

    @pytest.fixture(scope="class")
    def tiny_flux(self, folder_of):
        return folder_of("flux_kontext")
