# SPDX-License-Identifier: Apache-2.0
"""PaCoGRPOConfig: the paper's defaults, what is documented, what is refused, and the arithmetic of a round."""

import contextlib
import dataclasses
import math
import os
import re
import warnings

import pytest
from accelerate import Accelerator, DeepSpeedPlugin
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig
from trl import TrlParser

import launching
from launching import free_port
from paco_trl import PaCoGRPOConfig, PaCoNFTConfig, PaCoRewardConfig
from paco_trl.trainer import config_checks
from paco_trl.trainer.config_utils import REFUSED_GRPO_FIELDS
from paco_trl.trainer.run_settings import compared_settings
from paco_trl.trainer.step_statistics import RatioStatistics
from paco_trl.utils.deepspeed import check_compiled_blocks, complete_config
from testing_utils import docstring


FIELDS = {field.name: field for field in dataclasses.fields(PaCoGRPOConfig)}
OWN_FIELDS = list(PaCoGRPOConfig.__annotations__)
ROLLOUT = {"per_device_train_batch_size": 2, "per_device_rollout_batch_size": 4}


@pytest.fixture
def parse(tmp_path):
    """Parses a command line, or the lines of a YAML file."""

    def parse_config(*arguments, yaml=None):
        arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", *arguments]
        if yaml is not None:
            path = tmp_path / "config.yaml"
            path.write_text(yaml)
            arguments += ["--config", str(path)]
        (config,) = TrlParser(PaCoGRPOConfig).parse_args_and_config(arguments)
        return config

    return parse_config


def default_of(field):
    return field.default_factory() if field.default is dataclasses.MISSING else field.default


class TestDefaults:
    def test_are_the_papers(self, make_config):
        """Part 3 of the paper, text-to-image-set training of FLUX.1-dev."""
        papers = {
            "num_inference_steps": 10, "sde_type": "flow_sde", "sde_steps": [1], "num_sde_steps": None, "noise_level": 0.7,
            "guidance_scale": 3.5, "height": 1024, "width": 1024, "resolution_scale": 0.5, "num_generations": 16,
            "num_prompts_per_generation": 42, "optimizer_steps_per_generation": 2, "per_device_train_batch_size": 1,
            "multi_objective_aggregation": "log_tamed", "log_tame_threshold": 0.2, "advantage_clip": 5.0, "beta": 0.0,
            "scale_rewards": "group", "learning_rate": 3e-4, "epsilon": 1e-4, "num_iterations": 1, "loss_type": "grpo",
        }  # fmt: skip
        config = make_config()
        for name, value in papers.items():
            assert getattr(config, name) == value, name
        assert (config.generation_batch_size, config.steps_per_generation) == (672, 672)
        assert config.gradient_accumulation_steps == 336
        assert config.logging_nan_inf_filter is False

    def test_several_gpus_in_one_process_are_refused_before_anything_is_loaded(self, make_config, monkeypatch):
        monkeypatch.setattr(PaCoGRPOConfig, "n_gpu", 2)
        with pytest.raises(ValueError, match="accelerate launch"):
            make_config()

    @pytest.mark.parametrize(
        ("settings", "tolerance"),
        [
            ({}, 1e-4), ({"epsilon": 2e-3}, 2e-3), ({"ratio_tolerance": 0.5}, 0.5), ({"bf16": True}, 1e-4),
        ],
        ids=str,
    )  # fmt: skip
    def test_ratio_tolerance(self, make_config, settings, tolerance):
        assert RatioStatistics(Accelerator(cpu=True), make_config(**settings)).tolerance == tolerance

    def test_a_config_made_from_a_config_is_the_same(self, make_config):
        config = make_config(
            num_generations=3, num_prompts_per_generation=5, sde_steps=[1, 2], per_device_train_batch_size=2
        )
        assert config.num_prompts_per_generation != 5  # derived values are kept, too
        again = dataclasses.replace(config)
        assert again.round_plan == config.round_plan
        for name in OWN_FIELDS:
            assert getattr(again, name) == getattr(config, name), name

    @pytest.mark.parametrize("value", [True, False])
    def test_gradient_checkpointing_is_taken_by_both_names(self, make_config, value):
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)  # nobody is told off for a default
            config = make_config(gradient_checkpointing=value, gradient_checkpointing_kwargs={"use_reentrant": False})
            new = make_config(activation_checkpointing=value, activation_checkpointing_kwargs={"use_reentrant": False})
            assert new.activation_checkpointing is value
            assert new.activation_checkpointing_kwargs == {"use_reentrant": False}
            assert make_config().activation_checkpointing is True
        assert config.activation_checkpointing is config.gradient_checkpointing is value
        assert config.activation_checkpointing_kwargs == {"use_reentrant": False}


