# SPDX-License-Identifier: Apache-2.0
"""PaCoRewardConfig: the paper's defaults, what is documented, what is refused."""

import dataclasses
import math
import re

import pytest
from trl import SFTConfig, TrlParser

from docstrings import docstring
from paco_trl import PaCoRewardConfig
from paco_trl.trainer.first_token_loss import LOSS_VARIANTS
from paco_trl.trainer.refusals import REFUSED_SFT_FIELDS
from test_config import ENTRY, default_of, first_sentence, key_words


FIELDS = {field.name: field for field in dataclasses.fields(PaCoRewardConfig)}
# As they are now: parsing a command line replaces them (transformers 5.23, HfArgumentParser)
TYPES = {name: str(field.type) for name, field in FIELDS.items()}
TRL_FIELDS = {field.name: field for field in dataclasses.fields(SFTConfig)}
OWN_FIELDS = list(PaCoRewardConfig.__annotations__)
DOCUMENTED = {match[1]: match for match in ENTRY.finditer(docstring(PaCoRewardConfig))}


@pytest.fixture
def make(tmp_path):
    """Makes a config for the CPU."""

    def make_config(**kwargs):
        return PaCoRewardConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **kwargs})

    return make_config


@pytest.fixture
def parse(tmp_path):
    """Parses a command line, or the lines of a YAML file."""

    def parse_config(*arguments, yaml=None):
        arguments = ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "False", *arguments]
        if yaml is not None:
            path = tmp_path / "config.yaml"
            path.write_text(yaml)
            arguments += ["--config", str(path)]
        (config,) = TrlParser(PaCoRewardConfig).parse_args_and_config(arguments)
        return config

    return parse_config


class TestDefaults:
    def test_are_the_papers(self, make):
        """Part 2 of the paper, training of the judge."""
        papers = {
            "first_token_weight": 0.1,
            "loss_variant": "paper",
            "max_pixels": 2_097_152,
            "learning_rate": 2e-4,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 0.1,
            "num_train_epochs": 2.0,
            "per_device_train_batch_size": 8,
        }
        # From its published code, or chosen
        others = {"max_length": 16384, "dataloader_num_workers": 0, "ddp_find_unused_parameters": False}
        others |= {"enable_jit_checkpoint": True, "jit_checkpoint_signals": ["SIGTERM", "SIGUSR1"]}
        config = make()
        for name, value in {**papers, **others}.items():
            assert getattr(config, name) == value, name
        assert sorted(OWN_FIELDS) == sorted([*papers, *others])

    def test_the_warm_up_is_a_tenth_of_the_steps(self, make):
        assert make().get_warmup_steps(200) == 20
        assert make(warmup_steps=5).get_warmup_steps(200) == 5

    def test_a_routers_loss_is_never_added(self, make):
        """The default of TRL is the model's own."""
        assert default_of(TRL_FIELDS["router_aux_loss_coef"]) is None
        assert make().router_aux_loss_coef == 0.0

    def test_what_trl_makes_of_the_others(self, make):
        assert make(model_init_kwargs='{"dtype": "float32"}').model_init_kwargs == {"dtype": "float32"}
        with pytest.raises(ValueError, match="no_such_schedule"):
            make(lr_scheduler_type="no_such_schedule")

    def test_a_config_made_from_a_config_is_the_same(self, make):
        config = make(first_token_weight=0.5, max_length=None, max_pixels=None, learning_rate=1e-5)
        again = dataclasses.replace(config)
        for name in (*OWN_FIELDS, *REFUSED_SFT_FIELDS):
            assert getattr(again, name) == getattr(config, name), name
        assert (again.first_token_weight, again.max_length) == (0.5, None)

    def test_defaults_that_differ_from_trl_are_named_in_the_note(self, make):
        note = docstring(PaCoRewardConfig).split("[!NOTE]")[1].replace("\n    > ", " ")
        named = dict(re.findall(r"`(\w+)` \((`[^`]+`)\)", note))
        differing = {
            name
            for name in OWN_FIELDS
            if name in TRL_FIELDS and default_of(FIELDS[name]) != default_of(TRL_FIELDS[name])
        }
        assert len(differing) > 4 and differing == set(named)
        for name, value in named.items():
            assert eval(value.strip("`")) == default_of(FIELDS[name]), name


