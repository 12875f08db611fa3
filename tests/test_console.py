# SPDX-License-Identifier: Apache-2.0
"""What a training prints, in terminals of 80 and 120 columns and in files."""

import re
from types import SimpleNamespace

import pytest
import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from paco_trl.rewards import panel_similarity_reward, redness_reward
from paco_trl.trainer.console import ConsoleCallback


ENDS = ["|ratio-1|", "s/step", "mem GiB", "left"]


@pytest.fixture
def lines(capsys, monkeypatch):
    """Gives the lines that a console of so many columns prints of logs, a step each."""

    def run(logs: list[dict], columns: int = 120, max_steps: int = 2400) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        callback, args = ConsoleCallback(), SimpleNamespace(device=torch.device("cpu"), disable_tqdm=False)
        state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=max_steps)
        callback.on_train_begin(args, state, None)
        for entry in logs:
            state.global_step += 1
            callback.on_log(args, state, None, logs=entry)
        shown = capsys.readouterr()
        assert not shown.err  # no bar where there is no terminal
        return shown.out.splitlines()

    return run


def values_of(*names: str, value: float = -0.0123456) -> dict[str, float]:
    rewards = {f"rewards/{name}/{kind}": value for name in names for kind in ("mean", "std")}
    return {
        "loss": 0.1,
        **rewards,
        "ratio_deviation/step_1": 1e-6,
        "ratio_deviation/step_2": 1.2e-5,
        "clip_ratio/low_mean": 0.5,
    }


PAPER = ["consistency", "clip_t"]
MANY = [f"the_judge_of_my_{kind}s_reward" for kind in ("fox", "hat", "house", "sea", "hill", "bird")]


@pytest.mark.parametrize(
    "columns, names, left_out",
    [
        (80, PAPER, []), (80, [*PAPER, "no_duplicates"], []), (80, MANY[:4], ["mem GiB"]), (80, MANY, ENDS[:3]),
        (120, PAPER, []), (120, MANY, []),
    ],
)  # fmt: skip
def test_the_columns_that_fit(lines, columns, names, left_out):
    head, *rows = lines([values_of(*names)] * 2, columns)
    assert all(len(line) == len(head) <= columns for line in rows)
    labels, row = re.split(r" {2,}", head.strip()), rows[1].split()
    assert len(labels) == len(row) == len({*labels})  # names that are cut stay different
    assert labels[0] == "step" and labels[1 + len(names) :] == [end for end in ENDS if end not in left_out]
    assert row[:2] == ["2/2400", "-0.01235"] and ("|ratio-1|" in left_out or row[1 + len(names)] == "1.2e-05")


def test_rewards_of_nearly_one_name(lines):
    logs = {**values_of("clip", value=0.3), **values_of("clip_reward", value=0.9)}
    head, row = lines([logs])
    assert head.split()[1:3] == ["clip", "clip_reward"] and row.split()[1:3] == ["0.3", "0.9"]
    evaluation = {f"eval_{name}": value for name, value in logs.items() if name.endswith("mean")}
    assert lines([evaluation])[0].endswith("eval_clip 0.3, eval_clip_reward 0.9")


def test_a_column_that_is_new_or_gone(lines):
    first, second = values_of("clip_t"), values_of("clip_t", "ocr")
    shown = lines([first, first, second, {"loss": 0.1, "rewards/clip_t/mean": 1.0}, *[second] * 30])
    heads = [number for number, line in enumerate(shown) if "step" in line]
    assert heads == [0, 3, 27] and "ocr" not in shown[0] and "ocr" in shown[3]
    assert shown[5].split()[1:4] == ["1", "-", "-"]  # a step that trains no image has no ratio


def test_a_judge_and_what_else_is_logged(lines):
    evaluation = {
        "eval_loss": 0.5,
        "eval_decision_loss": 0.4,
        "eval_decision_accuracy": 1.0,
        "eval_auroc": 0.75,
        "eval_p_yes/consistent": 0.5,
        "epoch": 1.0,
    }
    of_images = {"eval_foxes_rewards/a_reward/mean": 0.5, "eval_foxes_rewards/a_reward/baseline": 0.25, "epoch": 1.0}
    shown = lines([{"loss": 0.1, "decision_accuracy": 0.875}, evaluation, of_images, {"mine": 3, "epoch": 1.0}])
    assert shown[0].split()[:4] == ["step", "loss", "accuracy", "s/step"]
    assert shown[1].split()[:3] == ["1/2400", "0.1", "0.875"]
    assert shown[2:] == [
        "Step 2: eval_loss 0.5, eval_accuracy 1, eval_auroc 0.75", "Step 3: eval_foxes_a 0.5 (untrained 0.25)", "Step 4: mine 3",
    ]  # fmt: skip


def test_a_training_and_the_rest_of_it(make_small, capsys, prompts, tmp_path):
    class Counter(TrainerCallback):
        logged = 0

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.logged += "loss" in logs
            if self.logged == 1:
                assert logs["rewards/redness_reward/std"] > 0  # callbacks and trackers get all

    counter = Counter()
    evaluation = {"eval_dataset": prompts.select(range(1)), "eval_strategy": "steps", "eval_steps": 2}
    settings = {
        "reward_funcs": [redness_reward, panel_similarity_reward], "optimizer_steps_per_generation": 1,
        "num_inference_steps_eval": 1, "save_strategy": "steps", "save_steps": 1, "disable_tqdm": False, **evaluation,
    }  # fmt: skip
    make_small(**settings, max_steps=2, callbacks=[counter]).train()
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert counter.logged == 2 and "generating" not in shown.err and "Resuming" not in shown.out
    head = next(number for number, line in enumerate(lines) if line.startswith("step"))
    assert lines[head].split() == ["step", "redness", "panel_similarity", *ENDS[:2], "mem", "GiB", "left"]
    assert lines[head + 1].startswith(" 1/2")
    evaluated, end = lines[head + 3 :]
    assert re.fullmatch(
        r"Step 2: eval_redness \S+ \(untrained \S+\), eval_panel_similarity \S+ \(untrained \S+\)", evaluated
    )
    assert re.fullmatch(r"Done: step 2 of 2 after \d\d:\d\d\.", end)
    # The last step has a line in any case
    make_small(**settings, max_steps=3, logging_steps=9, output_dir=str(tmp_path / "rare")).train()
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match(r" *\d+/3 ", line)]
    assert len(rows) == 1 and rows[0].startswith(" 3/3")
    make_small(**settings, max_steps=4, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2")).train()
    assert "Resuming from checkpoint-2 at step 3 of 4.\n" in capsys.readouterr().out
    # A finished run, or one that is past its end
    for last in (2, 1):
        make_small(**settings, max_steps=last, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2")).train()
        said = capsys.readouterr().out
        assert f"Resuming from checkpoint-2 with none of {last} step(s) left.\n" in said
        assert "Done: nothing was left to train.\n" in said and "Done: step" not in said


@pytest.mark.parametrize("is_hidden", [False, True])
def test_the_callback_of_another_stays(make_small, is_hidden):
    mine = ProgressCallback()
    trainer = make_small(disable_tqdm=is_hidden, callbacks=[mine])
    shown = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ProgressCallback)]
    assert [type(callback) for callback in shown] == [ProgressCallback, ConsoleCallback]
    assert type(trainer.pop_callback(PrinterCallback)) is ConsoleCallback  # Trainer's name of what prints the logs