# `name (`type`, *optional*, defaults to `value`):` and the text below it
ENTRY = re.compile(
    r"^ {8}(\w+) \(`([^\n]*?)`(?: or `[^\n`]+`)?, \*optional\*(?:, defaults to `([^`]+)`)?\):\n((?: {12}[^\n]*\n)+)",
    re.MULTILINE,
)
DOCUMENTED = {match[1]: match for match in ENTRY.finditer(docstring(PaCoGRPOConfig))}


class TestDocumentation:
    def test_all_fields_in_their_order_with_their_defaults(self):
        assert list(DOCUMENTED) == OWN_FIELDS
        for name in OWN_FIELDS:
            documented, default = DOCUMENTED[name][3], default_of(FIELDS[name])
            assert (documented is None) if default is None else eval(documented) == default, name

    def test_help_is_the_description_in_the_docstring(self):
        for name in OWN_FIELDS:
            described = re.findall(r"[a-z]{4,}", DOCUMENTED[name][4].lower())
            assert re.findall(r"[a-z]{4,}", FIELDS[name].metadata["help"].lower())[:3] == described[:3], name

    def test_help_can_be_shown(self, parse, capsys):
        with pytest.raises(SystemExit) as stop:
            parse("--help")
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert all(f"--{name}" in shown for name in OWN_FIELDS)


class TestRefusedFields:
    @pytest.mark.parametrize(
        ("name", "value"),
        [("top_k", 5), ("use_vllm", True), ("fsdp", "full_shard"), ("dataloader_num_workers", 2)],
    )
    def test_is_refused(self, make_config, name, value):
        assert name in FIELDS and name in REFUSED_GRPO_FIELDS
        with pytest.raises(ValueError, match=f"`{name}`"):
            make_config(**{name: value})
        # Twin: TRL's default passes when it is set
        make_config(**{name: default_of(FIELDS[name])})

    def test_saving_the_best_needs_an_evaluation(self, make_config):
        with pytest.raises(ValueError, match="`save_strategy` is 'best', but `eval_strategy` is 'no'"):
            make_config(save_strategy="best")
        make_config(save_strategy="best", eval_strategy="steps", eval_steps=2)

    def test_refused_on_the_command_line_too(self, parse):
        with pytest.raises(ValueError, match="`temperature`.*`noise_level`"):
            parse("--temperature", "0.7")

    def test_compilation_is_refused_by_its_other_name(self, make_config, monkeypatch):
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # TrainingArguments sets it; it is put back
        with pytest.raises(ValueError, match="compile"):
            make_config(torch_compile_backend="eager")


class TestParser:
    def test_the_defaults_pass(self, parse, make_config):
        config = parse()
        assert config.generation_batch_size == 672
        for name in OWN_FIELDS:
            assert getattr(config, name) == getattr(make_config(), name), name

    @pytest.mark.parametrize(("text", "value"), [("0.3", 0.3), ("mean", "mean"), ("0", 0.0)])
    def test_log_tame_threshold(self, parse, text, value):
        assert value != FIELDS["log_tame_threshold"].default
        threshold = parse("--log_tame_threshold", text).log_tame_threshold
        assert threshold == value and type(threshold) is type(value)
        threshold = parse(yaml=f"log_tame_threshold: {text}\n").log_tame_threshold
        assert threshold == value and type(threshold) is type(value)


