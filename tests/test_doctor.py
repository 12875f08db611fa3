# SPDX-License-Identifier: Apache-2.0
"""`paco-trl doctor` on the tiny FLUX: a healthy run has only "ok", and each planted fault is found in its row."""

import io
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset
from huggingface_hub import is_offline_mode
from peft import LoraConfig
from PIL import Image
from rich.console import Console
from torch import nn

import launching
import paco_trl.rewards
from hub_server import HubServer
from paco_trl import PaCoGRPOConfig
from paco_trl.checkpointing.weights import save_adapter
from paco_trl.commands import doctor, script_arguments
from paco_trl.commands.main import main
from paco_trl.commands.memory_plans import image_plan
from paco_trl.commands.sample_generator import SampleGenerator
from paco_trl.data import format_image_set_prompt
from paco_trl.planning import MemoryPlan, plan_memory
from paco_trl.rewards.named_rewards import NAMED_REWARDS, NamedReward
from paco_trl.rewards.paco_reward import read_judge_config
from paco_trl.rollout import FlowMatchSDEScheduler, RecordingPipeline
from paco_trl.utils.errors import raise_errors
from testing_utils import LORA, SMALL_RUN, prompts_of_two_sizes
from tiny_models import build_tiny_flux2_klein


ROOT = Path(__file__).parent.parent

SETTINGS = {
    "rewards": ["redness", "panel_similarity"], "num_generations": 4, "num_prompts_per_generation": 4,
    "per_device_train_batch_size": 2, "num_inference_steps": 4, "sde_steps": [1, 2], "max_steps": 6,
    "report_to": "none", "use_cpu": True, "bf16": False, "lora_r": 4, "lora_alpha": 8, "disable_tqdm": True,
}  # fmt: skip
HEALTHY = dict.fromkeys([
    "versions", "configuration", "output directory", "hub", "data", "rewards", "model and adapter", "prompt lengths", "memory",
    "noise-free image", "ratio", "reward redness_reward", "reward panel_similarity_reward",
], "ok")  # fmt: skip
HEALTHY["prompt lengths"] = "warning"  # the tiny T5 reads 32 tokens


_REWARD = "def mine(prompts, completions, **kwargs):\n    return [1.0] * len(completions)\n"
_EVALUATED = {"eval_split": "train", "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}


def plant_reward(monkeypatch, name, reward):
    """Give `--rewards` another name, as if this package had the reward."""
    monkeypatch.setitem(NAMED_REWARDS, name, NamedReward(f"planted_{name}", "planted"))
    monkeypatch.setattr(paco_trl.rewards, f"planted_{name}", reward, raising=False)


@pytest.fixture(scope="module")
def prompt_rows() -> list[dict]:
    return prompts_of_two_sizes()


@pytest.fixture
def make_arguments(tiny_flux, prompt_rows, tmp_path):
    """Makes the command's arguments: a YAML file of the settings, with changes."""

    def make(rows: list[dict] | None = None, **changes) -> list[str]:
        lines = [json.dumps(row) + "\n" for row in (prompt_rows if rows is None else rows)]
        (tmp_path / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        settings = {"model_name_or_path": str(tiny_flux), "dataset_name": str(tmp_path / "prompts.jsonl")}
        settings |= {"output_dir": str(tmp_path / "out"), **SETTINGS, **changes}
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
        return ["--config", str(tmp_path / "settings.yaml")]

    return make


@pytest.fixture
def examine(make_arguments, monkeypatch):
    """
    Runs the checks up to the last one named, or all; the plan of the memory, which takes longer than the others
    together, only where it is that one or `plans`. Other keyword arguments are changes of the settings. Gives the rows
    by name.
    """

    def run(last: str = "reward values", words=(), plans=False, **changes) -> dict[str, doctor.Row]:
        with monkeypatch.context() as patch:
            names = list(doctor.CHECKS)
            names = [n for n in names[: names.index(last) + 1] if n != "memory" or plans or last == "memory"]
            patch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name] for name in names})
            return {
                row.check: row
                for row in doctor.examine("grpo", [*make_arguments(**changes), *words], Console(quiet=True))
            }

    return run


@pytest.fixture(scope="module")
def tiny_plan(tiny_flux, prompts, tmp_path_factory) -> MemoryPlan:
    args = PaCoGRPOConfig(str(tmp_path_factory.mktemp("plan")), **SMALL_RUN)
    return plan_memory(str(tiny_flux), args, prompts, LORA)


def healthy(last: str = "reward panel_similarity_reward") -> dict[str, str]:
    """The verdicts of a healthy run up to a row, without the plan where that is not the last."""
    names = list(HEALTHY)
    return {name: HEALTHY[name] for name in names[: names.index(last) + 1] if name != "memory" or last == "memory"}


