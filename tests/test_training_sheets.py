# SPDX-License-Identifier: Apache-2.0
"""Contact sheets of training: each round and evaluation has one, also at the trackers and on the card."""

import sys
import zipfile
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from paco_trl.plots.trackers import send_to_trackers
from paco_trl.trainer import callbacks
from testing_utils import noise


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


@pytest.mark.parametrize("package", ["wandb", "trackio", "mlflow"])
def test_tables_of_completions_as_trl_sends_them(make, monkeypatch, package):
    """W&B and Trackio get one for each round; here of packages that only keep what they get."""
    sent = []
    table = lambda dataframe: dataframe  # noqa: E731
    log = lambda values: sent.append(values)  # noqa: E731
    tracker = SimpleNamespace(run=object(), Table=table, Image=lambda image: None, log=log, active_run=lambda: None)
    monkeypatch.setitem(sys.modules, package, tracker)
    name = {"wandb": "WandbCallback", "trackio": "TrackioCallback", "mlflow": "MLflowCallback"}[package]
    trainer = make(max_steps=2, callbacks=[type(name, (TrainerCallback,), {})()])
    trainer.train()
    tables = [(values["completions"], values["train/global_step"]) for values in sent if "completions" in values]
    assert [step for _, step in tables] == ([] if package == "mlflow" else [0, 1])
    for number, (found, _) in enumerate(tables):
        generations, rows = trainer.num_generations, trainer.schedule.row_indices(number)
        assert [*found] == ["prompt", "redness_reward", "advantage"] and len(found) == 2 * generations
        prompts = [trainer.train_rows.prompts[row] for row in rows for _ in range(generations)]
        assert found["prompt"].tolist() == prompts and found["advantage"].nunique() > 1
        assert found["redness_reward"].mean() == pytest.approx(
            trainer.state.log_history[number]["rewards/redness_reward/mean"], abs=1e-5
        )


@pytest.mark.parametrize("package", ["mlflow", "comet_ml", "swanlab"])
def test_an_image_at_a_tracker_that_few_use(package, tmp_path, monkeypatch):
    """By the real packages, where they are installed, and offline: each has a run, as transformers' callbacks start it."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracker = pytest.importorskip(package)
    name = {"mlflow": "MLflow", "comet_ml": "Comet", "swanlab": "SwanLab"}[package]
    callback = type(f"{name}Callback", (TrainerCallback,), {})()
    if package != "swanlab":  # no run, no image: it may have ended
        send_to_trackers(noise(0), "eval/wrong_pairs", 3, [callback])
    if package == "mlflow":
        tracker.set_tracking_uri(tmp_path.as_uri())
        tracker.set_experiment("sheets")
        tracker.start_run()
    elif package == "comet_ml":
        config = tracker.ExperimentConfig(offline_directory=str(tmp_path))
        run = tracker.start(api_key="none", online=False, experiment_config=config)
    else:
        run = tracker.init(mode="offline", logdir=str(tmp_path))
    send_to_trackers(noise(0), "eval/wrong_pairs", 3, [callback])
    send_to_trackers(noise(1), "eval/wrong_pairs", 3, [])
    tracker.end_run() if package == "mlflow" else run.end() if package == "comet_ml" else tracker.finish()
    if package == "comet_ml":
        (archive,) = tmp_path.glob("*.zip")
        zipfile.ZipFile(archive).extractall(tmp_path)
        assert '"eval/wrong_pairs' in (tmp_path / "messages.json").read_text().replace("\\/", "/")
    images = [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x89PNG"]
    assert len(images) == 1


def test_a_sheet_that_cannot_be_saved_stops_training_with_its_message(make, monkeypatch):
    def fails(*args):
        raise OSError(28, "No space left on device", "round.png")

    monkeypatch.setattr(callbacks, "save_scored_sheet", fails)
    with pytest.raises(OSError, match="No space left on device: 'round.png'"):
        make(max_steps=2).train()
