# SPDX-License-Identifier: Apache-2.0
"""Contact sheets of training: each round and evaluation has one, also at the trackers and on the card."""

import pytest
from transformers import TrainerCallback

from paco_trl.trainer import callbacks


@pytest.fixture
def make(make_trainer):
    """Makes trainers with contact sheets, and with rounds of 2 prompts, an optimizer step each."""
    settings = {"log_completions": True, "num_prompts_per_generation": 2, "optimizer_steps_per_generation": 1}
    return lambda **changes: make_trainer(**{**settings, **changes})


def sheets_in(folder) -> dict[str, bytes]:
    folder = folder / "contact_sheets"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*")}


def test_each_round_and_evaluation_has_a_sheet(make, tmp_path, prompts):
    trainer = make(max_steps=2, eval_dataset=prompts.select(range(1)), num_inference_steps_eval=1)
    trainer.train()
    found = sheets_in(tmp_path / "out")
    assert len(found) == 2 * (2 + 1 + 2)  # sheet and scores; for a card a sheet and an image of each prompt
    trainer.evaluate()
    new = sheets_in(tmp_path / "out").keys() - found.keys()
    ends = "eval_step_000002.png", "eval_step_000002.jsonl", "card/eval_step_000002.png", "card/0_eval_step_000002.png"
    assert new == {*ends}


def test_the_card_of_a_checkpoint_has_the_sheet_of_its_round(make, tmp_path):
    make(max_steps=1, save_strategy="steps", save_steps=1).train()
    sheet = sheets_in(tmp_path / "out")["card/round_00000.png"]
    assert (tmp_path / "out" / "checkpoint-1" / "contact_sheet.png").read_bytes() == sheet


def test_trackers_get_each_sheet_with_its_step(make, monkeypatch, prompts):
    sent = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            sent.append("log")  # opens a tracker

        def on_train_end(self, *args, **kwargs):
            sent.append("the end")  # and closes it

    send = lambda sheet, name, step, callbacks: sent.append((name, step))  # noqa: E731
    monkeypatch.setattr(callbacks, "send_to_trackers", send)
    trainer = make(
        max_steps=2, callbacks=[Tracker()], eval_dataset=prompts.select(range(1)), num_inference_steps_eval=1
    )
    trainer.evaluate()
    assert sent == ["log", ("eval_contact_sheet", 0)]
    trainer.train()
    sheets = [each for each in sent[2:] if each != "log"]
    assert sheets == [("contact_sheet", 0), ("contact_sheet", 1), "the end"]


def test_a_sheet_that_cannot_be_saved_stops_training_with_its_message(make, monkeypatch):
    def fails(*args):
        raise OSError(28, "No space left on device", "round.png")

    monkeypatch.setattr(callbacks, "save_scored_sheet", fails)
    with pytest.raises(OSError, match="No space left on device: 'round.png'"):
        make(max_steps=2).train()
