# SPDX-License-Identifier: Apache-2.0
"""Checkpoints without a run: complete or absent, of which run, which are deleted, and what is read."""

import os
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator, PartialState
from filelock import FileLock

from paco_trl.checkpointing import checkpoints
from paco_trl.checkpointing.checkpoints import (
    RUN_FILE,
    CheckpointError,
    check_resumed_run,
    clear_staging,
    commit_checkpoint,
    delete_checkpoint,
    find_checkpoint,
    how_to_resume,
    incomplete_files,
    list_checkpoints,
    load_round,
    rotate_checkpoints,
    round_file,
    write_checkpoint,
)
from paco_trl.checkpointing.output_dirs import (
    check_no_checkpoints,
    check_no_model,
    check_output_dir,
    check_same_run,
    delete_run,
    mark_output_dir,
)
from paco_trl.checkpointing.weights import load_weights


RUN = {"identity": {"r": 4}, "settings": {"seed": 1}, "num_processes": 1, "is_deepspeed": False}
RUN["is_round_pending"] = True


@pytest.fixture(autouse=True)
def state():
    PartialState()  # of the logger


def make(output: Path, step: int, *further: str, **run) -> Path:
    staged = output / ".saving" / f"checkpoint-{step}"
    for name in ("weights", *further):
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_text(name)
    return commit_checkpoint(staged, output, RUN | run)


def test_all_is_on_the_disk_before_it_is_visible(tmp_path, monkeypatch):
    events = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, f=function, name=name: (events.append(name), f(*args)))
    make(tmp_path, 1)
    assert events == ["fsync"] * 3 + ["replace", "fsync"]  # two files and their directory, then the parent


@pytest.mark.parametrize("is_staged_whole", [True, False])
@pytest.mark.parametrize(
    "read",
    [
        list_checkpoints,
        clear_staging,
        lambda folder: find_checkpoint(folder, "auto"),
        lambda folder: find_checkpoint(folder, str(folder / "checkpoint-2")),
    ],
)
def test_a_kill_while_a_checkpoint_is_replaced_loses_none(tmp_path, monkeypatch, read, is_staged_whole):
    checkpoint, rename = make(tmp_path, 2), os.replace
    (checkpoint / "notes.txt").write_text("mine")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(
            os, "replace", lambda old, new: rename(old, new) if old == checkpoint else signal.raise_signal(2)
        )
        make(tmp_path, 2, "new")
    assert not checkpoint.exists()
    if not is_staged_whole:
        (tmp_path / ".saving" / "checkpoint-2" / "weights").unlink()
    lock = FileLock(tmp_path / ".lock")
    if read is list_checkpoints:  # a run that writes there is between the two
        monkeypatch.setattr(checkpoints, "_LOCK_TIMEOUT", 0)
        with lock:
            assert list_checkpoints(tmp_path) == [] and not checkpoint.exists()
    read(tmp_path)
    assert find_checkpoint(tmp_path, True) == checkpoint and (checkpoint / "new").exists() is is_staged_whole
    assert (checkpoint / "notes.txt").read_text() == "mine"
    clear_staging(tmp_path)
    assert not (tmp_path / ".saving").exists() and find_checkpoint(tmp_path, True) == checkpoint


def test_an_error_while_a_checkpoint_is_replaced_loses_none(tmp_path, monkeypatch):
    checkpoint, rename = make(tmp_path, 2), os.replace
    renames = [rename, lambda *_: os.stat(tmp_path / "gone"), rename]
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="FileNotFound"):
        patch.setattr(os, "replace", lambda *paths: renames.pop(0)(*paths))
        write_checkpoint(tmp_path, 2, Accelerator(cpu=True), True, RUN, lambda folder: (folder / "weights").touch())
    assert not renames and not incomplete_files(checkpoint) and not (tmp_path / ".saving").exists()


