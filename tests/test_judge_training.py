# SPDX-License-Identifier: Apache-2.0
"""PaCo-GRPO with a judge behind HTTP: it learns, a judge that goes down stops it and loses nothing, it can be resumed."""

import subprocess
import threading
import time
from operator import attrgetter

import numpy as np
import pytest
import torch
from PIL import Image, ImageStat
from safetensors.torch import load_file

import launching
from judge_server import JudgeServer, LoopClock
from paco_trl import PaCoGRPOConfig, PaCoGRPOTrainer
from paco_trl.rewards import ConsistencyReward, redness_reward
from paco_trl.rewards.errors import RewardError
from paco_trl.utils.processes import end_training
from testing_utils import LORA, SMALL_RUN, are_equal, logs_with, square_prompts, weights_of


SETTINGS = {"num_inference_steps": 2, "sde_steps": [0], "gradient_checkpointing": False, "max_steps": 4}
# A question that is asked again is counted, so that a busy machine must not be a reason
PATIENT = {"timeout": 30.0, "time_budget": 120.0}


def redness(first: Image.Image, second: Image.Image, question: str) -> float:
    """Log-odds that are high for red images."""
    red, green, blue = np.mean([ImageStat.Stat(image.convert("RGB")).mean for image in (first, second)], axis=0)
    return (red - (green + blue) / 2) / 20


@pytest.fixture
def server():
    with JudgeServer(redness) as server:
        yield server


def consistency(server: JudgeServer, max_pairs: int = 1) -> ConsistencyReward:
    return ConsistencyReward(base_url=server.url, model="judge", max_pairs=max_pairs, **PATIENT)


@pytest.mark.slow
def test_the_images_follow_a_judge_over_http(make_trainer):
    settings = {"max_steps": 32, "num_generations": 8, "num_prompts_per_generation": 6, "epsilon": 1e-3}
    settings |= {"per_device_train_batch_size": 24, "gradient_checkpointing": False, "learning_rate": 2e-2}
    for sign in (1, -1):  # the twin: a judge that says the opposite
        with JudgeServer(lambda *asked, sign=sign: sign * redness(*asked)) as server:
            trainer = make_trainer(
                reward_funcs=[consistency(server), redness_reward], reward_weights=[1.0, 0.0], **settings
            )
            trainer.train()
        assert set(logs_with(trainer, "rewards/consistency/failure_rate")) == {0.0}
        assert len(server.requests) == 16 * 48 + 1  # one question for each image, and that of the check
        means = logs_with(trainer, "rewards/redness_reward/mean")
        assert sign * (means[-1] - means[0]) > 3 * logs_with(trainer, "rewards/redness_reward/std")[0] > 0


def test_images_are_scored_as_soon_as_they_are_generated(make_trainer, server):
    trainer = make_trainer(reward_funcs=consistency(server), **{**SETTINGS, "max_steps": 1})
    seen_while_drawing, draw = [], trainer.policy.recording_pipeline.generate

    def watch(*args, **kwargs):
        until = time.monotonic() + 10
        # Each micro-batch but the first finds the four before it scored, or waits for them
        while len(server.requests) - 1 < 4 * len(seen_while_drawing) and time.monotonic() < until:
            time.sleep(0.005)
        seen_while_drawing.append(len(server.requests) - 1)
        return draw(*args, **kwargs)

    trainer.policy.recording_pipeline.generate = watch
    trainer.train()
    assert seen_while_drawing == [0, 4, 8, 12]
    assert len(server.requests) - 1 == 16