def verdicts(rows: dict[str, doctor.Row]) -> dict[str, str]:
    return {name: row.verdict for name, row in rows.items()}


@pytest.mark.slow
def test_the_command(make_arguments, tmp_path):
    arguments = make_arguments()
    command = ["-m", "paco_trl.commands.main", "doctor", "grpo", *arguments]
    done = launching.run(command, cwd=ROOT, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    for name in HEALTHY:
        assert re.search(rf"{re.escape(name)}: {HEALTHY[name]}", done.stdout), name
    assert "12 ok, 1 warning" in done.stdout
    assert not (tmp_path / "out").exists()


def test_exit_code_and_table(make_arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with monkeypatch.context() as patch:
        names = ("versions", "configuration", "data")  # `test_the_command` makes all
        patch.setattr(doctor, "CHECKS", {name: doctor.CHECKS[name] for name in names})
        assert main(["doctor", "grpo", *make_arguments(num_generations=4)]) == 0
    capsys.readouterr()
    assert main(["doctor", "grpo", *make_arguments(num_generations=1)]) == 1  # at once
    shown = capsys.readouterr()
    assert "must be at least 2" in shown.err and shown.out == ""
    assert main(["doctor", "grpo", *make_arguments(attention_backend="nothing")]) == 1
    shown = capsys.readouterr().out
    assert "'nothing'" in shown
    assert "needs: configuration" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_every_row_is_ok_has_its_numbers_and_leaves_nothing_behind(examine, tmp_path):
    rows = examine(embeddings_dir=str(tmp_path / "embeddings"), plans=True)
    assert verdicts(rows) == HEALTHY
    assert not (tmp_path / "embeddings").exists() and not (tmp_path / "out").exists()
    for name, *tokens in (
        ("versions", "torch 2"),
        ("configuration", "4 prompts x 4 generations = 16 images a round", "effective batch 8 images"),
        ("data", "15 prompts", "2 x 2 (12), 1 x 2 (3)", "6 optimizer steps, 3 round(s)"),
        ("model and adapter", "Trained at 32 x 32 (12), 16 x 32 (3) (multiples of 4 pixels)"),
        ("noise-free image", "differ by 0 ("),
        ("ratio", "max |ratio - 1| before the first update 0 (step 1: 0, step 2: 0)"),
    ):
        assert all(token in rows[name].finding for token in tokens), rows[name].finding


@pytest.mark.parametrize("trainer, option", [("nft", "--nft_beta"), ("reward", "--first_token_weight")])
def test_the_options_of_a_trainer(trainer, option, capsys):
    assert main(["doctor", trainer, "--help"]) == 0
    assert option in capsys.readouterr().out
    assert main(["doctor", "grpo", "--help"]) == 0
    assert option not in capsys.readouterr().out


class TestFaults:
    """Each is found in its own row, and the others stay as they are."""

    def test_a_scheduler_that_is_not_its_parent_without_noise(self, examine, monkeypatch):
        step = FlowMatchSDEScheduler.step

        def changed(self, model_output, timestep, sample, **kwargs):
            output = step(self, model_output, timestep, sample, **kwargs)
            if self.sde is not None and self.sde.noise_level == 0:
                return (output[0] + 1e-6, *output[1:])  # no picture would show it
            return output

        monkeypatch.setattr(FlowMatchSDEScheduler, "step", changed)
        last = "noise-free image"
        assert verdicts(examine(last)) == healthy(last) | {last: "failed"}

    def test_a_clip_range_that_the_family_does_not_hold(self, examine, tmp_path):
        klein = str(build_tiny_flux2_klein(tmp_path / "klein"))
        settings = {"model_name_or_path": klein, "guidance_scale": 2.0}
        row = examine("model and adapter", **settings)["model and adapter"]
        assert row.verdict == "warning", row
        assert "The clip range is 0.0001; this model was seen to collapse above 1e-05" in row.finding
        assert examine("model and adapter", **settings, epsilon=1e-5)["model and adapter"].verdict == "ok"

    def test_a_replay_that_differs(self, examine, monkeypatch):
        norm = nn.LayerNorm.forward

        def noisy(self, hidden_states):
            output = norm(self, hidden_states)
            return output * 1.01 if torch.is_grad_enabled() else output

        monkeypatch.setattr(nn.LayerNorm, "forward", noisy)
        rows = examine("ratio")
        assert verdicts(rows) == healthy("ratio") | {"ratio": "failed"}
        assert "dropout" in rows["ratio"].advice

    def test_a_rollout_without_the_adapter(self, examine, monkeypatch):
        """A new adapter is zero, so that leaving it out would change nothing."""
        generate = RecordingPipeline.generate

        def without_adapter(self, *args, **kwargs):
            with self.model.disable_adapter():
                return generate(self, *args, **kwargs)

        monkeypatch.setattr(RecordingPipeline, "generate", without_adapter)
        assert examine("ratio")["ratio"].verdict == "failed"

    def test_rewards(self, examine, monkeypatch):
        async def asynchronous(prompts, completions, **kwargs):
            return [float(index) for index in range(len(completions))]

        planted = {
            "none": (lambda images: [None] * len(images), "failed", "nan, nan."),
            "constant": (lambda images: [1.0] * len(images), "warning", "1, 1."),
            "one_none": (lambda images: [None, *range(1, len(images))], "warning", "nan, 1."),
            "good": (lambda images: list(range(len(images))), "ok", "0, 1."),
            "asynchronous": (asynchronous, "ok", "0, 1."),
            "text": (lambda images: ["good"] * len(images), "failed", "'text' returned 'good'"),
        }

        def load(name):
            values, _, _ = planted[name]
            if values is asynchronous:
                return values

            def reward(prompts, completions, panel_images, theme, **kwargs):
                return values(completions)

            reward.__name__ = name
            return reward

        for name in planted:
            plant_reward(monkeypatch, name, load(name))
        names = [name for name in planted if name != "text"]
        rows = examine(rewards=[*names, "panel_similarity"])
        expected = healthy() | {f"reward {name}": planted[name][1] for name in names}
        del expected["reward redness_reward"]
        assert verdicts(rows) == expected
        for name in names:
            assert planted[name][2] in rows[f"reward {name}"].finding
            assert bool(rows[f"reward {name}"].advice) == (planted[name][1] != "ok")
        # An error stops a run, and so is the finding of all
        row = examine(rewards=["text", "redness"])["reward values"]
        assert row.verdict == "failed" and planted["text"][2] in row.finding

    def test_data_that_cannot_be_used(self, examine, prompt_rows):
        assert examine("data", rows=prompt_rows[:4])["data"].verdict == "ok"
        rows = examine("memory", rows=[{"caption": "A hat."}])
        assert rows["data"].verdict == "failed" and "column `prompt`" in rows["data"].finding
        assert rows["rewards"].verdict == "ok"
        assert rows["model and adapter"].finding == rows["memory"].finding == "needs: data"

    def test_too_few_prompts_do_not_end_the_plan(self, examine, prompt_rows):
        rows = examine("memory", rows=prompt_rows[:3])
        found = {"number of prompts": "failed", "model and adapter": "skipped"}
        assert verdicts(rows) == healthy("memory") | found
        assert (
            "`num_prompts_per_generation` to 3, or" in rows["number of prompts"].finding
            and "3 prompts" in rows["data"].finding
        )
        assert rows["model and adapter"].finding == "needs: number of prompts"

    def test_a_model_that_cannot_be_loaded(self, examine, monkeypatch):
        def needy(prompts, completions, masks, **kwargs):
            return masks

        rows = examine("memory", model_name_or_path="makers/base")
        found = {
            "configuration": "warning",
            "model and adapter": "failed",
            "prompt lengths": "failed",
            "memory": "failed",
        }
        assert verdicts(rows) == healthy("memory") | found
        assert all("the model makers/base" in rows[name].finding + rows[name].advice for name in found)
        plant_reward(monkeypatch, "needy", needy)
        row = examine("model and adapter", model_name_or_path="makers/base", rewards=["needy"])["model and adapter"]
        assert row.verdict == "failed" and "masks" in row.finding

    @pytest.mark.parametrize("is_asked", [False, True])
    def test_a_bug_keeps_its_traceback(self, examine, monkeypatch, capsys, is_asked):
        monkeypatch.setenv("PACO_TRL_TRACEBACK", str(int(is_asked)))
        assert examine("configuration", num_generations=1)["configuration"].verdict == "failed"
        assert ("Traceback" in capsys.readouterr().err) == is_asked
        monkeypatch.setattr(doctor, "get_version", lambda name: {}[name])
        assert examine("versions")["versions"].finding.startswith("KeyError: ")
        assert "get_version" in capsys.readouterr().err

    def test_without_a_network_the_hub_is_asked_once(self, make_arguments, tmp_path):
        settings = {"rewards": ["clip_t"], "clip_model": "someone/clip", "model_name_or_path": "someone/base"}
        arguments = [*make_arguments(**settings), "--device_memory", "24GiB"]
        hub = HubServer({})
        with hub.connected(tmp_path / "cache") as log:
            for is_there in (True, False):
                rows = {row.check: row for row in doctor.examine("grpo", arguments, Console(quiet=True))}
                assert ("cannot be reached" not in rows["versions"].finding) == is_there
                assert rows["data"].verdict == "ok" and rows["memory"].verdict == "failed"
                assert is_there or "HF_HUB_OFFLINE` is set" not in rows["memory"].finding
                assert not is_offline_mode()  # what the doctor found is not for what comes after it
                asked, _ = len(hub.requests), hub.stop() if is_there else None
        assert asked > 1 and "Retrying" not in log.getvalue()

    def test_a_configuration_that_does_not_divide(self, examine):
        rows = examine(generation_batch_size=18)
        assert rows["versions"].verdict == "ok"
        assert rows["configuration"].verdict == "failed"
        assert "`--generation_batch_size` = 18" in rows["configuration"].finding
        assert {row.verdict for name, row in rows.items() if name not in ("versions", "configuration")} == {"skipped"}


def test_all_weights_are_trained(examine):
    settings = {"use_peft": False, "lora_r": None, "lora_alpha": None, "learning_rate": 1e-5}
    rows = examine(**settings, bf16=True, beta=0.01, ema_decay=0.9, plans=True)
    assert verdicts(rows) == HEALTHY
    number = re.search(r"in torch.float32: (\S+) parameters trained", rows["model and adapter"].finding)[1]
    assert int(number.replace(",", "")) > 10_000
    shown = "".join(rows["memory"].table.columns[4]._cells)
    assert all(part in shown for part in ("trained weights", "EMA weights", "reference"))


def test_an_adapter_is_continued(make_trainer, examine, tmp_path):
    targets = r".*\.attn\.to_(q|v)"
    trainer = make_trainer(peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    folder = tmp_path / "adapter"
    # Not the identity, as a trained one is not
    trained = {name: torch.full_like(p, 0.02) for name, p in trainer.model.named_parameters() if p.requires_grad}
    save_adapter(trainer.model, trainer.pipeline, trained, folder)
    rows = examine(adapter=str(folder))
    assert verdicts(rows) == healthy()
    assert f"continued from '{folder}'" in rows["model and adapter"].finding
    assert "differ by 0 (" in rows["noise-free image"].finding


def test_rewards_of_the_evaluation(examine, monkeypatch):
    def judge(prompts, completions, **kwargs):
        return list(range(len(completions)))

    def unable(prompts, completions, **kwargs):
        return [None] * len(completions)

    planted, load, loaded = {"judge": judge, "unable": unable}, script_arguments.load_reward, []

    def load_counted(name, script_args, judge):
        loaded.append(name)
        return planted[name] if name in planted else load(name, script_args, judge)

    monkeypatch.setattr(script_arguments, "load_reward", load_counted)
    for name, reward in planted.items():
        plant_reward(monkeypatch, name, reward)
    rows = examine(eval_split="train", eval_on_start=True, eval_rewards=["redness", "judge", "unable"])
    expected = {"evaluation reward judge": "ok", "evaluation reward unable": "failed", "model and adapter": "warning"}
    assert verdicts(rows) == healthy() | expected and "also trained on" in rows["model and adapter"].advice
    assert "Evaluation: redness_reward, judge, unable." in rows["rewards"].finding
    assert loaded == ["redness", "panel_similarity", "judge", "unable"]


def test_an_evaluation_without_a_split(examine):
    row = examine("data", eval_on_start=True)["data"]  # "model and adapter" may be skipped
    assert row.verdict == "failed" and "`eval_dataset`" in row.finding


def test_the_output_directory(examine, tmp_path):
    """As the run, which writes over no checkpoint and no file of the user's."""

    def find(resume_from_checkpoint=None, **changes) -> doctor.Row:
        changes["resume_from_checkpoint"] = resume_from_checkpoint
        return examine("output directory", **changes)["output directory"]

    def add(step: int) -> Path:
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"run": {}, "files": {}}))
        return folder

    row = find(True)
    assert row.verdict == "failed" and f"'{tmp_path / 'out'}' has no complete checkpoint" in row.finding
    latest = add(10)
    row = find(True)
    assert (row.verdict, row.advice) == ("ok", "") and str(latest) in row.finding
    row = find()
    assert row.verdict == "failed" and "`--overwrite_output_dir True`" in row.finding
    row = find(overwrite_output_dir=True)
    assert row.verdict == "warning" and "deletes" in row.advice and latest.exists()
    cut_short = add(11)
    (cut_short / "run.json").write_text("{")
    row = find(True)
    assert row.verdict == "warning" and str(latest) in row.finding and str(cut_short) in row.advice
    assert find(str(cut_short)).verdict == "failed"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("My project.")
    row = find(output_dir=str(tmp_path / "mine"))
    assert row.verdict == "failed" and "README.md" in row.finding
    assert find(output_dir=str(tmp_path / "new" / "deep")).verdict == "ok" and not (tmp_path / "new").exists()


