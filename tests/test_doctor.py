# SPDX-License-Identifier: Apache-2.0
"""`paco-trl doctor` on the tiny FLUX: a healthy run has only "ok", and each planted fault is found in its row."""

import configparser
import importlib
import importlib.metadata
import json
import os
import re
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import init_empty_weights
from diffusers import FluxTransformer2DModel
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5EncoderModel

import launching
from paco_trl.commands import doctor, script_arguments
from paco_trl.commands.main import COMMANDS, main
from paco_trl.commands.memory import estimate_memory, latent_elements, rollout_buffer_bytes, weights_bytes
from paco_trl.data import demo_prompts_path
from paco_trl.rollout import FlowMatchSDEScheduler, FluxFamily


ROOT = Path(__file__).parent.parent
GIB = 2**30

SETTINGS = {
    "rewards": ["redness", "panel_similarity"],
    "num_generations": 4,
    "num_prompts_per_generation": 4,
    "per_device_train_batch_size": 2,
    "num_inference_steps": 4,
    "sde_steps": [1, 2],
    "max_steps": 6,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "lora_r": 4,
    "lora_alpha": 8,
    "disable_tqdm": True,
}
HEALTHY = {
    "versions": "ok",
    "configuration": "ok",
    "output directory": "ok",
    "hub": "ok",
    "data": "ok",
    "reports before training": "ok",
    "rewards": "ok",
    "model and adapter": "ok",
    "memory": "ok",
    "noise-free image": "ok",
    "ratio": "ok",
    "saved files": "ok",
    "reward redness_reward": "ok",
    "reward panel_similarity_reward": "ok",
}


@pytest.fixture(scope="module")
def prompt_rows() -> list[dict]:
    """Fifteen prompts of two sizes."""
    rows = map(json.loads, demo_prompts_path().read_text(encoding="utf-8").splitlines())
    return [
        row | {"height": 32 * row["rows"], "width": 32 * row["cols"]}
        for row in rows
        if (row["rows"], row["cols"]) in ((2, 2), (1, 2))
    ]