class TestOutage:
    """The judge goes down in the second of two rounds."""

    @pytest.fixture
    def fail_after(self, server, caplog):
        caplog.set_level("INFO", "openai")
        with LoopClock() as clock:

            def fail_after(count: int):
                """From that question on nobody listens any more, until the budget is over."""

                def fault(number: int):
                    if number == count:
                        threading.Thread(target=server.stop).start()
                        clock.forward_when(lambda: "Retrying" in caplog.text)
                    return "hang" if number >= count else None

                caplog.clear()
                server.fault = fault

            yield fail_after

    def test_a_checkpoint_that_is_there_is_not_written_again(self, make_trainer, server, fail_after, tmp_path):
        fail_after(1 + 16 + 7)
        settings = {**SETTINGS, "save_strategy": "steps", "save_steps": 2}
        trainer = make_trainer(reward_funcs=consistency(server), **settings)
        writes, save = [], trainer._save_checkpoint
        trainer._save_checkpoint = lambda *args: writes.append(trainer.state.global_step) or save(*args)
        with pytest.raises(RewardError, match="The reward 'consistency' raised JudgeUnavailableError") as error:
            trainer.train()
        checkpoint = tmp_path / "out" / "checkpoint-2"
        resume = f"The 2 steps before it are in '{checkpoint}': resume with `resume_from_checkpoint=True`."
        assert server.url in str(error.value) and resume in str(error.value)
        assert writes == [2] and trainer.state.global_step == 2

    def test_before_the_first_step_there_is_nothing_to_go_on_from(self, make_trainer, server, fail_after, tmp_path):
        fail_after(1 + 6)
        with pytest.raises(RewardError, match="Nothing was trained yet: restart the run"):
            make_trainer(reward_funcs=consistency(server), **SETTINGS).train()
        assert not list((tmp_path / "out").glob("checkpoint-*"))

    @pytest.mark.slow
    def test_an_outage_in_an_evaluation_keeps_the_steps_before_it(
        self, make_trainer, server, fail_after, prompts, tmp_path
    ):
        settings = {**SETTINGS, "eval_dataset": prompts.select(range(2)), "eval_strategy": "steps", "eval_steps": 2}
        settings["num_inference_steps_eval"] = 2
        fail_after(1 + 16 + 1)
        with pytest.raises(RewardError, match="The 2 steps before it are in"):
            make_trainer(reward_funcs=consistency(server), **settings).train()
        weights = load_file(tmp_path / "out" / "checkpoint-2" / "policy.safetensors")
        assert any(value.abs().max() > 0 for name, value in weights.items() if "lora_B" in name)

        # The evaluation is made when the run goes on, and nothing else is another for it
        server.fault = lambda number: None
        server.start()
        resumed = make_trainer(reward_funcs=consistency(server), **settings)
        resumed.train(resume_from_checkpoint=True)
        whole = {**settings, "output_dir": str(tmp_path / "whole")}
        undisturbed = make_trainer(reward_funcs=consistency(server), **whole)
        undisturbed.train()
        assert logs_with(undisturbed, "eval_reward") == logs_with(resumed, "eval_reward")
        assert len(logs_with(resumed, "eval_reward")) == 2
        assert are_equal(weights_of(resumed), weights_of(undisturbed))

    def test_questions_without_an_answer_are_left_out_and_counted(self, make_trainer, server):
        server.fault = lambda number: "neither" if number == 20 else None
        trainer = make_trainer(reward_funcs=consistency(server, max_pairs=2), max_reward_failures=0.1, **SETTINGS)
        trainer.train()
        assert logs_with(trainer, "rewards/consistency/failure_rate") == [1 / 16, 1 / 16, 0.0, 0.0]
        assert logs_with(trainer, "images_excluded") == [1, 1, 0, 0]
        for name in ("consistency/unanswered", "consistency/unanswered/undecided"):
            assert logs_with(trainer, name) == pytest.approx([1 / 32, 1 / 32, 0, 0])
        assert set(logs_with(trainer, "consistency/unanswered/refused")) == {0.0}


@pytest.mark.parametrize(
    ("layer", "value", "message"),
    [("transformer.proj_out", "nan", "latents"), ("vae.decoder.conv_out", "inf", "decoded")],
)
def test_images_that_are_no_numbers(make_trainer, layer, value, message):
    trainer = make_trainer()
    with torch.no_grad():
        attrgetter(layer)(trainer.pipeline).bias.fill_(float(value))
    with pytest.raises(RuntimeError, match=message):
        trainer.train()


def train(model: str, url: str, output_dir: str, resume: str) -> None:
    """In a process of its own."""
    settings = {**SMALL_RUN, "max_steps": 4, "per_device_train_batch_size": 2, "gradient_checkpointing": False}
    reward = ConsistencyReward(base_url=url, model="judge", timeout=1.0, time_budget=3.0)
    args = PaCoGRPOConfig(output_dir, ddp_backend="gloo", **settings)
    trainer = PaCoGRPOTrainer(model, reward, args, square_prompts(), peft_config=LORA)
    trainer.train(resume_from_checkpoint=resume == "resume")
    end_training(trainer.accelerator)


@pytest.mark.slow
def test_two_processes_both_stop_and_both_go_on(tiny_flux, server, tmp_path):
    def run(*options: str) -> subprocess.CompletedProcess:
        code = "import sys; from test_judge_training import train; train(*sys.argv[1:])"
        command = ["-c", code, tiny_flux, server.url, tmp_path / "out", *options]
        return launching.run(command, config=launching.CPU_DDP)

    # One process is refused in the second round, by one question that gets no answer; the other is served
    refused = []

    def fault(number: int):
        if number >= 2 + 96 + 20 and not refused:
            refused.append(number)
        return "500" if refused else None

    server.fault = fault
    stopped = run("new")
    assert stopped.returncode != 0
    assert refused
    assert "JudgeUnavailableError" in stopped.stderr and server.url in stopped.stderr
    assert "The 2 steps before it are in" in stopped.stderr
    assert (tmp_path / "out" / "checkpoint-2" / "trainer_state.json").is_file()

    refused.append(None)
    server.fault = lambda number: None
    resumed = run("resume")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