@pytest.mark.parametrize(
    ("error", "advice"),
    [(OSError(28, "No space left on device"), "Free disk space"), (ValueError("odd"), "Mend the cause and resume")],
)
def test_an_error_of_any_type_ends_on_all_processes(tmp_path, error, advice):
    """Other types would leave the other processes waiting."""

    def fail(folder):
        raise error

    with pytest.raises(CheckpointError, match=f"of step 2 could not be written.*{advice}") as raised:
        write_checkpoint(tmp_path, 2, Accelerator(cpu=True), True, RUN, fail)
    assert raised.value.__cause__ is error and not (tmp_path / ".saving").exists()


def test_copies_that_cannot_be_put_back_stay(tmp_path, monkeypatch, caplog):
    checkpoint, rename = make(tmp_path, 2), os.replace
    fails = lambda *_: os.stat(tmp_path / "gone")  # noqa: E731
    renames = [rename, fails, fails]
    with monkeypatch.context() as patch, pytest.raises(CheckpointError):
        patch.setattr(os, "replace", lambda *paths: renames.pop(0)(*paths))
        write_checkpoint(tmp_path, 2, Accelerator(cpu=True), True, RUN, lambda folder: (folder / "weights").touch())
    checkpoint.mkdir()  # by another program
    (checkpoint / "notes.txt").touch()
    clear_staging(tmp_path)
    assert "Move that away" in caplog.text and find_checkpoint(tmp_path, "auto") is None
    assert how_to_resume(tmp_path) == "Nothing is saved."
    delete_checkpoint(make(tmp_path, 8))  # saving and deleting others leaves the copy
    (checkpoint / "notes.txt").rename(tmp_path / "notes.txt")
    checkpoint.rmdir()
    assert find_checkpoint(tmp_path, True) == checkpoint and not incomplete_files(checkpoint)
    (make(tmp_path, 9) / "weights").unlink()
    assert str(checkpoint) in how_to_resume(tmp_path)


def test_the_warning_of_a_script_without_an_accelerator(tmp_path, monkeypatch, caplog):
    whole, broken = make(tmp_path, 9), make(tmp_path, 10)
    (broken / "weights").unlink()
    monkeypatch.setattr(PartialState, "_shared_state", {})
    assert find_checkpoint(tmp_path, True) == whole
    assert str(broken) in caplog.text


@pytest.mark.parametrize("damage", ["truncated", "missing", "no list"])
def test_what_is_incomplete_is_not_found(tmp_path, damage):
    whole, broken = make(tmp_path, 9), make(tmp_path, 10)
    assert find_checkpoint(tmp_path, True) == broken
    name = RUN_FILE if damage == "no list" else "weights"
    (broken / name).write_text("w") if damage == "truncated" else (broken / name).unlink()
    assert incomplete_files(broken) == [name]
    assert find_checkpoint(tmp_path, True) == whole
    with pytest.raises(ValueError, match=name):
        find_checkpoint(tmp_path, str(broken))
    with pytest.raises(
        ValueError, match=f"is the directory of a run. Name one of its checkpoints, such as '{broken}'"
    ):
        find_checkpoint(tmp_path / "other", str(tmp_path))


@pytest.mark.parametrize("content", ["", "a card with notes of mine", None])
def test_a_card_that_was_edited_is_no_damage(tmp_path, content):
    checkpoint = make(tmp_path, 9, "README.md", "images/0.png")
    for name in ("README.md", "images/0.png"):
        (checkpoint / name).unlink() if content is None else (checkpoint / name).write_text(content)
    (checkpoint / "weights").write_text("more weights")
    assert find_checkpoint(tmp_path, True) == checkpoint


