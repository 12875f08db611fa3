# SPDX-License-Identifier: Apache-2.0
"""The console script `paco-trl`: its parser, its errors, its help, and what it starts."""

import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import IntervalStrategy, TrainerCallback

from launching import CPU_DDP, ROOT
from paco_trl import PaCoGRPOConfig, PaCoNFTConfig, PaCoRewardConfig, __version__
from paco_trl.checkpointing.checkpoint_files import CheckpointError
from paco_trl.commands import grpo, main, reward
from paco_trl.commands.build_arguments import GridsArguments
from paco_trl.commands.memory_check import PlanArguments
from paco_trl.commands.options import option
from paco_trl.commands.parser import CommandParser
from paco_trl.commands.script_arguments import ScriptArguments
from paco_trl.commands.training import train_and_save
from paco_trl.data import demo_prompts_path


@dataclass
class Arguments:
    """A field of each kind."""

    rewards: list[str] = option(["consistency"], "Rewards.", "--reward_funcs")
    sde_steps: list[int] | None = option(None, "Steps.")
    reward_weights: list[float] | None = option(None, "Weights.")
    learning_rate: float = option(1e-3, "Rate.")
    max_steps: int = option(3, "Number.")
    swap: bool = option(True, "Whether to swap.")
    save_strategy: IntervalStrategy | str = option("steps", "When.")
    resume_from_checkpoint: str | None = option(None, "Checkpoint.")
    model_init_kwargs: dict | str | None = option(None, "Keywords.")
    height: int | None = option(5, "Height.")


class TestFiles:
    """Values of YAML files."""

    @staticmethod
    def parse(tmp_path, text: str, *words: str) -> Arguments:
        (tmp_path / "a.yaml").write_text(text)
        parser = CommandParser(Arguments, prog="test")
        return parser.parse_args_and_config(["--config", str(tmp_path / "a.yaml"), *words])[0]

    @pytest.mark.parametrize(
        ("text", "name", "value"),
        [
            ("rewards: redness", "rewards", ["redness"]),
            ("reward_funcs: redness", "rewards", ["redness"]),
            ("sde_steps: 1", "sde_steps", [1]),
            ("sde_steps: '1'", "sde_steps", [1]),
            ("sde_steps:", "sde_steps", None),
            ("reward_weights: 1.0", "reward_weights", [1.0]),
            ("reward_weights: [1, 1e-1]", "reward_weights", [1, 0.1]),  # PyYAML reads 1e-1 as a text
            ("learning_rate: 1e-4", "learning_rate", 1e-4),
            ("learning_rate: 1", "learning_rate", 1),
            ("swap: no", "swap", False),
            ("save_strategy: 'no'", "save_strategy", "no"),
            ("resume_from_checkpoint: true", "resume_from_checkpoint", True),
            ("model_init_kwargs: {revision: main}", "model_init_kwargs", {"revision": "main"}),
            ("height:", "height", None),
        ],
    )
    def test_a_value_that_fits(self, tmp_path, text, name, value):
        assert getattr(self.parse(tmp_path, text), name) == value

    def test_the_command_line_comes_first(self, tmp_path):
        assert self.parse(tmp_path, "rewards: a", "--reward_funcs", "b", "c").rewards == ["b", "c"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("learning_rate:", "`learning_rate` has no value in the file"),
            ("learning_rate: [1.0]", r"`learning_rate` is \[1.0\] in the file, but takes float"),
            ("max_steps: true", "`max_steps` is True in the file, but takes int"),
            ("max_steps: 1.5", "`max_steps` is 1.5 in the file, but takes int"),
            ("sde_steps: [1, 2.5]", "`sde_steps` is 2.5 in the file, but takes int"),
            ("sde_steps: one", "`sde_steps` is 'one' in the file, which does not fit: invalid literal"),
            (
                "save_strategy: no",
                "`save_strategy` is False in the file, but takes IntervalStrategy or str. .*in quotes",
            ),
            ("no_such_option: 1", "no_such_option"),
        ],
    )
    def test_a_value_that_does_not(self, tmp_path, text, message):
        with pytest.raises(ValueError, match=message):
            self.parse(tmp_path, text)


PARSERS = {
    "grpo": (ScriptArguments, PaCoGRPOConfig),
    "nft": (ScriptArguments, PaCoNFTConfig),
    "reward": (reward.ScriptArguments, PaCoRewardConfig),
    "doctor": (ScriptArguments, PaCoGRPOConfig, PlanArguments),
}


