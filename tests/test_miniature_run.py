# SPDX-License-Identifier: Apache-2.0
"""The miniature, shortened: every step runs, what is done is found, and what cannot be is said."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import load_from_disk

from paco_trl.miniature.run import STEPS, Miniature, StepError, describe_time
from paco_trl.miniature.settings import SHORT


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Miniature, list[str]]:
    said: list[str] = []
    miniature = Miniature(tmp_path_factory.mktemp("miniature") / "out", SHORT, say=said.append)
    miniature.run()
    return miniature, said


class TestShortRun:
    def test_what_lies_in_the_folder(self, finished):
        miniature, _ = finished
        for name in ("report.html", "before_and_after.png", "curves.png", "calibration.png"):
            assert (miniature.folder / name).stat().st_size > 1000
        for name in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors", "README.md"):
            assert (miniature.step_folder("generator") / name).is_file()

    def test_the_pairs_are_labelled_by_how_they_were_drawn(self, finished):
        miniature, _ = finished
        pairs = load_from_disk(str(miniature.step_folder("dataset") / "pairs" / "dataset"))["train"]
        for (first, second), completion in zip(pairs["panels"][:], pairs["completion"][:], strict=True):
            of_one_set = first.rsplit("/", 1)[0] == second.rsplit("/", 1)[0]
            assert (completion[0]["content"] == "Yes") == of_one_set

    def test_labels_are_worth_something(self, finished):
        """Figures of one set are the same more often than those of two."""
        share = finished[0].result("dataset")["true_share"]
        assert share["Yes"] > share["No"] + 0.2

    def test_no_prompt_is_in_two_parts(self, finished):
        parts = [set(finished[0].prompts(name)["prompt"][:]) for name in ("dataset", "train", "test")]
        assert [len(part) for part in parts] == [10, 8, 4]
        assert len(set.union(*parts)) == 22

    def test_it_says_what_comes_and_how_long(self, finished):
        miniature, said = finished
        starts = [f"Step {number} of 5, {name}:" for number, name in enumerate(STEPS, start=1)]
        assert [line.startswith(start) for line, start in zip(said, starts, strict=True)] == [True] * 5
        assert all("to the end)" in line for line in said)

    def test_the_summary(self, finished):
        lines = finished[0].summary()
        starts = ("Dataset:", "Judge:", "True consistency", "True prompt following", "Look at ")
        assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 5

    def test_the_page_needs_nothing_beside_it(self, finished):
        folder = finished[0].folder
        page = (folder / "report.html").read_text(encoding="utf-8")
        assert page.count('src="data:image/png;base64,') == 6
        assert 'src="http' not in page

    def test_again_does_nothing_again(self, finished):
        miniature, _ = finished
        before = {path: path.stat().st_mtime_ns for path in miniature.folder.rglob("*") if path.is_file()}
        said: list[str] = []
        Miniature(miniature.folder, SHORT, say=said.append).run()
        assert len(said) == 5 and all("found in" in line for line in said)
        assert before == {path: path.stat().st_mtime_ns for path in miniature.folder.rglob("*") if path.is_file()}

    def test_a_step_alone_gives_the_same_again(self, finished):
        miniature, _ = finished
        before = miniature.result("evaluation")
        picture = miniature.step_folder("evaluation") / "before_and_after.png"
        made = picture.stat().st_mtime_ns
        again = miniature.run(alone="evaluation")["evaluation"]
        assert picture.stat().st_mtime_ns > made
        assert {**before, "seconds": 0} == {**again, "seconds": 0}

    def test_training_goes_on_from_its_checkpoint(self, finished):
        """A run that was killed in the middle, and one that was not, have the same adapter."""
        miniature, _ = finished
        folder = miniature.step_folder("generator")
        adapter = folder / "adapter_model.safetensors"
        before = adapter.read_bytes()
        (folder / "result.json").unlink()
        adapter.unlink()
        said: list[str] = []
        Miniature(miniature.folder, SHORT, say=said.append).run()
        assert sum("found in" in line for line in said) == 4
        assert adapter.read_bytes() == before


class TestRefusals:
    def test_other_settings_in_the_same_folder(self, finished):
        with pytest.raises(ValueError, match="`seed` 0, now 1. Give another folder"):
            Miniature(finished[0].folder, replace(SHORT, seed=1))

    def test_a_step_whose_predecessor_is_missing(self, tmp_path):
        with pytest.raises(ValueError, match="'judge' needs what 'dataset' makes"):
            Miniature(tmp_path, SHORT).run(alone="judge")

    def test_an_unknown_step(self, tmp_path):
        with pytest.raises(ValueError, match="no step 'training'. The steps are dataset, judge"):
            Miniature(tmp_path, SHORT).run(alone="training")

    def test_a_step_that_fails_is_named(self, finished, tmp_path):
        miniature = Miniature(tmp_path, SHORT)
        for name in ("dataset", "judge", "generator"):
            miniature.step_folder(name).mkdir()
            (miniature.step_folder(name) / "result.json").write_text(json.dumps({"seconds": 1}))
        with pytest.raises(StepError, match="'evaluation' failed: .*runs it alone"):
            miniature.run()

    def test_a_folder_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(OSError):
            Miniature(Path(tmp_path / "file" / "below"), SHORT)


@pytest.mark.parametrize(
    "seconds, text", [(4, "10 seconds"), (31, "30 seconds"), (58, "1 minute"), (240, "4 minutes")]
)
def test_times_for_people(seconds, text):
    assert describe_time(seconds) == text
