# SPDX-License-Identifier: Apache-2.0
"""The console script `paco-trl`: its parser, its errors, its help, and what it starts."""

import copy
import os
import platform
import re
import signal
import subprocess
import sys
from argparse import ArgumentError
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import IntervalStrategy, TrainerCallback

import config_options
from launching import CONFIGS, ROOT
from paco_trl import PaCoGRPOConfig, __version__
from paco_trl.checkpointing.checkpoints import CheckpointError
from paco_trl.commands import build_arguments, config_files, doctor, env, evaluate_arguments, launching, main, messages
from paco_trl.commands import parser as parser_module
from paco_trl.commands.grpo import ImageCommandParser
from paco_trl.commands.options import find_unused, option
from paco_trl.commands.parser import CommandParser
from paco_trl.commands.script_arguments import ScriptArguments, load_rewards
from paco_trl.commands.training import train_and_save
from paco_trl.data import demo_prompts_path
from paco_trl.rewards import JudgeUnavailableError
from paco_trl.rewards.errors import RewardError
from paco_trl.rewards.weighting import Rewards
from paco_trl.trainer import config_checks
from paco_trl.utils import errors
from paco_trl.utils.errors import OptionError, is_user_error, raise_errors
from paco_trl.utils.text import number_text


DATA = ["--dataset_name", "demo"]


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
    report_to: None | str | list[str] = option(None, "Trackers.")


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
            ("reward_funcs: redness", "rewards", ["redness"]),
            ("sde_steps: 1", "sde_steps", [1]),
            ("report_to: [tensorboard, wandb]", "report_to", ["tensorboard", "wandb"]),
            ("sde_steps:", "sde_steps", None),
            ("learning-rate: 1e-4", "learning_rate", 1e-4),
            ("rewards: [--a, b]", "rewards", ["--a", "b"]),
            ("reward_weights: [1, 1e-1]", "reward_weights", [1, 0.1]),  # PyYAML reads 1e-1 as a text
            ("swap: no", "swap", False),
            ("save_strategy: 'no'", "save_strategy", "no"),
            ("save_strategy: no", "save_strategy", "no"),  # YAML's `no` is False
            ("resume_from_checkpoint: true", "resume_from_checkpoint", "True"),
            ("model_init_kwargs: {revision: main}", "model_init_kwargs", '{"revision": "main"}'),
            ("height:", "height", None),
            ("rewards: {a: 0.5, my.py:b: }", "rewards", ["a", "my.py:b"]),
            ("rewards: {a: 0.5, my.py:b: }", "reward_weights", [0.5, 1.0]),
            ("rewards: [a: 0.5, my.py:b]", "rewards", ["a", "my.py:b"]),
            ("rewards: [a: 0.5, my.py:b]", "reward_weights", [0.5, 1.0]),
        ],
    )
    def test_a_value_that_fits(self, tmp_path, text, name, value):
        assert getattr(self.parse(tmp_path, text), name) == value

    @pytest.mark.parametrize("word", ["-1e-4", "-1.5E3", "-.5", "-2."])
    def test_a_negative_number(self, tmp_path, word):
        assert self.parse(tmp_path, "height: 8", "--learning_rate", word).learning_rate == float(word)

    def test_none_where_it_is_no_value(self, tmp_path):
        for words in (["--max_steps", "None"], ["--learning_rate", "null"], ["--swap", "None"]):
            name, default = words[0][2:], getattr(Arguments(), words[0][2:])
            with pytest.raises(ValueError, match=f"`--{name}`: .*; leave it out for the default, {default}"):
                self.parse(tmp_path, "height: 8", *words)
        assert self.parse(tmp_path, "height: 8", "--height", "None").height is None

    def test_an_error_says_that_it_is_in_the_file(self, tmp_path):
        for text in ("learning_rate: fast", "max_stepz: 3", "sde_steps: [1, b]"):
            with pytest.raises(ValueError, match="^In the file of `--config`: "):
                self.parse(tmp_path, text)
        with pytest.raises(ValueError, match="^there is no option `--max_stepz`"):
            self.parse(tmp_path, "swap: no", "--max_stepz", "3")

    def test_the_command_line_comes_first(self, tmp_path, capsys):
        for text in ("rewards: a", "rewards: a\nreward_weights: null"):  # nothing is left out
            assert self.parse(tmp_path, text, "--reward_funcs", "b", "c").rewards == ["b", "c"]
        assert capsys.readouterr().err == ""
        weighted = "rewards: {a: 0.5, b: 2}"
        for words, rewards, weights in (
            ([], ["a", "b"], [0.5, 2]),
            (["--rewards", "c", "d"], ["c", "d"], None),
            (["--rewards", "x=1/c.py", "=d", "e=0"], ["x=1/c.py", "=d", "e"], [1, 1, 0]),
            (["--reward_weights", "3", "4"], ["a", "b"], [3, 4]),
        ):
            parsed = self.parse(tmp_path, weighted, *words)
            assert (parsed.rewards, parsed.reward_weights) == (rewards, weights)
        assert (
            capsys.readouterr().err
            == "paco-trl test: without rewards=['a', 'b'], reward_weights=[0.5, 2.0] of the file, because of `--rewards`.\n"
        )
        for text, words in (
            (f"{weighted}\nreward_weights: [1, 2]", []),
            ("", ["--rewards", "a=1", "--reward_weights", "1"]),
        ):
            with pytest.raises(ValueError, match="reward_weights"):
                self.parse(tmp_path, text or "swap: no", *words)

    @staticmethod
    def parse_checked(tmp_path, text: str, *words: str) -> Arguments:
        """With a rule between two options, and one about a third."""

        def check(parsed: Arguments) -> Iterator[OptionError]:
            if parsed.height is not None and parsed.height > parsed.max_steps + 2:
                rest = f"at a `learning_rate` of {parsed.learning_rate}"  # which has nothing to do with it
                message = f"`height` is {parsed.height}, but `max_steps` {parsed.max_steps} {rest}."
                yield OptionError(message, "height", "max_steps")
            yield from find_unused(parsed, ["sde_steps"] * parsed.swap, "with `--swap`", "swap")

        (tmp_path / "a.yaml").write_text(text)
        words = ["--config", str(tmp_path / "a.yaml"), *words]
        return CommandParser(Arguments, prog="paco-trl test", check=check).parse_args_and_config(words)[0]

    @pytest.mark.parametrize("is_sum", [False, True])
    def test_as_little_as_possible_is_left_out(self, tmp_path, capsys, is_sum):
        """One option if that mends it, or all that take part; and none for an option that is only recommended."""
        (tmp_path / "a.yaml").write_text("max_steps: 30\nheight: 20\nlearning_rate: 0.5\n")

        def check(parsed: Arguments) -> Iterator[OptionError]:
            largest = parsed.max_steps + parsed.height if is_sum else min(parsed.max_steps, parsed.height)
            if len(parsed.rewards) > 1 and largest > 8:
                yield OptionError("too large", "max_steps", "height", "rewards")
            if parsed.learning_rate > 0.4 and not parsed.swap:
                yield OptionError("too fast", "learning_rate", remedies=["swap"])

        parser = CommandParser(Arguments, prog="paco-trl test", check=check)
        words = ["--config", str(tmp_path / "a.yaml")]
        (parsed,) = parser.parse_args_and_config([*words, "--rewards", "a", "b"])
        assert (parsed.max_steps, parsed.height, parsed.learning_rate) == (3, 5 if is_sum else 20, 0.5)
        assert ("height=20" in capsys.readouterr().err) == is_sum
        with pytest.raises(OptionError, match="too fast"):
            parser.parse_args_and_config([*words, "--swap", "no"])

    def test_what_contradicts_the_command_line_is_left_out(self, tmp_path, capsys):
        text = "learning_rate: 0.5\nheight: 20\nmax_steps: 30\nswap: no\nsde_steps: [1]\n"
        parsed = self.parse_checked(tmp_path, text, "--max_steps", "10", "--swap")
        assert (parsed.height, parsed.max_steps, parsed.sde_steps, parsed.learning_rate) == (5, 10, None, 0.5)
        assert parsed.chosen == {"max_steps", "swap", "learning_rate"}
        said = capsys.readouterr().err.splitlines()
        assert "test: without height=20 of the file, because of `--max_steps`." in said[0] and len(said) == 2
        parsed = self.parse_checked(tmp_path, text, "--max_steps", "25")
        assert (parsed.height, parsed.sde_steps) == (20, [1]) and capsys.readouterr().err == ""
        for text, words in (
            ("height: 20\nmax_steps: 10\n", ["--learning_rate", "1"]),  # within the file
            ("height: 20\n", ["--learning_rate", "1"]),
            ("learning_rate: 1.0\n", ["--height", "20", "--max_steps", "10"]),  # within the command line
            ("swap: yes\nsde_steps: [1]\n", ["--learning_rate", "1"]),
            ("learning_rate: 1.0\n", ["--max_steps", "0", "--height", "None"]),
        ):
            with pytest.raises(ValueError, match="height|--sde_steps|--max_steps"):
                self.parse_checked(tmp_path, text, *words)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("learning_rate:", "learning_rate"),
            ("learning_rate: [1, 2]", "learning_rate"),
            ("max_steps: true", "max_steps.* 'True'"),
            ("sde_steps: [1, 2.5]", "sde_steps.* '2.5'"),
            ("max_steps: 1\nmax_steps: 2", "'max_steps' twice"),
            ("rewards: {a: 1, b: 2, a: 3}", "'a' twice"),
            ("no_such_option: 1", "no_such_option"),
        ],
    )
    def test_a_value_that_does_not(self, tmp_path, text, message):
        with pytest.raises((ValueError, ArgumentError), match=message):
            self.parse(tmp_path, text)