@pytest.fixture
def make_arguments(tiny_flux, prompt_rows, tmp_path):
    """Makes the command's arguments: a YAML file of the settings, with changes."""

    def make(rows: list[dict] | None = None, **changes) -> list[str]:
        lines = [json.dumps(row) + "\n" for row in (prompt_rows if rows is None else rows)]
        (tmp_path / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        settings = {
            "model_name_or_path": str(tiny_flux),
            "dataset_name": str(tmp_path / "prompts.jsonl"),
            "output_dir": str(tmp_path / "out"),
            **SETTINGS,
            **changes,
        }
        (tmp_path / "settings.yaml").write_text(yaml.safe_dump(settings))
        return ["--config", str(tmp_path / "settings.yaml")]

    return make


@pytest.fixture
def examine(make_arguments, monkeypatch):
    """
    Runs the checks up to the last one named, or all; keyword arguments are changes of the settings. Gives the rows by
    name.
    """

    def run(last: str | None = None, **changes) -> dict[str, doctor.Row]:
        with monkeypatch.context() as patch:
            if last is not None:
                names = [check.name for check in doctor.CHECKS]
                patch.setattr(doctor, "CHECKS", doctor.CHECKS[: names.index(last) + 1])
            return {row.check: row for row in doctor.examine(make_arguments(**changes), Console(quiet=True))}

    return run


def generator_of(trainer) -> doctor.SampleGenerator:
    is_new_adapter = isinstance(trainer.model, PeftModel) and trainer.trained_from is None
    return doctor.SampleGenerator(trainer.sampler, trainer.train_rows, trainer.args, is_new_adapter)


def healthy(last: str) -> dict[str, str]:
    """The verdicts of a healthy run up to a row."""
    names = list(HEALTHY)
    return dict.fromkeys(names[: names.index(last) + 1], "ok")


def verdicts(rows: dict[str, doctor.Row]) -> dict[str, str]:
    return {name: row.verdict for name, row in rows.items()}


def test_the_command(make_arguments, tmp_path):
    arguments = make_arguments()
    command = ["-m", "paco_trl.commands.main", "doctor", *arguments]
    done = launching.run(command, cwd=ROOT, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    for name in HEALTHY:
        assert re.search(rf"{re.escape(name)}: ok", done.stdout), name  # progress
    assert "14 ok" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if line[:1] in ("┃", "│")) == 100
    assert not (tmp_path / "out").exists()


class TestCommandLine:
    def test_the_console_script_is_the_dispatch(self):
        config = configparser.ConfigParser()
        config.read(ROOT / "setup.cfg")
        name, target = config["options.entry_points"]["console_scripts"].strip().split(" = ")
        module, function = target.split(":")
        assert name == "paco-trl"
        assert getattr(importlib.import_module(module), function) is main

    def test_commands_exist(self):
        for module, summary in COMMANDS.values():
            assert callable(importlib.import_module(module).main)
            assert summary

    def test_help(self, capsys):
        assert main(["--help"]) == 0
        assert "doctor" in capsys.readouterr().out
        assert main(["doctor", "--help"]) == 0
        shown = capsys.readouterr().out
        for option in ("--config", "--model_name_or_path", "--num_generations"):
            assert option == "--config" or option in shown

    @pytest.mark.parametrize("arguments, problem", [([], "missing"), (["doctr"], "'doctr'")])
    def test_no_such_command(self, arguments, problem, capsys):
        assert main(arguments) == 2
        assert problem in capsys.readouterr().err

    def test_exit_code_and_table(self, make_arguments, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        with monkeypatch.context() as patch:
            patch.setattr(doctor, "CHECKS", doctor.CHECKS[:5])  # `test_the_command` makes all
            assert main(["doctor", *make_arguments(num_generations=4)]) == 0
        capsys.readouterr()
        assert main(["doctor", *make_arguments(num_generations=1)]) == 1
        shown = capsys.readouterr().out
        assert "must be at least 2" in shown
        assert "needs: configuration" in shown
        assert all(len(line) <= 80 for line in shown.splitlines())

    def test_unknown_options_are_errors(self, make_arguments, capsys):
        rows = doctor.examine([*make_arguments(), "--no_such_option", "1"], Console(quiet=True))
        assert rows[1].verdict == "failed"
        assert "no_such_option" in rows[1].finding
        rows = doctor.examine(make_arguments(no_such_option=1), Console(quiet=True))
        assert rows[1].verdict == "failed"
        assert "no_such_option" in rows[1].finding


class TestHealthy:
    def test_every_row_is_ok_and_has_its_numbers(self, examine):
        rows = examine()
        assert verdicts(rows) == HEALTHY
        finding = {name: row.finding for name, row in rows.items()}
        assert "torch 2" in finding["versions"]
        assert "4 prompts x 4 generations = 16 images a round" in finding["configuration"]
        assert "effective batch 8 images" in finding["configuration"]
        assert "15 prompts" in finding["data"]
        assert "64 x 64 (12), 32 x 64 (3)" in finding["data"]
        assert "6 optimizer steps, 3 round(s)" in finding["data"]
        assert "Trained at 32 x 32, 16 x 32 (multiples of 4 pixels)" in finding["model and adapter"]
        assert "differ by 0 (" in finding["noise-free image"]
        assert "max |ratio - 1| before the first update 0 (step 1: 0, step 2: 0)" in finding["ratio"]
        effect = float(re.search(r"change the last latents by (\d\S*)\. ", finding["saved files"])[1])
        assert effect > 1e-3
        assert "0 with `PeftModel.from_pretrained` and 0 with `pipe.load_lora_weights`" in finding["saved files"]
        assert "0 None" in finding["reward redness_reward"]

    def test_bf16(self, examine):
        rows = examine(bf16=True)
        assert verdicts(rows) == HEALTHY
        assert "torch.bfloat16" in rows["model and adapter"].finding

    def test_rounding_up_is_a_warning(self, examine):
        rows = examine("configuration", num_prompts_per_generation=4, per_device_train_batch_size=4)
        assert rows["configuration"].verdict == "ok"
        rows = examine("configuration", num_prompts_per_generation=3, per_device_train_batch_size=4)
        assert rows["configuration"].verdict == "warning"
        assert "rounded up to 4" in rows["configuration"].advice

    def test_repeated_prompts_are_a_warning(self, examine, prompt_rows):
        rows = examine("memory", rows=[*prompt_rows, prompt_rows[0]])
        assert verdicts(rows) == healthy("memory") | {"data": "warning"}
        assert "1 row(s) repeat a prompt" in rows["data"].finding


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
        assert verdicts(examine()) == HEALTHY | {"noise-free image": "failed"}

    def test_a_replay_that_differs(self, examine, monkeypatch):
        norm = nn.LayerNorm.forward

        def noisy(self, hidden_states):
            output = norm(self, hidden_states)
            return output * 1.01 if torch.is_grad_enabled() else output

        monkeypatch.setattr(nn.LayerNorm, "forward", noisy)
        rows = examine()
        assert verdicts(rows) == HEALTHY | {"ratio": "failed"}
        assert "dropout" in rows["ratio"].advice

    @pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_lora_weights.safetensors"])
    def test_a_wrong_scale_in_the_files(self, examine, monkeypatch, name):
        save = doctor.save_adapter

        def save_wrong(model, pipeline, state_dict, folder):
            save(model, pipeline, state_dict, folder)
            path = Path(folder) / name
            if path.suffix == ".json":
                path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 4}))
            else:
                weights = {key: value / 2 if ".lora_B." in key else value for key, value in load_file(path).items()}
                save_file(weights, path, {"format": "pt"})

        monkeypatch.setattr(doctor, "save_adapter", save_wrong)
        assert verdicts(examine()) == HEALTHY | {"saved files": "failed"}

    def test_rewards(self, examine, monkeypatch):
        async def asynchronous(prompts, completions, **kwargs):
            return [float(index) for index in range(len(completions))]

        planted = {
            "raises": (lambda images: 1 / 0, "failed", "'raises' raised ZeroDivisionError"),
            "text": (lambda images: ["good"] * len(images), "failed", "'text' returned 'good'"),
            "none": (lambda images: [None] * len(images), "failed", "3 None"),
            "constant": (lambda images: [1.0] * len(images), "warning", "1, 1, 1"),
            "one_none": (lambda images: [None, *range(1, len(images))], "warning", "None, 1, 2; 1 None"),
            "good": (lambda images: list(range(len(images))), "ok", "0, 1, 2; 0 None"),
            "asynchronous": (asynchronous, "ok", "0, 1, 2; 0 None"),
        }

        def load(name, args, own=script_arguments.load_reward):
            if name not in planted:
                return own(name, args)
            values, _, _ = planted[name]
            if values is asynchronous:
                return values

            def reward(prompts, completions, panel_images, theme, **kwargs):
                return values(completions)

            reward.__name__ = name
            return reward

        monkeypatch.setattr(script_arguments, "load_reward", load)
        rows = examine(rewards=[*planted, "panel_similarity"])
        expected = HEALTHY | {f"reward {name}": verdict for name, (_, verdict, _) in planted.items()}
        del expected["reward redness_reward"]
        assert verdicts(rows) == expected
        for name, (_, verdict, message) in planted.items():
            assert message in rows[f"reward {name}"].finding
            assert bool(rows[f"reward {name}"].advice) == (verdict != "ok")

    def test_a_reward_that_does_not_exist(self, examine):
        rows = examine(rewards=["redness", "rednes"])
        expected = {name: verdict for name, verdict in HEALTHY.items() if not name.startswith("reward ")}
        assert verdicts(rows) == expected | {"rewards": "failed", "reward values": "skipped"}
        assert "'rednes'" in rows["rewards"].finding

    def test_fewer_prompts_than_a_round(self, examine, prompt_rows):
        assert examine("data", rows=prompt_rows[:4])["data"].verdict == "ok"
        rows = examine(rows=prompt_rows[:3])
        assert verdicts(rows) == HEALTHY | {"data": "failed"}
        assert "at most 3" in rows["data"].advice

    def test_data_that_cannot_be_used(self, examine, prompt_rows):
        rows = examine(rows=[{"text": "a cat"}] * 4)
        assert rows["data"].verdict == "failed"
        assert rows["model and adapter"].verdict == "skipped"
        assert rows["model and adapter"].finding == "needs: data"
        rows = examine("data", dataset_name="/no/such/prompts.jsonl")
        assert rows["data"].verdict == "failed"
        assert "prompts.jsonl" in rows["data"].finding

    def test_a_configuration_that_does_not_divide(self, examine):
        rows = examine(generation_batch_size=18)
        assert rows["versions"].verdict == "ok"
        assert rows["configuration"].verdict == "failed"
        assert "18 / 4 = 4.5" in rows["configuration"].finding
        assert {row.verdict for name, row in rows.items() if name not in ("versions", "configuration")} == {"skipped"}

    def test_a_layer_that_does_not_exist(self, examine):
        rows = examine("memory", lora_target_modules=["attn.to_q", "attn.to_k"])
        assert verdicts(rows) == healthy("memory")
        rows = examine(lora_target_modules=["attn.to_q", "attn.to_kk"])
        assert verdicts(rows) == HEALTHY | {"model and adapter": "failed"}
        assert "named attn.to_kk" in rows["model and adapter"].finding
        rows = examine(lora_target_modules=["to_kk"])
        assert rows["model and adapter"].verdict == "failed"
        assert rows["ratio"].verdict == "skipped"

    def test_a_model_that_does_not_exist(self, examine, tmp_path):
        rows = examine(model_name_or_path=str(tmp_path / "nothing"))
        assert rows["data"].verdict == "ok"
        assert rows["model and adapter"].verdict == "failed"
        assert rows["saved files"].finding == "needs: model and adapter"

    def test_an_outdated_version(self, monkeypatch):
        state = doctor.DoctorState(parse=None, temporary_dir="")
        assert doctor.check_versions(state).verdict == "ok"
        version = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.20.9" if name == "peft" else version(name))
        row = doctor.check_versions(state)
        assert row.verdict == "warning"
        assert row.finding.startswith("peft is 0.20.9, needed is >=0.21")
        assert "`pip install -U peft`" in row.advice

    def test_a_missing_package(self, monkeypatch):
        requires = importlib.metadata.requires

        def with_another(name):
            extras = ['no-such-extra>=1.0; extra == "test"', 'pytest>=999; extra == "test"']
            return [*requires(name), "no-such-package>=1.0", *extras]

        monkeypatch.setattr(importlib.metadata, "requires", with_another)
        row = doctor.check_versions(doctor.DoctorState(parse=None, temporary_dir=""))
        assert row.verdict == "warning"
        assert "no-such-package is missing" in row.finding
        assert "no-such-extra" not in row.finding
        assert "pytest" not in row.finding