class TestMemory:
    def test_the_row_names_an_optimizer_that_is_not_known(self, tiny_plan, monkeypatch):
        for optim, is_named in (("lomo", True), ("adamw_torch_fused", False), ("adafactor", False)):
            monkeypatch.setattr(tiny_plan.run.args, "optim", optim)
            assert (f"`{optim}` is counted as AdamW" in doctor.memory_row(tiny_plan, None).finding) == is_named

    @pytest.mark.parametrize("total, verdict", [(None, "ok"), (1.2, "ok"), (1.05, "warning"), (0.95, "failed")])
    def test_verdict(self, tiny_plan, total, verdict, monkeypatch):
        small = [replace(phase, device={"all": tiny_plan.peak}) for phase in tiny_plan.commands]
        monkeypatch.setitem(vars(tiny_plan), "commands", small)
        row = doctor.memory_row(tiny_plan, None if total is None else int(total * tiny_plan.peak))
        assert row.verdict == verdict
        assert ("`--vae_tiling`" in row.advice) == (verdict != "ok")
        assert ("The largest micro-batch that fits: " in row.finding) == (total == 1.2)
        assert row.table.row_count == 6 + 4

    def test_checkpointing_that_nothing_needs(self, tiny_plan):
        plan = replace(tiny_plan, gradient_checkpointing=True, batch_size=64)
        without = replace(plan, gradient_checkpointing=False)
        assert without.peak > 1.2 * plan.peak
        for planned, total, is_told in (
            (plan, without.peak, True),
            (plan, plan.peak, False),
            (without, plan.peak, False),
        ):
            finding = doctor.memory_row(planned, int(1.12 * total)).finding
            assert ("`--gradient_checkpointing False` saves" in finding) == is_told

    def test_only_settings_that_can_save_memory_are_named(self, tiny_plan, tiny_flux, tiny_qwen, prompts):
        advice = lambda plan: doctor.memory_row(plan, 1).advice  # noqa: E731
        names = (
            "vae_tiling",
            "ema_offload",
            "per_device_train_batch_size",
            "quantization int8",
            "accelerate_config zero3",
        )
        savings = advice(tiny_plan)
        assert all(f"--{name}" in savings for name in names) and "rewards" not in savings and "judge" not in savings
        small = replace(tiny_plan, vae_tiling=True, ema_offload=True, batch_size=1, quantization="nf4")
        assert advice(small).startswith("What saves memory: `--offload_embeddings`, smaller images")
        assert not any(name in advice(small) for name in names)
        judged = plan_memory(str(tiny_flux), tiny_plan.run.args, prompts, LORA, [str(tiny_qwen)])
        assert all(name in advice(judged) for name in ("--offload_rewards", "--judge_url"))

    def test_a_command_that_needs_more_than_training_is_named(self, tiny_plan, monkeypatch):
        *small, last = tiny_plan.commands
        small = [replace(phase, device={"all": tiny_plan.peak}) for phase in small]
        monkeypatch.setitem(vars(tiny_plan), "commands", [*small, replace(last, device={"all": 2 * tiny_plan.peak})])
        row = doctor.memory_row(tiny_plan, int(1.2 * tiny_plan.peak))
        assert row.verdict == "ok" and "`paco-trl space` takes more" in row.finding and not row.advice

    @pytest.mark.parametrize("size", ["24", "24G", "24g", "24 GiB", "24gib", "24576MiB", "24576M"])
    def test_sizes_of_a_card(self, size):
        assert doctor.PlanArguments(size).device_bytes(None) == 24 * 2**30
        assert doctor.PlanArguments("24GB").device_bytes(None) == 24 * 10**9
        for wrong in ("", "large", "24 cards", "-1"):
            with pytest.raises(ValueError, match="--device_memory"):
                raise_errors(doctor.PlanArguments(wrong).errors())

    @pytest.mark.parametrize(("processes", "fits"), [("1", True), ("2", False)])
    def test_the_host_is_compared_too(self, tiny_plan, monkeypatch, processes, fits):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        row = doctor.memory_row(tiny_plan, 2**40, int(1.5 * tiny_plan.host_peak))
        assert row.verdict == ("ok" if fits else "warning") and ("Host memory" in row.advice) is not fits
        assert f"for each of {processes} process(es)" in row.finding and "are mapped from files" in row.finding

    @pytest.mark.slow
    def test_another_card_is_planned_without_weights(self, make_arguments, tiny_flux, tmp_path):
        configs = shutil.copytree(tiny_flux, tmp_path / "configs", ignore=shutil.ignore_patterns("*.safetensors"))
        settings = {"model_name_or_path": str(configs), "rewards": ["consistency"], "judge_url": "http://x/v1"}
        arguments = [*make_arguments(**settings), "--device_memory", "24GiB"]
        rows = {row.check: row for row in doctor.examine("grpo", arguments, Console(quiet=True))}
        assert rows["memory"].verdict == "ok" and "The device has 24.0 GiB" in rows["memory"].finding
        assert rows["rewards"].verdict == rows["model and adapter"].verdict == "skipped"
        assert rows["rewards"].finding.startswith("Names, weights and columns fit.")
        assert "no weights are loaded" in rows["rewards"].finding
        assert rows["prompt lengths"].finding.startswith(
            "15 of 15 prompts of the dataset are longer than FluxPipeline reads"
        )

    def test_panels_that_the_model_does_not_read_are_named(self, examine):
        long = format_image_set_prompt("Hats.", 1, 2, ["A hat." + " Red." * 600, "A cap."])
        options = {
            "rows": [{"prompt": "A hat."}, {"prompt": long}],
            "rewards": ["redness"],
            "num_prompts_per_generation": 2,
        }
        row = examine("prompt lengths", words=["--device_memory", "24GiB"], **options)
        assert row["data"].verdict == "ok", row["data"]
        assert row["prompt lengths"].verdict == "warning"
        assert "1 of 2 prompts of the dataset are longer than FluxPipeline reads" in row["prompt lengths"].finding
        assert "row 1 (panels 1, 2). Shorten" in row["prompt lengths"].finding

    @pytest.mark.parametrize(
        ("text", "changes", "token"),
        [
            (_REWARD, {}, None),
            (_REWARD, {"reward_weights": [1, 2]}, "`--reward_weights`"),
            (_REWARD, {"rewards": ["clip_t"], "reward_weights": [1, 2]}, "`--reward_weights`"),
            (_REWARD, {"reward_required": [True, False]}, "`--reward_required`"),
            (_REWARD.replace("prompts", "masks"), {}, "`masks`"),
            (_REWARD.replace(", **kwargs", ""), {}, "`**kwargs`"),
            (_REWARD.replace(" * len(completions)", ""), {}, "'mine' returned 1 value(s) for 4 image(s)"),
            ("async " + _REWARD.replace("1.0", "'good'"), {}, "'mine' returned 'good' for image 0"),
            (_REWARD.replace("1.0", "1 / 0"), {}, "ZeroDivisionError: division by zero"),
            (_REWARD.replace("1.0", "1 / 0"), {"rewards": ["clip_t", "MINE"]}, "was called on images of noise."),
            ("async " + _REWARD.replace("1.0", "1 / completions[0].getextrema()[0][1]"), {}, None),
            (_REWARD + _REWARD.replace("mine", "other"), {}, "mine.py:other`"),
            (_REWARD.replace(":", "", 1), {}, "SyntaxError"),
            (
                "class Mine:\n    def __init__(self, path): pass\n    def __call__(self, **kwargs): pass\n",
                {},
                "'path'",
            ),
            (_REWARD, {"eval_rewards": ["missing.py"], **_EVALUATED}, "missing.py"),
            (_REWARD, {"metric_for_best_model": "eval_rewards/other/mean", **_EVALUATED}, "`--metric_for_best_model`"),
        ],
        ids=str,
    )
    def test_a_plan_checks_the_rewards_without_weights(self, examine, tmp_path, text, changes, token):
        """What a run would refuse: its functions are loaded, and compared with settings and data."""
        (tmp_path / "mine.py").write_text(text)
        names = [name.replace("MINE", str(tmp_path / "mine.py")) for name in changes.get("rewards", ["MINE"])]
        changes = {**changes, "rewards": names}
        rows = examine("model and adapter", words=["--device_memory", "24GiB"], **changes)
        failed = [row for row in rows.values() if row.verdict == "failed"]
        assert len(failed) == (token is not None) and all(token in row.finding for row in failed)
        assert token or rows["rewards"].verdict == "ok" and "mine (weight 1)" in rows["rewards"].finding
        assert rows["model and adapter"].verdict in ("skipped", "failed")

    def test_a_plan_says_that_nothing_is_offloaded(self, examine):
        row = examine("rewards", words=["--device_memory", "24GiB"], offload_rewards=True)["rewards"]
        assert row.verdict == "warning" and "`offload_rewards` has nothing" in row.advice

    def test_a_judge_that_is_an_image_pipeline(self, examine, tiny_flux, tmp_path, capsys):
        changes = {"rewards": ["consistency"], "judge_model": str(tiny_flux)}
        rows = examine("memory", words=["--device_memory", "24GiB"], **changes)
        words = ["--model_name_or_path", str(tiny_flux), "--dataset_name", "user/pairs", "--output_dir", str(tmp_path)]
        words += ["--use_cpu", "--bf16", "False", "--device_memory", "24GiB"]
        (of_reward,) = [row for row in doctor.examine("reward", words, Console(quiet=True)) if row.verdict == "failed"]
        for row in (rows["memory"], of_reward):
            assert row.verdict == "failed" and "is an image pipeline" in row.finding
        assert "Traceback" not in capsys.readouterr().err

    def test_a_judge_that_is_an_adapter_of_an_image_pipeline(self, tiny_flux, tmp_path):
        LoraConfig(r=4, base_model_name_or_path=str(tiny_flux)).save_pretrained(tmp_path)
        with pytest.raises(OSError, match=f"is an adapter of the image pipeline '{tiny_flux}'"):
            read_judge_config(str(tmp_path))

    @pytest.mark.parametrize("completion, verdict", [("Yes.", "ok"), ("Maybe.", "failed"), (True, "failed")])
    def test_the_pairs_of_a_judge(self, tiny_qwen, tmp_path, completion, verdict):
        for name in "ab":
            Image.new("RGB", (56, 56), "red").save(tmp_path / f"{name}.png")
        row = {"images": ["a.png", "b.png"], "prompt": "Alike?", "completion": completion}
        (tmp_path / "pairs.jsonl").write_text(json.dumps(row))
        words = ["--model_name_or_path", str(tiny_qwen), "--output_dir", str(tmp_path / "out"), "--use_cpu"]
        words += ["--dataset_name", str(tmp_path / "pairs.jsonl"), "--device_memory", "24GiB", "--bf16", "False"]
        console = Console(width=80, file=io.StringIO())
        rows = {row.check: row for row in doctor.examine("reward", words, console)}
        assert rows["pairs"].verdict == verdict and rows["memory"].verdict == "ok"
        shown = console.file.getvalue()
        assert 0 < shown.index("on the device  ") < shown.index("memory: ok")  # the end stays on the screen
        assert ("1 pair(s)" if verdict == "ok" else "ompletion") in rows["pairs"].finding
        if verdict == "ok":
            words += ["--dataset_split", "train", "--eval_split", "train"]
            rows = {row.check: row for row in doctor.examine("reward", words, Console(quiet=True))}
            assert "1 of 1 rows of `eval_dataset` are also trained on" in rows["pairs"].advice

    @pytest.mark.parametrize("is_planned", [True, False])
    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu(self, make_arguments, tiny_qwen, is_planned):
        arguments = make_arguments(rewards=["consistency"], judge_model=str(tiny_qwen), use_cpu=False, bf16=True)
        arguments += ["--device_memory=24GiB"] if is_planned else []
        rows = {row.check: row for row in doctor.examine("grpo", arguments, Console(quiet=True))}
        found = verdicts(rows)
        assert found.pop("configuration") == ("ok" if is_planned else "warning")
        assert is_planned or "use_cpu" in rows["configuration"].advice
        for name in ("rewards", "model and adapter", "noise-free image", "ratio", "reward values"):
            assert found.pop(name) == "skipped", rows[name].finding
        assert found == dict.fromkeys(("versions", "output directory", "hub", "data", "memory"), "ok") | {
            "prompt lengths": "warning"
        }

    def test_the_rewards_of_the_evaluation_are_counted(self, tiny_plan, tiny_flux, tiny_qwen, prompts):
        found = []
        for changes in (
            {"rewards": ["redness"], "eval_rewards": ["consistency"]},
            {"rewards": ["consistency"], "eval_judge_model": str(tiny_qwen)},
            {"rewards": ["redness"]},
            {"rewards": ["consistency"], "judge_url": "http://x"},
            {"rewards": ["consistency"], "judge_url": "http://x", "eval_judge_model": str(tiny_qwen)},
        ):
            options = {"model_name_or_path": str(tiny_flux), "lora_r": 4, "judge_model": str(tiny_qwen), **changes}
            plan = image_plan(script_arguments.ScriptArguments(**options), tiny_plan.run.args, prompts)
            found.append(len(plan.run.judges))
        assert found == [1, 1, 0, 0, 1]

    def test_the_rows_of_the_evaluation_are_planned(self, examine, monkeypatch):
        plans = []
        monkeypatch.setattr(doctor, "memory_row", lambda plan, *args: plans.append(plan) or doctor.Row("ok", ""))
        sizes = Dataset.from_list([{"prompt": "A fox.", "height": 96, "width": 64}])
        monkeypatch.setattr(doctor, "load_eval_prompts", lambda script_args: sizes)
        examine("memory")
        assert plans[0].run.eval_image.size == (96, 64)

    def test_a_judge_is_planned(self, tiny_qwen, tmp_path):
        arguments = ["--model_name_or_path", str(tiny_qwen), "--output_dir", str(tmp_path)]
        arguments += ["--dataset_name", "user/pairs", "--max_length", "128", "--use_cpu", "True", "--bf16", "False"]
        rows = doctor.examine("reward", [*arguments, "--device_memory", "24GiB"], Console(quiet=True))
        assert [(row.check, row.verdict) for row in rows] == [
            ("versions", "ok"), ("configuration", "ok"), ("output directory", "ok"), ("hub", "ok"), ("pairs", "skipped"),
            ("memory", "ok"),
        ]  # fmt: skip
        assert "Micro-batches of 8 at 128 tokens, the longest pair" in rows[-1].finding
        (*_, row) = doctor.examine("reward", [*arguments, "--device_memory", "1MiB"], Console(quiet=True))
        assert row.verdict == "failed" and "`--load_in_4bit`" in row.advice