class TestOptions:
    """Options that the parser refuses, and those that it completes."""

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (["--max_stepz", "3", *DATA], "`--max_steps`"),
            (["--config", "a.yaml", *DATA], "`--max_steps`"),
            (["--vllm_mod", "x", *DATA], "`--help`"),  # the nearest is refused
            (["--dataset", "a"], "--dataset_name"),
            (["--max_steps", "abc"], "'abc'"),
            (["--config", "list.yaml"], "'list.yaml'"),
            (["--config", "none.yaml"], "flux.1-dev-24gb"),  # what there is
            (["--config", "--max_steps", "3", *DATA], "`--config` lacks its value"),
            (["--config", "wrong.yaml"], "'wrong.yaml', which is not YAML, line 1: expected the node content"),
            (["--config", "a.yaml", "--config=flux.1-dev-80gb", *DATA], "2 files"),
            (["--dataset_name", "no.jsonl"], "no.jsonl"),
            (["--dataset_name", "Demo"], "Did you mean `demo`?"),
            (["--rewards", "rednes", "--dataset_name", str(demo_prompts_path())], "`redness`"),
            (["--rewards", "rednes", *DATA], "words:editscore, words:editscore_qwen3, words:viescore"),
            (["--noise_level", "-1", *DATA], "noise_level"),
            (["--eval_split", "b", *DATA], "--eval_split"),
            ([], "`--dataset_name` is required. Prompts: "),
            (["prompts.txt"], "`--dataset_name prompts.txt`"),
            (["--datset_name", "a.txt"], "`--dataset_name`"),
            (["--modle_name", "a", *DATA], "`--model_name_or_path`"),
            (["--config", "paco-reward-7b", *DATA], "paco-reward-7b"),
            (["--lora_r", "0", *DATA], "--lora_r"),
            (["--num_processes", "0", *DATA], "--num_processes"),
            (["--judge_model", "a/b", "--clip_model", "c/d", *DATA], "`--clip_model`, `--judge_model`"),
            (["--rewards", "redness=1", "clip_t=nan", *DATA], "reward_weights"),
            (["--reward_weights", "1", "2", *DATA], "reward_weights"),
            (["--use_peft", "False", "--lora_r", "8", *DATA], "--lora_r"),
            (["--eval_rewards", "redness", *DATA], "--eval_rewards"),
            (["--output_dir", "a.yaml", *DATA], "a file"),
            (["--dataset_name", ""], "`--dataset_name` is empty"),
            *(([f"--output_dir={word}", *DATA], "`--output_dir` is empty") for word in ("", "None", "null")),
            (["--output_dir", "/proc/x/y", *DATA], "'/proc/x/y', but '/proc' cannot be written to: "),
            (["--config", "empty.yaml", *DATA], "`--hub_model_id` is empty"),
            (["--hub_model_id", "me/x", *DATA], "`--hub_model_id` would do nothing without `--push_to_hub`"),
            (["--output_dir", "a.yaml/run", *DATA], "'a.yaml/run', but 'a.yaml' is a file"),
            (["--seed", "-1", *DATA], "`--seed`"),
            (["--lora_rank", "8", *DATA], "Did you mean `--lora_r`?"),
            (["--lora_dropout", "0.1", *DATA], "no option `--lora_dropout`. See"),  # not `--lora_r`
            (["--dataset_name", str(demo_prompts_path()), "--rewards", "no.py"], "no file 'no.py' of a reward. Check"),
            ([*DATA, "--resume_from_checkpoint"], "`--resume_from_checkpoint auto`"),
            (["--model_init_kwargs", "{revision: 5}", *DATA], "`--model_init_kwargs`"),
            (["--model_init_kwargs", "[1]", *DATA], "by name"),
            (["--jit_checkpoint_signals", "SIGKILL", *DATA], "'SIGKILL'"),
            (
                ["--dataset_name", "./no.csv", "--eval_dataset_name", "./nor.csv", "--eval_strategy", "steps"],
                "./no.csv",
            ),
            (
                ["--dataset_name", "./no.csv", "--eval_dataset_name", "./nor.csv", "--eval_strategy", "steps"],
                "./nor.csv",
            ),
            (["--dataset_name", str(demo_prompts_path()), "--adapter", "no-adapter"], "no adapter 'no-adapter'"),
            (["--dataset_name", str(demo_prompts_path()), "--adapter", "judge"], "is a judge, which generates"),
            (["--dataset_name", "user/no-such-dataset"], "`HF_HUB_OFFLINE`"),
            (
                ["--dataset_name", str(demo_prompts_path()), "--rewards", "consistency", "--judge_model", "o-judg"],
                "no directory 'o-judg'",
            ),
            ([*DATA, "--model_name_or_path", "modell"], "Did you mean 'model'?"),  # the Hub is not asked
            (["--dataset_name", str(demo_prompts_path()), "--model_name_or_path", "lora"], "--adapter"),
            (["--dataset_name", str(demo_prompts_path()), "--rewards", "two.py"], "`two.py:f`"),
            (["--dataset_name", str(demo_prompts_path()), "--rewards", "two.py,redness"], "spaces: `two.py redness`"),
            (["--dataset_name", str(demo_prompts_path()), "--rewards", "empty.py"], "has no function or class"),
            (["--dataset_name", str(demo_prompts_path()), "--rewards", "plain.py"], "'f' lacks `**kwargs`"),
            (["--report_to", "neptune", *DATA], "`pip install neptune`"),
            (["--dataset_name", "no/such/prompts"], "no file or directory 'no/such/prompts'"),
            (["--load_in_4bit", *DATA], "`--quantization`"),
            (["--deepspeed", "zero3", *DATA], "`--accelerate_config zero3`"),
            (["--accelerate_config", "list.yaml", *DATA], "'list.yaml', but must contain settings"),
            (["--accelerate_config", "wrong.yaml", *DATA], "'wrong.yaml', which is not YAML"),
            (["--dataset_name", str(demo_prompts_path()), "--eval_rewards", "a,b"], "`--eval_rewards` has 'a,b'"),
            (
                ["--dataset_name", str(demo_prompts_path()), "--rewards", "consistency", "--judge_model", "model"],
                "image pipeline",
            ),
            (
                [
                    "--dataset_name",
                    str(demo_prompts_path()),
                    "--output_dir",
                    "a",
                    "--resume_from_checkpoint",
                    "a/checkpoint-7",
                ],
                "no checkpoint 'a/checkpoint-7'",
            ),
        ],
        ids=str,
    )
    def test_refused(self, words, named, tiny_flux, tmp_path, monkeypatch, capsys):
        (tmp_path / "a.yaml").write_text("max_steps: 3\nmax_stepz: 3\n")
        (tmp_path / "list.yaml").write_text("- max_steps\n")
        (tmp_path / "wrong.yaml").write_text("a: [")
        (tmp_path / "empty.yaml").write_text("hub_model_id: ''\nnegative_prompt: ''\n")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "lora").mkdir()
        (tmp_path / "lora" / "adapter_config.json").write_text("{}")
        (tmp_path / "judge").mkdir()
        (tmp_path / "judge" / "adapter_config.json").write_text('{"base_model_name_or_path": "user/judge"}')
        (tmp_path / "judge" / "adapter_model.safetensors").touch()
        (tmp_path / "judge" / "paco_trl.json").write_text('{"kind": "judge"}')
        (tmp_path / "two.py").write_text("def f(**kwargs): pass\ndef g(**kwargs): pass\n")
        (tmp_path / "empty.py").write_text("import math\n")
        (tmp_path / "plain.py").write_text("def f(prompts, completions): pass\n")
        (tmp_path / "model").symlink_to(tiny_flux)
        common = f"--rewards redness --model_name_or_path {tiny_flux} --output_dir out --use_cpu --bf16 False".split()
        code = main.main(["grpo", *common, *words])
        shown = capsys.readouterr().err
        assert code == 2 or code == 1 and shown.startswith("paco-trl grpo: ")
        assert named in shown and "Traceback" not in shown and not (tmp_path / "out").exists()
        assert "`--negative_prompt` is empty" not in shown

    def test_a_wrong_value_in_a_file_is_no_contradiction(self, tiny_flux, tmp_path):
        """Without the typed `--sde_steps` another error would hide this one."""
        (tmp_path / "a.yaml").write_text("scale_rewards: nosuch\n")
        words = ["--config", str(tmp_path / "a.yaml"), "--num_inference_steps", "2", "--sde_steps", "0", "--use_cpu"]
        words += ["--bf16", "False", "--model_name_or_path", str(tiny_flux)]
        with pytest.raises(ValueError, match="`scale_rewards` is 'nosuch'"):
            ImageCommandParser(ScriptArguments, "PaCoGRPOConfig", prog="paco-trl grpo").parse_args_and_config(
                [*words, "--output_dir", str(tmp_path / "o"), *DATA]
            )
        (tmp_path / "a.yaml").write_text("scale_rewards: false\n")
        _, args = ImageCommandParser(ScriptArguments, "PaCoGRPOConfig", prog="paco-trl grpo").parse_args_and_config(
            [*words, "--output_dir", str(tmp_path / "o"), *DATA]
        )
        assert args.scale_rewards == "none"

    @pytest.mark.parametrize(
        ("words", "tokens"),
        [
            (
                "--num_generations 1 --beta -1 --use_peft False --lora_r 8",
                "num_generations beta --lora_r --dataset_name",
            ),
            ("--max_steps many --datset_name a --lern 3 --seed=x", "--max_steps `--dataset_name` --lern --seed"),
            ("--sde_steps 1 9 --tail_steps 9 --dataset_name no.txt --rewards clip", "sde_steps no.txt `clip_t`"),
            (
                "--config flux.1-dev-24gb --height 0 --adapter user/a --use_peft False",
                "height --adapter --dataset_name",
            ),
        ],
    )
    def test_all_that_is_wrong_is_said_at_once(self, words, tokens, capsys):
        assert main.main(["grpo", *words.split()]) == 1
        shown = capsys.readouterr().err
        lines = [line for line in shown.splitlines() if line.startswith("- ")]
        assert len(lines) == len(tokens.split()) and all(token in shown for token in tokens.split())

    def test_defaults_of_a_family_may_make_it_right(self, capsys):
        """Which one the model has is known later."""
        for words, is_refused in (("--image_folder a", False), ("--clip_model a --rewards redness", True)):
            parser, said = ImageCommandParser(ScriptArguments, "PaCoGRPOConfig", prog="paco-trl grpo"), ""
            try:
                parser.read([*DATA, *words.split()])
            except ValueError as error:
                said = str(error)
            assert bool(said) == is_refused

    def test_the_value_of_an_unknown_option_is_not_shown(self, capsys):
        for words in (["--hub_tokenn", "hf_secret"], ["--hub_tokenn=hf_secret"]):
            assert main.main(["grpo", *DATA, *words]) == 1
            shown = capsys.readouterr().err
            assert "--hub_tokenn" in shown and "hf_secret" not in shown

    @pytest.mark.parametrize("word", ["None", "null", "none"])
    def test_an_option_is_unset(self, word):
        names = ("sde_steps", "reward_weights", "resume_from_checkpoint", "model_init_kwargs", "height")
        words = [each for name in names for each in (f"--{name}", word)]
        (parsed,) = CommandParser(Arguments).parse_args_and_config([*words, "--save_strategy", "no"])
        assert {getattr(parsed, name) for name in names} == {None} and parsed.chosen == {"save_strategy"}
        with pytest.raises(ValueError, match=word):
            CommandParser(Arguments).parse_args_and_config(["--max_steps", word])

    def test_an_option_without_its_name(self):
        parser = CommandParser(Arguments, positional="resume_from_checkpoint")
        (parsed,) = parser.parse_args_and_config("folder --max-steps 5".split())
        assert (parsed.resume_from_checkpoint, parsed.max_steps) == ("folder", 5)

    def test_processes_in_a_file(self, tmp_path, monkeypatch):
        """They are started already."""
        monkeypatch.setenv("PACO_TRL_IS_LAUNCHED", "1")
        (tmp_path / "a.yaml").write_text("num_processes: 2\nmax_steps: 5\n")
        words = ["--config", str(tmp_path / "a.yaml")]
        (parsed,) = CommandParser(Arguments, is_launched=True).parse_args_and_config(words)
        assert parsed.max_steps == 5
        with pytest.raises(ValueError, match="num_processes"):
            CommandParser(Arguments).parse_args_and_config(words)


