# SPDX-License-Identifier: Apache-2.0
"""The documentation is true: snippets run, options and metrics are those of the code. And its site has all of it."""

import ast
import dataclasses
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig, SFTConfig

import launching
import paco_trl
from paco_trl import PaCoGRPOConfig, PaCoNFTConfig, PaCoRewardConfig, PaCoRewardTrainer
from paco_trl.commands import build_arguments, evaluate_arguments, reward
from paco_trl.commands.doctor_arguments import PlanArguments
from paco_trl.commands.script_arguments import ScriptArguments
from paco_trl.rewards import panel_similarity_reward, redness_reward
from test_paco_reward_trainer import mixed
from testing_utils import docstring


ROOT = Path(__file__).parent.parent
NAMES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
BENCHMARKS = ROOT / "benchmarks"
PAGES = sorted([*(ROOT / name for name in NAMES), *BENCHMARKS.rglob("README.md"), *(ROOT / "docs").glob("*.md")])
CONFIGS = {config.__name__: config for config in (PaCoGRPOConfig, PaCoNFTConfig, PaCoRewardConfig)}
OPTIONS_OF = {name: {field.name for field in dataclasses.fields(config)} for name, config in CONFIGS.items()}


def classes_of(module) -> list[type]:
    return [each for each in vars(module).values() if dataclasses.is_dataclass(each)]


# Words of a command -> the config and the classes of its options; which belong to which stage is tested elsewhere
COMMANDS = {
    "paco-trl grpo": [PaCoGRPOConfig, ScriptArguments],
    "paco-trl nft": [PaCoNFTConfig, ScriptArguments],
    "paco-trl reward": [PaCoRewardConfig, reward.JudgeScriptArguments],
    "paco-trl doctor grpo": [PaCoGRPOConfig, ScriptArguments, PlanArguments],
    "paco-trl doctor nft": [PaCoNFTConfig, ScriptArguments, PlanArguments],
    "paco-trl doctor reward": [PaCoRewardConfig, reward.JudgeScriptArguments, PlanArguments],
    "paco-trl build": classes_of(build_arguments),
    "paco-trl evaluate judge": [evaluate_arguments.JudgeArguments],
    "paco-trl evaluate": classes_of(evaluate_arguments),
}
# Options of each of these commands, and TRL's names of some options
LAUNCH = {"accelerate_config", "num_processes", "dataset_train_split", "dataset_test_split", "reward_funcs"}
# What Trainer and its callbacks log themselves
TRAINERS_KEYS = {"loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos"}

BLOCK = re.compile(r"^(<!-- runnable -->\n)?```(\w+)\n(.*?)^```$", flags=re.M | re.S)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[tuple[bool, str]]:
    """Code blocks of a page, and whether they are marked runnable."""
    return [(bool(mark), code) for mark, name, code in BLOCK.findall(text_of(page)) if name == language]


PYTHON_BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, (_, code) in enumerate(blocks(page, "python"))
]


def config_calls(code: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in CONFIGS
    ]


def run_blocks(pages: list[Path], folder: Path) -> tuple[int, str]:
    """Run the blocks of pages that are marked runnable; return their number and their output."""
    runnable = [code for page in pages for is_runnable, code in blocks(page, "python") if is_runnable]
    # In one process, sharing only the directory
    driver = "import json, sys\nfor code in json.loads(sys.argv[1]):\n    exec(code, {'__name__': '__main__'})"
    return len(runnable), launching.check_run(["-c", driver, json.dumps(runnable)], cwd=folder)