@pytest.mark.slow
def test_a_short_tail_and_the_batch_of_generation_are_checked(examine):
    settings = {"sde_steps": [1], "tail_steps": 1}
    rows = examine("ratio", **settings)
    assert verdicts(rows) == healthy("ratio")
    assert "2 image(s), max |ratio - 1| before the first update 0 (step 1: 0)" in rows["ratio"].finding
    found = examine("ratio", per_device_rollout_batch_size=4, sde_steps=[1])["ratio"].finding
    assert found.startswith("4 image(s), max |ratio - 1| before the first update ")


def test_weights_are_as_before_where_the_ratio_fails(examine, monkeypatch):
    """The rewards are checked next, on images of the untrained model."""
    models = []

    def replay(self, record):
        models.append(self.policy.model)
        assert any(weight.any() for name, weight in models[0].named_parameters() if ".lora_B." in name)
        raise RuntimeError("No memory is left.")

    monkeypatch.setattr(SampleGenerator, "replay", replay)
    assert "No memory is left" in examine("ratio", sde_steps=[1])["ratio"].finding
    assert not any(weight.any() for name, weight in models[0].named_parameters() if ".lora_B." in name)


def test_sets_are_generated_as_in_a_round(examine, monkeypatch, tmp_path):
    calls, generate = [], RecordingPipeline.generate

    def seen(self, *args, sources=(), **kwargs):
        largest = max(
            weight.abs().max().item() for name, weight in self.model.named_parameters() if ".lora_B." in name
        )
        calls.append((args[-1], len(sources), largest))  # and the keys of the noise
        return generate(self, *args, sources=sources, **kwargs)

    monkeypatch.setattr(RecordingPipeline, "generate", seen)
    panels = ["It runs.", "It runs.", "It eats."]
    rows = [
        {"layout": "separate", "theme": f"Fox {n}.", "panels": panels, "height": 64, "width": 64} for n in range(4)
    ]
    klein = {"model_name_or_path": str(build_tiny_flux2_klein(tmp_path / "klein")), "guidance_scale": 2.0}
    changes = {"per_device_train_batch_size": 1, "panel_generation": "anchored", "resolution_scale": 1.0}
    shown = {}

    def reward(prompts, completions, panel_images, cols, **kwargs):
        assert list(cols) == list(map(len, panel_images)) == [3, 3]
        shown["keys"], shown["sources"], shown["weights"] = map(list, zip(*calls[-6:], strict=True))
        shown["panels"] = [panel.tobytes() for panels in panel_images for panel in panels]
        return list(range(len(completions)))

    plant_reward(monkeypatch, "own", reward)
    found = examine(rows=rows, rewards=["own"], num_prompts_per_generation=6, **klein, **changes)
    assert found["ratio"].finding.startswith("6 image(s), max |ratio - 1| before the first update 0 ")
    assert found["reward reward"].verdict == "ok"
    assert shown["sources"] == [0, 0, 1, 1, 1, 1] and len(set(shown["panels"])) == 6
    assert len({key for keys in shown["keys"] for key in keys}) == 6
    # A new adapter gets other weights for the ratio, and only for it
    assert shown["weights"] == [0] * 6 and 0 < max(largest for *_, largest in calls) < 0.1


def test_the_smallest_image_may_be_behind_a_set_of_separate_images(examine):
    # Rows and images have other numbers then
    sets = [
        {"layout": "separate", "theme": "A fox.", "panels": ["It eats.", "It runs."], "height": 96, "width": 96}
    ] * 2
    rows = [*sets, *({"prompt": f"{count} foxes.", "height": 64, "width": 64} for count in range(4))]
    assert examine("noise-free image", rows=rows)["noise-free image"].finding.startswith("32 x 32 pixels")