WRONG = (
    *("grpo", "doctor grpo --lora_r 0", "grpo --rewards reednes --dataset_name demo", "grpo --dataset_name no.txt"),
    *("grpo --dataset_name demo --learning_rate -1", "reward --lr_scheduler_type cosin"),
    "grpo --dataset_name demo --rewards my.py=abc",
    *("grpo --dataset_name demo --report_to wandbb", "nft --config paco-flux.1-dev --dataset_name demo --nft_beta 0"),
    "grpo --dataset_name demo --gradient_accumulation_steps 3 --num_prompts_per_generation 7",
    *("reward --max_length 0", "reward --config paco-flux.1-dev", "grpo --dataset_name demo --adapter no"),
    *("evaluate prompts --dataset_name no.txt", "evaluate prompt", "build grid", "build grids --seeds a"),
    *("evaluate prompts --dataset_name demo --rewards redness --clip_model a", "build rank --judge_url http://a"),
    *("evaluate judge --judge_url http://a/v1 --device cpu", "evaluate report --dataset_name demo --card x"),
    *("push no", "merge a", "merge no --output_dir x", "space no", "serve --vllm /no/vllm"),
)
AT_ONCE = [*WRONG, *(f"{name} --help" for name in main.COMMANDS), "doctor nft --help", "grpo --help all"]
AT_ONCE += [f"evaluate {name} --help" for name in evaluate_arguments.STAGES]
AT_ONCE += [f"build {name} --help" for name in build_arguments.STAGES]