class TestHelp:
    def test_own_options_first_and_refused_ones_not_at_all(self):
        parser = grpo.parser_of(ScriptArguments, PaCoGRPOConfig, prog="paco-trl grpo")
        own, others = parser.format_help().split("options of TRL and transformers:")
        for name in ("help", "dataset_train_split", "reward_funcs", "lora_r", "noise_level", "num_generations"):
            assert re.search(rf"^  .*--{name}\b", own, flags=re.M), name
        for name in ("max_steps", "warmup_steps"):
            assert f"--{name} " in others and f"--{name} " not in own
        assert "--vllm_mode" in parser._option_string_actions
        assert "vllm" not in own and "--vllm" not in others
        assert "--fsdp" not in others
        assert re.search(r"--model_init_kwargs .*\n +Arguments of the model's `from_pretrained`", others)
        assert own.startswith("usage: paco-trl grpo [--config FILE] [options]\n")

    @pytest.mark.parametrize("command", ["build", "evaluate"])
    def test_the_lines_of_a_command(self, command, capsys):
        """As they are written: a backslash would have joined them."""
        assert main.main([command, "--help"]) == 0
        assert re.search(r" \\\n {8}--\w+", capsys.readouterr().out)

    def test_the_options_of_nft(self):
        texts = {
            config: grpo.parser_of(ScriptArguments, config, prog="x").format_help()
            for config in (PaCoGRPOConfig, PaCoNFTConfig)
        }
        assert "--nft_beta" in texts[PaCoNFTConfig] and "--nft_beta" not in texts[PaCoGRPOConfig]
        assert "--sde_steps" in texts[PaCoGRPOConfig] and "--sde_steps" not in texts[PaCoNFTConfig]


class TestNames:
    """Names of options are checked without the imports of the parser."""

    @pytest.mark.parametrize("command", PARSERS)
    def test_every_option_of_the_parser_is_known(self, command):
        names = [name for name in CommandParser(PARSERS[command], prog="x")._option_string_actions if name[1] == "-"]
        assert len(names) > 150
        main.check_options(["--config", os.devnull, *names, "--learning_rat=1"])

    def test_those_of_stages(self):
        names = [name for name in CommandParser(GridsArguments, prog="x")._option_string_actions if name[1] == "-"]
        main.check_options(names)
        with pytest.raises(ValueError, match="no option `--batchsize`. Did you mean `--batch_size`"):
            main.check_options([*names, "--batchsize", "2"])

    def test_numbers(self):
        good = [
            "--max_steps",
            "-1",
            "--learning_rate=1e-4",
            "--lora_r",
            "4",
            "--logging_steps",
            "0.5",
            "--report_to",
            "x",
        ]
        main.check_options(["--dataset_n", "x", *good], "dataset_name")
        for word, value, kind in (
            ("--max_steps", "1.5", "an integer"),
            ("--lora_r", "x", "an integer"),
            ("--noise_level", "x", "a number"),
        ):
            with pytest.raises(ValueError, match=f"`{word}` is '{value}', which is not {kind}"):
                main.check_options([*good, word, value])

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--max_stepz", "3"], "there is no option `--max_stepz`. Did you mean `--max_steps`?"),
            (["--config", "a.yaml"], "there is no option `--max_stepz`. Did you mean `--max_steps`?"),
            (["--config=a.yaml"], "there is no option `--max_stepz`. Did you mean `--max_steps`?"),
            (["--dataset_name", "a", "--max_steps", "abc"], "`--max_steps` is 'abc', which is not an integer."),
            (["--max_steps", "3"], "`--dataset_name` is missing: a Hub id, a directory or a file of prompts."),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_errors_are_found_before_torch_is_imported(self, words, message, tmp_path):
        (tmp_path / "a.yaml").write_text("max_steps: 3\nreward: redness\nmax_stepz: 3\n")
        code = "import sys, json; from paco_trl.commands.main import main\n"
        code += "print(json.dumps([main(['grpo', *sys.argv[1:]]), 'torch' in sys.modules, 'trl' in sys.modules]))"
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert json.loads(done.stdout) == [1, False, False]
        assert done.stderr == f"paco-trl grpo: {message}\n"


