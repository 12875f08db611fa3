# SPDX-License-Identifier: Apache-2.0
"""paco_trl/recipes: each is read by its command's own parser, says what the paper says, and names its sources."""

import functools
import json
import re
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_file
from torch import nn

from paco_trl.commands import reward
from paco_trl.commands.doctor_arguments import parser_for
from paco_trl.commands.main import main
from paco_trl.commands.memory_plans import image_plan, judge_plan
from paco_trl.commands.parser import CommandParser
from paco_trl.commands.script_arguments import (
    ScriptArguments,
    check_rewards,
    fit_panel_options,
    fit_reward_options,
    get_peft_config,
)
from paco_trl.data import demo_prompts_path
from paco_trl.planning import MemoryPlan
from paco_trl.planning.plan import USABLE_FRACTION
from paco_trl.rewards import redness_reward
from paco_trl.rollout.families import FAMILIES
from paco_trl.rollout.families.flux import FluxFamily
from paco_trl.rollout.families.qwen_image import QwenImageFamily
from paco_trl.trainer.config_checks import UNUSED_FIELDS


ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "paco_trl" / "recipes"
sys.path.append(str(ROOT / "benchmarks" / "memory"))

from memory_plan import GIB, rows_of  # noqa: E402


# What the parser of each command is made of
CLASSES = {"grpo": (ScriptArguments, "PaCoGRPOConfig"), "reward": (reward.JudgeScriptArguments, "PaCoRewardConfig")}

# The paper's figures, from the paper: none of them comes from a default of this package
JUDGE = {
    "model_name_or_path": "Qwen/Qwen2.5-VL-7B-Instruct", "dataset_name": "X-GenGroup/PaCo-Dataset",
    "dataset_files": ["consistency_reward_cot_train", "sharegpt_editing_cot"], "bf16": True, "max_pixels": 2_097_152,
    "lora_r": 32, "lora_alpha": 64, "lora_target_modules": None, "first_token_weight": 0.1, "loss_variant": "paper",
    "learning_rate": 2e-4, "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "num_train_epochs": 2.0,
    "per_device_train_batch_size": 8,
}  # fmt: skip
ALL_POLICIES = {
    "height": 1024, "width": 1024, "sde_type": "flow_sde", "num_generations": 16, "num_prompts_per_generation": 42,
    "optimizer_steps_per_generation": 2, "per_device_train_batch_size": 1, "judge_model": "X-GenGroup/PaCo-Reward-7B",
    "scale_rewards": "group", "advantage_clip": 5.0, "lora_r": 64, "lora_alpha": 128, "loss_type": "grpo",
    "epsilon": 1e-4, "beta": 0.0, "learning_rate": 3e-4,
}  # fmt: skip
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
FLUX_LAYERS = [f"attn.{name}" for name in ATTENTION]
FLUX_LAYERS += ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
EDITS = ALL_POLICIES | {"edits": True, "resolution_scale": 384 / 1024, "rewards": ["edit"]}
PAPER = {
    "paco-reward-7b-lora": JUDGE,
    "paco-reward-7b": JUDGE,
    "paco-flux.1-dev": ALL_POLICIES
    | {
        "model_name_or_path": "black-forest-labs/FLUX.1-dev", "num_inference_steps": 10, "sde_steps": [1],
        "noise_level": 0.7, "guidance_scale": 3.5, "resolution_scale": 512 / 1024,
        "rewards": ["consistency", "clip_t"], "multi_objective_aggregation": "log_tamed", "log_tame_threshold": 0.2,
        "lora_target_modules": FLUX_LAYERS,
    },
    "paco-flux.1-kontext-dev": EDITS
    | {
        "model_name_or_path": "black-forest-labs/FLUX.1-Kontext-dev", "num_inference_steps": 8, "sde_steps": [1],
        "noise_level": 0.9, "guidance_scale": 2.5, "lora_target_modules": FLUX_LAYERS,
    },
    "paco-qwen-image-edit": EDITS
    | {
        "model_name_or_path": "Qwen/Qwen-Image-Edit", "num_inference_steps": 10, "sde_steps": [1, 2, 3, 4],
        "noise_level": 1.0, "guidance_scale": 4.0,
    },
}  # fmt: skip
# Where the paper is silent, the published code's: PaCo-GRPO/config/base.py and grpo.py
PUBLISHED_CODE = {
    "num_inference_steps_eval": 20, "lr_scheduler_type": "constant", "weight_decay": 1e-4, "max_grad_norm": 1.0,
    "gradient_checkpointing": False, "save_total_limit": 5,
}  # fmt: skip
OF_IMAGE_SETS = {"reward_weights": [0.2, 1.0], "save_steps": 20}
OF_IMAGE_SETS["clip_model"] = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
NAMES = sorted(PAPER)
DATA = ("--dataset_name", "demo")  # which no recipe has
_VALUE = re.compile(r"^\s*(?:- \S|\w+:)")
_SOURCE = re.compile(r"  # (?:paper\b|published code\b|not given\b|ours$)")