class TestDescribedOptions:
    """The command line parses and refuses before torch and the configs are imported."""

    def test_they_are_those_of_the_configs(self):
        installed = {name: env.get_version(name) for name in env.TESTED_WITH}
        if any(not installed[name].startswith(f"{tested}.") for name, tested in env.TESTED_WITH.items()):
            pytest.skip(f"other versions have other options: {installed}")
        file = Path(parser_module.__file__).with_name("config_options.json")
        assert file.read_text() == config_options.text(), "`make options` writes it"

    def test_nothing_that_takes_seconds_is_imported(self, tmp_path):
        for name, content in (
            ("p", b"a fox"),
            ("blank", b"\n \n"),
            ("latin", b"caf\xe9"),
            ("utf16", "a".encode("utf-16")),
        ):
            (tmp_path / f"{name}.txt").write_bytes(content)
        (tmp_path / "run" / "checkpoint-8").mkdir(parents=True)
        (tmp_path / "run" / "checkpoint-8" / "run.json").write_text('{"run": {}, "files": {}}')
        words, run = f"--dataset_name {tmp_path}/", f"--output_dir {tmp_path}/run"
        of_files = [f"{name} {words}{file}.txt" for name in ("grpo", "reward") for file in ("blank", "latin", "utf16")]
        of_files += [f"{name} {words}p.txt {run}" for name in ("grpo", "nft", "reward")]
        of_files.append(f"nft {words}p.txt --resume_from_checkpoint {tmp_path}/no")
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "README.md").write_text("Mine.")
        (tmp_path / "empty").mkdir()
        of_files += [f"{name} {words}p.txt --output_dir {tmp_path}/mine" for name in ("grpo", "reward")]
        of_files += [
            f"{name} {words}p.txt --output_dir {tmp_path}/new --resume_from_checkpoint True"
            for name in ("nft", "reward")
        ]
        of_files += [f"grpo {words}p.txt --dataset_split trian", f"grpo {words}empty"]
        of_files += [f"grpo {words}p.txt --model_name_or_path {tmp_path}/mine"]
        code = f"import sys\nfrom paco_trl.commands.main import main\nfor words in {[*AT_ONCE, *of_files]}: main(words.split())\n"
        code += (
            "print(*({'torch', 'transformers', 'diffusers', 'trl', 'datasets', 'numpy'} & sys.modules.keys()), 'end')"
        )
        # The launcher of other tests forks from a process that has them
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "end"
        said = done.stderr.splitlines()
        lines = [line for line in said if line.startswith("paco-trl ")]
        assert "Traceback" not in done.stderr and len(lines) == len([*WRONG, *of_files])
        assert "PACO_TRL_TRACEBACK" not in done.stderr and done.stderr.count("checkpoint-8 of an earlier run") == 3

    def test_broken_rows_are_said_before_torch_is_imported(self, tmp_path):
        (tmp_path / "rows.jsonl").write_text('{"prompt": "a fox"}\n{"prompt": \n')
        (tmp_path / "rows.csv").write_text("prompt,rows\na fox,1,2\n")
        words = [
            f"{name} --dataset_name {tmp_path}/rows.{end}" for name in ("grpo", "reward") for end in ("jsonl", "csv")
        ]
        words.append(f"nft --dataset_name demo --eval_dataset_name {tmp_path}/rows.csv --eval_on_start")
        code = f"import sys\nfrom paco_trl.commands.main import main\nfor words in {words}: main(words.split())\n"
        code += "print(*({'torch', 'transformers', 'diffusers', 'trl'} & sys.modules.keys()), 'end')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "end"
        assert done.stderr.count("rows.jsonl: what begins on line 2 is not valid JSON") == 2
        assert done.stderr.count("rows.csv', line 2 has 3 fields, not 2") == len(done.stderr.splitlines()) - 2 == 3

    def test_what_merge_and_push_refuse_at_once(self, tmp_path, capsys):
        (tmp_path / "mine").touch()
        for words, message in (
            (f"merge user/adapter --output_dir {tmp_path}", "exists and is not empty"),
            (f"space user/adapter --output_dir {tmp_path}", "exists and is not empty"),
            (f"push {tmp_path} --hub_model_id a/b/c", "Repo id must be in the form"),
        ):
            assert main.main(words.split()) == 1
            assert message in capsys.readouterr().err

    def test_the_help_is_short(self, capsys):
        for command in ("grpo", "nft", "reward", "doctor grpo"):
            counts = []
            for words in ("--help", "--help all"):
                assert main.main([*command.split(), *words.split()]) == 0
                shown = capsys.readouterr().out
                counts.append(len(re.findall("^  --", shown, flags=re.M)))
                assert "--output_dir" in shown and ("--warmup_steps" in shown) == (words != "--help")
                assert "--temperature" not in shown and "--learning-rate" not in shown
            assert 15 < counts[0] < 32 and counts[1] > 100

    def test_an_option_that_the_installed_libraries_lack(self, monkeypatch):
        described = copy.deepcopy(parser_module.config_options())
        described["options"]["GRPOConfig"]["new_option"] = {"type": "int"}
        monkeypatch.setattr(parser_module, "config_options", lambda: described)
        with pytest.raises(ValueError, match="no option `--new_option`"):
            CommandParser("PaCoGRPOConfig").parse_args_and_config(["--new_option", "1", "--use_cpu"])


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (OptionError("`a` is 1. Set `b`.", "a", remedies=["b"]), "`--a` is 1. Set `--b`."),
            (OptionError("`a` is 1, in the column `c`.", "a"), "`--a` is 1, in the column `c`."),
            (ValueError("The column `a` is empty."), "The column `a` is empty."),
            (ValueError("Set `resume='auto'`, or `a=None`."), "Set `--resume auto`, or `--a None`."),
            (ValueError('Set `a=" "`, or `my=value` there.'), "Set `--a ' '`, or `my=value` there."),
        ],
    )
    def test_options_are_those_of_a_command_line(self, error, expected, capsys, monkeypatch):
        monkeypatch.delenv("PACO_TRL_TRACEBACK", raising=False)
        assert messages.format_as_flags(error) == expected
        if isinstance(error, OptionError):
            with pytest.raises(OptionError) as refused:
                raise_errors([error, OptionError(*error.args), OptionError("`d` is 2.", "d")])
            assert str(refused.value).startswith("2 problems:") and "`--d` is 2." in messages.format_as_flags(
                refused.value
            )
            assert expected in messages.format_as_flags(refused.value)

    @pytest.mark.parametrize(
        ("line", "is_ours"),
        [
            ("raise ValueError('no such file')", True),
            ("raise ValueError(f'no file {dict()[1]}')", False),  # the message itself fails
            ("raise ValueError(\n        'no file'\n    ) from None", True),
            ("{}[1]", False),
        ],
    )
    def test_an_error_is_ours_if_a_raise_of_the_package_made_it(self, tmp_path, monkeypatch, line, is_ours):
        monkeypatch.delenv("PACO_TRL_TRACEBACK", raising=False)
        path = tmp_path / "module.py"
        path.write_text(f"def run():\n    {line}\n")
        scope: dict = {}
        exec(compile(path.read_text(), str(path), "exec"), scope)
        with pytest.raises((ValueError, KeyError)) as raised:
            scope["run"]()
        assert not is_user_error(raised.value)  # it is of no module of the package
        monkeypatch.setattr(errors, "_PACKAGE", f"{tmp_path}{os.sep}")
        assert is_user_error(raised.value) == is_ours

    @pytest.mark.parametrize("is_asked", [False, True])
    def test_our_errors_are_a_line_and_bugs_have_a_traceback(self, capsys, monkeypatch, is_asked):
        def reward_that_raises(error: Exception):
            def reward(prompts, completions, **kwargs):
                raise error

            return lambda: Rewards([reward]).call(0, prompts=["A fox."], completions=[None])

        def fail(error: Exception):
            raise error

        monkeypatch.setenv("PACO_TRL_TRACEBACK", str(int(is_asked)))
        parser = CommandParser("PaCoGRPOConfig")
        words = ["--output_dir", "out", "--eval_strategy", "steps", "--eval_steps", "0", "--logging_steps", "0"]
        unavailable = JudgeUnavailableError("no judge")
        for run, token in (
            (lambda: CommandParser(Arguments).parse_args_and_config(["--max_steps", "many"]), "--max_steps"),
            (lambda: config_files.find_yaml("config", "flux", "recipes"), "'flux'"),
            (lambda: open("missing.txt"), "missing.txt"),
            (lambda: fail(CheckpointError("the disk is full")), "the disk is full"),
            (lambda: fail(SafetensorError("No space left")), "No space left"),
            (reward_that_raises(unavailable), "no judge"),
            (lambda: parser.parse_args_and_config(words), "--eval_steps"),  # of transformers' settings
        ):
            if is_asked:
                with pytest.raises(Exception, match=token):
                    main.run_command("grpo", run)
                continue
            assert main.run_command("grpo", run) == 1
            said = capsys.readouterr().err
            assert said.startswith("paco-trl grpo: ") and said.count("\n") == 1
            # A traceback helps where another library raised
            assert token in said and ("PACO_TRL_TRACEBACK=1" in said) == (token in ("missing.txt", "No space left"))
        # A library's, or a slip of ours, which no `raise` stands behind
        bugs: list[Callable] = [
            lambda: fail(ValueError("too many values")),
            lambda: torch.nn.functional.interpolate(torch.zeros(1, 1, 2, 2)),
            lambda: number_text("three"),
            lambda: fail(ImportError("cannot import name")),
        ]
        if is_asked:
            bugs.append(reward_that_raises(TypeError("a bug")))
        for run in bugs:
            with pytest.raises((ValueError, TypeError, ImportError, RewardError)):
                main.run_command("grpo", run)
            assert capsys.readouterr().err == ""

    @pytest.mark.parametrize(
        "code, words, line",
        [
            ("def f(prompts, completions, **kwargs):\n    return {}['a']", "raised KeyError: 'a'", 2),
            ("class F:\n    def __init__(self):\n        self.a = {}['a']", "raised KeyError: 'a'", 3),
            ("def f(**kwargs)\n    pass", "SyntaxError: expected ':'", 1),
            ("import sys\nimport not_there", "No module named 'not_there'", 2),
            ("import broken_helper", "SyntaxError", 1),
            ("import sys\nsys.exit('no key')", "SystemExit: no key", 2),
        ],
    )
    def test_an_error_in_a_reward_has_its_frames_alone(self, capsys, monkeypatch, tmp_path, code, words, line):
        (tmp_path / "my_rewards.py").write_text(code)
        (tmp_path / "broken_helper.py").write_text("def f(:")
        monkeypatch.setattr(sys, "path", [*sys.path])
        arguments = ScriptArguments(rewards=[f"{tmp_path}/my_rewards.py"])

        def run() -> None:
            Rewards(load_rewards(arguments)).call(0, prompts=["A fox."], completions=[None])

        assert main.run_command("grpo", run) == 1
        frames, _, said = capsys.readouterr().err.partition("paco-trl grpo: ")
        assert f'my_rewards.py", line {line}' in frames and words in said and "my_rewards.py" in said
        assert frames.count("Traceback") <= 1 and "/paco_trl/" not in frames and "importlib" not in frames
        assert said.count("\n") == 1

    @pytest.mark.parametrize("is_in_path", [False, True])
    def test_a_name_that_is_not_text(self, tmp_path, monkeypatch, capsys, is_in_path):
        """As any name beyond ASCII is with `LC_ALL=C PYTHONUTF8=0`: cards and settings could not hold it at the end."""
        name = os.fsdecode(b"\xfcber lauf")
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name if is_in_path else tmp_path)
        assert main.main(["push", "out" if is_in_path else name]) == 1
        shown = capsys.readouterr().err
        assert "\\xfcber lauf" in shown and "PYTHONUTF8=1" in shown
        monkeypatch.chdir(tmp_path)
        (tmp_path / "über lauf").mkdir()
        assert main.main(["push", "über lauf"]) == 1
        assert "PYTHONUTF8" not in capsys.readouterr().err

    def test_the_other_processes_wait(self, capsys, monkeypatch):
        """The launcher ends them when the first one has spoken."""
        waited = []
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr(main.time, "sleep", lambda seconds: waited.append((seconds, capsys.readouterr().err)))
        assert main.run_command("grpo", lambda: config_files.find_yaml("config", "late", "recipes")) == 1
        assert waited == [(60.0, "")] and "'late'" in capsys.readouterr().err

    @pytest.mark.parametrize("save_steps", [1, 100])
    def test_a_second_ctrl_c_says_how_to_resume(self, make_trainer, capsys, save_steps):
        class Interrupt(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 1:
                    raise KeyboardInterrupt

        trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=save_steps, callbacks=[Interrupt()])
        assert main.run_command("grpo", lambda: train_and_save(trainer, None, None)) == 130
        how = f"Rerun with `--resume_from_checkpoint auto` to resume from '{trainer.args.output_dir}/checkpoint-1'."
        assert capsys.readouterr().err.endswith(f"stopped. {how if save_steps == 1 else 'Nothing is saved.'}\n")

    @pytest.mark.parametrize("command", ["grpo", "build"])
    def test_a_signal_of_the_scheduler(self, capsys, monkeypatch, command):
        """While a model is loaded, for example."""
        before = signal.getsignal(signal.SIGTERM)
        assert main.run_command(command, lambda: os.kill(os.getpid(), signal.SIGTERM)) == 75
        said = capsys.readouterr().err
        assert said.startswith(f"paco-trl {command}: stopped by SIGTERM")
        assert ("--resume_from_checkpoint auto" in said) == (command == "grpo")
        assert signal.getsignal(signal.SIGTERM) is before
        monkeypatch.setenv("RANK", "1")
        assert main.run_command(command, lambda: os.kill(os.getpid(), signal.SIGUSR1)) == 75
        assert capsys.readouterr().err == ""


