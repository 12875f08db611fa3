# SPDX-License-Identifier: Apache-2.0
"""The planted world: what is drawn is what is read, and truth tells consistent sets and faithful ones apart."""

import numpy as np
import pytest
from datasets import Dataset
from datasets import Image as DatasetImage
from PIL import Image

from miniature.data import make_prompts, make_true_rankings, shared_properties
from miniature.edit_world import (
    EDIT_PANELS,
    EDITED,
    Edit,
    EditTruth,
    judge_edit,
    make_edits,
    read_edit,
    sample_careless_edit,
    sample_edit,
)
from miniature.truth import judge_set, read_panels
from miniature.world import (
    ALL_PANELS,
    Panel,
    PromptSpec,
    describe_spec,
    draw_all_panels,
    draw_panel,
    sample_careless_set,
    sample_specs,
    write_prompt,
)
from paco_trl.data import parse_image_set_prompt


SCENES = (("meadow", "left"), ("beach", "middle"), ("snow", "right"), ("night", "left"))
RED = Panel("round", "red", "hat", "meadow", "left")
OPEN = [PromptSpec("round", None, None, *scene) for scene in SCENES]
NAMED = [PromptSpec(*RED.identity, *scene) for scene in SCENES]


def set_of(*figures: tuple[str, str, str]) -> list[Panel]:
    return [Panel(*figure, *scene) for figure, scene in zip(figures, SCENES, strict=True)]


class TestReading:
    @pytest.mark.parametrize("size", [64, 32])
    @pytest.mark.parametrize("panels", [ALL_PANELS, EDIT_PANELS], ids=["sets", "edits"])
    def test_every_panel_is_read_as_what_was_drawn(self, size, panels):
        drawn = [Image.fromarray(pixels) for pixels in draw_all_panels(size, panels)]
        assert read_panels(drawn, panels) == list(panels)
        # Sets know no figure without an accessory
        assert (read_panels(drawn) == list(panels)) == (panels is ALL_PANELS)

    def test_what_shows_nothing_of_the_world_is_not_read(self):
        noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
        flat = Image.new("RGB", (64, 64), (255, 0, 255))
        assert read_panels([Image.fromarray(noise), flat, draw_panel(RED, 64)]) == [None, None, RED]
        assert read_panels([]) == []


class TestTruth:
    def test_copies_are_consistent_and_do_not_follow(self):
        truth = judge_set([RED] * 4, OPEN)
        assert truth.consistency == truth.copies == 1.0
        # The shape of all four; the ground of the first; the place of the first and the last
        assert truth.prompt_following == (4 + 1 + 2) / 12

    def test_a_figure_that_is_named_is_asked_for(self):
        panels = set_of(*[RED.identity] * 3, ("round", "blue", "hat"))
        assert judge_set(panels, OPEN) == (3 / 6, 1.0, 0, 0)
        assert judge_set(panels, NAMED) == (3 / 6, 19 / 20, 0, 0)
        other = set_of(*[("round", "blue", "flag")] * 4)
        assert judge_set(other, NAMED) == (1.0, 12 / 20, 0, 0)
        assert judge_set(other, OPEN) == (1.0, 1.0, 0, 0)
        assert judge_set([*other[:3], None], NAMED) == (3 / 6, 9 / 20, 0, 1 / 4)


class TestPrompts:
    def test_the_format_is_that_of_t2is(self):
        parsed = parse_image_set_prompt(write_prompt(NAMED))
        assert (parsed.rows, parsed.cols) == (2, 2)
        assert parsed.panels == [describe_spec(spec) for spec in NAMED]
        assert "one round figure" in parsed.theme
        assert parsed.panels[0] == "Meadow, on the left: red, hat."
        assert parse_image_set_prompt(write_prompt(OPEN)).panels[1] == "Beach, in the middle."

    @pytest.mark.parametrize("named", [True, False])
    def test_what_a_prompt_asks_for_is_in_its_row(self, named):
        for row in make_prompts(20, seed=0, named=named):
            specs = [PromptSpec(*spec) for spec in row["specs"]]
            assert row["prompt"] == write_prompt(specs) and row["panels"] == [describe_spec(spec) for spec in specs]
            assert len({spec.ground for spec in specs}) == 4
            assert len({spec[:3] for spec in specs}) == 1 and (None in specs[0]) != named


