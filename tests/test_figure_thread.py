# SPDX-License-Identifier: Apache-2.0
"""Contact sheets and curves are made next to training, on one thread, and none is lost."""

import json
import threading
import time

import pytest
from transformers import TrainerCallback

from paco_trl.plots import contact_sheet
from paco_trl.plots.figures import FigureThread
from paco_trl.rewards import redness_reward
from paco_trl.trainer import paco_grpo_trainer


@pytest.fixture
def make(make_trainer):
    """Makes trainers with contact sheets, and with rounds of 2 prompts, an optimizer step each."""
    settings = {"log_completions": True, "num_prompts_per_generation": 2, "optimizer_steps_per_generation": 1}
    return lambda **changes: make_trainer(**{**settings, **changes})


@pytest.fixture
def replace_saving(monkeypatch):
    """Replaces the function that saves a sheet by one that gets it as its first argument."""

    def replace(saving):
        save = contact_sheet.save_scored_sheet
        monkeypatch.setattr(paco_grpo_trainer, "save_scored_sheet", lambda *args: saving(save, *args))

    return replace


def sheets_in(folder) -> dict[str, bytes]:
    folder = folder / "contact_sheets"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}


def test_a_sheet_is_made_while_the_next_round_is_generated(make, replace_saving, tmp_path, prompts):
    scored, is_generated_again, at_the_same_time, saved = [], threading.Event(), [], []

    def reward(prompts, completions, **kwargs):
        scored.append(len(completions))
        if len(scored) == 2:
            is_generated_again.set()
        return redness_reward(prompts, completions)

    def slowly(save, folder, name, *args):
        saved.append((name, *args))
        if name == "round_00000":
            at_the_same_time.append(is_generated_again.wait(timeout=60))
        return save(folder, name, *args)

    replace_saving(slowly)
    trainer = make(reward_funcs=reward, max_steps=3, eval_dataset=prompts.select(range(1)), num_inference_steps_eval=1)
    trainer.train()
    assert scored == [8, 8, 8]
    assert at_the_same_time == [True]
    found = sheets_in(tmp_path / "out")
    assert len(found) == 3 * (2 + 1 + 2)  # sheet and scores; for a card a sheet and an image of each prompt
    # An evaluation does not return before its sheet
    trainer.evaluate()
    new = sheets_in(tmp_path / "out").keys() - found.keys()
    ends = "eval_step_000003.png", "eval_step_000003.jsonl", "card/eval_step_000003.png", "card/0_eval_step_000003.png"
    assert new == {*ends}
    for name, *args in saved:
        contact_sheet.save_scored_sheet(tmp_path / "again" / "contact_sheets", name, *args)
    assert sheets_in(tmp_path / "again") == sheets_in(tmp_path / "out")


def test_the_card_of_a_checkpoint_has_the_sheet_of_its_round(make, replace_saving, tmp_path):
    def slowly(save, *args):
        time.sleep(0.5)
        return save(*args)

    replace_saving(slowly)
    make(max_steps=1, save_strategy="steps", save_steps=1).train()
    sheet = sheets_in(tmp_path / "out")["card/round_00000.png"]
    assert (tmp_path / "out" / "checkpoint-1" / "contact_sheet.png").read_bytes() == sheet


def test_trackers_get_each_sheet_with_its_step_on_the_main_thread(make, monkeypatch):
    sent = []

    def send(sheet, name, step, callbacks):
        sent.append((sheet.size, name, step, threading.current_thread() is threading.main_thread()))

    class TrainingEnds(TrainerCallback):
        def on_train_end(self, *args, **kwargs):
            sent.append("the end")  # trackers close here

    monkeypatch.setattr(paco_grpo_trainer, "send_to_trackers", send)
    make(max_steps=2, callbacks=[TrainingEnds()]).train()
    size = sent[0][0]
    assert sent == [(size, "contact_sheet", 0, True), (size, "contact_sheet", 1, True), "the end"]


class TestErrors:
    @pytest.fixture
    def no_space(self, replace_saving):
        def fails(save, *args):
            raise OSError(28, "No space left on device", "round.png")

        replace_saving(fails)

    def test_of_a_sheet_stop_training_with_their_message(self, make, no_space):
        with pytest.raises(OSError, match="No space left on device: 'round.png'"):
            make(max_steps=2).train()

    def test_of_a_sheet_do_not_replace_those_of_training(self, make, no_space):
        class Interrupts(TrainerCallback):
            def on_step_end(self, *args, **kwargs):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt) as interrupted:
            make(max_steps=2, callbacks=[Interrupts()]).train()
        (note,) = interrupted.value.__notes__
        assert note.startswith("A contact sheet or figure failed as well: OSError: ") and "No space left" in note

    def test_are_raised_once(self):
        thread = FigureThread()
        thread.submit(lambda: json.loads("{"))
        with pytest.raises(json.JSONDecodeError):
            thread.submit(list)
        thread.wait()
        results = []
        with thread:
            thread.submit(lambda: 3, results.append)
            assert not results
        assert results == [3]
