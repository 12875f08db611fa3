# SPDX-License-Identifier: Apache-2.0
"""Curves of a run: the table, the picture, and what happens when they cannot be written."""

import csv
import logging
import math
import os

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image
from transformers import TrainerControl, TrainerState, TrainingArguments

from paco_trl.plots import curves
from paco_trl.plots.curves import CurvesCallback, history_table, plot_curves
from paco_trl.rewards import panel_similarity_reward, redness_reward


def train_entry(step, rewards=("a",)):
    """What a step of the trainer logs, in the order in which it logs it."""
    entry = {"loss": 1e-6 * step, "learning_rate": 3e-4}
    for index, name in enumerate(rewards):
        entry[f"rewards/{name}/mean"] = (50 + step) / 100 + index
        entry[f"rewards/{name}/h"] = 0.2 + 0.1 * index
        entry[f"rewards/{name}/failure_rate"] = 0.0
    entry |= {"consistency/unanswered/HTTP_500": 0.1, "clip/mean": 0.5}  # what a reward logs itself
    entry |= {"time/encode": 2.0, "time/rollout": 8.0, "time/reward": 4.0, "time/train": 3.0}
    entry |= {f"clip_ratio/{part}_mean": 0.1 for part in ("low", "high", "region")}
    entry["ratio_deviation/step_1" if step % 2 == 0 else "ratio_deviation_on_policy/step_1"] = 1e-5 * (step % 2 == 0)
    return {**entry, "epoch": step / 10, "step": step}


def eval_entry(step):
    mean = (40 + step) / 100
    metrics = {"mean": mean, "ci_low": mean - 0.05, "ci_high": mean + 0.07, "baseline": 0.37}
    return {f"eval_rewards/a/{name}": value for name, value in metrics.items()} | {"epoch": step / 10, "step": step}


def short_entry(step, **metrics):
    """With one panel: for tests of when a picture is drawn, not of what is in it."""
    return {"rewards/a/mean": 0.1 * step, "loss": 0.0, "epoch": step / 10, **metrics, "step": step}