# What Python has on Linux alone is gone when the command is imported
WINDOWS = """
import os, signal, sys
for module, names in ((os, "EX_TEMPFAIL register_at_fork fork sysconf geteuid"), (signal, "SIGUSR1 SIGHUP SIGKILL")):
    for name in names.split():
        delattr(module, name)
sys.modules |= dict.fromkeys(("fcntl", "pwd", "resource"))
from paco_trl.commands import main
sys.platform = "win32"
sys.exit(main.main(sys.argv[1:]))
"""


def test_other_systems(capsys, monkeypatch):
    for command in ("--version", "grpo"):
        done = subprocess.run([sys.executable, "-c", WINDOWS, command], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "") and done.stderr.count("\n") == 1 and "Linux" in done.stderr
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(OSError, match="Linux"):
        PaCoGRPOConfig("out")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main.main(["--version"]) == 0 and "Linux" in capsys.readouterr().err


@pytest.mark.parametrize("command, advice", [("grop", "Did you mean `grpo`?"), ("xyz", "one of: grpo, nft, reward")])
def test_an_unknown_command_is_a_line(capsys, command, advice):
    assert main.main([command, "--max_steps", "3"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"'{command}'" in said and advice in said


def test_version_and_environment(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert main.main(["env"]) == 0
    shown = capsys.readouterr().out
    for name in ("python", "paco_trl", "trl", "torch", "diffusers", "GPUs", "CUDA of torch"):
        assert re.search(rf"^- {name}: \S", shown, flags=re.M), name
    for secret in (platform.node(), str(Path.home()), str(ROOT)):
        assert secret not in shown


@pytest.mark.parametrize("trl, is_said", [("1.16.5", False), ("1.15.0", False), ("1.160.0", True), ("2.0.0", True)])
def test_a_newer_release_is_said_with_the_pin_that_helps(monkeypatch, capsys, trl, is_said):
    installed = {"trl": trl, "transformers": f"{env.TESTED_WITH['transformers']}.1"}
    monkeypatch.setattr(env, "get_version", lambda name: installed.get(name, "1.0"))
    assert main.main(["env"]) == 0
    row = doctor.check_versions(None)
    for said in (capsys.readouterr().out, row.advice):
        assert ('pip install "trl==1.16.*"' in said) == is_said and "transformers==" not in said
    assert row.verdict == ("warning" if is_said else "ok")


def test_options_of_accelerate_replace_the_process(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(os, "execv", lambda program, words: started.append(words) or sys.exit(0))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("accelerate_config: multi_gpu\nnum_processes: 4\n")
    (tmp_path / "zero3").write_text("num_machines: 1\n")
    config = ["--config", "a.yaml", *DATA]
    prompts = ["evaluate", "prompts", "--num_processes", "2", *DATA]
    for words, launched in (
        (["--num_processes", "8", "--accelerate_config", "zero3"], ["--config_file=zero3", "--num_processes=8"]),
        ([], [f"--config_file={CONFIGS / 'multi_gpu.yaml'}", "--num_processes=4"]),
        (["--accelerate_config", "None"], ["--num_processes=4", "--multi_gpu"]),
        (["--num_processes", "None"], [f"--config_file={CONFIGS / 'multi_gpu.yaml'}"]),
    ):
        os.environ.pop("PACO_TRL_IS_LAUNCHED", None)
        assert main.main(["grpo", *words, *config]) == 0
        assert started.pop()[1:] == [
            "-m", "paco_trl.commands.launcher", *launched, "-m", "paco_trl.commands.main", "grpo", *config,
        ]  # fmt: skip
    assert main.main(prompts) == 1 and not started  # launched already
    del os.environ["PACO_TRL_IS_LAUNCHED"]
    assert main.main(prompts) == 0 and started.pop()[-5:] == ["paco_trl.commands.main", "evaluate", "prompts", *DATA]
    # What is wrong is said before, and a round is divided over as many processes
    for name in ("PACO_TRL_IS_LAUNCHED", "WORLD_SIZE"):
        os.environ.pop(name, None)
    sizes = ["--gradient_accumulation_steps", "42", "--optimizer_steps_per_generation", "2"]
    sizes += ["--num_prompts_per_generation", "42"]
    for words, code in (
        (["--lora_r", "0", *config], 1),
        (["--num_processes", "many", *DATA], 1),
        (["--num_processes", "0", *DATA], 1),
        (["--num_processes", "-1", *DATA], 1),
        (["--accelerate_config", "zero4", *DATA], 1),
        (["--num_processes", "8", *DATA, *sizes], 0),
        (["--num_processes", "4", *DATA, *sizes], 1),
    ):
        assert main.main(["grpo", *words]) == code and len(started) == (code == 0)
        started.clear()
        os.environ.pop("PACO_TRL_IS_LAUNCHED", None)
    assert main.main(["push", "--num_processes", "8"]) == 1 and not started


def test_deepspeed_is_missing(monkeypatch, capsys, tmp_path):
    """Accelerate would say so by a traceback, seconds later."""
    monkeypatch.setattr(os, "execv", lambda program, words: sys.exit(0))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    (tmp_path / "ds.json").write_text("{}")
    words = {"--accelerate_config": "zero3", "--deepspeed": str(tmp_path / "ds.json")}
    assert main.main(["grpo", "--accelerate_config", "zero3", *DATA]) == 0
    for module in (launching, config_checks):
        monkeypatch.setattr(module, "find_spec", lambda package: None if package == "deepspeed" else package)
    for name, value in words.items():
        os.environ.pop("PACO_TRL_IS_LAUNCHED", None)
        assert main.main(["grpo", name, value, *DATA]) == 1
        assert 'pip install "paco_trl[deepspeed]"' in capsys.readouterr().err