class TestDocumentation:
    def test_exactly_the_own_fields_are_documented_in_their_order(self):
        assert len(OWN_FIELDS) > 10
        assert list(DOCUMENTED) == OWN_FIELDS

    @pytest.mark.parametrize("name", OWN_FIELDS)
    def test_default_in_the_docstring_is_that_of_the_field(self, name):
        documented, default = DOCUMENTED[name][3], default_of(FIELDS[name])
        assert (default is None) == (documented is None) == (name == "dataloader_num_workers")
        assert default is None or eval(documented) == default

    @pytest.mark.parametrize("name", OWN_FIELDS)
    def test_type_in_the_docstring_is_that_of_the_field(self, name):
        kind = DOCUMENTED[name][2].split("`")[0]
        default = default_of(FIELDS[name])
        assert (TYPES[name].split(" ")[0] if default is None else type(default).__name__) == kind.partition("[")[0]

    @staticmethod
    def agree(name, other):
        """Whether the first sentences of one field's docstring and another's help share half of their key words."""
        texts = DOCUMENTED[name][4], FIELDS[other].metadata["help"]
        documented, help_text = (key_words(first_sentence(text)) for text in texts)
        assert documented and help_text
        return len(documented & help_text) >= min(len(documented), len(help_text)) / 2

    @pytest.mark.parametrize("name", OWN_FIELDS)
    def test_help_says_what_the_docstring_says(self, name):
        assert self.agree(name, name)
        # Twin: the help of hardly any other field would do
        assert sum(self.agree(name, other) for other in OWN_FIELDS) <= len(OWN_FIELDS) / 4

    def test_help_is_the_docstring_and_the_parent_keeps_its_own(self):
        own = FIELDS["learning_rate"].metadata["help"]
        assert own == " ".join(DOCUMENTED["learning_rate"][4].split())
        assert SFTConfig.__dataclass_fields__["learning_rate"].metadata["help"] not in (own, None)

    def test_the_variants_are_named(self):
        for variant in LOSS_VARIANTS:
            assert f'`"{variant}"`' in DOCUMENTED["loss_variant"][4]
            assert f"'{variant}'" in FIELDS["loss_variant"].metadata["help"]

    def test_help_can_be_shown(self, parse, capsys):
        with pytest.raises(SystemExit) as stop:
            parse("--help")
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert all(f"--{name}" in shown for name in OWN_FIELDS)