def read_csv(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would be saved, so that a test sees what is in them."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    return figures


@pytest.fixture
def draw(drawn, tmp_path):
    def draw(entries, **kwargs):
        assert plot_curves(history_table(entries), tmp_path / "curves.png", **kwargs)
        return drawn[-1]

    return draw


def panel(figure, beginning):
    (axes,) = [axes for axes in figure.axes if axes.get_title(loc="left").startswith(beginning)]
    return axes


def legend_of(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_the_table_of_a_log():
    entries = [train_entry(1, ("b", "a")), {"x": None, "y": np.float32(0.5), "z": "text", "step": 1}]
    table = history_table(entries)
    assert math.isnan(table["x"][0]) and table["y"][0] == 0.5 and "z" not in table
    assert list(table)[:2] == ["step", "epoch"] and list(table)[2:] == sorted(list(table)[2:])
    # A checkpoint's JSON has sorted keys
    resumed = [{name: entry[name] for name in sorted(entry)} for entry in entries]
    assert list(resumed[0]) != list(entries[0]) and history_table(resumed).to_csv() == table.to_csv()


@pytest.mark.slow
class TestPicture:
    def test_panels_of_a_run_with_two_rewards(self, draw):
        figure = draw([train_entry(step, ("a", "b")) for step in range(1, 9)])
        spread = "Spread of each reward over a round: standard deviation / mean"
        beginnings = ["a: mean", "b: mean", spread, "Clip", "|ratio - 1|", "Seconds"]
        assert figure.axes == [panel(figure, beginning) for beginning in beginnings]

    def test_evaluations_have_intervals_and_a_baseline(self, draw):
        axes = panel(draw([eval_entry(0), train_entry(1), train_entry(2), eval_entry(2)]), "a: mean")
        assert legend_of(axes) == ["training", "evaluation", "baseline"]
        _, points, baseline = axes.lines
        assert points.get_xdata().tolist() == [0, 2] and points.get_ydata().tolist() == [0.4, 0.42]
        segments = [segment.tolist() for lines in axes.collections for segment in lines.get_segments()]
        assert np.allclose(segments, [[[0, 0.35], [0, 0.47]], [[2, 0.37], [2, 0.49]]])
        assert baseline.get_linestyle() == "--" and set(baseline.get_ydata()) == {0.37}

    def test_ratio_deviation_is_a_line_though_its_kinds_alternate(self, draw):
        axes = panel(draw([train_entry(step) for step in range(1, 7)]), "|ratio - 1|")
        on_policy, after = sorted(axes.lines, key=lambda line: line.get_xdata()[0])
        assert on_policy.get_xdata().tolist() == [1, 3, 5] and after.get_xdata().tolist() == [2, 4, 6]
        assert on_policy.get_ydata().tolist() == [0, 0, 0]  # has its place
        assert legend_of(axes) == ["step 1, after an update", "step 1, on policy"]

    def test_time_is_a_line_for_each_phase(self, draw):
        axes = panel(draw([train_entry(1), train_entry(2)]), "Seconds")
        assert [line.get_ydata().tolist() for line in axes.lines] == [[8, 8], [4, 4], [3, 3]]
        assert legend_of(axes) == ["rollout", "reward", "train"]


class _Run:
    """A run in a directory, with its callback."""

    def __init__(self, folder):
        self.callback, self.args = CurvesCallback(), TrainingArguments(output_dir=str(folder), use_cpu=True)
        self.csv, self.png = folder / "curves.csv", folder / "curves.png"

    def save(self, history, event="on_save", **kwargs):
        state = TrainerState(log_history=history, global_step=history[-1]["step"], **kwargs)
        getattr(self.callback, event)(self.args, state, TrainerControl())

    def end(self, history, **kwargs):
        self.save(history, "on_train_end", **kwargs)

    def table(self):
        return read_csv(self.csv)


class TestCallback:
    @pytest.fixture
    def run(self, tmp_path):
        return _Run(tmp_path / "out")

    def test_other_processes_write_nothing(self, run, tmp_path):
        run.end([short_entry(1)], is_world_process_zero=False)
        run.save([short_entry(1)], is_world_process_zero=False)
        assert os.listdir(tmp_path) == []
        run.save([short_entry(1)])
        assert sorted(os.listdir(tmp_path / "out")) == ["curves.csv", "curves.png"]
        with Image.open(tmp_path / "out" / "curves.png") as picture:
            assert picture.format == "PNG" and picture.size[0] == 1022

    def test_rows_of_a_broken_off_run_vanish(self, run, tmp_path):
        whole = [short_entry(step) for step in range(1, 7)]
        state = TrainerState(log_history=whole[:4])
        state.save_to_json(str(tmp_path / "trainer_state.json"))
        run.save(whole[:4] + [short_entry(5, loss=99.0, lost=1.0), short_entry(6, loss=99.0)])
        assert len(run.table()) == 6 and "lost" in run.table()[0]

        resumed = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
        another = _Run(tmp_path / "out")
        another.save(resumed.log_history + [whole[4]])
        assert len(run.table()) == 5
        another.save(resumed.log_history + whole[4:])
        uninterrupted = _Run(tmp_path / "uninterrupted")
        uninterrupted.save(whole)
        assert run.csv.read_text() == uninterrupted.csv.read_text()

    def test_a_full_disk_is_warned_of_and_does_not_stop_the_run(self, run, monkeypatch, caplog):
        entries = [short_entry(step) for step in (1, 2, 3)]
        write = curves.write_atomically

        def no_room_for_the_picture(path, content, **kwargs):
            if path.suffix == ".png":
                raise OSError(28, "No space left on device")
            write(path, content, **kwargs)

        with monkeypatch.context() as full_disk, caplog.at_level(logging.WARNING):
            full_disk.setattr(curves, "write_atomically", no_room_for_the_picture)
            run.save(entries[:1])
            run.end(entries)
        assert not run.png.exists() and len(run.table()) == 3
        messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "curves" in r.name]
        assert len(messages) == 2 and all("No space left on device" in message for message in messages)
        run.end(entries)  # there is room again
        assert run.png.exists()


@pytest.mark.slow
def test_a_run_has_its_curves(make_trainer, prompts, tmp_path, drawn):
    evaluation = {"eval_strategy": "steps", "eval_steps": 2, "num_inference_steps_eval": 2}
    rewards = [redness_reward, panel_similarity_reward]
    dataset = prompts.select(range(2))
    trainer = make_trainer(reward_funcs=rewards, eval_dataset=dataset, max_steps=3, plot_curves=True, **evaluation)
    trainer.train()
    rows = read_csv(tmp_path / "out" / "curves.csv")
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    logged = {}
    for entry in trainer.state.log_history:
        logged.setdefault(entry["step"], {}).update(entry)
    names = {name for entry in logged.values() for name in entry}
    assert set(rows[0]) == names and len(names) > 25
    for row in rows:
        for name, text in row.items():
            value = logged[int(row["step"])].get(name)
            assert text == "" if value is None else float(text) == value, name
    assert rows[1]["eval_rewards/redness_reward/mean"] and not rows[0]["eval_rewards/redness_reward/mean"]

    assert (tmp_path / "out" / "curves.png").is_file()
    figure = next(figure for figure in reversed(drawn) if "optimizer step" in figure.axes[-1].get_xlabel())
    assert len(figure.axes) == 6  # two rewards, spread, clipping, deviation, time