class TestSnippets:
    @pytest.mark.slow
    def test_runnable_blocks_run(self, tmp_path):
        number, printed = run_blocks(PAGES, tmp_path)
        assert number >= 12  # they are found
        # What the text around them promises
        assert (tmp_path / "paco-tiny" / "contact_sheets" / "round_00001.png").exists()
        assert (tmp_path / "paco-tiny" / "pytorch_lora_weights.safetensors").exists()
        for name in ("adapter_model.safetensors", "README.md", "eval_calibration.png", "eval_wrong_pairs.png"):
            assert (tmp_path / "tiny-judge" / name).exists()
        same, other = map(float, re.search(r"same color: (\S+), other color: (\S+)", printed).groups())
        assert other < 0.2 < 0.8 < same
        assert "ratio 1.0" in printed  # of the family that docs/add_a_family.md writes from scratch
        assert (tmp_path / "paco-edit" / "pytorch_lora_weights.safetensors").exists()

    def test_the_commands_of_the_speedrun_are_those_of_its_script(self):
        """It is run by tests/test_examples.py; the pages show it with a name, and may leave options out."""

        def commands_in(code: str) -> dict[tuple[str, str], list[set[str]]]:
            lines = [shlex.split(line, comments=True) for line in code.replace("\\\n", " ").splitlines()]
            found: dict[tuple[str, str], list[set[str]]] = {}
            for words in lines:
                if words[:1] in (["paco-trl"], ["hf"]) and words[1] != "auth":
                    found.setdefault((words[0], words[1]), []).append({*words[2:]})
            return found

        text = text_of(ROOT / "examples" / "speedrun.sh").replace(
            "${EVALUATION:---judge_quantization nf4}", "--judge_quantization nf4"
        )
        script = commands_in(text.replace("$repository", "USER/paco-klein").replace("$name", "paco-klein"))
        assert len(script) == 5
        for page, number in (("README.md", 3), ("docs/speedrun.md", 5)):
            shown = [commands_in(code) for _, code in blocks(ROOT / page, "bash") if "demo" in code or "push" in code]
            shown = [(name, words) for found in shown for name, each in found.items() for words in each]
            assert len({name for name, _ in shown}) == number
            for name, words in shown:
                assert words <= script[name][0], f"{page}: {name}"

    @pytest.mark.parametrize("code", PYTHON_BLOCKS)
    def test_python_compiles_and_what_it_imports_and_sets_exists(self, code):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "paco_trl":
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"
        for call in config_calls(code):
            assert {keyword.arg for keyword in call.keywords} <= OPTIONS_OF[call.func.id]

    @pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*/*.json")), ids=lambda path: path.stem)
    def test_the_numbers_of_a_benchmark_are_those_of_its_results(self, path):
        text = text_of(path.parent / "README.md")
        assert f"[`{path.name}`]({path.name})" in text
        ratios = json.loads(path.read_text(encoding="utf-8"))["ratios"].values()
        numbers = [n for ratio in ratios for n in (ratio.values() if isinstance(ratio, dict) else [ratio])]
        assert len(numbers) > 1
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(str(number))}(?![\d.]\d)", text), number

    @pytest.mark.parametrize("name", ["bright_panels_reward", "brightest_of_group_reward"])
    def test_the_written_rewards_are_rewards(self, make_trainer, name):
        (code,) = [code for _, code in blocks(ROOT / "docs/rewards.md", "python") if f"def {name}" in code]
        namespace: dict = {}
        exec(code, namespace)
        trainer = make_trainer(reward_funcs=namespace[name], max_steps=1)
        trainer.train()
        mean = trainer.state.log_history[0][f"rewards/{name}/mean"]
        # One compares a group, of four images that differ: 0, 1/3, 2/3 and 1
        assert mean == pytest.approx(0.5) if "group" in name else 0 < mean < 1


class TestOptions:
    def test_configs_of_the_paper_index_are_valid(self, tmp_path):
        calls = [call for _, code in blocks(ROOT / "docs" / "method.md", "python") for call in config_calls(code)]
        assert len(calls) == 11
        for call in calls:
            settings = {keyword.arg: eval(ast.unparse(keyword.value)) for keyword in call.keywords}
            settings |= {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
            args = CONFIGS[call.func.id](**settings)
            # On one process nothing is rounded: what the page says is what runs
            assert {name: getattr(args, name) for name in settings} == settings
        # The first config of each kind has the paper's settings, which are the defaults
        for name in ("PaCoGRPOConfig", "PaCoRewardConfig"):
            call = next(call for call in calls if call.func.id == name)
            defaults = CONFIGS[name](str(tmp_path), use_cpu=True, bf16=False)
            settings = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            del settings["output_dir"]
            assert len(settings) > 8 and {name: getattr(defaults, name) for name in settings} == settings

    @pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
    def test_options_of_the_commands_exist(self, page):
        for command, words in commands_with_options(page):
            options = {field.name for each in COMMANDS[command] for field in dataclasses.fields(each)}
            options |= LAUNCH | {"config"}
            for word in words:
                if word.startswith("--"):
                    assert word[2:] in options, f"{page.name}: {command} {word}"


@pytest.mark.parametrize("ours, theirs", [(PaCoGRPOConfig, GRPOConfig), (PaCoRewardConfig, SFTConfig)])
def test_other_defaults(ours, theirs):
    """The tables of docs/paco_grpo_trainer.md are those of the code."""

    def defaults(config):
        return {field.name: field.default for field in dataclasses.fields(config)}

    table = (
        text_of(ROOT / "docs" / "paco_grpo_trainer.md")
        .split(f"`{ours.__name__}` and `trl.{theirs.__name__}`:")[1]
        .split("\n\n")[1]
    )
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \| `(.+?)` \|", table, flags=re.M)
    documented = {name: tuple(map(ast.literal_eval, values)) for name, *values in rows}
    here, there = defaults(ours), defaults(theirs)
    changed = {name: (there[name], here[name]) for name in there if there[name] != here[name]}
    assert len(changed) > 5
    assert documented == changed


class TestMetrics:
    """The list under "Logged metrics" is what a run logs, in both directions."""

    @staticmethod
    def documented(page: str) -> set[str]:
        text = text_of(ROOT / "docs" / page)
        (section,) = re.findall(r"^## Logged metrics\n(.*?)^## ", text, flags=re.M | re.S)
        lines = re.findall(r"^- ((?:`[^`]+`(?:, )?)+):", section, flags=re.M)
        return {key for line in lines for key in re.findall(r"`([^`]+)`", line)}

    @staticmethod
    def compare(logged: set[str], documented: set[str]) -> None:
        assert logged - documented == set(), "logged, but not documented"
        assert documented - logged == set(), "documented, but not logged"

    def test_documented_keys_are_the_logged_ones(self, make_trainer, prompts):
        settings = {
            "beta": 0.01, "num_inference_steps": 5, "sde_steps": [1, 2],
            "eval_strategy": "steps", "eval_steps": 2, "num_generations_eval": 2, "num_inference_steps_eval": 2,
        }  # fmt: skip
        rewards = [redness_reward, panel_similarity_reward]
        trainer = make_trainer(reward_funcs=rewards, eval_dataset=prompts.select(range(2)), **settings)
        trainer.train()
        logged = set()
        for key in {key for entry in trainer.state.log_history for key in entry}:
            if key in TRAINERS_KEYS or key.startswith("train_"):
                continue
            key = re.sub(r"rewards/(redness_reward|panel_similarity_reward)/", "rewards/<name>/", key)
            logged.add(re.sub(r"/step_\d+$", "/step_<index>", key))
        assert len(logged) > 20
        self.compare(logged, self.documented("metrics.md"))

    @pytest.mark.slow
    def test_documented_keys_of_the_judge_are_the_logged_ones(self, tiny_qwen, tmp_path):
        pairs = mixed(4)
        args = PaCoRewardConfig(
            str(tmp_path), use_cpu=True, bf16=False, report_to="none", save_strategy="no", logging_steps=1, max_steps=1
        )
        trainer = PaCoRewardTrainer(str(tiny_qwen), args, pairs, pairs)
        trainer.train()
        logged = {key for entry in trainer.state.log_history for key in entry}
        logged = {key for key in logged - TRAINERS_KEYS if not key.startswith("train_")}
        logged -= {"eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
        logged.discard("eval_model_preparation_time")
        assert len(logged) > 12
        self.compare(logged, self.documented("paco_reward.md"))


def commands_with_options(page: Path) -> list[tuple[str, list[str]]]:
    """Command of `COMMANDS` and the words behind it in the page's shell commands."""
    found = []
    for _, code in blocks(page, "bash"):
        for line in code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for name in COMMANDS:
                command = name.split()
                places = [at for at in range(len(words)) if words[at : at + len(command)] == command]
                if places:
                    found.append((name, words[places[0] + len(command) :]))
                    break
    return found


# ---- The site (`make docs`): GitHub's Markdown and docstrings are rendered for it ----


@pytest.fixture(scope="module")
def hooks():
    sys.path.insert(0, str(ROOT / "docs"))
    yield importlib.import_module("site_hooks")
    sys.path.remove(str(ROOT / "docs"))


def test_every_page_is_in_the_navigation(hooks):
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    reference = [f"reference/{package or 'paco_trl'}.md" for package in hooks.PACKAGES]
    config = text_of(ROOT / "mkdocs.yml")
    navigation = re.findall(r": (\S+\.md)$", config, flags=re.M)
    assert len(pages) > 10
    assert sorted(navigation) == sorted([*pages, *hooks.OUTSIDE, *reference, "options.md", "commands.md"])
    assert yaml.safe_load(config)["hooks"] == ["docs/site_hooks.py"]


def test_scripts_of_other_servers_have_a_version_and_a_hash():
    assert yaml.safe_load(text_of(ROOT / "mkdocs.yml"))["extra_javascript"] == ["mathjax.js"]
    script = text_of(ROOT / "docs" / "mathjax.js")
    (address,) = re.findall(r"https?://[^\s\"]+", script)
    assert re.search(r"@\d+\.\d+\.\d+/", address) and re.search(r'integrity: "sha384-[\w+/]{64}"', script)


def test_every_public_name_is_in_the_reference(hooks):
    packages = [path.parent.name for path in (ROOT / "paco_trl").glob("*/__init__.py")]
    public = {package for package in packages if hooks.public_names(package)}
    assert public == set(hooks.PACKAGES) - {""}
    for package in ("", *public):
        name = f"paco_trl.{package}".rstrip(".")
        exported = set(importlib.import_module(name).__all__) - {"__version__"}
        listed = re.findall(rf"^::: {re.escape(name)}\.(\w+)$", hooks.reference_page(package), flags=re.M)
        assert set(listed) == exported


def test_every_option_is_in_the_reference(hooks):
    options = importlib.import_module("site_options")
    text = options.options_page()
    for name in options.CONFIGS:
        config = getattr(paco_trl, name)
        listed = re.findall(r"^        (\w+)(?:, (\w+))* \(`", docstring(config), flags=re.M)
        documented = {option for _, names, *_ in options.config_options(name) for option in names.split(", ")}
        assert len(documented) > 7 and documented == {option for names in listed for option in names if option}
        assert all(f"`{option}`" in text or f"{option}, " in text or f", {option}`" in text for option in documented)


def test_every_option_of_the_commands_is_in_the_reference(hooks):
    options = importlib.import_module("site_options")
    text, seen = options.commands_page(), 0
    for command, (module, function, _) in options.commands().items():
        for name in options.parts(module, function).values():
            fields, found = (
                options.fields_of(module, name),
                getattr(importlib.import_module(f"paco_trl.commands.{module}"), name),
            )
            assert list(fields) and set(fields) == {field.name for field in dataclasses.fields(found)}, command
            assert all(f"`--{field}`" in text for field in fields)
            seen += 1
    assert seen > 20