class TestCareless:
    @pytest.mark.parametrize("named", [True, False])
    @pytest.mark.parametrize("care", [1.0, 0.5])
    def test_it_is_as_wrong_as_planted(self, named, care):
        random = np.random.default_rng(0)
        truths = []
        for _ in range(800):
            specs = sample_specs(random, named)
            truths.append(judge_set(sample_careless_set(specs, random, care), specs))

        def both_right(values: int) -> float:
            """Two panels have one value: both kept it, or one of them or both have it by chance."""
            return care**2 + (1 - care**2) / values

        expected = both_right(6) * both_right(3)
        assert np.mean([truth.consistency for truth in truths]) == pytest.approx(expected, abs=0.04)
        assert all(truth.copies == 0 for truth in truths)  # the grounds are different
        # Of five things asked for in each panel, three are always right
        wrong = (1 - care) * (5 / 6 + 2 / 3) / 5 if named else 0
        assert np.mean([truth.prompt_following for truth in truths]) == pytest.approx(1 - wrong, abs=0.01)


class TestTrueRankings:
    """Three sets of one prompt, whose figures share 3, 2 and 1 properties with those of the first."""

    def test_the_best_shares_most(self, tmp_path):
        figures = [("round", "red", "hat"), ("round", "red", "flag"), ("round", "blue", "belt")]
        prompts = make_prompts(1, seed=0)
        scenes = [tuple(spec[3:]) for spec in prompts[0]["specs"]]
        rows = []
        for seed, figure in enumerate(figures):
            for position, scene in enumerate(scenes):
                path = tmp_path / f"{seed}-{position}.png"
                draw_panel(Panel(*figure, *scene), 64).save(path)
                rows.append({"prompt_id": prompts[0]["id"], "position": position, "image": str(path)})
        panels = Dataset.from_list(rows).cast_column("image", DatasetImage())
        rankings = make_true_rankings(panels, prompts, per_prompt=100)
        assert len(rankings) == 3 * 4 * 3
        for row in rankings:
            (reference,) = read_panels([row["reference"]])
            candidates = read_panels(row["candidates"])
            shared = [shared_properties(reference, candidates[index]) for index in row["ranking"]]
            assert shared == sorted(set(shared), reverse=True) and len(shared) > 1
            # All candidates are of one place in the sets, and the reference is of another
            assert len({(panel.ground, panel.place) for panel in candidates}) == 1
            assert (reference.ground, reference.place) != (candidates[0].ground, candidates[0].place)


class TestEdits:
    SOURCE = Panel("round", "red", "hat", "meadow", "left")

    @pytest.mark.parametrize(
        "name, value, instruction",
        [
            ("color", "blue", "Make the figure blue."),
            ("accessory", "none", "Remove the hat."),
            ("ground", "snow", "Change the ground to snow."),
            ("place", "right", "Move the figure to the right."),
        ],
    )
    def test_the_truth_of_an_edit(self, name, value, instruction):
        edit = Edit(self.SOURCE, name, value)
        other = next(other for other in EDITED if other != name)
        change = {other: {"color": "green", "accessory": "flag"}[other]}
        assert edit.instruction == instruction
        assert judge_edit(edit.target, edit) == EditTruth(True, True, True, False)
        assert judge_edit(edit.source, edit) == EditTruth(False, False, True, False)
        assert judge_edit(edit.target._replace(**change), edit) == EditTruth(False, True, False, False)
        assert judge_edit(edit.source._replace(**change), edit) == EditTruth(False, False, False, False)
        assert judge_edit(None, edit) == EditTruth(False, False, False, True)

    def test_careless_edits_fail_in_both_ways(self):
        random = np.random.default_rng(0)
        edits = [sample_edit(random) for _ in range(400)]
        assert all(edit.source != edit.target for edit in edits) and {edit.name for edit in edits} == set(EDITED)
        truths = [judge_edit(sample_careless_edit(edit, random, 0.0), edit) for edit in edits]
        assert not any(truth.success for truth in truths)
        assert {truth[1:3] for truth in truths} == {(False, True), (True, False), (False, False)}
        assert all(judge_edit(sample_careless_edit(edit, random, 1.0), edit).success for edit in edits)

    def test_the_dataset_has_each_edit_once_and_its_source(self):
        rows = make_edits(40, seed=1)
        edits = [read_edit(values) for values in rows["edit"]]
        assert len(set(edits)) == 40 and rows["prompt"][:] == [edit.instruction for edit in edits]
        assert read_panels(rows["image"][:], EDIT_PANELS) == [edit.source for edit in edits]
        assert make_edits(40, seed=2)["edit"][:] != rows["edit"][:] == make_edits(40, seed=1)["edit"][:]