class TestValues:
    @pytest.mark.parametrize("steps", [[0, 8], [4, 1, 2]])
    def test_sde_steps_are_sorted(self, make_config, steps):
        assert make_config(sde_steps=steps).sde_steps == sorted(steps)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"sde_steps": []}, "`sde_steps` is .*at least one step"),
            ({"sde_steps": 1}, "`sde_steps` is 1; it must be a list"),
            ({"height": "64"}, "`height` is '64'; it must be a whole number"),
            *(({name: "no"}, f"`{name}` is 'no'; it must be True or False") for name in ("bf16", "vae_tiling")),
            ({"sde_steps": [1, 1]}, r"`sde_steps` is \[1, 1\].*each once"),
            ({"sde_steps": [9]}, "`sde_steps` is .*from 0 to 8"),
            ({"num_inference_steps": 1}, "`num_inference_steps` is 1.*at least 2"),
            ({"num_sde_steps": 3, "sde_steps": [1, 2]}, r"`num_sde_steps` is 3, but 2 steps are named.*\[1, 2\]"),
            ({"noise_level": 0.0}, "`noise_level` is 0.0.*above 0"),
            ({"noise_level": 1.1, "sde_type": "cps"}, "`noise_level` is 1.1.*at most 1 for 'cps'"),
            ({"sde_type": "ode"}, "`sde_type` is 'ode'.*'flow_sde', 'dance_sde', 'cps'"),
            ({"log_tame_threshold": "x"}, "`log_tame_threshold` is 'x'.*a number >= 0, or 'mean'"),
            ({"loss_type": "dapo"}, "`loss_type` is 'dapo'.*'grpo', 'grpo_guard'"),
            ({"ema_decay": 1.0}, "`ema_decay` is 1.0.*between 0 and 1"),
            ({"height": 0}, "`height` is 0; it must be at least 1"),
            ({"max_resample_times": 1}, "`max_resample_times` is 1.*`min_reward_std`"),
            ({"reference": "base"}, "`reference` is 'base'.*`beta`"),
            (
                {"log_tame_threshold": 0.9, "multi_objective_aggregation": "rank_then_sum"},
                "'rank_then_sum' does not use",
            ),
            ({"max_steps": 0}, "`max_steps` is 0; it must be at least 1, or left out"),
            ({"num_train_epochs": 0}, "^`num_train_epochs` is 0; it must be above 0"),
            ({"report_to": ["wandb"]}, "wandb is not installed: `pip install wandb`"),
            ({"height": None}, "`height` is None"),
            ({"model_init_kwargs": ["a"]}, "by name"),
            ({"report_to": "wandbb"}, "`report_to` has 'wandbb'.* wandb,"),
            ({"num_inference_steps": "many"}, "`num_inference_steps` is 'many'; it must be a whole number"),
            ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "reentrant"),
            ({"gradient_checkpointing_kwargs": {"preserve_rng_state": False}}, "takes no options"),
            *(({name: 1.5}, f"`{name}` is 1.5; it must be a whole number") for name in (
                "per_device_train_batch_size", "num_generations_eval", "generation_batch_size", "height", "max_steps",
                "save_total_limit", "seed", "num_sde_steps", "max_resample_times",
            )),
            ({"max_resample_times": 0.0}, "`max_resample_times` is 0.0; it must be a whole"),
            ({"sde_steps": [1.0, 2.0]}, r"`sde_steps` is \[1.0, 2.0\]; it must be whole numbers"),
            ({"epsilon": math.nan}, "epsilon"),
            ({"learning_rate": math.inf}, "`learning_rate` is inf; it must be a finite number"),
            ({"learning_rate": "1e-3"}, "`learning_rate` is '1e-3'; it must be a number at least 0"),
            ({"num_train_epochs": math.inf}, "`num_train_epochs` is inf; it must be a finite number"),
            *(({name: -0.1}, f"`{name}` is -0.1.*at least 0") for name in ("beta", "guidance_scale")),
            *(({name: 0.0}, f"`{name}` is 0.0.*above 0") for name in ("advantage_clip", "ratio_tolerance")),
            ({"resolution_scale": 1.5}, "`resolution_scale` is 1.5"),
            ({"generation_batch_size": -32}, "`generation_batch_size` is -32"),
            *((ROLLOUT | settings, message) for settings, message in (
                ({"per_device_rollout_batch_size": 3}, "`per_device_rollout_batch_size` is 3, .*multiple of .*, 2. .*: 2 or 4"),
                ({"gradient_accumulation_steps": 3}, "`gradient_accumulation_steps` = 3"),
            )),
            ({"tail_steps": 0}, "`tail_steps` is 0"),
            ({"tail_steps": 6, "sde_steps": [1, 4]}, "`tail_steps` is 6, but 5 of 10"),
            ({"noise_level": 0.0}, "`noise_level` is 0.0"),
            ({"attention_backend": "sage_hub"}, "backward pass: flash, "),
            ({"attention_backend": "xformers"}, "install `xformers"),
            # Also where a size that is set has the default value
            ({"num_prompts_per_generation": 42, "generation_batch_size": 320}, "do not fit together"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )  # fmt: skip
    def test_bad_values(self, make_config, settings, message):
        with pytest.raises(ValueError, match=message):
            make_config(**settings)

    @pytest.mark.parametrize(
        "settings",
        [
            {"num_sde_steps": 2, "sde_steps": [1, 2], "num_generations": 2},
            {"resolution_scale": 1.0, "guidance_scale": 0.0},
            {"noise_level": 1.0, "sde_type": "cps", "log_tame_threshold": 0, "advantage_clip": None},
            {"noise_level": 1.1, "sde_type": "flow_sde", "log_tame_threshold": "0.3"},
            {"log_tame_threshold": "mean", "max_steps": 1, "num_train_epochs": 0},
            {"max_steps": -1, "num_train_epochs": 0.01, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
            {"ratio_tolerance": math.inf, "max_grad_norm": math.inf},  # no limit
            {"max_steps": 1, "num_train_epochs": math.inf},
            {"tail_steps": 8, "attention_backend": "_native_math", "compile_repeated_blocks": True},
            ROLLOUT,
        ],
        ids=str,
    )  # fmt: skip
    def test_values_at_the_edge_of_what_is_good(self, make_config, settings):
        config = make_config(**settings)
        for name in settings:
            assert getattr(config, name) in (settings[name], 0.3)  # "0.3" becomes a number

    @pytest.mark.parametrize(
        ("settings", "schedule", "is_endless"),
        [
            ({}, "constant", True),
            ({"warmup_steps": 5}, "constant_with_warmup", True),
            ({"warmup_steps": 0.1}, "constant_with_warmup", False),  # of all steps
            ({"warmup_steps": 5, "lr_scheduler_type": "linear"}, "linear", False),
        ],
    )
    def test_warmup_is_not_ignored(self, make_config, settings, schedule, is_endless):
        args = make_config(max_steps=10, **settings)
        assert args.lr_scheduler_type == schedule
        assert (compared_settings(args)["max_steps"] is None) == is_endless  # whether a resumed run may have more

    @pytest.mark.parametrize(("warmup", "schedule"), [(0.1, "constant"), (0, "constant"), (5, "constant_with_warmup")])
    def test_a_warmup_that_was_not_set_is_no_choice(self, tmp_path, warmup, schedule):
        """The judge's default warmup belongs to its default schedule."""
        settings = {"lr_scheduler_type": "constant", "warmup_steps": warmup}
        args = PaCoRewardConfig(str(tmp_path), use_cpu=True, bf16=False, **settings)
        assert args.lr_scheduler_type == schedule

    def test_num_generations_eval_none_is_trls(self, make_config):
        """Its type is `int | None`, and in TRL None means `num_generations`."""
        assert make_config(num_generations_eval=None).num_generations_eval == 16

    @pytest.mark.parametrize("name", INTEGRATION_TO_CALLBACK)
    def test_a_tracker_of_transformers_is_installed_or_named_with_its_package(self, tmp_path, name, monkeypatch):
        monkeypatch.setattr(config_checks, "find_spec", lambda package: package == "tensorboardX" or None)
        if name in ("azure_ml", "kubeflow", "tensorboard"):
            assert PaCoGRPOConfig(str(tmp_path), use_cpu=True, report_to=[name]).report_to == [name]
        else:
            with pytest.raises(ValueError, match=f"{name} is not installed: `pip install "):
                PaCoGRPOConfig(str(tmp_path), use_cpu=True, report_to=[name])


class TestRound:
    def test_only_another_number_of_generations(self, make_config):
        """TRL's own defaults would refuse it."""
        assert make_config(num_generations=24).round_plan.num_images == 42 * 24

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            # (images, steps_per_generation, accumulation, optimizer steps)
            ({}, (48, 24, 12, 2)),
            ({"generation_batch_size": 16}, (16, 8, 4, 2)),
            ({"steps_per_generation": 16}, (32, 16, 8, 2)),
            ({"gradient_accumulation_steps": 8}, (48, 24, 8, 3)),
            ({"steps_per_generation": 16, "gradient_accumulation_steps": 16}, (32, 16, 16, 1)),
            ({"optimizer_steps_per_generation": 4, "gradient_accumulation_steps": 6}, (48, 24, 6, 4)),
            ({"num_prompts_per_generation": 4, "generation_batch_size": 16}, (16, 8, 4, 2)),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("trained_steps", [1, 3])
    def test_combinations(self, make_config, settings, expected, trained_steps):
        """Micro-steps count (image, denoising step) rows, so three trained steps take three times as many."""
        settings = dict(settings)
        for name in ("steps_per_generation", "gradient_accumulation_steps"):
            if name in settings:
                settings[name] *= trained_steps
        base = {"num_generations": 4, "per_device_train_batch_size": 2}
        if not {"generation_batch_size", "steps_per_generation"} & settings.keys():
            base["num_prompts_per_generation"] = 12
        config = make_config(**{**base, **settings, "sde_steps": list(range(1, 1 + trained_steps))})
        images, steps, accumulation, optimizer_steps = expected
        assert config.round_plan.num_images == config.generation_batch_size == images
        assert config.num_prompts_per_generation == images // 4
        assert config.steps_per_generation == steps * trained_steps
        assert config.gradient_accumulation_steps == accumulation * trained_steps
        assert config.optimizer_steps_per_generation == optimizer_steps
        assert config.round_plan.gradient_accumulation_steps == config.gradient_accumulation_steps

    @pytest.mark.parametrize(
        ("accumulation", "expected"),
        # (images, optimizer steps) with full groups of 4, in batches of 2
        [(2, (8, 2)), (4, (16, 2)), (6, (24, 2)), (1, (4, 2)), (3, (12, 2)), (5, (20, 2))],
    )
    @pytest.mark.parametrize("trained_steps", [1, 3])
    def test_accumulation_alone_is_the_effective_batch(self, make_config, accumulation, expected, trained_steps):
        config = make_config(
            num_generations=4, per_device_train_batch_size=2, gradient_accumulation_steps=accumulation * trained_steps,
            sde_steps=list(range(1, 1 + trained_steps)),
        )  # fmt: skip
        assert (config.generation_batch_size, config.optimizer_steps_per_generation) == expected
        assert config.gradient_accumulation_steps == accumulation * trained_steps

    def test_an_effective_batch_below_half_a_group(self, make_config, caplog):
        config = make_config(gradient_accumulation_steps=4)  # of 16 images
        assert (config.num_prompts_per_generation, config.optimizer_steps_per_generation) == (1, 4)
        (said,) = caplog.messages
        assert "4 optimizer step(s) a round" in said

    def test_num_sde_steps_is_the_number_of_trained_steps(self, make_config):
        base = {"num_generations": 4, "num_prompts_per_generation": 4, "sde_steps": [1, 2, 3, 4]}
        assert [make_config(**base, num_sde_steps=n).steps_per_generation for n in (None, 2)] == [64, 32]


class TestLauncher:
    """What the launcher says in the environment must agree with the options."""

    @pytest.mark.parametrize("bf16", [False, True])
    @pytest.mark.parametrize("launcher", ["no", "bf16", "fp16"])
    def test_precision(self, make_config, monkeypatch, bf16, launcher):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
        if bf16 or launcher == "no":  # an option of its own goes before the launcher's
            assert make_config(bf16=bf16).mixed_precision == ("bf16" if bf16 else "no")
        else:
            with pytest.raises(ValueError, match=f"`bf16` is False.*`mixed_precision: {launcher}`"):
                make_config(bf16=False)

    @pytest.mark.parametrize("stage", [2, 3])
    def test_compiled_blocks_with_zero3(self, make_config, stage):
        pytest.importorskip("deepspeed")
        for is_compiled in (False, True):
            config = make_config(compile_repeated_blocks=is_compiled)
            config.deepspeed_plugin = DeepSpeedPlugin(zero_stage=stage)
            refused = pytest.raises(
                ValueError, match="`compile_repeated_blocks=True` does not work with DeepSpeed ZeRO-3"
            )
            with refused if is_compiled and stage == 3 else contextlib.nullcontext():
                check_compiled_blocks(config)

    @pytest.mark.parametrize(
        ("file", "said"),
        [
            ({}, []),
            ({"gradient_accumulation_steps": 1}, []),  # `accelerate config`
            ({"gradient_accumulation_steps": 8, "train_batch_size": "auto"}, ["gradient_accumulation_steps"]),
            ({"gradient_accumulation_steps": 8, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1},
             ["gradient_accumulation_steps", "train_batch_size"]),
        ],
        ids=str,
    )  # fmt: skip
    @pytest.mark.parametrize("config_class", [PaCoGRPOConfig, PaCoRewardConfig])
    def test_batch_sizes_of_a_deepspeed_file(self, make_config, file, said, config_class, caplog):
        """They decide nothing: what `accelerate config` asks about accumulation is computed here."""
        pytest.importorskip("deepspeed")
        config = make_config(config_class, per_device_train_batch_size=4, **(
            {"gradient_accumulation_steps": 3} if config_class is PaCoRewardConfig else {}
        ))  # fmt: skip
        zero = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": False}}
        config.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config={**zero, **file})
        complete_config(config)
        assert [re.search("`(.*)`", message)[1] for message in caplog.messages] == said
        engine = HfTrainerDeepSpeedConfig(config.deepspeed_plugin.deepspeed_config)  # as Trainer does
        engine.trainer_config_process(config)
        assert engine.mismatches == []
        assert engine.config["gradient_accumulation_steps"] == config.gradient_accumulation_steps > 1
        assert engine.config["train_micro_batch_size_per_gpu"] == 4

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"lr_scheduler_type": "cosine_with_min_lr"}, "cosine_with_min_lr.*min_lr"),
            ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 2}}, "num_cycle"),
            ({"optim": "schedule_free_adamw"}, "`optim` is 'schedule_free_adamw'.*schedulefree"),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("config_class", [PaCoGRPOConfig, PaCoRewardConfig])
    def test_an_optimizer_that_trainer_would_refuse_later(self, make_config, settings, message, config_class):
        with pytest.raises(ValueError, match=message):
            make_config(config_class, **settings)

    @pytest.mark.parametrize("file", [{"gradient_clipping": 0.5}, {"optimizer": {"params": {"lr": 0.5}}}], ids=str)
    def test_a_deepspeed_file_of_another_run(self, make_config, file):
        pytest.importorskip("deepspeed")
        config = make_config()
        zero = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": False}}
        config.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config={**zero, **file})
        with pytest.raises(ValueError, match="0.5 vs"):
            complete_config(config)

    @pytest.mark.slow
    def test_it_is_found_before_a_model_is_loaded(self, tmp_path):
        pytest.importorskip("deepspeed")
        options = f"{str(tmp_path)!r}, use_cpu=True, bf16=False, ddp_backend='gloo', compile_repeated_blocks=True"
        launched = {
            "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "DS_ACCELERATOR": "cpu", "RANK": "0",
            "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        code = f"from paco_trl import PaCoGRPOConfig\nPaCoGRPOConfig({options})"
        done = launching.run(["-c", code], env={**os.environ, **launched})
        assert "`compile_repeated_blocks=True` does not work with DeepSpeed ZeRO-3" in done.stderr

    @pytest.mark.parametrize("config_class", [PaCoGRPOConfig, PaCoNFTConfig, PaCoRewardConfig])
    @pytest.mark.parametrize(
        "variables, settings, message",
        [
            ({}, {}, None),
            ({"FSDP_VERSION": "1"}, {}, "`fsdp_version` .* is 1"),
            ({"FSDP_OFFLOAD_PARAMS": "true"}, {}, "`fsdp_offload_params` .* is true"),
            ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, {}, "`fsdp_cpu_ram_efficient_loading` .* is true"),
            ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, {}, "`gradient_checkpointing` does the same"),
            ({}, {"optim": "adafactor"}, "`optim` is 'adafactor'; with FSDP"),
        ],
    )
    def test_fsdp(self, tmp_path, monkeypatch, config_class, variables, settings, message):
        for name, value in ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} | variables).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            config_class(str(tmp_path), use_cpu=True, bf16=False, **settings)
        if message:
            monkeypatch.delenv("ACCELERATE_USE_FSDP")
            config_class(str(tmp_path), use_cpu=True, bf16=False, **settings)