class TestAllWeights:
    """`--use_peft False`: the trainer's model is the transformer itself."""

    @pytest.mark.parametrize("bf16, beta", [(False, 0.0), (True, 0.01)])
    def test_every_row_is_ok(self, examine, bf16, beta):
        rows = examine(use_peft=False, bf16=bf16, beta=beta, ema_decay=0.9)
        assert verdicts(rows) == HEALTHY
        finding = {name: row.finding for name, row in rows.items()}
        number = re.search(r"all weights of the transformer are trained, (\S+) ", finding["model and adapter"])[1]
        assert int(number.replace(",", "")) > 10_000
        assert "parameters in torch.float32" in finding["model and adapter"]
        effect = float(re.search(r"change the last latents by (\d\S*)\. ", finding["saved files"])[1])
        assert effect > 1e-3
        assert "differ by 0 with `FluxTransformer2DModel.from_pretrained`" in finding["saved files"]
        assert "trained weights" in finding["memory"]
        assert "average" in finding["memory"]
        assert ("reference (`beta` > 0)" in finding["memory"]) == (beta > 0)
        assert ("bfloat16 copies under autocast" in finding["memory"]) == bf16

    def test_files_that_are_not_what_was_trained(self, examine, monkeypatch):
        save = doctor.save_transformer

        def save_wrong(transformer, state_dict, folder):
            name = next(name for name in state_dict if name.endswith("attn.to_q.weight"))
            save(transformer, state_dict | {name: 0.9 * state_dict[name]}, folder)

        monkeypatch.setattr(doctor, "save_transformer", save_wrong)
        assert verdicts(examine(use_peft=False)) == HEALTHY | {"saved files": "failed"}

    def test_weights_are_as_they_were_after_it(self, make_trainer, monkeypatch):
        trainer = make_trainer(peft_config=None, gradient_checkpointing=False)
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        state = doctor.DoctorState(parse=None, temporary_dir="", args=trainer.args, trainer=trainer)
        state.generator = generator_of(trainer)
        state.generator.prepare()

        def check_they_are_restored():
            after = trainer.model.state_dict()
            assert all(torch.equal(value, after[name]) for name, value in before.items())

        assert doctor.check_round_trip(state).verdict == "ok"
        check_they_are_restored()
        monkeypatch.setattr(doctor, "save_transformer", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            doctor.check_round_trip(state)
        check_they_are_restored()


class TestExistingAdapter:
    @pytest.mark.parametrize("targets", [["attn.to_q", "attn.to_v"], r".*\.attn\.to_(q|v)"])
    def test_it_is_continued(self, make_trainer, examine, tmp_path, targets):
        trainer = make_trainer(peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        folder = tmp_path / "adapter"
        # Not the identity, as a trained one is not
        trained = {name: torch.full_like(p, 0.02) for name, p in trainer.model.named_parameters() if p.requires_grad}
        doctor.save_adapter(trainer.model, trainer.pipeline, trained, folder)
        saved = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
        assert isinstance(saved, str) == isinstance(targets, str)
        rows = examine(adapter_name_or_path=str(folder))
        assert verdicts(rows) == HEALTHY
        assert f"continued from '{folder}'" in rows["model and adapter"].finding
        assert "differ by 0 (" in rows["noise-free image"].finding

        (folder / "adapter_model.safetensors").unlink()
        rows = examine("model and adapter", adapter_name_or_path=str(folder))
        assert rows["model and adapter"].verdict == "failed"
        assert "adapter_model.safetensors" in rows["model and adapter"].finding


class TestEvaluation:
    def test_rewards_of_the_evaluation(self, examine, monkeypatch):
        trainers = []

        class Trainer(doctor.PaCoGRPOTrainer):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                trainers.append(self)

        def judge(prompts, completions, **kwargs):
            return list(range(len(completions)))

        def unable(prompts, completions, **kwargs):
            return [None] * len(completions)

        planted, load = {"judge": judge, "unable": unable}, script_arguments.load_reward
        loaded = []

        def load_counted(name, script_args):
            loaded.append(name)
            return planted[name] if name in planted else load(name, script_args)

        monkeypatch.setattr(script_arguments, "load_reward", load_counted)
        monkeypatch.setattr(doctor, "PaCoGRPOTrainer", Trainer)
        rows = examine(eval_split="train", eval_rewards=["redness", "judge", "unable"])
        assert verdicts(rows) == HEALTHY | {"evaluation reward judge": "ok", "evaluation reward unable": "failed"}
        assert "Evaluation: redness_reward, judge, unable." in rows["rewards"].finding
        assert loaded == ["redness", "panel_similarity", "judge", "unable"]
        assert trainers[0].reward_func_names == ["redness_reward", "panel_similarity_reward"]
        assert trainers[0].evaluator.rewards.names == ["redness_reward", "judge", "unable"]

    def test_a_reward_of_the_evaluation_that_does_not_exist(self, examine):
        rows = examine(eval_split="train", eval_rewards=["rednes"])
        assert verdicts(rows) == HEALTHY | {"rewards": "failed"}
        assert "'rednes'" in rows["rewards"].finding

    def test_without_a_split(self, examine):
        steps = {"eval_strategy": "steps", "eval_steps": 2}
        for setting in (steps, {"eval_on_start": True}):
            rows = examine("memory", **setting)
            assert verdicts(rows) == healthy("memory") | {"data": "failed"}
            assert "`--eval_split`" in rows["data"].advice
        assert verdicts(examine("memory", eval_on_start=True, **steps, eval_split="train")) == healthy("memory")


class TestOutputFolder:
    @pytest.fixture
    def add_checkpoint(self, tmp_path):
        def add(step: int, is_complete: bool = True) -> Path:
            folder = tmp_path / "out" / f"checkpoint-{step}"
            folder.mkdir(parents=True)
            if is_complete:
                (folder / "run.json").write_text(json.dumps({"run": {}, "files": {}}))
            return folder

        return add

    @pytest.fixture
    def find(self, make_arguments):
        """The row, without the checks that follow."""

        def run(**changes) -> doctor.Row:
            parse = doctor._parser().parse_args_and_config
            state = doctor.DoctorState(lambda: parse(make_arguments(**changes)), "elsewhere")
            assert doctor.check_configuration(state).verdict == "ok"
            rows = doctor._make(doctor.Check("output directory", doctor.check_output_folder, ("args",)), state)
            assert (state.args.output_dir, state.args.resume_from_checkpoint) == ("elsewhere", None)
            return rows[0]

        return run

    def test_resuming(self, find, add_checkpoint, tmp_path):
        row = find(resume_from_checkpoint=True)
        assert row.verdict == "failed"
        assert f"'{tmp_path / 'out'}' has no complete checkpoint" in row.finding
        add_checkpoint(9)
        latest = add_checkpoint(10)
        for value in (True, "true", str(latest)):
            row = find(resume_from_checkpoint=value)
            assert (row.verdict, row.advice) == ("ok", "")
            assert str(latest) in row.finding
        cut_short = add_checkpoint(11, is_complete=False)
        row = find(resume_from_checkpoint=True)
        assert row.verdict == "warning"
        assert str(latest) in row.finding
        assert str(cut_short) in row.advice
        assert find(resume_from_checkpoint=str(cut_short)).verdict == "failed"
        assert find(resume_from_checkpoint=str(tmp_path / "nothing")).verdict == "failed"

    def test_from_the_beginning(self, find, add_checkpoint):
        assert find().verdict == "ok"
        add_checkpoint(9)
        add_checkpoint(10)
        row = find()
        assert row.verdict == "warning"
        assert "2 checkpoint(s), the latest 'checkpoint-10'" in row.finding

    def test_the_other_rows_do_not_depend_on_it(self, examine, add_checkpoint, tmp_path):
        assert verdicts(examine("memory", resume_from_checkpoint=True)) == healthy("memory") | {
            "output directory": "failed"
        }
        checkpoint = add_checkpoint(2)
        assert verdicts(examine(resume_from_checkpoint=True)) == HEALTHY
        files = sorted(path.name for path in (tmp_path / "out").rglob("*"))
        assert files == [checkpoint.name, "run.json"]


class TestMemory:
    def test_all_weights(self):
        # Only buffers are frozen
        estimate = estimate_memory(8, 1000, 500, 200, 70, has_ema=True, reference_bytes=2008, autocasts_weights=True)
        assert (estimate.transformer, estimate.trained, estimate.reference, estimate.autocast) == (8, 4000, 2008, 2000)
        always = 8 + 4000 + 2008 + 8000 + 4000 + 70
        assert estimate.training == always + 4000 + 2000
        assert estimate.generation == always + 2000 + 200
        assert estimate.encoding == always + 500
        # bf16 with float32 masters
        divided = estimate_memory(
            8, 1000, 500, 200, 70, num_processes=2, zero_stage=3, trained_element_size=2, reference_bytes=2008
        )
        assert (divided.transformer, divided.trained, divided.reference) == (4, 1000 + 2000, 1004)
        assert (divided.gradients, divided.optimizer, divided.gathered) == (2000, 4000, 8 + 2000)

    @pytest.mark.parametrize(
        "optim, expected, is_8bit",
        [
            ("adamw_torch_fused", "AdamW", False),
            ("adafactor", "counted as AdamW", False),
            ("adamw_bnb_8bit", "counted as AdamW", True),
            ("paged_lion_8bit", "counted as AdamW", True),
        ],
    )
    def test_what_the_optimizer_is_counted_as(self, optim, expected, is_8bit):
        text = doctor._describe_optimizer(optim)
        assert expected in text
        assert (optim in text) == (text != "AdamW")
        assert ("8-bit: a quarter of the states" in text) == is_8bit

    def test_the_row_names_the_optimizer(self, examine):
        rows = examine("memory", optim="adafactor")
        assert verdicts(rows) == healthy("memory")
        assert "optimizer (`adafactor`, counted as AdamW in float32) " in rows["memory"].finding

    def test_weights(self):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).to(torch.bfloat16)
        model[1].requires_grad_(False)
        # Linear 3 x 5 + 5; norm 5 + 5, with two averages of 5 in bf16 and a counter of 8 bytes
        assert weights_bytes(model) == 2 * 20 + 2 * 10 + 2 * 10 + 8
        assert weights_bytes(model, trainable=True) == 2 * 20
        assert weights_bytes(model, trainable=False) == 2 * 10 + 2 * 10 + 8

    def test_without_deepspeed(self):
        estimate = estimate_memory(1000, 10, 500, 200, 70)
        assert (estimate.transformer, estimate.trained, estimate.gradients, estimate.optimizer) == (1000, 40, 40, 80)
        assert estimate.training == 1000 + 40 + 40 + 80 + 70
        assert estimate.generation == 1000 + 40 + 80 + 70 + 200
        assert estimate.encoding == 1000 + 40 + 80 + 70 + 500
        assert estimate.peak == estimate.encoding
        averaged = estimate_memory(1000, 10, 500, 200, 70, has_ema=True)
        assert averaged.ema == 40
        for phase in ("training", "generation", "encoding", "peak"):
            assert getattr(averaged, phase) == getattr(estimate, phase) + 40
        # Every process of DDP has all of it
        assert estimate_memory(1000, 10, 500, 200, 70, num_processes=4) == estimate

    @pytest.mark.parametrize(
        "stage, transformer, adapter, gradients, optimizer, gathered",
        [
            (0, 1000, 2 * 10 + 4 * 10, 40, 80, 0),
            (1, 1000, 2 * 10 + 4 * 10 // 2, 40, 40, 0),
            (2, 1000, 2 * 10 + 4 * 10 // 2, 20, 40, 0),
            (3, 500, 2 * 10 // 2 + 4 * 10 // 2, 20, 40, 1000 + 2 * 10),
        ],
    )
    def test_deepspeed_divides_by_stage(self, stage, transformer, adapter, gradients, optimizer, gathered):
        settings = {"num_processes": 2, "zero_stage": stage, "trained_element_size": 2}
        estimate = estimate_memory(1000, 10, 0, 0, 0, **settings)
        assert (estimate.transformer, estimate.trained) == (transformer, adapter)
        assert (estimate.gradients, estimate.optimizer, estimate.gathered) == (gradients, optimizer, gathered)
        assert estimate_memory(1000, 10, 0, 0, 0, **settings, gathers_for_rollout=False).gathered == 0
        averaged = estimate_memory(1000, 10, 0, 0, 0, **settings, has_ema=True)
        assert averaged.ema == (20 if stage == 3 else 40)

    @pytest.mark.parametrize(
        "total, verdict", [(None, "ok"), (3000, "ok"), (1700, "warning"), (1391, "warning"), (1389, "failed")]
    )
    def test_verdict(self, total, verdict):
        estimate = estimate_memory(1000, 10, 500, 200, 70)
        assert (estimate.generation, estimate.training, estimate.encoding) == (1390, 1230, 1690)
        found, advice = doctor._fits(estimate, total)
        assert found == verdict
        assert bool(advice) == (verdict != "ok")

    def test_the_buffer_is_what_the_policy_records(self, make_trainer):
        trainer = make_trainer(sde_steps=[0, 2])
        generator = generator_of(trainer)
        generator.prepare()
        generated = generator.generate(count=4, sde=generator.sde_settings(0.7))
        assert len(generated.records) == 2
        embeddings = generator.fetch().encoded[generator.number].place("cpu")
        latent = latent_elements(
            32, 32, trainer.pipeline.vae_scale_factor, trainer.pipeline.vae.config.latent_channels
        )
        assert generated.latents[0].numel() == latent
        prompt = sum(tensor.numel() for tensor in embeddings.values())
        expected = rollout_buffer_bytes(4, 2, latent, 1, prompt)
        assert expected == 4 * (2 * 4 * 2 * latent + prompt)
        assert rollout_buffer_bytes(4, 2, latent, 1, prompt, latents_per_step=3) == expected + 4 * 4 * 2 * latent
        tensors = [
            t for r in generated.records for call in r.calls for t in call.values() if isinstance(t, torch.Tensor)
        ]
        tensors += [tensor for r in generated.records for tensor in (r.sample, r.prev_sample)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        # Beside them only what is small: positions, timesteps, guidance
        assert expected <= sum(storages.values()) < 1.3 * expected

    def test_flux_dev(self):
        """The defaults of FluxTransformer2DModel are FLUX.1-dev's, but for the guidance. Nothing is allocated."""
        with init_empty_weights():
            transformer = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)
            t5 = T5EncoderModel(
                T5Config(
                    d_model=4096, d_ff=10240, num_layers=24, num_heads=64, vocab_size=32128,
                    feed_forward_proj="gated-gelu", is_encoder_decoder=False,
                )
            ).to(torch.bfloat16)  # fmt: skip
        t5.tie_weights()
        assert sum(p.numel() for p in transformer.parameters()) == 11_901_408_320
        assert weights_bytes(transformer) == 2 * 11_901_408_320  # 23.8 GB
        assert weights_bytes(t5) == pytest.approx(9.5e9, rel=0.01)
        with init_empty_weights():
            config = LoraConfig(r=64, lora_alpha=128, target_modules=FluxFamily.lora_target_modules)
            model = get_peft_model(transformer, config)
        # r x (in + out): 19 double blocks with 8 projections of attention and 4 layers of feed-forward, 38 single
        # blocks with 3 projections
        trainable = 19 * (8 * 64 * (3072 + 3072) + 4 * 64 * (3072 + 12288)) + 38 * 3 * 64 * (3072 + 3072)
        assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trainable == 179_306_496
        assert weights_bytes(model, trainable=False) == 2 * 11_901_408_320

        # 672 images of 512 x 512 a round, 42 prompts of 512 x 4096 + 768 numbers: the paper's settings on one GPU
        latent = latent_elements(512, 512, vae_scale_factor=8, latent_channels=16)
        assert latent == 1024 * 64  # tokens, channels of a packed token
        buffer = rollout_buffer_bytes(672, 1, latent, 42, 512 * 4096 + 768)
        assert buffer == 672 * 2 * 262_144 + 42 * 8_391_680
        vae = 2 * 83_819_683
        estimate = estimate_memory(
            weights_bytes(transformer, trainable=False), trainable, weights_bytes(t5), vae, buffer
        )
        assert estimate.training / GIB == pytest.approx(25.5, abs=0.1)
        assert estimate.peak == estimate.encoding
        eight = estimate_memory(
            weights_bytes(transformer, trainable=False), trainable, weights_bytes(t5), vae, buffer, 8, 3, 2
        )
        assert eight.transformer == 2 * 11_901_408_320 // 8
        assert eight.training < 5 * GIB


def test_branches_a_short_tail_and_the_batch_of_generation_are_checked(examine):
    settings = {"images_per_prefix": 2, "sde_steps": [1], "tail_steps": 1, "gradient_checkpointing": False}
    rows = examine("ratio", **settings)
    assert verdicts(rows) == healthy("ratio") | {"reports before training": "warning"}
    assert "2 image(s), max |ratio - 1| before the first update 0 (step 1: 0)" in rows["ratio"].finding
    assert "Checkpointing" not in rows["ratio"].finding
    found = examine("ratio", per_device_rollout_batch_size=4, sde_steps=[1])["ratio"].finding
    assert found.startswith("4 image(s), max |ratio - 1| before the first update ")
    assert "Checkpointing costs a forward of each image: see if it fits with `--gradient" in found


class TestReportsBeforeTraining:
    def row(self, examine, **changes) -> doctor.Row:
        return examine("reports before training", **changes)["reports before training"]

    def test_a_short_tail_without_a_report_is_a_warning(self, examine):
        row = self.row(examine, tail_steps=1, num_inference_steps=6)
        assert row.verdict == "warning" and "take 4 denoising steps in place of 6" in row.finding
        assert "`tail_transfer_prompts`: 0" in row.finding and "set `tail_transfer_prompts`" in row.advice

    def test_their_cost_is_what_they_generate(self, examine):
        changes = {"tail_steps": 1, "num_inference_steps": 6, "tail_transfer_prompts": 3}
        row = self.row(examine, **changes)
        # 3 prompts x 4 images with each tail, of 4 and of 6 steps
        assert row.verdict == "ok" and "24 images in up to 120 forwards" in row.finding
        row = self.row(examine, resolution_transfer_prompts=20, num_generations_eval=2, num_inference_steps_eval=5)
        # There are 15 prompts
        assert row.verdict == "ok" and row.finding == "`resolution_transfer_prompts`: 60 images in 300 forwards."
        assert self.row(examine).finding == "None."

    def test_the_steps_are_those_of_round_zero(self, examine, make_trainer, tmp_path):
        changes = {"sde_steps": [0, 1, 2], "num_sde_steps": 1, "num_inference_steps": 6, "tail_steps": 1, "seed": 1}
        shown = self.row(examine, **changes).finding
        (step,) = make_trainer(**changes, max_steps=1).schedule.sde(0).steps
        assert step != 2 and f"take {step + 2} denoising steps in place of 6" in shown