@pytest.mark.parametrize("how", ["deleted", "dropped", "replaced"])
def test_files_of_the_users_in_a_checkpoint_stay(tmp_path, how):
    checkpoint = make(tmp_path, 1, "images/0.png")
    mine = [checkpoint / name for name in ("notes.txt", "images/mine.png", "samples/run.json")]
    mine[2].parent.mkdir()
    for path in mine:
        path.write_text("mine")
    if how == "deleted":
        delete_run(tmp_path)
        check_same_run(tmp_path, {"r": 2})
    else:
        make(tmp_path, 1 if how == "replaced" else 2)
        rotate_checkpoints(str(tmp_path), 1, None)
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert (checkpoint / "weights").exists() == (how == "replaced") and not (checkpoint / "images" / "0.png").exists()
    check_output_dir(tmp_path, [])  # the run can go on there, or another one begin
    make(tmp_path, 1)
    assert not incomplete_files(checkpoint) and [path.read_text() for path in mine] == ["mine"] * 3


@pytest.mark.parametrize(
    ("saved", "now", "token"),
    [
        ({}, {"identity": {"r": 2}}, "r: 4, now 2"),
        ({"identity": {"data": {"a": 1, "b": 2}}}, {"identity": {"data": {"a": 1}}}, "data/b: 2, now None"),
        ({"settings": {"seed": 1}, "identity": {}}, {}, "r: None, now 4"),
        ({"is_deepspeed": True}, {"num_processes": 2, "is_deepspeed": True}, "DeepSpeed: 1, now 2"),
        ({"is_deepspeed": True}, {"num_processes": 2}, "DeepSpeed: 1, now None"),
        ({}, {"is_deepspeed": True}, "DeepSpeed: None, now 1"),
    ],
)
def test_another_run_cannot_be_resumed(tmp_path, saved, now, token):
    checkpoint = make(tmp_path, 1, **saved)
    run = {"identity": {"r": 4}, "settings": {"seed": 1}, "num_processes": 1, "is_deepspeed": False}
    with pytest.raises(ValueError, match=token):
        check_resumed_run(checkpoint, **run | now)


def test_one_of_an_older_version(tmp_path):
    staged = tmp_path / ".saving" / "checkpoint-1"
    staged.mkdir(parents=True)
    run = {name: value for name, value in RUN.items() if name != "settings"}
    checkpoint = commit_checkpoint(staged, tmp_path, run | {"hyperparameters": {"seed": 1}})
    with pytest.raises(ValueError, match="older version"):
        check_resumed_run(checkpoint, {"r": 4}, {"seed": 1}, 1, False)


def test_what_may_change_is_a_warning(tmp_path, caplog):
    checkpoint = make(tmp_path, 1)
    check_resumed_run(checkpoint, {"r": 4}, {"seed": 1}, 1, False)
    assert not caplog.text
    check_resumed_run(checkpoint, {"r": 4}, {"seed": 2}, 2, False)
    assert "seed: 1, now 2" in caplog.text and "in the middle of a round" in caplog.text


def test_the_directory_of_another_run(tmp_path):
    make(tmp_path, 1)
    check_same_run(tmp_path, {"r": 4})
    with pytest.raises(ValueError, match="of another run"):
        check_same_run(tmp_path, {"r": 2})


def test_what_would_be_written_over(tmp_path):
    check_no_checkpoints(tmp_path, None)
    checkpoint, elsewhere = make(tmp_path / "run", 1), make(tmp_path / "other", 1)
    check_no_checkpoints(tmp_path / "run", tmp_path / "other" / ".." / "run" / "checkpoint-1")
    for resumed in (None, elsewhere):
        with pytest.raises(ValueError, match="checkpoint-1 of an earlier run"):
            check_no_checkpoints(tmp_path / "run", resumed)
    (checkpoint / "weights").unlink()  # nobody can resume it
    check_no_checkpoints(tmp_path / "run", None)
    (checkpoint / RUN_FILE).write_text("{")
    check_output_dir(tmp_path / "run", [])
    (checkpoint / RUN_FILE).unlink()
    with pytest.raises(ValueError, match="not written by paco_trl"):
        check_output_dir(tmp_path / "run", [])


def test_a_saved_model_without_checkpoints(tmp_path):
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        check_no_model(tmp_path)
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="the model of an earlier run"):
        check_no_model(tmp_path)
    checkpoint = make(tmp_path, 1)
    check_no_model(tmp_path)  # `check_no_checkpoints` sees to it
    (checkpoint / "weights").unlink()
    check_no_checkpoints(tmp_path, None)
    with pytest.raises(ValueError, match="the model of an earlier run"):
        check_no_model(tmp_path)