def text_of(name: str) -> str:
    return (RECIPES / f"{name}.yaml").read_text()


def parse(recipe: str, *words: str) -> tuple:
    """The options of a recipe, by its name or path, as its command gets them."""
    command = "reward" if "reward" in recipe else "grpo"
    needed = DATA if command == "grpo" else ()
    return CommandParser(CLASSES[command]).parse_args_and_config(["--config", recipe, "--use_cpu", *needed, *words])


def values_of(recipe: str) -> dict:
    return {f.name: getattr(arguments, f.name) for arguments in parse(recipe) for f in fields(arguments)}


def differing(values: dict, expected: dict) -> dict:
    return {name: values[name] for name, value in expected.items() if values[name] != value}


@pytest.mark.parametrize("recipe", [name for name in PAPER if "reward" not in name])
def test_another_rank_keeps_the_scale(recipe):
    for words, expected in (((), (64, 128)), (("--lora_r", "8"), (8, 16))):
        adapter = get_peft_config(parse(recipe, *words)[0])
        assert (adapter.r, adapter.lora_alpha) == expected


@pytest.mark.parametrize("has_own_pairs", [True, False])
def test_files_of_the_published_pairs_are_left_out_for_others(tmp_path, capsys, has_own_pairs):
    (tmp_path / "pairs.jsonl").write_text("{}")
    words = ["--dataset_name", str(tmp_path / "pairs.jsonl")] if has_own_pairs else []
    parser = reward.build_parser(prog="paco-trl reward")
    arguments, _ = parser.parse_args_and_config(["--config", "paco-reward-7b", "--use_cpu", "--bf16", "False", *words])
    said = capsys.readouterr().err
    assert ("without dataset_files=" in said and "because of `--dataset_name`" in said) == has_own_pairs
    assert (arguments.dataset_files is None) == has_own_pairs