class TestErrors:
    def test_one_line(self, tmp_path, capsys):
        words = ["--output_dir", str(tmp_path / "out"), "--use_cpu", "--bf16", "False"]
        (tmp_path / "wrong.yaml").write_text("a: [")
        for more, message in (
            (["--dataset_name", str(tmp_path / "no.jsonl")], "There is no file or directory"),
            (["--dataset_name", str(demo_prompts_path()), "--rewards", "rednes"], "Unknown reward 'rednes'"),
            (["--dataset_name", "a", "--noise_level", "-1"], "`noise_level` is -1"),
            (["--dataset_name", "a", "--eval_split", "b"], "`--eval_split` is 'b', but nothing would be evaluated"),
            (
                ["--dataset_name", "a", "--eval_dataset_name", "b"],
                "`--eval_dataset_name` is 'b', but nothing would be evaluated",
            ),
            (["--eval_dataset_name", "b", "--eval_on_start"], "`--dataset_name` is missing"),
            (["--config", str(tmp_path / "wrong.yaml")], "wrong.yaml"),
            ([], "`--dataset_name` is missing"),
        ):
            assert main.main(["grpo", *words, *more]) == 1
            shown = capsys.readouterr().err
            assert shown.startswith("paco-trl grpo: ") and message in shown and "Traceback" not in shown
        assert not (tmp_path / "out").exists()

    def test_errors_of_the_user_are_a_sentence_and_faults_keep_their_traceback(self, capsys, monkeypatch):
        waited = []

        def training_step():
            raise CheckpointError("the disk is full")

        def before():
            raise ValueError("`max_steps` is 0")

        assert main.answer("grpo", before) == 1
        assert capsys.readouterr().err == "paco-trl grpo: `max_steps` is 0\n"
        assert main.answer("grpo", training_step) == 1
        assert capsys.readouterr().err == "paco-trl grpo: the disk is full\n"
        # The other processes, which the launcher ends when the first one has spoken
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr(main.time, "sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
        assert main.answer("grpo", before) == 1
        assert waited == [(10.0, "")] and capsys.readouterr().err == "paco-trl grpo: `max_steps` is 0\n"
        with pytest.raises(TypeError):
            main.answer("grpo", lambda: 1 + "1")

    @pytest.mark.parametrize("save_steps", [1, 100])
    def test_ctrl_c_says_how_to_resume(self, make_trainer, capsys, save_steps):
        class Interrupt(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 1:
                    raise KeyboardInterrupt

        trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=save_steps, callbacks=[Interrupt()])
        assert main.answer("grpo", lambda: train_and_save(trainer, None, None)) == 130
        how = f"Rerun with `--resume_from_checkpoint True` to resume from '{trainer.args.output_dir}/checkpoint-1'."
        assert capsys.readouterr().err.endswith(f"stopped. {how if save_steps == 1 else 'Nothing is saved.'}\n")

    def test_ctrl_c_in_what_resumes_by_itself(self, capsys, monkeypatch):
        def stop():
            raise KeyboardInterrupt

        assert main.answer("build", stop) == 130
        assert capsys.readouterr().err.endswith("paco-trl build: stopped. Rerun the same command to resume.\n")
        monkeypatch.setenv("RANK", "1")
        assert main.answer("build", stop) == 130
        assert capsys.readouterr().err == ""


def test_version_and_environment(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert main.main(["env"]) == 0
    shown = capsys.readouterr().out
    for name in ("python", "paco_trl", "trl", "torch", "diffusers", "GPUs", "CUDA of torch"):
        assert re.search(rf"^- {name}: \S", shown, flags=re.M), name
    for secret in (platform.node(), str(Path.home()), str(ROOT)):
        assert secret not in shown
    assert main.main(["env", "--all"]) == 1


def test_options_of_accelerate_replace_the_process(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words) or sys.exit(0))
    assert main.main(["grpo", "--num_processes", "8", "--config", "a.yaml", "--accelerate_config", "b.yaml"]) == 0
    ((_, *words),) = started
    assert words == [
        "-m", "accelerate.commands.launch", "--config_file=b.yaml", "--num_processes=8",
        "-m", "paco_trl.commands.main", "grpo", "--config", "a.yaml",
    ]  # fmt: skip
    assert main.main(["grpo", "--num_processes", "many"]) == 2
    assert main.main(["push", "--num_processes", "8"]) == 2 and len(started) == 1


@pytest.mark.slow
def test_one_of_two_processes_says_what_is_wrong(tmp_path):
    words = ["-m", "paco_trl.commands.main", "grpo", "--accelerate_config", CPU_DDP, "--max_steps", "0"]
    words += ["--use_cpu", "--bf16", "False", "--ddp_backend", "gloo", "--output_dir", tmp_path / "out"]
    words += ["--dataset_name", "unread"]
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=540)
    assert done.returncode == 1 and done.stderr.count("paco-trl grpo: `max_steps` is 0") == 1


@pytest.mark.slow
def test_two_processes_by_the_command(tiny_flux, tmp_path):
    """`paco-trl grpo --accelerate_config` as users start it, with prompts in a text file and an own reward."""
    (tmp_path / "prompts.txt").write_text("".join(f"A fox on hill {number}.\n" for number in range(4)))
    (tmp_path / "my_rewards.py").write_text(
        "def size(prompts, completions, **kwargs):\n    return [i.width for i in completions]\n"
    )
    words = [
        "--accelerate_config",
        CPU_DDP,
        "--ddp_backend",
        "gloo",
        "--use_cpu",
        "--bf16",
        "False",
        "--report_to",
        "none",
    ]
    words += [
        "--model_name_or_path",
        tiny_flux,
        "--dataset_name",
        "prompts.txt",
        "--rewards",
        "redness",
        "my_rewards.size",
    ]
    words += ["--num_generations", "2", "--num_prompts_per_generation", "2", "--per_device_train_batch_size", "2"]
    words += [
        "--num_inference_steps",
        "3",
        "--height",
        "64",
        "--width",
        "64",
        "--max_steps",
        "1",
        "--output_dir",
        "out",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "paco_trl.commands.main", "grpo", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=540)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("Adapter: out") == 1
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