def test_a_checkpoint_is_no_output_directory(tmp_path):
    checkpoint = make(tmp_path, 1)
    check_output_dir(tmp_path, [])
    with pytest.raises(ValueError, match="is a checkpoint"):
        check_output_dir(checkpoint, [])
    mark_output_dir(tmp_path / "new")  # what a killed run leaves
    check_output_dir(tmp_path / "new", [])


def test_neither_is_a_pipeline_or_what_is_below_a_file(tmp_path):
    (tmp_path / "pipeline").mkdir()
    check_output_dir(tmp_path / "pipeline", [])
    (tmp_path / "pipeline" / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match="is the directory of a model"):
        check_output_dir(tmp_path / "pipeline", [])
    for name in ("config.json", "scheduler_config.json", "tokenizer_config.json"):
        (part := tmp_path / name.removesuffix(".json")).mkdir()
        (part / name).write_text('{"learning_rate": 1}')  # somebody's own settings
        check_output_dir(part, [])
        (part / name).write_text('{"_class_name": "A", "model_type": "b"}')
        with pytest.raises(ValueError, match="is the directory of a model"):
            check_output_dir(part, [])
        mark_output_dir(part)  # of a run, such as a judge's
        check_output_dir(part, [])
    for folder in ("model_index.json", "model_index.json/run/1"):
        with pytest.raises(ValueError, match=f"{folder}', but .*model_index.json' is a file"):
            check_output_dir(tmp_path / "pipeline" / folder, [])


def test_the_best_and_the_complete_ones_are_kept(tmp_path):
    paths = [make(tmp_path, step) for step in (1, 2, 3, 4)]
    (paths[3] / "weights").unlink()
    for number, path in enumerate(paths):
        os.utime(path, (number, number))
    rotate_checkpoints(str(tmp_path), 2, str(paths[0]))
    assert [path.exists() for path in paths] == [True, False, True, False]


def test_a_copied_run_loses_its_oldest_checkpoint(tmp_path):
    paths = {step: make(tmp_path, step) for step in (2, 4, 6, 9)}
    mine = [tmp_path / "checkpoint-best", tmp_path / "checkpoint-1"]  # a copy, and what another program has written
    shutil.copytree(paths[4], mine[0])
    mine[1].mkdir()
    for minute, step in enumerate((4, 9, 2, 6)):  # resumed from 4: what came after it is given up
        os.utime(paths[step], (60 * minute, 60 * minute))
    rotate_checkpoints(str(tmp_path), 2, None)
    assert [step for step, path in paths.items() if path.exists()] == [4, 6] and all(path.exists() for path in mine)
    rotate_checkpoints(str(tmp_path), 1, None)
    assert [step for step, path in paths.items() if path.exists()] == [6]


@pytest.mark.parametrize("names", [["weight"], ["weight", "bias", "more"]])
def test_other_weights_than_those_that_are_trained(names):
    model, ones = torch.nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    load_weights(model, ones, zero_stage=0)
    assert model.weight.tolist() == [[1, 1], [1, 1]]
    with pytest.raises(ValueError, match=r"in one of them, such as '(bias|more)'"):
        load_weights(model, {name: torch.zeros(2, 2) for name in names}, zero_stage=0)
    assert model.weight.tolist() == [[1, 1], [1, 1]]


def test_an_unfinished_round_holds_no_code(tmp_path):
    torch.save({"latents": torch.ones(2)}, round_file(tmp_path, 0))
    assert load_round(tmp_path, 0, torch.device("cpu"), False)["latents"].tolist() == [1, 1]
    torch.save({"latents": tmp_path}, round_file(tmp_path, 0))
    with pytest.raises(pickle.UnpicklingError):
        load_round(tmp_path, 0, torch.device("cpu"), False)