def another_value(name):
    """A value that is not the default, of a fitting type."""
    default, kind = default_of(FIELDS[name]), TYPES[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if "dict" in kind:
        return {"skip_prepare_dataset": True}
    if "bool" in kind:
        return True
    if "float" in kind:
        return 0.01
    return 8 if default == "auto" else "other"


class TestRefusedFields:
    @pytest.mark.parametrize("name", sorted(REFUSED_SFT_FIELDS))
    def test_is_refused(self, make, name):
        assert name in TRL_FIELDS and name not in OWN_FIELDS
        value = another_value(name)
        with pytest.raises(ValueError, match=f"`{name}`"):
            make(**{name: value})
        # Twin: TRL's default passes when it is set
        make(**{name: default_of(FIELDS[name])})

    @pytest.mark.parametrize("name", ["completion_only_loss", "eval_packing"])
    def test_false_is_not_the_default_where_that_is_none(self, make, name):
        assert default_of(FIELDS[name]) is None
        with pytest.raises(ValueError, match=f"`{name}` is set to False"):
            make(**{name: False})

    def test_refused_on_the_command_line_and_in_yaml_too(self, parse):
        message = "`packing` is set to True"
        with pytest.raises(ValueError, match=message):
            parse("--packing")
        with pytest.raises(ValueError, match=message):
            parse(yaml="packing: true\n")
        assert parse(yaml="packing: false\n").packing is False


class TestParser:
    def test_the_defaults_pass(self, parse, make):
        config = parse()
        for name in OWN_FIELDS:
            assert getattr(config, name) == getattr(make(), name), name

    def test_values_of_the_command_line(self, parse):
        options = (
            "--first_token_weight 0.3 --loss_variant released --max_pixels 1000 --max_length 77 "
            "--learning_rate 1e-3 --lr_scheduler_type linear --warmup_steps 3 --num_train_epochs 1.5 "
            "--per_device_train_batch_size 2 --dataloader_num_workers 3 --ddp_find_unused_parameters true "
            "--enable_jit_checkpoint false --jit_checkpoint_signals SIGUSR2"
        )
        config = parse(*options.split())
        assert (config.first_token_weight, config.loss_variant) == (0.3, "released")
        assert (config.max_pixels, config.max_length) == (1000, 77)
        assert (config.learning_rate, config.lr_scheduler_type, config.warmup_steps) == (1e-3, "linear", 3)
        assert (config.num_train_epochs, config.per_device_train_batch_size) == (1.5, 2)
        assert config.dataloader_num_workers == 3 and config.ddp_find_unused_parameters is True
        assert all(getattr(config, name) != default_of(FIELDS[name]) for name in OWN_FIELDS)

    def test_values_of_a_yaml_file(self, parse):
        config = parse(yaml="first_token_weight: 0.3\nloss_variant: released\nmax_length: 77\nmax_pixels: 1000\n")
        assert (config.first_token_weight, config.loss_variant) == (0.3, "released")
        assert (config.max_length, config.max_pixels) == (77, 1000)

    @pytest.mark.parametrize("name", ["first_token_weight", "max_length", "max_pixels"])
    def test_none_in_a_yaml_file(self, parse, name):
        assert getattr(parse(yaml=f"{name}: null\n"), name) is None

    def test_an_unknown_option_is_an_error(self, parse):
        with pytest.raises((ValueError, SystemExit), match="no_such_option|2"):
            parse("--no_such_option", "1")

    def test_an_unknown_line_of_a_yaml_file_is_an_error(self, parse):
        with pytest.raises((ValueError, SystemExit)) as error:
            parse(yaml="max_length: 77\nno_such_option: 1\n")
        if isinstance(error.value, ValueError):
            assert "no_such_option" in str(error.value)


class TestValues:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            (
                {"first_token_weight": 0.0},
                r"`first_token_weight` is 0.0;.*\(0, 1\] \(the paper uses 0.1\).*not be train",
            ),
            ({"first_token_weight": -0.1}, "`first_token_weight` is -0.1;"),
            ({"first_token_weight": 1.1}, "`first_token_weight` is 1.1;"),
            ({"first_token_weight": math.nan}, "`first_token_weight` is nan;"),
            ({"loss_variant": "code"}, "`loss_variant` is 'code'; it must be one of 'paper', 'released'"),
            ({"max_pixels": 0}, "`max_pixels` is 0; it must be at least 1, or None"),
            ({"max_pixels": -5}, "`max_pixels` is -5"),
            ({"max_length": 0}, "`max_length` is 0; it must be at least 1, or None"),
            ({"max_length": -1}, "`max_length` is -1"),
            ({"num_train_epochs": 0}, "`num_train_epochs` is 0, which trains nothing"),
        ],
        ids=lambda value: str(value) if isinstance(value, dict) else "",
    )
    def test_bad_values(self, make, settings, message):
        with pytest.raises(ValueError, match=message):
            make(**settings)

    @pytest.mark.parametrize(
        "settings",
        [
            {"first_token_weight": 1e-6},
            {"first_token_weight": 1},
            {"first_token_weight": None},
            {"loss_variant": "released"},
            {"max_pixels": 1},
            {"max_pixels": None},
            {"max_length": 1},
            {"max_length": None},
        ],
        ids=str,
    )
    def test_values_at_the_edge_of_what_is_good(self, make, settings):
        config = make(**settings)
        for name, value in settings.items():
            assert getattr(config, name) == value


class TestMoreSettings:
    def test_the_least_calibration_error_is_the_best(self, make):
        settings = {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"}
        assert make(metric_for_best_model="ece", **settings).greater_is_better is False
        assert make(metric_for_best_model="eval_ece", **settings).greater_is_better is False
        assert make(metric_for_best_model="eval_ece", greater_is_better=True, **settings).greater_is_better is True
        assert make(metric_for_best_model="eval_auroc", **settings).greater_is_better is True

    def test_sampling_by_length(self, make):
        with pytest.raises(ValueError, match="`train_sampling_strategy` is 'batch_rebalance', whose order"):
            make(train_sampling_strategy="batch_rebalance")
        for strategy in ("random", "sequential", "group_by_length"):
            make(train_sampling_strategy=strategy)

    @pytest.mark.parametrize(
        ("has_gpu", "use_cpu", "expected"), [(True, False, 2), (True, True, 0), (False, False, 0)]
    )
    def test_workers_are_for_gpus(self, make, monkeypatch, has_gpu, use_cpu, expected):
        monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
        # TRL's own would use the GPU
        monkeypatch.setattr("trl.SFTConfig.__post_init__", lambda self: setattr(self, "deepspeed_plugin", None))
        assert make(use_cpu=use_cpu).dataloader_num_workers == expected
        assert make(use_cpu=use_cpu, dataloader_num_workers=5).dataloader_num_workers == 5
        assert make(use_cpu=use_cpu, dataloader_num_workers=0).dataloader_num_workers == 0