# What differs from paco-flux.1-dev
PRESETS = {
    "flux.1-dev-cps": {
        "sde_type": "cps", "noise_level": 0.8, "scale_rewards": "batch", "output_dir": "flux.1-dev-cps",
    },
    "flux.1-dev-80gb": {"tail_steps": 4, "output_dir": "flux.1-dev-80gb"},
    "flux.1-dev-24gb": {
        "tail_steps": 4,
        "output_dir": "flux.1-dev-24gb", "quantization": "nf4", "judge_quantization": "nf4",
        "gradient_checkpointing": True, "offload_embeddings": True, "offload_rewards": True,
        "ema_offload": True,
    },
    "krea-2-80gb": {
        "model_name_or_path": "krea/Krea-2-Raw", "num_inference_steps_eval": 28, "tail_steps": 4, "offload_rewards": True,
        "output_dir": "krea-2-80gb",
    },
    "krea-2-24gb": {
        "model_name_or_path": "krea/Krea-2-Raw", "num_inference_steps_eval": 28, "tail_steps": 4,
        "output_dir": "krea-2-24gb", "quantization": "nf4", "judge_quantization": "nf4", "gradient_checkpointing": True,
        "offload_embeddings": True, "offload_rewards": True, "ema_offload": True,
    },
    "flux.2-klein-4b-24gb": {
        "model_name_or_path": "black-forest-labs/FLUX.2-klein-base-4B", "num_inference_steps_eval": 28,
        "guidance_scale": 4.0, "tail_steps": 4, "num_prompts_per_generation": 9, "per_device_train_batch_size": 4,
        "judge_quantization": "nf4", "offload_rewards": True, "epsilon": 1e-6, "gradient_checkpointing": True,
        "max_steps": 40, "output_dir": "flux.2-klein-4b-24gb",
    },
    "flux.2-klein-4b-stories": {
        "model_name_or_path": "black-forest-labs/FLUX.2-klein-base-4B", "set_layout": "separate",
        "panel_generation": "anchored", "num_inference_steps": 16, "num_inference_steps_eval": 28, "guidance_scale": 4.0,
        "epsilon": 1e-6, "gradient_checkpointing": True, "output_dir": "flux.2-klein-4b-stories",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_papers_but_for_what_it_marks(name):
    paper, preset = values_of("paco-flux.1-dev"), values_of(name)
    derived = {"logging_dir", "steps_per_generation", "gradient_accumulation_steps", "activation_checkpointing"}
    derived |= {
        "generation_batch_size",
        "ratio_tolerance",
        "lora_target_modules",
    }  # the default of the family is the same
    expected = PRESETS[name]
    assert differing(preset, expected) == {} and preset["lora_target_modules"] is None
    assert {key for key in preset if preset[key] != paper[key]} - derived == expected.keys()
    assert set(re.findall(r"^(\w+):.*  # (?:ours|later[;,])", text_of(name), re.MULTILINE)) == expected.keys()
    layout = parse(name)[1].round_plan
    assert (layout.num_prompts, layout.num_optimizer_steps) == (expected.get("num_prompts_per_generation", 42), 2)


# The settings of the run in yifan123/flow_grpo#201, by our names: `sample` and `train` of its configuration
LATER = {
    "num_inference_steps": 10, "num_inference_steps_eval": 20, "guidance_scale": 3.5, "sde_type": "cps",
    "sde_steps": [1], "noise_level": 0.8, "num_generations": 16, "num_prompts_per_generation": 42,
    "optimizer_steps_per_generation": 2, "per_device_train_batch_size": 1, "scale_rewards": "batch",
    "advantage_clip": 5.0, "loss_type": "grpo", "epsilon": 1e-4, "beta": 0.0, "learning_rate": 3e-4,
    "weight_decay": 1e-4, "max_grad_norm": 1.0,
}  # fmt: skip


def test_the_later_settings_are_those_of_the_report_and_every_value_has_its_source():
    assert differing(values_of("flux.1-dev-cps"), LATER) == {}
    values = [line for line in text_of("flux.1-dev-cps").splitlines() if _VALUE.match(line)]
    assert {line.split(":")[0] for line in values if "  # later" in line} == LATER.keys()
    assert [line for line in values if "  # later" not in line and not _SOURCE.search(line)] == []


def test_each_other_file_is_a_preset():
    assert sorted(path.stem for path in RECIPES.iterdir()) == sorted([*NAMES, *PRESETS])


def commands_of(name: str) -> list[tuple[tuple[str, ...], int]]:
    """The training commands of a recipe's header: their options, and number of processes."""
    header = text_of(name).split("\n# Model")[0]
    command = "reward" if "reward" in name else "grpo"
    found = re.findall(
        rf"^#     (?:\S+ )?paco-trl {command} --config {re.escape(name)}(?: --num_processes (\d+))?(?: (.*))?$",
        re.sub(r" \\\n#\s+", " ", header),
        re.MULTILINE,
    )
    return [(tuple(shlex.split(options)), int(count or 1)) for count, options in found]


@functools.cache
def memory_plan(recipe: str, options: tuple[str, ...]) -> MemoryPlan:
    """Plan a command from the packaged configs of its models, as where the Hub cannot be reached."""
    if "reward" in recipe:
        return judge_plan(*parse(recipe, *options))
    is_editing = yaml.safe_load(text_of(recipe)).get("edits", False)
    return image_plan(*parse(recipe, *options), rows_of(1024, is_editing))


# Recipes that take the memory of another: noise, advantages and directories are none, as are steps without gradients
PLANNED_AS = {
    "flux.1-dev-cps": "paco-flux.1-dev", "flux.1-dev-80gb": "paco-flux.1-dev", "paco-reward-7b-lora": "paco-reward-7b",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *PRESETS])
def test_it_fits_the_memory_of_its_header(name):
    header = text_of(name).split("\n# Model")[0]
    memory = int(re.search(r"GPUs? (?:of|with) (\d+) GB", header)[1])
    needed = []
    for options, num_processes in commands_of(name):
        plan = memory_plan(PLANNED_AS.get(name, name), options)
        needed.append(replace(plan, num_processes=num_processes).peak / GIB)
    assert max(needed) <= USABLE_FRACTION * memory
    said = re.search(r"takes ([\d.]+) GiB", header)
    assert float(said[1]) == pytest.approx(max(needed), abs=0.3)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_the_paper_says(name):
    assert differing(values_of(name), PAPER[name]) == {}
    # All that the paper fixes is written out, also where it is the default, and so is no default that changes
    written = yaml.safe_load(text_of(name))
    assert PAPER[name].keys() <= written.keys()


@pytest.mark.parametrize("name", [name for name in NAMES if "reward" not in name])
class TestPolicies:
    def test_where_the_paper_is_silent_it_says_what_the_code_says(self, name):
        expected = PUBLISHED_CODE | (OF_IMAGE_SETS if "flux.1-dev" in name else {"save_steps": 40})
        expected["gradient_checkpointing"] = "qwen" in name  # does not fit 80 GB without
        assert differing(values_of(name), expected) == {}
        lines = text_of(name).splitlines()
        for key in expected:
            (line,) = [line for line in lines if line.startswith(f"{key.replace('reward_weights', 'rewards')}:")]
            assert re.search("  # (paper; weights: )?published code", line)

    def test_the_layers_that_get_an_adapter_are_those_of_the_family(self, name):
        family = QwenImageFamily if "qwen" in name else FluxFamily
        assert yaml.safe_load(text_of(name))["lora_target_modules"] == family.lora_target_modules


class TestDefaultsOfAFamily:
    """A command without a recipe has the paper's settings for edits where the pipeline is for edits."""

    RECIPES = {"FluxKontextPipeline": "paco-flux.1-kontext-dev", "QwenImageEditPipeline": "paco-qwen-image-edit"}

    @pytest.fixture
    def parse(self, tmp_path, capsys):
        def parse(pipeline: str, *words: str, command: str = "grpo") -> tuple[dict, str]:
            (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
            words = ["--model_name_or_path", str(tmp_path), *DATA, "--use_cpu", "--bf16", "False", *words]
            parsed = parser_for(command).parse_args_and_config(words)
            return {f.name: getattr(each, f.name) for each in parsed for f in fields(each)}, capsys.readouterr().err

        return parse

    @pytest.mark.parametrize("pipeline", RECIPES)
    def test_they_are_those_of_the_recipe(self, pipeline, parse):
        defaults = FAMILIES[pipeline].training_defaults
        recipe = values_of(self.RECIPES[pipeline])
        assert len(defaults) >= 8 and differing(recipe, defaults) == {}
        values, said = parse(pipeline)
        assert differing(values, defaults) == {} and all(name in said for name in defaults)
        own = {"model_name_or_path", "lora_r", "lora_alpha", "lora_target_modules"}
        assert differing(values, PAPER[self.RECIPES[pipeline]]).keys() <= own
        # DiffusionNFT has no stochastic steps
        values, said = parse(pipeline, command="nft")
        assert values["rewards"] == ["edit"] and "noise_level" not in said

    @pytest.mark.parametrize("pipeline", ["FluxPipeline", "QwenImage21Pipeline"])
    def test_others_have_those_of_sets(self, pipeline, parse):
        values, said = parse(pipeline)
        assert (values["edits"], values["rewards"], values["noise_level"]) == (False, ["consistency", "clip_t"], 0.7)
        assert said == ""

    def test_what_is_given_wins(self, parse, tmp_path):
        (tmp_path / "a.yaml").write_text("rewards: [redness]\nmax_source_images:\nresolution_scale: 0.5\n")
        words = ["--config", str(tmp_path / "a.yaml"), "--noise_level", "0.7"]
        values, said = parse("FluxKontextPipeline", *words)
        given = {"rewards": ["redness"], "max_source_images": None, "resolution_scale": 0.5, "noise_level": 0.7}
        assert differing(values, given) == {} and (values["edits"], values["num_inference_steps"]) == (True, 8)
        assert "num_inference_steps=8" in said and [name for name in given if name in said] == []
        # Indices of the family's own number of steps
        values, said = parse("QwenImageEditPipeline", "--num_inference_steps", "4")
        assert (values["sde_steps"], values["noise_level"]) == ([1], 1.0) and "sde_steps" not in said
        values, said = parse("FluxKontextPipeline", "--edits", "False")
        assert values["rewards"] == ["consistency", "clip_t"] and said == ""


# Typed options -> what a run then has, and which options of the recipe a line may name that are left out
LORA, ROUND = "lora_r lora_alpha lora_target_modules", "num_prompts_per_generation optimizer_steps_per_generation"
TYPED = {
    "--rewards my_rewards.py:bright": (
        {"rewards": ["my_rewards.py:bright"], "reward_weights": None},
        "rewards reward_weights",
    ),
    "--rewards a.py=2 paco_trl.rewards.redness_reward": ({"reward_weights": [2.0, 1.0]}, ""),
    "--rewards clip_t": ({"rewards": ["clip_t"], "reward_weights": None}, "rewards reward_weights"),
    "--adapter {adapter}": (dict.fromkeys(["lora_r", "lora_alpha", "lora_target_modules"]), LORA),
    "--lora_r 8": ({"lora_r": 8, "lora_alpha": None}, "lora_alpha"),
    "--use_peft False": (dict.fromkeys(["lora_r", "quantization"]), f"{LORA} quantization"),
    "--set_layout grid": ({"set_layout": "grid", "panel_generation": "independent"}, "panel_generation"),
    "--num_inference_steps 4": ({"num_inference_steps": 4, "tail_steps": None}, "tail_steps sde_steps"),
    "--edits False": ({"edits": False, "rewards": ["consistency", "clip_t"]}, "rewards"),
    "--save_steps 7": ({"save_steps": 7, "save_strategy": "steps"}, ""),
    "--num_train_epochs 2": ({"num_train_epochs": 2.0, "max_steps": -1}, "max_steps"),
    "--gradient_accumulation_steps 32": ({"gradient_accumulation_steps": 32}, ROUND),
    "--judge_url http://127.0.0.1:1/v1": ({"judge_quantization": None}, "judge_quantization"),
    "--quantization None --tail_steps null": ({"quantization": None, "tail_steps": None}, ""),
    "nft": ({"loss_type": "nft", "epsilon": 1.0, "tail_steps": None}, f"loss_type epsilon {' '.join(UNUSED_FIELDS)}"),
    "nft --loss_type awm": ({"loss_type": "awm", "epsilon": 1.0}, f"epsilon {' '.join(UNUSED_FIELDS)}"),
}


class TestTypedOptions:
    """What is typed wins over a recipe, and what contradicts it there is left out in a line."""

    @pytest.fixture
    def read(self, tmp_path, capsys, monkeypatch):
        for name in ("my_rewards.py", "a.py"):
            (tmp_path / name).write_text("def bright(prompts, completions, **kwargs): pass\n")
        LoraConfig(r=4, lora_alpha=8, target_modules=["to_q"]).save_pretrained(tmp_path / "adapter")
        save_file({}, tmp_path / "adapter" / "adapter_model.safetensors")

        def read(recipe: str, typed: str) -> tuple[dict, str, object]:
            classes = {
                "kontext": "FluxKontextPipeline",
                "qwen": "QwenImageEditPipeline",
                "klein": "Flux2KleinPipeline",
            }
            name = next((name for part, name in classes.items() if part in recipe), "FluxPipeline")
            (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
            command = "nft" if typed.startswith("nft") else "grpo"
            words = typed.removeprefix("nft").format(adapter=tmp_path / "adapter").split()
            words += ["--config", recipe, "--model_name_or_path", str(tmp_path), *DATA, "--use_cpu"]
            with monkeypatch.context() as patch:  # which are read
                patch.chdir(tmp_path)
                parsed = parser_for(command).parse_args_and_config(words)
                check_rewards(parsed[0])
            values = {f.name: getattr(each, f.name) for each in parsed for f in fields(each)}
            return values, capsys.readouterr().err, get_peft_config(parsed[0])

        return read

    @pytest.mark.parametrize("typed", TYPED)
    @pytest.mark.parametrize("recipe", [name for name in [*NAMES, *PRESETS] if "reward" not in name])
    def test_they_win(self, recipe, typed, read, tmp_path):
        values, said, peft_config = read(recipe, typed)
        expected, left_out = TYPED[typed]
        assert differing(values, expected) == {}
        written = yaml.safe_load(text_of(recipe))
        if isinstance(written["rewards"], dict):
            written["reward_weights"] = [*written["rewards"].values()]
        lines = [line for line in said.splitlines() if f" of {recipe}, because of " in line]
        assert not any("because of `paco-trl" in line.replace("`paco-trl nft`", "") for line in lines)
        found = {name for line in lines for name in re.findall(r"(\w+)=", line)}
        assert found <= {*left_out.split(), "lora_target_modules"}  # the layers are those of the model that is typed
        assert values["lora_target_modules"] is None
        if "--adapter" in typed:
            assert peft_config.name == str(tmp_path / "adapter")
        else:
            assert (peft_config is None) == ("use_peft" in typed)
        # Nothing else that the recipe has is changed
        kept = [name for name in written if name in values and name not in found and f"--{name}" not in typed]
        kept = [name for name in kept if name not in ("rewards", "reward_weights", "model_name_or_path")]
        assert len(kept) > 15 and differing(values, {name: written[name] for name in kept}) == {}

    @pytest.mark.parametrize(
        ("typed", "expected"),
        [
            ("--dataset_name my/pairs --dataset_split train --lora_r 8", {"lora_r": 8, "dataset_split": "train"}),
            ("--save_steps 7", {"save_steps": 7, "save_strategy": "steps"}),
            ("--load_best_model_at_end --eval_strategy steps --eval_files a", {"save_strategy": "steps"}),
            ("--first_token_weight None --max_pixels 4096", {"first_token_weight": None, "max_pixels": 4096}),
        ],
    )
    def test_they_win_over_the_judges(self, typed, expected):
        parsed = parser_for("reward").parse_args_and_config(
            ["--config", "paco-reward-7b-lora", "--use_cpu", *typed.split()]
        )
        assert differing({f.name: getattr(each, f.name) for each in parsed for f in fields(each)}, expected) == {}

    def test_of_a_file_of_ones_own(self, read, tmp_path):
        def of(text: str, typed: str):
            (tmp_path / "own.yaml").write_text(text)
            return read(str(tmp_path / "own.yaml"), typed)

        text = "num_prompts_per_generation: 10\noptimizer_steps_per_generation: 3\n"
        values, said, _ = of(text, "--gradient_accumulation_steps 5")
        assert "without optimizer_steps_per_generation=3 of the file" in said
        assert (values["num_prompts_per_generation"], values["gradient_accumulation_steps"]) == (10, 5)
        for text in ("num_inference_steps: 4\ntail_steps: 9\n", "bf16: true\neval_dataset_name: a\n"):
            with pytest.raises(ValueError, match="tail_steps|eval_dataset_name"):  # within the file
                of(text, "--lora_r 8")

    @pytest.mark.parametrize("rate", ["", " --learning_rate 1e-5"])
    def test_the_rate_of_an_adapter_is_not_for_all_weights(self, read, caplog, rate):
        read("flux.1-dev-80gb", f"--use_peft False{rate}")
        assert ("`learning_rate` is 0.0003" in caplog.text) == (rate == "")

    def test_with_other_data_or_under_deepspeed(self, read, tmp_path, monkeypatch, caplog):
        assert read("flux.2-klein-4b-stories", "--lora_r 8")[0]["panel_generation"] == "anchored"
        parsed = parser_for("grpo").parse_args_and_config(
            ["--config", "flux.2-klein-4b-stories", "--model_name_or_path", str(tmp_path), *DATA, "--use_cpu"]
        )
        single = {"prompt": ["A fox."], "rows": [1], "cols": [1], "panels": [["A fox."]], "theme": ["Animals."]}
        sets = Dataset.from_dict(single | {"cols": [2], "panels": [["A fox.", "A hare."]]})
        fit_panel_options(*parsed[:2], Dataset.from_dict(single), sets)
        assert parsed[1].panel_generation == "anchored"
        fit_panel_options(*parsed[:2], Dataset.from_dict(single), None)
        assert parsed[1].panel_generation == "independent" and "panel_generation" in caplog.text
        sized = Dataset.from_dict(single | {"height": [64], "width": [64]})
        fit_panel_options(*parsed[:2], sized, None)  # the recipe has another height, which nobody typed
        parsed[0].chosen = parsed[0].typed = {"height", "width"}
        fit_panel_options(*parsed[:2], sized, sets)  # where some rows have none
        with pytest.raises(ValueError, match="each row of the data has a height of its own"):
            fit_panel_options(*parsed[:2], sized, None)
        parsed[1].offload_rewards = True  # by the recipe
        fit_reward_options(*parsed[:2], [redness_reward, with_model := lambda **columns: None])
        assert not parsed[1].offload_rewards
        with_model.model, parsed[1].offload_rewards = nn.Linear(1, 1), True
        fit_reward_options(*parsed[:2], [redness_reward, with_model])
        assert parsed[1].offload_rewards
        parsed[0].chosen.add("offload_rewards")
        fit_reward_options(*parsed[:2], [redness_reward])
        assert parsed[1].offload_rewards  # the trainer says that it does nothing
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # by the launcher
        assert read("flux.1-dev-24gb", "--use_peft True")[0]["quantization"] is None


@pytest.mark.parametrize("words", ["grpo --config flux.1-dev-24gb", "nft --config flux.2-klein-4b-stories"])
def test_a_recipe_trains_with_a_reward_of_ones_own(words, folder_of, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def bright(prompts, completions, **kwargs): return list(range(len(completions)))\n")
    model = folder_of("flux2_klein" if "klein" in words else "flux")
    words += (
        f" --model_name_or_path {model} --dataset_name {demo_prompts_path()} --rewards own.py:bright --output_dir out"
    )
    words += " --use_cpu --bf16 False --quantization None --num_inference_steps 3 --num_generations 2"
    words += (
        " --resolution_scale 0.0625 --num_prompts_per_generation 2 --max_steps 1 --optimizer_steps_per_generation 1"
    )
    words += " --set_layout grid --num_train_epochs 1 --report_to none --save_strategy no --save_steps 5"
    assert main(words.split()) == 0
    assert Path("out/adapter_model.safetensors").exists() and "reward_weights=" in capsys.readouterr().err


def test_both_configs_of_the_judge_train_the_same():
    lora, merged = (yaml.safe_load(text_of(name)) for name in ("paco-reward-7b-lora", "paco-reward-7b"))
    assert lora.pop("output_dir") != merged.pop("output_dir")
    assert lora == merged
    assert "paco-trl merge" in text_of("paco-reward-7b")
